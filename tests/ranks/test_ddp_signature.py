"""Every argument of torch's `DistributedDataParallel`, of the torch that is there, is taken or refused by name."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh

from ddp_checks import data, mlp
from lockstep import DistributedDataParallel
from lockstep.errors import InputError, ModelError
from lockstep.testing import run_ranks


def test_all_arguments_are_known() -> None:
    torchs = inspect.signature(torch.nn.parallel.DistributedDataParallel.__init__).parameters
    ours = inspect.signature(DistributedDataParallel.__init__).parameters
    assert set(torchs) <= set(ours), "take it, or refuse it in checks.py"
    if list(torchs)[6] == "init_sync":  # older releases have it behind process_group
        assert list(ours)[: len(torchs)] == list(torchs), "positional arguments stand in torch's order"


def refuse() -> dict[str, str]:
    found = {}
    for options in (
        {"mixed_precision": torch.float16},
        {"delay_all_reduce_named_params": [("0.weight", None)]},
        {"param_to_hook_all_reduce": torch.ones(1)},
        {"bucket_cap_mb_list": [1, 2]},
        {"broadcast_buffers": True, "forward_sync_buffers": False},
        {"process_group": dist.group.WORLD, "device_mesh": init_device_mesh("cpu", (2,))},
        {"device_mesh": init_device_mesh("cpu", (2, 1))},
    ):
        with pytest.raises(InputError) as raised:
            DistributedDataParallel(mlp(), **options)
        found[" and ".join(options)] = str(raised.value)
    return found


def test_what_cannot_be_had_says_what_to_write() -> None:
    for found in run_ranks(refuse, 2):
        assert "torch.autocast" in found.pop("mixed_precision")
        assert "bucket_cap_mb" in found.pop("bucket_cap_mb_list")
        assert "mesh[" in found.pop("device_mesh")
        for name, message in found.items():
            assert name.split(" and ")[-1] in message


def take() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = DistributedDataParallel(
        mlp(),
        device_mesh=mesh,
        forward_sync_buffers=False,
        skip_all_reduce_unused_params=True,
        batched_grad_copy=True,
        lazy_bucket_allocation=True,
    )
    assert model.process_group is mesh.get_group()
    assert not model.broadcast_buffers
    model(data(5, 4).float()).sum().backward()
    assert DistributedDataParallel(mlp(), broadcast_buffers=None).broadcast_buffers


def test_what_means_nothing_here_is_taken() -> None:
    run_ranks(take, 2)


def taken_for_torchs() -> list[str]:
    """By programs that look whether they must take `model.module`, torch's own among them."""
    model = DistributedDataParallel(mlp())
    assert isinstance(model, torch.nn.parallel.DistributedDataParallel)
    assert not isinstance(model.module, torch.nn.parallel.DistributedDataParallel)
    assert copy.deepcopy(model).module is not model.module
    with pytest.raises(ModelError, match="Run the last forward pass of a window outside of no_sync"):
        model.reducer.prepare_for_backward([])
    return list(get_model_state_dict(model))


def test_programs_take_it_for_torchs() -> None:
    assert run_ranks(taken_for_torchs, 2) == [["0.weight", "0.bias", "2.weight", "2.bias"]] * 2
