"""A team: the connected ranks of one host, and the shared memory through which they move data.

[Note: two slots] Data moves in *transfers*. A transfer writes to the caller's slot, takes at least one step, and reads
the slots of others. Every rank counts the same transfers, and transfer c uses slot c mod 2. That is enough for no rank
ever to overwrite what a peer is still reading: a rank writes slot c mod 2 again in transfer c + 2, hence after a step
of transfer c + 1, which every peer takes only when it has finished transfer c. So no transfer needs a closing barrier.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from lockstep.errors import RankLost, SetupError, SharedMemoryError
from lockstep.log import get_logger
from lockstep.rank_status import RING
from lockstep.shm.bootstrap import Bootstrap
from lockstep.shm.control_blocks import BLOCK_BYTES, Failure, SharedControlBlocks
from lockstep.shm.doorbell import Doorbell
from lockstep.shm.large_slots import LargeSlots
from lockstep.shm.liveness import Watch
from lockstep.shm.mail_area import MailArea
from lockstep.shm.pool import CHUNK_BYTES
from lockstep.shm.processor import bytes_reduced_by_all, writes_lines_by_turns
from lockstep.shm.segment import HUGE_PAGE_BYTES, PAGE_BYTES, Segment
from lockstep.shm.sync import Overseer, PeerFailure, StepCounter, StepWaiter
from lockstep.shm.terms import common_terms

__all__ = ["Region", "SharedMemoryTeam"]


SMALL_SLOT_BYTES = 64 << 10
LARGE_SLOT_BYTES = 2 << 20
_SMALLEST_LARGE_SLOT_BYTES = 128 << 10
_VIEW_CACHE_ENTRIES = 512
_ERROR = "error:"


class Region:
    """Symmetric memory: a segment with one part per rank, of the same size and offset for all.

    Attributes:
        parts: uint8 tensors of shape (part_bytes,), one per rank, all mapped here.
        own: this rank's part.
        part_bytes: usable bytes of each part.
        words: 64-bit words for protocols over the region, `WORDS_PER_RANK` for each rank; those of rank r start at
            `word_start(r)` and are only written by r.
    """

    WORDS_PER_RANK = 2 * PAGE_BYTES // 8

    def __init__(self, segment: Segment, part_bytes: int, world_size: int, rank: int) -> None:
        self.part_bytes = part_bytes
        self.words = segment.memory.cast("q")
        stride, start = self._layout(part_bytes, world_size)
        self.parts = [segment.tensor(start + rank * stride, part_bytes) for rank in range(world_size)]
        self.own = self.parts[rank]
        self._segment = segment

    @property
    def whole(self) -> torch.Tensor:
        """The parts of all ranks, concatenated; includes the gaps between them unless parts are whole huge pages."""
        stride, start = self._layout(self.part_bytes, len(self.parts))
        return self._segment.tensor(start, stride * len(self.parts))

    @property
    def rows(self) -> torch.Tensor:
        """The parts of all ranks as a matrix, of shape (world_size, part_bytes), each row contiguous."""
        return self.whole.view(len(self.parts), -1)[:, : self.part_bytes]

    @classmethod
    def _layout(cls, part_bytes: int, world_size: int) -> tuple[int, int]:
        unit = HUGE_PAGE_BYTES if part_bytes >= HUGE_PAGE_BYTES else PAGE_BYTES
        stride = -(-part_bytes // unit) * unit
        head_bytes = PAGE_BYTES + world_size * cls.WORDS_PER_RANK * 8
        return stride, -(-head_bytes // unit) * unit

    @classmethod
    def size_bytes(cls, part_bytes: int, world_size: int) -> int:
        """Size in bytes of a segment that holds such a region."""
        stride, start = cls._layout(part_bytes, world_size)
        return start + stride * world_size

    def word_start(self, rank: int) -> int:
        """Index of the first of that rank's words."""
        return PAGE_BYTES // 8 + rank * self.WORDS_PER_RANK


