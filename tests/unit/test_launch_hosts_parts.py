"""The parts of a launch on several hosts that need no ranks: options, membership, rounds between threads."""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from lockstep.commands.run import main
from lockstep.errors import LaunchError
from lockstep.launch.free_port import find_free_port
from lockstep.launch.hosts import job_store as job_store_module
from lockstep.launch.hosts.agent import Interrupted
from lockstep.launch.hosts.heartbeat import Observer
from lockstep.launch.hosts.job_store import JobStore
from lockstep.launch.hosts.membership import Host, JobTerms, Membership
from lockstep.launch.hosts.options import HostsConfig, add_arguments, hosts_from, parse_conf, parse_endpoint
from lockstep.launch.hosts.rendezvous import HostRendezvous, JobClosed
from lockstep.launch.hosts.reports import HostReport, find_first_failure_of_all
from lockstep.launch.hosts.store_nonce import NoAnswer, NonceAnswers, ask_for_nonce
from lockstep.launch.process import RankExit
from lockstep.launch.report import ErrorReport
from lockstep.secret import Secret
from lockstep.testing import limit_s

# ---- options ---------------------------------------------------------------------------------------


def parsed(*words: str) -> HostsConfig | None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--master-addr")
    parser.add_argument("--master-port", type=int)
    parser.add_argument("--max-restarts", type=int)
    add_arguments(parser)
    return hosts_from(parser.parse_args(words))


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--nnodes", "1", "--node-rank", "0", "--master-addr", "here", "--master-port", "5"),
        ("--nnodes=1:1", "--rdzv-endpoint", "localhost:0", "--rdzv-backend=c10d", "--rdzv-id=9"),
    ],
)
def test_one_host_needs_nobody(words: tuple[str, ...]) -> None:
    assert parsed(*words) is None


def test_options() -> None:
    fixed = parsed("--nnodes=2", "--node_rank", "1", "--master-addr", "a", "--rdzv_conf", "join_timeout=7")
    assert fixed == HostsConfig(2, 2, "a", 29500, 1, is_holder=False, join_s=7.0)
    holder = parsed("--nnodes=2", "--node-rank=0", "--master-addr=a", "--master-port=9", "--rdzv-backend=static")
    assert holder == HostsConfig(2, 2, "a", 9, 0, is_holder=True)
    elastic = parsed("--nnodes=1:3", "--rdzv_endpoint=a:7", "--rdzv_id=x", "--local-addr=b", "--rdzv-conf=is_host=1")
    assert elastic == HostsConfig(1, 3, "a", 7, is_holder=True, run_id="x", local_addr="b")
    assert parsed("--nnodes=1:3", "--rdzv-endpoint=[fe80::1]") == HostsConfig(1, 3, "fe80::1", 29400)
    assert parse_conf("keep_alive_max_attempt=4,close_timeout=3") == {"lost_after_s": 4.0}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--nnodes 2:1", "--nnodes is '2:1'; expected a number of hosts, or MIN:MAX with 1 <= MIN <= MAX"),
        ("--nnodes 0", "--nnodes is '0'; expected a number of hosts"),
        ("--nnodes two", "--nnodes is 'two'; expected a number of hosts"),
        ("--nnodes 2 --node-rank 2", "--node-rank is 2, but --nnodes is 2: hosts are counted from 0 to 1"),
        ("--nnodes 2 --node-rank -1", "--node-rank is -1, but --nnodes is 2: hosts are counted from 0 to 1"),
        ("--node-rank 1", "--node-rank is 1, but --nnodes is 1: hosts are counted from 0 to 0"),
        ("--nnodes 2", "--nnodes 2 needs a rendezvous endpoint: --master-addr ADDR with --node-rank R, or"),
        ("--nnodes 2 --master-addr h", "--master-addr needs --node-rank, the number of this host from 0 to 1"),
        ("--nnodes 2 --master-addr h --node-rank 0 --master-port 0", "--master-port is 0; expected 1 to 65535"),
        ("--nnodes 2 --master-addr h --rdzv-endpoint k", "are two rendezvous endpoints; give one of them"),
        ("--nnodes 2 --rdzv-endpoint h:x", "--rdzv-endpoint is 'h:x'; expected HOST:PORT"),
        ("--nnodes 2 --rdzv-endpoint :9", "--rdzv-endpoint is ':9'; expected HOST:PORT"),
        ("--nnodes 2 --rdzv-backend etcd", "--rdzv-backend is 'etcd'; expected c10d or static"),
        ("--nnodes 2 --rdzv-conf join=3", "--rdzv-conf has no key 'join'; there are: join_timeout"),
        ("--nnodes 2 --rdzv-conf join_timeout=0", "--rdzv-conf has join_timeout=0; expected a number above 0"),
        ("--nnodes 2 --rdzv-conf join_timeout", "--rdzv-conf has 'join_timeout'; expected KEY=VALUE"),
        ("--nnodes 2 --rdzv-conf is_host=perhaps", "--rdzv-conf has is_host=perhaps; expected 0 or 1"),
    ],
)
def test_options_that_make_no_sense(words: str, said: str) -> None:
    with pytest.raises(LaunchError, match=re.escape(said)):
        main([*words.split(), __file__])


