"""How the output of many ranks becomes one: lines, provisional lines, what is left at the end."""

from __future__ import annotations

import os
import select
import threading
import tty
from collections.abc import Iterator

import pytest

from lockstep.launch import output
from lockstep.launch.output import Relay, write_all


class Channel:
    """A relay with one rank or more, whose output a test can read."""

    def __init__(self, *, is_terminal: bool = False, nproc: int = 1) -> None:
        if is_terminal:
            self.read_fd, self.write_fd = os.openpty()
            tty.setraw(self.write_fd)
        else:
            self.read_fd, self.write_fd = os.pipe()
        self.relay = Relay(self.write_fd, self.write_fd)
        # Ranks inherit copies; `close_writers` closes the launcher's own.
        self.ranks = [tuple(map(os.dup, self.relay.attach(rank))) for rank in range(nproc)]
        self.relay.close_writers()

    def read(self, length: int | None = None) -> bytes:
        """So many bytes, or all there are once the relay is done."""
        if length is None:
            self.relay.finish()
            assert select.select([self.relay.done_fd], [], [], 10)[0]
            os.set_blocking(self.read_fd, False)
        text = b""
        while length is None or len(text) < length:
            if length is not None:
                assert select.select([self.read_fd], [], [], 10)[0], f"only got {text!r}"
            try:
                text += os.read(self.read_fd, 65536)
            except BlockingIOError:
                break
        return text

    def close(self) -> None:
        self.relay.finish()
        assert select.select([self.relay.done_fd], [], [], 10)[0]
        self.relay.close()
        for fd in (self.read_fd, self.write_fd, *(fd for pair in self.ranks for fd in pair)):
            os.close(fd)


@pytest.fixture
def channel(request: pytest.FixtureRequest) -> Iterator[Channel]:
    made = Channel(**getattr(request, "param", {}))
    yield made
    made.close()


terminal = pytest.mark.parametrize("channel", [{"is_terminal": True}], indirect=True)
two_ranks = pytest.mark.parametrize("channel", [{"nproc": 2}], indirect=True)
terminal_and_two_ranks = pytest.mark.parametrize("channel", [{"is_terminal": True, "nproc": 2}], indirect=True)


@two_ranks
def test_line_waits_for_its_end(channel: Channel) -> None:
    os.write(channel.ranks[0][0], b"be")
    os.write(channel.ranks[1][0], b"other\n")
    assert channel.read(10) == b"[1] other\n"
    os.write(channel.ranks[0][0], b"gin\n\nrest")
    assert channel.read(10 + 5) == b"[0] begin\n[0] \n"
    assert channel.read() == b"[0] rest\n"


def test_progress_in_a_file_is_its_final_state(channel: Channel) -> None:
    for text in (b"\r 0%", b"\r 50%", b"\r 100%", b"\nnext\r\n", b"step 1\r", b"step 2\r", b"\n", b"left\r", b"    \r"):
        os.write(channel.ranks[0][0], text)
    assert channel.read() == b"[0]  100%\n[0] next\n[0] step 2\n"


def test_progress_in_a_file_shows_now_and_then(channel: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "_PROGRESS_INTERVAL_S", 0.0)
    os.write(channel.ranks[0][0], b"\r 10%")
    assert channel.read(9) == b"[0]  10%\n"
    os.write(channel.ranks[0][0], b"\r 20%")
    assert channel.read(9) == b"[0]  20%\n"


@terminal_and_two_ranks
def test_progress_on_a_terminal_is_overwritten(channel: Channel) -> None:
    os.write(channel.ranks[0][1], b"\r 10%")
    shown = b"[0]  10%\x1b[K\r"
    assert channel.read(len(shown)) == shown
    os.write(channel.ranks[0][1], b" done")
    shown = b"[0]  10% done\x1b[K\r"
    assert channel.read(len(shown)) == shown
    os.write(channel.ranks[1][0], b"line\nline\n")
    shown = b"[1] line\x1b[K\n[1] line\n"
    assert channel.read(len(shown)) == shown
    os.write(channel.ranks[0][1], b"\r 100%\n")
    assert channel.read() == b"[0]  100%\n"


@terminal
def test_unfinished_progress_is_kept_at_the_end(channel: Channel) -> None:
    os.write(channel.ranks[0][0], b"\r 10%")
    shown = b"[0]  10%\x1b[K\r"
    assert channel.read(len(shown)) == shown
    assert channel.read() == b"[0]  10%\x1b[K\n"


def test_endless_line_is_cut(channel: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "_MAX_LINE_BYTES", 1000)
    os.write(channel.ranks[0][0], b"x" * 1001)
    assert channel.read(1006) == b"[0] " + b"x" * 1001 + b"\n"
    os.write(channel.ranks[0][0], b"\r" + b"y" * 1001)
    assert channel.read(1006) == b"[0] " + b"y" * 1001 + b"\n"
    os.write(channel.ranks[0][0], b"z\n")
    assert channel.read(6) == b"[0] z\n"


@two_ranks
def test_finish_does_not_wait_for_a_writer_that_stays(channel: Channel) -> None:
    """A process that detached itself still holds the pipe."""
    os.write(channel.ranks[0][0], b"last")
    assert channel.read() == b"[0] last\n"


def test_write_all_waits_for_a_non_blocking_reader() -> None:
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    data = os.urandom(300_000)
    received = bytearray()

    def read() -> None:
        while chunk := os.read(read_fd, 65536):
            received.extend(chunk)

    reader = threading.Thread(target=read)
    reader.start()
    write_all(write_fd, data)
    os.close(write_fd)
    reader.join(timeout=10)
    os.close(read_fd)
    assert received == data
