"""Sends a function call to the ranks, and its results back.

The call is sent like by multiprocessing's "spawn" method, but without its Process class: the same preparation (module
path, `__main__` imported again as `__mp_main__`, authentication key) and the same pickler, so arguments can be anything
that a spawned `multiprocessing.Process` accepts: queues, locks, pipes, tensors in shared memory. Process itself cannot
be used, because a rank must be in a separate session and tied to the launcher's life before the user's modules are
imported, and only the supervisor may reap it.

The call is passed in anonymous memory that only the ranks inherit. Results and exceptions come back as pickles in the
attempt's private folder (mode 0700): written by our own children, read by us.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
import tempfile
from collections import ChainMap
from collections.abc import Callable, Sequence
from multiprocessing import context, process, resource_tracker, spawn
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, ClassVar

from lockstep import env
from lockstep.errors import InputTypeError, LaunchError

__all__ = ["PackedCall", "check_main_is_ready", "load_exception", "load_result", "run_call"]

# Extensions of files that IPython runs, but Python does not.
_CELL_SUFFIXES = (".ipy", ".ipynb")


class _DupFd:
    """A file descriptor that the rank inherits under the same number."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def detach(self) -> int:
        return self._fd


class _Spawning:
    """The object that multiprocessing's reducers expect while a process is being started."""

    DupFd = _DupFd

    def __init__(self) -> None:
        self.fds: list[int] = []

    def duplicate_for_child(self, fd: int) -> int:
        self.fds.append(fd)
        return fd


def check_main_is_ready() -> None:
    """Refuse to start ranks from a rank that is only importing the main module again.

    Raises:
        LaunchError: the main module starts ranks without a `__main__` guard.
    """
    if getattr(process.current_process(), "_inheriting", False):
        raise LaunchError(
            "lockstep.spawn was called while a rank imports the main module, so ranks would start ranks endlessly; "
            "put the call under `if __name__ == '__main__':`"
        )


def _name_of(fn: Callable[..., object]) -> str:
    return getattr(fn, "__qualname__", None) or repr(fn)


