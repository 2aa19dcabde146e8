"""The ranks average gradients of one and the same batch, or it is an error that names the batches."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import mse_loss
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import TensorDataset, random_split

import lockstep
from ddp_checks import backends, error_of
from lockstep import DistributedDataParallel, batch
from lockstep.errors import CollectiveMismatch, InputError, InputTypeError
from lockstep.parallel.rank_agreement import RankAgreement, fingerprint_of
from lockstep.parallel.rows import rows_in, show_inputs
from lockstep.testing import run_ranks


def make(num_samples: int) -> tuple[DistributedDataParallel, lockstep.DataLoader]:
    torch.manual_seed(0)
    data = torch.arange(float(num_samples), dtype=torch.float64).view(-1, 1)
    return DistributedDataParallel(nn.Linear(1, 1).double()), lockstep.DataLoader(TensorDataset(data), 4)


def backward(model: nn.Module, inputs: Tensor) -> None:
    mse_loss(model(inputs), torch.ones_like(inputs)).backward()


def skip_one(num_samples: int, accumulate: bool) -> str:
    """Rank 1 leaves out the backward pass of the second batch."""
    model, loader = make(num_samples)
    for number, (inputs,) in enumerate(loader):
        model.zero_grad()
        if number == 1 and dist.get_rank() == 1:
            continue
        if number == 1 + dist.get_rank():
            if accumulate:
                with model.no_sync():
                    backward(model, inputs)
            error = error_of(backward, model, inputs)
            assert isinstance(error, CollectiveMismatch)
            break
        backward(model, inputs)
    total = torch.ones(1)
    dist.all_reduce(total)  # the group still works
    assert total.item() == dist.get_world_size()
    return str(error)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("num_samples", [16, 17])
def test_a_skipped_backward_pass_is_an_error_that_names_the_batches(num_samples: int, accumulate: bool) -> None:
    for message in run_ranks(skip_one, 2, num_samples, accumulate):
        assert "rank 0: samples 4 … of epoch 0\n  rank 1: samples 8 … of epoch 0\n" in message
        assert "One rank has left out a backward pass" in message


def lose_tags_now_and_then() -> bool:
    """Whether ranks agree although each computes new inputs from some of its batches, others on each."""
    model, loader = make(16)
    for number, (inputs,) in enumerate(loader):
        backward(model, inputs * 1.0 if (number + dist.get_rank()) % 2 else inputs)
    weight = model.module.weight.grad.clone()
    dist.all_reduce(weight)
    return torch.equal(weight / dist.get_world_size(), model.module.weight.grad)


@pytest.mark.parametrize("backend", ["lockstep", "gloo"])
def test_a_batch_without_its_tag_is_not_compared(backend: str) -> None:
    assert run_ranks(lose_tags_now_and_then, 2, backend=backend) == [True, True]


def test_stamps() -> None:
    first, second = ("samples 0 to 3 of epoch 1", 5), ("samples 4 to 7 of epoch 1", 5)
    assert fingerprint_of([first, second]) == fingerprint_of([second, first])
    assert len({fingerprint_of([first, second]), fingerprint_of([first]), fingerprint_of([second]), 0}) == 4
    assert fingerprint_of([first, ("", 0)]) == fingerprint_of([]) == 0
    assert (
        max(fingerprint_of([(f"samples {2**40} to {2**41} of epoch {2**20}", 2**48 - 1)]), fingerprint_of([first]))
        < 2**63
    )
    agreement = RankAgreement(["weight"], [torch.ones(1)], dist.group.WORLD, torch.device("cpu"))  # type: ignore[arg-type]
    agreement._compare_batches([fingerprint_of([first]), 0, fingerprint_of([first])])
    with pytest.raises(CollectiveMismatch, match="of epoch 1, but with different data"):
        agreement._compare_batches([fingerprint_of([first]), fingerprint_of([(first[0], 6)])])


def split_by_itself(what: str, hook: Any = None) -> str:
    """A split, values or a seed that are another on each rank."""
    torch.manual_seed(dist.get_rank())
    dataset: Any = TensorDataset(torch.arange(32.0)[:, None].repeat(1, 3))
    seed = 0
    if what == "split":
        dataset, _ = random_split(dataset, [24, 8])
    elif what == "values":
        dataset = TensorDataset(torch.randn(24, 3))
    elif what == "seed":
        seed = dist.get_rank()
    elif what == "nothing":
        dataset = Files(dist.get_rank())
    model = DistributedDataParallel(torch.nn.Linear(3, 1))
    if hook is not None:
        model.register_comm_hook(None, hook)
    try:
        for (inputs,) in lockstep.DataLoader(dataset, 8, shuffle=True, seed=seed):
            backward(model, inputs)
    except CollectiveMismatch as error:
        return str(error)
    return ""


class Files:
    """A dataset of files, which each rank has in a folder of its own, and of what it has read so far."""

    def __init__(self, rank: int) -> None:
        self.paths = [f"/host{rank}/{name}.png" for name in range(24)]
        self.cache = [rank] * 24

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        return (torch.full((3,), float(index)),)


@backends
@pytest.mark.parametrize("what", ["split", "values", "seed"])
def test_ranks_with_other_data_are_told(what: str, backend: str) -> None:
    """Each trained on samples of another rank's validation set, or on some samples twice and never on others."""
    for message in run_ranks(split_by_itself, 2, what, backend=backend):
        assert "samples 0 … of epoch 0, but with different data" in message
        assert "what they draw without a seed or once the model trains (data, a split" in message
        assert "combine what ranks collected with lockstep.all_gather" in message


