"""Tells which frames of a stack are the user's, and which are Lockstep's or torch's."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, TracebackType

__all__ = [
    "is_internal_file",
    "is_library_file",
    "is_torch_file",
    "library_folders",
    "public_call",
    "split_site",
    "up_to_user",
    "without_own",
    "without_own_lines",
]

_PACKAGE = str(Path(__file__).parent)
# Our own code that uses the rest as a script would: errors name its lines as they would the user's.
_USERS_INSIDE = (f"{_PACKAGE}/testing/conformance/", f"{_PACKAGE}/recipes/", f"{_PACKAGE}/train.py")
# Wraps methods of torch, and only clutters a traceback.
_RELAY = f"{_PACKAGE}/comm/torch_record.py"
# Files of torch that only pass calls on.
_TORCHS_RELAYS = tuple(
    f"{os.sep}torch{os.sep}{file}"
    for file in (
        "_tensor.py",
        "nn/modules/module.py",
        "nn/modules/container.py",
        "optim/optimizer.py",
        "optim/lr_scheduler.py",
        "utils/_contextlib.py",
        "utils/data/dataloader.py",
        "utils/data/_utils/fetch.py",
        "utils/data/_utils/worker.py",
        "distributed/c10d_logger.py",
    )
)
_GENERATED = ("<frozen ", "<string>")
# Modules that wrap torch's functions and threads.
_WRAPPERS = ("/contextlib.py", "/functools.py", "/threading.py", "/typing_extensions.py", "/warnings.py")
# Also in the user's site folder, and in the system's when in a virtual environment.
_SITE_FOLDERS = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
# Functions of ours that communicate -> the name by which users call them; their internals mean nothing to a caller.
_PUBLIC_CALLS = {
    (f"{_PACKAGE}/{file}", function): name
    for file, function, name in (
        ("agreement.py", "all", "lockstep.all"),
        ("agreement.py", "any", "lockstep.any"),
        ("checkpoint.py", "save", "checkpoint.save"),
        ("checkpoint.py", "load", "checkpoint.load"),
        ("checkpoint.py", "gather_rng", "checkpoint.gather_rng"),
        ("metrics/reduction.py", "synchronize", "metrics.synchronize"),
        ("parallel/distributed.py", "__init__", "DistributedDataParallel"),
        ("parallel/distributed.py", "samples", "DistributedDataParallel.samples"),
        ("parallel/joined.py", "agree_on_step", "DistributedDataParallel.join"),
        ("parallel/closures.py", "_mean_over_ranks", "optimizer.step"),
        ("parallel/batchnorm.py", "forward", "SyncBatchNorm"),
        ("parallel/losses.py", "mean", "lockstep.mean"),
        ("parallel/losses.py", "sum", "lockstep.sum"),
        ("parallel/losses.py", "global_loss", "lockstep.global_loss"),
        ("parallel/losses.py", "all_gather", "lockstep.all_gather"),
        ("rank_zero.py", "rank_zero_first", "lockstep.rank_zero_first"),
        ("world.py", "should_stop", "world.should_stop"),
    )
}
# A frame in the text of a traceback, with its source lines; not the innermost.
_OUTER_FRAME = re.compile(
    r'^  File "(?P<file>[^"\n]+)", line \d+, in [^\n]*\n(?:    [^\n]*\n)*(?=  File ")', re.MULTILINE
)
_SITE_OF_PUBLIC_CALL = re.compile(r"(?P<site>.*) \((?P<call>[\w.]+)\)")


def public_call(code: CodeType) -> str | None:
    """The name by which users call this function, if it is one of ours that communicates; else None."""
    return _PUBLIC_CALLS.get((code.co_filename, code.co_name))


def split_site(site: str) -> tuple[str, str]:
    """Split a call site's text into the site and the function of ours that was called there; empty if none.

    >>> split_site("train.py:18 in main (checkpoint.save)")
    ('train.py:18 in main', 'checkpoint.save')
    """
    found = _SITE_OF_PUBLIC_CALL.fullmatch(site)
    return (found["site"], found["call"]) if found else (site, "")


def is_internal_file(name: str) -> bool:
    """Whether a file's code is not the user's: Lockstep's, torch's, and modules that wrap their functions."""
    if name.startswith(_GENERATED) or name.endswith(_WRAPPERS):
        return True
    return _is_own(name) or is_torch_file(name)


def is_torch_file(name: str) -> bool:
    """Whether a file's code is torch's, or wraps torch's methods."""
    if name == _RELAY:
        return True
    # Not imported here: if it is not loaded, there are no frames of it.
    torch_file = getattr(sys.modules.get("torch"), "__file__", None)
    return torch_file is not None and name.startswith(f"{Path(torch_file).parent}/")


