"""Everything that CUDA needs, on one GPU, in at most eight minutes: `make gpu`.

    python tests/gpu/gpu_run.py                       all checks and measures; writes benchmarks/results/gpu.*
    python tests/gpu/gpu_run.py --only engines        those whose names contain a word
    python tests/gpu/gpu_run.py --only nccl --update  those, into the results of an earlier run
    python tests/gpu/gpu_run.py --list                what there is, in the order of its importance

Needs the checkout, a Python with torch, and nothing that would have to be installed. Each check is a job of its own
with a deadline of its own (`gpu_jobs.py`), so that one that fails, hangs or crashes hides no other; the end of what it
printed is kept beside its outcome. Checks run several at a time, measures alone and after them. What the time does
not suffice for is skipped, from the end of the table (`gpu_table.py`), and said. Exits 1 if a check failed, 3 without
a GPU.

With `--device cpu` the checks that make sense there run on gloo: for tests of this program, not of the GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from gpu_jobs import Outcome, run_job
from gpu_page import render
from gpu_table import TABLE, Check

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "gpu.json"
_NO_GPU = 3
_NO_TIME = "the time was spent"
_SHORTEST_S = 10.0  # what is not even left that long is not begun

_DESCRIBE = """
import json, torch
found = {"torch": torch.__version__, "cuda": torch.version.cuda, "devices": torch.cuda.device_count()}
if torch.cuda.is_available():
    properties = torch.cuda.get_device_properties(0)
    found |= {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "capability": ".".join(map(str, torch.cuda.get_device_capability(0))),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None,
        "cudnn": torch.backends.cudnn.version(),
    }
