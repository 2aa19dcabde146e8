"""From torch 2.14 on, scripts that name a backend of ours need no `import lockstep`."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from torch.distributed.distributed_c10d import Backend

import lockstep
from lockstep.testing import limit_s

PACKAGE = Path(lockstep.__file__).parent
PROJECT = Path(__file__).parents[2] / "pyproject.toml"

pytestmark = pytest.mark.skipif(
    not hasattr(Backend, "_ensure_backend_registered"),
    reason=f"torch {torch.__version__} does not look for backends in entry points; 2.14 does",
)

SCRIPT = """
import argparse, sys
import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--backend")
chosen = parser.parse_args().backend
assert "lockstep" not in sys.modules
dist.init_process_group(chosen)
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
print(f"\\n{dist.get_backend()} {type(dist.group.WORLD).__name__} {total.item()}\\n", end="", flush=True)
dist.destroy_process_group()
"""


def entry_points() -> str:
    """The lines of pyproject.toml, as pip writes them into entry_points.txt."""
    group = "torch.distributed.backends"
    _, _, rest = PROJECT.read_text().partition(f'[project.entry-points."{group}"]\n')
    return f"[{group}]\n" + rest.partition("\n\n")[0].replace('"', "") + "\n"


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """The environment of a process for which this package is installed, in a folder of its own."""
    folder = tmp_path / "site"
    about = folder / "torch_lockstep-0.dist-info"
    about.mkdir(parents=True)
    (folder / "lockstep").symlink_to(PACKAGE)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-lockstep\nVersion: 0\n")
    (about / "entry_points.txt").write_text(entry_points())
    return {**os.environ, "PYTHONPATH": str(folder), "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}


def torchrun(environment: dict[str, str], backend: str, folder: Path) -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    return subprocess.run(
        [*command, "--backend", backend],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=limit_s(120),
    )


def test_torchrun_finds_our_group(installed: dict[str, str], tmp_path: Path) -> None:
    done = torchrun(installed, "lockstep", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n").count("lockstep LockstepProcessGroup 3.0") == 2, done.stdout


def test_our_name_for_mpi_is_found(installed: dict[str, str], tmp_path: Path) -> None:
    """These ranks are no MPI job, or there is no mpi4py at all: the error must be ours, not that of an unknown name."""
    done = torchrun(installed, "mpi4py", tmp_path)
    assert done.returncode != 0
    assert "lockstep.errors." in done.stderr, done.stderr
    assert "nknown backend" not in done.stderr


@pytest.mark.parametrize("name", ["lockstep", "mpi4py"])
def test_entry_point_registers(name: str) -> None:
    text = dict(line.split(" = ") for line in entry_points().splitlines()[1:])
    EntryPoint(name, text[name], "torch.distributed.backends").load()()
    assert name.upper() in Backend._plugins
