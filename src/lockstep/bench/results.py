"""The result of a run of a case: environment, parameters and every sample, as JSON.

Tables and plots are generated from these files alone, so every number can be traced to its
samples, its commit and its machine.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import lockstep
from lockstep.shm.processor import cpuinfo

__all__ = ["Environment", "Parameters", "Result", "Series", "Skipped"]

SCHEMA = 1
_SIGNIFICANT_DIGITS = 6
_SOURCES = Path(lockstep.__file__).resolve().parents[2]  # in a checkout, the folder of .git

Parameters = dict[str, int | str]
"""A configuration of a case, e.g. `{"world_size": 2, "bytes": 4096}`."""


@dataclass(frozen=True)
class Environment:
    """The machine and the software of a measurement.

    Attributes:
        commit: full hash of the package's sources, or "unknown" if they are not in a git checkout.
        dirty: whether tracked files differ from that commit, except those that benchmarks write.
        date: UTC, ISO 8601, to the second.
        lockstep, torch, numpy, python: versions.
        kernel: name and release of the kernel.
        cpu: model name.
        cores: cores that this process may use.
        memory_bytes: physical memory.
        shm_bytes: size of /dev/shm; 0 if there is none.
        shm_huge_pages: the kernel's setting for huge pages in shared memory.
        load: one-minute load average before the run; above a few tenths the samples are noisy.
    """

    commit: str
    dirty: bool
    date: str
    lockstep: str
    torch: str
    numpy: str
    python: str
    kernel: str
    cpu: str
    cores: int
    memory_bytes: int
    shm_bytes: int
    shm_huge_pages: str
    load: float

    @classmethod
    def read(cls) -> Environment:
        """The environment of this process, now. Does not import torch."""
        status = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results", ":!README.md")
        return cls(
            commit=_git("rev-parse", "HEAD") or "unknown",
            dirty=bool(status),
            date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            lockstep=lockstep.__version__,
            torch=metadata.version("torch"),
            numpy=metadata.version("numpy"),
            python=platform.python_version(),
            kernel=f"{platform.system()} {platform.release()}",
            cpu=cpuinfo("model name") or platform.processor() or platform.machine(),
            cores=len(os.sched_getaffinity(0)),
            memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            shm_bytes=_filesystem_bytes(Path("/dev/shm")),
            shm_huge_pages=_chosen(Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")),
            load=round(os.getloadavg()[0], 2),
        )

    def summary(self) -> str:
        """A line below a table: machine, versions, commit and date."""
        return (
            f"{self.cpu}, {self.cores} cores; {self.kernel}; torch {self.torch}, Python {self.python}, "
            f"lockstep {self.lockstep} at {self.commit[:10]}{' (modified)' if self.dirty else ''}; {self.date[:10]}"
        )


@dataclass(frozen=True)
class Series:
    """All samples of one contestant in one configuration.

    Attributes:
        parameters: the configuration.
        contestant: name of the contestant.
        iterations: calls that one sample averages over.
        samples_s: seconds per call, one per round, in the order measured; sample i of all
            contestants of a configuration belongs to the same round.
        facts: other values measured for the contestant, with units in their names: bytes, losses.
    """

    parameters: Parameters
    contestant: str
    iterations: int
    samples_s: list[float]
    facts: dict[str, float | str | list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Skipped:
    """A contestant that could not run here, and why."""

    parameters: Parameters
    contestant: str
    reason: str


@dataclass(frozen=True)
class Result:
    """Everything measured in a run of a case.

    Attributes:
        case: name of the case.
        quick: whether it was a quick run, whose numbers mean nothing.
        environment: machine and versions.
        settings: budgets, threads, and settings of the case.
        series: every sample.
        skipped: contestants without samples.
        complete: whether the run finished; otherwise it was cut short.
    """

    case: str
    quick: bool
    environment: Environment
    settings: Mapping[str, object]
    series: list[Series]
    skipped: list[Skipped] = field(default_factory=list)
    complete: bool = True

    def samples(self, contestant: str, **parameters: int | str) -> list[float] | None:
        """The samples of one contestant in one configuration; None if there are none."""
        for series in self.series:
            if series.contestant == contestant and series.parameters == parameters:
                return series.samples_s
        return None

    def values(self, name: str) -> list[int | str]:
        """The distinct values of a parameter, in the order measured."""
        return list(dict.fromkeys(series.parameters[name] for series in self.series if name in series.parameters))

    def save(self, folder: Path) -> Path:
        """Write `<folder>/<case>.json` atomically; returns its path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.case}.json"
        partial = path.with_suffix(".json.partial")
        partial.write_text(self.to_json(), encoding="utf-8")
        partial.replace(path)
        return path

    def to_json(self) -> str:
        """JSON text, with every list of samples on one line, so that a diff of two runs is readable."""
        document = {"schema": SCHEMA, **asdict(self)}
        for series in document["series"]:
            series["samples_s"] = [float(f"{sample:.{_SIGNIFICANT_DIGITS}g}") for sample in series["samples_s"]]
            if not series["facts"]:
                del series["facts"]
        text = json.dumps(document, indent=1)
        return re.sub(r"\[\n[^][{}\"]*\]", lambda match: re.sub(r"\s+", " ", match[0]), text) + "\n"

    @classmethod
    def load(cls, path: Path) -> Result:
        """Read what `save` wrote.

        Raises:
            ValueError: the file has another schema, or is not a result.
        """
        document = json.loads(path.read_text(encoding="utf-8"))
        schema = document.pop("schema", None)
        if schema != SCHEMA:
            raise ValueError(f"{path} has schema {schema}, expected {SCHEMA}: run the benchmark again")
        return cls(
            case=document["case"],
            quick=document["quick"],
            environment=Environment(**document["environment"]),
            settings=document["settings"],
            series=[Series(**series) for series in document["series"]],
            skipped=[Skipped(**skipped) for skipped in document["skipped"]],
            complete=document.get("complete", True),
        )


def _git(*arguments: str) -> str:
    """Output of a git command in the source tree; empty without git, or if the package is not in a checkout."""
    if not (_SOURCES / ".git").exists():
        return ""
    try:
        command = ["git", "-C", str(_SOURCES), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _filesystem_bytes(path: Path) -> int:
    try:
        status = os.statvfs(path)
    except OSError:
        return 0
    return status.f_frsize * status.f_blocks


def _chosen(path: Path) -> str:
    """The selected value of a kernel setting such as `always [never]`."""
    try:
        match = re.search(r"\[(\w+)\]", path.read_text(encoding="utf-8"))
    except OSError:
        match = None
    return match[1] if match else "unknown"
