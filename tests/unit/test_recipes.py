"""The parts of the digits recipe, each alone: options, data, log, display, curves."""

from __future__ import annotations

import argparse
import errno
import io
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from lockstep.errors import InputError, SetupError
from lockstep.recipes import options
from lockstep.recipes.curves import draw_curves
from lockstep.recipes.digits.options import DigitsConfig, add_arguments, resolve_config
from lockstep.recipes.digits.task import DigitsNet, ShiftedDigits, load_digits, stratified_split
from lockstep.recipes.display import Display
from lockstep.recipes.run_folder import create_run_folder, folder_of_run, read_metrics
from lockstep.recipes.runlog import RunLog
from lockstep.recipes.summary import RankTime, Summary
from lockstep.testing import limit_s
from lockstep.train import EpochReport, StepReport


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_arguments(parser)
    return parser.parse_args(words)


def step(number: int, epoch: int, loss: float = 0.5) -> StepReport:
    return StepReport(step=number, epoch=epoch, loss=loss, samples=64, samples_per_s=1234.5, lr=0.02)


def epoch(number: int, accuracy: float = 0.9) -> EpochReport:
    return EpochReport(
        epoch=number,
        step=2 * number,
        loss=0.25,
        samples=128,
        train_s=0.1,
        local_samples=64,
        communication_s=0.01,
        evaluation={"loss": 0.3, "accuracy": accuracy, "correct": round(accuracy * 50), "images": 50.0},
    )


SUMMARY = Summary(
    correct=49, total=50, held_out_loss=0.0625, steps=4, samples=2048, ranks=[RankTime(1024, 2.0, 0.25)] * 2
)


class TestOptions:
    def test_they_are_there_without_torch(self) -> None:
        code = (
            "import argparse, sys; from lockstep.recipes.digits import add_arguments; "
            "add_arguments(argparse.ArgumentParser()); assert 'torch' not in sys.modules"
        )
        subprocess.run([sys.executable, "-c", code], check=True, timeout=limit_s(60))

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            (("--epochs", "0"), "0 is too small; expected 1 or more"),
            (("--batch-size", "-4"), "-4 is too small; expected 1 or more"),
            (("--batch-size", "many"), "'many' is not a whole number"),
            (("--accumulate", "0"), "0 is too small"),
            (("--lr", "0"), "0 is out of range; expected a number above 0"),
            (("--lr", "nan"), "nan is out of range"),
            (("--lr", "fast"), "'fast' is not a number"),
            (("--seed", "-1"), "-1 is too small; expected 0 or more"),
            (("--optimizer", "lion"), "invalid choice: 'lion'"),
            (("--dtype", "int8"), "invalid choice: 'int8'"),
            (("--name", "a/b"), "'a/b' is not a folder name; use --out"),
            (("--name", ".."), "is not a folder name"),
            (("--resume", "nowhere"), "'nowhere' does not exist; expected a run folder"),
        ],
    )
    def test_a_bad_value_says_what_to_give(self, options: tuple[str, ...], said: str) -> None:
        with pytest.raises(argparse.ArgumentError, match=f"argument {options[0]}: .*{said}"):
            parse(*options)

    def test_defaults(self) -> None:
        assert resolve_config(parse()) == DigitsConfig()
        assert resolve_config(parse("--optimizer", "adam")).lr == 0.002
        assert resolve_config(parse("--optimizer", "adam", "--lr", "0.1", "--augment")) == DigitsConfig(
            optimizer="adam", lr=0.1, augment=True
        )

    def test_a_resumed_run_takes_what_is_not_given_from_its_checkpoint(self) -> None:
        saved = DigitsConfig(epochs=3, batch_size=10, lr=0.5, optimizer="adam", augment=True, seed=9).as_dict()
        assert resolve_config(parse(), saved) == DigitsConfig(**saved)
        changed = resolve_config(parse("--epochs", "9", "--lr", "0.25", "--batch-size", "10"), saved)
        assert changed == DigitsConfig(**{**saved, "epochs": 9, "lr": 0.25})
        for contradiction in (("--no-augment",), ("--seed", "8"), ("--optimizer", "sgd")):
            with pytest.raises(
                InputError, match=f"{contradiction[0].replace('--no-', '--')} is .*, but .* was trained"
            ):
                resolve_config(parse(*contradiction), saved)

    def test_missing_extras_are_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(options, "find_spec", lambda name: None if name in ("sklearn", "rich") else object())
        with pytest.raises(SetupError, match=r"scikit-learn and rich.*pip install scikit-learn rich"):
            parse()


