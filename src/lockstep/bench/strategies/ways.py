"""The ways to train: what each is, who starts its processes, and whether it can run here.

Does not import torch, which the process that starts the ranks does not need.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

__all__ = ["ALL_THREADS", "BASE", "OURS", "PARTS", "PEER", "SINGLE", "WAYS", "Way", "command_of", "why_not"]

BASE, OURS, PEER = "base", "ours", "peer"
SINGLE, ALL_THREADS = "single", "single_threads"

PARTS = ("data", "forward", "backward", "optimizer")
"""The parts of a step, in order."""


@dataclass(frozen=True)
class Way:
    """A way to train.

    Attributes:
        name: its name in results and for `--ways`.
        label: its description in reports.
        kind: `BASE` (one process, nothing averaged), `OURS` or `PEER`.
        starter: "alone" (one process), "spawn" (one, which starts the others), "lockstep" (`lockstep run`),
            "torchrun" or "horovodrun".
        package: a required module, and its package; empty for none.
    """

    name: str
    label: str
    kind: str
    starter: str
    package: tuple[str, str] | None = None


WAYS = {
    way.name: way
    for way in (
        Way(SINGLE, "one process, one device", BASE, "alone"),
        Way(ALL_THREADS, "one process, threads on all cores", BASE, "alone"),
        Way("dp", "lockstep.DataParallel", OURS, "alone"),
        Way("ddp", "lockstep DDP", OURS, "lockstep"),
        Way("sharded", "lockstep DDP, ZeroRedundancyOptimizer", OURS, "lockstep"),
        Way("spawn", "lockstep DDP, torch.multiprocessing.spawn", OURS, "spawn"),
        Way("apex", "Apex's calls (lockstep.compat.apex)", OURS, "lockstep"),
        Way("horovod", "Horovod's calls (lockstep.compat.horovod)", OURS, "lockstep"),
        Way("torch_dp", "torch DataParallel", PEER, "alone"),
        Way("torch_ddp", "torch DDP on gloo, or nccl", PEER, "torchrun"),
        Way("torch_ddp_lockstep", "torch DDP on lockstep's group", PEER, "lockstep"),
        Way("accelerate", "Accelerate", PEER, "torchrun", ("accelerate", "accelerate")),
        Way("fabric", "Lightning Fabric", PEER, "torchrun", ("lightning_fabric", "lightning-fabric")),
        Way("ignite", "Ignite (ignite.distributed)", PEER, "torchrun", ("ignite", "pytorch-ignite")),
        Way("horovod_itself", "Horovod itself", PEER, "horovodrun", ("horovod", "horovod")),
    )
}
"""All ways by name, in the order of their turns."""


def why_not(way: Way, nproc: int, num_gpus: int) -> str | None:
    """Why a way cannot run here; None if it can.

    Args:
        nproc: number of ranks, of ways with several.
        num_gpus: number of GPUs on this host.
    """
    if way.package is not None and find_spec(way.package[0]) is None:
        return f"not installed: pip install {way.package[1]}"
    if way.name == "torch_dp" and num_gpus == 0:
        return "without GPUs torch's DataParallel just runs the module, which is `single`"
    if way.name == ALL_THREADS and (num_gpus > 0 or nproc == 1):
        return "on GPUs, and with one rank, it is `single`"
    if way.name == "torch_ddp_lockstep" and num_gpus > 0:
        return "on GPUs lockstep's ranks use nccl, so it is the same as `torch_ddp`"
    return None


def command_of(way: Way, nproc: int, python: str, worker: Sequence[str]) -> list[str]:
    """The usual command line that starts a way.

    Args:
        nproc: number of ranks.
        python: the interpreter.
        worker: `-m`, a module and its arguments.
    """
    if way.starter == "lockstep":
        return [python, "-m", "lockstep", "run", "--nproc", str(nproc), "--no-prefix", *worker]
    if way.starter == "torchrun":
        # By default, the agent polls its workers ten times a second.
        agent = ["--standalone", "--nproc-per-node", str(nproc), "--monitor-interval", "2"]
        return [python, "-m", "torch.distributed.run", *agent, *worker]
    if way.starter == "horovodrun":
        return ["horovodrun", "-np", str(nproc), python, *worker]
    return [python, *worker]
