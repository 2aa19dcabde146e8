"""How jobs on a GPU end: killed ranks, too few GPUs, children of one's own; and what `lockstep doctor` sees."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist

import lockstep
from check_groups import expect_nccl_error
from gpu_context import Context, make_model, same
from lockstep.errors import SetupError


def killed(run: Context, backend: str) -> dict[str, Any]:
    """The last rank kills itself between two calls; the others wait for it."""
    world = run.init(backend)
    tensor = torch.ones(4, device=run.device)
    for _ in range(3):
        dist.all_reduce(tensor)
    run.synchronize()
    if world.rank == world.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(tensor)
    raise AssertionError("nobody noticed")


def killed_in_backward(run: Context, backend: str) -> dict[str, Any]:
    """The last rank kills itself before the averaging that the others wait in; on a GPU autograd's thread calls it."""
    world = run.init(backend)
    model = lockstep.DistributedDataParallel(make_model(torch.float32, run.device))
    for step in range(3):
        loss = model(torch.ones(2, 12, device=run.device)).mean()
        if step == 2 and world.rank == world.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
    raise AssertionError("nobody noticed")


def left_open(run: Context, how: str) -> dict[str, Any]:
    """The group is not destroyed; by a script that fails, that has forgotten it, or that knows torch alone."""
    if how == "plain":
        dist.init_process_group("nccl" if run.is_cuda else "gloo")
    else:
        run.init("nccl")
    with warnings.catch_warnings(record=True) as caught:
        dist.barrier()
    assert how == "plain" or not caught, caught
    dist.all_reduce(torch.ones(4, device=run.device))
    assert how != "fails", "this check fails on purpose"
    return {}


def too_few_gpus(run: Context) -> dict[str, Any]:
    """Without a device given, each rank would take a GPU of its own."""
    if torch.cuda.device_count() >= 2:
        return {"note": f"{torch.cuda.device_count()} GPUs are enough for two ranks"}
    try:
        lockstep.init()
    except SetupError as error:
        text = str(error)
    else:
        raise AssertionError("two ranks were started on one GPU without a word")
    assert "Start no more than that here (--nproc 1)" in text, text
    return {"error": text}


def nccl_on_one_gpu(run: Context) -> dict[str, Any]:
    """Both ranks take the first GPU."""
    run.init("nccl")
    error = expect_nccl_error(run)
    sys.stdout.flush()
    return {"error": error}


def _double(value: float, device: str) -> torch.Tensor:
    with lockstep.init(backend="lockstep", device=device) as world:
        tensor = torch.tensor([value + world.rank], device=device)
        dist.all_reduce(tensor)
        return tensor.cpu()


def spawned(run: Context) -> dict[str, Any]:
    """Two children share the GPU, though this process has used it already."""
    torch.ones(3, device=run.device).sum().item()
    found = lockstep.spawn(_double, (1.0, str(run.device)), 2, timeout=50)
    same([each.item() for each in found], [3.0, 3.0], "sums of the children")
    return {}


def doctor(run: Context) -> dict[str, Any]:
    """Its line of GPUs."""
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", "doctor"], capture_output=True, text=True, timeout=50, check=False
    )
    lines = [line.strip() for line in done.stdout.splitlines() if "GPU" in line]
    assert lines, done.stdout + done.stderr
    if run.is_cuda:
        assert torch.cuda.get_device_name(0) in done.stdout, done.stdout
    return {"says": lines[0][:200]}
