"""`apex.fp16_utils`: manual 16-bit models and float32 masters. See the table in `lockstep.compat.apex`.

General layout:

* `fp16util`: casts models, and copies between 16-bit parameters and float32 masters.
* `loss_scaler`: loss scales; `fp16_optimizer`: `FP16_Optimizer`, which uses both.
"""

from __future__ import annotations

from lockstep.compat.apex.fp16_utils.fp16_optimizer import FP16_Module, FP16_Optimizer, fp16_to_fp32, fp32_to_fp16
from lockstep.compat.apex.fp16_utils.fp16util import (
    BN_convert_float,
    FP16Model,
    clip_grad_norm,
    convert_module,
    convert_network,
    master_params_to_model_params,
    model_grads_to_master_grads,
    network_to_half,
    prep_param_lists,
    to_python_float,
    tofp16,
)
from lockstep.compat.apex.fp16_utils.loss_scaler import DynamicLossScaler, LossScaler

__all__ = [
    "BN_convert_float",
    "DynamicLossScaler",
    "FP16Model",
    "FP16_Module",
    "FP16_Optimizer",
    "LossScaler",
    "clip_grad_norm",
    "convert_module",
    "convert_network",
    "fp16_to_fp32",
    "fp32_to_fp16",
    "master_params_to_model_params",
    "model_grads_to_master_grads",
    "network_to_half",
    "prep_param_lists",
    "to_python_float",
    "tofp16",
]