class TestData:
    def test_the_split_is_fixed_and_in_proportion(self) -> None:
        train, held_out = load_digits(torch.float64)
        assert (len(train), len(held_out)) == (1438, 359)
        images, labels = held_out.tensors
        assert (images.shape, images.dtype, labels.dtype) == ((359, 1, 8, 8), torch.float64, torch.int64)
        assert (images.min(), images.max()) == (0, 1)
        # No image is in both, and none is lost.
        everything = torch.cat([train.tensors[0], images]).flatten(1)
        assert len(torch.unique(everything, dim=0)) == len(everything) == 1797
        shares = labels.bincount() / (labels.bincount() + train.tensors[1].bincount())
        assert shares.tolist() == pytest.approx([0.2] * 10, abs=0.004)

    def test_a_split_depends_on_its_seed(self) -> None:
        labels = torch.arange(100) % 3
        first, second = stratified_split(labels, 0.3, seed=1)
        assert torch.equal(torch.cat([first, second]).sort().values, torch.arange(100))
        assert torch.equal(stratified_split(labels, 0.3, seed=1)[1], second)
        assert not torch.equal(stratified_split(labels, 0.3, seed=2)[1], second)

    def test_shifts_keep_the_ink_and_reach_all_neighbours(self) -> None:
        image = torch.zeros(1, 8, 8)
        image[0, 3, 4] = 1
        dataset = ShiftedDigits(torch.utils.data.TensorDataset(image[None], torch.tensor([7])))
        places = set()
        for seed in range(200):
            shifted, label = dataset.__getitem__(0, generator=torch.Generator().manual_seed(seed))
            assert (shifted.shape, shifted.sum(), label) == ((1, 8, 8), 1, 7)
            places.add(tuple(shifted[0].nonzero()[0].tolist()))
        assert places == {(row, column) for row in (2, 3, 4) for column in (3, 4, 5)}

    def test_the_model_sees_one_image_at_a_time(self) -> None:
        torch.manual_seed(0)
        model, images = DigitsNet().double(), torch.rand(5, 1, 8, 8, dtype=torch.float64)
        together = model(images)
        alone = torch.cat([model(image[None]) for image in images])
        assert together.shape == (5, 10)
        assert torch.allclose(together, alone, rtol=0, atol=1e-12)


