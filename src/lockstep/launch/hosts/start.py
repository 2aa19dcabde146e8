"""Starts a job on several hosts. Imports torch when it is called, so that jobs on one host do not need it."""

from __future__ import annotations

from lockstep import env
from lockstep.launch.config import LaunchConfig
from lockstep.launch.hosts.options import HostsConfig

__all__ = ["start_on_hosts"]


def start_on_hosts(config: LaunchConfig, hosts: HostsConfig) -> int:
    """`launch_on_hosts`, with torch's log messages in the launcher turned off.

    torch's C++ code writes to stderr by itself: an unreachable store produces a line from the socket, lines from the
    store and a C++ stack, in addition to the launcher's own single line. The variable that controls this is only read
    when torch is imported, so it is set for just that time: the ranks have torch's default. If the user has set it,
    that value applies to the launcher too.

    Args:
        config: what to run, and the ranks of this host.
        hosts: the hosts of the job, according to this host's options.

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
