"""What no collective can take: an error on the rank that gives it, before anybody waits, and the group continues."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from failing import group_works
from lockstep.errors import InputError, InputTypeError
from lockstep.testing import run_ranks

WORLD_SIZE = 2
Call = Callable[[], object]


def two(tensor: Any) -> list[Any]:
    return [tensor, tensor]


def group() -> Any:
    return dist.group.WORLD


def at_root(value: Any) -> Any:
    """Lists that only the root has. Every rank is the root of its own call, so that every rank raises."""
    return value


def inputs_of(bad: Any) -> dict[str, Call]:
    """Every verb with `bad` as what it reads."""
    rank, good = dist.get_rank(), torch.zeros(2)
    return {
        "all_gather": lambda: dist.all_gather(two(good), bad),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(torch.zeros(4), bad),
        "gather": lambda: dist.gather(bad, two(good), rank),
        "scatter": lambda: dist.scatter(good, two(bad), rank),
        "reduce_scatter": lambda: dist.reduce_scatter(good, two(bad)),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(torch.zeros(1), bad),
        "all_to_all": lambda: dist.all_to_all(two(good), two(bad)),
        "all_to_all_single": lambda: dist.all_to_all_single(good, bad),
        "send": lambda: dist.send(bad, 1 - rank),
    }


def outputs_of(bad: Any) -> dict[str, Call]:
    """Every verb with `bad` as what it writes."""
    rank, good = dist.get_rank(), torch.zeros(2)
    return {
        "all_reduce": lambda: dist.all_reduce(bad),
        "all_reduce_coalesced": lambda: dist.all_reduce_coalesced([good, bad]),
        "reduce": lambda: dist.reduce(bad, 0),
        "broadcast": lambda: dist.broadcast(bad, 0),
        "all_gather": lambda: dist.all_gather(two(bad), good),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(bad, torch.zeros(1)),
        "gather": lambda: dist.gather(good, two(bad), rank),
        "scatter": lambda: dist.scatter(bad, two(good), rank),
        "reduce_scatter": lambda: dist.reduce_scatter(bad, two(good)),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(bad, torch.zeros(4)),
        "all_to_all": lambda: dist.all_to_all(two(bad), two(good)),
        "all_to_all_single": lambda: dist.all_to_all_single(bad, good),
        "recv": lambda: dist.recv(bad, 1 - rank),
    }


def collect(calls: dict[str, Call]) -> dict[str, BaseException | None]:
    """How each call ended."""
    errors: dict[str, BaseException | None] = {}
    for name, call in calls.items():
        errors[name] = None
        try:
            call()
        except Exception as error:
            errors[name] = error.with_traceback(None)
    return errors


BAD: dict[str, Callable[[], Any]] = {
    "number": lambda: 3,
    "meta": lambda: torch.zeros(2, device="meta"),
    "sparse": lambda: torch.zeros(2).to_sparse(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(1)]),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8),
    "expanded": lambda: torch.ones(1).expand(2),
}
ERRORS: dict[str, tuple[type[Exception], str]] = {
    "meta": (InputError, "supports CPU and CUDA tensors, got one on meta. Move it with .cpu()"),
    "sparse": (InputTypeError, "takes dense tensors, got layout torch.sparse_coo; use .to_dense()"),
    "nested": (InputTypeError, "takes dense tensors, got a nested one; use .to_padded_tensor()"),
    "quantized": (InputTypeError, "takes tensors of plain numbers, got torch.quint8: move .int_repr() and the scales"),
    "expanded": (InputError, "has several elements in the same memory, so it cannot be written; call .clone()"),
}


def give(kind: str) -> tuple[dict[str, BaseException | None], dict[str, BaseException | None], bool]:
    warnings.simplefilter("ignore")  # torch's own, about prototypes and old names
    bad = BAD[kind]()
    as_input = {} if kind == "expanded" else collect(inputs_of(bad))
    return as_input, collect(outputs_of(bad)), group_works()


@pytest.mark.parametrize("kind", BAD)
def test_tensor_that_cannot_be_moved(kind: str) -> None:
    for as_input, as_output, works in run_ranks(give, WORLD_SIZE, kind):
        for name, error in (*as_input.items(), *as_output.items()):
            if kind == "number":
                # torch itself turns it away.
                assert isinstance(error, TypeError), (name, error)
                continue
            if kind == "sparse" and name == "all_reduce":
                assert error is None, "the one verb that takes sparse tensors, as gloo's does"
                continue
            if kind == "quantized" and isinstance(error, ValueError) and not isinstance(error, InputError):
                # So it does where another tensor of the call has another dtype.
                assert "Invalid usage of tensors with different dtypes" in str(error), name
                continue
            if (kind, name) == ("sparse", "all_reduce"):
                continue  # torch gives it a way of its own
            expected, text = ERRORS[kind]
            assert type(error) is expected, (name, error)
            assert text in str(error), name
            verb = name.removesuffix("_coalesced").removesuffix("_into_tensor").removesuffix("_tensor")
            assert str(error).startswith(verb.removesuffix("_single")), name
        assert works


def expanded_inputs_are_read() -> list[list[float]]:
    """What is only read may have its elements in one place."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    source = torch.tensor([rank + 1.0]).expand(2)
    gathered = [torch.zeros(2) for _ in range(world_size)]
    dist.all_gather(gathered, source)
    scattered, reduced = torch.zeros(2), torch.zeros(2)
    dist.reduce_scatter(reduced, [source] * world_size)
    dist.all_to_all_single(scattered, source)
    return [*(tensor.tolist() for tensor in gathered), reduced.tolist(), scattered.tolist()]


