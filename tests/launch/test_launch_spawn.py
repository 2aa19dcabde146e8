"""`lockstep.spawn`: results by rank, the first rank's own exception, and nothing left behind."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from types import ModuleType

import pytest

import lockstep
import spawned
from launching import children_of, is_alive, wait_until
from lockstep.errors import InputError, InputTypeError, LaunchError, WorkerFailed
from lockstep.launch.spawn import RankTraceback
from lockstep.testing import limit_s


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> object:
    """No private folder, no file descriptor, no child but multiprocessing's own tracker."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    multiprocessing.resource_tracker.ensure_running()
    gc.collect()  # what earlier tests have left has descriptors
    children, num_descriptors = sorted(children_of(os.getpid())), len(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    assert sorted(children_of(os.getpid())) == children
    assert len(os.listdir("/proc/self/fd")) <= num_descriptors  # a thread of earlier tests may have closed some
    assert not list(tmp_path.glob("lockstep-*"))


def test_results_come_back_by_rank() -> None:
    assert lockstep.spawn(spawned.describe, ("a",), nproc=3, env={"EXTRA": "x"}) == [
        (rank, 3, "a", "x") for rank in range(3)
    ]


def test_partial_from_a_thread() -> None:
    found: list[object] = []
    thread = threading.Thread(
        target=lambda: found.append(lockstep.spawn(functools.partial(spawned.describe, "b"), nproc=1))
    )
    thread.start()
    thread.join(timeout=limit_s(30))
    assert found == [[(0, 1, "b", None)]]


def test_exception_keeps_its_type_and_brings_its_traceback() -> None:
    with pytest.raises(ValueError, match=r"^bad rate$") as caught:
        lockstep.spawn(spawned.fail, (1, "value"), nproc=2)
    assert type(caught.value) is ValueError
    assert isinstance(caught.value.__cause__, RankTraceback)
    text = str(caught.value.__cause__)
    assert "rank 1 (pid " in text
    assert 'raise ValueError("bad rate")' in text
    assert text.count("File ") == 1, "only the user's own frame"


def test_cause_is_raised_and_not_its_secondary_failures(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="lr"):
        lockstep.spawn(spawned.lose, (str(tmp_path / "marker"),), nproc=3)


@pytest.mark.parametrize(
    ("kind", "code", "words"),
    [
        ("two", 1, "failed with spawned.TwoArguments at .*no pickle"),
        ("kill", 137, r"rank 0 \(pid \d+\) was killed by signal 9 \(SIGKILL"),
        ("exit", 7, "rank 0 .* exited with code 7"),
    ],
)
def test_worker_failed(kind: str, code: int, words: str) -> None:
    with pytest.raises(WorkerFailed, match=words) as caught:
        lockstep.spawn(spawned.fail, (0, kind), nproc=2)
    assert (caught.value.rank, caught.value.exit_code) == (0, code)


def test_failure_says_where_the_rank_was(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match=r"rank 1 .* killed by signal 9 .* in barrier #3 at train\.py:7"):
        lockstep.spawn(spawned.die_in_a_collective, (str(tmp_path),), nproc=2)


def test_leaving_before_the_end() -> None:
    with pytest.raises(WorkerFailed, match=r"rank 0 .* left with exit code 0 before the function had returned"):
        lockstep.spawn(spawned.fail, (0, "os._exit"), nproc=1)
    assert lockstep.spawn(spawned.leave, (0,), nproc=1) == [None]


def test_result_that_cannot_be_sent() -> None:
    with pytest.raises(InputTypeError, match="rank 0: fail returned a lock that cannot be sent back"):
        lockstep.spawn(spawned.fail, (0, "result"), nproc=1)


@pytest.mark.parametrize("where", ["a script", "a session"])
def test_arguments_may_be_what_a_spawned_process_takes(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a notebook or a session, too, whose functions are sent by another pickler."""
    if where == "a session":
        monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    context = multiprocessing.get_context("spawn")
    queue, event = context.SimpleQueue(), context.Event()
    received: list[int] = []

    def receive() -> None:
        received.extend(sorted(queue.get() for _ in range(2)))
        event.set()

    thread = threading.Thread(target=receive)
    thread.start()
    lockstep.spawn(spawned.send, (queue, event), nproc=2)
    thread.join(timeout=limit_s(30))
    queue.close()
    assert received == [0, 1]


def test_borrowed_shared_memory_outlives_the_ranks() -> None:
    """A tracker of the rank's own would unlink it when the rank ends."""
    memory = SharedMemory(create=True, size=16)
    try:
        assert lockstep.spawn(spawned.write_rank, (memory.name,), nproc=2) == [None, None]
        assert bytes(memory.buf[:2]) == b"\x01\x02"
        SharedMemory(memory.name).close()
    finally:
        memory.close()
        memory.unlink()


def test_what_cannot_be_sent_is_refused_before_anything_starts() -> None:
    def local() -> None: ...

    for fn in (local, lambda: None, functools.partial(local)):
        with pytest.raises(InputTypeError, match="move it to the top level of a module"):
            lockstep.spawn(fn, nproc=1)
    with pytest.raises(InputTypeError, match="the args of describe cannot be sent"):
        lockstep.spawn(spawned.describe, (threading.Lock(),), nproc=1)
    with pytest.raises(InputTypeError, match="fn must be a function, got str"):
        lockstep.spawn("describe", nproc=1)  # type: ignore[arg-type]
    with pytest.raises(LaunchError, match="at least 1"):
        lockstep.spawn(spawned.describe, ("a",), nproc=0)
    with pytest.raises(InputError, match="timeout is 0"):
        lockstep.spawn(spawned.describe, ("a",), nproc=1, timeout=limit_s(0))


def test_timeout_names_who_was_late() -> None:
    start = time.monotonic()
    with pytest.raises(WorkerFailed, match=r"ranks 0, 1 were not done after 0\.5 s") as caught:
        lockstep.spawn(time.sleep, (60,), nproc=2, timeout=timedelta(seconds=0.5))
    assert time.monotonic() - start < limit_s(25)
    assert (caught.value.rank, caught.value.exit_code) == (0, 124)


def script_in(folder: Path, text: str) -> list[str]:
    (folder / "script.py").write_text(text)
    return [sys.executable, str(folder / "script.py")]


def test_functions_and_classes_of_main(tmp_path: Path) -> None:
    command = script_in(
        tmp_path,
        """
import lockstep
class Odd(Exception): pass
class Point:
    def __init__(self, x): self.x = x
def work(point):
    if point.x < 0: raise Odd(point.x)
    return Point(point.x + 1)
if __name__ == "__main__":
    (result,) = lockstep.spawn(work, (Point(1),), nproc=1)
    assert type(result) is Point and result.x == 2
    try:
        lockstep.spawn(work, (Point(-1),), nproc=1)
    except Odd as error:
        print("raised", error)
""",
    )
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s(30))
    assert (done.returncode, done.stdout, done.stderr) == (0, "raised -1\n", "")


INTERACTIVE = """
import dataclasses, os, sys
import lockstep

@dataclasses.dataclass
class Point:
    x: int

class Odd(Exception):
    pass

offset = 10

def work(point):
    rank = int(os.environ["RANK"])
    print("at", rank)
    if point.x < 0:
        raise Odd("negative")
    return Point(point.x + rank + offset)

points = lockstep.spawn(work, (Point(1),), nproc=2)
print(points, all(type(point) is Point for point in points))
try:
    lockstep.spawn(work, (Point(-1),), nproc=1)
except Odd as error:
    print("raised", error, "negative" in str(error.__cause__))
"""


def test_functions_of_a_session_go_by_value() -> None:
    """As in a notebook: nobody can import its main module."""
    done = subprocess.run([sys.executable, "-c", INTERACTIVE], capture_output=True, text=True, timeout=limit_s(60))
    assert (done.returncode, done.stderr) == (0, "")
    first, second, *rest = done.stdout.splitlines()
    assert sorted([first, second]) == ["[0] at 0", "[1] at 1"]
    assert rest == ["[Point(x=11), Point(x=12)] True", "[0] at 0", "raised negative True"]


def test_cells_in_a_file_are_not_run_as_python() -> None:
    """IPython runs such files, and Python cannot."""
    program = f"import __main__; __main__.__file__ = 'cells.ipy'\n{INTERACTIVE}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=limit_s(60))
    assert (done.returncode, done.stderr) == (0, "")
    assert "[Point(x=11), Point(x=12)] True" in done.stdout


def test_what_sends_by_value_is_named_where_it_is_missing() -> None:
    program = "import sys\nsys.modules['cloudpickle'] = None\n" + INTERACTIVE
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=limit_s(60))
    assert done.returncode == 1
    assert "InputTypeError: work was defined interactively" in done.stderr
    assert "pip install cloudpickle" in done.stderr


