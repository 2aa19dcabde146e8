"""`lockstep bench strategies` as a user runs it: every way that is installed, Ctrl-C, and a budget."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from warm_launcher import WarmLauncher

from lockstep.bench.results import Result
from lockstep.bench.strategies.report import View
from lockstep.bench.strategies.ways import WAYS, why_not
from lockstep.recipes.imagenet.shapes import ShapesFolder, write_shapes
from lockstep.testing import limit_s

COMMAND = [sys.executable, "-m", "lockstep", "bench", "strategies"]


def run(warm: WarmLauncher, folder: Path, *arguments: str) -> tuple[Result, str]:
    """A run that ends well: its result, and what it has said on stderr. Its processes are forked."""
    words = ("bench", "strategies", "--out", str(folder), "--name", "run", *arguments)
    done = warm.run(*words, folder=folder.parent, timeout_s=limit_s(200))
    assert done.returncode == 0, done.stderr
    assert "Where a step goes" in done.stdout
    return Result.load(folder / "run" / "strategies.json"), done.stderr


def test_every_way_that_is_installed_is_a_row_and_learns_the_same(warm: WarmLauncher, tmp_path: Path) -> None:
    nproc = 2
    result, err = run(warm, tmp_path, "--nproc", str(nproc), "--quick", "--dtype", "float64")
    view = View(result)
    expected = [name for name, way in WAYS.items() if why_not(way, nproc, 0) is None]
    assert view.names == expected, err
    assert {"ddp", "sharded", "spawn", "apex", "horovod", "torch_ddp", "torch_ddp_lockstep"} <= set(view.names)
    assert {one.contestant: one.reason for one in result.skipped} == {
        name: why_not(way, nproc, 0) for name, way in WAYS.items() if name not in expected
    }
    for name in view.names:
        assert view.differences(name), name
        assert max(view.differences(name)) <= 1e-12, name
        assert view.fact(name, "held_out_accuracy") == view.fact("single", "held_out_accuracy"), name
        assert len(view.epoch(name)) == 1  # the second round; the first is the warm-up
        assert min(view.step(name)) > 0
        assert view.is_split(name) == (nproc > 1 and WAYS[name].starter != "alone"), name
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        f"strategies.{kind}" for kind in ("json", "md", "png")
    ]


def test_batches_that_do_not_divide_evenly_and_drawn_images(warm: WarmLauncher, tmp_path: Path) -> None:
    ways = "ddp,sharded,horovod"
    options = ("--recipe", "imagenet", "--size", "16", "--batch-size", "31", "--dtype", "float64", "--ways", ways)
    result, _ = run(warm, tmp_path, "--nproc", "2", "--quick", *options)
    view = View(result)
    assert set(view.names) == {"single", *ways.split(",")}
    for name in view.names:
        assert view.differences(name), name
        assert max(view.differences(name)) <= 1e-12, name


def test_ctrl_c_keeps_what_has_been_measured(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()  # a terminal shows every turn
    command = [*COMMAND, "--out", str(tmp_path), "--name", "run", "--ways", "ddp", "--nproc", "2", "--images", "64"]
    process = subprocess.Popen(
        [*command, "--budget", "24h"], stdout=subprocess.PIPE, stderr=theirs, text=True, start_new_session=True
    )
    os.close(theirs)
    seen = b""
    deadline = time.monotonic() + limit_s(150)
    while b"round 2" not in seen and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            seen += os.read(ours, 4096)
        assert process.poll() is None, seen.decode()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does it
    while True:
        try:
            data = os.read(ours, 4096)
        except OSError:
            break
        if not data:
            break
        seen += data
    out = process.communicate()[0]
    os.close(ours)
    assert process.returncode == 130, seen.decode()
    assert b"interrupted; results so far are kept" in seen
    assert b"Traceback" not in seen
    assert "This run was cut short" in out
    result = Result.load(tmp_path / "run" / "strategies.json")
    assert not result.complete
    assert {series.contestant for series in result.series} == {"single", "ddp"}
    assert no_process_names(tmp_path)


def test_a_budget_that_is_spent_ends_the_run_and_says_what_was_left_out(warm: WarmLauncher, tmp_path: Path) -> None:
    result, _ = run(warm, tmp_path, "--nproc", "1", "--budget", "0.01s", "--ways", "ddp", "--images", "64")
    assert {series.contestant for series in result.series} == {"single"}
    assert len(View(result).epoch("single")) == 1
    (skipped,) = result.skipped
    assert skipped.contestant == "ddp"
    assert "out of time" in skipped.reason


def test_epochs_are_short_where_the_data_is_large(warm: WarmLauncher, tmp_path: Path) -> None:
    write_shapes(ShapesFolder(tmp_path / "images", images=2000, val_images=400, size=96))
    options = ("--recipe", "imagenet", "--data", str(tmp_path / "images"), "--size", "64", "--ways", "ddp")
    for budget in ("10s", "60s"):  # a machine busy with other things may start no way within the first
        folder = tmp_path / budget
        result, _ = run(warm, folder, "--nproc", "2", "--budget", budget, *options)
        if not result.skipped:
            break
    view = View(result)
    steps = result.settings["steps_at_most"]
    assert isinstance(steps, int)
    assert 1 <= steps < 2000 // 64
    for name in ("single", "ddp"):
        assert view.fact(name, "steps_per_epoch") == steps
        assert view.fact(name, "samples_per_epoch") == steps * 64
        assert view.epoch(name)  # at least one beside the warm-up
        assert view.agrees(name)
    assert view.fact("single", "held_out_images") == view.fact("ddp", "held_out_images")
    assert "limited by the time" in (folder / "run" / "strategies.md").read_text()


def no_process_names(folder: Path) -> bool:
    """Whether no process is left that writes below a folder."""
    for path in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if re.match(re.escape(str(folder)), os.readlink(path)):
                return False
    return True
