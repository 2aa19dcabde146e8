"""Waiting: who is waited for, how long, and what ends a wait. No ranks: threads, and processes to watch."""

from __future__ import annotations

import errno
import importlib.util
import math
import os
import platform
import signal
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest

from lockstep.shm import sync
from lockstep.shm.cores import Cores
from lockstep.shm.futex import Futex
from lockstep.shm.liveness import PeerIdentity, Watch, _read_stat, is_running, own_identity, pid_namespace
from lockstep.shm.sync import FailureKind, PeerFailure, PeerState, StepCounter, StepWaiter
from lockstep.testing import limit_s

RANKS = 4
PENDING = [(1, 1), (2, 2), (3, 3)]


class Words:
    """Counts of four ranks at 0 … 3 and their states at 4 … 7, all ready, then the gate; rank 0 waits."""

    def __init__(self) -> None:
        self.memory = memoryview(array("q", [0] * RANKS + [PeerState.READY] * RANKS + [0] * 3))
        self.watch = Watch({})
        self.waiter = StepWaiter(self.memory, range(RANKS, 2 * RANKS), 0, self.watch, 2 * RANKS)

    def wait(self, timeout_s: float = 30.0, target: int = 1) -> None:
        self.waiter.wait(self.memory, PENDING, target, timeout_s)

    def failure(self, timeout_s: float = 30.0) -> PeerFailure:
        with pytest.raises(PeerFailure) as caught:
            self.wait(timeout_s)
        return caught.value

    def come(self, *ranks: int) -> None:
        for rank in ranks:
            self.memory[rank] = 1

    def become(self, state: PeerState, *ranks: int) -> None:
        for rank in ranks:
            self.memory[RANKS + rank] = state


@pytest.fixture
def words() -> Words:
    return Words()


@pytest.fixture
def child() -> Iterator[int]:
    """A process that sleeps until it is killed."""
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    yield pid
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


def identity_of(pid: int) -> PeerIdentity:
    return PeerIdentity(pid, _read_stat(pid)[1], "here", pid_namespace())


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# ---- waiting ---------------------------------------------------------------------------------------


def test_all_have_come(words: Words) -> None:
    words.come(1, 2, 3)
    words.wait(timeout_s=0.0)


@pytest.mark.parametrize("delays_s", [(0.0, 0.001, 0.0001), (0.03, 0.0, 0.01)])
def test_ranks_come_one_after_another(words: Words, delays_s: tuple[float, ...]) -> None:
    timers = [threading.Timer(delay_s, words.come, [rank]) for rank, delay_s in enumerate(delays_s, start=1)]
    for timer in timers:
        timer.start()
    words.wait()
    assert words.memory[1:4].tolist() == [1, 1, 1]


def test_deadline_names_those_that_are_missing(words: Words) -> None:
    words.come(2)
    start = time.monotonic()
    failure = words.failure(timeout_s=0.05)
    assert failure.kinds == {1: FailureKind.LATE, 3: FailureKind.LATE}
    assert 0.05 <= failure.waited_s <= time.monotonic() - start < limit_s(0.5)
    assert failure.ranks(FailureKind.LATE) == [1, 3]
    assert failure.ranks(FailureKind.DEAD) == []


def test_one_deadline_for_all(words: Words) -> None:
    """Ranks that keep coming buy no time for the last: with a deadline for each, this would take 1.6 times as long."""
    timeout_s = limit_s(0.5)
    timers = [threading.Timer(0.3 * timeout_s * rank, words.come, [rank]) for rank in (1, 2)]
    for timer in timers:
        timer.start()
    failure = words.failure(timeout_s)
    assert failure.kinds == {3: FailureKind.LATE}
    assert failure.waited_s < 1.5 * timeout_s


@pytest.mark.parametrize(
    ("state", "kind"), [(PeerState.FAILED, FailureKind.FAILED), (PeerState.LEFT, FailureKind.LEFT)]
)
def test_rank_that_will_not_come(words: Words, state: PeerState, kind: FailureKind) -> None:
    words.come(1, 3)
    threading.Timer(0.01, words.become, [state, 2]).start()
    assert words.failure().kinds == {2: kind}


