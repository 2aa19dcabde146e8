"""The reducer: replaces the gradients in `.grad` by their mean over all ranks, once per backward pass.

[Note: when gradients move] If a parameter's `.grad` is None, autograd stores the gradient tensor it has just computed
there, without a copy. The reducer copies it into the parameter's view of a bucket while it is in cache, makes that view
the new `.grad`, and frees the original (at once, or if the transport leaves it in place, when the mean is ready).
Accumulating into a zeroed bucket would read and write every cache line once more. A gradient with other references
keeps its own memory, and the mean is copied there: [Note: kept gradients] in `gradient_memory.py`.

[Note: sentinels] A Python hook on each parameter costs more than the reduction of a thin layer. So only one parameter
of each bucket has one, its sentinel: the one whose gradient came last. When the sentinel's hook fires and all gradients
of the bucket are there, the bucket is sent. If one is missing, the bucket waits for the end of the backward pass, and
the missing parameter becomes the sentinel. This requires every `.grad` to have been None when the backward pass began,
so that an existing gradient belongs to this pass. Otherwise (gradients accumulated under `no_sync`, or not set to None)
all buckets are sent at the end. `begin` checks this once per backward pass.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection, Iterator, Sequence
from itertools import repeat
from operator import is_
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import Node

from lockstep.agreement import broadcast_tensors
from lockstep.errors import ModelError
from lockstep.parallel.buckets import BucketPlan, copy_all
from lockstep.parallel.checks import SPARSE_ADVICE
from lockstep.parallel.comm_hooks import CommHook, HookedBuckets
from lockstep.parallel.gradient_memory import GradientViews, can_renew, find_held
from lockstep.parallel.graph import AccumulationHook, Listener, remove_all, without_way_back
from lockstep.parallel.rank_agreement import NO_WORDS, RankAgreement, Words
from lockstep.parallel.sparse_gradients import SparseGradients
from lockstep.parallel.transports import Transport
from lockstep.torch_private.autograd import version_of

__all__ = ["Reducer"]


class Reducer:
    """Averages the gradients of a fixed list of parameters.

    Args:
        parameters: the parameters that require gradients.
        names: the parameters' names, for errors.
        plans: the parameters in each bucket, and their positions. Parameters in none of them have sparse gradients.
        transport: moves and averages the buckets.
        group: the ranks that average.
        backward: notified of incoming gradients; held weakly.
        agreement: compares the ranks with each averaging.
        may_go_early: whether buckets may be sent before the backward pass ends; an attribute.
        always_views: whether gradients are always views of buckets, even if there are other references to them.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        plans: Sequence[BucketPlan],
        transport: Transport,
        group: dist.ProcessGroup,
        backward: Listener,
        agreement: RankAgreement,
        may_go_early: bool,
        always_views: bool = False,
    ) -> None:
        self._parameters = list(parameters)
        self._names = list(names)
        self._plans = plans
        self._transport = transport
        self._group = group
        self._listener = weakref.ref(backward)
        self._agreement = agreement
        self.may_go_early = may_go_early
        self._members = [[placement.index for placement in plan.placements] for plan in plans]
        self._offsets = [[placement.offset for placement in plan.placements] for plan in plans]
        self._bucket_parameters = [[self._parameters[index] for index in members] for members in self._members]
        self._dense = frozenset(index for members in self._members for index in members)
        self._sparse = sorted(set(range(len(self._parameters))) - self._dense)
        self._always_views = always_views
        # Parameters whose gradients have their own memory: permanently, and in this backward pass.
        keeps_own = not always_views and not can_renew(transport)
        self._own_memory = set(range(len(self._parameters))) if keeps_own else set()
        self._given: dict[int, torch.Tensor] = {}  # `.grad` from before this pass that has other references
        self._copied_back: set[int] = set()  # indices of gradients in `_left`
        self._keeps_graph = False  # the backward pass runs with create_graph=True
        self._with_graph: set[int] = set()  # parameters whose gradients have a graph
        self._out: set[int] = set()
        # For buckets sent early: views, and gradients left in place, with their versions.
        self._sent: list[tuple[int, torch.Tensor, int]] = []
        self._left: dict[int, torch.Tensor] = {}  # gradients that are not in their view
        self._hooked: HookedBuckets | None = None
        self._sparse_gradients = SparseGradients([self._parameters[index] for index in self._sparse], group, backward)
        # Hooks of the sentinels, by bucket; then those of parameters without a bucket, each its own sentinel.
        sentinels = [*(members[-1] for members in self._members), *self._sparse]
        self._handles = [self._hook(index, bucket) for bucket, index in enumerate(sentinels)]
        self._watchers: list[AccumulationHook] = []  # hooks by parameter
        for handles in (self._handles, self._watchers):  # the parameters may outlive the engine
            weakref.finalize(self, remove_all, handles).atexit = False

    @functools.cached_property
    def _gradient_views(self) -> GradientViews:
        """Created when the first bucket is filled, which never happens with one rank."""
        return GradientViews(self._transport, self._plans, self._parameters)

    @property
    def _views(self) -> list[torch.Tensor]:
        """Views of the buckets, by parameter."""
        return self._gradient_views.tensors

    # ---- who is told of gradients --------------------------------------------------------------

    def _hook(self, index: int, bucket: int | None) -> AccumulationHook:
        listener = self._listener

        def call(*_: object) -> None:
            alive = listener()
            if alive is not None:
                alive.on_param_grad(index, bucket)

        return AccumulationHook(self._parameters[index], call)

    def _set_sentinel(self, bucket: int, index: int) -> None:
        self._handles[bucket].remove()
        self._handles[bucket] = self._hook(index, bucket)

    def watch_all(self) -> None:
        """Start reporting the gradient of every parameter. Local."""
        if not self._watchers:
            self._watchers += [self._hook(index, None) for index in range(len(self._parameters))]

    def watch_no_more(self) -> None:
        """Report only the sentinels' gradients again. Local."""
        remove_all(self._watchers)
        self._watchers.clear()

    @property
    def watched_nodes(self) -> Iterator[Node]:
        """Autograd's nodes that accumulate into the sentinels."""
        return (handle.node for handle in self._handles)

    # ---- during a backward pass ----------------------------------------------------------------

    def begin(self, is_new: bool) -> bool:
        """Begin a backward pass that will average. Local.

        Args:
            is_new: whether it is not the continuation of another one.

        Returns:
            Whether buckets may be sent as they fill.
        """
        are_none = all(map(is_, [parameter.grad for parameter in self._parameters], repeat(None)))
        self._keeps_graph = torch.is_grad_enabled()
        if is_new:
            self._given.clear()
            if not are_none and not self._always_views:
                self._note_given()
        # With create_graph, a second gradient would not be written into the bucket but replace it.
        return self.may_go_early and are_none and not self._keeps_graph and self._hooked is None and not self._out

    def _note_given(self) -> None:
        own, views = [(index, self._parameters[index].grad) for index in self._dense], self._views
        indices = [index for index, each in own if each is not None and each is not views[index]]
        gradients = [each.grad for each in map(self._parameters.__getitem__, indices) if each.grad is not None]
        held = zip(indices, gradients, find_held(gradients), strict=True)
        self._given = {index: gradient for index, gradient, is_held in held if is_held}

    def try_bucket(self, bucket: int) -> None:
        """Send a bucket whose sentinel has its gradient, if all others are there. Local."""
        if bucket >= len(self._plans) - 1 or bucket in self._out:
            return  # the last bucket is sent at the end anyway
        for index, parameter in zip(self._members[bucket], self._bucket_parameters[bucket], strict=True):
            if parameter.grad is None:
                self._set_sentinel(bucket, index)
                return
        self._send(bucket, is_early=True)

    def _send(self, bucket: int, is_early: bool = False) -> None:
        """Copy the gradients of a bucket to their views of its memory, and publish it."""
        self._let_go(bucket)
        indices, offsets, views, gradients = self._gather_gradients(bucket)
        if self._keeps_graph:
            self._with_graph.update(index for index, each in zip(indices, gradients, strict=True) if each.requires_grad)
        left = self._fill(bucket, offsets, views, gradients, indices)
        if self._own_memory or self._given:
            left = sorted({*left, *self._keep_own_memory(indices, gradients)})
        # A gradient left in place stays `.grad` until the mean is ready: hooks, and a second engine, may read it.
        if len(left) < len(indices):
            kept = set(left)
            for position, (index, view) in enumerate(zip(indices, views, strict=True)):
                if position not in kept:
                    self._parameters[index].grad = view
            indices, gradients = [indices[each] for each in left], [gradients[each] for each in left]
        self._left.update(zip(indices, gradients, strict=True))
        self._out.add(bucket)
        if self._hooked is not None:
            views, parameters = self._gradient_views.of_bucket[bucket], self._bucket_parameters[bucket]
            self._hooked.begin(bucket, self._transport.buffer(bucket), views, parameters)
            return
        if is_early:
            self._sent += zip(indices, gradients, map(version_of, gradients), strict=True)
            members = self._members[bucket]
            views = self._gradient_views.of_bucket[bucket]
            self._sent += zip(members, views, map(version_of, views), strict=True)
        self._transport.publish(bucket)

    def _fill(
        self,
        bucket: int,
        offsets: Sequence[int],
        views: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        indices: Sequence[int],
    ) -> Sequence[int]:
        """Copy gradients to their views, without a graph; returns the positions of those left in place."""
        try:
            if self._hooked is None:
                return self._transport.fill(bucket, offsets, views, gradients)
            copy_all(views, gradients)
        except RuntimeError:
            self._check_dense(indices, gradients)
            raise
        return ()

    def _gather_gradients(
        self, bucket: int
    ) -> tuple[Sequence[int], Sequence[int], Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Indices, offsets, views and gradients to copy to the bucket; zeroes the views of missing gradients."""
        gradients: list[Any] = [parameter.grad for parameter in self._bucket_parameters[bucket]]
        views = self._gradient_views.of_bucket[bucket]
        members, offsets = self._members[bucket], self._offsets[bucket]
        if not (any(map(is_, gradients, views)) or any(map(is_, gradients, repeat(None)))):
            return members, offsets, views, gradients
        chosen = []
        for position, (gradient, view) in enumerate(zip(gradients, views, strict=True)):
            if gradient is None:
                view.zero_()
            elif gradient is not view:
                chosen.append(position)
        every: tuple[Sequence[Any], ...] = (members, offsets, views, gradients)
        indices, offsets, views, gradients = ([each[position] for position in chosen] for each in every)
        return indices, offsets, views, gradients

    def _let_go(self, bucket: int) -> None:
        """Give the bucket new memory if there are references to gradients of an earlier pass.

        See `gradient_memory.py`.
        """
        if self._always_views:
            return
        held = self._gradient_views.held(bucket)
        if not held:
            return
        self._own_memory.update(held)
        for index in self._members[bucket]:
            if self._parameters[index].grad is self._views[index]:
                self._given[index] = self._views[index]  # it was accumulated there, and stays there
        self._gradient_views.renew(bucket)

    def _keep_own_memory(self, indices: Sequence[int], gradients: Sequence[torch.Tensor]) -> list[int]:
        """Positions of gradients that keep their own memory as `.grad`, to which the mean is copied back."""
        kept = [
            position
            for position, (index, gradient) in enumerate(zip(indices, gradients, strict=True))
            if index not in self._transport.stand_ins
            and (self._given.get(index) is gradient or (index in self._own_memory and not gradient.requires_grad))
        ]
        self._copied_back.update(indices[position] for position in kept)
        return kept

    def _check_dense(self, indices: Sequence[int], gradients: Sequence[torch.Tensor]) -> None:
        culprits = [self._names[i] for i, each in zip(indices, gradients, strict=True) if each.layout != torch.strided]
        if culprits:
            raise ModelError(
                f"parameter {', '.join(culprits)} has a sparse gradient, which was not known when the model was "
                f"wrapped. {SPARSE_ADVICE}"
            )

    # ---- after it ------------------------------------------------------------------------------

    def restart(self) -> None:
        """Discard the state of the last backward pass, which failed or never brought all gradients. Local."""
        self._out.clear()
        self._sent.clear()
        self._left.clear()
        self._with_graph.clear()
        self._copied_back.clear()
        if self._hooked is not None:
            self._hooked.abandon()
        self._transport.restart()

    def send_rest(self) -> None:
        """Send the remaining buckets at the end of the backward pass. Local; `finish` comes next.

        Separate from `finish`, because ranks may have sent different numbers of buckets so far: another collective on
        the same group has the same position in the order on all ranks only once everything has been sent.

        Raises:
            ModelError: a gradient changed after its bucket was sent.
        """
        if self._sent:
            self._check_versions()
        for bucket in range(len(self._plans)):
            if bucket not in self._out:
                self._send(bucket)
        if self._hooked is not None:  # each sparse gradient is a separate bucket, after the others
            for position, index in enumerate(self._sparse):
                gradient = self._sparse_gradients.gradient(position)
                self._hooked.begin(len(self._plans) + position, gradient, [gradient], [self._parameters[index]])

    def send_zeros(self) -> None:
        """Contribute zeros to the averaging of a step. Local; `finish` comes next."""
        for parameter in self._parameters:
            parameter.grad = None
        for bucket in range(len(self._plans)):
            self._let_go(bucket)
            self._transport.buffer(bucket).zero_()
        for index in self._dense:
            self._parameters[index].grad = self._views[index]
        self.send_rest()
        for parameter in self._parameters:
            parameter.grad = None

    def finish(
        self,
        none: Sequence[int],
        keep_none: Collection[int] = (),
        buffers: Sequence[torch.Tensor] = (),
        words: Words = NO_WORDS,
    ) -> list[Words] | None:
        """Average all gradients, once all buckets have been sent. Collective.

        Args:
            none: parameters that had no gradient when the rest was sent.
            keep_none: parameters that no rank used; their `.grad` is left unchanged.
            buffers: buffers to overwrite with those of the group's first rank.
            words: this rank's words about the step, to be compared.

        Returns:
            The words of all ranks; None if they are not sent.

        Raises:
            CollectiveMismatch: the ranks' claims differ.
        """
        by_rank = None
        if self._hooked is not None:
            self._finish_hook(self._hooked, keep_none, buffers, words)
        else:
            by_rank = self._transport.finish(buffers, words)
            if self._sparse:
                self._sparse_gradients.average()
        parameters, views = self._parameters, self._views
        for index in none:
            if index in self._dense and index not in keep_none:
                parameters[index].grad = views[index].clone() if index in self._own_memory else views[index]
        if self._copied_back:
            self._copy_back()
        for index in self._left:
            parameters[index].grad = views[index]
        self._left.clear()
        self._out.clear()
        for index in self._with_graph:
            self._parameters[index].grad = without_way_back(self._views[index])
        self._with_graph.clear()
        for index, stand_in in self._transport.stand_ins.items():
            if parameters[index].grad is not None:
                parameters[index].grad = stand_in
        return by_rank

    def _copy_back(self) -> None:
        """Copy the means to gradients that have their own memory."""
        pairs = [(self._left.pop(index), self._views[index]) for index in self._copied_back]
        with torch.no_grad():
            copy_all(*map(list, zip(*pairs, strict=True)))
        self._copied_back.clear()
        self._given.clear()

    def _check_versions(self) -> None:
        changed = [index for index, tensor, version in self._sent if version_of(tensor) != version]
        if changed:
            raise ModelError(
                f"parameter {self._names[changed[0]]} received a second gradient in one backward pass, after its "
                "bucket was sent. Re-entrant checkpointing does this, and a second backward pass over shared layers. "
                "Pass static_graph=True, which sends everything at the end, or add up the losses and call backward() "
                "once"
            )
        self._sent.clear()

    # ---- a communication hook --------------------------------------------------------------------

    @property
    def has_hook(self) -> bool:
        """Whether a communication hook reduces the buckets."""
        return self._hooked is not None

    def register_hook(self, state: Any, hook: CommHook) -> None:
        """Let `hook(state, bucket)` reduce the buckets instead. Local; register the same hook on all ranks."""
        if self._hooked is not None:
            raise ModelError("a communication hook is already registered; only one is allowed")
        if self._transport.stand_ins:
            raise ModelError(
                "a communication hook would get gradients that ZeroRedundancyOptimizer has sharded. Register it "
                "first, or use a plain optimizer"
            )
        self._hooked = HookedBuckets(state, hook, len(self._plans) + len(self._sparse))

    def _finish_hook(
        self, hooked: HookedBuckets, keep_none: Collection[int], buffers: Sequence[torch.Tensor], words: Words
    ) -> None:
        for bucket, result in hooked.results():
            if bucket >= len(self._plans):
                position = bucket - len(self._plans)
                if self._sparse[position] not in keep_none:
                    self._sparse_gradients.put(position, result)
                continue
            buffer = self._transport.buffer(bucket)
            if result.data_ptr() != buffer.data_ptr():
                with torch.no_grad():
                    buffer.copy_(result.view(-1))
        # Not earlier: hooks call collectives themselves as results arrive.
        self._agreement.claims.exchange(words.claim)
        if buffers:
            broadcast_tensors(buffers, self._group)
