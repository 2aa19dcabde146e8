"""A fourth backend, for tests: ranks as threads of one process, without a fork.

The ranks share queues, through which they exchange messages and copies of tensors. All else is what every group has
whose ranks talk in messages (`lockstep.comm.messages`).
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg

from lockstep import batch
from lockstep.comm.backend import EngineProcessGroup, is_default_group, make_group, ranks_of
from lockstep.comm.deadlock import forget_other_callers
from lockstep.comm.flight_recorder import FlightRecorder
from lockstep.comm.messages.message_algorithms import MessageAlgorithms
from lockstep.comm.messages.message_engine import MessageEngine
from lockstep.comm.messages.message_mailbox import MessageMailbox
from lockstep.comm.messages.message_team import MessageTeam, Parts
from lockstep.comm.wording import describe_group
from lockstep.shm.liveness import Watch, own_identity
from lockstep.shm.sync import next_look
from lockstep.testing import limit_s

__all__ = ["BACKEND", "run_threads"]

BACKEND = "threads"


class Queues:
    """What the ranks of one group share: queues for each pair of ranks, and a count of what was put into them."""

    def __init__(self, world_size: int) -> None:
        pairs = [(source, to) for source in range(world_size) for to in range(world_size)]
        self.messages: list[deque[tuple[int, bytes]]] = [deque() for _ in range(world_size)]
        self.tensors = {pair: deque[torch.Tensor]() for pair in pairs}
        self.mail = {pair: deque[torch.Tensor]() for pair in pairs}
        self.changed = threading.Condition()
        self.num_changes = 0

    def put(self, queue: deque[Any], item: object) -> None:
        """Append, and wake all who wait."""
        with self.changed:
            queue.append(item)
            self.num_changes += 1
            self.changed.notify_all()

    def wait(self, seen: int, timeout_s: float) -> None:
        """Return when more has changed than `seen`, or after so many seconds."""
        with self.changed:
            self.changed.wait_for(lambda: self.num_changes != seen, timeout_s)


class ThreadWaiter:
    """Ends the waits of one rank."""

    spins = 1

    def __init__(self, queues: Queues) -> None:
        self._queues = queues
        self.closed = False

    def close(self) -> None:
        self.closed = True
        self._queues.put(deque(), None)


class Receiving:
    """A tensor that waits for its contents."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.is_done = False


class ThreadTeam(MessageTeam[Receiving]):
    """The ranks of one group, on threads of this process."""

    def __init__(self, queues: Queues, rank: int, world_size: int) -> None:
        super().__init__(rank, [own_identity()] * world_size, Watch({}))
        self._queues = queues
        self._waiter = ThreadWaiter(queues)
        self._receiving: list[deque[Receiving]] = [deque() for _ in range(world_size)]

    @property
    def waiter(self) -> ThreadWaiter:
        return self._waiter

    def send_message(self, peer: int, message: bytes) -> None:
        self._queues.put(self._queues.messages[peer], (self.rank, message))

    def poll(self) -> None:
        inbox = self._queues.messages[self.rank]
        with self.lock:
            while inbox:
                peer, message = inbox.popleft()
                self._receive_message(peer, memoryview(message))

    def _wait(self, awaited: Callable[[], list[int]], timeout_s: float) -> None:
        start = look_at = time.monotonic()
        while True:
            seen = self._queues.num_changes
            ranks = awaited()
            if not ranks:
                return
            now = time.monotonic()
            if now >= look_at:
                self._look(ranks, now - start, timeout_s)
                look_at = next_look(start, now, timeout_s)
            self._queues.wait(seen, look_at - now)

    @property
    def _is_closed(self) -> bool:
        return self.waiter.closed

    def exchange(self, sends: Parts, receives: Parts, timeout_s: float) -> None:
        for peer, tensor in sends:
            if tensor.numel():
                self._queues.put(self._queues.tensors[self.rank, peer], tensor.clone())
        for peer, tensor in receives:
            if tensor.numel():
                inbox = self._queues.tensors[peer, self.rank]
                self._wait(functools.partial(self._awaited, peer, inbox), timeout_s)
                tensor.copy_(inbox.popleft())

    def _awaited(self, peer: int, inbox: deque[torch.Tensor]) -> list[int]:
        self.poll()
        return [] if inbox else [peer]

    def start_send(self, peer: int, tensor: torch.Tensor) -> list[Receiving]:
        self._queues.put(self._queues.mail[self.rank, peer], tensor.clone())
        return []

    def start_receive(self, peer: int, tensor: torch.Tensor) -> list[Receiving]:
        receiving = Receiving(tensor)
        self._receiving[peer].append(receiving)
        return [receiving]

    def are_done(self, requests: list[Receiving]) -> bool:
        for peer, receiving in enumerate(self._receiving):
            inbox = self._queues.mail[peer, self.rank]
            while receiving and inbox:
                one = receiving.popleft()
                one.tensor.copy_(inbox.popleft())
                one.is_done = True
        return all(one.is_done for one in requests)

    def abandon(self, memory: object) -> None:
        """Nobody writes into it but this rank itself."""

    def close(self) -> None:
        self.waiter.close()
        self._send_final_notice()


