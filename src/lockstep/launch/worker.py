"""Runs in a rank before the user's script.

Started by path as `python worker.py script.py args…` or `python worker.py -m module args…`, rather than with `-m`,
because that would put the current folder first on the module path before the bootstrap has imported what it needs. It

1. asks the kernel to be killed when the launcher dies, and checks that the launcher is still running;
2. makes stdout line-buffered, so that lines of several ranks stay complete wherever they are written;
3. installs the shims for scripts written for Horovod, Apex and old releases of torch, unless LOCKSTEP_COMPAT=0;
4. runs the script in a real `__main__`, as plain `python` does: `sys.argv`, `sys.path[0]`, `__file__`, `__spec__`,
   pickling of classes defined there, and multiprocessing's spawn children that import it again;
5. on an uncaught exception writes an error report for the launcher, prints the traceback as plain `python` does, and
   exits with 1. Frames of this file are left out, as are the internal frames of Lockstep's own errors. Errors that
   the launcher shows (LOCKSTEP_SHOWS_ERRORS) are not printed, nor are setup errors, which usually all ranks have at
   once. LOCKSTEP_DEBUG=1 keeps all frames, and prints. An exception that the program catches, to end by
   `sys.exit(1)`, is reported, but not printed again.

It sets no environment variables; those that a rank finds are listed in environment.py.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):
    # The folder of this file must not be on the path. Before any other import.
    del sys.path[0]

import builtins
import contextlib
import faulthandler
import importlib
import importlib.machinery
import importlib.util
import io
import os
import signal
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import NoReturn

try:
    from lockstep import env, libc
except ModuleNotFoundError:
    # Not installed: the launcher was found in another way, which the script must be able to use too.
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    from lockstep import env, libc

from lockstep.frames import is_internal_file, up_to_user, without_own
from lockstep.launch.attempt_folder import announce_failure
from lockstep.launch.report import capture, error_behind, is_expected, is_own, without_leading_frames
from lockstep.rank_status import EXIT_STOPPED

__all__ = ["code_of_exit", "main", "run_module", "run_rank", "run_script", "run_target"]

# By name, because it is a layer above this package.
_SHIMS, _WORLD, _EXIT_HOOKS = "lockstep.compat.install", "lockstep.world", "lockstep.comm.exit_hooks"
_INTERRUPTED_CODE = 128 + signal.SIGINT
_GOOD_CODES = (0, EXIT_STOPPED)
# Modules whose hooks for uncaught exceptions call the previous one.
_KNOWN_HOOKS = ("torch.distributed.distributed_c10d", _EXIT_HOOKS)
# Frames between the interpreter and the user's code, which are not informative.
_LIBRARY = Path(os.__file__).parent
_OWN_FILES = frozenset(
    {__file__, str(Path(__file__).with_name("payload.py")), str(Path(__file__).parents[1] / "tools/rehearse/rank.py")}
    | {str(_LIBRARY / name) for name in ("runpy.py", "multiprocessing/spawn.py")}
)

# This rank, and the launcher's folder for its report, as read at its start: a script may change RANK.
_addressee: tuple[int, Path] | None = None


def _die_with_launcher() -> None:
    """Ask for SIGKILL when the launcher dies. If it is already dead, exit."""
    libc.die_with_parent()
    if os.getppid() != env.LOCKSTEP_PARENT_PID.get():
        os._exit(128 + signal.SIGKILL)


def _write_line_by_line() -> None:
    """Make stdout line-buffered, even into a pipe or file, where Python would buffer more."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)


def _install_shims() -> None:
    """Install the shims. Not for functions (`lockstep.spawn`), whose caller has imported what they need."""
    if env.LOCKSTEP_COMPAT.get() is not False:
        importlib.import_module(_SHIMS)


def _become_main(loader: object, spec: importlib.machinery.ModuleSpec | None, file: str | None) -> types.ModuleType:
    """Replace this bootstrap by a new `__main__`, with the attributes that plain `python` gives it."""
    main = types.ModuleType("__main__")
    main.__dict__.update(
        __builtins__=builtins,
        __loader__=loader,
        __spec__=spec,
        __package__=None if spec is None else spec.parent,
        __cached__=None if spec is None else spec.cached,
    )
    if file is not None:
        main.__file__ = file
    sys.modules["__main__"] = main
    return main


