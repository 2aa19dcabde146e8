"""The parts of the group over MPI that need no mpirun, and what is said where MPI is missing."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep import mpi_library
from lockstep.bench.comm.mpi import clean_environment
from lockstep.comm.messages.notices import (
    NOTICE_BYTES,
    MessageControlBlocks,
    NoticeKind,
    forward_notices,
    forwarded_notices,
    notice_kind,
)
from lockstep.comm.mpi.team import MpiTeam
from lockstep.comm.mpi.waiter import MpiWaiter
from lockstep.errors import BackendUnavailable, RendezvousError, SetupError
from lockstep.rendezvous import mpi as meeting
from lockstep.rendezvous import tcp
from lockstep.rendezvous.urls import _EnvHandler
from lockstep.shm.control_blocks import Failure
from lockstep.shm.liveness import PeerIdentity
from lockstep.shm.segment import boot_id
from lockstep.shm.sync import FailureKind, PeerFailure, PeerState
from lockstep.testing import limit_s
from lockstep.topology import Topology
from mpi_harness import needs_mpi

# ---- control blocks --------------------------------------------------------------------------------


def blocks_of() -> tuple[MessageControlBlocks, MessageControlBlocks]:
    """Of two ranks that know each other."""
    identities = [PeerIdentity(10 + rank, 1, "here", 1) for rank in range(2)]
    return MessageControlBlocks(0, identities, lambda _: None), MessageControlBlocks(1, identities, lambda _: None)


def enter(blocks: MessageControlBlocks, number: int, fingerprint: int, call: int, site: int) -> bytes:
    """What the flight record does when a rank comes to a collective, and the notice that follows."""
    word = blocks.record_words[blocks.rank] + (number & 1) * 8
    for offset, value in enumerate((fingerprint, number, call, site)):
        blocks.words[word + offset] = value
    return blocks.enter_notice()


def test_peers_read_what_a_rank_said_it_came_for() -> None:
    one, other = blocks_of()
    assert other.latest_record(0) is None
    notice = enter(one, 1, 77, one.add_call("barrier()"), one.add_site("train.py:3"))
    other.receive(0, memoryview(notice))
    record = other.record(0, 1)
    assert (record.fingerprint, record.number, record.call, record.site) == (77, 1, "barrier()", "train.py:3")
    assert other.latest_record(0) == one.latest_record(0) == record
    assert other.number(0) == 1


def test_a_text_is_told_once() -> None:
    one, other = blocks_of()
    call, site = one.add_call("barrier()"), one.add_site("train.py:3")
    first, second = enter(one, 1, 77, call, site), enter(one, 2, 77, call, site)
    assert len(second) < len(first)
    for notice in (first, second):
        other.receive(0, memoryview(notice))
    assert other.record(0, 2).site == "train.py:3"


def test_texts_in_use_are_not_overwritten() -> None:
    one, _ = blocks_of()
    call = one.add_call("the first")
    enter(one, 1, 1, call, one.add_site("a line"))
    indices = {one.add_call(f"call {number}") for number in range(200)}
    assert call not in indices
    assert one.record(0, 1).call == "the first"


@pytest.mark.parametrize("text", ["", "ß" * 500, "a" * 255 + "ß"])
def test_texts_are_cut_at_whole_characters(text: str) -> None:
    one, other = blocks_of()
    notice = enter(one, 1, 1, one.add_call(text), one.add_site(text))
    assert len(notice) <= NOTICE_BYTES
    other.receive(0, memoryview(notice))
    assert text.startswith(other.record(0, 1).call)
    assert len(other.record(0, 1).site.encode()) in (len(text.encode()), 255, 256)


def test_a_rank_that_left_and_one_that_failed() -> None:
    one, other = blocks_of()
    left = one.final_notice(5)
    assert notice_kind(memoryview(left)) is NoticeKind.LEFT
    other.receive(0, memoryview(left))
    assert other.state(0) is PeerState.LEFT
    assert other.finished == {0: 5}
    other.fail(Failure("CollectiveTimeout", (0, 3), "waited | in vain"))
    other.fail(Failure("", (), "a consequence of the first"))
    failed = other.final_notice(4)
    one.receive(1, memoryview(failed))
    assert one.state(1) is PeerState.FAILED
    assert one.failure(1) == Failure("CollectiveTimeout", (0, 3), "waited | in vain")
    assert one.all_final([1])


def test_a_rank_that_went_after_its_part_is_still_waited_for() -> None:
    """What it owes to the collective that it has finished is on its way."""
    one, other = blocks_of()
    other.receive(0, memoryview(one.final_notice(5)))
    for number, failure in ((5, None), (6, FailureKind.LEFT)):
        team = object.__new__(MpiTeam)
        team.blocks, team._number = other, number
        assert team._will_not_finish(0) is failure


def test_what_is_attached_comes_with_the_notice() -> None:
    one, other = blocks_of()
    for number, attachment in ((1, b""), (2, b"12345678"), (3, bytes(4096))):
        notice = enter(one, number, 7, one.add_call(f"call {number}"), one.add_site("train.py:3"))
        received = other.receive(0, memoryview(notice + attachment))
        assert received is not None
        assert (received[0], bytes(received[1])) == (number, attachment)
        assert other.record(0, number).call == f"call {number}"
    assert other.receive(0, memoryview(one.final_notice(3))) is None


def test_a_notice_that_comes_again_changes_nothing() -> None:
    one, other = blocks_of()
    call, site = one.add_call("barrier()"), one.add_site("train.py:3")
    first, second, third = (enter(one, number, number, call, site) for number in (1, 2, 3))
    for notice in (first, second, third):
        assert other.receive(0, memoryview(notice)) is not None
    for late in (first, second, third):
        assert other.receive(0, memoryview(late)) is None
    assert (other.record(0, 2).fingerprint, other.record(0, 3).fingerprint) == (2, 3)
    assert other.number(0) == 3


@pytest.mark.parametrize("limit", [300, 8 << 10])
def test_notices_are_handed_on_whole(limit: int) -> None:
    notices = [(rank, bytes([rank % 256]) * size) for rank, size in ((3, 40), (0, 200), (70000, 0), (2, 90))]
    messages = list(forward_notices(notices, limit))
    assert len(messages) == (2 if limit == 300 else 1)
    assert all(len(message) <= limit for message in messages)
    assert all(notice_kind(memoryview(message)) is NoticeKind.FORWARDED for message in messages)
    found = [(rank, bytes(notice)) for message in messages for rank, notice in forwarded_notices(memoryview(message))]
    assert found == notices


def test_other_messages_are_no_notices() -> None:
    assert notice_kind(memoryview((11).to_bytes(8, sys.byteorder))) is None


# ---- waiting ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("questions", [1, 50, 500])
def test_waiter_asks_until_nobody_is_awaited(questions: int) -> None:
    answers = iter([[1]] * questions + [[]])
    MpiWaiter(1).wait(lambda: next(answers), lambda ranks, waited_s: None)
    assert next(answers, "none left") == "none left"


def test_waiter_looks_and_may_be_told_to_stop() -> None:
    def look(ranks: list[int], waited_s: float) -> None:
        if waited_s > 0.01:
            raise PeerFailure(dict.fromkeys(ranks, FailureKind.LATE), waited_s)

    with pytest.raises(PeerFailure) as caught:
        MpiWaiter(1).wait(lambda: [3], look)
    assert caught.value.ranks(FailureKind.LATE) == [3]


# ---- MPI is missing, or of no use ------------------------------------------------------------------


@pytest.fixture
def fresh_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nobody had asked for MPI yet."""
    monkeypatch.setattr(mpi_library, "_mpi", None)
    for name in [name for name in sys.modules if name.split(".")[0] == "mpi4py"]:
        monkeypatch.delitem(sys.modules, name)


