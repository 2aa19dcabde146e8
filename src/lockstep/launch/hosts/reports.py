"""The reports of a round's hosts on how their ranks ended, so that all hosts find the same root cause."""

from __future__ import annotations

import json
import socket
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace

from lockstep.json_records import read_record
from lockstep.launch.positions import RankStatus
from lockstep.launch.process import RankExit
from lockstep.launch.report import ErrorReport
from lockstep.launch.root_cause import RankFailure, find_first_failure

__all__ = ["HostReport", "find_first_failure_of_all"]


@dataclass(frozen=True)
class HostReport:
    """How the ranks on one host ended.

    Attributes:
        exits: rank -> how it exited, for the ranks on the host.
        reports: rank -> error report, for those that wrote one.
        announced: ranks that are known to have failed, whatever their exit code.
        statuses: rank -> where it was at the first failure.
    """

    exits: Mapping[int, RankExit] = field(default_factory=dict)
    reports: Mapping[int, ErrorReport] = field(default_factory=dict)
    announced: Collection[int] = ()
    statuses: Mapping[int, RankStatus] = field(default_factory=dict)

    @property
    def has_failed(self) -> bool:
        """Whether a rank on this host failed."""
        return bool(self.announced) or any(not ended.is_good for ended in self.exits.values())

    def encode(self) -> str:
        """Encode as text, including the name of this host."""
        host = socket.gethostname()
        exits = tuple(replace(ended, host=host) for ended in self.exits.values())
        reports, statuses = tuple(self.reports.values()), tuple(self.statuses.values())
        return json.dumps(asdict(_Encoded(exits, reports, tuple(sorted(self.announced)), statuses)))

    @classmethod
    def decode(cls, text: str) -> HostReport:
        """Decode from text.

        Raises:
            ValueError: the text is not a report.
        """
        try:
            found = read_record(_Encoded, text)
        except ValueError as error:
            raise ValueError(f"no report of a host: {error}") from None
        return cls(
            {ended.rank: ended for ended in found.exits},
            {report.rank: report for report in found.reports},
            found.announced,
            {status.rank: status for status in found.statuses},
        )


@dataclass(frozen=True)
class _Encoded:
    """The serialized form of a report: JSON has no mappings with numeric keys."""

    exits: tuple[RankExit, ...]
    reports: tuple[ErrorReport, ...]
    announced: tuple[int, ...]
    statuses: tuple[RankStatus, ...]


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
