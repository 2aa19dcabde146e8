"""`lockstep verify`: runs a script, unedited, on N processes and on one, and reports where they differ."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lockstep.commands.parsing import NPROC_OPTIONS, Parser, check_alone, hint_of_misplaced, split_at_script
from lockstep.errors import LaunchError
from lockstep.launch.screen import say
from lockstep.tools.verify.settings import Verification
from lockstep.tools.verify.verification import verify

__all__ = ["main"]

_FLAGS = frozenset({"-m", "--module", "--double", "--no-compat", "-h", "--help"})

_DESCRIPTION = """\
Run a script on N processes and on one, unedited, and compare the optimizer steps: samples, inputs and outputs of
models, loss, gradients, parameters, buffers. Reports the first stage that differs, with what was
measured, what it means and what to write. Works for any script that `lockstep run` can start; GPUs are simulated.
Options after the script are passed to it; use little data. What it writes goes to memory, where the system
allows that.
"""

_EPILOG = """\
The exit code is 0 if N processes give the answer of one, 1 if they do not, and 2 if verify cannot tell.

examples:
  lockstep verify train.py --epochs 1
  lockstep verify --nproc 2,3 --steps 6 --double train.py
"""


def _parser() -> Parser:
    parser = Parser(
        prog="lockstep verify",
        usage="lockstep verify [options] script.py [args ...]\n       lockstep verify [options] -m module [args ...]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    parser.add_argument(
        *NPROC_OPTIONS, dest="nproc", metavar="N[,M]", help="numbers of ranks, with commas (default: 2)"
    )
    parser.add_argument(
        "--steps",
        type=int,
        metavar="K",
        default=4,
        help="optimizer steps to compare in an epoch of more than 40 batches; shorter epochs run in full (default: "
        "%(default)s)",
    )
    parser.add_argument(
        "--double", action="store_true", help="compute in float64, so that rounding errors hide nothing"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the report to FILE")
    parser.add_argument("--plot", metavar="FILE", help="plot the differences of each stage over the steps")
    parser.add_argument(
        "--devices",
        choices=("auto", "cpu", "gpu"),
        default="auto",
        help="simulated GPUs: if the script fails without, or its ranks train separately (auto, the default), "
        "never (cpu), always (gpu)",
    )
    parser.add_argument(
        "-m", "--module", dest="is_module", action="store_true", help="run a module, as `python -m` does"
    )
    parser.add_argument(
        "--no-compat",
        dest="with_shims",
        action="store_false",
        help="let `import horovod` and `import apex` find the real packages only, as in `lockstep run`",
    )
    return parser


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise LaunchError(f"nproc is {text!r}; expected numbers of ranks, such as 2 or 2,3") from None


def main(arguments: Sequence[str]) -> int:
    """Run the command.

    Args:
        arguments: the words after `lockstep verify`.

    Returns:
        The exit code: 0 if N processes give the answer of one, 1 if they do not, 2 if verify cannot tell.
    """
    options, script, script_arguments = split_at_script(arguments, _FLAGS)
    parser = _parser()
    chosen = vars(parser.parse_args(options))
    if script is None:
        parser.error("name a module to run after -m" if chosen["is_module"] else "name a script to run")
    check_alone("lockstep verify")
    json_file, plot_file = chosen.pop("json"), chosen.pop("plot")
    if chosen["nproc"] is None:
        say(hint_of_misplaced("lockstep verify", (*(["-m"] if chosen["is_module"] else []), script), script_arguments))
    chosen["nproc"] = _numbers(chosen["nproc"] or "2")
    for file in (json_file, plot_file):
        if file is not None and not Path(file).absolute().parent.is_dir():
            raise LaunchError(f"the report cannot be written to {file}: there is no such folder")
    verdicts = verify(Verification(target=script, args=script_arguments, **chosen))
    # Imports torch; the ranks need not wait for it.
    from lockstep.tools.verify.report import code_of, format_json, format_text, write_plot

    print(format_text(script, verdicts), end="")
    try:
        if json_file is not None:
            Path(json_file).write_text(format_json(script, verdicts), encoding="utf-8")
        if plot_file is not None:
            write_plot(plot_file, verdicts)
    except OSError as error:
        raise LaunchError(f"the report cannot be written: {error}") from error
    return code_of(verdicts)
