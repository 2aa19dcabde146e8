"""Makes torch.distributed know the names "lockstep" and "mpi4py", without importing torch before the user does.

`import lockstep` calls `ensure`. If torch.distributed is loaded, `ensure` registers the names at once; otherwise as
soon as it is loaded. So the launcher, which imports lockstep too, never pays for torch. mpi4py is imported when a
group over it is made; "mpi" means the same where torch has no MPI (`mpi/name.py`). On the same occasion
`dist.monitored_barrier` and a private function that sets timeouts learn of our groups (`monitored.py`, `timeouts.py`),
and the interpreter is made to wait for gloo's threads when groups or it end (`gloo_threads.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from lockstep.after_import import call_after_import
from lockstep.comm.names import BACKEND_NAME, MPI_BACKEND_NAME

__all__ = ["ensure"]

_TORCH_MODULE = "torch.distributed.distributed_c10d"

# Functions of layers above that register something with torch.
_registrars: list[Callable[[ModuleType], None]] = []


def _create(options: Any, backend_options: Any) -> Any:
    """Make a group of shared memory, for torch."""
    from lockstep.comm.creation import create

    _note(options)
    return create(options, backend_options)


def _create_mpi(options: Any, backend_options: Any) -> Any:
    """Make a group over MPI, for torch."""
    from lockstep.comm.mpi.group import create

    _note(options)
    return create(options, backend_options)


def _note(options: Any) -> None:
    """A group is about to be made."""
    from lockstep.comm import builtin_hooks

    builtin_hooks.register()
    if not options.global_ranks_in_group:  # the default group
        from lockstep.comm import torch_version

        torch_version.warn_if_untested(sys.modules["torch"].__version__, options.group_rank)


def _register(module: ModuleType) -> None:
    # Not before torch is there: the launcher and `lockstep --help` need none of them.
    from lockstep.comm import (
        gloo_threads,
        mixed,
        monitored,
        old_shutdown,
        recorder_hook,
        timeouts,
        torch_record,
        torch_version,
    )
    from lockstep.comm.mpi import name as mpi_name

    torch_version.check_oldest(sys.modules["torch"].__version__)
    backend = module.Backend
    for name, create in ((BACKEND_NAME, _create), (MPI_BACKEND_NAME, _create_mpi)):
        if name not in backend.backend_list:
            backend.register_backend(name, create, extended_api=True, devices=["cpu"])
    monitored.register(module)
    timeouts.register(module)
    mixed.register(module)
    mpi_name.register(module, MPI_BACKEND_NAME)
    torch_record.register(module)
    recorder_hook.register()
    old_shutdown.register()
    gloo_threads.register()
    for registrar in _registrars:
        registrar(module)


def _register_imported() -> None:
    _register(sys.modules[_TORCH_MODULE])


def ensure(also: Callable[[ModuleType], None] | None = None) -> None:
    """Register the backends now, or as soon as torch.distributed is there. Local; may be called again.

    Args:
        also: called with torch's module right after, this time and every other.
    """
    if also is not None and also not in _registrars:
        _registrars.append(also)
    module = sys.modules.get(_TORCH_MODULE)
    if module is not None and hasattr(module, "Backend"):
        _register(module)
    elif module is None:
        call_after_import(_TORCH_MODULE, _register_imported)
