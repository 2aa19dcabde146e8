"""When a rank fails: who is named, with which traceback, which exit code, and what becomes of the others."""

from __future__ import annotations

import os
import re
import signal
import textwrap
import time

import pytest

from launching import Launches, is_alive
from lockstep.testing import limit_s

RULE = "=" * 88


def summary_of(stderr: str) -> str:
    """What stands between the last two rules."""
    _, block, after = stderr.rsplit(RULE, 2)
    assert after == "\n", "the failure summary is the last word"
    return block.strip("\n")


def test_first_failing_rank_is_named_last_with_its_traceback(launches: Launches) -> None:
    script = launches.script(
        """
        def step(values):
            return values[3]
        if RANK == 1:
            step([])
        time.sleep(60)
        """
    )
    done = launches.run("--nproc", "3", script)
    assert done.returncode == 1
    lines = summary_of(done.stderr).splitlines()
    assert lines[0].startswith("lockstep: rank 1 (pid ")
    assert lines[0].endswith(
        ") failed with IndexError at script.py:4: list index out of range; the other ranks were stopped"
    )
    assert lines[1:3] == ["", "Traceback (most recent call last):"]
    assert f'File "{launches.folder}/script.py", line 6, in <module>' in lines[3]
    assert lines[-1] == "IndexError: list index out of range"
    assert "worker.py" not in done.stderr


@pytest.mark.parametrize("where", ["libraries", "other/site-packages", "usr/lib/python3/dist-packages"])
def test_users_line_is_named_wherever_libraries_lie(launches: Launches, where: str) -> None:
    """On PYTHONPATH, in the user's site or that of the system: an error inside a library is shown at its caller."""
    folder = launches.folder / where
    (folder / "optical" / "flow").mkdir(parents=True)
    (folder / "optical" / "__init__.py").write_text("def estimate(frame):\n    return frame.shape\n")
    if where == "libraries":
        (folder / "optical-1.0.dist-info").mkdir()
    script = launches.script("import optical\n\noptical.estimate(None)\n")
    path = f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = launches.run("--nproc", "1", script, env=launches.environment(PYTHONPATH=path))
    assert "failed with AttributeError at script.py:5: 'NoneType' object" in summary_of(done.stderr)


def test_secondary_failures_do_not_bury_the_cause(launches: Launches) -> None:
    """The ranks that lose another one say so by themselves; the one that they lost is the root cause."""
    script = launches.script(
        """
        from pathlib import Path
        from lockstep.errors import RankLost
        if RANK == 2:
            Path('gone').touch()
            raise KeyError('lr')
        while not os.path.exists('gone'):
            time.sleep(0.005)
        try:
            raise RankLost('rank 2 left', (2,))
        except RankLost as error:
            if RANK == 1:
                raise RuntimeError('training failed') from error
            raise
        """
    )
    done = launches.run("--nproc", "3", script)
    assert done.returncode == 1
    summary = summary_of(done.stderr)
    assert summary.startswith("lockstep: rank 2 ")
    assert "failed with KeyError at script.py:7: 'lr'; the other ranks failed after it\n\nTraceback" in summary
    assert "RankLost" not in summary
    assert "training failed" not in summary
    assert "RankLost" not in done.stderr


def test_second_cause_is_mentioned(launches: Launches) -> None:
    script = launches.script(
        """
        first = os.path.join(os.environ['LOCKSTEP_RENDEZVOUS'], 'error-rank0.json')
        while RANK == 1 and not os.path.exists(first): time.sleep(0.005)
        raise ValueError(f'rate {RANK}')
        """
    )
    done = launches.run("--nproc", "2", script)
    lines = summary_of(done.stderr).splitlines()
    assert "rank 0 " in lines[0]
    assert lines[0].endswith("rate 0"), "what comes next says what became of the other"
    assert lines[1].startswith("lockstep: after it, rank 1 ")
    assert lines[1].endswith("failed with ValueError at script.py:5: rate 1")
    assert done.stderr.count("Traceback") == 1, "one way to the line: the errors differ in a number"
    assert lines[-1] == "ValueError: rate 0"


