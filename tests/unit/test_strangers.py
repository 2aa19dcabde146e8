"""Those who do not know the job's secret: what they write, where they connect, and what they make ranks wait for."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch.distributed as dist

from lockstep import env
from lockstep.comm.group_nonce import agree_on_nonce
from lockstep.comm.group_setup import BootstrapStore
from lockstep.comm.hosts.handshake import _HELLO, _MAGIC
from lockstep.comm.hosts.links import Links
from lockstep.comm.hosts.peer_listener import PeerListener
from lockstep.comm.mpi.group import _local_peers, _Member
from lockstep.drift import comparison
from lockstep.errors import LaunchError, RendezvousError, SetupError
from lockstep.launch.hosts.clients import _address, connected_to
from lockstep.launch.hosts.options import parse_conf
from lockstep.network_interfaces import Interface, ProbeListener, reachable
from lockstep.secret import MAC_BYTES, Refused, Seals, Secret, new_token, read_token_file
from lockstep.shm.bootstrap import Bootstrap
from lockstep.shm.liveness import own_identity
from lockstep.testing import limit_s

LOOPBACK = Interface("lo", "127.0.0.1", True)
TOKEN, OTHER = "a" * 64, "b" * 64

# ---- seals ----------------------------------------------------------------------------------------------------------


def test_value_under_a_seal_comes_back() -> None:
    writer, reader = Seals(Secret(TOKEN), "job"), Seals(Secret(TOKEN), "job")
    for text in ("", "a b  c", "ü\n", '{"a": "b c d e f"}'):
        assert reader.open("key", writer.seal("key", text)) == text


@pytest.mark.parametrize(
    ("reader", "key", "why"),
    [
        (Seals(Secret(OTHER), "job"), "key", "made with another token"),
        (Seals(Secret(None), "job"), "key", r"made with another token \([0-9a-f]{8}\) than is known here \(none\)"),
        (Seals(Secret(TOKEN), "another job"), "key", "its MAC is wrong"),
        (Seals(Secret(TOKEN), "job"), "another key", "its MAC is wrong"),
    ],
)
def test_seal_is_of_one_job_and_one_key(reader: Seals, key: str, why: str) -> None:
    with pytest.raises(Refused, match=why):
        reader.open(key, Seals(Secret(TOKEN), "job").seal("key", "value"))


def test_no_part_of_a_sealed_value_can_be_changed() -> None:
    seals = Seals(Secret(TOKEN), "job")
    sealed = seals.seal("key", "value")
    for place in range(len(sealed)):
        changed = sealed[:place] + ("0" if sealed[place] != "0" else "1") + sealed[place + 1 :]
        with pytest.raises(Refused):
            Seals(Secret(TOKEN), "job").open("key", changed)


def test_older_value_is_not_taken_again() -> None:
    writer, reader = Seals(Secret(TOKEN), "job"), Seals(Secret(TOKEN), "job")
    first, second = writer.seal("key", "1"), writer.seal("key", "2")
    assert reader.open("key", first) == "1"
    assert reader.open("key", second) == "2"
    assert reader.open("key", second) == "2"
    with pytest.raises(Refused, match="older than what was read before"):
        reader.open("key", first)


def test_secret_does_not_show() -> None:
    secret = Secret(TOKEN)
    for text in (repr(secret), str(secret), secret.name, f"{secret.derive('ranks')!r}", Seals(secret).seal("k", "v")):
        assert TOKEN not in text
        assert secret._key.hex() not in text


# ---- what ranks keep in their store ---------------------------------------------------------------------------------


def test_what_a_stranger_writes_into_the_ranks_store_counts_as_not_there(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCKSTEP_TOKEN", TOKEN)
    shared = dist.HashStore()
    ours, theirs = BootstrapStore(shared, "group"), BootstrapStore(shared, "group")
    forged = dist.PrefixStore("attempt0", shared)
    forged.set("segment", '{"handle": "its MAC is wrong"}')
    assert theirs.find("segment") is None
    ours.set("segment", "true")
    assert theirs.find("segment") == "true"
    monkeypatch.setattr("lockstep.comm.group_setup._PATIENCE_S", -1.0)
    forged.set("segment", b"\x80\xff garbage")
    with pytest.raises(RendezvousError, match="'segment' was not written by a rank of this job: it has no MAC"):
        theirs.find("segment")
    monkeypatch.setenv("LOCKSTEP_TOKEN", OTHER)
    BootstrapStore(shared, "group").set("segment", "another job's")
    with pytest.raises(RendezvousError, match=r"made with another token.*same LOCKSTEP_TOKEN"):
        theirs.find("segment")
    assert TOKEN not in capfd.readouterr().err


def test_values_that_are_removed_while_they_are_read_count_as_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank waited for others to write them for as long as its store waits, half an hour."""
    monkeypatch.setattr("lockstep.torch_private.stores._REMOVED_MEANWHILE", timedelta(seconds=0.1))
    shared = dist.HashStore()
    shared.set_timeout(timedelta(minutes=5))
    store, start_s = BootstrapStore(shared, "group"), time.monotonic()
    inner = store._store

    class Removing:
        def check(self, keys: list[str]) -> bool:
            found = inner.check(keys)
            inner.delete_key("b")
            return found

        def __getattr__(self, name: str) -> Any:
            return getattr(inner, name)

    store._store = Removing()  # type: ignore[assignment]
    for key in "ab":
        store.set(key, "1")
    assert store.get_all(["a", "b"]) is None
    store.set("b", "1")
    assert store.find("b") == "1"
    assert time.monotonic() - start_s < limit_s(30)
    assert shared.timeout == timedelta(minutes=5)