class TestRunLog:
    def test_records_and_scalars(self, tmp_path: Path) -> None:
        with RunLog(tmp_path, {"config": {"lr": 0.1}}) as log:
            log(step(1, 1))
            log(step(2, 1, loss=float("nan")))
            log(epoch(1))
            log.finish(SUMMARY)
        records = list(read_metrics(tmp_path / "metrics.jsonl"))
        assert [record["kind"] for record in records] == ["run", "step", "step", "epoch", "result"]
        assert (records[1]["loss"], records[2]["loss"]) == (0.5, None)
        assert (records[3]["held_out_correct"], records[3]["local_samples"]) == (45, 64)
        assert (records[4]["accuracy"], records[4]["ranks"][1]["communication_s"]) == (0.98, 0.25)
        assert scalars(tmp_path) == {
            "train/loss": [(1, 0.5), (2, pytest.approx(float("nan"), nan_ok=True))],
            "train/lr": [(1, pytest.approx(0.02)), (2, pytest.approx(0.02))],
            "train/samples_per_s": [(1, 1234.5), (2, 1234.5)],
            "held_out/loss": [(2, pytest.approx(0.3))],
            "held_out/accuracy": [(2, pytest.approx(0.9))],
        }

    @pytest.mark.parametrize("place", ["", "checkpoints", "checkpoints/step.pt"])
    def test_a_resumed_log_begins_with_the_earlier_one_up_to_the_checkpoint(self, tmp_path: Path, place: str) -> None:
        earlier, later = tmp_path / "earlier", tmp_path / "later"
        (earlier / "checkpoints").mkdir(parents=True)
        later.mkdir()
        with RunLog(earlier, {}) as log:
            for number in (1, 2):
                log(step(2 * number - 1, number))
                log(step(2 * number, number))
                log(epoch(number))
        with RunLog(later, {}, resumed=earlier / place, resumed_step=2) as log:
            log(step(3, 2, loss=0.125))
        records = list(read_metrics(later / "metrics.jsonl"))
        assert [(record["kind"], record.get("step")) for record in records] == [
            ("run", None), ("step", 1), ("step", 2), ("epoch", 2), ("step", 3),
        ]  # fmt: skip
        assert [value for _, value in scalars(later)["train/loss"]] == [0.5, 0.5, 0.125]

    def test_a_line_that_was_cut_off_is_left_out(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.jsonl"
        path.write_text(json.dumps({"kind": "run"}) + '\n{"kind": "st', encoding="utf-8")
        assert list(read_metrics(path)) == [{"kind": "run"}]

    def test_folders_that_cannot_be_made(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(InputError, match=r"file.*choose another --out"):
            create_run_folder(tmp_path / "file", "digits")
        with pytest.raises(InputError, match=r"cannot create .*choose another --out"):
            create_run_folder(tmp_path / "file" / "below", "digits")

    def resume(self, run: Path, *more: str) -> Path:
        return folder_of_run(parse("--resume", str(run / "checkpoints"), *more), "digits")

    @pytest.fixture
    def finished(self, tmp_path: Path) -> Path:
        """A run to continue from."""
        run = tmp_path / "run"
        (run / "checkpoints").mkdir(parents=True)
        (run / "metrics.jsonl").write_text('{"kind": "run"}\n', encoding="utf-8")
        return run

    def test_a_run_goes_on_in_its_folder_or_in_a_new_one(self, finished: Path) -> None:
        assert self.resume(finished) == finished
        assert sorted(path.name for path in finished.iterdir()) == ["checkpoints", "metrics.jsonl"]
        assert self.resume(finished, "--out", str(finished.parent)) == finished.parent / "digits"

    @pytest.mark.parametrize("broken", ["metrics.jsonl", "checkpoints"])
    def test_a_run_that_cannot_be_written_is_said(self, finished: Path, broken: str, monkeypatch: Any) -> None:
        """As on a file system that is mounted read-only, which root cannot write to either."""

        def refuse(*_: object, **__: object) -> None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        opens = Path.open
        if broken == "metrics.jsonl":
            monkeypatch.setattr(
                Path, "open", lambda path, *how, **more: (refuse if "a" in how else opens)(path, *how, **more)
            )
        else:
            monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
        said = f"cannot write to {finished}: Read-only file system; resume in a new folder, with --name or --out"
        with pytest.raises(InputError, match=re.escape(said)):
            self.resume(finished)
        assert self.resume(finished, "--out", str(finished.parent)).exists()

    @pytest.mark.parametrize("more", [(), ("--name", "later")])
    def test_damaged_metrics_are_said_before_a_folder_is_made(
        self, finished: Path, more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(finished.parent)
        (finished / "metrics.jsonl").write_text('{"kind": "run"}\nnoise\n', encoding="utf-8")
        with pytest.raises(
            InputError, match=r"metrics.jsonl, line 2: 'noise' is not a record of a run; remove the line"
        ):
            self.resume(finished, *more)
        assert [path.name for path in finished.parent.iterdir()] == ["run"]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard would show of a folder: (step, value) by tag."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_a_run_without_a_readable_held_out_image_has_a_summary() -> None:
    summary = replace(SUMMARY, correct=0, total=0, held_out_loss=math.nan, expected=5)
    assert summary.as_dict()["accuracy"] == 0


class TestDisplay:
    def show(self, **console: Any) -> str:
        file = io.StringIO()
        display = Display(
            "digits: 2 ranks", Path("runs/digits"), 2, 0, 4, Console(file=file, width=100, highlight=False, **console)
        )
        with display:
            for number in (1, 2):
                display(step(2 * number, number))
                display(epoch(number))
            display.finish(SUMMARY)
        return file.getvalue()

    def test_plain_lines_where_stdout_is_no_terminal(self) -> None:
        shown = self.show(force_terminal=False)
        assert shown.startswith(
            "digits: 2 ranks\n"
            "epoch 1/2   loss 0.2500   held out  90.00% (45/50)    1,280 samples/s\n"
            "epoch 2/2   loss 0.2500   held out  90.00% (45/50)    1,280 samples/s\n"
        )
        assert "98.00%   49 of 50 images, each counted once" in shown
        assert "1,024 samples/s" in shown
        assert shown.count("12.5%") == 2
        assert "\x1b" not in shown

    def test_paths_are_shown_as_they_are(self) -> None:
        file = io.StringIO()
        with Display("going on in runs [new]", Path("[run] :cat: 2"), 1, 0, 1, Console(file=file)) as display:
            display.say("listed in [bold]")
            display.finish(SUMMARY)
        lines = file.getvalue().splitlines()
        assert lines[:2] == ["going on in runs [new]", "listed in [bold]"]
        assert lines[-1].startswith("[run] :cat: 2: metrics.jsonl")

    def test_a_bar_on_a_terminal(self) -> None:
        shown = self.show(force_terminal=True, color_system=None)
        assert "4/4 steps   loss 0.5000    1,234 samples/s" in shown
        assert "epoch 2/2   loss 0.2500" in shown


@pytest.mark.parametrize("num_epochs", [1, 30])
def test_curves_of_short_and_long_runs(tmp_path: Path, num_epochs: int) -> None:
    records: list[dict[str, Any]] = [{"kind": "run"}]
    for number in range(1, num_epochs + 1):
        records += [{"kind": "step", "step": 2 * number - 1, "epoch": number, "loss": None}]
        records += [{"kind": "step", "step": 2 * number, "epoch": number, "loss": 1 / number}]
        held_out = {f"held_out_{name}": value for name, value in epoch(number).evaluation.items()}
        records += [{"kind": "epoch", "epoch": number, "step": 2 * number, "loss": 1 / number, **held_out}]
    draw_curves(records, tmp_path / "curves.png", "a run")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("loss", [0.0, None])
def test_curves_of_a_run_without_a_positive_loss(tmp_path: Path, loss: float | None) -> None:
    """matplotlib would warn of a logarithm."""
    held_out = {f"held_out_{name}": 0.0 for name in ("accuracy", "correct", "images")}
    records = [
        {"kind": "step", "step": 1, "epoch": 1, "loss": loss},
        {"kind": "epoch", "epoch": 1, "step": 1, "loss": loss, "held_out_loss": None, **held_out},
    ]
    draw_curves(records, tmp_path / "curves.png", "a run")
    assert (tmp_path / "curves.png").exists()
