"""Ranks that meet in a folder or at a port, as those of a Slurm step do."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

import lockstep
from lockstep import env
from lockstep.errors import RendezvousError, SetupError
from lockstep.launch.free_port import find_free_port
from lockstep.rendezvous import folder, meeting, tcp
from lockstep.testing import limit_s, run_ranks
from lockstep.topology import Topology

LONG = timedelta(seconds=30)
SHORT = timedelta(seconds=1)


@pytest.fixture
def name() -> str:
    """A name nobody has met under: the processes live on from test to test."""
    return f"lockstep-{os.geteuid()}-test-{secrets.token_hex(8)}"


@contextlib.contextmanager
def temporary_files_in(place: Path) -> Iterator[None]:
    """Only in this process, and without waiting for it to forget where they went before."""
    before, tempfile.tempdir = tempfile.tempdir, str(place)
    try:
        yield
    finally:
        tempfile.tempdir = before


def whoami() -> tuple[int, int]:
    rank, world_size = env.RANK.get(), env.WORLD_SIZE.get()
    assert rank is not None
    assert world_size is not None
    return rank, world_size


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LONG.total_seconds()
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


# ---- in a folder ----------------------------------------------------------------------------------


def meet_twice(place: Path, name: str) -> list[int]:
    with temporary_files_in(place):
        seen = []
        for _ in range(2):
            store = folder.open_store(name, *whoami(), LONG)
            assert list(place.iterdir()) == [], "nothing is left on disk once somebody has met"
            seen.append(store.add("who comes", 1))
            # Who continues at once would put the next meeting there while another still looks.
            wait_until(lambda store=store: store.add("who comes", 0) == whoami()[1])  # type: ignore[misc]
        return seen


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_everybody_meets_and_leaves_nothing(world_size: int, tmp_path: Path, name: str) -> None:
    orders = run_ranks(meet_twice, world_size, tmp_path, name, init=False)
    for order in zip(*orders, strict=True):
        assert sorted(order) == list(range(1, world_size + 1)), "one store for all, and an empty one for each meeting"


def leave_over(place: Path, name: str, *, complete: bool, pid: str = "999999999") -> Path:
    """What ranks leave behind that are killed while they meet; all of the others had signed."""
    path = place / name
    path.mkdir(mode=0o700)
    store = dist.FileStore(str(path / "store"), -1)
    for rank in (1, 2):
        store.compare_set(f"rank{rank}", "", pid)
    if complete:
        store.set("complete", "1")
    return path


def meet_after_others(place: Path, name: str) -> int:
    """Rank 0 comes when the others have found what is there."""
    rank, world_size = whoami()
    with temporary_files_in(place):
        if rank == 0:
            wait_until(lambda: len(list(place.glob("came-*"))) == world_size - 1)
        else:
            (place / f"came-{rank}").touch()
        return folder.open_store(name, rank, world_size, LONG).add("who comes", 1)


@pytest.mark.parametrize("complete", [False, True])
def test_what_killed_ranks_left_is_nobodys_meeting(tmp_path: Path, name: str, complete: bool) -> None:
    leave_over(tmp_path, name, complete=complete)
    orders = run_ranks(meet_after_others, 3, tmp_path, name, init=False)
    assert sorted(orders) == [1, 2, 3], "all three are in one new store"
    assert not (tmp_path / name).exists()


def meet(place: Path, name: str, timeout: timedelta, absent: tuple[int, ...] = (), as_rank: int | None = None) -> str:
    rank, world_size = whoami()
    if rank in absent:
        return "absent"
    with temporary_files_in(place):
        try:
            folder.open_store(name, rank if as_rank is None else min(rank, as_rank), world_size, timeout)
        except RendezvousError as error:
            return str(error)
    return "met"


def test_rank_that_does_not_come_is_named(tmp_path: Path, name: str) -> None:
    zero, one, two, three = run_ranks(meet, 4, tmp_path, name, SHORT, (1, 3), init=False)
    assert "rank 1, rank 3 did not come within 1 s of rank 0" in zero
    assert "rank 2 waited 1 s, but " in two
    assert one == three == "absent"
    assert list(tmp_path.iterdir()) == []


def test_rank_zero_that_does_not_come_is_named(tmp_path: Path, name: str) -> None:
    _, one = run_ranks(meet, 2, tmp_path, name, SHORT, (0,), init=False)
    assert f"rank 1 waited 1 s, but rank 0, which makes {tmp_path / name}, did not come" in one


def test_two_that_come_as_one_rank(tmp_path: Path, name: str) -> None:
    zero, *others = run_ranks(meet, 3, tmp_path, name, SHORT, (), 1, init=False)
    assert "rank 2 did not come" in zero
    assert any("two processes claim to be rank 1: this one and pid " in said for said in others)


@pytest.mark.parametrize("kind", ["open to others", "another user's", "a link", "a file"])
def test_folder_that_is_not_this_users_own(tmp_path: Path, name: str, kind: str) -> None:
    path = tmp_path / name
    if kind == "a file":
        path.touch()
    elif kind == "a link":
        own = tmp_path / "own"
        own.mkdir(mode=0o700)
        path.symlink_to(own)
    else:
        path.mkdir(mode=0o700)
        if kind == "another user's":
            if os.geteuid() != 0:
                pytest.skip("only root can give a folder away")
            os.chown(path, 12345, 12345)
        else:
            path.chmod(0o750)
    for said in run_ranks(meet, 2, tmp_path, name, LONG, init=False):
        assert str(path) in said
        assert "set TMPDIR" in said
    assert os.path.lexists(path), "what is not ours is left alone"


def test_nowhere_for_temporary_files(tmp_path: Path, name: str) -> None:
    (said,) = run_ranks(meet, 1, tmp_path / "missing", name, SHORT, init=False)
    assert f"the ranks cannot meet in {tmp_path / 'missing' / name} (No such file or directory); set TMPDIR" in said


# ---- at a port ------------------------------------------------------------------------------------


def listening(port: int) -> set[str]:
    """Local addresses that listen on a port, as /proc writes them."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            if state == "0A" and int(local.rpartition(":")[2], 16) == port:
                found.add(local.rpartition(":")[0])
    return found


