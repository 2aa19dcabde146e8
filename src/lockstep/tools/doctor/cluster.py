"""GPUs, the host's name, MPI, Slurm."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator

from lockstep import env
from lockstep.launch.environment import visible_gpus
from lockstep.mpi_library import is_installed
from lockstep.tools.doctor.check_result import CheckResult
from lockstep.tools.doctor.versions import has_torch

__all__ = ["RUNS_ON_GPUS", "look"]

RUNS_ON_GPUS = (
    "`make gpu` was run on one NVIDIA H200, with nccl between two ranks that shared it: of 74 checks 73 passed and 1 "
    "failed, because of a fault in the check itself. Several GPUs have never been tested: docs/gpu.md"
)
"""What has been tested on GPUs; benchmarks/results/gpu.json has every check."""


def look() -> Iterator[CheckResult]:
    """Checks of what training on GPUs and on several hosts needs; none of it is an error if absent."""
    yield _gpus()
    yield CheckResult("runs on GPUs", RUNS_ON_GPUS)
    yield _name()
    yield _mpi()
    slurm = shutil.which("srun")
    yield CheckResult(
        "Slurm", slurm if slurm else "not installed; `lockstep run --slurm` works on a cluster's login node"
    )


def _gpus() -> CheckResult:
    gpus = visible_gpus(env.snapshot())
    if gpus == 0:
        return CheckResult("GPUs", "none; `lockstep rehearse` runs scripts for GPUs on the CPU")
    if not has_torch():
        return CheckResult("GPUs", f"{gpus}; details need torch")
    import torch

    usable = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if usable < gpus:
        reason = "a CPU build of torch" if torch.version.cuda is None else f"built for CUDA {torch.version.cuda}"
        return CheckResult(
            "GPUs",
            f"{gpus}, of which torch ({reason}) can use {usable}",
            "install a CUDA build of PyTorch that fits the driver shown by nvidia-smi",
            "pip install --force-reinstall torch",
        )
    return CheckResult("GPUs", f"{gpus}: {', '.join(sorted({torch.cuda.get_device_name(gpu) for gpu in range(gpus)}))}")


def _name() -> CheckResult:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        return CheckResult(
            "host name",
            f"{name}, which does not resolve",
            "ranks on other hosts, Gloo and MPI look it up",
            f"echo '127.0.1.1 {name}' | sudo tee -a /etc/hosts",
        )
    return CheckResult("host name", f"{name}, {address}")


def _mpi() -> CheckResult:
    program, has_module = shutil.which("mpirun"), is_installed()
    if program and has_module:
        return CheckResult("MPI", f"{program}, and mpi4py")
    if program:
        return CheckResult("MPI", f"{program}; backend mpi also needs mpi4py: pip install mpi4py")
    library = "an MPI library: apt install openmpi-bin libopenmpi-dev"
    return CheckResult(
        "MPI", f"no mpirun; backend mpi needs {library}{'' if has_module else ', and pip install mpi4py'}"
    )