@pytest.mark.parametrize("options", [(), ("--no-prefix",)], ids=["prefix", "no-prefix"])
def test_one_error_is_said_once(launches: Launches, options: tuple[str, ...]) -> None:
    script = launches.script("raise ValueError(f'rate {1 + 1}')")
    done = launches.run("--nproc", "3", *options, script)
    assert done.stderr.startswith(RULE)
    assert done.stderr.count("rate 2") == 2, "in the sentence, and where a traceback ends"
    assert done.stderr.count("Traceback") == 1


def test_long_error_of_ours_is_said_once(launches: Launches) -> None:
    script = launches.script(
        """
        from lockstep.errors import CollectiveMismatch
        raise CollectiveMismatch('different things:\\n  rank 0: here\\n  rank 1: there\\nLook for a branch.')
        """
    )
    done = launches.run("--nproc", "2", script)
    lines = summary_of(done.stderr).splitlines()
    assert lines[:4] == ["lockstep: different things:", "  rank 0: here", "  rank 1: there", "Look for a branch."]
    assert lines[4:6] == ["", "Traceback (most recent call last):"]
    assert lines[-1] == "lockstep.errors.CollectiveMismatch: see above"
    assert done.stderr.count("Look for a branch") == 1 + done.stderr.count("raise CollectiveMismatch(")


def test_error_of_a_world_without_with_is_the_last_word(launches: Launches) -> None:
    """After it the exit handler that leaves the world does not compare models as at a good end."""
    script = launches.script(
        """
        import torch, lockstep
        world = lockstep.init(device='cpu', seed=0)
        model = lockstep.DistributedDataParallel(torch.nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + world.rank))
        for _ in range(40):
            model(torch.ones(2, 2)).sum().backward()
            optimizer.step()
        """
    )
    done = launches.run("--nproc", "2", script)
    assert "ModelMismatch" in summary_of(done.stderr)
    assert done.stderr.count("Traceback") == 1
    assert "end with different models" not in done.stderr


def test_ranks_print_their_own_errors_where_nobody_else_does(launches: Launches) -> None:
    """Into a log, which is read by itself; and for those who look for faults in Lockstep."""
    script = launches.script(
        """
        open(f'up{RANK}', 'w').close()
        while not all(os.path.exists(f'up{rank}') for rank in range(int(os.environ['WORLD_SIZE']))):
            time.sleep(0.005)
        raise ValueError(f'rate {RANK}')
        """
    )
    launches.run("--nproc", "2", "--log-dir", "logs", script)
    for rank in range(2):
        assert (launches.folder / f"logs/rank{rank}.log").read_text().splitlines()[-1] == f"ValueError: rate {rank}"
    done = launches.run("--nproc", "1", script, env=launches.environment(LOCKSTEP_DEBUG="1"))
    assert "[0] ValueError: rate 0\n" in done.stderr


@pytest.mark.parametrize("rank", ["7", "0", ""])
def test_rank_that_gives_itself_another_number_reports_as_what_it_is(launches: Launches, rank: str) -> None:
    script = launches.script(
        f"if RANK == 1:\n    os.environ['RANK'] = {rank!r}\n    raise ValueError('here')\ntime.sleep(60)"
    )
    done = launches.run("--nproc", "2", script)
    lines = summary_of(done.stderr).splitlines()
    assert lines[0].startswith("lockstep: rank 1 (pid ")
    assert lines[0].endswith("failed with ValueError at script.py:5: here; the other ranks were stopped")
    assert lines[-1] == "ValueError: here"


def test_error_whose_text_cannot_be_made_is_one_error(launches: Launches) -> None:
    script = launches.script(
        """
        class Broken(Exception):
            def __str__(self):
                return self.reason
        raise Broken()
        """
    )
    done = launches.run("--nproc", "1", script)
    assert "failed with Broken at script.py:6: <its text cannot be made: str() of it fails>" in summary_of(done.stderr)
    assert done.stderr.count("Traceback") == 1


OTHER_PRINTS = {
    "silent on others": """
        plain = builtins.print
        def print(*values, force=False, **options):
            if RANK == 0 or force:
                plain(*values, **options)
        """,
    "takes no options": """
        def print(*values):
            pass
        """,
}


@pytest.mark.parametrize("other", OTHER_PRINTS.values(), ids=OTHER_PRINTS)
def test_tracebacks_are_printed_past_a_print_of_the_scripts_own(launches: Launches, other: str) -> None:
    """As `setup_for_distributed` of many repositories puts one in place of Python's."""
    start, end = "import builtins\n", "builtins.print = print\nif RANK == 1: raise ValueError('here')\ntime.sleep(60)\n"
    launches.run("--nproc", "2", "--log-dir", "logs", launches.script(start + textwrap.dedent(other) + end))
    lines = (launches.folder / "logs/rank1.log").read_text().splitlines()
    assert lines[-1] == "ValueError: here"
    assert lines.count("Traceback (most recent call last):") == 1


