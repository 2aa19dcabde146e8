"""The programs that the field's introductions of 2018 to 2021 add up to, assembled and started as their readers did.

Each trains the same model on the same points; its losses are compared, step by step and bit for bit, with those of
one process in plain PyTorch that computes every rank's gradient and averages them. Two summands have one sum, and
halving is exact, so nothing may differ.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_sgd import DataPartitioner
from torch import nn
from torch.utils.data import DataLoader, Sampler
from torch.utils.data.distributed import DistributedSampler
from toy import Points, make_model

from launching import Launches
from lockstep.launch.free_port import find_free_port
from lockstep.testing import limit_s

PROGRAMS = Path(__file__).parent / "programs"
NUM_RANKS = 2
BATCH_SIZE = 24
# Some start two interpreters that import torch, on a machine that may be busy with others.
DEADLINE_S = 120


pytestmark = pytest.mark.usefixtures("forked")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As in the programs: sums over threads would be others."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def train(rounds: list[list[list[Any]]], lr: float, momentum: float = 0.0) -> tuple[list[list[float]], nn.Module]:
    """Losses of every rank in every step, and the model at the end.

    Args:
        rounds: for each step, each rank's batch.
    """
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    losses = []
    for batches in rounds:
        gradients = []
        losses.append([])
        for points, target in batches:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(points), target)
            loss.backward()
            losses[-1].append(loss.item())
            gradients.append([parameter.grad for parameter in model.parameters()])
        for parameter, parts in zip(model.parameters(), zip(*gradients, strict=True), strict=True):
            parameter.grad = sum(parts) / len(parts)
        optimizer.step()
    return [list(each) for each in zip(*losses, strict=True)], model


@cache
def sampled_rounds(num_epochs: int = 2) -> list[list[list[Any]]]:
    """What `DistributedSampler` gives two ranks."""
    rounds: list[list[list[Any]]] = []
    samplers: list[Sampler[int]] = [DistributedSampler(Points(), NUM_RANKS, rank) for rank in range(NUM_RANKS)]
    for epoch in range(num_epochs):
        epochs = []
        for sampler in samplers:
            sampler.set_epoch(epoch)
            epochs.append(list(DataLoader(Points(), batch_size=BATCH_SIZE // NUM_RANKS, sampler=sampler)))
        rounds += [list(batches) for batches in zip(*epochs, strict=True)]
    return rounds


def run(launches: Launches, program: str, *arguments: str, command: str, options: tuple[str, ...] = ()) -> list[Any]:
    """What the ranks reported, in order."""
    words = (*options, str(PROGRAMS / f"{program}.py"), *arguments)
    process = launches.start(*words, command=command)
    out, err = process.communicate(timeout=limit_s(DEADLINE_S))
    assert process.returncode == 0, err
    return sorted(json.loads(line.removeprefix("[0] ").removeprefix("[1] ")) for line in out.splitlines())


def check_losses(reports: list[Any]) -> nn.Module:
    expected, model = train(sampled_rounds(), lr=0.5)
    assert [report[0] for report in reports] == [0, 1]
    assert [report[1] for report in reports] == expected
    return model


def test_program_that_forks(launches: Launches) -> None:
    """Under the launcher too, whose variables are not for the processes that it forks."""
    program = str(PROGRAMS / "fork_processes.py")
    done = launches.run("--nproc", "1", "--no-prefix", program, str(find_free_port()))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"{words}: rank {rank} has data {value}"
        for words, value in (("isend", 1.0), ("send", 1.0), ("sum", 2.0))
        for rank in (0, 1)
    ]


def test_hand_written_sgd(launches: Launches) -> None:
    reports = run(launches, "distributed_sgd", command="run", options=("--nproc", "2"))
    loaders, states = [], []
    for rank in range(NUM_RANKS):
        torch.manual_seed(1234)
        partition = DataPartitioner(Points(), [0.5, 0.5]).use(rank)
        loaders.append(DataLoader(partition, batch_size=BATCH_SIZE // NUM_RANKS, shuffle=True))
        make_model()
        states.append(torch.get_rng_state())
    rounds: list[list[list[Any]]] = []
    for _ in range(3):
        epochs = []
        for rank, loader in enumerate(loaders):
            torch.set_rng_state(states[rank])
            epochs.append(list(loader))
            states[rank] = torch.get_rng_state()
        rounds += [list(batches) for batches in zip(*epochs, strict=True)]
    expected, _ = train(rounds, lr=0.5, momentum=0.5)
    per_epoch = len(rounds) // 3
    means = [
        [sum(losses[first : first + per_epoch]) / per_epoch for first in range(0, len(rounds), per_epoch)]
        for losses in expected
    ]
    assert reports == [[rank, losses] for rank, losses in enumerate(means)]
    assert means[0][-1] < means[0][0] / 2


def test_program_for_torch_distributed_launch(launches: Launches) -> None:
    options = ("--nproc_per_node=2", f"--master_port={find_free_port()}")
    reports = run(launches, "launch_main", command="launch", options=options)
    model = check_losses(reports)
    assert [report[2] for report in reports] == [0, 1], "the local ranks that the launcher passed"
    last = [losses[-1] for _, losses, *_ in reports]
    assert reports[0][3] == reports[1][3]
    assert reports[0][3][0] == (torch.tensor(last[0]) + torch.tensor(last[1])).item() / 2
    assert 0.5 < reports[0][3][1] <= reports[0][3][2] <= 1
    saved = torch.load(launches.folder / "1.ckpt")
    assert all(torch.equal(saved[name], tensor) for name, tensor in model.state_dict().items())
    assert (launches.folder / "0.ckpt").exists()


def test_program_that_spawns(launches: Launches) -> None:
    options = ("--nproc", "1", "--no-prefix")
    check_losses(run(launches, "spawn_main", "2", str(find_free_port()), command="run", options=options))


def test_program_that_spawns_or_takes_the_launchers_ranks(launches: Launches) -> None:
    """It is to be started with as many ranks as it shall train: `--nproc 1` is one of the two that it was asked for."""
    arguments = ("2", str(find_free_port()))
    check_losses(run(launches, "spawn_or_join", *arguments, command="run", options=("--nproc", "2")))
    reports = run(launches, "spawn_or_join", *arguments, command="run", options=("--nproc", "1"))
    assert [(rank, len(losses)) for rank, losses in reports] == [(0, 2 * len(Points()) // BATCH_SIZE)]


def test_program_for_slurm(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    """One task that spawns a process for each of its two devices; world size 2, and not the number of tasks."""
    for name, value in (("PROCID", "0"), ("NPROCS", "1"), ("JOBID", "17")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    check_losses(run(launches, "spawn_main", "2", command="run", options=("--nproc", "1", "--no-prefix")))


def test_program_for_horovod(launches: Launches) -> None:
    reports = run(launches, "horovod_main", command="run", options=("--nproc", "2"))
    check_losses(reports)
    last = torch.tensor([losses[-1] for _, losses, *_ in reports])
    assert [report[2:] for report in reports] == [[rank, (last.sum() / 2).item()] for rank in range(NUM_RANKS)]


def test_program_for_apex(launches: Launches) -> None:
    options = ("--nproc_per_node", "2")
    reports = run(launches, "apex_main", "--opt-level", "O0", command="launch", options=options)
    check_losses(reports)
    assert [report[2] for report in reports] == [0, 1]
