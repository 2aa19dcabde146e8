"""Breaks torch.distributed on import, to see whether the conformance suite notices.

all_reduce adds one to its result on rank 1, all_gather raises there while its peer waits, a
barrier kills rank 1. Its workers must not be used again, which the killing takes care of.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import torch.distributed as dist

_all_gather = dist.all_gather
_all_reduce = dist.all_reduce


def all_reduce(tensor: Any, *args: Any, **kwargs: Any) -> Any:
    work = _all_reduce(tensor, *args, **kwargs)
    if dist.get_rank() == 1:
        tensor += 1
    return work


def all_gather(*args: Any, **kwargs: Any) -> Any:
    if dist.get_rank() == 1:
        raise ValueError("sabotage")
    return _all_gather(*args, **kwargs)


def barrier(*args: Any, **kwargs: Any) -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


dist.all_reduce = all_reduce
dist.all_gather = all_gather
dist.barrier = barrier
