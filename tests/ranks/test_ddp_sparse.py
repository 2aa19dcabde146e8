"""Sparse gradients: the ranks average their entries, and have those of one process, to the last row."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import embedding
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import lockstep
from ddp_checks import TOLERANCE, assert_same_on_all_ranks, backends, clear, error_of, mean_over_ranks
from lockstep import DistributedDataParallel
from lockstep.errors import ModelError, ModelMismatch
from lockstep.parallel import distributed
from lockstep.parallel.transports import GroupTransport
from lockstep.testing import run_ranks

ROWS = 9
OF_ONE_PROCESS = 1e-12


class Net(nn.Module):
    """Two tables with sparse gradients before a dense layer; `forward` chooses what it uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.words = nn.Embedding(ROWS, 3, padding_idx=2, sparse=True)
        self.bag = nn.EmbeddingBag(ROWS, 3, mode="sum", sparse=True)
        self.head = nn.Linear(3, 2)
        self.double()

    def forward(self, rows: Tensor, use: str = "both") -> Tensor:
        features = torch.zeros(len(rows), 3, dtype=torch.float64)
        if use in ("both", "words"):
            features = features + self.words(rows[:, 0])
        if use in ("both", "bag"):
            features = features + self.bag(rows)
        return self.head(features.tanh())


