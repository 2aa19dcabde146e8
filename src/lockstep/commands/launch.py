"""`lockstep launch`: the command line of `torch.distributed.launch`, in every spelling it has ever had.

Replace `python -m torch.distributed.launch` by `python -m lockstep launch`. It starts ranks as `lockstep run` does,
with the same guarantees, and passes each its local rank as torch's launcher did. Does not import torch.

============================================= =========== ==========================================================
option (underscores and dashes alike)         here        how
============================================= =========== ==========================================================
`--nproc_per_node N|auto|gpu|cpu`             supported   default 1
`--nnodes N`, `MIN:MAX`; `--node_rank`        supported   one host or several; see `lockstep run --help`
`--master_addr`, `--master_port`              supported   on one host the default port is a free one; in torch, 29500
`--local_rank=N` before the script's own      supported   in the spelling that the script expects (`spelling.py`)
`--use_env`                                   supported   also `--use_env=True`; no `--local_rank` is passed
`-m`, `--module`; `--no_python`               supported   the latter needs `--use_env`, as in torch
`--logdir DIR`, `--log_dir DIR` with `-r`     different   DIR/rank<r>.log, with stdout and stderr
`--rdzv_backend`, `_endpoint`, `_id`,         supported   see `lockstep run --help`
`_conf`, `--local_addr`
`--standalone`                                supported   one host
`--max_restarts K`                            supported
`--shutdown_timeout SECONDS`                  supported   from SIGTERM to SIGKILL
`--monitor_interval`, `--start_method`,       different   accepted, with a warning: there is no polling, no
`--role`, `--event_log_handler`, `-t`,                    multiprocessing, one role, one log; every signal is handled
`--tee`, `--log_dir` alone,
`--signals_to_handle`, `--run_path`,
`--numa_binding`
`--local_ranks_filter`,                       refused     `--log_dir` with `-r 3` gives each rank a file
`--duplicate_std…_filters`, `--logs_specs`
`--virtual_local_rank`                        refused     set CUDA_VISIBLE_DEVICES in the script
============================================= =========== ==========================================================
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from typing import NoReturn

from lockstep import env
from lockstep.compat.legacy import choice
from lockstep.compat.legacy.spelling import find_spelling
from lockstep.errors import LaunchError
from lockstep.launch.config import LaunchConfig
from lockstep.launch.hosts.options import OPTIONS, add_arguments, hosts_from
from lockstep.launch.hosts.start import start_on_hosts
from lockstep.launch.screen import say
from lockstep.launch.supervisor import launch_job
from lockstep.similar import suggest

__all__ = ["main", "parse"]

_PROGRAM_RUNNER = "lockstep.launch.program"

_DESCRIPTION = """\
Start N processes of a script, as `python -m torch.distributed.launch` does: with RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR and MASTER_PORT in the environment, and with --local_rank=N (or --local-rank=N, whichever the script
expects) as its first argument, unless --use_env.
"""

# Options of torch's launcher that take a value and have no effect here.
_WITHOUT_EFFECT = (
    ("--monitor_interval", "ranks are not polled"),
    ("--start_method", "every rank is a new interpreter"),
    ("--role", "there is only one role"),
    ("--event_log_handler", "no such events are logged"),
    ("--signals_to_handle", "SIGINT, SIGTERM and SIGHUP are passed on to the ranks"),
    ("--numa_binding", "processes are not bound to NUMA nodes"),
    ("--tee", "output goes to the terminal, or to files with --log_dir and -r 3"),
)
_REFUSED = {
    "--local_ranks_filter": "use --log_dir DIR -r 3, which writes a file per rank",
    "--duplicate_stdout_filters": "use --log_dir DIR -r 3, and search the files",
    "--duplicate_stderr_filters": "use --log_dir DIR -r 3, and search the files",
    "--logs_specs": "use --log_dir DIR -r 3",
    "--virtual_local_rank": "let the script choose its device by LOCAL_RANK",
}


class _Parser(argparse.ArgumentParser):
    """Reports errors in one line, with a suggestion."""

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments:"):
            word = message.split(":", 1)[1].split()[0].partition("=")[0]
            message += suggest(word, self._option_string_actions)
        raise LaunchError(f"{message}; see `lockstep launch --help`")

    def takes_value(self, name: str) -> bool:
        """Whether the next word belongs to this option, which may be abbreviated."""
        meant = [action for option, action in self._option_string_actions.items() if option.startswith(name)]
        return bool(meant) and meant[0].nargs != 0


def _spellings(name: str) -> tuple[str, ...]:
    dashed = "--" + name.removeprefix("--").replace("_", "-")
    return (name,) if dashed == name else (name, dashed)


def _make_parser() -> _Parser:
    parser = _Parser(
        prog="lockstep launch",
        usage="lockstep launch [options] script.py [args ...]",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        *_spellings("--nproc_per_node"),
        "--nproc",
        dest="nproc",
        default="1",
        metavar="N",
        help="processes on this host: a number (default: %(default)s), gpu, cpu, or auto",
    )
    parser.add_argument(*_spellings("--master_addr"), metavar="ADDR", help="address of host number 0")
    parser.add_argument(
        *_spellings("--master_port"), type=int, metavar="PORT", help="a port there (default: a free one, or 29500)"
    )
    parser.add_argument(
        *_spellings("--use_env"), action="store_true", help="pass no --local_rank; the script reads LOCAL_RANK"
    )
    parser.add_argument("-m", "--module", dest="is_module", action="store_true", help="run a module")
    parser.add_argument(
        *_spellings("--no_python"),
        action="store_true",
        help="run a program that is not a Python script; needs --use_env",
    )
    choice.add_arguments(parser)
    parser.add_argument("--logdir", metavar="DIR", help="write the output to DIR/rank<r>.log")
    parser.add_argument(*_spellings("--log_dir"), metavar="DIR", help="the same, if -r is given")
    parser.add_argument("-r", "--redirects", default="0", metavar="WHAT", help="if not 0, write files to --log_dir")
    parser.add_argument(*_spellings("--max_restarts"), type=int, metavar="K", help="restart all ranks, up to K times")
    parser.add_argument(
        *_spellings("--shutdown_timeout"),
        dest="grace_s",
        type=float,
        metavar="SECONDS",
        help="time from SIGTERM to SIGKILL",
    )
    hosts = parser.add_argument_group("several hosts", "run the same command on each, with its --node_rank")
    add_arguments(hosts)
    parser.add_argument("-t", dest="tee", help=argparse.SUPPRESS)
    parser.add_argument(*_spellings("--run_path"), action="store_true", help=argparse.SUPPRESS)
    for name, _ in _WITHOUT_EFFECT:
        parser.add_argument(*_spellings(name), help=argparse.SUPPRESS)
    for name in _REFUSED:
        action = "store_true" if name == "--virtual_local_rank" else "store"
        parser.add_argument(*_spellings(name), action=action, help=argparse.SUPPRESS)
    parser.add_argument("training_script", help="the script, followed by its arguments")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the options of torch's launcher; they keep its names, unless the table above says otherwise. Local.

    Raises:
        LaunchError: options are unknown, incompatible or refused.
    """
    parser = _make_parser()
    chosen = parser.parse_args(_spelled_out(parser, arguments))
    for name, advice in _REFUSED.items():
        if getattr(chosen, name[2:]):
            raise LaunchError(f"{name} is not supported here; {advice}")
    if chosen.no_python and not chosen.use_env:
        raise LaunchError("--no_python needs --use_env: a program that is not a script takes no --local_rank")
    if chosen.no_python and chosen.is_module:
        raise LaunchError("--no_python and --module are mutually exclusive: a module is run by Python")
    ignored = [(name, why) for name, why in _WITHOUT_EFFECT if getattr(chosen, name[2:]) is not None]
    if chosen.log_dir is not None and chosen.redirects == "0":
        ignored.append(("--log_dir", "output goes to files only with -r 3, as with torch's launcher"))
        chosen.log_dir = None
    for name, why in ignored:
        say(f"lockstep: warning: {name} has no effect: {why}\n")
    return chosen


