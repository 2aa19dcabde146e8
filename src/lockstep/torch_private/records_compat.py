"""Names of torch needed for scripts for other libraries, old releases of torch and GPUs."""

from __future__ import annotations

from lockstep.torch_private.record import NameRecord, Use

__all__ = ["RECORDS"]

_NEEDED = "in a script that needs it, or with --compat; never with --no-compat"
_OLD = "old scripts fail as they do without Lockstep"


def _old(name: str, use: Use, why: str) -> NameRecord:
    return NameRecord(name, use, why, _OLD, _NEEDED, since="none" if use is Use.ADD else NameRecord.since)


RECORDS = (
    _old("torch.Tensor.eq", Use.PATCH, "2-d results are stored row by row, so that view(-1) works"),
    NameRecord(
        "torch.full", Use.PATCH, "returns floats for an integer fill value, as until torch 1.5", _OLD, "with --compat"
    ),
    _old("torch.serialization.load", Use.PATCH, "accepts argparse.Namespace and numpy scalars, which run no code"),
    _old("torch.utils.data.DataLoader.__init__", Use.PATCH, "accepts batch_size=64.0 as 64"),
    _old("torch.utils.data.BatchSampler.__init__", Use.PATCH, "accepts batch_size=64.0 as 64"),
    _old("torch.utils.data.Sampler.__init__", Use.PATCH, "accepts and ignores data_source, as it did"),
    _old("torch.optim.lr_scheduler.*.__init__", Use.PATCH, "schedulers accept verbose=…, which torch 2.7 removed"),
    _old("torch.distributed.*_multigpu", Use.ADD, "collectives of several tensors per process"),
    _old("torch.distributed.distributed_c10d.*_multigpu", Use.ADD, "the same"),
    _old("torch.distributed.reduce_op", Use.ADD, "the name of ReduceOp until torch 1.1"),
    _old("torch._six", Use.ADD, "names for Python 2 and 3, until torch 1.13"),
    _old("torch.cuda.comm", Use.ADD, "torch.nn.parallel.comm under its old name"),
    _old("torch.distributed.deprecated", Use.ADD, "torch.distributed under another name, in torch 1.0"),
    _old("torch.nn.parallel.deprecated", Use.ADD, "torch.nn.parallel under another name, in torch 1.0"),
    _old("torch.distributed.dist_backend", Use.ADD, "names of backends, until torch 0.4"),
    _old("torch.distributed._backend", Use.ADD, "the default group's backend, until torch 0.4"),
    NameRecord(
        "torch.nn.functional.binary_cross_entropy",
        Use.PATCH,
        "apex.amp raises for it in float16, as Apex does",
        "it computes what torch computes",
        "from amp.initialize(opt_level='O1') until amp is off",
    ),
    NameRecord(
        "torch.Tensor.cpu",
        Use.PATCH,
        "apex.amp converts to float32 on the host, as Apex does",
        "16 bits stay 16 bits",
        "from amp.initialize(opt_level='O1') until amp is off",
    ),
    NameRecord(
        "torch.Tensor.*_",
        Use.PATCH,
        "apex.amp refuses functions that run in float32 and write to 16 bits, as Apex does: exp_, log_ and others",
        "they compute in 16 bits",
        "from amp.initialize(opt_level='O1') until amp is off",
    ),
    NameRecord(
        "the modules of amp.register_*_function",
        Use.BEHAVIOUR,
        "scripts register functions of any module, which apex.amp wraps while it is enabled",
        "the script's own error",
        "from amp.initialize(opt_level='O1') until amp is off",
    ),
    *(
        NameRecord(
            f"torch._C.{name}",
            Use.READ,
            "CUDA's list of what autocast casts, for tensors on the CPU: cuda_casts.py",
            "autocast keeps the CPU's list",
            "apex.amp at O1 on a CPU, and under `lockstep rehearse`",
        )
        for name in (
            "DispatchKey",
            "DispatchKeySet",
            "_ExcludeDispatchKeyGuard",
            "_dispatch_get_registrations_for_dispatch_key",
        )
    ),
    NameRecord(
        "torch.library.Library._destroy",
        Use.READ,
        "removes that list",
        "it stays",
        "when apex.amp is disabled",
    ),
    NameRecord(
        "torch.* in rehearsing processes",
        Use.PATCH,
        "simulated GPUs: torch.cuda, devices of tensors, generators, nccl; and the calls that are monitored",
        "a missing name is not simulated or monitored",
        "under `lockstep rehearse`",
        folder="lockstep.tools.rehearse",
    ),
    NameRecord(
        "torch.* in verified processes",
        Use.PATCH,
        "records what loaders, backward(), optimizers and save() do, and each operator's random draws and sums",
        "a missing name is not compared",
        "under `lockstep verify`",
        folder="lockstep.tools.verify",
    ),
)
