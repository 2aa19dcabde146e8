"""What ranks understood of a step, each by itself, and must have understood alike.

A rank that weights a batch by its size, or by its tag, claims how large the batch is. On a lockstep group of one host
the claims are part of the description that the averaging compares anyhow. On other groups they cost a small collective,
so only claims that go by a size are compared there. A GPU is not waited for: the comparison of one step is looked
at when it is there, at the end of a later one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lockstep.comm.flight import fingerprint
from lockstep.errors import CollectiveMismatch

__all__ = ["ADVICE", "NO_CLAIMS", "ClaimCheck", "Claims", "join_claims"]

ADVICE = (
    "If the ranks came with different numbers of rows, say how many samples the loss on each is the mean over: `with "
    "model.samples(n):`"
)

_MAX_SHOWN = 4


@dataclass(frozen=True)
class Claims:
    """What one rank claims of a step.

    Attributes:
        text: for people, and compared; "" for nothing.
        is_certain: every claim comes from a tag, none from a size.
    """

    text: str = ""
    is_certain: bool = True


NO_CLAIMS = Claims()


def join_claims(claims: dict[str, bool]) -> Claims:
    """Those of one step: text -> whether it is certain. The order of forward passes does not count."""
    if not claims:
        return NO_CLAIMS
    texts = sorted(claims)
    if len(texts) > _MAX_SHOWN:
        rest = texts[_MAX_SHOWN:]
        texts[_MAX_SHOWN:] = [f"{len(rest)} more ({fingerprint(str(rest)):x})"]
    return Claims(", ".join(texts), all(claims.values()))


class ClaimCheck:
    """Compares claims over a group that does not compare descriptions.

    Args:
        group: who compares.
        device: where the group takes small tensors from.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        # Of a GPU: the claim, the compared values on the host, and the event behind their copy.
        self._pending: list[tuple[str, torch.Tensor, torch.cuda.Event]] = []

    def begin(self, claims: Claims) -> Callable[[], None]:
        """Begin to compare one step's claims, while other things are waited for. Collective.

        Returns:
            What waits for the result. It raises CollectiveMismatch if ranks claim different things, of this step or of
            one shortly before.
        """
        while self._pending and self._pending[0][2].query():  # type: ignore[no-untyped-call]
            text, values, _ = self._pending.pop(0)
            self._judge(text, values)
        if claims.is_certain:
            return lambda: None
        value = fingerprint(claims.text)
        # Equal on all ranks if the greatest is the least.
        both = torch.tensor([value, -value], dtype=torch.int64, device=self._device)
        work = dist.all_reduce(both, dist.ReduceOp.MAX, group=self._group, async_op=True)

        def end() -> None:
            work.wait()
            if self._device.type == "cuda":
                self._judge_later(claims.text, both)
            else:
                self._judge(claims.text, both)

        return end

    def _judge_later(self, text: str, both: torch.Tensor) -> None:
        values = torch.empty(2, dtype=torch.int64, pin_memory=True)
        values.copy_(both, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._pending.append((text, values, event))

    def _judge(self, text: str, values: torch.Tensor) -> None:
        greatest, least = values.tolist()
        if greatest != -least:
            raise CollectiveMismatch(
                f"the ranks averaged gradients of different batches: rank {dist.get_rank()} took {text}, another rank "
                f"something else. Every rank must take the batches of a lockstep.DataLoader in the same order. {ADVICE}"
            )
