"""Shows a run on the terminal: a progress bar and a line per epoch, then a table.

If stdout is not a terminal (a file, a pipe), only the lines are printed.
"""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from lockstep.recipes.summary import Summary
from lockstep.train import EpochReport, Report

__all__ = ["Display"]


class Display:
    """Shows the reports of a run as they arrive. For rank 0 only; a context manager.

    Args:
        heading: first line: what is trained, and how.
        folder: folder of the run.
        epochs: total number of epochs.
        steps_done: optimizer steps done before this run.
        steps_total: optimizer steps when all epochs are done.
        console: console to write to; stdout by default.
    """

    def __init__(
        self,
        heading: str,
        folder: Path,
        epochs: int,
        steps_done: int,
        steps_total: int,
        console: Console | None = None,
    ) -> None:
        self.heading = heading
        self.folder = folder
        self.epochs = epochs
        self.console = console or Console(highlight=False)
        self._progress = Progress(
            BarColumn(bar_width=20),  # the line fits 80 columns
            MofNCompleteColumn(),
            TextColumn("steps   loss {task.fields[loss]}   {task.fields[rate]} samples/s"),
            TimeRemainingColumn(compact=True),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self._task = self._progress.add_task("", completed=steps_done, total=steps_total, loss="     –", rate="     –")

    def __enter__(self) -> Display:
        self._print(self.heading, style="bold")
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, report: Report) -> None:
        """Show one report; a `Trainer` callback."""
        if isinstance(report, EpochReport):
            self._print(self._epoch_line(report))
        else:
            rate = f"{report.samples_per_s:6,.0f}"
            self._progress.update(self._task, completed=report.step, loss=f"{report.loss:.4f}", rate=rate)

    def say(self, line: str) -> None:
        """Show a line between those of the epochs."""
        self._print(line)

    def stop(self, why: str) -> None:
        """Show that the run ends before its last epoch."""
        self._progress.stop()
        self.say(why)

    def finish(self, summary: Summary) -> None:
        """Show the results of the run, and its folder."""
        self._progress.stop()
        self.console.print()
        self.console.print(_result_table(summary), _rank_table(summary), sep="\n")
        self._print(f"{self.folder}: metrics.jsonl, curves.png, checkpoints, TensorBoard scalars")

    def _print(self, line: str, style: str | None = None) -> None:
        """Show a line verbatim: brackets and colons are part of paths, not markup."""
        self.console.print(line, style=style, soft_wrap=True, markup=False, emoji=False)

    def _epoch_line(self, report: EpochReport) -> str:
        held_out = report.evaluation
        top5 = f"top-5 {held_out['top5']:7.2%}   " if "top5" in held_out else ""
        return (
            f"epoch {report.epoch:{len(str(self.epochs))}}/{self.epochs}   loss {report.loss:.4f}   "
            f"held out {held_out['accuracy']:7.2%} ({held_out['correct']:.0f}/{held_out['images']:.0f})   {top5}"
            f"{report.samples / report.train_s:6,.0f} samples/s"
        )


def _result_table(summary: Summary) -> Table:
    counted = f"{summary.correct:,} of {summary.total:,} images, each counted once"
    table = Table(show_header=False, box=box.ROUNDED, min_width=72)
    table.add_row("accuracy, held out", f"[bold]{summary.accuracy:.2%}[/bold]   {counted}")
    if summary.top5 is not None:
        table.add_row("top-5, held out", f"{summary.top5:.2%}")
    if summary.expected is not None:
        table.add_row("held out", f"{summary.total:,} of {summary.expected:,} counted")
    table.add_row("loss, held out", f"{summary.held_out_loss:.4f}")
    table.add_row("training", f"{summary.steps:,} steps in {summary.train_s:.1f} s")
    table.add_row("throughput", f"{summary.samples_per_s:,.0f} samples/s")
    return table


def _rank_table(summary: Summary) -> Table:
    table = Table(box=box.ROUNDED, min_width=72)
    for heading in ("rank", "samples", "training", "waiting for data", "communicating, with waits"):
        table.add_column(heading, justify="right")
    for number, rank in enumerate(summary.ranks):
        shares = [f"{spent_s:.2f} s {spent_s / rank.train_s:6.1%}" for spent_s in (rank.loader_s, rank.communication_s)]
        table.add_row(str(number), f"{rank.samples:,}", f"{rank.train_s:.2f} s", *shares)
    return table