def test_hooks_of_torch_and_ours_print_nothing_twice_and_run(launches: Launches) -> None:
    """torch's puts `[rank0]: ` before each line, ours tells the peers."""
    script = launches.script(
        """
        def wrapped(previous, module, note):
            def hook(*arguments):
                print(note, flush=True)
                previous(*arguments)
            hook.__module__ = module
            return hook
        sys.excepthook = wrapped(sys.excepthook, 'lockstep.comm.exit_hooks', 'peers told')
        sys.excepthook = wrapped(sys.excepthook, 'torch.distributed.distributed_c10d', 'prefix')
        raise ValueError('x')
        """
    )
    done = launches.run("--nproc", "1", script)
    assert done.stdout == "[0] prefix\n[0] peers told\n"
    assert done.stderr.count("Traceback") == 1


@pytest.mark.parametrize(
    ("number", "words"),
    [(signal.SIGKILL, "signal 9 (SIGKILL; out of memory?)"), (signal.SIGUSR1, "signal 10 (SIGUSR1)")],
)
def test_killed_rank(launches: Launches, number: int, words: str) -> None:
    """The others notice and fail with an error of their own, later: the killed one is still the cause."""
    script = launches.script(
        f"""
        open(f'up{{RANK}}', 'w').close()
        while not all(os.path.exists(f'up{{rank}}') for rank in range(3)):
            time.sleep(0.005)
        if RANK == 0:
            os.kill(os.getpid(), {int(number)})
        time.sleep(0.4)
        raise RuntimeError('Connection closed by peer [127.0.0.1]:1234' if RANK == 1 else 'strange')
        """
    )
    done = launches.run("--nproc", "3", script)
    assert done.returncode == 128 + number
    first = summary_of(done.stderr).splitlines()[0]
    assert first.startswith("lockstep: rank 0 (pid ")
    # The next line tells of rank 2; on a busy machine the others may be stopped before they fail.
    fates = "rank 1 failed after it|rank 1 was stopped|the other ranks were stopped"
    assert re.search(rf"was killed by {re.escape(words)}; ({fates})$", first)


@pytest.mark.parametrize(
    ("statement", "code", "words"),
    [
        ("sys.exit(7)", 7, "exited with code 7"),
        ("sys.exit('no data')", 1, "exited with code 1"),
        ("os._exit(3)", 3, "exited with code 3"),
        ("def f(:", 1, "failed with SyntaxError at script.py:3"),
        ("import nonsense_module", 1, "failed with ModuleNotFoundError at script.py:3: No module named"),
        ("class Odd(BaseException): pass\nraise Odd('x')", 1, "failed with Odd at script.py:4: x"),
    ],
)
def test_ways_to_fail(launches: Launches, statement: str, code: int, words: str) -> None:
    done = launches.run("--nproc", "1", launches.script(statement))
    assert done.returncode == code
    first = summary_of(done.stderr).splitlines()[0]
    assert words in first
    assert "other ranks" not in first
    assert "no data" not in statement or "[0] no data\n" in done.stderr


def test_error_that_becomes_an_exit_is_the_cause(launches: Launches) -> None:
    """As hydra's `run_and_report` does it. The rank that raised exits last."""
    script = launches.script(
        """
        import atexit, traceback
        import torch, lockstep

        def main():
            with lockstep.init(device='cpu'):
                for step in range(10):
                    if step == 5 and RANK == 1:
                        atexit.register(time.sleep, 0.5)
                        raise ValueError('bad sample 17')
                    torch.distributed.all_reduce(torch.ones(1))

        try:
            main()
        except Exception:
            print('said in its own way', file=sys.stderr)
            sys.exit(1)
        """
    )
    done = launches.run("--nproc", "2", script)
    assert done.returncode == 1
    summary = summary_of(done.stderr)
    assert re.match(r"lockstep: rank 1 \(pid \d+\) failed with ValueError at script.py:11: bad sample 17; ", summary)
    assert "ValueError: bad sample 17" in summary.splitlines()[-1]
    assert done.stderr.count("Traceback") == 1, "only in the failure summary"
    assert sorted(done.stderr.splitlines()[:2]) == ["[0] said in its own way", "[1] said in its own way"]


