"""PowerSGD: what it leaves out, that nothing is lost, and that training continues as well with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss

import lockstep
from lockstep.errors import InputError
from lockstep.parallel.comm_hooks import GradBucket
from lockstep.parallel.powersgd import PowerSGDState, powersgd_hook
from lockstep.testing import run_ranks

SHAPES = ((48, 40), (64, 3, 5, 5), (7,), (3, 3), (1, 1000))
RANK = 2


def gradients_of(rank: int, step: int, directions: int) -> list[torch.Tensor]:
    """Gradients of all shapes; matrices of so many directions, or of all of them for 0."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    found = []
    for shape in SHAPES:
        if directions and len(shape) > 1:
            columns = torch.Size(shape).numel() // shape[0]
            # The same directions on all ranks: else the mean has a higher rank.
            basis = torch.randn(shape[0], directions, generator=torch.Generator().manual_seed(step)).double()
            value = basis @ torch.randn(directions, columns, generator=generator).double()
            found.append(value.view(shape))
        else:
            found.append(torch.randn(shape, generator=generator).double())
    return found


def run_steps(num_steps: int, directions: int) -> dict[str, Any]:
    """The hook by itself; all claims are about means over ranks, which every rank can compute."""
    rank, size = dist.get_rank(), dist.get_world_size()
    state = PowerSGDState(matrix_rank=RANK, start_step=1)
    parameters = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    total, true_total = [[torch.zeros(shape, dtype=torch.float64) for shape in SHAPES] for _ in range(2)]
    worst_exact, worst_ratio = 0.0, 0.0
    for step in range(num_steps):
        of_ranks = [gradients_of(peer, step, directions) for peer in range(size)]
        means = [torch.stack(one).mean(0) for one in zip(*of_ranks, strict=True)]
        own = gradients_of(rank, step, directions)
        kept = [mean_error(state, parameter) for parameter in parameters]
        buffer = torch.cat([one.reshape(-1) for one in own])
        views = [v.view(s) for v, s in zip(buffer.split([one.numel() for one in own]), SHAPES, strict=True)]
        powersgd_hook(state, GradBucket(0, buffer, views, parameters, True)).wait()
        for index, view in enumerate(views):
            total[index] += view
            true_total[index] += means[index]
            if step == 0 or not state.compresses(view) or directions:
                worst_exact = max(worst_exact, float((view - means[index]).abs().max()))
            else:
                wanted = means[index] + kept[index].view(view.shape)
                worst_ratio = max(worst_ratio, float((view - wanted).norm() / wanted.norm()))
    lost = [
        float((one + mean_error(state, parameter).view(one.shape) - true).abs().max())
        for one, true, parameter in zip(total, true_total, parameters, strict=True)
    ]
    bits = torch.cat([one.reshape(-1) for one in total]).numpy().tobytes()
    shrunk = state.sent_numel / state.exact_numel
    return {"exact": worst_exact, "ratio": worst_ratio, "lost": max(lost), "bits": bits, "shrunk": shrunk}


def mean_error(state: PowerSGDState, parameter: torch.Tensor) -> torch.Tensor:
    """The error kept of a parameter, mean over ranks."""
    if not state.compresses(parameter) or state.step <= state.start_step:
        return torch.zeros(parameter.numel(), dtype=torch.float64)
    error = state.memory(parameter).error.clone()
    dist.all_reduce(error)
    return error.view(-1) / dist.get_world_size()


@pytest.mark.parametrize("world_size", [1, 3])
def test_what_is_left_out_is_kept(world_size: int) -> None:
    ranks = run_ranks(run_steps, world_size, 6, 0)
    for found in ranks:
        assert found["exact"] <= 1e-12, "the first step, vectors, and what does not shrink"
        assert 0.1 < found["ratio"] <= 1.0 + 1e-12, "never more is left out than there is"
        assert found["lost"] <= 1e-12, "results and error add up to the gradients"
        assert found["bits"] == ranks[0]["bits"]
        assert found["shrunk"] < 0.6


