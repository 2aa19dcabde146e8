"""numpy's generator is seeded when a sample uses it, and nobody can tell that it was not seeded before."""

from __future__ import annotations

import copy
import ctypes
import pickle
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from numpy.random import rand as imported_rand
from torch.utils.data import Dataset

from lockstep.data import DataLoader, deferred_numpy
from lockstep.data.seeding import preserve_global_rngs, restore_if_seeded, seed_global_rngs
from lockstep.seeding import derive_seed, derive_seeds

VALUE = 0x7A8A0B12EB86416B
SEED = VALUE >> 32

pytestmark = [
    pytest.mark.skipif(not hasattr(np.random, "get_bit_generator"), reason="older than numpy 1.24: no seed waits"),
    # What torch says on a machine with one core, and Python 3.12 of any fork.
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning"),
]

the_state: Any = np.random.mtrand._rand


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = id(np.random.get_bit_generator())  # Who holds it keeps seeds from waiting.
    monkeypatch.setattr(deferred_numpy, "_left_at_once", 0)
    monkeypatch.setattr(deferred_numpy, "_is_handed_out", False)
    with preserve_global_rngs():
        yield
    assert deferred_numpy._waiting is None
    assert id(np.random.get_bit_generator()) == before
    assert not is_held()


def is_held() -> bool:
    return deferred_numpy._stand_in.generator is not None and deferred_numpy._is_held_elsewhere()


@contextmanager
def waiting_seed(value: int = VALUE) -> Iterator[None]:
    with restore_if_seeded():
        seed_global_rngs(value)
        assert deferred_numpy._waiting == value >> 32
        yield


def written(state: Any) -> str:
    with np.printoptions(threshold=10_000):
        return repr(state.get_state(legacy=False))


def same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple):
        return all(map(same, one, other))
    return bool(np.array_equal(one, other))


USES: dict[str, tuple[Any, ...]] = {
    "beta": (2, 3),
    "binomial": (10, 0.5),
    "bytes": (9,),
    "chisquare": (3,),
    "choice": (1000,),
    "dirichlet": ([1.0, 2.0],),
    "exponential": (1.5,),
    "f": (3, 4),
    "gamma": (0.5, 2),
    "geometric": (0.2,),
    "get_state": (),
    "gumbel": (0, 1),
    "hypergeometric": (15, 15, 15),
    "laplace": (),
    "logistic": (),
    "lognormal": (),
    "logseries": (0.6,),
    "multinomial": (5, [0.5, 0.5]),
    "multivariate_normal": ([0.0, 0.0], [[1.0, 0.0], [0.0, 1.0]]),
    "negative_binomial": (3, 0.5),
    "noncentral_chisquare": (3, 1.0),
    "noncentral_f": (3, 4, 1.0),
    "normal": (0, [1.0, 2.0]),
    "pareto": (3,),
    "permutation": (50,),
    "poisson": (3.0,),
    "power": (2.0,),
    "rand": (2,),
    "randint": (10**9,),
    "randn": (),
    "random": (),
    "random_sample": ((2, 3),),
    "rayleigh": (),
    "standard_cauchy": (),
    "standard_exponential": (),
    "standard_gamma": (2.0,),
    "standard_normal": (),
    "standard_t": (3,),
    "tomaxint": (),
    "triangular": (0, 0.3, 1),
    "uniform": (2, 3),
    "vonmises": (1, 4),
    "wald": (1, 2),
    "weibull": (2,),
    "zipf": (2.5,),
}
OTHERS = {"random_integers", "seed", "set_state", "shuffle"}  # the first is obsolete, and calls `randint`


def test_the_list_of_uses_is_complete() -> None:
    methods = {name for name in dir(np.random.RandomState) if not name.startswith("_")}
    assert methods <= USES.keys() | OTHERS


@pytest.mark.parametrize("name", USES)
@pytest.mark.parametrize("taken", ["before", "meanwhile"])
@pytest.mark.parametrize("size", [(), (3,)])
def test_every_use_finds_a_seeded_generator(name: str, taken: str, size: tuple[int, ...]) -> None:
    if size and name in ("bytes", "get_state", "permutation", "rand", "randn", "random", "random_sample"):
        size = ()
    arguments: tuple[Any, ...] = USES[name]
    options = {"size": (*size, 2) if name == "normal" else size} if size else {}
    expected = np.random.RandomState(SEED)
    np.random.standard_normal()  # makes two, and keeps one
    before = getattr(the_state, name) if taken == "before" else None
    with waiting_seed():
        used = before or getattr(the_state, name)
        assert same(used(*arguments, **options), getattr(expected, name)(*arguments, **options))
        assert written(np.random) == written(expected)


