"""Registers the names "lockstep" and "mpi4py" with torch.distributed, without importing torch before the user does.

`import lockstep` calls `ensure`. If torch.distributed is loaded, `ensure` registers the names at once; otherwise as
soon as it is loaded. So the launcher, which imports lockstep too, never has to load torch. mpi4py is imported when a
group over it is created; "mpi" means the same if torch has no MPI (`mpi/name.py`). At the same time functions of torch
that only support its own groups are adapted to ours (`torch_functions.py`), and the interpreter is made to wait for
gloo's threads when groups are destroyed or it exits (`gloo_threads.py`).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from lockstep.after_import import call_after_import
from lockstep.comm.names import BACKEND_NAME, MPI_BACKEND_NAME

__all__ = ["create", "ensure"]

_TORCH_MODULE = "torch.distributed.distributed_c10d"

# Functions of higher layers that register something with torch.
_registrars: list[Callable[[ModuleType], None]] = []


def create(options: Any, _backend_options: Any) -> Any:
    """Create the `lockstep` group that torch asks for, alone or with underlying groups for other devices.

    Args:
        options: torch's `_DistributedBackendOptions`.

    Raises:
        BackendUnavailable: processes on this system cannot share memory; says why.
        SetupError: the rank is not below the world size.
    """
    from lockstep.comm.backend import LockstepProcessGroup, make_group
    from lockstep.comm.mixed import kinds_beside
    from lockstep.errors import BackendUnavailable
    from lockstep.shm.support import lack

    _note(options)
    missing = lack()
    if missing is not None:
        raise BackendUnavailable(f"the lockstep backend cannot be used here: {missing}. Use gloo, or lockstep.init()")
    beside = kinds_beside(BACKEND_NAME)
    if not beside:
        return make_group(LockstepProcessGroup, options)
    from lockstep.comm.mixed_group import MixedProcessGroup  # rarely needed, and it wraps fifty methods

    return make_group(functools.partial(MixedProcessGroup, beside), options)


def _create_mpi(options: Any, backend_options: Any) -> Any:
    """Create a group over MPI, for torch."""
    from lockstep.comm.mpi.group import create

    _note(options)
    return create(options, backend_options)


def _note(options: Any) -> None:
    """Called when a group is about to be created."""
    from lockstep.comm import torch_functions

    torch_functions.register_hooks_of_ddp()
    if not options.global_ranks_in_group:  # the default group
        from lockstep.comm import torch_version

        torch_version.warn_if_untested(sys.modules["torch"].__version__, options.group_rank)


def _register(module: ModuleType) -> None:
    # Only once torch is loaded: the launcher and `lockstep --help` need none of these.
    from lockstep.comm import gloo_threads, mixed, torch_functions, torch_record, torch_version
    from lockstep.comm.mpi import name as mpi_name

    torch_version.check_oldest(sys.modules["torch"].__version__)
    backend = module.Backend
    for name, make in ((BACKEND_NAME, create), (MPI_BACKEND_NAME, _create_mpi)):
        if name not in backend.backend_list:
            backend.register_backend(name, make, extended_api=True, devices=["cpu"])
    torch_functions.register()
    mixed.register(module)
    mpi_name.register(module, MPI_BACKEND_NAME)
    torch_record.register(module)
    gloo_threads.register()
    for registrar in _registrars:
        registrar(module)


def _register_imported() -> None:
    _register(sys.modules[_TORCH_MODULE])


def ensure(also: Callable[[ModuleType], None] | None = None) -> None:
    """Register the backends now, or as soon as torch.distributed is loaded. Local; may be called again.

    Args:
        also: called with torch's module after each registration, from now on.
    """
    if also is not None and also not in _registrars:
        _registrars.append(also)
    module = sys.modules.get(_TORCH_MODULE)
    if module is not None and hasattr(module, "Backend"):
        _register(module)
    elif module is None:
        call_after_import(_TORCH_MODULE, _register_imported)