def test_all_kinds_at_once(words: Words, child: int) -> None:
    words.watch.add(3, identity_of(child))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    words.become(PeerState.FAILED, 1)
    words.become(PeerState.LEFT, 2)
    expected = {1: FailureKind.FAILED, 2: FailureKind.LEFT, 3: FailureKind.DEAD}
    assert words.failure().kinds == expected


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        (PeerState.READY, FailureKind.DEAD),
        (PeerState.LEFT, FailureKind.LEFT),
        (PeerState.FAILED, FailureKind.FAILED),
    ],
)
def test_last_words_say_more_than_death(words: Words, child: int, state: PeerState, kind: FailureKind) -> None:
    words.come(1, 3)
    words.watch.add(2, identity_of(child))
    words.become(state, 2)
    os.kill(child, signal.SIGKILL)
    assert words.failure().kinds == {2: kind}


def test_who_came_and_left_has_kept_its_promise(words: Words) -> None:
    words.come(1, 2)
    words.become(PeerState.LEFT, 1)
    words.become(PeerState.FAILED, 2)
    threading.Timer(0.02, words.come, [3]).start()
    words.wait()


def test_own_group_is_closed_meanwhile(words: Words) -> None:
    threading.Timer(0.01, setattr, (words.waiter, "closed", True)).start()
    assert words.failure().kinds == {0: FailureKind.CLOSED}


# ---- steps taken back ------------------------------------------------------------------------------


def test_rank_that_gives_up_is_not_late_but_about_to_say_why(words: Words) -> None:
    words.come(1, 2)
    words.become(PeerState.GIVING_UP, 3)
    start = time.monotonic()
    threading.Timer(0.1, words.become, [PeerState.FAILED, 3]).start()
    assert words.failure(timeout_s=0.02).kinds == {3: FailureKind.FAILED}
    assert time.monotonic() - start > 0.05


def test_late_rank_is_told_apart_from_those_that_gave_up_on_it(words: Words) -> None:
    words.become(PeerState.GIVING_UP, 1, 2)
    assert words.failure(timeout_s=0.02).kinds == {3: FailureKind.LATE}


def test_reason_that_never_follows(words: Words, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync, "_REASON_FOLLOWS_WITHIN_S", 0.02)
    words.come(1, 2)
    words.become(PeerState.GIVING_UP, 3)
    assert words.failure(timeout_s=0.02).kinds == {3: FailureKind.LATE}


def test_who_gives_up_while_others_are_awaited_is_noticed(words: Words) -> None:
    """Rank 1 came first and goes back before the last one comes: the step is not complete."""
    words.come(1, 2)

    def go_back() -> None:
        words.memory[1] = 0
        words.come(3)
        words.become(PeerState.FAILED, 1)

    threading.Timer(0.02, go_back).start()
    assert words.failure().kinds == {1: FailureKind.FAILED}


def test_who_gives_up_the_next_step_has_taken_this_one(words: Words) -> None:
    words.come(1, 2, 3)
    words.become(PeerState.FAILED, 1, 2, 3)
    words.wait(timeout_s=0.0)


# ---- channels --------------------------------------------------------------------------------------


def make_channels(count: int) -> tuple[list[StepCounter], memoryview]:
    """Counts first, then states, then the gate and its bell."""
    memory = memoryview(array("q", [0] * count + [PeerState.READY] * count + [0, 0, 0]))
    gate = 2 * count
    waiters = [StepWaiter(memory, range(count, gate), rank, Watch({}), gate) for rank in range(count)]
    return [StepCounter(memory, range(count), rank, waiter, gate + 1) for rank, waiter in enumerate(waiters)], memory


