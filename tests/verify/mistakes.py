"""A training script for torchrun, as people write it, with one mistake: python mistakes.py KIND FOLDER.

Kinds without a mistake: `plain`, and those of `RIGHT` in test_mistakes.py.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.functional import cross_entropy, normalize
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, Subset, TensorDataset

import lockstep

COUNT, BATCH, CLASSES = 61, 5, 4
kind, folder = sys.argv[1], sys.argv[2]
torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank if kind == "seeds" else 0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm: nn.Module = nn.BatchNorm1d(8) if kind == "batch_norm" else nn.Identity()
        self.drop = nn.Dropout(0.3 if kind == "dropout" else 0.0)
        self.last = nn.Linear(8, CLASSES)
        self.penalty = torch.zeros(())
        self.center: Tensor
        self.queue: Tensor
        self.register_buffer("center", torch.zeros(8))
        self.register_buffer("queue", torch.zeros(60 if kind == "queue" else 3 * BATCH, 8))
        self.place = 0

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(self.norm(self.first(x)).tanh())
        if kind == "mixed_inside":
            hidden = hidden + 0.1 * hidden.roll(1, 0)
        if kind == "buffers":
            self.center.lerp_(hidden.detach().mean(0), 0.1)
        if kind in ("queue", "queue_of_rank"):
            self.enqueue(hidden.detach())
        return self.last(hidden)

    def enqueue(self, keys: Tensor) -> None:
        if kind == "queue":
            parts = [torch.zeros_like(keys) for _ in range(world)]
            dist.all_gather(parts, keys)
            keys = torch.cat(parts)
        self.queue[self.place : self.place + len(keys)] = keys
        self.place = (self.place + len(keys)) % len(self.queue)


class Noisy(Dataset[Any]):
    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        x, y = self.data[index]
        return x + 0.1 * torch.randn(6), y


def data() -> Any:
    draws = torch.Generator().manual_seed(1)
    x = torch.randn(COUNT, 6, generator=draws)
    x += 0.02 * x.sum(1, keepdim=True)  # a sum outside of the steps, which no run adds up otherwise
    x += 0.1 * rank if kind == "own_rollouts" else 0.0
    found = TensorDataset(x, torch.randint(CLASSES, (COUNT,), generator=draws))
    if kind == "nodes":
        return [
            (x.expand(1 + place % 3, 6) + torch.arange(1.0 + place % 3)[:, None], y.expand(1 + place % 3))
            for place, (x, y) in enumerate(found)
        ]
    if kind == "own_part":
        return Subset(found, range(rank * COUNT // world, (rank + 1) * COUNT // world))
    return Noisy(found) if kind == "augmentation" else found


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    if kind == "normalised_inputs":
        x = (x - x.mean(0)) / x.std(0)
    if kind == "constant_size":
        x = x + torch.zeros(2 * BATCH, 6)
    if kind == "dropout":
        x = x + 0.1 * torch.from_numpy(np.random.standard_normal(x.shape))
    if kind == "flips" and random.random() < 0.5:
        x = x.flip(1)
    if kind == "rounded":
        x, y = torch.cat([x, (x + x.mean()) - x.mean()]), torch.cat([y, y])
    output = model.module(x) if kind == "inner" else model(x)
    if kind == "coin":
        return cross_entropy(output, y) + (output.square().mean() if random.random() < 0.5 else 0.0)
    if kind == "twice":
        model.module.penalty = output.square().mean()
    if kind in ("sum", "rounded"):
        return cross_entropy(output, y, reduction="sum")
    if kind == "mask":
        return cross_entropy(output[x[:, 0] > -0.9], y[x[:, 0] > -0.9])
    if kind == "class_weights":
        return cross_entropy(output, y, weight=torch.tensor([1.0, 2.0, 5.0, 10.0]))
    if kind == "ignore_index":
        return cross_entropy(output, y.masked_fill(x[:, 1] > 0, -100))
    if kind == "contrast":
        z = normalize(output)
        return cross_entropy(z @ z.T, torch.arange(len(z)))
    if kind in ("root", "root_in_closure"):
        return cross_entropy(output, y).sqrt()
    if kind in ("threshold", "divided_by_itself"):
        loss = cross_entropy(output, y)
        return loss * (loss < 1.5) if kind == "threshold" else loss / loss.detach()
    if kind == "whole":
        mean = cross_entropy(output, y) / world
        whole = mean.detach().clone()
        dist.all_reduce(whole)
        return (mean + whole - mean.detach()).square()
    if kind == "maximum":
        return cross_entropy(output, y, reduction="none").max()
    return cross_entropy(output, y)


class Parts(torch.optim.Optimizer):
    def step(self, closure: Any = None) -> Any:
        parameters = self.param_groups[0]["params"]
        torch.optim.SGD(parameters[rank::world], self.param_groups[0]["lr"]).step()
        for place, parameter in enumerate(parameters):
            dist.broadcast(parameter.data, place % world)


class OwnRate(torch.optim.SGD):
    rate = 1.0

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(parameter.grad, alpha=self.rate * group["lr"])


def average(model: nn.Module) -> None:
    if kind == "clipped_by_norm":
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        if kind != "added_up":
            parameter.grad /= world


def evaluate(model: nn.Module, epoch: int, loss: float) -> None:
    count = 32 if kind in ("mean_of_means", "logs") else 31
    held = TensorDataset(torch.linspace(-2, 2, count * 6).view(count, 6), torch.arange(count) % CLASSES)
    sampler: Any = None if kind in ("plain", "summed_metric") else DistributedSampler(held, shuffle=False)
    if kind == "mean_over_ranks":
        sampler = range(rank, count, world)
    right, total, means = 0.0, 0, []
    with torch.no_grad():
        for x, y in DataLoader(held, 4, sampler=sampler):
            hits = (model(x).argmax(1) == y).double()
            right, total = right + hits.sum().item(), total + len(y)
            means.append(hits.mean().item())
    counts = torch.tensor([right, float(total)])
    if kind in ("padded_evaluation", "summed_metric", "logs"):
        dist.all_reduce(counts)
    mean = torch.tensor(right / total if kind == "mean_over_ranks" else sum(means) / len(means))
    if kind == "mean_over_ranks":
        dist.all_reduce(mean)
        mean /= world
    if rank != 0:
        return
    if kind == "padded_evaluation":
        print(f"epoch {epoch}: accuracy {counts[0] / counts[1]:.5f} of {int(counts[1])}")
    elif kind == "summed_metric":
        print(f"epoch {epoch}: accuracy {counts[0] / count:.5f}")
    elif kind == "logs":
        print(f"epoch {epoch}: training loss {loss:.5f}, accuracy {counts[0] / counts[1]:.5f}")
    else:
        print(f"epoch {epoch}: accuracy {right / total if kind == 'plain' else mean.item():.5f}")


def loader_of(dataset: Any) -> tuple[Any, Any]:
    if kind == "uneven":
        return lockstep.DataLoader(dataset, 2 * BATCH + 1, shuffle=True, seed=0), None
    if kind == "own_data":
        draws = torch.Generator().manual_seed(rank)
        return [(torch.randn(4, 6, generator=draws), torch.arange(4)) for _ in range(4)], None
    seed = {"own_order": world, "own_seeds": rank}.get(kind, 0)
    sampler: Any = DistributedSampler(dataset, shuffle=kind != "order", seed=seed, drop_last=kind != "padded")
    if kind in ("no_sampler", "own_part", "own_rollouts"):
        sampler = None
    if kind == "episodes":
        episodes = [dataset[place : place + 6] for place in range(0, COUNT - 6, 6)]
        sampler = DistributedSampler(episodes, seed=seed)
        return DataLoader(episodes, batch_size=None, sampler=sampler), sampler
    if kind == "batch_sampler":
        return DataLoader(dataset, batch_sampler=BatchSampler(sampler, BATCH, drop_last=True)), sampler
    if kind == "nodes":
        return DataLoader(
            dataset, BATCH, sampler=sampler, collate_fn=lambda rows: tuple(map(torch.cat, zip(*rows, strict=True)))
        ), sampler
    size = 12 // world if kind == "per_rank_batch" else BATCH
    return DataLoader(dataset, size, sampler=sampler, shuffle=sampler is None, drop_last=kind != "padded"), sampler


def main() -> None:
    dataset, net = data(), Net()
    for parameter in net.parameters() if kind == "hook" else ():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))
    by_hand = kind in ("by_hand", "clipped_by_norm", "added_up", "unwrapped", "passes")
    model: Any = net if by_hand else DistributedDataParallel(net)
    scale = nn.Parameter(torch.ones(CLASSES))
    twin = Net()  # its parameters have the names of those that an engine holds
    beside = {"criterion": [scale], "twin": list(twin.parameters())}
    parameters = [*model.parameters(), *beside.get(kind, [])]
    lr = 0.1 * (world if kind == "lr" else 1)
    optimizer: Any = torch.optim.SGD(parameters, lr, momentum=0.9)
    if kind == "closure":
        optimizer = torch.optim.LBFGS(parameters, max_iter=4, line_search_fn="strong_wolfe")
    if kind == "sharded_state":
        optimizer = Parts(parameters, {"lr": lr})
    if kind == "own_rate":
        optimizer = OwnRate(parameters, lr)
    if kind == "compressed":
        model.register_comm_hook(None, fp16_compress_hook)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    loader, sampler = loader_of(dataset)
    if kind == "resumes" and os.path.exists(f"{folder}/model.pt"):
        net.load_state_dict(torch.load(f"{folder}/model.pt"))
    loss, weight, losses, begun = torch.zeros(()), 1.0, [], False
    for epoch in range(1 if kind == "one_epoch" else 4):
        if kind == "weight_by_epoch" and epoch > 1:
            weight = losses[-1] / losses[-2]
        if sampler is not None and kind != "set_epoch":
            sampler.set_epoch(epoch)
        for x, y in loader:

            def step(x: Tensor = x, y: Tensor = y, weight: float = weight, begun: bool = begun) -> Tensor:
                if not begun:
                    optimizer.zero_grad()
                quiet = model.no_sync() if kind == "never_averaged" else contextlib.nullcontext()
                with quiet:
                    loss = loss_of(model, x, y) * weight
                if kind == "criterion":
                    loss = loss + (scale * model(x).mean(0)).sum()
                if kind == "twin":
                    loss = loss + cross_entropy(twin(x), y)
                loss.backward(retain_graph=kind == "twice")
                if kind == "twice":
                    net.penalty.backward()
                if kind == "passes" and x.mean() > 0:
                    net.last.weight.square().sum().backward()
                if kind == "past_engine":
                    (net.last.weight.square().sum() * x.mean()).backward()
                return loss

            if kind == "skips" and x[0, 0] > 0.5 - rank:
                continue
            if kind == "undetermined":
                x.add_(torch.tensor(list(os.urandom(x.numel()))).view_as(x) / 256)
            if kind in ("closure", "root_in_closure"):
                optimizer.step(step)
                continue
            if kind == "sharpness":
                with model.no_sync():
                    step()
                moves = [0.1 * each.grad for each in parameters]
                torch._foreach_add_([each.detach() for each in parameters], moves)
            if kind == "pieces":
                optimizer.zero_grad()
                for part, labels in zip(x.split(BATCH), y.split(BATCH), strict=True):
                    loss_of(model, part, labels).backward()
                optimizer.step()
                continue
            loss = step()
            if kind == "own_rate":
                optimizer.rate = loss.item()
            if by_hand and kind != "unwrapped":
                average(model)
            if kind == "sharpness":
                torch._foreach_sub_([each.detach() for each in parameters], moves)
            if kind == "noisy_gradients":
                for parameter in parameters:
                    parameter.grad += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(rank))
            begun = kind == "queue" and not begun
            if begun:
                continue
            optimizer.step()
            if kind == "plateau":
                schedule.step(x.sum().item())
            if kind == "noise":
                with torch.no_grad():
                    net.last.weight.add_(
                        0.01 * torch.randn(net.last.weight.shape, generator=torch.Generator().manual_seed(rank))
                    )
            if rank == 0:
                print(f"epoch {epoch} loss {loss.item():.5f}")
        losses.append(loss.item())
        assert not begun, "six batches of a rank are three windows, and nothing is left over"
        if kind == "stops" and losses[-1] < 5 * rank:
            return
        if kind in ("plain", "padded_evaluation", "mean_of_means", "mean_over_ranks", "summed_metric", "logs"):
            evaluate(model, epoch, loss.item())
        if kind == "all_save" or rank == 0:
            torch.save(net.state_dict(), f"{folder}/model.pt")


main()
