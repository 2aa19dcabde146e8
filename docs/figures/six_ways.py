"""Measure and draw docs/images/six_ways.png: six ways to train on several devices, one answer.

    python docs/figures/six_ways.py            # train, store six_ways.json, draw
    python docs/figures/six_ways.py --draw     # only draw what is stored

Every run is `lockstep train imagenet` as a user starts it, on the images that `lockstep data make-imagenet` draws, in
float64, so that rounding is small enough to see everything else. The ways are those of a well-known comparison on
ImageNet: DataParallel, torch.distributed, torch.multiprocessing, Apex, Horovod and Slurm; each on 1, 2 and 4 devices,
all against one process on one device. There is no Slurm here: the script starts the tasks itself, with the variables
that srun gives them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
STORE = HERE / "six_ways.json"
PICTURE = HERE.parent / "images" / "six_ways.png"

SIZES = (1, 2, 4)
DEVICES_DRAWN = "4"
WAYS = {
    "dp": "DataParallel (dp)",
    "ddp": "torch.distributed (ddp)",
    "spawn": "torch.multiprocessing (spawn)",
    "apex": "Apex O0 (apex)",
    "horovod": "Horovod (horovod)",
    "slurm": "Slurm (slurm)",
}
# Okabe and Ito, "Color Universal Design"; the lowest line is the widest.
COLOURS = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#000000")
OPTIONS = ("-a", "tiny", "--size", "32", "-b", "30", "-j", "0", "--epochs", "6", "--lr", "0.8", "--schedule", "cosine",
           "--warmup", "1", "--precision", "fp64", "--quiet")  # fmt: skip

# Four ranks on few cores; and what a rank computes does not depend on how many threads it has.
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


def measure() -> dict[str, Any]:
    """Train everything, one run after the other."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run("data", "make-imagenet", folder / "shapes")
        single = train("single", 1, folder)
        losses = {way: {str(size): train(way, size, folder)[1] for size in SIZES} for way in WAYS}
    header, expected = single
    return {"config": header["config"], "environment": header["environment"], "single": expected, "ways": losses}


def train(way: str, size: int, folder: Path) -> tuple[dict[str, Any], list[float]]:
    """The header and the losses of one way on `size` devices."""
    name = f"{way}{size}"
    words = [folder / "shapes", *OPTIONS, "--strategy", way, "--out", folder, "--name", name]
    if way == "slurm":
        run_tasks(size, "train", "imagenet", *words)
    else:
        run("train", "imagenet", "--nproc", size, *words)
    lines = (folder / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return records[0], [record["loss"] for record in records if record["kind"] == "step"]


def run(*words: object) -> None:
    print("lockstep", *words, flush=True)
    subprocess.run([sys.executable, "-m", "lockstep", *map(str, words)], check=True, env=ONE_THREAD)


def run_tasks(count: int, *words: object) -> None:
    """As `srun -n count lockstep …` on one node."""
    print(f"{count} tasks: lockstep", *words, flush=True)
    tasks = []
    for rank in range(count):
        variables = {
            "SLURM_JOB_ID": os.getpid(),
            "SLURM_STEP_ID": count,
            "SLURM_PROCID": rank,
            "SLURM_LOCALID": rank,
            "SLURM_NTASKS": count,
            "SLURM_STEP_NUM_TASKS": count,
            "SLURM_STEP_TASKS_PER_NODE": count,
            "SLURM_NODEID": 0,
            "SLURM_NNODES": 1,
            "SLURM_STEP_NODELIST": "node1",
        }
        environment = {**ONE_THREAD, **{name: str(value) for name, value in variables.items()}}
        command = [sys.executable, "-m", "lockstep", *map(str, words)]
        tasks.append(subprocess.Popen(command, env=environment))
    codes = [task.wait() for task in tasks]
    if any(codes):
        raise SystemExit(f"tasks ended with {codes}")


def draw(stored: dict[str, Any]) -> None:
    """Draw the stored losses."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), dpi=144, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle("Six ways, one answer: the same training on 4 devices", fontsize=14, fontweight="bold")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(1.25, 1))
    steps = range(1, len(stored["single"]) + 1)
    widths = (11, 8.6, 6.4, 4.4, 2.6, 1.0)
    for (way, label), colour, width in zip(WAYS.items(), COLOURS, widths, strict=True):
        losses = stored["ways"][way][DEVICES_DRAWN]
        upper.plot(steps, losses, color=colour, linewidth=width, label=label, solid_capstyle="round")
        worst = max_differences(stored, way)
        lower.plot(steps, worst, color=colour, linewidth=1.4, label=label)
    upper.set(ylabel="training loss")
    upper.legend(frameon=False, ncols=2, handlelength=3)
    lower.set(yscale="log", ylim=(1e-18, 1e-8), ylabel="largest |difference| to\n1 process, 1 device")
    lower.axhline(1e-12, color="#808080", linewidth=1, linestyle=":")
    lower.text(1, 1.6e-12, "$10^{-12}$: what the tests allow", color="#808080", fontsize=9)
    lower.text(1, 2e-10, "on 1, 2 and 4 devices, the largest of the three", color="#808080", fontsize=9)
    lower.set_yticks([1e-18, 1e-15, 1e-12, 1e-9])
    lower.set_yticklabels(["0", "$10^{-15}$", "$10^{-12}$", "$10^{-9}$"])
    lower.minorticks_off()
    lower.set_xlabel("optimizer step (`lockstep train imagenet`: drawn images, global batch of 30, float64)")
    lower.set_xlim(0, len(stored["single"]) + 1)
    for axes in (upper, lower):
        axes.grid(color="#E6E6E6", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(PICTURE)


def max_differences(stored: dict[str, Any], way: str) -> list[float]:
    """How far a way is from one process, step by step, at its worst number of devices; 1e-18 for not at all."""
    runs = stored["ways"][way].values()
    return [
        max(max(abs(loss - expected) for loss in losses), 1e-18)
        for expected, *losses in zip(stored["single"], *runs, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure and draw docs/images/six_ways.png.")
    parser.add_argument("--draw", action="store_true", help="only draw what is stored")
    if not parser.parse_args().draw:
        STORE.write_text(json.dumps(measure(), indent=1) + "\n", encoding="utf-8")
    draw(json.loads(STORE.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
