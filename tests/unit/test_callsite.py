"""Finding the user's line, and finding it without a search."""

from __future__ import annotations

import ast
import linecache
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
import torch
import torch.distributed as dist

import lockstep
from lockstep import frames
from lockstep.comm import callsite
from lockstep.frames import split_site


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each search through all frames."""
    found: list[int] = []
    search = callsite._search

    def counting(frame: FrameType | None) -> object:
        found.append(1)
        return search(frame)

    monkeypatch.setattr(callsite, "_search", counting)
    return found


# Their names before and since torch 2.13.
_SINGLE: dict[str, Callable[..., object]] = {
    "all_gather": getattr(dist, "all_gather_single", dist.all_gather_into_tensor),
    "reduce_scatter": getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor),
}
VERBS: dict[str, Callable[[torch.Tensor], object]] = {
    "all_reduce": dist.all_reduce,
    "broadcast": lambda tensor: dist.broadcast(tensor, 0),
    "barrier": lambda _: dist.barrier(),
    "all_to_all_single": lambda tensor: dist.all_to_all_single(tensor.clone(), tensor),
    "all_gather_single": lambda tensor: _SINGLE["all_gather"](tensor.clone(), tensor),
    "reduce_scatter_single": lambda tensor: _SINGLE["reduce_scatter"](tensor.clone(), tensor),
}


@pytest.mark.parametrize("verb", VERBS)
def test_calls_in_a_loop_are_searched_for_once(verb: str, searches: list[int]) -> None:
    """A search costs more than all else that the flight record does."""
    tensor = torch.ones(3)
    with lockstep.init(backend="lockstep", device="cpu"):
        searches.clear()
        for _ in range(10):
            VERBS[verb](tensor)
        assert len(searches) == 1


def test_line_is_that_of_the_innermost_user() -> None:
    locate = callsite.make_locator()

    def helper() -> callsite.CallSite:
        return locate()

    line = sys._getframe().f_lineno
    sites = [helper(), helper()]
    assert sites == [(__file__, line - 2, "helper")] * 2


def test_another_line_of_the_same_function_is_another_site() -> None:
    locate = callsite.make_locator()
    line = sys._getframe().f_lineno
    sites = [
        locate(),
        locate(),
    ]
    again = locate()
    assert [site[1] - line for site in (*sites, again)] == [2, 3, 5]


def test_functions_that_are_gone_are_not_taken_for_new_ones() -> None:
    """Identities of code are used again once the code is gone."""
    locate = callsite.make_locator()
    for number in range(50):
        names: dict[str, object] = {"locate": locate}
        source = "\n" * number + "def call():\n    return locate()\n"
        exec(compile(source, f"/home/user/script{number}.py", "exec"), names)
        call = names["call"]
        assert callable(call)
        assert call() == (f"/home/user/script{number}.py", number + 2, "call")


@pytest.mark.parametrize("in_another", [False, True])
def test_line_of_a_backward_pass_that_autograd_runs_in_a_thread_of_its_own(in_another: bool) -> None:
    """As it does on a GPU: the thread of the hook has no line of the user's. Of two that wait, nobody knows which."""
    sites: list[callsite.CallSite] = []
    note = eval("lambda: sites.append(locate())", {"sites": sites, "locate": callsite.make_locator()})

    def start(function: Callable[[], object]) -> None:
        thread = threading.Thread(target=function)
        thread.start()
        thread.join()

    weight, other = (torch.ones(1, requires_grad=True) for _ in range(2))
    other.register_hook(lambda _: start(note))
    pass_of_another = other.sum().backward
    weight.register_hook(lambda _: start(pass_of_another if in_another else note))
    weight.sum().backward()
    ((file, line, _),) = sites
    assert linecache.getline(file, line).strip() == ("" if in_another else "weight.sum().backward()")


def test_function_of_ours_is_named_beside_the_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What it does inside says nothing to who called it."""
    sites: list[callsite.CallSite] = []
    names = {"sites": sites, "locate": callsite.make_locator(), "written": str(tmp_path / f"step-{1:08}-{0:016x}.pt")}
    on_rank_zero = eval("lambda _: sites.append(locate()) or written", names)  # of no file, as a user's would be
    monkeypatch.setattr(lockstep.checkpoint, "on_rank_zero", on_rank_zero)
    lockstep.checkpoint.save(tmp_path, {}, step=1)
    (text,) = map(callsite.site_text, sites)
    own = test_function_of_ours_is_named_beside_the_line.__name__
    assert text.endswith(f" in {own} (checkpoint.save)")
    assert split_site(text) == (text.removesuffix(" (checkpoint.save)"), "checkpoint.save")
    assert split_site("train.py:81 in main") == ("train.py:81 in main", "")


@pytest.mark.parametrize(("path", "function"), frames._PUBLIC_CALLS)
def test_functions_that_are_named_so_exist(path: str, function: str) -> None:
    tree = ast.parse(Path(path).read_text())
    assert function in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