def library_folders() -> tuple[str, ...]:
    """Folders whose code is not the user's: this environment's, others that pip installed into, and torch's."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = {sysconfig.get_paths()[name] for name in names}
    folders.add(_PACKAGE)
    # The first entry is the script's own folder, even if packages are installed there.
    folders.update(entry for entry in sys.path[1:] if _has_installed_packages(entry))
    # Not imported here: if it is not loaded, there are no frames of it.
    torch_file = getattr(sys.modules.get("torch"), "__file__", None)
    if torch_file is not None:
        folders.add(str(Path(torch_file).parent))
    return tuple(folder.rstrip(os.sep) + os.sep for folder in folders)


def _has_installed_packages(folder: str) -> bool:
    """Whether pip has installed something in a folder, such as one on PYTHONPATH or in a .pth file."""
    try:
        return any(name.endswith(".dist-info") for name in os.listdir(folder or os.curdir))
    except OSError:  # an archive, or missing
        return False


def is_library_file(name: str, folders: tuple[str, ...]) -> bool:
    """Whether a file's code belongs to an installed library, including torch and Lockstep.

    Args:
        name: name of the file, as in its code object.
        folders: the result of `library_folders`.
    """
    return name.startswith((*folders, "<frozen ")) or any(site in name for site in _SITE_FOLDERS)


def up_to_user(trace: TracebackType | None) -> TracebackType | None:
    """The traceback up to the innermost frame of the user's code; all of it if there is none.

    For errors whose message says what went wrong, so that the internal frames add nothing.
    """
    links = list(_links(trace))
    while links and is_internal_file(links[-1].tb_frame.f_code.co_filename):
        links.pop()
    return _chain(links) or trace


def without_own(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without Lockstep's frames; if the innermost is ours, only without wrappers of torch's methods.

    Frames of torch that only pass a call on, such as `Module.__call__`, are removed, too, unless the error was raised
    there. For other errors that pass through Lockstep, such as a signal during a wait, or an error in a user's hook.
    """
    links = list(_links(trace))
    others = [link for link in links if not _is_own(link.tb_frame.f_code.co_filename)]
    if not others or others[-1] is not links[-1]:
        others = [link for link in links if link.tb_frame.f_code.co_filename != _RELAY]
    innermost = others[-1:]
    passed_on = [link for link in others[:-1] if not link.tb_frame.f_code.co_filename.endswith(_TORCHS_RELAYS)]
    return _chain([*passed_on, *innermost])


def without_own_lines(text: str) -> str:
    """The text of a traceback, such as one from a loader's worker, without the frames that `without_own` removes."""

    def kept(frame: re.Match[str]) -> str:
        return "" if _is_own(frame["file"]) or frame["file"].endswith(_TORCHS_RELAYS) else frame[0]

    return _OUTER_FRAME.sub(kept, text)


def _is_own(name: str) -> bool:
    return name.startswith(f"{_PACKAGE}/") and not name.startswith(_USERS_INSIDE)


def _links(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _chain(links: Sequence[TracebackType]) -> TracebackType | None:
    """A new traceback with these frames."""
    chain: TracebackType | None = None
    for link in reversed(links):
        chain = TracebackType(chain, link.tb_frame, link.tb_lasti, link.tb_lineno)
    return chain
