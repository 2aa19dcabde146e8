"""Backward passes that fail: what the others are told, whether training can continue, and what memory is left."""

from __future__ import annotations

import gc
import os
import signal
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_checks import assert_averaged, backends, clear, data, error_of, mlp, twins
from failing import wait_until
from lockstep import DistributedDataParallel, batch
from lockstep.comm import work
from lockstep.errors import CollectiveMismatch, ModelError, RankLost
from lockstep.testing import WorkerDied, limit_s, run_ranks

# ---- one rank fails ---------------------------------------------------------------------------------------


def fail_in_a_hook(kill: bool) -> tuple[str, float]:
    """Rank 1 fails in the middle of a backward pass; the others say what they were told, and when."""
    model = DistributedDataParallel(nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]), bucket_cap_mb=0)
    model(torch.ones(2, 4)).sum().backward()
    clear(model)
    if dist.get_rank() == 1:

        def fail(_: Tensor) -> None:
            print(f"failed at {time.monotonic()}", flush=True)
            if kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ZeroDivisionError("in the middle of it")

        model.module[1].weight.register_hook(fail)
    with pytest.raises(RankLost) as caught:
        model(torch.ones(2, 4)).sum().backward()
    assert caught.value.culprits == (1,)
    return str(caught.value), time.monotonic()


@pytest.mark.parametrize("kill", [False, True])
def test_the_others_are_told_at_once(kill: bool, capfd: pytest.CaptureFixture[str]) -> None:
    first, second, third = run_ranks(fail_in_a_hook, 3, kill, expect_errors=True)
    assert isinstance(second, WorkerDied if kill else ZeroDivisionError)
    failed_at = float(capfd.readouterr().out.split("failed at ")[1].split()[0])
    for message, told_at in (first, third):
        assert "rank 1" in message
        assert "gradient averaging" in message
        assert told_at - failed_at < limit_s(1)


# ---- all ranks fail, and continue ----------------------------------------------------------------------------


