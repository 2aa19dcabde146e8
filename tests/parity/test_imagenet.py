"""The ImageNet program on drawn images: six strategies, one answer at any number of ranks; what a run leaves."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from PIL import Image

import lockstep
from lockstep import checkpoint, env
from lockstep.errors import SetupError, SharedMemoryError
from lockstep.recipes.imagenet import add_arguments, main, models, strategies
from lockstep.recipes.imagenet.shapes import ShapesFolder, write_shapes
from lockstep.testing import limit_s, run_ranks

# See test_train_parity.py for where this comes from.
TOLERANCE = 1e-12
# float32 has 24 bits; the sums of a batch in other orders differ by some units of the last, and steps amplify that.
TOLERANCE_FP32 = 1e-4
STEPS = 5  # 33 images in batches of 7, which no number of ranks divides evenly, and a last one of 5
QUICK = ("-a", "tiny", "-j", "0", "-b", "7", "--size", "16", "-p", "2", "--lr", "1.6", "--quiet")


def work(options: argparse.Namespace, slurm: dict[str, Any] | None = None) -> int:
    """The program on this rank."""
    if slurm is not None:
        become_a_task(**slurm)
    # Shims are installed in ranks that the launcher starts; these are none, and theirs must not stay for other tests.
    opened, strategies._import = strategies._import, lambda name, _: importlib.import_module(f"lockstep.compat.{name}")
    try:
        return main(options)
    finally:
        strategies._import = opened


def become_a_task(job_id: int, folder: str) -> None:
    """Have the environment of a task of Slurm in the place of what the pool has set."""
    rank, world_size = env.RANK.get(), env.WORLD_SIZE.get()
    for variable in (env.RANK, env.WORLD_SIZE, env.LOCAL_RANK, env.LOCAL_WORLD_SIZE, env.LOCKSTEP_RENDEZVOUS):
        variable.unset()
    assert rank is not None
    assert world_size is not None
    env.SLURM_JOB_ID.set(job_id)
    env.SLURM_STEP_ID.set(0)
    env.SLURM_PROCID.set(rank)
    env.SLURM_NTASKS.set(world_size)
    env.SLURM_STEP_NUM_TASKS.set(world_size)
    env.SLURM_LOCALID.set(rank)
    env.SLURM_NODEID.set(0)
    env.SLURM_NNODES.set(1)
    env.SLURM_STEP_TASKS_PER_NODE.set(str(world_size))
    env.SLURM_STEP_NODELIST.set("n1.invalid")


def parse(*options: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(list(map(str, options)))


def run(world_size: int, *options: object, slurm: dict[str, Any] | None = None) -> list[int]:
    return run_ranks(work, world_size, parse(*options), slurm, init=False)


def train(data: Path, out: Path, name: str, world_size: int, *options: object, **extra: Any) -> list[dict[str, Any]]:
    """Run the program on ranks; the records of its metrics.jsonl."""
    assert run(world_size, data, *QUICK, "--out", out, "--name", name, *options, **extra) == [0] * world_size
    return read(out / name)


def read(run_folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]


def losses(records: list[dict[str, Any]]) -> list[float]:
    return [record["loss"] for record in records if record["kind"] == "step"]


def evaluations(records: list[dict[str, Any]]) -> list[dict[str, float]]:
    names = ("held_out_loss", "held_out_accuracy", "held_out_top5", "held_out_images")
    return [{name: record[name] for name in names} for record in records if record["kind"] == "epoch"]


def assert_same(records: list[dict[str, Any]], expected: list[dict[str, Any]], tolerance: float = TOLERANCE) -> None:
    assert losses(records) == pytest.approx(losses(expected), rel=0, abs=tolerance)
    for ours, theirs in zip(evaluations(records), evaluations(expected), strict=True):
        assert ours == pytest.approx(theirs, rel=0, abs=tolerance)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images") / "shapes"
    write_shapes(ShapesFolder(folder, classes=6, images=33, val_images=13, size=20))
    return folder


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def single(data: Path, out: Path) -> dict[str, list[dict[str, Any]]]:
    """One process, one device: what all others must be equal to."""
    return {
        precision: train(data, out, f"single-{precision}", 1, "--strategy", "single", "--precision", precision,
                         "--epochs", 2)
        for precision in ("fp64", "fp32")
    }  # fmt: skip


@pytest.mark.parametrize(
    ("size", "precision"), [(1, "fp64"), pytest.param(2, "fp64", marks=pytest.mark.core), (2, "fp32"), (4, "fp64")]
)
@pytest.mark.parametrize("strategy", ["dp", "ddp", "apex", "horovod", "slurm"])
def test_strategies_have_one_answer(
    data: Path, out: Path, single: dict[str, Any], strategy: str, size: int, precision: str, tmp_path: Path
) -> None:
    options = ("--strategy", strategy, "--precision", precision, "--epochs", 2, "--processes", size)
    slurm = {"job_id": 100 + size, "folder": str(tmp_path)} if strategy == "slurm" else None
    ranks = 1 if strategy == "dp" else size
    records = train(data, out, f"{strategy}{size}-{precision}", ranks, *options, slurm=slurm)
    assert (records[0]["strategy"], records[0]["world_size"]) == (strategy, ranks)
    assert len(losses(records)) == 2 * STEPS
    assert_same(records, single[precision], TOLERANCE if precision == "fp64" else TOLERANCE_FP32)


@pytest.mark.parametrize("size", [1, 3])
def test_spawned_processes_have_it_too(data: Path, out: Path, single: dict[str, Any], size: int) -> None:
    name = f"spawn{size}"
    options = ["--strategy", "spawn", "--processes", size, "--precision", "fp64", "--epochs", 2]
    words = [data, *QUICK, "--out", out, "--name", name, *options]
    command = [sys.executable, "-m", "lockstep.recipes.imagenet", *map(str, words)]
    subprocess.run(command, check=True, timeout=limit_s(120))
    records = read(out / name)
    assert records[0]["world_size"] == size
    assert_same(records, single["fp64"])


@pytest.mark.parametrize("strategy", ["ddp", "ddp --shard-optimizer", "horovod", "apex"])
def test_accumulation_and_batch_normalization_over_ranks(data: Path, out: Path, strategy: str) -> None:
    """Also with channels last, and at 3 ranks, of which two have no image of the last batch: it has one."""
    options = ("-b", 8, "-a", "tiny-bn", "--sync-bn", "--accumulate", 2, "--precision", "fp64", "--epochs", 2)
    options = (*options, "--channels-last", "--schedule", "cosine", "--warmup", 1)
    expected = train(data, out, f"sync-of-{strategy}", 1, *options, "--strategy", "single")
    records = train(data, out, f"sync-{strategy}", 3, *options, "--strategy", *strategy.split())
    assert len(losses(records)) == 6
    assert_same(records, expected)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_sixteen_bits(data: Path, out: Path, single: dict[str, Any], precision: str) -> None:
    """The same training, as far as eight or eleven bits tell; and with a loss scale that a checkpoint keeps.

    The first scale may be too high for float16, and steps left out: after the first loss, that is another training.
    """
    compared = STEPS if precision == "bf16" else 1
    for strategy, size in (("single", 1), ("ddp", 2), ("ddp --shard-optimizer", 2), ("horovod", 2)):
        name = f"{precision}-{strategy}"
        options = ("--strategy", *strategy.split(), "--epochs", 1)
        records = train(data, out, name, size, "--precision", precision, *options)
        assert losses(records)[:compared] == pytest.approx(losses(single["fp32"])[:compared], abs=0.1)
        state = checkpoint.load(out / name)
        assert ("scaler" in state["update"]) == (precision == "fp16")
        assert {tensor.dtype for tensor in state["model"].values()} == {torch.float32}


def test_apex_levels(data: Path, out: Path, single: dict[str, Any]) -> None:
    for level in ("O1", "O2"):
        options = ("--strategy", "apex", "--opt-level", level, "--epochs", 1, "--accumulate", 2)
        records = train(data, out, level, 2, *options)
        assert losses(records)[0] == pytest.approx(sum(losses(single["fp32"])[:1]), abs=0.5)
        assert records[0]["opt_level"] == level


def test_going_on_within_an_epoch_at_another_number_of_ranks(data: Path, out: Path, single: dict[str, Any]) -> None:
    options = ("--precision", "fp64", "--epochs", 2)
    first = train(data, out, "first", 3, *options, "--max-steps", 2)
    assert (len(losses(first)), first[-1]["kind"]) == (2, "note")
    second = train(data, out, "second", 1, "--resume", out / "first", "--max-steps", 7, "--strategy", "single")
    assert len(losses(second)) == 7
    third = train(data, out, "third", 2, "--resume", out / "second", "--strategy", "horovod")
    assert_same(third, single["fp64"])
    epochs = [
        [record["loss"] for record in records if record["kind"] == "epoch"] for records in (third, single["fp64"])
    ]
    assert epochs[0] == pytest.approx(epochs[1], abs=TOLERANCE)
    rates = [[record["lr"] for record in records if record["kind"] == "step"] for records in (third, single["fp64"])]
    assert rates[0] == rates[1]


def test_going_on_with_and_without_a_share_of_the_optimizer(data: Path, out: Path, single: dict[str, Any]) -> None:
    """A checkpoint of either is one of the other, at another number of ranks; at two, all ends with the same bits."""
    options, resume = ("--precision", "fp64", "--epochs", 2), "--resume"
    first = train(data, out, "shared-out", 3, *options, "--max-steps", 2, "--shard-optimizer")
    second = train(data, out, "whole", 2, resume, out / "shared-out", "--max-steps", 7, "--no-shard-optimizer")
    third = train(data, out, "whole-shared-out", 2, resume, out / "whole", "--shard-optimizer")
    assert [records[0]["shards_optimizer"] for records in (first, second, third)] == [True, False, True]
    assert_same(third, single["fp64"])
    plain = train(data, out, "whole-whole", 2, resume, out / "whole", "--no-shard-optimizer")
    assert losses(plain) == losses(third)
    ends = [checkpoint.load(out / name) for name in ("whole-whole", "whole-shared-out")]
    assert all(torch.equal(value, ends[1]["model"][name]) for name, value in ends[0]["model"].items())
    momenta = [[each["momentum_buffer"] for each in end["optimizer"]["state"].values()] for end in ends]
    assert momenta[0]
    assert all(torch.equal(*pair) for pair in zip(*momenta, strict=True))


def work_with_threshold(options: argparse.Namespace, parameters: int, is_full: bool) -> int:
    """The program on this rank, where so many parameters are worth a share, or there is no memory for shares."""
    full = SharedMemoryError("shared memory is full")
    with mock.patch.object(strategies, "_WORTH_A_SHARE", parameters), contextlib.ExitStack() as stack:
        if is_full:
            stack.enter_context(mock.patch.object(lockstep.ZeroRedundancyOptimizer, "__init__", side_effect=full))
        return main(options)


def test_large_networks_are_stepped_in_shares(data: Path, out: Path, capfd: pytest.CaptureFixture[str]) -> None:
    loud = tuple(word for word in QUICK if word != "--quiet")
    given = (data, *loud, "--out", out, "--name", "size", "--epochs", 1, "--max-steps", 1)
    num_parameters = sum(each.numel() for each in models.create_model("tiny", 6).parameters())
    said = []
    for size, threshold in ((2, num_parameters), (2, num_parameters + 1), (1, 0)):
        codes = run_ranks(work_with_threshold, size, parse(*given), threshold, False, init=False)
        assert codes == [0] * size
        said.append("each of which updates a shard of them" in capfd.readouterr().out)
    assert said == [True, False, False]


def test_shares_that_have_no_memory(data: Path, out: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Training goes on without them, unless they were asked for."""
    loud = tuple(word for word in QUICK if word != "--quiet")
    given = (data, *loud, "--out", out, "--name", "full", "--epochs", 1, "--max-steps", 1)
    assert run_ranks(work_with_threshold, 2, parse(*given), 0, True, init=False) == [0, 0]
    assert "each rank updates all parameters: shared memory is full" in capfd.readouterr().out
    asked = parse(*given, "--shard-optimizer")
    assert run_ranks(work_with_threshold, 2, asked, 0, True, init=False) == [2, 2]
    assert capfd.readouterr().err == "lockstep train imagenet: error: shared memory is full\n"


