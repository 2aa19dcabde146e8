"""What comes from a socket, a store, a file or shared memory, and is not what should: a named error, and nothing else.

Every parser gets what it should get with random changes, also of the types of values: for a minute in CI, from fixed
seeds, and some hundred times elsewhere; for FUZZ_MINUTES where that is set (`make nightly`), from others each time. A
failure prints the seed; `SEED=… pytest tests/fuzz/test_parsers.py` runs it again.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import select
import socket
import struct
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lockstep import network_interfaces
from lockstep.comm.hosts import handshake, link_store
from lockstep.comm.hosts.discovery import _RankInfo, _read, _read_first, _read_listener, _read_reached
from lockstep.comm.hosts.gloo_setup import _read_ready
from lockstep.comm.hosts.group import _read_terms
from lockstep.comm.hosts.handshake import _HELLO, _MAGIC, IncomingHandshake, OutgoingHandshake, Stranger
from lockstep.comm.hosts.link_store import LinkStore
from lockstep.comm.hosts.links import Links
from lockstep.comm.messages import message_mailbox
from lockstep.comm.messages.arrival import Entries
from lockstep.comm.messages.message_team import MESSAGE_BYTES, MessageTeam
from lockstep.comm.messages.notices import MessageControlBlocks, forward_notices, join_notices
from lockstep.comm.mpi.group import _Member
from lockstep.compat.legacy.choice import Choice
from lockstep.drift import comparison
from lockstep.errors import (
    InputError,
    LaunchError,
    RankLost,
    RendezvousError,
    SegmentDamaged,
    SetupError,
    SharedMemoryError,
)
from lockstep.launch.hosts import store_nonce
from lockstep.launch.hosts.job_store import _read_join_request
from lockstep.launch.hosts.membership import Host, JobTerms, Membership
from lockstep.launch.hosts.rendezvous import _read_master
from lockstep.launch.hosts.reports import HostReport, find_first_failure_of_all
from lockstep.launch.process import RankExit
from lockstep.launch.report import ErrorReport, _parse, read_reports
from lockstep.network_interfaces import ProbeListener
from lockstep.rank_status import find_unjoined, read_positions
from lockstep.recipes import runlog
from lockstep.recipes.imagenet import listing
from lockstep.recipes.runlog import RunLog
from lockstep.rendezvous.meeting import Meeting
from lockstep.secret import Refused, Seals, Secret, read_token_file, secret_of_ranks
from lockstep.shm.bootstrap import Bootstrap, _read_failure
from lockstep.shm.control_blocks import Failure, SharedControlBlocks
from lockstep.shm.liveness import own_identity
from lockstep.shm.messages import ANY_SOURCE, Label
from lockstep.shm.ring import RingReader, RingWriter, ring_bytes
from lockstep.shm.segment import PAGE_BYTES, Segment
from lockstep.shm.sync import PeerState
from lockstep.shm.terms import disagreement
from lockstep.train import EpochReport, StepReport

IS_NIGHTLY = "FUZZ_MINUTES" in os.environ
GOES_ON = IS_NIGHTLY or "CI" in os.environ
MINUTES = float(os.environ.get("FUZZ_MINUTES", "1"))
CASES = 600
INTERESTING = [
    b"",
    b"\0",
    b"\xff\xff\xff\xff",
    b"[",
    b"{",
    b"null",
    b"-1",
    b"1e999",
    b"9" * 5000,
    b"\x80\x04cos\n",
    b"|",
    b" ",
]


def mutate(data: bytes, choose: random.Random) -> bytes:
    """The same with some changes."""
    changed = bytearray(data)
    for _ in range(choose.choice((1, 1, 2, 8))):
        place = choose.randrange(len(changed) + 1)
        kind = choose.randrange(6)
        if kind == 0 and changed:
            changed[place % len(changed)] ^= 1 << choose.randrange(8)
        elif kind == 1:
            del changed[place : place + choose.choice((1, 4, 64))]
        elif kind == 2:
            changed[place:place] = choose.choice(INTERESTING)
        elif kind == 3:
            changed[place : place + 8] = choose.randbytes(8)
        elif kind == 4:
            changed[place:place] = changed[place : place + choose.choice((1, 16, 256))]
        else:
            del changed[place:]
    return bytes(changed)


def retype(data: bytes, choose: random.Random) -> bytes:
    """The same with one value of JSON that has another type; the same where it is no JSON."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return data
    box = [value]
    places: list[tuple[Any, Any]] = [(box, 0)]
    for holder, key in places:
        inner = holder[key]
        keys = inner.keys() if isinstance(inner, dict) else range(len(inner)) if isinstance(inner, list) else ()
        places.extend((inner, one) for one in keys)
    holder, key = choose.choice(places)
    holder[key] = choose.choice([None, True, -1, 1 << 70, 1.5, "", "text", [], [1], {}, {"a": 1}, [[]]])
    return json.dumps(box[0]).encode()


