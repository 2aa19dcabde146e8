"""A real Slurm with two nodes: who is who, the digits under srun and sbatch, submitting, requeueing."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import slurm_harness
from lockstep.recipes import digits, imagenet
from lockstep.recipes.imagenet.shapes import ShapesFolder, write_shapes
from lockstep.testing import limit_s, run_ranks
from lockstep.topology.slurm_forms import expand_hosts
from slurm_harness import SlurmCluster

_REASON = slurm_harness.why_not()
pytestmark = pytest.mark.skipif(_REASON is not None, reason=f"no Slurm: {_REASON}")

# See tests/parity/test_train_parity.py for where this comes from.
TOLERANCE = 1e-12
STEPS = 23  # 1438 images in batches of 64
IMAGES = 359  # held out

ENDS = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
LOCKSTEP = (sys.executable, "-m", "lockstep")


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with SlurmCluster() as cluster:
        yield cluster
    assert slurm_harness.processes_of(cluster.folder) == []
    assert not cluster.folder.exists()


def script(folder: Path, text: str, name: str = "script.py") -> str:
    path = folder / name
    path.write_text(textwrap.dedent(text).lstrip("\n"))
    return str(path)


def submit(cluster: SlurmCluster, folder: Path, *words: str, **extra: str) -> tuple[str, Path]:
    """`lockstep run --slurm …` in a folder; the job's number and its log."""
    done = cluster.run("sh", "-c", 'cd "$0" && exec "$@"', str(folder), *LOCKSTEP, "run", "--slurm", *words, **extra)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    return first.split()[1].rstrip(":"), Path(second.removeprefix("log: "))


# ---- host lists -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "n1",
        "login,n1",
        "n[1-3]",
        "n[1-3,7]",
        "n[1-3,7],gpu-a[01-04],login",
        "n[08-11]",
        "n[8-011]",
        "n[08-9]",
        "n[098-102]",
        "n[001,2,03]",
        "tux[0001-0003,10]",
        "n[1,1,1],n1",
        "r[1-2]n[1-3]",
        "r[1,3]n[08-10]",
        "n[1-2][3-4]",
        "[1-3]",
        "123",
        "node-1-[2-3],node-2-[0-1]",
        "n[0-3],m[00-03]",
        "a,,b,",
        "n[0-255]",
    ],
)
def test_hosts_are_those_that_slurm_shows(cluster: SlurmCluster, text: str) -> None:
    shown = cluster.run("scontrol", "show", "hostnames", text).stdout.split()
    assert shown
    assert list(expand_hosts(text)) == shown


@pytest.mark.parametrize("text", ["n[]", "n[3-1]", "n[a-b]", "n[1-2-3]", "n[-2]", "n[1,]", "n[1-2]]", "n[0-70000]"])
def test_what_slurm_refuses_is_no_host_list(cluster: SlurmCluster, text: str) -> None:
    assert cluster.run("scontrol", "show", "hostnames", text).stdout.split() == []
    with pytest.raises(ValueError):
        expand_hosts(text)


# ---- who is who -----------------------------------------------------------------------------------

PROBE = """
    import dataclasses, json
    from lockstep import env
    from lockstep.errors import LockstepError
    from lockstep.rendezvous.slurm import master_address, master_port
    from lockstep.topology import read_topology
    from lockstep.topology.slurm import describe_allocation, read_step

    variables = env.snapshot()
    found = dataclasses.asdict(read_topology(variables)) | {"allocation": describe_allocation(variables)}
    step = read_step(variables)
    if step is not None:
        try:
            found["master"] = [master_address(step), master_port(step)]
        except LockstepError as error:
            found["error"] = str(error)
    print(json.dumps(found))
"""


def records(text: str) -> list[dict[str, Any]]:
    """What the probes have printed, by rank."""
    found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return sorted(found, key=lambda record: record["rank"])


def probe(cluster: SlurmCluster, folder: Path, *words: str, **extra: str) -> list[dict[str, Any]]:
    done = cluster.run(*words, sys.executable, script(folder, PROBE), **extra)
    assert done.returncode == 0, done.stderr
    return records(done.stdout)


