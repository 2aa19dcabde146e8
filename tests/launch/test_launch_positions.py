"""Where every rank was: in the failure summary, at a timeout, and whenever somebody asks."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from torch.distributed import ProcessGroup

from launching import NOTE_PID, Launches, wait_until
from lockstep import rank_status
from lockstep.comm import torch_record
from lockstep.launch.positions import find_missing, look
from lockstep.launch.stacks import dump_stacks
from lockstep.testing import limit_s
from test_launch_failures import summary_of

JOINS = rank_status.JOINING

# For scripts: what a collective writes into the status file, without the seconds that importing torch takes.
RECORD = """
from lockstep import rank_status
sections = {}
def enter(call, line, number, group='the default group', done=True):
    section = sections.get(group) or sections.setdefault(group, rank_status.open_section(group))
    section.write_call(0, call)
    section.write_site(0, f'{os.getcwd()}/train.py:{line} in main')
    assert section.words[rank_status.CALL] == section.words[rank_status.SITE + 2] == 0
    section.times[rank_status.START] = time.monotonic()
    section.words[rank_status.NUMBER] = number
    if done:
        section.words[rank_status.FINISHED] = number
def meet(name):
    open(f'{name}{RANK}', 'w').close()
    while not all(os.path.exists(f'{name}{rank}') for rank in range(int(os.environ['WORLD_SIZE']))):
        time.sleep(0.002)
"""


def opening_of(stderr: str) -> str:
    """The paragraph that the failure summary begins with, without pids."""
    words = summary_of(stderr).splitlines()[0].split(" ")
    return " ".join(
        "N)" + word.partition(")")[2] if before == "(pid" else word
        for before, word in zip(["", *words], words, strict=False)
    )


def test_function_that_was_called_is_named_and_not_what_it_is_made_of(launches: Launches) -> None:
    script = launches.script(
        RECORD.replace("} in main", "} in main (checkpoint.save)")
        + """
enter('broadcast(int64[2], root=0)', 18, 4, done=False)
meet('here')
if RANK == 1:
    raise ValueError('bad')
time.sleep(60)
"""
    )
    done = launches.run("--nproc", "2", script)
    assert opening_of(done.stderr).endswith("; rank 0 was in checkpoint.save (collective #4) at train.py:18")


def test_killed_rank_and_where_the_others_were(launches: Launches) -> None:
    script = launches.script(
        RECORD
        + """
enter('all_reduce(float32[4], SUM)', 81, 56)
if RANK == 3:
    enter('broadcast(int64[1], root=0)', 7, 2, 'group 1 of ranks [0, 3]')
elif RANK != 2:
    enter('all_reduce(float32[4], SUM)', 90, 57, done=False)
meet('here')
if RANK == 2:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""
    )
    done = launches.run("--nproc", "4", script)
    assert done.returncode == 128 + signal.SIGKILL
    assert opening_of(done.stderr) == (
        "lockstep: rank 2 (pid N) was killed by signal 9 (SIGKILL; out of memory?) after all_reduce #56 at train.py:81"
        "; ranks 0, 1 were in all_reduce #57 at train.py:90; "
        "rank 3 was after broadcast #2 of group 1 of ranks [0, 3] at train.py:7"
    )


def test_rank_that_ends_in_the_middle_is_the_cause(launches: Launches) -> None:
    script = launches.script(
        RECORD
        + """
from lockstep.errors import RankLost
enter('all_reduce(float32[4], SUM)', 81, 3, done=RANK == 1)
meet('here')
if RANK == 1:
    sys.exit()
time.sleep(0.2)
raise RankLost('rank 1 left', (1,))
"""
    )
    done = launches.run("--nproc", "3", script)
    assert done.returncode == 1
    assert opening_of(done.stderr) == (
        "lockstep: rank 1 (pid N) ended (exit code 0) after all_reduce #3 at train.py:81 while other ranks still "
        "needed it; ranks 0, 2 were in all_reduce #3 at train.py:81"
    )


JOINING = """
from contextlib import ExitStack
from lockstep import rank_status
if RANK == 1:
    sys.exit()
with ExitStack() as stack:
    text = f'{MEETING} at {os.getcwd()}/train.py:7 in main'
    stack.enter_context(rank_status.noting_meeting(text, of_all=MEETING == rank_status.JOINING))
    time.sleep(NAP_S)
"""


def test_rank_that_ends_before_all_have_met_is_the_cause(launches: Launches) -> None:
    script = launches.script(f"MEETING, NAP_S = {JOINS!r}, 600" + JOINING)
    done = launches.run("--nproc", "3", script)
    assert done.returncode == 1
    assert opening_of(done.stderr) == (
        "lockstep: rank 1 (pid N) ended (exit code 0) while other ranks still needed it; "
        "ranks 0, 2 were in init_process_group at train.py:7"
    )


