"""Apex's caller of the kernels of `amp_C`, which do not exist here."""

from __future__ import annotations

from typing import Any, NoReturn

from lockstep.errors import LockstepError

__all__ = ["MultiTensorApply"]


class MultiTensorApply:
    """Never available; scripts check `available` before they use it.

    Args:
        chunk_size: number of elements per kernel block.
    """

    available = False

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(self, op: Any, noop_flag_buffer: Any, tensor_lists: Any, *args: Any) -> NoReturn:
        """Refused.

        Raises:
            LockstepError: always.
        """
        raise LockstepError(
            "apex.multi_tensor_apply calls kernels of amp_C, which lockstep.compat.apex does not have "
            "(multi_tensor_applier.available is False): use torch._foreach_mul_ etc."
        )