def test_missing_mpi4py_says_how_to_get_it(fresh_library: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(BackendUnavailable, match=r"needs mpi4py.*pip install mpi4py"):
        mpi_library.load()


@needs_mpi
def test_missing_mpi_library_says_how_to_get_it(fresh_library: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPI4PY_LIBMPI", "/nonexistent/libmpi.so")
    with pytest.raises(BackendUnavailable, match=r"needs an MPI library.*apt install openmpi-bin libopenmpi-dev"):
        mpi_library.load()


def fake_mpi(**differences: Any) -> Any:
    usual = {
        "THREAD_MULTIPLE": 3,
        "Is_initialized": lambda: True,
        "Query_thread": lambda: 3,
        "COMM_WORLD": SimpleNamespace(Get_size=lambda: 1),
        "get_vendor": lambda: ("MPICH", (4, 0, 0)),
    }
    return SimpleNamespace(**usual | differences)


@pytest.fixture
def under_mpirun(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third of four ranks on one host."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, text in (("RANK", "2"), ("SIZE", "4"), ("LOCAL_RANK", "2"), ("LOCAL_SIZE", "4")):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", text)


def test_mpi_for_one_thread_only_is_refused() -> None:
    mpi_library._check(fake_mpi())
    with pytest.raises(SetupError, match="without support for several threads"):
        mpi_library._check(fake_mpi(Query_thread=lambda: 1))


def test_library_of_another_mpirun_is_refused(under_mpirun: None) -> None:
    with pytest.raises(SetupError, match=r"mpirun started 4 ranks, but MPI says there are 1: .*\(MPICH\)"):
        mpi_library._check(fake_mpi())


_ALONE = """
import lockstep
from lockstep import env
from lockstep.errors import SetupError
with lockstep.init(backend="mpi") as world:
    print(world.rank, world.world_size, world.backend, world.launcher)
env.RANK.set(0), env.WORLD_SIZE.set(2)
try:
    lockstep.init(backend="mpi")
except SetupError as error:
    print(error)
"""


@needs_mpi
def test_one_process_is_a_world_and_several_without_mpirun_are_told() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _ALONE], env=clean_environment(), capture_output=True, text=True, timeout=limit_s(60)
    )
    assert done.returncode == 0, done.stderr
    alone, several = done.stdout.splitlines()
    assert alone == "0 1 mpi4py single"
    assert several.startswith("WORLD_SIZE is 2, but MPI knows of 1 rank(s)")
    assert "mpirun -np 2 python script.py" in several


