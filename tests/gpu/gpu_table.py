"""What `make gpu` checks and measures, the most important first. Imports neither torch nor Lockstep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["TABLE", "Check"]


@dataclass(frozen=True)
class Check:
    """One job.

    Attributes:
        name: of the check.
        why: what it shows.
        function: "module:function", called with a `Context` and `arguments`; returns facts, raises what is wrong.
        arguments: for the function.
        start: "run" (`lockstep run`), "torchrun" or "python".
        nproc: ranks; they share one GPU.
        limit_s: its deadline, with the time that processes take to start.
        says: patterns of what it must print.
        breaks: a rank breaks on purpose: the job must fail, and no result is expected.
        alone: a measure, which nothing may run beside.
        on_cpu: makes sense on the CPU, so that tests can run it there.
        variables: more environment.
    """

    name: str
    why: str
    function: str
    arguments: tuple[str, ...] = ()
    start: str = "run"
    nproc: int = 1
    limit_s: float = 60.0
    says: tuple[str, ...] = ()
    breaks: bool = False
    alone: bool = False
    on_cpu: bool = True
    variables: Mapping[str, str] = field(default_factory=dict)


def _engines() -> list[Check]:
    """Both engines against one process: over nccl alone, and with two ranks that share the GPU."""
    return [
        Check(
            f"engine-{engine}-{backend}-{nproc}",
            f"{engine}'s DDP over {backend} at {nproc} rank(s): gradients and weights of one process",
            "check_engines:train_like_one_process",
            (engine, backend),
            nproc=nproc,
        )
        for backend, nproc in (("nccl", 1), ("lockstep", 2), ("gloo", 2))
        for engine in ("lockstep", "torch")
    ]


_MEASURES = [
    Check(
        "measure-host-syncs",
        "what our DDP makes the host wait for in a step, beyond torch's: aim 0",
        "measure_steps:count_host_syncs",
        start="python",
        limit_s=80,
        alone=True,
        on_cpu=True,
    ),
    *(
        Check(
            f"measure-resnet50-{kind}",
            f"a training step of ResNet-50 in {kind}, our DDP over torch's on nccl: aim at least 1.0x",
            "measure_steps:compare_engines",
            (kind,),
            limit_s=90,
            alone=True,
        )
        for kind in ("bf16", "fp32")
    ),
    Check(
        "measure-resnet50-two-ranks",
        "the same where gradients are really exchanged: fp32, two ranks on the GPU, over gloo",
        "measure_steps:compare_engines",
        ("fp32", "gloo"),
        nproc=2,
        limit_s=60,
        alone=True,
    ),
    Check(
        "measure-record",
        "what the flight record adds to a call and to a step on nccl",
        "measure_steps:cost_of_record",
        limit_s=60,
        alone=True,
    ),
    Check(
        "measure-prefetch",
        "batches copied beside the computation: steps with prefetch over steps without",
        "measure_steps:gain_of_prefetch",
        start="python",
        limit_s=50,
        alone=True,
    ),
]

TABLE: list[Check] = [
    Check("nccl-run", "one rank on nccl under `lockstep run`", "check_groups:one_rank_of_nccl"),
    Check("nccl-torchrun", "the same under torchrun", "check_groups:one_rank_of_nccl", start="torchrun"),
    Check("nccl-alone", "the same as a plain process", "check_groups:one_rank_of_nccl", start="python"),
    Check("staged-verbs", "every verb with tensors of the GPU over lockstep", "check_groups:staged_verbs", nproc=2),
    Check(
        "staged-order",
        "a call sees what streams have queued, and streams see the call",
        "check_groups:staged_order",
        nproc=2,
    ),
    Check("gloo-verbs", "all_reduce and broadcast of tensors of the GPU over gloo", "check_groups:gloo_verbs", nproc=2),
    Check("mixed-one-rank", '"cpu:lockstep,cuda:nccl": each moves its own', "check_groups:mixed", nproc=1),
    Check(
        "mixed-two-ranks",
        "the same at two ranks: lockstep works, nccl says why it does not",
        "check_groups:mixed",
        nproc=2,
    ),
    # Not run yet, for want of a machine.
    Check("mixed-batch-one-rank", "a batch of messages to itself goes to nccl in one", "check_groups:mixed_batch"),
    Check(
        "mixed-batch-two-ranks",
        "neighbours that send large messages to each other; needs two GPUs",
        "check_groups:mixed_batch",
        nproc=2,
    ),
    *_engines(),
    Check("loader", "the loader copies ahead on a stream of its own, and the data is right", "check_data:loader"),
    Check("loader-order", "batches of a prefetching loader under load, and kept", "check_data:loader_under_load"),
    Check(
        "killed-on-nccl",
        "failure summary and record of a rank that is killed on nccl",
        "check_endings:killed",
        ("nccl",),
        says=(r"rank 0 \(pid \d+\) was killed by signal 9", r"all_reduce.* at .*check_endings\.py:\d+"),
        breaks=True,
    ),
    Check(
        "killed-staged",
        "the same where two ranks share the GPU over lockstep",
        "check_endings:killed",
        ("lockstep",),
        nproc=2,
        says=(r"rank 1 \(pid \d+\) was killed by signal 9", r"check_endings\.py:\d+"),
        breaks=True,
    ),
    Check(
        "one-gpu-two-ranks",
        "lockstep.init() at two ranks on one GPU says what to do",
        "check_endings:too_few_gpus",
        nproc=2,
        on_cpu=False,
    ),
    Check(
        "nccl-two-ranks",
        "nccl at two ranks on one GPU raises, and does not hang",
        "check_endings:nccl_on_one_gpu",
        nproc=2,
        on_cpu=False,
    ),
    *(
        Check(
            f"batchnorm-{backend}",
            f"SyncBatchNorm at two ranks over {backend}",
            "check_engines:batchnorm",
            (backend,),
            nproc=2,
        )
        for backend in ("lockstep", "gloo")
    ),
    Check("losses", "lockstep.mean, sum, all_gather and global_loss", "check_engines:losses", ("lockstep",), nproc=2),
    Check("losses-nccl", "the same at one rank on nccl", "check_engines:losses", ("nccl",)),
    Check("metrics", "Mean, Accuracy and synchronize", "check_data:metrics", ("lockstep",), nproc=2),
    Check("metrics-nccl", "the same at one rank on nccl", "check_data:metrics", ("nccl",)),
    Check("uneven", "batches that do not divide, with fillers", "check_engines:uneven_batches", ("lockstep",), nproc=2),
    Check("uneven-gloo", "the same over gloo", "check_engines:uneven_batches", ("gloo",), nproc=2),
    Check("grad-scaler", "autocast and GradScaler in both engines", "check_engines:grad_scaler"),
    Check("checkpoints", "saved on the GPU, loaded on CPU and GPU, with random states", "check_data:checkpoints"),
    Check("data-parallel", "lockstep.DataParallel on one device", "check_engines:data_parallel", start="python"),
    Check("horovod", "Horovod's shim with .cuda(), on nccl", "check_shims:horovod"),
    Check("horovod-verbs", "all of Horovod's operations on tensors of the GPU, on nccl", "check_shims:horovod_verbs"),
    *(
        Check(f"apex-{level}", f"Apex's shim with .cuda() at {level}", "check_shims:apex", (level,))
        for level in ("O0", "O1", "O2", "O3")
    ),
    Check("compile", "torch.compile of both engines", "check_engines:compiled", limit_s=110),
    Check("cuda-graph", "a training step of our engine as a CUDA graph", "check_engines:cuda_graph", on_cpu=False),
    Check("fsdp", "FSDP2 on nccl behind a lockstep group", "check_engines:fsdp", limit_s=70),
    Check("spawn", "lockstep.spawn with a GPU in the children", "check_endings:spawned", start="python"),
    Check(
        "imagenet",
        "lockstep train imagenet: workers, prefetch, bf16, channels last, torch.compile",
        "check_recipes:imagenet",
        start="python",
        limit_s=150,
    ),
    Check("doctor", "lockstep doctor names the GPU", "check_endings:doctor", start="python"),
    *_MEASURES,
]