def rows_of(count: int, seed: int = 0) -> Tensor:
    """int64[count, 4]; the first rows of the tables are looked up by the first samples alone."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(2, ROWS, (count, 4), generator=generator)
    rows[0] = torch.tensor([0, 1, 0, 1])
    return rows


def entries(gradient: Tensor | None) -> dict[int, Tensor]:
    """Row -> values; of a sparse gradient."""
    assert gradient is not None
    assert gradient.is_sparse
    gradient = gradient.coalesce()
    return dict(zip(gradient.indices()[0].tolist(), gradient.values().clone(), strict=True))


# ---- as on one process -----------------------------------------------------------------------------------


def make_optimizers(kind: str, net: Net) -> list[Any]:
    if kind == "sgd":
        return [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)]
    tables = [net.words.weight, net.bag.weight]
    return [torch.optim.SparseAdam(tables, lr=0.05), torch.optim.Adam(net.head.parameters(), lr=0.05)]


def train(kind: str, window: int, zero: str, with_engine: bool) -> list[Any]:
    """Gradients and parameters in each step of two epochs; the last batch of each has 2 samples."""
    net = Net()
    model: Any = DistributedDataParallel(net) if with_engine else net
    rows = rows_of(11)
    loader: Any = lockstep.DataLoader(TensorDataset(rows), 3) if with_engine else [[part] for part in rows.split(3)]
    optimizers = make_optimizers(kind, net)
    found: list[Any] = []
    for _ in range(2):
        for number, (inputs,) in enumerate(loader, 1):
            syncs = number % window == 0 or number == 4
            with model.no_sync() if with_engine and not syncs else nullcontext():
                (model(inputs).square().mean() / window).backward()
            if syncs:
                found.append([entries(net.words.weight.grad), entries(net.bag.weight.grad)])
                for optimizer in optimizers:
                    optimizer.step()
                found.append([parameter.detach().clone() for parameter in net.parameters()])
                for optimizer in optimizers:
                    optimizer.zero_grad(set_to_none=zero == "none")
    return found


def compare_with_one_process(kind: str, window: int, zero: str) -> None:
    ours, alone = train(kind, window, zero, True), train(kind, window, zero, False)
    for step, (one, other) in enumerate(zip(ours, alone, strict=True)):
        for mine, theirs in zip(one, other, strict=True):
            assert type(mine) is type(theirs)
            if isinstance(mine, dict):
                assert set(mine) == set(theirs), f"step {step}: other rows have entries"
                mine, theirs = [torch.stack([each[row] for row in sorted(each)]) for each in (mine, theirs)]
            assert (mine - theirs).abs().max() <= OF_ONE_PROCESS, f"step {step}"
            assert_same_on_all_ranks(mine)


@backends
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(
    ("kind", "window", "zero"), [("sgd", 1, "none"), ("sgd", 3, "zeros"), ("adam", 1, "none"), ("adam", 3, "none")]
)
def test_ranks_train_as_one_process(backend: str, world_size: int, kind: str, window: int, zero: str) -> None:
    """With 3 ranks the last batch of an epoch has a filler."""
    run_ranks(compare_with_one_process, world_size, kind, window, zero, backend=backend)


def bring_what_counts_nothing(accumulates: bool) -> None:
    """Rank 1 has a filler of its own, which looks up rows that are in no batch; before it perhaps samples."""
    net = Net()
    model = DistributedDataParallel(net)
    alone = Net()
    rank = dist.get_rank()
    expected = {4, 5} if accumulates else {4}
    if accumulates:
        with model.no_sync(), model.samples(1):
            model(torch.full((1, 4), 4 + rank)).mean().backward()
        alone(torch.tensor([[4] * 4, [5] * 4])).mean().backward()
    with model.samples(1 - rank):
        model(torch.full((1, 4), 4 + 3 * rank)).mean().backward()
    alone(torch.full((1, 4), 4)).mean().backward()
    for ours, own in ((net.words, alone.words), (net.bag, alone.bag)):
        assert set(entries(ours.weight.grad)) == expected
        assert ours.weight.grad is not None
        assert own.weight.grad is not None
        assert (ours.weight.grad.to_dense() - own.weight.grad.to_dense()).abs().max() <= OF_ONE_PROCESS


@backends
@pytest.mark.parametrize("accumulates", [False, True])
def test_a_filler_leaves_no_entries(backend: str, accumulates: bool) -> None:
    run_ranks(bring_what_counts_nothing, 2, accumulates, backend=backend)


# ---- each rank uses others -------------------------------------------------------------------------------


def assert_mean(model: DistributedDataParallel, plain: nn.Module, scale: float = 1.0) -> None:
    """As `ddp_checks.assert_averaged`, where some gradients are sparse. Collective."""
    for (name, ours), theirs in zip(model.module.named_parameters(), plain.parameters(), strict=True):
        used = torch.tensor([int(theirs.grad is not None)])
        dist.all_reduce(used)
        if not used.item():
            assert ours.grad is None, f"{name} has a gradient, though no rank used it"
            continue
        mean = mean_over_ranks(torch.zeros_like(theirs) if theirs.grad is None else theirs.grad.to_dense()) * scale
        assert ours.grad is not None, f"{name} has no gradient"
        if theirs.grad is not None:
            assert ours.grad.layout is theirs.grad.layout
        dense = ours.grad.to_dense()
        assert (dense - mean).abs().max().item() <= TOLERANCE * max(1.0, mean.abs().max().item()), name
        assert_same_on_all_ranks(dense)


def backward(model: Any, rows: Tensor, use: str) -> None:
    model(rows, use).square().mean().backward()


def use_what_differs(**options: Any) -> None:
    net = Net()
    plain = copy.deepcopy(net)
    model = DistributedDataParallel(net, find_unused_parameters=True, **options)
    optimizer = torch.optim.SparseAdam([net.words.weight, net.bag.weight])
    rank = dist.get_rank()
    for step, uses in enumerate(["www", "wbx", "bbw", "nnn", "xxx", "wnn", "nwb"]):
        use = {"w": "words", "b": "bag", "x": "both", "n": "none"}[uses[rank]]
        for each in (model, plain):
            backward(each, rows_of(5, seed=10 * step + rank), use)
        assert_mean(model, plain)
        before = [parameter.detach().clone() for parameter in optimizer.param_groups[0]["params"]]
        optimizer.step()
        for parameter, old in zip(optimizer.param_groups[0]["params"], before, strict=True):
            assert torch.equal(parameter, old) == (parameter.grad is None)
        assert_same_on_all_ranks(net.words.weight, net.bag.weight)
        plain.load_state_dict(net.state_dict())
        clear(model, plain)


@backends
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_each_rank_may_use_other_tables(backend: str, world_size: int) -> None:
    run_ranks(use_what_differs, world_size, backend=backend)


def leave_out_for_good() -> None:
    net = Net()
    plain = copy.deepcopy(net)
    model = DistributedDataParallel(net, static_graph=True)
    for step in range(3):
        for each in (model, plain):
            backward(each, rows_of(5, seed=10 * step + dist.get_rank()), "words")
        assert_mean(model, plain)
        clear(model, plain)


@backends
def test_a_static_graph_may_leave_a_table_out(backend: str) -> None:
    run_ranks(leave_out_for_good, 2, backend=backend)


def leave_out_without_saying_so() -> str:
    model = DistributedDataParallel(Net())
    return str(error_of(backward, model, rows_of(5), "words"))


def test_a_table_without_a_gradient_is_named() -> None:
    for rank, message in enumerate(run_ranks(leave_out_without_saying_so, 2)):
        assert message.startswith(f"1 parameter(s) got no gradient on rank {rank} in this step: bag.weight. ")


# ---- other models ----------------------------------------------------------------------------------------


class Tied(nn.Module):
    """The table is the weight of a dense layer, too, on some ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.words = nn.Embedding(ROWS, 3, sparse=True).double()

    def forward(self, rows: Tensor, use: str) -> Tensor:
        features = self.words(rows[:, 0])
        return features @ self.words.weight.t() if use == "tied" else features