@pytest.fixture
def neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program has the cores: every wait sleeps, and nobody wakes up by himself."""
    if not Futex.is_supported():
        pytest.skip("no futex on this machine")
    cores = Cores()
    monkeypatch.setattr(cores, "may_yield", lambda now_s: False)
    monkeypatch.setattr(sync, "own_cores", cores)
    monkeypatch.setattr(sync, "_LOOK_EVERY_S", 20.0)
    monkeypatch.setattr(sync, "MISSED_AFTER_S", 20.0)


def test_nobody_is_more_than_one_step_ahead() -> None:
    channels, memory = make_channels(3)
    wrong: list[list[int]] = []

    def run(channel: StepCounter) -> None:
        for number in range(1, 200):
            channel.step(30.0)
            counts = memory[:3].tolist()
            if not all(number <= count <= number + 1 for count in counts):
                wrong.append(counts)

    threads = [threading.Thread(target=run, args=[channel]) for channel in channels]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert memory[:3].tolist() == [199] * 3


def test_looks_become_rare_and_keep_the_deadline(words: Words, monkeypatch: pytest.MonkeyPatch) -> None:
    """See [Note: looks]: whoever waits long leaves the cores to those that compute."""
    looks: list[float] = []
    look = words.waiter.look

    def count(*arguments: object) -> float:
        looks.append(time.monotonic())
        return look(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(words.waiter, "look", count)
    words.failure(timeout_s=0.3)
    assert len(looks) < 80, "a look every 2 ms makes 150"
    assert sync.next_look(0.0, 0.0, 60.0) == sync._LOOK_EVERY_S
    assert sync.next_look(0.0, 30.0, 60.0) == 30.0 + sync._LONGEST_LOOK_S
    assert sync.next_look(0.0, 59.99, 60.0) == 60.0
    assert sync.next_look(0.0, 30.0, 60.0, is_woken=True) == 30.0 + sync._LOOK_EVERY_IF_WOKEN_S
    assert sync.next_look(0.0, 59.99, 60.0, is_woken=True) == 60.0
    assert sync.next_look(0.0, 0.0, 60.0, is_woken=True) == sync._FIRST_LOOK_IF_WOKEN_S
    assert sync.next_look(0.0, 0.0, 0.05, is_woken=True) == 0.05, "a deadline is kept"
    assert sync._LOOK_EVERY_IF_WOKEN_S <= 1.0, "a failure is noticed within a second"
    assert sync.next_look(0.0, 61.0, 60.0) == 61.0 + sync._LOOK_EVERY_S, "a peer that is giving up will say why"


def run_steps(channels: Sequence[StepCounter], count: int) -> list[threading.Thread]:
    def run(channel: StepCounter) -> None:
        for _ in range(count):
            channel.step(30.0)

    threads = [threading.Thread(target=run, args=[channel]) for channel in channels]
    for thread in threads:
        thread.start()
    return threads


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.usefixtures("neighbours")
def test_who_sleeps_is_woken_by_the_last_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """See [Note: gate]: once for all, and not by those who come before the last."""
    wakes: list[int] = []
    wake = Futex.wake
    monkeypatch.setattr(Futex, "wake", lambda futex, index: (wakes.append(index), wake(futex, index)))
    (first, second, last), memory = make_channels(3)
    start = time.monotonic()
    threads = run_steps([first], 1)
    wait_until(lambda: memory[7] == 1)
    threads += run_steps([second], 1)
    wait_until(lambda: memory[1] == 1)
    assert wakes == []
    last.step(30.0)
    for thread in threads:
        thread.join(limit_s(10))
    assert time.monotonic() - start < 15.0, "one woke up by itself"
    assert 1 <= len(wakes) <= 2, "once, and again if the second had just rung the bell anew"
    assert memory[7] == 0


@pytest.mark.usefixtures("neighbours")
@pytest.mark.parametrize("count", [2, 3, 5])
def test_no_wake_up_is_missed(count: int) -> None:
    channels, memory = make_channels(count)
    start = time.monotonic()
    threads = run_steps(channels, 300)
    for thread in threads:
        thread.join(60.0)
    assert memory[:count].tolist() == [300] * count
    assert time.monotonic() - start < 20.0, "one woke up by itself"


@pytest.fixture
def sleeps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The longest time of each sleep. Every wait sleeps at once."""
    if not Futex.is_supported():
        pytest.skip("no futex on this machine")
    cores = Cores()
    monkeypatch.setattr(cores, "may_yield", lambda now_s: False)
    monkeypatch.setattr(sync, "own_cores", cores)
    noted: list[float] = []
    sleep = Futex.sleep

    def note(futex: Futex, index: int, seen: int, timeout_s: float) -> None:
        noted.append(timeout_s)
        sleep(futex, index, seen, timeout_s)

    monkeypatch.setattr(Futex, "sleep", note)
    return noted