@pytest.mark.parametrize(
    ("options", "tasks"),
    [
        (["-N2", "-n3"], [2, 1]),
        (["-N2", "-n4", "--distribution=cyclic"], None),
        (["-N2", "-n5", "--distribution=block"], None),
        (["-N2", "--ntasks-per-node=2"], [2, 2]),
        (["-N1", "-n3"], [3]),
        (["-N1", "-n1"], [1]),
        (["--nodelist=n2", "-n2"], [2]),
    ],
)
def test_tasks_of_a_step(cluster: SlurmCluster, tmp_path: Path, options: list[str], tasks: list[int] | None) -> None:
    ranks = probe(cluster, tmp_path, "srun", *options)
    assert [record["rank"] for record in ranks] == list(range(len(ranks)))
    places = {(record["node_rank"], record["local_rank"]) for record in ranks}
    assert len(places) == len(ranks), "two ranks in one place"
    counts = [sum(node == number for node, _ in places) for number in range(ranks[0]["num_nodes"])]
    assert tasks in (None, counts)
    for record in ranks:
        assert record["world_size"] == len(ranks)
        assert record["local_world_size"] == counts[record["node_rank"]]
        assert record["launcher"] == "slurm"
        assert len(record["hosts"]) == len(counts)
        assert record["allocation"] is None
    # The names resolve nowhere: the address is Slurm's.
    assert {record["master"][0] for record in ranks} == {"127.0.0.1"}
    assert len({record["master"][1] for record in ranks}) == 1


def test_steps_of_one_job_and_its_shell(cluster: SlurmCluster, tmp_path: Path) -> None:
    """The shell of a batch script is alone; a step may hold less than the job; each step has a port of its own."""
    python = f"{sys.executable} {script(tmp_path, PROBE)}"
    (tmp_path / "batch.sh").write_text(
        f"#!/bin/bash\n{python}\nsrun {python}\nsrun -N1 -n1 {python}\nsrun -N2 -n2 {python}\n"
    )
    log = tmp_path / "log"
    job_id = cluster.run(
        "sbatch", "--parsable", "-N2", "-n4", f"--output={log}", str(tmp_path / "batch.sh")
    ).stdout.strip()
    assert cluster.wait_for(job_id, *ENDS)["JobState"] == "COMPLETED", log.read_text()
    # srun may write lines of its own between them, such as that it waits for the step before.
    found = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    shell, all_tasks, one, two = found[0], found[1:5], found[5], found[6:]
    assert (shell["rank"], shell["world_size"], shell["launcher"]) == (0, 1, "single")
    assert shell["allocation"] == f"job {job_id} of Slurm has 4 tasks on 2 nodes"
    assert [record["world_size"] for record in (*all_tasks, one, *two)] == [4] * 4 + [1] + [2] * 2
    assert [(r["num_nodes"], r["local_world_size"]) for r in (one, *two)] == [(1, 1), (2, 1), (2, 1)]
    assert len({record["master"][1] for record in (*all_tasks, one, *two)}) == 3


@pytest.mark.parametrize("submitted_in_a_step", [False, True])
def test_shells_are_alone(cluster: SlurmCluster, tmp_path: Path, submitted_in_a_step: bool) -> None:
    if submitted_in_a_step:
        # sbatch hands on the variables of the step that it was called in.
        words = ["srun", "-n1", "sbatch", "--parsable", "-n3", f"--output={tmp_path}/log", "--wrap"]
        job_id = cluster.run(*words, f"{sys.executable} {script(tmp_path, PROBE)}").stdout.strip()
        assert cluster.wait_for(job_id, *ENDS)["JobState"] == "COMPLETED"
        (found,) = records((tmp_path / "log").read_text())
    else:
        (found,) = probe(cluster, tmp_path, "salloc", "--quiet", "-n3")
    assert (found["world_size"], found["launcher"]) == (1, "single")
    assert "has 3 tasks on 1 node" in found["allocation"]


def type_into(cluster: SlurmCluster, words: list[str], *lines: str) -> str:
    """What is to be read on the terminal where somebody runs a program and types these lines."""
    ours, terminal = os.openpty()
    program = subprocess.Popen(words, env=cluster.environment, stdin=terminal, stdout=terminal, stderr=terminal)
    os.close(terminal)
    try:
        os.write(ours, "".join(f"{line}\n" for line in lines).encode())
        read = b""
        with contextlib.suppress(OSError):  # nobody has the terminal any more
            while select.select([ours], [], [], limit_s(60))[0] and (piece := os.read(ours, 65536)):
                read += piece
    finally:
        os.close(ours)
        program.terminate()
        program.wait(limit_s(60))
    return read.decode(errors="replace")


@pytest.mark.parametrize("tasks", [2, 3])
def test_shell_of_a_step_is_alone_whatever_its_number_of_tasks(
    cluster: SlurmCluster, tmp_path: Path, tasks: int
) -> None:
    """And a script that `srun --pty` starts itself is a rank."""
    path = script(tmp_path, PROBE)
    shown = type_into(cluster, ["srun", f"-n{tasks}", "--pty", "bash", "--norc"], f"{sys.executable} {path}", "exit")
    (found,) = records(shown)
    assert (found["world_size"], found["launcher"]) == (1, "single")
    assert f"has {tasks} tasks on 1 node" in found["allocation"]
    shown = type_into(cluster, ["srun", f"-n{tasks}", "--pty", sys.executable, path])
    assert (records(shown)[0]["rank"], records(shown)[0]["world_size"]) == (0, tasks)


