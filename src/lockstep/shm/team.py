"""A team: the connected ranks of one host, and the shared memory through which they move data.

[Note: two slots] Data moves in *transfers*. A transfer writes to the caller's slot, takes at
least one step, and reads the slots of others. Every rank counts the same transfers, and
transfer c uses slot c mod 2. That is enough for no rank ever to overwrite what a peer still
reads: a rank writes slot c mod 2 again in transfer c + 2, hence after a step of transfer c + 1, which every
peer takes only when it has done with transfer c. So no transfer needs a closing barrier.
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
    """A segment with one part per rank, the same size and offset for all: symmetric memory.

    Attributes:
        parts: uint8 tensors of shape (part_bytes,), one per rank, all mapped here.
        own: the part of this rank.
        part_bytes: usable bytes of each part.
        words: 64-bit words for the region's own protocol, `WORDS_PER_RANK` for each rank;
            those of rank r start at `word_start(r)` and are written by r only.
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
        """The parts of all ranks, one after the other; what lies between them too, unless they are whole huge pages."""
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
        """Bytes of a segment that holds such a region."""
        stride, start = cls._layout(part_bytes, world_size)
        return start + stride * world_size

    def word_start(self, rank: int) -> int:
        """Index of the first of that rank's words."""
        return PAGE_BYTES // 8 + rank * self.WORDS_PER_RANK


def _terms(world_size: int) -> dict[str, str | int]:
    """What ranks that share memory must have alike."""
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
        make_waiter: makes what waits for words of shared memory.

    Attributes:
        blocks: the control blocks.
        watch: liveness of the peers.
        waiter: waits for words of shared memory.
        mail_area: the memory through which messages between two ranks travel.
        is_entering: this rank has entered a collective; the first step of it resets this.
        on_arrival: called after that step, before anybody reads a byte: the flight recorder compares there what the
            ranks came for.
        near: the ranks of this rank's host: all of them.
        shares_memory: whether all ranks map the same memory: always.
        has_symmetric_memory: whether `allocate` works: always.
        interface: the network interface by which this rank reaches other hosts: none.
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
                self.watch.add(peer, blocks.identity(peer))  # From here on a death sounds the alarm.

    @classmethod
    def connect(cls, bootstrap: Bootstrap) -> SharedMemoryTeam:
        """Connect the ranks of this host. Collective.

        Raises:
            RendezvousError: a rank did not come in time, or two came as the same; names it.
            RankLost: a rank came and died.
            SetupError: ranks were given different world sizes, or go by different terms; on every rank.
            SharedMemoryError: the memory cannot be had; on every rank.
        """
        return cls._connect(bootstrap)[1]

    @classmethod
    def meet(cls, bootstrap: Bootstrap) -> Segment:
        """Connect the ranks of this host as `connect` does, for a team that is made afterwards. Collective.

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
        """How many alarms of this group there have been."""
        return self.waiter.num_alarms

    @property
    def overseers(self) -> list[Overseer]:
        """Look at each long wait in a step."""
        return self.waiter.overseers

    @property
    def published_waits(self) -> SharedControlBlocks:
        """Where the ranks publish their waits: their control blocks."""
        return self.blocks

    def poll(self) -> None:
        """Do nothing: what peers say, they write into memory of this rank."""

    def publish_waiting(self, text: str) -> None:
        """Let the peers know which send or receive this rank waits in; empty for none. Local."""
        self.mail_area.publish_waiting(self.rank, text)

    def waiting(self, rank: int) -> str:
        """The send or receive that a rank waits in; empty for none."""
        return self.mail_area.waiting(rank)

    def step(self, timeout_s: float) -> None:
        """Wait until every rank has taken this step. Collective.

        Raises:
            PeerFailure: a rank cannot come, or did not come in time.
        """
        self._step_counter.step(timeout_s)
        if self.is_entering:
            self.is_entering = False
            for check in self.on_arrival:
                check()

    def prepare(self, num_bytes: int, timeout_s: float) -> int:
        """Make sure that slots for an operation on `num_bytes` exist. Collective on first use of large ones.

        Called with what the flight record verifies to be equal on all ranks, before the first transfer of more than
        `SMALL_SLOT_BYTES`.

        Returns:
            Bytes of the slots that its transfers go through.

        Raises:
            SharedMemoryError: there is no memory for them, on every rank at their first use.
            SetupError: this rank cannot have the memory again that its slots had given back. The others do not know.
            PeerFailure: a rank did not come to their first use.
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
        """Say that this rank has read all that it will of the operation that `prepare` began. Local.

        See [Note: idle slots] in `large_slots.py`. An operation that fails does not come here: who reads what is
        not known then, and the slots keep their memory.
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
        """A new region with `part_bytes` for each rank. Collective, with the same size on all ranks.

        Raises:
            SharedMemoryError: on every rank, if any of them could not make or map it.
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
                # The text may not change before all have read it: the next announcement is a step away.
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
        """Count transfers alike again, after a step at which the ranks found that they had called different operations.

        Some may have begun a transfer and some not. All have taken the same steps, so all count
        on from there; nobody reads the slots of the transfer that did not happen.
        """
        self._transfers = self._step_counter.count

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
        """Each rank's slot as a row of a matrix, of shape (world_size, numel), each row contiguous. As `views`."""
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
        """In a forked child: let go of what belongs to the parent. Local."""
        self.watch.close()
