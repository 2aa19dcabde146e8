"""The table of names of torch that Lockstep uses, apart from public ones. Does not import torch.

>>> record_of("torch._C._current_graph_task_id").use
<Use.READ: 'read'>
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from lockstep.torch_private.record import NameRecord, Use

__all__ = ["make_table", "record_of", "table"]


def make_table(records: Iterable[NameRecord]) -> Mapping[str, NameRecord]:
    """Records by name.

    Raises:
        AssertionError: a name occurs twice.
    """
    found: dict[str, NameRecord] = {}
    for record in records:
        assert record.name not in found, f"{record.name} stands in the table twice"
        found[record.name] = record
    return MappingProxyType(found)


@functools.cache
def table() -> Mapping[str, NameRecord]:
    """All records, by name, in the order of the page."""
    from lockstep.torch_private import records_compat, records_groups, records_training

    return make_table([*records_groups.RECORDS, *records_training.RECORDS, *records_compat.RECORDS])


@functools.cache
def record_of(name: str, use: Use | None = None) -> NameRecord:
    """The record of a name.

    Args:
        name: full name.
        use: how it is used; None for any use.

    Raises:
        AssertionError: there is none, which is a bug of ours: every use of torch's private names is in the table.
    """
    exact = [table()[name]] if name in table() else []
    patterns = (each for pattern, each in table().items() if "*" in pattern and fnmatch.fnmatchcase(name, pattern))
    for record in (*exact, *patterns):
        if use in (None, record.use):
            return record
    raise AssertionError(f"{name} has no record in lockstep/torch_private{f' with {use}' if use else ''}: add one")
