"""`python -m benchmarks`: run cases, or regenerate tables and pictures from stored results."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from benchmarks import CASES, REPOSITORY, RESULTS, report
from benchmarks.plots import draw
from lockstep.bench.results import Result

README = REPOSITORY / "README.md"
_BUSY_LOAD = 0.5


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; return the exit code."""
    options = _parser().parse_args(arguments)
    if "report" in options.what:
        if len(options.what) > 1 or options.quick:
            _parser().error("`report` stands alone: it runs nothing")
        return regenerate(options.output or RESULTS, None if options.output else README, check=options.check)
    if options.check:
        _parser().error("--check belongs to `report`")
    output = options.output or (REPOSITORY / "build" / "benchmarks" if options.quick else RESULTS)
    started = time.monotonic()
    for case in options.what or CASES:
        _run(case, output, quick=options.quick)
    print(f"{time.monotonic() - started:.0f} s in all", file=sys.stderr)
    return 0


def _known(name: str) -> str:
    if name not in (*CASES, "report"):
        raise argparse.ArgumentTypeError(f"there is no {name!r}; there are: {', '.join(CASES)}, report")
    return name


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "what",
        nargs="*",
        type=_known,  # not `choices`: argparse of Python 3.11 holds even an empty list against them
        metavar="{" + ",".join([*CASES, "report"]) + "}",
        help="cases to run, all of them by default; or `report`: run nothing, regenerate tables and pictures "
        "from the stored results and fill the markers in README.md",
    )
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes; numbers mean nothing")
    parser.add_argument("--check", action="store_true", help="with report: write nothing, exit 1 if a text is stale")
    parser.add_argument(
        "--output",
        type=Path,
        help="folder of the results (default: benchmarks/results, or build/benchmarks if --quick); with `report`, "
        "a folder other than the default leaves README.md alone",
    )
    return parser


def _run(case: str, output: Path, *, quick: bool) -> None:
    """Run one case, store it, and generate its table and picture."""
    # Imported here: the cases import torch, which `report` and `--help` do not need.
    module: ModuleType = importlib.import_module(f"benchmarks.case_{case}")
    print(case, file=sys.stderr, flush=True)
    result: Result = module.run(module.QUICK if quick else module.FULL, quick=quick)
    if result.environment.load > _BUSY_LOAD:
        message = f"  the machine was busy at the start (load {result.environment.load}): expect noise"
        print(message, file=sys.stderr)
    path = result.save(output)
    for file, text in _texts(result, output).items():
        file.write_text(text, encoding="utf-8")
    draw(result, output / f"{case}.png")
    for verdict in report.verdicts(result):
        print(f"  {'met' if verdict.met else 'MISSED'}: {verdict.target}: {verdict.measured}")
    print(f"  {path}", file=sys.stderr)


def regenerate(folder: Path, document: Path | None, *, check: bool = False) -> int:
    """Regenerate everything that is generated from stored results.

    Args:
        folder: holds the results; tables and pictures are written beside them.
        document: a text with markers to fill from these results, or None.
        check: write nothing; only see whether the texts are what would be written.

    Returns:
        Exit code: 1 if there are no results, or if `check` found a stale text.
    """
    results = [Result.load(path) for case in CASES if (path := folder / f"{case}.json").exists()]
    if not results:
        print(f"no results in {folder}: run `python -m benchmarks` first", file=sys.stderr)
        return 1
    texts = {file: text for result in results for file, text in _texts(result, folder).items()}
    if document is not None and document.exists():
        texts[document] = report.fill_markers(document.read_text(encoding="utf-8"), folder)
    if check:
        stale = [file for file, text in texts.items() if not file.exists() or file.read_text("utf-8") != text]
        for file in stale:
            print(f"{file} is stale: run `python -m benchmarks report`", file=sys.stderr)
        return 1 if stale else 0
    for file, text in texts.items():
        file.write_text(text, encoding="utf-8")
    for result in results:
        draw(result, folder / f"{result.case}.png")
    return 0


def _texts(result: Result, folder: Path) -> dict[Path, str]:
    """The generated text files of one case."""
    return {folder / f"{result.case}.md": report.render(result)}


if __name__ == "__main__":
    sys.exit(main())