def run_script(path: str, args: list[str]) -> None:
    """Run a script, or a folder or zip file with a `__main__.py`, like `python path args…`."""
    sys.argv = [path, *args]
    # Only folders and zip files have a finder. It is called directly, so that no other `__main__` can be found.
    file = os.path.abspath(path)
    spec = importlib.machinery.PathFinder.find_spec("__main__", [file])
    if spec is not None:
        _put_first_on_path(file)
        return _run_spec(spec)
    _put_first_on_path(os.path.dirname(os.path.realpath(path)))
    if file.endswith(".pyc"):
        compiled = importlib.machinery.SourcelessFileLoader("__main__", file)
        code = compiled.get_code("__main__")
        main = _become_main(compiled, None, file)
    else:
        loader = importlib.machinery.SourceFileLoader("__main__", file)
        main = _become_main(loader, None, file)
        code = loader.source_to_code(loader.get_data(file), file)
    assert code is not None
    return exec(code, main.__dict__)


def _put_first_on_path(folder: str) -> None:
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, folder)


def run_module(name: str, args: list[str]) -> None:
    """Run a module like `python -m name args…`.

    Raises:
        ModuleNotFoundError: there is no such module, or it is a package that cannot be run.
    """
    sys.argv = ["-m", *args]
    _put_first_on_path(os.getcwd())
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        package, spec = name, importlib.util.find_spec(f"{name}.__main__")
        if spec is None:
            raise ModuleNotFoundError(f"{package!r} is a package without __main__, it cannot be run", name=package)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    if spec.origin is not None:
        sys.argv[0] = spec.origin
    _run_spec(spec)


def _run_spec(spec: importlib.machinery.ModuleSpec) -> None:
    loader = spec.loader
    get_code = getattr(loader, "get_code", None)
    code = get_code(spec.name) if get_code is not None else None
    if code is None:
        raise ImportError(f"no Python code found for module {spec.name!r}", name=spec.name)
    main = _become_main(loader, spec, spec.origin if spec.has_location else None)
    exec(code, main.__dict__)


def _has_plain_hook() -> bool:
    """Whether only torch and Lockstep have wrapped Python's hook for uncaught exceptions."""
    hook: object = sys.excepthook
    while getattr(hook, "__module__", None) in _KNOWN_HOOKS:
        inside = [cell.cell_contents for cell in getattr(hook, "__closure__", None) or ()]
        hook = next((one for one in inside if callable(one)), None)
    return hook is sys.__excepthook__


def _call_hook(error: BaseException, trace: TracebackType | None, *, is_plain: bool, is_quiet: bool) -> None:
    """Print an exception by the installed hook, such as that of rich or IPython; ours tells the peers."""
    # torch's hook would put the rank before every line again.
    own_words = contextlib.redirect_stderr(io.StringIO()) if is_plain or is_quiet else contextlib.nullcontext()
    try:
        with own_words:
            sys.excepthook(type(error), error, trace)
    except Exception:
        is_plain = True
    if is_plain and not is_quiet:
        _say("".join(traceback.format_exception(type(error), error, trace)))


def _say(text: str) -> None:
    """Write to stderr without `print`, which scripts replace by one that is silent on all ranks but the first."""
    if sys.stderr is not None:
        sys.stderr.write(text)


def _trace_to_show(error: BaseException) -> TracebackType | None:
    """The traceback without uninformative frames."""
    if env.LOCKSTEP_DEBUG.get() is True:
        return error.__traceback__
    trace = without_leading_frames(error.__traceback__, _OWN_FILES)
    return up_to_user(trace) if is_own(error) else without_own(trace)


def _report(error: BaseException, trace: TracebackType | None) -> bool:
    """Report an error to the launcher; returns whether the launcher gets the report."""
    if _addressee is None:
        return False
    rank, folder = _addressee
    try:
        capture(error, trace, rank).write(folder)
        is_written = True
    except OSError as problem:
        is_written = False
        _say(f"lockstep: rank {rank} cannot write its error report: {problem}\n")
    announce_failure(folder, rank, 1)
    return is_written


def _fail(error: BaseException, *, may_report: bool, is_quiet: bool) -> NoReturn:
    """Report, print unless quiet, and exit as after an uncaught exception."""
    trace = _trace_to_show(error)
    is_plain = _has_plain_hook()
    if may_report and _addressee is not None:
        # The launcher shows the report. Another library's hook may do more than print.
        if is_plain and env.LOCKSTEP_DEBUG.get() is not True:
            is_quiet = is_quiet or is_expected(error) or env.LOCKSTEP_SHOWS_ERRORS.get() is True
        is_quiet = _report(error, trace) and is_quiet
    error = error.with_traceback(trace)
    sys.last_value = error  # as the interpreter does for uncaught exceptions: exit handlers read how the program ended
    _call_hook(error, trace, is_plain=is_plain, is_quiet=is_quiet)
    _explain(error)
    sys.exit(1)


