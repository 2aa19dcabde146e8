"""A script of the field: torch's own name for MPI, and nothing of Lockstep in it. Prints what it finds, as JSON."""

from __future__ import annotations

import json
import sys
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


def total(group: dist.ProcessGroup | None = None) -> float:
    """Sum over ranks of 1, 2, …, in bfloat16, which MPI itself adds as integers."""
    tensor = torch.full((2,), dist.get_rank() + 1, dtype=torch.bfloat16)
    dist.all_reduce(tensor, group=group)
    return float(tensor[0])


def with_plain_name() -> list[object]:
    dist.init_process_group("mpi")
    found: list[object] = [dist.get_rank(), dist.get_world_size(), dist.get_backend(), total()]
    for group in (dist.new_group(), dist.new_group([0, 1], backend="mpi")):
        found += [dist.get_backend(group), total(group)]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found.append(total(mesh.get_group()))
    dist.destroy_process_group()
    return found


def as_in_the_tutorial() -> list[object]:
    """Rank and world size are given and mean nothing, as with torch's own MPI; the timeout is kept."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dist.init_process_group(dist.Backend.MPI, rank=0, world_size=0, timeout=timedelta(seconds=44))
    said = [str(warning.message) for warning in caught if "MPI" in str(warning.message)]
    engine = dist.group.WORLD.engine  # type: ignore[union-attr]
    found = [dist.get_rank(), total(), engine.timeout_s, said]
    dist.destroy_process_group()
    return found


def by_device() -> list[object]:
    dist.init_process_group("cpu:mpi", init_method="mpi://")
    found: list[object] = [dist.get_backend(), total()]
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    if "--import" in sys.argv:
        import lockstep  # noqa: F401  (after torch has been imported)
    outcome = [with_plain_name(), as_in_the_tutorial(), by_device(), dist.is_mpi_available()]
    print(json.dumps(outcome), flush=True)