def test_who_sleeps_wakes_up_once_and_then_for_looks_alone(sleeps: list[float]) -> None:
    """See [Note: missed wake-ups] in futex.py."""
    (sleeper, _), _ = make_channels(2)
    with pytest.raises(PeerFailure):
        sleeper.step(0.4)
    assert sleeps[0] == sync.MISSED_AFTER_S
    assert all(timeout_s > sync.MISSED_AFTER_S for timeout_s in sleeps[1:-1])
    assert len(sleeps) <= 4, "until the first look, until the deadline, and the rest if the kernel is early"


def test_missed_wake_up_is_noticed_before_the_first_look(sleeps: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    (sleeper, _), memory = make_channels(2)
    monkeypatch.setattr(sync, "_FIRST_LOOK_IF_WOKEN_S", 20.0)
    sleep = Futex.sleep

    def be_missed(futex: Futex, index: int, seen: int, timeout_s: float) -> None:
        memory[1] = 1  # it has come, and did not see the bell
        sleep(futex, index, seen, timeout_s)

    monkeypatch.setattr(Futex, "sleep", be_missed)
    start = time.monotonic()
    sleeper.step(30.0)
    assert time.monotonic() - start < 15.0
    assert sleeps == [sync.MISSED_AFTER_S]


def test_after_another_wake_up_one_may_be_missed_again(sleeps: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    (sleeper, other), _ = make_channels(2)
    sleep = Futex.sleep

    def be_woken(futex: Futex, index: int, seen: int, timeout_s: float) -> None:
        if len(sleeps) == 1:  # this is the second, which would continue until the first look
            other.waiter.sound_alarm()
        sleep(futex, index, seen, timeout_s)

    monkeypatch.setattr(Futex, "sleep", be_woken)
    with pytest.raises(PeerFailure):
        sleeper.step(limit_s(0.3))
    assert sleeps.count(sync.MISSED_AFTER_S) == 2


@pytest.mark.skipif(not Futex.is_supported(), reason="no futex on this machine")
def test_waits_yield_until_a_core_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """See [Note: lost cores] in cores.py."""
    (waiting, coming), memory = make_channels(2)
    cores = Cores()
    monkeypatch.setattr(sync, "own_cores", cores)
    yields: list[float] = []

    def give_up(now_s: float, lost_after_s: float) -> float:
        yields.append(now_s)
        return now_s

    monkeypatch.setattr(cores, "give_up", give_up)
    for number, may_yield in enumerate([True, False], start=1):
        monkeypatch.setattr(cores, "may_yield", lambda now_s, may=may_yield: may)
        threads = run_steps([waiting], 1)
        wait_until(lambda number=number: bool(yields) or memory[5] == number)  # type: ignore[misc]
        coming.step(30.0)
        threads[0].join(limit_s(10))
        assert bool(yields) is may_yield
        yields.clear()


@pytest.mark.skipif(not Futex.is_supported(), reason="no futex on this machine")
def test_futex_does_not_sleep_where_the_word_has_changed() -> None:
    words = memoryview(array("q", [0, 1 << 32 | 7]))
    futex = Futex(words)
    start = time.monotonic()
    futex.sleep(1, 6, 20.0)
    assert time.monotonic() - start < 20.0
    futex.sleep(1, 7, 0.01)
    assert time.monotonic() - start >= 0.01


# ---- alarms ----------------------------------------------------------------------------------------


def failure_of_a_sleeper(alarm: Callable[[StepWaiter, memoryview], None]) -> PeerFailure:
    """What ends a wait that nobody comes to, and that would not look by itself for long."""
    (sleeper, other), memory = make_channels(2)
    threading.Timer(0.05, lambda: alarm(other.waiter, memory)).start()
    with pytest.raises(PeerFailure) as caught:
        sleeper.step(60.0)
    assert caught.value.waited_s < 15.0, "it woke up by itself"
    return caught.value


def fail_and_tell(waiter: StepWaiter, memory: memoryview) -> None:
    memory[3] = PeerState.FAILED
    waiter.sound_alarm()


@pytest.mark.usefixtures("neighbours")
def test_alarm_wakes_who_sleeps() -> None:
    """See [Note: alarm]."""
    assert failure_of_a_sleeper(fail_and_tell).kinds == {1: FailureKind.FAILED}


@pytest.mark.usefixtures("neighbours")
def test_alarm_without_failures_wakes_nobody_for_good() -> None:
    def tell_and_fail(waiter: StepWaiter, memory: memoryview) -> None:
        for _ in range(10):
            waiter.sound_alarm()
        fail_and_tell(waiter, memory)

    assert failure_of_a_sleeper(tell_and_fail).kinds == {1: FailureKind.FAILED}


@pytest.mark.usefixtures("neighbours")
def test_death_wakes_who_sleeps(child: int) -> None:
    (sleeper, _), _ = make_channels(2)
    watch = sleeper.waiter._watch
    watch._on_death = sleeper.waiter.sound_alarm
    watch.add(1, identity_of(child))
    threading.Timer(0.05, os.kill, [child, signal.SIGKILL]).start()
    with pytest.raises(PeerFailure) as caught:
        sleeper.step(60.0)
    watch.close()
    assert caught.value.kinds == {1: FailureKind.DEAD}
    assert caught.value.waited_s < 15.0, "it woke up by itself"


@pytest.mark.usefixtures("neighbours")
def test_close_wakes_who_sleeps() -> None:
    (sleeper, _), _ = make_channels(2)
    threading.Timer(0.05, sleeper.waiter.close).start()
    with pytest.raises(PeerFailure) as caught:
        sleeper.step(60.0)
    assert caught.value.kinds == {0: FailureKind.CLOSED}
    assert caught.value.waited_s < 15.0, "it woke up by itself"


class CountingOverseer:
    """Counts looks, and wants another one after some time."""

    def __init__(self, again_s: float) -> None:
        self.looks = 0
        self._again_s = again_s

    def look(self, missing: Sequence[int], waited_s: float, timeout_s: float) -> float:
        self.looks += 1
        return self._again_s

    def end(self) -> None:
        pass


@pytest.mark.skipif(not Futex.is_supported(), reason="no futex on this machine")
@pytest.mark.parametrize(
    ("again_s", "must_ask", "at_least", "at_most"),
    [(math.inf, False, 1, 2), (0.02, False, 10, 52), (math.inf, True, 8, 24)],
    ids=["told", "wants more", "not told"],
)
def test_number_of_looks_in_a_second(
    again_s: float, must_ask: bool, at_least: int, at_most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """See [Note: looks]: what a wait costs is how often it wakes up. On a busy machine they are fewer."""
    (sleeper, _), _ = make_channels(2)
    monkeypatch.setattr(Watch, "must_ask", must_ask)
    overseer = CountingOverseer(again_s)
    sleeper.waiter.overseers.append(overseer)
    with pytest.raises(PeerFailure):
        sleeper.step(1.0)
    assert overseer.looks <= at_most
    assert overseer.looks >= (1 if limit_s(1.0) > 1.5 else at_least)


def test_without_futex_there_are_naps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Futex, "is_supported", staticmethod(lambda: False))
    (first, second), memory = make_channels(2)
    thread = threading.Thread(target=first.step, args=[30.0])
    thread.start()
    time.sleep(0.02)
    second.step(30.0)
    thread.join(limit_s(10))
    assert memory[:2].tolist() == [1, 1]


def test_channel_takes_its_step_back_when_it_gives_up() -> None:
    (first, late), memory = make_channels(2)
    threads = [threading.Thread(target=channel.step, args=[30.0]) for channel in (first, late)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with pytest.raises(PeerFailure):
        first.step(0.02)
    assert memory[0] == 1, "the step before that stays taken"
    assert memory[2] == PeerState.GIVING_UP
    memory[2] = PeerState.FAILED
    with pytest.raises(PeerFailure) as caught:
        late.step(30.0)
    assert caught.value.kinds == {0: FailureKind.FAILED}


def test_one_rank_alone_never_waits() -> None:
    (channel,), memory = make_channels(1)
    channel.step(0.0)
    assert memory[0] == 1


def test_fence_of_machines_that_reorder_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    spec = importlib.util.spec_from_file_location("sync_elsewhere", sync.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, "sync_elsewhere", module)
    spec.loader.exec_module(module)
    module.fence()
    assert "_fence_lock" in vars(module)
    assert "_fence_lock" not in vars(sync) or platform.machine() == "aarch64"


# ---- liveness --------------------------------------------------------------------------------------


@pytest.fixture(params=["pidfd", "proc"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Watch with pidfds, and where the system has none to give."""
    if request.param == "proc":

        def refuse(pid: int, flags: int = 0) -> int:
            raise OSError(errno.EPERM, "a filter knows no such call")

        monkeypatch.setattr(os, "pidfd_open", refuse)
        monkeypatch.setattr("lockstep.shm.liveness._READ_PROC_EVERY_S", 0.0)


@pytest.mark.usefixtures("way")
def test_death_is_seen_before_anybody_reaps(child: int) -> None:
    before = open_descriptors()
    watch = Watch({5: identity_of(child), 6: own_identity()})
    assert watch.dead() == set()
    os.kill(child, signal.SIGKILL)
    deadline = time.monotonic() + limit_s(10)
    while watch.dead() != {5}:
        assert time.monotonic() < deadline
    os.waitpid(child, 0)
    assert watch.dead() == {5}
    watch.close()
    watch.close()
    assert open_descriptors() == before
    assert watch.dead() == {5}


@pytest.mark.usefixtures("way")
def test_process_that_has_gone_already(child: int) -> None:
    peer = identity_of(child)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    watch = Watch({1: peer})
    assert watch.dead() == {1}
    watch.close()


@pytest.mark.usefixtures("way")
def test_pid_that_means_another_process_here(child: int) -> None:
    """Its start time differs: nothing here says whether the peer lives."""
    before = open_descriptors()
    there = identity_of(child)
    watch = Watch({1: replace(there, start_time=there.start_time + 1)})
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert watch.dead() == set()
    assert open_descriptors() == before
    watch.close()


@pytest.mark.usefixtures("way")
def test_pid_of_another_namespace_proves_no_death(child: int) -> None:
    """A container's pid names no process here, or another one: neither says that the peer died."""
    before = open_descriptors()
    there = replace(identity_of(child), pid_namespace=pid_namespace() + 1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    watch = Watch({1: there})
    assert watch.dead() == set()
    assert is_running(there)
    assert open_descriptors() == before
    watch.close()


@pytest.fixture
def no_descriptors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process cannot open any file."""

    def refuse(*arguments: object, **options: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pidfd_open", refuse)
        patch.setattr("lockstep.shm.liveness.open", refuse, raising=False)
        patch.setattr("lockstep.shm.liveness._READ_PROC_EVERY_S", 0.0)
        yield


@pytest.mark.usefixtures("no_descriptors")
def test_process_out_of_descriptors_takes_nobody_for_dead(child: int) -> None:
    peer = PeerIdentity(child, 1, "here", pid_namespace())
    watch = Watch({1: peer})
    assert is_running(peer)
    assert watch.dead() == set()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert not is_running(peer), "the kernel says so without a descriptor, too"
    assert watch.dead() == {1}
    watch.close()
