"""Checkpoints: what comes back, what is refused, and what is left after a kill at any moment."""

from __future__ import annotations

import errno
import hashlib
import os
import pickle
import signal
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

from lockstep import checkpoint
from lockstep.errors import CheckpointError, CheckpointNotWritten, InputError, InputTypeError
from lockstep.testing import WorkerDied, run_ranks


def damage(path: Path) -> None:
    """Flip one bit in the middle, as a failing disk does."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def save_steps(folder: Path, *steps: int, keep: int = 10) -> list[Path]:
    return [checkpoint.save(folder, {"step": step}, step=step, keep=keep) for step in steps]


def test_everything_that_may_be_saved_comes_back(tmp_path: Path) -> None:
    state: dict[str, Any] = {
        "tensors": [torch.arange(6.0).view(2, 3), torch.ones(2, dtype=torch.bfloat16), torch.tensor(7)],
        "parameter": torch.nn.Parameter(torch.zeros(2)),
        "ordered": OrderedDict(weight=torch.ones(1)),
        "numbers": (1, 2.5, 1j, True, None),
        "texts": ["ä", b"raw"],
        "kinds": {torch.float64, torch.int8},
        "device": torch.device("cpu"),
        "shape": torch.Size([2, 3]),
        "nested": {0: {"betas": (0.9, 0.999)}},
    }
    loaded = checkpoint.load(checkpoint.save(tmp_path / "new" / "folder", state, step=3))
    assert list(loaded) == list(state)
    for expected, actual in zip(state.pop("tensors"), loaded.pop("tensors"), strict=True):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)
    assert torch.equal(loaded.pop("parameter"), state.pop("parameter"))
    assert loaded == state


def test_numbers_of_numpy_become_those_of_python(tmp_path: Path) -> None:
    model = OrderedDict(weight=torch.ones(1), scale=np.float32(0.5))
    model._metadata = {"version": 2}  # type: ignore[attr-defined]  # as of a module's state_dict
    state: dict[str, Any] = {
        "lr": np.float64(0.1),
        "rates": [np.float64(0.1), 2],
        "pair": (np.int64(3), np.bool_(True)),
        "kinds": {np.int32(4)},
        "milestones": Counter({3: np.int64(2)}),
        "model": model,
        "plain": [1, 2],
    }
    if not checkpoint._loads_counters():
        del state["milestones"]
    loaded = checkpoint.load(checkpoint.save(tmp_path, state, step=1))
    assert loaded == state
    assert (type(loaded["lr"]), type(loaded["rates"][0]), type(loaded["model"]["scale"])) == (float, float, float)
    assert [type(each) for each in loaded["pair"]] == [int, bool]
    assert loaded["model"]._metadata == {"version": 2}
    assert list(loaded["model"]) == ["weight", "scale"]
    assert type(state["lr"]) is type(state["rates"][0]) is np.float64, "what was given is as it was"


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda own: lr_scheduler.LambdaLR(own, lambda epoch: 0.5),
    "MultiplicativeLR": lambda own: lr_scheduler.MultiplicativeLR(own, lambda epoch: 0.5),
    "StepLR": lambda own: lr_scheduler.StepLR(own, 2),
    "MultiStepLR": lambda own: lr_scheduler.MultiStepLR(own, [1, 3]),
    "ConstantLR": lr_scheduler.ConstantLR,
    "LinearLR": lr_scheduler.LinearLR,
    "ExponentialLR": lambda own: lr_scheduler.ExponentialLR(own, 0.9),
    "CosineAnnealingLR": lambda own: lr_scheduler.CosineAnnealingLR(own, 5),
    "PolynomialLR": lr_scheduler.PolynomialLR,
    "CyclicLR": lambda own: lr_scheduler.CyclicLR(own, 0.1, 0.2),
    "OneCycleLR": lambda own: lr_scheduler.OneCycleLR(own, 0.2, 10),
    "CosineAnnealingWarmRestarts": lambda own: lr_scheduler.CosineAnnealingWarmRestarts(own, 3),
    "ReduceLROnPlateau": lr_scheduler.ReduceLROnPlateau,
    "ChainedScheduler": lambda own: lr_scheduler.ChainedScheduler([lr_scheduler.MultiStepLR(own, [1])]),
    "SequentialLR": lambda own: lr_scheduler.SequentialLR(
        own, [lr_scheduler.ConstantLR(own), lr_scheduler.MultiStepLR(own, [1])], milestones=[2]
    ),
    "SWALR": lambda own: torch.optim.swa_utils.SWALR(own, 0.1),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_may_be_saved(tmp_path: Path, name: str) -> None:
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1, momentum=0.9)
    scheduler = SCHEDULERS[name](optimizer)
    optimizer.step()
    scheduler.step(*([0.5] if name == "ReduceLROnPlateau" else []))
    if callable(scheduler.state_dict().get("anneal_func")):
        pytest.skip("torch 2.6 has a function in it, which a safe load refuses")
    checkpoint.save(tmp_path, {"scheduler": scheduler.state_dict()}, step=1)
    assert checkpoint.load(tmp_path) == {"scheduler": scheduler.state_dict()}


def test_the_name_holds_step_and_checksum(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, {"a": 1}, step=12)
    checksum = hashlib.sha256(path.read_bytes()).hexdigest()
    assert path == tmp_path / f"step-00000012-{checksum[:16]}.pt"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_means_its_newest_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "digits"
    paths = save_steps(run / "checkpoints", 9, 10, 100_000_000)
    assert checkpoint.available(run / "checkpoints") == [paths[2], paths[1], paths[0]]
    assert checkpoint.load(run / "checkpoints") == {"step": 100_000_000}
    assert checkpoint.load(run) == {"step": 100_000_000}
    assert checkpoint.load(paths[0]) == {"step": 9}


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3, 4, 5, keep=2)
    assert [checkpoint.load(path)["step"] for path in checkpoint.available(tmp_path)] == [5, 4]


def test_going_back_leaves_the_later_ones_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that was resumed from step 100 does not continue, later, from step 300 of the run that was left."""
    _, _, last = save_steps(tmp_path, 100, 200, 300, keep=3)
    assert "WARNING" not in capsys.readouterr().err
    resumed = checkpoint.load(checkpoint.available(tmp_path)[-1])
    assert resumed == {"step": 100}
    save_steps(tmp_path, 150, keep=3)
    assert "step 150 comes after steps 200, 300 in" in capsys.readouterr().err
    assert checkpoint.load(tmp_path) == {"step": 150}
    assert [checkpoint.load(path)["step"] for path in checkpoint.available(tmp_path)] == [150, 100], "100 is still here"

    save_steps(tmp_path, 160, 300, keep=3)
    assert checkpoint.load(tmp_path) == {"step": 300}
    abandoned = tmp_path / f"abandoned-{last.name}"
    assert checkpoint.load(abandoned) == {"step": 300}, "nothing is lost"
    damage(abandoned)
    with pytest.raises(CheckpointError, match="SHA-256"):
        checkpoint.load(abandoned)
    assert capsys.readouterr().err == ""


