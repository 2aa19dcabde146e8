"""Six ways to train on several devices, and one for a single device, each through its usual interface.

    single              one process, one device
    dp                  one process with a replica per device: DataParallel
    ddp, spawn, slurm   a process per device: DistributedDataParallel; they differ in who starts the processes
    apex                amp.initialize, apex.parallel.DistributedDataParallel, amp.scale_loss
    horovod             hvd.DistributedOptimizer, hvd.broadcast_parameters

A strategy wraps the network, and comes between loss and optimizer (`lockstep.train.Update`); data, loop,
evaluation and checkpoints are the same for all. Apex and Horovod are imported under their own names: in ranks that
Lockstep starts these are Lockstep's shims, unless the real packages are installed.

[Note: who weights] A rank holds n_r of the n images of a batch, and n_r is not the same on all ranks if the batch
does not divide evenly. Lockstep's engines weight gradients by n_r / n; all others take the plain mean over ranks,
so the loss is multiplied by world_size * n_r / n before its backward pass.

[Note: worth a share] With ddp, spawn and slurm each rank can update a shard of the parameters, with
`ZeroRedundancyOptimizer`. On the CPUs of one host, ranks then do not repeat each other's work, but every step
has more calls and barriers; on several hosts that holds for the ranks of each. With this SGD on two ranks, a tenth
of a million parameters were slower this way, half a million faster. With large images, the time of the convolutions
hides either.
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
    """A network, ready to be trained on all devices.

    Attributes:
        model: called by the loop.
        optimizer: stepped by the loop.
        update: comes between the two.
        owns_buffers: whether each rank has its own batch norm statistics during training.
        notes: lines to print before training.
        close: called after training, before the world is closed.
    """

    model: Parallel
    optimizer: torch.optim.Optimizer
    update: Update
    owns_buffers: bool = False
    notes: tuple[str, ...] = ()
    close: Callable[[], None] = lambda: None

    def align_buffers(self) -> None:
        """Give all ranks rank 0's statistics, so that the same network is evaluated. Collective."""
        group = torch.distributed.group.WORLD
        if self.owns_buffers and group is not None:
            broadcast_tensors(list(self.model.module.buffers()), group)


class _Around:
    """A network without gradient averaging: the module itself, or in DataParallel. A `lockstep.train.Parallel`."""

    def __init__(self, module: nn.Module, called: nn.Module | None = None) -> None:
        self.module = module
        self._called = called or module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # As in Lockstep's engines: batch norm over ranks leaves out the filler of a rank without samples.
        with batch.hand.active(batch.hand.current()):
            return self._called(*args, **kwargs)

    def train(self, mode: bool = True) -> nn.Module:
        return self._called.train(mode)

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()


class _Scaled(Update):
    """Scales losses for 16-bit floats (`torch.amp.GradScaler`), if there is a scaler."""

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
    """Lets the optimizer average gradients before they are read, and not again in its step."""

    def backward(self, loss: Tensor, share: BatchShare, closes_step: bool) -> None:
        super().backward(weighted(loss, share), share, closes_step)

    def finish(self) -> None:
        self.optimizer.synchronize()  # type: ignore[attr-defined]
        super().finish()

    def step(self) -> None:
        with self.optimizer.skip_synchronize():  # type: ignore[attr-defined]
            super().step()


class _Apex(Update):
    """Lets Apex scale losses and unscale gradients."""

    def __init__(self, optimizer: torch.optim.Optimizer, amp: Any, *, weights: bool) -> None:
        super().__init__(optimizer)
        self.amp, self.weights = amp, weights

    def backward(self, loss: Tensor, share: BatchShare, closes_step: bool) -> None:
        loss = weighted(loss, share) if self.weights else loss
        with self.amp.scale_loss(loss, self.optimizer, delay_unscale=not closes_step) as scaled_loss:
            scaled_loss.backward()

    def parameters(self, module: nn.Module) -> list[nn.Parameter]:
        # With master weights, the optimizer has these instead of the network's.
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
    """Wrap a network in a strategy. Collective: every rank calls it with the same arguments.

    Args:
        name: one of `options.STRATEGIES`.
        module: the network, on the world's device, in its final dtype, with the same parameters on all ranks.
        optimizer: optimizer of its parameters.
        world: the ranks.
        precision: one of `options.PRECISIONS`; "fp16" scales losses.
        opt_level: opt level of Apex.
        replicas: number of replicas of "dp" without GPUs.
        accumulate: backward passes per step.
        shards: whether each rank of ddp, spawn and slurm updates a shard; None if it is faster, see
            [Note: worth a share].

    Raises:
        SetupError: Apex or Horovod cannot be imported; or there is no shared memory for the requested shards.
        InputError: the strategy does not support the precision.
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
        except SharedMemoryError as error:  # on every rank, with the network unchanged
            if shards:
                raise
            notes = [f"each rank updates all parameters: {error}"]
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
            f"--precision {precision} is not supported by --strategy apex, where opt levels select 16 bits: use "
            "--opt-level O1, O2 or O3"
        )
    if precision == "fp64" and opt_level != "O0":
        raise InputError(f"--opt-level {opt_level} computes in 16 bits; with --precision fp64, use --opt-level O0")
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
    state = {
        name: tensor.contiguous() for name, tensor in module.state_dict().items()
    }  # Horovod accepts no other tensors
    hvd.broadcast_parameters(state, root_rank=0)
    module.load_state_dict(state)
    seeding.begin_rank_streams()  # as Lockstep's engines do: dropout masks differ between ranks
    update = _Horovod(distributed, scaler)
    return Strategy(_Around(module), distributed, update, owns_buffers=True, close=hvd.shutdown)


def _import(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise SetupError(
            f"{package} is not installed, and Lockstep's shim for it is active only in processes that Lockstep "
            "starts: use `lockstep train imagenet` or `lockstep run -m lockstep.recipes.imagenet`"
        ) from error


def weighted(loss: Tensor, share: BatchShare) -> Tensor:
    """The loss for engines other than Lockstep's. See [Note: who weights]."""
    return loss if share.weight == 1 else loss * share.weight