class Recorded(dist.Store):
    """A store of which somebody has recorded all that was ever written there."""

    def __init__(self, values: list[tuple[str, bytes]]) -> None:
        super().__init__()
        self.values = dict(values)
        self.recording = list(values)

    def set(self, key: str, value: Any) -> None:
        self.values[key] = bytes(value)
        self.recording.append((key, bytes(value)))

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return self.values.keys() >= set(keys)

    def delete_key(self, key: str) -> bool:
        return self.values.pop(key, None) is not None


def agree(store: dist.Store) -> list[BootstrapStore | BaseException]:
    """Two ranks that make a group over that store."""
    found: dict[int, BootstrapStore | BaseException] = {}

    def come(rank: int) -> None:
        try:
            nonce = agree_on_nonce(BootstrapStore(store, "group"), rank, (0, 1), limit_s(10), "segment")
            found[rank] = BootstrapStore(store, "group", nonce=nonce)
        except BaseException as error:
            found[rank] = error

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[0], found[1]]


def test_recording_of_an_earlier_job_fits_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one token for several jobs, what a rank of yesterday's had said of its failure ended today's."""
    monkeypatch.setenv("LOCKSTEP_TOKEN", TOKEN)
    yesterday = Recorded([])
    one, two = agree(yesterday)
    assert isinstance(one, BootstrapStore)
    assert isinstance(two, BootstrapStore)
    one.set("failure", "rank 0 could not join")
    one.below("host a").set("segment", "handle")
    assert two.find("failure") == "rank 0 could not join"
    assert two.below("host a").find("segment") == "handle"
    today = Recorded(yesterday.recording)
    three, four = agree(today)
    assert isinstance(three, BootstrapStore)
    assert isinstance(four, BootstrapStore)
    for key, value in yesterday.recording:
        today.set(key, value)
    for store in (three, four):
        assert store.find("failure") is None
        assert store.below("host a").find("segment") is None
    four.set("failure", "rank 1 could not join")
    assert three.find("failure") == "rank 1 could not join"
    assert "segment" not in today.values, "what tells ranks without a token that others have one is gone"


@pytest.mark.parametrize("tokens", [(TOKEN, OTHER), (TOKEN, None), (None, TOKEN)])
def test_ranks_with_another_token_do_not_agree(
    tokens: tuple[str | None, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them hears of it before its timeout, also where the other has no token, and so no nonce."""
    monkeypatch.setattr("lockstep.rendezvous.meeting._PATIENCE_S", 0.1)
    monkeypatch.setattr("lockstep.comm.group_setup._PATIENCE_S", 0.1)
    own = threading.local()
    for module in ("comm.group_nonce", "comm.group_setup", "rendezvous.meeting"):
        monkeypatch.setattr(f"lockstep.{module}.secret_of_ranks", lambda: Secret(own.token))
    store, said = dist.HashStore(), dict[int, str]()

    def come(rank: int) -> None:
        own.token = tokens[rank]
        plain = BootstrapStore(store, "group")
        try:
            nonce = agree_on_nonce(plain, rank, (0, 1), limit_s(1), "segment")
            bound = BootstrapStore(store, "group", nonce=nonce)
            if rank == 0:
                bound.set("segment", "handle")
            end_s = time.monotonic() + limit_s(1)
            while time.monotonic() < end_s and not said:
                bound.find("segment")
                time.sleep(0.01)
        except RendezvousError as error:
            said[rank] = str(error)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "was made with another token" in said[1]
    assert "Do all ranks have the same LOCKSTEP_TOKEN" in said[1]