def test_a_kill_while_going_back_leaves_where_it_went_back_to(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 8, 9)
    (died,) = run_ranks(go_back_and_die, 1, tmp_path, init=False, expect_errors=True)
    assert isinstance(died, WorkerDied)
    assert checkpoint.load(tmp_path) == {"step": 1}


def go_back_and_die(folder: Path) -> None:
    """Be killed before the new file of step 3 has its name."""
    rename = Path.replace

    def die(path: Path, target: Path) -> None:
        if path.name.startswith(".writing-"):
            os.kill(os.getpid(), signal.SIGKILL)
        rename(path, target)

    Path.replace = die  # type: ignore[assignment,method-assign]
    checkpoint.save(folder, {"step": 3}, step=3)


def test_a_damaged_checkpoint_is_passed_over_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = save_steps(tmp_path, 1, 2, 3)
    damage(paths[2])
    paths[1].write_bytes(paths[1].read_bytes()[:-100])
    assert checkpoint.load(tmp_path) == {"step": 1}
    said = capsys.readouterr().err
    assert f"{paths[2]} is damaged" in said
    assert f"{paths[1]} is damaged" in said


def test_a_damaged_checkpoint_that_was_named_is_an_error(tmp_path: Path) -> None:
    paths = save_steps(tmp_path, 1, 2)
    damage(paths[1])
    with pytest.raises(CheckpointError, match=rf"{paths[1].name} is damaged.*Intact ones next to it: {paths[0].name}"):
        checkpoint.load(paths[1])


def test_nothing_whole_is_an_error_that_lists_what_there_is(tmp_path: Path) -> None:
    paths = save_steps(tmp_path, 1, 2)
    for path in paths:
        damage(path)
    with pytest.raises(CheckpointError, match=rf"no intact checkpoint in {tmp_path}: {paths[1].name}.*{paths[0].name}"):
        checkpoint.load(tmp_path)


@pytest.mark.parametrize("name", ["nowhere", "empty"])
def test_no_checkpoint_is_an_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="no checkpoint"):
        checkpoint.load(tmp_path / name)


def test_a_renamed_file_loads_with_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = checkpoint.save(tmp_path, {"a": 1}, step=1).rename(tmp_path / "best.pt")
    assert checkpoint.load(path) == {"a": 1}
    assert "no checksum in its name" in capsys.readouterr().err