def test_rank_that_ends_early_is_no_failure_where_others_meet_without_it(launches: Launches) -> None:
    script = launches.script("MEETING, NAP_S = 'init_process_group(rank=0, world_size=2)', 1.5" + JOINING)
    done = launches.run("--nproc", "3", script)
    assert (done.returncode, done.stderr) == (0, "")


def test_setup_error_of_all_ranks_is_one_block(launches: Launches) -> None:
    script = launches.script(
        """
        from lockstep.errors import BackendUnavailable
        raise BackendUnavailable(f"backend 'glo' is not available on rank {RANK}")
        """
    )
    done = launches.run("--nproc", "3", script)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    first, second, _, *traceback = summary_of(done.stderr).splitlines()
    assert "failed with lockstep.errors.BackendUnavailable at script.py:4: backend 'glo' is not available" in first
    assert second.startswith("lockstep: the same error on ranks ")
    assert len(traceback) <= 5


# A training loop on the real group; the last rank stops itself after two steps.
REAL = (
    NOTE_PID
    + """
import torch, torch.distributed as dist, lockstep
with lockstep.init(timeout=float(os.environ['TIMEOUT_S'])) as world:
    for step in range(3):
        if step == 2 and RANK == 1:
            note('stopped')
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.all_reduce(torch.ones(4))  # step
"""
)


@pytest.fixture
def step_line() -> int:
    """The line of REAL's collective in the script."""
    return 1 + next(number for number, line in enumerate(REAL.splitlines(), 1) if line.endswith("# step"))


@pytest.mark.usefixtures("forked")
def test_stopped_rank_on_demand_and_at_the_timeout(launches: Launches, step_line: int) -> None:
    arguments = ("--nproc", "2", "--stacks-on-timeout", "--grace", "0.2", launches.script(REAL))
    process = launches.start(*arguments, env=launches.environment(TIMEOUT_S=str(limit_s(2))))
    (stopped,) = launches.pids("stopped")
    (folder,) = launches.temporary.glob("lockstep-*")
    waiting = f"in all_reduce #3 at script.py:{step_line}"
    wait_until(lambda: look(folder, {1: stopped})[1].is_stopped, "rank 1 is stopped")
    wait_until(lambda: (status := look(folder, {0: 0})[0]).latest and status.latest.number == 3, "rank 0 waits")
    process.send_signal(signal.SIGUSR1)
    _, err = process.communicate(timeout=limit_s(30))
    assert process.returncode == 1
    table = err.partition("lockstep: where every rank is\n")[2].splitlines()
    assert f"{waiting}, for " in table[0]
    assert table[0].endswith(" s: all_reduce(float32[4], SUM)")
    assert f"rank 1 (pid {stopped}), stopped by a signal: after all_reduce #2 at script.py:{step_line}" in table[1]
    # py-spy reads a stopped process too. The rank that has raised has no stack any more, but a traceback.
    stacks = err.partition("lockstep: stacks of rank 1\n")[2].partition("=====")[0]
    assert f"<module> (script.py:{step_line - 1})" in stacks
    assert "stacks of rank 0" not in err
    summary = summary_of(err)
    assert summary.startswith(
        f"lockstep: rank 1 (pid {stopped}) did not reach all_reduce #3 at script.py:{step_line}: it was after "
        f"all_reduce #2 at script.py:{step_line}, and its process is stopped; rank 0 was {waiting}"
    )
    assert "Missing: rank 1 (" in summary
    assert "engine.py" not in err, "frames of ours are left out"
    assert "distributed_c10d.py" not in err


def test_missing_py_spy_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert dump_stacks({0: os.getpid()}) == "lockstep: no stacks: py-spy is not installed (pip install py-spy)\n"


def test_process_without_python_has_no_stack() -> None:
    assert dump_stacks({3: 1}).startswith("lockstep: no stack of rank 3: ")


