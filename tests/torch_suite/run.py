"""PyTorch's own tests of process groups (`DistributedTest` in the wheel), run with this backend and with gloo.

    python tests/torch_suite/run.py                      every test with lockstep, compared with the table
    python tests/torch_suite/run.py --tests test_isend   some of them
    python tests/torch_suite/run.py --measure            every test with gloo and lockstep; writes the table anew

The table is `results.md`. The rule: a test that gloo passes passes here. Tests run in batches, each in a process of its
own (`batch.py`); a batch that dies or gets stuck costs the one test it was in. Sections: all tests at 3 ranks; at 4 and
8 those that the suite skips at 3, most of its tests of sub-groups among them; and those that it keeps for MPI, because
gloo has no such verb.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

HERE = Path(__file__).parent
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
    Section("4 ranks: tests that ask for 4", 4, "gloo", "world size of 4"),
    Section("8 ranks: tests that ask for 8", 8, "gloo", "small world size"),
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
        batch = remaining[:BATCH_SIZE]
        order = {"backend": backend, "world_size": section.world_size, "pose": section.pose, "tests": batch}
        for result in _run_batch(order):
            remaining.remove(result.name)
            yield result
        if remaining[: len(batch)] == batch:
            raise RuntimeError(
                f"not one test was begun; see why: echo '{json.dumps(order)}' | python {HERE / 'batch.py'}"
            )


def list_tests() -> list[str]:
    """The names of all tests of the suite that is installed."""
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


@dataclass(frozen=True)
class Row:
    """What the table says of a test in a section.

    Attributes:
        theirs: status with gloo; "–" where gloo was not asked.
        ours: status with lockstep.
    """

    theirs: str
    ours: str

    @property
    def must_pass(self) -> bool:
        """The rule, and no way back for what has passed once."""
        return "passed" in (self.theirs, self.ours)


def read_table() -> dict[tuple[str, str], Row]:
    """The measured table, by title of the section and name of the test."""
    table, title = {}, ""
    for line in TABLE.read_text().splitlines():
        if line.startswith("## "):
            title = line.removeprefix("## ")
        elif line.startswith("| test_"):
            cells = [cell.strip() for cell in line.split("|")]
            table[title, cells[1]] = Row(cells[2], cells[3])
    return table


def measure(names: Sequence[str]) -> list[Result]:
    """Run all sections with gloo and lockstep, and write the table. What breaks the rule."""
    lines = [
        "# PyTorch's own tests of process groups",
        "",
        'Written by `make torch-suite ARGS="--measure"`; do not edit. `DistributedTest` of',
        f"`torch.testing._internal.distributed.distributed_test`, torch {torch.__version__}, CPU.",
        "",
        "Which tests are skipped, and why, is the suite's own word, and the same for both: it takes this backend for",
        "gloo (in the last section for MPI). Those that need GPUs, or NCCL, run on neither.",
    ]
    first, wrong, chosen = [], [], list(names)
    for section in SECTIONS:
        if section.skipped_for:
            chosen = [one.name for one in first if one.status == "skipped" and section.skipped_for in one.detail]
        ours = _collect("lockstep", chosen, section)
        theirs = _collect("gloo", chosen, section) if section.pose == "gloo" else []
        first = first or ours
        if theirs:
            must_pass = [one.name for one in theirs if one.status == "passed"]
        else:  # The suite skips what is not for this backend.
            must_pass = [one.name for one in ours if one.status != "skipped"]
        wrong += _failures(ours, must_pass)
        lines += _section_lines(section, ours, theirs)
    TABLE.write_text("\n".join(lines) + "\n")
    return wrong


def _section_lines(section: Section, ours: Sequence[Result], theirs: Sequence[Result]) -> list[str]:
    """Markdown of one section: how many passed, and a row for each test."""
    lines = ["", f"## {section.title}", "", "| | passed | failed | skipped |", "|---|---|---|---|"]
    for backend, results in (("gloo", theirs), ("lockstep", ours)):
        if results:
            count = Counter(one.status for one in results)
            lines.append(f"| {backend} | {count['passed']} | {count['failed']} | {count['skipped']} |")
    lines += ["", "| test | gloo | lockstep | remark |", "|---|---|---|---|"]
    of_gloo = {one.name: one for one in theirs}
    for one in ours:
        other = of_gloo.get(one.name)
        remark = _reason(one) or (f"gloo: {_reason(other)}" if other is not None and _reason(other) else "")
        lines.append(f"| {one.name} | {'–' if other is None else other.status} | {one.status} | {remark} |")
    return lines


def _collect(backend: str, names: Sequence[str], section: Section) -> list[Result]:
    results = []
    for result in run_tests(backend, names, section):
        results.append(result)
        print(f"{backend:9} {result.status:8} {result.seconds:6.1f} s  {result.name}", flush=True)
    return sorted(results, key=lambda one: one.name)


def _reason(result: Result) -> str:
    """Why a test did not pass, fit for a table."""
    lines = [line for line in result.detail.splitlines() if line.strip()]
    return lines[-1].strip().replace("|", "/")[:160] if lines and result.status != "passed" else ""


def _failures(results: Sequence[Result], must_pass: Collection[str]) -> list[Result]:
    return [one for one in results if one.name in must_pass and one.status != "passed"]


def check_section(section: Section, names: Sequence[str]) -> list[Result]:
    """Run tests with lockstep. What did not pass and must, as the table has it.

    Args:
        section: how.
        names: tests that the table has in this section.
    """
    table = read_table()
    must_pass = [name for name in names if table[section.title, name].must_pass]
    return _failures(_collect("lockstep", names, section), must_pass)


def check(names: Sequence[str]) -> list[Result]:
    """Run tests with lockstep in all sections in which the table has them. What did not pass and must."""
    table, wrong = read_table(), []
    for section in SECTIONS:
        in_section = [name for name in names if (section.title, name) in table]
        if in_section:
            wrong += check_section(section, in_section)
    return wrong


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", nargs="*", metavar="NAME", help="only these")
    parser.add_argument("--measure", action="store_true", help="run everything with gloo and lockstep, write the table")
    options = parser.parse_args()
    if options.tests and options.measure:
        parser.error("--measure writes the whole table, so it runs all tests: leave out --tests")
    names = options.tests or list_tests()
    wrong = measure(names) if options.measure else check(names)
    for result in wrong:
        print(f"\n{result.status}: {result.name}\n{result.detail}")
    print(f"{len(wrong)} tests that must pass did not")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
