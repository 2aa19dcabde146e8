"""The engine runs the collectives of one group on one rank: checks, flight record, and choice of thread.

This is the op table; `backend.py` only translates torch's names into these. A synchronous call runs in the caller's
thread, unless asynchronous calls are still queued; asynchronous calls, and calls made after them, run in the group's
thread. Either way calls run one at a time, in the order in which they were made.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Sequence
from threading import get_ident
from time import perf_counter
from typing import Any

import torch

from lockstep.comm import clock, staging
from lockstep.comm.callsite import CallSite, make_locator
from lockstep.comm.contract import Algorithms, PublishedWaits, Team
from lockstep.comm.deadlock import DeadlockDetector, note_other_caller
from lockstep.comm.descriptions import describe_call, describe_rows
from lockstep.comm.ephemeral import Extension, extended
from lockstep.comm.flight_recorder import FlightRecorder
from lockstep.comm.group_setup import NewGroup
from lockstep.comm.p2p import PointToPoint
from lockstep.comm.sparse import all_reduce_sparse, check_sparse, describe_sparse
from lockstep.comm.symmetric_regions import SymmetricRegions
from lockstep.comm.tensors import (
    FlatTensor,
    check_exchange,
    check_output,
    check_pairs,
    check_root,
    check_row,
    check_some,
    check_tensor,
)
from lockstep.comm.user_threads import MAIN_THREAD
from lockstep.comm.wording import describe_tensor
from lockstep.comm.work import DoneWork, PendingWork, Runner
from lockstep.errors import CollectiveError, InputError, NotInitialized, SharedMemoryError
from lockstep.rank_status import FINISHED
from lockstep.shm.base_mailbox import BaseMailbox
from lockstep.shm.bootstrap import Bootstrap
from lockstep.shm.kernels import Kernel, find_kernel, op_name
from lockstep.shm.sync import PeerFailure, PeerState
from lockstep.shm.team import Region

__all__ = ["Body", "Describe", "Engine"]

Work = DoneWork | PendingWork
Describe = Callable[[], str]
Body = Callable[[float], None]

_CLOSE_PATIENCE_S = 1.0


class Engine:
    """One group on one rank.

    Args:
        team: the ranks of the group.
        recorder: its flight recorder.
        timeout_s: default seconds until a missing rank is an error.
        algorithms: the collectives of the team.
        make_mailbox: creates the mailbox for point to point, at the first send or receive.
        waits: where the ranks of the default group publish their waits; None turns deadlock detection off.

    Attributes:
        extensions: temporary extensions of the timeout of the next collectives.
        locate: finds the user's line that made a call; benchmarks replace it.
    """

    def __init__(
        self,
        team: Team,
        recorder: FlightRecorder,
        timeout_s: float,
        algorithms: Algorithms,
        make_mailbox: Callable[[], BaseMailbox],
        waits: PublishedWaits | None = None,
    ) -> None:
        self.team = team
        self.recorder = recorder
        self.timeout_s = timeout_s
        self.extensions: set[Extension] = set()
        self.locate = make_locator()
        self._algorithms = algorithms
        self._make_mailbox = make_mailbox
        self._runner = Runner("lockstep-collectives", lambda: self.timeout_s, recorder.explain_held_up)
        self._p2p: PointToPoint | None = None  # from the first send or receive on
        self._p2p_lock = threading.Lock()
        self._turn = threading.Lock()
        self._closed = ""  # why the group cannot be used any more; empty while it can
        self._symmetric = SymmetricRegions()
        self._make_detector: Callable[[Callable[[], str]], DeadlockDetector] | None = None
        if waits is not None and team.overseers is not None:
            known = waits, recorder.global_ranks, team.rank, recorder.group_name, self._runner
            self._make_detector = functools.partial(DeadlockDetector, *known)
            team.overseers.append(self._make_detector(recorder.describe_activity))

    def make_detector(self, new: NewGroup, waits: PublishedWaits, where: Callable[[], str]) -> DeadlockDetector:
        """Create a detector of ranks that wait for this one while it creates a further group."""
        return DeadlockDetector(waits, new.ranks, new.rank, new.name, self._runner, where)

    # ---- running -----------------------------------------------------------------------------

    def _submit(
        self,
        key: object,
        describe: Describe,
        body: Body,
        result: list[torch.Tensor],
        is_async: bool,
        timeout_s: float | None,
        touched: Sequence[torch.Tensor] = (),
    ) -> Work:
        """Run or queue one collective.

        Args:
            key: determines the fingerprint; equal keys mean equal descriptions.
            describe: returns the text that is fingerprinted.
            body: runs the collective; receives the timeout of each wait in seconds.
            result: the tensors that it writes.
            is_async: whether to queue it.
            timeout_s: timeout of each wait in seconds; None for that of the group.
            touched: the tensors that it reads or writes; None for those of `result`.
        """
        if self._closed:
            raise NotInitialized(f"{describe()} on {self.recorder.group_name}: {self._closed}")
        site = self.locate()
        if get_ident() != MAIN_THREAD:
            note_other_caller()
        if timeout_s is None:
            timeout_s = self.timeout_s
            if self.extensions:
                body = extended(body, self.extensions)
        if not is_async and not self._runner.unfinished:
            self._run(key, describe, body, site, timeout_s)
            return DoneWork(result)
        call = staging.behind_caller(touched or result, lambda: self._run(key, describe, body, site, timeout_s))
        work = PendingWork(call, result, describe, self._runner)
        if self._runner.is_current_thread:
            # A callback of a finished call makes this one, and may wait for it in this very thread, so it has to run at
            # once. That also gives it the same position in the order of calls on all ranks, if the callback was added
            # before another call.
            self._runner.run_now(work)
        else:
            self._runner.submit(work)
        if not is_async:
            work.wait()
        return work

    def _run(self, key: object, describe: Describe, body: Body, site: CallSite, timeout_s: float) -> None:
        with self._turn:
            start = perf_counter()
            try:
                recorder = self.recorder
                recorder.enter(key, describe, site, start)
                body(timeout_s)
                recorder.status_words[FINISHED] = recorder.number
            except PeerFailure as failure:
                raise self.recorder.explain(failure) from None
            except (CollectiveError, SharedMemoryError):
                raise  # All ranks raise these at the same step, or the group was already broken.
            except BaseException as error:
                self.recorder.interrupt(error)
                raise
            finally:
                clock.add(perf_counter() - start)

    # ---- collectives ---------------------------------------------------------------------------

    def barrier(self, is_async: bool, timeout_s: float | None) -> Work:
        """Wait for all ranks. Collective."""
        return self._submit("barrier", lambda: "barrier()", self._algorithms.barrier, [], is_async, timeout_s)

    def all_reduce(self, tensors: Sequence[torch.Tensor], op: Any, is_async: bool, timeout_s: float | None) -> Work:
        """Reduce each of `tensors` in place over all ranks. Collective."""
        if len(tensors) == 1:
            (tensor,) = tensors
            kernel = find_kernel(op, check_tensor(tensor, "all_reduce").dtype)
            if not tensor.is_contiguous():
                check_output(tensor, "all_reduce")
            offset = self._symmetric.offset_of(tensor) if self._symmetric.starts else None
            key: object = ("all_reduce", tensor.dtype, tensor.shape, kernel.name, offset)

            def body(timeout_s: float) -> None:
                self._all_reduce_one(tensor, kernel, timeout_s)

        else:
            check_some("all_reduce", tensors)
            kernels = [find_kernel(op, check_output(tensor, "all_reduce").dtype) for tensor in tensors]
            offsets = [self._symmetric.offset_of(tensor) for tensor in tensors] if self._symmetric.starts else ()
            key = ("all_reduce", op_name(op), *offsets, *((tensor.dtype, tensor.shape) for tensor in tensors))

            def body(timeout_s: float) -> None:
                for tensor, kernel in zip(tensors, kernels, strict=True):
                    self._all_reduce_one(tensor, kernel, timeout_s)

        return self._submit(
            key, lambda: self._describe_all_reduce(tensors, op_name(op)), body, list(tensors), is_async, timeout_s
        )

    def _describe_all_reduce(self, tensors: Sequence[torch.Tensor], op: str) -> str:
        offsets = [self._symmetric.offset_of(tensor) for tensor in tensors]
        return describe_call("all_reduce", tensors, op, offsets=offsets)

    def all_reduce_sparse(self, tensor: torch.Tensor, op: Any, is_async: bool, timeout_s: float | None) -> Work:
        """Sum a sparse tensor in place over all ranks. Collective."""
        check_sparse(tensor, op)
        return self._submit(
            ("all_reduce sparse", tensor.dtype, tensor.shape, tensor.sparse_dim(), op_name(op)),
            lambda: describe_sparse(tensor, op),
            lambda timeout_s: all_reduce_sparse(self._algorithms, self.team.world_size, tensor, op, timeout_s),
            [tensor],
            is_async,
            timeout_s,
        )

    def _all_reduce_one(self, tensor: torch.Tensor, kernel: Kernel, timeout_s: float) -> None:
        found = self._symmetric.find(tensor) if self._symmetric.starts else None
        if found is not None:
            region, offset_bytes = found
            flat = tensor.detach().view(-1)
            self._algorithms.all_reduce_symmetric(region, offset_bytes, flat, kernel, timeout_s)
            return
        item = FlatTensor(tensor)
        self._algorithms.all_reduce(item.flat, kernel, timeout_s)
        item.write_back()

    def reduce(self, tensor: torch.Tensor, op: Any, root: int, is_async: bool, timeout_s: float | None) -> Work:
        """Reduce into the root's `tensor`. Collective."""
        check_root("reduce", root, self.recorder)
        kernel = find_kernel(op, check_output(tensor, "reduce").dtype)

        def body(timeout_s: float) -> None:
            item = FlatTensor(tensor)
            self._algorithms.reduce(item.flat, kernel, root, timeout_s)
            if self.team.rank == root:
                item.write_back()

        return self._submit(
            ("reduce", tensor.dtype, tensor.shape, kernel.name, root),
            lambda: describe_call("reduce", [tensor], kernel.name, root=self.recorder.global_rank(root)),
            body,
            [tensor],
            is_async,
            timeout_s,
        )

    def broadcast(self, tensors: Sequence[torch.Tensor], root: int, is_async: bool, timeout_s: float | None) -> Work:
        """Copy the root's tensors to all ranks. Collective."""
        check_some("broadcast", tensors)
        check_root("broadcast", root, self.recorder)
        for tensor in tensors:
            check_output(tensor, "broadcast")

        def body(timeout_s: float) -> None:
            for tensor in tensors:
                item = FlatTensor(tensor, is_read=self.team.rank == root)
                self._algorithms.broadcast(item.flat, root, timeout_s)
                if self.team.rank != root:
                    item.write_back()

        return self._submit(
            ("broadcast", root, *((tensor.dtype, tensor.shape) for tensor in tensors)),
            lambda: describe_call("broadcast", tensors, root=self.recorder.global_rank(root)),
            body,
            list(tensors),
            is_async,
            timeout_s,
        )

    def all_gather(
        self,
        outputs: Sequence[Sequence[torch.Tensor]],
        inputs: Sequence[torch.Tensor],
        is_async: bool,
        timeout_s: float | None,
    ) -> Work:
        """Copy each rank's `inputs[i]` into `outputs[i][rank]` of all ranks. Collective.

        The outputs may differ in size from rank to rank, as long as all ranks pass the same sizes.
        """
        check_pairs("all_gather", outputs, inputs)
        check_some("all_gather", inputs)
        for row, tensor in zip(outputs, inputs, strict=True):
            check_tensor(tensor, "all_gather")
            check_row("all_gather", row, tensor, self.team.world_size, check=check_output)
            if row[self.team.rank].numel() != tensor.numel():
                raise InputError(
                    f"all_gather: the output for this rank ({self.team.rank}) is "
                    f"{describe_tensor(row[self.team.rank])}, its input is {describe_tensor(tensor)}; they must hold "
                    "the same number of elements"
                )

        def body(timeout_s: float) -> None:
            for row, tensor in zip(outputs, inputs, strict=True):
                items = [FlatTensor(output, is_read=False) for output in row]
                self._algorithms.all_gather([item.flat for item in items], FlatTensor(tensor).flat, timeout_s)
                for item in items:
                    item.write_back()

        # The output for this rank describes the input, so that uneven gathers have equal fingerprints.
        sizes = [[output.numel() for output in row] for row in outputs]
        return self._submit(
            ("all_gather", tuple(map(tuple, sizes)), *((tensor.dtype, tensor.shape) for tensor in inputs)),
            lambda: describe_rows("all_gather", inputs, sizes),
            body,
            [output for row in outputs for output in row],
            is_async,
            timeout_s,
            [*inputs, *(output for row in outputs for output in row)],
        )

    def gather(
        self,
        outputs: Sequence[torch.Tensor] | None,
        tensor: torch.Tensor,
        root: int,
        is_async: bool,
        timeout_s: float | None,
    ) -> Work:
        """Copy each rank's `tensor` into `outputs[rank]` of the root. Collective."""
        check_tensor(tensor, "gather")
        check_root("gather", root, self.recorder)
        if outputs is not None:
            check_row("gather", outputs, tensor, self.team.world_size, check=check_output, same_numel=True)

        def body(timeout_s: float) -> None:
            items = None if outputs is None else [FlatTensor(output, is_read=False) for output in outputs]
            flats = None if items is None else [item.flat for item in items]
            self._algorithms.gather(flats, FlatTensor(tensor).flat, root, timeout_s)
            for item in items or ():
                item.write_back()

        return self._submit(
            ("gather", tensor.dtype, tensor.shape, root),
            lambda: describe_call("gather", [tensor], root=self.recorder.global_rank(root)),
            body,
            list(outputs or ()),
            is_async,
            timeout_s,
            [tensor, *(outputs or ())],
        )

    def scatter(
        self,
        tensor: torch.Tensor,
        inputs: Sequence[torch.Tensor] | None,
        root: int,
        is_async: bool,
        timeout_s: float | None,
    ) -> Work:
        """Copy `inputs[rank]` of the root into each rank's `tensor`. Collective."""
        check_output(tensor, "scatter")
        check_root("scatter", root, self.recorder)
        if inputs is not None:
            check_row("scatter", inputs, tensor, self.team.world_size, same_numel=True)

        def body(timeout_s: float) -> None:
            flats = None if inputs is None else [FlatTensor(source).flat for source in inputs]
            item = FlatTensor(tensor, is_read=False)
            self._algorithms.scatter(item.flat, flats, root, timeout_s)
            item.write_back()

        return self._submit(
            ("scatter", tensor.dtype, tensor.shape, root),
            lambda: describe_call("scatter", [tensor], root=self.recorder.global_rank(root)),
            body,
            [tensor],
            is_async,
            timeout_s,
            [tensor, *(inputs or ())],
        )

    def reduce_scatter(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[Sequence[torch.Tensor]],
        op: Any,
        is_async: bool,
        timeout_s: float | None,
    ) -> Work:
        """Reduce `inputs[i][rank]` of all ranks into each rank's `outputs[i]`. Collective."""
        kernels = []
        check_pairs("reduce_scatter", outputs, inputs)
        check_some("reduce_scatter", outputs)
        for tensor, row in zip(outputs, inputs, strict=True):
            check_output(tensor, "reduce_scatter")
            check_row("reduce_scatter", row, tensor, self.team.world_size)
            kernels.append(find_kernel(op, tensor.dtype))
            if row[self.team.rank].numel() != tensor.numel():
                raise InputError(
                    f"reduce_scatter: the output is {describe_tensor(tensor)}, the input for this rank "
                    f"{describe_tensor(row[self.team.rank])}; they must hold the same number of elements"
                )

        def body(timeout_s: float) -> None:
            for tensor, row, kernel in zip(outputs, inputs, kernels, strict=True):
                item = FlatTensor(tensor, is_read=False)
                flats = [FlatTensor(source).flat for source in row]
                self._algorithms.reduce_scatter(item.flat, flats, kernel, timeout_s)
                item.write_back()

        sizes = [[source.numel() for source in row] for row in inputs]
        dtypes = tuple(tensor.dtype for tensor in outputs)
        return self._submit(
            ("reduce_scatter", tuple(map(tuple, sizes)), dtypes, op_name(op)),
            lambda: describe_rows("reduce_scatter", outputs, sizes, op_name(op)),
            body,
            list(outputs),
            is_async,
            timeout_s,
            [*outputs, *(source for row in inputs for source in row)],
        )

    def all_to_all(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        is_async: bool,
        timeout_s: float | None,
        result: Sequence[torch.Tensor] | None = None,
    ) -> Work:
        """Copy `inputs[peer]` into `outputs[this rank]` of each peer. Collective.

        Sizes may differ from pair to pair; the two ends of a pair must agree. `result` is what the handle returns, by
        default `outputs`.
        """
        like = check_tensor(inputs[0], "all_to_all") if inputs else torch.empty(0, device="cpu")
        check_row("all_to_all", inputs, like, self.team.world_size)
        check_row("all_to_all", outputs, like, self.team.world_size, check=check_output)
        dtype = like.dtype

        def body(timeout_s: float) -> None:
            # Every rank learns what each rank sends and expects, so that all detect a pair that disagrees.
            own = [source.numel() for source in inputs] + [output.numel() for output in outputs]
            table = [torch.empty(len(own), dtype=torch.int64, device="cpu") for _ in inputs]
            self._algorithms.all_gather(table, torch.tensor(own, dtype=torch.int64, device="cpu"), timeout_s)
            sent, expected = torch.stack(table).chunk(2, dim=1)
            check_exchange(self.recorder, sent, expected.T)
            items = [FlatTensor(output, is_read=False) for output in outputs]
            flats = [FlatTensor(source).flat for source in inputs]
            self._algorithms.all_to_all([item.flat for item in items], flats, int(sent.max()), timeout_s)
            for item in items:
                item.write_back()

        return self._submit(
            ("all_to_all", dtype),
            lambda: f"all_to_all({str(dtype).removeprefix('torch.')})",
            body,
            list(outputs if result is None else result),
            is_async,
            timeout_s,
            [*inputs, *outputs],
        )

    # ---- point to point --------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Work:
        """Start sending to a rank. Local."""
        return self._point_to_point("send").send(tensor, peer, tag, self.timeout_s)

    def receive(self, tensor: torch.Tensor, peer: int | None, tag: int) -> Work:
        """Start receiving from a rank, or from any rank. Local."""
        return self._point_to_point("recv").receive(tensor, peer, tag, self.timeout_s)

    def _point_to_point(self, verb: str) -> PointToPoint:
        if self._closed:
            raise NotInitialized(f"{verb} on {self.recorder.group_name}: {self._closed}")
        if self._p2p is None:
            with self._p2p_lock:
                if self._p2p is None:
                    self._p2p = PointToPoint(self.team, self.recorder, self._make_mailbox(), self._make_detector)
        return self._p2p

    # ---- symmetric memory ----------------------------------------------------------------------

    def allocate(self, part_bytes: int, purpose: str = "symmetric_empty") -> Region:
        """A region of symmetric memory with `part_bytes` for each rank. Collective.

        Args:
            part_bytes: the same on all ranks.
            purpose: its name in errors.

        Raises:
            SharedMemoryError: on every rank, if allocation fails.
            InputError: this group has no symmetric memory.
        """
        if not self.team.has_symmetric_memory:
            raise InputError(f"{self.recorder.group_name} has no symmetric memory; use a lockstep group")
        made: list[Region] = []
        self._submit(
            (purpose, part_bytes),
            lambda: f"{purpose}({part_bytes} bytes)",
            lambda timeout_s: made.append(self.team.allocate(part_bytes, timeout_s)),
            [],
            False,
            None,
        )
        return made[0]

    def symmetric_empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A zeroed tensor at the same offset of symmetric memory on every rank; `all_reduce` works on it in place.

        Collective, with the same arguments on all ranks.
        """
        numel = int(torch.Size(shape).numel())
        region = self.allocate(max(numel * dtype.itemsize, 1))
        self._symmetric.add(region)
        return region.own[: numel * dtype.itemsize].view(dtype).view(tuple(shape))

    def run_steps(self, text: str, between: Callable[[], Any] | None = None, key: object = None) -> None:
        """Run one collective of two steps with work in between, for protocols over a separate region. Collective.

        Args:
            text: describes it; compared between ranks.
            between: called when all ranks have arrived; has finished on all ranks when this returns. If it is a
                generator, all ranks also meet at each of its yields.
            key: determines the fingerprint instead of the text, if the text leaves something out.

        Raises:
            InputError: the ranks share no memory.
        """
        if not self.team.shares_memory:
            raise InputError(f"{self.recorder.group_name} has no memory that all its ranks share")

        def body(timeout_s: float) -> None:
            self._algorithms.barrier(timeout_s)
            for _ in (between and between()) or ():
                self._algorithms.barrier(timeout_s)
            self._algorithms.barrier(timeout_s)

        self._submit(text if key is None else key, lambda: text, body, [], False, None)

    # ---- further groups ----------------------------------------------------------------------------

    def connect_further(self, new: NewGroup, bootstrap: Bootstrap, check_peers: Callable[[], None]) -> Engine | None:
        """Connect ranks of this group to a further group over existing connections. Collective over these ranks.

        Args:
            new: the further group.
            bootstrap: of its ranks, as if they shared one host.
            check_peers: called while waiting; raises if a rank can no longer come.

        Returns:
            None if a further group needs its own connections, as on one host, where they cost nothing.
        """
        return None

    # ---- end -------------------------------------------------------------------------------------

    def fail(self, message: str, error: BaseException | None = None) -> None:
        """Tell the peers that this rank raised an exception; they raise RankLost with `message`. Local."""
        if not self._closed:
            self.recorder.fail(message, error.culprits if isinstance(error, CollectiveError) else None)

    def shutdown(self) -> None:
        """Leave the group once the asynchronous calls made so far have ended; after an error, at once. Local."""
        try:
            is_well = not self._closed and self.team.blocks.state(self.team.rank) is PeerState.READY
            if is_well and sys.exc_info()[1] is None:
                self._runner.finish()
        finally:
            self.close()

    def close(self) -> None:
        """Leave the group. Local; queued calls are cancelled, a running wait raises CollectiveAborted."""
        if self._closed:
            return
        self._closed = "this group was shut down; call init() again before using it"
        self.team.waiter.close()
        self._runner.close()
        if self._p2p is not None:
            self._p2p.close()
        # A call in another thread notices soon. If it does not, it is computing, not waiting: the memory it works on
        # stays mapped.
        had_turn = self._turn.acquire(timeout=_CLOSE_PATIENCE_S)
        try:
            self.team.close()
            self.recorder.close()
        finally:
            if had_turn:
                self._turn.release()
        self._symmetric.clear()

    def disown(self) -> None:
        """In a forked child: make the group unusable, as it belongs to the parent. Local; touches nothing shared."""
        self._closed = (
            f"this process is a fork of {self.recorder.name(self.team.rank)}, not a rank; make the call in that "
            "process, or start a separate process for it"
        )
        if self._p2p is not None:
            self._p2p.disown()
        self.team.disown()
