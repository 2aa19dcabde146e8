"""`lockstep doctor`: what this machine has for training; with --capabilities, which verbs work on which backend."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from lockstep.commands.parsing import Parser

__all__ = ["main"]

_DESCRIPTION = """\
Look at this machine: what is there for training, what is missing, and what to do about it. With --capabilities run
every verb of torch.distributed on every backend and device there is, on two ranks, and print which work: half a minute.
"""


def main(arguments: Sequence[str]) -> int:
    """Run the command.

    Args:
        arguments: the words after `lockstep doctor`.

    Returns:
        0, or 1 if something is missing without which training cannot work.
    """
    parser = Parser(
        prog="lockstep doctor", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--capabilities", action="store_true", help="run every verb on every backend and device")
    parser.add_argument(
        "--classic", action="store_true", help="with --capabilities: only the rows of PyTorch's own table"
    )
    parser.add_argument("--format", choices=("text", "markdown", "json"), default="text", help="of --capabilities")
    options = parser.parse_args(arguments)
    return _show_capabilities(options.format, options.classic) if options.capabilities else _show_findings()


def _show_findings() -> int:
    from lockstep.tools.doctor import examine

    is_well = True
    for finding in examine():
        mark = "ok" if not finding.remedy else ("MISSING" if finding.is_needed else "look")
        print(f"{mark:8} {finding.subject:14} {finding.text}")
        if finding.remedy:
            print(f"{'':8} {'':14} -> {finding.remedy}")
        is_well = is_well and not (finding.remedy and finding.is_needed)
    return 0 if is_well else 1


def _show_capabilities(form: str, is_classic: bool) -> int:
    from lockstep.tools.capabilities import measure, table
    from lockstep.tools.capabilities.verbs import CLASSIC, VERBS

    verbs = list(CLASSIC if is_classic else VERBS)
    columns = measure.find_columns()
    for column in columns:
        if not column.absent:
            print(f"running {len(verbs)} verbs on {column.backend}, {column.device} …", file=sys.stderr)
            measure.measure(column, verbs)
    show = {"text": table.as_text, "markdown": table.as_markdown, "json": table.as_json}[form]
    print(show(columns, verbs), end="")
    return 0
