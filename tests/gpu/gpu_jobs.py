"""One check as a job of its own: how it is started, when it is over, and what is left of it.

The processes of a job carry a mark in their environment. When its time is up, or it is over, all that carry the mark
are killed, whoever started them and whatever session they are in.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_table import Check

__all__ = ["Outcome", "command_of", "run_job"]

_MARK = "LOCKSTEP_GPU_JOB"
_RESULT = re.compile(r"RESULT (\{.*\})$", re.MULTILINE)
_TAIL_CHARACTERS = 6000
_DUMP_BEFORE_S = 4.0  # so long before its deadline a rank says where it stands


@dataclass(frozen=True)
class Outcome:
    """What became of a check.

    Attributes:
        kind: "passed", "failed", "timed out" or "skipped".
        seconds: it took.
        why: it was skipped, or is taken for failed.
        facts: what it found, of rank 0.
        tail: the end of what it printed, if it did not pass.
    """

    kind: str
    seconds: float = 0.0
    why: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    tail: str = ""

    def as_json(self) -> dict[str, Any]:
        """Without what is empty."""
        named = {
            "outcome": self.kind,
            "seconds": self.seconds,
            "reason": self.why,
            "facts": self.facts,
            "tail": self.tail,
        }
        return {name: value for name, value in named.items() if value not in ("", {})}


def command_of(check: Check, device: str, limit_s: float, python: str, root: Path) -> list[str]:
    """The command line of a job."""
    script = str(root / "tests" / "gpu" / "gpu_one.py")
    launchers = {
        "run": [python, "-m", "lockstep", "run", "--nproc", str(check.nproc)],
        "torchrun": [python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(check.nproc)],
        "python": [python],
    }
    dump_s = max(limit_s - _DUMP_BEFORE_S, limit_s / 2)
    return [*launchers[check.start], script, check.name, "--device", device, "--dump-after", f"{dump_s:.1f}"]


def _environment(check: Check, mark: str, root: Path) -> dict[str, str]:
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("LOCKSTEP_", "TORCH_NCCL"))}
    path = os.pathsep.join(filter(None, [str(root / "src"), outside.get("PYTHONPATH")]))
    settings = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "2", "NCCL_DEBUG": "WARN", _MARK: mark}
    return outside | settings | dict(check.variables)


def _marked(mark: str) -> list[int]:
    """Processes that carry the mark."""
    wanted = f"{_MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:  # it is gone, or not ours
                continue
    return found


def _sweep(mark: str) -> None:
    for _ in range(20):
        pids = _marked(mark)
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def run_job(check: Check, device: str, limit_s: float, python: str, root: Path) -> Outcome:
    """Run a check to its end, or to its deadline."""
    mark = secrets.token_hex(8)
    started_s = time.monotonic()
    code: int | None = None
    with tempfile.TemporaryFile("w+b") as output:
        try:
            process = subprocess.Popen(
                command_of(check, device, limit_s, python, root),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_environment(check, mark, root),
                cwd=root,
                start_new_session=True,
            )
            try:
                code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                _sweep(mark)
                process.wait()
        finally:
            _sweep(mark)
        seconds = time.monotonic() - started_s
        output.seek(0)
        text = output.read().decode(errors="replace").replace(f"{root}/", "")  # results are published
    return judge(check, code, text, round(seconds, 2))


def judge(check: Check, code: int | None, text: str, seconds: float) -> Outcome:
    """What became of a job.

    Args:
        check: which.
        code: its exit code; None if its time was up.
        text: what it printed.
        seconds: it took.
    """
    facts: dict[str, Any] = {}
    for found in _RESULT.findall(text):
        facts.update(json.loads(found))
    is_done = facts.pop("done", False)
    tail = text[-_TAIL_CHARACTERS:]
    skipped = facts.pop("skipped", None)
    if skipped is not None:
        return Outcome("skipped", seconds, str(skipped), facts)
    if code is None:
        return Outcome("timed out", seconds, f"not over after {seconds:.0f} s", facts, tail)
    problems = _problems(check, code, text, is_done)
    if problems:
        return Outcome("failed", seconds, "; ".join(problems), facts, tail)
    return Outcome("passed", seconds, facts=facts)


def _problems(check: Check, code: int, text: str, is_done: bool) -> Sequence[str]:
    problems = [f"does not say {pattern!r}" for pattern in check.says if not re.search(pattern, text)]
    if check.breaks:
        problems += ["exit code 0, though a rank broke"] if code == 0 else []
    else:
        problems += [f"exit code {code}"] if code else []
        problems += ["no result"] if not is_done else []
    return problems


if __name__ == "__main__":
    sys.exit("this is a part of gpu_run.py")
