"""Memory shared by the processes of one host.

A segment has no name. It is a memfd by default, which peers open through `/proc/<pid>/fd`, so that kill -9 at any
moment leaves nothing behind, and the size of `/dev/shm` (64 MiB in a default container) does not matter. If peers
cannot see each other's `/proc`, `LOCKSTEP_SHM_DIR` names a folder that they share: the segment is then a file there
with a random name and mode 0600, unlinked as soon as all ranks have mapped it.

[Note: orphans] A process killed between creating such a file and unlinking it leaves the file behind. So its creator
meanwhile holds a lock on it, which ends with the process, and the process that creates the next segment in that folder
removes the files that are not locked.

[Note: forged handles] A handle comes from a store that others may be able to write, and the file that it names is
mapped and written. So it may only name what a rank of this user has created for this purpose: a file with our naming
scheme in this rank's own LOCKSTEP_SHM_DIR, whatever folder the handle says, or a memfd of our name; no other file of
the user's. Its size is what this rank computes itself, not what the handle says.

Pages are reserved when the segment is created (`posix_fallocate`): a full file system is an error here, never a SIGBUS
later.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import json
import mmap
import os
import re
import secrets
import stat
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from lockstep import libc
from lockstep.errors import SharedMemoryError
from lockstep.json_records import read_record
from lockstep.shm.descriptors import advice
from lockstep.shm.support import segment_folder

__all__ = ["Segment", "boot_id", "can_leave", "give_back", "leave", "populate"]

PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20
_NONCE_BYTES = 16
_FILE_PREFIX = "lockstep-segment-"
_FILE_NAME = re.compile(_FILE_PREFIX + "[0-9a-f]{16}")
_MEMFD_NAME = "lockstep"
_MEMFD_LINK = re.compile(rf"/?memfd:{_MEMFD_NAME}( \(deleted\))?")
_LARGEST_BYTES = 1 << 46
_LONGEST_DIRECTORY = 200  # the path travels in a small field of the control segment
_MADV_REMOVE = 9
_MADV_POPULATE_WRITE = 23
_MADV_COLLAPSE = 25
_MAP_FIXED = 0x10
_PROT_NONE = 0
_MAP_PRIVATE_ANONYMOUS = 0x22
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2


@functools.cache
def boot_id() -> str:
    """The id of this boot of this host; containers of one host share it."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _reserve(fd: int, size_bytes: int, where: str, is_sparse: bool) -> None:
    try:
        if is_sparse:
            os.ftruncate(fd, size_bytes)
        else:
            os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        how = "Free some, give the container more (docker run --shm-size), or point LOCKSTEP_SHM_DIR elsewhere"
        if error.errno == errno.EFBIG:
            how = "Shared memory is a file to the kernel: raise the limit on their size (ulimit -f)"
        raise SharedMemoryError(
            error.errno,
            f"cannot reserve {size_bytes / 2**20:.1f} MiB of shared memory in {where}: {error.strerror}. {how}",
        ) from None


def _open_in(directory: str) -> tuple[int, str]:
    """Create a locked file in `directory`; returns its descriptor and path."""
    if len(directory) > _LONGEST_DIRECTORY:
        raise SharedMemoryError(errno.ENAMETOOLONG, f"LOCKSTEP_SHM_DIR={directory}: give a shorter path")
    try:
        _remove_orphans(directory)
        while True:
            path = os.path.join(directory, _FILE_PREFIX + secrets.token_hex(8))
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            _lock(fd)
            if os.fstat(fd).st_nlink > 0:
                return fd, path
            os.close(fd)  # another process removed it as an orphan before it was locked
    except OSError as error:
        raise SharedMemoryError(
            error.errno,
            f"cannot make a segment in LOCKSTEP_SHM_DIR={directory}: {error.strerror}{advice(error)}",
        ) from None


def _lock(fd: int, waits: bool = True) -> None:
    """Lock a file until it is closed. BlockingIOError if another process holds it and `waits` is False."""
    import fcntl  # not on Windows, where this package can still be imported

    fcntl.flock(fd, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)


def _make_memfd() -> int:
    """Create a file without a name; returns its descriptor."""
    try:
        return os.memfd_create(_MEMFD_NAME, os.MFD_CLOEXEC)
    except OSError as error:
        raise SharedMemoryError(error.errno, f"cannot make a segment: {error.strerror}{advice(error)}") from None