def test_endpoints() -> None:
    assert parse_endpoint("h") == ("h", 29400)
    assert parse_endpoint("[::1]:5") == ("::1", 5)
    assert parse_endpoint("fe80::1") == ("fe80::1", 29400)


# ---- membership ------------------------------------------------------------------------------------------

A, B, C = (Host(key, key, number, key, 1) for number, key in enumerate("abc"))


def keys(hosts: tuple[Host, ...]) -> str:
    return "".join(host.key for host in hosts)


def test_membership_of_an_elastic_job() -> None:
    membership = Membership(JobTerms(1, 2, 0)).joined(A)
    assert (keys(membership.members), membership.is_enough, membership.is_full) == ("a", True, False)
    membership = membership.begun().joined(B).joined(C)
    assert (keys(membership.members), keys(membership.waiting), membership.has_room) == ("a", "bc", True)
    membership = membership.joined(A)
    assert (membership.number, membership.is_running, keys(membership.members), keys(membership.waiting)) == (
        1,
        False,
        "bc",
        "a",
    )
    membership = membership.begun()
    assert not membership.has_room, "a is a spare now"
    membership = membership.without("b")
    assert (membership.number, membership.is_running, keys(membership.members)) == (1, True, "c"), "c still runs"
    membership = membership.joined(C)
    assert (membership.number, keys(membership.members)) == (2, "ac")
    assert keys(membership.begun().members) == "ca", "who ran before comes first"
    assert Membership.decode(membership.encode()) == membership


def test_hosts_with_numbers_are_in_their_order() -> None:
    hosts = [replace(host, node_rank=number) for host, number in ((A, 2), (B, 0), (C, None))]
    membership = Membership(JobTerms(3, 3, 0))
    for host in hosts:
        membership = membership.joined(host)
    assert keys(membership.begun().members) == "bac"
    late = Host("d", "d", 1, "d", 1, 2)
    membership = membership.begun().joined(late)
    assert (membership.namesake(late), membership.namesake(hosts[0]), membership.namesake(hosts[2])) == (
        hosts[0],
        None,
        None,
    )
    two = Membership(JobTerms(2, 2, 0)).joined(hosts[0]).joined(late)
    assert not two.is_enough, "one of them must go"
    assert not two.is_full


def test_a_job_that_has_gone_on_elsewhere_keeps_its_numbers() -> None:
    fresh = Membership(JobTerms(1, 2, 0))
    assert fresh.joined(A).continued(5, 2).joined(B).begun().number == 5
    running = fresh.joined(A).begun().continued(5, 2).joined(B)
    assert (running.number, running.failures, running.joined(A).number) == (0, 2, 5)


def test_a_round_fails_once() -> None:
    membership = Membership(JobTerms(1, 1, 3)).failed(0).failed(0)
    assert (membership.failures, membership.failed(1).failures) == (1, 2)
    assert membership.ended("first", 3).ended("second", 4).exit_code == 3


class Counts:
    """A store where counts lie."""

    def __init__(self, **counts: str) -> None:
        self.counts = counts

    def get(self, key: str) -> str | None:
        return self.counts.get(key.removeprefix("heartbeat/"))


def test_who_stops_counting_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the observer's own clock; looking rarely makes nobody lost."""
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    store: Any = Counts(a="1", b="7")
    observer = Observer(store, 5.0)
    assert observer.lost("ab") == []
    now_s += 4
    store.counts["a"] = "2"
    assert observer.lost("ab") == []
    now_s += 2
    assert observer.lost("ab") == ["b"]
    now_s += 60
    store.counts["a"] = "3"
    assert observer.lost("abc") == ["b"]


