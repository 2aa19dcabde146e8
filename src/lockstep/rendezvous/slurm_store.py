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
    """The store of the ranks of a Slurm step. Collective.

    On one host they meet in a folder and open no port. Between hosts, or where MASTER_ADDR or MASTER_PORT is set, rank
    0 listens: on the first node of the step and a port made of the numbers of job and step, unless these say
    otherwise.

    Args:
        variables: the environment.
        topology: this rank's, as read from them.
        timeout: until a rank that does not come is an error.

    Returns:
        None outside of a step, or where the ranks have nothing to do with it.

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
