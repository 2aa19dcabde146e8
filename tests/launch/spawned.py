"""Functions that the tests of `lockstep.spawn` run on ranks: a module of its own, as ranks import it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import NoReturn

from lockstep import rank_status
from lockstep.errors import RankLost


class TwoArguments(Exception):
    """Pickles, but does not come out again."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def rank() -> int:
    return int(os.environ["RANK"])


def describe(word: str) -> tuple[int, int, str, str | None]:
    return rank(), int(os.environ["WORLD_SIZE"]), word, os.environ.get("EXTRA")


def fail(failing: int, kind: str) -> None:
    if rank() != failing:
        time.sleep(60)
    if kind == "value":
        raise ValueError("bad rate")
    if kind == "two":
        raise TwoArguments("no", "pickle")
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "exit":
        sys.exit(7)
    if kind == "result":
        return threading.Lock()  # type: ignore[return-value]
    os._exit(0)


def leave(code: int | None) -> NoReturn:
    sys.exit(code)


def lose(marker: str) -> None:
    """Rank 1 fails, the others notice before it has left."""
    if rank() == 1:
        Path(marker).touch()
        raise KeyError("lr")
    while not os.path.exists(marker):
        time.sleep(0.005)
    raise RankLost("rank 1 left", (1,))


def send(queue: object, event: object) -> None:
    queue.put(rank())  # type: ignore[attr-defined]
    assert event.wait(30)  # type: ignore[attr-defined]


def sleep_with_child(folder: str) -> None:
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)
    draft = Path(folder, f"draft{rank()}")
    draft.write_text(f"{os.getpid()} {child}")
    draft.rename(Path(folder, f"pids{rank()}"))
    time.sleep(60)


def wait_and_save(folder: str) -> None:
    """Rank 1 cannot do what Ctrl-C asks for."""
    try:
        Path(folder, f"up{rank()}").touch()
        time.sleep(60)
    except KeyboardInterrupt:
        if rank() == 1:
            raise OSError("cannot save: disk full") from None
        raise


def die_in_a_collective(folder: str) -> None:
    """As the flight recorder of a group notes it, without one."""
    section = rank_status.open_section("the default group")
    section.write_call(0, "barrier()")
    section.write_site(0, "train.py:7 in main")
    section.words[rank_status.NUMBER] = 3
    Path(folder, f"up{rank()}").touch()
    while not all(Path(folder, f"up{other}").exists() for other in range(2)):
        time.sleep(0.005)
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def add_tensor(tensor: object) -> object:
    return tensor + rank()  # type: ignore[operator]


def write_rank(name: str) -> None:
    memory = SharedMemory(name)
    memory.buf[rank()] = rank() + 1
    memory.close()


def say(text: str) -> None:
    print(text)
    print("to stderr", file=sys.stderr)
