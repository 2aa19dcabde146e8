"""The status file: where a rank is, in a file that outlives the rank.

The flight record is in memory that the ranks share, and is lost with them. So that a launcher, which is not a rank and
never imports torch, can report where each rank was, every rank also maps a small file from the launcher: one *section*
per process group, with the collective that the rank entered last, its call site, and whether it has returned. The
contents remain however the process ends. The file is memory held by the launcher, linked in its private folder
(`make_status_files`). Without a launcher there is no file, and the same words are written to private memory.

Layout of the file, all integers 64 bit in native byte order::

    0        magic, pid, who joined a group (see the note),        64
             whether this rank has raised in a world, meetings (see the note)
    64       text: which group this rank waits for others to make  512, up to HEADER_BYTES
    4096     section 0, section 1, …                               SECTION_BYTES each

    section:
    0        number entered, number finished, start;               64
             call and site of even numbers, of odd numbers
    64       state                                                 64
    128      text: name of the group                               384
    512      text: what a send or receive waits for                512
    4096     texts: ring of calls, RING entries of TEXT_BYTES
    …        texts: ring of call sites, RING entries of TEXT_BYTES

A text is a 16-bit length and UTF-8 bytes, truncated to its field. `start` is a double: seconds on the monotonic clock,
which all processes of a host share.

[Note: who joined] Three words, each set by a process when it joins a group: the rank itself; a child in its place, with
the same rank and world size; a child with another rank, which belongs to a job that the script starts itself. A script
that starts such a job does so in every rank of the launcher.

[Note: meetings] All ranks meet to create the default group, and any other with `new_group`. A rank counts the meetings
of all ranks of the launcher that it has reached, and says in which of them it waits. A rank that has ended after fewer
meetings will never reach that one, whatever its exit code.

[Note: what it costs] Texts are written once and then referred to by index, so a collective writes at most seven words,
and three if it repeats the last but one. Space is allocated before it is mapped: if memory is full, there is no status
file, rather than a SIGBUS at the first write.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import struct
import threading
import time
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from lockstep import env, libc

__all__ = [
    "CALL",
    "DEFAULT_GROUP",
    "EXIT_STOPPED",
    "FINISHED",
    "JOINING",
    "NUMBER",
    "RING",
    "SECTION_BYTES",
    "SITE",
    "START",
    "TEXT_BYTES",
    "Position",
    "Section",
    "call_field",
    "check_nobody_waits",
    "find_joined",
    "find_missed",
    "find_unjoined",
    "has_raised",
    "has_stopping_ranks",
    "make_status_files",
    "note_joined",
    "note_raised",
    "note_stopping",
    "note_torch",
    "noting_meeting",
    "open_section",
    "read_positions",
    "read_text",
    "site_field",
    "write_text",
]

EXIT_STOPPED = 75
"""Exit code of a rank that was told to stop, has saved, and wants to be restarted: EX_TEMPFAIL in sysexits.h."""

JOINING = "init_process_group"
"""The text for `noting_meeting` when a rank joins the group of all the launcher's ranks."""

RING = 64
TEXT_BYTES = 256
HEADER_BYTES = 4096
_RINGS_START = 4096
SECTION_BYTES = _RINGS_START + 2 * RING * TEXT_BYTES

# Indices of the words of a section.
NUMBER, FINISHED, START, CALL, SITE = range(5)
"""The CALL and SITE of a collective are at these plus 2 * (number % 2), so alternating calls need not be rewritten."""
_STATE = 8
_FREE, _OPEN, _CLOSED = range(3)

_MAGIC = 0x4C6F636B73746570
_STOPPING = "stops-by-itself"
_HEADER = struct.Struct("=8q")
_WORD = struct.Struct("=q")
_BY_ITSELF, _BY_CHILD, _BY_OTHERS = 16, 24, 32
"""Offsets of the three words described in [Note: who joined]."""
_RAISED, _NUM_MEETINGS = 40, 48
_MEETING = (64, 512)
DEFAULT_GROUP = "the default group"
_WORDS = struct.Struct("=2qd4q")
_NAME = (128, 384)
_WAITING = (512, 512)
_READ_TRIES = 10