@backends
def test_what_is_a_ranks_own_business_is_not_compared(backend: str) -> None:
    assert run_ranks(split_by_itself, 2, "nothing", backend=backend) == ["", ""]


def test_ranks_with_other_data_are_told_with_a_communication_hook() -> None:
    for message in run_ranks(split_by_itself, 2, "split", allreduce_hook):
        assert "with different data" in message


def leave_out_by_gloo() -> str:
    """Rank 1 leaves out the backward pass of the second batch, and the ranks compare in the fourth averaging."""
    model, loader = make(32)
    for number, (inputs,) in enumerate(loader):
        model.zero_grad()
        if number != 1 or dist.get_rank() == 0:
            try:
                backward(model, inputs)
            except CollectiveMismatch as error:
                return f"{number}: {error}"
    return ""


def test_a_skipped_backward_pass_is_found_by_gloo_too() -> None:
    for rank, message in enumerate(run_ranks(leave_out_by_gloo, 2, backend="gloo")):
        assert message.startswith(f"{3 + rank}: the ranks averaged gradients of different batches")


class Detector(nn.Module):
    """Takes a dictionary, as the models of ultralytics do: images, and the boxes of all of them in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1).double()

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.layer(batch["images"].flatten(1)).square().mean()


def train_with_more(what: str, num_images: int = 4) -> str | bool:
    """Whether the gradients are the mean over both ranks, where rank 1 holds one more of these."""
    model = DistributedDataParallel(Detector())
    batch = {"boxes": torch.rand(4, 4), "images": torch.rand(num_images, 2, 2, 2).double(), "names": torch.rand(4)}
    if dist.get_rank() == 1:
        batch[what] = batch[what][[0, 0, 1, 2, 3]]
    try:
        model(batch).backward()
    except CollectiveMismatch as error:
        return str(error)
    weight = model.module.layer.weight.grad.clone()
    dist.all_reduce(weight)
    return torch.equal(weight / 2, model.module.layer.weight.grad)


@pytest.mark.parametrize("num_images", [1, 4])
@pytest.mark.parametrize("what", ["boxes", "names"])
def test_inputs_of_no_sample_may_differ_in_size(what: str, num_images: int) -> None:
    assert run_ranks(train_with_more, 2, what, num_images) == [True, True]


def test_batches_of_other_sizes_are_an_error_that_says_what_to_write() -> None:
    for message in run_ranks(train_with_more, 2, "images"):
        assert "with model.samples(n)" in str(message)


@pytest.mark.parametrize("number", ["num_graphs", "batch_size"])
def test_what_says_how_many_samples_it_holds_is_believed(number: str) -> None:
    graphs = SimpleNamespace(x=torch.rand(7, 3), edges=torch.zeros(2, 9), **{number: 4})
    assert rows_in(((graphs,), {})) == 4
    assert rows_in(((torch.rand(7, 3), graphs), {})) == 4
    options = SimpleNamespace(**{number: 4})  # a script's
    assert rows_in(((options,), {})) is None


def test_a_dictionary_is_believed_where_something_in_it_has_that_size() -> None:
    """OpenPCDet's `batch_dict`; a `batch_size` out of a script's options need not be that of this batch."""
    batch = {"voxels": torch.rand(7, 3, 4), "gt_boxes": torch.rand(2, 5, 8), "batch_size": 2}
    assert rows_in(((batch,), {})) == 2
    assert rows_in(((batch | {"batch_size": 4},), {})) == 7
    for batch_size in (4, [3], torch.tensor(3)):
        assert rows_in((({"images": torch.rand(3, 4, 4), "batch_size": batch_size},), {})) == 3


def test_a_list_in_a_dictionary_tells_its_length() -> None:
    """As the models of mmdet3d are called: with a list of clouds, and voxels, of which each rank has its own number."""
    inputs: dict[str, Any] = {"points": [torch.rand(9, 4), torch.rand(5, 4)], "voxels": {"voxels": torch.rand(7, 3, 4)}}
    samples = [SimpleNamespace(), SimpleNamespace(), SimpleNamespace()]
    assert rows_in(((), {"inputs": inputs, "data_samples": samples})) == 2
    assert rows_in(((), {"data_samples": samples, "inputs": inputs})) == 3


class Pillars(nn.Module):
    """Takes voxels and a list of samples, or a dictionary that says how many samples it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1).double()

    def forward(self, inputs: dict[str, Any], data_samples: Any = None) -> Tensor:
        voxels = inputs["voxels"]
        return self.net(voxels if isinstance(voxels, Tensor) else voxels["voxels"]).mean()


