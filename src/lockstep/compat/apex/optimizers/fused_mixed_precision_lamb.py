"""`apex.optimizers.FusedMixedPrecisionLamb`: can be imported, but not used."""

from __future__ import annotations

from typing import Any

from lockstep.errors import LockstepError

__all__ = ["FusedMixedPrecisionLamb"]


class FusedMixedPrecisionLamb:
    """Not supported.

    Raises:
        LockstepError: always; names the alternative.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        raise LockstepError(
            "apex.optimizers.FusedMixedPrecisionLamb is not supported by lockstep.compat.apex; use FusedLAMB with "
            'amp.initialize(opt_level="O2")'
        )
