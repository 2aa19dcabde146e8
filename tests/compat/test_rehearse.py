"""`lockstep rehearse` on whole scripts: every kind of finding where there is one, none where there is none."""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import Sampler
from warm_launcher import WarmLauncher

from lockstep.launch.free_port import find_free_port
from lockstep.testing import limit_s
from lockstep.tools.rehearse.findings import KINDS

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).with_name("rehearsals")
DOCS = ROOT / "docs" / "rehearse.md"
_FAULT = re.compile(r"# fault: (.+)")


@dataclass(frozen=True)
class Rehearsed:
    """One rehearsal: how it ended, what was printed, and its report."""

    code: int
    output: str
    report: dict[str, Any]

    @property
    def found(self) -> set[tuple[str, int]]:
        """Kind and line of every finding."""
        return {(one["id"], one["line"]) for one in self.report["findings"]}


def rehearse(warm: WarmLauncher, tmp_path: Path, *words: str) -> Rehearsed:
    """Of processes that are forked; those of tests/compat/test_imagenet_commands.py start anew."""
    report = tmp_path / "report.json"
    words = ("rehearse", "--format", "json", "--output", str(report), *words)
    done = warm.run(*words, folder=tmp_path, timeout_s=limit_s(120))
    output = done.stdout + done.stderr
    assert report.exists(), output
    return Rehearsed(done.returncode, output, json.loads(report.read_text()))


def marked(name: str) -> set[tuple[str, int]]:
    """Kind and line of every fault that the program says it has."""
    lines = (PROGRAMS / name).read_text().splitlines()
    return {
        (kind.strip(), number)
        for number, line in enumerate(lines, 1)
        if (found := _FAULT.search(line))
        for kind in found.group(1).split(",")
    }


def test_every_kind_has_a_program_and_a_row_in_the_manual() -> None:
    shown = {kind for program in PROGRAMS.glob("*.py") for kind, _ in marked(program.name)}
    assert shown == set(KINDS)
    rows = re.findall(r"^\| `([a-z][a-z-]+)` \| (.+?) \| (.+?) \|$", DOCS.read_text(), re.MULTILINE)
    assert rows == [(kind.id, kind.title, kind.fix) for kind in KINDS.values()]


def test_faults_of_training_are_found_at_their_lines(warm: WarmLauncher, tmp_path: Path) -> None:
    done = rehearse(
        warm, tmp_path, "--nproc", "2", "--strict", str(PROGRAMS / "faulty_training.py"), "--checkpoint", "state.pt"
    )
    assert done.found == marked("faulty_training.py"), done.output
    assert done.code == 1  # the script itself went well
    assert done.report["exit_code"] == 0
    assert (done.report["version"], done.report["ranks"], done.report["gpus_per_node"]) == (1, 2, 2)
    unused = next(one for one in done.report["findings"] if one["id"] == "reduced-value-unused")
    assert unused["called_from"][0]["function"] == "main"  # who threw the value away


def test_nothing_is_found_in_what_is_right(warm: WarmLauncher, tmp_path: Path) -> None:
    done = rehearse(
        warm, tmp_path, "--nproc", "2", "--strict", str(PROGRAMS / "clean_training.py"), "--checkpoint", "state.pt"
    )
    assert done.report["findings"] == []
    assert done.code == 0, done.output
    assert "nothing found" in done.output


def test_wrong_identities_are_found(warm: WarmLauncher, tmp_path: Path) -> None:
    done = rehearse(warm, tmp_path, "--nproc", "2", str(PROGRAMS / "faulty_identity.py"))
    assert done.found == marked("faulty_identity.py"), done.output
    assert done.code == 0  # not strict


def test_a_second_node_shows_what_a_global_rank_does(warm: WarmLauncher, tmp_path: Path) -> None:
    done = rehearse(warm, tmp_path, "--nodes", "2", "--nproc", "1", str(PROGRAMS / "faulty_identity.py"))
    assert done.code == 1
    assert "cuda:1 is asked for, but this node has 1 device(s)" in done.output
    assert ("shared-gpu", 12) not in done.found  # one rank on each node
    assert done.report["nodes"] == 2


@pytest.mark.parametrize(("which", "kind"), [("rank", "rank-only-collective"), ("data", "branch-dependent-collective")])
def test_ranks_that_part_are_found_instead_of_a_hang(warm: WarmLauncher, tmp_path: Path, which: str, kind: str) -> None:
    done = rehearse(warm, tmp_path, "--nproc", "2", str(PROGRAMS / "faulty_branches.py"), which)
    assert done.code == 1
    assert done.found == {(found, line) for found, line in marked("faulty_branches.py") if found == kind}, done.output