def tie_on_some_ranks() -> None:
    net = Tied()
    plain = copy.deepcopy(net)
    model = DistributedDataParallel(net)
    for step, tied_ranks in enumerate(([0, 1, 2], [1], [], [0, 2])):
        rank = dist.get_rank()
        for each in (model, plain):
            backward(each, rows_of(5, seed=10 * step + rank), "tied" if rank in tied_ranks else "plain")
        if tied_ranks and rank not in tied_ranks:
            plain.words.weight.grad = plain.words.weight.grad.to_dense()  # as the sum over ranks is
        assert_mean(model, plain)
        if step:  # else it continues accumulating
            clear(model, plain)
        else:
            plain.words.weight.grad = net.words.weight.grad.clone()


@backends
def test_a_gradient_that_is_dense_on_some_ranks(backend: str) -> None:
    """A model without any bucket, as all of its parameters have sparse gradients."""
    run_ranks(tie_on_some_ranks, 3, backend=backend)


def move_by_the_group() -> list[bool]:
    """What is true over several hosts, and of CUDA: no memory is shared by all ranks of the group."""
    made = []

    def make(*arguments: Any) -> GroupTransport:
        made.append(GroupTransport(*arguments))
        return made[-1]

    replaced, distributed.make_transport = distributed.make_transport, make
    try:
        tie_on_some_ranks()
    finally:
        distributed.make_transport = replaced
    return [each.can_renew for each in made]


@backends
def test_no_bucket_over_several_hosts(backend: str) -> None:
    assert run_ranks(move_by_the_group, 3, backend=backend) == [[True]] * 3


def train_in(dtype: torch.dtype) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    table = nn.Embedding(ROWS, 3, sparse=True).to(dtype)
    model = DistributedDataParallel(table)
    model(torch.tensor([rank, 5, 5])).sum().abs().backward()
    alone = copy.deepcopy(table)
    alone.zero_grad()
    alone(torch.tensor([rank, 5, 5])).sum().abs().backward()
    assert alone.weight.grad is not None
    mean = mean_over_ranks(alone.weight.grad.to_dense().double()).to(dtype)
    found = entries(table.weight.grad)
    assert sorted(found) == [*range(world_size), 5]
    tolerance = 4 * torch.finfo(dtype).eps
    assert max((value - mean[row]).abs().max().item() for row, value in found.items()) <= tolerance


@backends
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_dtypes(backend: str, dtype: torch.dtype) -> None:
    run_ranks(train_in, 3, dtype, backend=backend)


class Checkpointed(Net):
    def forward(self, rows: Tensor, use: str = "both") -> Tensor:
        start = torch.zeros(len(rows), 3, dtype=torch.float64, requires_grad=True)
        features = checkpoint(lambda zeros: zeros + self.words(rows[:, 0]), start, use_reentrant=use == "re-entrant")
        return self.head((features + self.bag(rows)).tanh())


def train_checkpointed(use: str) -> None:
    net = Checkpointed()
    model = DistributedDataParallel(net, static_graph=use == "re-entrant")
    alone = Checkpointed()
    rows = rows_of(11)
    for (inputs,), whole in zip(lockstep.DataLoader(TensorDataset(rows), 3), rows.split(3), strict=True):
        for each, given in ((model, inputs), (alone, whole)):
            each.zero_grad()
            backward(each, given, use)
        for mine, theirs in ((net.words, alone.words), (net.bag, alone.bag)):
            assert set(entries(mine.weight.grad)) == set(entries(theirs.weight.grad))
            difference = (mine.weight.grad - theirs.weight.grad).to_dense()  # type: ignore[operator]
            assert difference.abs().max() <= OF_ONE_PROCESS


@backends
@pytest.mark.parametrize("use", ["re-entrant", "not re-entrant"])
def test_inside_of_checkpoints(backend: str, use: str) -> None:
    run_ranks(train_checkpointed, 3, use, backend=backend)


# ---- with the rest of the engine -------------------------------------------------------------------------


