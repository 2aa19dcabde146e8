"""Changes torch for old scripts; the table is in the package's docstring.

Each change adds a missing name, or accepts a call that torch rejects; calls that torch accepts are
unchanged. Replaced functions are recorded in `lockstep.torch_private`.
"""

from __future__ import annotations

import argparse
import collections.abc
import functools
import inspect
import math
import os
import pickle
import queue
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import comm
from torch.optim import lr_scheduler
from torch.utils.data import Sampler

from lockstep.compat.legacy import multigpu
from lockstep.compat.legacy.needs import CHANGES
from lockstep.errors import DataError, InputError
from lockstep.frames import is_internal_file, is_library_file, library_folders
from lockstep.torch_private.patching import add, add_module, patch, wrap

__all__ = ["install", "listeners", "on_install"]

_C10D = "torch.distributed.distributed_c10d"
_NOT_GIVEN = object()
_DOC = f"What torch had under this name, added by {__name__}."

_installed: set[str] = set()

listeners: list[Callable[[str, str], None]] = []
"""Called with a name in `needs.CHANGES` and a detail when a call is accepted that torch rejects."""

_watchers: list[Callable[[list[str]], None]] = []


def install(changes: Iterable[str] | None = None) -> list[str]:
    """Change torch as scripts of 2018 to 2021 expect. Local; may be called again.

    Args:
        changes: names in `needs.CHANGES`; None for all.

    Returns:
        The changes made by this call, without those made before and those that torch does not need.

    Raises:
        InputError: a change is unknown.
    """
    wanted = list(CHANGES if changes is None else changes)
    unknown = [name for name in wanted if name not in _CHANGES]
    if unknown:
        raise InputError(f"unknown change for old scripts: {', '.join(unknown)}; expected {', '.join(_CHANGES)}")
    new = [name for name in wanted if name not in _installed]
    _installed.update(new)
    done = [name for name in new if _CHANGES[name]()]
    for watcher in _watchers:
        watcher(new)
    return done


def on_install(watcher: Callable[[list[str]], None]) -> None:
    """Call `watcher` with the changes requested so far, and with any later ones. Local."""
    watcher(list(_installed))
    _watchers.append(watcher)


def _tell(change: str, detail: str = "") -> None:
    for listener in listeners:
        listener(change, detail)


# ---- missing names ---------------------------------------------------------------------------------


def _add_multigpu() -> bool:
    modules = ("torch.distributed", _C10D)
    done = [add(f"{module}.{name}", getattr(multigpu, name)) for name in multigpu.__all__ for module in modules]
    return any(done)


def _add_reduce_op() -> bool:
    members = {name: getattr(dist.ReduceOp, name) for name in dir(dist.ReduceOp) if name.isupper()}
    return add("torch.distributed.reduce_op", SimpleNamespace(**members))


def _add_six() -> bool:
    content: dict[str, Any] = {
        "PY2": False,
        "PY3": True,
        "PY37": True,
        "inf": math.inf,
        "nan": math.nan,
        "string_classes": (str, bytes),
        "int_classes": int,
        "container_abcs": collections.abc,
        "queue": queue,
        "FileNotFoundError": FileNotFoundError,
        "with_metaclass": lambda meta, *bases: meta("Base", bases, {}),
        "istuple": lambda value: isinstance(value, tuple),
    }
    return add_module("torch._six", content, _DOC)


def _add_cuda_comm() -> bool:
    content = {name: value for name, value in vars(comm).items() if not name.startswith("__")}
    return add_module("torch.cuda.comm", content, _DOC)


def _add_deprecated() -> bool:
    return add_module("torch.distributed.deprecated", {"__getattr__": functools.partial(getattr, dist)}, _DOC)


def _add_deprecated_parallel() -> bool:
    content = {"__getattr__": functools.partial(getattr, torch.nn.parallel)}
    return add_module("torch.nn.parallel.deprecated", content, _DOC)


class _BackendOfWorld:
    """`torch.distributed._backend`: equal to the name of the default group's backend, "undefined" without a group."""

    def __eq__(self, other: object) -> bool:
        return str(self) == other

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        return str(dist.get_backend()) if dist.is_initialized() else "undefined"


def _add_dist_backend() -> bool:
    # Both or neither, because scripts that find one use the other.
    if hasattr(dist, "_backend") or hasattr(dist, "dist_backend"):
        return False
    names = {name: name.lower() for name in ("UNDEFINED", "TCP", "MPI", "GLOO", "NCCL")}
    add("torch.distributed.dist_backend", SimpleNamespace(**names))
    return add("torch.distributed._backend", _BackendOfWorld())


def _plain_data() -> list[Any]:
    """Types in old checkpoints, other than tensors, that run no code when unpickled."""
    trusted: list[Any] = [argparse.Namespace, np.ndarray, np.dtype]
    trusted += {type(np.dtype(code)) for code in (*np.typecodes["AllInteger"], "?", "e", "f", "d", "F", "D")}
    rebuild_number, rebuild_array = (value.__reduce__()[0] for value in (np.float64(0), np.zeros(1)))
    for function, name in ((rebuild_number, "scalar"), (rebuild_array, "_reconstruct")):
        # Files have the module names of their time, which differ since numpy 2.
        trusted += [(function, f"numpy.{core}.multiarray.{name}") for core in ("core", "_core")]
    return trusted


# ---- calls that torch rejects ----------------------------------------------------------------------


def _let_old_calls_through() -> bool:
    return wrap(f"{_C10D}.init_process_group", _take_old_backends, alias="torch.distributed")


