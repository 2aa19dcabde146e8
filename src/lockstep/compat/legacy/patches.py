"""Puts what old scripts expect into today's torch; the table is in the package's docstring.

Each function here is one row of it. They add what is missing, or let a call through that torch turns away; a call that
torch takes does what torch does.
"""

from __future__ import annotations

import argparse
import collections.abc
import functools
import importlib.util
import inspect
import math
import os
import queue
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.nn.parallel import comm
from torch.optim import lr_scheduler
from torch.utils.data import BatchSampler, DataLoader, Sampler

from lockstep.compat.legacy import multigpu
from lockstep.errors import DataError

__all__ = ["install"]

_MARK = "_lockstep_legacy"


def install() -> None:
    """Add to torch what scripts of 2018 to 2021 expect. Local; twice does no harm."""
    if getattr(dist, _MARK, False):
        return
    _add_functions()
    _add_modules()
    _trust_plain_data()
    _wrap(distributed_c10d, "init_process_group", _take_old_backends)
    dist.init_process_group = distributed_c10d.init_process_group
    _wrap(DataLoader, "__init__", _take_whole_floats)
    _wrap(BatchSampler, "__init__", _take_whole_floats)
    _wrap(torch.Tensor, "eq", _lay_out_in_order)
    for scheduler in vars(lr_scheduler).values():
        if isinstance(scheduler, type) and issubclass(scheduler, lr_scheduler.LRScheduler):
            _accept_verbose(scheduler)
    if Sampler.__init__ is object.__init__:
        Sampler.__init__ = _init_sampler  # type: ignore[method-assign,assignment]
    setattr(dist, _MARK, True)


def _wrap(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(make(original)))


# ---- missing names ---------------------------------------------------------------------------------


def _add_functions() -> None:
    for name in multigpu.__all__:
        if not hasattr(dist, name):
            setattr(dist, name, getattr(multigpu, name))
            setattr(distributed_c10d, name, getattr(multigpu, name))
    if not hasattr(dist, "reduce_op"):
        members = {name: getattr(dist.ReduceOp, name) for name in dir(dist.ReduceOp) if name.isupper()}
        dist.reduce_op = SimpleNamespace(**members)  # type: ignore[assignment]


def _add_modules() -> None:
    """Modules that torch had, made of what stands for them; a real one is left alone."""
    text = (str, bytes)
    six = {
        "PY2": False,
        "PY3": True,
        "PY37": True,
        "inf": math.inf,
        "nan": math.nan,
        "string_classes": text,
        "int_classes": int,
        "container_abcs": collections.abc,
        "queue": queue,
        "FileNotFoundError": FileNotFoundError,
        "with_metaclass": lambda meta, *bases: meta("Base", bases, {}),
        "istuple": lambda value: isinstance(value, tuple),
    }
    _add_module("torch._six", six)
    _add_module("torch.cuda.comm", {name: value for name, value in vars(comm).items() if not name.startswith("__")})
    _add_module("torch.distributed.deprecated", {"__getattr__": functools.partial(getattr, dist)})


def _add_module(name: str, content: dict[str, Any]) -> None:
    if name in sys.modules or importlib.util.find_spec(name) is not None:
        return
    module = ModuleType(name, f"What torch had under this name, added by {__name__}.")
    module.__dict__.update(content)
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    setattr(sys.modules[parent], last, module)


def _trust_plain_data() -> None:
    """Let `torch.load` take what checkpoints of old hold beside tensors, and what runs no code when it is read."""
    trusted: list[Any] = [argparse.Namespace]
    try:
        import numpy
    except ImportError:
        pass
    else:
        trusted += [numpy.ndarray, numpy.dtype, *{type(numpy.dtype(code)) for code in numpy.typecodes["AllInteger"]}]
        trusted += [type(numpy.dtype(code)) for code in ("?", "e", "f", "d", "F", "D")]
        rebuild_number, rebuild_array = (value.__reduce__()[0] for value in (numpy.float64(0), numpy.zeros(1)))
        for function, name in ((rebuild_number, "scalar"), (rebuild_array, "_reconstruct")):
            # Files name the module that had them when they were written: another one since numpy 2.
            trusted += [(function, f"numpy.{core}.multiarray.{name}") for core in ("core", "_core")]
    torch.serialization.add_safe_globals(trusted)


# ---- calls that torch turns away -------------------------------------------------------------------


def _take_old_backends(original: Callable[..., None]) -> Callable[..., None]:
    """`init_process_group` with the backend "tcp", and a file without a folder."""

    def init_process_group(
        backend: str | None = None, init_method: str | None = None, *args: Any, **options: Any
    ) -> None:
        name = backend.lower() if isinstance(backend, str) else ""
        if name == "tcp":
            backend = "gloo"
        return original(backend, _whole_path(init_method), *args, **options)

    return init_process_group


def _whole_path(init_method: str | None) -> str | None:
    """`file://name` in the current folder; anything else as it is."""
    if not isinstance(init_method, str) or not init_method.startswith("file://"):
        return init_method
    parts = urlsplit(init_method)
    if parts.path or not parts.netloc:
        return init_method
    return f"file://{os.path.abspath(parts.netloc)}" + (f"?{parts.query}" if parts.query else "")


def _take_whole_floats(original: Callable[..., None]) -> Callable[..., None]:
    """The constructors of DataLoader and BatchSampler, whose second argument is `batch_size`."""

    def __init__(self: Any, *args: Any, **options: Any) -> None:  # noqa: N807
        given = list(args)
        if len(given) > 1 and isinstance(given[1], float):
            given[1] = _as_whole(given[1], type(self))
        if isinstance(options.get("batch_size"), float):
            options["batch_size"] = _as_whole(options["batch_size"], type(self))
        original(self, *given, **options)

    return __init__


def _as_whole(size: float, kind: type) -> int:
    if not size.is_integer():
        raise DataError(
            f"{kind.__name__}: batch_size={size} is no whole number; if it is a global batch divided by the number of "
            f"ranks, choose one that can be divided, or say int({size:g})"
        )
    return int(size)


def _lay_out_in_order(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`Tensor.eq`, whose result takes its strides from its operands since torch 1.7."""

    def eq(self: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        result = original(self, *args, **options)
        if type(result) is torch.Tensor and result.dim() == 2 and not result.is_contiguous():
            return result.contiguous()
        return result

    return eq


def _accept_verbose(scheduler: Any) -> None:
    """Schedulers of the learning rate, which announced each change until torch 2.6 if told `verbose=True`."""
    original = scheduler.__dict__.get("__init__")
    if original is None or "verbose" in inspect.signature(original).parameters:
        return

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, verbose: object = False, **options: Any) -> None:  # noqa: N807
        original(self, *args, **options)

    scheduler.__init__ = __init__


def _init_sampler(self: Sampler[Any], data_source: object = None) -> None:
    """Samplers of old handed their data to the base class, which ignored it."""
    super(Sampler, self).__init__()
