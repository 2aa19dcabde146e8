"""The digits recipe as a user runs it: one answer at any number of ranks, and what it leaves behind."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lockstep import checkpoint
from lockstep.recipes.digits import add_arguments, main
from lockstep.testing import limit_s, run_ranks

pytest.importorskip("sklearn")
pytest.importorskip("tensorboard")

# See test_train_parity.py for where this comes from.
TOLERANCE = 1e-12
STEPS_PER_EPOCH = 23  # 1438 images in batches of 64


def digits(*options: str) -> int:
    """The recipe on this rank."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return main(parser.parse_args(options))


def digits_with_one_gpu(*options: str) -> int:
    """The recipe on this rank, to which torch says that there is one GPU."""
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "device_count", return_value=1),
        mock.patch.object(dist, "is_nccl_available", return_value=True),
    ):
        return digits(*options)


def train(world_size: int, out: Path, name: str, *options: str) -> list[dict[str, Any]]:
    """Run the recipe on `world_size` ranks; the records of its metrics.jsonl."""
    arguments = ("--out", str(out), "--name", name, *options)
    assert run_ranks(digits, world_size, *arguments, init=False) == [0] * world_size
    return read(out / name)


def read(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(records: list[dict[str, Any]]) -> list[float]:
    return [record["loss"] for record in records if record["kind"] == "step"]


def evaluations(records: list[dict[str, Any]]) -> list[tuple[int, float]]:
    return [(record["held_out_correct"], record["held_out_loss"]) for record in records if record["kind"] == "epoch"]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def one_process(out: Path) -> list[dict[str, Any]]:
    return train(1, out, "one", "--epochs", "2", "--dtype", "float64", "--quiet")


@pytest.fixture(scope="module")
def half(out: Path) -> Path:
    """A run of one epoch at two ranks, to continue from."""
    train(2, out, "half", "--epochs", "1", "--dtype", "float64", "--quiet")
    return out / "half"


def assert_same_answer(records: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(losses(records)) == 2 * STEPS_PER_EPOCH
    assert losses(records) == pytest.approx(losses(expected), rel=0, abs=TOLERANCE)
    for (correct, loss), (expected_correct, expected_loss) in zip(
        evaluations(records), evaluations(expected), strict=True
    ):
        assert correct == expected_correct
        assert loss == pytest.approx(expected_loss, rel=0, abs=TOLERANCE)


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.core), 3])
def test_losses_do_not_depend_on_the_number_of_ranks(
    out: Path, one_process: list[dict[str, Any]], world_size: int
) -> None:
    records = train(world_size, out, f"ranks{world_size}", "--epochs", "2", "--dtype", "float64", "--quiet")
    assert records[0]["world_size"] == world_size
    assert_same_answer(records, one_process)


def test_resuming_with_another_number_of_ranks_gives_the_same_answer(
    out: Path, half: Path, one_process: list[dict[str, Any]]
) -> None:
    # Options that are not given, the dtype here, come from the checkpoint.
    records = train(3, out, "whole", "--epochs", "2", "--resume", str(half), "--quiet")
    assert (records[0]["world_size"], records[0]["config"]["dtype"]) == (3, "float64")
    assert_same_answer(records, one_process)
    result = records[-1]
    assert (result["steps"], result["samples"]) == (STEPS_PER_EPOCH, 1438)  # its own, without those before


def test_run_goes_on_in_its_folder(tmp_path: Path, one_process: list[dict[str, Any]]) -> None:
    """Its log is one story, also where it goes back to an earlier checkpoint."""
    train(2, tmp_path, "run", "--epochs", "1", "--dtype", "float64", "--quiet")
    folder = tmp_path / "run"
    (earlier,) = (folder / "checkpoints").glob("*.pt")
    for path in (folder, folder / "checkpoints" / earlier.name):
        arguments = ("--epochs", "2", "--resume", str(path), "--quiet")
        assert run_ranks(digits, 1, *arguments, init=False) == [0]
        records = read(folder)
        assert_same_answer(records, one_process)
        assert records[0]["resumed_from"] is None
        assert [record["kind"] for record in records].count("result") == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]
    assert not (tmp_path / "runs").exists()


