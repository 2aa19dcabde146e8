"""What glibc is told about the memory of gradients."""

from __future__ import annotations

import resource
from collections.abc import Callable

import pytest
import torch
from torch import nn

import lockstep
from lockstep import env
from lockstep.parallel import gradient_memory
from lockstep.parallel.gradient_memory import keep_memory_of_gradients

MIB = 1 << 20
TRIM, MMAP = -1, -3


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What glibc would be told; nobody has told it anything yet."""
    found: list[tuple[int, int]] = []

    def mallopt(name: int, value: int) -> int:
        found.append((name, value))
        return 1

    for variable in (env.GLIBC_TUNABLES, env.MALLOC_MMAP_THRESHOLD_, env.MALLOC_TRIM_THRESHOLD_):
        monkeypatch.delenv(variable.name, raising=False)
    monkeypatch.setattr(gradient_memory, "_told", (0, 0))
    monkeypatch.setattr(gradient_memory, "_mallopt", mallopt)
    return found


def of(*mib: int) -> list[torch.Tensor]:
    """Parameters of that many MiB each; none of it is ever touched."""
    return [torch.empty(one * MIB // 4) for one in mib]


def test_two_steps_gradients_are_kept(told: list[tuple[int, int]]) -> None:
    keep_memory_of_gradients(of(4, 40, 16))
    assert told == [(MMAP, 41 * MIB), (TRIM, 2 * 60 * MIB + 41 * MIB)]


def test_small_models_leave_it_where_it_goes_by_itself(told: list[tuple[int, int]]) -> None:
    keep_memory_of_gradients(of(1))
    assert told[0] == (MMAP, 33 * MIB)


def test_of_several_models_the_largest_counts(told: list[tuple[int, int]]) -> None:
    keep_memory_of_gradients(of(64))
    told.clear()
    keep_memory_of_gradients(of(1))
    keep_memory_of_gradients(of(64))
    assert told == []
    keep_memory_of_gradients(of(128))
    assert told[0] == (MMAP, 129 * MIB)


def test_numbers_fit_what_they_are_told_in(told: list[tuple[int, int]]) -> None:
    keep_memory_of_gradients([torch.empty(1, dtype=torch.float64).expand(1 << 29)])
    assert told == [(MMAP, 1 << 30), (TRIM, 2**31 - 1)]


@pytest.mark.parametrize("parameters", [[], [torch.empty(8 * MIB, device="meta")]], ids=["none", "elsewhere"])
def test_nothing_is_said_for_other_memory(told: list[tuple[int, int]], parameters: list[torch.Tensor]) -> None:
    keep_memory_of_gradients(parameters)
    assert told == []


@pytest.mark.parametrize(
    ("name", "value", "decides"),
    [
        ("MALLOC_TRIM_THRESHOLD_", "131072", True),
        ("MALLOC_MMAP_THRESHOLD_", "131072", True),
        ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1", True),
        ("GLIBC_TUNABLES", "glibc.cpu.x86_rep_movsb_threshold=1", False),
    ],
)
def test_what_somebody_has_said_stays(
    told: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, name: str, value: str, decides: bool
) -> None:
    monkeypatch.setenv(name, value)
    keep_memory_of_gradients(of(4))
    assert (told == []) is decides


@pytest.mark.parametrize(
    ("largest", "expected"),
    [
        (32 * MIB, [(MMAP, 41 * MIB), (MMAP, 32 * MIB), (TRIM, 2 * 40 * MIB + 41 * MIB)]),
        (0, [(MMAP, 41 * MIB), (MMAP, 32 * MIB)]),
    ],
    ids=["older glibc", "another malloc"],
)
def test_what_is_refused_is_not_half_told(
    told: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, largest: int, expected: list[tuple[int, int]]
) -> None:
    """A trim threshold without the other one has glibc map every larger tensor of the program anew."""

    def mallopt(name: int, value: int) -> int:
        told.append((name, value))
        return int(name != MMAP or value <= largest)

    monkeypatch.setattr(gradient_memory, "_mallopt", mallopt)
    keep_memory_of_gradients(of(40))
    assert told == expected


def test_other_c_libraries_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_memory, "_mallopt", None)
    monkeypatch.setattr(gradient_memory, "_told", (0, 0))
    keep_memory_of_gradients(of(4))
    assert gradient_memory._told == (0, 0)


def faults_of(step: Callable[[], None], count: int) -> float:
    """Page faults in a step."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(count):
        step()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / count


@pytest.mark.skipif(
    gradient_memory._mallopt is None or gradient_memory._is_decided(),
    reason="another allocator, or settings of its own",
)
def test_steps_of_a_large_model_take_no_page_faults() -> None:
    with lockstep.init(backend="lockstep", device="cpu"):
        layers = [nn.Linear(784, 2048), nn.Linear(2048, 2048), nn.Linear(2048, 2048), nn.Linear(2048, 10)]
        model = lockstep.DistributedDataParallel(nn.Sequential(*layers))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        inputs = torch.randn(8, 784)

        def step() -> None:
            optimizer.zero_grad()
            model(inputs).sum().backward()
            optimizer.step()

        faults_of(step, 4)
        # 10M gradients are 9800 pages. A busy kernel takes some pages away by itself, and steps fault those in again.
        assert faults_of(step, 5) < 9800 / 4