@dataclass
class Parser:
    """What reads, what it should get, and by which errors it may refuse what it gets."""

    read: Callable[[bytes], object]
    samples: list[bytes]
    refuses: tuple[type[Exception], ...] = ()


def as_text(data: bytes) -> str:
    return data.decode(errors="replace")


def text_of(read: Callable[[str], object]) -> Callable[[bytes], object]:
    return lambda data: read(as_text(data))


def as_json(read: Callable[[Any], object]) -> Callable[[bytes], object]:
    """For what is handed parsed JSON."""

    def parse(data: bytes) -> object:
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            return None
        return read(value)

    return parse


def host(key: str) -> Host:
    return Host(key, "node", 4711, "10.0.0.1", 2, None, 29401)


def membership() -> Membership:
    return Membership(JobTerms(1, 2, 3), 4, True, (host("a"), host("b")), (host("c"),), 5, 1, 0, ("a", "b"))


def report() -> ErrorReport:
    return ErrorReport(1, 2, "node", "ValueError", "text", "Traceback", "a.py", 3, 1.5, False, (0,))


def read_arrival(data: bytes) -> object:
    """The server's side of a handshake, with a client that says this and no more."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data[:4096])
        theirs.shutdown(socket.SHUT_WR)
        return IncomingHandshake(ours, "", 0, Secret("token"), lambda peer, address: None).advance()


def read_links(data: bytes) -> object:
    """A connection between ranks on which this comes."""
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(data[:4096])
        theirs.shutdown(socket.SHUT_WR)
        links = Links({1: Quiet(ours)})  # type: ignore[dict-item]
        for _ in range(3):
            for _, message in links.poll():
                assert len(message) <= len(data)
        links.close()
    return None


def elastic_time(reports: dict[int, ErrorReport]) -> object:
    """Which of the failures came first is decided by their times."""
    own = HostReport({1: RankExit(1, 2, 1, None, 1.0, False)}, dict(reports), (1,))
    return find_first_failure_of_all([HostReport.decode(own.encode())])


class Quiet:
    """A socket that takes the options of TCP, which it has not."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link

    def setsockopt(self, *_: object) -> None:
        pass

    def getpeername(self) -> tuple[str, int]:
        return "here", 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)


class OneValue:
    """A store with the same value under the one key that matters."""

    def __init__(self, text: str) -> None:
        self._text = text

    def set(self, key: str, value: str) -> None:
        pass

    def find(self, key: str) -> str | None:
        return self._text if key == "segment" else None

    def delete(self, key: str) -> None:
        pass


LAST_WORDS = "failure 1", json.dumps(["SetupError", "text", []]).encode()


def read_link_store(data: bytes) -> object:
    """What another rank says while a group is made, in one message."""
    links = SimpleNamespace(poll=lambda: [(1, memoryview(data))], lost=set(), put_back=list, send=lambda *_: None)
    store = LinkStore(links, 0, (0, 1), 1.0, lambda: None)  # type: ignore[arg-type]
    store.check_peers()
    store.set("failure 0", b"")
    return store.check(["failure 1"])


def link_message(key: str, value: bytes) -> bytes:
    return link_store._HEAD.pack(link_store._KIND, len(key), len(value)) + key.encode() + value


