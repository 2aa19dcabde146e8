"""Engines of PyTorch and others, unchanged, on the lockstep group: each trains like one process with all samples."""

from __future__ import annotations

import copy
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import lockstep
from lockstep.testing import limit_s, run_ranks

GLOBAL_BATCH = 8
STEPS = 2
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
on_cpu = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="FSDP2 of torch 2.6 needs a GPU: on the CPU gloo fails, too"
)


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 7), nn.Tanh(), nn.Linear(7, 3))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch of a step: inputs of shape (8, 6), targets of shape (8, 3)."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(GLOBAL_BATCH, 6, generator=generator), torch.randn(GLOBAL_BATCH, 3, generator=generator)


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(inputs), targets)


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, backward: Any = torch.Tensor.backward) -> None:
    """Steps on this rank's half of each batch."""
    share = GLOBAL_BATCH // dist.get_world_size()
    mine = slice(share * dist.get_rank(), share * (dist.get_rank() + 1))
    for step in range(STEPS):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        backward(loss_of(model, inputs[mine], targets[mine]))
        optimizer.step()


def reference() -> dict[str, torch.Tensor]:
    """The parameters that one process has after the same steps on whole batches."""
    model = network()
    optimizer = optimizer_of(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, *batch(step)).backward()
        optimizer.step()
    return model.state_dict()


def expect_trained(state: dict[str, Any]) -> None:
    """Parameters are those of one process. Means over halves and over all round differently: some 1e-7."""
    for name, expected in reference().items():
        value = state[name]
        value = value.full_tensor() if isinstance(value, DTensor) else value
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


# ---- PyTorch -------------------------------------------------------------------------------------------------------


def train_ddp() -> None:
    for settings in ({}, {"static_graph": True, "gradient_as_bucket_view": True}, {"find_unused_parameters": True}):
        model = DistributedDataParallel(network(), **settings)
        train(model, optimizer_of(model.parameters()))
        expect_trained(model.module.state_dict())


def test_ddp() -> None:
    run_ranks(train_ddp, 2)


def train_zero() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of torch's own deprecations

    model = DistributedDataParallel(network())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    train(model, optimizer)
    expect_trained(model.module.state_dict())
    optimizer.consolidate_state_dict(to=1)
    if dist.get_rank() == 1:
        assert len(optimizer.state_dict()["state"]) == 6


def test_zero_redundancy_optimizer() -> None:
    run_ranks(train_zero, 2)


def shard(model: nn.Module, **settings: Any) -> nn.Module:
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **settings)
    fully_shard(model, **settings)
    return model


