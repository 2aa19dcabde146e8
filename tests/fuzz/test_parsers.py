"""What comes from a socket, a store, a file or shared memory, and is not what should: a named error, and nothing else.

Every parser gets what it should get with random changes, also of the types of values: for a minute in CI, from fixed
seeds, and some hundred times elsewhere; for FUZZ_MINUTES where that is set (`make nightly`), from others each time. A
failure prints the seed; `SEED=… pytest tests/fuzz/test_parsers.py` runs it again.
"""

from __future__ import annotations

import json
import os
import random
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep import drift
from lockstep.comm.hosts.discovery import _Listener, _RankInfo, _read_first, _read_reached
from lockstep.comm.hosts.handshake import _HELLO, _MAGIC, IncomingHandshake, Stranger
from lockstep.comm.hosts.links import Links
from lockstep.comm.mpi.group import _Member
from lockstep.errors import LaunchError, RendezvousError, SegmentDamaged, SetupError, SharedMemoryError
from lockstep.launch.hosts import store_nonce
from lockstep.launch.hosts.job_store import _read_join_request
from lockstep.launch.hosts.membership import Host, JobTerms, Membership
from lockstep.launch.hosts.rendezvous import _read_master
from lockstep.launch.hosts.reports import HostReport, find_first_failure_of_all
from lockstep.launch.process import RankExit
from lockstep.launch.report import ErrorReport, _parse, read_reports
from lockstep.rank_status import find_unjoined, read_positions
from lockstep.rendezvous import tcp
from lockstep.secret import Refused, Seals, Secret, read_token_file, secret_of_ranks
from lockstep.shm.bootstrap import Bootstrap, _read_failure
from lockstep.shm.control_blocks import Failure, SharedControlBlocks
from lockstep.shm.liveness import own_identity
from lockstep.shm.messages import Label
from lockstep.shm.ring import RingReader, RingWriter, ring_bytes
from lockstep.shm.segment import PAGE_BYTES, Segment
from lockstep.shm.terms import disagreement

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


def text_of(read: Callable[[str], object]) -> Callable[[bytes], object]:
    return lambda data: read(data.decode(errors="replace"))


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

    def get(self, key: str) -> str:
        return self._text

    def has(self, key: str) -> bool:
        return key == "segment"


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
    tcp._Rendezvous("127.0.0.1", 1, 2, timedelta(seconds=1))._invite_one(store, "0" * 32, 1, invited)
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
    handle_of = Segment.create(PAGE_BYTES)
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
            as_json(_RankInfo.decode),
            [json.dumps({"identity": asdict(own_identity()), "boot_id": "b", "handle": "h"}).encode()],
            (RendezvousError,),
        ),
        "first": Parser(as_json(lambda value: _read_first(value, 3)), [b"2"], (RendezvousError,)),
        "probe": Parser(
            as_json(_Listener.decode),
            [b'{"nonce": "a", "endpoints": [["eth0", "10.0.0.1", 5000], ["lo", "127.0.0.1", 1]]}'],
            (RendezvousError,),
        ),
        "reached": Parser(as_json(_read_reached), [b'{"1": [0, 1], "2": []}'], (RendezvousError,)),
        "member": Parser(
            text_of(_Member.decode), [_Member(0, 2, own_identity()).encode().encode()], (RendezvousError,)
        ),
        "drift": Parser(
            text_of(drift._read_summaries), [b'[{"shapes": [[2, 3]], "now": "ab", "synced": ["cd"]}]'], (ValueError,)
        ),
        "questions": Parser(read_questions, [f" {'0' * 32}  {'a' * 32} ".encode()]),
        "coming": Parser(read_coming, [f"{'0' * 32} {coming.seal('coming/1', '1')}".encode()]),
        "label": Parser(Label.decode, [Label("float32", (2, 3), "a.py:1").encode()], (ValueError,)),
        "control blocks": blocks_of(segment),
        "ring": ring_of(Segment.create(1 << 14)),
        "handshake": Parser(read_arrival, [hello], (Stranger,)),
        "links": Parser(
            read_links,
            [struct.pack("!IQ", 5, 0) + b"abcde" + struct.pack("!IQ", 0, 7), struct.pack("!IQ", 0xFFFFFFFF, 0)],
        ),
        "error report": Parser(text_of(_parse), [json.dumps(asdict(report())).encode()]),
        "report file": Parser(
            read_folder(folder, "error-rank0.json", lambda: read_reports(folder, {0: 1})),
            [json.dumps(asdict(report())).encode()],
        ),
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
    "probe", "reached", "member", "drift", "questions", "coming", "label",
    "control blocks", "ring", "handshake", "links", "error report", "report file", "status file", "token file",
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