def test_a_run_goes_on_in_its_folder(data: Path, tmp_path: Path, single: dict[str, Any]) -> None:
    """Without a place for a new one; its listing is beside it, and not where the program happens to be started."""
    train(data, tmp_path, "run", 2, "--precision", "fp64", "--epochs", 2, "--max-steps", 3)
    assert run(1, data, "-j", 0, "--quiet", "--resume", tmp_path / "run") == [0]
    records = read(tmp_path / "run")
    assert_same(records, single["fp64"])
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".listings", "run"]
    assert not Path("runs").exists()


def work_with_weights(options: argparse.Namespace, can_be_had: bool) -> int:
    """The program on this rank, with trained weights that are the initial ones, or cannot be downloaded."""
    offline = SetupError("there is no network")
    with mock.patch.object(models, "_load_torchvision_weights") as load:
        load.side_effect = (lambda model, name: model) if can_be_had else offline
        return main(options)


def test_trained_weights_are_not_loaded_again_to_go_on(data: Path, tmp_path: Path) -> None:
    """The checkpoint has all weights; in an evaluation, too."""
    given = (data, *QUICK, "--out", tmp_path, "--name", "run")
    begun = parse(*given, "--epochs", 1, "--pretrained")
    assert run_ranks(work_with_weights, 1, begun, False, init=False) == [2]
    assert run_ranks(work_with_weights, 1, begun, True, init=False) == [0]
    for more in (("--epochs", 2), ("-e",)):
        resumed = parse(*given, "--resume", tmp_path / "run", *more)
        assert run_ranks(work_with_weights, 1, resumed, False, init=False) == [0]