class Job:
    """The groups of the ranks that run together."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queues: dict[str, Queues] = {}

    def queues(self, group_name: str, world_size: int) -> Queues:
        """Those of a group; torch counts groups alike on all ranks, so they have one name for it."""
        with self._lock:
            return self._queues.setdefault(group_name, Queues(world_size))


_here = threading.local()  # the job of this thread


class ThreadProcessGroup(EngineProcessGroup):
    """A process group of threads."""

    def __init__(self, options: Any) -> None:
        name, ranks, world_size = options.group_id, ranks_of(options), options.group_size
        team = ThreadTeam(_here.job.queues(f"{name} {ranks}", world_size), options.group_rank, world_size)
        recorder = FlightRecorder(team, describe_group(name, ranks, is_default_group(options)), ranks)
        make_mailbox = functools.partial(MessageMailbox, team)
        algorithms = MessageAlgorithms(team)
        engine = MessageEngine(team, recorder, options.timeout.total_seconds(), algorithms, make_mailbox, RuntimeError)
        super().__init__(engine, BACKEND, options)


@contextmanager
def _threads_are_ranks() -> Iterator[None]:
    """Give each thread a torch.distributed of its own."""
    multi_threaded_pg._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    try:
        yield
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        multi_threaded_pg._uninstall_threaded_pg()
        forget_other_callers()
        batch.reset()


def run_threads(body: Callable[[int], Any], world_size: int) -> list[Any]:
    """Run `body(rank)` on ranks that are threads of this process, with a default group.

    What a process has once, the ranks share: random generators, and the iterations of loaders, by which a metric knows
    its batch where no tensor tells it. So a body does not draw from the process's generator, and hands a metric a
    tensor of the batch or a loss of the engine's.

    Returns:
        For each rank what `body` returned, or the exception that it raised.
    """
    if BACKEND not in dist.Backend.backend_list:
        create = functools.partial(make_group, ThreadProcessGroup)
        dist.Backend.register_backend(BACKEND, lambda options, _: create(options), extended_api=True, devices=["cpu"])
    job, store = Job(), dist.HashStore()
    results: list[Any] = [None] * world_size

    def run(rank: int) -> None:
        _here.job = job
        timeout = timedelta(seconds=limit_s(10))
        dist.init_process_group(BACKEND, store=store, rank=rank, world_size=world_size, timeout=timeout)
        try:
            results[rank] = body(rank)
        except Exception as error:
            results[rank] = error
        finally:
            # torch's own end of a group knows nothing of threads in some releases; the rest goes with the thread.
            for group in list(dist.distributed_c10d._world.pg_map):
                group.shutdown()

    with _threads_are_ranks():
        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(limit_s(100))
            assert not thread.is_alive()
    return results
