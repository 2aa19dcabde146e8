"""The program of one rank: runs operations one after the other, and records the outcome of each.

    python -m lockstep.tools.capabilities.probe FOLDER BACKEND DEVICE VERB [VERB ...]

The rank is given by RANK and WORLD_SIZE, or by MPI under mpirun. Every operation gets a new group, in case one breaks
it. Writes `rank<r>.jsonl` to FOLDER: a line when an operation begins, and one when it is done.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist

from lockstep import env
from lockstep.comm.names import MPI_BACKEND_NAME
from lockstep.tools.capabilities.verbs import VERBS

__all__ = ["VERB_DEADLINE_S", "main"]

# Timeout of a collective; among processes of one host, anything slower has hung.
VERB_DEADLINE_S = 10.0


def _join(folder: Path, backend: str, number: int) -> None:
    """Create the default group."""
    limit = timedelta(seconds=VERB_DEADLINE_S)
    if backend == MPI_BACKEND_NAME:
        dist.init_process_group(backend, timeout=limit)
        return
    meeting = (folder / f"meeting-{number}").as_uri()
    dist.init_process_group(
        backend, init_method=meeting, rank=env.RANK.get() or 0, world_size=env.WORLD_SIZE.get() or 1, timeout=limit
    )


def _try(verb: str, device: torch.device) -> str:
    """Why the operation does not work here; empty if it does."""
    try:
        return "" if VERBS[verb](device) else "the result is wrong"
    except Exception as error:
        return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def _note(file: TextIO, **entry: object) -> None:
    file.write(json.dumps(entry) + "\n")
    file.flush()


def main(arguments: list[str]) -> None:
    """Run the operations.

    Args:
        arguments: folder, backend, device, names of operations.
    """
    folder, backend, kind = Path(arguments[0]), arguments[1], arguments[2]
    for number, verb in enumerate(arguments[3:]):
        _join(folder, backend, number)
        device = torch.device(kind, dist.get_rank()) if kind == "cuda" else torch.device(kind)
        if kind == "cuda":
            torch.cuda.set_device(device)
        with (folder / f"rank{dist.get_rank()}.jsonl").open("a") as file:
            _note(file, verb=verb, state="begun")
            _note(file, verb=verb, state="done", trouble=_try(verb, device))
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
