"""What goes wrong between a worker and the training process comes out as an error, and not as a wait without end."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from lockstep.data import DataLoader
from lockstep.errors import DataError

# torch's own deadline for a batch, far more than any takes: a lost error fails the test instead of hanging it.
DEADLINE_S = 60

FULL_MEMORY = """
import sys
import torch
import lockstep

class Plain(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.zeros(3, 128, 128)

dataset = Plain() if sys.argv[1] == "plain" else torch.utils.data.TensorDataset(torch.zeros(64, 3, 128, 128))
for batch in lockstep.DataLoader(dataset, batch_size=32, num_workers=1, timeout=60):
    pass
"""


def with_small_memory(tmp_path: Path, kind: str, size: str = "1m", **settings: str) -> subprocess.CompletedProcess[str]:
    """The program above, where /dev/shm has a size; it ends with what is left there."""
    alone = ["unshare", "--mount", "--map-root-user"]
    mount = f"mount -t tmpfs -o size={size} none /dev/shm"
    if subprocess.run([*alone, "sh", "-c", mount], capture_output=True).returncode != 0:
        pytest.skip("no mount namespaces for this user")
    program = tmp_path / "program.py"
    program.write_text(FULL_MEMORY)
    script = f'{mount} && "$@"; code=$?; ls /dev/shm; exit $code'
    command = [*alone, "sh", "-c", script, "sh", sys.executable, str(program), kind]
    environment = {**os.environ, **settings}
    return subprocess.run(command, capture_output=True, text=True, timeout=2 * DEADLINE_S, env=environment)


@pytest.mark.parametrize("kind", ["plain", "tensors"])
def test_size_of_shared_memory_does_not_limit_batches(tmp_path: Path, kind: str) -> None:
    done = with_small_memory(tmp_path, kind)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


@pytest.mark.skipif(torch.__version__.startswith("2.6."), reason="workers of torch 2.6 die of a bus error, and say so")
@pytest.mark.parametrize("kind", ["plain", "tensors"])
def test_full_shared_memory_is_an_error_that_names_it(tmp_path: Path, kind: str) -> None:
    done = with_small_memory(tmp_path, kind, LOCKSTEP_SHM_DIR="/dev/shm")  # no buffers then
    assert done.returncode == 1
    assert "/dev/shm (1 MiB in all) has no room for the next batch" in done.stderr
    assert "num_workers or prefetch_factor" in done.stderr
    assert "timed out" not in done.stderr
    assert done.stdout == "", "nothing is left in /dev/shm"


def test_no_room_for_the_semaphores_of_workers_is_an_error_that_names_it(tmp_path: Path) -> None:
    done = with_small_memory(tmp_path, "plain", size="4k")
    assert done.returncode == 1
    said = done.stderr.splitlines()[-1]
    assert re.search(r"DataError: workers cannot start: .*No space left.* /dev/shm.* has 0 MiB free. Give .*=8g", said)
    assert done.stdout == "", "nothing is left in /dev/shm"


def test_batch_that_cannot_be_sent_is_an_error() -> None:
    loader = DataLoader(range(4), 2, num_workers=1, collate_fn=lambda samples: lambda: samples, timeout=DEADLINE_S)
    with pytest.raises(DataError, match=r"batch of type function cannot be sent from its worker.*num_workers=0"):
        list(loader)


def test_workers_end_with_an_iterator_that_an_error_keeps_in_a_cycle() -> None:
    before = set(multiprocessing.active_children())
    loader = DataLoader(range(4), 2, num_workers=1, collate_fn=lambda samples: samples[9])
    with contextlib.suppress(IndexError):
        list(loader)
    del loader
    gc.collect()
    assert before.issuperset(multiprocessing.active_children())


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_arrive_as_the_collate_function_made_them(num_workers: int) -> None:
    def collate(samples: list[int]) -> dict[str, object]:
        return {"tensor": torch.tensor(samples), "array": np.array(samples), "text": str(samples), "nothing": None}

    first, second = DataLoader(range(4), 2, num_workers=num_workers, collate_fn=collate)
    assert first["tensor"].tolist() == first["array"].tolist() == [0, 1]
    assert (second["text"], second["nothing"]) == ("[2, 3]", None)
    ((values,),) = DataLoader(TensorDataset(torch.arange(3)), 3, num_workers=num_workers)
    assert values.tolist() == [0, 1, 2]
