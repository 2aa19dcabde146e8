"""`lockstep bench`: measures training and its communication on this machine.

Each benchmark is a module or package of `lockstep.bench`, with:

* `SUMMARY`, its line in the overview, and `DESCRIPTION`, for its help;
* `add_arguments(parser)`: adds its own options to the common ones. Must not import torch;
* `measure(options, session)`: passes measurements to `session.add`; stops when `session.left_s` is used up;
* `blocks(result)`: tables, computed from the result alone (`lockstep.bench.pages`);
* `draw(result)`: plots the result, as a matplotlib figure.

The command does everything else: common options, progress, Ctrl-C, files.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from lockstep import env
from lockstep.commands.parsing import Parser, add_nproc
from lockstep.errors import InputError, LaunchError, LockstepError
from lockstep.launch.command import USAGE_CODE
from lockstep.launch.config import resolve_nproc
from lockstep.recipes.options import DEFAULT_OUT, folder_name
from lockstep.similar import suggest

__all__ = ["main"]

_BENCHMARKS = ("strategies", "comm", "scaling")
_REPORT = "report"
_INTERRUPTED_CODE = 130


def main(arguments: Sequence[str]) -> int:
    """Run the command.

    Args:
        arguments: the words after `lockstep bench`.

    Returns:
        0; 1 if a rank or a check failed; 130 after Ctrl-C. Measurements made so far are written in
        all cases.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview(), end="")
        return 0 if arguments else USAGE_CODE
    name, *options = arguments
    if name == _REPORT:
        return _report(options)
    if name not in _benchmarks():
        known = [*_benchmarks(), _REPORT]
        raise LaunchError(f"unknown benchmark {name!r}{suggest(name, known) or '.'} Benchmarks: {', '.join(known)}")
    return _run(name, importlib.import_module(f"lockstep.bench.{name}"), options)


def _benchmarks() -> list[str]:
    return [name for name in _BENCHMARKS if find_spec(f"lockstep.bench.{name}")]


def _overview() -> str:
    lines = [f"  {name:10}   {importlib.import_module(f'lockstep.bench.{name}').SUMMARY}" for name in _benchmarks()]
    return "\n".join(
        [
            "usage: lockstep bench <benchmark> [options]",
            "",
            *lines,
            f"  {_REPORT:10}   regenerate tables and plots from a stored result",
            "",
            "`lockstep bench <benchmark> --help` shows its options",
            "",
        ]
    )


def _run(name: str, benchmark: ModuleType, arguments: Sequence[str]) -> int:
    """Measure, and write the results, also after an error or Ctrl-C."""
    from lockstep.bench.ranks import RankFailed
    from lockstep.bench.session import ProgressLine, Session

    options = _parser(name, benchmark).parse_args(arguments)
    nproc = resolve_nproc(options.nproc or "auto", env.snapshot())
    folder = _new_folder(options.out or DEFAULT_OUT, options.name or f"bench-{name}")
    progress = ProgressLine(f"bench {name}", options.budget)
    session = Session(name, nproc, options.budget, options.quick, folder, progress)
    code = 0
    try:
        benchmark.measure(options, session)
    except KeyboardInterrupt:
        code = _INTERRUPTED_CODE
        progress.say(f"lockstep bench {name}: interrupted; results so far are kept")
    except (LockstepError, RuntimeError) as failure:
        if not session.series:
            progress.close()
            _remove_if_empty(folder)
            if isinstance(failure, LockstepError | RankFailed):  # says what to do
                raise LaunchError(str(failure)) from failure
            raise
        code = 1
        progress.say(f"lockstep bench {name}: error: {failure}; results so far are kept")
    finally:
        progress.close()
    if not session.series:
        _remove_if_empty(folder)
        print(f"lockstep bench {name}: nothing was measured, so nothing was written", file=sys.stderr)
        return code or 1
    path = session.result(complete=code == 0).save(folder)
    _publish(path, benchmark)
    if session.failure:
        progress.say(f"lockstep bench {name}: error: {session.failure}")
    return code or int(bool(session.failure))


def _publish(path: Path, benchmark: ModuleType) -> None:
    """Print the tables of a stored result, and write them and the plot next to it."""
    from lockstep.bench.pages import as_text, markdown_page, notes_of
    from lockstep.bench.results import Result

    result = Result.load(path)  # what is shown is what is stored
    blocks = benchmark.blocks(result)
    written = [path.name, path.with_suffix(".md").name]
    has_plot = find_spec("matplotlib") is not None
    if has_plot:
        from lockstep.bench.figures import save

        save(benchmark.draw(result), result, path.with_suffix(".png"))
        written.append(path.with_suffix(".png").name)
    page = markdown_page(result, blocks, path.stem, has_plot=has_plot)
    path.with_suffix(".md").write_text(page, encoding="utf-8")
    print("\n\n".join([*notes_of(result), as_text(blocks)]))
    print(f"\n{path.parent}: {', '.join(written)}")
    if not has_plot:
        print(
            "no plot, because matplotlib is not installed: pip install matplotlib, then "
            f"lockstep bench {_REPORT} {path}",
            file=sys.stderr,
        )


def _report(arguments: Sequence[str]) -> int:
    """`lockstep bench report`."""
    parser = Parser(
        prog=f"lockstep bench {_REPORT}",
        description="Regenerate the tables and the plot of a run from its JSON file.",
    )
    parser.add_argument("path", type=Path, nargs="+", help="folder or JSON file of a run")
    for path in parser.parse_args(arguments).path:
        files = sorted(path.glob("*.json")) if path.is_dir() else [path]
        if not files or not files[0].is_file():
            raise LaunchError(f"no result at {str(path)!r}; expected the folder or the JSON file of a run")
        for file in files:
            _publish(file, _benchmark_of(file))
    return 0


def _benchmark_of(path: Path) -> ModuleType:
    """The benchmark that a result belongs to.

    Raises:
        LaunchError: the file is not a result of `lockstep bench`.
    """
    from lockstep.bench.results import Result

    try:
        name = Result.load(path).case
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise LaunchError(f"{path} is not a result of `lockstep bench`: {error}") from error
    if name not in _benchmarks():
        raise LaunchError(f"{path} is a result of {name!r}; expected one of {', '.join(_benchmarks())}")
    return importlib.import_module(f"lockstep.bench.{name}")


def _parser(name: str, benchmark: ModuleType) -> Parser:
    parser = Parser(
        prog=f"lockstep bench {name}",
        description=benchmark.DESCRIPTION,
    )
    run = parser.add_argument_group("run")
    add_nproc(run)
    run.add_argument(
        "--budget", type=_budget, metavar="TIME", default="5m", help="approximate time limit: 30s, 5m, 1h (default: 5m)"
    )
    run.add_argument("--quick", action="store_true", help="measure as little as possible, to see that it works")
    run.add_argument(
        "--name",
        type=folder_name,
        help=f"folder for the results inside --out (default: bench-{name}, bench-{name}-2, …)",
    )
    run.add_argument("--out", type=Path, metavar="DIR", help=f"where runs are kept (default: {DEFAULT_OUT})")
    benchmark.add_arguments(parser)
    return parser


def _budget(text: str) -> float:
    from lockstep.bench.session import parse_duration

    try:
        return parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _new_folder(out: Path, name: str) -> Path:
    from lockstep.recipes.run_folder import create_run_folder

    try:
        return create_run_folder(out, name)
    except InputError as mistake:
        raise LaunchError(str(mistake)) from mistake


def _remove_if_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:
        return