def test_rank_that_does_not_come_to_agree_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_TOKEN", TOKEN)
    plain = BootstrapStore(dist.HashStore(), "group")
    with pytest.raises(RendezvousError, match=r"rank 6 did not come within 0.05 s of rank 5.*same world size of 2"):
        agree_on_nonce(plain, 0, (5, 6), 0.05)
    with pytest.raises(RendezvousError, match=r"rank 5 did not come within 0.05 s of rank 6"):
        agree_on_nonce(plain, 1, (5, 6), 0.05)


def test_segment_that_is_removed_once_it_was_seen_is_read() -> None:
    """Between two questions, whether it is there and what it is, somebody may remove it."""

    class Once:
        """A store whose value is gone after the first question."""

        values: ClassVar = ["handle"]

        def find(self, key: str) -> str | None:
            return self.values.pop() if self.values else None

    assert Bootstrap(Once(), 1, (0, 1), 0.1)._await_published() == "handle"  # type: ignore[arg-type]


def test_ranks_that_compare_models_believe_no_stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    """What he wrote in the place of a rank was the end of a good run, by a ModelError or a raw one."""
    monkeypatch.setenv("LOCKSTEP_TOKEN", TOKEN)
    shared, said = dist.HashStore(), {"g/0": "same"}
    forged = json.dumps({"g/0": "other"})
    for key in ("lockstep/drift/g/1", "lockstep/drift/g/attempt0/hashes1", "lockstep/drift/g/attempt0/hashes0"):
        shared.set(key, forged)
    monkeypatch.setattr("lockstep.comm.group_stores.default_store", lambda: shared)
    found: dict[int, Any] = {}

    def end(rank: int) -> None:
        group = SimpleNamespace(group_name="g")
        world = SimpleNamespace(process_group=group, rank=rank, world_size=2)
        found[rank] = comparison._Meeting(world).exchange("hashes", said, str)  # type: ignore[arg-type]

    threads = [threading.Thread(target=end, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1] == [said] * 2


@pytest.mark.parametrize("text", ["[]", "[1]", '{"a": 1}', '{"a": "b"}', '{"a": {"b": [1.0]}}', "[" * 9000])
@pytest.mark.parametrize("is_known", [comparison._is_said, comparison._is_projection])
def test_summary_that_no_rank_makes_is_refused(text: str, is_known: Callable[[Any], bool]) -> None:
    with pytest.raises(ValueError, match=r".+"):
        comparison._read_summary(text, is_known)


def test_summary_that_ranks_make_is_read() -> None:
    for summary, is_known in (
        ({"g/0": [True, 3, "hash"]}, comparison._is_said),
        ({"g/0": {"weight": [1.5, 0.25]}}, comparison._is_projection),
    ):
        assert comparison._read_summary(json.dumps(summary), is_known) == summary


@pytest.mark.parametrize(
    "text",
    [
        *("[]", "{}", "3", "[0, 1, 2, 3, 4, 5]", "[0, 1, 2, 3, 4, 5, 6]"),
        *('["0", 1, "boot", 2, 3, "host", 5]', '[7, 2, "boot", 2, 3, "h", 5]', '[0, 2, 1, 2, 3, "h", 5]'),
    ],
)
def test_member_of_an_mpi_group_is_checked(text: str) -> None:
    with pytest.raises(RendezvousError, match="published invalid data about itself"):
        _Member.decode(text)
    member = _Member(1, 2, "boot", own_identity())
    assert _Member.decode(member.encode()) == member


def test_ranks_of_mpi_watch_no_process_of_a_host_with_the_same_name() -> None:
    """It was said to have died: its pid is none on this host."""
    members = [_Member(rank, 4, boot, own_identity()) for rank, boot in enumerate(("a", "b", "b", "a"))]
    assert [_local_peers(members, rank) for rank in range(4)] == [[3], [2], [1], [0]]


def test_a_value_refused_to_the_end_is_named_whichever_way_the_wait_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_TOKEN", OTHER)
    shared = dist.HashStore()
    BootstrapStore(shared, "group").below("host a").set("segment", "another job's")
    monkeypatch.setenv("LOCKSTEP_TOKEN", TOKEN)
    ours = BootstrapStore(shared, "group")
    with pytest.raises(RendezvousError, match=r"^rank 0 did not come$"), ours.explaining():
        raise RendezvousError("rank 0 did not come")
    assert ours.below("host a").find("segment") is None
    expected = r"'segment' .* made with another token.*LOCKSTEP_TOKEN, .* The ranks did not meet: rank 0 did not come$"
    with pytest.raises(RendezvousError, match=expected), ours.explaining():
        raise RendezvousError("rank 0 did not come")
    ours.below("host a").set("segment", "true")
    assert ours.below("host a").find("segment") == "true"
    with pytest.raises(RendezvousError, match=r"^rank 0 did not come$"), ours.explaining():
        raise RendezvousError("rank 0 did not come")


# ---- where ranks connect --------------------------------------------------------------------------------------------


def meet(
    secrets: tuple[Secret, Secret],
    disturb: Callable[[str, int], object] = lambda address, port: None,
    timeout_s: float = 5.0,
) -> list[Links | BaseException]:
    """Two ranks connect, after a stranger has done something at rank 0's listener."""
    listeners = [PeerListener("127.0.0.1", secret) for secret in secrets]
    disturb(*listeners[0].endpoint[:2])
    made: dict[int, Links | BaseException] = {}

    def join(rank: int) -> None:
        try:
            made[rank] = listeners[rank].connect(
                rank, {1 - rank: listeners[1 - rank].endpoint}, limit_s(timeout_s), lambda: None
            )
        except BaseException as error:
            made[rank] = error

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [made[0], made[1]]


def close(made: list[Links | BaseException]) -> None:
    for one in made:
        if isinstance(one, Links):
            one.close()


@pytest.mark.parametrize("token", [None, TOKEN])
def test_silent_connections_keep_nobody_waiting(token: str | None, capfd: pytest.CaptureFixture[str]) -> None:
    """Six of them stopped a group for 30 s."""
    silent: list[socket.socket] = []

    def knock(address: str, port: int) -> None:
        silent.extend(socket.create_connection((address, port)) for _ in range(20))
        silent[0].sendall(_MAGIC[:1])

    start_s = time.monotonic()
    made = meet((Secret(token), Secret(token)), knock)
    assert all(isinstance(one, Links) for one in made), made
    assert time.monotonic() - start_s < limit_s(3)
    close(made)
    for one in silent:
        one.close()


def test_ranks_with_another_token_are_refused_by_both() -> None:
    made = meet((Secret(TOKEN), Secret(OTHER)), timeout_s=1.0)  # rank 0 waits for all of it
    assert "rank 1 cannot connect to rank 0" in str(made[1])
    assert "has another token than this rank" in str(made[1])
    assert "ranks [1] did not connect to rank 0" in str(made[0])


def pass_for_rank_one(address: str, port: int, key: Secret) -> bytes:
    """What a stranger hears that does all as a rank would, by a key that it has made up."""
    with socket.create_connection((address, port), limit_s(5)) as link:
        link.sendall(_HELLO.pack(_MAGIC, 1, bytes(16)))
        answer = link.recv(MAC_BYTES + 16, socket.MSG_WAITALL)
        proof = key.mac(b"handshake", b"client", b"0", b"1", bytes(16), answer[MAC_BYTES:])
        link.sendall(proof)
        return link.recv(2)


def test_who_knows_the_store_alone_does_not_pass_for_a_rank() -> None:
    """It was taken for rank 1, and rank 0 blamed for what came of it."""
    listener = PeerListener("127.0.0.1", Secret(TOKEN))
    other = PeerListener("127.0.0.1", Secret(TOKEN))
    address, port, word = listener.endpoint
    heard: list[bytes] = []
    made: list[Links] = []

    def strange() -> None:
        heard.append(pass_for_rank_one(address, port, Secret(None).derive("handshake", word)))
        made.append(other.connect(1, {0: listener.endpoint}, limit_s(5), lambda: None))

    thread = threading.Thread(target=strange)
    thread.start()
    links = listener.connect(0, {1: other.endpoint}, limit_s(10), lambda: None)
    thread.join()
    assert heard == [b"\x00"]
    links.close()
    made[0].close()


def test_without_a_token_a_rank_comes_from_its_own_address() -> None:
    listener = PeerListener("127.0.0.1", Secret(None))
    address, port, word = listener.endpoint
    said: list[object] = []
    thread = threading.Thread(
        target=lambda: said.append(pass_for_rank_one(address, port, Secret(None).derive("handshake", word)))
    )
    thread.start()
    with pytest.raises(RendezvousError, match=r"one from 127.0.0.1 was refused: .*rank 1, whose address is 10.0.0.2"):
        listener.connect(0, {1: ("10.0.0.2", 1, "")}, limit_s(1), lambda: None)
    thread.join()
    assert said == [b"\x00"]


def test_probe_listener_answers_only_who_knows_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_TOKEN", TOKEN)
    listener = ProbeListener([LOOPBACK])
    try:
        place = listener.endpoints[0][1:]
        silent = [socket.create_connection(place) for _ in range(6)]
        assert reachable({1: (listener.nonce, [place])}) == {1: [0]}
        monkeypatch.setenv("LOCKSTEP_TOKEN", OTHER)
        assert reachable({1: (listener.nonce, [place])}) == {1: []}
        for one in silent:
            one.close()
    finally:
        listener.close()


# ---- tokens ---------------------------------------------------------------------------------------------------------


def test_token_file_is_made_once_and_for_this_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "token"
    token, remarks = read_token_file(str(path))
    assert len(token) == 64
    assert remarks == [f"made {path}, with a token for this job: every host needs the same file"]
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_token_file(str(path)) == (token, [])
    assert os.listdir(tmp_path) == ["token"]


@pytest.mark.parametrize("data", [b"", b" \n", b"\xff\xfe" * 20, b"x" * 5000, b"a\x00b"])
def test_file_without_a_token_is_named(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_bytes(data)
    path.chmod(0o600)
    with pytest.raises(SetupError, match=f"token_file={path} holds no token") as caught:
        read_token_file(str(path))
    assert "x" * 20 not in str(caught.value)


def test_file_that_others_may_read_is_said(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("short\n")
    path.chmod(0o644)
    token, remarks = read_token_file(str(path))
    assert token == "short"
    assert "others may read" in remarks[0]
    assert "can be guessed" in remarks[1]
    assert "short" not in "".join(remarks).replace(str(path), "")
    for wrong in (tmp_path, tmp_path / "missing" / "token"):
        with pytest.raises(SetupError, match="token_file="):
            read_token_file(str(wrong))


def test_token_on_a_command_line_is_refused() -> None:
    assert parse_conf("token_file=/a/b")["token_file"] == "/a/b"
    with pytest.raises(LaunchError, match="token_file=PATH") as caught:
        parse_conf(f"token={TOKEN}")
    assert TOKEN not in str(caught.value)
    with pytest.raises(LaunchError, match="without a path"):
        parse_conf("token_file=")


def test_every_token_is_another() -> None:
    assert len({new_token() for _ in range(100)}) == 100


# ---- who is connected -----------------------------------------------------------------------------------------------


def test_addresses_of_visitors() -> None:
    assert _address("0100007F") == "127.0.0.1" or sys.byteorder == "big"
    assert _address("0000000000000000FFFF00000100007F") == "127.0.0.1" or sys.byteorder == "big"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert connected_to(port) == set()
        with socket.create_connection(("127.0.0.1", port), source_address=("127.0.0.7", 0)):
            assert connected_to(port) == {"127.0.0.7"}


# ---- what is shown ---------------------------------------------------------------------------------------------------


def test_doctor_and_errors_do_not_show_the_token() -> None:
    variables = {**os.environ, "LOCKSTEP_TOKEN": TOKEN}
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", "doctor"],
        env=variables,
        capture_output=True,
        text=True,
        timeout=limit_s(120),
    )
    assert TOKEN not in done.stdout + done.stderr
    assert "lockstep" in (done.stdout + done.stderr).lower()
    env.check({"LOCKSTEP_TOKEN": TOKEN})
    assert json.dumps(sorted(env.registry)).count("LOCKSTEP_TOKEN") == 1
