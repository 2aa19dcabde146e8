"""The ImageNet program, with all that makes it fast at once."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from check_engines import _has_triton
from gpu_context import Context, Skip, same

_PACKAGES = ("PIL", "rich", "matplotlib", "tensorboard")
_LIMIT_S = 70
_STEPS = 4
# bfloat16 has 8 bits for each of some hundred products in a sum; the first loss is about 0.7.
_TOLERANCE = 0.05


def imagenet(run: Context) -> dict[str, Any]:
    """`lockstep train imagenet` with workers, prefetch, bf16, channels last and compiled: the losses of a plain run."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise Skip(f"no {', '.join(missing)} here, of the extra imagenet")
    from lockstep.recipes.imagenet.shapes import ShapesFolder, write_shapes  # needs Pillow

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_shapes(ShapesFolder(folder / "images", classes=2, images=32, val_images=4, size=64))
        # On the CPU compiling takes a minute, and tests/compat/test_imagenet_commands.py does it.
        can_compile = run.is_cuda and _has_triton()
        plain = _train(run, folder, "plain", "-j", "0")
        fast = _train(
            run, folder, "fast", "-j", "2", "--precision", "bf16", "--channels-last", *["--compile"] * can_compile
        )
    for records in (plain, fast):
        same(records[0]["backend"], "nccl" if run.is_cuda else "lockstep", "backend")
        same(records[-1]["kind"], "result", "last record")
    expected, found = ([record["loss"] for record in records if record["kind"] == "step"] for records in (plain, fast))
    same((len(expected), len(found)), (_STEPS, _STEPS), "number of steps")
    difference = abs(expected[0] - found[0])
    assert difference < _TOLERANCE, f"the first loss is {found[0]:.4g} in bf16 and {expected[0]:.4g} in fp32"
    same(fast[-1]["total"], plain[-1]["total"], "images evaluated")
    return {"compiled": can_compile, "first loss off by": difference, "losses": found}


def _train(run: Context, folder: Path, name: str, *words: str) -> list[dict[str, Any]]:
    """The records of a short training."""
    command = [sys.executable, "-m", "lockstep", "train", "imagenet", "--nproc", "1", "-a", "tiny-bn", "-b", "8"]
    options = ["--epochs", "1", "--size", "64", "-p", "1", "--seed", "1", "--out", "runs", "--name", name]
    device = [] if run.is_cuda else ["--no-accel"]
    done = subprocess.run(
        [*command, *options, *device, *words, "images"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]