@pytest.mark.parametrize("draw", [np.random.rand, imported_rand, the_state.rand])
def test_functions_that_somebody_holds(draw: Callable[[], float]) -> None:
    for value in (VALUE, VALUE + 2**40):
        deferred_numpy._left_at_once = 0
        with waiting_seed(value):
            assert draw() == np.random.RandomState(value >> 32).rand()


def test_whole_states_are_those_of_plain_seeds() -> None:
    for value in [0, 2**64 - 1, *derive_seeds(b"test", 0, 0, range(300))]:
        deferred_numpy._left_at_once = 0
        expected = np.random.RandomState(value >> 32)
        with waiting_seed(value):
            assert written(np.random) == written(expected)
            assert np.random.standard_normal() == expected.standard_normal()
            assert written(np.random) == written(expected)  # with a normal number kept


def shuffled(state: Any) -> list[int]:
    items = [*range(20)]
    state.shuffle(items)
    return items


def seeded_again(state: Any) -> list[float]:
    state.seed(3)
    return [state.standard_normal(), state.standard_normal(), state.random_sample()]


def drawn_and_seeded_again(state: Any) -> list[float]:
    state.standard_normal()
    return seeded_again(state)


def seeded_wrongly(state: Any) -> float:
    with pytest.raises(ValueError, match="Seed must be between"):
        state.seed(-1)
    return float(state.random_sample())


def put_back(state: Any) -> list[float]:
    found = state.get_state()
    drawn = [state.random_sample()]
    state.set_state(found)
    return [*drawn, state.random_sample()]


def replaced(state: Any) -> list[float]:
    other = np.random.RandomState(4)
    other.standard_normal()
    state.set_state(other.get_state())  # with a normal number kept
    return [state.standard_normal(), state.standard_normal(), state.random_sample()]


def replaced_by_half(state: Any) -> list[float]:
    with pytest.raises(TypeError):
        state.set_state(("MT19937", None, 3, 1, 0.25))  # What it has set by then stays.
    return [state.standard_normal(), state.random_sample()]


@pytest.mark.parametrize(
    "use", [shuffled, seeded_again, drawn_and_seeded_again, seeded_wrongly, put_back, replaced, replaced_by_half]
)
def test_uses_that_change_the_state(use: Callable[[Any], Any]) -> None:
    expected = np.random.RandomState(SEED)
    np.random.standard_normal()
    before = written(np.random)
    with waiting_seed():
        assert use(the_state) == use(expected)
        assert written(np.random) == written(expected)
        seed_global_rngs(2**40)
        assert np.random.standard_normal() == np.random.RandomState(2**8).standard_normal()
    assert written(np.random) == before


def test_a_state_that_was_replaced_does_not_outlast_the_next_seed() -> None:
    with waiting_seed():
        replaced(the_state)
        np.random.standard_normal()
        deferred_numpy._left_at_once = 0
        seed_global_rngs(2**40)
        assert deferred_numpy._waiting == 2**8
        assert np.random.standard_normal() == np.random.RandomState(2**8).standard_normal()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
@pytest.mark.parametrize("what", ["state", "bit generator"])
def test_copies_of_the_generator_are_seeded(copied: Callable[[Any], Any], what: str) -> None:
    with waiting_seed():
        other = copied(the_state if what == "state" else np.random.get_bit_generator())
        if what != "state":
            assert type(other) is np.random.MT19937
            other = np.random.RandomState(other)
        assert type(other._bit_generator) is np.random.MT19937
        assert other.random_sample() == np.random.RandomState(SEED).random_sample()
    assert not is_held()