def call_field(index: int) -> tuple[int, int]:
    """Start and size in bytes of a text in the ring of calls; the same in the control blocks of shared memory."""
    return _RINGS_START + index * TEXT_BYTES, TEXT_BYTES


def site_field(index: int) -> tuple[int, int]:
    """Start and size in bytes of a text in the ring of call sites."""
    return _RINGS_START + (RING + index) * TEXT_BYTES, TEXT_BYTES


def write_text(memory: memoryview, start: int, capacity: int, text: str) -> None:
    """Write a text, truncated if necessary, into a field of `capacity` bytes; the length is written last."""
    data = text.encode(errors="replace")[: capacity - 2]
    memory[start + 2 : start + 2 + len(data)] = data
    memory[start : start + 2] = len(data).to_bytes(2, "little")


def read_text(memory: memoryview | bytes, start: int, capacity: int) -> str:
    """The text in a field of `capacity` bytes; accepts any contents."""
    length = min(int.from_bytes(memory[start : start + 2], "little"), capacity - 2)
    return bytes(memory[start + 2 : start + 2 + length]).decode(errors="ignore")


class Section:
    """Where this rank is in one group. Only this rank writes it.

    Args:
        memory: SECTION_BYTES that a launcher reads, or None for private memory.

    Attributes:
        words: indexed by NUMBER, FINISHED, CALL and SITE; written by the thread that enters a collective.
        times: the same memory as doubles; indexed by START.
    """

    def __init__(self, memory: memoryview | None) -> None:
        self._memory = memory
        words = memory if memory is not None else memoryview(array("q", bytes(64 + 64))).cast("B")
        self.words = words.cast("q")
        self.times = words.cast("d")
        self._slot: tuple[_StatusFile, int] | None = None

    def write_call(self, index: int, text: str) -> None:
        """Write the description of a call into the ring of calls."""
        self._write(*call_field(index), text)

    def write_site(self, index: int, text: str) -> None:
        """Write a call site into the ring of call sites."""
        self._write(*site_field(index), text)

    def publish_waiting(self, text: str) -> None:
        """Set the send or receive that this rank waits in; empty when it no longer waits."""
        self._write(*_WAITING, text)

    def _write(self, offset: int, capacity: int, text: str) -> None:
        if self._memory is not None:
            write_text(self._memory, offset, capacity, text)

    def close(self) -> None:
        """Mark the group as shut down. The contents stay readable until another group reuses the section."""
        if self._slot is not None:
            status_file, index = self._slot
            self._slot = None
            self.words[_STATE] = _CLOSED
            status_file.release(index)


def _map(fd: int, offset: int) -> memoryview:
    """A section of a file as bytes, mapped as long as a view of them is alive.

    Not with Python's `mmap`, which would keep a duplicate of the descriptor open.
    """
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    address = libc.map_memory(None, SECTION_BYTES, protection, mmap.MAP_SHARED, fd, offset)
    return memoryview(libc.own(address, SECTION_BYTES)).cast("B")


