"""Python's own generator is seeded when a sample uses it, and nobody can tell that it was not seeded before."""

from __future__ import annotations

import copy
import pickle
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from lockstep.data import DataLoader, deferred, numpy_stream
from lockstep.data.seeding import preserve_global_rngs, restore_if_seeded, seed_global_rngs
from lockstep.seeding import derive_seed, derive_seeds

SEED = 0x7A8A0B12EB86416B

pytestmark = [
    # What torch says on a machine with one core, and Python 3.12 of any fork.
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning"),
]


def holders(name: str) -> int:
    return sys.getrefcount(deferred._natives[name])


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    native = id(random.random), id(random.getrandbits)  # Who holds the functions themselves keeps seeds from waiting.
    # Modules that other tests have imported may hold them; here only those count that come to hold them.
    before = {name: holders(name) - deferred._HOLDERS for name in deferred._natives}
    count = deferred._num_holders
    monkeypatch.setattr(deferred, "_num_holders", lambda name: count(name) - before[name])
    with preserve_global_rngs():
        yield
    assert (id(random.random), id(random.getrandbits)) == native
    assert type(random._inst) is random.Random


@contextmanager
def waiting_seed() -> Iterator[None]:
    with restore_if_seeded():
        seed_global_rngs(SEED)
        assert deferred._waiting == SEED
        yield


USES: dict[str, tuple[Any, ...]] = {
    "betavariate": (2, 3),
    "binomialvariate": (10, 0.5),
    "choice": (range(1000),),
    "choices": (range(1000),),
    "expovariate": (1.5,),
    "gammavariate": (0.5, 2),
    "gauss": (),
    "getrandbits": (70,),
    "getstate": (),
    "lognormvariate": (0, 1),
    "normalvariate": (0, 1),
    "paretovariate": (3,),
    "randbytes": (9,),
    "randint": (0, 10**9),
    "random": (),
    "randrange": (10**9,),
    "sample": (range(10**6), 5),
    "triangular": (0, 1, 0.3),
    "uniform": (2, 3),
    "vonmisesvariate": (1, 4),
    "weibullvariate": (1, 2),
}
OTHERS = {"seed", "setstate", "shuffle", "Random", "SystemRandom"}


def test_the_list_of_uses_is_complete() -> None:
    assert set(random.__all__) <= USES.keys() | OTHERS


@pytest.mark.parametrize("name", [name for name in USES if hasattr(random, name)])
@pytest.mark.parametrize("taken", ["before", "meanwhile"])
def test_every_use_finds_a_seeded_generator(name: str, taken: str) -> None:
    expected = random.Random(SEED)
    before = getattr(random, name) if taken == "before" and name not in ("random", "getrandbits") else None
    with waiting_seed():
        used = before or getattr(random, name)
        assert used(*USES[name]) == getattr(expected, name)(*USES[name])
        assert random.getstate() == expected.getstate()


def shuffled(generator: Any) -> list[int]:
    items = [*range(20)]
    generator.shuffle(items)
    return items


def seeded_again(generator: Any) -> list[float]:
    generator.gauss()
    generator.seed(3)
    return [generator.gauss(), generator.gauss(), generator.random()]


def put_back(generator: Any) -> list[float]:
    state = generator.getstate()
    drawn = [generator.random()]
    generator.setstate(state)
    return [*drawn, generator.random()]


def replaced(generator: Any) -> float:
    generator.setstate(random.Random(4).getstate())
    return float(generator.random())


@pytest.mark.parametrize("use", [shuffled, seeded_again, put_back, replaced])
def test_uses_that_change_the_state(use: Callable[[Any], Any]) -> None:
    expected = random.Random(SEED)
    before = random.getstate()
    with waiting_seed():
        assert use(random) == use(expected)
        assert random.getstate() == expected.getstate()
    assert random.getstate() == before


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_of_the_generator_are_seeded(copied: Callable[[Any], Any]) -> None:
    with waiting_seed():
        other = copied(random._inst)
        assert type(other) is random.Random
        assert other.random() == random.Random(SEED).random()


def test_a_second_normal_number_is_not_the_one_left_over_from_before() -> None:
    random.gauss()  # makes two, and keeps one
    with waiting_seed():
        assert random.gauss() == random.Random(SEED).gauss()


def test_nested_blocks_put_back_what_each_has_found() -> None:
    before = random.getstate()
    with waiting_seed():
        with restore_if_seeded():
            seed_global_rngs(5)
            assert random.random() == random.Random(5).random()
        assert random.random() == random.Random(SEED).random()
    with waiting_seed():
        with restore_if_seeded():
            seed_global_rngs(5)
        assert random.random() == random.Random(SEED).random()
    with waiting_seed(), preserve_global_rngs():
        random.random()
        seed_global_rngs(7)
    assert random.getstate() == before


def test_outside_of_a_batch_no_seed_waits() -> None:
    seed_global_rngs(SEED)
    assert deferred._waiting is None
    assert random.getstate() == random.Random(SEED).getstate()


