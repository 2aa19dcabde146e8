"""However a job ends, nothing of it is left: no process, no folder; and Ctrl-C is quiet."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import lockstep
from launching import NOTE_PID, Launches, children_of, is_alive, wait_until
from lockstep.testing import limit_s
from test_launch_positions import RECORD

# Each rank has a child, which has a child that ignores SIGTERM, one that left the process group and one that
# left even the session. The last line of every child is to wait for long.
FAMILY = (
    NOTE_PID
    + """
if os.fork() == 0:
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        note(f'stubborn{RANK}')
        time.sleep(60)
    if os.fork() == 0:
        os.setpgid(0, 0)
        note(f'regrouped{RANK}')
        time.sleep(60)
    if os.fork() == 0:
        os.setsid()
        note(f'detached{RANK}')
        time.sleep(60)
    note(f'child{RANK}')
    time.sleep(60)
note(f'rank{RANK}')
"""
)
INTERRUPTED = re.compile(r"lockstep: Ctrl-C: stopping; ranks have[^\n]*\n")
LAUNCH_FIRST = ("lockstep.launch", "lockstep.launch.signals", "lockstep.launch.standard_streams")
MEMBERS = ("rank", "child", "stubborn", "regrouped", "detached")


def family_of(launches: Launches, nproc: int = 2) -> list[int]:
    return launches.pids(*(f"{member}{rank}" for rank in range(nproc) for member in MEMBERS))


def wait_until_gone(pids: list[int], timeout_s: float) -> None:
    wait_until(lambda: not any(map(is_alive, pids)), f"all of {pids} are gone", timeout_s)


@pytest.mark.usefixtures("bystander")
def test_killed_launcher_takes_everything_with_it(launches: Launches) -> None:
    process = launches.start("--nproc", "2", launches.script(FAMILY + "time.sleep(60)"))
    pids = [*family_of(launches), *children_of(process.pid)]
    assert len(set(pids)) == 11, "two families and the reaper"
    process.kill()
    wait_until_gone(pids, 2)
    wait_until(lambda: not launches.leftovers(), "the private folder is removed", 2)


def test_launcher_killed_while_it_starts(launches: Launches) -> None:
    """At moments spread over the first 150 ms: whatever exists by then is gone soon after."""
    script = launches.script("time.sleep(60)")
    variables = launches.environment(LOCKSTEP_TEST_MARK=str(launches.folder))
    for delay_ms in range(30, 180, 15):
        process = launches.start("--nproc", "2", script, env=variables)
        time.sleep(delay_ms / 1000)
        process.kill()
        process.communicate()
    wait_until(lambda: not _marked_processes(launches), "all processes are gone", 3)
    wait_until(lambda: not launches.leftovers(), "all private folders are removed", 3)


def _marked_processes(launches: Launches) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                variables = (entry / "environ").read_bytes()
            except OSError:
                continue
            if f"LOCKSTEP_TEST_MARK={launches.folder}".encode() in variables:
                found.append(int(entry.name))
    return found


@pytest.mark.usefixtures("bystander")
@pytest.mark.parametrize("end", ["sys.exit(3)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_failing_job_leaves_nothing(launches: Launches, end: str) -> None:
    script = launches.script(
        FAMILY
        + f"""
if RANK == 0:
    while not all(os.path.exists(f'{{member}}{{rank}}') for member in {MEMBERS} for rank in range(2)):
        time.sleep(0.005)
    {end}
time.sleep(60)
"""
    )
    done = launches.run("--nproc", "2", "--grace", "0.3", script)
    assert done.returncode in (3, 137)
    wait_until_gone(family_of(launches), 0.5)


def test_successful_job_leaves_only_what_detached_itself(launches: Launches) -> None:
    script = launches.script(
        FAMILY
        + f"""
while not all(os.path.exists(f'{{member}}{{RANK}}') for member in {MEMBERS}):
    time.sleep(0.005)