print(json.dumps(found))
"""


def describe_device(python: str) -> dict[str, Any]:
    """What torch says of the GPU, asked in a process of its own: this one must hold no memory of it.

    Raises:
        SystemExit: torch cannot be asked.
    """
    done = subprocess.run([python, "-c", _DESCRIBE], capture_output=True, text=True, timeout=120, check=False)
    try:
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        raise SystemExit(f"{python} cannot say what GPU there is:\n{done.stderr[-2000:]}") from None
    return found


def _output_of(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False, cwd=ROOT)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def describe_machine(device: dict[str, Any]) -> dict[str, Any]:
    """Where and of what the results are."""
    return {
        "commit": _output_of("git", "rev-parse", "HEAD") or "unknown",
        "dirty": bool(_output_of("git", "status", "--porcelain", "--untracked-files=no")),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cores": len(os.sched_getaffinity(0)),
        "driver": _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0],
        **device,
    }


class Session:
    """One run of the table.

    Args:
        device: "cuda" or "cpu".
        budget_s: seconds for all of it.
        python: the interpreter of the jobs.
    """

    def __init__(self, device: str, budget_s: float, python: str) -> None:
        self.device = device
        self.python = python
        self.outcomes: dict[str, Outcome] = {}
        self._ends_s = time.monotonic() + budget_s

    def left_s(self) -> float:
        """Seconds that are left of the budget."""
        return self._ends_s - time.monotonic()

    def run(self, check: Check, reserve_s: float = 0.0) -> None:
        """Run one check, unless it cannot be or there is no time for it.

        Args:
            check: of the table.
            reserve_s: seconds of the budget that it must leave to others.
        """
        available_s = self.left_s() - reserve_s
        if self.device == "cpu" and not check.on_cpu:
            outcome = Outcome("skipped", why="needs a GPU")
        elif available_s < _SHORTEST_S:
            outcome = Outcome("skipped", why=_NO_TIME)
        else:
            limit_s = min(check.limit_s, available_s)
            outcome = run_job(check, self.device, limit_s, self.python, ROOT)
            if limit_s < check.limit_s and outcome.kind != "passed" and outcome.seconds > limit_s / 2:
                outcome = Outcome("skipped", why=_NO_TIME, seconds=outcome.seconds)  # nobody knows how it would end
        self.outcomes[check.name] = outcome
        print(f"{outcome.kind:>9}  {outcome.seconds:6.1f} s  {check.name}  {_facts_in_short(outcome)}", flush=True)
        if outcome.kind in ("failed", "timed out"):
            print("\n".join(f"           | {line}" for line in outcome.tail.splitlines()[-12:]), flush=True)


def _facts_in_short(outcome: Outcome) -> str:
    if outcome.why:
        return outcome.why
    shown = {name: value for name, value in outcome.facts.items() if isinstance(value, int | float | str)}
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in shown.items()
    )


def run_all(session: Session, checks: Sequence[Check], at_once: int) -> None:
    """Checks several at a time, measures alone. The most important first."""
    measures = [check for check in checks if check.alone]
    reserve_s = min(sum(check.limit_s for check in measures), session.left_s() / 2)
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(lambda check: session.run(check, reserve_s), (check for check in checks if not check.alone)))
    for check in measures:
        session.run(check)


def report(session: Session, checks: Sequence[Check], device: dict[str, Any], seconds: float) -> dict[str, Any]:
    """What is written down: every check of the table, in its order, those that were skipped with the reason."""
    return {
        "schema": 1,
        "environment": describe_machine(device),
        "device_kind": session.device,
        "seconds": round(seconds, 1),
        "checks": [
            {"name": check.name, "why": check.why, **session.outcomes[check.name].as_json()} for check in checks
        ],
    }


def update(earlier: dict[str, Any], latest: dict[str, Any]) -> dict[str, Any]:
    """The latest results, and of checks that had no time or were left out those of before, with where they are from."""
    found = {entry["name"]: entry for entry in latest["checks"] if entry.get("reason") != _NO_TIME}
    where = {name: earlier["environment"].get(name) for name in ("name", "torch", "date", "commit")}
    for entry in earlier["checks"]:
        found.setdefault(entry["name"], {"environment": where, **entry})
    why = {check.name: check.why for check in TABLE}
    return {**latest, "checks": [{**found[name], "why": why[name]} for name in why if name in found]}


def _summary(session: Session) -> str:
    kinds = [outcome.kind for outcome in session.outcomes.values()]
    return ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(sorted(kinds)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the table, write the results. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=470, metavar="S", help="seconds for all of it")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="checks whose names contain one of these")
    parser.add_argument("--at-once", type=int, default=min(4, max(1, len(os.sched_getaffinity(0)) // 3)))
    parser.add_argument("--output", type=Path, help=f"default {RESULTS.relative_to(ROOT)}, if nothing was left out")
    parser.add_argument("--update", action="store_true", help="keep what the results of before have of other checks")
    parser.add_argument("--list", action="store_true", help="say what there is, and run nothing")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    checks = [check for check in TABLE if not options.only or any(word in check.name for word in options.only)]
    if options.list:
        print("\n".join(f"{check.name:28} {check.why}" for check in checks))
        return 0
    device = describe_device(sys.executable)
    if options.device == "cuda" and not device["devices"]:
        print("make gpu: torch sees no GPU here, so nothing was run and nothing is known", file=sys.stderr)
        return _NO_GPU
    started_s = time.monotonic()
    session = Session(options.device, options.budget, sys.executable)
    print(
        f"{device.get('name', 'CPU')}, torch {device['torch']}, {len(checks)} checks, {options.at_once} at once",
        flush=True,
    )
    run_all(session, checks, options.at_once)
    seconds = time.monotonic() - started_s
    is_whole = options.device == "cuda" and (options.update or not options.only)
    output = options.output or (RESULTS if is_whole else None)
    print(f"{_summary(session)} in {seconds:.0f} s{f'; {output}' if output else ''}")
    if output is not None:
        written = report(session, checks, device, seconds)
        if options.update and output.exists():
            written = update(json.loads(output.read_text()), written)
        output.write_text(json.dumps(written, indent=1) + "\n")
        output.with_suffix(".md").write_text(render(written))
    return int(any(outcome.kind in ("failed", "timed out") for outcome in session.outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
