"""`lockstep doctor`: the report, and the table of verbs that were really run."""

from __future__ import annotations

import importlib.util
import json
import re
import socket
import sys
from pathlib import Path

import pytest
import torch

from lockstep import cli
from lockstep.errors import WorkerFailed
from lockstep.launch import control_groups
from lockstep.tools.capabilities import measure, table
from lockstep.tools.capabilities.measure import Column
from lockstep.tools.capabilities.verbs import CLASSIC, VERBS
from lockstep.tools.doctor import CheckResult, cluster, limits, sharing, versions

PAGE = Path(__file__).parents[2] / "docs" / "capabilities.md"


def test_report_of_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    subjects = [line[9:24].strip() for line in lines if not line.startswith(" ")]
    assert subjects[:3] == ["Python", "torch", "cores"]
    assert any(line.startswith("ok       shared memory   works") for line in lines)
    assert any(line.startswith("ok       two ranks       started, connected and added") for line in lines)


@pytest.fixture
def without_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """No ranks are started, which takes seconds."""
    monkeypatch.setattr(sharing, "_two_ranks", lambda: CheckResult("two ranks", "not tried"))


@pytest.mark.usefixtures("without_ranks")
def test_report_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    found = {one["subject"]: one for one in json.loads(capsys.readouterr().out)}
    assert found["shared memory"]["status"] == "ok"
    assert set(found["torch"]) == {"status", "subject", "text", "remedy", "command"}


