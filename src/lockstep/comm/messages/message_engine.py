"""The engine of a group whose ranks exchange messages, over MPI or between hosts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.comm.callsite import CallSite
from lockstep.comm.contract import Algorithms
from lockstep.comm.engine import Body, Describe, Engine
from lockstep.comm.flight_recorder import FlightRecorder
from lockstep.comm.messages.message_team import MessageTeam
from lockstep.errors import CollectiveAborted, LockstepError
from lockstep.shm.base_mailbox import BaseMailbox

__all__ = ["MessageEngine"]


class MessageEngine(Engine):
    """The op table of a group whose ranks exchange messages.

    Args:
        team: the ranks of the group.
        recorder: its flight recorder.
        timeout_s: default seconds until a missing rank is an error.
        algorithms: the collectives of the team.
        make_mailbox: creates the mailbox for point to point, at the first send or receive.
        failure: the class of exceptions of the library that transfers tensors; they abort the call.
        library: name of that library in errors, put before its message.
    """

    def __init__(
        self,
        team: MessageTeam[Any],
        recorder: FlightRecorder,
        timeout_s: float,
        algorithms: Algorithms,
        make_mailbox: Callable[[], BaseMailbox],
        failure: type[Exception],
        library: str = "",
    ) -> None:
        super().__init__(team, recorder, timeout_s, algorithms, make_mailbox)
        self._message_team = team
        self._failure = failure
        self._library = library

    def _run(self, key: object, describe: Describe, body: Body, site: CallSite, timeout_s: float) -> None:
        try:
            super()._run(key, describe, body, site, timeout_s)
        except LockstepError:
            raise
        except self._failure as error:
            message = f"{describe()} of {self.recorder.group_name}: {self._library}{error}"
            raise CollectiveAborted(message) from error
        finally:
            # The control messages of a rank that gave up explain this better.
            self._message_team.note_finished(self.recorder.number)
