"""The engine against one process that sees the whole global batch, and against torch's own engine, bit for bit.

Float64 where a tolerance is needed: ranks add the same numbers as one process in another order, so a
sum of n terms may differ by n units in the last place, 1e-16 each; over the few steps here that
grows to 1e-14 or so. 1e-12 leaves room, and any mistake in weighting is a million times larger.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import lockstep
from lockstep import batch
from lockstep.testing import run_ranks

TOLERANCE = 1e-12
EPOCHS = 2

worlds = pytest.mark.parametrize("world_size", [1, 2, 3, 5])

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.3),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.02),
}

SIZES = {  # samples in the dataset, in a global batch
    "even": (24, 12),
    "uneven, last batch partial": (23, 7),
    "a batch smaller than five ranks": (11, 4),
    "a dataset smaller than the ranks": (2, 2),
    "one sample": (1, 8),
}

History = list[tuple[float, Tensor]]  # loss over the global batch, and all parameters after the step, flat


def make_dataset(num_samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(num_samples, 1, 5, 5, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(0, 3, (num_samples,), generator=generator))


def make_model() -> nn.Module:
    torch.manual_seed(11)
    layers = [nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(36, 8), nn.Linear(8, 3)]
    return nn.Sequential(*layers).double()


def flat_parameters(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).clone()


def regularizer(model: nn.Module) -> Tensor:
    return 0.05 * torch.stack([parameter.square().sum() for parameter in model.parameters()]).sum()


def batches_on_one_process(num_samples: int, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    loader = lockstep.DataLoader(
        make_dataset(num_samples), batch_size=batch_size, shuffle=True, seed=2, rank=0, world_size=1
    )
    for _ in range(EPOCHS):
        yield from loader


def train_on_one_process(num_samples: int, batch_size: int, optimizer_name: str, *, regularized: bool) -> History:
    """Plain PyTorch; no engine, no group."""
    model = make_model()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    history = []
    for inputs, labels in batches_on_one_process(num_samples, batch_size):
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), labels)
        if regularized:
            loss = loss + regularizer(model)
        loss.backward()
        optimizer.step()
        history.append((loss.item(), flat_parameters(model)))
    return history


def over_the_global_batch(loss: Tensor) -> float:
    """The mean of a loss over the samples of all ranks. Collective."""
    share = batch.hand.current()
    assert share is not None
    total = loss.detach() * share.weight / share.world_size
    dist.all_reduce(total)
    return total.item()


def train(num_samples: int, batch_size: int, optimizer_name: str, regularized: bool) -> History:
    model = lockstep.DistributedDataParallel(make_model(), bucket_cap_mb=0)
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    loader = lockstep.DataLoader(make_dataset(num_samples), batch_size=batch_size, shuffle=True, seed=2)
    history = []
    for _ in range(EPOCHS):
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), labels)
            if regularized:
                loss = loss + regularizer(model)
            loss.backward()
            optimizer.step()
            history.append((over_the_global_batch(loss), flat_parameters(model)))
    return history


def train_all_sizes(optimizer_name: str) -> list[History]:
    return [train(*size, optimizer_name, False) for size in SIZES.values()]


def assert_same_history(history: History, expected: History, what: object = "") -> None:
    assert len(history) == len(expected)
    for step, ((loss, parameters), (expected_loss, expected_parameters)) in enumerate(
        zip(history, expected, strict=True)
    ):
        assert loss == pytest.approx(expected_loss, rel=0, abs=TOLERANCE), f"loss of step {step}, {what}"
        difference = (parameters - expected_parameters).abs().max().item()
        assert difference <= TOLERANCE, f"parameters after step {step} differ by {difference}, {what}"


def assert_same_bits(histories: Sequence[History]) -> None:
    for rank, history in enumerate(histories):
        for step, ((loss, parameters), (first_loss, first)) in enumerate(zip(history, histories[0], strict=True)):
            assert loss == first_loss, f"rank {rank}, step {step}"
            assert torch.equal(parameters, first), f"rank {rank}, step {step}"


@worlds
@pytest.mark.parametrize("optimizer_name", list(OPTIMIZERS))
def test_every_step_is_that_of_one_process(world_size: int, optimizer_name: str) -> None:
    by_size = zip(*run_ranks(train_all_sizes, world_size, optimizer_name), strict=True)
    for (name, size), histories in zip(SIZES.items(), by_size, strict=True):
        assert_same_bits(histories)
        assert_same_history(histories[0], train_on_one_process(*size, optimizer_name, regularized=False), name)


@worlds
@pytest.mark.parametrize("backend", ["lockstep", "gloo"])
def test_a_term_that_does_not_depend_on_the_batch_is_not_scaled(world_size: int, backend: str) -> None:
    histories = run_ranks(train, world_size, 11, 4, "momentum", True, backend=backend)
    assert_same_bits(histories)
    assert_same_history(histories[0], train_on_one_process(11, 4, "momentum", regularized=True))


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_a_run_repeats_bit_for_bit(world_size: int) -> None:
    first, second = (run_ranks(train, world_size, 23, 7, "adam", True) for _ in range(2))
    assert_same_bits([*first, *second])


# ---- accumulation ----------------------------------------------------------------------------------


def train_accumulated(num_samples: int, batch_size: int, window: int, set_to_none: bool) -> History:
    """A step takes `window` global batches; the last of an epoch and its last batch may be smaller."""
    model = lockstep.DistributedDataParallel(make_model())
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    loader = lockstep.DataLoader(make_dataset(num_samples), batch_size=batch_size, shuffle=True, seed=2)
    history = []
    for _ in range(EPOCHS):
        rest, loss_of_step = num_samples, 0.0
        for number, (inputs, labels) in enumerate(loader):
            if number % window == 0:
                samples_of_step = min(rest, window * batch_size)
                rest -= samples_of_step
                optimizer.zero_grad(set_to_none=set_to_none)
            share = batch.hand.current()
            assert share is not None
            is_last = number % window == window - 1 or number == len(loader) - 1
            model.require_backward_grad_sync = is_last  # what no_sync() sets
            loss = cross_entropy(model(inputs), labels) * (share.global_samples / samples_of_step)
            loss.backward()
            loss_of_step += over_the_global_batch(loss)
            if is_last:
                optimizer.step()
                history.append((loss_of_step, flat_parameters(model)))
                loss_of_step = 0.0
    return history


WINDOWS = [(24, 4, 2), (23, 5, 3), (9, 2, 2)]  # samples in the dataset, in a global batch; batches in a step


def train_all_windows(set_to_none: bool) -> list[History]:
    return [train_accumulated(*window, set_to_none) for window in WINDOWS]


@worlds
@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulation_is_one_larger_batch(world_size: int, set_to_none: bool) -> None:
    by_window = zip(*run_ranks(train_all_windows, world_size, set_to_none), strict=True)
    for (num_samples, batch_size, window), histories in zip(WINDOWS, by_window, strict=True):
        assert_same_bits(histories)
        expected = train_on_one_process(num_samples, batch_size * window, "momentum", regularized=False)
        assert_same_history(histories[0], expected, (num_samples, batch_size, window))


# ---- weights on paths through several hooks --------------------------------------------------------


class Features(nn.Module):
    """Returns what it computes the logits from, too, and the logits twice."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Flatten(), nn.Linear(25, 6), nn.Tanh())
        self.head = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> dict[str, Any]:
        features = self.trunk(inputs)
        logits = self.head(features)
        return {"features": features, "logits": logits, "again": [logits]}


