"""Steps on a GPU do not make the host wait: nothing that they send is copied from memory of the host, nor read there.

A tensor of the device "meta" stands for one of a GPU: it has no values, so that whoever reads one fails, and operators
that copy to it are seen by a dispatch mode.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import lockstep
from lockstep.parallel.claims import NUM_ELEMENTS, Claims
from lockstep.parallel.losses import Origin
from lockstep.testing import run_ranks

META = torch.device("meta")
COPIES = {"from the host", "aten::copy_", "aten::lift_fresh", "aten::_local_scalar_dense", "aten::nonzero"}


class Operators(TorchDispatchMode):
    """Notes the names of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        goes_there = (kwargs or {}).get("device") == META
        is_move = func._schema.name == "aten::_to_copy" and goes_there and args[0].device != META
        self.names.append("from the host" if is_move else func._schema.name)
        return func(*args, **(kwargs or {}))


def compare_claims() -> set[str]:
    """The operators of the writing of a new claim that make a host wait; it ends with a copy on the device."""
    group: Any = dist.group.WORLD
    claims = Claims(group, META)
    claims.set_elements(torch.empty(NUM_ELEMENTS, device=META))
    with Operators() as operators:
        claims.write("8 rows")
    assert operators.names.pop() == "aten::copy_"
    return COPIES & set(operators.names)


def test_a_claim_is_made_on_the_device() -> None:
    assert run_ranks(compare_claims, 2) == [set()] * 2


def add_up_counts() -> set[str]:
    total = torch.ones((), device=META, requires_grad=True)
    origin = Origin(dist.group.WORLD, 1.0, is_filler=False)
    with (
        Operators() as operators,
        mock.patch.object(dist, "all_reduce"),
        mock.patch("lockstep.parallel.losses.find_origin", return_value=origin),
        mock.patch("lockstep.parallel.losses.collective_device", return_value=META),
        mock.patch.object(torch.Tensor, "is_cuda", True),
    ):
        lockstep.mean(total, 3)
        lockstep.sum(total)
    return COPIES & set(operators.names)


def test_counts_that_are_numbers_are_written_on_the_device() -> None:
    assert run_ranks(add_up_counts, 2) == [set()] * 2


def ask_for_unused() -> tuple[list[bool], list[frozenset[int]]]:
    engine = lockstep.DistributedDataParallel(torch.nn.Linear(2, 1), find_unused_parameters=True)
    reads = []
    found = []
    for missing in ([], [dist.get_rank()]):
        with Operators() as operators:
            found.append(engine._backward.used_nowhere(missing))
        reads.append("aten::nonzero" in operators.names)
    return reads, found


def test_who_has_used_all_parameters_reads_nothing() -> None:
    assert run_ranks(ask_for_unused, 2) == [([False, True], [frozenset(), frozenset()])] * 2


class Counting:
    """A group whose all_reduces are counted."""

    def __init__(self, group: Any) -> None:
        self.group, self.lengths = group, list[int]()

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Any:
        self.lengths.append(len(tensors[0]))
        return self.group.allreduce(tensors, options)


def count_all_reduces() -> list[int]:
    model: Any = lockstep.DistributedDataParallel(torch.nn.Linear(5, 3))
    model(torch.ones(2, 5)).mean().backward()  # the first compares parameters, too
    counting = Counting(model.process_group)
    model.zero_grad()
    with (
        mock.patch.object(model._reducer._transport, "_group", counting),
        mock.patch.object(model._agreement.claims, "_group", counting),
        mock.patch.object(dist, "all_reduce", side_effect=AssertionError("another collective")),
    ):
        model(torch.ones(2, 5)).mean().backward()
    return counting.lengths


def test_a_step_is_one_all_reduce_for_each_bucket() -> None:
    """Over a group that compares no descriptions: the claim travels in the last one."""
    assert run_ranks(count_all_reduces, 2, backend="gloo") == [[32 + NUM_ELEMENTS]] * 2