def test_packages_of_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that users install; what of them is absent is named, with the command that installs it."""
    project = (PAGE.parents[1] / "pyproject.toml").read_text()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    text_of = {result.subject: result.text for result in versions.look_at_extras()}
    for extra in ("train", "imagenet", "notebook"):
        (packages,) = re.findall(rf"^{extra} = \[(.*)\]$", project, re.MULTILINE)
        commands = re.findall(r"pip install ([^;]+)", text_of[f"[{extra}]"])
        assert sorted(" ".join(commands).split()) == sorted(packages.replace('"', "").split(", "))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert {result.text for result in versions.look_at_extras() if result.subject.startswith("[")} == {"installed"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torchvision" else object())
    (text,) = (result.text for result in versions.look_at_extras() if result.subject == "[imagenet]")
    assert (
        text == "installed; --pretrained and networks that are not built in need torchvision: pip install torchvision"
    )


def test_what_is_missing_of_mpi_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for program in ("/usr/bin/mpirun", None):
        for has_module in (True, False):
            monkeypatch.setattr(cluster.shutil, "which", lambda name, found=program: found)
            monkeypatch.setattr(cluster, "is_installed", lambda found=has_module: found)
            text = cluster._mpi().text
            assert ("pip install mpi4py" in text) is not has_module
            assert ("apt install openmpi-bin" in text) is (program is None)
            assert (program or "no mpirun") in text


def test_what_is_said_of_gpus_is_what_was_published() -> None:
    """In the report, in README and on the page of GPUs."""
    checks = json.loads((PAGE.parents[1] / "benchmarks" / "results" / "gpu.json").read_text())["checks"]
    outcomes = [check["outcome"] for check in checks]
    count, passed, failed = len(outcomes), outcomes.count("passed"), outcomes.count("failed")
    said = f"of {count} checks {passed} passed and {failed} failed" if failed else f"all {count} checks passed"
    texts = [
        cluster.RUNS_ON_GPUS,
        *(path.read_text() for path in (PAGE.parents[1] / "README.md", PAGE.with_name("gpu.md"))),
    ]
    assert passed + failed == count
    for text in texts:
        assert said in " ".join(text.split())


def test_too_many_threads_come_with_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4096")
    found = {result.subject: result for result in limits.look()}
    assert "OMP_NUM_THREADS=4096" in found["cores"].text
    assert found["cores"].command == "unset OMP_NUM_THREADS"


def test_what_is_needed_and_missing_is_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = CheckResult("shared memory", "no space", "make some", "rm big", is_needed=True)
    monkeypatch.setattr("lockstep.tools.doctor.examine", lambda: iter([missing]))
    assert cli.main(["doctor"]) == 1
    assert "MISSING  shared memory   no space\n" + 25 * " " + "-> make some\n" + 25 * " " + "-> $ rm big\n" in (
        capsys.readouterr().out
    )


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Control groups of a container: files that tests write, in the folder that is returned."""
    monkeypatch.setattr(control_groups, "_CGROUPS", tmp_path)
    monkeypatch.setattr(control_groups, "_OF_PROCESS", tmp_path / "self")
    monkeypatch.setattr(control_groups, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(limits, "visible_cores", lambda: 8)
    (tmp_path / "meminfo").write_text("MemTotal: 64000000 kB\nMemAvailable: 32000000 kB\n")
    return tmp_path


def test_container_of_version_2(container: Path) -> None:
    (container / "self").write_text("0::/pod/mine\n")
    (container / "pod/mine").mkdir(parents=True)
    (container / "pod/mine/cpu.max").write_text("max 100000\n")
    (container / "pod/cpu.max").write_text("250000 100000\n")  # the group above decides
    (container / "pod/mine/memory.max").write_text(f"{3 << 30}\n")
    (container / "pod/mine/memory.current").write_text(f"{1 << 30}\n")
    (container / "pod/mine/pids.max").write_text("100\n")
    assert control_groups.allowed_cores() == 2.5
    assert control_groups.available_mib() == 2048
    found = {result.subject: result for result in limits.look()}
    assert found["cores"].command == "lockstep run --nproc 2 train.py"
    assert found["memory"].command == "lockstep run --nproc 2 train.py"
    assert found["processes"].text == "at most 100"
    assert found["processes"].command == "docker run --pids-limit=4096 IMAGE", "no ulimit lifts that of a container"


@pytest.mark.parametrize(
    ("hard", "command"),
    [(4096, "ulimit -n 4096"), (1 << 60, "ulimit -n 65536"), (64, "sudo prlimit --pid $$ --nofile=65536:65536")],
)
def test_command_for_more_files_brings_more(monkeypatch: pytest.MonkeyPatch, hard: int, command: str) -> None:
    monkeypatch.setattr(limits, "_soft_and_hard", lambda _: (64, hard))
    found = {result.subject: result for result in limits.look()}
    assert found["open files"].command == command


def test_container_of_version_1(container: Path) -> None:
    (container / "self").write_text("5:cpu,cpuacct:/mine\n4:memory:/mine\n")
    (container / "cpu,cpuacct/mine").mkdir(parents=True)
    (container / "cpu,cpuacct/mine/cpu.cfs_quota_us").write_text("50000\n")
    (container / "cpu,cpuacct/mine/cpu.cfs_period_us").write_text("100000\n")
    (container / "cpu,cpuacct/cpu.cfs_quota_us").write_text("-1\n")
    (container / "cpu,cpuacct/cpu.cfs_period_us").write_text("100000\n")
    (container / "memory/mine").mkdir(parents=True)
    (container / "memory/mine/memory.limit_in_bytes").write_text(f"{100 << 20}\n")
    (container / "memory/mine/memory.usage_in_bytes").write_text(f"{90 << 20}\n")
    assert control_groups.allowed_cores() == 0.5
    found = {result.subject: result for result in limits.look()}
    assert found["cores"].command == "lockstep run --nproc 1 train.py"
    assert "even one rank may be killed" in found["memory"].remedy


def test_no_container(container: Path) -> None:
    assert control_groups.allowed_cores() is None
    assert control_groups.available_mib() == 31250
    assert {result.status for result in limits.look() if result.subject in ("cores", "memory")} == {"ok"}


@pytest.mark.parametrize(
    ("version", "status"), [("2.5.1", "missing"), ("2.13.0+cpu", "ok"), ("99.0.0", "look")], ids=str
)
def test_versions_of_torch(monkeypatch: pytest.MonkeyPatch, version: str, status: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert {result.subject: result for result in versions.look()}["torch"].status == status


def test_little_room_for_loader_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "_free_mib", lambda folder: 63)
    found = sharing._loader_workers()
    assert found.status == "look"
    assert found.command == "mount -o remount,size=8G /dev/shm"


def test_no_room_at_all_for_loader_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "_free_mib", lambda folder: 1)
    assert sharing._loader_workers().status == "missing"
    monkeypatch.setattr(sharing, "_free_mib", lambda folder: 100_000)
    monkeypatch.setattr("os.access", lambda path, mode: path != "/dev/shm")
    found = sharing._loader_workers()
    assert (found.status, found.command) == ("missing", "mount -o remount,rw /dev/shm")


