"""How the ranks of an MPI job meet: over MPI, or without it on one host.

[Note: with MPI] Every rank sends its host to rank 0. Rank 0 then opens a rendezvous, a folder if all are on one host
(`folder.py`) and otherwise a port (`tcp.py`), and sends that, and the host of each rank, to all. All of this has a
deadline, unlike MPI's own collectives.

[Note: without MPI] Ranks on one host that do not need a group over MPI need no MPI to meet either: the job's id is a
name that they share. Initialising MPI takes half a second, and makes each rank wait for all others when it ends.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep import env
from lockstep.errors import RendezvousError, SetupError
from lockstep.mpi_library import is_installed, load
from lockstep.network_interfaces import source_towards
from lockstep.rendezvous import folder, tcp
from lockstep.secret import new_token
from lockstep.topology import Topology
from lockstep.topology.mpi import job_id
from lockstep.topology.processes import name_and_parent
from lockstep.torch_private.stores import HashStore, Store

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["meet_by_mpi", "meet_under_mpirun", "rendezvous_name"]

_TAG = 19027  # on MPI's own communicator, where scripts may send messages too
_HOST_BYTES = 256
_POLL_S = 0.001
_LAUNCHER = "mpirun"
_HYDRA_PROXY = "hydra_pmi_proxy"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

# On rank 0: the rendezvous, and the listening socket until the store takes it over.
_rendezvous: dict[str, Any] = {}
_listeners: dict[int, socket.socket] = {}


def meet_under_mpirun(variables: Mapping[str, str], topology: Topology, timeout: timedelta) -> Store | None:
    """Connect the ranks that mpirun started to a store, for a group that need not be over MPI. Collective.

    Args:
        variables: the environment.
        topology: this rank's topology, as read from the environment.
        timeout: time until a missing rank is an error.

    Returns:
        The store; None if mpirun did not start this process, or the ranks are on several hosts and mpi4py is missing.

    Raises:
        RendezvousError: a rank did not come.
    """
    if topology.launcher != "mpirun":
        return None
    if topology.num_nodes == 1:
        return folder.open_store(rendezvous_name(variables), topology.rank, topology.world_size, timeout)
    return meet_by_mpi(timeout)[1] if is_installed() else None


def rendezvous_name(variables: Mapping[str, str]) -> str:
    """A name that is unique to this job on this host. See [Note: without MPI].

    If the launcher does not provide a job id (MPICH), it is the pid of the launcher's process on this host, of which
    all its ranks are descendants.
    """
    job = job_id(variables) or f"parent{_launcher_above(os.getppid())}"
    plain = "".join(char if char.isalnum() or char in ".-" else "_" for char in job)
    return f"lockstep-{os.geteuid()}-mpi-{plain}"


def _launcher_above(pid: int) -> int:
    """The process that starts ranks of MPICH or Intel MPI on this host: `pid`, or its first ancestor that is no rank's.

    Between it and a rank there may be a wrapper (`mpirun -n 4 numactl.sh python train.py`), a separate one for each
    rank, which has the rank's variables. The launcher may have such variables too, from a job in which it was started,
    but it is recognised by its name.
    """
    while True:
        try:
            name, parent = name_and_parent(pid)
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:  # another user's, or ended
            return pid
        is_of_rank = any(variable.startswith(b"PMI_RANK=") for variable in variables)
        if not is_of_rank or name == _HYDRA_PROXY or parent == 0:
            return pid
        pid = parent


def meet_by_mpi(timeout: timedelta) -> tuple[Topology, Store]:
    """The topology of this rank in MPI's world, and a store that it shares with all others. Collective.

    Args:
        timeout: time until a missing rank is an error.

    Raises:
        BackendUnavailable: mpi4py or the MPI library is missing.
        SetupError: another launcher has started a different number of ranks than MPI.
        RendezvousError: not all ranks came in time; on rank 0, names those that did not.
    """
    world = load().COMM_WORLD
    rank, world_size = world.Get_rank(), world.Get_size()
    given = env.WORLD_SIZE.get()
    if given not in (None, world_size):
        raise SetupError(
            f"WORLD_SIZE is {given}, but MPI knows of {world_size} rank(s): ranks of an MPI job are started by "
            f"`mpirun -np {given} python script.py`, or `mpirun -np {given} lockstep run script.py`"
        )
    if world_size == 1:
        return Topology(0, 1, 0, 1), HashStore()
    deadline = _Deadline(timeout)
    rendezvous = _publish(world, deadline) if rank == 0 else _join(world, deadline)
    if rendezvous.get("token"):
        env.LOCKSTEP_TOKEN.set(str(rendezvous["token"]))
    topology = _locate(rank, rendezvous["hosts"])
    if "name" in rendezvous:
        return topology, folder.open_store(rendezvous["name"], rank, world_size, timeout)
    listener = _listeners.pop(rendezvous["port"], None) if rank == 0 else None
    return topology, tcp.open_store(rendezvous["address"], rendezvous["port"], rank, world_size, timeout, listener)


class _Deadline:
    """A time limit for everything that a rank waits for until it has met the others."""

    def __init__(self, timeout: timedelta) -> None:
        self._seconds = timeout.total_seconds()
        self._end_s = time.monotonic() + self._seconds

    def wait(self, is_done: Callable[[], bool], explain: Callable[[], str]) -> None:
        """Poll MPI until `is_done` returns True.

        Raises:
            RendezvousError: it did not in time.
        """
        while not is_done():
            if time.monotonic() > self._end_s:
                raise RendezvousError(f"{explain()} within {self._seconds:g} s. Do all ranks call lockstep.init()?")
            time.sleep(_POLL_S)


def _publish(world: MPI.Intracomm, deadline: _Deadline) -> dict[str, Any]:
    """Rank 0's part of [Note: with MPI]; returns what it sent to the others."""
    mpi = load()
    peers = range(1, world.Get_size())
    buffers = [bytearray(_HOST_BYTES) for _ in peers]
    requests = [world.Irecv([buffer, mpi.BYTE], peer, _TAG) for peer, buffer in zip(peers, buffers, strict=True)]

    def all_came() -> bool:
        mpi.Request.Testsome(requests)
        return not any(requests)

    def missing() -> str:
        absent = [f"rank {peer}" for peer, request in zip(peers, requests, strict=True) if request]
        return f"{', '.join(absent)} did not come"

    try:
        deadline.wait(all_came, missing)
    except RendezvousError:
        for request in filter(None, requests):
            request.Cancel()
        raise
    hosts = [_own_host(), *(bytes(buffer).rstrip(b"\0").decode() for buffer in buffers)]
    rendezvous = {"hosts": hosts, **_open_rendezvous(hosts)}
    message = json.dumps(rendezvous).encode()
    answers = [world.Isend([message, mpi.BYTE], peer, _TAG) for peer in peers]
    deadline.wait(lambda: bool(mpi.Request.Testall(answers)), lambda: "the other ranks came, but did not continue")
    return rendezvous


