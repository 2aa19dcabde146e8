"""Sets up every way with its usual calls: around the model, and between loss and optimizer.

For weights of ranks with uneven batches, see [Note: who weights] in `recipes/imagenet/strategies.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

import lockstep
from lockstep.batch.share import BatchShare
from lockstep.bench.strategies.task import Task
from lockstep.recipes.imagenet.strategies import prepare, weighted
from lockstep.world import World

__all__ = ["TrainingConfig", "TrainingSetup", "alone", "build"]


@dataclass(frozen=True)
class TrainingConfig:
    """The configuration of a way.

    Attributes:
        task: model and data.
        nproc: number of ranks, or of replicas of DataParallel.
        device: device of this rank.
        initialize: `lockstep.init` with a rendezvous, for a way that Lockstep starts or spawns.
    """

    task: Task
    nproc: int
    device: torch.device
    initialize: Callable[..., World] = lockstep.init

    def model(self) -> nn.Module:
        """A new model, on the device."""
        return self.task.make_model().to(self.device)

    def optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        """A new optimizer of a model's parameters."""
        return torch.optim.SGD(module.parameters(), lr=self.task.lr, momentum=self.task.momentum)


def _backward(loss: Tensor, share: BatchShare) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


@dataclass
class TrainingSetup:
    """A way, ready to train.

    Attributes:
        model: called by the loop.
        module: the network inside.
        optimizer: the optimizer of the parameters, whose state is reset for every training.
        rank: rank of this process.
        world_size: number of ranks that share a batch.
        backward: computes gradients from the local mean loss.
        step: updates the parameters.
        zero_grad: drops the gradients.
        close: called at the end.
    """

    model: Callable[[Tensor], Tensor]
    module: nn.Module
    optimizer: torch.optim.Optimizer
    rank: int = 0
    world_size: int = 1
    backward: Callable[[Tensor, BatchShare], None] = _backward
    step: Callable[[], object] = lambda: None
    zero_grad: Callable[[], object] = lambda: None
    close: Callable[[], object] = lambda: None
    _initial: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._initial = {name: tensor.detach().clone() for name, tensor in self.module.state_dict().items()}

    def begin_again(self) -> None:
        """Go back to the initial weights."""
        self.module.load_state_dict(self._initial)
        self.optimizer.state.clear()


def alone(config: TrainingConfig, rank: int = 0, world_size: int = 1) -> TrainingSetup:
    """One process without averaging: `single`, or a rank without its communication."""
    module = config.model()
    optimizer = config.optimizer(module)
    return TrainingSetup(
        module, module, optimizer, rank, world_size, step=optimizer.step, zero_grad=optimizer.zero_grad
    )


def build(name: str, config: TrainingConfig) -> TrainingSetup:
    """Build a way. Collective: every rank of it calls this.

    Args:
        name: one of `ways.WAYS`.
    """
    if name in _BUILDERS:
        return _BUILDERS[name](config)
    return _ours(name, config)


def _ours(name: str, config: TrainingConfig) -> TrainingSetup:
    """A strategy of `lockstep train imagenet`."""
    if name in ("apex", "horovod"):
        _take_own_shims()
    world = config.initialize(device=config.device)
    module = config.model()
    precision = "fp64" if config.task.dtype == torch.float64 else "fp32"
    strategy = prepare(name, module, config.optimizer(module), world, precision=precision, replicas=config.nproc)
    update = strategy.update

    def step() -> None:
        update.finish()
        update.step()

    def close() -> None:
        strategy.close()
        world.shutdown()

    return TrainingSetup(
        strategy.model,
        strategy.model.module,
        strategy.optimizer,
        world.rank,
        world.world_size,
        backward=lambda loss, share: update.backward(loss, share, True),
        step=step,
        zero_grad=strategy.optimizer.zero_grad,
        close=close,
    )


def _sharded(config: TrainingConfig) -> TrainingSetup:
    world = config.initialize(device=config.device)
    module = config.model()
    plain = config.optimizer(module)
    model = lockstep.DistributedDataParallel(module)
    optimizer = lockstep.ZeroRedundancyOptimizer(model.parameters(), type(plain), **plain.defaults)
    return TrainingSetup(
        model,
        module,
        optimizer.optim,  # has the state
        world.rank,
        world.world_size,
        step=optimizer.step,
        zero_grad=optimizer.zero_grad,
        close=world.shutdown,
    )


def _take_own_shims() -> None:
    """Import Lockstep's modules as Apex and Horovod, even if those are installed."""
    import lockstep.compat.apex.amp
    import lockstep.compat.apex.parallel
    import lockstep.compat.horovod.torch

    sys.modules["apex.amp"] = lockstep.compat.apex.amp
    sys.modules["apex.parallel"] = lockstep.compat.apex.parallel
    sys.modules["horovod.torch"] = lockstep.compat.horovod.torch


