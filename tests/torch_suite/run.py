"""PyTorch's own tests of process groups (`DistributedTest` in the wheel), run with this backend and with gloo.

    python tests/torch_suite/run.py                      every test with lockstep, compared with the table
    python tests/torch_suite/run.py --tests test_isend   some of them
    python tests/torch_suite/run.py --measure            every test with gloo and lockstep; writes the table anew

The table is `results.md`. The rule: no test that gloo passes fails here, except those that `skips.toml` names with a
reason. Tests run in batches, each in a process of its own (`batch.py`); a batch that dies or gets stuck costs the one
test it was in. Three sections: all tests at 3 ranks; at 4 those that need 4; and those that the suite
keeps for MPI, because gloo has no such verb.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

HERE = Path(__file__).parent
SKIPS = HERE / "skips.toml"
TABLE = HERE / "results.md"
BATCH_SIZE = 40
# Above what a test may take by itself (`batch.TEST_DEADLINE_S`), imports included.
_STUCK_AFTER_S = 180.0


@dataclass(frozen=True)
class Section:
    """A part of the table: how its tests are run, and which they are.

    Attributes:
        title: heading.
        world_size: number of ranks.
        pose: as which backend the suite chooses tests.
        skipped_for: tests that the first section skips for a reason with this text; all if empty.
    """

    title: str
    world_size: int
    pose: str
    skipped_for: str


SECTIONS = (
    Section("3 ranks", 3, "gloo", ""),
    Section("4 ranks: tests that 3 are too few for", 4, "gloo", "world size"),
    Section("3 ranks: tests that the suite keeps for MPI", 3, "mpi", "Only MPI"),
)


@dataclass(frozen=True)
class Result:
    """How one test went.

    Attributes:
        name: of the test.
        status: "passed", "failed" or "skipped".
        detail: why it did not pass: a traceback, or a reason to skip.
        seconds: from start to end.
    """

    name: str
    status: str
    detail: str = ""
    seconds: float = 0.0


def run_tests(backend: str, names: Sequence[str], section: Section = SECTIONS[0]) -> Iterator[Result]:
    """Run tests in batches; yields each result as it comes.

    Args:
        backend: a name that `init_process_group` knows.
        names: of the tests.
        section: how.
    """
    remaining = list(names)
    while remaining:
        order = {"backend": backend, "world_size": section.world_size, "pose": section.pose}
        for result in _run_batch({**order, "tests": remaining[:BATCH_SIZE]}):
            remaining.remove(result.name)
            yield result


def list_tests() -> list[str]:
    """The names of all tests."""
    (line,) = _lines({"world_size": 3, "list": True})
    return [str(name) for name in json.loads(line)]


def _run_batch(order: dict[str, object]) -> Iterator[Result]:
    """Results of one process: of all its tests, or up to the one in which it died."""
    started = None
    for line in _lines(order):
        entry = json.loads(line)
        if entry["status"] == "started":
            started = entry["name"]
        else:
            started = None
            yield Result(**entry)
    if started is not None:
        yield Result(started, "failed", "the process that runs the tests died, or did not come to an end")


def _lines(order: dict[str, object]) -> Iterator[str]:
    """What a batch writes, until it ends or nothing has come for too long."""
    with subprocess.Popen(
        [sys.executable, str(HERE / "batch.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(order))
            process.stdin.close()
            with selectors.DefaultSelector() as selector:
                selector.register(process.stdout, selectors.EVENT_READ)
                while selector.select(_STUCK_AFTER_S):
                    line = process.stdout.readline()
                    if not line:
                        return
                    yield line
        finally:
            _kill_session(process)


def _kill_session(process: subprocess.Popen[str]) -> None:
    """End a batch and every rank it has started: they are in one session."""
    try:
        os.killpg(process.pid, 9)
    except ProcessLookupError:
        return


def read_skips() -> dict[str, str]:
    """Tests that gloo passes and this backend need not: name and reason."""
    return {str(name): str(reason) for name, reason in tomllib.loads(SKIPS.read_text())["skips"].items()}


def read_table() -> dict[tuple[str, str], str]:
    """The measured table: (title of the section, test) -> status with gloo; "–" where gloo was not asked."""
    table, title = {}, ""
    for line in TABLE.read_text().splitlines():
        if line.startswith("## "):
            title = line.removeprefix("## ")
        elif line.startswith("| test_"):
            cells = line.split("|")
            table[title, cells[1].strip()] = cells[2].strip()
    return table


def measure(names: Sequence[str]) -> bool:
    """Run all sections with gloo and lockstep, and write the table. Whether the rule holds."""
    lines = [
        "# PyTorch's own tests of process groups",
        "",
        "Written by `make torch-suite ARGS=--measure`; do not edit. `DistributedTest` of",
        f"`torch.testing._internal.distributed.distributed_test`, torch {torch.__version__}, CPU.",
    ]
    skips, holds, chosen = read_skips(), True, list(names)
    first: list[Result] = []
    for section in SECTIONS:
        if section.skipped_for:
            chosen = [one.name for one in first if one.status == "skipped" and section.skipped_for in one.detail]
        results = {"lockstep": _collect("lockstep", chosen, section)}
        if section.pose == "gloo":
            results["gloo"] = _collect("gloo", chosen, section)
        theirs = {one.name: one.status for one in results.get("gloo", [])}
        first = first or results["lockstep"]
        holds &= report(results["lockstep"], theirs) == 0
        lines += ["", f"## {section.title}", "", "| | passed | failed | skipped |", "|---|---|---|---|"]
        for backend, of_backend in sorted(results.items()):
            count = Counter(one.status for one in of_backend)
            lines.append(f"| {backend} | {count['passed']} | {count['failed']} | {count['skipped']} |")
        lines += ["", "| test | gloo | lockstep | remark |", "|---|---|---|---|"]
        for one in results["lockstep"]:
            remark = skips.get(one.name) or ("" if one.status == "passed" else _reason(one))
            lines.append(f"| {one.name} | {theirs.get(one.name, '–')} | {one.status} | {remark} |")
    TABLE.write_text("\n".join(lines) + "\n")
    return holds


def _collect(backend: str, names: Sequence[str], section: Section) -> list[Result]:
    results = []
    for result in run_tests(backend, names, section):
        results.append(result)
        print(f"{backend:9} {result.status:8} {result.seconds:6.1f} s  {result.name}", flush=True)
    return results


def _reason(result: Result) -> str:
    """Why a test did not pass, fit for a table."""
    lines = [line for line in result.detail.splitlines() if line.strip()]
    return lines[-1].strip().replace("|", "/")[:120] if lines else ""


def report(results: Sequence[Result], theirs: Mapping[str, str]) -> int:
    """Print what did not pass though gloo passes it, and the counts.

    Args:
        results: with lockstep.
        theirs: status of each test with gloo; those it was not asked for count as passed.

    Returns:
        How many of those no skip explains.
    """
    skips, unexplained = read_skips(), 0
    for result in results:
        if result.status == "passed" or theirs.get(result.name, "passed") != "passed":
            continue
        if result.name in skips:
            print(f"explained: {result.name}: {skips[result.name]}")
        else:
            unexplained += 1
            print(f"{result.status}: {result.name}\n{result.detail}")
    count = Counter(result.status for result in results)
    print(f"{count['passed']} passed, {count['failed']} failed, {count['skipped']} skipped; {unexplained} unexplained")
    return unexplained


def check(names: Sequence[str]) -> bool:
    """Run tests with lockstep in the sections in which the table has them. Whether the rule holds."""
    table, holds = read_table(), True
    for section in SECTIONS:
        chosen = [name for name in names if (section.title, name) in table]
        if chosen:
            theirs = {name: table[section.title, name].replace("–", "passed") for name in chosen}
            holds &= report(_collect("lockstep", chosen, section), theirs) == 0
    return holds


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", nargs="*", metavar="NAME", help="only these")
    parser.add_argument("--measure", action="store_true", help="run everything with gloo and lockstep, write the table")
    options = parser.parse_args()
    names = options.tests or list_tests()
    sys.exit(not (measure(names) if options.measure else check(names)))


if __name__ == "__main__":
    main()