class _StatusFile:
    """The status file of this process.

    Args:
        folder: the launcher's private folder.
        rank: global rank of this process.

    Raises:
        OSError: the file cannot be created, or another process of this rank uses it.
    """

    def __init__(self, folder: str, rank: int) -> None:
        self.owner = folder, rank, os.getpid()
        self._path = _path(Path(folder), rank)
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(fd).st_size > 0:
                raise FileExistsError("another process of this rank has written here")
            os.posix_fallocate(fd, 0, HEADER_BYTES)
            os.pwrite(fd, _HEADER.pack(_MAGIC, os.getpid(), *[0] * 6), 0)
        finally:
            os.close(fd)
        self._num_sections = 0
        self._num_meetings = 0
        self._free: list[int] = []

    def open(self, name: str) -> Section:
        index = self._free.pop(0) if self._free else self._num_sections
        start = HEADER_BYTES + index * SECTION_BYTES
        # Opened for each section, so that no descriptor stays open.
        with open(self._path, "r+b", buffering=0) as file:
            os.posix_fallocate(file.fileno(), start, SECTION_BYTES)
            memory = _map(file.fileno(), start)
        self._num_sections = max(self._num_sections, index + 1)
        memory[:4096] = bytes(4096)
        section = Section(memory)
        section._slot = self, index
        section._write(*_NAME, name)
        section.words[_STATE] = _OPEN
        return section

    def release(self, index: int) -> None:
        self._free.append(index)

    def write_meeting(self, text: str, num_more: int) -> None:
        self._num_meetings += num_more
        awaited = self._num_meetings if num_more > 0 else 0
        self._write(_WORD.pack(self._num_meetings) + _WORD.pack(awaited), _NUM_MEETINGS)
        start, capacity = _MEETING
        field = bytearray(capacity)
        write_text(memoryview(field), 0, capacity, text)
        self._write(field, start)

    def write_word(self, offset: int) -> None:
        self._write(_WORD.pack(1), offset)

    def _write(self, data: bytes | bytearray, offset: int) -> None:
        with open(self._path, "r+b", buffering=0) as file:
            os.pwrite(file.fileno(), data, offset)


def make_status_files(folder: Path, ranks: Iterable[int]) -> list[int]:
    """Create the status files of these ranks in memory. Local; called by the launcher.

    Without this, a rank creates a file on disk, where writes may have to wait if the disk is busy.

    Args:
        folder: private folder of the attempt, where each rank finds its file.
        ranks: global ranks on this host.

    Returns:
        Descriptors to close when the files are no longer read or written.
    """
    fds: list[int] = []
    with contextlib.suppress(OSError):
        for rank in ranks:
            fds.append(os.memfd_create(f"lockstep-position-rank{rank}", os.MFD_CLOEXEC))
            _path(folder, rank).symlink_to(f"/proc/{os.getpid()}/fd/{fds[-1]}")
    return fds


_status_file: _StatusFile | None = None
_refused: tuple[str, int, int] | None = None
_lock = threading.Lock()


def open_section(name: str) -> Section:
    """A section for a group of this rank. Local.

    Args:
        name: name of the group in messages.

    Returns:
        A section that the launcher reads; one in private memory if there is no launcher, or its folder is full.
    """
    with _lock:
        status_file = _file_of_process()
        if status_file is None:
            return Section(None)
        try:
            return status_file.open(name)
        except OSError:
            _refuse()
            return Section(None)


def note_torch() -> None:
    """Tell the launcher that this rank has imported torch. Local."""
    with _lock:
        _file_of_process()


def note_joined(rank: int, world_size: int) -> None:
    """Tell the launcher that this rank, or a child that it started, has joined a process group. Local.

    Args:
        rank: rank of this process in the group.
        world_size: size of the group.
    """
    with _lock, contextlib.suppress(OSError, struct.error):
        owner = _owner()
        if owner is None:
            return
        _file_of_process()
        with open(_path(Path(owner[0]), owner[1]), "r+b", buffering=0) as file:  # may be another process's
            magic, pid, *_ = _HEADER.unpack(file.read(_HEADER.size))
            is_it = (rank, world_size) == (owner[1], env.WORLD_SIZE.get())
            word = _BY_ITSELF if pid == os.getpid() else _BY_CHILD if is_it else _BY_OTHERS
            if magic == _MAGIC and (word != _BY_OTHERS or world_size > 1):
                os.pwrite(file.fileno(), _WORD.pack(1), word)


def note_raised() -> None:
    """Tell the launcher that this rank has raised an error of which the other ranks are told. Local."""
    with _lock, contextlib.suppress(OSError):
        status_file = _file_of_process()
        if status_file is not None:
            status_file.write_word(_RAISED)


@contextlib.contextmanager
def noting_meeting(text: str, of_all: bool = False) -> Iterator[None]:
    """Context manager within which the launcher sees that this rank waits for others to create a group. Local.

    Args:
        text: the call and its site, such as `new_group([0, 1]) at train.py:81 in main`.
        of_all: whether all ranks of the launcher must take part. See [Note: meetings].
    """
    _note_meeting(text, int(of_all))
    num_more = -int(of_all)
    try:
        yield
        num_more = 0
    finally:
        _note_meeting("", num_more)