def test_a_collective_that_one_rank_leaves_out_on_a_row_of_a_mesh_is_found(warm: WarmLauncher, tmp_path: Path) -> None:
    done = rehearse(warm, tmp_path, "--nproc", "4", str(PROGRAMS / "faulty_mesh.py"))
    assert done.code == 1
    assert done.found == marked("faulty_mesh.py"), done.output
    (finding,) = done.report["findings"]
    assert finding["what"] == "rank 2 called all_reduce(float32[1], SUM), but rank 3 called no further collective"


def test_the_number_of_slurm_tasks_is_not_the_number_of_ranks(warm: WarmLauncher, tmp_path: Path) -> None:
    done = rehearse(warm, tmp_path, "--nproc", "2", str(PROGRAMS / "faulty_slurm.py"))
    assert done.code == 1
    assert done.found == marked("faulty_slurm.py"), done.output


def test_what_a_script_sees_of_cuda(warm: WarmLauncher, tmp_path: Path) -> None:
    words = ("--nproc", "2", "--start", "once", "--memory", "64MiB")
    done = rehearse(warm, tmp_path, *words, str(PROGRAMS / "stand_ins.py"))
    assert done.code == 0, done.output
    assert "all of it holds" in done.output
    assert {one["id"] for one in done.report["findings"]} == set()


def test_a_build_for_cuda_keeps_its_version() -> None:
    """torchvision requires its own, and fails to import with another."""
    words = "import torch; torch.version.cuda = '13.0'; from lockstep.tools.rehearse.devices import install; install(1)"
    subprocess.run([sys.executable, "-c", f"{words}; assert torch.version.cuda == '13.0'"], check=True)


def test_meshes_and_what_is_sharded_over_them(warm: WarmLauncher, tmp_path: Path) -> None:
    done = rehearse(warm, tmp_path, "--nproc", "2", str(PROGRAMS / "sharded.py"))
    assert done.code == 0, done.output
    assert done.output.count("all of it holds") == 2
    assert (done.report["ranks"], done.report["findings"]) == (2, [])  # the mesh has joined the group


def test_apex_casts_as_on_a_gpu(warm: WarmLauncher, tmp_path: Path) -> None:
    done = rehearse(warm, tmp_path, "--nproc", "1", str(PROGRAMS / "apex_casts.py"))
    assert done.code == 0, done.output
    assert "all of it holds" in done.output


@pytest.mark.skipif(torch.__version__.startswith("2.6."), reason="a known gap with torch 2.6: docs/rehearse.md")
def test_children_that_fail_are_found(warm: WarmLauncher, tmp_path: Path) -> None:
    done = rehearse(warm, tmp_path, "--nproc", "1", str(PROGRAMS / "faulty_children.py"))
    assert done.found == marked("faulty_children.py"), done.output
    assert (done.code, done.report["exit_code"]) == (1, 0), done.output  # not strict
    assert "Process-3, which ran work, exited with code 1; Process-4" in done.report["findings"][0]["what"]
    assert "exited with code 7" in done.report["findings"][0]["what"]


@pytest.mark.parametrize("name", ["horovod_sgd.py", "distributed_sgd.py", "apex_amp.py"])
def test_nothing_is_found_in_the_examples(warm: WarmLauncher, tmp_path: Path, name: str) -> None:
    done = rehearse(warm, tmp_path, "--nproc", "2", "--strict", str(ROOT / "examples" / name))
    assert (done.report["findings"], done.code) == ([], 0), done.output


def test_evaluation_that_no_rank_shares_and_values_that_no_caller_uses(warm: WarmLauncher, tmp_path: Path) -> None:
    done = rehearse(warm, tmp_path, "--nodes", "2", "--nproc", "1", str(PROGRAMS / "faulty_evaluation.py"))
    assert done.found == marked("faulty_evaluation.py"), done.output
    # train() uses what the same line reduces.
    unused = [one for one in done.report["findings"] if one["id"] == "reduced-value-unused"]
    assert [one["called_from"][0]["function"] for one in unused] == ["validate", "count"]


def test_gpus_of_a_node_taken_for_those_of_the_job(warm: WarmLauncher, tmp_path: Path) -> None:
    done = rehearse(warm, tmp_path, "--nproc", "2", str(PROGRAMS / "faulty_worlds.py"))
    assert (done.found, done.code) == (marked("faulty_worlds.py"), 0), done.output


def test_gpus_of_a_node_where_ranks_are_more(warm: WarmLauncher, tmp_path: Path) -> None:
    """The division by 2, which makes no mean of 4 ranks."""
    done = rehearse(warm, tmp_path, "--nproc", "4", "--gpus", "2", str(PROGRAMS / "faulty_divisor.py"))
    assert (done.found, done.code) == (marked("faulty_divisor.py"), 0), done.output


