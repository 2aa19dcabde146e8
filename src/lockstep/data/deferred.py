"""Seeds Python's process-wide generator when something draws from it or looks at it, and not before.

`random.seed` takes longer than seeding torch's and numpy's generators together, and few datasets draw from `random`.

[Note: a seed that waits] The functions of the module `random` are methods of one object. While a seed waits, the
object has a class that notices every use: all methods draw by `random` or `getrandbits`, and they read or set the
attributes `VERSION` and `gauss_next` where they look at the state or replace it. The first use seeds the
generator, so nobody can tell that it was not seeded earlier. Two functions of the module are C code, which no class
stands before: the module has others in their place meanwhile. Who had said `from random import random` before holds
the C code itself. Its count of references tells, and then, as wherever `random` is not as it was installed, no seed
waits.
"""

from __future__ import annotations

import random
import sys
from types import BuiltinMethodType, MethodType
from typing import Any

__all__ = ["drop", "num_changes", "seed", "settle"]

_generator: Any = random._inst
_functions = vars(random)
_draw, _draw_bits = random.Random.random, random.Random.getrandbits

_waiting: int | None = None  # the seed
_num_changes = 0


class _Noticing(random.Random):
    """The class of `random`'s generator while a seed waits. See [Note: a seed that waits]."""

    def random(self) -> float:
        settle()
        return _draw(self)

    def getrandbits(self, k: int, /) -> int:
        settle()
        return _draw_bits(self, k)

    @property
    def VERSION(self) -> int:  # type: ignore[override]  # noqa: N802  # the name is Python's
        settle()  # `getstate` reads it before the state.
        return random.Random.VERSION

    @property
    def gauss_next(self) -> float | None:
        settle()
        return vars(self).get("gauss_next")

    @gauss_next.setter
    def gauss_next(self, value: float | None) -> None:
        # By `seed` and `setstate`, which replace the state; `gauss` has read it before.
        if self is _generator:
            _replaced()
        vars(self)["gauss_next"] = value

    def __reduce__(self) -> Any:
        return (random.Random, (), self.getstate())  # A copy is as it always was.


# What the module has in the place of its two functions of C while a seed waits, and those two.
_stand_ins: dict[str, Any] = {name: MethodType(vars(_Noticing)[name], _generator) for name in ("random", "getrandbits")}
_natives = {name: _functions[name] for name in _stand_ins}
_ARE_NATIVE = all(
    type(function) is BuiltinMethodType and function.__self__ is _generator and function.__name__ == name
    for name, function in _natives.items()
)
_example: dict[str, Any] = {"held once": [].append}
_HOLDERS = sys.getrefcount(_example["held once"]) + 1  # the module, and the table above


def seed(value: int, *, may_wait: bool) -> None:
    """Start the generator anew. Local.

    Args:
        value: 0 … 2**64-1.
        may_wait: it is enough to do it before the next use.
    """
    global _waiting, _num_changes
    if may_wait and (type(_generator) is _Noticing or _watch()):
        _waiting = value
        return
    _num_changes += 1
    random.seed(value)


def settle() -> None:
    """Seed the generator now, if a seed waits. Local."""
    global _waiting, _num_changes
    value, _waiting = _waiting, None
    if value is not None:
        _num_changes += 1
        _unwatch()
        _generator.seed(value)


def drop() -> bool:
    """Forget the seed that waits, and leave the generator as it was before. Local.

    Returns:
        Whether one waited.
    """
    global _waiting
    value, _waiting = _waiting, None
    if value is not None:
        _unwatch()
    return value is not None


def num_changes() -> int:
    """How often the generator was seeded here, or by somebody else while a seed waited. Local."""
    return _num_changes


def _replaced() -> None:
    global _num_changes
    if drop():
        _num_changes += 1


def _watch() -> bool:
    """Begin to notice uses of the generator; False where some would go unnoticed."""
    if type(_generator) is not random.Random or not _ARE_NATIVE:
        return False
    _put_natives_back()
    if not all(map(_is_only_the_modules, _natives)):
        return False
    _functions.update(_stand_ins)
    _generator.__class__ = _Noticing
    return True


def _is_only_the_modules(name: str) -> bool:
    """Whether the module has its own function of that name, and nobody else has it."""
    return _functions[name] is _natives[name] and _num_holders(name) == _HOLDERS


def _num_holders(name: str) -> int:
    return sys.getrefcount(_natives[name])


def _unwatch() -> None:
    _generator.__class__ = random.Random
    _put_natives_back()


def _put_natives_back() -> None:
    for name, native in _natives.items():
        if _functions[name] is _stand_ins[name]:  # else somebody has put something there meanwhile
            _functions[name] = native
