"""The launcher's pure parts: options, environment, ports, reports, which failure was the first."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lockstep.errors import CollectiveAborted, CollectiveMismatch, LaunchError, LockstepError, RankLost
from lockstep.launch import free_port, support
from lockstep.launch.attempt_folder import AttemptFolder, announce_failure
from lockstep.launch.config import LaunchConfig, check_target, resolve_nproc
from lockstep.launch.environment import AttemptEnvironment, visible_cores, visible_gpus
from lockstep.launch.free_port import find_free_port
from lockstep.launch.positions import RankStatus
from lockstep.launch.process import RankExit
from lockstep.launch.report import ErrorReport, capture, error_behind, is_secondary, read_reports
from lockstep.launch.root_cause import find_first_failure, format_last_words, format_summary
from lockstep.rank_status import Position


@pytest.mark.parametrize(
    ("allowed", "count"),
    [(None, 3), ("", 0), ("-1", 0), ("1", 1), ("0,2", 2), ("0,-1,2", 1), ("GPU-8a2b,MIG-3", 2), ("0, 1", 2)],
)
def test_gpus_are_counted_as_cuda_counts(tmp_path: Path, allowed: str | None, count: int) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    variables = {} if allowed is None else {"CUDA_VISIBLE_DEVICES": allowed}
    assert visible_gpus(variables, str(tmp_path)) == count


def test_no_gpu_where_there_is_no_device(tmp_path: Path) -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,1"}, str(tmp_path)) == 0
    assert visible_gpus({}, str(tmp_path / "missing")) == 0


def test_nproc() -> None:
    assert resolve_nproc(4, {}) == 4
    assert resolve_nproc(" 4 ", {}) == 4
    assert resolve_nproc("cpu", {}) == visible_cores()
    assert resolve_nproc("auto", {"CUDA_VISIBLE_DEVICES": ""}) == visible_cores()
    for wrong, words in (("0", "at least 1"), (-3, "at least 1"), ("two", "'two'"), ("1.5", "'1.5'")):
        with pytest.raises(LaunchError, match=words):
            resolve_nproc(wrong, {})
    with pytest.raises(LaunchError, match="no GPU here"):
        resolve_nproc("gpu", {"CUDA_VISIBLE_DEVICES": ""})
    with pytest.raises(LaunchError, match=r"these ranks need 625 GiB even without a model, but \d+ GiB are free"):
        resolve_nproc(10_000, {})


def test_target_must_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "folder").mkdir()
    check_target("train.py", is_module=False)
    check_target("train", is_module=True)
    for target, is_module, words in (
        ("missing.py", False, f"'missing.py' not found in {tmp_path}$"),
        ("train", False, r"did you mean train\.py\?"),
        ("json.tool", False, r"put -m before it \(lockstep run -m json\.tool\)"),
        ("folder", False, "without a __main__"),
        ("nonsense_module.x", True, "module 'nonsense_module.x' not found$"),
        ("./train.py", True, "leave out -m"),
    ):
        with pytest.raises(LaunchError, match=words):
            check_target(target, is_module=is_module)
    if os.geteuid() != 0:
        (tmp_path / "train.py").chmod(0)
        with pytest.raises(LaunchError, match="cannot be read"):
            check_target("train.py", is_module=False)


def test_folder_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    with pytest.raises(LaunchError, match="change into another"):
        support.check()


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("max_restarts", -1, "max_restarts is -1"),
        ("grace_s", -0.5, "grace is -0.5"),
        ("grace_s", float("nan"), "grace is nan"),
        ("master_port", 70000, "expected 1 to 65535"),
    ],
)
def test_options_are_checked(option: str, value: float, words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        LaunchConfig(target=__file__, **{option: value}).check()


def test_jobs_in_jobs_carry_both_ids(tmp_path: Path) -> None:
    outer = AttemptEnvironment({}, "outer", tmp_path, 2, "127.0.0.1", 1).of_rank(0)
    inner = AttemptEnvironment(outer, "inner", tmp_path, 1, "127.0.0.1", 2).of_rank(0)
    assert inner["LOCKSTEP_JOB"] == "outer:inner"
    assert (inner["WORLD_SIZE"], inner["MASTER_PORT"]) == ("1", "2")
    assert inner["LOCKSTEP_PARENT_PID"] == str(os.getpid())


def test_port_is_free_and_outside_the_ephemeral_range(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("", find_free_port()))
    for text, ports in (("32768 60999", range(10_000, 32768)), ("1024 50000", range(50_001, 65536))):
        (tmp_path / "range").write_text(text)
        monkeypatch.setattr(free_port, "_PORT_RANGE_FILE", str(tmp_path / "range"))
        assert free_port._candidate_ports() == ports
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        assert not free_port._is_free(port)
        monkeypatch.setattr(free_port, "_candidate_ports", lambda: range(port, port + 1))
        with pytest.raises(LaunchError, match="--master-port"):
            find_free_port()


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def test_private_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = AttemptFolder()
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert folder.read_failures() == []
    announce_failure(folder.path, 3, 1)
    announce_failure(folder.path, 0, 255)
    assert folder.read_failures() == [(3, 1), (0, 255)]
    with pytest.raises(BlockingIOError), opened(folder.path) as fd:  # systemd-tmpfiles leaves alone what is locked
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    folder.remove()
    folder.remove()
    assert not folder.path.exists()
    announce_failure(folder.path, 1, 1)  # A rank that outlives the folder must not fail for it.
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with pytest.raises(LaunchError, match="set TMPDIR"):
        AttemptFolder()


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:
        return caught


class DistBackendError(RuntimeError):
    """Stands in for torch's."""