@pytest.fixture
def status_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A private folder, as the launcher gives it to rank 0."""
    monkeypatch.setenv("LOCKSTEP_RENDEZVOUS", str(tmp_path))
    monkeypatch.setenv("RANK", "0")
    return tmp_path


def enter(section: rank_status.Section, number: int, text: str, start_s: float) -> None:
    section.write_call(number % rank_status.RING, text)
    section.words[rank_status.CALL + 2 * (number % 2)] = number % rank_status.RING
    section.times[rank_status.START] = start_s
    section.words[rank_status.NUMBER] = number


def test_status_file_keeps_each_groups_last_call(status_folder: Path) -> None:
    default, other = rank_status.open_section("the default group"), rank_status.open_section("group 1")
    unused = rank_status.open_section("group 2")
    for number in range(1, 200):
        enter(default, number, f"all_reduce(float32[{number}])", float(number))
        default.words[rank_status.FINISHED] = number
    enter(other, 1, "barrier()", 50.0)
    other.publish_waiting("recv(float32[3], src=0, tag=0) at train.py:3 in main")
    positions = rank_status.read_positions(status_folder, [0, 1])[0]
    assert [(one.group, one.number, one.inside) for one in positions] == [
        ("group 1", 1, True),
        ("the default group", 199, False),
    ]
    assert positions[1].call == "all_reduce(float32[199])"
    assert positions[0].waiting.startswith("recv(")
    # A section that is given back keeps its last word until another group has need of it.
    other.close()
    assert not rank_status.read_positions(status_folder, [0])[0][0].is_open
    assert rank_status.open_section("group 3").words[rank_status.NUMBER] == 0
    assert [one.group for one in rank_status.read_positions(status_folder, [0])[0]] == ["the default group"]
    unused.close()


def test_status_file_says_which_group_a_rank_waits_to_make(status_folder: Path) -> None:
    enter(rank_status.open_section("the default group"), 3, "barrier()", 50.0)
    with rank_status.noting_meeting("new_group([0, 1]) at train.py:3 in main"):
        status = look(status_folder, {0: os.getpid()})[0]
        assert status.describe() == "in new_group([0, 1]) at train.py:3"
    assert look(status_folder, {0: os.getpid()})[0].latest.number == 3  # type: ignore[union-attr]


def test_names_of_groups_that_ranks_wait_to_make(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    for values, options, expected in (
        ((), {}, JOINS),
        (("gloo", "env://"), {"rank": 1, "world_size": 3}, JOINS),
        (("gloo", None, None, 3, 1, object()), {}, JOINS),
        (("gloo",), {"rank": 0, "world_size": 2}, f"{JOINS}(rank=0, world_size=2)"),
        (("gloo", "tcp://127.0.0.1:1?rank=0&world_size=2"), {}, f"{JOINS}()"),
    ):
        assert torch_record._name_of_joining(values, options) == expected


def test_status_file_is_no_necessity(status_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process of this rank has it, or there is no room: the words go nowhere, and nothing else changes."""
    (status_folder / "position-rank0").write_bytes(b"not ours")
    section = rank_status.open_section("the default group")
    enter(section, 1, "barrier()", 1.0)
    section.publish_waiting("recv")
    section.close()
    assert rank_status.read_positions(status_folder, [0]) == {}
    monkeypatch.delenv("LOCKSTEP_RENDEZVOUS")
    enter(rank_status.open_section("the default group"), 1, "barrier()", 1.0)


