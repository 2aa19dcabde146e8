"""Finalizes MPI at exit: waits for all ranks if none has failed; after a failure waits 10 s, then aborts the job.

`MPI_Finalize` waits until every rank of the job has called it. That is right if there was no failure. If a rank has
failed, the others may be anywhere, even in something that never ends. Then this process gives them 10 s to notice the
failure and leave, and after that aborts the job.
"""

from __future__ import annotations

import atexit
import os
import sys
import time

from lockstep.comm.mpi.team import MpiTeam
from lockstep.errors import NotInitialized
from lockstep.mpi_library import load

__all__ = ["register", "release"]

_ABORT_AFTER_S = 10.0
_POLL_S = 0.001

_teams: list[MpiTeam] = []
_owner_pid = 0


def register(team: MpiTeam) -> None:
    """Keep a team until all its ranks have left. Local."""
    global _owner_pid
    if _owner_pid == 0:
        _owner_pid = os.getpid()
        atexit.register(_leave)
    _teams.append(team)


def release() -> None:
    """Release the communicators of groups that all ranks have left. Local; does not wait."""
    _teams[:] = [team for team in _teams if not (team.has_left and team.try_release())]


def _leave() -> None:
    """Leave all groups, before mpi4py finalizes MPI at the very end of the interpreter."""
    if os.getpid() != _owner_pid:
        return  # this is a fork of a rank
    try:
        mpi = load()
    except NotInitialized:
        return  # the script has finalized MPI itself
    for team in _teams:
        team.close()
    start = time.monotonic()
    release()
    while _teams:
        if any(team.has_failed for team in _teams) and time.monotonic() - start > _ABORT_AFTER_S:
            rank = mpi.COMM_WORLD.Get_rank()
            print(
                f"lockstep: rank {rank} has waited {_ABORT_AFTER_S:g} s after a failure for the other ranks to leave "
                "MPI, and now ends the job",
                file=sys.stderr,
                flush=True,
            )
            mpi.COMM_WORLD.Abort(1)
        time.sleep(_POLL_S)
        release()
