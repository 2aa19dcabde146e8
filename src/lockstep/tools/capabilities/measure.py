"""Starts ranks for each available backend and device, and collects which operations work.

If an operation hangs or crashes its ranks, the remaining ones are run on new ranks.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lockstep import env
from lockstep.launch.environment import visible_gpus

__all__ = ["Column", "find_columns", "measure"]

WORLD_SIZE = 2
# Time without progress on any rank; covers importing torch on a busy machine, and the slowest operation.
_SILENCE_S = 90.0
_LOOK_EVERY_S = 0.05
_PROBE = "lockstep.tools.capabilities.probe"


@dataclass
class Column:
    """A backend on a device.

    Attributes:
        backend: its name in the table.
        name: its name for `init_process_group`.
        device: "cpu" or "cuda".
        absent: why it cannot be measured here; empty if it can.
        troubles: verb -> why it does not work; empty if it does. Filled in by `measure`.
    """

    backend: str
    name: str
    device: str
    absent: str = ""
    troubles: dict[str, str] = field(default_factory=dict)


def find_columns() -> list[Column]:
    """Every backend on every device, in the order of the table; `absent` says why one is missing."""
    gpus = visible_gpus(env.snapshot())
    no_gpus = "" if gpus >= WORLD_SIZE else f"needs {WORLD_SIZE} GPUs; there are {gpus} here"
    no_mpi = ""
    if shutil.which("mpirun") is None:
        no_mpi = "mpirun is not installed"
    elif importlib.util.find_spec("mpi4py") is None:
        no_mpi = "mpi4py is not installed"
    return [
        Column("gloo", "gloo", "cpu"),
        Column("gloo", "gloo", "cuda", no_gpus),
        Column("mpi", "mpi4py", "cpu", no_mpi),
        Column("mpi", "mpi4py", "cuda", no_mpi or no_gpus),
        Column("nccl", "nccl", "cpu", "nccl moves GPU tensors only"),
        Column("nccl", "nccl", "cuda", no_gpus),
        Column("lockstep", "lockstep", "cpu"),
        Column("lockstep", "cpu:lockstep,cuda:nccl", "cuda", no_gpus),
    ]


def measure(column: Column, verbs: Sequence[str]) -> None:
    """Run operations on the ranks of a column and fill in its `troubles`.

    Args:
        column: must not be absent.
        verbs: names in `verbs.VERBS`.
    """
    remaining = list(verbs)
    while remaining:
        with tempfile.TemporaryDirectory(prefix="capabilities-") as folder:
            ended = _run(column, remaining, Path(folder))
            entries = _read(Path(folder))
        done = {verb for verb, states in entries.items() if len(states) == WORLD_SIZE and None not in states}
        for verb in done:
            column.troubles[verb] = next((state for state in entries[verb] if state), "")
        remaining = [verb for verb in remaining if verb not in done]
        reason = ended or "the ranks exited without an error message"
        if not entries:  # no rank created a group
            column.troubles.update(dict.fromkeys(remaining, reason))
            return
        if remaining:  # the operation in which they exited or hung
            column.troubles[remaining.pop(0)] = reason


def _read(folder: Path) -> dict[str, list[str | None]]:
    """Verb -> for each rank that began it: why it failed ("" if it did not), or None if it did not return."""
    entries: dict[str, list[str | None]] = {}
    for path in sorted(folder.glob("rank*.jsonl")):
        of_rank: dict[str, str | None] = {}
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            of_rank[entry["verb"]] = entry.get("trouble") if entry["state"] == "done" else None
        for verb, trouble in of_rank.items():
            entries.setdefault(verb, []).append(trouble)
    return entries


def _run(column: Column, verbs: Sequence[str], folder: Path) -> str:
    """Run the ranks until they exit; returns how they failed, or ""."""
    errors = folder / "stderr"
    with errors.open("w") as stderr, contextlib.ExitStack() as stack:
        ranks = []
        for command, variables in _commands(column, verbs, folder):
            ranks.append(stack.enter_context(_start(command, variables, stderr.fileno())))
            stack.callback(_kill, ranks[-1])
        seen, heard = -1, time.monotonic()
        while any(rank.poll() is None for rank in ranks):
            if any(rank.poll() not in (None, 0) for rank in ranks):
                break
            size = sum(path.stat().st_size for path in folder.glob("rank*.jsonl"))
            if size != seen:
                seen, heard = size, time.monotonic()
            if time.monotonic() - heard > _SILENCE_S:
                return f"it hung for {_SILENCE_S:g} s"
            time.sleep(_LOOK_EVERY_S)
        codes = [rank.poll() for rank in ranks]
    failed = next((code for code in codes if code), 0)
    if failed == 0:
        return ""
    how = f"was killed by {signal.Signals(-failed).name}" if failed < 0 else f"exited with code {failed}"
    last = next((line for line in reversed(errors.read_text().splitlines()) if line.strip()), "")
    return f"a rank {how}: {last}"


def _commands(column: Column, verbs: Sequence[str], folder: Path) -> list[tuple[list[str], dict[str, str]]]:
    """Command line and environment of each process to start."""
    program = [sys.executable, "-m", _PROBE, str(folder), column.name, column.device, *verbs]
    variables = env.snapshot()
    if column.backend == "mpi":
        as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        mpirun = ["mpirun", *as_root, "--oversubscribe", "--bind-to", "none", "-np", str(WORLD_SIZE)]
        return [([*mpirun, *program], variables)]
    commands = []
    for rank in range(WORLD_SIZE):
        of_rank = dict(variables)
        env.RANK.set(rank, of_rank)
        env.WORLD_SIZE.set(WORLD_SIZE, of_rank)
        env.LOCAL_RANK.set(rank, of_rank)
        commands.append((program, of_rank))
    return commands


def _start(command: list[str], variables: dict[str, str], stderr: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command, env=variables, stdin=subprocess.DEVNULL, stdout=stderr, stderr=stderr, start_new_session=True
    )


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