"""
    )
    done = launches.run("--nproc", "1", script, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert done.returncode == 0
    *others, detached = family_of(launches, 1)
    assert not any(map(is_alive, others))
    assert is_alive(detached), "setsid is how a process asks to stay"
    os.kill(detached, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
@pytest.mark.parametrize("options", [(), ("--no-prefix",)], ids=["prefix", "no-prefix"])
def test_signal_to_the_launcher_ends_all_ranks_with_one_sentence(
    launches: Launches, number: int, options: tuple[str]
) -> None:
    script = launches.script(NOTE_PID + "print('up', flush=True)\nnote(f'rank{RANK}')\ntime.sleep(60)")
    process = launches.start("--nproc", "2", *options, script)
    pids = launches.pids("rank0", "rank1")
    process.send_signal(number)
    out, err = process.communicate(timeout=limit_s(10))
    assert process.returncode == 128 + number
    assert sorted(line[-2:] for line in out.splitlines()) == ["up", "up"]
    name = "Ctrl-C" if number == signal.SIGINT else number.name
    how = f"{'press' if name == 'Ctrl-C' else 'send'} {name}"
    assert err == f"lockstep: {name}: stopping; ranks have 5 s to exit ({how} again to kill them)\n"
    assert not any(map(is_alive, pids))


def test_interrupt_says_where_the_ranks_were(launches: Launches) -> None:
    script = launches.script(RECORD + "enter('barrier()', 7, 3, done=False)\nmeet('here')\ntime.sleep(60)")
    process = launches.start("--nproc", "2", "--grace", "9", script)
    wait_until(lambda: all((launches.folder / f"here{rank}").exists() for rank in range(2)), "both ranks are there")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=limit_s(10))
    assert err == (
        "lockstep: SIGTERM: stopping; ranks have 9 s to exit (send SIGTERM again to kill them); "
        "ranks 0, 1 were in barrier #3 at train.py:7\n"
    )


def test_ctrl_c_at_any_moment_of_the_start_is_quiet(launches: Launches) -> None:
    script = launches.script("time.sleep(60)")
    codes = []
    for delay_ms in range(100, 260, 20):
        process = launches.start("--nproc", "2", script)
        # The launcher's own import of its modules is Python's to answer for: wait until it has begun its work.
        wait_until(launches.leftovers, "the private folder is made")
        time.sleep((delay_ms - 100) / 1000)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=limit_s(10))
        codes.append(process.returncode)
        assert out == "", f"{delay_ms} ms"
        assert INTERRUPTED.fullmatch(err), f"{delay_ms} ms: {err}"
    assert codes == [130] * len(codes)


# A finder of modules that sends Ctrl-C when {name} is looked for, and swallows it, as Python's import locks may.
CTRL_C_IN_IMPORT = """
import os, signal, sys, time

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "{name}":
            try:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0)
            except KeyboardInterrupt:
                {answer}

sys.meta_path.insert(0, Interrupting())
from lockstep import cli
sys.exit(cli.main(["run", "--nproc", "1", "script.py"]))
"""


@pytest.mark.parametrize("answer", ["raise", "pass"])
@pytest.mark.parametrize(
    "name", ["lockstep.launch.command", "lockstep.launch.config", "lockstep.commands.run", "lockstep.launch.supervisor"]
)
def test_ctrl_c_while_the_command_is_imported(launches: Launches, name: str, answer: str) -> None:
    launches.script("print('must not run')")
    program = CTRL_C_IN_IMPORT.format(name=name, answer=answer)
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=launches.folder, env=launches.environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "lockstep: Ctrl-C\n")


def test_little_is_imported_before_ctrl_c_is_looked_after() -> None:
    program = "import sys; import lockstep.cli; print(*sorted(name for name in sys.modules if 'lockstep' in name))"
    # Without what an installation runs when Python starts, and from where this process has it.
    environment = os.environ | {"PYTHONPATH": str(Path(lockstep.__file__).parents[1])}
    command = [sys.executable, "-S", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    ours = "lockstep lockstep.after_import lockstep.cli lockstep.comm lockstep.comm.names lockstep.comm.registration"
    assert done.stdout.split() == [*ours.split(), *LAUNCH_FIRST]


@pytest.mark.parametrize("error", ["ValueError('half')", "KeyboardInterrupt"])
def test_import_that_ctrl_c_breaks_off_is_no_error_of_a_rank(launches: Launches, error: str) -> None:
    """Libraries turn KeyboardInterrupt into errors of other kinds; nobody wants their tracebacks then."""
    launches.script(
        f"""
        open(f'importing{{RANK}}', 'w').close()
        try:
            time.sleep(60)
        except BaseException:
            raise {error} from None
        """,
        name="library.py",
    )
    process = launches.start("--nproc", "2", launches.script("import library"))
    wait_until(lambda: all((launches.folder / f"importing{rank}").exists() for rank in range(2)), "both import")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=limit_s(10))
    assert (process.returncode, out) == (130, "")
    assert INTERRUPTED.fullmatch(err), err


def test_rank_may_finish_its_work_within_the_grace(launches: Launches) -> None:
    script = launches.script(
        NOTE_PID
        + """
try:
    note(f'rank{RANK}')
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(0.3)
    print('saved', flush=True)
"""
    )
    process = launches.start("--nproc", "2", script)
    launches.pids("rank0", "rank1")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=limit_s(10))
    assert process.returncode == 130
    assert INTERRUPTED.fullmatch(err)
    assert sorted(out.splitlines()) == ["[0] saved", "[1] saved"]


def test_ctrl_c_that_ends_the_reader_too_leaves_the_grace(launches: Launches) -> None:
    """As in `lockstep run … | tee log`: the next line of a rank has no reader."""
    script = launches.script(
        NOTE_PID
        + """
