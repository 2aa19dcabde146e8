"""`lockstep doctor`: what this machine has for training; with --capabilities, which operations each backend has."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from lockstep.commands.parsing import Parser

__all__ = ["main"]

_DESCRIPTION = """\
Check what this machine has for training and what it lacks, with the command that installs or fixes it. Starts two
ranks for a moment. With --capabilities, run every operation of torch.distributed on every available backend and
device, on two ranks, and print which work; takes half a minute.
"""


def main(arguments: Sequence[str]) -> int:
    """Run the command.

    Args:
        arguments: the words after `lockstep doctor`.

    Returns:
        0, or 1 if something that training needs is missing.
    """
    parser = Parser(prog="lockstep doctor", description=_DESCRIPTION, allow_abbrev=True)
    parser.add_argument("--capabilities", action="store_true", help="run every operation on every backend and device")
    parser.add_argument(
        "--classic", action="store_true", help="with --capabilities: only the operations in PyTorch's own table"
    )
    parser.add_argument(
        "--format", choices=("text", "markdown", "json"), default="text", help="format of --capabilities"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    if options.capabilities:
        return _show_capabilities("json" if options.json else options.format, options.classic)
    return _show_findings(options.json)


def _show_findings(as_json: bool) -> int:
    from lockstep.tools.doctor import examine

    findings = []
    for finding in examine():
        findings.append(finding)
        if not as_json:
            print(f"{finding.status.replace('missing', 'MISSING'):8} {finding.subject:15} {finding.text}", flush=True)
            for line in filter(None, (finding.remedy, finding.command and f"$ {finding.command}")):
                print(f"{'':8} {'':15} -> {line}")
    if as_json:
        print(json.dumps([finding.as_dict() for finding in findings], indent=2))
    return 1 if any(finding.status == "missing" for finding in findings) else 0


def _show_capabilities(form: str, is_classic: bool) -> int:
    from lockstep.tools.capabilities import measure, table
    from lockstep.tools.capabilities.verbs import CLASSIC, VERBS

    verbs = list(CLASSIC if is_classic else VERBS)
    columns = measure.find_columns()
    for column in columns:
        if not column.absent:
            print(f"running {len(verbs)} operations on {column.backend}, {column.device} …", file=sys.stderr)
            measure.measure(column, verbs)
    show = {"text": table.as_text, "markdown": table.as_markdown, "json": table.as_json}[form]
    print(show(columns, verbs), end="")
    return 0
