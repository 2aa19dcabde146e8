"""A script with an NCCL group that ends in an error; the group is one of gloo that says that it is NCCL's."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lockstep.testing import limit_s

SCRIPT = """
import sys
import torch.distributed as dist
from lockstep.comm import nccl_end
dist.get_backend_config = lambda group: sys.argv[1]
dist.ProcessGroup.abort = lambda self: print("aborted", flush=True)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
nccl_end.abort_at_exit()
nccl_end.abort_at_exit()
"""


@pytest.mark.parametrize(
    ("config", "end", "printed"),
    [
        ("cuda:nccl", "raise ValueError", "aborted\n"),
        ("cpu:gloo,cuda:nccl", "", "aborted\n"),
        ("cpu:gloo", "raise ValueError", ""),
        ("cuda:nccl", "dist.destroy_process_group()", ""),
    ],
)
def test_groups_that_are_left_open_are_aborted_once(config: str, end: str, printed: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT + end, config], capture_output=True, text=True, timeout=limit_s(60)
    )
    assert (done.returncode, done.stdout) == (int("raise" in end), printed), done.stderr
