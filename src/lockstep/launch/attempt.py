"""One start of all ranks, from the first fork until the last process has ended.

[Note: phases of an attempt]
RUNNING   all ranks work. A rank that exits with 0 is simply done.
   │ a rank fails: the others get `settle_s` to notice the loss by themselves and
   │ report the call in which they lost it
SETTLING
   │ time is up: SIGTERM to every group. A rank that reported a failure has `grace_s` to exit by itself, as it
   │ may upload logs or write a checkpoint; if one hangs there, this phase follows RUNNING, too
   │ (an interrupt leads here at once, with its own signal, and with `stop_grace_s` if ranks save before they end)
STOPPING
   │ `grace_s` is up, or a second interrupt: SIGKILL to every group
KILLED
   │ all ranks have exited; this may follow any phase
GONE      the sweep kills what ranks left behind, and pids are released

[Note: one wish, two signals] `timeout` signals the launcher and then its whole group; when a terminal closes, the shell
gets SIGHUP and passes it to its jobs, and then the foreground group gets one. So a signal soon after the first does not
count as a second interrupt, except for a second Ctrl-C, which a person presses.
"""

from __future__ import annotations

import enum
import selectors
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from lockstep.launch.attempt_folder import AttemptFolder
from lockstep.launch.process import RankCommand, RankExit, RankProcess
from lockstep.launch.reaper import Reaper, sweep
from lockstep.rank_status import find_missed, has_stopping_ranks

__all__ = ["Attempt", "AttemptPhase"]

# Seconds after an interrupt, see the note; people press Ctrl-C no faster than the second value.
_SAME_WISH_S = 1.0
_SAME_CTRL_C_S = 0.05
# Seconds to wait for processes to end after a SIGKILL before giving up on them (uninterruptible sleep).
_KILL_TIMEOUT_S = 10.0
# Seconds between two checks for ranks that wait for one that has ended; it counts when it is seen twice.
_LOOK_EVERY_S = 0.5


class AttemptPhase(enum.Enum):
    """See [Note: phases of an attempt]."""

    RUNNING = enum.auto()
    SETTLING = enum.auto()
    STOPPING = enum.auto()
    KILLED = enum.auto()