def train_fsdp2() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = shard(network(), mesh=mesh)
    train(model, optimizer_of(model.parameters()))
    expect_trained(model.state_dict())

    # Gradients reduced in bfloat16: near, not equal.
    narrow = shard(network(), mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
    train(narrow, optimizer_of(narrow.parameters()))
    for value, expected in zip(narrow.parameters(), reference().values(), strict=True):
        torch.testing.assert_close(value.full_tensor().detach(), expected, rtol=0, atol=5e-3)


@on_cpu
def test_fsdp2() -> None:
    run_ranks(train_fsdp2, 2)


def train_hybrid() -> None:
    """Replicated over one dimension of the mesh, sharded over the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = shard(network(), mesh=mesh)
    train(model, optimizer_of(model.parameters()))
    expect_trained(model.state_dict())


@on_cpu
def test_fsdp2_on_a_mesh() -> None:
    run_ranks(train_hybrid, 4)


def save_and_load(folder: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = shard(network(), mesh=mesh)
    optimizer = optimizer_of(model.parameters())
    train(model, optimizer)
    dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/plain")
    pending = dcp.async_save({"model": model.state_dict()}, checkpoint_id=f"{folder}/async")
    pending.result()
    for kind in ("plain", "async"):
        fresh = shard(network(), mesh=mesh)
        state = {"model": fresh.state_dict()}
        dcp.load(state, checkpoint_id=f"{folder}/{kind}")
        fresh.load_state_dict(state["model"])
        expect_trained(fresh.state_dict())


@on_cpu
def test_distributed_checkpoint(tmp_path: Path) -> None:
    run_ranks(save_and_load, 2, str(tmp_path))


def compute_with_dtensors() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    left, right = torch.randn(6, 5), torch.randn(5, 4)
    sharded = distribute_tensor(left, mesh, [Shard(0)])
    torch.testing.assert_close((sharded @ distribute_tensor(right, mesh, [Replicate()])).full_tensor(), left @ right)
    # Sharded along the dimension that is summed: a partial result, which an all_reduce or reduce_scatter completes.
    partial = distribute_tensor(left, mesh, [Shard(1)]) @ distribute_tensor(right, mesh, [Shard(0)])
    torch.testing.assert_close(partial.full_tensor(), left @ right)
    torch.testing.assert_close(partial.redistribute(mesh, [Shard(0)]).full_tensor(), left @ right)
    # From one dimension to the other: an all_to_all.
    torch.testing.assert_close(sharded.redistribute(mesh, [Shard(1)]).full_tensor(), left)
    weight = distribute_tensor(right, mesh, [Replicate()]).requires_grad_()
    (sharded @ weight).sum().backward()
    gradient = weight.grad
    assert isinstance(gradient, DTensor)
    torch.testing.assert_close(gradient.full_tensor(), left.sum(0)[:, None].expand(5, 4))


def test_dtensor() -> None:
    run_ranks(compute_with_dtensors, 2)


def use_meshes() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    rank = dist.get_rank()
    data, model = mesh["data"], mesh["model"]
    assert (data.get_local_rank(), model.get_local_rank()) == divmod(rank, 2)
    dist.all_reduce(column := torch.tensor([float(rank)]), group=data.get_group())
    dist.all_reduce(row := torch.tensor([float(rank)]), group=model.get_group())
    assert (column.item(), row.item()) == (2.0 * (rank % 2) + 2, 4.0 * (rank // 2) + 1)
    both = mesh["data", "model"]._flatten("both")
    dist.all_gather_into_tensor(everybody := torch.zeros(4), torch.tensor([float(rank)]), group=both.get_group())
    assert everybody.tolist() == [0, 1, 2, 3]


def test_device_mesh() -> None:
    run_ranks(use_meshes, 4)


# ---- Accelerate and Lightning Fabric ---------------------------------------------------------------------------------


def train_with_accelerate() -> None:
    from accelerate import Accelerator

    with lockstep.init() as world:
        accelerator = Accelerator(cpu=True)
        assert accelerator.num_processes == world.world_size
        assert dist.get_backend() == "lockstep"
        model = network()
        model, optimizer = accelerator.prepare(model, optimizer_of(model.parameters()))
        train(model, optimizer, accelerator.backward)
        expect_trained(accelerator.unwrap_model(model).state_dict())
        ranks = accelerator.gather(torch.tensor([world.rank]))
        assert ranks.tolist() == [0, 1]
        accelerator.wait_for_everyone()


def test_accelerate() -> None:
    run_ranks(train_with_accelerate, 2, init=False)


def train_with_fabric() -> None:
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments import TorchElasticEnvironment

    with lockstep.init():
        # What Fabric finds by itself under `lockstep run`. Without a launcher it would go on to
        # look for MPI, which opens ports in a process that other tests use after this one.
        fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp", plugins=[TorchElasticEnvironment()])
        fabric.launch()
        model = network()
        model, optimizer = fabric.setup(model, optimizer_of(model.parameters()))
        train(model, optimizer, fabric.backward)
        expect_trained(model.state_dict())
        assert fabric.all_gather(torch.tensor(fabric.global_rank)).tolist() == [0, 1]
        fabric.barrier()


def test_fabric() -> None:
    run_ranks(train_with_fabric, 2, init=False)


def compare_gradients(compiled: Any, plain: nn.Module) -> None:
    """The compiled engine's gradients are the means over ranks of a plain copy's. Collective."""
    inputs, targets = batch(dist.get_rank())
    for step in range(STEPS):
        loss_of(compiled, inputs, targets).backward()
        loss_of(plain, inputs, targets).backward()
        gradient = next(plain.parameters()).grad
        assert gradient is not None
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()  # gloo of torch 2.6 has no AVG
        torch.testing.assert_close(next(compiled.parameters()).grad, gradient, msg=f"step {step}")
        compiled.zero_grad()
        plain.zero_grad()


def train_compiled() -> None:
    """With buffers, which torch's DDP broadcasts from C++ while Dynamo watches the compiled model."""
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))
    compiled = torch.compile(DistributedDataParallel(copy.deepcopy(plain)), backend="aot_eager")
    compare_gradients(compiled, plain)


def test_compiled_ddp() -> None:
    run_ranks(train_compiled, 2)


class NormedLayers(nn.Module):
    """Has buffers, too. Dynamo compiles what is no part of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(inputs)).tanh())


def train_with_inductor(folder: str) -> bool:
    """As `train_compiled`, by the compiler that users have; whether it has written kernels."""
    from torch._inductor import metrics  # takes its time

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    metrics.reset()
    # What it writes is compiled by this process: processes of its own would live on with it.
    with torch._inductor.config.patch(compile_threads=1, fx_graph_cache=False):
        torch._dynamo.reset()
        torch.manual_seed(3)
        plain = NormedLayers()
        compiled = torch.compile(DistributedDataParallel(copy.deepcopy(plain)), backend="inductor")
        compare_gradients(compiled, plain)
        torch._dynamo.reset()
        return metrics.generated_kernel_count > 0


@pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="inductor needs a C++ compiler on the CPU"
)
@pytest.mark.parametrize("backend", ["lockstep", "gloo"])
def test_ddp_compiled_by_inductor(backend: str, tmp_path: Path) -> None:
    assert run_ranks(train_with_inductor, 2, str(tmp_path), backend=backend, timeout=limit_s(180)) == [True, True]


class TwoLayers(nn.Module):
    """Dynamo compiles what is no part of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(inputs).tanh())


def train_with_our_engine_compiled() -> int:
    """The graphs that the compiler was handed."""
    torch._dynamo.reset()
    graphs = []

    def compile_nothing(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.manual_seed(3)
    plain = TwoLayers()
    compiled = torch.compile(lockstep.DistributedDataParallel(copy.deepcopy(plain)), backend=compile_nothing)
    compare_gradients(compiled, plain)
    return len(graphs)


@pytest.mark.skipif(TORCH < (2, 11), reason="this torch cannot be told to leave functions out")
def test_our_engine_is_left_out_of_what_is_compiled() -> None:
    assert run_ranks(train_with_our_engine_compiled, 2) == [1, 1]
