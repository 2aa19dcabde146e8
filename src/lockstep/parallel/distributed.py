"""`lockstep.DistributedDataParallel`: a model on every rank, trained with one averaged gradient.

The forward pass is here; `backward_pass.py` has the backward pass, from the first gradient to the means.
"""

from __future__ import annotations

import copy
import functools
import itertools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from lockstep import batch, seeding
from lockstep.agreement import broadcast_tensors, collective_device
from lockstep.drift.engines import StepArguments, engines, note_engine, parameters_of
from lockstep.drift.watch import describe_step, watch_steps
from lockstep.errors import InputTypeError, ModelError
from lockstep.parallel.backward_pass import BackwardPass, Phase
from lockstep.parallel.batchnorm import explain_forward_error, warn_of_batch_statistics
from lockstep.parallel.buckets import plan_buckets
from lockstep.parallel.checks import (
    PassesForTorchs,
    check_bucket_cap,
    check_device,
    check_group,
    check_module,
    check_parameters,
    check_refused,
    check_renormalised,
    choose_broadcast_buffers,
    choose_devices,
    find_alike,
    find_buffers,
    find_sparse,
    has_sync_batchnorm,
    named_tensors,
)
from lockstep.parallel.closures import with_mean_of_closure
from lockstep.parallel.comm_hooks import CommHook
from lockstep.parallel.feeding import PLAIN, Feed, Feeding, share_said
from lockstep.parallel.forward_pass import ForwardPass
from lockstep.parallel.gradient_memory import keep_memory_of_gradients
from lockstep.parallel.joined import JoinedRank, RepeatableJoin, Steps
from lockstep.parallel.parameter_changes import ParameterChanges
from lockstep.parallel.rank_agreement import RankAgreement, check_same_model
from lockstep.parallel.reducer import Reducer
from lockstep.parallel.sharded.gradients import JOIN_ADVICE, ShardedGradient, find_stand_ins, refuse_others
from lockstep.parallel.transports import make_transport
from lockstep.torch_private.autograd import current_graph_task_id
from lockstep.torch_private.dynamo import left_out, untraced
from lockstep.torch_private.groups import join_config_of
from lockstep.torch_private.profiling import profiler_range
from lockstep.tree import move_tensors

__all__ = ["DistributedDataParallel"]

_FIRST_BUCKET_BYTES = _MIB = 1 << 20
_IGNORED = "_ddp_params_and_buffers_to_ignore"
_NO_TASK = -1  # autograd's task id outside a backward pass
_numbers: weakref.WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = weakref.WeakKeyDictionary()


