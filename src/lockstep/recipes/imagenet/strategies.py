"""Six ways to train on several devices, and one device alone, each as its users know it.

    single              one process, one device
    dp                  one process, a replica on each device: DataParallel
    ddp, spawn, slurm   a process for each device: DistributedDataParallel; they differ in who starts the processes
    apex                amp.initialize, apex.parallel.DistributedDataParallel, amp.scale_loss
    horovod             hvd.DistributedOptimizer, hvd.broadcast_parameters

A strategy is what stands around the network and between loss and optimizer (`lockstep.train.Update`); data, loop,
evaluation and checkpoints are the same for all. Apex and Horovod are imported by their own names: in ranks that
Lockstep starts these are Lockstep's shims, unless the real packages are installed.

[Note: who weights] A rank holds n_r of the n images of a batch, and n_r is not the same on all ranks where the batch
does not divide evenly. Lockstep's engines weight what goes through them; all others take the plain mean over ranks of
what each has computed, so the loss is multiplied by the rank's share before its backward pass.

[Note: worth a share] With ddp, spawn and slurm each rank can step a share of the parameters, by
`ZeroRedundancyOptimizer`. On the CPUs of one host no rank then sums and steps what others do as well, and every step
has some more calls and meetings; on several hosts that holds for the ranks of each. With this SGD at two ranks, a tenth
of a million parameters took longer so, and half a million less long. The larger the images, the less either shows
next to the convolutions.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import lockstep
from lockstep import batch, seeding
from lockstep.agreement import broadcast_tensors
from lockstep.batch.share import BatchShare
from lockstep.comm.backend import engine_of
from lockstep.errors import InputError, SetupError, SharedMemoryError
from lockstep.train import Parallel, Update
from lockstep.world import World

__all__ = ["Strategy", "prepare", "weighted"]

_WORTH_A_SHARE = 1_000_000  # parameters


@dataclass(frozen=True)
class Strategy:
    """A network that is ready to be trained on all devices.

    Attributes:
        model: what the loop calls.
        optimizer: what the loop steps.
        update: what is between the two.
        owns_buffers: each rank's statistics of batch normalization are its own while training.
        notes: lines for a person to know before the training begins.
        close: called when the training is over, before the world is left.
    """

    model: Parallel
    optimizer: torch.optim.Optimizer
    update: Update
    owns_buffers: bool = False
    notes: tuple[str, ...] = ()
    close: Callable[[], None] = lambda: None

    def align_buffers(self) -> None:
        """Give all ranks the statistics of rank 0, for an evaluation of one network. Collective."""
        group = torch.distributed.group.WORLD
        if self.owns_buffers and group is not None:
            broadcast_tensors(list(self.model.module.buffers()), group)


class _Around:
    """A network that nobody averages from within: itself, or in DataParallel. A `lockstep.train.Parallel`."""

    def __init__(self, module: nn.Module, called: nn.Module | None = None) -> None:
        self.module = module
        self._called = called or module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # As Lockstep's engines do: batch normalization over ranks leaves out the filler of a rank without a sample.
        with batch.hand.active(batch.hand.current()):
            return self._called(*args, **kwargs)

    def train(self, mode: bool = True) -> nn.Module:
        return self._called.train(mode)

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()


class _Scaled(Update):
    """Losses scaled for 16-bit floats (`torch.amp.GradScaler`), where there is a scaler."""

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None) -> None:
        super().__init__(optimizer)
        self.scaler = scaler

    def backward(self, loss: Tensor, share: BatchShare, closes_step: bool) -> None:
        super().backward(loss if self.scaler is None else self.scaler.scale(loss), share, closes_step)

    def finish(self) -> None:
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)

    def step(self) -> None:
        if self.scaler is None:
            super().step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def state_dict(self) -> dict[str, Any]:
        return {} if self.scaler is None else {"scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.scaler is not None and "scaler" in state:
            self.scaler.load_state_dict(state["scaler"])


class _Horovod(_Scaled):
    """Gradients are averaged by the optimizer: before they are looked at, and not again in its step."""

    def backward(self, loss: Tensor, share: BatchShare, closes_step: bool) -> None:
        super().backward(weighted(loss, share), share, closes_step)

    def finish(self) -> None:
        self.optimizer.synchronize()  # type: ignore[attr-defined]
        super().finish()

    def step(self) -> None:
        with self.optimizer.skip_synchronize():  # type: ignore[attr-defined]
            super().step()


class _Apex(Update):
    """Losses are scaled, and gradients unscaled, by Apex."""

    def __init__(self, optimizer: torch.optim.Optimizer, amp: Any, *, weights: bool) -> None:
        super().__init__(optimizer)
        self.amp, self.weights = amp, weights

    def backward(self, loss: Tensor, share: BatchShare, closes_step: bool) -> None:
        loss = weighted(loss, share) if self.weights else loss
        with self.amp.scale_loss(loss, self.optimizer, delay_unscale=not closes_step) as scaled_loss:
            scaled_loss.backward()

    def parameters(self, module: nn.Module) -> list[nn.Parameter]:
        # With master weights, the optimizer holds those, and not the network's.
        groups = self.optimizer.param_groups
        return [parameter for group in groups for parameter in group["params"] if parameter.grad is not None]

    def state_dict(self) -> dict[str, Any]:
        return {"amp": dict(self.amp.state_dict())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "amp" in state:
            self.amp.load_state_dict(state["amp"])


def prepare(
    name: str,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    world: World,
    *,
    precision: str,
    opt_level: str = "O0",
    replicas: int = 1,
    accumulate: int = 1,
    shards: bool | None = False,
) -> Strategy:
    """Put a strategy around a network. Collective: every rank calls it with the same arguments.

    Args:
        name: one of `options.STRATEGIES`.
        module: on the world's device, in its dtype, with the same parameters on all ranks.
        optimizer: over its parameters.
        world: the ranks.
        precision: one of `options.PRECISIONS`; "fp16" scales losses.
        opt_level: of Apex.
        replicas: of "dp", where there are no GPUs.
        accumulate: backward passes per step.
        shards: whether each rank of ddp, spawn and slurm steps a share; None for where it is faster, see
            [Note: worth a share].

    Raises:
        SetupError: Apex or Horovod cannot be imported; or there is no shared memory for the shares that were asked for.
        InputError: a precision that the strategy does not have.
    """
    scaler = torch.amp.GradScaler(world.device.type) if precision == "fp16" and name != "apex" else None
    if name == "single":
        return Strategy(_Around(module), optimizer, _Scaled(optimizer, scaler))
    if name == "dp":
        devices: Any = None if world.device.type == "cuda" else ["cpu"] * replicas
        return Strategy(_Around(module, lockstep.DataParallel(module, devices)), optimizer, _Scaled(optimizer, scaler))
    if name == "apex":
        return _prepare_apex(module, optimizer, precision, opt_level)
    if name == "horovod":
        return _prepare_horovod(module, optimizer, scaler, accumulate)
    device_ids = [world.device.index] if world.device.type == "cuda" else None
    model = lockstep.DistributedDataParallel(module, device_ids=device_ids)
    notes = []
    if _is_worth_shares(module, world) if shards is None else shards:
        try:
            optimizer = lockstep.ZeroRedundancyOptimizer(model.parameters(), type(optimizer), **optimizer.defaults)
        except SharedMemoryError as error:  # on every rank, and the network is what it was
            if shards:
                raise
            notes = [f"each rank steps all parameters: {error}"]
    return Strategy(model, optimizer, _Scaled(optimizer, scaler), notes=tuple(notes))


def _is_worth_shares(module: nn.Module, world: World) -> bool:
    """See [Note: worth a share]. Collective."""
    engine = engine_of(torch.distributed.group.WORLD)
    numel = sum(parameter.numel() for parameter in module.parameters())
    if engine is None or world.device.type != "cpu" or numel < _WORTH_A_SHARE:
        return False
    return lockstep.any(len(engine.team.near) > 1)


def _prepare_apex(module: nn.Module, optimizer: torch.optim.Optimizer, precision: str, opt_level: str) -> Strategy:
    if precision in ("bf16", "fp16"):
        raise InputError(
            f"--precision {precision} is not for --strategy apex, whose opt levels say where 16 bits are used: give "
            "--opt-level O1, O2 or O3"
        )
    if precision == "fp64" and opt_level != "O0":
        raise InputError(f"--opt-level {opt_level} computes in 16 bits: not with --precision fp64; give --opt-level O0")
    amp, parallel = _import("apex.amp", "Apex"), _import("apex.parallel", "Apex")
    levels = {"opt_level": opt_level, "verbosity": 0}
    if precision == "fp64":
        levels["cast_model_type"] = False  # O0 would make it float32
    module, optimizer = amp.initialize(module, optimizer, **levels)
    model: Parallel = parallel.DistributedDataParallel(module)
    is_ours = isinstance(model, lockstep.DistributedDataParallel)
    if not is_ours:
        model = _Around(module, model)  # type: ignore[arg-type]
    return Strategy(model, optimizer, _Apex(optimizer, amp, weights=not is_ours), owns_buffers=True)


def _prepare_horovod(
    module: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None, accumulate: int
) -> Strategy:
    hvd = _import("horovod.torch", "Horovod")
    hvd.init()
    distributed = hvd.DistributedOptimizer(
        optimizer, named_parameters=module.named_parameters(), backward_passes_per_step=accumulate
    )
    state = {name: tensor.contiguous() for name, tensor in module.state_dict().items()}  # the only kind Horovod takes
    hvd.broadcast_parameters(state, root_rank=0)
    module.load_state_dict(state)
    seeding.begin_rank_streams()  # as Lockstep's engines do: each rank has dropout masks of its own
    update = _Horovod(distributed, scaler)
    return Strategy(_Around(module), distributed, update, owns_buffers=True, close=hvd.shutdown)


def _import(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise SetupError(
            f"{package} is not installed, and Lockstep's own shim for it is installed only in processes that Lockstep "
            "starts: begin with `lockstep train imagenet` or `lockstep run -m lockstep.recipes.imagenet`"
        ) from error


def weighted(loss: Tensor, share: BatchShare) -> Tensor:
    """A loss as others than Lockstep's engines must have it. See [Note: who weights]."""
    return loss if share.weight == 1 else loss * share.weight
