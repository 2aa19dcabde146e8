"""A nonce on which the ranks of a group agree, so that values signed for another group are rejected.

[Note: nonce of a group] Several jobs may use the same user-supplied token, and have groups of the same names. So that
values recorded from one job cannot be replayed in the next, the ranks of the default group first agree on a nonce, in a
rendezvous over their store; the MACs of it and of all groups derived from it cover the nonce. Without a token anyone
can compute MACs, and there is no nonce.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from lockstep.comm.group_setup import BootstrapStore
from lockstep.errors import RendezvousError
from lockstep.rendezvous.meeting import Meeting
from lockstep.secret import new_nonce, secret_of_ranks
from lockstep.shm.bootstrap import lost_store, not_come
from lockstep.torch_private.stores import Store

__all__ = ["agree_on_nonce"]

_LONGEST_NAP_S = 0.02


def agree_on_nonce(
    store: BootstrapStore, rank: int, ranks: Sequence[int], timeout_s: float, first_key: str | None = None
) -> str:
    """The nonce of a group: [Note: nonce of a group]. Collective.

    Args:
        store: the group's store, still without a nonce.
        rank: this rank in the group.
        ranks: the global rank of each rank of the group.
        timeout_s: seconds until a missing rank is an error.
        first_key: the key that ranks without a token, and thus without a nonce, read first. They learn there that
            others have a token, and the others learn that they have none.

    Returns:
        Empty without a token.

    Raises:
        RendezvousError: a rank did not come in time, has another token or none, or two came with the same rank, or the
            store is gone.
    """
    if not secret_of_ranks().is_given:
        return ""
    if len(ranks) == 1:
        return new_nonce()
    start_s = time.monotonic()

    def explain(missing: Iterable[int]) -> str:
        return str(not_come(list(missing) or [0], rank, ranks, timeout_s))

    def pause(_store: Store, _key: str, longest_s: float) -> None:
        time.sleep(min(_LONGEST_NAP_S, (time.monotonic() - start_s) / 10, longest_s))

    def watch() -> tuple[str, str] | None:
        why = None if first_key is None else store.find_other_token(first_key)
        return None if first_key is None or why is None else (first_key, why)

    meeting = Meeting(store.bare("meeting"), len(ranks), timeout_s, "the store", explain, pause, watch)
    try:
        if rank != 0:
            return meeting.join(rank)
        if first_key is not None:
            store.set(first_key, "")
        return meeting.admit_all(lambda: None if first_key is None else store.delete(first_key))
    except RendezvousError:
        raise
    except RuntimeError as error:
        raise lost_store(ranks[rank], error) from None