def test_missing_ranks_are_those_behind(status_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, number in ((0, 5), (1, 4), (2, 5)):
        monkeypatch.setenv("RANK", str(rank))
        enter(rank_status.open_section("the default group"), number, "barrier()", 1.0)
    statuses = look(status_folder, {0: 0, 1: 0, 2: 0, 3: 0})
    assert find_missing(statuses, 0) == (1, 3)
    assert find_missing(statuses, 3) == ()


def test_ranks_of_a_group_may_be_an_iterator() -> None:
    new_group = torch_record._noting_that_it_meets(lambda ranks: list(ranks))
    assert new_group(iter([0, 1])) == [0, 1]


def test_plain_torch_on_gloo_gets_the_same_summary(launches: Launches) -> None:
    """Nothing of Lockstep in the script: torch's own group, sub-group, DDP and messages are recorded all the same."""
    script = launches.script(
        """
        from datetime import timedelta
        from pathlib import Path
        import torch, torch.distributed as dist
        dist.init_process_group('gloo')
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        model(torch.ones(1, 2)).sum().backward()  # line 8
        pair = dist.new_group([0, 1], timeout=timedelta(seconds=2))
        dist.all_reduce(torch.ones(3), group=pair)  # line 10
        if RANK == 0:
            dist.send(torch.ones(1), 1)
            from lockstep.rank_status import read_positions
            for one in read_positions(Path(os.environ['LOCKSTEP_RENDEZVOUS']), [0])[0]:
                print(one.group, one.number, one.call, one.site.partition(':')[2], one.inside, sep='; ', flush=True)
        else:
            dist.recv(torch.ones(1), 0)
            os.kill(os.getpid(), signal.SIGSTOP)
        works = [dist.all_reduce(torch.ones(3), group=pair, async_op=True) for _ in range(2)]  # line 19
        for work in works:
            work.wait()
        """
    )
    done = launches.run("--nproc", "2", "--grace", "0.2", script)
    assert done.returncode == 1, done.stderr
    said = [line.removeprefix("[0] ") for line in done.stdout.splitlines()]
    assert "torch's DistributedDataParallel; 1; forward pass; 8 in <module>; False" in said
    reduced = "the default group; 4; all_reduce(float32[6]); 8 in <module>; False"
    assert (reduced in said) == hasattr(ProcessGroup, "register_pre_hook"), "torch's DDP reduces from C++"
    group = next(line for line in said if "of ranks [0, 1]" in line).partition(";")[0]
    assert f"{group}; 1; all_reduce(float32[3]); 10 in <module>; False" in said
    assert "torch_record.py" not in done.stderr
    assert opening_of(done.stderr) == (
        f"lockstep: rank 1 (pid N) did not reach all_reduce #3 of {group} at script.py:19: it was after "
        f"all_reduce #1 of {group} at script.py:10, and its process is stopped; rank 0 was in all_reduce #3 of {group} "
        "at script.py:19"
    )


def test_rank_that_gloo_lost_without_an_error_is_the_root_cause(launches: Launches) -> None:
    """gloo says that a connection was closed, and not by whom."""
    script = launches.script(
        """
        import torch, torch.distributed as dist
        dist.init_process_group('gloo')
        dist.all_reduce(torch.ones(3))  # line 5
        if RANK != 1:
            dist.all_reduce(torch.ones(3))  # line 7
        """
    )
    done = launches.run("--nproc", "3", script)
    assert done.returncode == 1
    assert re.match(
        r"lockstep: rank 1 \(pid N\) ended \(exit code 0\) after all_reduce #1 at script.py:5 while other ranks still "
        "needed it",
        opening_of(done.stderr),
    ), done.stderr


@pytest.mark.parametrize("code", ["raise ValueError('bad sample')", "sys.exit()"])
@pytest.mark.usefixtures("forked")
def test_rank_that_caught_its_own_error_outside_did_not_decide_to_stop(launches: Launches, code: str) -> None:
    script = launches.script(
        f"""
        import contextlib
        import torch.distributed as dist
        import lockstep
        with contextlib.suppress(ValueError), lockstep.init():
            if RANK == 1:
                {code}
            dist.barrier()
        """
    )
    done = launches.run("--nproc", "2", script)
    assert done.returncode == 1
    raised = code != "sys.exit()"
    assert ("rank 0 (pid N) failed with lockstep.errors.RankLost" in opening_of(done.stderr)) == raised, done.stderr
    assert ("it raised ValueError: bad sample at " in opening_of(done.stderr)) == raised
    assert ("nothing failed there" in done.stderr) != raised


@pytest.mark.usefixtures("forked")
def test_rank_that_leaves_gloo_waits_for_no_rank_that_waits_for_it(launches: Launches) -> None:
    """At its end each rank waits for what the others say of their models."""
    script = launches.script(
        """
        import torch, torch.distributed as dist
        import lockstep
        from lockstep.drift import comparison
        comparison._PATIENCE_S = 1000.0
        lockstep.init('gloo')
        model = lockstep.DistributedDataParallel(torch.nn.Linear(2, 2))
        for _ in range(1 if RANK == 0 else 2):
            model(torch.ones(1, 2)).sum().backward()  # line 10
        """
    )
    done = launches.run("--nproc", "2", script)
    assert re.match(
        r"lockstep: rank 0 \(pid N\) ended \(exit code 0\) after \w+ #\d+ at script.py:10 while other ranks ",
        opening_of(done.stderr),
    ), done.stderr


@pytest.mark.parametrize("call", ["dist.new_group([0, 1])", "dist.destroy_process_group(); init()"])
def test_rank_that_ends_before_others_meet_again_is_the_cause(launches: Launches, call: str) -> None:
    script = launches.script(
        f"""
        import torch.distributed as dist
        def init():
            dist.init_process_group('gloo')
        init()
        if RANK != 1:
            {call}
        """
    )
    done = launches.run("--nproc", "3", script)
    assert re.match(
        r"lockstep: rank 1 \(pid N\) ended \(exit code 0\).* while other ranks still needed it; "
        r"ranks? 0.* (was|were) in (new_group\(\[0, 1\]\)|init_process_group) at script.py:\d+",
        opening_of(done.stderr),
    ), done.stderr


@pytest.mark.usefixtures("forked")
def test_rank_that_leaves_before_a_group_is_made_is_the_cause(launches: Launches) -> None:
    script = launches.script(
        """
        import torch.distributed as dist
        import lockstep
        world = lockstep.init()
        if RANK != 1:
            dist.new_group([0, 1, 2])
        """
    )
    done = launches.run("--nproc", "3", script)
    assert re.match(r"lockstep: rank 1 \(pid N\) (ended|left the group).* while other", opening_of(done.stderr)), done
