"""Checks Python, torch, and optional packages."""

from __future__ import annotations

import importlib
import importlib.util
import platform
import sys
from collections.abc import Iterable, Iterator

from lockstep.comm.torch_version import NEWEST_TESTED, OLDEST, release_of
from lockstep.launch.stacks import find_py_spy
from lockstep.tools.doctor.check_result import CheckResult

__all__ = ["has_torch", "look", "look_at_extras"]

_NEWEST_PYTHON_TESTED = (3, 13)

# What the loader of shared libraries says when memory or address space has run out.
_OUT_OF_MEMORY = ("failed to map segment", "cannot allocate memory", "Cannot allocate memory")

# Extra of this package -> what needs its modules, those modules, and those that are optional, with their purpose.
_EXTRAS = {
    "train": ("`lockstep train`", ("sklearn", "rich", "matplotlib", "tensorboard"), {}),
    "imagenet": (
        "`lockstep train imagenet`",
        ("PIL", "rich", "matplotlib", "tensorboard"),
        {"torchvision": "--pretrained and networks that are not built in"},
    ),
    "notebook": ("`lockstep.spawn` in a notebook", ("cloudpickle",), {}),
}
_PACKAGES = {"sklearn": "scikit-learn", "PIL": "pillow"}  # packages whose name differs from their module's


def look() -> Iterator[CheckResult]:
    """Check Python and torch."""
    yield _python()
    yield _torch()


def _python() -> CheckResult:
    text = f"{platform.python_version()}, {sys.executable}"
    if sys.version_info[:2] > _NEWEST_PYTHON_TESTED:
        newest = ".".join(map(str, _NEWEST_PYTHON_TESTED))
        return CheckResult(
            "Python", text, f"newer than {newest}, the newest tested: compare with that if something fails"
        )
    return CheckResult("Python", text)


def _torch() -> CheckResult:
    oldest = ".".join(map(str, OLDEST))
    install = f"pip install 'torch>={oldest}'"
    try:
        import torch
        import torch.distributed as dist
    except (ImportError, OSError) as error:
        return CheckResult("torch", f"cannot be imported: {error}", *_remedy_for(str(error), install), is_needed=True)
    release = release_of(torch.__version__)
    if release < OLDEST:
        return CheckResult("torch", torch.__version__, f"older than {oldest}, the oldest that works", install, True)
    kinds = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    built = ", ".join(name for name, is_there in kinds.items() if is_there) or "no backend"
    text = f"{torch.__version__} with {built}"
    if release > NEWEST_TESTED:
        newest = ".".join(map(str, NEWEST_TESTED))
        return CheckResult(
            "torch", text, f"newer than {newest}, the newest tested: compare with that if something fails"
        )
    return CheckResult("torch", text)


def _remedy_for(error: str, install: str) -> tuple[str, str]:
    """What to do if torch does not load, and the command."""
    if any(phrase in error for phrase in _OUT_OF_MEMORY):
        return "it is installed, but this process may not use enough memory to load it", "ulimit -v unlimited"
    if importlib.util.find_spec("torch") is not None:
        return "it is installed, but does not load: reinstall it", install.replace(
            "install", "install --force-reinstall"
        )
    return f"install PyTorch {'.'.join(map(str, OLDEST))} or newer", install


def has_torch() -> bool:
    """Whether torch can be imported; `look` says why not."""
    try:
        importlib.import_module("torch.distributed")
    except (ImportError, OSError):
        return False
    return True


def _absent_packages(modules: Iterable[str]) -> list[str]:
    """The packages to install for those of these modules that are missing."""
    return [_PACKAGES.get(name, name) for name in modules if importlib.util.find_spec(name) is None]


def look_at_extras() -> Iterator[CheckResult]:
    """Check optional packages; none is an error if absent."""
    for extra, (who, modules, optional) in _EXTRAS.items():
        absent = _absent_packages(modules)
        texts = [f"{who} needs {', '.join(absent)}: pip install {' '.join(absent)}"] if absent else ["installed"]
        texts += [
            f"{why} need {name}: pip install {name}" for name, why in optional.items() if _absent_packages([name])
        ]
        yield CheckResult(f"[{extra}]", "; ".join(texts))
    is_there = find_py_spy() is not None
    yield CheckResult(
        "py-spy", "installed" if is_there else "not installed; for --stacks-on-timeout: pip install py-spy"
    )