def _spelled_out(parser: _Parser, arguments: Sequence[str]) -> list[str]:
    """Turn `--use_env=True`, as in torch's documentation, into a flag, and drop `=False`; stops at the script."""
    words: list[str] = []
    rest = list(arguments)
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        is_use_env = name.replace("_", "-") == "--use-env"
        if not is_use_env or not equals:
            words.append(word)
        elif value.lower() in ("1", "true", "yes"):
            words.append(name)
        if not equals and rest and parser.takes_value(name):
            words.append(rest.pop(0))
    return [*words, *rest]


def main(arguments: Sequence[str]) -> int:
    """Run the command line of `torch.distributed.launch`.

    Args:
        arguments: the words after `lockstep launch`.

    Returns:
        The exit code of the job.

    Raises:
        LaunchError: the job cannot be started as requested.
    """
    chosen = parse(arguments)
    options = _host_options(chosen)
    hosts = hosts_from(options)
    config = _config(chosen, {name: value for name, value in vars(options).items() if value is not None})
    if hosts is None:
        return launch_job(config)
    return start_on_hosts(config, hosts)


def _host_options(chosen: argparse.Namespace) -> argparse.Namespace:
    """The options for `hosts_from`, with the defaults of torch's launcher; the rest are fields of `LaunchConfig`."""
    options = argparse.Namespace(**{name: getattr(chosen, name) for name in (*OPTIONS, "master_addr", "master_port")})
    options.max_restarts = chosen.max_restarts
    if chosen.standalone:
        return options
    if options.rdzv_endpoint is not None:
        # torch's launcher uses the address for its static rendezvous only.
        options.master_addr = options.master_port = None
    elif options.nnodes not in ("1", "1:1"):
        options.master_addr = options.master_addr or LaunchConfig.master_addr
        options.node_rank = options.node_rank or 0
    return options


def _config(chosen: argparse.Namespace, settings: dict[str, object]) -> LaunchConfig:
    script, args = chosen.training_script, tuple(chosen.training_script_args)
    is_module, option = chosen.is_module, None
    if chosen.no_python:
        if shutil.which(script) is None:
            raise LaunchError(f"program {script!r} not found; give its path, or leave out --no_python for a script")
        script, args, is_module = _PROGRAM_RUNNER, (script, *args), True
    elif not chosen.use_env:
        option = find_spelling(script, is_module).option
    log_dir = chosen.logdir if chosen.logdir is not None else chosen.log_dir
    settings["environment"] = variables = env.snapshot()
    choice.tell_ranks(variables, chosen.compat, script, is_module, args)
    if chosen.grace_s is not None:
        settings["grace_s"] = settings["stop_grace_s"] = chosen.grace_s
    return LaunchConfig(
        target=script,
        args=args,
        nproc=chosen.nproc,
        is_module=is_module,
        prefix=False,
        log_dir=log_dir,
        local_rank_option=option,
        **settings,  # type: ignore[arg-type]
    )
