"""Every script of examples/ runs, at one rank and at two, and says at its end what it has shown.

Scripts check their own results. Those that a launcher starts run on ranks that are there already; those that start
ranks themselves, or need a launcher's hooks, are started as their users start them.
"""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from warm_launcher import WarmLauncher

from lockstep import env
from lockstep.launch.free_port import find_free_port
from lockstep.testing import limit_s, run_ranks

FOLDER = Path(__file__).parents[2] / "examples"

# Script -> its last line on rank 0; `{n}` stands for the number of processes.
ON_RANKS = {
    "train.py": r"epoch 4: loss \d\.\d{{12}} on {n} process",
    "trainer.py": r"best held-out loss \d\.\d{{5}} in epoch \d+, on {n} process",
    "tensors.py": r"mean 4\.8842, standard deviation 6\.0168, read by {n} process",
    "point_to_point.py": r"all messages arrived between {n} process",
    "collectives.py": r"every collective did what it says, with {n} process\(es\) on lockstep",
    "groups.py": r"groups agree among {n} process",
    "distributed_sgd.py": r"epoch 1: loss .* by hand, .* by DistributedDataParallel",
    "ddp.py": r"epoch 1: loss \d\.\d{{4}} on {n} process",
    "ddp_checkpoint.py": r"resumed with the same bits on {n} process",
    "model_parallel.py": r"loss .* -> .* on cpu and cpu, {n} process",
    "language_model.py": r"epoch 3: loss \d\.\d{{5}} per word, held out \d\.\d{{5}}, on {n} process",
    "distributed_evaluation.py": r"top-5 .* on {n} process",
}
OF_THEIR_OWN = {
    ("spawn.py", 1): ("python", ["--nproc", "1"], r"spawned 1 process\(es\) twice"),
    ("spawn.py", 2): ("python", ["--nproc", "2"], r"spawned 2 process\(es\) twice; every rank ended at"),
    ("slurm.py", 1): ("python", ["--per-node", "1"], r"1 rank\(s\) on 1 node\(s\) trained together"),
    ("slurm.py", 2): ("python", ["--per-node", "2"], r"2 rank\(s\) on 1 node\(s\) trained together"),
    ("data_parallel.py", 1): ("python", [], r"on 2 device\(s\): \['cpu', 'cpu'\]"),
    ("launch.py", 1): ("lockstep launch --nproc_per_node=1", [], r"rank 0 of 1, local rank 0: loss"),
    ("launch.py", 2): ("lockstep launch --nproc_per_node=2", ["--lr", "0.05"], r"rank 1 of 2, local rank 1: loss"),
    ("horovod_sgd.py", 1): ("lockstep run --nproc 1", [], r"epoch 1: loss .* on 1 process"),
    ("horovod_sgd.py", 2): ("lockstep horovodrun -np 2 -H localhost:2 python", [], r"epoch 1: loss .* on 2 process"),
    ("accelerate_train.py", 1): ("lockstep run --nproc 1", [], r"epoch 1: loss .* on 1 process\(es\) over lockstep"),
    ("accelerate_train.py", 2): ("lockstep run --nproc 2", [], r"epoch 1: loss .* on 2 process\(es\) over lockstep"),
    ("apex_amp.py", 1): ("lockstep run --nproc 1", ["--opt-level", "O0"], r"O0: loss .* on 1 process"),
    ("apex_amp.py", 2): ("lockstep run --nproc 2", ["--opt-level", "O2"], r"O2: loss .* on 2 process"),
}


# What the epochs of these come to, at one rank and at two, which have the same global batches, but for the last.
DDP_LOSSES = [2.2618, 2.0894]
LAST_LOSSES = {"accelerate_train.py": 2.0855, "horovod_sgd.py": 0.3940}


def test_every_example_is_run() -> None:
    assert {path.name for path in FOLDER.glob("*.py")} == {*ON_RANKS} | {name for name, _ in OF_THEIR_OWN}