def _join(world: MPI.Intracomm, deadline: _Deadline) -> dict[str, Any]:
    """The part of every other rank in [Note: with MPI]; returns what rank 0 sent."""
    mpi = load()
    host = _own_host().encode()[:_HOST_BYTES]
    request = world.Isend([host, mpi.BYTE], 0, _TAG)
    status = mpi.Status()
    deadline.wait(
        lambda: bool(request.Test()) and bool(world.Iprobe(0, _TAG, status)),
        lambda: f"rank {world.Get_rank()} heard nothing from rank 0, which waits for all ranks,",
    )
    message = bytearray(status.Get_count(mpi.BYTE))
    world.Recv([message, mpi.BYTE], 0, _TAG)
    rendezvous: dict[str, Any] = json.loads(message)
    return rendezvous


def _open_rendezvous(hosts: Sequence[str]) -> dict[str, Any]:
    """Open the rendezvous, a single one for all worlds of this process."""
    if not _rendezvous and len(set(hosts)) == 1:
        _rendezvous["name"] = f"lockstep-{os.geteuid()}-mpi-{secrets.token_hex(8)}"
    elif not _rendezvous:
        address = _address_towards(_name_of(host) for host in hosts if host != hosts[0])
        listener = tcp.listen(address, 0)
        port = listener.getsockname()[1]
        _rendezvous.update(address=address, port=port)
        if env.LOCKSTEP_TOKEN.get() is None:
            _rendezvous["token"] = new_token()  # sent by MPI's own messages, not through a store
        _listeners[port] = listener
    return _rendezvous


def _own_host() -> str:
    """The name of this host and, because cloned hosts may share a name, an id of its kernel."""
    try:
        return f"{socket.gethostname()} {_BOOT_ID.read_text().strip()}"
    except OSError:
        return socket.gethostname()


def _name_of(host: str) -> str:
    return host.partition(" ")[0]


def _address_towards(hosts: Iterable[str]) -> str:
    """The address of this host on the route to the first of `hosts` that has one; its name, if none has."""
    return next(filter(None, map(source_towards, hosts)), socket.gethostname())


def _locate(rank: int, hosts: Sequence[str]) -> Topology:
    """The topology of a rank, from the host of each rank."""
    different = list(dict.fromkeys(hosts))
    host = hosts[rank]
    return Topology(
        rank,
        len(hosts),
        hosts[:rank].count(host),
        hosts.count(host),
        different.index(host),
        len(different),
        _LAUNCHER,
        tuple(map(_name_of, different)),
    )