def _is_interactive() -> bool:
    """Whether the main module cannot be imported: a notebook, an interactive session, `python -c`, a file of cells."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    return getattr(main, "__spec__", None) is None and (file is None or file.endswith(_CELL_SUFFIXES))


def _pickler_by_value(fn: Callable[..., object]) -> Callable[[object], bytes] | None:
    """The pickler that pickles objects of the main module by value; None if unnecessary or impossible.

    Raises:
        InputTypeError: `fn` needs it, and cloudpickle is not installed.
    """
    if not _is_interactive():
        return None
    try:
        import cloudpickle
    except ImportError:
        if getattr(fn, "__module__", None) != "__main__":
            return None
        raise InputTypeError(
            f"{_name_of(fn)} was defined interactively, so the ranks, which are new interpreters, cannot import it; "
            f"pip install cloudpickle to send it by value, or put it into a .py file and "
            f"import it from there"
        ) from None

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # as Any
        """Pickles queues, locks and tensors like for a spawned Process."""

        # A class attribute: a pickler reads it once, when it is created.
        dispatch_table: ClassVar[ChainMap[Any, Any]] = ChainMap(
            ForkingPickler(io.BytesIO()).dispatch_table, cloudpickle.Pickler.dispatch_table
        )

    def dumps(value: object) -> bytes:
        buffer = io.BytesIO()
        Pickler(buffer).dump(value)
        return buffer.getvalue()

    return dumps


class PackedCall:
    """`fn(*args)`, pickled once for all ranks.

    Args:
        fn: a function defined at a module's top level.
        args: its arguments, the same for every rank.

    Attributes:
        fds: descriptors that every rank must inherit, including `call_fd` and `tracker_fd`.

    Raises:
        InputTypeError: `fn` cannot be called or pickled, or `args` cannot be pickled.
    """

    def __init__(self, fn: Callable[..., object], args: Sequence[object]) -> None:
        if not callable(fn):
            raise InputTypeError(f"fn must be a function, got {type(fn).__name__}")
        if isinstance(args, str | bytes) or not isinstance(args, Sequence):
            raise InputTypeError(
                f"args is a {type(args).__name__}; expected a sequence of arguments, such as ({args!r},)"
            )
        by_value = _pickler_by_value(fn)
        # Before anything is pickled: a semaphore among the arguments is registered with the tracker.
        self.tracker_fd = resource_tracker.getfd()
        assert self.tracker_fd is not None
        spawning = _Spawning()
        context.set_spawning_popen(spawning)  # type: ignore[arg-type]  # all that the reducers use of it
        try:
            preparation = spawn.get_preparation_data("LockstepRank")
            if _is_interactive():
                preparation.pop("init_main_from_path", None)
            content = ForkingPickler.dumps(preparation)
            self.call_fd = _open_unnamed()
            try:
                with os.fdopen(os.dup(self.call_fd), "wb") as file:
                    file.write(content)
                    file.write(_dump_call(fn, tuple(args), by_value or ForkingPickler.dumps))
            except BaseException:
                self.close()
                raise
        finally:
            context.set_spawning_popen(None)
        self.fds = (self.call_fd, self.tracker_fd, *spawning.fds)

    def close(self) -> None:
        """Free the memory; ranks that have started keep theirs."""
        os.close(self.call_fd)


def _open_unnamed() -> int:
    """Create a file without a name: in memory, or on disk if a filter blocks memfds."""
    try:
        return os.memfd_create("lockstep-call", os.MFD_CLOEXEC)
    except OSError:
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())


def _dump_call(
    fn: Callable[..., object], args: tuple[object, ...], dumps: Callable[[object], bytes | memoryview]
) -> bytes | memoryview:
    try:
        return dumps((fn, args))
    except Exception as error:
        try:
            dumps(fn)
        except Exception:
            raise InputTypeError(
                f"{_name_of(fn)} cannot be sent to the ranks, which are new interpreters ({error}); move it to the top "
                f"level of a module (no lambda, no function inside a function) and pass what it uses in args"
            ) from error
        raise InputTypeError(
            f"the args of {_name_of(fn)} cannot be sent to the ranks ({error}); pass plain data, and create the rest "
            "inside the function"
        ) from error


def run_call(call_fd: int, tracker_fd: int) -> None:
    """In a rank: unpickle the call, run it, and write its result into the private folder. Local.

    Raises:
        Exception: what the function raises, after writing that into the folder too if it can be pickled.
    """
    # The ranks share the parent's tracker; their own would unlink resources that they only borrowed.
    resource_tracker._resource_tracker._fd = tracker_fd  # type: ignore[attr-defined]
    folder, rank = env.LOCKSTEP_RENDEZVOUS.get(), env.RANK.get()
    assert folder is not None
    assert rank is not None
    try:
        fn, args = _unpack(call_fd)
        try:
            value = fn(*args)
        except SystemExit as leaving:
            if leaving.code not in (None, 0):
                raise
            value = None
        _write(_result_path(Path(folder), rank), _dump_result(value, fn, rank))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        if (content := _dump_exception(error)) is not None:
            _write(_exception_path(Path(folder), rank), content)
        raise


def _unpack(call_fd: int) -> tuple[Callable[..., object], tuple[object, ...]]:
    current = process.current_process()
    # Reopened, as the inherited descriptors of all ranks share one file position.
    with open(f"/proc/self/fd/{call_fd}", "rb") as file:
        os.close(call_fd)
        current._inheriting = True  # type: ignore[attr-defined]
        try:
            spawn.prepare(pickle.load(file))
            call: tuple[Callable[..., object], tuple[object, ...]] = pickle.load(file)
        finally:
            del current._inheriting  # type: ignore[attr-defined]
    return call


def _dump_result(value: object, fn: Callable[..., object], rank: int) -> bytes:
    try:
        return _dump_back(value)
    except Exception as error:
        raise InputTypeError(
            f"rank {rank}: {_name_of(fn)} returned a {type(value).__name__} that cannot be sent back ({error}); return "
            f"plain data or tensors"
        ) from error


def _dump_back(value: object) -> bytes:
    """Pickle by value what was received by value, so that the caller gets its own classes."""
    try:
        return pickle.dumps(value)
    except Exception:
        cloudpickle = sys.modules.get("cloudpickle")
        if cloudpickle is None:
            raise
        content: bytes = cloudpickle.dumps(value)
        return content


def _dump_exception(error: BaseException) -> bytes | None:
    """The pickled exception; None if unpickling would not restore it, as with a constructor of several arguments."""
    try:
        content = _dump_back(error)
        return content if type(pickle.loads(content)) is type(error) else None
    except Exception:
        return None


def _write(path: Path, content: bytes) -> None:
    draft = path.with_suffix(".tmp")
    draft.write_bytes(content)
    os.replace(draft, path)


def _result_path(folder: Path, rank: int) -> Path:
    return folder / f"result-rank{rank}.pkl"


def _exception_path(folder: Path, rank: int) -> Path:
    return folder / f"exception-rank{rank}.pkl"


def load_result(folder: Path, rank: int) -> object:
    """The value that a rank's call returned.

    Raises:
        FileNotFoundError: the rank ended without returning.
        Exception: raised by unpickling.
    """
    with open(_result_path(folder, rank), "rb") as file:
        return pickle.load(file)


def load_exception(folder: Path, rank: int) -> BaseException | None:
    """The exception that a rank's call raised; None if it could not be passed on."""
    try:
        with open(_exception_path(folder, rank), "rb") as file:
            error = pickle.load(file)
    except Exception:
        return None
    return error if isinstance(error, BaseException) else None