def _let_floats_through() -> bool:
    owners = ("torch.utils.data.DataLoader", "torch.utils.data.BatchSampler")
    done = [wrap(f"{owner}.__init__", _take_whole_floats) for owner in owners]
    return any(done)


def _let_verbose_through() -> bool:
    schedulers = {
        name: kind
        for name, kind in vars(lr_scheduler).items()
        if isinstance(kind, type) and issubclass(kind, lr_scheduler.LRScheduler)
    }
    done = [_accept_verbose(name, kind) for name, kind in schedulers.items()]
    return any(done)


def _let_data_through() -> bool:
    return Sampler.__init__ is object.__init__ and patch("torch.utils.data.Sampler.__init__", _init_sampler)


def _take_old_backends(original: Callable[..., None]) -> Callable[..., None]:
    """`init_process_group`: accept the backend "tcp", and a file without a folder."""

    def init_process_group(
        backend: str | None = None, init_method: str | None = None, *args: Any, **options: Any
    ) -> None:
        name = backend.lower() if isinstance(backend, str) else ""
        path = _whole_path(init_method)
        if name == "tcp" or path != init_method:
            _tell("init_process_group")
        if name == "tcp":
            backend = "gloo"
        return original(backend, path, *args, **options)

    return init_process_group


def _whole_path(init_method: str | None) -> str | None:
    """The path of `file://name` in the current folder; anything else unchanged."""
    if not isinstance(init_method, str) or not init_method.startswith("file://"):
        return init_method
    parts = urlsplit(init_method)
    if parts.path or not parts.netloc:
        return init_method
    return f"file://{os.path.abspath(parts.netloc)}" + (f"?{parts.query}" if parts.query else "")


def _take_plain_data(original: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.load`, which since torch 2.6 reads only tensors and plain values by default."""

    def load(f: Any, *args: Any, **options: Any) -> Any:
        start = f.tell() if hasattr(f, "tell") else None
        try:
            return original(f, *args, **options)
        except pickle.UnpicklingError as error:
            if options.get("weights_only") is not None:
                raise
            refused = str(error)
        if start is not None:
            f.seek(start)
        with torch.serialization.safe_globals(_plain_data()):
            result = original(f, *args, **options)
        named = re.search(r"GLOBAL (\S+)", refused)
        _tell("load", named[1] if named is not None else "other classes")
        return result

    return load


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
            f"{kind.__name__}: batch_size={size} is not a whole number; if it is a global batch divided by the number "
            f"of ranks, choose a multiple, or use int({size:g})"
        )
    _tell("batch_size")
    return int(size)


def _lay_out_in_order(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`Tensor.eq`, whose result has the strides of its operands since torch 1.7."""

    def eq(self: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        result = original(self, *args, **options)
        if type(result) is torch.Tensor and result.dim() == 2 and not result.is_contiguous():
            return result.contiguous()
        return result

    return eq


def _fill_with_floats(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`torch.full`, whose result has the dtype of the value since torch 1.7; only in the script."""
    folders = library_folders()

    def full(size: Any, fill_value: Any, *args: Any, **options: Any) -> torch.Tensor:
        is_untyped = options.get("dtype") is None and options.get("out") is None
        if is_untyped and isinstance(fill_value, int) and not _called_by_library(folders):
            options["dtype"] = torch.get_default_dtype()
            _tell("full")
        return original(size, fill_value, *args, **options)

    return full


def _called_by_library(folders: tuple[str, ...]) -> bool:
    """Whether the caller's caller is library code."""
    file = sys._getframe(2).f_code.co_filename
    return is_internal_file(file) or is_library_file(file, folders)


def _accept_verbose(name: str, scheduler: type) -> bool:
    """Learning rate schedulers, which until torch 2.6 printed each change with `verbose=True`."""
    own: Any = vars(scheduler).get("__init__")
    if own is None or "verbose" in inspect.signature(own).parameters:
        return False

    def make(original: Callable[..., None]) -> Callable[..., None]:
        def __init__(self: Any, *args: Any, verbose: object = _NOT_GIVEN, **options: Any) -> None:  # noqa: N807
            if verbose is not _NOT_GIVEN:
                _tell("verbose")
            original(self, *args, **options)

        return __init__

    return wrap(f"torch.optim.lr_scheduler.{name}.__init__", make)


def _init_sampler(self: Sampler[Any], data_source: object = _NOT_GIVEN) -> None:
    """Old samplers pass their data to the base class, which ignores it."""
    if data_source is not _NOT_GIVEN:
        _tell("sampler")
    super(Sampler, self).__init__()


_CHANGES: Mapping[str, Callable[[], bool]] = MappingProxyType(
    {
        "torch._six": _add_six,
        "torch.cuda.comm": _add_cuda_comm,
        "torch.distributed.deprecated": _add_deprecated,
        "torch.nn.parallel.deprecated": _add_deprecated_parallel,
        "multigpu": _add_multigpu,
        "reduce_op": _add_reduce_op,
        "dist_backend": _add_dist_backend,
        "init_process_group": _let_old_calls_through,
        "batch_size": _let_floats_through,
        "sampler": _let_data_through,
        "eq": functools.partial(wrap, "torch.Tensor.eq", _lay_out_in_order),
        "verbose": _let_verbose_through,
        "full": functools.partial(wrap, "torch.full", _fill_with_floats),
        "load": functools.partial(wrap, "torch.serialization.load", _take_plain_data, "torch"),
    }
)