def test_who_is_written_over_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger who wrote there faster than the launcher counts had it given up. One that never counts is lost."""
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    store: Any = Counts(a="1", b="7")
    observer = Observer(store, 5.0)
    assert observer.lost("ab") == []
    del store.counts["a"], store.counts["b"]
    for _ in range(9):
        now_s += 4
        assert observer.lost("ab") == []
    store.counts["a"] = "2"
    now_s += 4
    assert observer.lost("ab") == []
    now_s += 11
    store.counts["a"] = "3"
    assert observer.lost("ab") == ["b"], "not seen for ten times as long"
    now_s += 6
    assert observer.lost("ab") == ["a", "b"], "it stands still, and nobody writes over it"


# ---- reports ---------------------------------------------------------------------------------------


def test_failures_of_all_hosts_are_compared() -> None:
    """Times decide between causes; a secondary failure is none, however early its host's clock is."""
    secondary = ErrorReport(1, 11, "b", "lockstep.errors.RankLost", "rank 0 died", "…", "x.py", 1, 50.0, True, (0,))
    one = HostReport({0: RankExit(0, 10, 137, 9, 100.0, False)}, {}, [0])
    two = HostReport(
        {1: RankExit(1, 11, 1, None, 50.1, False), 2: RankExit(2, 12, 0, None, 1.0, False)}, {1: secondary}, [1]
    )
    received = [HostReport.decode(report.encode()) for report in (two, one)]
    failures = find_first_failure_of_all(received)
    assert [failure.rank for failure in failures] == [0, 1]
    assert failures[1].report == secondary
    assert failures[0].ended.host == socket.gethostname()
    assert [report.has_failed for report in received] == [True, True]
    assert not HostReport({2: RankExit(2, 12, 0, None, 1.0, False)}).has_failed


@pytest.mark.parametrize(
    ("part", "change"),
    [("exits", {"time": "soon"}), ("exits", {"stopped": "no"}), ("exits", {"rank": [1]}), ("reports", {"line": "7"})],
)
def test_report_with_other_types_is_refused(part: str, change: dict[str, Any]) -> None:
    """It was a TypeError where the failures of all hosts are compared."""
    error = ErrorReport(1, 11, "b", "ValueError", "text", "…", "x.py", 1, 50.0, False)
    report = json.loads(HostReport({1: RankExit(1, 11, 1, None, 50.1, False)}, {1: error}, [1]).encode())
    HostReport.decode(json.dumps(report))
    report[part][0].update(change)
    with pytest.raises(ValueError, match="no report of a host"):
        HostReport.decode(json.dumps(report))


# ---- rounds ----------------------------------------------------------------------------------------

Nap = Callable[[float], None]


def quick(port: int, nnodes: tuple[int, int] = (2, 2), **options: Any) -> HostsConfig:
    options = {"heartbeat_s": 0.1, "lost_after_s": limit_s(1), "last_call_s": 0.2, "join_s": limit_s(20)} | options
    return HostsConfig(*nnodes, "127.0.0.1", port, **options)


def rendezvous_of(
    config: HostsConfig, max_restarts: int = 0, num_ranks: int = 1, nap: Nap = time.sleep
) -> HostRendezvous:
    return HostRendezvous(config, JobStore.open(config, nap), num_ranks, max_restarts, nap)


def in_thread(call: Callable[[], Any]) -> Future[Any]:
    """Start the call; each in a thread of its own."""
    executor = ThreadPoolExecutor(1)
    future = executor.submit(call)
    executor.shutdown(wait=False)
    return future


