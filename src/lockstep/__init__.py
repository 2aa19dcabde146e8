"""Lockstep: synchronous data-parallel training for PyTorch. N processes, one answer.

Public names are resolved on first use, so that `import lockstep.launch` (the launcher)
does not import torch.

General layout, from the top down; imports point down, and `tests/unit/test_layers.py` enforces it:

* `cli`: finds the module of a command; `commands`: a module for each command.
* `tools`: rehearsals, and what a machine can do; `bench`: measures training and its communication.
* `compat`: shims for Horovod, Apex and old scripts; `recipes`: training programs; `testing`: ranks for tests.
* `launch`: starts processes, watches them and reports why they failed.
* `train`: a training loop.
* `parallel`: averages gradients over ranks; `data`: loads global batches; `metrics`: counts every sample once;
  `checkpoint`: saves and restores a run.
* `rank_zero`: actions of rank 0 for all ranks; `drift`: finds ranks whose models diverge; `replicas`: `DataParallel`.
* `world`: `init`, which opens the world; `stopping`: signals that tell a job to stop.
* `agreement`: decisions that all ranks make together; `placement`: which ranks share a host if no launcher says so;
  `device_choice`: which device a rank computes on.
* `comm`: process groups for torch.distributed; `rendezvous`: how ranks find each other.
* `shm`: the shared memory of one host.
* `batch`: a rank's share of a global batch.
* `topology`: reads rank and world size from the environment; `mpi_library`: finds MPI and initialises it.
* `seeding`: derives seeds; `tree`: finds tensors inside containers.
* `rank_status`: reports a rank's position to the launcher; `frames`: finds the user's frames on a stack.
* `network_interfaces`: chooses the address that a host listens on.
* `torch_private`: holds every patch and every private name of torch.
* `errors`: all exceptions; `env`: all environment variables; `log`: the logger; `secret`: the keys of a job;
  `json_records`: reads records that other processes have written; `similar`: suggests a known word.
* `libc`: Linux calls that Python lacks; `after_import`: calls back when a module has been imported.
"""

from __future__ import annotations

import importlib
from types import ModuleType as _ModuleType
from typing import TYPE_CHECKING

from lockstep.comm import registration as _registration

__version__ = "0.1.0"

if TYPE_CHECKING:  # `as` marks a re-export for type checkers
    from lockstep.agreement import all as all
    from lockstep.agreement import any as any
    from lockstep.batch.tags import is_filler as is_filler
    from lockstep.comm.symmetric_memory import symmetric_empty as symmetric_empty
    from lockstep.data import DataLoader as DataLoader
    from lockstep.errors import LockstepError as LockstepError
    from lockstep.launch.spawn import spawn as spawn
    from lockstep.parallel.batchnorm import SyncBatchNorm as SyncBatchNorm
    from lockstep.parallel.batchnorm import convert_sync_batchnorm as convert_sync_batchnorm
    from lockstep.parallel.distributed import DistributedDataParallel as DistributedDataParallel
    from lockstep.parallel.losses import all_gather as all_gather
    from lockstep.parallel.losses import global_loss as global_loss
    from lockstep.parallel.losses import mean as mean
    from lockstep.parallel.losses import sum as sum
    from lockstep.parallel.sharded.optimizer import ZeroRedundancyOptimizer as ZeroRedundancyOptimizer
    from lockstep.rank_status import EXIT_STOPPED as EXIT_STOPPED
    from lockstep.rank_zero import get_logger as get_logger
    from lockstep.rank_zero import rank_zero_first as rank_zero_first
    from lockstep.replicas.data_parallel import DataParallel as DataParallel
    from lockstep.world import World as World
    from lockstep.world import current_world as current_world
    from lockstep.world import init as init

# Public name -> the module that defines it. A subpackage stands for itself.
_PUBLIC = {
    "DataLoader": "lockstep.data",
    "DataParallel": "lockstep.replicas.data_parallel",
    "DistributedDataParallel": "lockstep.parallel.distributed",
    "EXIT_STOPPED": "lockstep.rank_status",
    "LockstepError": "lockstep.errors",
    "SyncBatchNorm": "lockstep.parallel.batchnorm",
    "World": "lockstep.world",
    "ZeroRedundancyOptimizer": "lockstep.parallel.sharded.optimizer",
    "all": "lockstep.agreement",
    "all_gather": "lockstep.parallel.losses",
    "any": "lockstep.agreement",
    "checkpoint": "lockstep.checkpoint",
    "convert_sync_batchnorm": "lockstep.parallel.batchnorm",
    "current_world": "lockstep.world",
    "errors": "lockstep.errors",
    "get_logger": "lockstep.rank_zero",
    "global_loss": "lockstep.parallel.losses",
    "init": "lockstep.world",
    "is_filler": "lockstep.batch.tags",
    "mean": "lockstep.parallel.losses",
    "metrics": "lockstep.metrics",
    "rank_zero_first": "lockstep.rank_zero",
    "spawn": "lockstep.launch.spawn",
    "sum": "lockstep.parallel.losses",
    "symmetric_empty": "lockstep.comm.symmetric_memory",
    "testing": "lockstep.testing",
    "train": "lockstep.train",
}

# Names from other libraries, and their equivalents here.
_ELSEWHERE = {
    "Trainer": "lockstep.train.Trainer",
    "all_reduce": "lockstep.mean, lockstep.sum or torch.distributed.all_reduce",
    "allreduce": "lockstep.mean, lockstep.sum or torch.distributed.all_reduce",
    "barrier": "torch.distributed.barrier()",
    "broadcast": "torch.distributed.broadcast",
    "gather": "lockstep.all_gather",
    "local_rank": "world.local_rank, where world = lockstep.init()",
    "print": "print where world.rank == 0, or lockstep.get_logger",
    "rank": "world.rank, where world = lockstep.init()",
    "save": "lockstep.checkpoint.save",
    "shutdown": "world.shutdown(), where world = lockstep.init()",
    "size": "world.world_size, where world = lockstep.init()",
    "world_size": "world.world_size, where world = lockstep.init()",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> object:
    module_name = _PUBLIC.get(name)
    if module_name is None:
        hint = f": use {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}{hint}")
    module = importlib.import_module(module_name)
    value = module if module_name == f"lockstep.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


def _register_urls(module: _ModuleType) -> None:
    from lockstep.rendezvous import urls

    urls.register(module)


# Lets `dist.init_process_group("lockstep")` work after `import lockstep`, whichever of the two is imported first.
_registration.ensure(_register_urls)