def test_output_has_prefixes_and_goes_where_python_prints(capsys: pytest.CaptureFixture[str]) -> None:
    lockstep.spawn(spawned.say, ("hello\nworld",), nproc=2)
    out, err = capsys.readouterr()
    assert sorted(out.splitlines()) == ["[0] hello", "[0] world", "[1] hello", "[1] world"]
    assert sorted(err.splitlines()) == ["[0] to stderr", "[1] to stderr"]


def test_output_without_prefix(capfd: pytest.CaptureFixture[str]) -> None:
    lockstep.spawn(spawned.say, ("hello",), nproc=1, prefix=False)
    assert capfd.readouterr() == ("hello\n", "to stderr\n")


@pytest.mark.parametrize("args", [4, "word", None])
def test_args_are_a_sequence(args: object) -> None:
    with pytest.raises(
        InputTypeError, match=rf"args is a \w+; expected a sequence of arguments, such as \({args!r},\)"
    ):
        lockstep.spawn(spawned.describe, args, nproc=2)  # type: ignore[arg-type]


def test_missing_main_guard_is_explained(tmp_path: Path) -> None:
    command = script_in(tmp_path, "import lockstep, time\nlockstep.spawn(time.time, nproc=1)\n")
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s(30))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "lockstep.errors.LaunchError: lockstep.spawn was called while a rank"
    )
    assert "if __name__ == '__main__':" in done.stderr


