"""Tracebacks as users see them."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest
import torch

import lockstep
from lockstep.frames import without_own, without_own_lines
from lockstep.rank_zero import on_rank_zero


def fail() -> str:
    raise ValueError("of the user")


def names_of(error: BaseException) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(without_own(error.__traceback__))]


def test_errors_that_came_through_lockstep_are_shown_without_its_frames() -> None:
    """Such as one that a signal raises in a wait: it was eleven frames away from the user's line."""
    with pytest.raises(ValueError, match="of the user") as caught:
        on_rank_zero(fail)
    every = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert every == ["test_errors_that_came_through_lockstep_are_shown_without_its_frames", "on_rank_zero", "fail"]
    assert names_of(caught.value) == [every[0], every[2]]


def test_errors_inside_lockstep_keep_its_frames() -> None:
    with pytest.raises(TypeError) as caught:
        on_rank_zero("no function")  # type: ignore[arg-type]
    assert names_of(caught.value)[-1] == "on_rank_zero"


class Halves(torch.nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(inputs)

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Linear(3, 1))


def test_calls_of_modules_are_not_in_the_way_of_the_line_that_matters() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        Halves()(torch.ones(2, 4))
    assert names_of(caught.value) == [
        "test_calls_of_modules_are_not_in_the_way_of_the_line_that_matters",
        "forward",
        "forward",
    ]


def test_an_error_that_torch_raises_there_is_shown_there() -> None:
    with pytest.raises(NotImplementedError) as caught:
        torch.nn.Sequential(torch.nn.Module())(torch.ones(1))
    assert names_of(caught.value) == ["test_an_error_that_torch_raises_there_is_shown_there", "_forward_unimplemented"]


class Broken(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        raise ValueError("of the user")


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_of_a_workers_traceback_the_users_lines_are_left() -> None:
    with pytest.raises(ValueError, match="of the user") as caught:
        list(lockstep.DataLoader(Broken(), 2, num_workers=1, multiprocessing_context="fork"))
    text = str(caught.value)
    assert text.count(f"{Path(lockstep.__file__).parent}/data/") > 3
    _, _, within = without_own_lines(text).partition("Original Traceback (most recent call last):\n")
    assert within.count("  File ") == 1
    assert within.startswith(f'  File "{__file__}", line ')
    assert within.endswith("ValueError: of the user\n")
