"""A world over gloo can be left while gloo's threads hold tensors; with torch before 2.8 most runs of this hung."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from lockstep.testing import limit_s

_SCRIPT = """
import torch
import torch.distributed as dist
import lockstep

for number in range(50):
    with lockstep.init(backend="gloo"):
        for _ in range(20):
            tensors = [torch.ones(100) for _ in range(7)]
            works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        for work in works:
            work.wait()
        del work, works, tensors  # before a thread of gloo drops what it has of them
print("left all of them")
"""


def test_worlds_over_gloo_are_left(tmp_path: Path) -> None:
    environ = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=limit_s(100),
    )  # fmt: skip
    assert done.stdout == "left all of them\n", done.stderr
    assert done.returncode == 0
