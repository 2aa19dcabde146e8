"""The table in `lockstep.compat.apex`: each name is there, and is what the table says."""

from __future__ import annotations

import importlib
import inspect
import re

import pytest

from lockstep.compat import apex

# What scripts import of Apex, and the arguments of the functions whose signatures are settled.
SIGNATURES = {
    "amp.initialize": "models, optimizers=None, enabled=True, opt_level='O1', cast_model_type=None, "
    "patch_torch_functions=None, keep_batchnorm_fp32=None, master_weights=None, loss_scale=None, "
    "cast_model_outputs=None, num_losses=1, verbosity=1, min_loss_scale=None, max_loss_scale=16777216.0",
    "amp.scale_loss": "loss, optimizers, loss_id=0, model=None, delay_unscale=False, delay_overflow_check=False",
    "amp.master_params": "optimizer",
    "amp.state_dict": "destination=None",
    "amp.load_state_dict": "state_dict",
    "amp.disable_casts": "",
    "amp.half_function": "fn",
    "amp.float_function": "fn",
    "amp.promote_function": "fn",
    "amp.register_half_function": "module, name",
    "amp.register_float_function": "module, name",
    "amp.register_promote_function": "module, name",
    "amp.init": "enabled=True, loss_scale='dynamic', enable_caching=True, verbose=False, allow_banned=False",
    "parallel.DistributedDataParallel": "module, message_size=10000000, delay_allreduce=False, shared_param=None, "
    "allreduce_trigger_params=None, retain_allreduce_buffers=False, allreduce_always_fp32=False, "
    "num_allreduce_streams=1, allreduce_communicators=None, gradient_average=True, gradient_predivide_factor=1.0, "
    "gradient_average_split_factor=None, prof=False, *, device_ids=None, output_device=None",
    "parallel.Reducer": "module_or_grads_list",
    "parallel.SyncBatchNorm": "num_features, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True, "
    "process_group=None, channel_last=False, fuse_relu=False",
    "parallel.convert_syncbn_model": "module, process_group=None, channel_last=False",
    "parallel.create_syncbn_process_group": "group_size",
    "parallel.LARC": "optimizer, trust_coefficient=0.02, clip=True, eps=1e-08",
    "fp16_utils.FP16_Optimizer": "init_optimizer, static_loss_scale=1.0, dynamic_loss_scale=False, "
    "dynamic_loss_args=None, verbose=True",
    "optimizers.FusedAdam": "params, lr=0.001, bias_correction=True, betas=(0.9, 0.999), eps=1e-08, adam_w_mode=True, "
    "weight_decay=0.0, amsgrad=False, set_grad_none=True, capturable=False, master_weights=False, max_grad_norm=0.0",
    "optimizers.FusedSGD": "params, lr, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False, "
    "wd_after_momentum=False, materialize_master_grads=True, set_grad_none=False",
    "optimizers.FusedLAMB": "params, lr=0.001, bias_correction=True, betas=(0.9, 0.999), eps=1e-06, "
    "weight_decay=0.01, amsgrad=False, adam_w_mode=True, grad_averaging=True, set_grad_none=True, max_grad_norm=1.0, "
    "use_nvlamb=False",
    "optimizers.FusedNovoGrad": "params, lr=0.001, bias_correction=True, betas=(0.9, 0.999), eps=1e-08, "
    "weight_decay=0.0, amsgrad=False, reg_inside_moment=False, grad_averaging=True, norm_type=2, init_zero=False, "
    "set_grad_none=True",
    "normalization.FusedLayerNorm": "normalized_shape, eps=1e-05, elementwise_affine=True, memory_efficient=False",
    "fp16_utils.network_to_half": "network",
    "fp16_utils.BN_convert_float": "module",
    "fp16_utils.prep_param_lists": "model, flat_master=False",
    "fp16_utils.model_grads_to_master_grads": "model_params, master_params, flat_master=False",
    "fp16_utils.master_params_to_model_params": "model_params, master_params, flat_master=False",
    "fp16_utils.clip_grad_norm": "parameters, max_norm, norm_type=2.0",
    "fp16_utils.LossScaler": "scale=1",
    "fp16_utils.DynamicLossScaler": "init_scale=4294967296, scale_factor=2.0, scale_window=1000",
}


