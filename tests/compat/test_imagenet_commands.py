"""The two commands that documents of the field print for ImageNet, as printed, on CPUs and rehearsed; and each strategy
as a user starts it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from warm_launcher import WarmLauncher, WarmProcess

from lockstep.recipes.imagenet.shapes import ShapesFolder, write_shapes
from lockstep.testing import limit_s

PROGRAM = ("train", "imagenet")
ONE_NODE = (
    "-a resnet50 --dist-url tcp://127.0.0.1:FREEPORT --dist-backend nccl --multiprocessing-distributed --world-size 1 "
    "--rank 0"
)
NODE = (
    "-a resnet50 --dist-url tcp://IP_OF_NODE0:FREEPORT --dist-backend nccl --multiprocessing-distributed "
    "--world-size 2 --rank {node}"
)
# What is not printed: little data, so that it ends soon.
LITTLE = ("--size", "32", "--epochs", "1", "-b", "8", "-j", "0", "--out", "runs")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_shapes(ShapesFolder(tmp_path / "images", classes=2, images=8, val_images=3, size=32))
    return tmp_path


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "lockstep", *words]
    return subprocess.Popen(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def start_warm(warm: WarmLauncher, folder: Path, *words: str, **more: str) -> WarmProcess:
    """As `start`, but launchers and their ranks are forked, from a process that has imported torch."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **more}
    return warm.start(*words, folder=folder, variables=variables, beside=True)


def end(*started: subprocess.Popen[str] | WarmProcess) -> list[str]:
    """What they wrote, once all have ended well."""
    try:
        written = ["".join(filter(None, one.communicate(timeout=limit_s(150)))) for one in started]
    finally:
        for one in started:
            one.kill()
            one.communicate()
    for one, text in zip(started, written, strict=True):
        assert one.returncode == 0, text
    return written


def run_warm(warm: WarmLauncher, folder: Path, *words: str, **more: str) -> str:
    return end(start_warm(warm, folder, *words, **more))[0]


def result(folder: Path) -> dict[str, Any]:
    (metrics,) = (folder / "runs").glob("imagenet*/metrics.jsonl")
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return {**records[-1], "strategy": records[0]["strategy"], "backend": records[0]["backend"]}


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_the_two_commands_of_the_readme(warm: WarmLauncher, tmp_path: Path) -> None:
    """What they draw can be learned: of 10 classes, most images are told right."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    lines = [line.partition("#")[0].split() for line in readme.splitlines()]
    commands = [
        line[1:] for line in lines if line[:3] in (["lockstep", "data", "make-imagenet"], ["lockstep", *PROGRAM])
    ]
    assert len(commands) == 2
    for command in commands:
        run_warm(warm, tmp_path, *command)
    assert result(tmp_path)["accuracy"] > 0.5


def test_one_node(folder: Path) -> None:
    (text,) = end(start(folder, *PROGRAM, "--nproc", "2", *ONE_NODE.split(), "images", *LITTLE))
    ended = result(folder)
    assert (ended["kind"], len(ended["ranks"]), ended["strategy"]) == ("result", 2, "spawn")
    assert (ended["total"], ended["backend"]) == (3, "lockstep")
    assert "there is no GPU: training on the CPU, without nccl" in text


REFERENCE = (
    "-a tiny -j 0 --epochs 3 --start-epoch 1 -b 8 --lr 0.2 --momentum 0.8 --wd 0.001 -p 1 --seed 4 --gpu 0 "
    "--dist-url tcp://127.0.0.1:FREEPORT --dist-backend nccl --multiprocessing-distributed --world-size 1 --rank 0"
)


@pytest.mark.parametrize("rehearses", [False, True])
def test_all_options_of_the_reference_example_in_one_run(warm: WarmLauncher, folder: Path, rehearses: bool) -> None:
    """Those that a training run takes together; `--resume ''` is the default there. Rehearsed as with two GPUs."""
    words = [*REFERENCE.split(), "--resume", "", "--size", "32", "--out", "runs", "images"]
    if rehearses:
        command = ["rehearse", "--nproc", "2", "--start", "once", "--strict", "-m", "lockstep.recipes.imagenet"]
        text = run_warm(warm, folder, *command, *words)
        assert "nothing found in lockstep.recipes.imagenet on 2 ranks" in text
    else:
        text = run_warm(warm, folder, *PROGRAM, "--nproc", "2", "--no-accel", *words)
        assert "--no-accel: training on the CPU, without nccl" in text
    assert "each process of --multiprocessing-distributed has its own GPU" in text
    ended = result(folder)
    assert (ended["backend"], len(ended["ranks"])) == ("nccl" if rehearses else "lockstep", 2)
    (metrics,) = (folder / "runs").glob("imagenet*/metrics.jsonl")
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [record["epoch"] for record in records if record["kind"] == "epoch"] == [2, 3]
    assert [record["step"] for record in records if record["kind"] == "epoch"] == [2, 3]


def commands_of_two_nodes() -> list[list[str]]:
    port = free_port()
    commands = [NODE.format(node=node).replace("IP_OF_NODE0:FREEPORT", f"127.0.0.1:{port}") for node in (0, 1)]
    # The network that is printed trains in `test_one_node`; what is of two nodes here, any network shows.
    return [[*command.split(), "images", *LITTLE, "-a", "tiny"] for command in commands]


def test_two_nodes(warm: WarmLauncher, folder: Path) -> None:
    """Two launchers that know each other by address and port alone; here on one machine."""
    end(*(start_warm(warm, folder, *PROGRAM, "--nproc", "1", *words) for words in commands_of_two_nodes()))
    ended = result(folder)
    assert ([rank["samples"] for rank in ended["ranks"]], ended["total"]) == ([4, 4], 3)


def test_two_nodes_rehearsed(warm: WarmLauncher, folder: Path) -> None:
    rehearse = ("rehearse", "--nproc", "1", "--start", "once", "--strict", "-m", "lockstep.recipes.imagenet")
    for text in end(*(start_warm(warm, folder, *rehearse, *words) for words in commands_of_two_nodes())):
        assert "nothing found in lockstep.recipes.imagenet" in text
    assert (result(folder)["backend"], len(result(folder)["ranks"])) == ("nccl", 2)


@pytest.mark.parametrize("strategy", ["horovod", "apex"])
def test_by_the_shims(warm: WarmLauncher, folder: Path, strategy: str) -> None:
    """The ranks that `lockstep train` starts import Horovod and Apex by their own names."""
    words = ("--nproc", "2", "--strategy", strategy, "-a", "tiny", "images", *LITTLE)
    text = run_warm(warm, folder, *PROGRAM, *words)
    assert result(folder)["strategy"] == strategy
    assert f"import {strategy}" in text, "the notice of the shim"


def test_without_a_shim(folder: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "lockstep.recipes.imagenet",
        "--strategy",
        "horovod",
        "-a",
        "tiny",
        "images",
        *LITTLE,
    ]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=limit_s(60))
    assert ended.returncode == 2
    assert "Horovod is not installed, and Lockstep's shim" in ended.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("imagenet", "--nproc", "2", "-a", "tiny", "--dist-backend", "foo", "images"),
        ("imagenet", "--nproc", "2", "-a", "tiny", "--dist-backend", "foo", "--strategy", "spawn", "images"),
        ("digits", "--nproc", "2", "--backend", "foo"),
    ],
)
def test_backend_that_is_not_there(warm: WarmLauncher, folder: Path, words: tuple[str, ...]) -> None:
    """It was a traceback of each rank."""
    ended = start_warm(warm, folder, "train", *words)
    text = "".join(ended.communicate(timeout=limit_s(60)))
    assert ended.returncode == 2, text
    # torch may say between them that it ends the processes that it has spawned.
    lines = [line for line in text.splitlines() if line.startswith("lockstep")]
    assert len(lines) == 1, text
    expected = rf"lockstep train {words[0]}: error: backend 'foo' is not available here; there are: auto, lockstep, .*"
    assert re.fullmatch(expected, lines[0]), text
    assert "Traceback" not in text


def test_ranks_that_are_told_who_they_are(warm: WarmLauncher, folder: Path) -> None:
    """The example's third way: a command for each process."""
    url = f"tcp://127.0.0.1:{free_port()}"
    words = ("--dist-url", url, "--world-size", "2", "-a", "tiny", "images", *LITTLE)
    end(*(start_warm(warm, folder, *PROGRAM, *words, "--rank", str(rank)) for rank in (0, 1)))
    assert len(result(folder)["ranks"]) == 2