MODELS = b'{"0/1": [true, 3, "5e1f"], "0/2": [false, 4, "5e1f"]}'
VALUES = b'{"0/1": {"0.weight": [1.0, 0.5], "0.bias": [2.0, 0.0]}}'


def compare_models(data: bytes) -> object:
    """What another rank says of its models, beside what this one does."""
    own, other = (comparison._read_summary(text, comparison._is_said) for text in (MODELS.decode(), as_text(data)))
    return [comparison._find_differing(key, [own, other]) for key in own | other]


def compare_values(data: bytes) -> object:
    """What another rank says of its tensors, beside what this one does."""
    read = [comparison._read_summary(text, comparison._is_projection) for text in (VALUES.decode(), as_text(data))]
    return comparison._find_apart([[0, 1]], [one.get("0/1", {}) for one in read])


def notices() -> list[bytes]:
    """Messages of rank 1 of three: that it comes to a collective, that rank 2 does, that all do, and its last."""
    writer = MessageControlBlocks(1, [own_identity()] * 3, lambda failure: None)
    record = 5, 1, writer.add_call("all_reduce(float32[10], SUM)"), writer.add_site("a.py:3 in main")
    start = writer.fingerprint_words[1][1]
    writer.words[start : start + 4] = memoryview(array("q", record))
    entered = writer.enter_notice() + b"attached"
    joined = join_notices(1, [writer.enter_notice() + b"attached"] * 3, MESSAGE_BYTES)  # without texts, by now known
    assert joined is not None
    writer.fail(Failure("RankLost", (2,), "rank 2 is lost"))
    return [entered, *forward_notices([(2, entered)], MESSAGE_BYTES), joined, writer.final_notice(1)]


def read_notice(data: bytes) -> object:
    """What rank 1 sends, and then what the flight record reads of it."""
    blocks = MessageControlBlocks(0, [own_identity()] * 3, lambda failure: None)
    team: Any = SimpleNamespace(blocks=blocks, mail=deque(), _others=(1, 2), _entries=Entries(3))
    for name in ("_receive_notice", "_receive_entry"):
        setattr(team, name, functools.partial(getattr(MessageTeam, name), team))
    MessageTeam._receive_message(team, 1, memoryview(data))
    for rank in (1, 2):
        blocks.latest_record(rank)
        if blocks.state(rank) == PeerState.FAILED:
            str(blocks.failure(rank))
    return blocks.finished


def mails() -> list[bytes]:
    """One of each kind of message between two ranks."""
    label = Label("uint8", (40,), "a.py:1").encode()
    kinds = message_mailbox._Kind
    head = message_mailbox._HEADER.pack
    return [
        head(kinds.EAGER, 1, 3, 40, len(label)) + label + bytes(40),
        head(kinds.ANNOUNCE, 1, 3, 40, len(label)) + label,
        head(kinds.GRANT, 1, 0, 0, 0),
        head(kinds.REFUSE, 1, 0, 0, len(label)) + label,
        head(kinds.CONFIRM, 1, 0, 0, 0),
    ]


def read_mail(data: bytes) -> object:
    """What rank 1 sends to a rank that waits for a message, and has announced one."""
    blocks = MessageControlBlocks(0, [own_identity()] * 2, lambda failure: None)
    team: Any = SimpleNamespace(
        rank=0,
        world_size=2,
        blocks=blocks,
        mail=deque([(1, data), (1, data)]),
        poll=lambda: None,
        send_message=lambda *_: None,
        start_send=lambda *_: [],
        start_receive=lambda *_: [],
        are_done=lambda _: True,
    )
    mailbox = message_mailbox.MessageMailbox[Any](team)
    label = Label("uint8", (40,), "b.py:1")
    mailbox.receive(ANY_SOURCE, 3, label, torch.zeros(40, dtype=torch.uint8))
    mailbox.send(1, 3, Label("uint8", (5000,), "b.py:2"), torch.zeros(5000, dtype=torch.uint8))
    for _ in range(2):
        mailbox.progress()
    # Who comes later finds what was kept.
    mailbox.receive(1, 3, label, torch.zeros(40, dtype=torch.uint8))
    return mailbox.take_finished()


