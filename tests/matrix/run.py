"""The main job and the tests that depend on torch most, with every release that is supported.

    python tests/matrix/run.py                                    all of RELEASES; writes docs/versions.md
    python tests/matrix/run.py --versions 2.15 2.6                some of them; the rows of the others stay
    python tests/matrix/run.py --environment 2.15=/path/to/venv   an environment that is there already
    python tests/matrix/run.py --ends                             what CI does: the newest that can be had here and the
                                                                  oldest, few tests, no table

Environments are made one at a time under .venv-matrix, about 6 GB each, and removed again; `--keep` leaves them. A
release that cannot be installed here, or whose Python is missing, is a line that says so, and no failure.
"""

from __future__ import annotations

import argparse
import datetime
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.matrix import environments, groups, table  # noqa: E402
from tests.matrix.environments import RELEASES, Release, Unavailable  # noqa: E402
from tests.matrix.groups import Counts  # noqa: E402


def run_release(release: Release, python: Path, chosen: groups.Choice) -> dict[str, Counts]:
    """All groups of tests with one environment; what failed is printed."""
    results: dict[str, Counts] = {}
    for group in chosen:
        began = time.monotonic()
        counts = groups.run(group, python, ROOT, environments.FOLDER / "logs" / release.torch)
        results[group.name] = counts
        took = f"{time.monotonic() - began:.0f} s"
        print(f"torch {release.torch}, {group.name}: {counts} (passed/failed/skipped) in {took}", flush=True)
    return results


def try_release(release: Release, given: Path | None, options: argparse.Namespace) -> table.Row:
    """One row of the table, whether the release can be had here or not."""
    today = datetime.date.today().isoformat()
    is_short = options.ends or release.name in options.short
    chosen = [group for group in (groups.SHORT if is_short else groups.ALL) if group.name in options.groups]
    made: Path | None = None
    try:
        if given is None:
            print(f"torch {release.torch}: making an environment with Python {release.python}", flush=True)
            made = environments.make(release, ROOT, any_python=options.ends)
        python = environments.python_of(given or made or Path())
        version = subprocess.run(
            [
                python,
                "-c",
                "import platform, torch; print(torch.__version__.partition('+')[0], platform.python_version())",
            ],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        if version[0] != release.torch:
            raise Unavailable(f"{python} has torch {version[0]}, not {release.torch}")
        results = run_release(release, python, chosen)
        return table.Row(release.name, *version, results, "short" if is_short else "all", today)
    except Unavailable as reason:
        print(f"torch {release.torch}: not run, {reason}", flush=True)
        return table.Row(release.name, release.torch, release.python, {}, f"not run: {reason}", today)
    finally:
        if made is not None and not options.keep:
            shutil.rmtree(made, ignore_errors=True)


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[Release], Mapping[str, Path]]:
    """The options, the releases to run in order, and the environments that are there."""
    known = {release.name: release for release in RELEASES}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", nargs="+", choices=known, default=list(known), help="default: all")
    parser.add_argument("--environment", action="append", default=[], metavar="VERSION=FOLDER", help="may be repeated")
    parser.add_argument("--short", nargs="*", choices=known, default=[], help="releases with which fewer tests run")
    names = [group.name for group in groups.ALL]
    parser.add_argument("--groups", nargs="+", choices=names, default=names, help="the other cells of a row stay")
    parser.add_argument("--ends", action="store_true", help="the newest there is here, the oldest, few tests, no table")
    parser.add_argument("--keep", action="store_true", help="leave the environments that were made")
    options = parser.parse_args(arguments)
    pairs = dict(pair.split("=", 1) for pair in options.environment)
    unknown = pairs.keys() - known.keys()
    if unknown:
        parser.error(f"--environment: {', '.join(sorted(unknown))} is none of {', '.join(known)}")
    names = environments.newer_than_pinned(ROOT) if options.ends else options.versions
    return options, [known[name] for name in names], {name: Path(folder).absolute() for name, folder in pairs.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the releases one after another, of the newest ones until one could be had; 1 if a test failed."""
    options, releases, given = parse(arguments)
    rows: list[table.Row] = []
    for release in releases:
        rows.append(try_release(release, given.get(release.name), options))
        if not options.ends:
            table.update(ROOT / "docs" / "versions.md", rows[-1])
        elif rows[-1].results:
            break
    if options.ends:
        rows.append(try_release(RELEASES[0], given.get(RELEASES[0].name), options))
    return int(any(counts.failed for row in rows for counts in row.results.values()))


if __name__ == "__main__":
    sys.exit(main())