def test_rounds_of_two_launchers() -> None:
    """They get the same numbers in every round, with a place for rank 0 that is another one in each."""
    port = find_free_port()
    zero = rendezvous_of(quick(port, node_rank=0))
    one = rendezvous_of(quick(port, node_rank=1, is_holder=False))
    masters = set()
    for number in range(3):
        pending = in_thread(one.next_rendezvous)
        mine, other = zero.next_rendezvous(), pending.result(limit_s(20))
        assert [(info.rank, info.world_size) for info in (mine, other)] == [(0, 2), (1, 2)]
        assert zero.number == one.number == number
        assert mine.bootstrap_store_info == other.bootstrap_store_info
        masters.add(zero.master)
        one.put("word", f"in round {number}")
        deadline = time.monotonic() + limit_s(10)
        while zero.get("word") is None and time.monotonic() < deadline:  # nobody confirms what a store is told
            time.sleep(0.001)
        assert zero.get("word") == f"in round {number}"
        assert zero.num_nodes_waiting() == 0
        zero.regroup()
        assert zero.num_nodes_waiting() == 1
    assert len(masters) == 3
    one.shutdown()
    deadline = time.monotonic() + limit_s(10)
    while not zero.missing() and time.monotonic() < deadline:
        zero.look()
        time.sleep(0.02)
    assert zero.missing() == [one.host]
    pending = in_thread(zero.next_rendezvous)
    one.close("that is enough", 3)  # not zero, which no two threads may use at once
    with pytest.raises(JobClosed, match="that is enough") as caught:
        pending.result(limit_s(20))
    assert caught.value.membership.exit_code == 3
    zero.shutdown()


def test_a_round_that_began_while_a_member_ended_its_ranks_is_its_round() -> None:
    """It left that round for another, and the others took it for lost."""
    port = find_free_port()
    zero = rendezvous_of(quick(port, node_rank=0))
    one = rendezvous_of(quick(port, node_rank=1, is_holder=False))
    one._change(lambda membership: membership.joined(one.host))  # as a host does that goes back to the first store
    zero.next_rendezvous()
    assert one.next_rendezvous().rank == 1
    zero.look()
    assert (zero.number, one.number, zero.missing()) == (0, 0, [])
    one.shutdown()
    zero.shutdown()


def test_a_host_that_finds_its_store_again_has_left_the_round() -> None:
    """Its ranks are gone, and the others must end theirs."""
    port = find_free_port()
    zero = rendezvous_of(quick(port, node_rank=0))
    one = rendezvous_of(quick(port, node_rank=1, is_holder=False))
    pending = in_thread(one.next_rendezvous)
    zero.next_rendezvous()
    pending.result(limit_s(20))
    one._settle_at(one.job_store.reconnect())
    pending = in_thread(one.next_rendezvous)
    deadline = time.monotonic() + limit_s(10)
    while not zero.missing() and time.monotonic() < deadline:
        zero.look()
        time.sleep(0.02)
    assert zero.missing() == [one.host]
    zero.next_rendezvous()
    pending.result(limit_s(20))
    assert (zero.number, one.number) == (1, 1)
    one.shutdown()
    zero.shutdown()


def test_launchers_that_were_told_different_things() -> None:
    port = find_free_port()
    join_s = limit_s(8)  # until the first one gives up, and none of the others can name it
    zero = rendezvous_of(quick(port, node_rank=0, join_s=join_s))
    pending = in_thread(zero.next_rendezvous)
    deadline = time.monotonic() + limit_s(10)
    while not zero.membership.hosts and time.monotonic() < deadline:
        time.sleep(0.01)
    for config, max_restarts, words in (
        (quick(port, (3, 3), node_rank=2, is_holder=False), 0, "--nnodes 3 here and 2 there; give all launchers"),
        (quick(port, (1, 2), node_rank=1, is_holder=False), 0, "--nnodes 1:2 here and 2 there; give all launchers"),
        (quick(port, node_rank=1, is_holder=False), 4, "--max-restarts 4 here and 0 there; give all launchers"),
    ):
        other = rendezvous_of(config, max_restarts)
        said = re.escape(f"{other.host} and {zero.host} have different options: {words}")
        with pytest.raises(LaunchError, match=said):
            other.next_rendezvous()
        other.shutdown()
    same = rendezvous_of(quick(port, node_rank=0, is_holder=False, lost_after_s=join_s / 4))
    with pytest.raises(LaunchError, match=r"two launchers have --node-rank 0: this one .*; give each host"):
        same.next_rendezvous()
    same.shutdown()
    within = re.escape(f"within {join_s:g} s. Start `lockstep run` on every")
    with pytest.raises(LaunchError, match=rf"1 of 2 came .*; they did not come {within}"):
        pending.result(limit_s(20))
    zero.shutdown()