def test_expanded_inputs() -> None:
    assert run_ranks(expanded_inputs_are_read, 2) == [[[1.0, 1.0], [2.0, 2.0], [3.0, 3.0], [1.0, 2.0]]] * 2


# ---- lists -----------------------------------------------------------------------------------------


def one_too_many() -> list[torch.Tensor]:
    return [torch.zeros(2) for _ in range(WORLD_SIZE + 1)]


def zeros(*numels: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.zeros(numel, dtype=dtype) for numel in numels]


# Such a call would take no step: nobody would have compared it when a rank is two calls further.
NONE_AT_ALL: dict[str, Call] = {
    "all_reduce": lambda: dist.all_reduce_coalesced([]),
    "broadcast": lambda: group().broadcast([], dist.BroadcastOptions()),
    "all_gather": lambda: dist.all_gather_coalesced([[], []], []),
    "reduce_scatter": lambda: group().reduce_scatter_tensor_coalesced([], []),
}

# Every rank is root where there is one, and so raises by itself.
LISTS: dict[str, tuple[Call, type[Exception], str]] = {
    "all_gather, long": (
        lambda: dist.all_gather(one_too_many(), torch.zeros(2)),
        InputError,
        "all_gather: got a list of 3 tensors for a group of 2 ranks; one per rank",
    ),
    "gather, long": (
        lambda: dist.gather(torch.zeros(2), one_too_many(), dist.get_rank()),
        InputError,
        "gather: got a list of 3 tensors for a group of 2 ranks; one per rank",
    ),
    "scatter, short": (
        lambda: dist.scatter(torch.zeros(2), zeros(2), dist.get_rank()),
        InputError,
        "scatter: got a list of 1 tensors for a group of 2 ranks; one per rank",
    ),
    "reduce_scatter, long": (
        lambda: dist.reduce_scatter(torch.zeros(2), one_too_many()),
        InputError,
        "reduce_scatter: got a list of 3 tensors for a group of 2 ranks; one per rank",
    ),
    "all_to_all, long input": (
        lambda: dist.all_to_all(zeros(2, 2), one_too_many()),
        InputError,
        "all_to_all: got a list of 3 tensors for a group of 2 ranks; one per rank",
    ),
    "all_to_all, short output": (
        lambda: dist.all_to_all(zeros(2), zeros(2, 2)),
        InputError,
        "all_to_all: got a list of 1 tensors for a group of 2 ranks; one per rank",
    ),
    "all_to_all, empty": (
        lambda: group().alltoall([], []),
        InputError,
        "all_to_all: got a list of 0 tensors for a group of 2 ranks; one per rank",
    ),
    "all_gather_coalesced, ragged": (
        lambda: group().allgather_coalesced([zeros(2), zeros(2, 2)], zeros(2)),
        InputError,
        "all_gather_coalesced: got 2 outputs for 1 inputs; one for each",
    ),
    "all_gather of several, uneven": (
        lambda: group().allgather([zeros(2, 2)], zeros(2, 2)),
        InputError,
        "all_gather: got 1 outputs for 2 inputs; one for each",
    ),
    "reduce_scatter of several, uneven": (
        lambda: group().reduce_scatter_tensor_coalesced(zeros(1), zeros(2, 2)),
        InputError,
        "reduce_scatter: got 1 outputs for 2 inputs; one for each",
    ),
    **{
        f"{verb}, none": (call, InputError, f"{verb}: got an empty list of tensors; pass one or more")
        for verb, call in NONE_AT_ALL.items()
    },
    "all_gather, own output": (
        lambda: dist.all_gather(zeros(3, 3), torch.zeros(2)),
        InputError,
        "they must hold the same number of elements",
    ),
    "gather, sizes": (
        lambda: dist.gather(torch.zeros(2), zeros(2, 3), dist.get_rank()),
        InputError,
        "gather: float32[3] and float32[2] differ in the number of elements",
    ),
    "scatter, sizes": (
        lambda: dist.scatter(torch.zeros(2), zeros(2, 3), dist.get_rank()),
        InputError,
        "scatter: float32[3] and float32[2] differ in the number of elements",
    ),
    "reduce_scatter, own input": (
        lambda: dist.reduce_scatter(torch.zeros(2), zeros(3, 3)),
        InputError,
        "they must hold the same number of elements",
    ),
    "all_gather_into_tensor, size": (
        lambda: dist.all_gather_into_tensor(torch.zeros(5), torch.zeros(2)),
        InputError,
        "all_gather: the tensor for all ranks has 5 elements, the one for this rank 2; expected 2 times as many",
    ),
    "reduce_scatter_tensor, size": (
        lambda: dist.reduce_scatter_tensor(torch.zeros(2), torch.zeros(5)),
        InputError,
        "reduce_scatter: the tensor for all ranks has 5 elements, the one for this rank 2; expected 2 times as many",
    ),
    "all_to_all_single, rows": (
        lambda: dist.all_to_all_single(torch.zeros(4), torch.zeros(3)),
        InputError,
        "all_to_all_single: 3 rows of the input do not divide evenly among 2 ranks; give split sizes",
    ),
    "all_to_all_single, splits": (
        lambda: dist.all_to_all_single(torch.zeros(4), torch.zeros(4), [2, 3], [2, 2]),
        InputError,
        "all_to_all_single: output splits [2, 3] must be 2 numbers that add up to 4 rows",
    ),
    "all_to_all_single, number of splits": (
        lambda: dist.all_to_all_single(torch.zeros(4), torch.zeros(4), [2, 2], [1, 1, 2]),
        InputError,
        "all_to_all_single: input splits [1, 1, 2] must be 2 numbers that add up to 4 rows",
    ),
    "all_gather, dtypes": (
        lambda: group().allgather([zeros(2, 2, dtype=torch.float64)], zeros(2)),
        InputTypeError,
        "all_gather: float64[2] and float32[2] differ in dtype",
    ),
    "all_gather_into_tensor, dtypes": (
        lambda: dist.all_gather_into_tensor(torch.zeros(4, dtype=torch.int32), torch.zeros(2)),
        InputTypeError,
        "all_gather: int32[2] and float32[2] differ in dtype",
    ),
    "reduce_scatter_tensor, dtypes": (
        lambda: dist.reduce_scatter_tensor(torch.zeros(2), torch.zeros(4, dtype=torch.int32)),
        InputTypeError,
        "reduce_scatter: int32[2] and float32[2] differ in dtype",
    ),
    "all_to_all, dtypes": (
        lambda: group().alltoall(zeros(2, 2, dtype=torch.int64), zeros(2, 2)),
        InputTypeError,
        "all_to_all: int64[2] and float32[2] differ in dtype",
    ),
}