def read_answers(data: bytes) -> object:
    """The client's side of a handshake, with a server that says this and no more."""
    ours, theirs = socket.socketpair()
    client: Any = object.__new__(OutgoingHandshake)
    with ours, theirs:
        theirs.sendall(data[:4096])
        theirs.shutdown(socket.SHUT_WR)
        client.peer, client._rank, client._key = 1, 0, Secret("token")
        client.socket, client._step, client._reader = ours, handshake._Step.CONNECT, handshake._SocketReader(ours)
        # The challenge is not a random one here, so that an answer can be right.
        with patched(handshake.secrets, "token_bytes", bytes):
            is_over = client.advance() or client.advance()
        if client.socket is None:
            raise ConnectionError("it begins again")
        return is_over


def answers() -> bytes:
    """What the server of `read_answers` says."""
    return handshake._proof(Secret("token"), b"server", 1, 0, bytes(16), bytes(16)) + bytes(16) + b"\x01"


def read_challenge(data: bytes) -> object:
    """A client of the listener by which hosts find out who reaches whom."""
    ours, theirs = socket.socketpair()
    listener: Any = object.__new__(ProbeListener)
    with theirs:
        theirs.sendall(data[:4096])
        theirs.shutdown(socket.SHUT_WR)
        ours.setblocking(False)
        listener._key, listener._poll = Secret("token"), select.poll()
        listener._clients = {ours.fileno(): (ours, b"", 0.0)}
        listener._poll.register(ours, select.POLLIN)
        while listener._clients:
            listener._receive(ours.fileno())
    return None


def read_proof(data: bytes) -> bool:
    """What such a listener answers."""
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(data[:4096])
        theirs.shutdown(socket.SHUT_WR)
        with patched(network_interfaces.socket, "socket", lambda *_: Connected(ours)), ours:
            attempt = network_interfaces._Try(0, 0, "nonce", "10.0.0.1", 1)
            while (answers := attempt.go_on()) is None:
                pass
            return answers


class Connected:
    """A socket that connects to nothing further."""

    def __init__(self, client: socket.socket) -> None:
        self._client = client

    def connect_ex(self, _: object) -> int:
        return 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