class Breakable:
    """Raises in the gradient hook of one parameter while it is armed."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.action: Callable[[], None] | None = None
        parameter.register_hook(self._on_gradient)

    def _on_gradient(self, _: Tensor) -> None:
        if self.action is not None:
            action, self.action = self.action, None
            action()


def raise_error() -> None:
    raise ZeroDivisionError


def backward_that_fails(loss: Tensor, **kwargs: Any) -> None:
    with pytest.raises(ZeroDivisionError):
        loss.backward(**kwargs)


def deep() -> nn.Module:
    """Its weights are large enough to be reduced where autograd left them."""
    return nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])


def fail_and_go_on(fails_at: list[int], options: dict[str, Any]) -> None:
    """Each rank fails at a layer of its own, then the next steps must be right."""
    torch.manual_seed(0)
    model, plain = twins(deep(), **options)
    breakables = [Breakable(layer.weight) for layer in model.module]
    step = 0

    def good_step() -> None:
        nonlocal step
        step += 1
        clear(model, plain)
        for each in (model, plain):
            each(data(3, 256, seed=step)).square().mean().backward()
        assert_averaged(model, plain)

    good_step()
    for _ in range(2):
        clear(model)
        breakables[fails_at[dist.get_rank()]].action = raise_error
        backward_that_fails(model(data(3, 256, seed=-1)).sum())
        good_step()
        good_step()

    # Several failures in a row, one of them in a forward pass.
    for _ in range(2):
        clear(model)
        breakables[fails_at[dist.get_rank()]].action = raise_error
        backward_that_fails(model(data(3, 256, seed=-1)).sum())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.ones(1, dtype=torch.float64))
    good_step()

    # The same graph again, without another forward pass.
    clear(model, plain)
    breakables[fails_at[dist.get_rank()]].action = raise_error
    loss = model(data(3, 256)).square().mean()
    backward_that_fails(loss, retain_graph=True)
    clear(model)
    loss.backward()
    plain(data(3, 256)).square().mean().backward()
    assert_averaged(model, plain)


@pytest.mark.parametrize(
    ("fails_at", "options"),
    [
        ([1, 1, 1], {}),
        ([0, 2, 3], {}),
        ([1, 1, 1], {"bucket_cap_mb": 0}),
        ([0, 2, 3], {"bucket_cap_mb": 0}),
        ([0, 2, 3], {"static_graph": True}),
    ],
)
def test_training_goes_on_after_a_failure_on_all_ranks(fails_at: list[int], options: dict[str, Any]) -> None:
    run_ranks(fail_and_go_on, 3, fails_at, options)


@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 0}], ids=str)
def test_training_goes_on_over_gloo_after_a_failure_at_one_place(options: dict[str, Any]) -> None:
    run_ranks(fail_and_go_on, 2, [1, 1], options, backend="gloo")


def overtake_a_failing_rank() -> None:
    """Rank 0 is through with the pass after the failed one, while what rank 1 published for that still stands."""
    torch.manual_seed(0)
    model, plain = twins(deep(), bucket_cap_mb=0)
    store = dist.distributed_c10d._get_default_store()
    first, last = Breakable(model.module[0].weight), Breakable(model.module[3].weight)
    for each in (model, plain):
        each(data(3, 256)).square().mean().backward()
    clear(model, plain)
    if dist.get_rank() == 0:
        last.action = raise_error
    else:

        def wait_and_fail() -> None:
            store.wait(["rank 0 is through"])
            raise_error()

        first.action = wait_and_fail
    backward_that_fails(model(data(3, 256, seed=1)).square().mean())
    clear(model)
    if dist.get_rank() == 0:
        first.action = lambda: store.set("rank 0 is through", "1")
    for each in (model, plain):
        each(data(3, 256, seed=2)).square().mean().backward()
    assert_averaged(model, plain)


def test_nothing_of_a_failed_pass_is_averaged() -> None:
    run_ranks(overtake_a_failing_rank, 2)


def fail_alone() -> str:
    """Rank 1 swallows an error that rank 0 did not have: their next meeting would be of two different steps."""
    model, plain = twins(deep(), bucket_cap_mb=0)
    breakable = Breakable(model.module[1].weight)
    loss = model(data(3, 256, seed=1)).sum()
    if dist.get_rank() == 1:
        breakable.action = raise_error
        backward_that_fails(loss)
        clear(model)
        loss = model(data(3, 256, seed=2)).sum()
    error = error_of(loss.backward)
    assert isinstance(error, CollectiveMismatch)

    # All have been told. From here on they agree again.
    for seed in range(3):
        clear(model, plain)
        for each in (model, plain):
            each(data(3, 256, seed=seed)).square().mean().backward()
        assert_averaged(model, plain)
    return str(error)


def test_a_failure_that_one_rank_keeps_to_itself() -> None:
    for message in run_ranks(fail_alone, 2):
        assert "called different operations" in message
        assert "1 backward passes failed since the last averaging" in message


def meet_another_collective() -> None:
    """One rank calls something else instead of its backward pass; both are told, and agree again."""
    model, plain = twins(deep(), bucket_cap_mb=0)
    loss = model(data(3, 256, seed=1)).sum()
    error = error_of(dist.all_reduce, torch.ones(3)) if dist.get_rank() == 0 else error_of(loss.backward)
    assert isinstance(error, CollectiveMismatch)
    num_errors = 0
    for seed in range(4):
        clear(model, plain)
        try:
            model(data(3, 256, seed=seed)).square().mean().backward()
        except CollectiveMismatch:
            num_errors += 1  # the rank that was elsewhere learns that the other has lost a pass
            continue
        plain(data(3, 256, seed=seed)).square().mean().backward()
        assert_averaged(model, plain)
    assert num_errors <= 1


def test_a_mismatch_is_survived() -> None:
    run_ranks(meet_another_collective, 2)


# ---- memory ---------------------------------------------------------------------------------------------


class Outputs(nn.Module):
    """Two outputs, one computed from the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = mlp(batch_norm=True), nn.Linear(3, 3)

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        one = self.first(inputs)
        return {"one": one, "two": self.second(one)}


def num_tensors() -> int:
    for runner in list(work._runners):  # with torch 2.6 they keep the last finished calls, a limited number
        for kept in runner._kept or ():
            kept.clear()
    gc.collect()
    return sum(isinstance(each, Tensor) for each in gc.get_objects())