def table() -> dict[str, str]:
    """Name to supported, different or refused."""
    assert apex.__doc__ is not None
    rows = re.findall(r"^  (\S.*?)  +(supported|different|refused)\b", apex.__doc__, re.MULTILINE)
    assert len(dict(rows)) == len(rows), "a name is twice in the table"
    return {name: word for name, word in rows if not name.startswith("opt_level")}


def test_table_has_every_name() -> None:
    listed = table()
    assert set(SIGNATURES) <= set(listed)
    assert "parallel.multiproc" in listed
    exported = {f"{part}.{name}" for part in apex.__all__ for name in getattr(apex, part).__all__}
    assert exported - set(listed) == set(), "exported, but not in the table"
    refused = set(apex.REFUSED) - {"contrib", "contrib.optimizers"}
    refused |= {f"contrib.optimizers.{name}" for name in apex.contrib.optimizers._ELSEWHERE}
    refused.add("optimizers.FusedMixedPrecisionLamb")
    assert {name for name, word in listed.items() if word == "refused"} == refused


@pytest.mark.parametrize(("name", "word"), table().items())
def test_table_agrees_with_the_modules(name: str, word: str) -> None:
    part, _, attribute = name.rpartition(".")
    module = importlib.import_module(f"lockstep.compat.apex.{part}".rstrip("."))
    if word != "refused":
        assert getattr(module, attribute, None) is not None or importlib.import_module(f"{module.__name__}.{attribute}")
        return
    if module is apex.optimizers:  # In one statement with others, of which a script makes use.
        with pytest.raises(RuntimeError, match=rf"apex\.{name} is not supported .*; use "):
            getattr(module, attribute)([])
        return
    with pytest.raises(ImportError, match=rf"apex\.{name} is not supported .*; use "):
        getattr(module, attribute)
    with pytest.raises(ImportError, match="use "):
        exec(f"from {module.__name__} import {attribute}")


@pytest.mark.parametrize(("name", "expected"), SIGNATURES.items())
def test_signatures(name: str, expected: str) -> None:
    part, _, attribute = name.rpartition(".")
    found = inspect.signature(getattr(getattr(apex, part), attribute))
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in found.parameters.values()]
    assert str(inspect.Signature(bare)) == f"({expected})"


def test_modules_that_scripts_name() -> None:
    from lockstep.compat.apex.amp._amp_state import _amp_state
    from lockstep.compat.apex.amp.amp import half_function
    from lockstep.compat.apex.normalization.fused_layer_norm import FusedLayerNorm
    from lockstep.compat.apex.parallel.distributed import DistributedDataParallel
    from lockstep.compat.apex.parallel.LARC import LARC

    assert apex.amp._amp_state is _amp_state
    assert apex.normalization.FusedLayerNorm is FusedLayerNorm
    assert apex.parallel.DistributedDataParallel is DistributedDataParallel
    assert apex.parallel.LARC is LARC
    assert apex.parallel.optimized_sync_batchnorm.SyncBatchNorm is apex.parallel.SyncBatchNorm
    assert half_function is apex.amp.half_function
    assert apex.optimizers.FP16_Optimizer is apex.fp16_utils.FP16_Optimizer
    assert apex.contrib.optimizers.FP16_Optimizer is apex.fp16_utils.FP16_Optimizer
    with pytest.raises(ImportError, match=r"apex\.contrib\.sparsity is not supported .*; use torch's layers"):
        exec("from lockstep.compat.apex.contrib import sparsity")
    for name in ("Adagrad", "Adam", "LAMB", "MixedPrecisionLamb", "NovoGrad", "SGD"):
        last = "mixed_precision_lamb" if name == "MixedPrecisionLamb" else name.lower()
        module = importlib.import_module(f"lockstep.compat.apex.optimizers.fused_{last}")
        assert getattr(module, f"Fused{name}") is getattr(apex.optimizers, f"Fused{name}")


def test_unknown_names_are_attribute_errors() -> None:
    for module in (apex, apex.contrib.optimizers):
        with pytest.raises(AttributeError, match="no attribute 'missing'"):
            _ = module.missing
    assert not hasattr(apex.contrib, "_missing")
