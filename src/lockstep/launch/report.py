"""The error report of a failing rank: one JSON file in the private folder of the attempt.

The bootstrap writes it in the rank, and the launcher reads it. It is JSON rather than pickle, so that reading it runs
no code. The file is written atomically.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from lockstep import env
from lockstep.frames import is_library_file, is_torch_file, library_folders, without_own_lines
from lockstep.json_records import read_record
from lockstep.launch.attempt_folder import ERRORS
from lockstep.launch.headline import locations_in

__all__ = [
    "SECONDARY_PHRASES",
    "ErrorReport",
    "capture",
    "error_behind",
    "is_expected",
    "is_own",
    "is_secondary",
    "read_reports",
    "without_leading_frames",
]

# A report is finally shown on a terminal. Of longer texts, the beginning and the end are kept.
_MAX_TEXT_CHARS = 64 * 1024

_SECONDARY_TYPES = frozenset({"lockstep.errors.RankLost", "lockstep.errors.CollectiveAborted"})
_TORCH_SECONDARY_TYPES = frozenset({"DistBackendError", "DistNetworkError"})
_OWN_BASE, _SETUP_BASE = "lockstep.errors.LockstepError", "lockstep.errors.SetupError"
_TIMEOUT_TYPE = "lockstep.errors.CollectiveTimeout"
# Phrases of gloo, nccl's watchdog and torch's stores.
_TIMEOUT_PHRASES = ("timed out", "timeout")
# How torch's futures word an error of Lockstep's in a callback, such as one that a communication hook adds.
_THROUGH_CALLBACK = re.compile(
    r"(?:Got the following error when running the callback: (?:RuntimeError: )?)+(?:RankLost|CollectiveAborted): "
)
# What `rank_zero` tells the other ranks about an error that is not one of Lockstep's.
_TOLD_OF_ANOTHER = re.compile(r"rank \d+ failed: ")
SECONDARY_PHRASES = ("connection reset", "connection closed", "closed by peer", "reset by peer", "broken pipe")


@dataclass(frozen=True)
class ErrorReport:
    """An uncaught exception of one rank.

    Attributes:
        rank: global rank.
        pid: pid of the rank's process.
        host: name of the host on which it ran.
        type: name of the exception, with its module unless it is a builtin.
        message: the text of the exception.
        traceback: as printed by Python, without Lockstep's own leading frames.
        file: where it was raised, in the user's code if that is in the traceback; empty if unknown.
        line: the line there; 0 if unknown.
        time: seconds since the epoch.
        secondary: whether it is a secondary failure, caused by another rank's, such as `RankLost`.
        culprits: ranks that the exception blames; empty if none.
        is_timeout: whether it says that a rank missed the deadline; of any backend.
        in_import: whether it was raised while a module was imported.
        after_interrupt: whether it was raised by code that the script ran after a KeyboardInterrupt, such as a save.
    """

    rank: int
    pid: int
    host: str
    type: str
    message: str
    traceback: str
    file: str
    line: int
    time: float
    secondary: bool
    culprits: tuple[int, ...] = ()
    is_timeout: bool = False
    in_import: bool = False
    after_interrupt: bool = False

    def write(self, folder: Path) -> None:
        """Write it to `folder`, atomically: as error-rank<r>.json, or into memory if no file can be written."""
        final = _report_path(folder, self.rank)
        draft = final.with_suffix(f".{self.pid}.tmp")
        text = json.dumps(asdict(self))  # one line
        try:
            draft.write_text(text, encoding="utf-8")
            os.replace(draft, final)
        except OSError:  # the error itself may be that the disk is full
            with open(os.open(folder / ERRORS, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC), "wb", buffering=0) as memory:
                memory.write(f"{text}\n".encode())


def _report_path(folder: Path, rank: int) -> Path:
    return folder / f"error-rank{rank}.json"


def _shorten(text: str) -> str:
    if len(text) <= _MAX_TEXT_CHARS:
        return text
    half = _MAX_TEXT_CHARS // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"


def without_leading_frames(trace: TracebackType | None, files: frozenset[str]) -> TracebackType | None:
    """The traceback, starting with the first frame that is not in one of `files`.

    Frames of the import system that directly follow are removed as well: they come from our call.
    """
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if name not in files and not name.startswith("<frozen "):
            break
        trace = trace.tb_next
    return trace


def is_own(error: BaseException) -> bool:
    """Whether it is one of Lockstep's own errors, recognised by name because not every job imports them."""
    return any(_qualified_name(kind) == _OWN_BASE for kind in type(error).__mro__)


def is_expected(error: BaseException) -> bool:
    """Whether it is a self-explanatory error before the first collective, so that ranks need not print it too."""
    return any(_qualified_name(kind) == _SETUP_BASE for kind in type(error).__mro__)


def _qualified_name(kind: type[BaseException]) -> str:
    if kind.__module__ in ("builtins", "__main__"):
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "<its text cannot be made: str() of it fails>"


def _is_secondary_itself(error: BaseException) -> bool:
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__}
    if names & _SECONDARY_TYPES or (_OWN_BASE in names and _TOLD_OF_ANOTHER.match(_text_of(error))):
        return True
    # torch's own, recognised by name because torch must not be imported for this.
    if any(name.startswith("torch.") and name.rpartition(".")[2] in _TORCH_SECONDARY_TYPES for name in names):
        return True
    if isinstance(error, RuntimeError | ConnectionError):
        text = _text_of(error)
        return _THROUGH_CALLBACK.match(text) is not None or any(one in text.lower() for one in SECONDARY_PHRASES)
    return False


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception and its causes, as shown in a traceback."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        yield current
        seen.add(id(current))
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


