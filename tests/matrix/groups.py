"""The groups of tests that every release of torch runs, and how one of them is run."""

from __future__ import annotations

import math
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

__all__ = ["ALL", "SHORT", "Choice", "Counts", "Group", "read_junit", "run"]

_LIMIT_S = 3000.0
_SCRIPT_LIMIT_S = 300.0
_SHOWN_LINES = 60


@dataclass(frozen=True)
class Counts:
    """How many tests ended how."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def __str__(self) -> str:
        return f"{self.passed}/{self.failed}/{self.skipped}"


@dataclass(frozen=True)
class Group:
    """A column of the table.

    Attributes:
        name: its heading.
        arguments: of pytest; none for the main job.
    """

    name: str
    arguments: tuple[str, ...] = ()


Choice = Sequence[Group]

MAIN_JOB = Group("train.py")
_CONFORMANCE = "tests/ranks/test_conformance.py"
_NAMES = ("tests/ranks/test_torch_names.py", "tests/ranks/test_entry_points.py")

ALL: Choice = (
    MAIN_JOB,
    Group("conformance", (_CONFORMANCE, "-k", "lockstep-2 or lockstep-3")),
    Group("DDP", ("tests/ranks", "-k", "test_ddp or test_batchnorm or test_powersgd")),
    Group("parity", ("tests/parity",)),
    Group("launch", ("tests/launch",)),
    Group("front doors", ("tests/compat",)),
    Group("torch's names", _NAMES),
)
SHORT: Choice = (
    MAIN_JOB,
    Group("conformance", (_CONFORMANCE, "-k", "lockstep-2")),
    Group("DDP", ("tests/ranks/test_ddp.py",)),
    Group("parity", ("tests/parity/test_ddp_parity.py",)),
    Group("launch", ("tests/launch/test_launch_run.py", "tests/launch/test_launch_torch.py")),
    Group("front doors", ("tests/compat/test_horovod_ops.py",)),
    Group("torch's names", _NAMES),
)


def run(group: Group, python: Path, root: Path, logs: Path) -> Counts:
    """Run a group of tests with an interpreter; what failed is printed, and all that was written is kept.

    Args:
        group: which.
        python: of the environment.
        root: of this project.
        logs: folder for what the tests write.
    """
    logs.mkdir(parents=True, exist_ok=True)
    # Ranks of tests are processes of their own, so that this checkout comes first for them, too.
    environment = {**os.environ, "PYTHONPATH": str(root / "src"), **_folders(logs.parent.parent / "var")}
    if group is MAIN_JOB:
        return _run_main_job(python, root, environment)
    name = re.sub(r"\W+", "-", group.name)
    junit, log = logs / f"{name}.xml", logs / f"{name}.log"
    junit.unlink(missing_ok=True)
    command = [str(python), "-m", "pytest", *group.arguments, f"--junitxml={junit}", "-ra", "--color=no"]
    with log.open("w") as file:
        try:
            subprocess.run(command, cwd=root, env=environment, stdout=file, stderr=file, timeout=_LIMIT_S)
        except subprocess.TimeoutExpired:
            file.write(f"\nstopped after {_LIMIT_S:g} s\n")
    counts = read_junit(junit.read_text()) if junit.exists() else Counts(failed=1)
    if counts.failed or not counts.passed:
        print("\n".join(log.read_text().splitlines()[-_SHOWN_LINES:]), flush=True)
    # Nothing found is a failure, too: a module may have another name by now.
    return counts if counts.passed or counts.failed else Counts(failed=1, skipped=counts.skipped)


def _folders(var: Path) -> dict[str, str]:
    """So that nothing is written outside of the clone."""
    folders = {
        "MPLCONFIGDIR": var / "matplotlib",
        "XDG_CACHE_HOME": var / "cache",
        "PYTEST_DEBUG_TEMPROOT": var / "tmp",
    }
    for folder in folders.values():
        folder.mkdir(parents=True, exist_ok=True)
    return {name: str(folder) for name, folder in folders.items()}


def read_junit(text: str) -> Counts:
    """The counts of one report of pytest's."""
    (suite,) = ElementTree.fromstring(text).iter("testsuite")
    number = {name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
    failed = number["failures"] + number["errors"]
    return Counts(max(number["tests"] - failed - number["skipped"], 0), failed, number["skipped"])


def _run_main_job(python: Path, root: Path, environment: dict[str, str]) -> Counts:
    """examples/train.py at 1, 2 and 3 ranks, whose losses must be the same but for rounding."""
    passed, expected = 0, None
    for num_ranks in (1, 2, 3):
        command = [str(python), "-m", "lockstep", "run", "--nproc", str(num_ranks), "examples/train.py"]
        try:
            done = subprocess.run(
                command, cwd=root, env=environment, capture_output=True, text=True, timeout=_SCRIPT_LIMIT_S
            )
        except subprocess.TimeoutExpired:
            print(f"{' '.join(command)} took more than {_SCRIPT_LIMIT_S:g} s", flush=True)
            continue
        losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", done.stdout)]
        expected = expected or losses
        # float32 sums in another order: the last of 24 bits, over 40 steps.
        same = len(losses) == 5 and all(
            math.isclose(*pair, rel_tol=1e-6) for pair in zip(losses, expected, strict=True)
        )
        if done.returncode == 0 and same:
            passed += 1
        else:
            print(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}{done.stderr}", flush=True)
    return Counts(passed, 3 - passed)
