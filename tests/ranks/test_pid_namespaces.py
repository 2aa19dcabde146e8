"""Ranks that share a folder for their segments, but no pid namespace: containers of one host."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.testing import limit_s

PROGRAM = """
import sys, time
import torch, torch.distributed as dist
import lockstep

rank = int(sys.argv[1])
dist.init_process_group("lockstep", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
tensor = torch.ones(3)
dist.all_reduce(tensor)
if rank == 0:
    # Rank 1 says that it is blocked after it has looked at this process, and found that it may still come.
    blocks = dist.group.WORLD.engine.team.blocks
    deadline = time.monotonic() + 60
    while blocks.wait_of(1) is None and time.monotonic() < deadline:
        pass
dist.all_reduce(tensor)
print(tensor.tolist())
dist.destroy_process_group()
"""


def can_unshare() -> bool:
    """Whether this user may have a pid namespace of their own."""
    return subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", "true"], capture_output=True).returncode == 0


def test_peer_of_another_namespace_is_not_taken_for_dead(tmp_path: Path) -> None:
    """Its pid means nothing here, so that no process has it, or a stranger."""
    if not can_unshare():
        pytest.skip("no pid namespaces for this user")
    (tmp_path / "segments").mkdir()
    variables = {**os.environ, "LOCKSTEP_SHM_DIR": str(tmp_path / "segments"), "OMP_NUM_THREADS": "1"}
    alone = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    ranks = [
        subprocess.Popen(
            [*(alone if rank == 1 else []), sys.executable, "-c", PROGRAM, str(rank), str(tmp_path / "store")],
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            out, err = rank.communicate(timeout=limit_s(120))
            assert (rank.returncode, out) == (0, "[4.0, 4.0, 4.0]\n"), err
    finally:
        for rank in ranks:
            rank.kill()