def loss_of_features(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    output = model(inputs)
    loss = cross_entropy(output["logits"], labels) + 0.5 * cross_entropy(output["again"][0], labels)
    return loss + output["features"].square().mean()


class Chain(nn.Module):
    """An encoder and a decoder, which an engine each may wrap. Both write in place to views of what they computed."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.encoder = wrap(nn.Sequential(nn.Tanh(), nn.Linear(25, 6), nn.Unflatten(1, (2, 3))))
        self.decoder = wrap(nn.Sequential(nn.Flatten(), nn.ReLU(inplace=True), nn.Linear(6, 3), nn.Flatten(0)))

    def forward(self, inputs: Tensor) -> Tensor:
        code = self.encoder(inputs.flatten(1))
        code += 0.5
        logits = self.decoder(code)
        logits *= 2.0
        return logits.view(-1, 3)


def loss_of_logits(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(model(inputs), labels)


def build_features(wrap: Callable[[nn.Module], nn.Module]) -> tuple[nn.Module, Callable[..., Tensor]]:
    return wrap(Features().double()), loss_of_features


def build_chain(wrap: Callable[[nn.Module], nn.Module]) -> tuple[nn.Module, Callable[..., Tensor]]:
    return Chain(lambda module: wrap(module.double())), loss_of_logits


BUILDERS = {"outputs computed from each other": build_features, "two engines in a row": build_chain}


def train_with(name: str, batches: Iterator[tuple[Tensor, Tensor]], wrap: Callable[[nn.Module], nn.Module]) -> Tensor:
    torch.manual_seed(5)
    model, loss_of = BUILDERS[name](wrap)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for inputs, labels in batches:
        optimizer.zero_grad()
        loss_of(model, inputs, labels).backward()
        optimizer.step()
    return flat_parameters(model)


def train_with_engine(name: str) -> Tensor:
    loader = lockstep.DataLoader(make_dataset(11), batch_size=4, shuffle=True, seed=2)
    batches = (item for _ in range(EPOCHS) for item in loader)
    return train_with(name, batches, lockstep.DistributedDataParallel)


@worlds
@pytest.mark.parametrize("name", list(BUILDERS))
def test_a_gradient_is_weighted_once_on_its_way(world_size: int, name: str) -> None:
    expected = train_with(name, batches_on_one_process(11, 4), lambda module: module)
    for parameters in run_ranks(train_with_engine, world_size, name):
        assert (parameters - expected).abs().max().item() <= TOLERANCE


def evaluate_between_forward_and_backward() -> Tensor:
    model = lockstep.DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    training = lockstep.DataLoader(make_dataset(11), batch_size=4, shuffle=True, seed=2)
    held_out = lockstep.DataLoader(make_dataset(7), batch_size=5, evaluation=True)
    for _ in range(EPOCHS):
        for inputs, labels in training:
            loss = cross_entropy(model(inputs), labels)
            model.eval()
            evaluation = iter(held_out)
            with torch.no_grad():
                model(next(evaluation)[0])
            model.train()
            share = batch.hand.current()
            assert share is not None
            assert share.global_samples == 5, "the share of the batch yielded last, one for evaluation"
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return flat_parameters(model)


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_weight_is_that_of_the_forward_pass(world_size: int) -> None:
    _, expected = train_on_one_process(11, 4, "sgd", regularized=False)[-1]
    for parameters in run_ranks(evaluate_between_forward_and_backward, world_size):
        assert (parameters - expected).abs().max().item() <= TOLERANCE


def backward_of_infinite_filler() -> list[list[float]]:
    """Rank 1 holds a filler, of which its loss has no finite gradient."""
    model = lockstep.DistributedDataParallel(nn.Linear(2, 1, bias=False).double())
    nn.init.ones_(model.module.weight)
    is_filler = dist.get_rank() == 1
    with batch.hand.hold(batch.share.BatchShare(0 if is_filler else 3, 3, 2)):
        output = model(torch.tensor([[3.0, 4.0]], dtype=torch.float64))
    (output.log() * torch.inf if is_filler else output).sum().backward()
    assert model.module.weight.grad is not None
    return model.module.weight.grad.tolist()


def test_a_filler_counts_for_nothing() -> None:
    assert run_ranks(backward_of_infinite_filler, 2) == [[[3.0, 4.0]]] * 2


def average_over_a_part_of_the_ranks() -> list[list[float]]:
    """A loader splits over more ranks than the engine averages over: the mean is over what these hold."""
    model = lockstep.DistributedDataParallel(nn.Linear(2, 1, bias=False).double())
    with batch.hand.hold(batch.share.BatchShare(1 + dist.get_rank(), 6, 3)):
        model(torch.full((1, 2), 1.0 + 2 * dist.get_rank(), dtype=torch.float64)).sum().backward()
    assert model.module.weight.grad is not None
    return model.module.weight.grad.tolist()


def test_a_batch_split_over_more_ranks_than_average() -> None:
    """Rank 0 has 1 sample, of ones, rank 1 has 2, of threes."""
    for gradients in run_ranks(average_over_a_part_of_the_ranks, 2):
        assert gradients == [pytest.approx([7 / 3] * 2, abs=TOLERANCE)]


def train_on_zipped_loaders(model: nn.Module, **place: int) -> Tensor:
    """Two forwards of two datasets, one backward; loaders cut alike, so that either weight is right."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    real, fake = (
        lockstep.DataLoader(make_dataset(11), batch_size=4, shuffle=True, seed=seed, **place) for seed in (2, 3)
    )
    for _ in range(EPOCHS):
        for (inputs, labels), (others, other_labels) in zip(real, fake, strict=True):
            optimizer.zero_grad()
            (cross_entropy(model(inputs), labels) + cross_entropy(model(others), other_labels)).backward()
            optimizer.step()
    return flat_parameters(model)


