"""Process-wide generators: seeded for each sample that draws, compared where none does, put back afterwards."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from lockstep.data import DataLoader, seeding
from lockstep.data.seeding import preserve_global_rngs, seed_global_rngs
from lockstep.seeding import derive_seed, derive_seeds

SEED = 0x7A8A0B12EB86416B

pytestmark = [
    # What torch says on a machine with one core, and Python 3.12 of any fork.
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning"),
]


def states() -> tuple[Any, ...]:
    with np.printoptions(threshold=10_000):
        return torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state(legacy=False))


def by_torch() -> float:
    return torch.rand((), dtype=torch.float64).item()


def by_python() -> float:
    return random.random()


def by_numpy() -> float:
    return float(np.random.rand())


def by_all() -> float:
    return by_torch() + by_python() + by_numpy()


def seeded(value: int, draw: Callable[[], float]) -> float:
    """What one process draws that seeds all three before."""
    with preserve_global_rngs():
        torch.manual_seed(value)
        random.seed(value)
        np.random.seed(value >> 32)
        return draw()


DRAWS = pytest.mark.parametrize("draw", [by_torch, by_python, by_numpy, by_all])


# ---- samples ------------------------------------------------------------------------------------------------


class Some(Dataset[float]):
    """Draws for samples from `first` on, and of these for each third; counts how often a sample is asked for."""

    def __init__(self, draw: Callable[[], float], first: int = 0) -> None:
        self.draw = draw
        self.first = first
        self.asked: Counter[int] = Counter()

    def __len__(self) -> int:
        return 24

    def draws_for(self, index: int) -> bool:
        return index >= self.first and index % 3 == 0

    def __getitem__(self, index: int) -> float:
        self.asked[index] += 1
        return self.draw() if self.draws_for(index) else -1.0


@DRAWS
@pytest.mark.parametrize("first", [0, 2, 13])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("world_size", [1, 3])
def test_samples_are_those_of_generators_seeded_for_each(
    draw: Callable[[], float], first: int, num_workers: int, world_size: int
) -> None:
    """Also where the first that draws comes late."""
    expected = {
        index: seeded(derive_seed(b"global", 5, 0, index), draw) if Some(draw, first).draws_for(index) else -1.0
        for index in range(24)
    }
    found = {}
    for rank in range(world_size):
        pairs = WithIndex(Some(draw, first))
        for index, value in DataLoader(pairs, 6, seed=5, num_workers=num_workers, rank=rank, world_size=world_size):
            found.update(zip(index.tolist(), value.tolist(), strict=True))
    assert found == expected


class Gpu:
    """A stand-in for the current GPU, which is initialised when a sample draws there for the first time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, is_used: bool) -> None:
        self.is_used = is_used
        self.generator = torch.Generator().manual_seed(17)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: self.is_used)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "default_generators", (self.generator,), raising=False)

    def draw(self) -> float:
        self.is_used = True
        return torch.rand((), dtype=torch.float64, generator=self.generator).item()


