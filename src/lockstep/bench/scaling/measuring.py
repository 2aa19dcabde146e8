"""Inside the ranks: steps with and without communication, and the pieces that a model is fitted to."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import lockstep
import lockstep.comm.backend  # registers the backend
from lockstep.bench.harness import Budget, Configuration, Contestant, measure
from lockstep.bench.ranks import Job, tell
from lockstep.bench.results import Parameters, Series
from lockstep.parallel.buckets import plan_buckets

__all__ = ["bucket_bytes", "build", "measure_crowded", "measure_link", "measure_on_host", "measure_together"]

_TIMEOUT = timedelta(seconds=120)
_FIRST_BUCKET_BYTES, _BUCKET_BYTES = 1 << 20, 25 << 20
_NUM_CLASSES = 10
_WARM_UP_STEPS = 3


def build(recipe: str) -> tuple[nn.Module, tuple[int, ...]]:
    """A recipe's model, and the shape of one of its samples; the same weights everywhere.

    Args:
        recipe: `digits`, or `imagenet`, which is ResNet-18 on images of 64 pixels.
    """
    torch.manual_seed(0)
    if recipe == "digits":
        from lockstep.recipes.digits.task import DigitsNet

        return DigitsNet(), (1, 8, 8)
    from lockstep.recipes.imagenet.models import create_model

    return create_model("resnet18", _NUM_CLASSES), (3, 64, 64)


def bucket_bytes(recipe: str) -> list[int]:
    """Bytes of the buckets that the engine makes of a recipe's gradients. Local."""
    parameters = [one for one in build(recipe)[0].parameters() if one.requires_grad]
    return [plan.num_bytes for plan in plan_buckets(parameters, _BUCKET_BYTES, _FIRST_BUCKET_BYTES)]


class _Steps:
    """The parts of a training step, of one model on random samples.

    Args:
        model: a copy of it is trained.
        shape: of a sample.
        batch: samples of this rank.
        group: whose ranks train together; None for nobody.
    """

    def __init__(self, model: nn.Module, shape: tuple[int, ...], batch: int, group: dist.ProcessGroup | None) -> None:
        own = copy.deepcopy(model)
        self._model = own if group is None else lockstep.DistributedDataParallel(own, process_group=group)
        self._optimizer = torch.optim.SGD(own.parameters(), lr=1e-3, momentum=0.9)
        self._inputs = torch.randn((batch, *shape))
        self._labels = torch.randint(_NUM_CLASSES, (batch,))

    def forward(self) -> torch.Tensor:
        """Loss, and nothing else."""
        return cross_entropy(self._model(self._inputs), self._labels)

    def backward(self) -> None:
        """Forward and backward."""
        self._optimizer.zero_grad()
        self.forward().backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        """All of a step."""
        self.backward()
        self._optimizer.step()


