"""`lockstep.init` with peers: every way to meet, every way to leave."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

import lockstep
from failing import (
    Caught,
    attempt,
    expect,
    is_dead,
    kill_self,
    kill_self_soon,
    pids_of_ranks,
    wait_until,
)
from lockstep import env
from lockstep.errors import RankLost, RendezvousError, SetupError
from lockstep.launch.free_port import find_free_port
from lockstep.testing import WorkerDied, limit_s, run_ranks


def listening_ports() -> list[int]:
    """TCP ports that this process has opened to listen on; none that it has from the one that forked it."""
    own, inherited = (
        {socket.laddr.port for socket in process.net_connections(kind="tcp") if socket.status == psutil.CONN_LISTEN}
        for process in (psutil.Process(), psutil.Process(os.getppid()))
    )
    return sorted(own - inherited)


def describe(world: lockstep.World) -> dict[str, Any]:
    """What a world says of itself, after it has been used."""
    tensor = torch.tensor([1.0 + dist.get_rank()])
    dist.all_reduce(tensor)
    return {
        "rank": world.rank,
        "local_rank": world.local_rank,
        "sizes": (world.world_size, world.local_world_size),
        "backend": world.backend,
        "launcher": world.launcher,
        "sum": tensor.item(),
        "ports": listening_ports(),
    }


def expected(rank: int, launcher: str, backend: str = "lockstep", size: int = 2) -> dict[str, Any]:
    total = size * (size + 1) / 2
    return {
        "rank": rank,
        "local_rank": rank,
        "sizes": (size, size),
        "backend": backend,
        "launcher": launcher,
        "sum": total,
        "ports": [],
    }


# ---- ways to meet ----------------------------------------------------------------------------------


def init_under_our_launcher(times: int) -> list[dict[str, Any]]:
    found = []
    for _ in range(times):
        with lockstep.init() as world:
            found.append(describe(world))
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_under_our_launcher_no_port_is_opened(world_size: int) -> None:
    outcomes = run_ranks(init_under_our_launcher, world_size, 3, init=False)
    for rank, found in enumerate(outcomes):
        assert found == [expected(rank, "lockstep", size=world_size)] * 3


def without_our_launcher() -> int:
    """Take our launcher's folder out of the environment; the rank."""
    env.LOCKSTEP_RENDEZVOUS.unset()
    rank = env.RANK.get()
    assert rank is not None
    return rank


def init_like_torchrun(port: int) -> dict[str, Any]:
    without_our_launcher()
    env.MASTER_ADDR.set("127.0.0.1")
    env.MASTER_PORT.set(port)
    env.TORCHELASTIC_RUN_ID.set("job")
    with lockstep.init() as world:
        return describe(world)


def test_under_torchrun() -> None:
    port = find_free_port()
    outcomes = run_ranks(init_like_torchrun, 2, port, init=False)
    assert outcomes[0].pop("ports") == [port], "torch's own store is there, and nothing else"
    assert outcomes[0] == {k: v for k, v in expected(0, "torchrun").items() if k != "ports"}
    assert outcomes[1] == expected(1, "torchrun")


def init_with_arguments(method: str) -> dict[str, Any]:
    """Ranks that are counted the other way round than the environment has them."""
    rank = 1 - without_our_launcher()
    with lockstep.init(rank=rank, world_size=2, init_method=method) as world:
        return describe(world)


@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_arguments_win_over_the_environment(kind: str, tmp_path: Path) -> None:
    method = f"file://{tmp_path}/meeting" if kind == "file" else f"tcp://127.0.0.1:{find_free_port()}"
    for position, found in enumerate(run_ranks(init_with_arguments, 2, method, init=False)):
        rank = 1 - position
        if kind == "tcp" and rank == 0:
            assert len(found.pop("ports")) == 1
            found["ports"] = []
        assert found == expected(rank, "environment")


def init_with_a_store(path: str, backend: str) -> dict[str, Any]:
    store = dist.FileStore(path, 2)
    with lockstep.init(backend, store=store, timeout=limit_s(30)) as world:
        return describe(world)


@pytest.mark.parametrize("backend", ["lockstep", "auto", "gloo"])
def test_explicit_store(backend: str, tmp_path: Path) -> None:
    outcomes = run_ranks(init_with_a_store, 2, str(tmp_path / "store"), backend, init=False)
    for rank, found in enumerate(outcomes):
        if backend == "gloo":
            found["ports"] = []
        assert found == expected(rank, "lockstep", "gloo" if backend == "gloo" else "lockstep")


def init_with_the_launchers_numbers() -> list[int]:
    with lockstep.init(rank=env.RANK.get(), world_size=env.WORLD_SIZE.get()):
        dist.barrier()
        return listening_ports()


def test_numbers_that_the_launcher_gave_are_no_reason_for_a_port() -> None:
    assert run_ranks(init_with_the_launchers_numbers, 2, init=False) == [[], []]


def adopt() -> dict[str, Any]:
    with lockstep.init() as world:
        found = describe(world)
    dist.barrier()
    return found