def train_on_clouds(how: str, num_samples: int) -> str | bool:
    """Whether the gradients are the mean over both ranks, where rank 1 has two voxels more."""
    model = DistributedDataParallel(Pillars())
    voxels = torch.rand(7 + 2 * dist.get_rank(), 3, 4).double()
    count = num_samples if dist.get_rank() else 2
    try:
        if how == "list":
            points = [torch.rand(9, 4).double() for _ in range(count)]
            inputs = {"points": points, "voxels": {"voxels": voxels}}
            model(inputs=inputs, data_samples=[SimpleNamespace() for _ in range(count)]).backward()
        else:
            model({"voxels": voxels, "gt_boxes": torch.rand(count, 5, 8), "batch_size": count}).backward()
    except CollectiveMismatch as error:
        return str(error)
    weight = model.module.net.weight.grad.clone()
    dist.all_reduce(weight)
    return torch.equal(weight / 2, model.module.net.weight.grad)


@pytest.mark.parametrize("how", ["list", "dictionary"])
def test_point_clouds_have_any_number_of_voxels(how: str) -> None:
    assert run_ranks(train_on_clouds, 2, how, 2) == [True, True]
    for message in run_ranks(train_on_clouds, 2, how, 3):
        assert "with model.samples(n)" in str(message)


class Graphs(SimpleNamespace):
    """As DGL has them: node features are popped, and the model takes them beside the graphs."""

    def num_nodes(self) -> int:
        return self.nodes

    def num_edges(self, kind: str) -> int:
        raise AssertionError


@pytest.mark.parametrize("number", ["num_graphs", "batch_size"])
def test_nodes_beside_graphs_are_no_samples(number: str) -> None:
    nodes = torch.rand(7, 3)
    for graphs in (
        SimpleNamespace(x=nodes, **{number: 4}),
        SimpleNamespace(edges=torch.zeros(9), num_nodes=7, **{number: 4}),
        Graphs(edges=torch.zeros(9), nodes=7, **{number: 4}),
    ):
        for inputs in (graphs, nodes), (nodes, graphs):
            assert rows_in((inputs, {})) == 4


def train_on_graphs() -> list[float]:
    """As DGL's tutorial of several GPUs: the same number of graphs on each rank, with other numbers of nodes."""
    model = DistributedDataParallel(Graphwise())
    sizes = torch.tensor([3, 2 + 4 * dist.get_rank()])
    nodes = int(sizes.sum())
    model(Graphs(batch_size=2, sizes=sizes, nodes=nodes), torch.ones(nodes, 1)).mean().backward()
    return model.module.layer.weight.grad.flatten().tolist()


class Graphwise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)

    def forward(self, graphs: Graphs, features: Tensor) -> Tensor:
        return torch.stack([self.layer(part).sum() for part in features.split(graphs.sizes.tolist())])


def test_training_on_graphs_with_other_numbers_of_nodes() -> None:
    assert run_ranks(train_on_graphs, 2) == [[(5 + 9) / 2 / 2]] * 2


