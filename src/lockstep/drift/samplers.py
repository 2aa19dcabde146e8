"""Samplers that give each rank its own part of the data, by whatever names they know rank and number of ranks.

torch's DistributedSampler, and those of timm and transformers, say `num_replicas` and `rank`; OpenMMLab's and lhotse's
`world_size` and `rank`; detectron2's and YOLOX's the same with an underscore; Megatron-LM's `data_parallel_size` and
`data_parallel_rank`.
"""

from __future__ import annotations

import contextlib
import itertools

import numpy as np

__all__ = ["num_ranks_of"]

_NAMES = (("num_replicas", "rank"), ("world_size", "rank"), ("data_parallel_size", "data_parallel_rank"))


def num_ranks_of(sampler: object) -> int:
    """Among how many ranks a sampler shares out its indices; 1 where its attributes tell of no others. Local."""
    for (size_name, rank_name), prefix in itertools.product(_NAMES, ("", "_")):
        with contextlib.suppress(Exception):  # a property may ask a group that is not there
            size, rank = getattr(sampler, prefix + size_name), getattr(sampler, prefix + rank_name)
            if all(isinstance(each, int | np.integer) for each in (size, rank)) and size > 1:
                return int(size)
    return 1
