"""Checks the arguments of `DistributedDataParallel` before any rank waits for another."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchEngine

from lockstep.drift.comparison import note_end
from lockstep.drift.engines import engines
from lockstep.errors import InputError, InputTypeError, ModelError, NotInitialized
from lockstep.log import get_logger, warn_once
from lockstep.parallel.batchnorm import SyncBatchNorm
from lockstep.torch_private.groups import device_types_of
from lockstep.torch_private.modules import buffers_of
from lockstep.torch_private.tensors import may_overlap

__all__ = [
    "SPARSE_ADVICE",
    "PassesForTorchs",
    "check_bucket_cap",
    "check_device",
    "check_group",
    "check_module",
    "check_parameters",
    "check_refused",
    "check_renormalised",
    "choose_broadcast_buffers",
    "choose_devices",
    "find_alike",
    "find_buffers",
    "find_sparse",
    "has_sync_batchnorm",
    "named_tensors",
]

_DEFAULT_BUCKET_MIB = 25.0

# Attributes that Megatron-LM and DeepSpeed (experts), Tutel, and Megatron-LM (tensor parallelism) set on parameters
# that differ between ranks.
_MARKS_OF_PARTS = {"allreduce": False, "skip_allreduce": True, "tensor_model_parallel": True}
_NORMS = (
    *(torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm, SyncBatchNorm),
    *(torch.nn.InstanceNorm1d, torch.nn.InstanceNorm2d, torch.nn.InstanceNorm3d),
)

SPARSE_ADVICE = (
    "Only those of an nn.Embedding or nn.EmbeddingBag with sparse=True by then are averaged. Put the parameter in "
    "one, or drop sparse=True"
)


def check_group(process_group: object, device_mesh: Any = None) -> dist.ProcessGroup:
    """The group given directly or as a mesh of one dimension; else the default group.

    Raises:
        NotInitialized: there is no group.
        InputError: both were given, or the mesh has several dimensions, or this rank is not in the group.
        InputTypeError: not a group.
    """
    group = process_group
    if device_mesh is not None:
        if process_group is not None:
            raise InputError("both process_group and device_mesh were given. They mean the same; pass one")
        if device_mesh.ndim != 1:
            raise InputError(
                f"device_mesh has {device_mesh.ndim} dimensions, but gradients are averaged along one. Pass that one, "
                'such as mesh["dp"]'
            )
        group = device_mesh.get_group()
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    if group is None:
        raise NotInitialized("DistributedDataParallel needs a process group. Call lockstep.init() first")
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise InputError(
            f"process_group: rank {dist.get_rank()} is not a member of the group that it passed. Wrap the model only "
            "on the ranks passed to new_group"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise InputTypeError(f"process_group must be a ProcessGroup or None, got {type(group).__name__}")
    return group


def check_device(device: torch.device, group: dist.ProcessGroup) -> None:
    """Check that the group accepts tensors on the model's device."""
    kinds = device_types_of(group)
    if device.type == "cpu" and "cpu" not in kinds:
        raise ModelError(
            f"the model is on the CPU, but {dist.get_backend(group)} communicates {min(kinds)} tensors only. Write "
            "DistributedDataParallel(model.to(world.device)), or open the world with lockstep.init(device='cpu')"
        )


def check_parameters(named: dict[str, torch.nn.Parameter]) -> None:
    """Check that there are parameters that require a gradient, and that all of them can be averaged."""
    if not named:
        raise ModelError("no parameter of the model requires a gradient, so nothing is averaged. Do not wrap it")
    for name, parameter in named.items():
        if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
            raise ModelError(f"parameter {name} is lazy and has no shape yet. Run one forward pass before wrapping")
        if parameter.is_meta:
            raise ModelError(f"parameter {name} is on the meta device and has no values. Load or initialize it first")


def find_sparse(module: torch.nn.Module, named: dict[str, torch.nn.Parameter]) -> frozenset[int]:
    """Positions in `named` of the parameters of layers with sparse gradients. Found as in torch's engine."""
    positions = {id(parameter): position for position, parameter in enumerate(named.values())}
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    layers = [each for each in module.modules() if isinstance(each, kinds) and each.sparse]
    return frozenset(positions[id(each.weight)] for each in layers if id(each.weight) in positions)