@contextlib.contextmanager
def patched(place: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(place, name)
    setattr(place, name, value)
    try:
        yield
    finally:
        setattr(place, name, before)


def read_run(folder: Path) -> Callable[[bytes], object]:
    """The metrics of a run, by a run that continues with it in its folder."""

    def parse(data: bytes) -> object:
        (folder / runlog.METRICS).write_bytes(data)
        (folder / "later" / runlog.METRICS).unlink(missing_ok=True)
        scalars = SimpleNamespace(add_scalar=lambda _, value, step: float(value) + (1 << 63) // (step + 1), close=list)
        with (
            patched(runlog, "SummaryWriter", lambda *_, **__: scalars),
            RunLog(folder / "later", {}, resumed=folder, resumed_step=3),
        ):
            runlog._drop_after(folder / runlog.METRICS, 1)
        return None

    (folder / "later").mkdir(exist_ok=True)
    return parse


def run_lines() -> bytes:
    step = {"kind": "step", **asdict(StepReport(1, 1, 0.5, 8, 100.0, 0.1))}
    epoch = {"kind": "epoch", **asdict(EpochReport(1, 2, 0.5, 16, 1.0, 8, 0.1)), "held_out_loss": 0.5}
    del epoch["evaluation"]
    return b"".join(json.dumps(record).encode() + b"\n" for record in ({"kind": "run"}, step, epoch))


class KeptListing:
    """A listing of a small folder of images, as rank 0 keeps it."""

    def __init__(self, folder: Path) -> None:
        self.root, self.kept = folder / "images", folder / "kept.npz"
        for name in ("cat/1.png", "cat/2.png", "dog/1.png"):
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            (self.root / name).touch()
        self.listing, folders = listing.scan_folder(self.root)
        later_ns = time.time_ns() + 3_600_000_000_000
        listing._write(self.kept, self.listing, folders, later_ns)
        self.whole = self.kept.read_bytes()
        with np.load(self.kept) as arrays:
            self.arrays = dict(arrays)
        found = listing._read(self.kept, self.root)
        assert found is not None
        assert len(found) == 3

    def read(self, data: bytes) -> object:
        self.kept.write_bytes(data)
        found = listing._read(self.kept, self.root)
        return None if found is None else [found.path(index) for index in range(len(found))]

    def read_header(self, data: bytes) -> object:
        with self.kept.open("wb") as file:
            np.savez(file, **{**self.arrays, "header": np.frombuffer(data, dtype=np.uint8)})
        found = listing._read(self.kept, self.root)
        return None if found is None else [found.classes[label] for label in found.labels]


def bootstrap_of(segment: Segment) -> Parser:
    text = json.dumps(
        {
            "handle": segment.handle,
            "world_size": 2,
            "terms": {"layout": 1},
            "maker": asdict(own_identity()),
            "published_at_s": 1.0,
        }
    )
    error = json.dumps({"error": "SharedMemoryError", "message": "m", "boot_id": "b", "published_at_s": 1.0})

    def read(said: str) -> object:
        bootstrap = Bootstrap(OneValue(said), 1, (0, 1), 1.0)  # type: ignore[arg-type]
        found = bootstrap._read(said)
        return None if "error" in found else bootstrap._different(found, {"layout": 1})

    return Parser(text_of(read), [text.encode(), error.encode()], (RendezvousError,))


def blocks_of(segment: Segment) -> Parser:
    """Everything that a rank reads of a peer's block, which is written over."""
    blocks = SharedControlBlocks(segment, 0, 1)
    blocks.introduce(own_identity())
    blocks.add_call("all_reduce(float32[10], SUM)")
    blocks.add_site("train.py:3 in main")
    blocks.fail(Failure("RankLost", (1,), "rank 1 is lost"))
    blocks.announce(segment.handle)
    blocks.publish_wait("waits")
    start = 4096
    sample = bytes(segment.memory[start : start + 4096 + 256])

    def read(data: bytes) -> object:
        block = data[: len(sample)]
        segment.memory[start : start + len(block)] = block
        blocks.state(0)
        blocks.wait_of(0), blocks.announcement(0), blocks.failure(0), blocks.identity(0)
        blocks.latest_record(0)
        return blocks.find_damage(0, 1)

    return Parser(read, [sample], (SegmentDamaged,))


def ring_of(segment: Segment) -> Parser:
    capacity = 4096
    RingWriter(segment, 64, capacity).write((3, 1, 2, 5, 0, -1, 0), torch.arange(5, dtype=torch.uint8))
    sample = bytes(segment.memory[64 : 64 + 128 + 128])

    def read(data: bytes) -> object:
        segment.memory[64 : 64 + ring_bytes(capacity)] = bytes(ring_bytes(capacity))
        block = data[: ring_bytes(capacity)]
        segment.memory[64 : 64 + len(block)] = block
        reader = RingReader(segment, 64, capacity)
        for _ in range(100):
            fields = reader.read()
            if fields is None:
                break
            reader.payload(max(fields[3], 0) % 5000)
            reader.advance()
        return None

    return Parser(read, [sample], (SegmentDamaged,))


def read_questions(data: bytes) -> object:
    """What stands where launchers ask for the nonce."""
    store = dist.HashStore()
    dist.PrefixStore(store_nonce._PREFIX, store).set(store_nonce._ASK, data)
    answers = object.__new__(store_nonce.NonceAnswers)
    answers._store = dist.PrefixStore(store_nonce._PREFIX, store)
    return answers._take_questions()


def read_coming(data: bytes) -> object:
    """What stands where a rank comes to a meeting."""
    store, invited = dist.HashStore(), dict[int, str]()
    store.set("coming/1", data)
    Meeting(store, 2, 1.0, "here", str, lambda *_: None)._invite_one("0" * 32, 1, invited)
    return invited


def read_folder(folder: Path, rank_file: str, read: Callable[[], object]) -> Callable[[bytes], object]:
    """For what reads a file."""

    def parse(data: bytes) -> object:
        (folder / rank_file).write_bytes(data)
        return read()

    return parse


def parsers(folder: Path) -> dict[str, Parser]:
    """Every parser of the package that reads what another process wrote; by the page docs/security.md."""
    segment, seals = Segment.create(1 << 18), Seals(Secret("token"), "job")
    handle_of, kept = Segment.create(PAGE_BYTES), KeptListing(folder)
    secret = folder / "token"
    secret.touch(mode=0o600)
    hello = _HELLO.pack(_MAGIC, 1, bytes(16)) + bytes(32)
    coming = Seals(secret_of_ranks(), "coming", "0" * 32)
    host_report = HostReport({1: RankExit(1, 2, 1, None, 1.0, False)}, {1: report()}, (1,))
    box = b"".join(struct.pack("=q", number) for number in range(2048))
    return {
        "seals": Parser(
            text_of(lambda text: Seals(Secret("token"), "job").open("key", text)),
            [seals.seal("key", "v").encode()],
            (Refused,),
        ),
        "membership": Parser(text_of(Membership.decode), [membership().encode().encode()], (ValueError,)),
        "host report": Parser(
            text_of(lambda text: find_first_failure_of_all([HostReport.decode(text), host_report])),
            [host_report.encode().encode()],
            (ValueError,),
        ),
        "master": Parser(text_of(_read_master), [b'["10.0.0.1", 29500]'], (LaunchError,)),
        "knock": Parser(text_of(_read_join_request), [b'{"host": "a", "address": "10.0.0.1"}']),
        "handle": Parser(
            text_of(lambda text: Segment.attach(text, size_bytes=PAGE_BYTES).release()),
            [handle_of.handle.encode()],
            (SharedMemoryError,),
        ),
        "bootstrap": bootstrap_of(handle_of),
        "failure": Parser(text_of(lambda text: str(_read_failure(text))), [b'["SetupError", "text"]']),
        "terms": Parser(
            as_json(lambda value: disagreement("rank 0", {"layout": 1}, "rank 1", value)),
            [b'{"layout": 1, "wire": "fp32"}'],
        ),
        "info": Parser(
            as_json(lambda value: _read(_RankInfo, value)),
            [json.dumps({"identity": asdict(own_identity()), "boot_id": "b", "handle": "h"}).encode()],
            (RendezvousError,),
        ),
        "first": Parser(as_json(lambda value: _read_first(value, 3)), [b"2"], (RendezvousError,)),
        "probe": Parser(
            as_json(_read_listener),
            [b'{"nonce": "a", "endpoints": [["eth0", "10.0.0.1", 5000], ["lo", "127.0.0.1", 1]]}'],
            (RendezvousError,),
        ),
        "reached": Parser(as_json(_read_reached), [b'{"1": [0, 1], "2": []}'], (RendezvousError,)),
        "member": Parser(
            text_of(_Member.decode), [_Member(0, 2, "boot", own_identity()).encode().encode()], (RendezvousError,)
        ),
        "models": Parser(compare_models, [MODELS], (ValueError,)),
        "values": Parser(compare_values, [VALUES], (ValueError,)),
        "questions": Parser(read_questions, [f" {'0' * 32}  {'a' * 32} ".encode()]),
        "coming": Parser(read_coming, [f"{'0' * 32} {coming.seal('coming/1', '1')}".encode()]),
        "link store": Parser(
            read_link_store, [link_message("terms 1", b"{}"), link_message(*LAST_WORDS)], (SetupError, RankLost)
        ),
        "last words": Parser(
            lambda data: read_link_store(link_message("failure 1", data)),
            [LAST_WORDS[1], b'["RankLost", "rank 2 is gone", [2]]'],
            (SetupError, RankLost),
        ),
        "terms of a group": Parser(
            lambda data: disagreement("rank 0", {"layout": 1}, "rank 1", _read_terms(data, "rank 1")["terms"]),
            [b'{"terms": {"layout": 1}, "number": 3}', b'{"terms": {"layout": 2}, "number": null}'],
            (RendezvousError,),
        ),
        "ready": Parser(lambda data: set(_read_ready(data, 1)[1]), [b'[true, ["10.0.0.1"]]'], (RendezvousError,)),
        "notices": Parser(read_notice, notices()),
        "mails": Parser(read_mail, mails()),
        "label": Parser(Label.decode, [Label("float32", (2, 3), "a.py:1").encode()], (ValueError,)),
        "control blocks": blocks_of(segment),
        "ring": ring_of(Segment.create(1 << 14)),
        "handshake": Parser(read_arrival, [hello], (Stranger,)),
        "outgoing handshake": Parser(read_answers, [answers()], (RendezvousError, ConnectionError)),
        "challenge": Parser(read_challenge, [bytes(16)]),
        "proof": Parser(read_proof, [bytes(32)]),
        "links": Parser(
            read_links,
            [struct.pack("!IQ", 5, 0) + b"abcde" + struct.pack("!IQ", 0, 7), struct.pack("!IQ", 0xFFFFFFFF, 0)],
        ),
        "error report": Parser(text_of(_parse), [json.dumps(asdict(report())).encode()]),
        "report file": Parser(
            read_folder(folder, "error-rank0.json", lambda: read_reports(folder, {0: 1})),
            [json.dumps(asdict(report())).encode()],
        ),
        "elastic report": Parser(
            read_folder(folder, "torchelastic-rank7.json", lambda: elastic_time(read_reports(folder, {7: 1}))),
            [
                json.dumps(
                    {"message": {"message": "E: text", "extraInfo": {"py_callstack": "t", "timestamp": "1.5"}}}
                ).encode()
            ],
        ),
        "choice": Parser(
            text_of(lambda text: (choice := Choice.load(text)).sentence(list(choice.changes))),
            [Choice("main.py", {"torch._six": "utils.py:3"}).dump().encode()],
            (ValueError,),
        ),
        "metrics of a run": Parser(read_run(folder), [run_lines()], (InputError,)),
        "line of metrics": Parser(
            lambda data: read_run(folder)(data.replace(b"\n", b" ") + b"\n"),
            [line for line in run_lines().splitlines() if line],
            (InputError,),
        ),
        "listing": Parser(kept.read, [kept.whole]),
        "header of a listing": Parser(kept.read_header, [kept.arrays["header"].tobytes()]),
        "status file": Parser(
            read_folder(folder, "position-rank0", lambda: (read_positions(folder, [0]), find_unjoined(folder, [0]))),
            [box],
        ),
        "token file": Parser(
            read_folder(folder, "token", lambda: read_token_file(str(secret))), [b"0123456789abcdef\n"], (SetupError,)
        ),
    }


NAMES = [
    "seals", "membership", "host report", "master", "knock", "handle", "bootstrap", "failure", "terms", "info", "first",
    "probe", "reached", "member", "models", "values", "questions", "coming", "link store", "last words",
    "terms of a group", "ready", "notices", "mails", "label", "control blocks", "ring", "handshake",
    "outgoing handshake", "challenge", "proof", "links", "error report", "report file", "elastic report", "choice",
    "metrics of a run", "line of metrics", "listing", "header of a listing", "status file", "token file",
]  # fmt: skip


def test_all_are_named(tmp_path: Path) -> None:
    assert list(parsers(tmp_path)) == NAMES


@pytest.mark.timeout(60 * MINUTES + 300)
@pytest.mark.parametrize("name", NAMES)
def test_parser(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    parser = parsers(tmp_path)[name]
    until = time.monotonic() + 60 * MINUTES / len(NAMES)
    seed = int(os.environ.get("SEED", time.time_ns() % (1 << 30) if IS_NIGHTLY else 0))
    count = 0
    while count < CASES or (GOES_ON and time.monotonic() < until):
        choose = random.Random(f"{name} {seed + count}")
        change = choose.choice((mutate, mutate, retype))
        data = change(choose.choice(parser.samples), choose)
        try:
            parser.read(data)
        except parser.refuses:
            pass
        except Exception as error:
            raise AssertionError(
                f"{name}, seed {seed + count}: {type(error).__name__}: {error}\n{data[:300]!r}"
            ) from error
        count += 1
