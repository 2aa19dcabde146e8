"""The sentry: one thread and one descriptor for each process, whatever the number of watches. No ranks: processes."""

from __future__ import annotations

import errno
import gc
import os
import select
import signal
import threading
from collections.abc import Iterator

import pytest

from lockstep.shm.liveness import PeerIdentity, Watch, _read_stat, pid_namespace
from lockstep.shm.sentry import sentry
from lockstep.testing import limit_s

_NUM_WATCHES = 50


@pytest.fixture
def children() -> Iterator[list[PeerIdentity]]:
    """Two processes that sleep until they are killed."""
    pids = []
    for _ in range(2):
        pid = os.fork()
        if pid == 0:
            signal.pause()
            os._exit(0)
        pids.append(pid)
    yield [PeerIdentity(pid, _read_stat(pid)[1], "here", pid_namespace()) for pid in pids]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def sentries() -> int:
    return sum(thread.name == "lockstep-sentry" for thread in threading.enumerate())


def watch_both(children: list[PeerIdentity]) -> tuple[Watch, threading.Event]:
    """A watch, and what is set when it is told of a death."""
    is_told = threading.Event()
    return Watch(dict(enumerate(children)), is_told.set), is_told


def test_watches_share_descriptors_and_thread(children: list[PeerIdentity]) -> None:
    before, threads = open_descriptors(), sentries()
    watches = [Watch(dict(enumerate(children))) for _ in range(_NUM_WATCHES)]
    assert open_descriptors() == before + 5, "one for each process, two for the thread to sleep on, and a reserve"
    assert sentries() == threads + 1
    for watch in watches[1:]:
        watch.close()
    assert open_descriptors() == before + 5
    watches[0].close()
    assert (open_descriptors(), sentries()) == (before, threads)


def test_all_watches_are_told_without_asking(children: list[PeerIdentity]) -> None:
    pairs = [watch_both(children) for _ in range(3)]
    assert not any(watch.must_ask for watch, _ in pairs)
    os.kill(children[1].pid, signal.SIGKILL)
    for watch, is_told in pairs:
        assert is_told.wait(limit_s(10))
        assert watch.dead() == {1}
        is_told.clear()
    os.kill(children[0].pid, signal.SIGKILL)
    for watch, is_told in pairs:
        assert is_told.wait(limit_s(10))
        assert watch.dead() == {0, 1}
        watch.close()


def test_whoever_looks_first_tells_all(children: list[PeerIdentity]) -> None:
    """A look takes the news from the thread, which may never hear of it."""
    (first, _), (_, is_told) = watches = [watch_both(children) for _ in range(2)]
    os.kill(children[0].pid, signal.SIGKILL)
    while first.dead() != {0}:
        pass
    assert is_told.wait(limit_s(10))
    for watch, _ in watches:
        watch.close()


def test_closed_watch_is_told_nothing(children: list[PeerIdentity]) -> None:
    (closed, is_told), (other, is_told_too) = watch_both(children), watch_both(children)
    closed.close()
    os.kill(children[0].pid, signal.SIGKILL)
    assert is_told_too.wait(limit_s(10))
    other.close()
    assert not is_told.is_set()


def test_watch_that_nobody_closed_is_forgotten(children: list[PeerIdentity]) -> None:
    before = open_descriptors()
    watch, _ = watch_both(children)
    del watch
    gc.collect()
    Watch({0: children[0]}).close()
    assert open_descriptors() == before


def test_sentry_comes_back(children: list[PeerIdentity]) -> None:
    for _ in range(20):
        Watch({0: children[0]}).close()
    watch, is_told = watch_both(children)
    os.kill(children[0].pid, signal.SIGKILL)
    assert is_told.wait(limit_s(10))
    watch.close()


def test_fork_gives_up_what_belongs_to_the_parent(children: list[PeerIdentity]) -> None:
    """Its close leaves the parent's watch alone: both have one epoll. And it can watch for itself."""
    before = open_descriptors()
    watch, is_told = watch_both(children)
    sentry()._lock.acquire()  # as if a thread held it at the moment of the fork
    pid = os.fork()
    if pid == 0:
        inherited = open_descriptors() > before
        watch.close()
        _own, is_told_here = watch_both(children)
        os.kill(children[0].pid, signal.SIGKILL)
        os._exit(0 if not inherited and is_told_here.wait(limit_s(10)) else 1)
    sentry()._lock.release()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert is_told.wait(limit_s(10))
    assert watch.dead() == {0}
    watch.close()


def test_without_what_it_sleeps_on_there_are_questions(
    children: list[PeerIdentity], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("lockstep.shm.liveness._READ_PROC_EVERY_S", 0.0)
    before = open_descriptors()
    for module, name in ((select, "epoll"), (os, "eventfd")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, refuse)
            watch, _ = watch_both(children)
        assert watch.must_ask
        assert watch.dead() == set()
        assert open_descriptors() == before
        watch.close()
    with monkeypatch.context() as patch:
        patch.setattr(select, "epoll", refuse)
        watch, _ = watch_both(children)
    os.kill(children[0].pid, signal.SIGKILL)
    while watch.dead() != {0}:
        pass
    watch.close()