class Attempt:
    """The processes of all ranks of one start.

    Args:
        folder: where ranks announce failures.
        reaper: is told of every session before the rank runs in it.
        job: the job's id, for the final sweep.
        grace_s: seconds from the signal that asks ranks to stop until SIGKILL; also the time that a rank has to exit by
            itself after it has announced a failure.
        settle_s: seconds from the first failure until that signal, if no rank is exiting by itself.
        stop_grace_s: like `grace_s`, after an interrupt, if a rank has announced that it saves before it ends.
        on_failure: called once, at the first sign of a failure, before any rank is stopped because of it.

    Attributes:
        exits: rank -> how it ended; complete when `wait` has returned.
        interrupted_by: the signal of the first interrupt, or None.
        is_cut_short: whether an interrupt, rather than a failure, ended the attempt.
    """

    def __init__(
        self,
        folder: AttemptFolder,
        reaper: Reaper,
        *,
        job: str,
        grace_s: float,
        settle_s: float,
        stop_grace_s: float,
        on_failure: Callable[[], None],
    ) -> None:
        self.exits: dict[int, RankExit] = {}
        self.interrupted_by: int | None = None
        self.is_cut_short = False
        self._suspected: set[int] = set()
        self._look_s = 0.0  # monotonic; when to check for them again
        self._interrupted_at_s = 0.0  # monotonic
        self._on_failure: Callable[[], None] | None = on_failure
        self._folder = folder
        self._reaper = reaper
        self._job = job
        self._grace_s = grace_s
        self._settle_s = settle_s
        self._stop_grace_s = stop_grace_s
        self._phase = AttemptPhase.RUNNING
        self._deadline: float | None = None  # monotonic; when the current phase ends by itself
        self._processes: dict[int, RankProcess] = {}
        self._alive: set[int] = set()
        self._settling_ends_s = 0.0  # monotonic, except for ranks that are exiting by themselves
        self._announced: dict[int, tuple[float, RankExit]] = {}  # rank -> when it was read, monotonic; how it will exit
        self._selector = selectors.DefaultSelector()
        self._selector.register(folder.events_fd, selectors.EVENT_READ, self._on_announcement)

    def watch(self, fd: int, callback: Callable[[], None]) -> None:
        """Make `wait` call `callback` each time `fd` is readable."""
        self._selector.register(fd, selectors.EVENT_READ, callback)

    def start(self, commands: Iterable[RankCommand]) -> None:
        """Start the ranks. If one cannot be started, the caller's `close` ends the others.

        Raises:
            LaunchError: a process cannot be started.
        """
        for command in commands:
            process = RankProcess(command)
            self._processes[command.rank] = process
            self._alive.add(command.rank)
            self._reaper.watch_session(process.pid)
            self._selector.register(process.pidfd, selectors.EVENT_READ, self._make_exit_callback(process))

    @property
    def pids(self) -> dict[int, int]:
        """Rank -> pid."""
        return {rank: process.pid for rank, process in self._processes.items()}

    @property
    def alive_pids(self) -> dict[int, int]:
        """Rank -> pid of the ranks that have not exited."""
        return {rank: self._processes[rank].pid for rank in sorted(self._alive)}

    @property
    def failed_ranks(self) -> set[int]:
        """Ranks whose exit code is that of a failure, or that announced an uncaught exception."""
        return self._announced.keys() | {rank for rank, ended in self.exits.items() if not ended.is_good}

    @property
    def interrupt_grace_s(self) -> float:
        """Seconds that ranks have after an interrupt: more if one of them saves before it ends."""
        return self._stop_grace_s if has_stopping_ranks(self._folder.path) else self._grace_s

    @property
    def is_undisturbed(self) -> bool:
        """Whether no rank has failed or was told to stop."""
        return self._phase is AttemptPhase.RUNNING and not self.failed_ranks

    def wait(self, timeout_s: float | None = None) -> bool:
        """Watch the ranks until all have exited, ending them if necessary.

        Args:
            timeout_s: seconds after which to return while the ranks continue; None for no limit: a job has none, but
                each phase of its ending has.

        Returns:
            True if all have exited, False if the time was up first.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while self._alive:
            look_s = self._look_s if self.exits and self._phase is AttemptPhase.RUNNING else None
            marks = [mark for mark in (self._deadline, end, look_s) if mark is not None]
            left_s = max(0.0, min(marks) - time.monotonic()) if marks else None
            for key, _ in self._selector.select(left_s):
                key.data()
            now = time.monotonic()
            if look_s is not None and now >= look_s:
                self._look_for_missed()
            if self._alive and self._deadline is not None and now >= self._deadline:
                self._next_phase()
            if end is not None and now >= end:
                break
        return not self._alive

    def interrupt(self, number: int) -> None:
        """Ask all ranks to end by this signal; a second call, or one while they are being stopped, kills them.

        One interrupt may come as two signals; see the note.
        """
        if self._is_same_wish(number):
            return
        if self.interrupted_by is None:
            self.interrupted_by, self._interrupted_at_s = number, time.monotonic()
        # A failure before the interrupt counts, whichever of the two is read first.
        for rank in sorted(self._alive):
            self._on_exit(self._processes[rank])
        if self._phase is AttemptPhase.RUNNING:
            self.is_cut_short = True
            self._stop(number, self.interrupt_grace_s)
        else:
            self.kill()

    def _is_same_wish(self, number: int) -> bool:
        if self.interrupted_by is None:
            return False
        is_ctrl_c = number == self.interrupted_by == signal.SIGINT
        return time.monotonic() - self._interrupted_at_s < (_SAME_CTRL_C_S if is_ctrl_c else _SAME_WISH_S)

    def settle(self) -> None:
        """Give the ranks `settle_s` to notice that a rank here or elsewhere has failed, and then ask them to stop."""
        if self._phase is AttemptPhase.RUNNING:
            self._note_failure()
            self._phase = AttemptPhase.SETTLING
            self._settling_ends_s = time.monotonic() + self._settle_s
            self._deadline = self._end_of_settling()

    def _end_of_settling(self) -> float:
        """When to ask the remaining ranks to stop: later, while ranks that announced a failure are exiting."""
        on_way_out = self._announced.keys() & self._alive
        # A rank that reports late, because of another one's failure, does not extend the time again.
        began = [min(self._announced[rank][0], self._settling_ends_s) for rank in on_way_out]
        return max([self._settling_ends_s, *(one + self._grace_s for one in began)])

    def stop(self) -> None:
        """Ask all ranks to end, although none has failed."""
        if self._phase in (AttemptPhase.RUNNING, AttemptPhase.SETTLING):
            self._stop(signal.SIGTERM, self.interrupt_grace_s)

    def kill(self) -> None:
        """SIGKILL to every group, now."""
        self._phase = AttemptPhase.KILLED
        self._deadline = time.monotonic() + _KILL_TIMEOUT_S
        self._send(signal.SIGKILL)

    def pause(self) -> None:
        """SIGSTOP to every group."""
        self._send(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT to every group."""
        self._send(signal.SIGCONT)

    def close(self) -> None:
        """End the remaining processes of the attempt and release everything.

        After success, processes that left their rank's session on purpose are left running, as under any shell.
        Otherwise they are killed too.
        """
        succeeded = not self._alive and not self.failed_ranks and self.interrupted_by is None
        # Exited ranks included: their children may still be running.
        for process in self._processes.values():
            process.send(signal.SIGKILL)
        self._selector.close()  # frees a descriptor that the sweep may need
        sweep(set(self.pids.values()), None if succeeded else self._job, _KILL_TIMEOUT_S)
        for process in self._processes.values():
            process.reap()

    def _make_exit_callback(self, process: RankProcess) -> Callable[[], None]:
        return lambda: self._on_exit(process)

    def _on_exit(self, process: RankProcess) -> None:
        # Already handled, if an interrupt came between the selector's answer and this.
        ended = process.poll() if process.rank in self._alive else None
        if ended is None:
            return
        self._selector.unregister(process.pidfd)
        self._alive.discard(process.rank)
        # The announcement may be read after the exit: the order of the two descriptors is arbitrary.
        self._on_announcement()
        self._note_exit(ended)
        if process.rank in self.failed_ranks:
            self.settle()
        if self._phase is AttemptPhase.SETTLING:
            self._deadline = self._end_of_settling()

    def _note_exit(self, ended: RankExit) -> None:
        """A rank that was stopped on its way out failed by itself: when it announced that, and with that code."""
        _, announced = self._announced.get(ended.rank, (0.0, None))
        if announced is not None and not announced.stopped:
            ended = announced if ended.stopped else replace(ended, time=announced.time)
        self.exits[ended.rank] = ended

    def _on_announcement(self) -> None:
        failures = [(rank, code) for rank, code in self._folder.read_failures() if rank in self._processes]
        for rank, code in failures:
            process = self._processes[rank]
            announced = RankExit(rank, process.pid, code, None, time.time(), process.was_signalled)
            self._announced.setdefault(rank, (time.monotonic(), announced))
        if self._phase is AttemptPhase.SETTLING:
            self._deadline = self._end_of_settling()
        # It should exit within moments. If it cannot (one of its threads blocks, a destructor hangs), nobody would ever
        # notice its failure, so the wait for its exit is limited.
        if failures and self._phase is AttemptPhase.RUNNING and self._deadline is None:
            self._note_failure()
            self._deadline = time.monotonic() + self._grace_s

    def _look_for_missed(self) -> None:
        """End the job if a rank waits for one that has ended: otherwise it would wait for half an hour."""
        self._look_s = time.monotonic() + _LOOK_EVERY_S
        found = set(find_missed(self._folder.path, self.exits, self._alive))
        missed, self._suspected = found & self._suspected, found
        if missed and self._phase is AttemptPhase.RUNNING:
            self._note_failure()
            self.exits |= {rank: replace(self.exits[rank], is_missed=True) for rank in missed}
            self._stop(signal.SIGTERM, self._grace_s)

    def _note_failure(self) -> None:
        callback, self._on_failure = self._on_failure, None
        if callback is not None:
            callback()

    def _next_phase(self) -> None:
        """Enter the next phase, because the time of the current one is up."""
        if self._phase in (AttemptPhase.RUNNING, AttemptPhase.SETTLING):
            self._stop(signal.SIGTERM, self._grace_s)
        elif self._phase is AttemptPhase.STOPPING:
            self.kill()
        else:
            # Even SIGKILL did not end them: uninterruptible sleep in the kernel. Report them as killed.
            for rank in self._alive:
                pid = self._processes[rank].pid
                self._note_exit(RankExit(rank, pid, 128 + signal.SIGKILL, signal.SIGKILL, time.time(), True))
            self._alive.clear()

    def _stop(self, number: int, grace_s: float) -> None:
        self._phase = AttemptPhase.STOPPING
        self._deadline = time.monotonic() + grace_s
        self._send(number)
        self._send(signal.SIGCONT)  # a stopped process takes no other signal but SIGKILL

    def _send(self, number: int) -> None:
        for rank in sorted(self._alive):
            process = self._processes[rank]
            # A rank that has just exited by itself was not told to stop.
            if process.poll() is None:
                process.send(number)