def run_script(name: str, arguments: list[str], port: int) -> str:
    """What the script writes on this rank."""
    env.MASTER_ADDR.set("127.0.0.1")
    env.MASTER_PORT.set(port)
    written = io.StringIO()
    old = sys.argv
    sys.argv = [name, *arguments]
    try:
        with contextlib.redirect_stdout(written):
            runpy.run_path(str(FOLDER / name), run_name="__main__")
    finally:
        sys.argv = old
    return written.getvalue()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", ON_RANKS)
def test_on_ranks(name: str, world_size: int, tmp_path: Path) -> None:
    arguments = {"trainer.py": ["--folder", str(tmp_path / "checkpoints")]}
    arguments |= {"groups.py": ["--file", str(tmp_path / "meeting")], "ddp.py": ["--save", str(tmp_path / "model.pt")]}
    output = run_ranks(run_script, world_size, name, arguments.get(name, []), find_free_port(), init=False)[0]
    assert re.search(ON_RANKS[name].format(n=world_size), output.splitlines()[-1]), output
    if name == "ddp.py":  # what was saved is what --pretrained takes
        assert losses_in(output) == pytest.approx(DDP_LOSSES, abs=5e-3)
        again = ["--epochs", "1", "--pretrained", *arguments[name][1:]]
        resumed = run_ranks(run_script, world_size, name, again, find_free_port(), init=False)[0]
        assert losses_in(resumed)[0] < losses_in(output)[1] - 0.05
    # torch's FileStore leaves its file where two ranks close it at once: each then takes the other for the last.
    assert {path.name for path in tmp_path.iterdir()} <= {"model.pt", "meeting", "checkpoints"}


def test_losses_do_not_depend_on_the_number_of_ranks() -> None:
    """Three ranks do not divide its batches: the weight of each rank's gradient counts, too."""
    by_size = [run_ranks(run_script, size, "train.py", [], find_free_port(), init=False)[0] for size in (1, 2, 3)]
    one, *others = ([float(loss) for loss in re.findall(r"loss (\d\.\d+)", output)] for output in by_size)
    assert others == [pytest.approx(one, rel=1e-6)] * 2
    assert len(one) == 5


def losses_in(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"epoch \d: loss (\d\.\d+)", output)]


def test_losses_per_word_do_not_depend_on_the_number_of_ranks() -> None:
    """To what is printed; the last digit may be rounded to either side."""
    outputs = [
        run_ranks(run_script, size, "language_model.py", [], find_free_port(), init=False)[0] for size in (1, 2, 3)
    ]
    one, *others = ([float(loss) for loss in re.findall(r"\d\.\d{5}", output)] for output in outputs)
    assert len(one) == 8
    assert one[-1] < one[0] - 0.3
    assert others == [pytest.approx(one, rel=0, abs=1.5e-5)] * 2


@pytest.mark.parametrize(("name", "world_size"), OF_THEIR_OWN)
def test_of_its_own(name: str, world_size: int, warm: WarmLauncher, tmp_path: Path) -> None:
    """At two ranks of `lockstep run` and `launch`, they are forked; at one, and by other commands, they start anew."""
    command, arguments, words = OF_THEIR_OWN[name, world_size]
    if world_size == 2 and command.startswith(("lockstep run", "lockstep launch")):
        line = [*command.split()[1:], str(FOLDER / name), *arguments]
        ended = warm.run(*line, folder=tmp_path, timeout_s=limit_s(120))
    else:
        ended = run_anew(command, str(FOLDER / name), *arguments)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert re.search(words, ended.stdout), ended.stdout + ended.stderr
    if name in LAST_LOSSES:
        assert losses_in(ended.stdout)[-1] == pytest.approx(LAST_LOSSES[name], rel=0.03)


def run_anew(command: str, *words: str) -> subprocess.CompletedProcess[str]:
    start = [sys.executable] if command == "python" else [sys.executable, "-m", *command.split()]
    return subprocess.run([*start, *words], capture_output=True, text=True, timeout=limit_s(120))
