"""Files that a run writes are kept apart from the user's."""

from __future__ import annotations

import os
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lockstep import libc
from lockstep.tools.verify import scratch

NOBODY, SET_DUMPABLE = 65534, 4


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that every user may enter and write."""
    made = Path(tempfile.mkdtemp())
    for name in ("data", "shared"):
        (made / name).mkdir()
    for name in ("kept.pt", "old.pt"):
        (made / "data" / name).write_text("the user's")
    for each in (made, *made.rglob("*")):
        each.chmod(0o777)
    yield made
    shutil.rmtree(made)


def in_child(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def write_in(data: Path, keeper: scratch.Keeper) -> None:
    os.chdir(data)
    scratch.enter(keeper.pid)
    assert Path.cwd() == data
    assert Path("kept.pt").read_text() == "the user's"
    Path("kept.pt").write_text("the run's")
    os.remove("old.pt")
    os.makedirs("runs/1")
    Path("runs/1/new.pt").write_text("the run's")
    data.with_name("shared").joinpath("record").write_text("for all")


def use(folder: Path) -> None:
    data = folder / "data"
    for number, covered in enumerate([data, data, folder, folder]):  # a run sees nothing of another
        with scratch.kept_apart([str(covered)], folder / "shared" / f"memory-{number}") as keeper:
            assert keeper.why == "", keeper.why
            assert in_child(lambda: write_in(data, keeper)) == 0
        assert keeper.written == [str(data / name) for name in ("kept.pt", "old.pt", "runs/1/new.pt")]
    assert sorted(each.name for each in data.iterdir()) == ["kept.pt", "old.pt"]
    assert {each.read_text() for each in data.iterdir()} == {"the user's"}
    assert (folder / "shared" / "record").read_text() == "for all"


def why_not(folder: Path) -> str:
    with scratch.kept_apart([str(folder / "data")], folder / "tried") as keeper:
        return keeper.why


def test_what_a_run_writes_is_listed_and_gone(folder: Path) -> None:
    if why := why_not(folder):
        pytest.skip(why)
    assert in_child(lambda: use(folder)) == 0


def test_a_user_without_privileges_has_them_kept_apart_too(folder: Path) -> None:
    def become_nobody_and_use() -> None:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        libc.call("prctl", SET_DUMPABLE, 1, 0, 0, 0)  # as a process is that such a user has started
        use(folder)

    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    if why := why_not(folder):
        pytest.skip(why)
    for each in folder.rglob("*"):
        os.chown(each, NOBODY, NOBODY)
    assert in_child(become_nobody_and_use) == 0


def test_a_folder_that_cannot_be_covered_is_named(tmp_path: Path) -> None:
    with scratch.kept_apart(["/"], tmp_path / "memory") as keeper:
        assert "/ contains another file system" in keeper.why


def test_folders_are_the_current_one_the_scripts_and_those_of_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("here/inside", "code", "out"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(tempfile, "tempdir", "/")  # which has file systems inside it
    args = ("--epochs", "1", f"--out={tmp_path}/out/model.pt", str(tmp_path / "here" / "inside"), "relative/path")
    found = scratch.folders_of("../code/train.py", False, args)
    assert found == [str(tmp_path / name) for name in ("code", "here", "out")]
    assert scratch.folders_of("package.train", True, ()) == [str(tmp_path / "here")]
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert scratch.folders_of("package.train", True, ()) == [str(tmp_path)]
