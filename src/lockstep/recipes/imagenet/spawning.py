"""`--strategy spawn`: this process starts the ranks of its host with `torch.multiprocessing.spawn`."""

from __future__ import annotations

import argparse
import sys

import torch
from torch.multiprocessing.spawn import ProcessExitedException
from torch.multiprocessing.spawn import spawn as spawn_processes

from lockstep import env
from lockstep.errors import InputError
from lockstep.launch.config import resolve_nproc
from lockstep.launch.environment import visible_cores
from lockstep.recipes.imagenet.starting import meeting_url
from lockstep.recipes.imagenet.training import run

__all__ = ["spawn"]


def spawn(options: argparse.Namespace) -> int:
    """Start the processes of this host, and wait for them.

    Args:
        options: `world_size` hosts, of which this is number `rank`; `processes` on each, "auto" for one per GPU, or per
            core without GPUs.

    Returns:
        0; or 2 if the options cannot be used.

    Raises:
        torch.multiprocessing.ProcessExitedException, ProcessRaisedException: a process failed.
    """
    try:
        num_hosts, host = _hosts(options)
        url = meeting_url(options, num_hosts)
    except InputError as mistake:
        print(f"lockstep train imagenet: error: {mistake}", file=sys.stderr, flush=True)
        return 2
    per_host = _processes(options)
    try:
        spawn_processes(  # type: ignore[no-untyped-call]
            _work, args=(options, host, num_hosts, per_host, url), nprocs=per_host
        )
    except ProcessExitedException as ended:
        if ended.exit_code == 2:  # reported by rank 0
            return 2
        raise
    return 0


def _processes(options: argparse.Namespace) -> int:
    # From torch, not the environment, because `lockstep rehearse` simulates GPUs.
    if options.processes == "auto" and torch.cuda.is_available():
        return torch.cuda.device_count()
    return resolve_nproc(options.processes, env.snapshot())


def _hosts(options: argparse.Namespace) -> tuple[int, int]:
    """The number of hosts, and the number of this one.

    Raises:
        InputError: the number of this host is out of range.
    """
    num_hosts, host = max(options.world_size, 1), options.rank
    if options.dist_url == "env://":  # as in the reference example
        num_hosts = env.WORLD_SIZE.get() or num_hosts if options.world_size == -1 else num_hosts
        host = env.RANK.get() if host == -1 else host
    if host in (None, -1) and num_hosts == 1:
        host = 0
    if host is None or not 0 <= host < num_hosts:
        raise InputError(
            f"--rank is {host} of --world-size {num_hosts}: with --strategy spawn these count hosts, from 0"
        )
    return num_hosts, host


def _work(local_rank: int, options: argparse.Namespace, host: int, num_hosts: int, per_host: int, url: str) -> None:
    """The function of each rank."""
    env.RANK.set(host * per_host + local_rank)
    env.WORLD_SIZE.set(num_hosts * per_host)
    env.LOCAL_RANK.set(local_rank)
    env.LOCAL_WORLD_SIZE.set(per_host)
    env.GROUP_RANK.set(host)
    env.GROUP_WORLD_SIZE.set(num_hosts)
    # A launcher gave its threads to this one process, but there are several.
    torch.set_num_threads(min(torch.get_num_threads(), max(1, visible_cores() // per_host)))
    code = run(options, url)
    if code:
        sys.exit(code)