def error_behind(end: SystemExit) -> Exception | None:
    """The exception in whose handler a program called `sys.exit(1)`, like hydra, after printing it in its own way.

    None for other codes, such as those of usage errors; after Ctrl-C; if `from None` says that it does not matter; and
    for the exceptions of click, which are messages to the user and have their own exit code.
    """
    _, *chain = _chain(end)
    behind = [one for one in chain if isinstance(one, Exception)]
    if end.code != 1 or not behind or len(behind) < len(chain) or hasattr(behind[0], "exit_code"):
        return None
    return behind[0]


def is_secondary(error: BaseException) -> bool:
    """Whether the exception, or one that caused it, only says that another rank failed."""
    return any(_is_secondary_itself(one) for one in _chain(error))


def _culprits_of(error: BaseException) -> tuple[int, ...]:
    """The ranks that it blames, if it is one of Lockstep's own errors or was caused by one."""
    for one in _chain(error):
        ranks = getattr(one, "culprits", None)
        if type(one).__module__ == "lockstep.errors" and isinstance(ranks, tuple):
            return tuple(int(rank) for rank in ranks)
    return ()


def _is_timeout(error: BaseException) -> bool:
    """Whether the exception says, in the words of Lockstep, gloo or nccl, that a rank missed the deadline."""
    if any(_qualified_name(kind) == _TIMEOUT_TYPE for kind in type(error).__mro__):
        return True
    if not isinstance(error, RuntimeError) or type(error).__module__.startswith("lockstep."):
        return False
    # Of other exceptions only those raised by torch count: a script may have other kinds of timeouts.
    files = (frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__))
    text = _text_of(error).lower()
    return any(map(is_torch_file, files)) and any(phrase in text for phrase in _TIMEOUT_PHRASES)


def _is_in_import(error: BaseException) -> bool:
    """Whether a module other than the script was being imported. Python leaves its own frames of imports out."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_name == "<module>"]
    return any(frame.f_globals.get("__name__") != "__main__" for frame in frames)


def _location_of(error: BaseException, trace: TracebackType | None) -> tuple[str, int]:
    """File and line to point at: the innermost frame of the user's code, otherwise the innermost frame."""
    if isinstance(error, SyntaxError) and error.filename:
        return error.filename, error.lineno or 0
    locations = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(trace)]
    # The frames of a worker, a replica or a spawned process are only in the text, and further inside.
    for one in _chain(error):
        locations += locations_in(_text_of(one))
    libraries = library_folders()
    own = [one for one in locations if not is_library_file(one[0], libraries)]
    return (own or locations or [("", 0)])[-1]


def capture(error: BaseException, trace: TracebackType | None, rank: int) -> ErrorReport:
    """Describe an uncaught exception.

    Args:
        error: the exception.
        trace: the traceback to show, without the bootstrap's frames and other uninformative ones.
        rank: the rank of this process.
    """
    file, line = _location_of(error, trace)
    text = "".join(traceback.format_exception(type(error), error, trace))
    if env.LOCKSTEP_DEBUG.get() is not True:
        text = without_own_lines(text)
    return ErrorReport(
        rank=rank,
        pid=os.getpid(),
        host=socket.gethostname(),
        type=_qualified_name(type(error)),
        message=_shorten(_text_of(error)),
        traceback=_shorten(text),
        file=file,
        line=line,
        time=time.time(),
        secondary=is_secondary(error),
        culprits=_culprits_of(error),
        is_timeout=_is_timeout(error),
        in_import=_is_in_import(error),
        after_interrupt=any(isinstance(one, KeyboardInterrupt) for one in _chain(error)),
    )


def _parse(text: str) -> ErrorReport | None:
    try:
        return read_record(ErrorReport, text)
    except ValueError:
        return None


def _parse_elastic(path: Path, rank: int, pid: int) -> ErrorReport | None:
    """Parse the report of torch.distributed.elastic's `@record`, for a rank that ended without one of ours."""
    try:
        message = json.loads(path.read_text(encoding="utf-8"))["message"]
        kind, _, text = str(message["message"]).partition(": ")
        extra = message["extraInfo"]
        trace, moment = str(extra["py_callstack"]), float(extra["timestamp"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError, OverflowError):
        return None
    secondary = any(phrase in text.lower() for phrase in SECONDARY_PHRASES)
    return ErrorReport(rank, pid, socket.gethostname(), kind, text, trace, "", 0, moment, secondary)


def _read_memory(folder: Path) -> dict[int, ErrorReport]:
    """The reports of ranks that could not write a file."""
    try:
        lines = (folder / ERRORS).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    return {report.rank: report for line in lines if (report := _parse(line)) is not None}


def read_reports(folder: Path, pids: dict[int, int]) -> dict[int, ErrorReport]:
    """The reports of the ranks that wrote one.

    Args:
        folder: the attempt's private folder.
        pids: rank -> pid of all ranks of the attempt.

    Returns:
        rank -> report. An unreadable report is skipped, with a line on stderr: it must not hide the failure itself.
    """
    reports: dict[int, ErrorReport] = {}
    in_memory = _read_memory(folder)
    for rank, pid in pids.items():
        try:
            text = _report_path(folder, rank).read_text(encoding="utf-8", errors="replace")
        except OSError:
            report = in_memory.get(rank) or _parse_elastic(folder / f"torchelastic-rank{rank}.json", rank, pid)
        else:
            report = _parse(text)
            if report is None:
                print(f"lockstep: the error report of rank {rank} cannot be read", file=sys.stderr)
        if report is not None:
            reports[rank] = report
    return reports