def test_adopts_a_group_of_ranks() -> None:
    """`run_ranks` has initialised torch.distributed, without any launcher's variables."""
    outcomes = run_ranks(adopt, 2)
    assert outcomes == [expected(rank, "environment") for rank in range(2)]


# ---- stores that were used before ------------------------------------------------------------------


def begin_and_die(path: str) -> None:
    """Rank 0 publishes its memory and is killed while it waits for the others."""
    if env.RANK.get() == 0:
        kill_self_soon(0.3)
        lockstep.init(store=dist.FileStore(path, 2))


def begin_again(path: str, attempt_number: int) -> dict[str, Any]:
    """The next life of the job; rank 1 is there long before rank 0 has published anything new."""
    env.TORCHELASTIC_RESTART_COUNT.set(attempt_number)
    store = dist.FileStore(path, 2)
    ready = Path(path + "-rank1")
    if env.RANK.get() == 1:
        threading.Timer(0.2, ready.touch).start()
    else:
        wait_until(ready.exists, "rank 1 waiting")
    with lockstep.init(store=store, timeout=limit_s(20)) as world:
        return describe(world)


@pytest.mark.parametrize("attempt_number", [0, 1])
def test_restarted_job_finds_its_store_as_it_was_left(attempt_number: int, tmp_path: Path) -> None:
    """Also where nobody counts the attempts."""
    path = str(tmp_path / "store")
    # As many as any test uses, because all are replaced after that: the next life has new processes.
    died, *_ = run_ranks(begin_and_die, 5, path, init=False, expect_errors=True)
    assert isinstance(died, WorkerDied)
    outcomes = run_ranks(begin_again, 2, path, attempt_number, init=False)
    assert outcomes == [expected(rank, "lockstep") for rank in range(2)]


def give_up(path: str) -> None:
    """Rank 0 waits in vain, says so in the store, and ends."""
    if env.RANK.get() == 0:
        with pytest.raises(RendezvousError, match="rank 1 did not come"):
            lockstep.init(store=dist.FileStore(path, 2), timeout=0.2)


def test_next_life_does_not_give_up_because_the_last_one_did(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    assert run_ranks(give_up, 2, path, init=False) == [None, None]
    run_ranks(begin_and_die, 5, str(tmp_path / "other"), init=False, expect_errors=True)  # the next are new processes
    assert run_ranks(begin_again, 2, path, 0, init=False) == [expected(rank, "lockstep") for rank in range(2)]


def make_groups_of_a_kind(store_path: str) -> list[float]:
    """Three default groups one after another over one store, and two sub-groups of the same ranks at once."""
    store = dist.FileStore(store_path, 2)
    sums = []
    for number in range(3):
        if number == 1 and env.RANK.get() == 0:
            # Let rank 1 come long before there is anything new in the store.
            threading.Event().wait(0.8)
        dist.init_process_group("lockstep", store=store, rank=env.RANK.get() or 0, world_size=2)
        groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
        tensor = torch.ones(1)
        for group in groups:
            dist.all_reduce(tensor, group=group)
        sums.append(tensor.item() + number)
        dist.destroy_process_group()
    return sums


def test_store_is_used_again(tmp_path: Path) -> None:
    assert run_ranks(make_groups_of_a_kind, 2, str(tmp_path / "store"), init=False) == [[4.0, 5.0, 6.0]] * 2


# ---- ranks that cannot meet ------------------------------------------------------------------------


def init_with_another_world_size() -> Caught:
    rank = env.RANK.get() or 0
    world_size = 3 if rank == 1 else 2
    store = dist.FileStore(os.path.join(env.LOCKSTEP_RENDEZVOUS.get() or "", "own"), -1)
    return attempt(lambda: lockstep.init(rank=rank, world_size=world_size, store=store, timeout=limit_s(5)))


def test_world_sizes_differ() -> None:
    zero, one = run_ranks(init_with_another_world_size, 2, init=False)
    for caught in (zero, one):
        assert type(caught.error) is SetupError
        assert "rank 1 was given world_size 3, rank 0 2: give all ranks the same" in str(caught.error)


def init_as_the_same_rank() -> Caught:
    rank = min(env.RANK.get() or 0, 1)
    store = dist.FileStore(os.path.join(env.LOCKSTEP_RENDEZVOUS.get() or "", "own"), -1)

    def init() -> None:
        with lockstep.init(rank=rank, world_size=2, store=store, timeout=limit_s(2)):  # one waits for all of it
            pass

    return attempt(init)


def test_two_come_as_the_same_rank() -> None:
    outcomes = run_ranks(init_as_the_same_rank, 3, init=False)
    errors = [outcome.error for outcome in outcomes[1:] if outcome.error is not None]
    assert len(errors) == 1, outcomes
    # The one that came later finds the place taken, or the meeting over.
    assert isinstance(errors[0], RendezvousError)


def die_before_a_group(how: str, victim: int) -> Caught | None:
    """A rank goes before a sub-group is made: who waits for it there must not wait for the deadline."""
    dist.barrier()
    if dist.get_rank() == victim:
        if how == "died":
            kill_self()
        elif how == "left":
            dist.destroy_process_group()
            return None
        else:
            raise ValueError("cannot continue")
    return attempt(lambda: dist.new_group([0, 1]))


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    ("how", "says"), [("died", "died: its process is gone"), ("left", "left the default group"), ("raised", "left")]
)
def test_rank_that_cannot_come_to_a_group(how: str, says: str, victim: int) -> None:
    outcomes = run_ranks(die_before_a_group, 2, how, victim, expect_errors=True)
    expect(outcomes[1 - victim], RankLost, (victim,), f"rank {victim} (", says, "while a group of it was being made")


