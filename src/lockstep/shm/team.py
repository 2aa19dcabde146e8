"""The ranks of one host that share memory: how they meet, and the memory they move data through.

[Note: two slots] Data moves in *transfers*. A transfer writes to the caller's slot, takes at
least one step, and reads the slots of others. Every rank counts the same transfers, and
transfer c uses slot c mod 2. That is enough for no rank ever to overwrite what a peer still
reads: a rank writes slot c mod 2 again in transfer c + 2, hence after a step of transfer c + 1, which every
peer takes only when it has done with transfer c. So no transfer needs a closing barrier.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch

from lockstep.errors import RankLost, RendezvousError, SharedMemoryError
from lockstep.log import get_logger
from lockstep.shm.board import Board
from lockstep.shm.liveness import Watch, own_identity
from lockstep.shm.segment import HUGE_PAGE_BYTES, PAGE_BYTES, Segment
from lockstep.shm.sync import Channel, PeerState, Waiter

__all__ = ["Region", "Store", "Team"]

_logger = get_logger(__name__)

SMALL_SLOT_BYTES = 64 << 10
LARGE_SLOT_BYTES = 2 << 20
_SMALLEST_LARGE_SLOT_BYTES = 128 << 10
_VIEW_CACHE_ENTRIES = 512


class Store(Protocol):
    """What a team needs of a torch store to meet."""

    def set(self, key: str, value: str) -> None:
        """Publish a value."""

    def get(self, key: str) -> bytes:
        """Read a value, waiting for it up to the store's timeout."""