@pytest.mark.parametrize("directions", [1, RANK])
def test_gradients_of_low_rank_come_out_as_they_are(directions: int) -> None:
    """Of less than r directions, too: the basis is orthonormal though the columns of M Q depend on each other."""
    for found in run_ranks(run_steps, 2, 4, directions):
        assert found["exact"] <= 1e-10


def overflow(dtype: torch.dtype) -> list[Any]:
    """Rank 1 meets infinity in the second of four steps; then one whose result is no number of the dtype."""
    rank = dist.get_rank()
    state = PowerSGDState(matrix_rank=1, start_step=0)
    parameters = [torch.zeros(12, 8), torch.zeros(10, 6)]
    found: list[Any] = []
    for step in range(4):
        buffer = torch.randn(156, generator=torch.Generator().manual_seed(10 * step + rank)).to(dtype)
        views = [buffer[:96].view(12, 8), buffer[96:].view(10, 6)]
        if step == 1 and rank == 1:
            views[0][3, 4] = torch.inf
        if step == 3:
            buffer.fill_(torch.finfo(dtype).max)
            for each in map(state.memory, parameters):
                each.error.fill_(torch.finfo(dtype).max)
        kept = [(each.error.clone(), each.q.clone()) for each in map(state.memory, parameters)]
        powersgd_hook(state, GradBucket(0, buffer, views, parameters, True)).wait()
        are_kept = [
            torch.equal(each.error, error) and torch.equal(each.q, q)
            for (error, q), each in zip(kept, map(state.memory, parameters), strict=True)
        ]
        found.append([[bool(view.isfinite().all()) for view in views], are_kept])
    return found


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_infinite_gradients_leave_no_trace(dtype: torch.dtype) -> None:
    fine, first, none = [[True, True], [False, False]], [[False, True], [True, False]], [[False, False], [True, True]]
    assert run_ranks(overflow, 2, dtype) == [[fine, first, fine, none]] * 2


def losses(hook: str, engine: str, num_steps: int) -> list[float]:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(40, 80), torch.nn.Tanh(), torch.nn.Linear(80, 20))
    teacher = torch.randn(40, 20) / 6
    ddp: Any = lockstep.DistributedDataParallel if engine == "lockstep" else torch.nn.parallel.DistributedDataParallel
    model = ddp(net)
    if hook == "powersgd":
        model.register_comm_hook(PowerSGDState(matrix_rank=RANK, start_step=5), powersgd_hook)
    generator = torch.Generator().manual_seed(dist.get_rank())
    found = []
    for _ in range(num_steps):
        inputs = torch.randn(64, 40, generator=generator)
        model.zero_grad()
        loss = mse_loss(model(inputs), inputs @ teacher)
        loss.backward()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter -= 0.5 * parameter.grad  # type: ignore[operator]
        value = loss.detach().clone()
        dist.all_reduce(value)
        found.append(float(value) / dist.get_world_size())
    weights = torch.cat([parameter.detach().view(-1) for parameter in net.parameters()])
    both = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(both, weights)
    assert all(torch.equal(one, weights) for one in both)
    return found


@pytest.mark.parametrize("engine", ["lockstep", "torch"])
def test_training_converges(engine: str) -> None:
    """The loss comes down as far: within a factor of 1.5 after 200 steps, that is by more than a factor of 5."""
    exact = run_ranks(losses, 2, "none", engine, 200)[0]
    compressed = run_ranks(losses, 2, "powersgd", engine, 200)[0]
    assert exact[:5] == pytest.approx(compressed[:5], rel=1e-4)
    assert compressed[-1] < 0.2 * compressed[0]
    assert sum(compressed[-10:]) < 1.5 * sum(exact[-10:])


@pytest.mark.parametrize("wrong", [{"matrix_rank": 0}, {"start_step": -1}, {"min_compression": 0.5}])
def test_wrong_numbers(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="expected a matrix_rank of at least 1"):
        PowerSGDState(**wrong)
