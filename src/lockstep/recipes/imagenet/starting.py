"""Who starts the processes, from the options of the reference example and `--strategy`. Imports no torch.

    --strategy ddp, apex, horovod   Lockstep's launcher: --nproc ranks on this host, or any launcher that is there
    --strategy single, dp           one process
    --strategy spawn                one process per host, which starts those of its host (torch.multiprocessing.spawn);
                                    --world-size then counts hosts and --rank numbers them, as in the example with
                                    --multiprocessing-distributed
    --strategy slurm                srun: every task is a rank
    --world-size N --rank R         without any of these: this process is rank R of N, as in the example

[Note: places] The example's commands have FREEPORT and IP_OF_NODE0 in them, for a person to replace. On one host they
need not be replaced: nobody else has to know the port, so one that is free is taken.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from urllib.parse import urlsplit

from lockstep import env
from lockstep.errors import InputError
from lockstep.launch.free_port import find_free_port
from lockstep.recipes.imagenet.options import resolve_config
from lockstep.topology.slurm import read_slurm

__all__ = ["Start", "choose_strategy", "meeting_url", "start"]

_PLACEHOLDERS = ("FREEPORT", "IP_OF_NODE0")
_SPAWNED_HERE = frozenset({"single", "dp", "spawn"})


@dataclass(frozen=True)
class Start:
    """What `lockstep train` starts.

    Attributes:
        nproc: processes on this host; None: none, because this one is the rank.
        extra: words for them, besides those that were given.
    """

    nproc: int | str | None
    extra: tuple[str, ...] = ()


def choose_strategy(options: argparse.Namespace) -> str:
    """The strategy that options mean.

    Raises:
        InputError: they contradict each other.
    """
    chosen: str | None = options.strategy
    if options.multiprocessing_distributed and chosen not in (None, "spawn"):
        raise InputError(
            f"--multiprocessing-distributed starts processes as --strategy spawn does: leave it out for {chosen}"
        )
    if options.gpu is not None and not options.multiprocessing_distributed and chosen not in (None, "single"):
        raise InputError(f"--gpu {options.gpu} means one process on that GPU: leave it out to train on all of them")
    if chosen is not None:
        return chosen
    if options.multiprocessing_distributed:
        return "spawn"
    return "single" if options.gpu is not None and not _is_given_a_rank(options) else "ddp"


def start(options: argparse.Namespace, nproc: int | str) -> Start:
    """How many processes `lockstep train` starts for these options.

    Args:
        options: as parsed.
        nproc: what was asked for.

    Raises:
        InputError: as `choose_strategy` and `resolve_config`; or `--strategy slurm` outside of a step of Slurm.
    """
    strategy = choose_strategy(options)
    if options.resume is None:
        resolve_config(options)  # what is said here, is said once
    if strategy == "slurm":
        if read_slurm(env.snapshot()) is None:
            raise InputError(
                "--strategy slurm is for tasks that srun has started, and this process is none: write `srun "
                "--ntasks-per-node=4 lockstep train imagenet --strategy slurm …`"
            )
        return Start(None)
    if strategy in _SPAWNED_HERE:
        return Start(1, () if strategy == "single" else ("--processes", str(nproc)))
    return Start(None) if _is_given_a_rank(options) else Start(nproc)


def meeting_url(options: argparse.Namespace, num_hosts: int) -> str:
    """Where processes meet that were not started by a launcher. See [Note: places].

    Raises:
        InputError: there are several hosts, and nobody said where.
    """
    url: str | None = options.dist_url
    if url is None or any(word in url for word in _PLACEHOLDERS):
        if num_hosts > 1:
            raise InputError(
                f"--dist-url is {url or 'not given'}, but {num_hosts} hosts must meet: give all of them "
                "tcp://ADDRESS:PORT, with the address of host 0 and a port that is free there"
            )
        return f"tcp://127.0.0.1:{find_free_port()}"
    parts = urlsplit(url)
    if parts.scheme not in ("tcp", "file", "env"):
        raise InputError(f"--dist-url is {url!r}; expected tcp://ADDRESS:PORT, file:///PATH or env://")
    try:
        has_port = parts.port is not None
    except ValueError:
        has_port = False
    if parts.scheme == "tcp" and not (parts.hostname and has_port):
        raise InputError(f"--dist-url is {url!r}; expected a port in it, tcp://ADDRESS:PORT")
    return url


def _is_given_a_rank(options: argparse.Namespace) -> bool:
    """Whether this process was told which rank it is, by the example's options."""
    return options.world_size > 1 and not options.multiprocessing_distributed and options.strategy != "spawn"
