"""Horovod's allreduce, whose result is tracked, and its optimizer, which shows that all ranks train one model together.

Adds to the events of `collectives` and `passes`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from lockstep.comm.callsite import is_users
from lockstep.tools.rehearse.patching import wrap
from lockstep.tools.rehearse.watch import passes
from lockstep.tools.rehearse.watch.collectives import saw_reduction

__all__ = ["install"]


def _returning(original: Callable[..., Any]) -> Callable[..., Any]:
    def allreduce(tensor: Any, average: Any = None, name: Any = None, *args: Any, **kwargs: Any) -> Any:
        import lockstep.compat.horovod.torch as hvd

        result = original(tensor, average, name, *args, **kwargs)
        if is_users(sys._getframe(1).f_code) and isinstance(result, torch.Tensor) and result.is_floating_point():
            is_mean = average is not False and kwargs.get("op") in (None, hvd.Average)
            saw_reduction(result, hvd.size(), None, is_mean=is_mean)
        return result

    return allreduce


def _trains(original: Callable[..., Any]) -> Callable[..., Any]:
    def make(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("process_set") is None:
            passes.add_model(None)
        return original(*args, **kwargs)

    return make


def install() -> None:
    """Watch Lockstep's shim for Horovod."""
    import lockstep.compat.horovod.torch as hvd

    wrap(hvd, "DistributedOptimizer", _trains)

    for name in ("allreduce", "allreduce_"):
        wrap(hvd, name, _returning)
