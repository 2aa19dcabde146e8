"""The contract: the interface that a backend implements so that its ranks form a process group.

A backend is a team, its algorithms, and a mailbox for point to point (`lockstep.shm.base_mailbox`). The engine, the
flight recorder and point to point use only these protocols. There are three backends: shared memory of one host
(`lockstep.shm`), several hosts (`lockstep.comm.hosts`), MPI (`lockstep.comm.mpi`). Optional abilities are properties,
so that no code asks which backend it has.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from lockstep.errors import InputError
from lockstep.shm.control_blocks import Failure, Record
from lockstep.shm.kernels import Kernel
from lockstep.shm.liveness import PeerIdentity, Watch
from lockstep.shm.sync import Overseer, PeerState
from lockstep.shm.team import Region

__all__ = ["Algorithms", "ControlBlocks", "PublishedWaits", "Team", "Waiter"]


class Waiter(Protocol):
    """Waits for the ranks of a team."""

    @property
    def spins(self) -> int:
        """How often a wait polls before it yields the core."""

    def close(self) -> None:
        """End this rank's waits, current and future. Local; any thread may call it."""


class ControlBlocks(Protocol):
    """One block for each rank, with the records of its calls and its state. Each rank writes only its own."""

    @property
    def words(self) -> memoryview:
        """The memory of the records, as 64-bit words."""

    @property
    def record_words(self) -> Sequence[int]:
        """For each rank, the index of its record of even collectives; that of odd ones is 8 words further."""

    @property
    def fingerprint_words(self) -> Sequence[tuple[int, int]]:
        """For each rank, the indices of the fingerprints of its even and its odd collective."""

    @property
    def can_be_damaged(self) -> bool:
        """Whether anything other than the ranks could have written into the blocks; then use `find_damage`."""

    def find_damage(self, rank: int, number: int) -> str | None:
        """What in that rank's record of collective `number` no rank can have written; None if nothing is wrong."""

    def identity(self, rank: int) -> PeerIdentity:
        """The process of that rank."""

    def state(self, rank: int) -> PeerState:
        """The state of that rank."""

    def fail(self, failure: Failure) -> None:
        """Mark this rank as failed, and tell its peers. Only the first failure is kept."""

    def failure(self, rank: int) -> Failure:
        """Why that rank failed."""

    def add_call(self, text: str) -> int:
        """Store the description of a call; returns its index among the `RING` of this rank."""

    def add_site(self, text: str) -> int:
        """Store a call site; returns its index among the `RING` of this rank."""

    def record(self, rank: int, number: int) -> Record:
        """That rank's latest record of a collective of `number`'s parity."""

    def latest_record(self, rank: int) -> Record | None:
        """The record of the last collective that this rank entered; None before its first."""


class PublishedWaits(Protocol):
    """Where each rank of a group publishes what it is waiting for, read by the deadlock detectors of the others."""

    @property
    def world_size(self) -> int:
        """Number of ranks in the group."""

    def identity(self, rank: int) -> PeerIdentity:
        """The process of that rank."""

    def publish_wait(self, text: str) -> None:
        """Publish what this rank is waiting in, and for which ranks."""

    def confirm_wait(self, time_ns: int) -> None:
        """Confirm that the published wait was still going on at that time of the monotonic clock."""

    def withdraw_wait(self) -> None:
        """Publish that this rank is no longer waiting."""

    def wait_of(self, rank: int) -> tuple[int, int, str] | None:
        """Number of that rank's wait, time of its last confirmation (ns), and its text; None if none is published."""