class DistributedDataParallel(PassesForTorchs, Joinable):
    """Trains one model on all ranks of a group by averaging gradients during the backward pass.

    A drop-in replacement for `torch.nn.parallel.DistributedDataParallel`. On a lockstep group gradients are averaged in
    shared memory; on any other group (gloo, nccl, …) each bucket is one asynchronous all_reduce. The gradient is that
    of the mean over the global batch, with `lockstep.DataLoader` also if ranks hold different numbers of samples; with
    other data, declare these with `samples`. `feeding.py` describes how the engine determines the samples of a forward
    pass. Write a loss that is not a mean over samples with `lockstep.mean`, `lockstep.sum`, `lockstep.all_gather` or
    `lockstep.global_loss`.

    Collective: every rank constructs it, with the same model. Rank 0's parameters and buffers are copied to all ranks.

    Args:
        module: the model, already on its device.
        device_ids: None, or a list with this rank's single device, to which inputs are then moved.
        output_device: must agree with `device_ids`; for compatibility with torch.
        dim: must be 0; for compatibility with torch.
        broadcast_buffers: copy the first rank's buffers to all ranks along with the gradients of each training step;
            None means True. Buffers are equal when a step ends. torch copies them before the next forward pass instead,
            so here values that a script writes to them between two steps stay local in the next.
        init_sync: check that the models agree, and copy the first rank's parameters to all ranks.
        process_group: the ranks that train together; by default the default group.
        bucket_cap_mb: MiB of gradients that are averaged together; default 25. With 0 each has its own bucket.
        find_unused_parameters: parameters may be unused in a step's loss, and different ones on each rank. A parameter
            that no rank uses keeps its `.grad`, which may be None.
        check_reduction: ignored, as in torch.
        gradient_as_bucket_view: let the next backward pass overwrite gradients that are still referenced. False
            preserves them, and copies only if there are such references; see `gradient_memory.py`.
        static_graph: the set of used parameters never changes. Allows re-entrant checkpointing, several backward passes
            over shared layers, and parameters that are never used; gradients are averaged at the end of the backward
            pass.
        delay_all_reduce_named_params: refused, with advice on what to do instead.
        param_to_hook_all_reduce: refused.
        mixed_precision: refused.
        device_mesh: a mesh of one dimension, instead of `process_group`.
        skip_all_reduce_unused_params: ignored; parameters that are unused on all ranks always keep their `.grad`.
        bucket_cap_mb_list: refused.
        batched_grad_copy: ignored; always done here.
        forward_sync_buffers: torch's newer name for `broadcast_buffers`.
        lazy_bucket_allocation: accepted, and has no effect.

    Attributes:
        module: the model. Its `state_dict` has names without `module.`.

    Raises:
        NotInitialized: no process group.
        ModelMismatch: on every rank, if models differ; names the first parameter that differs.
        ModelError: there are no parameters to train, or some cannot be trained; `module` is or contains an engine; or,
            raised by an optimizer's step, it runs within the backward pass.
        UnusedParameters: parameters got no gradient. Raised by `backward`, or by the next forward pass if another
            backward pass could still have followed.

    Gradients of `Embedding(sparse=True)` and `EmbeddingBag(sparse=True)` are averaged entry by entry, after the others,
    and stay sparse (`sparse_gradients.py`).

    Names in `module._ddp_params_and_buffers_to_ignore` are ignored, as in torch. For parameters on the CPU, glibc is
    set to keep the memory of gradients between steps, unless MALLOC_TRIM_THRESHOLD_ or a similar variable is set
    (`gradient_memory.py`).
    """

    # Without a loader, ranks must have the same number of rows; Apex's engine averages plainly instead.
    _compares_rows = True
    _averages_at_once = True
    number: int

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: None = None,
        param_to_hook_all_reduce: None = None,
        mixed_precision: None = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        lazy_bucket_allocation: bool = False,
    ) -> None:
        super().__init__()
        Joinable.__init__(self)
        check_module(module)
        check_refused(
            delay_all_reduce_named_params=delay_all_reduce_named_params,
            param_to_hook_all_reduce=param_to_hook_all_reduce,
            mixed_precision=mixed_precision,
            bucket_cap_mb_list=bucket_cap_mb_list,
            dim=dim or None,
        )
        self.module = module
        self.process_group = group = check_group(process_group, device_mesh)
        self.broadcast_buffers = choose_broadcast_buffers(broadcast_buffers, forward_sync_buffers)
        self.find_unused_parameters, self.static_graph = find_unused_parameters, static_graph
        self.require_backward_grad_sync = True
        self._world_size = group.size()
        self._ignored = ignored = frozenset(getattr(module, _IGNORED, ()))
        self._sharded: dict[int, ShardedGradient] = {}  # by `id` of the parameter
        self._register()
        check_renormalised(module, self._world_size)
        warn_of_batch_statistics(module, is_told=self._compares_rows and self._world_size > 1 and group.rank() == 0)
        self.device_ids = choose_devices(device_ids, output_device, self._parameters_to_reduce)
        cap_mib = check_bucket_cap(bucket_cap_mb)
        self._buffers_of_ranks = find_buffers(module, ignored)
        if init_sync:
            self._agree(cap_mib)
        self._cap_mib, self._always_views = cap_mib, gradient_as_bucket_view
        self._hook: tuple[Any, CommHook] | None = None  # with its state
        self._orders_differ = find_unused_parameters and has_sync_batchnorm(module)
        self._feeding = Feeding(group, collective_device(group, self.device), module)
        self._joined = Steps(group, self.device)
        self.number = -1  # for a copy
        if self._averages_at_once:
            self.number = next(_numbers.setdefault(group, itertools.count()))
            self._reducer  # noqa: B018  created now, while all ranks are here
        for other in engines():
            other.give_way(self._own)
        note_engine(self)
        seeding.begin_rank_streams_of_engine()
        watch_steps()

    def _register(self) -> None:
        """Average the parameters that now require a gradient, in their current dtype. Local.

        Called on construction, and after a part was unfrozen or the model was converted (`model.double()`).

        The reducer is then recreated in the next backward pass, which every rank runs.
        """
        vars(self).pop("_reducer", None)
        module, group, ignored = self.module, self.process_group, self._ignored
        named = {name: each for name, each in module.named_parameters() if each.requires_grad and name not in ignored}
        check_parameters(named)
        self._sparse = find_sparse(module, named)
        self._names, self._parameters_to_reduce = list(named), list(named.values())
        keep_memory_of_gradients(each for index, each in enumerate(named.values()) if index not in self._sparse)
        self.device, self._dtype = self._parameters_to_reduce[0].device, self._parameters_to_reduce[0].dtype
        check_device(self.device, group)
        self._own = frozenset(map(id, self._parameters_to_reduce))
        self.changes = ParameterChanges(module, self._own, ignored)
        self.check_unread()
        self._agreement = RankAgreement(
            self._names, self._parameters_to_reduce, group, collective_device(group, self.device)
        )
        if "_backward" not in vars(self):
            self._backward = BackwardPass(self, group, self.device, self._compares_rows)
            self._weakly = weakref.ref(self._backward)
        self._backward.set_parameters(self._parameters_to_reduce, self._names, self.changes, self._agreement)

    @functools.cached_property
    def _reducer(self) -> Reducer:
        """Collective when it is created: with the engine; for a copy, or when recreated, in a backward pass."""
        parameters, cap_bytes = self._parameters_to_reduce, max(int(self._cap_mib * _MIB), 1)
        stand_ins = find_stand_ins(parameters, self._sharded)
        plans = plan_buckets(parameters, cap_bytes, min(cap_bytes, _FIRST_BUCKET_BYTES), self._sparse, stand_ins)
        reducer = Reducer(
            parameters,
            self._names,
            plans,
            make_transport(plans, self.process_group, self._agreement, self.device, stand_ins),
            self.process_group,
            self._backward,
            self._agreement,
            may_go_early=self._world_size > 1 and not self.static_graph and not self._orders_differ,
            always_views=self._always_views,
        )
        if self._hook is not None:
            reducer.register_hook(*self._hook)
        self._backward.set_reducer(reducer)
        return reducer

    # ---- construction --------------------------------------------------------------------------

    def _agree(self, cap_mib: float) -> None:
        tensors = named_tensors(self.module, self._ignored)
        settings = {
            "bucket_cap_mb": cap_mib,
            "broadcast_buffers": self.broadcast_buffers,
            "find_unused_parameters": self.find_unused_parameters,
            "static_graph": self.static_graph,
            "sparse": [self._names[index] for index in sorted(self._sparse)],
        }
        check_same_model(tensors, settings, self.process_group, collective_device(self.process_group, self.device))
        broadcast_tensors([tensor.detach() for tensor in tensors.values()], self.process_group)

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedDataParallel:
        """A copy of the model with its own engine, as made by AveragedModel. Local, until the copy trains.

        Includes attributes, hooks, modules and buffers that users have added. The constructor of a subclass is not run;
        what it created is copied.
        """
        kind = type(self)
        twin = memo[id(self)] = kind.__new__(kind)
        # Groups belong to the process, and cannot be copied.
        memo.update((id(each), each) for each in vars(self).values() if isinstance(each, dist.ProcessGroup))
        twin._averages_at_once = False
        DistributedDataParallel.__init__(
            twin,
            copy.deepcopy(self.module, memo),
            self.device_ids,
            broadcast_buffers=self.broadcast_buffers,
            init_sync=False,
            process_group=self.process_group,
            bucket_cap_mb=self._cap_mib,
            find_unused_parameters=self.find_unused_parameters,
            gradient_as_bucket_view=self._always_views,
            static_graph=self.static_graph,
        )
        twin._hook = self._hook
        twin._backward.pause(self._backward.is_paused)
        of_modules = vars(torch.nn.Module()).keys()  # with submodules, parameters, buffers and hooks, in dicts
        made = {*vars(twin), "_reducer"} - of_modules  # created when the copy trains
        for name, value in torch.nn.Module.__getstate__(self).items():  # type: ignore[no-untyped-call]
            if name not in made:
                vars(twin)[name] = copy.deepcopy(value, memo)
        return twin

    def __reduce_ex__(self, _: Any) -> NoReturn:
        raise ModelError(
            "DistributedDataParallel cannot be pickled: it is tied to this process and its group. Pickle its "
            "`module` (model.module.state_dict()); copy.deepcopy(model) makes a copy"
        )

    def _set_static_graph(self) -> None:
        """torch's way to set `static_graph=True` on an existing engine. Call it before the first step, on all ranks."""
        self.static_graph = True
        if "_reducer" in vars(self):
            self._reducer.may_go_early = False

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module: torch.nn.Module, names: Iterable[str]) -> None:
        """torch's way to set `module._ddp_params_and_buffers_to_ignore` before the module is wrapped. Local."""
        setattr(module, _IGNORED, names)

    # ---- forward -------------------------------------------------------------------------------

    @left_out(with_what_it_calls=False)
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; its backward pass will average gradients.

        In evaluation mode, or without gradients, this just runs the module, and no rank waits for another.

        Raises:
            UnusedParameters: an earlier backward pass left gradients to another one, which was not run.
            InputError: the number of samples cannot be determined from the inputs.
        """
        forward, inputs, kwargs = self._pre_forward(inputs, kwargs)
        with profiler_range("lockstep.DistributedDataParallel.forward"), batch.hand.active(forward.feed.share, forward):
            try:
                output = self.module(*inputs, **kwargs)
            except (RuntimeError, ValueError) as error:
                explain_forward_error(error, self._world_size, forward.feed.share)
                raise
        return self._post_forward(forward, output)

    @left_out(with_what_it_calls=True)
    def _pre_forward(self, inputs: Any, kwargs: Any) -> tuple[ForwardPass, Any, Any]:
        """Prepare a forward pass; returns it with the module's inputs. Local, except in `join`."""
        with_gradients = torch.is_grad_enabled()
        seeding.begin_torch_stream(with_gradients)
        joins = join_config_of(self).enable
        syncs = with_gradients and self.require_backward_grad_sync
        if syncs:
            self._backward.check_awaited()
        if with_gradients:
            if joins:
                syncs = self._agree_on_step(inputs, kwargs, syncs)
            if current_graph_task_id() == _NO_TASK:  # otherwise a checkpoint repeats it inside a backward pass
                if self.changes.were_unfrozen() or self._parameters_to_reduce[0].dtype is not self._dtype:
                    self._register()
                self._backward.pre_forward(syncs)
        feed = self._feed(inputs, kwargs, with_gradients, syncs, joins)
        if self.device_ids is not None:
            inputs, kwargs = move_tensors((inputs, kwargs), self.device_ids[0], non_blocking=True)
        is_functional = self.changes.are_transformed()
        forward = ForwardPass(feed, syncs, self.process_group, self._weakly, self._own, is_functional, self.training)
        if not (forward.is_plain or forward.is_filler):
            inputs, kwargs = forward.enter((inputs, kwargs))
        return forward, inputs, kwargs

    @left_out(with_what_it_calls=True)
    def _post_forward(self, forward: ForwardPass, output: Any) -> Any:
        """The module's output, with hooks that notice its backward pass. Local."""
        if not forward.syncs and forward.is_plain and not forward.feed.claim:
            return output
        output, roots = forward.leave(output)
        self._backward.post_forward(forward, roots)
        return output

    @untraced
    def _feed(self, inputs: Any, kwargs: Any, with_gradients: bool, syncs: bool, joins: bool) -> Feed:
        """The samples that the forward pass holds; see `feeding.py`. Local."""
        if with_gradients and joins:
            feed = Feed(self._joined.share.weight, self._joined.share)
        elif with_gradients and self._world_size > 1:
            feed = self._feeding.resolve((inputs, kwargs), self.training, syncs)
        else:
            share = self._feeding.look((inputs, kwargs), self.training)
            feed = PLAIN if share is None else Feed(share=share)
        batch.hand.note_forward(feed.share)
        return feed

    def _agree_on_step(self, inputs: Any, kwargs: Any, syncs: bool) -> bool:
        """Whether this step averages on any rank. Collective, within `join`."""
        work = Join.notify_join_context(self)
        if work is not None:
            work.wait()
        return self._joined.agree_on_step(True, syncs, self._feeding.count_rows((inputs, kwargs)))

    @contextmanager
    def samples(self, count: int) -> Iterator[None]:
        """Declare how many samples this rank's loss averages, for forward passes inside. Collective, but in `join`.

        For inputs that do not show it: sequence first, lists of unequal tensors, data that is no batch of a loader.
        Each rank is weighted by its fraction of the sum of all counts.

        Args:
            count: number of samples of this rank, any integer type; 0 for a filler (`lockstep.is_filler`).

        Raises:
            InputError: negative, or 0 on all ranks.
            InputTypeError: not an integer.
        """
        joins = join_config_of(self).enable
        share = share_said(count, self.process_group, collective_device(self.process_group, self.device), joins)
        with batch.hand.hold(share):
            yield

    # ---- backward: what `BackwardPass` asks ------------------------------------------------------

    @property
    def steps_joined(self) -> Steps | None:
        """Within `join`, the object by which ranks agree on its steps. Local."""
        return self._joined if join_config_of(self).enable else None

    def buffers_to_sync(self) -> list[torch.Tensor]:
        """Buffers to copy from the first rank to all ranks at the end of this step. Local."""
        if not (self._buffers_of_ranks and self.broadcast_buffers and self.training and self._world_size > 1):
            return []
        # A module may have replaced or removed one; TorchScript's mapping has no `get`.
        found = [buffers[name] for buffers, name in self._buffers_of_ranks if name in buffers]
        return [buffer for buffer in found if buffer is not None]

    def brings_now(self, parameter: torch.Tensor) -> bool:
        """Whether the current backward pass came through this engine, and it averages the parameter. Local."""
        return self._backward.came_by(current_graph_task_id()) and id(parameter) in self._own

    def may_average(self, parameters: frozenset[int]) -> bool:
        """Whether a backward pass in which this engine averages any of these has begun or may begin. Local."""
        return self._backward.phase is not Phase.IDLE and not self._own.isdisjoint(parameters)

    def give_way(self, parameters: frozenset[int]) -> None:
        """Cede to a new engine for these parameters the gradients that bypass all outputs. Local."""
        if not self._own.isdisjoint(parameters):
            self._backward.forget()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without averaging, for forward passes inside. Local, but use it on all ranks alike."""
        previous = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = previous

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Let `hook(state, bucket)` reduce each bucket; it returns a future of the reduced flat tensor.

        Hooks from `torch.distributed.algorithms.ddp_comm_hooks` work unchanged. A hook gets unscaled gradients and
        divides by the world size itself. Local; register the same hook on all ranks.
        """
        if not callable(hook):
            raise InputTypeError(f"a communication hook must be callable, got {type(hook).__name__}")
        self._reducer.register_hook(state, hook)
        self._hook = (state, hook)

    # ---- what others ask -----------------------------------------------------------------------

    def pre_step(self, optimizer: torch.optim.Optimizer, arguments: StepArguments) -> StepArguments | None:
        """Called when an optimizer is about to step; see `AveragingModule`. Local.

        Raises:
            ModelError: it steps within the backward pass, with this rank's own gradients; or there are parameters that
                no engine averages.
            UnusedParameters: a backward pass left gradients to another one, which was not run.
        """
        self.changes.check(optimizer)
        if self._own.isdisjoint(map(id, parameters_of(optimizer))):
            return None
        if self._sharded:
            refuse_others(optimizer, parameters_of(optimizer), self._sharded)
        backward, task = self._backward, current_graph_task_id()
        if task != _NO_TASK:
            if backward.is_under_way and backward.begun_task == task:
                self._pre_step_within(optimizer)
        elif backward.awaited and not join_config_of(self).enable:
            backward.check_awaited(f"before {describe_step(optimizer)}")
        if self._world_size > 1 and isinstance(optimizer, torch.optim.LBFGS):
            return with_mean_of_closure(arguments, backward, self.process_group)
        return arguments

    def _pre_step_within(self, optimizer: torch.optim.Optimizer) -> None:
        if self._world_size > 1:
            raise ModelError(
                f"{describe_step(optimizer)}: the optimizer steps during the backward pass, with this rank's own "
                "gradients; DistributedDataParallel averages them at its end. Step after backward()"
            )
        self._backward.step_comes_within()

    def check_unread(self) -> None:
        """Check results of comparisons between ranks that are still unread on a GPU. Local.

        Raises:
            CollectiveMismatch: the ranks averaged gradients of different batches.
        """
        if "_agreement" in vars(self):
            self._agreement.claims.read_arrived(0)

    @property
    def has_averaged(self) -> bool:
        """Whether any backward pass of this engine has been averaged. Local."""
        return self._agreement.num_averagings > 0

    def tensors_alike(self) -> dict[str, torch.Tensor]:
        """Tensors that should end up equal on all ranks; none with a communication hook, which decides. Local."""
        return {} if self._hook is not None else find_alike(self.module, self._ignored, self.broadcast_buffers)

    # ---- join: ranks with fewer batches --------------------------------------------------------

    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False
    ) -> Join:
        """A context in which ranks may run out of batches at different times.

        A rank that finishes early keeps contributing zeros to the collectives of the others. With `lockstep.DataLoader`
        this is not needed: it gives every rank the same number of batches. If ranks have different numbers of rows
        (from the tag, `samples`, or the first input's first dimension), the mean is taken over all rows.

        Args:
            divide_by_initial_world_size: keep dividing by the number of all ranks, as torch does; if False, by the
                number of those still training.
            enable: False disables the context.
            throw_on_early_termination: raise on all ranks as soon as one has no more batches.
        """
        return RepeatableJoin(
            self, enable, throw_on_early_termination, divide_by_initial_world_size=divide_by_initial_world_size
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """The actions of a rank that has joined; called by torch's `Join`."""
        if self._sharded:
            raise ModelError(f"Join: {JOIN_ADVICE}")
        self._joined.divides_by_all = bool(kwargs.get("divide_by_initial_world_size", True))
        return JoinedRank(self, self._ignored)

    @property
    def join_device(self) -> torch.device:
        """Device of the collectives of `Join`."""
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """Group of the collectives of `Join`."""
        return self.process_group

    def answer_step(self) -> None:
        """Take part in one step of the ranks that still train, having joined. Collective; `Join` calls it."""
        if self._joined.agree_on_step(trains=False, averages=False, rows=0):
            self._backward.answer_step(self)
