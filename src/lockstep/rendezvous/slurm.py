"""The rendezvous of a Slurm step, which every task computes independently. No torch.

[Note: port] `20000 + (SLURM_JOB_ID + 997 * SLURM_STEP_ID) mod 12768`. It lies in 20000 … 32767, below Linux's ephemeral
ports. Consecutive jobs get different ports, up to 12768 of them, and so do the steps of a job, because 997 and 12768
have no common divisor.
"""

from __future__ import annotations

import os
import socket
import subprocess

from lockstep.errors import RendezvousError
from lockstep.topology.slurm import SlurmStep

__all__ = ["master_address", "master_port", "rendezvous_name"]

_FIRST_PORT = 20_000
_NUM_PORTS = 32_768 - _FIRST_PORT
_STEP_STRIDE = 997
_ASK_SLURM_TIMEOUT_S = 30.0


def master_port(step: SlurmStep) -> int:
    """The port of rank 0's store. See [Note: port]."""
    return _FIRST_PORT + (step.job_id + _STEP_STRIDE * step.step_id) % _NUM_PORTS


def rendezvous_name(step: SlurmStep) -> str:
    """A name that is unique to this step on this host, even among restarts of the same job."""
    return f"lockstep-{os.geteuid()}-slurm-{step.job_id}.{step.step_id}.{step.restart_count}"


def master_address(step: SlurmStep) -> str:
    """The name or address of the step's first node, where rank 0 runs. Local; may query the name service and Slurm.

    Slurm's node names may be unknown to the name service. Then the address is the NodeAddr shown by `scontrol show
    node`.

    Raises:
        RendezvousError: neither gives an address, or rank 0 runs on another node.
    """
    if not step.hosts:
        raise RendezvousError(
            "SLURM_STEP_NODELIST is not set, so the host of rank 0 is unknown; set MASTER_ADDR to its name"
        )
    if step.rank == 0 and step.node_rank != 0:
        raise RendezvousError(
            f"rank 0 runs on {step.hosts[step.node_rank]}, but the other ranks look for it on {step.hosts[0]}, the "
            "first node of the step; set MASTER_ADDR to its name, or choose another srun --distribution"
        )
    host = step.hosts[0]
    if _resolves(host):
        return host
    address, why = _ask_slurm(host)
    if address is not None and _resolves(address):
        return address
    raise RendezvousError(
        f"host {host}, where rank 0 runs, has no address here: the name service does not know it, and "
        f"{why or f'its NodeAddr in Slurm, {address}, is not known either'}. Set MASTER_ADDR to an address of {host}"
    )


def _resolves(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
    except (OSError, UnicodeError):
        return False


def _ask_slurm(host: str) -> tuple[str | None, str]:
    """The NodeAddr of a node; or None, and the reason."""
    command = ["scontrol", "show", "node", "--oneliner", host]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_ASK_SLURM_TIMEOUT_S
        )
    except FileNotFoundError:
        return None, "scontrol, which would know, is not installed here"
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"`{' '.join(command)}` fails ({error})"
    for word in done.stdout.split():
        name, _, value = word.partition("=")
        if name == "NodeAddr" and value:
            return value, ""
    said = (done.stderr or done.stdout).strip().splitlines()
    return None, f"`{' '.join(command)}` does not give its NodeAddr ({said[-1] if said else 'no output'})"
