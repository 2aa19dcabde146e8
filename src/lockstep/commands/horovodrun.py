"""`lockstep horovodrun`: horovodrun's command line, on Lockstep's launcher.

Its options:

=====================================================  ==============================================================
-np, --num-proc, -H, --hosts, -hostfile, --hostfile    ranks on this host; for others, the commands that start them
--min-np, --max-np, --reset-limit                      elastic: all ranks restart from their last commit
--host-discovery-script, --slots-per-host              run once, to find hosts and slots
--output-filename                                      a folder with one file per rank
--timeline-filename, --timeline-mark-cycles            HOROVOD_TIMELINE, HOROVOD_TIMELINE_MARK_CYCLES
--[no-]stall-check, --stall-check-*-time-seconds       HOROVOD_STALL_…
--log-level                                            LOCKSTEP_LOG_LEVEL
--config-file                                          read if PyYAML is installed; unknown keys are reported
--check-build, --verbose, --version                    as in horovodrun
--gloo                                                 accepted; MPI is never used here
--mpi, --jsrun                                         refused: mpirun, jsrun and srun start the script themselves
all others                                             accepted and ignored, with one line that says so
=====================================================  ==============================================================

The ranks get `HOROVOD_RANK`, `HOROVOD_SIZE`, `HOROVOD_LOCAL_RANK`, `HOROVOD_LOCAL_SIZE`, `HOROVOD_CROSS_RANK`,
`HOROVOD_CROSS_SIZE` and `HOROVOD_HOSTNAME`, in addition to the variables of `lockstep run`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from lockstep import env
from lockstep.commands.horovodrun_config import CONTROLLERS, read_config
from lockstep.commands.parsing import Parser
from lockstep.compat.horovod import __version__
from lockstep.compat.horovod.runner import is_this_host, parse_hosts
from lockstep.compat.legacy import choice
from lockstep.errors import InputError, LaunchError
from lockstep.launch.config import LaunchConfig
from lockstep.launch.screen import say
from lockstep.launch.supervisor import launch_job

__all__ = ["main", "plan"]

_DESCRIPTION = """\
Start a Horovod program with horovodrun's options. `import horovod.torch` imports Lockstep's version if Horovod is not
installed. Options after the command belong to the command.
"""
_EPILOG = """\
examples:
  lockstep horovodrun -np 4 python train.py
  lockstep horovodrun -np 4 -H localhost:4 --timeline-filename trace.json python train.py --epochs 10
  lockstep horovodrun -np 2 --min-np 2 --reset-limit 5 python elastic_train.py
