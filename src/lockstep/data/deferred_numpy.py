"""Seeds numpy's process-wide generator when something draws from it or looks at it, and not before.

`np.random.seed` takes longer than seeding torch's generator, and few datasets that use torch draw from numpy.

[Note: numpy's seed that waits] The old functions of `np.random` are methods of one `RandomState`. It draws from a
bit generator, which can be exchanged. While a seed waits, another stands in its place. This one has the same memory,
so the numbers are the same, but its lock and all its attributes are code of ours. Every draw takes the lock; whatever
looks at the state or changes it asks the bit generator for an attribute. The first use puts the bit generator back
and seeds it, so nobody can tell that it was not seeded earlier, not even who had said `from numpy.random import rand`
or holds the `RandomState`. Uses of the bit generator itself would go unnoticed: by another `RandomState` or
`Generator` that was made of it, or by C code that has its functions. Counts of references tell, and then no seed
waits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

__all__ = ["Holder", "drop", "holder_of", "seed", "settle"]

# After a use, so many seeds do not wait: to exchange bit generators and be noticed takes longer than to seed.
_AT_ONCE = 31

_module: Any = np.random
_find: Callable[[], Any] = getattr(_module, "get_bit_generator", lambda: None)  # both since numpy 1.24
_exchange: Callable[[Any], None] = getattr(_module, "set_bit_generator", lambda _: None)

_waiting: int | None = None  # the seed
_left_at_once = 0
_is_exchanging = False
_is_handed_out = False  # Somebody has C functions of what stands in the place of the bit generator.


class Holder:
    """Holds a bit generator for all modules here, so that its count of references tells whether anybody else does."""

    __slots__ = ("generator",)

    def __init__(self, generator: Any) -> None:
        self.generator = generator


class _NoticingLock:
    """The lock of a bit generator; tells who takes it."""

    __slots__ = ("_holder", "_notice")

    def __init__(self, holder: Holder, notice: Callable[[str], None]) -> None:
        self._holder, self._notice = holder, notice

    def __enter__(self) -> Any:
        self._notice("lock")
        return self._holder.generator.lock.__enter__()

    def __exit__(self, *error: object) -> Any:
        return self._holder.generator.lock.__exit__(*error)


class _StandIn(np.random.MT19937):
    """What `np.random` has for a bit generator while a seed waits. See [Note: numpy's seed that waits].

    Args:
        holder: of the bit generator.
        notice: called before each use, with the name of what is used.
    """

    def __init__(self, holder: Holder, notice: Callable[[str], None]) -> None:
        super().__init__(0)
        own = object.__getattribute__(self, "__dict__")
        own.update(holder=holder, notice=notice, lock=_NoticingLock(holder, notice))

    def __getattribute__(self, name: str) -> Any:
        own = object.__getattribute__(self, "__dict__")
        if name == "lock":
            return own["lock"]
        own["notice"](name)
        return getattr(own["holder"].generator, name)

    def __setattr__(self, name: str, value: Any) -> None:
        own = object.__getattribute__(self, "__dict__")
        own["notice"](f"{name} =")
        generator = own["holder"].generator
        setattr(generator, name, value)

    def __reduce__(self) -> Any:
        return self.__getattribute__("__reduce__")()  # A copy is as it always was.


def seed(value: int, *, may_wait: bool) -> None:
    """Start the generator anew. Local.

    Args:
        value: 0 … 2**32-1.
        may_wait: it is enough to do it before the next use.
    """
    global _waiting, _left_at_once
    if may_wait:
        if _waiting is not None:
            if _find() is _stand_in.generator:
                _waiting = value
                if _find() is _stand_in.generator:  # else another thread has drawn just now
                    return
            settle()  # Somebody has put another bit generator there.
        elif _left_at_once:
            _left_at_once -= 1
        elif _watch():
            _waiting = value
            return
    np.random.seed(value)


def settle() -> None:
    """Seed the generator now, if a seed waits. Local."""
    if _waiting is not None:
        if _find() is _stand_in.generator:
            _exchange(_home.generator)
        _seed_home()


def drop() -> None:
    """Forget the seed that waits, and leave the generator as it was before. Local."""
    global _waiting
    _waiting = None
    if _stand_in.generator is not None and _find() is _stand_in.generator:
        _exchange(_home.generator)


def holder_of(generator: Any) -> Holder:
    """What to keep instead of a bit generator."""
    return _home if generator is _home.generator else Holder(generator)


def _seed_home() -> None:
    global _waiting, _left_at_once
    value, _waiting = _waiting, None
    if value is not None:
        _left_at_once = _AT_ONCE
        _seeder.seed(value)


def _noticed(name: str) -> None:
    """Somebody is about to use the bit generator."""
    global _is_handed_out
    if _is_exchanging:
        return
    if name in ("capsule", "ctypes", "cffi"):
        _is_handed_out = True
    if name == "state =":
        # `RandomState.set_state` has set the second normal number already, which an exchange forgets.
        _seed_home()
    else:
        settle()


def _watch() -> bool:
    """Begin to notice uses of the generator; False where some would go unnoticed."""
    global _is_exchanging
    if _is_handed_out or not _notices_all():
        return False
    if _stand_in.generator is None:
        _stand_in.generator = _StandIn(_home, _noticed)
    if not _is_in_place() or _is_held_elsewhere():
        return False
    _is_exchanging = True
    try:
        _exchange(_stand_in.generator)
    finally:
        _is_exchanging = False
    return True


def _is_in_place() -> bool:
    current = _find()
    return current is _home.generator or current is _stand_in.generator


def _is_held_elsewhere() -> bool:
    """Whether anybody but `np.random` has the bit generator, what stands in its place, or its C functions."""
    return (
        _num_others(_home) > 0
        or _num_others(_stand_in) > 0
        or sys.getrefcount(_home.generator.capsule) > _CAPSULE_HOLDERS
        or _num_holders_of_ctypes(_home) > _CTYPES_HOLDERS
        or getattr(_home.generator, "_cffi", None) is not None
    )


def _num_others(holder: Holder) -> int:
    """Of those that hold it, all but the holder, `np.random`, and what seeds it here."""
    return sys.getrefcount(holder.generator) - _HOLDERS - (_find() is holder.generator) - (holder is _home)


def _num_holders_of_ctypes(holder: Holder) -> int:
    """Of the tuple of C functions that numpy makes once, and of those functions."""
    return sys.getrefcount(holder.generator.ctypes) + sum(map(sys.getrefcount, holder.generator.ctypes))


_home = Holder(_find())
_stand_in = Holder(None)
_seeder = np.random.RandomState(_home.generator)  # Seeds it also while something stands in its place.

_example = Holder(np.random.MT19937(0))
_HOLDERS = sys.getrefcount(_example.generator)
_CAPSULE_HOLDERS = sys.getrefcount(_example.generator.capsule)
_CTYPES_HOLDERS = _num_holders_of_ctypes(_example)

_USES: tuple[Callable[[Any], Any], ...] = (
    lambda state: state.random_sample(),
    lambda state: state.random_sample(3),
    lambda state: state.standard_normal(),
    lambda state: state.normal(1.0, [2.0, 3.0]),
    lambda state: state.randint(1000),
    lambda state: state.randint(100, size=3, dtype=np.uint8),
    lambda state: state.permutation(9),
    lambda state: state.poisson(3.0),
    lambda state: state.multinomial(5, [0.5, 0.5]),
    lambda state: state.tomaxint(),
    lambda state: state.get_state()[1],
    lambda state: state.seed(5),
    lambda state: state.set_state(np.random.RandomState(3).get_state()),
    lambda state: state.random_sample(),
)


@cache
def _notices_all() -> bool:
    """Whether this release of numpy uses a bit generator in no other way than is known."""
    if type(_home.generator) is not np.random.MT19937:
        return False
    noticed: list[str] = []
    stand_in = _StandIn(Holder(np.random.MT19937(1)), noticed.append)
    plain, watched = np.random.RandomState(np.random.MT19937(1)), np.random.RandomState(stand_in)
    try:
        for use in _USES:
            noticed.clear()
            if not np.array_equal(use(plain), use(watched)) or not noticed:
                return False
    except (AttributeError, TypeError, ValueError):
        return False
    return True
