"""Start-up of the ImageNet program on a folder of its real size: what listing 1.3 million files takes.

Two ranks make the list of training images, as at the start of a run. Contestants:

- `every_rank` — each rank walks the folder for itself into paths and labels, as torchvision's `ImageFolder` does;
- `lockstep` — the first run on a folder: rank 0 lists it, hands the list to all, and keeps it;
- `lockstep_again` — every later run: the kept list, after a look at each class folder.

The files are empty, because nothing opens them, on a local file system that has all names in memory: that is the best
case of those who walk. Before anything is timed, all contestants must have found the same images.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

from lockstep.bench.harness import Budget, Configuration, Contestant, measure
from lockstep.bench.ranks import Job, run_ranks
from lockstep.bench.results import Environment, Result, Series
from lockstep.recipes.imagenet.listing import EXTENSIONS, list_part

__all__ = ["FULL", "QUICK", "Plan", "run"]

_RANKS = 2


@dataclass(frozen=True)
class Plan:
    """What to measure and for how long.

    Attributes:
        classes: folders.
        images: files in all of them together.
        budget: of the measurement.
    """

    classes: int
    images: int
    budget: Budget


FULL = Plan(1000, 1_281_167, Budget(seconds=60.0, sample_s=0.01, min_rounds=5, max_rounds=10, sweeps=1))
QUICK = Plan(10, 2000, Budget(seconds=0.5, sample_s=0.001, max_rounds=3, sweeps=1))


def run(plan: Plan, *, quick: bool = False) -> Result:
    """Make the folder of a plan, measure, and remove it.

    Raises:
        RankFailed: a rank failed, for instance because the lists differ.
    """
    environment = Environment.read()
    folder = Path(tempfile.mkdtemp(prefix="listing-"))
    try:
        _make_folder(folder / "train", plan)
        job = {"folder": str(folder), "images": plan.images, "budget": asdict(plan.budget)}
        answer = run_ranks(_measure_on_rank, _RANKS, job, threads=1, timeout_s=300 + 10 * plan.budget.seconds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert isinstance(answer, list)
    settings = {"ranks": _RANKS, "classes": plan.classes, "images": plan.images, "budget": asdict(plan.budget)}
    return Result("listing", quick, environment, settings, [Series(**item) for item in answer])


def _make_folder(root: Path, plan: Plan) -> None:
    for label in range(plan.classes):
        place = root / f"n{label:08d}"
        place.mkdir(parents=True)
        for number in range(label, plan.images, plan.classes):
            os.close(os.open(place / f"n{label:08d}_{number}.JPEG", os.O_CREAT | os.O_WRONLY))
    for place in (*root.iterdir(), root):
        os.utime(place, (0, 0))  # A list of folders that have just changed is not kept.


def _walk(root: Path) -> list[tuple[str, int]]:
    """Path and label of each image, in the order of their names."""
    classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    found = []
    for label, name in enumerate(classes):
        for folder, _, names in sorted(os.walk(root / name, followlinks=True)):
            images = (one for one in sorted(names) if one.lower().endswith(EXTENSIONS))
            found.extend((os.path.join(folder, one), label) for one in images)
    return found


def _measure_on_rank(job: Job) -> object:
    """Body of one rank."""
    folder, images, budget = job["folder"], job["images"], job["budget"]
    assert isinstance(folder, str)
    assert isinstance(budget, dict)
    kept_in = Path(folder, "kept")

    def list_anew() -> None:
        if dist.get_rank() == 0:
            shutil.rmtree(kept_in, ignore_errors=True)
        list_part(Path(folder), "train", kept_in)

    walked = _walk(Path(folder, "train"))
    for _ in range(2):  # anew, and as it is kept
        listing = list_part(Path(folder), "train", kept_in)
        step = max(len(walked) // 1000, 1)
        same = all((str(listing.path(i)), int(listing.labels[i])) == walked[i] for i in range(0, len(walked), step))
        if not len(listing) == len(walked) == images or not same:
            raise RuntimeError(f"{images} images were made, {len(walked)} walked over, {len(listing)} listed")
    if dist.get_rank() == 0 and listing.seconds > 0:
        raise RuntimeError("the list was not kept")
    del walked, listing
    contestants = [
        Contestant("every_rank", lambda: _walk(Path(folder, "train")), warms_up=False),
        Contestant("lockstep", list_anew, warms_up=False),
        # After `lockstep`, whose list it finds.
        Contestant("lockstep_again", lambda: list_part(Path(folder), "train", kept_in), warms_up=False),
    ]
    series = measure([Configuration({}, contestants)], Budget(**budget))
    return [asdict(item) for item in series]