class Team(Protocol):
    """The ranks of one group, connected.

    Attributes:
        is_entering: this rank has entered a collective (set by the flight recorder) and does not know yet that all
            ranks have arrived (cleared by the team).
    """

    is_entering: bool

    @property
    def rank(self) -> int:
        """This rank's number in the group."""

    @property
    def world_size(self) -> int:
        """Number of ranks in the group."""

    @property
    def near(self) -> Sequence[int]:
        """The ranks on this rank's host, itself included, in order."""

    @property
    def shares_memory(self) -> bool:
        """Whether all ranks map the same memory, so that protocols over a region need no messages."""

    @property
    def has_symmetric_memory(self) -> bool:
        """Whether `allocate` works."""

    @property
    def interface(self) -> str | None:
        """Network interface by which this rank reaches other hosts, if the group itself connects them; else None."""

    @property
    def blocks(self) -> ControlBlocks:
        """The control blocks of all ranks."""

    @property
    def watch(self) -> Watch:
        """Monitors whether the peers are alive."""

    @property
    def waiter(self) -> Waiter:
        """Waits for the peers in collectives."""

    @property
    def on_arrival(self) -> list[Callable[[], None]]:
        """Called in each collective once all ranks have arrived, before any of them reads a byte; may raise."""

    @property
    def overseers(self) -> list[Overseer] | None:
        """Called during each long wait in a collective; None if waits cannot be observed."""

    @property
    def published_waits(self) -> PublishedWaits | None:
        """Where the ranks publish their waits; None if the backend cannot do so."""

    @property
    def failures_wake_waits(self) -> bool:
        """Whether a failure wakes threads that sleep in a wait of this group, so they need to check only rarely."""

    @property
    def num_alarms(self) -> int:
        """Number of alarms of this group so far: each failure that wakes threads is one."""

    def poll(self) -> None:
        """Receive pending messages from peers, if they use messages. Local; does not wait."""

    def publish_waiting(self, text: str) -> None:
        """Let the peers know which send or receive this rank is waiting in, if possible; empty for none. Local."""

    def waiting(self, rank: int) -> str:
        """The send or receive that a rank is waiting in; empty for none, or if this rank cannot know."""

    def realign(self) -> None:
        """Resume after a collective in which the ranks had called different operations. Local, on all ranks."""

    def allocate(self, part_bytes: int, timeout_s: float) -> Region:
        """Allocate a region of symmetric memory, with `part_bytes` for each rank. Collective.

        Raises:
            SharedMemoryError: on every rank, if allocation fails.
            PeerFailure: a rank did not call it.
        """

    def close(self) -> None:
        """Leave the group; in good order, unless this rank failed. Local. Peers that still need it raise RankLost."""

    def disown(self) -> None:
        """In a forked child: release what belongs to the parent, so that peers notice when the parent ends. Local."""


class Algorithms(Protocol):
    """The collectives of one team.

    All take flat contiguous CPU tensors and run in the calling thread, one at a time. Every rank calls the same method
    with the same sizes; `on_arrival` detects differences before data moves. All may raise `PeerFailure`. `timeout_s` is
    the number of seconds until each wait is an error.

    Every backend derives from it. A collective that is added here with a body made of the others works on all of them;
    a backend overrides it to be faster.
    """

    @abc.abstractmethod
    def barrier(self, timeout_s: float) -> None:
        """Wait for every other rank."""

    @abc.abstractmethod
    def all_reduce(self, tensor: torch.Tensor, kernel: Kernel, timeout_s: float) -> None:
        """Reduce `tensor` in place over all ranks."""

    def all_reduce_symmetric(
        self, region: Region, offset_bytes: int, tensor: torch.Tensor, kernel: Kernel, timeout_s: float
    ) -> None:
        """Reduce in place a tensor that lies at the same offset of a region on every rank.

        Raises:
            InputError: the team has no symmetric memory.
        """
        raise InputError("this group has no symmetric memory; use a lockstep group")

    @abc.abstractmethod
    def reduce(self, tensor: torch.Tensor, kernel: Kernel, root: int, timeout_s: float) -> None:
        """Reduce over all ranks into `tensor` of the root; other ranks keep their tensor."""

    @abc.abstractmethod
    def broadcast(self, tensor: torch.Tensor, root: int, timeout_s: float) -> None:
        """Copy `tensor` of the root to all ranks."""

    @abc.abstractmethod
    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, timeout_s: float) -> None:
        """Copy each rank's `tensor` into `outputs[rank]` on all ranks. Sizes may differ between ranks."""

    @abc.abstractmethod
    def gather(self, outputs: Sequence[torch.Tensor] | None, tensor: torch.Tensor, root: int, timeout_s: float) -> None:
        """Copy each rank's `tensor` into `outputs[rank]` of the root; other ranks pass None."""

    @abc.abstractmethod
    def scatter(self, tensor: torch.Tensor, inputs: Sequence[torch.Tensor] | None, root: int, timeout_s: float) -> None:
        """Copy `inputs[rank]` of the root into each rank's `tensor`; other ranks pass None."""

    @abc.abstractmethod
    def reduce_scatter(
        self, tensor: torch.Tensor, inputs: Sequence[torch.Tensor], kernel: Kernel, timeout_s: float
    ) -> None:
        """Reduce `inputs[rank]` of all ranks into each rank's `tensor`. Sizes may differ between ranks."""

    @abc.abstractmethod
    def all_to_all(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], largest: int, timeout_s: float
    ) -> None:
        """Copy `inputs[peer]` of this rank into `outputs[this rank]` of each peer.

        Args:
            outputs: one for each rank.
            inputs: one for each rank.
            largest: numel of the largest tensor that any rank sends, the same on all ranks.
            timeout_s: seconds until each wait is an error.
        """