def give_lists() -> tuple[dict[str, BaseException | None], bool]:
    warnings.simplefilter("ignore")
    return collect({name: call for name, (call, _, _) in LISTS.items()}), group_works()


def test_lists_of_wrong_lengths_sizes_and_types() -> None:
    for errors, works in run_ranks(give_lists, WORLD_SIZE):
        for name, (_, kind, text) in LISTS.items():
            error = errors[name]
            assert type(error) is kind, (name, error)
            assert text in str(error), (name, str(error))
        assert works


# ---- roots -----------------------------------------------------------------------------------------


def give_roots() -> tuple[dict[str, BaseException | None], list[float], bool]:
    tensor = torch.full((2,), 7.0)
    calls: dict[str, Call] = {}
    for root in (-1, WORLD_SIZE):
        calls |= {
            f"broadcast {root}": lambda root=root: dist.broadcast(tensor, root),
            f"reduce {root}": lambda root=root: dist.reduce(tensor, root),
            f"gather {root}": lambda root=root: dist.gather(tensor, None, root),
            f"scatter {root}": lambda root=root: dist.scatter(tensor, None, root),
        }
    return collect(calls), tensor.tolist(), group_works()


def test_roots_that_the_group_does_not_have() -> None:
    """-1 was nobody: a broadcast from it wrote what the slots held, without a word."""
    for errors, values, works in run_ranks(give_roots, WORLD_SIZE):
        for name, error in errors.items():
            verb, root = name.split()
            assert type(error) is InputError, (name, error)
            assert str(error).startswith(f"{verb}: there is no rank {root} in the default group, which has 2 ranks")
        assert values == [7.0, 7.0]
        assert works


