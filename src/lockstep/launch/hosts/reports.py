"""The reports of all hosts of a round on how their ranks ended, so that all hosts come to the same root cause.

A report is JSON, each value of the type that it has here, so that reading it runs no code.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, TypeVar

from lockstep.launch.positions import RankStatus
from lockstep.launch.process import RankExit
from lockstep.launch.report import ErrorReport
from lockstep.launch.root_cause import RankFailure, find_first_failure
from lockstep.rank_status import Position

__all__ = ["HostReport", "find_first_failure_of_all"]

T = TypeVar("T")


@dataclass(frozen=True)
class HostReport:
    """How the ranks of one host ended.

    Attributes:
        exits: rank -> how it exited, for the ranks of the host.
        reports: rank -> error report, for those that wrote one.
        announced: ranks that are known to have failed, with any exit code.
        statuses: rank -> where it was at the first failure.
    """

    exits: Mapping[int, RankExit] = field(default_factory=dict)
    reports: Mapping[int, ErrorReport] = field(default_factory=dict)
    announced: Collection[int] = ()
    statuses: Mapping[int, RankStatus] = field(default_factory=dict)

    @property
    def has_failed(self) -> bool:
        """Whether a rank of this host failed."""
        return bool(self.announced) or any(not ended.is_good for ended in self.exits.values())

    def encode(self) -> str:
        """Encode as text, with the name of this host."""
        host = socket.gethostname()
        return json.dumps(
            {
                "exits": [asdict(replace(ended, host=host)) for ended in self.exits.values()],
                "reports": [asdict(report) for report in self.reports.values()],
                "announced": sorted(self.announced),
                "statuses": [asdict(status) for status in self.statuses.values()],
            }
        )

    @classmethod
    def decode(cls, text: str) -> HostReport:
        """Decode from text.

        Raises:
            ValueError: the text is no report.
        """
        try:
            return cls._decode(json.loads(text))
        except (TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
            raise ValueError(f"no report of a host: {error}") from None

    @classmethod
    def _decode(cls, found: Any) -> HostReport:
        exits = [_make(RankExit, entry) for entry in found["exits"]]
        reports = [_make(ErrorReport, entry) for entry in found["reports"]]
        statuses = [
            _make(RankStatus, {**entry, "positions": tuple(_make(Position, one) for one in entry["positions"])})
            for entry in found["statuses"]
        ]
        announced = found["announced"]
        if not all(type(rank) is int for rank in announced):
            raise TypeError(f"announced is {str(announced)[:40]!r}")
        return cls(
            {ended.rank: ended for ended in exits},
            {report.rank: report for report in reports},
            tuple(announced),
            {status.rank: status for status in statuses},
        )


_KINDS: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "str": (str,),
    "int | None": (int, type(None)),
}
_LISTS: dict[str, type] = {"tuple[int, ...]": int, "tuple[Position, ...]": Position}


def _make(kind: type[T], values: Mapping[str, Any]) -> T:
    """A record from what JSON made of it: lists are tuples here.

    Raises:
        TypeError: a field has a value of another type.
    """
    made = {}
    for one in fields(kind):  # type: ignore[arg-type]
        if one.name not in values:
            continue
        value, name = values[one.name], str(one.type)
        if name in _LISTS:
            value = tuple(value)
            is_typed = all(type(part) is _LISTS[name] for part in value)
        else:
            is_typed = type(value) in _KINDS[name]
        if not is_typed:
            raise TypeError(f"{one.name} is {str(value)[:40]!r}")
        made[one.name] = value
    return kind(**made)


def find_first_failure_of_all(reports: Iterable[HostReport]) -> list[RankFailure]:
    """The failures of all hosts, the first one first, as far as the hosts' clocks agree."""
    exits: dict[int, RankExit] = {}
    said: dict[int, ErrorReport] = {}
    statuses: dict[int, RankStatus] = {}
    announced: set[int] = set()
    for report in reports:
        exits |= report.exits
        said |= report.reports
        statuses |= report.statuses
        announced |= set(report.announced)
    return find_first_failure(exits, said, announced, statuses)