def test_the_bit_generator_is_as_it_would_be_when_somebody_looks_at_it() -> None:
    expected: Any = np.random.RandomState(SEED)._bit_generator
    looks: list[Callable[[Any], Any]] = [
        lambda one: one.random_raw(3).tolist(),
        lambda one: repr(one.state),
        lambda one: repr(one.jumped().state),
        lambda one: one.seed_seq,
        lambda one: ctypes.string_at(one.ctypes.state_address, 2500),
        lambda one: one.__class__.__name__,
    ]
    for look in looks:
        deferred_numpy._left_at_once = 0
        deferred_numpy._is_handed_out = False
        with waiting_seed():
            expected._legacy_seeding(SEED)
            seen = look(np.random.get_bit_generator())
            assert seen == look(expected)
    deferred_numpy._left_at_once = 0
    with waiting_seed():
        assert str(the_state) == "RandomState(MT19937)"
        assert isinstance(np.random.get_bit_generator(), np.random.MT19937)


def test_a_bit_generator_whose_state_is_set_forgets_the_seed() -> None:
    with waiting_seed():
        np.random.get_bit_generator().state = np.random.RandomState(4).get_state(legacy=False)
        assert np.random.standard_normal() == np.random.RandomState(4).standard_normal()


def test_generators_of_ones_own_are_left_alone() -> None:
    own, other = np.random.default_rng(3), np.random.RandomState(3)
    own.normal(), other.normal()
    with waiting_seed():
        drawn = own.normal(), other.normal()
        assert np.random.default_rng(5).random() == np.random.Generator(np.random.PCG64(5)).random()
        assert deferred_numpy._waiting == SEED
    again, other = np.random.default_rng(3), np.random.RandomState(3)
    again.normal(), other.normal()
    assert drawn == (again.normal(), other.normal())


def test_another_thread_finds_a_seeded_generator() -> None:
    drawn = []
    with waiting_seed():
        thread = threading.Thread(target=lambda: drawn.append(np.random.random_sample()))
        thread.start()
        thread.join()
        expected = np.random.RandomState(SEED)
        assert [*drawn, np.random.random_sample()] == expected.random_sample(2).tolist()


def test_threads_that_draw_meanwhile_do_no_harm() -> None:
    ends = threading.Event()

    def draw() -> None:
        while not ends.is_set():
            np.random.standard_normal(50)

    threads = [threading.Thread(target=draw) for _ in range(3)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for value in range(300):
            deferred_numpy._left_at_once = 0
            with restore_if_seeded():
                for step in range(5):
                    seed_global_rngs((value + step) << 32)
                np.random.standard_normal()
    finally:
        ends.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    deferred_numpy._left_at_once = 0
    with waiting_seed():
        assert np.random.random_sample() == np.random.RandomState(SEED).random_sample()


def test_nested_blocks_put_back_what_each_has_found() -> None:
    before = written(np.random)
    for draws in (True, False):
        deferred_numpy._left_at_once = 0
        with waiting_seed():
            with restore_if_seeded():
                seed_global_rngs(5 << 32)
                if draws:
                    assert np.random.random_sample() == np.random.RandomState(5).random_sample()
            assert np.random.random_sample() == np.random.RandomState(SEED).random_sample()
    deferred_numpy._left_at_once = 0
    with waiting_seed(), preserve_global_rngs():
        np.random.random_sample()
        seed_global_rngs(7)
    assert written(np.random) == before


def test_outside_of_a_batch_no_seed_waits() -> None:
    seed_global_rngs(VALUE)
    assert deferred_numpy._waiting is None
    assert written(np.random) == written(np.random.RandomState(SEED))


def test_after_a_use_some_seeds_do_not_wait() -> None:
    waits = []
    with restore_if_seeded():
        for value in range(40):
            seed_global_rngs(value << 32)
            waits.append(deferred_numpy._waiting is not None)
            if value == 3:
                np.random.random_sample()
        assert np.random.random_sample() == np.random.RandomState(39).random_sample()
    assert waits == [True] * 4 + [False] * deferred_numpy._AT_ONCE + [True] * (36 - deferred_numpy._AT_ONCE)


# ---- where a use would go unnoticed -------------------------------------------------------------------


def no_seed_waits() -> None:
    deferred_numpy._left_at_once = 0
    with restore_if_seeded():
        seed_global_rngs(VALUE)
        assert deferred_numpy._waiting is None


@pytest.mark.parametrize(
    "held",
    [
        lambda: np.random.Generator(np.random.get_bit_generator()),
        lambda: np.random.RandomState(np.random.get_bit_generator()),
        lambda: copy.copy(the_state),
    ],
)
@pytest.mark.parametrize("taken", ["before", "meanwhile"])
def test_others_that_draw_from_the_same_numbers_draw_seeded_ones(held: Callable[[], Any], taken: str) -> None:
    if not isinstance(held(), np.random.Generator) and held()._bit_generator is not np.random.get_bit_generator():
        pytest.skip("this release of numpy copies the bit generator too")
    holder = held() if taken == "before" else None
    for value in (VALUE, VALUE + 2**40):
        deferred_numpy._left_at_once = 0
        with restore_if_seeded():
            seed_global_rngs(value)
            holder = holder or held()
            assert deferred_numpy._waiting is None
            expected = np.random.RandomState(value >> 32)
            same_kind = np.random.Generator(expected._bit_generator)
            assert (
                holder.random(3).tolist()
                == (same_kind if isinstance(holder, np.random.Generator) else expected).random(3).tolist()
            )
            assert np.random.random_sample() == expected.random_sample()


@pytest.mark.parametrize(
    "held",
    [
        lambda one: one,
        lambda one: one.random_raw,
        lambda one: one.capsule,
        lambda one: one.ctypes,
        lambda one: one.ctypes.next_double,
    ],
)
def test_no_seed_waits_while_somebody_has_the_bit_generator(held: Callable[[Any], Any]) -> None:
    holder = [held(np.random.get_bit_generator())]
    no_seed_waits()
    holder.clear()
    with waiting_seed():
        holder.append(held(np.random.get_bit_generator()))
        np.random.random_sample()
    no_seed_waits()


@pytest.mark.parametrize("name", ["capsule", "ctypes"])
def test_no_seed_waits_once_c_functions_were_given_away(name: str) -> None:
    with waiting_seed():
        getattr(np.random.get_bit_generator(), name)
        assert deferred_numpy._waiting is None
    no_seed_waits()


def test_another_release_of_numpy_is_seeded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred_numpy, "_notices_all", lambda: False)
    no_seed_waits()


