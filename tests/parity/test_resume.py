"""A run that is killed and resumed, after any step, is the run that nobody disturbed: every batch, and the parameters.

Three epochs of five steps, the last batch of each smaller than the others and than three ranks' even shares. Each place
at which a script may save is tried: before the first step, after each of the 15, and after the loop over an epoch's
batches. Every place is tried at one of three numbers of ranks, and at another in the next kind of loop, so that each
pair of the two is tried with three of the nine. What is compared is the samples of every global batch, which tells an
epoch that is skipped, begun again or walked twice, and the parameters, in float64: ranks add the same numbers in
another order, so 1e-12 is a hundred times what rounding can make.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import RandomSampler, TensorDataset

import lockstep
from lockstep.testing import run_ranks
from lockstep.train import Trainer

EPOCHS, STEPS, NUM_SAMPLES, BATCH_SIZE = 3, 5, 23, 5

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning"),
]


def dataset() -> TensorDataset:
    inputs = torch.randn(NUM_SAMPLES, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return TensorDataset(inputs, inputs.sin().sum(1, keepdim=True), torch.arange(NUM_SAMPLES))


class EpochOrder(RandomSampler):
    """An order for each epoch, of which the script tells it the number."""

    def __init__(self) -> None:
        super().__init__(range(NUM_SAMPLES))
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(self.epoch)).tolist())


class Buckets(RandomSampler):
    """Five global batches of 1 to 8 samples, drawn as they come."""

    def __init__(self) -> None:
        super().__init__(range(NUM_SAMPLES))

    def __iter__(self) -> Iterator[Any]:
        rest = list(range(NUM_SAMPLES))
        for size in (5, 1, 7, 8, 2):
            batch = [rest.pop(int(torch.randint(len(rest), ()))) for _ in range(size)]
            yield batch

    def __len__(self) -> int:
        return STEPS


class Run:
    """One process of a run: what a script makes anew each time it starts."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(1)
        self.model = lockstep.DistributedDataParallel(nn.Linear(4, 1).double())
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)
        self.loader = lockstep.DataLoader(dataset(), **({"seed": 7} | options))
        self.epoch = 0
        self.ids: list[list[int]] = []
        self.states: list[dict[str, Any]] = []
        self.keeps_states = False

    def state(self, epoch: int) -> dict[str, Any]:
        parts = {"model": self.model.module, "optimizer": self.optimizer, "loader": self.loader}
        return copy.deepcopy({name: part.state_dict() for name, part in parts.items()} | {"epoch": epoch})

    def resume(self, state: dict[str, Any]) -> None:
        state = copy.deepcopy(state)
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.loader.load_state_dict(state["loader"])
        self.epoch = state["epoch"]

    def save(self, epoch: int) -> None:
        if self.keeps_states:
            self.states.append(self.state(epoch))

    def pass_over_the_batches(self, epoch: int) -> None:
        for inputs, targets, ids in self.loader:
            self.optimizer.zero_grad()
            (self.model(inputs) - targets).square().mean().backward()
            self.optimizer.step()
            self.ids.append([] if lockstep.is_filler(ids) else ids.tolist())
            self.save(epoch)
        self.save(epoch + 1)

    def parameters(self) -> list[float]:
        return torch.cat([each.detach().reshape(-1) for each in self.model.parameters()]).tolist()


def while_the_loader_has_epochs(run: Run) -> None:
    while run.loader.next_epoch < EPOCHS:
        run.pass_over_the_batches(0)


def over_epochs_of_the_loader(run: Run) -> None:
    for epoch in range(run.loader.next_epoch, EPOCHS):
        run.pass_over_the_batches(epoch)


def over_epochs_of_its_own(run: Run) -> None:
    for epoch in range(run.epoch, EPOCHS):
        run.pass_over_the_batches(epoch)


def telling_the_loader(run: Run) -> None:
    for epoch in range(run.epoch, EPOCHS):
        run.loader.set_epoch(epoch)
        run.pass_over_the_batches(epoch)


def telling_the_sampler(run: Run) -> None:
    for epoch in range(run.epoch, EPOCHS):
        run.loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        run.pass_over_the_batches(epoch)


SHUFFLED = {"shuffle": True, "batch_size": BATCH_SIZE}
WORKERS = {"num_workers": 1, "persistent_workers": True}
LOOPS: dict[str, tuple[Callable[[Run], None], dict[str, Any]]] = {
    "while": (while_the_loader_has_epochs, SHUFFLED),
    "range": (over_epochs_of_the_loader, {"shuffle": True, "drop_last": True, "batch_size": 4}),
    "own count": (over_epochs_of_its_own, SHUFFLED),
    "set_epoch": (telling_the_loader, SHUFFLED),
    "sampler": (while_the_loader_has_epochs, {"sampler": RandomSampler(range(NUM_SAMPLES)), "batch_size": BATCH_SIZE}),
    "sampler.set_epoch": (telling_the_sampler, {"sampler": EpochOrder(), "batch_size": BATCH_SIZE}),
    "batch_sampler": (while_the_loader_has_epochs, {"batch_sampler": Buckets()}),
    "workers": (while_the_loader_has_epochs, {**SHUFFLED, **WORKERS}),
    "workers and batch_sampler": (over_epochs_of_its_own, {"batch_sampler": Buckets(), **WORKERS}),
}