@pytest.mark.parametrize(
    "end",
    [
        "sys.exit(2)",
        "raise SystemExit(1) from None",
        "sys.exit('no data')",
    ],
)
def test_exit_that_speaks_for_itself_stays_one(launches: Launches, end: str) -> None:
    script = launches.script(f"try:\n    raise ValueError('inner')\nexcept ValueError:\n    {end}\n")
    summary = summary_of(launches.run("--nproc", "1", script).stderr)
    assert re.search(r"rank 0 \(pid \d+\) exited with code [12]$", summary.splitlines()[0]), summary
    assert "inner" not in summary


@pytest.mark.parametrize("statement", ["sys.exit()", "sys.exit(0)", "sys.exit(None)", "raise SystemExit", "pass"])
def test_ways_to_succeed(launches: Launches, statement: str) -> None:
    done = launches.run("--nproc", "1", launches.script(statement))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_missing_module_below_an_existing_package(launches: Launches) -> None:
    done = launches.run("--nproc", "1", "-m", "json.nonsense")
    assert done.returncode == 1
    assert "failed with ModuleNotFoundError: No module named 'json.nonsense'" in summary_of(done.stderr)
    done = launches.run("--nproc", "1", "-m", "json")
    assert "'json' is a package without __main__" in summary_of(done.stderr)


def test_own_excepthook_is_used(launches: Launches) -> None:
    script = launches.script(
        """
        sys.excepthook = lambda kind, error, trace: print('hook:', kind.__name__, trace.tb_lineno, file=sys.stderr)
        raise ValueError
        """
    )
    done = launches.run("--nproc", "1", script)
    assert "[0] hook: ValueError 4\n" in done.stderr
    assert done.stderr.count("Traceback") == 1, "only in the failure summary"


def test_rank_that_hangs_on_its_way_out_is_noticed(launches: Launches) -> None:
    """An exception went through, but a thread that blocks keeps the process alive, and SIGTERM is ignored."""
    script = launches.script(
        """
        import threading
        if RANK == 1:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            threading.Thread(target=time.sleep, args=(60,)).start()
            raise ValueError('stuck')
        time.sleep(60)
        """
    )
    start = time.monotonic()
    done = launches.run("--nproc", "2", "--grace", "0.5", script)
    assert time.monotonic() - start < limit_s(25)
    assert done.returncode == 1
    assert "rank 1 " in summary_of(done.stderr).splitlines()[0]
    assert "stuck; the other ranks were stopped" in summary_of(done.stderr)


@pytest.mark.parametrize(("end", "code"), [("3", 3), ("1", 1), ("'no data'", 1), ("-1", 255)])
@pytest.mark.parametrize(
    "slowly", ["threading.Thread(target=time.sleep, args=(60,)).start()", "atexit.register(time.sleep, 60)"]
)
def test_exit_code_of_a_rank_that_is_stopped_on_its_way_out(
    launches: Launches, slowly: str, end: str, code: int
) -> None:
    script = launches.script(
        f"import atexit, threading\nif RANK == 1:\n    {slowly}\n    sys.exit({end})\ntime.sleep(60)"
    )
    done = launches.run("--nproc", "2", "--grace", "0.3", script)
    first = summary_of(done.stderr).splitlines()[0]
    assert re.search(rf"rank 1 \(pid \d+\) exited with code {code}; the other ranks were stopped$", first), first
    assert done.returncode == code


@pytest.mark.parametrize("needs_s", [0.5, 60])
def test_rank_that_left_first_is_the_cause_however_long_it_takes(launches: Launches, needs_s: float) -> None:
    script = launches.script(
        f"""
        import atexit
        if RANK == 1:
            atexit.register(time.sleep, {needs_s})
            atexit.register(lambda: open('leaves', 'w').close())
            sys.exit(3)
        while not os.path.exists('leaves'):
            time.sleep(0.005)
        sys.exit(4)
        """
    )
    done = launches.run("--nproc", "2", "--grace", "1", script)
    assert re.search(r"rank 1 \(pid \d+\) exited with code 3", summary_of(done.stderr).splitlines()[0]), done.stderr
    assert done.returncode == 3