@pytest.mark.parametrize(("strategy", "start_as"), [("dp", "once"), ("horovod", "ranks"), ("apex", "ranks")])
def test_rehearsed_strategies(warm: WarmLauncher, folder: Path, strategy: str, start_as: str) -> None:
    """What would stay in host memory on a machine with GPUs is an error in a rehearsal."""
    words = ("rehearse", "--nproc", "2", "--start", start_as, "--strict", "-m", "lockstep.recipes.imagenet")
    options = ("-a", "tiny-bn", "--skip-broken", "--channels-last", "--strategy", strategy)
    sync = () if strategy == "dp" else ("--sync-bn",)
    text = run_warm(warm, folder, *words, *options, *sync, "images", *LITTLE)
    assert "nothing found in lockstep.recipes.imagenet" in text
    assert (result(folder)["strategy"], result(folder)["backend"]) == (strategy, "nccl")


# What is compiled is a kernel or two for each layer, forwards, backwards and for evaluation: `tiny` took a minute.
ONE_LAYER = """
from torch import nn

def is_model(name):
    return name == "one_layer"

class OneLayer(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 8, 3, 4), nn.Linear(8, num_classes)

    def forward(self, images):
        return self.fc(self.conv(images).relu().mean((2, 3)))

def create_model(name, pretrained, num_classes):
    return OneLayer(num_classes)
"""


@pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="torch.compile needs a C++ compiler on the CPU"
)
def test_compiled(warm: WarmLauncher, folder: Path) -> None:
    """Two ranks, with channels last: what is compiled, is compiled; and the losses are those of the plain network."""
    (folder / "timm.py").write_text(ONE_LAYER)
    words = ("--nproc", "2", "-a", "one_layer", "images", *LITTLE, "-b", "2")
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled")}
    losses = {}
    for name, options in (("plain", ()), ("compiled", ("--compile", "--channels-last"))):
        run_warm(warm, folder, *PROGRAM, *words, "--name", name, *options, **cache)
        records = [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]
        assert records[-1]["total"] == 3
        losses[name] = [record["loss"] for record in records if record["kind"] == "step"]
        # What inductor has written is no part of a run that compiles nothing.
        assert bool(list(folder.glob("compiled/**/*.so"))) == (name == "compiled")
    assert len(losses["plain"]) == 4
    assert losses["compiled"] == pytest.approx(losses["plain"], abs=1e-4)
