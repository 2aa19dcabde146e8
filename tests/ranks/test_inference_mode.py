"""Collectives inside of `torch.inference_mode()`, before and after others outside of it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lockstep
from lockstep.testing import run_ranks


def add_up(numel: int, is_async: bool) -> None:
    tensor = torch.ones(numel)
    work = dist.all_reduce(tensor, async_op=is_async)
    if work is not None:
        work.wait()
    assert (tensor == dist.get_world_size()).all()


def gather_lists(numel: int, is_async: bool) -> None:
    outputs = [torch.zeros(numel) for _ in range(dist.get_world_size())]
    work = dist.all_gather(outputs, torch.full((numel,), float(dist.get_rank())), async_op=is_async)
    if work is not None:
        work.wait()
    assert [output[-1].item() for output in outputs] == list(range(dist.get_world_size()))


def pass_on(numel: int, is_async: bool) -> None:
    tensor = torch.full((2, numel), float(dist.get_rank())).t()  # not contiguous
    send, receive = (dist.isend, dist.irecv) if is_async else (dist.send, dist.recv)
    request = send(tensor, 1) if dist.get_rank() == 0 else receive(tensor, 0)
    if is_async:
        request.wait()
    assert (tensor == 0).all()


def tell_objects(numel: int, is_async: bool) -> None:
    names: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(names, "x" * numel)
    assert names == ["x" * numel] * dist.get_world_size()


def call_inside_and_outside() -> None:
    programs: tuple[Callable[[int, bool], None], ...] = (add_up, gather_lists, pass_on, tell_objects)
    for numel in (1, 1_000_000):  # the first large one makes the large slots
        for program in programs:
            for is_async in (False, True):
                with torch.inference_mode():
                    program(numel, is_async)
                program(numel, is_async)


def test_verbs() -> None:
    run_ranks(call_inside_and_outside, 2)


def evaluate_before_training() -> None:
    for engine in (DistributedDataParallel, lockstep.DistributedDataParallel):
        model = engine(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
        with torch.inference_mode():
            model(torch.ones(4, 3))  # torch's engine broadcasts buffers here
        model(torch.randn(4, 3)).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())


def test_engines() -> None:
    run_ranks(evaluate_before_training, 2)
