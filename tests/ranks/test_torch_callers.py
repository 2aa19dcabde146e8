"""What torch's own code asks of a group, in forms that no public function has."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.errors import InputTypeError
from lockstep.testing import run_ranks


def join_with_unused_parameters() -> int:
    """The rank that has joined reduces a bare tensor, by an overload of C++."""
    model = DistributedDataParallel(nn.Linear(2, 2), find_unused_parameters=True)
    steps = 0
    with model.join():
        for _ in range(2 + dist.get_rank()):
            model(torch.ones(1, 2)).sum().backward()
            steps += 1
    return steps


def test_torchs_engine_joins_with_unused_parameters() -> None:
    assert run_ranks(join_with_unused_parameters, 2) == [2, 3]


def send_what_is_not_waited_for(numel: int) -> list[float]:
    """The result of a functional collective has no memory of its own until it is used."""
    pending: Any = functional.all_reduce(torch.ones(numel), "sum", dist.group.WORLD)
    assert type(pending) is not torch.Tensor
    received = torch.empty(numel)
    if dist.get_rank() == 0:
        dist.send(pending, 1)
        return [2.0]
    dist.recv(received, 0)
    return sorted(set(received.tolist()))


def test_results_of_functional_collectives_are_sent() -> None:
    for numel in (4, 1_000_000):
        assert run_ranks(send_what_is_not_waited_for, 2, numel) == [[2.0]] * 2


class Wrapper(torch.Tensor):
    """A tensor around nothing."""

    @staticmethod
    def __new__(cls, numel: int) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, (numel,))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(func)


def send_a_wrapper() -> str:
    try:
        dist.send(Wrapper(3), 1 - dist.get_rank())
    except InputTypeError as error:
        return str(error)
    return ""


def test_a_tensor_without_memory_is_refused() -> None:
    assert all("send takes plain tensors, got a Wrapper" in error for error in run_ranks(send_a_wrapper, 2))


def exchange_rows() -> tuple[list[int], bool]:
    output, rows = torch.empty(4, 3), torch.ones(4, 3)
    (whole,) = dist.all_to_all_single(output, rows, async_op=True).get_future().wait()
    return list(whole.shape), whole.data_ptr() == output.data_ptr()


def test_the_future_of_an_exchange_has_the_whole_output() -> None:
    assert run_ranks(exchange_rows, 2) == [([4, 3], True)] * 2


def ask_for_memory() -> bool:
    group = dist.group.WORLD
    return bool(group._get_backend(torch.device("cpu")).supports_tensor_alloc(torch.device("cpu")))  # type: ignore[union-attr]


def test_a_group_has_no_memory_for_fsdp() -> None:
    assert run_ranks(ask_for_memory, 2) == [False] * 2