def test_checkpoints_within_an_epoch(data: Path, out: Path) -> None:
    train(data, out, "often", 2, "--epochs", 1, "--save-every", 2)
    steps = [int(path.name.split("-")[1]) for path in checkpoint.available(out / "often" / "checkpoints")]
    assert steps == [5, 4, 2]


def test_workers_do_not_change_the_answer(data: Path, out: Path, single: dict[str, Any]) -> None:
    """-j counts those of a host: two for two ranks are one for each."""
    records = train(data, out, "workers", 2, "--precision", "fp64", "--epochs", 2, "-j", 2)
    assert_same(records, single["fp64"])


def test_what_a_run_shows_and_leaves_behind(data: Path, out: Path, capfd: pytest.CaptureFixture[str]) -> None:
    loud = tuple(word for word in QUICK if word != "--quiet")
    assert run(2, data, *loud, "-a", "tiny-bn", "--out", out, "--name", "shown", "--epochs", 2) == [0, 0]
    shown = capfd.readouterr().out
    assert "learning rate 0.04375 = 1.6 x 7 images per step / 256; x 0.1 every 30 epochs" in shown
    assert "33 training images, 13 held out, 6 classes" in shown
    assert "batch normalization sees 7 images in 2 parts" in shown
    assert "13 of 13 counted" in shown
    assert len(re.findall(r"^epoch \d+(?! waited)\b", shown, re.MULTILINE)) == 2
    folder = out / "shown"
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert list(folder.glob("events.out.tfevents.*"))
    result = read(folder)[-1]
    assert (result["kind"], result["total"], result["expected"]) == ("result", 13, 13)

    assert run(3, data, "-e", "--resume", folder, "-j", 0, "--out", out) == [0, 0, 0]
    said = capfd.readouterr().out.splitlines()[-1]
    assert said.startswith(f"top-1 {result['accuracy']:.2%}   top-5 {result['top5']:.2%}   loss ")
    assert said.endswith("13 of 13 counted")