"""
_ELASTIC_RESTARTS = 100  # Horovod has no limit.
_FOLDER = "horovodrun-elastic-"
_DISCOVERY_TIMEOUT_S = 60.0
_PORT = 29500

# Accepted and ignored: name -> number of values.
_TUNING = {
    "--disable-cache": 0,
    "--start-timeout": 1,
    "--network-interfaces": 1,
    "--network-interface": 1,
    "-p/--ssh-port": 1,
    "-i/--ssh-identity-file": 1,
    "--fusion-threshold-mb": 1,
    "--cycle-time-ms": 1,
    "--cache-capacity": 1,
    "--hierarchical-allreduce": 0,
    "--no-hierarchical-allreduce": 0,
    "--hierarchical-allgather": 0,
    "--no-hierarchical-allgather": 0,
    "--torus-allreduce": 0,
    "--no-torus-allreduce": 0,
    "--autotune": 0,
    "--no-autotune": 0,
    "--autotune-log-file": 1,
    "--autotune-warmup-samples": 1,
    "--autotune-steps-per-sample": 1,
    "--autotune-bayes-opt-max-samples": 1,
    "--autotune-gaussian-process-noise": 1,
    "--elastic-timeout": 1,
    "--blacklist-cooldown-range": 2,
    "--mpi-threads-disable": 0,
    "--no-mpi-threads-disable": 0,
    "--mpi-args": 1,
    "--tcp": 0,
    "--binding-args": 1,
    "--num-nccl-streams": 1,
    "--thread-affinity": 1,
    "--gloo-timeout-seconds": 1,
    "--log-with-timestamp": 0,
    "--log-without-timestamp": 0,
    "--log-hide-timestamp": 0,
    "--no-log-hide-timestamp": 0,
    "-prefix-timestamp/--prefix-output-with-timestamp": 0,
}


def _make_parser() -> Parser:
    parser = Parser(
        prog="lockstep horovodrun",
        usage="lockstep horovodrun -np N [options] command [args ...]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    parser.add_argument("-v", "--version", action="version", version=__version__)
    parser.add_argument("-np", "--num-proc", dest="num_proc", type=int, metavar="N", help="number of ranks")
    parser.add_argument("-cb", "--check-build", action="store_true", help="show what is built in, and exit")
    hosts = parser.add_mutually_exclusive_group()
    hosts.add_argument("-H", "--hosts", metavar="HOST:SLOTS,…", help="hosts to start ranks on (default: this host)")
    hosts.add_argument("-hostfile", "--hostfile", metavar="FILE", help="the same, from lines `host slots=N`")
    hosts.add_argument("--host-discovery-script", metavar="PROGRAM", help="the same, from printed lines `host:slots`")
    parser.add_argument("--slots-per-host", type=int, metavar="N", help="slots of hosts listed without a number")
    parser.add_argument(
        "--min-np", "--min-num-proc", dest="min_np", type=int, metavar="N", help="elastic: fewest ranks"
    )
    parser.add_argument("--max-np", "--max-num-proc", dest="max_np", type=int, metavar="N", help="elastic: most ranks")
    parser.add_argument("--reset-limit", type=int, metavar="N", help="elastic: how many times ranks may restart")
    parser.add_argument("--output-filename", metavar="DIR", help="write the output to DIR/rank<r>.log")
    parser.add_argument("--config-file", metavar="FILE", help="options from a YAML file; the command line wins")
    parser.add_argument("--timeline-filename", metavar="FILE", help="write a Chrome trace")
    _add_switch(parser, "timeline-mark-cycles", "mark each negotiation round in it")
    _add_switch(parser, "stall-check", "warn about operations that some ranks do not call (default: yes)")
    parser.add_argument(
        "--stall-check-warning-time-seconds", type=float, metavar="S", help="delay before the warning (default: 60)"
    )
    parser.add_argument(
        "--stall-check-shutdown-time-seconds", type=float, metavar="S", help="delay before it is an error"
    )
    parser.add_argument("--log-level", metavar="LEVEL", help="level of Lockstep's logger")
    parser.add_argument("--verbose", action="store_true", help="print what is started")
    parser.add_argument("--gloo", dest="use_gloo", action="store_true", help="accepted; there is no other controller")
    parser.add_argument("--mpi", dest="use_mpi", action="store_true", help="refused; says how to use MPI")
    parser.add_argument("--jsrun", dest="use_jsrun", action="store_true", help="refused; says how to use it")
    choice.add_arguments(parser)
    for names, num_values in _TUNING.items():
        spellings = names.split("/")
        if num_values:
            parser.add_argument(*spellings, nargs=num_values, help=argparse.SUPPRESS)
        else:
            parser.add_argument(*spellings, action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _add_switch(parser: argparse.ArgumentParser, name: str, text: str) -> None:
    parser.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=None, help=text)


def main(arguments: Sequence[str]) -> int:
    """Run the command.

    Args:
        arguments: the words after `lockstep horovodrun`.

    Returns:
        The exit code of the job.

    Raises:
        LaunchError: the job cannot be started as requested; for several hosts, gives the commands that start it.
    """
    parser = _make_parser()
    chosen = parser.parse_args(list(arguments))
    if chosen.check_build:
        print(_describe_build())
        return 0
    if chosen.config_file is not None:
        chosen = _with_config(parser, chosen, arguments)
    with _elastic_folder(_is_elastic(chosen)) as folder:
        config = plan(chosen, folder)
        if chosen.verbose:
            say(f"lockstep: {config.nproc} rank(s) of {shlex.join((config.target, *config.args))}\n")
        return launch_job(config)


def plan(chosen: argparse.Namespace, folder: str | None = None) -> LaunchConfig:
    """The job that these options describe.

    Args:
        chosen: parsed options.
        folder: folder for elastic states; None if the job is not elastic.

    Raises:
        LaunchError: options contradict each other or have no counterpart.
    """
    if chosen.use_mpi or chosen.use_jsrun:
        starter = "mpirun" if chosen.use_mpi else "jsrun"
        raise LaunchError(
            f"--{starter.removesuffix('run') if chosen.use_mpi else starter}: start the program with {starter} itself, "
            f"for instance `{starter} -np {chosen.num_proc or 'N'} {shlex.join(chosen.command)}`; hvd.init() finds its "
            "rank there, and hvd.init(comm=MPI.COMM_WORLD) communicates through MPI"
        )
    if not chosen.command:
        raise LaunchError("name a command to run; see `lockstep horovodrun --help`")
    num_proc = _choose_num_proc(chosen)
    _name_ignored(chosen)
    variables = env.snapshot()
    _set_variables(chosen, variables, num_proc)
    if folder is not None:
        env.LOCKSTEP_ELASTIC_FOLDER.set(folder, variables)
    target, args, is_module = _find_target(chosen.command)
    choice.tell_ranks(variables, chosen.compat, target, is_module, args)
    restarts = 0
    if _is_elastic(chosen):
        restarts = chosen.reset_limit if chosen.reset_limit is not None else _ELASTIC_RESTARTS
    return LaunchConfig(
        target=target,
        args=args,
        nproc=num_proc,
        is_module=is_module,
        log_dir=chosen.output_filename,
        max_restarts=restarts,
        environment=variables,
    )


def _is_elastic(chosen: argparse.Namespace) -> bool:
    given = (chosen.min_np, chosen.max_np, chosen.reset_limit, chosen.host_discovery_script)
    return any(value is not None for value in given)


def _choose_num_proc(chosen: argparse.Namespace) -> int:
    """Number of ranks to start on this host.

    Raises:
        LaunchError: no number is given, there are not enough slots, or other hosts are named.
    """
    num_proc = chosen.num_proc if chosen.num_proc is not None else chosen.min_np
    if num_proc is None:
        raise LaunchError("the number of ranks is missing: -np N")
    if num_proc < 1:
        raise LaunchError(f"-np is {num_proc}; expected at least 1")
    for name, bound in (("--min-np", chosen.min_np), ("--max-np", chosen.max_np)):
        if bound is not None and (bound > num_proc if name == "--min-np" else bound < num_proc):
            raise LaunchError(f"-np is {num_proc}, but {name} is {bound}")
    hosts = _find_hosts(chosen)
    if any(not is_this_host(name) for name, _ in hosts):
        raise LaunchError(_explain_hosts(hosts, num_proc, chosen))
    slots = sum(count for _, count in hosts)
    if hosts and slots < num_proc:
        raise LaunchError(
            f"-np is {num_proc}, but there are {slots} slots: {hosts}; raise the number of slots of a host"
        )
    return int(num_proc)


def _find_hosts(chosen: argparse.Namespace) -> list[tuple[str, int]]:
    """Names and slots; empty for this host."""
    if chosen.hosts is not None:
        lines = chosen.hosts.split(",")
    elif chosen.hostfile is not None:
        try:
            text = Path(chosen.hostfile).read_text()
        except OSError as error:
            raise LaunchError(f"--hostfile {chosen.hostfile}: {error.strerror}") from None
        lines = [line.partition("#")[0] for line in text.splitlines()]
    elif chosen.host_discovery_script is not None:
        lines = _discover(chosen.host_discovery_script).splitlines()
    else:
        return []
    items = [":".join(part.strip() for part in line.split("slots=")) for line in lines if line.strip()]
    default = chosen.slots_per_host or 1
    try:
        return parse_hosts(",".join(item if ":" in item else f"{item}:{default}" for item in items))
    except InputError as error:
        raise LaunchError(str(error)) from None


def _discover(program: str) -> str:
    try:
        done = subprocess.run(
            shlex.split(program), capture_output=True, text=True, timeout=_DISCOVERY_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise LaunchError(f"--host-discovery-script {program}: {error}") from None
    return done.stdout


def _explain_hosts(hosts: Sequence[tuple[str, int]], num_proc: int, chosen: argparse.Namespace) -> str:
    """The commands to run on several hosts, since this one does not log in to any."""
    first, left = hosts[0][0], num_proc
    shares = []
    for name, slots in hosts:
        share = min(slots, left)
        left -= share
        if share:
            shares.append((name, share))
    if left:
        return f"-np is {num_proc}, but there are {num_proc - left} slots: {list(hosts)}"
    command = list(chosen.command)
    if command and command[0].rpartition("/")[2].startswith("python"):
        command = command[1:]
    lines = [
        f"  on {name}: lockstep run --nproc {share} --nnodes {len(shares)} --node-rank {number} --master-addr {first} "
        f"--master-port {_PORT} {shlex.join(command)}"
        for number, (name, share) in enumerate(shares)
    ]
    return "\n".join(
        [
            "horovodrun would log in to other hosts by ssh, which Lockstep does not do. Run on each host:",
            *lines,
            "or on a cluster: lockstep run --slurm",
        ]
    )


def _name_ignored(chosen: argparse.Namespace) -> None:
    ignored = []
    for names in _TUNING:
        longest = names.split("/")[-1]
        if getattr(chosen, longest.lstrip("-").replace("-", "_")):
            ignored.append(longest)
    if ignored:
        say(f"lockstep: horovodrun's {', '.join(ignored)} have no counterpart in Lockstep and are ignored\n")


def _set_variables(chosen: argparse.Namespace, variables: dict[str, str], num_proc: int) -> None:
    env.HOROVOD_SIZE.set(num_proc, variables)  # With this, the launcher sets the others.
    if chosen.timeline_filename is not None:
        env.HOROVOD_TIMELINE.set(os.path.abspath(chosen.timeline_filename), variables)
    if chosen.timeline_mark_cycles:
        variables[env.HOROVOD_TIMELINE_MARK_CYCLES.name] = "1"
    if chosen.stall_check is False:
        variables[env.HOROVOD_STALL_CHECK_DISABLE.name] = "1"
    for seconds, variable in (
        (chosen.stall_check_warning_time_seconds, env.HOROVOD_STALL_CHECK_TIME_SECONDS),
        (chosen.stall_check_shutdown_time_seconds, env.HOROVOD_STALL_SHUTDOWN_TIME_SECONDS),
    ):
        if seconds is not None:
            variable.set(seconds, variables)
    if chosen.log_level is not None:
        level = {"TRACE": "DEBUG", "FATAL": "CRITICAL"}.get(chosen.log_level.upper(), chosen.log_level.upper())
        env.LOCKSTEP_LOG_LEVEL.set(level, variables)


def _find_target(command: Sequence[str]) -> tuple[str, tuple[str, ...], bool]:
    """What to start: the script or module if the command is Python, otherwise the program itself."""
    program, *rest = command
    if Path(program).name.startswith("python"):
        while rest and rest[0] in ("-u", "-B"):
            rest = rest[1:]
        if len(rest) > 1 and rest[0] == "-m":
            return rest[1], tuple(rest[2:]), True
        if rest and not rest[0].startswith("-"):
            return rest[0], tuple(rest[1:]), False
    elif program.endswith(".py") and os.path.isfile(program):
        return program, tuple(rest), False
    if shutil.which(program) is None:
        raise LaunchError(f"command {program!r} not found; give its path, or `python script.py`")
    return "lockstep.launch.program", tuple(command), True


def _with_config(parser: Parser, chosen: argparse.Namespace, arguments: Sequence[str]) -> argparse.Namespace:
    """The options, with those of the file added; the command line takes precedence."""
    words, unknown = read_config(chosen.config_file, parser._option_string_actions)
    if chosen.use_gloo or chosen.use_mpi or chosen.use_jsrun:
        words = [word for word in words if word not in CONTROLLERS.values()]
    if unknown:
        say(f"lockstep: --config-file {chosen.config_file}: {', '.join(unknown)} are not options and are ignored\n")
    return parser.parse_args([*words, *arguments])


@contextlib.contextmanager
def _elastic_folder(is_elastic: bool) -> Iterator[str | None]:
    """A folder for the states of this job. Also removes those left by killed commands."""
    if not is_elastic:
        yield None
        return
    base = Path(tempfile.gettempdir())
    for left in base.glob(f"{_FOLDER}*"):
        owner = left.name.removeprefix(_FOLDER).partition("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(left, ignore_errors=True)
    folder = tempfile.mkdtemp(prefix=f"{_FOLDER}{os.getpid()}-")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _describe_build() -> str:
    """The output of `horovodrun --check-build`."""
    hvd = importlib.import_module("lockstep.compat.horovod.torch")

    def box(is_there: object) -> str:
        return "[X]" if is_there else "[ ]"

    return "\n".join(
        [
            f"Horovod v{__version__} (Lockstep's):",
            "",
            "Available Frameworks:",
            f"    {box(False)} TensorFlow",
            f"    {box(True)} PyTorch",
            f"    {box(False)} MXNet",
            "",
            "Available Controllers:",
            f"    {box(hvd.mpi_built())} MPI",
            f"    {box(hvd.gloo_built())} Gloo",
            f"    {box(True)} Lockstep (shared memory)",
            "",
            "Available Tensor Operations:",
            f"    {box(hvd.nccl_built())} NCCL",
            f"    {box(hvd.ddl_built())} DDL",
            f"    {box(hvd.ccl_built())} CCL",
            f"    {box(hvd.mpi_built())} MPI",
            f"    {box(hvd.gloo_built())} Gloo",
            f"    {box(True)} Lockstep (shared memory)",
        ]
    )
