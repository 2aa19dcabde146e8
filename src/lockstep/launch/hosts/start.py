"""Starts a job on several hosts. Imports torch when it is called, so that jobs on one host do not wait for it."""

from __future__ import annotations

from lockstep import env
from lockstep.launch.config import LaunchConfig
from lockstep.launch.hosts.options import HostsConfig

__all__ = ["start_on_hosts"]


def start_on_hosts(config: LaunchConfig, hosts: HostsConfig) -> int:
    """`launch_on_hosts`, with the launcher's own torch quiet.

    torch's C++ parts write to stderr by themselves: a store that cannot be reached is a line of the socket's, lines of
    the store's and a C++ stack, among the launcher's own lines, which say the same in one. They read the variable for
    it when torch is imported and never again, so it is set just then: the ranks have torch's default. Where the user
    has set it, it counts for the launcher too.

    Args:
        config: what to run, and the ranks of this host.
        hosts: the hosts of the job, as this one was told.

    Returns:
        The exit code.
    """
    is_set = env.TORCH_CPP_LOG_LEVEL.get() is not None
    if not is_set:
        env.TORCH_CPP_LOG_LEVEL.set("FATAL")
    from lockstep.launch.hosts.job import launch_on_hosts

    if not is_set:
        env.TORCH_CPP_LOG_LEVEL.unset()
    return launch_on_hosts(config, hosts)
