"""`DistributedOptimizer`: any optimizer, with gradients reduced over ranks before each step."""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from lockstep.comm.backend import engine_of
from lockstep.compat.horovod.common.exceptions import UnsupportedError
from lockstep.compat.horovod.torch import runtime
from lockstep.compat.horovod.torch.compression import Compression, Compressor
from lockstep.compat.horovod.torch.context import size
from lockstep.compat.horovod.torch.counting import CountingOptimizer, Counts
from lockstep.compat.horovod.torch.delta_optimizer import DeltaOptimizer
from lockstep.compat.horovod.torch.gradients import Buckets, ReductionSettings, reduce_dense, reduce_sparse
from lockstep.compat.horovod.torch.mpi_ops.handles import Pending, channel_of
from lockstep.compat.horovod.torch.mpi_ops.reductions import Adasum, Average, ReductionOp, allreduce, check_op
from lockstep.compat.horovod.torch.process_sets import ProcessSet, global_process_set
from lockstep.compat.horovod.torch.wrapping import find_names, wrap
from lockstep.errors import InputError

__all__ = ["DistributedOptimizer", "ReducingOptimizer"]

_STEP_AFTER_SYNCHRONIZE = (
    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). This can "
    "cause training slowdown. You may want to consider using optimizer.skip_synchronize() context if you use "
    "optimizer.synchronize() in your code."
)
_Group = tuple[int, ...]


