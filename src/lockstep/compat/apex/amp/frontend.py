"""`initialize`, which prepares models and optimizers for an opt level; and the state of the loss scalers."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from lockstep.compat.apex.amp._amp_state import AmpError, _amp_state, say, warn_or_raise
from lockstep.compat.apex.amp.casts import AmpHandle
from lockstep.compat.apex.amp.forward import CastForward, keep_state_dict_wide
from lockstep.compat.apex.amp.optimizers import process_optimizer
from lockstep.compat.apex.amp.properties import HALF_DTYPES, Properties, choose
from lockstep.compat.apex.amp.scaler import LossScaler
from lockstep.compat.apex.fp16_utils.fp16_optimizer import FP16_Optimizer
from lockstep.compat.apex.fp16_utils.fp16util import convert_network
from lockstep.compat.apex.parallel.LARC import LARC
from lockstep.errors import InputTypeError

__all__ = ["initialize", "load_state_dict", "state_dict"]


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: Any = None,
    patch_torch_functions: Any = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
) -> Any:
    """Prepare models and optimizers for an opt level. Call it once, before an engine wraps the models. Local.

    ====== =============== ============== ==================== ============== ==========
    Level  cast_model_type functions cast keep_batchnorm_fp32  master_weights loss_scale
    ====== =============== ============== ==================== ============== ==========
    O0     float32         no             None                 False          1.0
    O1     None            yes            None                 None           dynamic
    O2     float16         no             True                 True           dynamic
    O3     float16         no             False                False          1.0
    ====== =============== ============== ==================== ============== ==========

    Args:
        models: a module, or a list of modules, on any device.
        optimizers: an optimizer, a list of them, or None for inference.
        enabled: False makes all of Amp do nothing.
        opt_level: "O0" to "O3".
        cast_model_type: dtype of the model, `torch.bfloat16` for instance; False leaves parameters alone.
        patch_torch_functions: with O1 also `torch.bfloat16`, which functions then cast to.
        keep_batchnorm_fp32: a bool, "True" or "False".
        master_weights: see `optimizers.py`.
        loss_scale: a number, a string with a number, or "dynamic".
        cast_model_outputs: dtype of the models' outputs; by default float32 if the model is cast.
        num_losses: number of losses with separate scales; see `loss_id` of `scale_loss`.
        verbosity: 0 prints nothing.
        min_loss_scale: lower bound of a dynamic scale.
        max_loss_scale: upper bound of a dynamic scale.

    Returns:
        Models, or (models, optimizers), each as a list if given as one: the same objects, changed in place.

    Raises:
        AmpError: the level is unknown; options are incompatible; a model has 16 bits or is wrapped already; an
            optimizer was given before.
        AmpValueError: the value of an option is invalid.
        InputTypeError: `models` or `optimizers` have the wrong type.
    """
    _amp_state.verbosity = verbosity
    if not enabled:
        _amp_state.opt_properties = Properties()
        _amp_state.loss_scalers = []
        return models if optimizers is None else (models, optimizers)
    overrides = {
        "cast_model_type": cast_model_type,
        "patch_torch_functions": patch_torch_functions,
        "keep_batchnorm_fp32": keep_batchnorm_fp32,
        "master_weights": master_weights,
        "loss_scale": loss_scale,
    }
    properties = choose(opt_level, overrides)
    each_model, each_optimizer = _listed_models(models), _listed_optimizers(optimizers)
    for model in each_model:
        _check_model(model)
    for model in each_model:
        _cast_model(model, properties, cast_model_outputs)
    for optimizer in each_optimizer:
        if properties.cast_model_type and not properties.master_weights:
            optimizer.load_state_dict(optimizer.state_dict())  # casts its state to the parameters' dtype
        process_optimizer(optimizer, bool(properties.master_weights))
    _amp_state.opt_properties = properties
    _amp_state.loss_scalers = [
        LossScaler(properties.loss_scale, min_loss_scale=min_loss_scale, max_loss_scale=max_loss_scale)
        for _ in range(num_losses)
    ]
    if properties.patch_torch_functions:
        chosen = properties.patch_torch_functions
        dtype = chosen if chosen in HALF_DTYPES else torch.float16
        kinds = {parameter.device.type for model in each_model for parameter in model.parameters()}
        AmpHandle(dtype, sorted(kinds), verbose=verbosity == 2)
    return models if optimizers is None else (models, optimizers)


def _listed_models(models: Any) -> list[nn.Module]:
    listed = list(models) if isinstance(models, (list, tuple)) else [models]
    for model in listed:
        if not isinstance(model, nn.Module):
            raise InputTypeError(f"models must be a torch.nn.Module or a list of them, got {type(model).__name__}")
    return listed


def _listed_optimizers(optimizers: Any) -> list[Any]:
    if optimizers is None:
        return []
    listed = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
    for optimizer in listed:
        if isinstance(optimizer, FP16_Optimizer):
            raise AmpError(
                "an optimizer is an FP16_Optimizer already. Pass the plain one to amp.initialize, which adds master "
                "weights and loss scaling according to opt_level"
            )
        if not isinstance(optimizer, (torch.optim.Optimizer, LARC)):
            raise InputTypeError(
                f"optimizers must be a torch optimizer, LARC or a list of them, got {type(optimizer).__name__}"
            )
    return listed


def _check_model(model: nn.Module) -> None:
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):  # true for Lockstep's, too
        raise AmpError(
            f"the model is wrapped in {type(model).__name__} already. Wrap it after amp.initialize: the wrapper must "
            "see the final parameters"
        )
    if _amp_state.allow_incoming_model_not_fp32:
        return
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            if tensor.dtype in HALF_DTYPES:
                warn_or_raise(
                    f"{kind} {name} of the model is {tensor.dtype}, expected float32: do not call half() "
                    "before amp.initialize, at every opt level"
                )


def _cast_model(model: nn.Module, properties: Properties, outputs: torch.dtype | None) -> None:
    dtype = properties.cast_model_type
    if dtype:
        if properties.keep_batchnorm_fp32:
            convert_network(model, dtype)
        else:
            model.to(dtype)
        if dtype in HALF_DTYPES:
            keep_state_dict_wide(model)
        outputs = outputs or torch.float32
    if dtype or outputs:
        CastForward(model, dtype or None, outputs).install()


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """State of the loss scalers: `{"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 0}, ...}`."""
    destination = OrderedDict() if destination is None else destination
    for index, scaler in enumerate(_amp_state.loss_scalers):
        destination[f"loss_scaler{index}"] = {
            "loss_scale": scaler.loss_scale(),
            "unskipped": scaler._unskipped,
        }
    return destination


def load_state_dict(state_dict: dict[str, Any]) -> None:
    """Load the state of an earlier run, after `initialize`. Warns if the number of losses differs.

    Raises:
        AmpError: an entry is not that of a loss scaler.
    """
    unexpected = [key for key in state_dict if "loss_scaler" not in key]
    if unexpected:
        raise AmpError(f"amp.load_state_dict: unexpected key(s) {', '.join(map(repr, unexpected))}")
    scalers = _amp_state.loss_scalers
    if len(state_dict) != len(scalers):
        say(f"Warning: state_dict contains {len(state_dict)} entries, while {len(scalers)} loss_scalers are used")
    for scaler, saved in zip(scalers, state_dict.values(), strict=False):
        scaler._loss_scale = saved["loss_scale"]
        scaler._unskipped = saved["unskipped"]
