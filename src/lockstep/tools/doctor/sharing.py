"""Checks the shared memory of ranks and loader workers, temporary files and the launcher, and starts two ranks."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator

from lockstep.errors import LaunchError, LockstepError
from lockstep.launch import support as launch_support
from lockstep.shm import support
from lockstep.tools.doctor.check_result import CheckResult
from lockstep.tools.doctor.versions import has_torch

__all__ = ["look"]

_MIB = 1 << 20
_LITTLE_FOR_WORKERS_MIB = 1024
_LITTLE_FOR_SEGMENTS_MIB = 256
_LITTLE_FOR_FOLDER_MIB = 16
_MEET_TIMEOUT_S = 60.0
_WORKERS_FOLDER = "/dev/shm"
_OTHER_FOLDER = "mkdir -p ~/tmp; export TMPDIR=~/tmp"


def look() -> Iterator[CheckResult]:
    """Check shared memory, temporary files, the launcher, two ranks; without torch, those that do not need it."""
    is_usable = has_torch()
    if is_usable:
        yield _segments()
    yield _loader_workers()
    temporary = _temporary_folder()
    yield temporary
    launcher = _launcher()
    yield launcher
    if is_usable and not launcher.remedy and temporary.status == "ok":
        yield _two_ranks()


def _segments() -> CheckResult:
    missing = support.lack()
    if missing is not None:
        return CheckResult(
            "shared memory", f"none: {missing}", "ranks communicate over gloo: the same results, but slower"
        )
    from lockstep.shm.segment import Segment

    try:
        segment = Segment.create(_MIB)
        segment.memory[0] = 1
        segment.release()
    except (LockstepError, OSError) as error:
        return CheckResult("shared memory", str(error), "see the message", is_needed=True)
    folder = support.segment_folder()
    if folder is None:
        return CheckResult("shared memory", "works, in anonymous files (memfd), which no file system limits")
    free = _free_mib(folder)
    text = f"works, in files in {folder}, {free} MiB free"
    if free is not None and free < _LITTLE_FOR_SEGMENTS_MIB:
        remedy = "little for a group of several ranks"
        return CheckResult("shared memory", text, remedy, f"mount -o remount,size=4G {folder}")
    return CheckResult("shared memory", text)


def _loader_workers() -> CheckResult:
    free = _free_mib(_WORKERS_FOLDER)
    if free is None:
        return CheckResult("loader workers", f"{_WORKERS_FOLDER} cannot be read")
    use = f"{_WORKERS_FOLDER}, through which workers of torch's DataLoader pass batches,"
    if not os.access(_WORKERS_FOLDER, os.W_OK):
        remedy = "no worker can start: make it writable, or use num_workers=0"
        command = f"mount -o remount,rw {_WORKERS_FOLDER}"
        return CheckResult("loader workers", f"{use} is not writable", remedy, command, is_needed=True)
    text = f"{use} has {free} MiB free"
    if free < _LITTLE_FOR_WORKERS_MIB:
        return CheckResult(
            "loader workers",
            text,
            "little for batches of images: give the container more (docker run --shm-size=8g), or use num_workers=0",
            f"mount -o remount,size=8G {_WORKERS_FOLDER}",
            is_needed=free < _LITTLE_FOR_FOLDER_MIB,
        )
    return CheckResult("loader workers", text)


def _temporary_folder() -> CheckResult:
    try:
        with tempfile.TemporaryDirectory() as folder:
            free = shutil.disk_usage(folder).free // _MIB
    except OSError as error:
        remedy = "the launcher needs a folder there: set TMPDIR to a writable one"
        return CheckResult("temporary files", str(error), remedy, _OTHER_FOLDER, is_needed=True)
    text = f"{tempfile.gettempdir()}, {free} MiB free"
    if free < _LITTLE_FOR_FOLDER_MIB:
        remedy = "almost full: free some space, or set TMPDIR"
        return CheckResult("temporary files", text, remedy, _OTHER_FOLDER, is_needed=True)
    return CheckResult("temporary files", text)


def _launcher() -> CheckResult:
    try:
        launch_support.check()
    except LaunchError as error:
        return CheckResult("launcher", "cannot work here", str(error))
    return CheckResult("launcher", "can start and watch processes")


def _two_ranks() -> CheckResult:
    from lockstep.launch.spawn import spawn
    from lockstep.tools.doctor.two_ranks import add_ones

    begun_s = time.monotonic()
    try:
        sums = spawn(add_ones, nproc=2, timeout=_MEET_TIMEOUT_S)
    except Exception as error:
        text = f"failed: {type(error).__name__}: {str(error).splitlines()[0]}"
        return CheckResult("two ranks", text, "see the message", "lockstep doctor --capabilities", is_needed=True)
    if sums != [2.0, 2.0]:
        text = f"added 1 and 1 to {sums}"
        return CheckResult("two ranks", text, "a bug in Lockstep: please report it", is_needed=True)
    return CheckResult("two ranks", f"started, connected and added in {time.monotonic() - begun_s:.1f} s")


def _free_mib(folder: str) -> int | None:
    with contextlib.suppress(OSError):
        return shutil.disk_usage(folder).free // _MIB
    return None
