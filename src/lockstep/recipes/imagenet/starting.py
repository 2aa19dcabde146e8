"""Determines who starts the processes, from the options of PyTorch's example and `--strategy`. Does not import torch.

    --strategy ddp, apex, horovod   Lockstep's launcher: --nproc ranks on this host, unless another launcher is used
    --strategy single, dp           one process
    --strategy spawn                one process per host, which starts its ranks (torch.multiprocessing.spawn);
                                    --world-size then counts hosts and --rank numbers them, as in the example with
                                    --multiprocessing-distributed
    --strategy slurm                srun: every task is a rank
    --world-size N --rank R         without any of these: this process is rank R of N, as in the example

[Note: places] The example's commands contain FREEPORT and IP_OF_NODE0, to be replaced by the user. On one host they
need not be replaced: no other host has to know the port, so a free one is chosen.
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
    """The processes that `lockstep train` starts.

    Attributes:
        nproc: number of processes on this host; None if none are started, because this process is the rank.
        extra: arguments to add to those given.
    """

    nproc: int | str | None
    extra: tuple[str, ...] = ()


def choose_strategy(options: argparse.Namespace) -> str:
    """The strategy selected by the options.

    Raises:
        InputError: they contradict each other.
    """
    chosen: str | None = options.strategy
    if options.multiprocessing_distributed and chosen not in (None, "spawn"):
        raise InputError(f"--multiprocessing-distributed is --strategy spawn: leave it out for {chosen}")
    if options.gpu is not None and not options.multiprocessing_distributed and chosen not in (None, "single"):
        raise InputError(f"--gpu {options.gpu} means one process on that GPU: leave it out to train on all of them")
    if chosen is not None:
        return chosen
    if options.multiprocessing_distributed:
        return "spawn"
    return "single" if options.gpu is not None and not _is_given_a_rank(options) else "ddp"


def start(options: argparse.Namespace, nproc: int | str) -> Start:
    """The processes that `lockstep train` starts for these options.

    Args:
        options: parsed options.
        nproc: requested number of processes.

    Raises:
        InputError: as `choose_strategy` and `resolve_config`; or `--strategy slurm` outside of a Slurm step.
    """
    strategy = choose_strategy(options)
    if options.resume is None:
        resolve_config(options)  # errors raised here are reported once
    if strategy == "slurm":
        if read_slurm(env.snapshot()) is None:
            raise InputError(
                "--strategy slurm is for tasks started by srun, and this process is not one: use `srun "
                "--ntasks-per-node=4 lockstep train imagenet --strategy slurm …`"
            )
        return Start(None)
    if strategy in _SPAWNED_HERE:
        return Start(1, () if strategy == "single" else ("--processes", str(nproc)))
    return Start(None) if _is_given_a_rank(options) else Start(nproc)


def meeting_url(options: argparse.Namespace, num_hosts: int) -> str:
    """The rendezvous address of processes that were not started by a launcher. See [Note: places].

    Raises:
        InputError: it is not given, and there are several hosts.
    """
    url: str | None = options.dist_url
    if url is None or any(word in url for word in _PLACEHOLDERS):
        if num_hosts > 1:
            raise InputError(
                f"--dist-url is {url or 'not given'}, but {num_hosts} hosts need one: on each of them, use "
                "tcp://ADDRESS:PORT, with the address of host 0 and a free port there"
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
        raise InputError(f"--dist-url is {url!r}, without a port; expected tcp://ADDRESS:PORT")
    return url


def _is_given_a_rank(options: argparse.Namespace) -> bool:
    """Whether the example's options tell this process its rank."""
    return options.world_size > 1 and not options.multiprocessing_distributed and options.strategy != "spawn"