def test_packed_sequences_hold_as_many_samples_as_there_are_sequences() -> None:
    packed = pack_sequence([torch.rand(length, 3) for length in (5, 3, 2)])
    assert rows_in(((packed,), {})) == 3


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_hold_as_many_samples_as_there_are_tensors_in_them(layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([torch.rand(length, 3) for length in (5, 2, 4)], layout=layout)
    assert rows_in(((nested,), {"targets": torch.rand(2, 2)})) == 3


def differentiate_by_inputs(batch_size: int) -> list[float]:
    """The norms of the gradients of this rank's inputs, one of each batch of 6 samples."""
    model = DistributedDataParallel(nn.Linear(3, 2))
    norms = []
    for x, y in lockstep.DataLoader(TensorDataset(torch.ones(6, 3), torch.zeros(6, 2)), batch_size):
        x.requires_grad_()
        mse_loss(model(x), y).backward()
        norms.append(x.grad.norm().item())
    return norms


@pytest.mark.parametrize("batch_size", [4, 2])
def test_the_gradient_of_a_fillers_inputs_is_zero(batch_size: int) -> None:
    """It was 0/0 where ranks ask each other: of 4 samples and of 2 rank 1 has one, and rank 2 one or a filler."""
    *others, last = run_ranks(differentiate_by_inputs, 3, batch_size)
    assert all(norm > 0 for norms in others for norm in norms)
    assert [norm > 0 for norm in last] == ([True, False] if batch_size == 4 else [False] * 3)
    assert last[-1] == 0


def test_the_one_size_that_may_be_a_batchs() -> None:
    x, rows = torch.rand(5, 2), np.zeros((3, 4))
    shared = nn.Parameter(torch.rand(7, 2))
    assert rows_in(((0.5, torch.tensor(1.0), shared, x, rows), {})) == 5
    assert rows_in(((), {"a": None, "b": rows, "c": x})) == 3
    assert rows_in((((x, rows),), {})) == rows_in((({"x": x},), {})) == 5
    assert rows_in((([torch.rand(3, 5, 6), torch.rand(3, 7, 8)], x), {})) == 2, "images"
    assert rows_in((("a text", [1, 2]), {})) == 2
    assert rows_in((("a text", 3), {})) is None


def test_arrays_of_numpy_tell_a_size() -> None:
    rows, masks = np.zeros((3, 4), np.float32), np.zeros((5, 4, 4), bool)
    assert rows_in(((rows,), {})) == 3
    assert rows_in((({"observations": {"depth": rows}},), {})) == 3
    assert rows_in((({"observations": rows, "masks": masks},), {})) == 5
    assert rows_in(((np.array(3.0), np.array(["a", "b"])), {})) is None
    assert rows_in((([np.zeros((480, 640, 3)), np.zeros((333, 500, 3))],), {})) == 2, "images"
    assert show_inputs((({"array": rows},), {"x": torch.rand(2)})) == "float32[2], numpy float32[3, 4]"


class Converting(nn.Linear):
    """Takes arrays, as the models of some libraries for reinforcement learning do."""

    def forward(self, inputs: Any) -> Tensor:
        return super().forward(torch.as_tensor(inputs))


def train_on_arrays(num_rows: int, says: bool) -> str:
    model = DistributedDataParallel(Converting(4, 1))
    inputs = np.ones((num_rows * (1 + dist.get_rank()) if num_rows > 3 else 3, 4), np.float32)
    with model.samples(np.int64(len(inputs))) if says else nullcontext():
        loss = model(inputs).mean()
    try:
        loss.backward()
    except CollectiveMismatch as error:
        return str(error)
    return ""


def test_arrays_of_other_sizes_are_an_error() -> None:
    for message in run_ranks(train_on_arrays, 2, 4, False):
        assert "4 rows" in message
        assert "8 rows" in message
    assert run_ranks(train_on_arrays, 2, 3, False) == ["", ""]
    assert run_ranks(train_on_arrays, 2, 4, True) == ["", ""]


@pytest.mark.parametrize("count", [3, np.int64(3), np.array(3), torch.tensor(3)])
def test_integers_that_count_samples(count: Any) -> None:
    with lockstep.init(device="cpu"):
        model = DistributedDataParallel(nn.Linear(1, 1))
        with model.samples(count):
            share = batch.hand.held()
            assert share is not None
            assert type(share.local_samples) is int
            assert share.local_samples == 3


@pytest.mark.parametrize("count", [True, 3.0, np.bool_(True), np.float32(3), torch.tensor(True), torch.ones(()), "3"])
def test_what_counts_no_samples(count: Any) -> None:
    with lockstep.init(device="cpu"):
        model = DistributedDataParallel(nn.Linear(1, 1))
        with pytest.raises(InputTypeError, match="expected the number of samples on this rank"), model.samples(count):
            pass


def test_a_list_of_two_batches_is_none_of_samples() -> None:
    """As a StyleGAN is given one or two batches of latents."""
    for latents in ([torch.rand(8, 4)], [torch.rand(8, 4)] * 2, torch.rand(2, 8, 4).unbind()):
        assert rows_in(((latents,), {})) == 8
    assert rows_in((([torch.rand(3, 5, 6), torch.rand(3, 7, 8)],), {})) == 2, "images"
    assert rows_in((([torch.rand(5)] * 3,), {})) == 3


class HyperNetwork(nn.Module):
    """Makes the weights of a layer from a code of one row."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 3)

    def forward(self, code: Tensor) -> Tensor:
        return self.net(code)[0]


def train_by_a_code(says: bool) -> Tensor | str:
    """Batches of 4, 4 and 1: the code has as many rows as the last one on rank 0, and as its filler."""
    torch.manual_seed(0)
    model = DistributedDataParallel(HyperNetwork().double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    code, data = torch.ones(1, 2).double(), torch.arange(27.0).double().view(9, 3) / 9
    for (x,) in lockstep.DataLoader(TensorDataset(data), batch_size=4):
        optimizer.zero_grad()
        try:
            with model.samples(0 if lockstep.is_filler(x) else len(x)) if says else nullcontext():
                weights = model(code)
        except InputError as error:
            return str(error)
        (x @ weights).square().mean().backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def train_by_an_iterator_that_was_there_first() -> list[float]:
    """The gradients of batches of 4, 4 and 3 samples that have lost their tags."""
    data = torch.arange(11.0, dtype=torch.float64).view(-1, 1)
    batches = iter(lockstep.DataLoader(TensorDataset(data), 4))
    torch.manual_seed(0)
    model, found = DistributedDataParallel(nn.Linear(1, 1).double()), []
    for (inputs,) in batches:
        model.zero_grad()
        backward(model, inputs * 1.0)
        found.append(model.module.weight.grad.item())
    return found


def test_an_iteration_may_begin_before_the_engine_is_made() -> None:
    (expected,) = run_ranks(train_by_an_iterator_that_was_there_first, 1)
    for found in run_ranks(train_by_an_iterator_that_was_there_first, 2):
        assert found == pytest.approx(expected, rel=1e-12)


def test_one_row_beside_the_batches_is_no_batch_of_one_sample() -> None:
    """It counted twice on rank 0, and not at all on rank 1, without a word."""
    for message in run_ranks(train_by_a_code, 2, False):
        assert "No batch has as many rows as the first tensor" in str(message)
        assert "with model.samples(n)" in str(message)
    (expected,) = run_ranks(train_by_a_code, 1, True)
    for found in run_ranks(train_by_a_code, 2, True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def lay_in_a_row(what: str) -> str:
    model = DistributedDataParallel(nn.Linear(1, 1))
    first, second = (
        lockstep.DataLoader(TensorDataset(torch.ones(10, 1)), batch_size=batch_size) for batch_size in (5, 7)
    )
    both = zip(first, second, strict=True)
    (x,), (other,) = next(both)
    return str(error_of(model, torch.cat([x, x * 2] if what == "views" else [x, other])))


@pytest.mark.parametrize(
    ("what", "cure"), [("views", "lockstep.all_gather(a)"), ("loaders", "Call the model once per batch")]
)
def test_rows_of_several_batches_have_a_cure_of_their_own(what: str, cure: str) -> None:
    """`model.samples(n)` would be another answer, without a word."""
    for message in run_ranks(lay_in_a_row, 2, what):
        assert cure in message
        assert "samples(n)" not in message


class SlowEvent:
    """An event of a GPU that never comes before somebody waits for it."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return False


def claim_on_a_gpu(num_after: int, is_local: bool) -> list[str]:
    """An engine whose comparisons arrive late, as a GPU's do; ranks differ in one step. Returns the errors."""
    found = []
    try:
        with lockstep.init() as world, mock.patch("torch.cuda.Event", SlowEvent):
            model: Any = DistributedDataParallel(torch.nn.Linear(3, 1))
            model._agreement.claims._memory = None  # as of elements on a GPU
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(3 + num_after):
                rows = 5 + (world.rank if step == 2 else 0)
                model(torch.ones(rows, 3)).mean().backward()
                optimizer.step()
            found.append("after the loop")
            if is_local:
                del model, optimizer
    except CollectiveMismatch as error:
        found.append(str(error))
    return found


@pytest.mark.parametrize(
    ("num_after", "is_local", "said_late"), [(40, False, False), (4, False, True), (0, True, True)]
)
def test_what_a_gpu_has_compared_is_read_at_last(num_after: int, is_local: bool, said_late: bool) -> None:
    """At the latest sixteen steps later, or when the world is left, also of an engine that is gone by then."""
    for found in run_ranks(claim_on_a_gpu, 2, num_after, is_local, backend="gloo"):
        assert len(found) == 1 + said_late
        assert "gradients of different batches" in found[-1]