class ReducingOptimizer(CountingOptimizer):
    """The part of a distributed optimizer that is added to the wrapped optimizer's class.

    Created by `DistributedOptimizer`. See [Note: held back] in `gradients.py`.
    """

    _settings: ReductionSettings
    _sparse_as_dense = False

    def _prepare(
        self,
        names: Sequence[str],
        parameters: Sequence[torch.Tensor],
        settings: ReductionSettings,
        passes: int,
        groups: Any,
    ) -> None:
        self._settings = settings
        self._names = list(names)
        self._parameters = list(parameters)
        self._parameter_names = dict(zip(parameters, names, strict=True))
        self.backward_passes_per_step = passes
        self.op = settings.op
        self.process_set = settings.process_set
        # By name, so that ranks agree even if their optimizers have different orders.
        by_name = sorted(range(len(names)), key=lambda index: names[index])
        self._required = [index for index in by_name if parameters[index].requires_grad]
        self._counts = Counts([passes] * len(parameters))
        self._group_of = self._assign_groups(groups)
        self._finishers: dict[_Group, Callable[[], None]] = {}
        self._bulk: Pending | None = None
        self._buckets: Buckets | None = None
        self._synchronized = False
        self._should_synchronize = True
        self._runtime: runtime.Runtime | None = None
        self._refresh()
        self._remove_at_end([self._watch(number, index) for number, index in enumerate(self._required)])

    def _refresh(self) -> None:
        """Update the ranks, which elastic training may have changed. Local."""
        opened = runtime.current()
        if opened is self._runtime:
            return
        self._runtime = opened
        self._reset()
        self._buckets = self._counts.arrive = None
        is_distributed = bool(self.process_set.included()) and len(self._required) > 0 and size() > 1
        self._counts.is_active = is_distributed
        if not is_distributed:
            return
        self._channel = channel_of(self.process_set, "allreduce")
        on_cpu = all(parameter.is_cpu for parameter in self._parameters)
        engine = engine_of(self._channel.control)
        self._counts.holds_back = on_cpu and engine is not None and engine.team.shares_memory
        if self._counts.holds_back:
            self._channel.add_holder(self)

    def _assign_groups(self, groups: Any) -> dict[int, _Group]:
        """Index of a parameter -> the group reduced with it."""
        if groups is None:
            return {index: (index,) for index in self._required}
        parts = _split_evenly(self._required, groups) if isinstance(groups, int) else self._parts_as_asked(groups)
        return {index: part for part in parts for index in part}

    def _parts_as_asked(self, groups: Iterable[Iterable[torch.Tensor]]) -> list[_Group]:
        """The groups listed by the user; every other parameter is its own group."""
        index_of = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        required = set(self._required)
        wanted = [[index_of.get(id(tensor), -1) for tensor in group] for group in groups]
        parts = [tuple(index for index in group if index in required) for group in wanted]
        grouped = {index for part in parts for index in part}
        return parts + [(index,) for index in self._required if index not in grouped]

    def _watch(self, number: int, index: int) -> RemovableHandle:
        counts, reference = self._counts, weakref.ref(self)

        def on_gradient(_: torch.Tensor) -> None:
            if not counts.is_active or counts.count(index):
                return
            if counts.holds_back:
                if counts.arrive is not None:
                    counts.arrive(number)
                return
            optimizer = reference()
            if optimizer is not None:
                optimizer._on_complete(index)

        parameter = self._parameters[index]
        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(on_gradient)  # type: ignore[no-untyped-call]
        return handle

    def _on_complete(self, index: int) -> None:
        """Request the reduction of a group once all its gradients, which are not held back, are complete. Local."""
        self._refresh()
        part = self._group_of[index]
        if all(self._counts.delays[member] == 0 for member in part):
            self._submit(part)

    # ---- reducing ----------------------------------------------------------------------------------

    def _submit(self, part: _Group) -> None:
        """Request the reduction of some gradients. Local."""
        self._fill_missing(part)
        parameters = [self._parameters[index] for index in part]
        dense: list[int] = []
        for index, parameter in zip(part, parameters, strict=True):
            assert parameter.grad is not None
            if parameter.grad.is_sparse and not self._sparse_as_dense:
                self._finishers[(index,)] = reduce_sparse(self._names[index], parameter, self._settings)
            else:
                dense.append(index)
        if dense:
            names = [self._names[index] for index in dense]
            chosen = [self._parameters[index] for index in dense]
            self._finishers[tuple(dense)] = reduce_dense(self._channel, names, chosen, self._settings)
            if not self._counts.holds_back:
                self._channel.rouse()

    def _fill_missing(self, part: Iterable[int]) -> None:
        """Fill missing gradients with zeros, as another rank may have computed them."""
        for index in part:
            parameter = self._parameters[index]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def offer(self) -> None:
        """Called when this rank waits: submit the gradients if all are complete and none was submitted. Local."""
        counts = self._counts
        is_waiting = counts.num_open > 0 and self._bulk is None and not self._finishers
        if is_waiting and not any(counts.delays[index] for index in self._required):
            self._submit_all()

    def _submit_all(self) -> None:
        """Submit all gradients that are held back, as one request if possible. Local."""
        self._fill_missing(self._required)
        if self._buckets is None and self._fits_buckets():
            self._buckets = Buckets(
                [self._names[index] for index in self._required],
                [self._parameters[index] for index in self._required],
                self._channel,
            )
            self._counts.arrive = self._buckets.arrive
        if self._buckets is not None:
            self._bulk = self._buckets.submit()
        if self._bulk is None:
            self._submit(tuple(self._required))

    def _fits_buckets(self) -> bool:
        settings = self._settings
        is_plain = settings.compression is Compression.none and settings.predivide_factor == 1.0
        return (
            is_plain
            and settings.op == Average
            and all(self._parameters[index].dtype.is_floating_point for index in self._required)
        )

    def synchronize(self) -> None:
        """Reduce all gradients, and wait for the results. Collective.

        Parameters without a gradient get that of the other ranks, or zeros.

        Raises:
            HorovodInternalError: ranks disagree on a gradient, or a rank was lost.
        """
        self._refresh()
        if self._counts.is_active:
            try:
                self._reduce_rest()
            finally:
                self._reset()
        self._synchronized = True

    def _reduce_rest(self) -> None:
        if self._counts.holds_back:
            if self._bulk is None and not self._finishers:
                self._submit_all()
        else:
            submitted = {index for part in self._finishers for index in part}
            for part in dict.fromkeys(self._group_of.values()):
                if not submitted.intersection(part):
                    self._submit(part)
        if self._bulk is not None:
            self._bulk.wait()
        for finish in self._finishers.values():
            finish()

    def _reset(self) -> None:
        self._bulk = None
        self._finishers.clear()
        self._counts.reset(self.backward_passes_per_step)

    @property
    def num_unreduced(self) -> int:
        """Number of gradients computed and not yet reduced; 0 if there are no other ranks. Local."""
        return self._counts.num_open

    def synchronizes_at_step(self) -> bool:
        """Whether `step()` would reduce gradients now. Local."""
        return self._should_synchronize

    # ---- the optimizer's own methods -----------------------------------------------------------------

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """A context in which `step()` does not reduce, for scripts that change gradients after `synchronize()`."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce the gradients, and run the optimizer's own step. Collective.

        Args:
            closure: computes the loss and the gradients, which are reduced too. For LBFGS, whose steps depend on
                the loss, the loss is averaged over ranks.
        """
        if closure is not None:
            return self._step_with_closure(closure)
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn(_STEP_AFTER_SYNCHRONIZE, stacklevel=2)
            self.synchronize()
        self._synchronized = False
        return super().step()  # type: ignore[misc]

    def _step_with_closure(self, closure: Callable[[], Any]) -> Any:
        if self._counts.num_open and self._should_synchronize:
            self.synchronize()

        def reduced() -> Any:
            loss = closure()
            if self._should_synchronize:
                self.synchronize()
                self._synchronized = False
                if isinstance(self, torch.optim.LBFGS) and isinstance(loss, torch.Tensor) and self._counts.is_active:
                    loss = allreduce(loss.detach(), op=Average, process_set=self.process_set)
            return loss

        self._synchronized = False
        return super().step(reduced)  # type: ignore[misc]

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Calls the optimizer's own, and discards gradients not yet reduced."""
        self._reset()
        self._synchronized = False
        self._should_synchronize = True
        super().load_state_dict(*args, **kwargs)  # type: ignore[misc]


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Wrap an optimizer, so that gradients are reduced over ranks before each step. Local.

    Unlike in Horovod, the result shares the state of the wrapped optimizer, which may have been loaded from a
    checkpoint.

    Args:
        optimizer: the optimizer to wrap; afterwards, use only the result.
        named_parameters: names of its parameters, the same on all ranks: `model.named_parameters()`. Names match
            the gradients of ranks; without them, parameters are numbered.
        compression: `Compression.none` or `Compression.fp16`.
        backward_passes_per_step: number of backward passes before each step, whose gradients accumulate.
        op: Average, Sum or Adasum. With Adasum and several ranks, the updates of the ranks' local steps
            are combined instead of gradients.
        gradient_predivide_factor: divides gradients before the sum; the average multiplies by it again.
        num_groups: deprecated name of `groups`.
        groups: number or list of parameter groups whose gradients are reduced together.
        sparse_as_dense: reduce sparse gradients as dense ones.
        process_set: the ranks that take part; on other ranks, the optimizer only runs its own step.

    Returns:
        An instance of a subclass of `type(optimizer)`, with `synchronize`, `skip_synchronize` and
        `set_backward_passes_per_step`.

    Raises:
        InputError: names are missing or not unique, a predivide factor is given without Average, groups share a
            parameter, or Apex's `amp.initialize` was called with the optimizer before.
        UnsupportedError: Adasum over a subset of the ranks, or a number that is not a power of two.
    """
    chosen = ReductionOp(op)
    if gradient_predivide_factor != 1.0 and chosen != Average:
        raise InputError("gradient_predivide_factor not supported with op != Average")
    if num_groups != 0:
        warnings.warn("Parameter `num_groups` has been replaced by `groups`", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    if backward_passes_per_step <= 0:
        raise InputError(f"backward_passes_per_step must be > 0, got {backward_passes_per_step}")
    _check_groups(groups)
    if isinstance(optimizer, CountingOptimizer):
        raise InputError("this optimizer is a DistributedOptimizer already; wrap it once")
    names, parameters = find_names(optimizer, named_parameters)
    if chosen == Adasum and runtime.is_open() and size() > 1:
        check_op(chosen, parameters, process_set)
        if process_set.process_set_id != 0:
            raise UnsupportedError("Adasum does not support non-global process sets yet.")
        delta = wrap(optimizer, DeltaOptimizer)
        delta._prepare(names, parameters, compression, backward_passes_per_step)
        return delta
    settings = ReductionSettings(compression, chosen, float(gradient_predivide_factor), process_set)
    reducing = wrap(optimizer, ReducingOptimizer)
    reducing._sparse_as_dense = sparse_as_dense
    reducing._prepare(names, parameters, settings, backward_passes_per_step, groups)
    return reducing


def _split_evenly(indices: Sequence[int], num_parts: int) -> list[_Group]:
    """Up to `num_parts` non-empty parts, whose lengths differ by at most one."""
    count = max(1, min(num_parts, len(indices)))
    share, extra = divmod(len(indices), count)
    starts = [number * share + min(number, extra) for number in range(count + 1)]
    return [tuple(indices[start:end]) for start, end in itertools.pairwise(starts)]


def _check_groups(groups: Any) -> None:
    if groups is None:
        return
    if isinstance(groups, int):
        if groups <= 0:
            raise InputError(f"groups should be a positive integer or a list of list of torch.Tensor, got {groups}")
        return
    if not isinstance(groups, list | tuple):
        raise InputError(f"groups should be an integer or a list of list of torch.Tensor, got {type(groups).__name__}")
    tensors = [tensor for group in groups for tensor in group]
    if any(not isinstance(tensor, torch.Tensor) for tensor in tensors):
        raise InputError("groups must consist of torch.Tensor.")
    if any(count > 1 for count in Counter(map(id, tensors)).values()):
        raise InputError("A parameter can only appear once in groups.")