def train_on_zipped_loaders_with_engine() -> Tensor:
    return train_on_zipped_loaders(lockstep.DistributedDataParallel(make_model()))


@worlds
def test_two_loaders_may_be_zipped(world_size: int) -> None:
    expected = train_on_zipped_loaders(make_model(), rank=0, world_size=1)
    for parameters in run_ranks(train_on_zipped_loaders_with_engine, world_size):
        assert (parameters - expected).abs().max().item() <= TOLERANCE


# ---- against torch's engine -------------------------------------------------------------------------


def make_wide_model() -> nn.Module:
    """Parameters from 1 to 131072 elements; some are large enough to be reduced where autograd wrote them."""
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(54, 512),
        nn.ReLU(),
        nn.Linear(512, 256),
        nn.Tanh(),
        nn.Linear(256, 1),
    )


def compare_with_torch(peer_backend: str) -> list[str]:
    """What differs between the two engines."""
    peer_group = dist.new_group(backend=peer_backend)
    differing = []
    for bucket_cap_mb, dtype in (
        (None, torch.float32),
        (0.1, torch.float32),
        (1e-6, torch.float32),  # one byte: a bucket for each parameter; 0 is refused by torch 2.11
        (None, torch.float64),
    ):
        found = train_with_both_engines(peer_group, bucket_cap_mb, dtype)
        differing += [f"{each}, buckets of {bucket_cap_mb}, {dtype}" for each in found]
    return differing