class Exploit:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("exploited",)


def test_code_in_a_checkpoint_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"model": Exploit()}, "draft.pt")
    checksum = hashlib.sha256(Path("draft.pt").read_bytes()).hexdigest()[:16]
    Path("draft.pt").rename(f"step-00000001-{checksum}.pt")
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.load(tmp_path)
    assert not Path("exploited").exists()


@pytest.mark.parametrize("content", [b"", b"text", pickle.dumps({"a": 1})])
def test_a_file_that_is_no_archive_is_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "best.pt"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"best\.pt is damaged: it does not begin"):
        checkpoint.load(path)


@pytest.mark.parametrize(
    ("state", "place"),
    [
        ({"optimizer": {"lr": np.ones(1)}}, r"state\['optimizer'\]\['lr'\] is a numpy.ndarray"),
        ({"began": np.datetime64("2025-01-01")}, r"state\['began'\] is a numpy.datetime64"),
        ({"steps": [1, Exploit()]}, r"state\['steps'\]\[1\] is a .*Exploit"),
        ({"table": {(1, 2): 3}}, r"state\['table'\] has a key of type tuple"),
    ],
)
def test_what_could_not_be_loaded_is_not_saved(tmp_path: Path, state: dict[str, Any], place: str) -> None:
    with pytest.raises(InputTypeError, match=place):
        checkpoint.save(tmp_path, state, step=1)
    assert not list(tmp_path.iterdir())


def test_arguments_out_of_range(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="step is -1"):
        checkpoint.save(tmp_path, {}, step=-1)
    with pytest.raises(InputError, match="keep is 0"):
        checkpoint.save(tmp_path, {}, step=1, keep=0)
    with pytest.raises(InputError, match=r"step is 5\.0; expected an integer"):
        checkpoint.save(tmp_path, {}, step=10 / 2)  # type: ignore[arg-type]


def test_random_state_of_one_process(tmp_path: Path) -> None:
    states = checkpoint.gather_rng()
    expected = torch.rand(3)
    path = checkpoint.save(tmp_path, {"rng": states}, step=1)
    checkpoint.restore_rng(checkpoint.load(path)["rng"])
    assert torch.equal(torch.rand(3), expected)
    for wrong in (None, {}, torch.get_rng_state()):
        with pytest.raises(InputTypeError, match=r"expected what gather_rng\(\) returned"):
            checkpoint.restore_rng(wrong)  # type: ignore[arg-type]


def save_and_die(folder: Path, killed_at: str) -> None:
    """Save steps 1 and 2; be killed in the second, just before the call named by `killed_at`."""
    checkpoint.save(folder, {"step": 1}, step=1, keep=1)

    def die(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    owner, name = {
        "write": (checkpoint._HashingWriter, "write"),
        "fsync": (os, "fsync"),
        "rename": (Path, "replace"),
        "sync folder": (checkpoint, "_sync_folder"),
        "delete": (Path, "unlink"),
    }[killed_at]
    setattr(owner, name, die)
    checkpoint.save(folder, {"step": 2}, step=2, keep=1)


@pytest.mark.parametrize(
    ("killed_at", "loaded"), [("write", 1), ("fsync", 1), ("rename", 1), ("sync folder", 2), ("delete", 2)]
)
def test_a_kill_while_saving_leaves_a_whole_checkpoint(tmp_path: Path, killed_at: str, loaded: int) -> None:
    (died,) = run_ranks(save_and_die, 1, tmp_path, killed_at, init=False, expect_errors=True)
    assert isinstance(died, WorkerDied)
    assert checkpoint.load(tmp_path) == {"step": loaded}
    # The next writer clears up what the killed one left.
    path = checkpoint.save(tmp_path, {"step": 3}, step=3, keep=1)
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_made_is_named_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "checkpoints"
    for attempt in (lambda: checkpoint.save(folder, {}, step=1), lambda: checkpoint.check_folder(folder)):
        with pytest.raises(
            CheckpointNotWritten, match=r"rank 0 cannot make \S+/checkpoints: Not a directory; "
        ) as caught:
            attempt()
        assert caught.value.__suppress_context__
        assert (caught.value.errno, isinstance(caught.value, OSError)) == (errno.ENOTDIR, True)
    checkpoint.check_folder(tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []


def test_a_full_disk_is_said_as_the_system_says_it(tiny_tmpfs: Callable[[str], Path]) -> None:
    """torch raises an error of its own, of the archive that it could not end."""
    folder = tiny_tmpfs("64k")
    with pytest.raises(CheckpointNotWritten, match=r"rank 0 cannot write to \S+: No space left on device; "):
        checkpoint.save(folder, {"a": torch.zeros(100_000)}, step=1)
    assert list(folder.iterdir()) == []
