"""`lockstep doctor`: what this machine has for training; with --capabilities, which verbs work on which backend."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from lockstep.commands.parsing import Parser

__all__ = ["main"]

_DESCRIPTION = """\
Look at this machine: what is there for training, what is missing, and the command that brings it. Two ranks meet for
a moment. With --capabilities run every verb of torch.distributed on every backend and device there is, on two ranks,
and print which work: half a minute.
"""


def main(arguments: Sequence[str]) -> int:
    """Run the command.

    Args:
        arguments: the words after `lockstep doctor`.

    Returns:
        0, or 1 if something is missing without which training cannot work.
    """
    parser = Parser(prog="lockstep doctor", description=_DESCRIPTION, allow_abbrev=True)
    parser.add_argument("--capabilities", action="store_true", help="run every verb on every backend and device")
    parser.add_argument(
        "--classic", action="store_true", help="with --capabilities: only the rows of PyTorch's own table"
    )
    parser.add_argument("--format", choices=("text", "markdown", "json"), default="text", help="of --capabilities")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
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
            print(f"running {len(verbs)} verbs on {column.backend}, {column.device} …", file=sys.stderr)
            measure.measure(column, verbs)
    show = {"text": table.as_text, "markdown": table.as_markdown, "json": table.as_json}[form]
    print(show(columns, verbs), end="")
    return 0
