"""`apex.contrib`: only `optimizers.FP16_Optimizer`, which scripts of 2019 import from there.

General layout:

* `optimizers`: `FP16_Optimizer`.
"""

from __future__ import annotations

import importlib
from typing import Any

from lockstep.compat.apex import REFUSED

__all__ = ["optimizers"]

_OF_APEX = frozenset(
    [
        "bottleneck",
        "clip_grad",
        "conv_bias_relu",
        "cudnn_gbn",
        "fmha",
        "focal_loss",
        "gpu_direct_storage",
        "group_norm",
        "groupbn",
        "index_mul_2d",
        "layer_norm",
        "multihead_attn",
        "nccl_allocator",
        "nccl_p2p",
        "openfold_triton",
        "peer_memory",
        "sparsity",
        "torchsched",
        "transducer",
        "xentropy",
    ]
)


def __getattr__(name: str) -> Any:
    if name == "optimizers":
        return importlib.import_module(f"{__name__}.optimizers")
    if name not in _OF_APEX:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    advice = REFUSED.get(f"contrib.{name}", REFUSED["contrib"])
    raise ImportError(f"apex.contrib.{name} is not supported by lockstep.compat.apex; {advice}")
