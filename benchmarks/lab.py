"""Everything worth knowing of a larger machine, in the few minutes that somebody has it: `make lab`.

    python -m benchmarks.lab                     at most eight minutes; writes benchmarks/results/lab/<machine>/
    python -m benchmarks.lab --budget 200        less of everything
    python -m benchmarks.lab --list              what would run here, and for how long

First the GPU checks (`make gpu`), if torch sees a GPU; then, on the cores, the cases that depend on how many there are,
each beside its peers: all_reduce, a step where ranks have one thread or many, the sharded step, and what waiting ranks
take from one that computes. Needs the checkout and a Python with torch and numpy; nothing is installed, and no picture
drawn. A case that fails, or for which no time is left, is a line at the end and an exit code of 1; the others run.
"""

from __future__ import annotations

import argparse
import importlib
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import REPOSITORY, RESULTS, report
from lockstep.bench.harness import Budget
from lockstep.bench.ranks import RankFailed
from lockstep.bench.results import Environment, Result

__all__ = ["Part", "main", "parts_for"]

KIB, MIB = 1024, 1024 * 1024
_GPU_SHARE = 0.5  # of the time, where there is a GPU
_GPU_RUN = REPOSITORY / "tests" / "gpu" / "gpu_run.py"
_STARTING_S = 12.0  # the ranks of one layout: processes, imports, the first group
_SLACK = 2.0  # calibration and untimed calls, for each second of timed rounds


@dataclass(frozen=True)
class Part:
    """A benchmark case on this machine.

    Attributes:
        case: its name.
        weight: of its share of the time.
        starts: how often it starts ranks.
        settings: how many configurations it measures.
        plan: makes the case's plan, given the seconds of timed rounds for each configuration.
    """

    case: str
    weight: float
    starts: int
    settings: int
    plan: Callable[[float], Any]

    def budget_s(self, share_s: float) -> float:
        """Seconds of timed rounds for one configuration, out of the seconds for the whole part; below 0 if too few."""
        return (share_s - self.starts * _STARTING_S) / (self.settings * _SLACK)


def parts_for(cores: int) -> list[Part]:
    """What runs on so many cores: 2, 4, 8 ranks of one thread as far as they have one each, and 2 ranks of many."""
    worlds = [count for count in (2, 4, 8) if count <= max(cores, 2)]
    layouts = [*((count, 1) for count in worlds), (2, max(2, cores // 2))]
    sizes = (4, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 25 * MIB)

    def all_reduce(seconds: float) -> Any:
        case = importlib.import_module("benchmarks.case_all_reduce")
        return case.Plan(tuple(worlds), sizes, Budget(seconds=seconds, sample_s=0.01, sweeps=1))

    def threads(seconds: float) -> Any:
        case = importlib.import_module("benchmarks.case_threads")
        budget = Budget(seconds=seconds, sample_s=0.05, min_rounds=4, max_rounds=40, sweeps=1)
        models = tuple(importlib.import_module("benchmarks.case_train_step").MODELS)
        return case.Plan(tuple(layouts), models, budget, limit_s=len(models) * seconds * _SLACK)

    def contention(seconds: float) -> Any:
        case = importlib.import_module("benchmarks.case_contention")
        return case.Plan({}, {}, Budget(seconds=seconds, sample_s=0.02), 0.5, {worlds[-1]: 4}, turns=1)

    def sharded(seconds: float) -> Any:
        case = importlib.import_module("benchmarks.case_sharded")
        budget = Budget(seconds=seconds, sample_s=0.1, min_rounds=4, max_rounds=40, sweeps=1)
        cases = tuple((count, "mlp_10m", "adam") for count in worlds)
        return case.Plan(cases, budget, ((worlds[-1], "mlp_50m"),))

    return [
        Part("all_reduce", 1.0, len(worlds), len(worlds) * len(sizes), all_reduce),
        Part("threads", 1.6, len(layouts), 3 * len(layouts), threads),
        Part("sharded", 1.2, len(worlds) + 2, len(worlds), sharded),
        Part("contention", 0.5, 4, 1, contention),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what fits into the budget; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lab", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budget", type=float, default=470, metavar="S", help="seconds for all of it")
    parser.add_argument("--only", nargs="+", default=[], metavar="CASE", help="these alone; `gpu` is the GPU checks")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/lab/<machine>")
    parser.add_argument("--list", action="store_true", help="say what would run, and run nothing")
    options = parser.parse_args(arguments)
    environment, gpu = Environment.read(), _name_of_gpu()
    parts = [part for part in parts_for(environment.cores) if not options.only or part.case in options.only]
    has_gpu = bool(gpu) and (not options.only or "gpu" in options.only)
    machine = _slug(f"{environment.cores} cores {environment.cpu} {gpu}")
    output = options.output or RESULTS / "lab" / machine
    print(f"{environment.summary()}; {gpu or 'no GPU'}; results in {output}", file=sys.stderr, flush=True)
    ends_s = time.monotonic() + options.budget
    problems: list[str] = []
    if has_gpu:
        budget_s = options.budget * (_GPU_SHARE if parts else 1.0)
        if options.list:
            print(f"{'gpu':12} {budget_s:4.0f} s")
        else:
            problems += _run_gpu(budget_s, output)
    for position, part in enumerate(parts):
        share_s = (ends_s - time.monotonic()) * part.weight / sum(each.weight for each in parts[position:])
        seconds = part.budget_s(share_s)
        if options.list:
            ends_s -= share_s
            print(f"{part.case:12} {share_s:4.0f} s, {seconds:.1f} s for each of {part.settings}")
        elif seconds <= 0:
            problems.append(f"{part.case}: no time was left")
        else:
            problems += _run_part(part, seconds, output)
    for problem in problems:
        print(f"NOT MEASURED: {problem}", file=sys.stderr)
    return int(bool(problems))


def _run_part(part: Part, seconds: float, output: Path) -> list[str]:
    """Run a case and store it with its table; what went wrong, if anything did."""
    print(f"{part.case}, {seconds:.1f} s for each of {part.settings}", file=sys.stderr, flush=True)
    try:
        result: Result = importlib.import_module(f"benchmarks.case_{part.case}").run(part.plan(seconds))
    except (RankFailed, OSError) as error:
        return [f"{part.case}: {error}"]
    path = result.save(output)
    path.with_suffix(".md").write_text(report.render(result, with_picture=False), encoding="utf-8")
    for verdict in report.verdicts(result):
        print(f"  {'met' if verdict.met else 'MISSED'}: {verdict.target}: {verdict.measured}", flush=True)
    return []


def _run_gpu(budget_s: float, output: Path) -> list[str]:
    """Run the GPU checks in a process of their own; what went wrong, if anything did."""
    output.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(_GPU_RUN), "--budget", f"{budget_s:.0f}", "--output", str(output / "gpu.json")]
    code = subprocess.run(command, check=False, cwd=REPOSITORY).returncode
    return [f"gpu: exit code {code}; see {output / 'gpu.md'}"] if code else []


def _name_of_gpu() -> str:
    """What torch calls the first GPU; asked in a process of its own, as this one must hold no memory of it."""
    ask = "import torch; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else '')"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _slug(text: str) -> str:
    """A folder's name: small letters, digits and hyphens.

    >>> _slug("16 cores Intel(R) Xeon(R) Platinum 8480+ NVIDIA H100 80GB HBM3")
    '16-cores-intel-xeon-platinum-8480-nvidia-h100-80gb-hbm3'
    """
    return "-".join(re.findall(r"[a-z0-9]+", re.sub(r"\((r|tm)\)", "", text.lower())))


if __name__ == "__main__":
    sys.exit(main())
