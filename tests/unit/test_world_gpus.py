"""Which GPU a rank takes, without one: torch is told how many there are."""

from __future__ import annotations

import pytest
import torch

from lockstep import world
from lockstep.errors import SetupError
from lockstep.topology import Topology


def choose(
    monkeypatch: pytest.MonkeyPatch, visible: int, launcher: str, of_host: int | None, local_rank: int = 3
) -> torch.device:
    """The device of one of four ranks of a host."""
    taken: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.delenv("SLURM_GPUS_ON_NODE", raising=False)
    if of_host is not None:
        monkeypatch.setenv("SLURM_GPUS_ON_NODE", str(of_host))
    topology = Topology(local_rank, 4, local_rank, 4, launcher=launcher)
    chosen = world._choose_device("nccl", topology, None)
    assert taken == [chosen]
    return chosen


@pytest.mark.parametrize(
    ("visible", "launcher", "of_host", "index"),
    [
        (4, "torchrun", None, 3),
        (4, "slurm", 4, 3),  # each task sees all
        (1, "slurm", 4, 0),  # --gpus-per-task=1: each its own
        (2, "slurm", 8, 0),  # --gpus-per-task=2
    ],
)
def test_rank_takes_the_gpu_that_is_its_own(
    monkeypatch: pytest.MonkeyPatch, visible: int, launcher: str, of_host: int | None, index: int
) -> None:
    assert choose(monkeypatch, visible, launcher, of_host) == torch.device("cuda", index)


@pytest.mark.parametrize(
    ("visible", "launcher", "of_host"),
    [(1, "torchrun", 4), (1, "slurm", None), (1, "slurm", 1), (3, "slurm", 3), (0, "slurm", 4)],
)
def test_more_ranks_than_gpus_stop_all_ranks(
    monkeypatch: pytest.MonkeyPatch, visible: int, launcher: str, of_host: int | None
) -> None:
    for local_rank in range(4):
        with pytest.raises(SetupError, match=rf"this host has {visible} GPU\(s\) for 4 rank\(s\)"):
            choose(monkeypatch, visible, launcher, of_host, local_rank)
