"""One line for errors of torch's that say their reason further down."""

from __future__ import annotations

import multiprocessing

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lockstep.launch.headline import (
    first_reason,
    gave_accelerate_a_backend,
    knows_two_backends,
    locations_in,
    needs_gpu,
    origin_of,
    why_worker_is_gone,
)
from lockstep.launch.report import capture


class Unmakeable(Exception):
    """torch cannot raise it again, because it needs two arguments."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f'code {code}\n  File "no frame": {text}')


class Broken(Dataset[int]):
    def __init__(self, error: Exception) -> None:
        self.error = error

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        raise self.error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("bad jpeg 37"), "bad jpeg 37"),
        (ValueError("two\nlines"), "two"),
        (KeyError("label"), "'label'"),
        (ValueError(), "ValueError"),
        (Unmakeable(3, "torn"), "test_headline.Unmakeable: code 3"),
    ],
)
def test_errors_of_workers(error: Exception, expected: str) -> None:
    with pytest.raises(Exception) as caught:  # any kind, as the worker raised it
        list(DataLoader(Broken(error), num_workers=1))
    text, kind = str(caught.value), type(caught.value).__name__
    assert origin_of(kind, text) == f"{expected} (in DataLoader worker process 0)"
    line = Broken.__getitem__.__code__.co_firstlineno + 1
    assert locations_in(text)[-1] == (__file__, line)


def _fail(_: int, text: str) -> None:
    raise ValueError(text)


def test_errors_of_spawned_processes() -> None:
    with pytest.raises(Exception) as caught:
        torch.multiprocessing.start_processes(_fail, ("bad rate",), 1, start_method="fork")
    text, kind = str(caught.value), f"torch.multiprocessing.spawn.{type(caught.value).__name__}"
    assert origin_of(kind, text) == "ValueError: bad rate (in process 0 that it had spawned)"
    report = capture(caught.value, caught.value.__traceback__, 0)
    assert (report.file, report.line) == (__file__, _fail.__code__.co_firstlineno + 1)


def test_errors_of_a_pool() -> None:
    with multiprocessing.get_context("fork").Pool(1) as pool, pytest.raises(ValueError, match="bad rate") as caught:
        pool.apply(_fail, (0, "bad rate"))
    report = capture(caught.value, caught.value.__traceback__, 0)
    assert (report.message, report.line) == ("bad rate", _fail.__code__.co_firstlineno + 1)


@pytest.mark.parametrize("message", ["", "Caught", "Caught ValueError in a net.", 'x:\n  File "a.py", line 3, in f'])
def test_other_texts_are_no_workers(message: str) -> None:
    assert origin_of("ValueError", message) is None
    assert locations_in(message) == []


def refusal(model: nn.Module, state: dict[str, torch.Tensor]) -> str:
    with pytest.raises(RuntimeError) as caught:
        model.load_state_dict(state)
    return first_reason(str(caught.value))


@pytest.mark.parametrize(
    ("noticed", "expected"),
    [
        ("is killed by signal: Killed. ", "is killed by signal: Killed (out of memory?)"),
        (
            "is killed by signal: Bus error. Out of shared memory?",
            "is killed by signal: Bus error. Out of shared memory?",
        ),
        ("exited unexpectedly with exit code 3. Details", "exited unexpectedly with exit code 3. Details"),
    ],
)
def test_worker_that_is_gone(noticed: str, expected: str) -> None:
    message = "DataLoader worker (pid(s) 17) exited unexpectedly"
    trace = f"RuntimeError: DataLoader worker (pid 17) {noticed}\n\nThe above exception\n\nRuntimeError: {message}\n"
    assert why_worker_is_gone(message, trace) == f"DataLoader worker (pid 17) {expected}"
    assert why_worker_is_gone(message, f"RuntimeError: {message}\n") is None
    assert why_worker_is_gone("no memory", trace) is None
    # What the handler of SIGCHLD raises itself, in the middle of a step.
    assert why_worker_is_gone(f"DataLoader worker (pid 17) {noticed}", "") == f"DataLoader worker (pid 17) {expected}"


def test_state_of_another_shape() -> None:
    said = refusal(nn.Linear(2, 3), nn.Linear(4, 3).state_dict())
    assert said.startswith("Error(s) in loading state_dict for Linear: size mismatch for weight")
    assert "module" not in said


def test_state_of_a_wrapped_model() -> None:
    state = nn.Linear(2, 3).state_dict()
    wrapped = {f"module.{key}": value for key, value in state.items()}
    said = refusal(nn.Linear(2, 3), wrapped)
    assert 'Missing key(s) in state_dict: "weight", "bias"' in said
    assert "the saved keys begin with 'module.'" in said
    assert "save model.module.state_dict()" in said


def test_state_for_a_wrapped_model() -> None:
    said = refusal(nn.ModuleDict({"module": nn.Linear(2, 3)}), nn.Linear(2, 3).state_dict())
    assert "load them into model.module" in said


def test_state_of_another_model() -> None:
    said = refusal(nn.Linear(2, 3), {f"layer{number}.weight": torch.ones(1) for number in range(100)})
    assert said == 'Error(s) in loading state_dict for Linear: Missing key(s) in state_dict: "weight", "bias".'
    assert len(first_reason("Error(s):\n" + "x" * 10_000)) < 300


@pytest.mark.parametrize(
    ("message", "expected"),
    [("", ""), ("text", "text"), ("text\nmore", "text"), ("text:", "text:"), ("text:\n\n", "text:")],
)
def test_plain_texts_keep_their_first_line(message: str, expected: str) -> None:
    assert first_reason(message) == expected


def test_errors_of_scripts_for_gpus() -> None:
    assert not needs_gpu("CUDA out of memory")
    if torch.backends.cuda.is_built():
        pytest.skip("this torch is built for CUDA")
    with pytest.raises(AssertionError) as caught:
        torch.ones(1, device="cuda")
    assert needs_gpu(str(caught.value))
    with pytest.raises(AttributeError) as missing:
        torch.cuda.set_device(0)
    assert needs_gpu(str(missing.value))


def test_backends_that_accelerate_refuses() -> None:
    said = "Your assigned backend {} is not available, please use gloo"
    assert gave_accelerate_a_backend(said.format("lockstep"))
    assert gave_accelerate_a_backend(said.format("cpu:lockstep,cuda:nccl"))
    assert not gave_accelerate_a_backend(said.format("nccl"))


def test_programs_that_know_two_backends() -> None:
    """As YOLOX and older releases of detectron2."""
    trace = (
        'Traceback:\n  File "comm.py", line 9, in _serialize\n    assert backend in ["gloo", "nccl"]\nAssertionError'
    )
    assert knows_two_backends("AssertionError", trace)
    assert not knows_two_backends("ValueError", trace)
    assert not knows_two_backends("AssertionError", trace.replace("nccl", "mpi"))


# As torch 2.11 has raised it on an H200.
NCCL = """NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:93, invalid usage, NCCL version 2.28.9
ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
Last error:
"""


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        ("Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 60", "NCCL: Duplicate GPU detected : rank 1"),
        ("socketProgress: Connection closed by remote peer", "NCCL: socketProgress: Connection closed by remote peer"),
        ("", "NCCL error in: "),
    ],
)
def test_of_nccls_errors_the_last_line_counts(last: str, expected: str) -> None:
    found = first_reason(NCCL + last)
    assert found.startswith(expected)
    assert ("each rank needs a GPU of its own" in found) == ("Duplicate" in last)