def join_early(divide_by_initial_world_size: bool) -> None:
    net = Net()
    plain = copy.deepcopy(net)
    model = DistributedDataParallel(net)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    found = []
    with model.join(divide_by_initial_world_size=divide_by_initial_world_size):
        for step in range(1 + rank):
            clear(model)
            backward(model, rows_of(4, seed=10 * step + rank), "both")
            found.append(entries(net.bag.weight.grad))
    for step, ours in enumerate(found):
        expected = torch.zeros(ROWS, 3, dtype=torch.float64)
        for other in range(step, world_size):
            clear(plain)
            backward(plain, rows_of(4, seed=10 * step + other), "both")
            assert plain.bag.weight.grad is not None
            expected += plain.bag.weight.grad.to_dense()
        expected /= world_size if divide_by_initial_world_size else world_size - step
        assert max((value - expected[row]).abs().max().item() for row, value in ours.items()) <= TOLERANCE
        assert set(ours) == set(expected.any(1).nonzero().flatten().tolist())


@backends
@pytest.mark.parametrize("divide_by_initial_world_size", [True, False])
def test_ranks_may_join_early(backend: str, divide_by_initial_world_size: bool) -> None:
    run_ranks(join_early, 3, divide_by_initial_world_size, backend=backend)


def reduce_by_a_hook() -> None:
    net = Net()
    plain = copy.deepcopy(net)
    model = DistributedDataParallel(net, find_unused_parameters=True, bucket_cap_mb=0)
    seen: list[tuple[int, bool]] = []

    def hook(state: Any, bucket: Any) -> Any:
        seen.append((bucket.index(), bucket.is_last()))
        assert bucket.buffer().is_sparse == (bucket.parameters()[0] is not net.head.weight and bucket.index() > 1)
        return allreduce_hook(state, bucket)

    model.register_comm_hook(None, hook)
    rank = dist.get_rank()
    for step, uses in enumerate(["xx", "wb", "nn"]):
        for each in (model, plain):
            backward(
                each, rows_of(5, seed=10 * step + rank), {"x": "both", "w": "words", "b": "bag"}.get(uses[rank], "")
            )
        assert_mean(model, plain)
        clear(model, plain)
    assert seen == [(0, False), (1, False), (2, False), (3, True)] * 3


@backends
def test_a_communication_hook_gets_sparse_buckets(backend: str) -> None:
    run_ranks(reduce_by_a_hook, 2, backend=backend)


def keep_gradients() -> None:
    net = Net()
    model = DistributedDataParallel(net)
    kept: list[tuple[Tensor, Tensor]] = []
    for step in range(3):
        backward(model, rows_of(5, seed=10 * step + dist.get_rank()), "both")
        assert net.words.weight.grad is not None
        kept.append((net.words.weight.grad, net.words.weight.grad.to_dense()))
        clear(model)
    assert all(torch.equal(gradient.to_dense(), content) for gradient, content in kept)
    twin = copy.deepcopy(model)
    backward(twin, rows_of(5, seed=dist.get_rank()), "both")
    backward(model, rows_of(5, seed=dist.get_rank()), "both")
    assert torch.equal(twin.module.bag.weight.grad.to_dense(), net.bag.weight.grad.to_dense())  # type: ignore[union-attr]
    assert_same_on_all_ranks(net.bag.weight.grad.to_dense())  # type: ignore[union-attr]


@backends
def test_gradients_may_be_kept_and_engines_copied(backend: str) -> None:
    run_ranks(keep_gradients, 2, backend=backend)


def wrap_other_layers() -> str:
    net = Net()
    net.bag.sparse = dist.get_rank() == 0
    error = error_of(DistributedDataParallel, net)
    assert isinstance(error, ModelMismatch)
    return str(error)


@backends
def test_ranks_must_agree_on_what_is_sparse(backend: str) -> None:
    for message in run_ranks(wrap_other_layers, 2, backend=backend):
        assert "rank 0 has sparse=['words.weight', 'bag.weight']; rank 1 has sparse=['words.weight']" in message


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(ROWS, 3))

    def forward(self, rows: Tensor) -> Tensor:
        return embedding(rows, self.table, sparse=True)


def be_sparse_unannounced(cap: int | None) -> list[str]:
    model = DistributedDataParallel(Functional(), bucket_cap_mb=cap)
    messages = []
    for _ in range(2):
        error = error_of(model(torch.tensor([1, 2])).sum().backward)
        assert isinstance(error, ModelError)
        messages.append(str(error))
        model.zero_grad()
    return messages


@backends
@pytest.mark.parametrize("cap", [None, 0])
def test_a_sparse_gradient_that_no_layer_announced_is_named(backend: str, cap: int | None) -> None:
    for messages in run_ranks(be_sparse_unannounced, 2, cap, backend=backend):
        for message in messages:
            assert message.startswith(
                "parameter table has a sparse gradient, which was not known when the model was wrapped"
            )