def test_places_that_cannot_be_had() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            LaunchError, match=f"must listen at 127.0.0.1, port {port}, .*in use.* another --master-port"
        ):
            JobStore.open(quick(port, is_holder=True), time.sleep)
    port = find_free_port()
    with pytest.raises(
        LaunchError, match=rf"found no other at 127.0.0.1, port {port}, .* within 0.3 s: nobody listens"
    ):
        JobStore.open(quick(port, is_holder=False, join_s=0.3), time.sleep)
    nowhere = replace(quick(port, join_s=0.3), address="no-such-host.invalid")
    with pytest.raises(LaunchError, match=r"the name service does not know no-such-host.invalid .*; give an address"):
        JobStore.open(nowhere, time.sleep)


def test_holder_whose_name_is_not_known_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of a pod appears once it is ready; no other launcher will listen there."""
    failures = iter(range(5))
    known = socket.getaddrinfo

    def getaddrinfo(host: str, *args: Any, **options: Any) -> Any:
        if host == "localhost" and next(failures, None) is not None:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return known(host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    store = JobStore.open(replace(quick(find_free_port(), join_s=limit_s(30)), address="localhost"), lambda nap_s: None)
    try:
        assert store.is_holder
    finally:
        store.close()


@pytest.mark.parametrize(
    ("before", "name_errors", "patience_s"),
    [(400, 100, None), (0, 400, 30), (6500, 0, 600), (5900, 200, 600)],  # tenths of a second
)
def test_patience_with_a_name_begins_when_it_is_not_known(
    monkeypatch: pytest.MonkeyPatch, before: int, name_errors: int, patience_s: int | None
) -> None:
    clock_s = [0.0]

    def nap(nap_s: float) -> None:
        clock_s[0] += nap_s

    def connect(*_: Any) -> socket.socket:
        number = round(clock_s[0] * 10)
        if number < before:
            raise ConnectionRefusedError(111, "Connection refused")
        if number < before + name_errors:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return socket.socket()

    monkeypatch.setattr(job_store_module, "time", SimpleNamespace(monotonic=lambda: clock_s[0]))
    monkeypatch.setattr(socket, "create_connection", connect)
    monkeypatch.setattr(job_store_module, "say", lambda text: None)
    config = quick(1, join_s=600)
    if patience_s is None:
        assert job_store_module._reach(config, nap, lambda: None) == "0.0.0.0"
    else:
        with pytest.raises(LaunchError, match=f"found no other at .* within {patience_s} s"):
            job_store_module._reach(config, nap, lambda: None)


@pytest.mark.parametrize("answers", [True, False])
def test_what_listens_is_no_launcher(answers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that hangs up, and one that takes connections and never says anything."""
    monkeypatch.setattr(job_store_module, "_CONNECT_TIMEOUT_S", 1.0 if answers else 0.5)
    monkeypatch.setattr(job_store_module, "_STORE_TIMEOUT", timedelta(seconds=1))
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        if answers:
            hang_up = threading.Thread(target=lambda: [other.accept()[0].close() for _ in range(2)], daemon=True)
            hang_up.start()
        config = quick(other.getsockname()[1], is_holder=False)
        with pytest.raises(LaunchError, match=r"is not the launcher of a multi-host job \(.*\); choose another port"):
            JobStore.open(config, time.sleep)
    # A thread in torch's code must not come back from there while this process ends.
    for thread in threading.enumerate():
        if thread.name == "lockstep-connect":
            thread.join(limit_s(60))
            assert not thread.is_alive()


def test_waiting_ends_when_the_launcher_is_told_to_end() -> None:
    def interrupted(_: float) -> None:
        raise Interrupted(2)

    with pytest.raises(Interrupted):
        JobStore.open(quick(find_free_port(), is_holder=False), interrupted)


def test_second_launcher_of_a_machine_connects_to_the_first() -> None:
    port = find_free_port()
    first = JobStore.open(quick(port), time.sleep)
    second = JobStore.open(quick(port), time.sleep)
    assert (first.is_holder, second.is_holder) == (True, False)
    second.set("key", "value")
    assert first.get("key") == "value"
    assert first.get("other") is None
    before = len(os.listdir("/proc/self/fd"))
    third = JobStore.open(quick(port, run_id="another job"), time.sleep)
    assert third.get("key") is None
    # A connection has two ends, both here, and whatever the store opens beside it.
    assert len(os.listdir("/proc/self/fd")) - before <= 3


# ---- the nonce of a store  -----------------------------------------------------------------------------------------