def _explain(error: BaseException) -> None:
    shims = sys.modules.get(_SHIMS)
    if shims is not None:
        with contextlib.suppress(Exception):  # it reads the text, which the script's own code produces
            shims.explain(error)


def code_of_exit(end: SystemExit) -> int:
    """The exit code that Python makes of it."""
    if end.code is None or isinstance(end.code, int):
        return (end.code or 0) & 0xFF
    return 1


def _report_cause_of(end: SystemExit) -> None:
    """Report the exception that the program has turned into an exit, like hydra. It has printed it itself.

    Without one, announce the failure, so that its exit handlers have as much time as those of a rank that raised.
    """
    _explain(end)
    error = error_behind(end)
    if error is not None:
        _report(error, _trace_to_show(error))
    elif _addressee is not None and code_of_exit(end) not in _GOOD_CODES:
        rank, folder = _addressee
        announce_failure(folder, rank, code_of_exit(end))


def _run_to_end(body: Callable[[], None]) -> None:
    """Run the program; if it succeeds, leave the world that it has left open, whose errors count as the program's."""
    good_end: SystemExit | None = None
    try:
        body()
    except SystemExit as end:
        if code_of_exit(end) not in _GOOD_CODES:
            raise
        good_end = end
    _leave_world()  # not while the exit is handled, which an error would name as its context
    if good_end is not None:
        raise good_end


def _leave_world() -> None:
    world = sys.modules.get(_WORLD)  # torch must not be imported for this
    if world is not None:
        try:
            world.leave_open_world()
        except Exception as error:
            files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
            if env.LOCKSTEP_DEBUG.get() is not True and all(map(is_internal_file, files)):
                raise error.with_traceback(None) from None  # after the script's last line: our frames say nothing
            raise
        # If threads still use it, it is left when they have ended.
        sys.modules[_EXIT_HOOKS].__dict__["shown_by"] = _report_at_exit


def _report_at_exit(error: Exception) -> bool:
    """Report an error in an exit handler to the launcher; returns whether the launcher shows it."""
    is_reported = _report(error, _trace_to_show(error))
    return is_reported and env.LOCKSTEP_SHOWS_ERRORS.get() is True and env.LOCKSTEP_DEBUG.get() is not True


def run_rank(body: Callable[[], None], *, is_quiet: bool = False) -> None:
    """Run `body` as this rank's program: exits the process unless it returns.

    Args:
        body: runs the program.
        is_quiet: do not print an exception that is reported to the launcher, which raises it again.

    Raises:
        SystemExit: as raised by `body`; with 1 after an uncaught exception, which has been reported and printed; with
            130 and no message after Ctrl-C. An exception that `body` caught and turned into an exit is reported, too.
    """
    global _addressee
    pid = os.getpid()
    rank, folder = env.RANK.get(), env.LOCKSTEP_RENDEZVOUS.get()
    _addressee = None if rank is None or folder is None else (rank, Path(folder))
    try:
        # Blocked by the launcher up to here; one that came meanwhile is raised now.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        _run_to_end(body)
    except KeyboardInterrupt:
        # No second one during interpreter shutdown; the launcher has SIGKILL if that takes too long.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        sys.exit(_INTERRUPTED_CODE)
    except SystemExit as end:
        if os.getpid() == pid:
            _report_cause_of(end)
        raise
    except BaseException as error:
        # A process forked by the script gets here too; it is not the rank.
        is_rank = os.getpid() == pid
        _fail(error, may_report=is_rank, is_quiet=is_quiet and is_rank)


def run_target(target: str, args: list[str], *, is_module: bool) -> None:
    """Run a script or module as this process's program: exits the process unless it returns; see `run_rank`."""
    _write_line_by_line()
    _install_shims()
    if is_module:
        run_rank(lambda: run_module(target, args))
    else:
        run_rank(lambda: run_script(target, args))


def main(argv: list[str]) -> None:
    """Run as a rank from here on.

    Args:
        argv: a script and its arguments, `-m` before a module and its arguments, or `--call` and a function's
            descriptors.
    """
    _die_with_launcher()
    with contextlib.suppress(Exception):  # without a stderr nothing can be printed
        faulthandler.enable()  # a crash in native code then at least shows where Python was
    kind, *rest = argv
    if kind == "--call":
        from lockstep.launch.payload import run_call

        _write_line_by_line()
        run_rank(lambda: run_call(int(rest[0]), int(rest[1])), is_quiet=True)
        return
    if kind == "-m":
        run_target(rest[0], rest[1:], is_module=True)
    else:
        run_target(kind, rest, is_module=False)


if __name__ == "__main__":
    main(sys.argv[1:])
