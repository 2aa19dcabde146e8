"""The report of a verification, as text, JSON and a plot."""

from __future__ import annotations

import dataclasses
import json
import math
import textwrap
from collections.abc import Sequence

from lockstep.tools.verify.verdict import Verdict

__all__ = ["code_of", "format_json", "format_text", "write_plot"]

_WIDTH = 110
_SHOWN_LINES = 3


def _wrapped(head: str, text: str) -> str:
    # Paths and options are not broken, so that they can be searched for and copied.
    wrapper = textwrap.TextWrapper(_WIDTH, head, " " * 4, break_long_words=False, break_on_hyphens=False)
    return wrapper.fill(text)


def _digits(value: float) -> str:
    if value == 0:
        return "rounding"
    return f"{max(0, math.floor(-math.log10(value)))} digits" if value < 1 else "no digit"


def format_text(target: str, verdicts: Sequence[Verdict]) -> str:
    """The report as text.

    Args:
        target: the script.
        verdicts: one for each number of ranks.
    """
    lines = []
    for one in verdicts:
        head = f"{target} on {one.world_size} ranks: "
        if one.differences:
            lines.append(head + "NOT the answer of one process")
        elif one.unknown:
            first, _, rest = one.unknown.partition("\n")
            lines.append(_wrapped(head, f"cannot tell: {first}"))
            lines.extend(f"  | {line}" for line in rest.splitlines())
        else:
            worst = max((step["gradients"] for step in one.digits), default=0.0)
            lines.append(head + f"the answer of one process in {one.steps} steps, to {_digits(worst)}")
        for each in one.differences:
            where = f"step {each.step}, {each.stage}" if each.step else each.stage
            where += f" ({', '.join(each.lines[:_SHOWN_LINES])})" if each.lines else ""
            lines.append(_wrapped(f"  {where}: ", each.measured))
            lines.append(_wrapped("    why:   ", each.meaning))
            lines.append(_wrapped("    write: ", each.advice))
        lines.extend(_wrapped("  note: ", note) for note in one.notes)
    return "\n".join(lines) + "\n"


def code_of(verdicts: Sequence[Verdict]) -> int:
    """The exit code: 1 if any number of ranks differs, else 2 if any is unknown, else 0."""
    codes = {one.code for one in verdicts}
    return 1 if 1 in codes else 2 if 2 in codes else 0


def format_json(target: str, verdicts: Sequence[Verdict]) -> str:
    """The report as JSON."""
    content = {
        "target": target,
        "code": code_of(verdicts),
        "runs": [{**dataclasses.asdict(one), "code": one.code} for one in verdicts],
    }
    return json.dumps(content, indent=2, allow_nan=True) + "\n"


def write_plot(file: str, verdicts: Sequence[Verdict]) -> None:
    """Plot the distance of each stage of each step from one process. Needs matplotlib.

    Args:
        file: path of the plot; the extension determines the format.
        verdicts: one for each number of ranks.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(verdicts), squeeze=False, figsize=(5 * len(verdicts), 3.6), sharey=True)
    for axis, one in zip(axes[0], verdicts, strict=True):
        for stage in ("inputs", "outputs", "loss", "gradients"):
            values = [max(step.get(stage, 0.0), 1e-17) for step in one.digits]
            axis.plot(range(1, len(values) + 1), values, marker="o", label=stage)
        axis.set(
            yscale="log", ylim=(1e-17, 10), xlabel="optimizer step", title=f"{one.world_size} ranks against one process"
        )
        axis.xaxis.get_major_locator().set_params(integer=True)
    axes[0][0].set_ylabel("relative difference")
    axes[0][0].legend(loc="best", fontsize=8)
    figure.tight_layout()
    figure.savefig(file)
    pyplot.close(figure)
