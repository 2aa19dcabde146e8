"""What `make gpu` checks and measures, the most important first. Imports neither torch nor Lockstep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
        apart: its ranks count as hosts of their own for nccl, which takes one rank of a host on a GPU; they meet by
            sockets.
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
    apart: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)


_PLACES = (("nccl", 1), ("lockstep", 2), ("gloo", 2))  # backends, and ranks that one GPU has room for


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
        for backend, nproc in _PLACES
        for engine in ("lockstep", "torch")
    ]


def _apart() -> list[Check]:
    """nccl between two ranks that share the GPU, as if each were a host of its own. Messages take their time."""

    def check(name: str, why: str, function: str, *arguments: str, **options: Any) -> Check:
        return Check(
            f"{name}-nccl-2", f"{why}, two ranks on nccl", function, arguments, "run", 2, apart=True, **options
        )

    return [
        check("verbs", "every verb of tensors on the GPU", "check_groups:two_ranks_of_nccl"),
        *(
            check(f"engine-{engine}", f"{engine}'s DDP", "check_engines:train_like_one_process", engine, "nccl")
            for engine in ("lockstep", "torch")
        ),
        check("sharded", "gradients go to their owners by reduce_scatter", "check_sharded:sharded", "nccl"),
        check("uneven", "batches that do not divide", "check_engines:uneven_batches", "nccl"),
        check("claims", "ranks that come with unequal batches", "check_engines:claims", "nccl"),
        check("batchnorm", "SyncBatchNorm", "check_engines:batchnorm", "nccl"),
        check("losses", "mean, sum, all_gather and global_loss", "check_engines:losses", "nccl"),
        check("metrics", "Mean, Accuracy and synchronize", "check_data:metrics", "nccl"),
        check("mixed-batch", "neighbours that send large messages to each other", "check_groups:mixed_batch"),
        check("horovod", "Horovod's shim with .cuda()", "check_shims:horovod"),
        check("fsdp", "FSDP2 behind a lockstep group", "check_engines:fsdp"),
        check(
            "killed",
            "a rank is killed, and the other says which and where",
            "check_endings:killed",
            "nccl",
            says=(r"rank 1 \(pid \d+\) was killed by signal 9", r"all_reduce.* at .*check_endings\.py:\d+"),
            breaks=True,
        ),
    ]


_NO_WARNING = r"(?s)\A(?!.*destroy_process_group\(\) was not called)"

_LEFT_OPEN = {"ends": "ends", "fails": "fails", "plain": "knows torch alone, and ends,"}

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
    Check(
        "measure-host-time",
        "steps with an engine over 8 ranks that move nothing: torch's DDP over ours, aim at least 1.0x",
        "measure_models:host_time",
        start="python",
        limit_s=90,
        alone=True,
    ),
    Check(
        "measure-peers",
        "GPT-2 small with a loader, one rank: a step with Lockstep, Accelerate and Fabric",
        "measure_models:peers",
        start="python",
        limit_s=120,
        alone=True,
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
    Check("mixed-batch-one-rank", "a batch of messages to itself goes to nccl in one", "check_groups:mixed_batch"),
    *_engines(),
    *_apart(),
    *(
        Check(
            f"sharded-{backend}-{nproc}",
            f"the sharded optimizer over {backend} at {nproc} rank(s): parameters and state of the plain one",
            "check_sharded:sharded",
            (backend,),
            nproc=nproc,
        )
        for backend, nproc in _PLACES
    ),
    Check("memory", "an engine at one rank takes no memory for buckets", "check_engines:memory", on_cpu=False),
    Check("loader", "the loader copies ahead on a stream of its own, and the data is right", "check_data:loader"),
    Check("loader-draws", "samples that draw on the GPU are those of one process", "check_data:loader_draws"),
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
        "killed-in-backward",
        "the same in a backward pass, whose line is named",
        "check_endings:killed_in_backward",
        ("lockstep",),
        nproc=2,
        says=(r"rank 1 \(pid \d+\) was killed by signal 9", r"rank 0 was .* at .*check_endings\.py:\d+"),
        breaks=True,
    ),
    *(
        Check(
            f"left-open-{how}",
            f"a script that {_LEFT_OPEN[how]} with its group open: torch does not warn of a group of nccl",
            "check_endings:left_open",
            (how,),
            says=(_NO_WARNING, *said),
            breaks=how == "fails",
        )
        for how, said in (("ends", ()), ("fails", (r"this check fails on purpose",)), ("plain", ()))
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
