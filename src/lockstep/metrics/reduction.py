"""The values of metrics over all ranks, by one collective."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import cast, overload

import torch
import torch.distributed as dist

from lockstep.agreement import collective_device, has_group
from lockstep.errors import CollectiveMismatch, InputTypeError
from lockstep.metrics.metric import Metric
from lockstep.world import current_world

__all__ = ["synchronize"]

_DATA_MASK = (1 << 16) - 1  # few enough bits for exact sums of squares


@overload
def synchronize(
    metrics: Mapping[str, Metric], /, *, process_group: dist.ProcessGroup | None = None
) -> dict[str, float]: ...
@overload
def synchronize(*metrics: Metric, process_group: dist.ProcessGroup | None = None) -> tuple[float, ...]: ...
def synchronize(
    *metrics: Metric | Mapping[str, Metric], process_group: dist.ProcessGroup | None = None
) -> dict[str, float] | tuple[float, ...]:
    """Compute the values of metrics over all ranks, with a single all_reduce.

    Collective: every rank calls it with the same metrics, including ranks that saw no batch. The metrics keep this
    rank's sums, so more batches may follow. With one process, or no process group, the values are this rank's.

    Args:
        *metrics: metrics, or one mapping from names to metrics (in any order of names).
        process_group: by default the open world's, else the default group of `torch.distributed`.

    Returns:
        The values, a dict if given a mapping, else a tuple. Metrics that no rank has updated are nan (`Sum`: 0.0).

    Raises:
        CollectiveMismatch: ranks passed different metrics, or have evaluated different data.
        CollectiveError: a rank was lost, or did not call `synchronize`.

        >>> from lockstep.metrics import Mean
        >>> mean = Mean()
        >>> mean.update(1.5)
        >>> synchronize({"loss": mean})
        {'loss': 1.5}
    """
    if len(metrics) == 1 and isinstance(metrics[0], Mapping):
        mapping = metrics[0]
        values = _synchronize([mapping[name] for name in sorted(mapping)], sorted(mapping), process_group)
        by_name = dict(zip(sorted(mapping), values, strict=True))
        return {name: by_name[name] for name in mapping}
    listed = [metric for metric in metrics if isinstance(metric, Metric)]
    if len(listed) != len(metrics):
        given = ", ".join(type(metric).__name__ for metric in metrics)
        raise InputTypeError(f"synchronize: expected metrics, or one mapping from names to metrics; got {given}")
    return tuple(_synchronize(listed, [str(place) for place in range(len(listed))], process_group))


def _synchronize(metrics: list[Metric], names: list[str], process_group: dist.ProcessGroup | None) -> list[float]:
    """Values over all ranks, in the order of `metrics`."""
    group = process_group or _open_group()
    world_size = 1 if group is None else dist.get_world_size(group)
    if not metrics or world_size == 1:
        return [metric.compute() for metric in metrics]
    layout = ", ".join(f"{name}: {metric.label()}" for name, metric in zip(names, metrics, strict=True))
    fingerprint = float(int.from_bytes(hashlib.blake2b(layout.encode(), digest_size=2).digest(), "little"))
    device = collective_device(group)
    parts = [torch.tensor([fingerprint, fingerprint**2], dtype=torch.float64, device=device)]
    parts += [metric.state().to(device) for metric in metrics]
    data = [metric.data_seen(world_size) & _DATA_MASK for metric in metrics]
    seen = [[float(each > 0), float(each), float(each) ** 2] for each in data]
    parts.append(torch.tensor(seen, dtype=torch.float64, device=device).flatten())
    reduced = torch.cat(parts)
    dist.all_reduce(reduced, group=group)
    fingerprint_sum, square_sum, *sums = reduced.tolist()
    # Equal on all ranks if and only if their variance is zero. Exact: 16 bits, squared, summed.
    if fingerprint_sum**2 != world_size * square_sum:
        raise CollectiveMismatch(
            f"synchronize: ranks passed different metrics. This rank ({dist.get_rank(group)} of {world_size}) passed "
            f"{layout}. Pass the same metrics under the same names on every rank, even if a rank had no batch"
        )
    values = []
    for metric in metrics:
        values.append(metric.from_sums(sums[: metric.num_sums]))
        del sums[: metric.num_sums]
    _check_data(names, sums)
    return values


def _check_data(names: list[str], sums: list[float]) -> None:
    """Check that all ranks evaluated the same data; see [Note: data of an evaluation] in `metric.py`. Local.

    Args:
        names: the metrics' names.
        sums: for each metric, summed over ranks: 1 if the rank knows its data, the data's number, and its square.
    """
    for name, known, total, square_sum in zip(names, sums[::3], sums[1::3], sums[2::3], strict=True):
        if total**2 != known * square_sum:
            raise CollectiveMismatch(
                f"synchronize: metric {name} covers different data on each rank: the loaders with evaluation=True "
                "hold different samples, or the same in another order. Ranks differ in what they draw without "
                "a seed, find in a folder, or collect from a loader. Draw data and splits with "
                "torch.Generator().manual_seed(0), sort what is found, and combine what ranks have collected with "
                "lockstep.all_gather. If each rank has its own data, use a loader with rank=0 and world_size=1"
            )


def _open_group() -> dist.ProcessGroup | None:
    """The open world's group, else torch's default group, else None."""
    world = current_world()
    if world is not None:
        return world.process_group
    if has_group("metrics.synchronize"):
        return cast("dist.ProcessGroup", dist.group.WORLD)
    return None
