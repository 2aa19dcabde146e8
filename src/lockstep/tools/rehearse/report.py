"""The report, as text and as JSON.

The JSON report is an object with

* `version`: 1; within a version fields may be added, but none changes its meaning;
* `script`, `exit_code` (the script's), `ranks`, `nodes`, `gpus_per_node`: what was rehearsed; `processes`: how many
  were started, also if they joined no group and `ranks` is 1;
* `findings`: a list of objects with `id`, `title`, `file`, `line` and `function` (null if no line is to blame),
  `called_from` (objects with `file`, `line` and `function`, innermost caller first), `what` was seen, `why` it
  matters, the `fix`, and `ranks`, empty if it concerns all.
"""

from __future__ import annotations

import itertools
import json
import textwrap
from collections.abc import Sequence

from lockstep.tools.rehearse.events import RehearsedJob
from lockstep.tools.rehearse.findings import KINDS, Finding
from lockstep.tools.rehearse.line import Site
from lockstep.topology import name_ranks

__all__ = ["format_json", "format_text"]

_VERSION = 1
_WIDTH = 100


def _as_dict(site: Site) -> dict[str, object]:
    return {"file": site.file, "line": site.line, "function": site.function}


def format_json(script: str, findings: Sequence[Finding], job: RehearsedJob | None, exit_code: int) -> str:
    """The report as JSON; see the module's docstring.

    Args:
        script: the script that was rehearsed.
        findings: what the rehearsal found.
        job: records of its processes; None if none started.
        exit_code: exit code of the script.
    """
    content = {
        "version": _VERSION,
        "script": script,
        "exit_code": exit_code,
        "ranks": 0 if job is None else job.world_size,
        "processes": 0 if job is None else job.num_started,
        "nodes": 0 if job is None else job.settings.nodes,
        "gpus_per_node": 0 if job is None else job.settings.devices,
        "findings": [
            {
                "id": one.id,
                "title": KINDS[one.id].title,
                **(_as_dict(one.sites[0]) if one.sites else {"file": None, "line": None, "function": None}),
                "called_from": [_as_dict(site) for site in one.sites[1:]],
                "what": one.what,
                "why": KINDS[one.id].why,
                "fix": KINDS[one.id].fix,
                "ranks": list(one.ranks),
            }
            for one in findings
        ],
    }
    return json.dumps(content, indent=2) + "\n"


def _paragraph(label: str, text: str) -> str:
    return textwrap.fill(
        text, _WIDTH, initial_indent=f"    {label:5}", subsequent_indent=" " * 9, break_on_hyphens=False
    )


def _describe(findings: Sequence[Finding]) -> str:
    """Text for findings of one kind at one line, with the call path of each."""
    kind = KINDS[findings[0].id]
    place = str(findings[0].sites[0]) if findings[0].sites else "(no line)"
    lines = [f"{place}: {kind.title} [{kind.id}]"]
    for finding in findings:
        lines.append(_paragraph("seen", finding.what + "."))
        # A call from the top level, usually of main(), is left out unless it is the only caller.
        callers = list(map(str, finding.sites[1:]))[:2]
        if len(callers) > 1 and finding.sites[2].function == "<module>":
            callers.pop()
        if callers:
            lines.append(_paragraph("from", ", called from ".join(callers)))
    return "\n".join([*lines, _paragraph("why", kind.why + "."), _paragraph("fix", kind.fix + ".")])


def _who_ran(job: RehearsedJob | None) -> str:
    ranks = 0 if job is None else job.world_size
    if job is not None and job.num_started > 1 and not job.has_group:
        return f"in {job.num_started} processes that joined no group"
    return f"on {ranks} rank{'' if ranks == 1 else 's'}"


def format_text(script: str, findings: Sequence[Finding], job: RehearsedJob | None, exit_code: int) -> str:
    """The report as text; takes the same arguments as `format_json`."""
    where = f"{script} {_who_ran(job)}"
    if job is not None and job.settings.nodes > 1:
        where += f" on {job.settings.nodes} simulated nodes"
    if not findings and exit_code != 0 and (job is None or not job.has_group):
        ending = f"it ended with exit code {exit_code} before joining a group"
        lines = [f"lockstep rehearse: no report on {script}: {ending}"]
    elif not findings:
        ending = {0: "", 130: " before it was interrupted"}.get(exit_code, " before it failed")
        lines = [f"lockstep rehearse: nothing found in {where}{ending}"]
    else:
        count = f"{len(findings)} thing{'' if len(findings) == 1 else 's'}"
        lines = [f"lockstep rehearse: {count} in {where} would go wrong on a cluster", ""]
        places = itertools.groupby(findings, key=lambda one: (one.id, one.sites[:1]))
        lines += ["\n\n".join(_describe(list(group)) for _, group in places)]
    if job is not None and job.silent:
        silent = f"{name_ranks(job.silent)} left no record of what happened, as killed processes do"
        lines += ["", f"lockstep rehearse: {silent}"]
    if job is not None and job.unread:
        lines += ["", f"lockstep rehearse: records that could not be read: {'; '.join(job.unread)}"]
    return "\n".join([*lines, ""])
