"""The program behind `make gpu` on a machine without a GPU: what it starts, makes of it and writes."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.testing import limit_s

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "gpu"))

import gpu_jobs  # noqa: E402
import gpu_page  # noqa: E402
import gpu_run  # noqa: E402
from gpu_jobs import Outcome, judge, run_job  # noqa: E402
from gpu_table import TABLE, Check  # noqa: E402

PLAIN = Check("plain", "", "some:thing")
BREAKING = replace(PLAIN, breaks=True, says=(r"rank \d was killed",))


@pytest.mark.parametrize("check", TABLE, ids=lambda check: check.name)
def test_every_check_names_a_function(check: Check) -> None:
    module, _, function = check.function.partition(":")
    assert callable(getattr(importlib.import_module(module), function))
    assert check.why


def test_names_are_unique_and_measures_come_last() -> None:
    assert len({check.name for check in TABLE}) == len(TABLE)
    assert [check.alone for check in TABLE] == sorted(check.alone for check in TABLE)


@pytest.mark.parametrize(
    ("check", "code", "text", "kind", "why"),
    [
        (PLAIN, 0, 'noise\nRESULT {"done": true, "ratio": 1.5}\n', "passed", ""),
        (PLAIN, 0, '[0] RESULT {"done": true}', "passed", ""),
        (PLAIN, 0, "noise", "failed", "no result"),
        (PLAIN, 1, 'RESULT {"done": true}', "failed", "exit code 1"),
        (PLAIN, None, "noise", "timed out", "not over after 3 s"),
        (PLAIN, 0, 'RESULT {"done": true, "skipped": "no triton"}', "skipped", "no triton"),
        (BREAKING, 1, "rank 1 was killed", "passed", ""),
        (BREAKING, 0, "rank 1 was killed", "failed", "exit code 0, though a rank broke"),
        (BREAKING, 1, "noise", "failed", "does not say"),
    ],
)
def test_judgement(check: Check, code: int | None, text: str, kind: str, why: str) -> None:
    outcome = judge(check, code, text, 3.0)
    assert outcome.kind == kind
    assert outcome.why.startswith(why)
    assert bool(outcome.tail) == (kind in ("failed", "timed out"))
    assert "done" not in outcome.facts


def start(monkeypatch: pytest.MonkeyPatch, code: str, limit_s: float) -> Outcome:
    monkeypatch.setattr(gpu_jobs, "command_of", lambda *_: [sys.executable, "-c", code])
    return run_job(PLAIN, "cpu", limit_s, sys.executable, ROOT)


def test_a_job_that_hangs_is_ended_with_all_it_has_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    child = "import time; time.sleep(600)"
    code = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True)\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        "print('waiting', flush=True)\n"
        "child.wait()\n"
    )
    outcome = start(monkeypatch, code, limit_s(3))
    assert (outcome.kind, outcome.tail) == ("timed out", "waiting\n")
    pid = int((tmp_path / "pid").read_text())
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return  # it is gone
    assert "Z" in stat.rpartition(")")[2]


def test_a_job_that_fails_leaves_the_end_of_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = start(monkeypatch, "raise SystemExit('no such kernel')", 60.0)
    assert (outcome.kind, outcome.why) == ("failed", "exit code 1; no result")
    assert outcome.tail == "no such kernel\n"


class Counting(gpu_run.Session):
    """Notes what would be run."""

    def __init__(self, device: str, budget_s: float) -> None:
        super().__init__(device, budget_s, sys.executable)
        self.limits: dict[str, float] = {}


def test_what_the_time_does_not_suffice_for_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Counting("cuda", 100.0)

    def pretend(check: Check, device: str, limit_s: float, *_: Any) -> Outcome:
        session.limits[check.name] = limit_s
        session._ends_s -= 40
        return Outcome("passed", 40.0)

    monkeypatch.setattr(gpu_run, "run_job", pretend)
    checks = [
        *(replace(PLAIN, name=name, limit_s=60) for name in ("first", "second", "third")),
        replace(PLAIN, name="measure", limit_s=30, alone=True),
    ]
    gpu_run.run_all(session, checks, 1)
    # Of 100 s 30 are kept for the measure: 70 for the first, which takes 40, 30 for the second; none for the third.
    assert {name: round(limit) for name, limit in session.limits.items()} == {"first": 60, "second": 30, "measure": 20}
    written = gpu_run.report(session, checks, {"name": "H100"}, 100.0)
    assert [entry["outcome"] for entry in written["checks"]] == ["passed", "passed", "skipped", "passed"]
    assert written["checks"][2]["reason"] == "the time was spent"
    assert written["environment"]["name"] == "H100"


def test_a_check_that_the_end_of_the_time_cuts_off_has_not_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = iter(["timed out", "failed", "passed", "failed"])
    monkeypatch.setattr(gpu_run, "run_job", lambda _check, _device, limit_s, *_: Outcome(next(kinds), limit_s * 0.9))
    session = Counting("cuda", 50.0)
    for name in ("cut", "cut, too", "passed"):
        session.run(replace(PLAIN, name=name, limit_s=60))
    session.run(replace(PLAIN, name="failed", limit_s=20))
    found = {name: (outcome.kind, outcome.why) for name, outcome in session.outcomes.items()}
    cut = ("skipped", "the time was spent")
    assert found == {"cut": cut, "cut, too": cut, "passed": ("passed", ""), "failed": ("failed", "")}


def run_program(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "tests/gpu/gpu_run.py", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=limit_s(300), check=False
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has GPUs")
def test_without_a_gpu_it_says_so() -> None:
    done = run_program()
    assert done.returncode == 3
    assert "torch sees no GPU here" in done.stderr


def test_checks_run_on_the_cpu(tmp_path: Path) -> None:
    """Real jobs: one rank, two ranks, a rank that is killed, and one that needs a GPU."""
    output = tmp_path / "gpu.json"
    words = ["mixed-one-rank", "staged-verbs", "killed-staged", "cuda-graph"]
    done = run_program(
        "--device", "cpu", "--at-once", "2", "--budget", "280", "--output", str(output), "--only", *words
    )
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads(output.read_text())
    outcomes = {entry["name"]: entry["outcome"] for entry in written["checks"]}
    assert outcomes == {
        "staged-verbs": "passed",
        "mixed-one-rank": "skipped",
        "killed-staged": "passed",
        "cuda-graph": "skipped",
    }
    assert written["environment"]["torch"] == torch.__version__
    assert next(entry for entry in written["checks"] if entry["name"] == "staged-verbs")["facts"]["verbs"] == 23


def test_the_check_of_the_imagenet_program_runs_on_the_cpu(tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    done = run_program("--device", "cpu", "--budget", "280", "--output", str(output), "--only", "imagenet")
    (entry,) = json.loads(output.read_text())["checks"]
    assert (entry["name"], entry["outcome"]) == ("imagenet", "passed"), done.stdout + done.stderr
    assert len(entry["facts"]["losses"]) == 4


def test_published_page_is_made_from_the_published_results() -> None:
    results = gpu_run.RESULTS
    assert results.with_suffix(".md").read_text() == gpu_page.render(json.loads(results.read_text()))


def test_page_names_what_failed_and_why() -> None:
    """By the last error of what was printed, without the rank before it; by the reason where none was."""
    entries = [
        {
            "name": "a",
            "why": "one",
            "outcome": "failed",
            "reason": "exit code 1",
            "tail": "[0] [rank0]: ValueError: bad\n",
        },
        {"name": "b", "why": "two", "outcome": "timed out", "reason": "60 s", "tail": "nothing"},
        {"name": "measure-c", "why": "three", "outcome": "passed", "facts": {"ratio": 1.23456, "samples": [1]}},
        {"name": "d", "why": "four", "outcome": "skipped", "reason": "no time"},
    ]
    environment = {"name": "GPU", "devices": 1, "torch": "2.11", "date": "2026-11-26T11", "commit": "0123456789abc"}
    page = gpu_page.render({"environment": environment, "checks": entries})
    assert (
        "**GPU (1 GPU), torch 2.11, 2026-11-26, commit 0123456789: 1 passed, 1 failed, 1 timed out, 1 skipped.**"
        in page
    )
    assert "- `a`, one: `ValueError: bad`\n- `b`, two: `60 s`" in page
    assert "- Three: ratio 1.235." in page
    assert "| `d` | four | skipped: no time |" in page


def test_an_update_keeps_what_other_runs_have_found() -> None:
    def run(name: str, *entries: dict[str, str]) -> dict[str, Any]:
        environment = {"name": name, "devices": 1, "torch": "2.11", "date": "2026-11-27T08:00", "commit": 40 * "a"}
        return {"environment": environment, "checks": list(entries)}

    first, second, third = (check.name for check in TABLE[:3])
    earlier = run(
        "old GPU",
        {"name": first, "outcome": "failed", "tail": "ValueError: one"},
        {"name": second, "outcome": "passed"},
        {"name": "of a table before", "outcome": "passed"},
    )
    latest = run(
        "new GPU",
        {"name": third, "outcome": "passed"},
        {"name": first, "outcome": "passed"},
        {"name": second, "outcome": "skipped", "reason": "the time was spent"},
    )
    page = gpu_page.render(gpu_run.update(earlier, latest))
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == [first, second, third]
    assert ["old GPU" in row for row in rows] == [False, True, False]
    assert "3 passed." in page