def _weighted_backward(loss: Tensor, share: BatchShare) -> None:
    _backward(weighted(loss, share), share)


def _torch_dp(config: TrainingConfig) -> TrainingSetup:
    module = config.model()
    optimizer = config.optimizer(module)
    model = nn.DataParallel(module, device_ids=list(range(config.nproc)))
    return TrainingSetup(model, module, optimizer, step=optimizer.step, zero_grad=optimizer.zero_grad)


def _torch_ddp(config: TrainingConfig) -> TrainingSetup:
    dist.init_process_group("nccl" if config.device.type == "cuda" else "gloo")
    return _around_torch_ddp(config, dist.destroy_process_group)


def _torch_ddp_on_lockstep(config: TrainingConfig) -> TrainingSetup:
    world = config.initialize(device=config.device)
    return _around_torch_ddp(config, world.shutdown)


def _averaging_plainly(
    model: Callable[[Tensor], Tensor],
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int,
    world_size: int,
    close: Callable[[], object],
) -> TrainingSetup:
    """The setup of a library that takes the plain mean over ranks, and does not change calls of the optimizer."""
    return TrainingSetup(
        model,
        module,
        optimizer,
        rank,
        world_size,
        backward=_weighted_backward,
        step=optimizer.step,
        zero_grad=optimizer.zero_grad,
        close=close,
    )


def _around_torch_ddp(config: TrainingConfig, close: Callable[[], object]) -> TrainingSetup:
    module = config.model()
    optimizer = config.optimizer(module)
    device_ids = [config.device.index] if config.device.type == "cuda" else None
    model = nn.parallel.DistributedDataParallel(module, device_ids=device_ids)
    return _averaging_plainly(model, module, optimizer, dist.get_rank(), dist.get_world_size(), close)


def _accelerate(config: TrainingConfig) -> TrainingSetup:
    import accelerate  # type: ignore[import-untyped]

    accelerator = accelerate.Accelerator(cpu=config.device.type == "cpu", mixed_precision="no")
    module = config.model()
    raw = config.optimizer(module)
    model, optimizer = accelerator.prepare(module, raw)
    return TrainingSetup(
        model,
        accelerator.unwrap_model(model),
        raw,
        accelerator.process_index,
        accelerator.num_processes,
        backward=lambda loss, share: accelerator.backward(weighted(loss, share)),
        step=optimizer.step,
        zero_grad=optimizer.zero_grad,
        close=accelerator.end_training,
    )


def _fabric(config: TrainingConfig) -> TrainingSetup:
    import lightning_fabric

    double = config.task.dtype == torch.float64
    fabric = lightning_fabric.Fabric(
        accelerator=config.device.type,
        strategy="ddp",
        devices=config.nproc,
        precision="64-true" if double else "32-true",
    )
    fabric.launch()
    module = config.model()
    raw = config.optimizer(module)
    model, optimizer = fabric.setup(module, raw)
    if double:  # Fabric converts a model's output to the default dtype
        torch.set_default_dtype(torch.float64)
    return TrainingSetup(
        model,
        module,
        raw,
        fabric.global_rank,
        fabric.world_size,
        backward=lambda loss, share: fabric.backward(weighted(loss, share)),
        step=optimizer.step,
        zero_grad=optimizer.zero_grad,
        close=_leave,
    )


def _ignite(config: TrainingConfig) -> TrainingSetup:
    import ignite.distributed as idist  # type: ignore[import-not-found, unused-ignore]

    idist.initialize("nccl" if config.device.type == "cuda" else "gloo")
    module = config.model()
    model = idist.auto_model(module)
    optimizer = idist.auto_optim(config.optimizer(module))
    return _averaging_plainly(model, module, optimizer, idist.get_rank(), idist.get_world_size(), idist.finalize)


def _horovod_itself(config: TrainingConfig) -> TrainingSetup:
    import horovod.torch as hvd  # type: ignore[import-not-found, unused-ignore]

    hvd.init()
    module = config.model()
    raw = config.optimizer(module)
    optimizer = hvd.DistributedOptimizer(raw, named_parameters=module.named_parameters())
    hvd.broadcast_parameters(module.state_dict(), root_rank=0)
    return _averaging_plainly(module, module, optimizer, hvd.rank(), hvd.size(), hvd.shutdown)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


_BUILDERS: dict[str, Callable[[TrainingConfig], TrainingSetup]] = {
    "single": alone,
    "single_threads": alone,
    "sharded": _sharded,
    "torch_dp": _torch_dp,
    "torch_ddp": _torch_ddp,
    "torch_ddp_lockstep": _torch_ddp_on_lockstep,
    "accelerate": _accelerate,
    "fabric": _fabric,
    "ignite": _ignite,
    "horovod_itself": _horovod_itself,
}