def _reducer(name: str, num_bytes: int, group: dist.ProcessGroup) -> Contestant:
    tensor = torch.zeros(max(1, num_bytes // 4))
    return Contestant(name, lambda: dist.all_reduce(tensor, group=group))


def _ints(job: Job, name: str) -> list[int]:
    values = job[name]
    assert isinstance(values, list)
    return values


def _measure(configurations: list[Configuration], job: Job) -> list[dict[str, object]]:
    budget = job["budget"]
    assert isinstance(budget, dict)

    def report(found: list[Series]) -> None:
        tell([asdict(one) for one in found])

    def left_s() -> float:
        return seconds - (time.monotonic() - started)

    seconds, started = float(str(job.get("seconds", "inf"))), time.monotonic()
    return [asdict(one) for one in measure(configurations, Budget(**budget), left_s=left_s, report=report)]


def measure_on_host(job: Job) -> object:
    """Body of one rank of a one-host run; the default group is gloo.

    Args:
        job: `recipe`, `batches` (of each rank), `sizes` (of all_reduces), `budget`, `seconds` after which
            nothing further is begun.

    Returns:
        Series: by batch the parts of a step that communicates with nobody, and a step of the engine; by size an
        all_reduce. Every configuration has the number of ranks.
    """
    recipe = job["recipe"]
    assert isinstance(recipe, str)
    n = dist.get_world_size()
    group = dist.new_group(backend="lockstep")
    assert isinstance(group, dist.ProcessGroup)
    model, shape = build(recipe)
    torch.manual_seed(1 + dist.get_rank())
    configurations = []
    for batch in _ints(job, "batches"):
        alone, together = _Steps(model, shape, batch, None), _Steps(model, shape, batch, group)
        for _ in range(_WARM_UP_STEPS):
            alone.step()
            together.step()
        calls: dict[str, Callable[[], object]] = {
            "forward": alone.forward,
            "forward_backward": alone.backward,
            "step_alone": alone.step,
            "step": together.step,
        }
        parameters: Parameters = {"part": "step", "world_size": n, "batch": batch}
        configurations.append(Configuration(parameters, [Contestant(name, call) for name, call in calls.items()]))
    for num_bytes in _ints(job, "sizes"):
        sized: Parameters = {"part": "host", "world_size": n, "bytes": num_bytes}
        configurations.append(Configuration(sized, [_reducer("all_reduce", num_bytes, group)]))
    return _measure(configurations, job)


def measure_link(job: Job) -> object:
    """Body of one of two ranks on two hosts: a ping-pong, point to point.

    Args:
        job: `sizes`, `budget`.

    Returns:
        Series, by size, of half a round trip.
    """
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    group = dist.new_group(backend="lockstep", timeout=_TIMEOUT)
    assert isinstance(group, dist.ProcessGroup)
    rank = dist.get_rank()
    configurations = [
        Configuration({"part": "link", "bytes": size}, [_ping_pong(size, 1 - rank, group, is_first=rank == 0)])
        for size in _ints(job, "sizes")
    ]
    series = _measure(configurations, job)
    for one in series:
        samples = one["samples_s"]
        assert isinstance(samples, list)
        one["samples_s"] = [sample / 2 for sample in samples]
    dist.destroy_process_group()
    return series


def _ping_pong(num_bytes: int, peer: int, group: dist.ProcessGroup, *, is_first: bool) -> Contestant:
    tensor = torch.zeros(num_bytes, dtype=torch.uint8)
    first, second = (dist.send, dist.recv) if is_first else (dist.recv, dist.send)

    def call() -> None:
        first(tensor, peer, group)
        second(tensor, peer, group)

    return Contestant("message", call)


def measure_crowded(job: Job) -> object:
    """Body of one rank of several on each of two hosts that share this machine's cores: the pieces of an all_reduce.

    Args:
        job: `per_host` (ranks of each host), `sizes` (of messages), `host_sizes` (of all_reduces), `budget`.

    Returns:
        Series, all ranks at once: by size `exchange`, a message to the rank in the same place of the other host and
        one from it, and `all_reduce` among the ranks of each host; `barrier` of all.
    """
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    group = dist.new_group(backend="lockstep", timeout=_TIMEOUT)
    assert isinstance(group, dist.ProcessGroup)
    per_host = job["per_host"]
    assert isinstance(per_host, int)
    n, rank = dist.get_world_size(), dist.get_rank()
    hosts = [list(range(start, start + per_host)) for start in range(0, n, per_host)]
    groups = [dist.new_group(ranks, backend="lockstep", timeout=_TIMEOUT) for ranks in hosts]
    own = groups[rank // per_host]
    assert isinstance(own, dist.ProcessGroup)
    peer = (rank + per_host) % n
    contestants = [
        (4, Contestant("barrier", lambda: dist.barrier(group))),
        *((size, _exchange(size, peer, group)) for size in _ints(job, "sizes")),
        *((size, _reducer("all_reduce", size, own)) for size in _ints(job, "host_sizes")),
    ]
    series = _measure([Configuration({"part": "crowded", "bytes": size}, [one]) for size, one in contestants], job)
    dist.destroy_process_group()
    return series


def _exchange(num_bytes: int, peer: int, group: dist.ProcessGroup) -> Contestant:
    sent, received = (torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(2))

    def call() -> None:
        work = dist.isend(sent, peer, group)
        dist.recv(received, peer, group)
        assert work is not None
        work.wait()

    return Contestant("exchange", call)


def measure_together(job: Job) -> object:
    """Body of one rank of the check: several ranks on each of several hosts.

    Args:
        job: `recipe`, `batches`, `sizes`, `budget`.

    Returns:
        Series: steps of the engine by batch, all_reduces by size.
    """
    recipe = job["recipe"]
    assert isinstance(recipe, str)
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    group = dist.new_group(backend="lockstep", timeout=_TIMEOUT)
    assert isinstance(group, dist.ProcessGroup)
    model, shape = build(recipe)
    torch.manual_seed(1 + dist.get_rank())
    configurations = []
    for batch in _ints(job, "batches"):
        steps = _Steps(model, shape, batch, group)
        for _ in range(_WARM_UP_STEPS):
            steps.step()
        configurations.append(Configuration({"part": "check", "batch": batch}, [Contestant("step", steps.step)]))
    for num_bytes in _ints(job, "sizes"):
        sized: Parameters = {"part": "check", "bytes": num_bytes}
        configurations.append(Configuration(sized, [_reducer("all_reduce", num_bytes, group)]))
    series = _measure(configurations, job)
    dist.destroy_process_group()
    return series
