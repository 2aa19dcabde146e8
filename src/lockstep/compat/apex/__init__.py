"""NVIDIA Apex as it was before `amp`, `parallel` and `fp16_utils` were removed (May 2025), on current PyTorch and CPUs.

Mixed precision is torch's autocast, with the loss scaler and master weights in `amp`; gradients are averaged by
`lockstep.DistributedDataParallel`; fused kernels are torch's. Names that scripts import::

  name                                        here       note
  ------------------------------------------  ---------  -----------------------------------------------------------
  amp.initialize                              supported  models on the CPU too; tuples too; patch_torch_functions
                                                         may be torch.bfloat16, the dtype that O1 casts to
  amp.scale_loss                              supported  the error for an unknown loss_id names it
  amp.master_params                           supported
  amp.state_dict                              supported  empty if Amp is not enabled
  amp.load_state_dict                         supported
  amp.disable_casts                           supported
  amp.half_function                           supported  float64 stays, as in torch's autocast; also in the next 5
  amp.float_function                          supported
  amp.promote_function                        supported
  amp.register_half_function                  supported
  amp.register_float_function                 supported
  amp.register_promote_function               supported
  amp.init                                    different  the handle's scale_loss works again; enable_caching: no effect
  amp.AmpError                                different  the error that Amp raises; a RuntimeError
  amp._amp_state                              different  opt_properties, loss_scalers, handle, hard_override,
                                                         allow_incoming_model_not_fp32, verbosity
  opt_level O0, O2, O3                        supported
  opt_level O1                                different  the functions that cast are those of torch's autocast for
                                                         CUDA, on the CPU too
  parallel.DistributedDataParallel            different  allreduce_trigger_params, num_allreduce_streams, prof: no
                                                         effect; shared_param, retain_allreduce_buffers and
                                                         allreduce_communicators are refused; parameters may be
                                                         unused; device_ids, which Apex does not have: no effect
  parallel.Reducer                            supported
  parallel.SyncBatchNorm                      supported  any device and any split of the batch
  parallel.convert_syncbn_model               different  refuses a layer with its own forward, which would be lost
  parallel.create_syncbn_process_group        supported
  parallel.optimized_sync_batchnorm           supported
  parallel.LARC                               supported
  parallel.ReduceOp                           supported
  parallel.distributed.flat_dist_call         supported
  parallel.distributed.apply_flat_dist_call   supported
  parallel.distributed.flatten                supported
  parallel.distributed.unflatten              supported
  parallel.multiproc                          different  one process per core if there is no GPU; output of all
                                                         ranks, prefixed with the rank, and no GPU_<rank>.log
  fp16_utils.FP16_Optimizer                   different  state_dict has the loss scale as plain values; reads both
  fp16_utils.FP16_Module                      supported
  fp16_utils.FP16Model                        supported
  fp16_utils.network_to_half                  supported
  fp16_utils.BN_convert_float                 supported
  fp16_utils.convert_module                   supported
  fp16_utils.convert_network                  supported
  fp16_utils.prep_param_lists                 supported
  fp16_utils.model_grads_to_master_grads      supported
  fp16_utils.master_params_to_model_params    supported
  fp16_utils.clip_grad_norm                   supported
  fp16_utils.LossScaler                       supported
  fp16_utils.DynamicLossScaler                supported
  fp16_utils.to_python_float                  supported
  fp16_utils.tofp16                           supported
  fp16_utils.fp16_to_fp32                     supported
  fp16_utils.fp32_to_fp16                     supported
  optimizers.FusedAdam                        different  torch.optim.AdamW or Adam, in float32 for 16-bit parameters
  optimizers.FusedSGD                         different  torch.optim.SGD; no wd_after_momentum
  optimizers.FusedAdagrad                     different  torch.optim.Adagrad; no adagrad_w_mode
  optimizers.FusedLAMB                        supported
  optimizers.FusedNovoGrad                    supported
  optimizers.FP16_Optimizer                   different  that of fp16_utils
  optimizers.FusedMixedPrecisionLamb          refused    when constructed: use FusedLAMB with
                                                         amp.initialize(opt_level="O2")
  normalization.FusedLayerNorm                different  torch.nn.LayerNorm; memory_efficient ignored; under
                                                         torch.autocast in float32, as torch's
  normalization.FusedRMSNorm                  different  torch.nn.RMSNorm, rounded as in Apex; memory_efficient ignored
  normalization.MixedFusedLayerNorm           different  as FusedLayerNorm
  normalization.MixedFusedRMSNorm             different  as FusedRMSNorm
  multi_tensor_apply.multi_tensor_applier     different  available is False; use torch._foreach_mul_ etc.
  multi_tensor_apply.MultiTensorApply         different  the same; there is no amp_C and no apex_C
  RNN                                         refused    use torch.nn.LSTM and GRU
  reparameterization                          refused    use torch.nn.utils.parametrizations.weight_norm
  mlp                                         refused    use torch.nn.Sequential
  fused_dense                                 refused    use torch.nn.Linear
  pyprof                                      refused    use torch.profiler
  contrib.optimizers.FP16_Optimizer           different  that of fp16_utils
  contrib.optimizers.FusedAdam                refused    use apex.optimizers.FusedAdam
  contrib.optimizers.FusedLAMB                refused    use apex.optimizers.FusedLAMB
  contrib.optimizers.FusedSGD                 refused    use apex.optimizers.FusedSGD
  contrib.clip_grad                           refused    use torch.nn.utils.clip_grad_norm_
  contrib.groupbn                             refused    use apex.parallel.SyncBatchNorm
  contrib.layer_norm                          refused    use torch.nn.LayerNorm
  contrib.multihead_attn                      refused    use torch.nn.functional.scaled_dot_product_attention
  contrib.xentropy                            refused    use torch.nn.functional.cross_entropy
  transformer                                 refused    use torch.distributed.tensor.parallel

Refused names raise an ImportError that names the alternative, as do all names of contrib that are not listed. As in
Apex, gradients that accumulate over several backward passes, of which only the last averages over ranks, need
`scale_loss(..., delay_unscale=True)` in all others. Without it, Apex is silently wrong; here it is an error.

General layout:

* `amp`: mixed precision; `fp16_utils`: manual conversion to 16 bits.
* `parallel`: data-parallel training; `optimizers`: torch's, LAMB and NovoGrad; `normalization`: torch's.
* `contrib`: only `optimizers.FP16_Optimizer`.
* `multi_tensor_apply`: can be imported, but is not available.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

# Names and submodules of `import apex`.
_SUBPACKAGES = ("amp", "contrib", "fp16_utils", "multi_tensor_apply", "normalization", "optimizers", "parallel")

REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "RNN": "use torch.nn.LSTM and torch.nn.GRU",
        "contrib": "use torch's layers",
        "contrib.clip_grad": "use torch.nn.utils.clip_grad_norm_",
        "contrib.groupbn": "use apex.parallel.SyncBatchNorm",
        "contrib.layer_norm": "use torch.nn.LayerNorm",
        "contrib.optimizers": "use apex.optimizers",
        "contrib.multihead_attn": "use torch.nn.functional.scaled_dot_product_attention",
        "contrib.xentropy": "use torch.nn.functional.cross_entropy",
        "fused_dense": "use torch.nn.Linear",
        "mlp": "use torch.nn.Sequential",
        "pyprof": "use torch.profiler",
        "reparameterization": "use torch.nn.utils.parametrizations.weight_norm",
        "transformer": "use torch.distributed.tensor.parallel",
    }
)
"""Missing modules, which include their submodules unless these exist or are listed -> what to use instead."""

__all__ = ["amp", "fp16_utils", "multi_tensor_apply", "normalization", "optimizers", "parallel"]


def __getattr__(name: str) -> Any:
    if name in _SUBPACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in REFUSED:
        raise ImportError(f"apex.{name} is not supported by {__name__}; {REFUSED[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