try:
    note('rank0')
    time.sleep(60)
except KeyboardInterrupt:
    note('heard0')
    while not os.path.exists('go'):
        time.sleep(0.005)
    print('saving', flush=True)
    time.sleep(0.3)
    note('saved0')
"""
    )
    process = launches.start("--nproc", "1", "--grace", "60", script, bufsize=0)
    launches.pids("rank0")
    process.send_signal(signal.SIGINT)
    launches.pids("heard0")
    assert process.stdout is not None
    process.stdout.close()
    (launches.folder / "go").touch()
    assert process.wait(timeout=limit_s(30)) == 130
    assert (launches.folder / "saved0").exists()


def test_signals_of_one_hangup_leave_the_grace(launches: Launches) -> None:
    """`timeout` sends its signal twice, a terminal that goes away hangs up twice: nobody has asked to hurry."""
    script = launches.script(
        NOTE_PID
        + """
def save(*_):
    time.sleep(0.3)
    note('saved0')
    sys.exit(0)
signal.signal(signal.SIGHUP, save)
signal.signal(signal.SIGTERM, save)
note('rank0')
time.sleep(60)
"""
    )
    process = launches.start("--nproc", "1", "--grace", "60", script)
    launches.pids("rank0")
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGHUP)  # another, because two of a kind may become one
    assert process.wait(timeout=limit_s(30)) in (128 + signal.SIGHUP, 128 + signal.SIGTERM)
    assert (launches.folder / "saved0").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_error_of_a_rank_that_was_told_to_end_is_shown(launches: Launches, number: int) -> None:
    """One that saves then, and cannot, must not end as one that has saved; a secondary failure is not worth a word."""
    script = launches.script(
        NOTE_PID
        + """
from lockstep.errors import RankLost
def raises(*_):
    raise KeyboardInterrupt
signal.signal(signal.SIGTERM, raises)
try:
    note(f'rank{RANK}')
    time.sleep(60)
except KeyboardInterrupt:
    raise RankLost('rank 0 left', (0,)) if RANK == 1 else OSError('cannot save: disk full')
"""
    )
    process = launches.start("--nproc", "3", script)
    launches.pids("rank0", "rank1", "rank2")
    process.send_signal(number)
    _, err = process.communicate(timeout=limit_s(10))
    assert process.returncode == 128 + number
    told, rule, failed, alike, *shown = err.splitlines()
    assert "stopping; ranks have" in told
    assert re.match(
        r"lockstep: rank [02] \(pid \d+\) failed with OSError at script.py:\d+: cannot save: disk full$", failed
    )
    assert re.match("lockstep: the same error on rank [02]$", alike)
    assert shown[-2:] == ["OSError: cannot save: disk full", rule]
    assert "errors.RankLost:" not in err


def test_stopped_rank_may_end_within_the_grace(launches: Launches) -> None:
    script = launches.script(
        NOTE_PID
        + """
if RANK == 1:
    signal.signal(signal.SIGTERM, lambda *_: (note('ended'), sys.exit(1)))
    note('stopped')
    os.kill(os.getpid(), signal.SIGSTOP)
while not os.path.exists('stopped'): time.sleep(0.01)
while open(f"/proc/{int(open('stopped').read())}/stat").read().split()[2] != 'T': time.sleep(0.01)
raise ValueError('bad')
"""
    )
    assert launches.run("--nproc", "2", script).returncode == 1
    assert (launches.folder / "ended").exists()


def test_second_ctrl_c_kills_at_once(launches: Launches) -> None:
    script = launches.script(
        NOTE_PID
        + """
signal.signal(signal.SIGINT, lambda *_: note(f'heard{RANK}'))
note('rank0')
while True:
    time.sleep(60)
