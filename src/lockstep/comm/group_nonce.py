"""A nonce on which the ranks of a group agree, so that nothing is believed that was sealed for another group.

[Note: nonce of a group] A token that a user has set may be that of several jobs, each of which has groups of the same
names. So that what somebody has recorded of one is not believed in the next, the ranks of the default group agree on a
nonce first, by a rendezvous over their store, and the seals of all groups that are made of it cover the nonce. Without
a token everybody can make seals, and there is no nonce.
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
        store: of the group, without a nonce.
        rank: this rank in the group.
        ranks: the global rank of each rank of the group.
        timeout_s: until a rank that does not come is an error.
        first_key: where ranks that have no token, and so no nonce, look first. They learn there that others have one,
            and the others that they have none.

    Returns:
        Empty where there is no token.

    Raises:
        RendezvousError: a rank did not come in time, or has another token or none, or two came as the same, or the
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