def test_hosts_without_an_address(cluster: SlurmCluster, tmp_path: Path) -> None:
    """The first node does not resolve, and there is no scontrol to ask."""
    first, second = probe(cluster, tmp_path, "srun", "-N2", "-n2", "env", f"PATH={tmp_path}")
    assert first["error"] == second["error"]
    assert "host n1, where rank 0 runs, has no address here" in first["error"]
    assert "Set MASTER_ADDR to an address of n1" in first["error"]


# ---- training -------------------------------------------------------------------------------------

DIGITS = ("--epochs", "1", "--dtype", "float64", "--name")


def train_alone(*options: str) -> int:
    """The recipe in a process that has torch already."""
    parser = argparse.ArgumentParser()
    digits.add_arguments(parser)
    return digits.main(parser.parse_args(options))


def records_of(run: Path) -> tuple[list[float], dict[str, Any]]:
    """The loss of every step, and the last epoch."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "step"], [x for x in lines if x["kind"] == "epoch"][-1]


def test_digits_on_two_nodes_give_the_answer_of_one_process(cluster: SlurmCluster, tmp_path: Path) -> None:
    """Submitted, a rank on each node. Tasks of srun, two and one: the images below."""
    pytest.importorskip("sklearn")
    pytest.importorskip("tensorboard")
    job_id, log = submit(cluster, tmp_path, "--nodes", "2", "--no-prefix", "-m", digits.__name__, *DIGITS, "sbatch")
    alone = (*DIGITS, "one", "--out", str(tmp_path / "runs"), "--quiet")
    assert run_ranks(train_alone, 1, *alone, init=False) == [0]
    job = cluster.wait_for(job_id, *ENDS, timeout_s=120)
    printed = log.read_text()
    assert job["JobState"] == "COMPLETED", printed
    assert "digits: 2 ranks on " in printed
    expected, expected_result = records_of(tmp_path / "runs" / "one")
    found, result = records_of(tmp_path / "runs" / "sbatch")
    assert len(found) == len(expected) == STEPS
    assert found == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE)
    assert result["held_out_correct"] == expected_result["held_out_correct"] > 0.9 * IMAGES
    (accuracy,) = [line for line in printed.splitlines() if "accuracy, held out" in line]
    assert f"{result['held_out_correct']} of {IMAGES} images, each counted once" in accuracy


def train_images_alone(*options: str) -> int:
    parser = argparse.ArgumentParser()
    imagenet.add_arguments(parser)
    return imagenet.main(parser.parse_args(options))


def test_imagenet_in_tasks_of_two_nodes_gives_the_answer_of_one_process(cluster: SlurmCluster, tmp_path: Path) -> None:
    images, out = tmp_path / "images", str(tmp_path / "runs")
    write_shapes(ShapesFolder(images, classes=2, images=17, val_images=5, size=16))
    quick = ("-a", "tiny", "--size", "16", "-b", "6", "-j", "0", "-p", "1", "--epochs", "1", "--precision", "fp64")
    options = (str(images), *quick, "--quiet", "--out", out)
    assert run_ranks(train_images_alone, 1, *options, "--name", "one", init=False) == [0]
    words = ("train", "imagenet", "--strategy", "slurm", *options, "--name", "two")
    done = cluster.run("srun", "-N2", "-n3", "--kill-on-bad-exit=1", *LOCKSTEP, *words, OMP_NUM_THREADS="1")
    assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{cluster.logs()}"
    (expected, expected_epoch), (found, epoch) = (records_of(tmp_path / "runs" / name) for name in ("one", "two"))
    assert len(found) == 3
    assert found == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE)
    assert epoch["held_out_loss"] == pytest.approx(expected_epoch["held_out_loss"], rel=TOLERANCE)
    assert epoch["held_out_images"] == 5


def test_ranks_of_one_node_open_no_port_and_leave_no_folder(cluster: SlurmCluster, tmp_path: Path) -> None:
    program = """
        import os, re, tempfile
        import torch, torch.distributed as dist
        import lockstep

        with lockstep.init() as world:
            total = torch.tensor([world.rank + 1.0])
            dist.all_reduce(total)
            own = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if fd.isdigit()
                   and os.path.islink(f"/proc/self/fd/{fd}")}
            rows = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}")]
            listening = [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own]
            left = [name for name in os.listdir(tempfile.gettempdir()) if name.startswith("lockstep-")]
            print(f"{world.rank} {world.backend} {total.item()} {listening} {left}", flush=True)
            os.kill(os.getpid(), 9)
    """
    (tmp_path / "tmp").mkdir()
    done = cluster.run(
        "srun",
        "-N1",
        "-n2",
        sys.executable,
        script(tmp_path, program),
        TMPDIR=str(tmp_path / "tmp"),
        OMP_NUM_THREADS="1",
    )
    assert sorted(done.stdout.splitlines()) == ["0 lockstep 3.0 [] []", "1 lockstep 3.0 [] []"], done.stderr
    assert list((tmp_path / "tmp").iterdir()) == [], "also after kill -9"


# ---- submitting -----------------------------------------------------------------------------------


def test_what_is_asked_for_is_given(cluster: SlurmCluster, tmp_path: Path) -> None:
    program = """
        import json, os
        names = "SLURM_NTASKS", "SLURM_NNODES", "SLURM_JOB_NAME", "SLURM_JOB_PARTITION", "CUDA_VISIBLE_DEVICES"
        print(json.dumps([*map(os.environ.get, (*names, "SLURM_CPUS_PER_TASK", "OMP_NUM_THREADS")), os.sys.argv[1:]]))
    """
    script(tmp_path, program, "train.py")
    words = ["--nodes=2", "--gpus-per-node=2", "--cpus-per-task=2", "--time=5", "--partition=main", "--job-name=my job"]
    job_id, log = submit(
        cluster, tmp_path, *words, "--output=logs/%j.txt", '--sbatch-arg=--comment=a "b"', "train.py", "a b", "$HOME"
    )
    job = cluster.wait_for(job_id, *ENDS)
    assert log == tmp_path / "logs" / f"{job_id}.txt"
    assert job["JobState"] == "COMPLETED", log.read_text()
    assert (job["TimeLimit"], job["JobName"]) == ("00:05:00", "my")  # scontrol does not quote: "my job"
    # Each line has its rank before it.
    lines = dict(line.split(": ", 1) for line in sorted(log.read_text().splitlines()))
    assert list(lines) == ["0", "1", "2", "3"]
    for line in lines.values():
        assert json.loads(line) == ["4", "2", "my job", "main", "0,1", "2", "2", ["a b", "$HOME"]]
    assert 'a "b"' in cluster.run("squeue", "--noheader", "--states=all", f"--jobs={job_id}", "--format=%k").stdout


def test_rank_that_fails_ends_the_job(cluster: SlurmCluster, tmp_path: Path) -> None:
    program = """
        import os, sys, time
        if os.environ["SLURM_PROCID"] == "1":
            print("no luck", file=sys.stderr, flush=True)
            time.sleep(1)  # srun drops what is still under way when it ends a step
            sys.exit(1)
        time.sleep(600)
    """
    script(tmp_path, program, "train.py")
    job_id, log = submit(cluster, tmp_path, "--nodes=2", "train.py")
    assert cluster.wait_for(job_id, *ENDS, timeout_s=20)["JobState"] == "FAILED"
    assert "1: no luck" in log.read_text()


def test_job_is_requeued_before_its_time_limit(cluster: SlurmCluster, tmp_path: Path) -> None:
    """The signal that Slurm sends a minute before the limit comes from scancel here."""
    program = """
        import os, pathlib, time
        count = os.environ.get("SLURM_RESTART_COUNT", "0")
        print("start", count, flush=True)
        pathlib.Path(f"started-{count}").touch()
        if count == "0":
            time.sleep(600)
    """
    script(tmp_path, program, "train.py")
    job_id, log = submit(cluster, tmp_path, "--requeue", "train.py")
    slurm_harness.wait_until((tmp_path / "started-0").exists, "the job starts")
    assert cluster.run("scancel", "--batch", "--signal=USR1", job_id).returncode == 0
    cluster.wait_for(job_id, "PENDING")
    assert cluster.job(job_id)["Restarts"] == "1"
    # Not at once: the credentials of the first start have to expire, which takes 5 s here and 120 s by default.
    cluster.wait_for(job_id, *ENDS)
    text = log.read_text()
    said = ["0: start 0\n", "the ranks are told to stop", f"job {job_id} goes back into the queue", "0: start 1\n"]
    places = [text.index(words) for words in said]
    assert places == sorted(places), text


def test_refusal_is_one_line(cluster: SlurmCluster, tmp_path: Path) -> None:
    script(tmp_path, "", "train.py")
    words = ["run", "--slurm", "--partition=none", str(tmp_path / "train.py")]
    done = cluster.run(*LOCKSTEP, *words)
    assert done.returncode == 2
    assert done.stderr.startswith("lockstep: error: Slurm refuses the job: ")
    assert "invalid partition specified: none" in done.stderr
    assert done.stderr.count("\n") == 1