# ---- where a use would go unnoticed -------------------------------------------------------------------


def test_who_holds_the_function_itself_draws_from_a_seeded_generator() -> None:
    held = random.random
    with restore_if_seeded():
        seed_global_rngs(SEED)
        assert deferred._waiting is None
        assert held() == random.Random(SEED).random()


def test_a_function_that_somebody_has_put_there_stays() -> None:
    with mock.patch("random.random", return_value=0.25), restore_if_seeded():
        seed_global_rngs(SEED)
        assert deferred._waiting is None
        assert random.random() == 0.25
        assert random.uniform(2, 3) == random.Random(SEED).uniform(2, 3)
    with waiting_seed(), mock.patch("random.random", return_value=0.25):
        random.randint(0, 5)
        assert random.random() == 0.25
    assert random.random() != 0.25
    deferred._unwatch()  # The mock has put back what it found: a function that seeds what waits.


# ---- numpy's stream -------------------------------------------------------------------------------------


def numpy_state() -> str:
    with np.printoptions(threshold=10_000):
        return repr(np.random.get_state(legacy=False))


@pytest.mark.parametrize("kept", ["a normal number is kept", "none is"])
@pytest.mark.parametrize("drawn", [0, 1, 2, 1000])
def test_numpys_stream_goes_on_where_it_was(kept: str, drawn: int) -> None:
    np.random.seed(3)
    np.random.standard_normal(1 if kept != "none is" else 2)
    before, expected = numpy_state(), np.random.RandomState(SEED >> 32).standard_normal(drawn)
    with restore_if_seeded():
        seed_global_rngs(SEED)
        assert (np.random.standard_normal(drawn) == expected).all()
        with restore_if_seeded():
            seed_global_rngs(7)
            np.random.standard_normal()
    assert numpy_state() == before


@pytest.fixture
def another_generator() -> Iterator[None]:
    before = np.random.get_bit_generator()
    yield
    np.random.set_bit_generator(before)


@pytest.mark.usefixtures("another_generator")
def test_a_generator_of_another_kind_goes_on_where_it_was() -> None:
    np.random.set_bit_generator(np.random.PCG64(4))
    before = numpy_state()
    with restore_if_seeded():
        seed_global_rngs(5)
        np.random.random()
    assert numpy_state() == before


@pytest.mark.usefixtures("another_generator")
def test_a_generator_that_a_sample_puts_there_is_gone_afterwards() -> None:
    before = numpy_state()
    with restore_if_seeded():
        seed_global_rngs(5)
        np.random.set_bit_generator(np.random.PCG64(4))
    assert numpy_state() == before


def test_memory_that_is_laid_out_in_another_way_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numpy_stream, "_is_as_known", lambda: False)
    monkeypatch.setattr(numpy_stream, "_memory_of", None)
    before = numpy_state()
    with restore_if_seeded():
        seed_global_rngs(5)
    assert numpy_state() == before


def test_numpys_memory_is_as_known() -> None:
    assert numpy_stream._is_as_known()


# ---- in a loader ----------------------------------------------------------------------------------------


class Some(Dataset):
    """Draws for every third sample alone."""

    def __init__(self, draw: Callable[[], float]) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> float:
        return self.draw() if index % 3 == 0 else -1.0


class Seeded(Some):
    def __getitem__(self, index: int, generator: torch.Generator | None = None) -> float:
        return super().__getitem__(index)


def draw_by_python() -> float:
    return random.random()


def draw_nothing() -> float:
    return 0.0


def calls_of(function: Callable[[], Any]) -> Counter[str]:
    """How often `function` called which functions of C that seed."""
    found: Counter[str] = Counter()

    def note(_: Any, event: str, called: Any) -> None:
        if event == "c_call" and called.__name__ in ("seed", "manual_seed", "setstate"):
            found[called.__name__] += 1

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize("kind", [Some, Seeded])
@pytest.mark.parametrize(("draw", "seedings"), [(draw_nothing, 0), (draw_by_python, 4)])
def test_samples_that_do_not_use_it_are_not_seeded(kind: type[Some], draw: Callable[[], float], seedings: int) -> None:
    loader = DataLoader(kind(draw), 4)
    calls = calls_of(lambda: list(loader))
    assert calls["seed"] == seedings
    assert calls["setstate"] == (3 if seedings else 0), "and what was not used is not put back"
    assert calls["manual_seed"] >= 12, "torch's is seeded for each sample"


@pytest.mark.parametrize("num_workers", [0, 2])
def test_samples_are_those_of_generators_seeded_for_each(num_workers: int) -> None:
    loader = DataLoader(Some(draw_by_python), 4, seed=5, num_workers=num_workers)
    expected = [
        random.Random(derive_seed(b"global", 5, 0, index)).random() if index % 3 == 0 else -1.0 for index in range(12)
    ]
    assert torch.cat(list(loader)).tolist() == expected


class Keeps(Dataset):
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