def meet_at(address: str, port: int) -> tuple[int, int, set[str]]:
    rank, world_size = whoami()
    orders = [tcp.open_store(address, port, rank, world_size, LONG).add("who comes", 1) for _ in range(2)]
    return orders[0], orders[1], listening(port)


LOOPBACK = ("0100007F", "00000000000000000000000001000000")


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_rank_zero_listens_where_it_must(address: str) -> None:
    outcomes = run_ranks(meet_at, 3, address, find_free_port(), init=False)
    assert sorted(first for first, _, _ in outcomes) == [1, 2, 3]
    assert sorted(second for _, second, _ in outcomes) == [1, 2, 3]
    (listens_on,) = outcomes[0][2]
    assert listens_on in LOOPBACK


def meet_by_url(port: int, opens: str, url: str | None) -> tuple[float, set[str]]:
    rank, world_size = whoami()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    numbers = {}
    if url is not None:  # the script says all
        numbers = {"rank": rank, "world_size": world_size}
        for name in ("RANK", "WORLD_SIZE"):
            del os.environ[name]
        if url.startswith("tcp"):
            del os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        url = url.format(port)
    if opens == "mpirun":
        for name in ("RANK", "LOCAL_RANK"):
            os.environ[f"OMPI_COMM_WORLD_{name}"] = str(rank)
            del os.environ[name]
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ[f"OMPI_COMM_{name}".replace("LOCAL_WORLD", "WORLD_LOCAL")] = str(world_size)
            del os.environ[name]
    total = 0.0
    for _ in range(2):
        if opens == "init":
            lockstep.init("lockstep", init_method=url, timeout=LONG, device="cpu", **numbers)  # type: ignore[arg-type]
        else:
            dist.init_process_group("lockstep", url, **numbers)  # type: ignore[arg-type]
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        total += tensor.item()
        found = listening(port)
        dist.barrier()
        dist.destroy_process_group()
    return total, found


@pytest.mark.parametrize(
    ("opens", "url"),
    [
        ("torch", None),
        ("torch", "env://"),
        ("torch", "tcp://127.0.0.1:{}"),
        ("init", "env://"),
        ("init", "tcp://127.0.0.1:{}"),
        ("mpirun", None),
    ],
)
def test_env_url_listens_on_one_address(opens: str, url: str | None) -> None:
    """torch's own handlers have rank 0 listen on every address of its host."""
    outcomes = run_ranks(meet_by_url, 3, find_free_port(), opens, url, init=False)
    assert {total for total, _ in outcomes} == {6.0}
    assert outcomes[0][1] == {LOOPBACK[0]}


