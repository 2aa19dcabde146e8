"""Code shared by the tools that run scripts, `rehearse` and `verify`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from lockstep.errors import InputError

if TYPE_CHECKING:
    from lockstep.env import Variable

__all__ = ["distributed_sampler", "read_settings", "run_target"]


def distributed_sampler(loader: Any) -> Any:
    """The sampler that splits a loader's samples among ranks, or None."""
    from torch.utils.data import DistributedSampler

    for holder in (loader, getattr(loader, "batch_sampler", None)):
        sampler = getattr(holder, "sampler", None)
        if isinstance(sampler, DistributedSampler):
            return sampler
    return None


def read_settings(variable: Variable[str], command: str) -> dict[str, Any]:
    """The settings that a command passes to its processes, decoded from JSON.

    Raises:
        InputError: this process was not started by that command.
    """
    text = variable.get()
    if text is None:
        raise InputError(f"this process was not started by `lockstep {command} script.py`")
    found: dict[str, Any] = json.loads(text)
    return found


def run_target(arguments: list[str], local_rank_option: str) -> None:
    """Run a script as the launcher's worker would have.

    Args:
        arguments: the script and its arguments, or `-m`, a module and its arguments.
        local_rank_option: the option for the local rank, which goes before the script's own arguments, as with
            torch.distributed.launch; empty for none.
    """
    from lockstep import env
    from lockstep.launch import worker

    kind, *rest = arguments
    run, target = (worker.run_module, rest.pop(0)) if kind == "-m" else (worker.run_script, kind)
    run(target, [*([f"{local_rank_option}={env.LOCAL_RANK.get()}"] if local_rank_option else []), *rest])
