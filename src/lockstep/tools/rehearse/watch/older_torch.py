"""Calls that succeed only because of Lockstep's shims for old scripts.

Records `older` (`error`: what plain torch lacks or rejects).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from lockstep.compat.legacy import multigpu, patches
from lockstep.compat.legacy.signs import MODULES
from lockstep.tools.rehearse.devices.marks import note_on, storage_of
from lockstep.tools.rehearse.patching import replace, wrap
from lockstep.tools.rehearse.sites import chain, is_own
from lockstep.tools.rehearse.watch.recorder import recorder

__all__ = ["install"]

_LAYOUT = "_lockstep_plain_layout"
_ERRORS = {
    "init_process_group": 'torch has no backend "tcp", and needs the whole path of a file:// URL',
    "batch_size": "torch accepts no float as batch_size",
    "sampler": "torch's Sampler accepts no data_source",
    "verbose": "torch's schedulers take no verbose=",
    "multigpu": "torch.distributed has no {name}",
    "reduce_op": "torch.distributed has no reduce_op",
    "dist_backend": "torch.distributed has no dist_backend and no _backend",
    "eq": "the result of Tensor.eq lies in memory as its operands do since torch 1.7: {name}",
    "full": "torch.full of a whole number gives whole numbers since torch 1.7",
    "load": "torch.load reads tensors and plain values alone: the file holds {name}",
}

_seen: set[Any] = set()


def _note(change: str, name: str = "") -> None:
    sites = chain()
    if sites and (change, sites) not in _seen:
        _seen.add((change, sites))
        error = f"torch has no module {change}" if change in MODULES else _ERRORS[change].format(name=name)
        recorder.note("older", sites, error=error)


class _Module(ModuleType):
    """A module that torch lacks. Taking a name from it is recorded, importing it alone is not."""

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("__"):
            _note(ModuleType.__getattribute__(self, "__name__"))
        return ModuleType.__getattribute__(self, name)


def _watch_members(name: str) -> None:
    """Record uses of members of `torch.distributed.name` if torch itself lacks it."""

    class WatchedNames(SimpleNamespace):
        def __getattribute__(self, member: str) -> Any:
            if not member.startswith("__"):
                _note(name)
            return SimpleNamespace.__getattribute__(self, member)

    if type(names := vars(dist).get(name)) is SimpleNamespace:
        replace(dist, name, WatchedNames(**vars(names)))


def _noting(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            _note("multigpu", name)
            return original(*args, **kwargs)

        return call

    return make


def _watch_names(changes: Iterable[str]) -> None:
    for name in set(MODULES).intersection(changes):
        module = sys.modules.get(name)
        if type(module) is ModuleType and (module.__doc__ or "").endswith(f"added by {patches.__name__}."):
            module.__class__ = _Module
    _watch_members("reduce_op")
    _watch_members("dist_backend")
    for name in multigpu.__all__:
        if getattr(dist, name, None) is getattr(multigpu, name):
            wrap(dist, name, _noting(name))


# ---- results of Tensor.eq ----------------------------------------------------------------------------


def _remember_layout(original: Callable[..., Any]) -> Callable[..., Any]:
    def eq(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if is_own(sys._getframe(1)) and type(result) is torch.Tensor and result.dim() == 2:
            plain = torch.eq(self, *args, **kwargs).stride()  # The shim leaves `torch.eq` unchanged.
            if plain != result.stride():
                note_on(storage_of(result), _LAYOUT, (result.stride(), plain))
        return result

    return eq


def _check_view(original: Callable[..., Any]) -> Callable[..., Any]:
    def view(self: torch.Tensor, *shape: Any, **kwargs: Any) -> Any:
        layout = getattr(storage_of(self), _LAYOUT, None)
        if layout is not None and self.stride() == layout[0]:  # The whole result, or some rows or columns.
            plain = torch.empty_strided(self.size(), layout[1], dtype=self.dtype, device="meta")
            try:
                original(plain, *shape, **kwargs)
            except RuntimeError as error:
                _note("eq", str(error).splitlines()[0].rstrip("."))
        return original(self, *shape, **kwargs)

    return view


def _watch(changes: list[str]) -> None:
    _watch_names(changes)
    if "eq" in changes:
        wrap(torch.Tensor, "eq", _remember_layout)
        wrap(torch.Tensor, "view", _check_view)


def install() -> None:
    """Watch the changes for old scripts, which in a spawned process are only made later."""
    patches.listeners.append(_note)
    patches.on_install(_watch)
