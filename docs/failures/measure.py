"""Runs every case of `cases.py` on gloo, on gloo with TORCH_DISTRIBUTED_DEBUG=DETAIL and on lockstep, side by side.

`make failures` runs it. It leaves what it saw in docs/failures/results.json, and the page made of that in
docs/failures.md. `python -m docs.failures.measure page` makes the page again from the stored results.

gloo's waits end after `GLOO_TIMEOUT_S` here; by default they last 30 minutes.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from docs.failures.cases import CASES, CULPRIT, WORLD_SIZE, Case, Observation, observe, observe_on_gloo
from lockstep.testing import WorkerDied, run_ranks

__all__ = ["PAGE", "RESULTS", "SYSTEMS", "Row", "load", "main", "render"]

RESULTS = Path(__file__).with_name("results.json")
PAGE = Path(__file__).parents[1] / "failures.md"
GLOO_TIMEOUT_S = 2.0
LOCKSTEP_TIMEOUT_S = 2.0
# A rank that has not come back by then hangs.
_LIMIT_S = 20.0
SYSTEMS = ("gloo", "gloo, DETAIL", "lockstep")

_INTRODUCTION = """\
# What happens when ranks disagree, fail or never arrive

Each case runs on three ranks, and rank 1 is the culprit. The table shows what the *other two* ranks see on gloo, on
gloo with `TORCH_DISTRIBUTED_DEBUG=DETAIL`, and on a lockstep group. Times are in seconds from the moment when the
ranks diverge. All waits had a timeout of {timeout:g} s here, which "at the timeout" means; the default is 30 minutes.

An error can name six things: the culprit's **rank**, its **host and pid**, the **operation** and
its **number**, **what each passed** (shape, dtype, reduce op, root; or the exception), and the **lines of both**: where
in the user's code the waiting rank and the culprit were, or were last seen.

`make failures` generates this page from the cases in [failures/cases.py](failures/cases.py).
`tests/ranks/test_failure_table.py` checks that the lockstep group behaves as the table says.

"""

_NAMED = """
Collectives, sends and receives must agree in dtype and shape. Dimensions of size 1 do not count, and a flat tensor
matches any other with the same number of elements: a matrix may be broadcast into a vector, but `[2, 3]` does not match
`[3, 2]`. If a flat tensor and another one come from different lines, in a collective without a root, a branch may have
mixed up two tensors, so Lockstep warns. A message that is shorter than the tensor that receives it is a
`CollectiveMismatch`, where gloo and MPI silently fill the front of the tensor. Send the size first, or receive into
`tensor[:size]`. When a rank leaves cleanly, only messages with that rank end with `RankLost`; a rank that fails or dies
breaks the group.

Ranks that wait for each other, in several groups or for messages, are found within a second in the cases above, unless
one of them may still do what the others wait for. That is so if a rank:

- runs a thread of the script's own, or one that has communicated before;
- runs a thread that may call the script's functions: a timer, an event loop with tasks, a busy pool, a server;
- has another send or receive under way, or receives from any rank;
- waits with a limit, as `work.wait(timeout)` does.

Then they wait for the timeout.