def test_a_use_that_is_not_noticed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert deferred_numpy._notices_all.__wrapped__()
    monkeypatch.setattr(deferred_numpy, "_USES", (*deferred_numpy._USES, lambda state: 1))
    assert not deferred_numpy._notices_all.__wrapped__()
    monkeypatch.setattr(deferred_numpy, "_USES", (lambda state: state.no_such_method(),))
    assert not deferred_numpy._notices_all.__wrapped__()


@pytest.mark.parametrize("back", [True, False])
def test_a_bit_generator_that_a_sample_puts_there_is_seeded(back: bool) -> None:
    before = written(np.random)
    with waiting_seed():
        found = np.random.get_bit_generator()
        np.random.set_bit_generator(np.random.PCG64(4))
        seed_global_rngs(VALUE + 2**40)
        expected = np.random.PCG64(SEED + 2**8)
        assert np.random.random_sample() == np.random.RandomState(expected).random_sample()
        if back:
            np.random.set_bit_generator(found)
            assert np.random.random_sample() == np.random.RandomState(SEED).random_sample()
    assert written(np.random) == before


# ---- in a loader ----------------------------------------------------------------------------------------


class Some(Dataset):
    """Draws for every third sample alone, or for every one in the first half."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> float:
        return float(imported_rand() + the_state.standard_normal()) if index % 3 == 0 or index < 50 else 0.0


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_of_a_loader_are_those_of_plain_seeds(workers: int) -> None:
    np.random.standard_normal()
    before = written(np.random)
    dataset = Some()
    loader = DataLoader(dataset, 20, seed=3, num_workers=workers, rank=0, world_size=1)
    seeds = [derive_seed(b"global", 3, 0, index) >> 32 for index in range(100)]
    expected = []
    for index, seed in enumerate(seeds):
        state = np.random.RandomState(seed)
        expected.append(state.rand() + state.standard_normal() if index % 3 == 0 or index < 50 else 0.0)
    loaded = torch.cat(list(loader))
    assert loaded.tolist() == expected
    assert written(np.random) == before


def test_seeds_of_samples_that_draw_nothing_are_never_used(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()
    seed = np.random.seed
    monkeypatch.setattr(np.random, "seed", lambda value: calls.update(["seed"]) or seed(value))
    monkeypatch.setattr(deferred_numpy, "_seed_home", lambda: calls.update(["settle"]))

    class Plain(Dataset):
        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.rand(2)

    list(DataLoader(Plain(), 16, rank=0, world_size=1))
    assert not calls
