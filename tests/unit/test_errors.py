"""The exception tree: as drawn, and able to cross a process boundary."""

from __future__ import annotations

import pickle
import re

import pytest

from lockstep import errors

ARGUMENTS = {
    "WorkerFailed": ("rank 3 failed", 3, 137),
    **{
        name: ("ranks [1, 2] are lost", (1, 2))
        for name in errors.__all__
        if issubclass(getattr(errors, name), errors.CollectiveError)
    },
}


@pytest.mark.parametrize("name", errors.__all__)
def test_pickling_keeps_type_message_and_fields(name: str) -> None:
    error = getattr(errors, name)(*ARGUMENTS.get(name, ("what went wrong",)))
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_collective_errors_name_culprits() -> None:
    assert errors.RankLost("gone", culprits=(2,)).culprits == (2,)
    assert errors.CollectiveTimeout("late").culprits == ()


def _drawn_tree() -> dict[str, tuple[str, set[str]]]:
    """name -> (the class it hangs from, built-in classes in parentheses), read from the docstring."""
    drawn: dict[str, tuple[str, set[str]]] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.fullmatch(r"    ((?:[│ ]   )*(?:[├└]── )?)(\w+)(?: \((\w+)\))?(?: {2,}\S.*)?", line)
        if found is None:
            continue
        prefix, name, builtin = found.groups()
        depth = len(prefix) // 4
        del path[depth:]
        drawn[name] = (path[-1] if path else "", {builtin} if builtin else set())
        path.append(name)
    return drawn


def test_tree_in_the_docstring_is_the_class_hierarchy() -> None:
    drawn = _drawn_tree()
    assert sorted(drawn) == sorted(errors.__all__)
    for name, (parent, builtins_drawn) in drawn.items():
        bases = {base.__name__ for base in getattr(errors, name).__bases__}
        ours = bases & set(errors.__all__)
        assert ours == ({parent} if parent else set()), name
        assert bases - ours == builtins_drawn, f"{name} also derives from {bases - ours}, drawn: {builtins_drawn}"


def test_every_error_is_a_lockstep_error() -> None:
    assert all(issubclass(getattr(errors, name), errors.LockstepError) for name in errors.__all__)