def _note_meeting(text: str, num_more: int) -> None:
    with _lock, contextlib.suppress(OSError):
        status_file = _file_of_process()
        if status_file is not None:
            status_file.write_meeting(text, num_more)


def note_stopping() -> None:
    """Tell the launcher that a signal does not end this rank at once, but after a step and a save. Local."""
    owner = _owner()
    if owner is not None:
        with contextlib.suppress(OSError):
            (Path(owner[0]) / _STOPPING).touch()


def has_stopping_ranks(folder: Path) -> bool:
    """Whether a rank of an attempt has called `note_stopping`. Local; called by the launcher.

    Args:
        folder: private folder of the attempt.
    """
    return (folder / _STOPPING).exists()


def _file_of_process() -> _StatusFile | None:
    """The status file of this rank, created on first use; None without a launcher, or if it cannot be created."""
    global _status_file
    owner = _owner()
    if owner is None or _refused == owner:
        return None
    try:
        if _status_file is None or _status_file.owner != owner:
            _status_file = _StatusFile(owner[0], owner[1])
    except OSError:
        _refuse()
        return None
    return _status_file


def _owner() -> tuple[str, int, int] | None:
    folder, rank = env.LOCKSTEP_RENDEZVOUS.get(), env.RANK.get()
    return None if folder is None or rank is None else (folder, rank, os.getpid())


def _refuse() -> None:
    global _refused
    _refused = _owner()


@dataclass(frozen=True)
class Position:
    """The last known position of one rank in one group.

    Attributes:
        rank: global rank.
        pid: its process id.
        group: name of the group in messages.
        number: number of the collective in that group, counted from 1; 0 before the first.
        call: the call, such as `all_reduce(float32[10], SUM)`.
        site: its call site, such as `/home/me/train.py:81 in main`.
        inside: whether it has not returned from that collective.
        waiting: the send or receive that it waits in; empty for none.
        since_s: when it entered, in seconds on the monotonic clock.
        is_open: whether the group has not been shut down.
    """

    rank: int
    pid: int
    group: str
    number: int
    call: str
    site: str
    inside: bool
    waiting: str
    since_s: float
    is_open: bool

    @property
    def operation(self) -> str:
        """The name of the call, without arguments."""
        return self.call.partition("(")[0]

    @property
    def for_s(self) -> float:
        """Seconds since it entered."""
        return max(time.monotonic() - self.since_s, 0.0)


def read_positions(folder: Path, ranks: Iterable[int]) -> dict[int, list[Position]]:
    """The last known positions of the ranks of an attempt, including ranks that have ended.

    Args:
        folder: private folder of the attempt.
        ranks: global ranks to look for.

    Returns:
        rank -> its positions, one for each group in which it has called something, those that it is still in first,
        then the latest. Ranks without a position are left out.
    """
    found = {rank: _read_file(folder, rank) for rank in ranks}
    return {rank: positions for rank, positions in found.items() if positions}


def find_unjoined(folder: Path, ranks: Iterable[int]) -> list[int]:
    """Ranks of an attempt that imported torch and never joined a process group. Local; called by the launcher.

    Args:
        folder: private folder of the attempt.
        ranks: global ranks to look for.
    """
    return [rank for rank in ranks if _has_joined(folder, rank) is False]


def find_joined(folder: Path, ranks: Iterable[int]) -> list[int]:
    """Ranks of an attempt that joined a process group, however they ended. Local; called by the launcher.

    Args:
        folder: private folder of the attempt.
        ranks: global ranks to look for.
    """
    return [rank for rank in ranks if _has_joined(folder, rank)]


def find_missed(folder: Path, ended: Iterable[int], others: Iterable[int]) -> list[int]:
    """Ranks that ended before reaching the meeting in which another waits for all. Local; called by the launcher.

    See [Note: meetings]. Ranks with a child that joined a group are left out.

    Args:
        folder: private folder of the attempt.
        ended: ranks that have exited.
        others: ranks that have not.
    """
    awaited = max((_words_of(folder, rank).awaited_meeting for rank in others), default=0)
    words = {rank: _words_of(folder, rank) for rank in ended}
    return [
        rank
        for rank, each in words.items()
        if each.num_meetings < awaited and not (each.joined_by_child or each.joined_by_others)
    ]