def test_ranks_that_two_nodes_start_for_one_group_are_judged_together(warm: WarmLauncher, tmp_path: Path) -> None:
    done = rehearse(warm, tmp_path, "--nodes", "2", "--nproc", "1", str(PROGRAMS / "faulty_spawn_nodes.py"))
    assert (done.found, done.code) == (marked("faulty_spawn_nodes.py"), 0), done.output
    assert done.report["ranks"] == 2


def test_script_that_is_started_once_sees_no_launcher(
    warm: WarmLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    words = ("--nproc", "2", "--no-prefix", "--strict", str(PROGRAMS / "clean_plain.py"), str(find_free_port()))
    done = rehearse(warm, tmp_path, *words)
    assert (done.report["findings"], done.report["ranks"], done.code) == ([], 2, 0), done.output
    seen = json.loads(next(line for line in done.output.splitlines() if line.startswith("{")))
    different = {name for name in seen.keys() | os.environ.keys() if seen.get(name) != os.environ.get(name)}
    assert {name for name in different if not name.startswith("LOCKSTEP_")} <= {"CUDA_VISIBLE_DEVICES", "PATH"}


def test_copies_that_join_no_group(warm: WarmLauncher, tmp_path: Path) -> None:
    done = rehearse(warm, tmp_path, "--nproc", "2", str(PROGRAMS / "faulty_copies.py"))
    assert (done.found, done.code) == (marked("faulty_copies.py"), 0), done.output
    assert (done.report["ranks"], done.report["processes"]) == (1, 2)


def test_jobs_of_two_nodes_that_know_nothing_of_each_other(warm: WarmLauncher, tmp_path: Path) -> None:
    done = rehearse(warm, tmp_path, "--nodes", "2", "--nproc", "1", str(PROGRAMS / "clean_spawn.py"))
    lines = (PROGRAMS / "clean_spawn.py").read_text().splitlines()
    number = next(number for number, line in enumerate(lines, 1) if "fault on two nodes" in line)
    assert done.found == {("checkpoint-by-copies", number)}, done.output


def test_what_only_lockstep_lets_through(warm: WarmLauncher, tmp_path: Path) -> None:
    done = rehearse(warm, tmp_path, "--nproc", "2", str(PROGRAMS / "faulty_older.py"))
    needless = {
        ("needs-older-torch", number)
        for number, line in enumerate((PROGRAMS / "faulty_older.py").read_text().splitlines(), 1)
        if ("verbose=True" in line and "verbose" in inspect.signature(StepLR).parameters)
        or ("super().__init__(data)" in line and Sampler.__init__ is not object.__init__)
    }
    assert (done.found, done.code) == (marked("faulty_older.py") - needless, 0), done.output


def test_what_only_lockstep_lets_through_in_ranks_that_the_script_starts(warm: WarmLauncher, tmp_path: Path) -> None:
    done = rehearse(warm, tmp_path, "--nproc", "2", str(PROGRAMS / "faulty_older_spawn.py"))
    assert (done.found, done.code) == (marked("faulty_older_spawn.py"), 0), done.output
    assert done.output.count("DataLoader and BatchSampler take whole floats as batch_size (faulty_older_spawn.py:") == 1


@pytest.mark.parametrize("name", ["clean_copies.py", "clean_older.py", "clean_accelerate.py", "clean_fabric.py"])
def test_nothing_is_found_where_it_only_looks_wrong(warm: WarmLauncher, tmp_path: Path, name: str) -> None:
    done = rehearse(warm, tmp_path, "--nproc", "2", "--strict", str(PROGRAMS / name))
    assert (done.report["findings"], done.code) == ([], 0), done.output


def test_a_module_that_asks_the_cluster_who_it_is(warm: WarmLauncher, tmp_path: Path) -> None:
    shutil.copy(PROGRAMS / "clean_cluster.py", tmp_path)
    done = rehearse(warm, tmp_path, "--nproc", "2", "--strict", "-m", "clean_cluster")
    assert (done.report["findings"], done.code) == ([], 0), done.output


def test_nothing_is_found_where_nodes_and_ranks_are_told_apart(warm: WarmLauncher, tmp_path: Path) -> None:
    # Wherever the folders of tests are, a folder of temporary files is one that a node has for itself.
    with tempfile.TemporaryDirectory() as disk:
        words = ("--nodes", "2", "--nproc", "2", "--strict", str(PROGRAMS / "clean_worlds.py"), "--node-disk", disk)
        done = rehearse(warm, tmp_path, *words)
    assert (done.report["findings"], done.code) == ([], 0), done.output
