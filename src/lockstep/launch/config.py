"""What to start and how: the options of one job, checked before anything is started."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import math
import os
import re
import shlex
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.errors import LaunchError
from lockstep.launch.control_groups import available_mib
from lockstep.launch.environment import visible_cores, visible_gpus

if TYPE_CHECKING:
    from lockstep.launch.root_cause import RankFailure

__all__ = ["LaunchConfig", "check_target", "resolve_nproc"]

# Minimum memory of a rank that imports torch; and the number of ranks that may always be started.
_MIB_OF_RANK, _FEW_RANKS = 64, 16


@dataclass(frozen=True)
class LaunchConfig:
    """One job on this host.

    Attributes:
        target: path of a script (or of a folder or zip file with a `__main__.py`), or name of a module.
        args: passed on unchanged.
        nproc: number of ranks, "auto" (GPUs if there are any, else cores), "gpu" or "cpu".
        is_module: `target` is a module, run as `python -m` does.
        prefix: put `[rank] ` before every line. If False, ranks write to the launcher's own stdout and stderr.
        all_bars: on a terminal, show the progress bars of all ranks, not only of the first.
        log_dir: folder for one file per rank, rank<r>.log, which then gets stdout and stderr. Created if missing.
        max_restarts: how often to start all ranks again after a failure.
        grace_s: seconds from asking a rank to stop (SIGTERM) until SIGKILL, and until a rank that raised is asked to
            stop.
        stop_grace_s: like `grace_s`, for ranks that were told to stop by a signal to this launcher and save before they
            end (`World.should_stop`); as long as Slurm, Kubernetes and torchrun give a job.
        settle_s: seconds that the other ranks get, after a failure, to report what they lost.
        stacks_on_timeout: when a rank was late, print the stacks of all ranks before they are stopped.
        master_addr: MASTER_ADDR for the ranks.
        master_port: MASTER_PORT for the ranks; None for a free one, a new one for every attempt.
        environment: variables for the ranks to start from; None for the launcher's own.
        local_rank_option: an option, such as `--local_rank`, that each rank gets with its local rank before `args`;
            None for no such option.
        on_end: called with an attempt's private folder after its ranks have ended, before the folder is removed.
        on_failure: called with the failures of the last attempt, the root cause first, instead of printing a summary.
        explained_code: exit code of ranks that have already told the user what is wrong: no failure summary follows.
        forks: fork the ranks from this process, which has imported what they need; see `forked.py`.
        warns_unjoined: warn at a successful end if several ranks imported torch and none joined a process group.
    """

    target: str
    args: tuple[str, ...] = ()
    nproc: int | str = "auto"
    is_module: bool = False
    prefix: bool = True
    all_bars: bool = False
    log_dir: str | None = None
    max_restarts: int = 0
    grace_s: float = 5.0
    stop_grace_s: float = 30.0
    settle_s: float = 1.0
    stacks_on_timeout: bool = False
    master_addr: str = "127.0.0.1"
    master_port: int | None = None
    environment: Mapping[str, str] | None = None
    local_rank_option: str | None = None
    on_end: Callable[[Path], None] | None = None
    on_failure: Callable[[list[RankFailure]], None] | None = None
    explained_code: int | None = None
    forks: bool = False
    warns_unjoined: bool = True

    @property
    def rehearsable(self) -> str | None:
        """Target and arguments as typed after `lockstep rehearse`; None if this is a rehearsal."""
        if self.on_end is not None:
            return None
        return shlex.join([*(["-m"] if self.is_module else []), self.target, *self.args])

    def args_of(self, local_rank: int) -> tuple[str, ...]:
        """The arguments of the target on one rank."""
        return self.args if self.local_rank_option is None else (f"{self.local_rank_option}={local_rank}", *self.args)

    def check(self) -> None:
        """Reject invalid options before anything is started.

        Raises:
            LaunchError: names the option, its value and what is expected.
        """
        check_target(self.target, self.is_module)
        if self.max_restarts < 0:
            raise LaunchError(f"max_restarts is {self.max_restarts}; expected 0 or more")
        for name, value in (("grace", self.grace_s), ("grace", self.stop_grace_s), ("settle_s", self.settle_s)):
            if not (math.isfinite(value) and value >= 0):
                raise LaunchError(f"{name} is {value}; expected a number of seconds, 0 or more")
        if self.master_port is not None and not 1 <= self.master_port <= 65535:
            raise LaunchError(f"master_port is {self.master_port}; expected 1 to 65535")


def resolve_nproc(nproc: int | str, variables: Mapping[str, str]) -> int:
    """The number of ranks.

    Args:
        nproc: a number, as int or text, or "auto", "gpu" or "cpu".
        variables: the environment, for CUDA_VISIBLE_DEVICES.

    Raises:
        LaunchError: not a number, less than one, or "gpu" where there is none.

    >>> resolve_nproc("3", {})
    3
    """
    text = str(nproc).strip().lower()
    if text in ("auto", "gpu"):
        gpus = visible_gpus(variables)
        if gpus > 0:
            return gpus
        if text == "gpu":
            raise LaunchError("nproc is 'gpu', but there is no GPU here or CUDA_VISIBLE_DEVICES hides them all")
        return visible_cores()
    if text == "cpu":
        return visible_cores()
    try:
        number = int(text)
    except ValueError:
        raise LaunchError(
            f"nproc is {str(nproc)!r}; expected a number of processes, or 'auto' for one per GPU, else one per core"
        ) from None
    if number < 1:
        raise LaunchError(f"nproc is {number}; expected at least 1 process")
    _check_memory(number)
    return number


def _check_memory(number: int) -> None:
    """Refuse a number of ranks with which the system would only page, or kill processes at random.

    Raises:
        LaunchError: there is not enough memory for their interpreters and torch.
    """
    free_mib = available_mib() if number > _FEW_RANKS else None
    if free_mib is not None and number * _MIB_OF_RANK > free_mib:
        raise LaunchError(
            f"nproc is {number}: these ranks need {number * _MIB_OF_RANK >> 10} GiB even without a model, but "
            f"{free_mib >> 10} GiB are free here; start at most {max(_FEW_RANKS, free_mib // _MIB_OF_RANK)}"
        )


def _has_module(name: str) -> bool:
    """Whether the outermost package of a dotted name can be found; imports nothing."""
    outermost = name.partition(".")[0]
    if not outermost or os.sep in outermost:
        return False
    # `python -m` searches the current folder first, unlike a console script.
    if importlib.machinery.PathFinder.find_spec(outermost, [os.getcwd()]) is not None:
        return True
    try:
        return importlib.util.find_spec(outermost) is not None
    except (ImportError, ValueError):
        return False


def check_target(target: str, is_module: bool) -> None:
    """Check that the target exists and can be run.

    Raises:
        LaunchError: no such script or module, or a folder without `__main__.py`; with a suggestion.
    """
    if is_module:
        if not _has_module(target):
            hint = "; it is a file: leave out -m" if os.path.exists(target) else ""
            raise LaunchError(f"module {target!r} not found{hint}")
        return
    if os.path.isdir(target):
        if not os.path.isfile(os.path.join(target, "__main__.py")):
            raise LaunchError(f"{target!r} is a folder without a __main__.py; name the script in it to run")
    elif not os.path.exists(target):
        raise LaunchError(f"script {target!r} not found in {os.getcwd()}{_hint_for_missing(target)}")
    elif not os.access(target, os.R_OK):
        raise LaunchError(f"script {target!r} cannot be read; check its permissions")
    elif zipfile.is_zipfile(target):
        with zipfile.ZipFile(target) as archive:
            if "__main__.py" not in archive.namelist():
                raise LaunchError(f"{target!r} is a zip file without a __main__.py")


def _hint_for_missing(target: str) -> str:
    if re.fullmatch(r"python[0-9.]*", os.path.basename(target)):
        return "; leave it out: the ranks run the Python that lockstep runs on"
    if os.path.exists(f"{target}.py"):
        return f"; did you mean {target}.py?"
    if _has_module(target):
        return f"; it looks like a module: put -m before it (lockstep run -m {target})"
    return ""