def check_nobody_waits(rank: int) -> None:
    """Raise if another rank of this host has entered a later collective of the default group than this one. Local.

    Args:
        rank: global rank of this process.

    Raises:
        RuntimeError: there is such a rank. Never raised without a launcher.
    """
    owner = _owner()
    found = {} if owner is None else read_positions(Path(owner[0]), range(env.WORLD_SIZE.get() or 0))
    numbers = {peer: one.number for peer, seen in found.items() for one in seen if one.group == DEFAULT_GROUP}
    if max(numbers.values(), default=0) > numbers.get(rank, 0):
        raise RuntimeError("other ranks have not left, and wait for this one")


def _has_joined(folder: Path, rank: int) -> bool | None:
    """See [Note: who joined]. None for a rank that has not imported torch, whose purpose is therefore unknown."""
    words = _words_of(folder, rank)
    if not words.is_there:
        return None
    return bool(words.joined_by_itself or (words.joined_by_child and not words.joined_by_others))


def has_raised(folder: Path, rank: int) -> bool:
    """Whether a rank of an attempt has called `note_raised`. Local; called by the launcher."""
    return bool(_words_of(folder, rank).has_raised)


class _Words(NamedTuple):
    """The words of a status file's header; zeros for a rank that has not imported torch."""

    is_there: bool = False
    joined_by_itself: int = 0
    joined_by_child: int = 0
    joined_by_others: int = 0
    has_raised: int = 0
    num_meetings: int = 0
    awaited_meeting: int = 0


def _words_of(folder: Path, rank: int) -> _Words:
    try:
        magic, _, *words = _HEADER.unpack(_path(folder, rank).read_bytes()[: _HEADER.size])
    except (OSError, struct.error):
        return _Words()
    return _Words(True, *words) if magic == _MAGIC else _Words()


def _path(folder: Path, rank: int) -> Path:
    return folder / f"position-rank{rank}"


def _read_file(folder: Path, rank: int) -> list[Position]:
    try:
        with open(_path(folder, rank), "rb") as file:
            header = file.read(HEADER_BYTES)
            magic, pid, *_ = _HEADER.unpack(header[: _HEADER.size])
            size = os.fstat(file.fileno()).st_size
            starts = range(HEADER_BYTES, size - SECTION_BYTES + 1, SECTION_BYTES)
            positions = [_read_section(file.fileno(), start, rank, pid) for start in starts]
    except (OSError, struct.error):
        return []
    if magic != _MAGIC:
        return []
    said = [position for position in positions if position is not None]
    meeting = read_text(header[_MEETING[0] :], 0, _MEETING[1])
    if meeting:
        said.append(Position(rank, pid, DEFAULT_GROUP, 0, "", "", False, meeting, math.inf, True))
    # First those that it is still in, then the latest.
    return sorted(said, key=lambda one: (one.inside or bool(one.waiting), one.since_s), reverse=True)


def _read_section(fd: int, start: int, rank: int, pid: int) -> Position | None:
    data = b""
    # The rank may be writing: two equal reads are consistent.
    for _ in range(_READ_TRIES):
        before, data = data, os.pread(fd, SECTION_BYTES, start)
        if data == before:
            break
    number, finished, since_s, *calls_and_sites = _WORDS.unpack_from(data)
    call, site = calls_and_sites[2 * (number & 1) :][:2]
    (state,) = struct.unpack_from("=q", data, 8 * _STATE)
    waiting = read_text(data, *_WAITING)
    if state == _FREE or (number == 0 and not waiting):
        return None
    return Position(
        rank,
        pid,
        read_text(data, *_NAME),
        number,
        read_text(data, *call_field(call)) if number else "",
        read_text(data, *site_field(site)) if number else "",
        inside=number > finished,
        waiting=waiting,
        since_s=since_s,
        is_open=state == _OPEN,
    )