def loss_of(model: nn.Module, step: int) -> Tensor:
    output = model(data(5, 4, seed=step).requires_grad_())
    return output["one"].sum() + output["two"].square().sum()


def train_for_long(options: dict[str, Any]) -> None:
    model = DistributedDataParallel(Outputs().double(), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    counts = []
    for step in range(201):
        optimizer.zero_grad()
        with batch.hand.hold(batch.share.BatchShare(1 + dist.get_rank(), 3, 2)):
            loss_of(model, step).backward()
        optimizer.step()
        if step % 10 == 0:
            loss_of(model, step)  # a forward pass without a backward pass
            with model.no_sync():
                loss_of(model, step).backward()
        if step % 100 == 0:
            counts.append(num_tensors())
    # What the last forward pass without a backward pass has left goes with the next.
    wait_until(lambda: num_tensors() <= counts[1] + 2, f"letting go of all but {counts[1] + 2} tensors ({counts})")


@pytest.mark.parametrize(
    ("backend", "options"),
    [("lockstep", {}), ("gloo", {}), ("lockstep", {"find_unused_parameters": True}), ("gloo", {"static_graph": True})],
    ids=str,
)
def test_memory_does_not_grow(backend: str, options: dict[str, Any]) -> None:
    run_ranks(train_for_long, 2, options, backend=backend)


class Probe:
    """A hook that lives as long as the graph it hangs on."""

    def __call__(self, _: Tensor) -> None: ...


def forward_without_backward() -> None:
    """The graph of a forward pass that nobody goes back through is kept until the next one at most."""
    model = DistributedDataParallel(Outputs().double())
    probes = []
    for step in range(4):
        output = model(data(5, 4, seed=step))
        probe = Probe()
        output["one"].register_hook(probe)
        probes.append(weakref.ref(probe))
        del output, probe
    gc.collect()
    assert [probe() for probe in probes[:-1]] == [None] * 3


@backends
def test_graphs_are_not_collected(backend: str) -> None:
    run_ranks(forward_without_backward, 2, backend=backend)


def let_go(ends_with: str) -> None:
    """Engines come and go around one module."""
    module = Outputs().double()
    counts, num_hooks = [], []
    for _ in range(6):
        model = DistributedDataParallel(module, bucket_cap_mb=0)
        loss_of(model, 0).backward()
        clear(model)
        loss = None
        if ends_with == "forward":
            loss_of(model, 1)
        elif ends_with == "graph":
            loss = loss_of(model, 1)
        elif ends_with == "failure":
            handle = module.first[0].weight.register_hook(lambda _: raise_error())
            backward_that_fails(loss_of(model, 1))
            handle.remove()
        parts = [model, model._reducer, model._reducer._transport]
        references = [weakref.ref(part) for part in parts]
        num_hooks.append(sum(len(p._post_accumulate_grad_hooks or ()) for p in module.parameters()))
        module.zero_grad()
        parts.clear()
        del model
        gc.collect()
        assert [reference() for reference in references] == [None] * 3
        if loss is not None:
            error = error_of(loss.backward)
            assert isinstance(error, ModelError)
            assert "was deleted between its forward and its backward pass" in str(error)
            del loss
            module.zero_grad()
        counts.append(num_tensors())
    assert num_hooks[0] == num_hooks[-1], "hooks of engines that are gone stay on the parameters"
    assert not any(p._post_accumulate_grad_hooks for p in module.parameters())
    if not (ends_with == "failure" and dist.get_backend() == "gloo"):  # whose threads may still hold some
        # The first engine of a process leaves what all others find. Gloo's threads let go of the tensors of a
        # collective a moment after it is over, a long one where the machine is busy.
        most = max(counts[:2]) + 2
        wait_until(lambda: num_tensors() <= most, f"letting go of all but {most} tensors ({counts})")


@backends
@pytest.mark.parametrize("ends_with", ["backward", "forward", "graph", "failure"])
def test_an_engine_lets_go_of_its_memory(backend: str, ends_with: str) -> None:
    run_ranks(let_go, 2, ends_with, backend=backend)