@pytest.mark.parametrize("is_used", [False, True])
@pytest.mark.parametrize("world_size", [1, 3])
def test_draws_on_a_gpu_are_those_of_a_generator_seeded_for_each(
    is_used: bool, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it was not in use before."""
    gpu = Gpu(monkeypatch, is_used)
    before = gpu.generator.get_state()
    found = {}
    for rank in range(world_size):
        pairs = WithIndex(Some(gpu.draw))
        for index, value in DataLoader(pairs, 6, seed=5, rank=rank, world_size=world_size):
            found.update(zip(index.tolist(), value.tolist(), strict=True))
    if is_used:
        assert gpu.generator.get_state().tolist() == before.tolist()
    else:
        assert gpu.generator.initial_seed() == torch.initial_seed()
    seeds = {index: derive_seed(b"global", 5, 0, index) for index in range(24)}
    expected = {
        index: torch.rand((), dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).item()
        for index, seed in seeds.items()
    }
    assert found == {index: value if index % 3 == 0 else -1.0 for index, value in expected.items()}


class WithIndex(Dataset[Any]):
    def __init__(self, dataset: Some) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return index, self.dataset[index]


@DRAWS
@pytest.mark.parametrize("first", [0, 13, 99])
def test_the_streams_of_the_training_go_on_where_they_were(draw: Callable[[], float], first: int) -> None:
    seeded_before = 7
    seed_global_rngs(seeded_before)
    np.random.standard_normal()  # keeps the second one
    random.gauss(0, 1)
    before = states()
    for _ in DataLoader(Some(draw, first), 4):
        assert states() == before


def test_a_sample_is_asked_for_twice_where_it_is_the_first_that_draws() -> None:
    dataset = Some(by_all)
    loader = DataLoader(dataset, 4)
    list(loader)
    list(loader)
    assert dataset.asked[0] == 3
    assert {dataset.asked[index] for index in range(1, 24)} == {2}


def test_a_batch_is_fetched_twice_where_it_is_the_first_that_draws_later() -> None:
    dataset = Some(by_numpy, first=13)
    loader = DataLoader(dataset, 4)
    list(loader)
    list(loader)
    assert {index for index, count in dataset.asked.items() if count == 3} == {12, 13, 14, 15}
    assert set(dataset.asked.values()) == {2, 3}


class Counting:
    """A generator that counts how often each of its methods is called."""

    def __init__(self, rng: Any, counts: Counter[tuple[str, str]]) -> None:
        self._rng, self._counts = rng, counts

    def __getattr__(self, name: str) -> Any:
        self._counts[type(self._rng).__name__, name] += 1
        return getattr(self._rng, name)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, str]]:
    counts: Counter[tuple[str, str]] = Counter()
    counting = [Counting(rng, counts) for rng in seeding.GLOBAL_RNGS]
    monkeypatch.setattr("lockstep.data.source.GLOBAL_RNGS", counting)
    monkeypatch.setattr("lockstep.data.seeding.GLOBAL_RNGS", counting)
    return counts


def nothing() -> float:
    return 0.0


@pytest.mark.parametrize(("draw", "drawn"), [(nothing, None), (by_torch, "_Torch"), (by_python, "_Python")])
def test_only_a_generator_that_is_drawn_from_costs_something_for_each_sample(
    draw: Callable[[], float], drawn: str | None, calls: Counter[tuple[str, str]]
) -> None:
    loader = DataLoader(Some(draw), 4)
    list(loader)
    calls.clear()
    list(loader)
    batches, samples = 6, 24
    expected: Counter[tuple[str, str]] = Counter()
    for name in ("_Torch", "_Python", "_Numpy", "_Cuda"):
        expected[name, "state"] = batches
        expected[name, "restore"] = 2 * batches if name in ("_Torch", "_Cuda") else batches
        if name == drawn:
            expected[name, "seed"] = samples + batches  # which are collated
        else:
            expected[name, "is_at"] = batches
    assert calls == expected


@pytest.mark.parametrize(
    "dataset",
    [
        [(torch.ones(2), 1)] * 8,
        torch.ones(8),
        range(8),
        Subset(TensorDataset(torch.ones(8)), [*range(8)]),
        TensorDataset(torch.ones(8)),
    ],
)
def test_lists_and_tensors_are_not_seeded(dataset: Any, calls: Counter[tuple[str, str]]) -> None:
    list(DataLoader(dataset, 4))
    assert not calls


class Reads(Some):
    """Looks at torch's seed, and draws nothing."""

    def __getitem__(self, index: int) -> int:  # type: ignore[override]
        return torch.initial_seed() >> 12


def test_a_seed_that_is_only_read_is_the_same_at_any_number_of_ranks_and_workers() -> None:
    found = set()
    for options in ({}, {"num_workers": 2}, {"rank": 1, "world_size": 2}, {"batch_size": 3}):
        for batch in DataLoader(Reads(nothing), **{"batch_size": 4, **options}):
            found.update(batch.tolist())
    assert len(found) == 1


class SeedsOnce(Some):
    """Seeds all generators by its worker in the first sample, as RAFT does, which is the loader's business here."""

    is_seeded = False

    def __getitem__(self, index: int) -> float:
        if not self.is_seeded:
            self.is_seeded = True
            seed_global_rngs(3)
        return by_all()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_dataset_that_seeds_in_its_first_sample(num_workers: int) -> None:
    values = torch.cat(list(DataLoader(SeedsOnce(nothing), 4, num_workers=num_workers))).tolist()
    assert values == [seeded(value, by_all) for value in derive_seeds(b"global", 0, 0, range(24))]


class Fetches(Some):
    def __getitems__(self, indices: list[int]) -> list[float]:
        return [index + self.draw() for index in indices]


@DRAWS
def test_a_dataset_that_fetches_batches_is_seeded_for_each(draw: Callable[[], float]) -> None:
    def batch(first: int) -> list[float]:
        return seeded(derive_seed(b"global", 0, 0, first), lambda: [first + i + draw() for i in range(4)])  # type: ignore

    found = [batch_.tolist() for batch_ in DataLoader(Fetches(draw), 4)]
    assert found == [batch(first) for first in range(0, 24, 4)]


# ---- collate functions --------------------------------------------------------------------------------------


@DRAWS
@pytest.mark.parametrize("num_workers", [0, 2])
def test_collate_functions_are_seeded_for_each_batch_and_called_once(
    draw: Callable[[], float], num_workers: int
) -> None:
    def take_apart(samples: list[list[float]]) -> list[float]:
        return [sample.pop() + draw() for sample in samples]

    def collated(first: int) -> list[float]:
        samples = [[float(index)] for index in range(first, first + 4)]
        return seeded(derive_seed(b"collate", 0, 0, first), lambda: take_apart(samples))  # type: ignore

    loader = DataLoader(Lists(), 4, collate_fn=take_apart, num_workers=num_workers)
    expected = [*map(collated, range(0, 24, 4))]
    assert [*loader, *loader][:6] == expected


class Lists(Dataset[list[float]]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> list[float]:
        return [float(index)]


class LazyRow(Mapping[str, torch.Tensor]):
    """Draws when it is looked into, as the default collate function does."""

    def __getitem__(self, name: str) -> torch.Tensor:
        return torch.rand(1)

    def __iter__(self) -> Iterator[str]:
        return iter(["x"])

    def __len__(self) -> int:
        return 1


@pytest.mark.parametrize("collate_fn", [None, lambda rows: default_collate([dict(row) for row in rows])])
def test_rows_of_a_list_that_draw_as_they_are_collated(collate_fn: Any) -> None:
    drawn = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        loader = DataLoader([LazyRow() for _ in range(8)], 1, collate_fn=collate_fn)
        drawn.append([batch["x"].item() for batch in loader])
        assert torch.initial_seed() == seed
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == 8


# ---- generators of each sample ------------------------------------------------------------------------------


class Keeps(Dataset[torch.Generator]):
    """Keeps its generators, or hands them on."""

    def __init__(self) -> None:
        self.kept: list[torch.Generator] = []

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int, generator: torch.Generator) -> torch.Generator:
        if index % 2:
            self.kept.append(generator)
            return self.kept[0]
        return generator


def test_generators_that_a_dataset_keeps_stay_its_own() -> None:
    dataset = Keeps()
    (samples,) = DataLoader(dataset, 6, seed=2, collate_fn=list)
    seeds = derive_seeds(b"sample", 2, 0, range(6))
    assert [one.initial_seed() for one in samples[::2]] == seeds[::2]
    assert [one.initial_seed() for one in dataset.kept] == seeds[1::2]


def test_seeds_of_many_are_those_of_each() -> None:
    indices = [0, 1, -1, 2**40, 2**63 - 1, 3]
    for seed, epoch in ((0, 0), (-5, 7), (2**64 - 1, 2**33)):
        expected = [derive_seed(b"global", seed, epoch, index) for index in indices]
        assert derive_seeds(b"global", seed, epoch, indices) == expected


# ---- the generators -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rng", seeding.GLOBAL_RNGS[:3], ids=lambda rng: type(rng).__name__)
def test_a_draw_is_seen(rng: Any) -> None:
    draw = {"_Torch": by_torch, "_Python": by_python, "_Numpy": by_numpy}[type(rng).__name__]
    with preserve_global_rngs():
        rng.seed(SEED)
        state = rng.state()
        for change, is_there in ((nothing, True), (draw, False), (lambda: rng.seed(4), False)):
            rng.restore(state)
            change()
            assert rng.is_at(state) == is_there


@pytest.mark.parametrize("rng", seeding.GLOBAL_RNGS[:3], ids=lambda rng: type(rng).__name__)
@pytest.mark.parametrize("words", [1, 2, 623, 624, 625, 2 * 624])
def test_a_draw_of_whole_blocks_is_seen(rng: Any, words: int) -> None:
    draw = {
        "_Torch": lambda: torch.rand(words),
        "_Python": lambda: random.getrandbits(32 * words),
        "_Numpy": lambda: np.random.bytes(4 * words),
    }[type(rng).__name__]
    with preserve_global_rngs():
        rng.seed(SEED)
        state = rng.state()
        draw()
        assert not rng.is_at(state)


@pytest.fixture(params=["read in memory", "not found in memory"])
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Those of numpy's and Python's generators."""
    seeding._states_after.cache_clear()
    if request.param != "read in memory":
        monkeypatch.setattr(seeding, "_mersenne_twister", lambda: None)
        monkeypatch.setattr(seeding, "_known_python", lambda: None)
    yield
    seeding._states_after.cache_clear()


@pytest.mark.usefixtures("layout")
@pytest.mark.parametrize("number", range(3), ids=["torch", "random", "numpy"])
def test_a_state_that_is_restored_is_that_of_seeding(number: int) -> None:
    rng = seeding.GLOBAL_RNGS[number]
    with preserve_global_rngs():
        for normal in (random.gauss, np.random.normal, lambda *_: torch.normal(0.0, 1.0, (1,)).item()):
            seed_global_rngs(7)
            rng.seed(SEED)
            expected = states()
            seed_global_rngs(7)
            state = seeding.states_after(SEED)[number]
            seed_global_rngs(7)
            normal(0.0, 1.0)  # one more is kept
            rng.restore(state)
            assert rng.is_at(state)
            for other in {*seeding.GLOBAL_RNGS[:3]} - {rng}:
                other.seed(7)
            assert states() == expected


@pytest.mark.usefixtures("layout")
@DRAWS
def test_samples_are_the_same_where_no_memory_is_known(draw: Callable[[], float]) -> None:
    expected = [
        seeded(derive_seed(b"global", 5, 0, index), draw) if index % 3 == 0 else -1.0  # as `Some` draws
        for index in range(24)
    ]
    assert torch.cat([*DataLoader(Some(draw), 6, seed=5)]).tolist() == expected


@pytest.mark.parametrize("drawn", [0, 1, 2])
def test_the_normal_number_that_random_keeps_goes_on(drawn: int) -> None:
    random.gauss(0.0, 1.0)  # the second of the pair is kept
    before = states()
    with preserve_global_rngs():
        seed_global_rngs(SEED)
        expected = random.Random(SEED)
        assert [random.gauss(0.0, 1.0) for _ in range(drawn)] == [expected.gauss(0.0, 1.0) for _ in range(drawn)]
    assert states() == before


@pytest.mark.parametrize("kept", ["a normal number is kept", "none is"])
@pytest.mark.parametrize("drawn", [0, 1, 2, 1000])
def test_numpys_stream_goes_on_where_it_was(kept: str, drawn: int) -> None:
    np.random.seed(3)
    np.random.standard_normal(1 if kept != "none is" else 2)
    before, expected = states(), np.random.RandomState(SEED >> 32).standard_normal(drawn)
    with preserve_global_rngs():
        seed_global_rngs(SEED)
        assert (np.random.standard_normal(drawn) == expected).all()
        with preserve_global_rngs():
            seed_global_rngs(7)
            np.random.standard_normal()
    assert states() == before


def test_a_normal_number_is_noticed_that_is_kept_beside_a_state_known_from_before() -> None:
    for num_drawn in (2, 1):  # none is kept, one is; the numbers and the position are the same
        np.random.seed(3)
        np.random.standard_normal(num_drawn)
        before = states()
        for _ in DataLoader(Some(by_all), 4):
            assert states() == before


@pytest.fixture
def another_generator() -> Iterator[None]:
    before = np.random.get_bit_generator()  # type: ignore[attr-defined]
    yield
    np.random.set_bit_generator(before)  # type: ignore[attr-defined]


@pytest.mark.usefixtures("another_generator")
def test_a_generator_of_another_kind_goes_on_where_it_was() -> None:
    np.random.set_bit_generator(np.random.PCG64(4))  # type: ignore[attr-defined]
    before = states()
    with preserve_global_rngs():
        np.random.random()
    assert states() == before


@pytest.mark.usefixtures("another_generator")
def test_a_generator_that_a_sample_puts_there_is_gone_afterwards() -> None:
    before = states()
    with preserve_global_rngs():
        seed_global_rngs(5)
        np.random.set_bit_generator(np.random.PCG64(4))  # type: ignore[attr-defined]
    assert states() == before


def test_memory_that_is_laid_out_in_another_way_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeding, "_place_of_normal", lambda: None)
    monkeypatch.setattr(seeding, "_memory_of", None)
    before = states()
    with preserve_global_rngs():
        seed_global_rngs(5)
    assert states() == before


def test_memory_is_as_known() -> None:
    assert seeding._place_of_normal()
    assert seeding._known_python() is not None
