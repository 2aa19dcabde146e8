"""Gradients that somebody holds on to: the next backward pass leaves them alone, as torch's engine does."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.dlpack import from_dlpack

from ddp_checks import TOLERANCE, assert_same_on_all_ranks, backends, data, mlp, twins
from lockstep import DistributedDataParallel
from lockstep.testing import run_ranks


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def mean_gradients(plain: nn.Module, inputs: Tensor) -> list[Tensor]:
    """Of one process with all ranks' inputs of equal sizes. Collective."""
    plain.zero_grad()
    plain(inputs).square().mean().backward()
    for gradient in gradients(plain):
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    return [gradient.clone() for gradient in gradients(plain)]


def distance(some: list[Any], others: list[Tensor]) -> float:
    return max((torch.as_tensor(one) - other).abs().max().item() for one, other in zip(some, others, strict=True))


def wide() -> nn.Module:
    """Its gradients are large enough to be left where they are in the own share; its buckets are several."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 400), nn.Tanh(), nn.Linear(400, 400), nn.Tanh(), nn.Linear(400, 3))


HOLDS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda gradient: gradient,
    "view": lambda gradient: gradient.view(-1)[: gradient.numel()].view(gradient.shape),
    "detached": lambda gradient: gradient.detach(),
    "data": lambda gradient: gradient.data,
    "array": lambda gradient: gradient.numpy(),
    "dlpack": lambda gradient: from_dlpack(gradient),
}


def keep(how: str, on_ranks: tuple[int, ...], make: Callable[[], nn.Module], **options: Any) -> float:
    """Hold the gradients of each of some steps; how far all of them are from the true ones in the end."""
    torch.manual_seed(0)
    model, plain = twins(make(), **options)
    kept, expected = [], []
    for step in range(4):
        inputs = data(5, 4, seed=step)
        model.zero_grad()
        model(inputs).square().mean().backward()
        means = mean_gradients(plain, inputs)
        assert distance(gradients(model), means) <= TOLERANCE
        assert_same_on_all_ranks(*gradients(model))
        if dist.get_rank() in on_ranks:
            kept += [HOLDS[how](gradient) for gradient in gradients(model)]
            expected += means
    return distance(kept, expected) if kept else 0.0


@backends
@pytest.mark.parametrize("how", HOLDS)
def test_kept_gradients_stay_as_they_are(how: str, backend: str) -> None:
    assert max(run_ranks(keep, 2, how, (0, 1), wide, backend=backend)) <= TOLERANCE


@pytest.mark.parametrize("options", [{"bucket_cap_mb": 0}, {"static_graph": True}, {"bucket_cap_mb": 0.01}], ids=str)
def test_kept_gradients_on_one_rank_of_three(options: dict[str, Any]) -> None:
    assert max(run_ranks(keep, 3, "view", (1,), mlp, **options)) <= TOLERANCE


def odd() -> nn.Module:
    """1,000 elements in one bucket: shares of whole lines are not a quarter."""
    return nn.Linear(4, 200)


@pytest.mark.parametrize("rank", [1, 3])
def test_kept_gradients_change_no_share(rank: int) -> None:
    """A rank whose bucket has moved reduces what it did before, as the others expect."""
    assert max(run_ranks(keep, 4, "view", (rank,), odd)) <= TOLERANCE


def keep_in_graph() -> bool:
    """A graph that has saved a gradient computes with it, two steps later."""
    torch.manual_seed(0)
    model, plain = twins(mlp())
    model(data(5, 4)).square().mean().backward()
    (first, *_) = mean_gradients(plain, data(5, 4))
    factor = torch.ones_like(first, requires_grad=True)
    product = (next(model.parameters()).grad * factor).sum()
    for step in (1, 2):
        model.zero_grad()
        model(data(5, 4, seed=step)).square().mean().backward()
    product.backward()
    return (factor.grad - first).abs().max().item() <= TOLERANCE


def test_kept_by_a_graph() -> None:
    assert run_ranks(keep_in_graph, 2) == [True, True]


def keep_some() -> float:
    """Some `.grad`s are set to None, of which one is kept; the others accumulate where they are."""
    torch.manual_seed(0)
    model, plain = twins(mlp(), bucket_cap_mb=100)
    first_inputs, second_inputs = data(5, 4, seed=0), data(5, 4, seed=1)
    model(first_inputs).square().mean().backward()
    kept, *others = gradients(model)
    first, second = mean_gradients(plain, first_inputs), mean_gradients(plain, second_inputs)
    next(model.parameters()).grad = None
    model(second_inputs).square().mean().backward()
    assert all(ours is kept_one for ours, kept_one in zip(gradients(model)[1:], others, strict=True))
    sums = [one + other for one, other in zip(first, second, strict=True)]
    return distance([kept, *gradients(model)], [first[0], second[0], *sums[1:]])


def test_some_kept_and_others_accumulated() -> None:
    assert max(run_ranks(keep_some, 2)) <= TOLERANCE


def use_flat_buffer(option: bool, accumulate: bool) -> list[float]:
    """`.grad`s are views of one buffer that the user has made; how far it is from the truth after each step."""
    torch.manual_seed(0)
    model, plain = twins(wide(), gradient_as_bucket_view=option)
    parameters = list(model.parameters())
    flat = torch.zeros(sum(parameter.numel() for parameter in parameters), dtype=torch.float64)
    for parameter, piece in zip(parameters, flat.split([each.numel() for each in parameters]), strict=True):
        parameter.grad = piece.view_as(parameter)
    distances = []
    for step in range(3):
        inputs = data(5, 4, seed=step)
        flat.zero_()
        if accumulate:
            with model.no_sync():
                model(inputs).square().mean().backward()
            model(torch.zeros_like(inputs)).mul(0).sum().backward()
        else:
            model(inputs).square().mean().backward()
        expected = torch.cat([gradient.view(-1) for gradient in mean_gradients(plain, inputs)])
        distances.append((flat - expected).abs().max().item())
    return distances


@backends
@pytest.mark.parametrize("accumulate", [False, True])
def test_flat_buffer_of_the_user(accumulate: bool, backend: str) -> None:
    for distances in run_ranks(use_flat_buffer, 2, False, accumulate, backend=backend):
        assert max(distances) <= TOLERANCE


def look_at_views(option: bool) -> tuple[bool, bool]:
    """Whether gradients lie where those of the step before lay, while nobody holds these, and while somebody does."""
    model = DistributedDataParallel(mlp().double(), gradient_as_bucket_view=option)
    places = []
    kept = []
    for step in range(4):
        model.zero_grad()
        model(data(5, 4, seed=step)).square().mean().backward()
        places.append([gradient.data_ptr() for gradient in gradients(model)])
        if step == 2:
            kept = gradients(model)
    assert kept
    return places[1] == places[0], places[3] == places[2]


@pytest.mark.parametrize(("option", "expected"), [(False, (True, False)), (True, (True, True))])
def test_gradients_are_copied_only_if_held(option: bool, expected: tuple[bool, bool]) -> None:
    assert run_ranks(look_at_views, 2, option) == [expected] * 2


def save_one() -> tuple[int, int, int]:
    """Bytes of a small gradient's storage, of its file, and of its copy's storage."""
    model = DistributedDataParallel(wide())
    model(torch.ones(2, 4)).sum().backward()
    gradient = gradients(model)[-1]
    file = io.BytesIO()
    torch.save(gradient, file)
    return gradient.untyped_storage().nbytes(), file.tell(), copy.deepcopy(gradient).untyped_storage().nbytes()


@backends
def test_saving_a_gradient_saves_no_bucket(backend: str) -> None:
    for storage, file, copied in run_ranks(save_one, 2, backend=backend):
        assert storage == copied == 3 * 4
        assert file < 10_000


def large_pieces() -> set[int]:
    """Where pieces of memory of the size of the weight, or larger, lie."""
    storages = [each.untyped_storage() for each in gc.get_objects() if isinstance(each, Tensor)]
    return {each.data_ptr() for each in storages if each.nbytes() >= 4 * 512**2}


def count_large() -> list[int]:
    """How many of them there are more than at first: after two steps, and after two more with a hook."""
    before = large_pieces()
    model = DistributedDataParallel(nn.Linear(512, 512, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counts = []
    for with_hook in (False, True):
        if with_hook:
            model.register_comm_hook(None, default_hooks.allreduce_hook)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 512)).mean().backward()
            optimizer.step()
        counts.append(len(large_pieces() - before))
    return counts


def test_alone_there_is_no_bucket_before_a_hook_wants_to_see_one() -> None:
    """The weight and its gradient; no bucket beside them."""
    ((without, with_hook),) = run_ranks(count_large, 1)
    assert without == 2 < with_hook