# ---- reduce operations -----------------------------------------------------------------------------

OPS: list[tuple[ReduceOp.RedOpType, torch.dtype, str]] = [
    *[(op, dtype, "bitwise operations need an integer or bool dtype")
      for op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
      for dtype in (torch.float32, torch.bfloat16)],
    *[(ReduceOp.AVG, dtype, "it needs numbers that can be divided; use SUM and divide as you see fit")
      for dtype in (torch.uint16, torch.bool)],
]  # fmt: skip


def reduce_what_has_no_sense() -> tuple[list[dict[str, BaseException | None]], bool]:
    warnings.simplefilter("ignore")
    found = []
    for op, dtype, _ in OPS:
        tensor = torch.zeros(2, dtype=dtype)
        calls: dict[str, Call] = {
            "all_reduce": lambda tensor=tensor, op=op: dist.all_reduce(tensor, op),
            "reduce": lambda tensor=tensor, op=op: dist.reduce(tensor, 0, op),
            "reduce_scatter": lambda tensor=tensor, op=op: dist.reduce_scatter(tensor, two(tensor), op),
            "reduce_scatter_tensor": lambda tensor=tensor, op=op: dist.reduce_scatter_tensor(tensor[:1], tensor, op),
            "async": lambda tensor=tensor, op=op: dist.all_reduce(tensor, op, async_op=True),
        }
        found.append(collect(calls))
    return found, group_works()


def test_operations_that_a_dtype_does_not_have() -> None:
    for found, works in run_ranks(reduce_what_has_no_sense, WORLD_SIZE):
        for (op, dtype, text), errors in zip(OPS, found, strict=True):
            for name, error in errors.items():
                assert type(error) is InputTypeError, (name, op, dtype, error)
                assert str(error) == f"{op.name} of {str(dtype).removeprefix('torch.')} tensors: {text}"
        assert works


def reduce_several_with_symmetric_memory() -> list[list[float]]:
    """Several tensors in one call, some of them in symmetric memory on all ranks."""
    import lockstep

    shared, other = lockstep.symmetric_empty(3), lockstep.symmetric_empty(5)
    tensors = [torch.ones(2), shared, torch.ones(4), other[1:3], torch.ones(1), torch.ones(1)]
    for tensor in tensors:
        tensor.fill_(dist.get_rank() + 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.all_reduce_coalesced(tensors)
    return [tensor.tolist() for tensor in tensors]


def test_several_tensors_of_both_kinds_of_memory() -> None:
    expected = [[3.0] * numel for numel in (2, 3, 4, 2, 1, 1)]
    assert run_ranks(reduce_several_with_symmetric_memory, 2) == [expected] * 2


def mix_kinds_of_memory(numel: int) -> tuple[str, bool]:
    """The same tensors, on one rank in symmetric memory and on the other not: they could not be reduced together."""
    import lockstep

    shared = lockstep.symmetric_empty(numel)
    own = shared if dist.get_rank() == 0 else torch.zeros(numel)
    error = collect({"": lambda: dist.all_reduce_coalesced([*zeros(1, 1, 1, 1), own])})[""]
    return f"{type(error).__name__}: {error}", group_works()


def test_kinds_of_memory_differ_between_ranks() -> None:
    for error, works in run_ranks(mix_kinds_of_memory, 2, 100_000):
        assert error.startswith("CollectiveMismatch: ")
        assert "symmetric memory at None, None, None, None" in error
        assert works