FORKS = """
import multiprocessing, os, sys
import torch, torch.distributed as dist, lockstep

def meet(rank, world_size):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1], RANK=str(rank), WORLD_SIZE=str(world_size))
    for backend in ("gloo", "lockstep"):
        dist.init_process_group(backend)
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        dist.destroy_process_group()
        assert tensor.item() == world_size

meet(0, 1)
children = [multiprocessing.get_context("fork").Process(target=meet, args=(rank, 2)) for rank in range(2)]
for child in children:
    child.start()
for child in children:
    child.join()
assert [child.exitcode for child in children] == [0, 0]
"""


def test_forked_children_meet_at_their_parents_port() -> None:
    """The parent has met alone there, and its server is not the child's."""
    command = [sys.executable, "-c", FORKS, str(find_free_port())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s(60))
    assert done.returncode == 0, done.stderr


def test_port_that_is_taken_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RendezvousError, match=rf"rank 0 cannot listen on port {port} .*set MASTER_PORT") as caught:
            tcp.open_store("127.0.0.1", port, 0, 1, SHORT)
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.EADDRINUSE


@pytest.mark.parametrize(("port", "world_size"), [("taken", 1), (0, 2), ("free", 2)])
def test_a_port_that_a_url_has_named_is_not_that_of_a_variable(port: str | int, world_size: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = {"taken": taken.getsockname()[1], "free": find_free_port(), 0: 0}[port]
        url = f"tcp://127.0.0.1:{number}"
        with pytest.raises((RendezvousError, SetupError)) as caught:
            next(iter(dist.rendezvous(f"{url}?rank=0&world_size={world_size}", timeout=SHORT)))
    said = "the same init_method and world_size" if port == "free" else f"set the port in {url} (init_method) to one"
    assert said in str(caught.value)
    assert "MASTER_" not in str(caught.value)


def test_port_of_a_stranger_who_says_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        with pytest.raises(
            RendezvousError, match=rf"port {port}, .*does not respond\. Is rank 0 running, and are MASTER_ADDR"
        ):
            tcp.open_store("127.0.0.1", port, 1, 2, SHORT)


def test_ranks_that_do_not_come_to_the_port() -> None:
    with pytest.raises(RendezvousError, match=r"rank 1, rank 2 did not come to 127.0.0.1, port \d+.* within 1 s"):
        tcp.open_store("127.0.0.1", find_free_port(), 0, 3, SHORT)


def meet_unevenly(port: int) -> list[int]:
    """Two meet, then three, then two: who was not there does not know how many meetings there were."""
    rank, _ = whoami()
    seen = []
    for world_size in (2, 3, 2):
        if rank < world_size:
            store = tcp.open_store("127.0.0.1", port, rank, world_size, LONG)
            seen.append(store.add("who comes", 1))
    return seen


def test_meetings_of_some_ranks_at_one_port() -> None:
    zero, one, two = run_ranks(meet_unevenly, 3, find_free_port(), init=False)
    assert sorted([zero[0], one[0]]) == [1, 2]
    assert sorted([zero[1], one[1], *two]) == [1, 2, 3]
    assert sorted([zero[2], one[2]]) == [1, 2]


def come_late_once(port: int, another: int) -> int:
    """Rank 1 misses the first meeting; the invitation to it is not taken for one to the second."""
    rank, _ = whoami()
    if rank == 0:
        with pytest.raises(RendezvousError, match="rank 1 did not come"):
            tcp.open_store("127.0.0.1", port, 0, 2, SHORT)
        left = dist.TCPStore("127.0.0.1", port, None, False, LONG)
        assert left.num_keys() <= 1, "nothing but a key of torch's own is left"
        tcp.open_store("127.0.0.1", another, 0, 2, LONG)
    else:
        tcp.open_store("127.0.0.1", another, 1, 2, LONG)
    return tcp.open_store("127.0.0.1", port, rank, 2, LONG).add("who comes", 1)


def test_a_meeting_that_failed_is_not_the_next() -> None:
    assert sorted(run_ranks(come_late_once, 2, find_free_port(), find_free_port(), init=False)) == [1, 2]


# ---- strangers at the port -----------------------------------------------------------------------


def store_at(port: int) -> dist.Store:
    """The ranks' store as whoever reaches the port has it."""
    client: list[dist.Store] = []

    def connect() -> bool:
        with contextlib.suppress(RuntimeError):
            client.append(dist.TCPStore("127.0.0.1", port, None, False, SHORT, wait_for_workers=False))
        return bool(client)

    wait_until(connect)
    return dist.PrefixStore("lockstep", client[0])


def ask_as(store: dist.Store, rank: int, word: str) -> bytes:
    """What rank 0 answers to a word that a stranger writes in the place of a rank."""
    store.set(f"coming/{rank}", f"{word} no seal")
    wait_until(lambda: store.check([f"invitation/{word}"]))
    return bytes(store.get(f"invitation/{word}"))


def disturb_a_meeting(port: int, what: str) -> str:
    """Two ranks meet; rank 1 writes as a stranger first."""
    rank, _ = whoami()
    os.environ["LOCKSTEP_TOKEN"] = "0123456789abcdef" * 2
    if rank == 0:
        if what == "an earlier server":  # of this process, whose keys others have written
            server = dist.TCPStore("127.0.0.1", port, None, True, LONG, wait_for_workers=False, multi_tenant=True)
            early = dist.PrefixStore("lockstep", server)
            for key in ("meetings", "coming/1", "invitation/1"):
                early.set(key, b"\xff abc")
        return str(tcp.open_store("127.0.0.1", port, 0, 2, LONG).add("who comes", 1))
    store = store_at(port)
    if what in ("garbage", "a number"):
        store.set("coming/1", b"\xff\xfe" if what == "garbage" else "999")
        store.set("invitation/1", b"\xff\xfe" if what == "garbage" else "999")
        store.set("meeting999/complete", "1")
    elif what == "a recording":
        forged = ask_as(store, 1, "0" * 32)
        real = meeting.find

        def find(place: dist.Store, key: str) -> bytes | None:
            """The invitation that was made for another word stands there first."""
            if key.startswith("invitation/") and not recorded:
                recorded.append(key)
                place.set(key, forged)
            return real(place, key)

        recorded: list[str] = []
        meeting.find = find
        try:
            return str(tcp.open_store("127.0.0.1", port, 1, 2, LONG).add("who comes", 1))
        finally:
            meeting.find = real
            assert recorded
    return str(tcp.open_store("127.0.0.1", port, 1, 2, LONG).add("who comes", 1))


@pytest.mark.parametrize("what", ["garbage", "a number", "a recording", "an earlier server"])
def test_strangers_do_not_disturb_a_meeting(what: str) -> None:
    """There were raw errors of torch, and a forged number parted a rank from the others."""
    assert sorted(run_ranks(disturb_a_meeting, 2, find_free_port(), what, init=False)) == ["1", "2"]


def meet_with_token(port: int) -> str:
    rank, _ = whoami()
    os.environ["LOCKSTEP_TOKEN"] = "0123456789abcdef" * (rank + 1)
    with pytest.raises(RendezvousError) as caught:
        tcp.open_store("127.0.0.1", port, rank, 2, timedelta(seconds=limit_s(2)))
    return str(caught.value)


def test_ranks_with_different_tokens_do_not_meet() -> None:
    zero, one = run_ranks(meet_with_token, 2, find_free_port(), init=False)
    assert zero.startswith("rank 1 did not come")
    for said in (zero, one):
        assert "made with another token" in said
        assert "Do all ranks have the same LOCKSTEP_TOKEN" in said


def begin_groups_in_turn(port: int) -> float:
    """As a script does that tries gloo first, or checks its answer with another backend."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.pop("LOCKSTEP_RENDEZVOUS", None)
    total = 0.0
    for backend in ("gloo", "lockstep", None, "gloo", None):
        with contextlib.ExitStack() as stack:
            if backend is None:
                stack.enter_context(lockstep.init(timeout=LONG, device="cpu"))
            else:
                dist.init_process_group(backend)
                stack.callback(dist.destroy_process_group)
            tensor = torch.ones(1)
            dist.all_reduce(tensor)
            total += tensor.item()
    return total


def test_groups_in_turn_at_one_port() -> None:
    assert run_ranks(begin_groups_in_turn, 3, find_free_port(), init=False) == [15.0] * 3


def test_an_address_elsewhere_means_all_addresses_here() -> None:
    """One that is translated on the way: 192.0.2.1 is nobody's (RFC 5737)."""
    port = find_free_port()
    with tcp.listen("192.0.2.1", port):
        assert listening(port) == {"00000000000000000000000000000000"}


# ---- lockstep.init() in a step of Slurm ------------------------------------------------------------


def become_task(nodes: int, job_id: int) -> None:
    """The variables that srun would set, in place of those that run_ranks set; the last node has one task."""
    rank, world_size = whoami()
    for name in list(os.environ):
        if name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCKSTEP_RENDEZVOUS", "GROUP_RANK"):
            del os.environ[name]
    on_first = world_size if nodes == 1 else world_size - 1
    node = int(rank >= on_first)
    for name, value in {
        "SLURM_JOB_ID": job_id,
        "SLURM_STEP_ID": 0,
        "SLURM_PROCID": rank,
        "SLURM_NTASKS": world_size,
        "SLURM_STEP_NUM_TASKS": world_size,
        "SLURM_LOCALID": rank - node * on_first,
        "SLURM_NODEID": node,
        "SLURM_NNODES": nodes,
        "SLURM_STEP_TASKS_PER_NODE": on_first if nodes == 1 else f"{on_first},1",
        "SLURM_STEP_NODELIST": "n1.invalid" if nodes == 1 else "n[1-2].invalid",
    }.items():
        os.environ[name] = str(value)


def train_in_step(
    place: Path, nodes: int, job_id: int, variables: dict[str, str]
) -> tuple[Topology | str, str, float, list[str]]:
    become_task(nodes, job_id)
    os.environ.update(variables)
    files: list[str] = []
    total = 0.0
    try:
        with temporary_files_in(place):
            for _ in range(2):
                with lockstep.init(timeout=LONG, device="cpu") as world:
                    tensor = torch.tensor([float(world.rank + 1)])
                    dist.all_reduce(tensor)
                    total += tensor.item()
                    files += [path.name for path in place.iterdir()]
                    found = (world.rank, world.world_size, world.local_rank, world.local_world_size, world.node_rank)
    except RendezvousError as error:
        return str(error), "", total, files
    return found, world.backend, total, files


def job() -> int:
    return secrets.randbelow(1 << 30)


def test_step_on_one_host_opens_no_port(tmp_path: Path) -> None:
    outcomes = run_ranks(listen_in_own_step, 3, tmp_path, job(), init=False)
    assert outcomes == [(((rank, 3, rank, 3, 0), "lockstep", 12.0, []), set()) for rank in range(3)]


def listen_in_own_step(
    place: Path, number: int
) -> tuple[tuple[Topology | str, str, float, list[str]], set[tuple[str, int]]]:
    before = own_listening()
    outcome = train_in_step(place, 1, number, {})
    return outcome, own_listening() - before


def own_listening() -> set[tuple[str, int]]:
    """Where this process listens; other programs of this host open ports at any time."""
    sockets = psutil.Process().net_connections(kind="tcp")
    return {tuple(socket.laddr) for socket in sockets if socket.status == psutil.CONN_LISTEN}


def listen_in_step(place: Path, number: int) -> tuple[tuple[Topology | str, str, float, list[str]], set[str]]:
    outcome = train_in_step(place, 2, number, {"MASTER_ADDR": "127.0.0.1"})
    return outcome, listening(20_000 + number % 12_768)


def test_step_on_two_hosts_with_a_master(tmp_path: Path) -> None:
    """Two nodes that are this host: MASTER_ADDR is given, and the port is the step's."""
    number = job()
    outcomes = run_ranks(listen_in_step, 3, tmp_path, number, init=False)
    assert outcomes[0][1] == {"0100007F"}
    assert [found for (found, *_), _ in outcomes] == [(0, 3, 0, 2, 0), (1, 3, 1, 2, 0), (2, 3, 0, 1, 1)]
    assert {total for (_, _, total, _), _ in outcomes} == {12.0}


def test_step_whose_hosts_have_no_address(tmp_path: Path) -> None:
    outcomes = run_ranks(train_in_step, 2, tmp_path, 2, job(), {"PATH": str(tmp_path)}, init=False)
    for said, *_ in outcomes:
        assert "host n1.invalid, where rank 0 runs, has no address here" in said
        assert "Set MASTER_ADDR" in said


def warn_of_allocation() -> str:
    become_task(2, 77)
    del os.environ["SLURM_STEP_ID"]
    os.environ["SLURM_NTASKS"] = "4"
    os.environ["SLURM_PROCID"] = "0"
    with contextlib.ExitStack() as stack:
        stream = stack.enter_context(tempfile.TemporaryFile("w+"))
        stack.enter_context(contextlib.redirect_stderr(stream))
        with lockstep.init(device="cpu") as world:
            assert (world.rank, world.world_size) == (0, 1)
        stream.seek(0)
        return stream.read()


def test_script_beside_srun_is_told() -> None:
    (said,) = run_ranks(warn_of_allocation, 1, init=False)
    assert said.count("\n") == 1
    assert "job 77 of Slurm has 4 tasks on 2 nodes, but this process is alone: start the script with `srun" in said