def _terms(world_size: int) -> dict[str, str | int]:
    """The handshake parameters of ranks that share memory."""
    return common_terms() | {
        "small slots": SMALL_SLOT_BYTES,
        "large slots": LARGE_SLOT_BYTES,
        "tensors that every rank adds up": bytes_reduced_by_all(world_size),
        "sums handed back": writes_lines_by_turns(),
        "rings": MailArea.capacity_of(world_size),
        "blocks": BLOCK_BYTES,
        "calls kept": RING,
        "chunks": CHUNK_BYTES,
        "words of a region": Region.WORDS_PER_RANK,
    }


def _plain_waiter(blocks: SharedControlBlocks, watch: Watch) -> StepWaiter:
    return StepWaiter(blocks.words, blocks.state_words, blocks.rank, watch, blocks.gate_word)


class SharedMemoryTeam:
    """The ranks of one host, connected.

    Args:
        segment: the mapped control segment.
        rank: this rank among the team.
        world_size: number of ranks in the team.
        make_waiter: creates the object that waits for words of shared memory.

    Attributes:
        blocks: the control blocks.
        watch: monitors whether the peers are alive.
        waiter: waits for words of shared memory.
        mail_area: the memory through which messages between two ranks travel.
        is_entering: this rank has entered a collective; reset by the first step of it.
        on_arrival: called after that step, before any rank reads a byte: the flight recorder compares the ranks' calls
            there.
        near: the ranks on this rank's host: all of them.
        shares_memory: whether all ranks map the same memory: always.
        has_symmetric_memory: whether `allocate` works: always.
        interface: network interface by which this rank reaches other hosts: None.
    """

    shares_memory = True
    has_symmetric_memory = True
    interface = None

    def __init__(
        self,
        segment: Segment,
        rank: int,
        world_size: int,
        make_waiter: Callable[[SharedControlBlocks, Watch], StepWaiter] = _plain_waiter,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.near = range(world_size)
        start = SharedControlBlocks.size_bytes(world_size)
        small = segment.tensor(start, world_size * 2 * SMALL_SLOT_BYTES)
        self._small_rows = small.view(world_size, 2 * SMALL_SLOT_BYTES)
        self._small = list(self._small_rows)
        self.mail_area = MailArea(segment, start + world_size * 2 * SMALL_SLOT_BYTES, world_size)
        self._doorbell = Doorbell(self.mail_area, rank)
        self.blocks = blocks = SharedControlBlocks(segment, rank, world_size, on_end=self._sound_alarm)
        self.watch = Watch({}, on_death=self._sound_alarm)
        self.waiter = make_waiter(blocks, self.watch)
        self._step_counter = StepCounter(blocks.words, blocks.step_words, rank, self.waiter, blocks.bell_word)
        self.is_entering = False
        self.on_arrival: list[Callable[[], None]] = []
        self._transfers = 0
        self._large: LargeSlots | None = None
        self._large_rows: torch.Tensor | None = None
        self._views: dict[tuple[bool, int, torch.dtype, int], list[torch.Tensor]] = {}
        for peer in range(world_size):
            if peer != rank:
                self.watch.add(peer, blocks.identity(peer))  # from here on a death sounds the alarm

    @classmethod
    def connect(cls, bootstrap: Bootstrap) -> SharedMemoryTeam:
        """Connect the ranks of this host. Collective.

        Raises:
            RendezvousError: a rank did not come in time, or two have the same number; names it.
            RankLost: a rank came and died.
            SetupError: world sizes or handshake parameters differ; on every rank.
            SharedMemoryError: memory cannot be allocated; on every rank.
        """
        return cls._connect(bootstrap)[1]

    @classmethod
    def meet(cls, bootstrap: Bootstrap) -> Segment:
        """Connect the ranks of this host like `connect`, for a team that is created afterwards. Collective.

        Returns:
            The control segment of all of them.
        """
        segment, team = cls._connect(bootstrap)
        team.watch.close()
        return segment

    @classmethod
    def _connect(cls, bootstrap: Bootstrap) -> tuple[Segment, SharedMemoryTeam]:
        world_size = bootstrap.world_size
        slots_bytes = world_size * 2 * SMALL_SLOT_BYTES
        size_bytes = SharedControlBlocks.size_bytes(world_size) + slots_bytes + MailArea.size_bytes(world_size)
        segment = bootstrap.open_segment(size_bytes, _terms(world_size))
        team = cls(segment, bootstrap.rank, world_size)
        if bootstrap.rank == 0:
            bootstrap.forget_segment()
        try:
            team.step(bootstrap.timeout_s)
        except PeerFailure as failure:
            error = bootstrap.explain(failure, team.blocks)
            culprits = error.culprits if isinstance(error, RankLost) else ()
            team.blocks.fail(Failure(type(error).__name__, culprits, str(error)))
            team.watch.close()
            raise error from None
        return segment, team

    def _sound_alarm(self) -> None:
        """Wake the ranks that wait, in collectives and in point to point, because a rank has ended."""
        self.waiter.sound_alarm()
        self._doorbell.ring_all()

    @property
    def failures_wake_waits(self) -> bool:
        """Whether a failure wakes the threads that sleep in a wait of this group."""
        return self.waiter.failures_wake_waits

    @property
    def num_alarms(self) -> int:
        """Number of alarms of this group so far."""
        return self.waiter.num_alarms

    @property
    def overseers(self) -> list[Overseer]:
        """Called during each long wait in a step."""
        return self.waiter.overseers

    @property
    def published_waits(self) -> SharedControlBlocks:
        """Where the ranks publish their waits: their control blocks."""
        return self.blocks

    def poll(self) -> None:
        """Do nothing: peers write directly into shared memory."""

    def publish_waiting(self, text: str) -> None:
        """Let the peers know which send or receive this rank is waiting in; empty for none. Local."""
        self.mail_area.publish_waiting(self.rank, text)

    def waiting(self, rank: int) -> str:
        """The send or receive that a rank is waiting in; empty for none."""
        return self.mail_area.waiting(rank)

    def step(self, timeout_s: float) -> None:
        """Wait until every rank has taken this step. Collective.

        Raises:
            PeerFailure: a rank cannot arrive, or did not in time.
        """
        self._step_counter.step(timeout_s)
        if self.is_entering:
            self.is_entering = False
            for check in self.on_arrival:
                check()

    def prepare(self, num_bytes: int, timeout_s: float) -> int:
        """Make sure that slots for an operation on `num_bytes` exist. Collective at the first use of large ones.

        Called before the first transfer of more than `SMALL_SLOT_BYTES`, with arguments that the flight record has
        verified to be equal on all ranks.

        Returns:
            Size in bytes of the slots used by its transfers.

        Raises:
            SharedMemoryError: memory is exhausted, on every rank at their first use.
            SetupError: this rank cannot reallocate the memory that its slots had released. The others do not know.
            PeerFailure: a rank did not arrive at their first use.
        """
        if num_bytes <= SMALL_SLOT_BYTES:
            return SMALL_SLOT_BYTES
        if self._large is None:
            self.step(timeout_s)
            self._large = self._allocate_large_slots(timeout_s)
        try:
            self._large.begin()
        except SharedMemoryError as error:
            raise SetupError(str(error)) from None
        return self._large.slot_bytes

    def finish(self, num_bytes: int) -> None:
        """Mark the operation started by `prepare` as fully read by this rank. Local.

        See [Note: idle slots] in `large_slots.py`. Not called for an operation that fails: it is then unknown who is
        reading what, and the slots keep their memory.
        """
        if num_bytes > SMALL_SLOT_BYTES and self._large is not None:
            self._large.finish(self._step_counter.count)

    def _allocate_large_slots(self, timeout_s: float) -> LargeSlots:
        slot_bytes = LARGE_SLOT_BYTES
        while True:
            try:
                region = self.allocate(2 * slot_bytes, timeout_s)
            except SharedMemoryError as error:
                slot_bytes //= 2
                if slot_bytes < _SMALLEST_LARGE_SLOT_BYTES:
                    raise
                if self.rank == 0:
                    get_logger(__name__).warning(
                        "%s; trying slots of %d KiB, which are slower", error, slot_bytes >> 10
                    )
                continue
            self._large_rows = region.rows
            return LargeSlots(region.parts, slot_bytes, self.blocks)

    def allocate(self, part_bytes: int, timeout_s: float) -> Region:
        """Create a region with `part_bytes` for each rank. Collective, with the same size on all ranks.

        Raises:
            SharedMemoryError: on every rank, if any of them could not create or map it.
            PeerFailure: a rank did not come.
        """
        segment: Segment | None = None
        try:
            if self.rank == 0:
                try:
                    segment = Segment.create(Region.size_bytes(part_bytes, self.world_size))
                    if segment.size_bytes >= 2 * HUGE_PAGE_BYTES:
                        segment.use_huge_pages()
                    self.blocks.announce(segment.handle)
                except SharedMemoryError as error:
                    self.blocks.announce(f"{_ERROR}{error}")
            self.step(timeout_s)
            handle = self.blocks.announcement(0)
            if handle.startswith(_ERROR):
                # The text must not change before all have read it: the next announcement is a step away.
                self.step(timeout_s)
                raise SharedMemoryError(handle.removeprefix(_ERROR))
            if self.rank != 0:
                try:
                    segment = Segment.attach(handle, size_bytes=Region.size_bytes(part_bytes, self.world_size))
                    self.blocks.announce("mapped")
                except SharedMemoryError as error:
                    self.blocks.announce(f"{_ERROR}{error}")
            self.step(timeout_s)
            answers = [self.blocks.announcement(peer) for peer in range(1, self.world_size)]
            self.step(timeout_s)
        finally:
            if segment is not None:
                segment.release()
        for answer in answers:
            if answer.startswith(_ERROR):
                raise SharedMemoryError(answer.removeprefix(_ERROR))
        assert segment is not None
        return Region(segment, part_bytes, self.world_size, self.rank)

    def begin_transfer(self) -> int:
        """The slot to use: see [Note: two slots]. Every rank calls it once for each transfer."""
        self._transfers += 1
        return self._transfers & 1

    def realign(self) -> None:
        """Realign the count of transfers, after a step at which the ranks had called different operations.

        Some may have begun a transfer and some not. All have taken the same steps, so all count on from these; nobody
        reads the slots of the transfer that did not happen.
        """
        self._transfers = self._step_counter.count

    def views(self, slot: int, num_bytes: int, dtype: torch.dtype, numel: int) -> list[torch.Tensor]:
        """Each rank's slot as a flat tensor of `numel` elements of `dtype`.

        Args:
            slot: the return value of `begin_transfer`.
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
                sources, slot_bytes = self._large.parts, self._large.slot_bytes
            else:
                sources, slot_bytes = self._small, SMALL_SLOT_BYTES
            start, size = slot * slot_bytes, numel * dtype.itemsize
            views = [source[start : start + size].view(dtype) for source in sources]
            if len(self._views) >= _VIEW_CACHE_ENTRIES:
                self._views.clear()
            self._views[key] = views
        return views

    def rows(self, num_bytes: int, slot: int, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """Each rank's slot as a row of a matrix, of shape (world_size, numel), each row contiguous. Like `views`."""
        if num_bytes > SMALL_SLOT_BYTES:
            assert self._large_rows is not None, "prepare() comes before the first transfer"
            rows = self._large_rows
        else:
            rows = self._small_rows
        start = slot * (rows.shape[1] // 2)
        return rows[:, start : start + numel * dtype.itemsize].view(dtype)

    def close(self) -> None:
        """Leave in good order. Local; peers that still wait for this rank raise RankLost."""
        self.blocks.leave()
        self.waiter.close()
        self.watch.close()
        self._views.clear()
        if self._large is not None:
            self._large.close()

    def disown(self) -> None:
        """In a forked child: release what belongs to the parent. Local."""
        self.watch.close()