@pytest.mark.parametrize("strategy", ["ddp", "apex", "horovod"])
def test_one_network_is_evaluated(data: Path, out: Path, capfd: pytest.CaptureFixture[str], strategy: str) -> None:
    """Ranks normalise by statistics of their own while they train: what counts is what the checkpoint holds."""
    records = train(data, out, f"statistics-{strategy}", 3, "-a", "tiny-bn", "--strategy", strategy, "--epochs", 1)
    assert run(1, data, "-e", "--resume", out / f"statistics-{strategy}", "-j", 0, "--out", out, "--quiet") == [0]
    printed = re.search(r"loss (\d+\.\d+)   13 of 13", capfd.readouterr().out)
    assert printed is not None
    # float32, summed in another order, and printed with four digits
    assert float(printed[1]) == pytest.approx(evaluations(records)[0]["held_out_loss"], abs=2e-4)


@pytest.fixture
def spoiled(tmp_path: Path) -> Iterator[Path]:
    """Drawn images, of which one of each part is cut off."""
    folder = tmp_path / "spoiled"
    write_shapes(ShapesFolder(folder, classes=2, images=12, val_images=6, size=20))
    for path in (folder / "train" / "000-disk" / "0003.jpg", folder / "val" / "001-square" / "0001.jpg"):
        path.write_bytes(path.read_bytes()[:-200])
    return folder