# ---- where ranks meet ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "ending"),
    [
        ({"PMIX_NAMESPACE": "2084372481"}, "-mpi-2084372481"),
        ({"PMIX_NAMESPACE": "prterun-host/7@1"}, "-mpi-prterun-host_7_1"),
        ({"OMPI_MCA_ess_base_jobid": "5"}, "-mpi-5"),
    ],
)
def test_meeting_name_comes_from_the_job(variables: dict[str, str], ending: str) -> None:
    assert meeting.rendezvous_name(variables).endswith(ending)


def test_meeting_name_without_a_job_is_that_of_the_parent() -> None:
    assert "-mpi-parent" in meeting.rendezvous_name({})


@pytest.mark.parametrize("variable", ["PMI_RANK", "OTHER"])
def test_a_program_through_which_a_rank_is_started_is_not_its_launcher(variable: str) -> None:
    """`mpirun -n 4 numactl.sh python train.py`: ranks have different parents, and one launcher."""
    wrapper = subprocess.Popen(
        ["sh", "-c", "sh -c 'echo $$; read end; true'; true"],
        env={"PATH": os.defpath, variable: "0"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert wrapper.stdout is not None
        rank = int(wrapper.stdout.readline())
        launcher = os.getpid() if variable == "PMI_RANK" else rank
        assert meeting._launcher_above(rank) == launcher
    finally:
        wrapper.communicate("\n", timeout=limit_s(30))


def test_hosts_of_one_name_are_told_apart_by_their_kernels() -> None:
    hosts = ["node 1", "node 2", "node 1"]
    assert meeting._locate(1, hosts) == Topology(1, 3, 0, 1, 1, 2, "mpirun", ("node", "node"))
    assert meeting._own_host().split() == [socket.gethostname(), boot_id()]


def test_ranks_are_placed_by_the_names_of_their_hosts() -> None:
    hosts = ["b", "a", "b", "a", "b"]
    assert meeting._locate(4, hosts) == Topology(4, 5, 2, 3, 0, 2, "mpirun", ("b", "a"))
    assert meeting._locate(3, hosts) == Topology(3, 5, 1, 2, 1, 2, "mpirun", ("b", "a"))


def asked_for(monkeypatch: pytest.MonkeyPatch, url: str) -> list[tuple[object, ...]]:
    """Who is asked for a place to meet by `env://`, and how."""
    calls: list[tuple[object, ...]] = []

    def torchs_own(url: str, timeout: timedelta) -> Iterator[Any]:
        calls.append(("torch", url))
        return iter([])

    def by_the_job(variables: object, topology: Topology, timeout: timedelta) -> None:
        calls.append(("job", topology.rank, topology.world_size))

    def at_the_master(address: str, port: int, rank: int, world_size: int, timeout: timedelta) -> None:
        calls.append((address, port, rank, world_size))

    monkeypatch.setattr(meeting, "meet_under_mpirun", by_the_job)
    monkeypatch.setattr(tcp, "open_store", at_the_master)
    try:
        list(_EnvHandler(torchs_own)(url))
    except RendezvousError as error:
        calls.append((str(error),))
    return calls


def test_env_url_is_torchs_own_outside_of_mpirun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMPI_COMM_WORLD_RANK", raising=False)
    assert asked_for(monkeypatch, "env://") == [("torch", "env://")]


def test_env_url_under_mpirun_meets_by_the_job(under_mpirun: None, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = asked_for(monkeypatch, "env://")
    assert first == ("job", 2, 4)
    assert "install mpi4py" in str(second[0])


def test_env_url_under_mpirun_keeps_what_is_set(under_mpirun: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked_for(monkeypatch, "env://?rank=0&world_size=2") == [("torch", "env://?rank=0&world_size=2")]
    monkeypatch.setenv("MASTER_ADDR", "head")
    monkeypatch.setenv("MASTER_PORT", "1234")
    assert asked_for(monkeypatch, "env://") == [("head", 1234, 2, 4)], "where rank 0 listens on that address alone"
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert asked_for(monkeypatch, "env://") == [("torch", "env://")]
