"""The process group "mpi4py" of torch.distributed: its ranks find each other through the store and get a communicator.

`team.py` moves tensors and control messages; the engine, the collectives and point to point are those of every group
whose ranks exchange messages (`lockstep.comm.messages`).
"""

from __future__ import annotations

import functools
import json
import threading
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from lockstep.comm.backend import EngineProcessGroup, find_nonce, is_default_group, make_group, ranks_of
from lockstep.comm.flight_recorder import FlightRecorder
from lockstep.comm.group_setup import BootstrapStore
from lockstep.comm.messages.message_algorithms import MessageAlgorithms
from lockstep.comm.messages.message_engine import MessageEngine
from lockstep.comm.messages.message_mailbox import MessageMailbox
from lockstep.comm.mpi import departures
from lockstep.comm.mpi.team import MpiTeam
from lockstep.comm.names import MPI_BACKEND_NAME
from lockstep.comm.wording import describe_group
from lockstep.errors import RendezvousError, SetupError
from lockstep.json_records import read_record
from lockstep.mpi_library import load
from lockstep.shm.liveness import PeerIdentity, own_identity
from lockstep.shm.segment import boot_id
from lockstep.topology import name_each
from lockstep.torch_private.stores import PrefixStore

__all__ = ["MpiProcessGroup", "create"]

# Creating a communicator is not thread-safe.
_making = threading.Lock()


@dataclass(frozen=True)
class _Member:
    """What a rank of a new group publishes: its process, its host's boot id, and its rank in MPI's world."""

    mpi_rank: int
    mpi_size: int
    boot_id: str
    identity: PeerIdentity

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> _Member:
        """Decode from text.

        Raises:
            RendezvousError: the text cannot come from a rank.
        """
        try:
            member = read_record(cls, text)
            if 0 <= member.mpi_rank < member.mpi_size:
                return member
        except ValueError:
            pass
        raise RendezvousError(f"a rank published invalid data about itself: {text[:60]!r}")


def _introduce(store: BootstrapStore, ranks: Sequence[int], rank: int, timeout: timedelta) -> list[_Member]:
    """Exchange the members of a new group; returns them in order of rank. Collective."""
    world = load().COMM_WORLD
    own = _Member(world.Get_rank(), world.Get_size(), boot_id(), own_identity())
    with store.explaining():
        found = store.share("member", rank, len(ranks), own.encode(), timeout.total_seconds())
        if found is None:
            missing = name_each(peer for number, peer in enumerate(ranks) if store.find(f"member{number}") is None)
            raise RendezvousError(
                f"{missing} did not come within {timeout.total_seconds():g} s of rank {ranks[rank]} "
                f"(pid {own.identity.pid} on {own.identity.host})"
            )
    members = [_Member.decode(text) for text in found]
    if len({member.mpi_rank for member in members}) < len(members):
        raise SetupError(
            f"the {len(members)} ranks are not {len(members)} ranks of one MPI job: rank {ranks[rank]} is rank "
            f"{own.mpi_rank} of {own.mpi_size} there. Start them with one `mpirun -np {len(members)} python script.py`"
        )
    return members


def _local_peers(members: Sequence[_Member], rank: int) -> list[int]:
    """The other ranks on this host, by boot id: two hosts may have the same name, and pids are local to a host."""
    return [peer for peer, one in enumerate(members) if one.boot_id == members[rank].boot_id and peer != rank]


def _connect(members: Sequence[_Member], name: str) -> MpiTeam:
    """Create a team with its own communicator. Collective over the members only."""
    mpi = load()
    departures.release()
    with _making:
        everybody = mpi.COMM_WORLD.Get_group()
        chosen = everybody.Incl([member.mpi_rank for member in members])
        tag = zlib.crc32(name.encode()) & 0x7FFF  # every MPI supports tags up to 32767
        comm = mpi.COMM_WORLD.Create_group(chosen, tag)
        chosen.Free()
        everybody.Free()
    team = MpiTeam(comm, [member.identity for member in members], _local_peers(members, comm.Get_rank()))
    departures.register(team)
    return team


class MpiProcessGroup(EngineProcessGroup):
    """A process group over MPI.

    Created by `dist.init_process_group("mpi4py")` or `dist.new_group(backend="mpi4py")`, not by hand.

    Args:
        options: torch's `_DistributedBackendOptions`.

    Raises:
        BackendUnavailable: mpi4py or the MPI library is missing.
        SetupError: the ranks do not belong to one MPI job.
        RendezvousError: a rank did not come.
    """

    def __init__(self, options: Any) -> None:
        ranks, timeout = ranks_of(options), options.timeout
        below, scope = PrefixStore("mpi", options.store), ("mpi", options.group_id)
        nonce = find_nonce(BootstrapStore(below, *scope), options, "member0")
        store = BootstrapStore(below, *scope, nonce=nonce)
        members = _introduce(store, ranks, options.group_rank, timeout)
        team = _connect(members, options.group_id)
        name = describe_group(options.group_id, ranks, is_default_group(options))
        algorithms, make_mailbox = MessageAlgorithms(team), functools.partial(MessageMailbox, team)
        timeout_s, failure = timeout.total_seconds(), load().Exception
        recorder = FlightRecorder(team, name, ranks)
        engine = MessageEngine(team, recorder, timeout_s, algorithms, make_mailbox, failure, "MPI says ")
        super().__init__(engine, MPI_BACKEND_NAME, options, nonce)


def create(options: Any, _backend_options: Any) -> MpiProcessGroup:
    """Create a group, for torch; `options` is its `_DistributedBackendOptions`.

    Raises:
        SetupError: the rank is not below the world size.
    """
    return make_group(MpiProcessGroup, options)
