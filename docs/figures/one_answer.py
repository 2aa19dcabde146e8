"""Measure and draw docs/images/one_answer.png: the same training on 1, 2 and 4 processes.

    python docs/figures/one_answer.py            # train, store one_answer.json, draw
    python docs/figures/one_answer.py --draw     # only draw what is stored

Lockstep's runs are `lockstep train digits` as a user starts it, in float64 so that rounding is
small enough to see everything else. The peer is the usual recipe on the same data and model: torch's
DistributedDataParallel over gloo, with a DistributedSampler and a batch size divided by the number
of processes. It is compared with itself on one process.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
STORE = HERE / "one_answer.json"
PICTURE = HERE.parent / "images" / "one_answer.png"

WORLD_SIZES = (1, 2, 4)
EPOCHS = 5
BATCH_SIZE = 64
LEARNING_RATE = 0.02
BLUE, ORANGE, BLACK, GREY = "#56B4E9", "#D55E00", "#000000", "#808080"


def measure() -> dict[str, Any]:
    """Train everything, one run after the other."""
    with tempfile.TemporaryDirectory() as folder:
        lockstep = {str(size): train_lockstep(size, Path(folder)) for size in WORLD_SIZES}
        peer = {str(size): train_peer(size, Path(folder)) for size in WORLD_SIZES}
    header = lockstep["1"][0]
    return {
        "config": header["config"],
        "environment": header["environment"],
        "lockstep": {
            size: [one["loss"] for one in records if one["kind"] == "step"] for size, records in lockstep.items()
        },
        "peer": peer,
    }


def train_lockstep(world_size: int, folder: Path) -> list[dict[str, Any]]:
    """The records of `lockstep train digits` on `world_size` processes."""
    name = f"ranks{world_size}"
    options = ["--epochs", EPOCHS, "--batch-size", BATCH_SIZE, "--lr", LEARNING_RATE, "--dtype", "float64"]
    run("train", "digits", "--nproc", world_size, *options, "--out", folder, "--name", name, "--quiet")
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def train_peer(world_size: int, folder: Path) -> list[float]:
    """The losses of the usual recipe on `world_size` processes."""
    path = folder / f"peer{world_size}.json"
    run("run", "--nproc", world_size, __file__, "--peer", path)
    losses: list[float] = json.loads(path.read_text(encoding="utf-8"))
    return losses


def run(*arguments: object) -> None:
    print("lockstep", *arguments, flush=True)
    subprocess.run([sys.executable, "-m", "lockstep", *map(str, arguments)], check=True)


def peer(path: Path) -> None:
    """One rank of the usual recipe: torch's engine and sampler, nothing of Lockstep but data and model."""
    import torch
    import torch.distributed as dist
    from torch.nn.functional import cross_entropy
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler

    from lockstep.recipes.digits.task import DigitsNet, load_digits

    dist.init_process_group("gloo")
    train_set, _ = load_digits(torch.float64)
    torch.manual_seed(0)
    model = DistributedDataParallel(DigitsNet().double())
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    sampler: DistributedSampler[Any] = DistributedSampler(train_set, seed=0)
    loader = DataLoader(train_set, batch_size=BATCH_SIZE // dist.get_world_size(), sampler=sampler)
    losses = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses.append(mean.item() / dist.get_world_size())
    if dist.get_rank() == 0:
        path.write_text(json.dumps(losses), encoding="utf-8")
    dist.destroy_process_group()


def draw(stored: dict[str, Any]) -> None:
    """Draw the stored losses."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.6), dpi=144, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle("One answer: the same training on 1, 2 and 4 processes", fontsize=14, fontweight="bold")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(1.15, 1))
    draw_losses(upper, stored["lockstep"])
    draw_differences(lower, stored)
    for axes in (upper, lower):
        axes.grid(color="#E6E6E6", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    lower.set_xlabel("optimizer step (`lockstep train digits`: global batch of 64, float64)")
    lower.set_xlim(0, len(stored["lockstep"]["1"]) + 1)
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE)


def draw_losses(axes: Any, losses: dict[str, list[float]]) -> None:
    """Three curves, each thinner than the one below it, so that all of them are seen."""
    styles: dict[str, dict[str, Any]] = {
        "1": {"color": BLUE, "linewidth": 8, "solid_capstyle": "round"},
        "2": {"color": ORANGE, "linewidth": 3.2},
        "4": {"color": BLACK, "linewidth": 1.3, "linestyle": (0, (4, 3))},
    }
    for size, style in styles.items():
        label = f"{size} process" + ("es" if size != "1" else "")
        axes.plot(range(1, len(losses[size]) + 1), losses[size], label=label, **style)
    axes.set(yscale="log", ylabel="training loss")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.legend(frameon=False, handlelength=3.5)


def draw_differences(axes: Any, stored: dict[str, Any]) -> None:
    """How far each run is from the one on one process."""
    lines = [
        ("peer", "4", {"color": GREY, "linewidth": 1.4}, "torch DDP with DistributedSampler, 4 processes"),
        ("lockstep", "2", {"color": ORANGE, "linewidth": 2.4}, "Lockstep, 2 processes"),
        ("lockstep", "4", {"color": BLACK, "linewidth": 1.1, "linestyle": (0, (4, 3))}, "Lockstep, 4 processes"),
    ]
    floor = 1e-18  # where a difference of exactly zero is drawn
    for source, size, style, label in lines:
        pairs = zip(stored[source][size], stored[source]["1"], strict=True)
        values = [max(abs(several - one), floor) for several, one in pairs]
        axes.plot(range(1, len(values) + 1), values, label=label, **style)
    axes.set(yscale="log", ylim=(floor / 3, 10), ylabel="|difference|\nto 1 process")
    axes.set_yticks([floor, 1e-15, 1e-12, 1e-9, 1e-6, 1e-3, 1])
    axes.set_yticklabels(["0", *(f"$10^{{{power}}}$" for power in (-15, -12, -9, -6, -3)), "1"])
    axes.minorticks_off()
    # 1438 samples over 4 ranks: DistributedSampler repeats two in the last batch of each epoch.
    first = next(step for step, (a, b) in enumerate(zip(*peer_pair(stored), strict=True), 1) if abs(a - b) > 1e-9)
    axes.text(
        first + 1, 1e-7, "its sampler repeats two samples\nto fill the last batch of an epoch", color=GREY, fontsize=9
    )
    axes.legend(frameon=False, loc="center right", bbox_to_anchor=(1, 0.55))


def peer_pair(stored: dict[str, Any]) -> tuple[list[float], list[float]]:
    """The peer's losses on 4 processes and on 1."""
    return stored["peer"]["4"], stored["peer"]["1"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure and draw docs/images/one_answer.png.")
    parser.add_argument("--draw", action="store_true", help="only draw what is stored")
    parser.add_argument("--peer", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer:
        peer(options.peer)
        return
    if not options.draw:
        STORE.write_text(json.dumps(measure(), indent=1) + "\n", encoding="utf-8")
    draw(json.loads(STORE.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
