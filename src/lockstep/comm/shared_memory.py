"""The engine of a group whose ranks share the memory of one host."""

from __future__ import annotations

import functools

from lockstep.comm.contract import Algorithms
from lockstep.comm.engine import Engine
from lockstep.comm.flight_recorder import FlightRecorder
from lockstep.comm.group_setup import NewGroup
from lockstep.shm.algorithms import SharedMemoryAlgorithms
from lockstep.shm.mailbox import Mailbox
from lockstep.shm.team import SharedMemoryTeam

__all__ = ["make_engine"]


class _Algorithms(SharedMemoryAlgorithms, Algorithms):
    """The algorithms of `shm`, completed by the contract's default implementations."""


def make_engine(team: SharedMemoryTeam, new: NewGroup) -> Engine:
    """Create the engine of a group on one host. Local."""
    recorder = FlightRecorder(team, new.name, new.ranks)
    make_mailbox = functools.partial(Mailbox, team.mail_area, team.rank, team.world_size)
    waits = team.blocks if new.is_default else new.default_waits
    return Engine(team, recorder, new.timeout_s, _Algorithms(team), make_mailbox, waits)
