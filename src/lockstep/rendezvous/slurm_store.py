"""The store of the ranks of a Slurm step, to which srun gives numbers but no address."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from lockstep import env
from lockstep.rendezvous import folder, slurm, tcp
from lockstep.topology import Topology
from lockstep.topology.slurm import read_step
from lockstep.torch_private.stores import Store

__all__ = ["meet_in_slurm"]


def meet_in_slurm(variables: Mapping[str, str], topology: Topology, timeout: timedelta) -> Store | None:
    """Connect the ranks of a Slurm step to a store. Collective.

    On one host they meet in a folder and open no port. Between hosts, or if MASTER_ADDR or MASTER_PORT is set, rank 0
    listens: on the first node of the step and a port computed from job and step ids, unless these variables say
    otherwise.

    Args:
        variables: the environment.
        topology: this rank's topology, as read from the environment.
        timeout: time until a missing rank is an error.

    Returns:
        The store; None outside of a step, or if the ranks are not those of the step.

    Raises:
        RendezvousError: a rank did not come, or rank 0's host has no address.
    """
    step = read_step(variables) if topology.launcher == "slurm" else None
    if step is None:
        return None
    address, port = env.MASTER_ADDR.get(variables), env.MASTER_PORT.get(variables)
    if topology.num_nodes == 1 and address is None and port is None:
        return folder.open_store(slurm.rendezvous_name(step), topology.rank, topology.world_size, timeout)
    return tcp.open_store(
        address if address is not None else slurm.master_address(step),
        port if port is not None else slurm.master_port(step),
        topology.rank,
        topology.world_size,
        timeout,
    )