PARENT = """
import lockstep, spawned, sys
if __name__ == "__main__":
    lockstep.spawn(spawned.sleep_with_child, (sys.argv[1],), nproc=2)
"""


def start_parent(folder: Path, program: str) -> subprocess.Popen[str]:
    """Start a script with the folder as its argument; it finds `spawned`."""
    paths = [str(Path(spawned.__file__).parent), os.environ.get("PYTHONPATH", "")]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "TMPDIR": str(folder)}
    return subprocess.Popen(
        [*script_in(folder, program), str(folder)], env=variables, stderr=subprocess.PIPE, text=True
    )


def test_ctrl_c_says_what_it_does_and_what_a_rank_raised_then(tmp_path: Path) -> None:
    parent = start_parent(tmp_path, PARENT.replace("sleep_with_child", "wait_and_save"))
    wait_until(lambda: all((tmp_path / f"up{rank}").exists() for rank in range(2)), "ranks are up")
    parent.send_signal(signal.SIGINT)
    _, err = parent.communicate(timeout=limit_s(30))
    told, *shown = err.splitlines()
    assert parent.returncode == -signal.SIGINT
    assert told == "lockstep: Ctrl-C: stopping; ranks have 5 s to exit (press Ctrl-C again to kill them)"
    assert 'raise OSError("cannot save: disk full") from None' in err
    causes = [line for line in shown if line and not line.startswith((" ", '"'))]
    assert causes[-3:] == [
        "The above exception was the direct cause of the following exception:",
        "Traceback (most recent call last):",
        "KeyboardInterrupt",
    ]
    assert causes[-4] == "OSError: cannot save: disk full"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=lambda number: number.name)
def test_end_of_the_parent_is_the_end_of_all(tmp_path: Path, number: int) -> None:
    parent = start_parent(tmp_path, PARENT)
    files = [tmp_path / f"pids{rank}" for rank in range(2)]
    wait_until(lambda: all(file.exists() for file in files), "ranks are up")
    pids = [int(word) for file in files for word in file.read_text().split()] + children_of(parent.pid)
    assert len(set(pids)) == 6, "two ranks, a child of each, the reaper, multiprocessing's tracker"
    parent.send_signal(number)
    _, err = parent.communicate(timeout=limit_s(10))
    assert parent.returncode == -number
    own = [line for line in err.splitlines() if line.startswith("Traceback")]
    assert len(own) == (1 if number == signal.SIGINT else 0), "the parent's own"
    wait_until(lambda: not any(map(is_alive, pids)), "all processes are gone", 2)
    wait_until(lambda: not list(tmp_path.glob("lockstep-*")), "the private folder is removed", 2)
