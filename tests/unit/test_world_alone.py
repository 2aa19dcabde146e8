"""`lockstep.init` in one process: arguments, errors, and the life of a world. With peers: tests/ranks/test_world.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lockstep
from lockstep import env
from lockstep.comm import registration
from lockstep.comm.backend import LockstepProcessGroup
from lockstep.comm.mpi import group
from lockstep.errors import (
    AlreadyInitialized,
    BackendUnavailable,
    InputError,
    InputTypeError,
    NotInitialized,
    RendezvousError,
    SetupError,
)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No launcher's variables, and no world left open."""
    for variable in env.registry:
        monkeypatch.delenv(variable, raising=False)
    yield
    world = lockstep.current_world()
    if world is not None:
        world.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Two GPUs, as far as torch says; the devices that were made current."""
    made_current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", made_current.append)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    return made_current


def launch(monkeypatch: pytest.MonkeyPatch, **variables: int) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


# ---- one process -----------------------------------------------------------------------------------


def test_one_process_alone_is_a_world() -> None:
    with lockstep.init() as world:
        assert (world.rank, world.world_size, world.local_rank, world.local_world_size, world.node_rank) == (
            0,
            1,
            0,
            1,
            0,
        )
        assert (world.backend, world.device, world.launcher) == ("lockstep", torch.device("cpu"), "single")
        assert lockstep.current_world() is world
        assert world.process_group is dist.group.WORLD
        assert repr(world) == "World(rank=0, world_size=1, backend='lockstep', device=cpu)"
        tensor = torch.tensor([1.0, 2.0])
        dist.all_reduce(tensor)
        assert tensor.tolist() == [1.0, 2.0]
        assert world.communication_seconds() > 0
    assert lockstep.current_world() is None
    assert not dist.is_initialized()


def test_an_attribute_that_a_world_does_not_have() -> None:
    with lockstep.init() as world, pytest.raises(AttributeError, match=r"no attribute 'size'.*has rank, world_size"):
        world.size  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("arguments", [(3, 4), ((2, -1),), ("3",), (3, "float32")])
def test_symmetric_memory_of_no_shape(arguments: tuple[Any, ...]) -> None:
    with lockstep.init(), pytest.raises((InputError, InputTypeError), match=r"symmetric_empty\("):
        lockstep.symmetric_empty(*arguments)


def test_init_twice() -> None:
    with (
        lockstep.init() as world,
        pytest.raises(AlreadyInitialized, match=r"World\(rank=0.*still open; call shutdown\(\)"),
    ):
        lockstep.init()
    world.shutdown()
    with lockstep.init() as again:
        assert again is not world


def test_use_after_shutdown() -> None:
    world = lockstep.init()
    group = world.process_group
    assert isinstance(group, LockstepProcessGroup)
    world.shutdown()
    world.shutdown()
    world.abort("too late to matter")
    with pytest.raises(NotInitialized, match=r"was shut down; call lockstep.init\(\) again"):
        _ = world.process_group
    with pytest.raises(NotInitialized, match="was shut down"), world:
        pass
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        dist.all_reduce(torch.ones(1))
    with pytest.raises(NotInitialized, match=r"all_reduce\(float32\[1\], SUM\) on the default group: .*was shut down"):
        group.allreduce([torch.ones(1)])
    with pytest.raises(NotInitialized, match=r"call lockstep.init\(\) first"):
        lockstep.symmetric_empty(3)


def test_script_destroys_the_group_itself() -> None:
    world = lockstep.init()
    dist.destroy_process_group()
    assert lockstep.current_world() is None
    with pytest.raises(NotInitialized):
        _ = world.process_group
    with lockstep.init() as again:
        world.shutdown()
        assert lockstep.current_world() is again
        dist.barrier()


@pytest.mark.parametrize("error", [ValueError("no data"), SystemExit(0), SystemExit(3), KeyboardInterrupt()])
def test_world_is_left_by_whatever_is_raised(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, lockstep.init():
        raise error
    assert caught.value is error
    assert lockstep.current_world() is None
    assert not dist.is_initialized()


# ---- arguments -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("timeout", "seconds"), [(5, 5.0), (0.25, 0.25), (timedelta(minutes=2), 120.0), (None, 1800.0)]
)
def test_timeout(timeout: Any, seconds: float) -> None:
    with lockstep.init(timeout=timeout) as world:
        assert isinstance(world.process_group, LockstepProcessGroup)
        assert world.process_group.engine.timeout_s == seconds


@pytest.mark.parametrize("timeout", [0, -1.0, timedelta(0), float("inf"), float("nan")])
def test_timeout_that_is_no_time(timeout: Any) -> None:
    with pytest.raises(SetupError, match="pass seconds above 0, or None for 30 minutes"):
        lockstep.init(timeout=timeout)


def test_timeout_of_another_type() -> None:
    with pytest.raises(InputTypeError, match=r"timeout is '30'; pass seconds as a number, or a datetime\.timedelta"):
        lockstep.init(timeout="30")  # type: ignore[arg-type]


def test_backend_that_does_not_exist() -> None:
    with pytest.raises(
        BackendUnavailable, match="'ncll' is not available here; there are: auto, lockstep, gloo"
    ) as caught:
        lockstep.init("ncll")
    assert isinstance(caught.value, ValueError)
    with pytest.raises(BackendUnavailable, match="'nccl' is not available here"):
        lockstep.init("nccl")
    with pytest.raises(BackendUnavailable, match="'cpu:gloo,cuda:nccl' is not available here"):
        lockstep.init("cpu:gloo,cuda:nccl")
    with pytest.raises(InputTypeError, match="backend is None; give a name such as 'auto'"):
        lockstep.init(None)  # type: ignore[arg-type]


def test_gloo_by_name() -> None:
    with lockstep.init("GLOO") as world:
        assert world.backend == dist.get_backend() == "gloo"
        with pytest.raises(InputError, match="only lockstep groups have symmetric memory; this one is gloo"):
            lockstep.symmetric_empty(3)


def test_rank_and_world_size_go_together() -> None:
    with pytest.raises(SetupError, match="rank was given without world_size"):
        lockstep.init(rank=0)
    with pytest.raises(SetupError, match="world_size was given without rank"):
        lockstep.init(world_size=2)
    with pytest.raises(SetupError, match=r"rank is 2, but world_size is 2: expected 0 … 1"):
        lockstep.init(rank=2, world_size=2)


@pytest.mark.parametrize("create", [registration.create, group.create], ids=["lockstep", "mpi4py"])
def test_torch_asks_for_a_rank_that_no_group_of_that_size_has(create: Callable[..., object]) -> None:
    asked = SimpleNamespace(group_rank=2, group_size=2, store=dist.HashStore(), timeout=timedelta(seconds=1))
    asked.global_ranks_in_group = [3, 4]
    with pytest.raises(SetupError, match=r"rank is 2, but world_size is 2: expected 0 … 1"):
        create(asked, None)


def test_two_ways_to_meet() -> None:
    with pytest.raises(SetupError, match="both store and init_method were given"):
        lockstep.init(store=dist.HashStore(), init_method="env://")


def test_nobody_says_where_to_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    launch(monkeypatch, RANK=1, WORLD_SIZE=2)
    with pytest.raises(
        RendezvousError, match=r"rank 1 of 2 does not know where to meet.*lockstep run --nproc N script.py"
    ):
        lockstep.init()


def test_nobody_is_at_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    launch(monkeypatch, RANK=1, WORLD_SIZE=2)
    with pytest.raises(
        RendezvousError, match=r"rank 1 of 2 did not meet the others at 127.0.0.1, port 1, where.*\. Is rank 0 running"
    ):
        lockstep.init(init_method="tcp://127.0.0.1:1", timeout=0.2)
    assert not dist.is_initialized()
    assert lockstep.current_world() is None


def test_failed_attempt_does_not_count() -> None:
    """Groups meet under numbered names; after a failure this process must meet those that did not fail."""
    with pytest.raises(RendezvousError, match=r"rank 1 did not come within 0.05 s of rank 0. Is every rank running"):
        lockstep.init(rank=0, world_size=2, store=dist.HashStore(), timeout=0.05)
    assert not dist.is_initialized()
    with lockstep.init():
        assert dist.distributed_c10d._world.group_count == 1


# ---- devices ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
@pytest.mark.usefixtures("gpus")
def test_cpu_on_request(device: Any) -> None:
    with lockstep.init(device=device) as world:
        assert (world.device, world.backend) == (torch.device("cpu"), "lockstep")


def test_device_that_torch_does_not_know() -> None:
    with pytest.raises(InputError, match="device is 'tpu:0', which torch does not know"):
        lockstep.init(device="tpu:0")
    assert not dist.is_initialized()


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_device_that_is_not_there(device: str) -> None:
    with pytest.raises(SetupError, match=r"rank 0 would use cuda:0, but torch sees no GPU here: .*device='cpu'"):
        lockstep.init(device=device)


@pytest.mark.parametrize(("device", "chosen"), [("cuda", "cuda:0"), ("cuda:1", "cuda:1")])
def test_device_becomes_the_current_one(device: str, chosen: str, gpus: list[torch.device]) -> None:
    with lockstep.init("gloo", device=device) as world:
        assert world.device == torch.device(chosen)
    assert gpus == [torch.device(chosen)]


@pytest.mark.usefixtures("gpus")
def test_device_number_too_high() -> None:
    with pytest.raises(SetupError, match=r"rank 0 would use cuda:2, but this host has 2 GPU\(s\)"):
        lockstep.init("gloo", device="cuda:2")


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("backend", ["auto", "nccl"])
@pytest.mark.usefixtures("gpus")
def test_more_ranks_than_gpus(backend: str, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those for which there is a GPU stop, instead of waiting for those for which there is none."""
    launch(monkeypatch, RANK=rank, WORLD_SIZE=3, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=3)
    says = rf"rank {rank} would use cuda:{rank}, but this host has 2 GPU\(s\) for 3 rank\(s\). Start no more than that"
    with pytest.raises(SetupError, match=says):
        lockstep.init(backend)


# ---- a group that was there before -----------------------------------------------------------------


def test_adopts_a_group_and_leaves_it_alone() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with lockstep.init() as world:
        assert (world.rank, world.world_size, world.backend) == (0, 1, "gloo")
        assert world.process_group is dist.group.WORLD
    assert lockstep.current_world() is None
    assert dist.is_initialized()
    with lockstep.init("gloo", rank=0, world_size=1):
        dist.barrier()


def test_what_a_group_that_is_there_contradicts() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(
        AlreadyInitialized, match=r"initialised with backend 'gloo'; lockstep.init\(backend='lockstep'\)"
    ):
        lockstep.init("lockstep")
    with pytest.raises(
        AlreadyInitialized, match=r"initialised with world_size 1; lockstep.init\(world_size=2\) cannot"
    ):
        lockstep.init(rank=0, world_size=2)
    assert lockstep.current_world() is None


def test_ignored_settings_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with lockstep.init(timeout=3, init_method="env://"):
        assert "takes it over and ignores init_method, timeout" in capsys.readouterr().err