def _remove_orphans(directory: str) -> None:
    """Remove files of this user's killed processes from `directory`. See [Note: orphans]."""
    for entry in os.scandir(directory):
        if not _FILE_NAME.fullmatch(entry.name) or not entry.is_file(follow_symlinks=False):
            continue
        with contextlib.suppress(OSError):  # another user's, or locked by its creator: not an orphan
            fd = os.open(entry.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                _lock(fd, waits=False)
                os.unlink(entry.path)
            finally:
                os.close(fd)


_LONGEST_HANDLE = 1024


@dataclass(frozen=True)
class _Description:
    """The parsed handle of a segment."""

    boot_id: str
    pid: int
    fd: int
    path: str | None
    size_bytes: int
    nonce: str


def _read_handle(handle: str) -> _Description:
    """Parse a handle, if it has the fields of one of our handles. See [Note: forged handles]."""
    try:
        return read_record(_Description, handle if len(handle) <= _LONGEST_HANDLE else "")
    except ValueError:
        raise SharedMemoryError(
            errno.EINVAL, f"{handle[:60]!r} is not the handle of a segment; does another program use the store?"
        ) from None


def _path_of(description: _Description, directory: str | None) -> str:
    """The path at which to open what a handle describes. See [Note: forged handles]."""
    if description.path is None:
        return f"/proc/{description.pid}/fd/{description.fd}"
    name = os.path.basename(str(description.path))
    if not _FILE_NAME.fullmatch(name):
        raise SharedMemoryError(
            errno.EINVAL, f"{description.path} is not the name of a segment; does another program use the store?"
        )
    if directory is None:
        raise SharedMemoryError(
            errno.EINVAL,
            f"process {description.pid} made its shared memory in a folder ({description.path}), and "
            "LOCKSTEP_SHM_DIR is not set here: set it on all ranks, to the folder that they share",
        )
    return os.path.join(directory, name)


def _open_peers(description: _Description, directory: str | None) -> tuple[int, str]:
    """Open the file that a peer announced, if it is valid; returns its descriptor and path."""
    path = _path_of(description, directory)
    try:
        fd = _open_regular(path, follows_links=description.path is None)
    except OSError as error:
        how = advice(error) or (
            ". Ranks in different containers need one pid namespace, or LOCKSTEP_SHM_DIR pointing at a folder they "
            "share"
        )
        raise SharedMemoryError(
            error.errno,
            f"cannot open the shared memory of process {description.pid} ({path}): {error.strerror}{how}",
        ) from None
    if fd is not None:
        found = os.fstat(fd)
        # Of the open file, since the path may change its meaning.
        is_ours = found.st_uid == os.geteuid() and (
            description.path is not None or _MEMFD_LINK.fullmatch(os.readlink(f"/proc/self/fd/{fd}")) is not None
        )
        if is_ours and found.st_size == description.size_bytes:
            return fd, path
        os.close(fd)
    raise SharedMemoryError(errno.ESTALE, f"{path} is not the segment that was announced")


def _open_regular(path: str, follows_links: bool) -> int | None:
    """Open a regular file; None for another kind, since opening a pipe or a tape has side effects.

    Raises:
        OSError: it cannot be opened.
    """
    flags = os.O_PATH | os.O_CLOEXEC
    named = os.open(path, flags if follows_links else flags | os.O_NOFOLLOW)
    try:
        mode = os.fstat(named).st_mode
        if stat.S_ISLNK(mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        return os.open(f"/proc/self/fd/{named}", os.O_RDWR | os.O_CLOEXEC) if stat.S_ISREG(mode) else None
    finally:
        os.close(named)


def _map(fd: int, size_bytes: int) -> int:
    """Map `fd` at an address aligned to a huge page, so that huge pages can be used."""
    span = size_bytes + HUGE_PAGE_BYTES
    # Reserve more than needed, then put the segment on top at an aligned address.
    try:
        base = libc.map_memory(None, span, _PROT_NONE, _MAP_PRIVATE_ANONYMOUS, -1)
    except OSError as error:
        raise SharedMemoryError(
            error.errno, f"cannot map {size_bytes / 2**20:.1f} MiB: address space is full"
        ) from None
    address = (base + HUGE_PAGE_BYTES - 1) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    try:
        libc.map_memory(address, size_bytes, protection, mmap.MAP_SHARED | _MAP_FIXED, fd)
    except OSError as error:
        libc.unmap(base, span)
        raise SharedMemoryError(
            error.errno, f"cannot map {size_bytes / 2**20:.1f} MiB of shared memory: {error.strerror}"
        ) from None
    if address > base:
        libc.unmap(base, address - base)
    tail = address + size_bytes
    if base + span > tail:
        libc.unmap(tail, base + span - tail)
    return address


def can_leave(alignment_bytes: int) -> bool:
    """Whether `leave` can handle pieces of memory that begin and end at multiples of that many bytes."""
    return alignment_bytes % mmap.PAGESIZE == 0 and libc.function("mremap") is not None


def leave(piece: torch.Tensor) -> torch.Tensor:
    """Move a piece of a segment to another address, and leave private memory in its place. Local.

    The memory at the old address becomes private, with the same content, in one step: tensors, views and raw pointers
    to it stay valid, and no other rank writes there any more. Peers keep using the segment as before.

    Args:
        piece: uint8 tensor that begins at a page boundary, with nothing else in its last page.

    Returns:
        A uint8 tensor of the same shape, over the shared memory.

    Raises:
        SharedMemoryError: the kernel refuses, or memory is exhausted.
    """
    address, size_bytes = piece.data_ptr(), -(-piece.numel() // mmap.PAGESIZE) * mmap.PAGESIZE
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    try:
        # A size of 0 asks for a second mapping of the same pages.
        memory = libc.own(libc.remap(address, 0, size_bytes, _MREMAP_MAYMOVE), size_bytes)
        copy = libc.map_memory(None, size_bytes, protection, _MAP_PRIVATE_ANONYMOUS, -1)
        ctypes.memmove(copy, address, size_bytes)
        libc.remap(copy, size_bytes, size_bytes, _MREMAP_MAYMOVE | _MREMAP_FIXED, address)
    except OSError as error:
        raise SharedMemoryError(
            error.errno, f"cannot map {size_bytes / 2**20:.1f} MiB again: {error.strerror}"
        ) from None
    return torch.frombuffer(memory, dtype=torch.uint8, count=piece.numel())


def give_back(piece: torch.Tensor) -> bool:
    """Return the memory of a piece of a segment to the system, for all processes that map it; it reads as zeros. Local.

    Args:
        piece: uint8 tensor that begins at a page boundary and is a whole number of pages long.

    Returns:
        Whether the kernel did, and supports `populate`.
    """
    address, size_bytes = piece.data_ptr(), piece.numel()
    return libc.advise(address, mmap.PAGESIZE, _MADV_POPULATE_WRITE) and libc.advise(address, size_bytes, _MADV_REMOVE)


def populate(piece: torch.Tensor) -> None:
    """Allocate memory for a piece of a segment after `give_back`, in huge pages if the kernel has any. Local.

    Args:
        piece: as for `give_back`.

    Raises:
        SharedMemoryError: there is not enough memory.
    """
    address, size_bytes = piece.data_ptr(), piece.numel()
    if size_bytes >= HUGE_PAGE_BYTES:
        libc.advise(address, size_bytes, _MADV_COLLAPSE)
    if not libc.advise(address, size_bytes, _MADV_POPULATE_WRITE):
        code = ctypes.get_errno()
        raise SharedMemoryError(
            code, f"cannot reserve {size_bytes / 2**20:.1f} MiB of shared memory again: {os.strerror(code)}. Free some"
        )


class Segment:
    """A piece of zeroed memory that several processes map.

    The memory stays mapped as long as any tensor or view of it is alive; only the file has to be closed (`release`).

    Attributes:
        size_bytes: its size, a multiple of the page size.
        handle: text that a peer on the same host passes to `attach`.
    """

    def __init__(self, fd: int, size_bytes: int, handle: str, path: str | None) -> None:
        self.size_bytes = size_bytes
        self.handle = handle
        self._fd: int | None = fd
        self._path = path
        try:
            address = _map(fd, size_bytes)
        except SharedMemoryError:
            self.release()
            raise
        self._memory = libc.own(address, size_bytes)

    @classmethod
    def whole(cls, size_bytes: int) -> int:
        """The size of a segment created with that many bytes: whole pages, whole huge pages from 2 MiB on."""
        unit = HUGE_PAGE_BYTES if size_bytes >= HUGE_PAGE_BYTES else PAGE_BYTES
        return -(-size_bytes // unit) * unit

    @classmethod
    def create(cls, size_bytes: int, directory: str | None = None, *, is_sparse: bool = False) -> Segment:
        """Create a segment. Local.

        Args:
            size_bytes: rounded up, see `whole`.
            directory: folder for the file; default `LOCKSTEP_SHM_DIR`, otherwise a memfd.
            is_sparse: allocate each page when it is first touched, unless there is a file. The space of a folder is
                limited, and touching a page for which there is no space kills a process with SIGBUS; so the pages of a
                file are always allocated at once.

        Raises:
            SharedMemoryError: not enough space; says how much was requested and where.
        """
        size_bytes = cls.whole(size_bytes)
        directory = directory or segment_folder()
        path: str | None = None
        if directory is None:
            fd = _make_memfd()
        else:
            fd, path = _open_in(directory)
        try:
            os.fchmod(fd, 0o600)
            _reserve(fd, size_bytes, directory or "memory", is_sparse and directory is None)
        except OSError:
            os.close(fd)
            if path is not None:
                Path(path).unlink(missing_ok=True)
            raise
        nonce = secrets.token_bytes(_NONCE_BYTES)
        description = _Description(boot_id(), os.getpid(), fd, path, size_bytes, nonce.hex())
        segment = cls(fd, size_bytes, json.dumps(asdict(description)), path)
        segment.memory[:_NONCE_BYTES] = nonce
        return segment

    @classmethod
    def attach(cls, handle: str, directory: str | None = None, *, size_bytes: int | None = None) -> Segment:
        """Map a segment that a peer on this host created. Local.

        Args:
            handle: the `handle` of the peer's segment.
            directory: folder of its file, if it has one; default `LOCKSTEP_SHM_DIR`. Not taken from the handle.
            size_bytes: the size that the peer passed to `create`, as computed by this process; None to accept any size.

        Raises:
            SharedMemoryError: the peer is on another host, or its segment cannot be opened from here, is not a segment,
                or has another size.
        """
        description = _read_handle(handle)
        if description.boot_id != boot_id():
            raise SharedMemoryError(
                errno.EXDEV,
                "the shared memory is that of another host. A lockstep group holds the ranks of one host; use gloo or "
                "nccl across hosts",
            )
        announced_bytes = description.size_bytes
        if size_bytes is not None and announced_bytes != cls.whole(size_bytes):
            raise SharedMemoryError(
                errno.EINVAL,
                f"the segment that process {description.pid} announced has {announced_bytes} bytes; here it would "
                f"have {cls.whole(size_bytes)}. Do all ranks run the same Lockstep?",
            )
        if not 0 < announced_bytes <= _LARGEST_BYTES:
            raise SharedMemoryError(
                errno.EINVAL, f"no segment has {announced_bytes} bytes; does another program use the store?"
            )
        fd, path = _open_peers(description, directory or segment_folder())
        segment = cls(fd, announced_bytes, handle, None)
        if bytes(segment.memory[:_NONCE_BYTES]).hex() != description.nonce:
            segment.release()
            raise SharedMemoryError(errno.ESTALE, f"{path} does not hold the nonce that was announced")
        return segment

    @property
    def memory(self) -> memoryview:
        """The whole segment as bytes. The first 64 bytes belong to the segment itself."""
        return memoryview(self._memory).cast("B")

    def tensor(self, offset_bytes: int, size_bytes: int) -> torch.Tensor:
        """A uint8 tensor, shape (size_bytes,), over a part of the memory."""
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=size_bytes, offset=offset_bytes)

    def use_huge_pages(self) -> bool:
        """Ask the kernel to back the segment by huge pages now. Returns whether it did.

        Shared memory gets none by itself if `shmem_enabled` is `never` (the default); `MADV_COLLAPSE` (Linux 6.1)
        ignores that setting.
        """
        address = ctypes.addressof(self._memory)
        return libc.advise(address, self.size_bytes, _MADV_COLLAPSE)

    def release(self) -> None:
        """Close the file and remove its name, once every peer has mapped it. The memory stays."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        if self._path is not None:
            Path(self._path).unlink(missing_ok=True)
            self._path = None
