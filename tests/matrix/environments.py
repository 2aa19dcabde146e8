"""Virtual environments, one for each release of torch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "FOLDER",
    "RELEASES",
    "Release",
    "Unavailable",
    "constraints_for",
    "make",
    "newer_than_pinned",
    "python_of",
]

FOLDER = Path(__file__).parents[2] / ".venv-matrix"


@dataclass(frozen=True)
class Release:
    """A release of torch and the Python it is tried with.

    Attributes:
        name: how the table and the command line call it.
        torch: what pip installs.
        python: major and minor number.
    """

    name: str
    torch: str
    python: str


# From the oldest supported to the newest there is; lockstep.comm.torch_version has both ends, too.
RELEASES = (
    Release("2.6", "2.6.0", "3.10"),
    Release("2.11", "2.11.0", "3.12"),
    Release("2.13", "2.13.0", "3.11"),
    Release("2.14", "2.14.1", "3.13"),
    Release("2.15", "2.15.0", "3.11"),
)


class Unavailable(Exception):
    """A release that cannot be run here; says why."""


def python_of(environment: Path) -> Path:
    """The interpreter of a virtual environment."""
    return environment / "bin" / "python"


def constraints_for(text: str, torch: str) -> str:
    """constraints.txt for another torch: without the pinned one and what comes with it, which differs by release."""
    kept = []
    skipping = False
    for line in text.splitlines():
        if line.startswith("# PyTorch"):
            skipping = True
        elif not line.strip():
            skipping = False
        if not skipping:
            kept.append(line)
    return "\n".join([*kept, "", f"torch=={torch}", ""])


def newer_than_pinned(root: Path) -> list[str]:
    """Names of the releases beyond that of constraints.txt, the newest first."""
    text = (root / "constraints.txt").read_text()
    (pinned,) = (number for number, each in enumerate(RELEASES) if f"torch=={each.torch}\n" in text)
    return [each.name for each in reversed(RELEASES[pinned + 1 :])]


def make(release: Release, root: Path, any_python: bool = False) -> Path:
    """Make an environment with that torch, this project and what its tests need; returns its folder.

    Args:
        release: what to install.
        root: of this project.
        any_python: take the running Python where the release's own is missing.

    Raises:
        Unavailable: no such Python here, or the installation failed.
    """
    python = _find_python(release.python) or (sys.executable if any_python else None)
    if python is None:
        raise Unavailable(f"there is no Python {release.python} here")
    folder = FOLDER / release.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(exist_ok=True)
    try:
        _call([python, "-m", "venv", str(folder)], root)
        constraints = folder / "constraints.txt"
        constraints.write_text(constraints_for((root / "constraints.txt").read_text(), release.torch))
        # Without a cache: what pip would keep of a release is as large as its environment. Nor does it compile all
        # modules: the tests import a part of them.
        pip = [
            str(python_of(folder)),
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-cache-dir",
            "--no-compile",
        ]
        pip += ["--constraint", str(constraints)]
        _call([*pip, "setuptools>=77", "wheel"], root)  # as pyproject.toml needs; of an environment it may be older
        _call([*pip, "--no-build-isolation", "--editable", ".[dev]"], root)
    except Unavailable:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


def _call(command: list[str], root: Path) -> None:
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    except OSError as error:
        raise Unavailable(f"{command[0]} does not start: {error}") from None
    if done.returncode != 0:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if re.match("(?i)error", line)]
        reason = lines[-1] if lines else f"{' '.join(command[1:4])} ended with {done.returncode}"
        raise Unavailable(f"the installation failed: {reason[:200]}")


def _find_python(version: str) -> str | None:
    """An interpreter of that version that starts; pyenv's shims may be there for versions that are not."""
    for candidate in _candidates(version):
        asked = [candidate, "-c", "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2])"]
        done = subprocess.run(asked, capture_output=True, text=True)
        if done.returncode == 0 and done.stdout.strip() == version:
            return candidate
    return None


def _candidates(version: str) -> Iterator[str]:
    for name in (f"python{version}", "python3"):
        found = shutil.which(name)
        if found is not None:
            yield found
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from (str(path) for path in sorted(pyenv.glob(f"versions/{version}.*/bin/python"), reverse=True))
