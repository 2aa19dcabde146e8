"""One verification, from the command line to the report."""

from __future__ import annotations

import importlib
import shutil
import tempfile
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.errors import LaunchError
from lockstep.launch.config import check_target
from lockstep.tools.verify.settings import Verification

if TYPE_CHECKING:
    from lockstep.tools.verify.verdict import Verdict

__all__ = ["verify"]

# A process's first optimizer and first DDP import torch._dynamo.
_PRELOADED = ("torch._dynamo", "torch.nn.parallel", "lockstep.tools.verify.training", "lockstep.tools.verify.loaders")


def _import_for_ranks() -> None:
    """Import modules that every rank needs, as ranks are forked from this process; see `launch/forked.py`."""
    import torch

    torch.set_num_threads(1)  # threads of OpenMP do not survive a fork
    for name in _PRELOADED:
        importlib.import_module(name)


def verify(what: Verification) -> list[Verdict]:
    """Verify a script at each number of ranks. Local.

    Args:
        what: the script and options.

    Returns:
        A verdict for each number of ranks, or one for the number that the script starts, whatever it is asked for.

    Raises:
        LaunchError: the script cannot be started as requested.
    """
    check_target(what.target, what.is_module)
    if what.steps < 1 or not what.nproc or min(what.nproc) < 2:
        wrong = f"steps is {what.steps}; expected 1 or more"
        if not what.nproc or min(what.nproc) < 2:
            wrong = f"nproc is {', '.join(map(str, what.nproc))}; expected 2 ranks or more"
        raise LaunchError(wrong)
    _import_for_ranks()
    from lockstep.tools.verify import session
    from lockstep.tools.verify.verdict import Verdict

    verdicts = dict[int, Verdict]()
    for world_size in what.nproc:
        folder = Path(tempfile.mkdtemp(prefix="lockstep-verify-"))
        try:
            verdict = session.verify_at(what, world_size, folder)
        except Exception:
            words = f"lockstep verify itself failed, not the script:\n{traceback.format_exc()}"
            verdict = Verdict(world_size, unknown=words)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        verdicts[verdict.world_size] = verdict
        if verdict.world_size != world_size:
            break
    return [*verdicts.values()]
