"""Scripts compute where the world is, and those that are for CPUs say so: on machines with GPUs, without one here."""

from __future__ import annotations

import functools
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lockstep
from docs.samples import script_in
from lockstep import env

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No launcher's variables, and no world left open."""
    for variable in env.registry:
        monkeypatch.delenv(variable, raising=False)
    yield
    world = lockstep.current_world()
    if world is not None:
        world.shutdown()
    assert not dist.is_initialized()


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The world is on the meta device, which refuses tensors of the CPU as a GPU does."""
    monkeypatch.setattr(lockstep, "init", functools.partial(lockstep.init, device="meta"))
    monkeypatch.setattr(lockstep, "DistributedDataParallel", lambda module: module)  # shares no memory with others
    monkeypatch.setattr(lockstep.metrics, "synchronize", lambda *_: (0.0,))


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs, as far as torch says."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)


def run_script_of_readme() -> None:
    """The block of Python of README, as it is printed."""
    exec(compile(script_in((ROOT / "README.md").read_text()), "README.md", "exec"), {})


def run_example() -> None:
    runpy.run_path(str(EXAMPLES / "train.py"))


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("script", [run_script_of_readme, run_example])
def test_script_trains_where_the_world_is(script: Callable[[], None]) -> None:
    script()


def test_script_of_readme_trains() -> None:
    run_script_of_readme()


def test_example_is_the_script_of_readme() -> None:
    example = (EXAMPLES / "train.py").read_text()
    _, docstring, script = example.split('"""')
    assert docstring
    assert script.strip() == script_in((ROOT / "README.md").read_text()).strip()


def names_of(example: str) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / example), run_name="imported")


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("example", ["tensors.py", "distributed_sgd.py"])
def test_example_for_the_cpu_runs_where_gpus_are(example: str) -> None:
    names_of(example)["main"]()


@pytest.mark.usefixtures("gpus")
def test_spawned_ranks_run_on_the_cpu_where_gpus_are() -> None:
    assert isinstance(names_of("spawn.py")["spawned_by_lockstep"](), float)