def test_exit_that_answers_a_signal_of_the_launcher_is_no_cause(launches: Launches) -> None:
    script = launches.script(
        """
        import atexit
        if RANK == 0:
            atexit.register(time.sleep, 60)
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(4))
            open('ready', 'w').close()
            time.sleep(60)
        while not os.path.exists('ready'):
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    done = launches.run("--nproc", "2", "--grace", "0.5", script)
    assert re.search(r"rank 1 .* killed by .*; the other ranks were stopped", summary_of(done.stderr)), done.stderr
    assert done.returncode == 137


@pytest.mark.parametrize(("grace", "ends"), [("20", ["left 0", "left 1"]), ("0.5", [])])
def test_ranks_that_raised_have_the_grace_for_their_exit_handlers(
    launches: Launches, grace: str, ends: list[str]
) -> None:
    """As `wandb.finish` uploads there. Rank 2 exits before they have, and rank 3 hangs."""
    script = launches.script(
        """
        import atexit
        def leave():
            print('left', RANK, flush=True)
        if RANK < 2:
            atexit.register(leave)
            atexit.register(time.sleep, 2 + RANK)
            if RANK == 0:
                raise ValueError('bad batch')
            sys.exit(1)
        time.sleep(60 if RANK == 3 else 0.2)
        sys.exit(1)
        """
    )
    start = time.monotonic()
    done = launches.run("--nproc", "4", "--no-prefix", "--grace", grace, script)
    took_s = time.monotonic() - start
    assert sorted(done.stdout.splitlines()) == ends
    assert done.returncode == 1
    assert took_s < limit_s(10), "when they have left, rank 3 is told to stop at once"


def test_rank_that_ignores_sigterm_is_killed_after_the_grace(launches: Launches) -> None:
    script = launches.script(
        """
        open(f'pid{RANK}', 'w').write(str(os.getpid()))
        if RANK == 1:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            open('ready', 'w').close()
            time.sleep(60)
        while not os.path.exists('ready'):
            time.sleep(0.005)
        sys.exit(5)
        """
    )
    start = time.monotonic()
    done = launches.run("--nproc", "2", "--grace", "0.3", script)
    assert 1.3 < time.monotonic() - start < limit_s(25), "settling takes 1 s, then the grace"
    assert done.returncode == 5
    assert not is_alive(int((launches.folder / "pid1").read_text()))


def test_log_of_the_failing_rank_is_named(launches: Launches) -> None:
    script = launches.script(
        """
        if RANK == 0:
            open('over', 'w').close()
        while not os.path.exists('over'):
            time.sleep(0.005)
        sys.exit(RANK)
        """
    )
    done = launches.run("--nproc", "2", "--log-dir", "logs", script)
    assert done.returncode == 1
    assert "its output is in logs/rank1.log" in summary_of(done.stderr)
    assert "other ranks had finished" in summary_of(done.stderr)


def test_restarts_begin_afresh(launches: Launches) -> None:
    script = launches.script(
        """
        count = os.environ['TORCHELASTIC_RESTART_COUNT']
        with open(f'attempts{RANK}', 'a') as file:
            print(count, os.environ['TORCHELASTIC_MAX_RESTARTS'], os.environ['LOCKSTEP_RENDEZVOUS'],
                  os.environ['MASTER_PORT'], sorted(os.listdir(os.environ['LOCKSTEP_RENDEZVOUS'])), sep='|', file=file)
        if count != '2' and RANK == 1:
            raise ValueError('not yet')
        """
    )
    done = launches.run("--nproc", "2", "--max-restarts", "3", script)
    assert done.returncode == 0, done.stderr
    own = [line for line in done.stderr.splitlines() if line.startswith("lockstep: ")]
    assert len(own) == 2
    assert done.stderr.count("Traceback") == 2
    assert own[0].endswith("ValueError at script.py:8: not yet; starting all ranks again (restart 1 of 3)")
    assert own[1].endswith("(restart 2 of 3)")
    attempts = [line.split("|") for line in (launches.folder / "attempts1").read_text().splitlines()]
    assert [line[:2] for line in attempts] == [["0", "3"], ["1", "3"], ["2", "3"]]
    assert len({line[2] for line in attempts}) == 3
    assert len({line[3] for line in attempts}) == 3
    assert {line[4] for line in attempts} == {"['errors', 'events', 'position-rank0', 'position-rank1', 'store']"}


def test_restarts_end_with_the_failure_summary(launches: Launches) -> None:
    script = launches.script("print(1); sys.exit(4)")
    done = launches.run("--nproc", "1", "--max-restarts", "1", "--log-dir", "logs", script)
    assert done.returncode == 4
    assert done.stderr.count("restart 1 of 1") == 1
    assert "exited with code 4" in summary_of(done.stderr)
    log = (launches.folder / "logs/rank0.log").read_text().splitlines()
    assert [line if line.isdigit() else "restart" for line in log] == ["1", "restart", "1"]


def test_exception_recorded_for_torchrun_is_shown(launches: Launches) -> None:
    """As torch.distributed.elastic's @record leaves it, when the script then goes by os._exit."""
    script = launches.script(
        """
        import json
        record = {'message': 'OSError: disk', 'extraInfo': {'py_callstack': 'Traceback: here', 'timestamp': '12'}}
        json.dump({'message': record}, open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w'))
        os._exit(1)
        """
    )
    summary = summary_of(launches.run("--nproc", "1", script).stderr)
    assert "failed with OSError: disk\n\nTraceback: here" in summary


def test_own_frames_are_kept_on_request(launches: Launches) -> None:
    script = launches.script("raise ValueError")
    done = launches.run("--nproc", "1", script, env=launches.environment(LOCKSTEP_DEBUG="1"))
    assert "worker.py" in summary_of(done.stderr)


@pytest.mark.parametrize("error", ["ValueError", "lockstep.errors.RendezvousError"])
def test_exception_in_a_forked_child_is_not_the_ranks(launches: Launches, error: str) -> None:
    script = launches.script(
        f"""
        import lockstep.errors
        pid = os.fork()
        if pid == 0:
            raise {error}('of the child')
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        """
    )
    done = launches.run("--nproc", "1", script)
    assert (done.returncode, done.stdout) == (0, "[0] 1\n")
    assert f"[0] {error}: of the child\n" in done.stderr


# What torch says to scripts for GPUs, where there is none or where it is built without CUDA.
GPU_MESSAGES = (
    "Distributed package doesn't have NCCL built in",
    "module 'torch._C' has no attribute '_cuda_setDevice'",
    "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU",
    "Torch not compiled with CUDA enabled",
)


@pytest.mark.parametrize("command", ["run", "launch", "horovodrun"])
def test_script_for_gpus_is_told_of_rehearsals(launches: Launches, command: str) -> None:
    script = launches.script("raise RuntimeError(sys.argv[-1])")
    count = "--nproc_per_node" if command == "launch" else "-np" if command == "horovodrun" else "--nproc"
    hidden = launches.environment(CUDA_VISIBLE_DEVICES="")
    done = launches.run(count, "1", script, GPU_MESSAGES[0], command=command, env=hidden)
    said = summary_of(done.stderr).splitlines()
    assert said[0].endswith(f"failed with RuntimeError at script.py:3: {GPU_MESSAGES[0]}")
    assert said[1].startswith("lockstep: there is no GPU on this host: `lockstep rehearse --nproc 1 script.py ")
    assert "on CPUs" in said[1]


def test_accelerate_is_to_be_given_a_group_and_no_backend(launches: Launches) -> None:
    script = launches.script('raise ValueError("Your assigned backend lockstep is not available, please use gloo")')
    said = summary_of(launches.run("--nproc", "2", script).stderr).splitlines()
    assert "Your assigned backend lockstep is not available" in said[0]
    assert any("call `lockstep.init()` before `Accelerator()`" in line for line in said[1:3])


@pytest.mark.usefixtures("forked")
def test_worker_of_a_loader_is_quoted(launches: Launches) -> None:
    """torch raises a worker's error again, with all of the worker's traceback as its text."""
    script = launches.script(
        """
        from torch.utils.data import DataLoader, Dataset
        class Images(Dataset):
            def __len__(self):
                return 2
            def __getitem__(self, index):
                raise ValueError(f"bad jpeg {index}")
        list(DataLoader(Images(), num_workers=1))
        """
    )
    done = launches.run("--nproc", "1", script)
    (line,) = summary_of(done.stderr).splitlines()[:1]
    assert line.endswith("failed with ValueError at script.py:8: bad jpeg 0 (in DataLoader worker process 0)")