def undisturbed(name: str) -> tuple[list[list[int]], list[float], list[dict[str, Any]]]:
    """Samples of this rank, batch by batch; parameters at the end; a state for each place where the run may end."""
    loop, options = LOOPS[name]
    run = Run(**options)
    run.keeps_states = True
    run.save(0)
    loop(run)
    return run.ids, run.parameters(), run.states


def resumed(name: str, states: list[dict[str, Any]]) -> list[tuple[list[list[int]], list[float]]]:
    """From each of the states to the end."""
    loop, options = LOOPS[name]
    ends = []
    for state in states:
        run = Run(**options)
        run.resume(state)
        loop(run)
        ends.append((run.ids, run.parameters()))
    return ends


def together(of_ranks: list[list[list[int]]]) -> list[list[int]]:
    """The global batches from each rank's part of them."""
    return [list(itertools.chain(*parts)) for parts in zip(*of_ranks, strict=True)]


def steps_done(number: int) -> int:
    """How many steps come before the state of this number: one before the first, then five and one for each epoch."""
    epoch, place = divmod(number - 1, STEPS + 1)
    return 0 if number == 0 else epoch * STEPS + min(place + 1, STEPS)


@pytest.mark.parametrize("name", LOOPS)
def test_resumed_anywhere_a_run_is_the_undisturbed_one(name: str) -> None:
    ((whole, parameters, states),) = run_ranks(undisturbed, 1, name)
    assert len(whole) == EPOCHS * STEPS
    for epoch in range(EPOCHS):
        samples = sorted(itertools.chain(*whole[epoch * STEPS : (epoch + 1) * STEPS]))
        assert len(set(samples)) == len(samples) in (NUM_SAMPLES, STEPS * 4)
    assert whole[:STEPS] != whole[STEPS : 2 * STEPS]
    assert len(states) == 1 + EPOCHS * (STEPS + 1)
    every = 3 if "workers" in name else 1  # workers take their time to start
    turn = list(LOOPS).index(name)
    for world_size in (1, 2, 3):
        numbers = range(0, len(states), every)[(world_size + turn) % 3 :: 3]
        ranks = run_ranks(resumed, world_size, name, [states[number] for number in numbers])
        for number, ends in zip(numbers, zip(*ranks, strict=True), strict=True):
            assert together([ids for ids, _ in ends]) == whole[steps_done(number) :], f"{number} at {world_size} ranks"
            for _, last in ends:
                assert last == pytest.approx(parameters, rel=0, abs=1e-12), f"{number} at {world_size} ranks"


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_state_does_not_depend_on_the_ranks_that_wrote_it(world_size: int) -> None:
    (alone,) = run_ranks(undisturbed, 1, "while")
    for ids, _, states in run_ranks(undisturbed, world_size, "while"):
        assert [each["loader"] for each in states] == [each["loader"] for each in alone[2]]
        assert len(ids) == EPOCHS * STEPS


# ---- Trainer -------------------------------------------------------------------------------------------------


class Noting:
    """A loss that notes which samples it is of."""

    def __init__(self) -> None:
        self.ids: list[list[int]] = []

    def __call__(self, model: Any, batch: Any) -> Tensor:
        inputs, targets, ids = batch
        self.ids.append([] if lockstep.is_filler(ids) else ids.tolist())
        loss: Tensor = (model(inputs) - targets).square().mean()
        return loss


def train(state: dict[str, Any] | None, accumulate: int) -> tuple[list[list[int]], list[float], list[dict[str, Any]]]:
    """From a state to the end, with a `Trainer`; the states are those after each step, and after each epoch."""
    run, noting, states = Run(**SHUFFLED), Noting(), []
    trainer = Trainer(run.model, run.optimizer, run.loader, noting, accumulate=accumulate, log_every=1)
    if state is not None:
        trainer.load_state_dict(state)
    while trainer.epoch < EPOCHS:
        trainer.fit(EPOCHS, max_steps=trainer.step + 1)
        states.append(copy.deepcopy(trainer.state_dict()))
    return noting.ids, run.parameters(), states


def resume_training(states: list[dict[str, Any]], accumulate: int) -> list[Any]:
    return [train(state, accumulate)[:2] for state in states]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_trainer_resumed_after_any_step_ends_as_the_undisturbed_one(accumulate: int) -> None:
    ((whole, parameters, states),) = run_ranks(train, 1, None, accumulate)
    assert len(whole) == EPOCHS * STEPS
    for world_size in (1, 2, 3):
        ranks = run_ranks(resume_training, world_size, states, accumulate)
        for state, ends in zip(states, zip(*ranks, strict=True), strict=True):
            batches = state["epoch"] * STEPS + -(-state["loader"]["samples_consumed"] // BATCH_SIZE)
            assert together([ids for ids, _ in ends]) == whole[batches:]
            for _, last in ends:
                assert last == pytest.approx(parameters, rel=0, abs=1e-12)