class Region:
    """A segment with one part per rank, the same size and offset for all: symmetric memory.

    Attributes:
        parts: uint8 tensors of shape (part_bytes,), one per rank, all mapped here.
        part_bytes: usable bytes of each part.
        words: 64-bit words for the region's own protocol, `WORDS_PER_RANK` for each rank;
            those of rank r start at `word_start(r)` and are written by r only.
    """

    WORDS_PER_RANK = 2 * PAGE_BYTES // 8

    def __init__(self, segment: Segment, part_bytes: int, world_size: int) -> None:
        self.part_bytes = part_bytes
        self.words = segment.memory.cast("q")
        stride, start = self._layout(part_bytes, world_size)
        self.parts = [segment.tensor(start + rank * stride, part_bytes) for rank in range(world_size)]
        self._segment = segment

    @classmethod
    def _layout(cls, part_bytes: int, world_size: int) -> tuple[int, int]:
        unit = HUGE_PAGE_BYTES if part_bytes >= HUGE_PAGE_BYTES else PAGE_BYTES
        stride = -(-part_bytes // unit) * unit
        head_bytes = PAGE_BYTES + world_size * cls.WORDS_PER_RANK * 8
        return stride, -(-head_bytes // unit) * unit

    @classmethod
    def size_bytes(cls, part_bytes: int, world_size: int) -> int:
        """Bytes of a segment that holds such a region."""
        stride, start = cls._layout(part_bytes, world_size)
        return start + stride * world_size

    def word_start(self, rank: int) -> int:
        """Index of the first of that rank's words."""
        return PAGE_BYTES // 8 + rank * self.WORDS_PER_RANK


class Team:
    """The ranks of one host, connected.

    Args:
        segment: the mapped control segment.
        rank: this rank among the team.
        world_size: number of ranks in the team.

    Attributes:
        board: the control blocks.
        watch: liveness of the peers.
        waiter: how to wait for words of shared memory.
        after_step: called once after the next step, then forgotten; the flight record sets it
            to compare what the ranks came for before anybody reads a byte.
    """

    def __init__(self, segment: Segment, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.board = Board(segment, rank, world_size)
        peers = {peer: self.board.identity(peer) for peer in range(world_size) if peer != rank}
        self.watch = Watch(peers)
        self.waiter = Waiter(self.board.words, self.board.state_words, rank, self.watch)
        self._channel = Channel(self.board.words, self.board.step_words, rank, self.waiter)
        self.after_step: Callable[[], None] | None = None
        self._transfers = 0
        start = Board.size_bytes(world_size)
        self._small = [
            segment.tensor(start + peer * 2 * SMALL_SLOT_BYTES, 2 * SMALL_SLOT_BYTES) for peer in range(world_size)
        ]
        self._large: Region | None = None
        self._large_slot_bytes = LARGE_SLOT_BYTES
        self._views: dict[tuple[bool, int, torch.dtype, int], list[torch.Tensor]] = {}

    @classmethod
    def connect(
        cls, store: Store, rank: int, world_size: int, timeout_s: float, name_of: Callable[[int], str] = str
    ) -> Team:
        """Meet the other ranks of this host. Collective.

        Args:
            store: where rank 0 publishes its segment.
            rank: this rank, 0 … world_size-1.
            world_size: number of ranks that will come.
            timeout_s: seconds to wait for the last of them.
            name_of: how to call a rank in an error message.

        Raises:
            RendezvousError: a rank did not come in time; names it.
            RankLost: a rank came and died.
            SharedMemoryError: the memory cannot be had.
        """
        if rank == 0:
            segment = Segment.create(Board.size_bytes(world_size) + world_size * 2 * SMALL_SLOT_BYTES)
            store.set("segment", segment.handle)
        else:
            try:
                handle = store.get("segment").decode()
            except RuntimeError as error:
                raise RendezvousError(
                    f"{name_of(rank)} waited {timeout_s:g} s for {name_of(0)}, which opens the shared memory, and it "
                    f"did not come. Is it running? ({str(error).splitlines()[0]})"
                ) from None
            segment = Segment.attach(handle)
        board = Board(segment, rank, world_size)
        board.introduce(own_identity())
        _await_ready(board, timeout_s, name_of)
        segment.release()
        return cls(segment, rank, world_size)

    def step(self, timeout_s: float) -> None:
        """Wait until every rank has taken this step. Collective.

        Raises:
            PeerTrouble: a rank cannot come, or did not come in time.
        """
        self._channel.step(timeout_s)
        check = self.after_step
        if check is not None:
            self.after_step = None
            check()

    def slot_bytes(self, num_bytes: int) -> int:
        """Bytes of the slots that a transfer of `num_bytes` should go through."""
        return SMALL_SLOT_BYTES if num_bytes <= SMALL_SLOT_BYTES else self._large_slot_bytes

    def prepare(self, num_bytes: int, timeout_s: float) -> None:
        """Make sure that slots for transfers of `num_bytes` exist. Collective on first use of large ones.

        Called with what the flight record verifies to be equal on all ranks, before the first transfer.
        """
        if num_bytes > SMALL_SLOT_BYTES and self._large is None:
            self.step(timeout_s)
            self._large = self._allocate_large_slots(timeout_s)

    def _allocate_large_slots(self, timeout_s: float) -> Region:
        slot_bytes = LARGE_SLOT_BYTES
        while True:
            try:
                region = self.allocate(2 * slot_bytes, timeout_s)
            except SharedMemoryError as error:
                slot_bytes //= 2
                if slot_bytes < _SMALLEST_LARGE_SLOT_BYTES:
                    raise
                if self.rank == 0:
                    _logger.warning("%s; trying slots of %d KiB, which are slower", error, slot_bytes >> 10)
                continue
            self._large_slot_bytes = slot_bytes
            return region

    def allocate(self, part_bytes: int, timeout_s: float) -> Region:
        """A new region with `part_bytes` for each rank. Collective, with the same size on all ranks.

        Raises:
            SharedMemoryError: on every rank, if any of them could not make or map it.
            PeerTrouble: a rank did not come.
        """
        segment: Segment | None = None
        if self.rank == 0:
            try:
                segment = Segment.create(Region.size_bytes(part_bytes, self.world_size))
                if segment.size_bytes >= 2 * HUGE_PAGE_BYTES:
                    segment.use_huge_pages()
                self.board.announce(segment.handle)
            except SharedMemoryError as error:
                self.board.announce(f"error:{error}")
        self.step(timeout_s)
        handle = self.board.announcement(0)
        if handle.startswith("error:"):
            # The text may not change before all have read it: the next announcement is a step away.
            self.step(timeout_s)
            raise SharedMemoryError(handle.removeprefix("error:"))
        if self.rank != 0:
            try:
                segment = Segment.attach(handle)
                self.board.announce("mapped")
            except SharedMemoryError as error:
                self.board.announce(f"error:{error}")
        self.step(timeout_s)
        answers = [self.board.announcement(peer) for peer in range(1, self.world_size)]
        self.step(timeout_s)
        if segment is not None:
            segment.release()
        for answer in answers:
            if answer.startswith("error:"):
                raise SharedMemoryError(answer.removeprefix("error:"))
        assert segment is not None
        return Region(segment, part_bytes, self.world_size)

    def begin_transfer(self) -> int:
        """The slot to use: see [Note: two slots]. Every rank calls it once for each transfer."""
        self._transfers += 1
        return self._transfers & 1

    def realign(self) -> None:
        """After a step at which the ranks found that they came for different things.

        Some may have begun a transfer and some not. All have taken the same steps, so all count
        on from there; nobody reads the slots of the transfer that did not happen.
        """
        self._transfers = self._channel.count

    def views(self, slot: int, num_bytes: int, dtype: torch.dtype, numel: int) -> list[torch.Tensor]:
        """Each rank's slot as a flat tensor of `numel` elements of `dtype`.

        Args:
            slot: what `begin_transfer` returned.
            num_bytes: size of the whole operation, which decides between small and large slots.
            dtype: element type of the views.
            numel: elements of each view.
        """
        is_large = num_bytes > SMALL_SLOT_BYTES
        key = (is_large, slot, dtype, numel)
        views = self._views.get(key)
        if views is None:
            if is_large:
                assert self._large is not None, "prepare() comes before the first transfer"
                sources, slot_bytes = self._large.parts, self._large_slot_bytes
            else:
                sources, slot_bytes = self._small, SMALL_SLOT_BYTES
            start, size = slot * slot_bytes, numel * dtype.itemsize
            views = [source[start : start + size].view(dtype) for source in sources]
            if len(self._views) >= _VIEW_CACHE_ENTRIES:
                self._views.clear()
            self._views[key] = views
        return views

    def close(self) -> None:
        """Leave in good order. Local; peers that still wait for this rank raise RankLost."""
        self.board.leave()
        self.waiter.closed = True
        self.watch.close()
        self._views.clear()


def _await_ready(board: Board, timeout_s: float, name_of: Callable[[int], str]) -> None:
    """Wait until every rank has introduced itself."""
    start = time.monotonic()
    watch = Watch({})
    known: set[int] = {board.rank}
    try:
        while True:
            for rank in range(board.world_size):
                if rank not in known and board.state(rank) != PeerState.ABSENT:
                    watch.add(rank, board.identity(rank))
                    known.add(rank)
            if len(known) == board.world_size:
                return
            dead = sorted(watch.dead())
            if dead:
                names = ", ".join(name_of(rank) for rank in dead)
                raise RankLost(f"{names} died while the group was being made", tuple(dead))
            waited_s = time.monotonic() - start
            if waited_s > timeout_s:
                missing = ", ".join(name_of(rank) for rank in range(board.world_size) if rank not in known)
                raise RendezvousError(f"{missing} did not come within {timeout_s:g} s of {name_of(board.rank)}")
            time.sleep(min(0.001, waited_s / 10))
    finally:
        watch.close()