@pytest.mark.parametrize(
    ("error", "command"),
    [
        ("libtorch_cpu.so: failed to map segment from shared object", "ulimit -v unlimited"),
        ("libgomp.so.1: cannot open shared object file", "pip install --force-reinstall 'torch>=2.6'"),
    ],
)
def test_torch_that_does_not_load(
    error: str, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is one result, and the report continues with what can be said without torch."""

    class Refusing:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name == "torch.distributed":
                raise ImportError(error)

    monkeypatch.delitem(sys.modules, "torch.distributed")
    monkeypatch.setattr(sys, "meta_path", [Refusing(), *sys.meta_path])
    assert cli.main(["doctor", "--json"]) == 1
    found = {one["subject"]: one for one in json.loads(capsys.readouterr().out)}
    assert (found["torch"]["status"], found["torch"]["command"]) == ("missing", command)
    assert error in found["torch"]["text"]
    assert {"cores", "loader workers", "launcher", "GPUs", "host name"} <= set(found)
    assert not {"shared memory", "two ranks"} & set(found)


def test_ranks_that_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise WorkerFailed("rank 1 was killed\nby signal 9", 1, 137)

    monkeypatch.setattr("lockstep.launch.spawn.spawn", refuse)
    found = sharing._two_ranks()
    assert (found.status, found.command) == ("missing", "lockstep doctor --capabilities")
    assert found.text == "failed: WorkerFailed: rank 1 was killed"


def test_host_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> str:
        raise OSError("unknown")

    monkeypatch.setattr(socket, "gethostbyname", fail)
    found = {result.subject: result for result in cluster.look()}["host name"]
    assert found.command.startswith("echo '127.0.1.1 ")


def test_verbs_that_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "find_columns", lambda: [Column("lockstep", "lockstep", "cpu"), ABSENT])
    assert cli.main(["doctor", "--capabilities", "--format", "json"]) == 0
    ours, absent = json.loads(capsys.readouterr().out)
    assert ours["verbs"] == {verb: {"works": True, "trouble": None} for verb in VERBS}
    assert absent["absent"] == "no GPUs"
    assert absent["verbs"]["send"] == {"works": None, "trouble": None}


ABSENT = Column("lockstep", "lockstep", "cuda", "no GPUs")


def test_backend_that_cannot_be_used_costs_one_start() -> None:
    column = Column("none", "nonesuch", "cpu")
    measure.measure(column, list(CLASSIC))
    assert set(column.troubles) == set(CLASSIC)
    assert all("a rank exited with code 1" in trouble for trouble in column.troubles.values())


def test_verb_that_ends_its_ranks_costs_itself(tmp_path: Path) -> None:
    for rank, last in enumerate(('{"verb": "b", "state": "begun"}', '{"verb": "b", "state": "done", "trouble": ""}')):
        done = '{"verb": "a", "state": "begun"}\n{"verb": "a", "state": "done", "trouble": "odd"}\n'
        (tmp_path / f"rank{rank}.jsonl").write_text(done + last + "\n")
    assert measure._read(tmp_path) == {"a": ["odd", "odd"], "b": [None, ""]}


def test_forms() -> None:
    column = Column("gloo", "gloo", "cpu", troubles={"send": "", "recv": "RuntimeError: no"})
    text = table.as_text([column, ABSENT], ["send", "recv"])
    assert text.splitlines()[2:4] == ["send     ✓         ?", "recv     ✘         ?"]
    assert "gloo, CPU, recv: RuntimeError: no" in text
    assert "lockstep, GPU: no GPUs" in text
    page = table.as_markdown([column, ABSENT], ["send", "recv"])
    assert "| recv | ✘ | ? |" in page


def test_page_has_every_verb() -> None:
    rows = [line.split("|")[1].strip() for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    assert rows[1:] == list(VERBS) or rows == list(VERBS), "run `lockstep doctor --capabilities --format markdown`"