def test_usage_error_is_one_line_and_no_failure(half: Path) -> None:
    command = [sys.executable, "-m", "lockstep", "train", "digits", "--nproc", "2", "--resume", str(half)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s(120))
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert "has done 1 epoch already; raise --epochs to continue" in line


def test_augmentation_and_accumulation_do_not_depend_on_it_either(out: Path) -> None:
    options = (
        "--epochs",
        "1",
        "--dtype",
        "float64",
        "--augment",
        "--accumulate",
        "3",
        "--optimizer",
        "adam",
        "--quiet",
    )
    expected, records = train(1, out, "augmented", *options), train(3, out, "augmented3", *options)
    assert len(losses(expected)) == 8
    assert losses(records) == pytest.approx(losses(expected), rel=0, abs=TOLERANCE)


def test_a_default_run_reaches_its_accuracy_and_leaves_everything_behind(
    out: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    records = train(2, out, "default")
    result = records[-1]
    assert result["kind"] == "result"
    assert result["accuracy"] >= 0.97
    assert result["total"] == 359
    assert result["correct"] == round(result["accuracy"] * 359)
    assert [rank["samples"] for rank in result["ranks"]] == [20 * 719, 20 * 719]
    assert all(0 < rank["communication_s"] < rank["train_s"] for rank in result["ranks"])
    assert [record["kind"] for record in records].count("epoch") == 20

    run = out / "default"
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert list(run.glob("events.out.tfevents.*"))
    state = checkpoint.load(run)
    assert (state["epoch"], state["step"], state["metrics"]["correct"]) == (20, 20 * STEPS_PER_EPOCH, result["correct"])

    shown = capfd.readouterr().out
    assert shown.count("epoch ") == 20, "one line per epoch where stdout is no terminal, from rank 0 alone"
    assert f"{result['correct']} of 359 images, each counted once" in shown
    assert "\x1b" not in shown


def test_a_name_that_is_taken_gets_a_number(out: Path) -> None:
    for expected in ("twice", "twice-2", "twice-3"):
        arguments = ("--out", str(out), "--name", "twice", "--epochs", "1", "--batch-size", "1438", "--quiet")
        run_ranks(digits, 2, *arguments, init=False)
        assert (out / expected / "curves.png").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--batch-size", "32"), "--batch-size is 32, but {half} was trained with 64: leave --batch-size out"),
        ((), "{half} has done 1 epoch already; raise --epochs to continue"),
        (("--epochs", "2", "--out", "{half}/metrics.jsonl"), "cannot keep runs in {half}/metrics.jsonl"),
    ],
)
def test_options_that_cannot_be_used_are_one_line(
    half: Path, capfd: pytest.CaptureFixture[str], options: tuple[str, ...], said: str
) -> None:
    arguments = [option.format(half=half) for option in options]
    assert run_ranks(digits, 2, "--resume", str(half), *arguments, init=False) == [2, 2]
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("lockstep train digits: error: " + said.format(half=half))


def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    checkpoint.save(tmp_path, {"model": {}}, step=1)
    assert run_ranks(digits, 1, "--resume", str(tmp_path), init=False) == [2]
    assert "was not written by the digits recipe" in capfd.readouterr().err


def test_more_ranks_than_gpus(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ("--out", str(tmp_path), "--epochs", "1", "--batch-size", "512")
    assert run_ranks(digits_with_one_gpu, 2, *arguments, init=False) == [0, 0]
    first, note, *_ = capfd.readouterr().out.splitlines()
    assert first.startswith("digits: 2 ranks on lockstep")
    assert note == "training on the CPU, because there are 2 ranks but 1 GPU; --nproc 1 trains on 1 GPU"
    assert run_ranks(digits_with_one_gpu, 2, *arguments, "--backend", "nccl", init=False) == [2, 2]
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("lockstep train digits: error: backend nccl needs a GPU per rank")
