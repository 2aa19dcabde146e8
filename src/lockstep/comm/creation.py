"""Makes the `lockstep` group that torch asks for: alone, or with groups of others behind it."""

from __future__ import annotations

import functools
from typing import Any

from lockstep.comm.backend import LockstepProcessGroup, make_group
from lockstep.comm.mixed import kinds_beside
from lockstep.comm.names import BACKEND_NAME
from lockstep.errors import BackendUnavailable
from lockstep.shm.support import lack

__all__ = ["create"]


def create(options: Any, _backend_options: Any) -> LockstepProcessGroup:
    """Make a group, for torch; `options` is its `_DistributedBackendOptions`.

    Raises:
        BackendUnavailable: processes of this system cannot share memory; says why.
        SetupError: there is no such rank in a group of that size.
    """
    missing = lack()
    if missing is not None:
        raise BackendUnavailable(f"the lockstep backend cannot be used here: {missing}. Use gloo, or lockstep.init()")
    beside = kinds_beside(BACKEND_NAME)
    if not beside:
        return make_group(LockstepProcessGroup, options)
    from lockstep.comm.mixed_group import MixedProcessGroup  # needed by few, and it changes fifty methods

    return make_group(functools.partial(MixedProcessGroup, beside), options)
