"""Where the ranks of a recipe train on machines with GPUs, without one: torch is told how many there are."""

from __future__ import annotations

import argparse

import pytest
import torch

import lockstep
from lockstep import env
from lockstep.errors import InputError
from lockstep.recipes.devices import choose_device
from lockstep.recipes.imagenet.options import add_options
from lockstep.recipes.imagenet.training import run
from lockstep.topology import Topology


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in env.registry:
        monkeypatch.delenv(variable, raising=False)


def see_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def ranks(number: int, launcher: str = "lockstep", num_nodes: int = 1) -> Topology:
    return Topology(0, number * num_nodes, 0, number, 0, num_nodes, launcher)


@pytest.mark.parametrize("backend", ["auto", "nccl", "gloo", "lockstep", "cpu:gloo,cuda:nccl", "Gloo"])
def test_every_rank_has_a_gpu(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    see_gpus(monkeypatch, 2)
    for number in (1, 2):
        assert choose_device(backend, ranks(number)) == ("cuda", [])


@pytest.mark.parametrize("backend", ["auto", "gloo", "lockstep"])
def test_more_ranks_than_gpus_train_on_the_cpu(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    see_gpus(monkeypatch, 1)
    device, notes = choose_device(backend, ranks(2))
    assert (device, notes) == (
        "cpu",
        ["training on the CPU, because there are 2 ranks but 1 GPU; --nproc 1 trains on 1 GPU"],
    )


def test_nccl_with_too_few_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    see_gpus(monkeypatch, 2)
    with pytest.raises(InputError, match=r"there are 4 ranks and 2 GPUs: start 2 \(--nproc 2\), or choose another"):
        choose_device("nccl", ranks(4))


def test_ranks_that_may_choose_otherwise_leave_it_to_the_error_of_init(monkeypatch: pytest.MonkeyPatch) -> None:
    """On another host, or started by hand perhaps there, there may be GPUs enough."""
    see_gpus(monkeypatch, 1)
    for topology in (ranks(2, num_nodes=2), ranks(2, "environment")):
        assert choose_device("auto", topology) == ("cuda", [])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert choose_device("auto", ranks(2, "environment"))[0] == "cpu"


def test_backends_of_which_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    see_gpus(monkeypatch, 2)
    device, (note,) = choose_device("mpi", ranks(2))
    assert (device, note.partition(":")[0]) == (None, "training on the CPU")


def test_without_gpus_nothing_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    see_gpus(monkeypatch, 0)
    assert choose_device("auto", ranks(2)) == (None, [])


@pytest.mark.parametrize(("words", "device"), [((), "cuda"), (("--no-accel",), "cpu"), (("--gpu", "1"), "cuda:1")])
@pytest.mark.parametrize("backend", ["gloo", "lockstep"])
def test_imagenet_trains_on_the_gpus_over_any_backend(
    monkeypatch: pytest.MonkeyPatch, backend: str, words: tuple[str, ...], device: str
) -> None:
    """As the field's reference example does."""
    see_gpus(monkeypatch, 2)
    asked: list[tuple[str, object]] = []

    def init(backend: str, *, device: str | None) -> None:
        asked.append((backend, device))
        raise SystemExit

    monkeypatch.setattr(lockstep, "init", init)
    parser = argparse.ArgumentParser()
    add_options(parser)
    with pytest.raises(SystemExit):
        run(parser.parse_args(["DIR", "--dist-backend", backend, *words]))
    assert asked == [(backend, device)]
