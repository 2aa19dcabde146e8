"""Makes the backend name "mpi" refer to our MPI group if torch was built without MPI.

[Note: the name "mpi"] torch handles "mpi" in a branch of its own, which raises if torch was built without MPI, as every
wheel is. `register` runs as soon as lockstep and torch are both imported. If torch has no MPI, it makes "mpi" refer to
our group, with minimal changes; if torch has MPI, it does nothing.

* `Backend("mpi")`, through which torch passes every name, returns "mpi4py": so `new_group(backend="mpi")`,
  "cpu:mpi,cuda:nccl" and `DeviceMesh` find our group, and `dist.get_backend()` returns its actual name.
* `init_process_group("mpi")` takes rank and world size from MPI and uses the rendezvous `mpi://`, with any arguments;
  rank and world_size cause torch's own warning. torch does the same with its own MPI group.

Nothing else in torch changes; `dist.is_mpi_available()` still says what torch was built with.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

from lockstep.torch_private.patching import wrap, wrap_once

__all__ = ["register"]

_NAME = "mpi"
_C10D = "torch.distributed.distributed_c10d"
_IGNORED = ("rank", "world_size", "store")


def register(module: ModuleType, backend_name: str) -> None:
    """Make "mpi" refer to our group, unless torch has its own. Local; may be called again. See [Note: the name "mpi"].

    Args:
        module: `torch.distributed.distributed_c10d`. Names that `torch.distributed` imported from it are replaced too.
        backend_name: the name under which torch knows our group.
    """
    if module.is_mpi_available():
        return
    translating = functools.partial(_translating, plain=module.Backend.MPI, backend_name=backend_name)
    if wrap_once(f"{_C10D}.Backend.__new__", translating):
        wrap(f"{_C10D}.init_process_group", _asking_mpi, alias="torch.distributed")


def _translating(torchs_own: Callable[..., str], plain: str, backend_name: str) -> Callable[..., str]:
    """`Backend.__new__` that returns the name of our group for the plain one."""

    def __new__(cls: type, name: str) -> str:  # noqa: N807
        found = torchs_own(cls, name)
        return backend_name if found == plain else found

    return __new__


def _asking_mpi(torchs_own: Callable[..., None]) -> Callable[..., None]:
    """`init_process_group` that takes its numbers from MPI if the backend is the plain name."""
    signature = inspect.signature(torchs_own)

    def init_process_group(*args: Any, **options: Any) -> None:
        try:
            given = signature.bind(*args, **options).arguments
        except TypeError:
            given = {}  # torch itself reports what is wrong
        backend = given.get("backend")
        if not isinstance(backend, str) or backend.lower() != _NAME:
            return torchs_own(*args, **options)
        if given.get("rank", -1) != -1 or given.get("world_size", -1) != -1:
            warnings.warn(
                f"For MPI backend, world_size ({given.get('world_size', -1)}) and rank ({given.get('rank', -1)}) are "
                "ignored since they are assigned by the MPI runtime.",
                stacklevel=2,
            )
        kept = {name: value for name, value in given.items() if name not in _IGNORED}
        return torchs_own(**{**kept, "init_method": "mpi://"})

    return init_process_group
