"""`lockstep rehearse`: runs a script for N GPUs, unedited, on CPU processes; reports what would fail on the cluster."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.commands.parsing import NPROC_OPTIONS, Parser, add_grace, check_alone, hint_of_misplaced, split_at_script
from lockstep.errors import LaunchError
from lockstep.launch.screen import say
from lockstep.tools.rehearse.rehearsal import Rehearsal, rehearse

__all__ = ["main"]

_FLAGS = frozenset({"-m", "--module", "--no-prefix", "--strict", "--no-compat", "-h", "--help"})

_DESCRIPTION = """\
Run a script written for N GPUs, unedited, on CPU processes: each `cuda` device is a stand-in in CPU memory, nccl is
a group over shared memory. It ends with a report of what would fail on the cluster: where, why, and the fix.
Unlike under `lockstep verify`, the script really writes its files, such as checkpoints and logs.
Options after the script are passed to it; use little data and few steps.
"""

_EPILOG = """\
The exit code is that of the script if it fails; 1 if a process that it started failed unnoticed, or, with --strict,
if there are findings; otherwise 0.

examples:
  lockstep rehearse --nproc 4 train.py --epochs 2
  lockstep rehearse --nodes 2 --nproc 4 --memory 8GiB train.py
  lockstep rehearse --nproc 2 --strict --format json --output report.json train.py
"""


def _parser() -> Parser:
    parser = Parser(
        prog="lockstep rehearse",
        usage="lockstep rehearse [options] script.py [args ...]\n"
        "       lockstep rehearse [options] -m module [args ...]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    parser.add_argument(
        *NPROC_OPTIONS,
        dest="nproc",
        type=int,
        metavar="N",
        default=2,
        help="ranks per node, each with a GPU (default: %(default)s)",
    )
    parser.add_argument("--gpus", type=int, metavar="N", help="simulated GPUs per node (default: --nproc)")
    parser.add_argument("--nodes", type=int, metavar="K", default=1, help="simulated nodes (default: %(default)s)")
    parser.add_argument(
        "--start",
        choices=("auto", "ranks", "once"),
        default="auto",
        help="start the script once per rank (ranks) or once per node (once), for scripts that start their ranks "
        "themselves or use DataParallel; auto (default) reads the script",
    )
    parser.add_argument("--memory", metavar="SIZE", help="memory of each GPU, such as 8GiB (default: no limit)")
    parser.add_argument(
        "--format", choices=("text", "json"), default="text", help="format of the report (default: text)"
    )
    parser.add_argument("--output", metavar="FILE", help="write the report to FILE (default: to stdout, at the end)")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if there are findings")
    parser.add_argument(
        "-m", "--module", dest="is_module", action="store_true", help="run a module, as `python -m` does"
    )
    parser.add_argument(
        "--no-prefix", dest="prefix", action="store_false", help="do not print `[rank]` before each line"
    )
    parser.add_argument(
        "--no-compat",
        dest="with_shims",
        action="store_false",
        help="let `import horovod` and `import apex` find the real packages only, as in `lockstep run`",
    )
    add_grace(parser)
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run the command.

    Args:
        arguments: the words after `lockstep rehearse`.

    Returns:
        The exit code: that of the job if it is not 0; 1 if a finding is a failure of the script (`child-failed`), or
        if there are findings and `--strict` was given; otherwise 0.
    """
    options, script, script_arguments = split_at_script(arguments, _FLAGS)
    parser = _parser()
    chosen = parser.parse_args(options)
    if script is None:
        parser.error("name a module to run after -m" if chosen.is_module else "name a script to run")
    check_alone("lockstep rehearse")
    if chosen.nproc == parser.get_default("nproc"):
        say(hint_of_misplaced("lockstep rehearse", (*(["-m"] if chosen.is_module else []), script), script_arguments))
    for name in ("nproc", "nodes", "gpus"):
        number = getattr(chosen, name)
        if number is not None and number < 1:
            raise LaunchError(f"{name} is {number}; expected at least 1")
    return rehearse(Rehearsal(target=script, args=script_arguments, **vars(chosen)))
