"""Which GPU a rank takes, without one: torch is told how many there are."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import lockstep
from lockstep import device_choice, env, placement
from lockstep.errors import SetupError
from lockstep.launch.free_port import find_free_port
from lockstep.testing import limit_s, run_ranks
from lockstep.topology import Topology, read_topology


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
    chosen = device_choice.choose_device("nccl", topology, None)
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


def test_local_rank_alone_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the ranks of this host, which may each see GPUs of their own, nobody has told the number."""
    taken: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    said = {"RANK": "4", "LOCAL_RANK": "0", "WORLD_SIZE": "8"}
    assert device_choice.choose_device("nccl", read_topology(said), None) == torch.device("cuda", 0)
    with pytest.raises(SetupError, match=r"rank 5 would use cuda:1, but this host has 1 GPU"):
        device_choice.choose_device("nccl", read_topology(said | {"RANK": "5", "LOCAL_RANK": "1"}), None)


def test_error_says_what_nobody_has_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SetupError, match="set LOCAL_RANK to the number of each rank's GPU, and LOCAL_WORLD_SIZE"):
        device_choice.choose_device("nccl", read_topology({"RANK": "1", "WORLD_SIZE": "2"}), None)


def init_in_a_container(port: int, gpus_here: int) -> list[object]:
    """`init` where each rank has a container, as in Kubernetes: told its rank, and nothing of its host."""
    rank = env.RANK.get()
    for variable in (env.LOCKSTEP_RENDEZVOUS, env.LOCAL_RANK, env.LOCAL_WORLD_SIZE):
        variable.unset()
    env.MASTER_ADDR.set("127.0.0.1")
    env.MASTER_PORT.set(port)
    taken: list[torch.device] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement, "describe_own_host", lambda gpus: json.dumps(["boot", f"processes {rank}", *gpus]))
        patch.setattr(torch.cuda, "device_count", lambda: gpus_here)
        patch.setattr(torch.cuda, "set_device", taken.append)
        patch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"GPU {rank}.{index}"))
        with lockstep.init("lockstep", device="cuda" if gpus_here else None, timeout=limit_s(30)) as found:
            dist.barrier()
    return [found.local_rank, found.local_world_size, found.node_rank, *map(str, taken)]


@pytest.mark.parametrize("gpus_here", [0, 1])
def test_ranks_in_containers_take_the_one_gpu_that_each_sees(gpus_here: int) -> None:
    found = run_ranks(init_in_a_container, 2, find_free_port(), gpus_here, init=False)
    assert found == [[0, 1, rank, *["cuda:0"] * gpus_here] for rank in range(2)]


@pytest.mark.parametrize(
    ("visible", "launcher", "of_host"),
    [(1, "torchrun", 4), (1, "slurm", None), (1, "slurm", 1), (3, "slurm", 3)],
)
def test_more_ranks_than_gpus_stop_all_ranks(
    monkeypatch: pytest.MonkeyPatch, visible: int, launcher: str, of_host: int | None
) -> None:
    for local_rank in range(4):
        with pytest.raises(SetupError, match=rf"this host has {visible} GPU\(s\) for 4 rank\(s\)"):
            choose(monkeypatch, visible, launcher, of_host, local_rank)


@pytest.mark.parametrize(
    ("is_built", "visible", "why"),
    [
        (False, None, f"torch {torch.__version__} is built without CUDA"),
        (True, "", "CUDA_VISIBLE_DEVICES is ''"),
        (True, None, "`nvidia-smi` says whether the machine has one"),
    ],
)
def test_no_gpu_at_all_stops_all_ranks_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, is_built: bool, visible: str | None, why: str
) -> None:
    """There is no number of ranks that would do, so none is proposed."""
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: is_built)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    for local_rank in range(4):
        expected = re.escape(f"rank {local_rank} would use cuda:{local_rank}, but torch sees no GPU here: {why}")
        with pytest.raises(SetupError, match=rf"{expected}.* write lockstep\.init\(device='cpu'\)"):
            choose(monkeypatch, 0, "slurm", 4, local_rank)
