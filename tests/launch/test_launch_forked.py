"""Ranks that are forked from the launcher: what they share with it, and what they have of their own."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from lockstep import env
from lockstep.launch.config import LaunchConfig
from lockstep.launch.supervisor import launch_job

SCRIPT = """
import atexit, json, os, signal, sys
print("to the log")
atexit.register(lambda: open(f"{sys.argv[1]}/{os.environ['RANK']}.json", "w").write(json.dumps(facts)))
facts = {
    "argv": sys.argv, "main": __name__, "file": __file__, "leads": os.getsid(0) == os.getpid(), "parent": os.getppid(),
    "mine": os.environ.get("OF_THIS_JOB"), "other": os.environ.get("OF_THE_LAUNCHER"), "has": "a_marker" in sys.modules,
    "interrupts": signal.getsignal(signal.SIGINT) is signal.default_int_handler, "folder": sys.path[0],
}
sys.exit(int(sys.argv[2]) if os.environ["RANK"] == "1" else 0)
"""

# Frees files of the launcher after it has opened its own, and then uses these.
FREES = """
import os, sys
own = [os.open(__file__, os.O_RDONLY) for _ in range(100)]
sys.modules["a_marker"].files.clear()
for each in own:
    os.fstat(each)
"""


def _launch(folder: Path, code: int, text: str = SCRIPT) -> int:
    script = folder / "script.py"
    script.write_text(text)
    variables = {**env.snapshot(), "OF_THIS_JOB": "yes"}
    variables.pop("OF_THE_LAUNCHER", None)
    config = LaunchConfig(
        str(script),
        (str(folder), str(code)),
        nproc=2,
        log_dir=str(folder / "log"),
        environment=variables,
        on_end=lambda folder: None,
        forks=True,
    )
    return launch_job(config)


def test_a_forked_rank_has_the_launchers_modules_and_all_else_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "a_marker", sys)
    monkeypatch.setenv("OF_THE_LAUNCHER", "yes")
    assert _launch(tmp_path, 0) == 0
    for rank in range(2):
        facts = json.loads((tmp_path / f"{rank}.json").read_text())
        assert facts == {
            "argv": [str(tmp_path / "script.py"), str(tmp_path), "0"],
            "main": "__main__",
            "file": str(tmp_path / "script.py"),
            "leads": True,
            "parent": os.getpid(),
            "mine": "yes",
            "other": None,
            "has": True,
            "interrupts": True,
            "folder": str(tmp_path),
        }
        assert (tmp_path / "log" / f"rank{rank}.log").read_text() == "to the log\n"


def test_the_exit_code_of_a_forked_rank_is_that_of_the_job(tmp_path: Path) -> None:
    assert _launch(tmp_path, 7) == 7


def test_what_the_launcher_had_open_closes_nothing_of_a_forked_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [io.FileIO(os.devnull) for _ in range(20)]
    monkeypatch.setitem(sys.modules, "a_marker", SimpleNamespace(files=files))  # type: ignore[arg-type]
    assert _launch(tmp_path, 0, FREES) == 0
    for file in files:
        file.close()