SECRET = Secret("a token in a file that stays when its job ends")


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + limit_s(10)
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def recording(port: int) -> dict[str, str]:
    """What stands in the store of a job that has ended, with the same token, name and port as the next."""
    config = quick(port, is_holder=True, secret=SECRET)
    rendezvous = rendezvous_of(config)
    rendezvous.close("the job is done", 0)
    found = {key: rendezvous.job_store.raw(key) for key in ("birth", "membership")}
    rendezvous.shutdown()
    return found


def test_holder_takes_no_nonce_that_stands_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger who came first to the port had it continue with an earlier job, which was closed."""
    port = find_free_port()
    earlier = recording(port)
    hold = job_store_module._hold

    def hold_and_lose(config: HostsConfig) -> Any:
        store = hold(config)
        for key, value in earlier.items():
            store.set(key, value)
        return store

    monkeypatch.setattr(job_store_module, "_hold", hold_and_lose)
    zero = rendezvous_of(quick(port, is_holder=True, secret=SECRET))
    assert zero.job_store.raw("birth") != earlier["birth"]
    assert zero.membership.closed is None
    zero.shutdown()


@pytest.mark.parametrize("is_removed", [True, False])
def test_who_comes_believes_no_nonce_that_stands_there(is_removed: bool) -> None:
    """It took a recorded one for the job's, and made one of its own where there was none."""
    port = find_free_port()
    earlier = recording(port)
    zero = rendezvous_of(quick(port, is_holder=True, secret=SECRET))
    for key, value in earlier.items():
        zero.job_store._store.set(key, value)
    if is_removed:
        zero.job_store._store.delete_key("birth")
    one = rendezvous_of(quick(port, is_holder=False, secret=SECRET))
    assert one.job_store.nonce == zero.job_store.nonce
    assert one.membership.closed is None
    assert (zero.job_store.raw("birth") == "") == is_removed, "only the holder writes it"
    zero.job_store.put_back_nonce()
    assert zero.job_store.raw("birth") not in ("", earlier["birth"])
    one.shutdown()
    zero.shutdown()


def test_answers_to_others_are_refused_and_asked_again() -> None:
    """What a holder has answered is of use to nobody else, and garbage in its place keeps nobody out."""
    shared = dist.HashStore()
    asked = dist.PrefixStore("lockstep-birth", shared)
    answers = NonceAnswers(shared, SECRET, 5, "the nonce")
    asked.set("ask", b"\xff garbage")
    old = "0" * 32
    wait_until(lambda: not asked.check(["ask"]))
    asked.set("ask", f"{old} and more")
    wait_until(lambda: asked.check([f"answer/{old}"]))
    recorded = asked.get(f"answer/{old}")
    is_first = True

    def nap(seconds: float) -> None:
        nonlocal is_first
        if is_first:  # The question stands there; the stranger answers first.
            is_first = False
            question = asked.get("ask").decode().split()[0]
            asked.set(f"answer/{question}", recorded)
        time.sleep(seconds)

    answers.stop()
    with pytest.raises(NoAnswer, match="its MAC is wrong"):
        ask_for_nonce(shared, SECRET, 5, limit_s(20), 0.2, nap)
    answers = NonceAnswers(shared, SECRET, 5, "the nonce")
    assert ask_for_nonce(shared, SECRET, 5, limit_s(20), limit_s(20), time.sleep) == "the nonce"
    answers.stop()


def test_nobody_answers() -> None:
    with pytest.raises(NoAnswer, match=r"nobody there answers within 0.1 s"):
        ask_for_nonce(dist.HashStore(), SECRET, 5, 0.1, 0.1, time.sleep)


class Removing:
    """A store in which a stranger removes each value once it was seen there.

    Args:
        store: the store.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def check(self, keys: list[str]) -> bool:
        found = self._store.check(keys)
        for key in keys:
            self._store.delete_key(key)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_value_that_is_removed_while_it_is_read_counts_as_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher waited 30 s for another, and took the store for lost, which ended the job."""
    monkeypatch.setattr(job_store_module, "_STORE_TIMEOUT", timedelta(seconds=1))
    store = JobStore.open(quick(find_free_port(), is_holder=True), time.sleep)
    store._store.set("round0/failed", "a stranger's")
    store._store = Removing(store._store)  # type: ignore[assignment]
    assert store.get("round0/failed") is None
    store.close()
