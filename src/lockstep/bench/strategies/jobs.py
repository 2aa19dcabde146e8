"""The processes of each way: started once, they wait for orders, and sleep while other ways have their turn.

The parent hosts a TCP store, into which it puts the task and the orders, and ranks put their replies. A rank
that waits for an order sleeps in `get`, and exits when the store closes, so no process outlives the parent for long.

    task                    the task, for all ranks
    <way>/order/<n>         what to do next
    <way>/reply/<n>/<rank>  the result

A way's processes have their own session, which Ctrl-C does not reach.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from lockstep import env
from lockstep.bench.ranks import RankFailed
from lockstep.bench.strategies.ways import Way, command_of

__all__ = ["HOST", "TASK_KEY", "Orders", "WayFailed", "WayJob"]

HOST = "127.0.0.1"
TASK_KEY = "task"
_LOOKS_S = (0.005, 0.05)  # polling interval for replies: first, and longest
_ENDING_S = 30.0
_ERROR = re.compile(r"(\[?rank ?\d+\]?:? )?[\w.]*(Error|Exception|Failed|Lost)\b.*?: \S")
_MOST_LETTERS = 300


class WayFailed(RankFailed):
    """The processes of a way exited, or did not reply; quotes their last output."""


class Orders:
    """The store, and the folder for the logs of ways.

    Args:
        task: the task, as JSON.
        logs: folder for the output of processes; created if missing.
    """

    def __init__(self, task: Mapping[str, Any], logs: Path) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self.store, self.logs = TCPStore(HOST, 0, is_master=True, wait_for_workers=False), logs
        self.store.set(TASK_KEY, json.dumps(dict(task)))


class WayJob:
    """The processes of one way.

    Args:
        nproc: number of ranks, for a way with several.
        threads: intra-op threads of each rank.
        orders: the store.

    Attributes:
        world_size: number of ranks that reply.
        log: file with the output of the processes.
    """

    def __init__(self, way: Way, nproc: int, threads: int, orders: Orders) -> None:
        self.way, self._orders = way, orders
        self.world_size = 1 if way.starter == "alone" else nproc
        self._number = 0
        self.log = orders.logs / f"{way.name}.txt"
        worker = ["-m", "lockstep.bench.strategies.worker", way.name, str(orders.store.port), str(nproc), str(threads)]
        variables = env.snapshot()
        env.OMP_NUM_THREADS.set(str(threads), variables)
        env.PYTHONPATH.set(os.pathsep.join(filter(None, [_source(), variables.get("PYTHONPATH", "")])), variables)
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command_of(way, nproc, sys.executable, worker),
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def ask(self, order: Mapping[str, Any], timeout_s: float) -> list[dict[str, Any]]:
        """Send all ranks an order, and wait for their replies.

        Args:
            order: the order, as JSON.
            timeout_s: time limit for all replies.

        Returns:
            One reply per rank.

        Raises:
            WayFailed: processes exited, or the time is up.
        """
        number = self._number
        self._number += 1
        self._orders.store.set(f"{self.way.name}/order/{number}", json.dumps(dict(order)))
        keys = [f"{self.way.name}/reply/{number}/{rank}" for rank in range(self.world_size)]
        deadline = time.monotonic() + timeout_s
        pause_s, longest_s = _LOOKS_S
        # Not `wait`, because torch's C++ code prints every timeout.
        while not self._orders.store.check(keys):
            if self._process.poll() is not None and not self._orders.store.check(keys):
                raise WayFailed(self._last_words() or f"its processes exited with code {self._process.returncode}")
            if time.monotonic() > deadline:
                raise WayFailed(f"it did not reply within {timeout_s:.0f} s")
            time.sleep(pause_s)
            pause_s = min(longest_s, 1.5 * pause_s)
        return [json.loads(self._orders.store.get(key)) for key in keys]

    def ask_to_leave(self) -> None:
        """Ask the processes to exit. Does not wait."""
        if self._process.poll() is None:
            self._orders.store.set(f"{self.way.name}/order/{self._number}", json.dumps({"do": "leave"}))

    def end(self) -> None:
        """Ask the processes to exit, and kill those that do not."""
        self.ask_to_leave()
        self._wait(_ENDING_S)
        self.kill()

    def terminate(self) -> None:
        """Send SIGTERM, so that a launcher stops its ranks. Does not wait."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the processes."""
        self.terminate()
        self._wait(_ENDING_S)
        self._signal(signal.SIGKILL)
        self._wait(_ENDING_S)

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def forget_log(self) -> None:
        """Remove the log, once it is not needed."""
        self.log.unlink(missing_ok=True)

    def _wait(self, seconds: float) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def _last_words(self) -> str:
        """The most informative line of the log: the first that names an error, otherwise the last."""
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if _ERROR.match(line)]
        return [*errors, *lines[-1:], ""][0][:_MOST_LETTERS]


def _source() -> str:
    """The folder that this package is imported from."""
    return str(Path(__file__).resolve().parents[3])