def found_a_group_without_the_lost() -> tuple[Caught, float] | None:
    """The survivors of a loss may continue in a group of their own."""
    pids = pids_of_ranks()
    if dist.get_rank() == 1:
        kill_self()
    wait_until(lambda: is_dead(pids[1]), "the death")
    caught = attempt(lambda: dist.barrier())
    rest = dist.new_group([0, 2], use_local_synchronization=True)
    tensor = torch.tensor([1.0 + dist.get_rank()])
    dist.all_reduce(tensor, group=rest)
    return caught, tensor.item()


def test_survivors_found_a_group() -> None:
    outcomes = run_ranks(found_a_group_without_the_lost, 3, expect_errors=True)
    for caught, total in (outcomes[0], outcomes[2]):
        expect(caught, RankLost, (1,))
        assert total == 4.0


# ---- ways to leave ---------------------------------------------------------------------------------


def leave_by(ending: str) -> Caught | None:
    with lockstep.init(timeout=limit_s(30)) as world:
        dist.barrier()
        if world.rank == 1:
            if ending == "return":
                return None
            raise {"exit 0": SystemExit(0), "exit 3": SystemExit(3), "interrupt": KeyboardInterrupt()}[ending]
        return attempt(lambda: dist.barrier())


@pytest.mark.parametrize(
    ("ending", "says"),
    [
        ("return", "left the group while others still needed it"),
        ("return", "let all ranks agree"),
        ("exit 0", "left the group while others still needed it"),
        ("exit 3", "failed: it raised SystemExit: 3 at "),
        ("interrupt", "failed: it raised KeyboardInterrupt at "),
    ],
)
def test_what_others_hear_when_a_world_is_left(ending: str, says: str) -> None:
    outcomes = run_ranks(leave_by, 3, ending, init=False, expect_errors=True)
    for caught in (outcomes[0], outcomes[2]):
        expect(caught, RankLost, (1,), says, "rank 1 (")


def abort_with_a_sentence() -> Caught | None:
    world = lockstep.init(timeout=limit_s(30))
    dist.barrier()
    if world.rank == 1:
        world.abort("has run out of disk")
        return None
    return attempt(lambda: dist.barrier())


def test_abort_with_a_sentence() -> None:
    caught, _ = run_ranks(abort_with_a_sentence, 2, init=False)
    expect(caught, RankLost, (1,), "rank 1 (", "failed: it has run out of disk")


def leave_together(rounds: int) -> None:
    """Nobody may take a peer's leaving for a loss once the last collective is over."""
    for _ in range(rounds):
        with lockstep.init():
            dist.all_reduce(torch.ones(50_000))


def test_leaving_together_is_no_loss() -> None:
    run_ranks(leave_together, 3, 30, init=False)


# ---- registration ----------------------------------------------------------------------------------

USE = "dist.init_process_group('lockstep', store=dist.HashStore(), rank=0, world_size=1); dist.monitored_barrier()"


def test_lockstep_is_imported_before_torch() -> None:
    program = f"import lockstep, sys; assert 'torch' not in sys.modules; import torch.distributed as dist; {USE}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=limit_s(120))
    assert done.returncode == 0, done.stderr


def import_after_torch() -> str:
    """In a process that has torch and, as far as Python knows, never heard of Lockstep."""
    ours = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "lockstep"}
    for name in ours:
        del sys.modules[name]
    dist.Backend._plugins.pop("LOCKSTEP")
    dist.Backend.backend_list.remove("lockstep")
    if hasattr(dist.Backend, "LOCKSTEP"):
        del dist.Backend.LOCKSTEP  # by which torch 2.6 knows that a name is taken
    exec(f"import lockstep; {USE}", {"dist": dist})
    name = dist.get_backend()
    dist.destroy_process_group()
    sys.modules.update(ours)
    raise RuntimeError(name)  # a worker whose job failed is not used again


def test_lockstep_is_imported_after_torch() -> None:
    (outcome,) = run_ranks(import_after_torch, 1, init=False, expect_errors=True)
    assert str(outcome) == "lockstep"


def test_rank_that_no_group_of_that_size_has(tmp_path: Path) -> None:
    meeting = (tmp_path / "meeting").as_uri()
    with pytest.raises(SetupError, match=r"rank is 2, but world_size is 2: expected 0 … 1"):
        dist.init_process_group("lockstep", init_method=meeting, rank=2, world_size=2)
    assert not dist.is_initialized()