DistBackendError.__module__ = "torch.distributed"


@pytest.mark.parametrize(
    ("error", "secondary"),
    [
        (RankLost("rank 1 died", (1,)), True),
        (CollectiveAborted("shut down"), True),
        (CollectiveMismatch("shapes differ"), False),
        (LockstepError("rank 0 failed: ValueError: no such name"), True),
        (RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1"), True),
        (ConnectionResetError("Connection reset by peer"), True),
        (DistBackendError("NCCL error"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("connection reset by peer, says the user"), False),
        (raised(RuntimeError("training failed"), RankLost("x")), True),
    ],
)
def test_secondary_failures_are_told_from_causes(error: BaseException, secondary: bool) -> None:
    assert is_secondary(error) is secondary


def test_loss_that_came_through_a_callback_of_a_future_is_secondary() -> None:
    """torch makes a RuntimeError of what a callback raises, in which a communication hook takes the sum."""
    reduced: torch.futures.Future[int] = torch.futures.Future()
    mean = reduced.then(lambda done: done.value() / 2).then(lambda done: done.value())
    reduced.set_exception(RankLost("rank 1 died", (1,)))
    with pytest.raises(RuntimeError) as caught:
        mean.wait()
    assert is_secondary(caught.value)
    assert not is_secondary(RuntimeError("Got the following error when running the callback: ValueError: no such key"))


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def exit_in_handler_of(error: BaseException, code: object) -> SystemExit:
    try:
        try:
            raise error
        except BaseException:
            sys.exit(code)  # type: ignore[arg-type]
    except SystemExit as end:
        return end


def test_error_behind_an_exit() -> None:
    error = ValueError("bad sample")
    assert error_behind(exit_in_handler_of(error, 1)) is error
    assert error_behind(SystemExit(1)) is None
    for code in (None, 0, 2, "no data"):
        assert error_behind(exit_in_handler_of(ValueError(), code)) is None
    aborted = RuntimeError("click.Abort")
    aborted.__context__ = KeyboardInterrupt()
    said_by_click = RuntimeError("no such file")
    said_by_click.exit_code = 1  # type: ignore[attr-defined]
    for silent in (KeyboardInterrupt(), aborted, said_by_click):
        assert error_behind(exit_in_handler_of(silent, 1)) is None


def test_report_survives_the_way_through_the_file(tmp_path: Path) -> None:
    error = raised(json.JSONDecodeError("bad", "doc", 0))
    report = capture(error, error.__traceback__, rank=3)
    assert (report.type, report.file, report.pid) == ("json.decoder.JSONDecodeError", __file__, os.getpid())
    assert report.line == raised.__code__.co_firstlineno + 2
    report.write(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["error-rank3.json"]
    assert read_reports(tmp_path, {2: 1, 3: os.getpid()}) == {3: report}


def test_report_survives_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = AttemptFolder()
    reports = {rank: capture(raised(ValueError(f"rate {rank}\n")), None, rank) for rank in range(2)}
    for rank, report in reports.items():
        (folder.path / f"error-rank{rank}.json").mkdir()  # where none can be written, not even by root
        report.write(folder.path)
    assert read_reports(folder.path, {0: 1, 1: 2}) == reports
    folder.remove()


def test_report_points_at_the_users_own_code() -> None:
    try:
        json.loads("{")
    except ValueError as error:
        report = capture(error, error.__traceback__, rank=0)
    assert report.file == __file__


def test_report_of_an_exception_without_text() -> None:
    error = raised(Unprintable())
    report = capture(error, error.__traceback__, rank=0)
    assert "str() of it fails" in report.message
    huge = raised(ValueError("x" * 1_000_000))
    assert len(capture(huge, huge.__traceback__, rank=0).traceback) < 70_000


def test_unreadable_report_does_not_hide_the_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "error-rank0.json").write_text('{"rank": 0')
    assert read_reports(tmp_path, {0: 1}) == {}
    assert "error report of rank 0 cannot be read" in capsys.readouterr().err


def left(rank: int, code: int = 1, time: float = 0.0, *, signal: int | None = None, stopped: bool = False) -> RankExit:
    return RankExit(rank, 1000 + rank, code, signal, time, stopped)


def wrote(rank: int, time: float, *, secondary: bool = False) -> ErrorReport:
    kind = "RankLost" if secondary else "ValueError"
    return ErrorReport(rank, 1000 + rank, "host", kind, "text", "Traceback", "/x/train.py", 8, time, secondary)


def first_of(exits: list[RankExit], reports: list[ErrorReport], announced: set[int] | None = None) -> list[int]:
    by_rank = {report.rank: report for report in reports}
    failures = find_first_failure({ended.rank: ended for ended in exits}, by_rank, announced or set())
    return [failure.rank for failure in failures]


def test_first_failure() -> None:
    assert first_of([left(0, 0), left(1, 0)], []) == []
    # By the time of the exception, not of the exit that follows it.
    assert first_of([left(0, time=5), left(1, time=4)], [wrote(0, 1), wrote(1, 2)]) == [0, 1]
    # A secondary failure may come before its cause is seen to exit.
    assert first_of([left(0, time=2), left(1, 137, 3, signal=9)], [wrote(0, 1, secondary=True)]) == [1, 0]
    # Who was stopped by us is no cause, whatever the time.
    assert first_of([left(0, 143, 1, signal=15, stopped=True), left(1, time=2)], [wrote(1, 2)]) == [1, 0]
    # A rank killed before another one's error is the cause of it.
    assert first_of([left(0, 139, 1, signal=11), left(1, time=2)], [wrote(1, 1.5)]) == [0, 1]
    # Only secondary failures: the first of them.
    assert first_of([left(0), left(1)], [wrote(0, 2, secondary=True), wrote(1, 1, secondary=True)]) == [1, 0]
    # An exception went through, whatever the exit code says.
    assert first_of([left(0, 0), left(1, 0)], [wrote(1, 1)], {1}) == [1]


def test_exit_code_of_a_rank_that_was_stopped_after_its_exception() -> None:
    (failure,) = find_first_failure({0: left(0, 137, 9, signal=9, stopped=True)}, {0: wrote(0, 1)}, {0})
    assert failure.exit_code == 1
    assert failure.describe() == "rank 0 (pid 1000) failed with ValueError at /x/train.py:8: text"


def test_summary_mentions_a_few_more_and_counts_the_rest() -> None:
    exits = {rank: left(rank, time=rank) for rank in range(8)}
    text = format_summary(find_first_failure(exits, {0: wrote(0, 0)}, set()), 8)
    assert text.count("lockstep: after it, rank") == 4
    assert "lockstep: and 3 more ranks" in text


def test_errors_that_differ_in_a_number_share_one_traceback() -> None:
    """Two ranks that meet another bad file each: two sentences, but one way to the line."""
    trace = 'Traceback (most recent call last):\n  File "/x/train.py", line 8, in <module>\nValueError: bad jpeg {}'
    reports = {
        rank: replace(wrote(rank, rank), message=f"bad jpeg {rank}", traceback=trace.format(rank)) for rank in (0, 1)
    }
    reports[2] = replace(wrote(2, 2), traceback=trace.format(2).replace("line 8", "line 9"))
    text = format_summary(find_first_failure({rank: left(rank, time=rank) for rank in range(3)}, reports, set()), 3)
    assert "after it, rank 1 (pid 1001) failed with ValueError at /x/train.py:8: bad jpeg 1\n" in text
    assert (text.count("line 8"), text.count("line 9"), "\nrank 1:" in text, "\nrank 2:" in text) == (1, 1, False, True)


def test_mismatch_after_ctrl_c_says_what_to_write() -> None:
    """On the rank that shows its traceback, the error may know of no Ctrl-C."""
    exits = {rank: left(rank, time=rank) for rank in range(3)}
    reports = {
        rank: replace(wrote(rank, rank), type="lockstep.errors.CollectiveMismatch", after_interrupt=rank > 0)
        for rank in exits
    }
    assert "world.stop_on(signal.SIGINT)" in format_last_words(find_first_failure(exits, reports, set()))
    before = {rank: replace(report, after_interrupt=False) for rank, report in reports.items()}
    assert "stop_on" not in format_last_words(find_first_failure(exits, before, set()))


def test_ranks_that_exit_alike_are_said_together() -> None:
    exits = {rank: left(rank, 3, time=rank) for rank in range(8)}
    lines = format_summary(find_first_failure(exits, {}, set()), 8).splitlines()
    assert lines[1:-1] == [
        "lockstep: rank 0 (pid 1000) exited with code 3",
        "lockstep: the same end on ranks 1, 2, 3, 4, 5, 6, 7",
    ]


def test_an_error_on_the_way_out_is_no_stop() -> None:
    """Ranks that fail alike may still be leaving when they are told to stop; those that only were told are others."""
    exits = {0: left(0), 1: left(1, 143, 2, signal=15, stopped=True), 2: left(2, 143, 2, signal=15, stopped=True)}
    lines = format_summary(find_first_failure(exits, {0: wrote(0, 0), 1: wrote(1, 1)}, {0, 1}), 3).splitlines()
    assert lines[1].endswith("failed with ValueError at /x/train.py:8: text; rank 2 was stopped")
    assert lines[2] == "lockstep: the same error on rank 1"


def test_secondary_failures_are_told_apart_from_other_failures() -> None:
    exits = {0: left(0, 137, 0, signal=9), 1: left(1, time=1), 2: left(2, time=1)}
    reports = {1: wrote(1, 1, secondary=True), 2: wrote(2, 1)}
    lines = format_summary(find_first_failure(exits, reports, set()), 3).splitlines()
    assert lines[1].endswith("was killed by signal 9 (SIGKILL; out of memory?); rank 1 failed after it")
    assert lines[2] == "lockstep: after it, rank 2 (pid 1002) failed with ValueError at /x/train.py:8: text"


def test_rank_that_came_when_the_others_had_given_up_is_late() -> None:
    def at(rank: int, number: int) -> RankStatus:
        site = "/x/train.py:8 in main"
        calls = (Position(rank, 1000 + rank, "the default group", number, "barrier()", site, True, "", 0.0, True),)
        return RankStatus(rank, 1000 + rank, "S", calls, False)

    statuses = {rank: at(rank, number) for rank, number in enumerate((9, 9, 8))}
    waited = replace(wrote(0, 1.0), is_timeout=True, culprits=(1, 2))
    exits = {rank: left(rank, stopped=rank > 0) for rank in range(3)}
    text = format_summary(find_first_failure(exits, {0: waited}, set(), statuses), 3)
    assert "rank 1 (pid 1001) reached barrier #9 at /x/train.py:8 too late; rank 2 (pid 1002) did not reach " in text


def test_traceback_of_a_mismatch_is_that_of_who_came_for_something_else() -> None:
    kind, exits = "lockstep.errors.CollectiveMismatch", {rank: left(rank) for rank in range(3)}
    reports = {rank: replace(wrote(rank, rank), type=kind, culprits=(2,), traceback=f"of {rank}") for rank in range(3)}
    lines = format_summary(find_first_failure(exits, reports, set()), 3).splitlines()
    assert lines[1:-1] == ["lockstep: text", "", "of 2"]


def test_each_launcher_shows_the_tracebacks_of_its_own_host() -> None:
    exits = {rank: replace(left(rank), host="north" if rank < 2 else "south") for rank in range(4)}
    reports = {0: wrote(0, 0), 2: replace(wrote(2, 1), type="KeyError", traceback="of rank 2")}
    failures = find_first_failure(exits, reports, set())
    north, south = (format_summary(failures, 4, "logs", ranks=ranks).splitlines() for ranks in ({0, 1}, {2, 3}))
    assert north[1].startswith("lockstep: rank 0 (pid 1000 on north) failed with ValueError")
    assert north[:3] == south[:3]
    assert north[-4:-1] == ["lockstep: its output is in logs/rank0.log", "", "Traceback"]
    assert south[-6:-1] == [
        "lockstep: its output is in logs/rank0.log on north",
        "lockstep: the launcher on north shows the traceback of rank 0",
        "",
        "rank 2:",
        "of rank 2",
    ]


def test_ranks_that_left_early_are_named_once_and_the_one_that_missed_them_says_for_what() -> None:
    report = replace(wrote(0, 1, secondary=True), culprits=(1, 2, 3), traceback="Traceback: in checkpoint.save")
    exits = {0: left(0), **{rank: left(rank, 0) for rank in (1, 2, 3)}}
    lines = format_summary(find_first_failure(exits, {0: report}, set()), 4).splitlines()
    assert lines[1].startswith("lockstep: rank 1 (pid 1001) ended (exit code 0) while other ranks still needed it")
    assert lines[2] == "lockstep: the same end on ranks 2, 3"
    assert "let all ranks agree" in lines[3]
    assert lines[4:-1] == ["", "rank 0:", "Traceback: in checkpoint.save"]


def test_rank_that_was_stopped_on_its_way_out_is_blamed() -> None:
    report = replace(wrote(0, 1, secondary=True), culprits=(1,))
    exits = {0: left(0), 1: left(1, 143, signal=15, stopped=True)}
    lines = format_summary(find_first_failure(exits, {0: report}, set()), 2).splitlines()
    assert lines[1].startswith("lockstep: rank 1 (pid 1001) left the group while other ranks still needed it")
    assert "let all ranks agree" in lines[2]


def test_place_is_relative_below_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    report = ErrorReport(0, 1, "host", "E", "", "", str(tmp_path / "a/b.py"), 2, 0.0, False)
    (failure,) = find_first_failure({0: left(0)}, {0: report}, set())
    assert failure.describe() == "rank 0 (pid 1000) failed with E at a/b.py:2"


def test_library_folders_hold_this_interpreter() -> None:
    """Guards the test above that points at user code: `json` must count as library here."""
    from lockstep.frames import library_folders

    assert os.__file__.startswith(library_folders()), sys.prefix