"""
    )
    process = launches.start("--nproc", "1", "--grace", "60", script)
    (pid,) = launches.pids("rank0")
    process.send_signal(signal.SIGINT)
    launches.pids("heard0")
    assert process.poll() is None
    time.sleep(0.1)  # as long as fingers need
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=limit_s(5))
    assert process.returncode == 130
    assert not is_alive(pid)


def test_ignored_hangup_stays_ignored(launches: Launches) -> None:
    """`nohup lockstep run …` continues when the terminal is closed, and so do its ranks."""
    script = launches.script(
        NOTE_PID + "note('rank0')\nwhile not os.path.exists('go'): time.sleep(0.01)\nprint('done')"
    )
    program = "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); os.execv(sys.executable, sys.argv)"
    command = [sys.executable, "-m", "lockstep", "run", "--nproc", "1", script]
    process = subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.argv = {command!r}; {program}"],
        cwd=launches.folder, env=launches.environment(), stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    (rank,) = launches.pids("rank0")
    process.send_signal(signal.SIGHUP)
    os.kill(rank, signal.SIGHUP)
    (launches.folder / "go").touch()
    out, _ = process.communicate(timeout=limit_s(10))
    assert (process.returncode, out) == (0, "[0] done\n")


def test_ctrl_z_stops_and_continues_the_ranks(launches: Launches) -> None:
    script = launches.script(NOTE_PID + "note('rank0')\nwhile not os.path.exists('go'): time.sleep(0.01)")
    process = launches.start("--nproc", "1", script)
    (rank,) = launches.pids("rank0")

    def state(pid: int) -> bytes:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]

    process.send_signal(signal.SIGTSTP)
    wait_until(lambda: state(rank) == state(process.pid) == b"T", "launcher and rank are stopped")
    process.send_signal(signal.SIGCONT)
    wait_until(lambda: state(rank) != b"T", "the rank continues")
    (launches.folder / "go").touch()
    assert process.wait(timeout=limit_s(10)) == 0


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_reader_that_goes_away_ends_the_job_quietly(launches: Launches, stream: str) -> None:
    script = launches.script(f"while True: print('line', file=sys.{stream}, flush=True); time.sleep(0.01)")
    process = launches.start("--nproc", "2", script, bufsize=0)
    pipe = getattr(process, stream)
    assert pipe.readline()[3:] == " line\n"
    pipe.close()
    other = process.stderr if stream == "stdout" else process.stdout
    assert other is not None
    assert other.read() == ""
    assert process.wait(timeout=limit_s(10)) == 128 + signal.SIGPIPE


def test_slow_reader_gets_everything(launches: Launches) -> None:
    """The ranks have long finished when the reader begins to read."""
    script = launches.script("note = open('written', 'w'); os.write(1, b'x' * 150_000 + b'\\n'); note.write('1\\n')")
    process = launches.start("--nproc", "1", script)
    launches.pids("written")
    out, _ = process.communicate(timeout=limit_s(10))
    assert out == "[0] " + "x" * 150_000 + "\n"


def test_job_inside_a_job_ends_with_it(launches: Launches) -> None:
    launches.script(FAMILY + "time.sleep(60)", "inner.py")
    outer = launches.script(
        "import subprocess\n"
        "subprocess.run([sys.executable, '-m', 'lockstep', 'run', '--nproc', '1', 'inner.py'], start_new_session=True)"
    )
    process = launches.start("--nproc", "1", outer)
    pids = family_of(launches, 1)
    process.kill()
    wait_until_gone(pids, 3)
    wait_until(lambda: not launches.leftovers(), "both private folders are removed", 3)


def test_killed_reaper_does_not_hurt(launches: Launches) -> None:
    script = launches.script(NOTE_PID + "note('rank0')\nwhile not os.path.exists('go'): time.sleep(0.01)\nsys.exit(6)")
    process = launches.start("--nproc", "1", "--max-restarts", "1", script)
    (rank,) = launches.pids("rank0")
    (reaper,) = set(children_of(process.pid)) - {rank}
    os.kill(reaper, signal.SIGKILL)
    (launches.folder / "go").touch()
    _, err = process.communicate(timeout=limit_s(10))
    assert process.returncode == 6
    assert "Traceback" not in err


def test_ctrl_c_while_failing_prevents_the_restart(launches: Launches) -> None:
    script = launches.script(
        NOTE_PID
        + """
if RANK == 1:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    note('rank1')
    time.sleep(60)
while not os.path.exists('rank1'):
    time.sleep(0.005)
note('rank0')
raise ValueError('first')
"""
    )
    process = launches.start("--nproc", "2", "--grace", "60", "--max-restarts", "5", script)
    failing, pid = launches.pids("rank0", "rank1")
    wait_until(lambda: not is_alive(failing), "rank 0 has failed")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=limit_s(10))
    assert process.returncode == 1
    assert "failed with ValueError" in err
    assert "restart" not in err
    assert not is_alive(pid)


def test_death_signal_stands_in_for_a_killed_reaper(launches: Launches) -> None:
    script = launches.script(NOTE_PID + "note(f'rank{RANK}')\ntime.sleep(60)")
    process = launches.start("--nproc", "2", script)
    ranks = launches.pids("rank0", "rank1")
    (reaper,) = set(children_of(process.pid)) - set(ranks)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(reaper, number)
    assert is_alive(reaper), "only SIGKILL ends the reaper"
    os.kill(reaper, signal.SIGKILL)
    wait_until(lambda: not is_alive(reaper), "the reaper is gone")
    process.kill()
    wait_until_gone(ranks, 2)
    shutil.rmtree(launches.temporary)  # What only the reaper would have removed.