PyTorch {torch}, on {cores} cores. Under `lockstep run` the launcher's failure summary begins with the root cause and
says where every rank was, for gloo and nccl too.
"""


@dataclass(frozen=True)
class Row:
    """How one case ended on one system.

    Attributes:
        case: its name.
        system: one of SYSTEMS.
        outcome: what the other ranks saw, in words.
        seconds: until the last of them knew; None if none of them ever did.
        named: what the messages of all of them say.
        culprit: how it ended on the culprit; empty where the case itself ends it.
    """

    case: str
    system: str
    outcome: str
    seconds: float | None
    named: list[str]
    culprit: str


def _run(case: Case, system: str, folder: str) -> list[Any]:
    """What every rank observed, or how it died."""
    options: dict[str, Any] = {"expect_errors": True, "timeout": _LIMIT_S}
    try:
        if system == "lockstep":
            deadline_s = LOCKSTEP_TIMEOUT_S
            return run_ranks(observe, WORLD_SIZE, case.name, folder, deadline_s, **options)
        is_detailed = system.endswith("DETAIL")
        return run_ranks(
            observe_on_gloo, WORLD_SIZE, case.name, folder, GLOO_TIMEOUT_S, is_detailed, init=False, **options
        )
    except TimeoutError:
        return [None] * WORLD_SIZE


def measure(case: Case, system: str) -> Row:
    """Run one case on one system."""
    with tempfile.TemporaryDirectory(prefix="failures-") as folder:
        outcomes = _run(case, system, folder)
        place = Path(folder, f"pid-{CULPRIT}")
        if not place.exists():  # Such as torch 2.13's DDP on gloo with DETAIL: a segmentation fault in its constructor.
            if not all(isinstance(outcome, WorkerDied) for outcome in outcomes):
                raise RuntimeError(f"{case.name} on {system} was not run: {outcomes}")
            return Row(case.name, system, "every process crashes first", None, [], "")
        culprit_pid = int(place.read_text())
    others = [outcome for rank, outcome in enumerate(outcomes) if rank != CULPRIT]
    raised = [outcome for outcome in others if isinstance(outcome, Observation) and outcome.error]
    # A rank that raised for a reason of its own may say less than the next; all of what both say counts.
    named = [
        what
        for what in Observation(0, 0, "", "", "", 0.0).names(case, 0)
        if raised and any(outcome.names(case, culprit_pid)[what] for outcome in raised)
    ]
    ends = sorted({_describe(outcome, case) for outcome in others})
    seconds = max((outcome.seconds for outcome in raised), default=None)
    culprit = outcomes[CULPRIT]
    is_ended = isinstance(culprit, WorkerDied) and (case.error == "RankLost" or case.name == "stopped")
    return Row(case.name, system, "; ".join(ends), seconds, named, "" if is_ended else _describe(culprit, case))


def _describe(outcome: Any, case: Case) -> str:
    if outcome is None:
        return f"still waits after {_LIMIT_S:g} s"
    if isinstance(outcome, WorkerDied):
        return "process aborts"
    if not isinstance(outcome, Observation):
        return f"raises {type(outcome).__name__}"
    if not outcome.error:
        return "continues, with wrong data" if case.error == "CollectiveMismatch" else "continues"
    return f"raises {outcome.error.rpartition('.')[2]}"


def render(document: dict[str, Any]) -> str:
    """The page of stored results."""
    rows = {(row["case"], row["system"]): Row(**row) for row in document["rows"]}
    lines = [_INTRODUCTION.format(timeout=document["timeout_s"])]
    lines.append(f"| case | {' | '.join(SYSTEMS)} |\n|---|{'---|' * len(SYSTEMS)}\n")
    for case in CASES:
        cells = [_cell(rows[case.name, system], document["timeout_s"]) for system in SYSTEMS]
        lines.append(f"| {case.title} | {' | '.join(cells)} |\n")
    lines.append(_NAMED.format(torch=document["torch"], cores=document["cores"]))
    return "".join(lines)


def _cell(row: Row, timeout_s: float) -> str:
    everything = list(Observation(0, 0, "", "", "", 0.0).names(CASES[0], 0))
    text = row.outcome
    if row.seconds is not None:
        when = "at the timeout" if row.seconds > 0.8 * timeout_s else f"{max(row.seconds, 0.01):.2f} s"
        names = "everything" if row.named == everything else ", ".join(row.named) or "nothing"
        text += f" ({when}); names {names}"
    if row.culprit and row.culprit != row.outcome:
        text += f". The culprit: {row.culprit}"
    return text


def load() -> dict[str, Any]:
    """The stored results."""
    document: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return document


def main(arguments: Sequence[str]) -> int:
    """Measure and write both files; with `page`, only make the page again."""
    if list(arguments) != ["page"]:
        rows = []
        for case in CASES:
            for system in SYSTEMS:
                rows.append(measure(case, system))
                print(f"{case.name}, {system}: {rows[-1]}", file=sys.stderr)
        document = {
            "torch": torch.__version__,
            "cores": len(os.sched_getaffinity(0)),
            "timeout_s": GLOO_TIMEOUT_S,
            "rows": [asdict(row) for row in rows],
        }
        RESULTS.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(render(load()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