def check_renormalised(module: torch.nn.Module, world_size: int) -> None:
    """Refuse embeddings whose forward pass rescales the rows that this rank looks up: ranks would diverge."""
    for name, submodule in module.named_modules() if world_size > 1 else ():
        if isinstance(submodule, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and submodule.max_norm is not None:
            raise ModelError(
                f"{name or 'the model'} is a {type(submodule).__name__}(max_norm={submodule.max_norm:g}), which "
                "rescales the rows that a forward pass looks up. Each rank looks up different rows, so the "
                "weights would diverge. Pass max_norm=None, and after optimizer.step() write: with torch.no_grad(): "
                f"weight.renorm_({submodule.norm_type:g}, 0, {submodule.max_norm:g})"
            )


def check_bucket_cap(bucket_cap_mb: float | None) -> float:
    """Validate the number of MiB of gradients in a bucket, and apply the default."""
    if bucket_cap_mb is None:
        return _DEFAULT_BUCKET_MIB
    if isinstance(bucket_cap_mb, bool) or not isinstance(bucket_cap_mb, (int, float)):
        raise InputTypeError(f"bucket_cap_mb must be a number of MiB, got {type(bucket_cap_mb).__name__}")
    if not (0 <= bucket_cap_mb < math.inf):
        raise InputError(f"bucket_cap_mb={bucket_cap_mb}: expected MiB, at least 0 (one bucket per parameter)")
    return float(bucket_cap_mb)


def named_tensors(module: nn.Module, ignored: frozenset[str], with_buffers: bool = True) -> dict[str, torch.Tensor]:
    """Parameters of a module, and its buffers, by name. Local."""
    buffers: Iterable[tuple[str, torch.Tensor]] = module.named_buffers() if with_buffers else ()
    tensors = itertools.chain(module.named_parameters(), buffers)
    return {name: tensor for name, tensor in tensors if name not in ignored}


def find_alike(module: torch.nn.Module, ignored: frozenset[str], with_buffers: bool) -> dict[str, torch.Tensor]:
    """Tensors that must be equal on all ranks at the end, by name: parameters and persistent buffers. Local.

    Excludes parameters that are marked as local to a rank, or sharded, and normalization statistics, which forward
    passes without a backward pass also update.
    """
    saved = module.state_dict().keys() if with_buffers else ()
    norms = [each for each in module.modules() if isinstance(each, _NORMS)]
    statistics = {id(each) for layer in norms for each in layer.buffers(False)}
    parameters = dict(module.named_parameters())

    def is_left_out(name: str, tensor: torch.Tensor) -> bool:
        if name not in parameters:
            return name not in saved or id(tensor) in statistics
        is_marked = any(getattr(tensor, mark, None) is value for mark, value in _MARKS_OF_PARTS.items())
        return is_marked or type(tensor) not in (torch.Tensor, torch.nn.Parameter)

    tensors = named_tensors(module, ignored, with_buffers)
    return {name: tensor for name, tensor in tensors.items() if not is_left_out(name, tensor)}


def find_buffers(module: torch.nn.Module, ignored: frozenset[str]) -> list[tuple[dict[str, torch.Tensor | None], str]]:
    """Where the buffers of a module are stored: for each buffer, its submodule's dict and the name in it.

    Raises:
        ModelError: several elements of a buffer share memory, so that it cannot be overwritten.
    """
    entries, seen = [], set()
    for prefix, submodule in module.named_modules():
        for name, buffer in buffers_of(submodule).items():
            full_name = f"{prefix}.{name}" if prefix else name
            if buffer is None or buffer.numel() == 0 or id(buffer) in seen or full_name in ignored:
                continue
            seen.add(id(buffer))
            if buffer.layout is torch.strided and may_overlap(buffer):
                raise ModelError(f"buffer {full_name} is expanded: its values share memory. Register buffer.clone()")
            entries.append((buffers_of(submodule), name))
    return entries


def has_sync_batchnorm(module: torch.nn.Module) -> bool:
    """Whether the backward pass of this model itself calls collectives. Local.

    If ranks leave out different parameters, one may send a bucket before such a collective, and another after it.
    """
    return any(isinstance(each, (SyncBatchNorm, torch.nn.SyncBatchNorm)) for each in module.modules())


_logger = get_logger(__name__)

_REFUSED = {
    "mixed_precision": (
        "gradients are averaged in the dtype of the parameters. Compute in 16 bits with torch.autocast, and "
        "communicate 16 bits with register_comm_hook(None, "
        "torch.distributed.algorithms.ddp_comm_hooks.default_hooks.bf16_compress_hook)"
    ),
    "delay_all_reduce_named_params": (
        "it makes torch average some parameters separately. List them in module._ddp_params_and_buffers_to_ignore, "
        "and average them with dist.all_reduce"
    ),
    "param_to_hook_all_reduce": "it belongs to delay_all_reduce_named_params, which is not supported either",
    "dim": "one process gets one part of the batch, along dimension 0",
    "bucket_cap_mb_list": "pass one size for all buckets: bucket_cap_mb",
}


def check_refused(**given: object) -> None:
    """Refuse unsupported arguments, by an InputError that names the argument and says what to write instead."""
    for name, value in given.items():
        if value is not None:
            raise InputError(f"DistributedDataParallel: {name} is not supported: {_REFUSED[name]}")


def choose_broadcast_buffers(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> bool:
    """Whether to broadcast buffers, from the argument's old or new name; InputError if these differ."""
    if None not in (broadcast_buffers, forward_sync_buffers) and broadcast_buffers != forward_sync_buffers:
        raise InputError(
            f"broadcast_buffers={broadcast_buffers} and forward_sync_buffers={forward_sync_buffers} are two names for "
            "one option. Pass one of them"
        )
    chosen = broadcast_buffers if forward_sync_buffers is None else forward_sync_buffers
    return chosen is not False


def choose_devices(
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
    parameters: Sequence[torch.Tensor],
) -> list[torch.device] | None:
    """The single device given, in a list, as torch stores it; None if none was given.

    Raises:
        InputError: several were given, or another than the parameters' device.
        InputTypeError: `device_ids` is no list.
    """
    if not isinstance(device_ids, Iterable | None):  # 0 is false, so one rank of several would take it
        raise InputTypeError(f"device_ids={device_ids!r}: expected a list of one device, [{device_ids!r}], or None")
    if not device_ids:
        return None
    if len(device_ids) != 1:
        raise InputError(
            f"device_ids={list(device_ids)}: each process uses one device. Pass [local_rank], or None and start one "
            "process per device"
        )
    chosen = torch.device("cuda", device_ids[0]) if isinstance(device_ids[0], int) else torch.device(device_ids[0])
    devices = {parameter.device for parameter in parameters}
    if devices != {chosen}:
        raise InputError(
            f"device_ids is {chosen}, but parameters are on {', '.join(sorted(map(str, devices)))}. Move the model "
            "there first, or leave device_ids out (required for CPU models and models on several devices)"
        )
    if output_device is not None and torch.device(output_device) != chosen and output_device != device_ids[0]:
        warn_once(_logger, f"output_device={output_device} is ignored: outputs stay on {chosen}")
    return [chosen]


_OURS = "lockstep.DistributedDataParallel"
_TORCHS = "torch.nn.parallel.DistributedDataParallel"


def check_module(module: object) -> None:
    """Refuse an argument that is not a module, or contains an engine. Local.

    Raises:
        InputTypeError: not a module.
        ModelError: it is an engine, or one of its submodules is; names both.
    """
    if not isinstance(module, nn.Module):
        raise InputTypeError(f"DistributedDataParallel wraps a torch.nn.Module, got {type(module).__name__}")
    for name, submodule in module.named_modules():
        is_ours = any(submodule is each for each in engines())
        if is_ours or TorchEngine in type(submodule).__mro__:  # `isinstance` holds for ours as well
            where = f"its submodule {name} is" if name else "it is"
            raise ModelError(
                f"{_OURS} was given {type(module).__name__}, but {where} a {_OURS if is_ours else _TORCHS} already: "
                "its gradients would be averaged twice. Wrap the bare model once, and train with the wrapped one"
            )


class _Reducer:
    """Stands in for the C++ reducer of torch's engine."""

    def prepare_for_backward(self, outputs: object) -> NoReturn:
        """Refuse to average gradients accumulated under `no_sync()`, by a ModelError that says what to write."""
        raise ModelError(
            f"{_OURS} averages in the backward pass of a forward pass that ran outside of no_sync(), and this cannot "
            "be changed later. Run the last forward pass of a window outside of no_sync(); for torch's pipeline "
            f"stages use {_TORCHS}, which also runs on this group"
        )


@TorchEngine.register
class PassesForTorchs(nn.Module):
    """A module that is accepted as torch's engine.

    It passes `isinstance` for torch's engine, by which scripts and libraries decide whether to unwrap `model.module`.
    Some also use internals of torch's engine to average a backward pass whose forward pass ran in `no_sync()`: torch's
    pipelines, and Accelerate's `trigger_sync_in_backward`. Here the forward pass decides.

    Attributes:
        require_forward_param_sync: for these libraries; has no effect here.
        reducer: refuses their requests.
    """

    __del__ = note_end  # an engine's model is compared with that of other ranks
    require_forward_param_sync = True
    reducer = _Reducer()
