"""How the output of many ranks becomes one: lines, provisional lines, what is left at the end."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import select
import shlex
import struct
import subprocess
import sys
import termios
import threading
import tty
from collections.abc import Iterator

import pytest

from launching import Launches
from lockstep.launch import streams
from lockstep.launch.output import Relay
from lockstep.launch.screen import FileSink, write_all
from lockstep.testing import limit_s


class Channel:
    """A relay with one rank or more, whose output a test can read."""

    def __init__(self, *, is_terminal: bool = False, nproc: int = 1, all_bars: bool = False) -> None:
        if is_terminal:
            self.read_fd, self.write_fd = os.openpty()
            tty.setraw(self.write_fd)
        else:
            self.read_fd, self.write_fd = os.pipe()
        self.relay = Relay(self.write_fd, self.write_fd, all_bars=all_bars)
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
    monkeypatch.setattr(streams, "_PROGRESS_INTERVAL_S", 0.0)
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
    monkeypatch.setattr(streams, "_MAX_LINE_BYTES", 1000)
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
    reader.join(timeout=limit_s(10))
    os.close(read_fd)
    assert received == data


@terminal_and_two_ranks
def test_bars_of_other_ranks_do_not_move(channel: Channel) -> None:
    """They would take turns in one line. What they show in the end is said."""
    os.write(channel.ranks[1][1], b"\r 10%")
    os.write(channel.ranks[1][1], b"\r 20%")
    os.write(channel.ranks[0][1], b"\r 30%")
    shown = b"[0]  30%\x1b[K\r"
    assert channel.read(len(shown)) == shown
    os.write(channel.ranks[1][1], b"\r 100%\nnext\n")
    shown = b"[1]  100%\x1b[K\n[1] next\n"
    assert channel.read(len(shown)) == shown
    assert channel.read() == b"[0]  30%\n"


@pytest.mark.parametrize("channel", [{"is_terminal": True, "nproc": 2, "all_bars": True}], indirect=True)
def test_all_bars_move_on_request(channel: Channel) -> None:
    os.write(channel.ranks[1][1], b"\r 10%")
    shown = b"[1]  10%\x1b[K\r"
    assert channel.read(len(shown)) == shown


@terminal_and_two_ranks
def test_display_of_several_lines_changes_in_place(channel: Channel) -> None:
    os.write(channel.ranks[0][0], b"\x1b[?25la 1\nb 1")
    shown = b"\x1b[?25l[0] a 1\n[0] b 1\x1b[K\r"
    assert channel.read(len(shown)) == shown
    os.write(channel.ranks[0][0], b"\r\x1b[2K\x1b[1A\x1b[2Ka 2\nb 2")
    shown = b"\x1b[K\r\r\x1b[1A[0] a 2\x1b[K\n[0] b 2\x1b[K\r"
    assert channel.read(len(shown)) == shown
    os.write(channel.ranks[1][0], b"\x1b[?25la 1\nb 1\r\x1b[2K\x1b[1A\x1b[2Ka 2\nb 2\n\x1b[?25h")
    assert channel.read() == b"[0] b 2\x1b[K\n\x1b[?25h[1] a 2\n[1] b 2\n"


@terminal_and_two_ranks
def test_lines_of_others_are_not_overwritten_by_going_up(channel: Channel) -> None:
    os.write(channel.ranks[0][0], b"a 1\n\r b 1\x1b[A")
    shown = b"[0] a 1\n[0]  b 1\x1b[K\r\r\x1b[1A[0] a 1\x1b[K\r"
    assert channel.read(len(shown)) == shown
    os.write(channel.ranks[1][0], b"other\n")
    shown = b"\x1b[1B\n[1] other\n"
    assert channel.read(len(shown)) == shown
    os.write(channel.ranks[0][0], b"\ra 2\n\r b 2\n")
    assert channel.read() == b"[0] a 2\n[0]  b 2\n"


@terminal
def test_question_is_shown_before_its_line_ends(channel: Channel) -> None:
    os.write(channel.ranks[0][0], b"name? ")
    shown = b"[0] name? \x1b[K"
    assert channel.read(len(shown)) == shown
    os.write(channel.ranks[0][0], b"\n")
    assert channel.read() == b"\r[0] name? \x1b[K\n"


@terminal_and_two_ranks
def test_colours_end_with_the_line(channel: Channel) -> None:
    os.write(channel.ranks[0][0], b"\x1b[3")
    os.write(channel.ranks[0][0], b"1mred\n\x1b[32mgreen\x1b[0m\n")
    assert channel.read() == b"[0] \x1b[31mred\x1b[0m\n[0] \x1b[32mgreen\x1b[0m\n"


FACTS = "print(sys.stdout.isatty(), sys.stderr.isatty(), sys.stdout.isatty() and tuple(os.get_terminal_size()))"


def test_ranks_find_a_terminal_where_there_is_one(launches: Launches) -> None:
    script = launches.script(FACTS)
    assert launches.run("--nproc", "1", script).stdout == "[0] False False False\n"
    read_fd, write_fd = os.openpty()
    fcntl.ioctl(write_fd, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    process = launches.start("--nproc", "1", script, stdout=write_fd, stderr=write_fd)
    os.close(write_fd)
    shown = b""
    with contextlib.suppress(OSError):  # the end
        while chunk := os.read(read_fd, 4096):
            shown += chunk
    os.close(read_fd)
    assert process.wait(timeout=limit_s(30)) == 0
    assert shown == b"[0] True True (95, 30)\r\n", "a prefix and a column to spare"


def test_terminal_of_one_stream_only(launches: Launches) -> None:
    """`lockstep run … 2>errors`: what goes to a file stays plain."""
    script = launches.script(FACTS)
    read_fd, write_fd = os.openpty()
    process = launches.start("--nproc", "1", script, stderr=write_fd)
    os.close(write_fd)
    assert process.communicate(timeout=limit_s(30))[0] == "[0] False True False\n"
    os.close(read_fd)


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_closed_streams_are_no_error(launches: Launches, closed: str) -> None:
    """What is opened next would get their numbers: output would go into the launcher's own pipes."""
    text = "print('line'); print('line', file=sys.stderr); open(f'ended{RANK}', 'w').write(sys.stdin.read())"
    command = shlex.join([sys.executable, "-m", "lockstep", "run", "--nproc", "2", launches.script(text)])
    shell = ["sh", "-c", f"exec {command} {closed}"]
    streams = {"env": launches.environment(), "capture_output": True, "stdin": subprocess.DEVNULL, "text": True}
    done = subprocess.run(shell, cwd=launches.folder, timeout=limit_s(60), **streams)
    assert (done.returncode, (launches.folder / "ended1").exists()) == (0, True), done.stderr
    lines = "[0] line\n[1] line\n"
    assert "".join(sorted(done.stdout.splitlines(True))) == ("" if "1>" in closed else lines)
    if "2>" not in closed:
        assert lines in "".join(sorted(done.stderr.splitlines(True)))


def test_bar_in_a_notebook_is_overwritten() -> None:
    """A cell knows carriage returns, and no sequences."""

    class Cell(io.StringIO):
        """What IPython's kernel puts in the place of sys.stdout."""

    Cell.__module__ = "ipykernel.iostream"
    cell = Cell()
    sink = FileSink(cell)
    read_fd, write_fd = os.pipe()
    os.set_blocking(read_fd, False)
    stream = streams.RankStream(0, read_fd, sink)
    for text in (b"\r 100 of 200", b"\r done", b"\rlast words\nnext\n"):
        os.write(write_fd, text)
        stream.read()
    os.close(read_fd)
    os.close(write_fd)
    assert cell.getvalue() == ("[0]  100 of 200\r[0]  done" + " " * 6 + "\r" + " " * 9 + "\r[0] last words\n[0] next\n")