def train_with_both_engines(
    peer_group: dist.ProcessGroup, bucket_cap_mb: float | None, dtype: torch.dtype
) -> list[str]:
    """Trains with both engines on the same data; what differs in any step."""
    module = make_wide_model().to(dtype)
    ours = lockstep.DistributedDataParallel(copy.deepcopy(module), bucket_cap_mb=bucket_cap_mb)
    theirs = nn.parallel.DistributedDataParallel(module, process_group=peer_group, bucket_cap_mb=bucket_cap_mb)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9) for model in (ours, theirs)]
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    differing = []
    for step in range(4):
        inputs = torch.randn(6, 1, 5, 5, generator=generator).to(dtype)
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
        for (name, one), other in zip(ours.module.named_parameters(), theirs.module.parameters(), strict=True):
            assert one.grad is not None
            assert other.grad is not None
            if not (torch.equal(one.grad, other.grad) and torch.equal(one, other)):
                differing.append(f"{name} in step {step}")
    return differing


@pytest.mark.parametrize(
    ("backend", "peer_backend"), [("lockstep", "lockstep"), ("gloo", "gloo"), ("lockstep", "gloo")]
)
def test_even_batches_give_the_bits_of_torch(backend: str, peer_backend: str) -> None:
    assert run_ranks(compare_with_torch, 2, peer_backend, backend=backend) == [[], []]