@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_image_is_an_error_that_names_it(spoiled: Path, tmp_path: Path, workers: int) -> None:
    options = parse(spoiled, *QUICK, "--out", tmp_path, "-j", workers)
    outcomes = run_ranks(work, 2, options, init=False, expect_errors=True)
    name = str(spoiled / "train" / "000-disk" / "0003.jpg")
    assert any(name in str(outcome) and "--skip-broken" in str(outcome) for outcome in outcomes)


def test_broken_images_are_left_out_counted_and_listed(spoiled: Path, tmp_path: Path) -> None:
    options = ("--skip-broken", "--precision", "fp64", "--epochs", 2)
    one = train(spoiled, tmp_path, "one", 1, *options)
    three = train(spoiled, tmp_path, "three", 3, *options)
    assert_same(three, one)
    assert [record["held_out_broken"] for record in three if record["kind"] == "epoch"] == [2, 2]
    assert (three[-1]["total"], three[-1]["expected"]) == (5, 6)
    listed = (tmp_path / "three" / "broken.txt").read_text().splitlines()
    assert [Path(line).relative_to(spoiled).as_posix() for line in listed] == [
        "train/000-disk/0003.jpg",
        "val/001-square/0001.jpg",
    ]


def test_broken_images_weigh_nothing(spoiled: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Evaluated as if they were not there; trained on without a loss, and so without a gradient."""
    out = tmp_path / "runs"
    train(spoiled, out, "run", 2, "--skip-broken", "--epochs", 1)
    evaluate = ("-e", "--resume", out / "run", "-j", 0, "--out", out, "--skip-broken", "--quiet")
    run(2, spoiled, *evaluate)
    with_it = capfd.readouterr().out.strip()
    (spoiled / "val" / "001-square" / "0001.jpg").unlink()
    run(2, spoiled, *evaluate)
    assert with_it.endswith("5 of 6 counted")
    assert capfd.readouterr().out.strip() == with_it.replace("5 of 6", "5 of 5")

    for path in spoiled.rglob("*.jpg"):
        path.write_bytes(b"")
    records = train(spoiled, out, "none", 2, "--skip-broken", "--epochs", 1)
    assert losses(records) == [0, 0]
    assert (records[-1]["total"], records[-1]["expected"], records[-1]["accuracy"]) == (0, 5, 0)


def said_of(capfd: pytest.CaptureFixture[str], world_size: int, *options: object) -> str:
    """The one line on stderr with which the program ends."""
    assert run(world_size, *options) == [2] * world_size
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("lockstep train imagenet: error: ")
    return line.removeprefix("lockstep train imagenet: error: ")


def test_folders_that_are_not_as_they_should_be(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "data"
    write_shapes(ShapesFolder(folder, classes=2, images=4, val_images=2, size=16))
    options = (folder, *QUICK, "--out", tmp_path / "runs")
    (folder / "val" / "unknown").mkdir()
    Image.new("RGB", (9, 9)).save(folder / "val" / "unknown" / "a.png")
    assert f"{folder}/val/unknown is a class that {folder}/train does not have" in said_of(capfd, 2, *options)
    (folder / "val" / "unknown" / "a.png").unlink()
    assert f"{folder}/val/unknown has no images: expected files that end in .jpg" in said_of(capfd, 2, *options)
    (folder / "val").rename(folder / "validation")
    said = said_of(capfd, 2, *options)
    assert f"{folder}/val is missing: {folder} must have train/ and val/" in said
    assert "in it: train, validation" in said


def test_a_val_folder_with_fewer_classes_has_the_labels_of_train(data: Path, tmp_path: Path) -> None:
    """torchvision would count the classes of val/ by themselves, and call the third one the first."""
    folder, out = tmp_path / "images", tmp_path / "runs"
    write_shapes(ShapesFolder(folder, classes=3, images=6, val_images=3, size=16))
    whole = train(folder, out, "whole", 1, "--epochs", 1, "--precision", "fp64")
    parts = []
    (folder / "val").rename(folder / "all")
    for name in ("000-disk", "001-square", "002-triangle"):
        shutil.copytree(folder / "all" / name, folder / "val" / name)
        parts.append(train(folder, out, name, 1, "--epochs", 1, "--precision", "fp64"))
        shutil.rmtree(folder / "val")
    assert [losses(part) for part in parts] == [losses(whole)] * 3
    assert [part[-1]["total"] for part in parts] == [1, 1, 1]
    # One image of each class: what each of them loses, adds up to what all lose.
    each = [evaluations(part)[0]["held_out_loss"] for part in parts]
    assert sum(each) / 3 == pytest.approx(evaluations(whole)[0]["held_out_loss"], rel=1e-12)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--strategy", "dp", "--sync-bn"), "--sync-bn is not supported by --strategy dp"),
        (("--opt-level", "O1"), "--opt-level O1 is an option of Apex"),
        (("--strategy", "horovod", "--shard-optimizer"), "--shard-optimizer is not supported by --strategy horovod"),
        (("--strategy", "apex", "--precision", "fp16"), "--precision fp16 is not supported by --strategy apex"),
        (("--strategy", "apex", "--precision", "fp64", "--opt-level", "O1"), "--opt-level O1 computes in 16 bits"),
        (("--warmup", 90), "--warmup is 90 of 90 epochs"),
        (("-a", "tiny", "--pretrained"), "there are no trained weights for tiny"),
    ],
)
def test_options_that_do_not_go_together(
    data: Path, out: Path, capfd: pytest.CaptureFixture[str], options: tuple[object, ...], said: str
) -> None:
    assert said in said_of(capfd, 1, data, *QUICK, "--out", out, *options)


def test_a_network_that_there_is_not_is_found_before_images_are_listed(
    data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said = said_of(capfd, 2, data, *QUICK, "--out", tmp_path, "-a", "tinyy")
    assert said.rstrip().endswith("; did you mean tiny or tiny-bn?")
    assert list(tmp_path.iterdir()) == []


def test_one_process_is_not_started_twice(data: Path, out: Path, capfd: pytest.CaptureFixture[str]) -> None:
    said = said_of(capfd, 2, data, *QUICK, "--out", out, "--strategy", "dp")
    assert said.startswith("--strategy dp trains in one process, but there are 2")


def test_a_checkpoint_of_other_images_or_another_network(
    data: Path, out: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train(data, out, "to-go-on", 1, "--epochs", 1)
    options = (data, "-j", 0, "--out", out, "--resume", out / "to-go-on", "--epochs", 2)
    assert "--arch is tiny-bn, but" in said_of(capfd, 2, *options, "-a", "tiny-bn")
    assert "has done 1 epoch already" in said_of(capfd, 1, *options, "--epochs", 1)
    assert "has done 5 steps already" in said_of(capfd, 1, *options, "--max-steps", 5)
    other = tmp_path / "other"
    write_shapes(ShapesFolder(other, classes=7, images=33, val_images=13, size=20))
    said = said_of(capfd, 2, other, *options[1:])
    assert "was trained on 6 classes, the data has 7; 006-stripes is in only one of the two" in said
    checkpoint.save(tmp_path / "foreign", {"model": {}}, step=1)
    assert "was not written by the imagenet recipe" in said_of(
        capfd, 1, data, "--resume", tmp_path / "foreign", "--out", out
    )


def test_noise_in_the_place_of_images(out: Path) -> None:
    assert run(2, *QUICK, "--dummy", "--max-steps", 2, "--out", out, "--name", "dummy") == [0, 0]
    records = read(out / "dummy")
    assert losses(records) == pytest.approx([6.9, 6.9], abs=0.5)  # 1000 classes
