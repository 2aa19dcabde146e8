"""`lockstep.DistributedDataParallel`: a model on every rank, one gradient.

[Note: backward passes] The engine learns that a backward pass runs from a hook on the outputs of the forward
pass, weights the incoming gradient there (see [Note: exact weighting]) and asks autograd to call it back
when the pass is over. A pass that reached only some parameters is of one of three kinds: the rest is reachable
from the outputs (another backward pass will bring it: wait), the user said that parameters may be unused
(zeros go out for them), or it is a mistake, and raises in that very step.

[Note: exact weighting] Rank r holds n_r of the n samples of a global batch and computes the mean over its n_r. The
gradient of the mean over all n is the mean over ranks of the local gradients times n_r * W / n. The factor is applied
to the gradient that enters the backward pass at the model's outputs: so it is exact for every micro-batch of an
accumulation, does not touch terms of the loss that do not depend on the batch, and costs nothing when it
is 1, as with all batches that divide evenly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from lockstep import batch
from lockstep.comm.backend import LockstepProcessGroup
from lockstep.errors import InputError, InputTypeError, ModelError, NotInitialized, UnusedParameters
from lockstep.log import get_logger, warn_once
from lockstep.parallel.agreement import broadcast_tensors, check_same_model
from lockstep.parallel.buckets import plan_buckets
from lockstep.parallel.graph import map_tensors, reachable_leaves
from lockstep.parallel.reducer import CommHook, Reducer
from lockstep.parallel.transports import make_transport

__all__ = ["DistributedDataParallel"]

_logger = get_logger(__name__)

_DEFAULT_BUCKET_MIB = 25.0
_FIRST_BUCKET_BYTES = 1 << 20
_MIB = 1 << 20


class DistributedDataParallel(torch.nn.Module, Joinable):
    """Trains one model on all ranks of a group: their gradients are averaged during the backward pass.

    A drop-in for `torch.nn.parallel.DistributedDataParallel`. On a lockstep group gradients meet in shared
    memory; on any other group (gloo, nccl, …) each bucket is one asynchronous all_reduce.
    With `lockstep.DataLoader` the gradient is that of the mean over the global batch, also when ranks
    hold different numbers of samples; without it, the plain mean over ranks.

    Collective: every rank constructs it, with the same model. Parameters and buffers become those of rank 0.

    Args:
        module: the model, already on its device.
        device_ids: None, or a list with this rank's one device, to which inputs are then moved.
        output_device: must agree with `device_ids`; there for torch's signature.
        dim: must be 0; there for torch's signature.
        broadcast_buffers: with the gradients of each training step, give all ranks the buffers of the first.
        init_sync: check that the models agree, and give all ranks the parameters of the first.
        process_group: who trains together; default the default group.
        bucket_cap_mb: MiB of gradients that go out together; default 25.
        find_unused_parameters: parameters may take no part in a step's loss.
        check_reduction: ignored, as in torch.
        gradient_as_bucket_view: always so here; accepted for torch's signature.
        static_graph: the set of used parameters never changes. Allows re-entrant checkpointing and
            parameters that are never used; gradients are averaged at the end of the backward pass.

    Attributes:
        module: the model. Take `state_dict` from it for names without `module.`.

    Raises:
        NotInitialized: no process group.
        ModelMismatch: on every rank, if models differ; names the first parameter that does.
        ModelError: nothing to train, or parameters that cannot be.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
    ) -> None:
        super().__init__()
        Joinable.__init__(self)
        if not isinstance(module, torch.nn.Module):
            raise InputTypeError(f"DistributedDataParallel wraps a torch.nn.Module, got {type(module).__name__}")
        if dim != 0:
            raise InputError(f"dim={dim}: one process handles one part of the batch here; only dim=0 is supported")
        group = process_group if process_group is not None else dist.group.WORLD if dist.is_initialized() else None
        if group is None:
            raise NotInitialized("DistributedDataParallel needs a process group: call lockstep.init() first")
        self.module = module
        self.process_group = group
        self.broadcast_buffers = broadcast_buffers
        self.find_unused_parameters = find_unused_parameters
        self.static_graph = static_graph
        self.require_backward_grad_sync = True
        self._world_size = group.size()
        named = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        self._check_parameters(named)
        self._parameters_to_reduce = list(named.values())
        self._names = list(named)
        self.device = self._parameters_to_reduce[0].device
        self.device_ids = self._check_device_ids(device_ids, output_device)
        if init_sync:
            self._agree()
        cap_mib = _DEFAULT_BUCKET_MIB if bucket_cap_mb is None else bucket_cap_mb
        plans = plan_buckets(self._parameters_to_reduce, max(int(cap_mib * _MIB), 1), _FIRST_BUCKET_BYTES)
        self._reducer = Reducer(
            self._parameters_to_reduce,
            self._names,
            plans,
            make_transport(plans, group),
            group,
            may_go_early=not static_graph,
        )
        self._buffers = [buffer for buffer in module.buffers() if buffer.numel() > 0]
        self._num_hooks = 0
        self._callback_queued = False
        self._roots: list[Any] = []
        self._reachable: set[int] | None = None
        self._static_unused: frozenset[int] | None = None
        self._join_divisor: int | None = None
        self._divide_by_initial_world_size = True

    # ---- construction --------------------------------------------------------------------------

    def _check_parameters(self, named: dict[str, torch.nn.Parameter]) -> None:
        if not named:
            raise ModelError("no parameter of the model requires a gradient: there is nothing to average")
        for name, parameter in named.items():
            if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
                raise ModelError(f"parameter {name} is lazy and has no shape yet: run one forward pass before wrapping")

    def _check_device_ids(
        self, device_ids: Sequence[int | torch.device] | None, output_device: int | torch.device | None
    ) -> list[torch.device] | None:
        if not device_ids:
            return None
        if len(device_ids) != 1:
            raise InputError(
                f"device_ids={list(device_ids)}: one process drives one device here. Give [local_rank], or None and "
                "start one process per device"
            )
        chosen = torch.device("cuda", device_ids[0]) if isinstance(device_ids[0], int) else torch.device(device_ids[0])
        devices = {parameter.device for parameter in self._parameters_to_reduce}
        if devices != {chosen}:
            raise InputError(
                f"device_ids names {chosen}, but parameters are on {', '.join(sorted(map(str, devices)))}. Move the "
                "model there first, or leave device_ids out (as CPU models and models on several devices must)"
            )
        if output_device is not None and torch.device(output_device) != chosen and output_device != device_ids[0]:
            warn_once(_logger, f"output_device={output_device} is ignored: outputs stay on {chosen}")
        return [chosen]

    def _agree(self) -> None:
        tensors = dict(self.module.named_parameters()) | dict(self.module.named_buffers())
        device = self.device if not isinstance(self.process_group, LockstepProcessGroup) else torch.device("cpu")
        check_same_model(tensors, self.process_group, device)
        broadcast_tensors([tensor.detach() for tensor in tensors.values()], self.process_group)

    # ---- forward -------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; its backward pass will average gradients.

        In evaluation mode, or without gradients, this is the module alone and no rank waits for another.
        """
        with_gradients = torch.is_grad_enabled()
        syncing = with_gradients and self.require_backward_grad_sync
        if with_gradients:
            syncing = self._join_before_forward(syncing)
            self._roots.clear()
            self._callback_queued = False
            if syncing:
                self._reducer.rearm()
            else:
                self._reducer.disarm()
        if self.device_ids is not None:
            device = self.device_ids[0]
            inputs, kwargs = map_tensors(lambda tensor: tensor.to(device, non_blocking=True), (inputs, kwargs))
        with torch.autograd.profiler.record_function("lockstep.DistributedDataParallel.forward"):
            output = self.module(*inputs, **kwargs)
        if not with_gradients:
            return output
        return self._watch(output, syncing)

    def _watch(self, output: Any, syncing: bool) -> Any:
        """Put the engine's hook on every output that requires a gradient."""
        share = batch.current()
        weight = 1.0
        if share is not None and share.world_size == self._world_size:
            weight = share.weight
        if weight == 1.0 and not syncing:
            return output

        def on_gradient(gradient: torch.Tensor) -> torch.Tensor | None:
            if syncing:
                self._backward_begins()
            return None if weight == 1.0 else gradient * weight

        num_watched = 0

        def watch(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal num_watched
            if not tensor.requires_grad:
                return tensor
            num_watched += 1
            # A leaf would keep the hook beyond this step: watch a view of it instead.
            watched = tensor.view_as(tensor) if tensor.grad_fn is None else tensor
            watched.register_hook(on_gradient)
            if syncing:
                self._roots.append(watched.grad_fn)
            return watched

        watched_output = map_tensors(watch, output)
        if num_watched == 0 and self.training:
            warn_once(
                _logger,
                f"the model returned no tensor that requires a gradient (it returned {type(output).__name__}): its "
                "gradients will not be averaged. Return tensors, or containers that torch.utils._pytree knows",
            )
        if syncing and self.find_unused_parameters:
            self._reachable = reachable_leaves(self._roots)
        return watched_output

    def _buffers_to_sync(self) -> list[torch.Tensor]:
        """Buffers that all ranks shall have from the first rank when this step is over."""
        if not (self.broadcast_buffers and self.training and self._world_size > 1):
            return []
        return self._buffers

    def _sync_buffers_joined(self, joined: bool) -> None:
        """Under `join`: give all ranks the buffers of the last rank that still trains. Collective."""
        buffers = self._buffers_to_sync()
        if not buffers:
            return
        candidate = torch.tensor([-1 if joined else self.process_group.rank()], device=self.device)
        dist.all_reduce(candidate, dist.ReduceOp.MAX, group=self.process_group)
        if int(candidate.item()) >= 0:
            broadcast_tensors(buffers, self.process_group, int(candidate.item()))

    # ---- backward ------------------------------------------------------------------------------

    def _backward_begins(self) -> None:
        if not self._callback_queued:
            self._callback_queued = True
            Variable._execution_engine.queue_callback(self._backward_ends)  # type: ignore[attr-defined]

    def _backward_ends(self) -> None:
        self._callback_queued = False
        missing = self._reducer.missing()
        keep_none: list[int] = []
        if missing and self._comes_later(missing):
            return
        if missing:
            self._check_unused(missing)
        if self.find_unused_parameters or (self.static_graph and self._static_unused):
            keep_none = self._unused_everywhere(missing)
        self._roots.clear()
        self._reachable = None
        if self._world_size > 1 or self._num_hooks:
            with torch.autograd.profiler.record_function("lockstep.DistributedDataParallel.reduce"):
                if self._join_config.enable:
                    self._sync_buffers_joined(joined=False)
                    self._reducer.finish(keep_none)
                    self._rescale_after_join()
                else:
                    self._reducer.finish(keep_none, self._buffers_to_sync())

    def _comes_later(self, missing: list[int]) -> bool:
        """Whether parts of the model wait for another backward pass over the same outputs."""
        reachable = self._reachable if self._reachable is not None else reachable_leaves(self._roots)
        return any(id(self._parameters_to_reduce[index]) in reachable for index in missing)

    def _check_unused(self, missing: list[int]) -> None:
        if self.find_unused_parameters:
            return
        if self.static_graph:
            if self._static_unused is None:
                self._static_unused = frozenset(missing)
            if self._static_unused == frozenset(missing):
                return
        names = [self._names[index] for index in missing]
        listed = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
        if self.static_graph:
            advice = "static_graph=True says that the same parameters are used in every step; they were not"
        else:
            advice = (
                "Use them, freeze them (requires_grad_(False)), or pass find_unused_parameters=True if a step may "
                "leave some out"
            )
        raise UnusedParameters(
            f"{len(names)} parameter(s) got no gradient on rank {dist.get_rank()} in this step: {listed}. {advice}"
        )

    def _unused_everywhere(self, missing: Sequence[int]) -> list[int]:
        """Parameters that no rank has a gradient for. Collective."""
        used = torch.ones(len(self._names), dtype=torch.uint8)
        used[list(missing)] = 0
        used = used.to(self.device)
        dist.all_reduce(used, dist.ReduceOp.MAX, group=self.process_group)
        return (used == 0).nonzero().flatten().tolist()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without averaging, for forward passes inside. Local, on all ranks alike."""
        previous = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = previous

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Let `hook(state, bucket)` reduce each bucket; it returns a future of the reduced flat tensor.

        Hooks of `torch.distributed.algorithms.ddp_comm_hooks` work unchanged. A hook gets gradients
        as they are: it divides by the world size itself. Local, the same on all ranks.
        """
        if not callable(hook):
            raise InputTypeError(f"a communication hook must be callable, got {type(hook).__name__}")
        self._reducer.register_hook(state, hook)
        self._num_hooks += 1

    # ---- join: ranks with fewer batches --------------------------------------------------------

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """A context in which ranks may run out of batches at different times.

        A rank that leaves early goes on answering the collectives of the others with zeros. With
        `lockstep.DataLoader` nobody needs it: every rank has the same number of batches there.

        Args:
            divide_by_initial_world_size: go on dividing by all ranks; False divides by those still training.
            enable: False turns the context off.
            throw_on_early_termination: raise on all ranks as soon as one has no more batches.
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What a rank does that has joined; called by torch's `Join`."""
        return _JoinedRank(self, bool(kwargs.get("divide_by_initial_world_size", True)))

    @property
    def join_device(self) -> torch.device:
        """Device of the collectives of `Join`."""
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """Group of the collectives of `Join`."""
        return self.process_group

    def _join_before_forward(self, syncing: bool) -> bool:
        """Under `join`: tell the joined ranks what comes. Returns whether this step averages. Collective."""
        if not self._join_config.enable:
            return syncing
        work = Join.notify_join_context(self)
        if work is not None:
            work.wait()
        return self._join_agree(syncing)

    def _join_agree(self, syncing: bool) -> bool:
        """How many ranks take part in this step, and whether it averages: [takes part, averages]. Collective."""
        state = torch.tensor([1, int(syncing)], dtype=torch.int64, device=self.device)
        dist.all_reduce(state, group=self.process_group)
        self._join_divisor = None if self._divide_by_initial_world_size else int(state[0])
        return bool(state[1] > 0)

    def _rescale_after_join(self) -> None:
        if self._join_divisor is None or not self._join_config.enable:
            return
        factor = self._world_size / self._join_divisor
        for parameter in self._parameters_to_reduce:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def _shadow_step(self) -> None:
        """Answer one step of the ranks that still train. Collective."""
        state = torch.tensor([0, 0], dtype=torch.int64, device=self.device)
        dist.all_reduce(state, group=self.process_group)
        if not bool(state[1] > 0):
            return
        if self.find_unused_parameters or (self.static_graph and self._static_unused):
            self._unused_everywhere(range(len(self._names)))
        self._sync_buffers_joined(joined=True)
        self._reducer.finish_with_zeros()


class _JoinedRank(JoinHook):
    """Stands in for a rank that has run out of batches.

    Args:
        engine: the engine whose collectives it answers.
        divide_by_initial_world_size: see `DistributedDataParallel.join`.
    """

    def __init__(self, engine: DistributedDataParallel, divide_by_initial_world_size: bool) -> None:
        self._engine = engine
        engine._divide_by_initial_world_size = divide_by_initial_world_size
        super().__init__()

    def main_hook(self) -> None:
        """Answer one step of the others."""
        self._engine._shadow_step()

    def post_hook(self, is_last_joiner: bool) -> None:
        """All have joined: give everybody the model of the last that trained."""
        engine = self._engine
        candidate = torch.tensor([engine.process_group.rank() if is_last_joiner else -1], device=engine.device)
        dist.all_reduce(candidate, dist.ReduceOp.MAX, group=engine.process_group)
        tensors = [*engine.module.parameters(), *engine.module.buffers()]
        broadcast_tensors([tensor.detach() for tensor in tensors], engine.process_group, int(candidate.item()))
