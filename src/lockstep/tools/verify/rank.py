"""Runs in each process of a verification, between the launcher's worker and the user's script.

`python worker.py -m lockstep.tools.verify.rank script.py args…` starts recording, and then runs the script exactly as
the worker would have.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import importlib.machinery
import os
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lockstep import env
from lockstep.errors import SetupError
from lockstep.tools.rehearse.patching import wrap
from lockstep.tools.shared import run_target
from lockstep.tools.verify.scratch import enter
from lockstep.tools.verify.settings import RANKS, Number, VerifySettings

if TYPE_CHECKING:
    from lockstep.tools.verify.recorder import StepRecorder

__all__ = ["install", "main"]

_SHARDS = (
    "FullyShardedDataParallel's shards of parameters cannot be compared between ranks. Verify the script with its "
    "successor, fully_shard, or with DistributedDataParallel"
)

_UNSEEDED = 0x6C6F636B  # a seed that scripts are unlikely to use on only some ranks


def install(settings: VerifySettings) -> StepRecorder:
    """Start recording this process, permanently; returns the recorder."""
    import torch

    from lockstep.tools.verify import outputs
    from lockstep.tools.verify.draws import DrawWatch
    from lockstep.tools.verify.loaders import LoaderWatch
    from lockstep.tools.verify.recorder import StepRecorder
    from lockstep.tools.verify.starts import StartWatch
    from lockstep.tools.verify.training import TrainingWatch

    rank = env.RANK.get() or 0
    torch.set_num_threads(int(env.OMP_NUM_THREADS.get() or 1))
    torch.compiler.set_stance("force_eager")
    if settings.double:
        torch.set_default_dtype(torch.float64)
    if settings.devices:
        from lockstep.tools.rehearse import devices

        devices.install(settings.devices)
    _seed_as_nobody_does(rank)
    recorder = StepRecorder(settings, rank)
    loaders = LoaderWatch(recorder)
    loaders.install()
    TrainingWatch(recorder, loaders.note_step).install()
    outputs.install(recorder)
    DrawWatch(recorder).install()
    StartWatch(recorder, _seed_as_nobody_does).install()
    wrap(argparse.ArgumentParser, "parse_known_args", functools.partial(_note_defaults, recorder))
    if settings.role == RANKS:
        from torch.distributed.fsdp import FullyShardedDataParallel

        wrap(FullyShardedDataParallel, "__init__", lambda original: functools.partial(_refuse, recorder, _SHARDS))
    atexit.register(recorder.write)
    return recorder


def _note_defaults(recorder: StepRecorder, original: Callable[..., Any]) -> Callable[..., Any]:
    """Note numbers that the script's options have by default, because one process may need others."""

    def parse_known_args(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        parsed = original(parser, *args, **kwargs)
        options = [each for each in parser._actions if each.option_strings and type(each.default) is int]
        taken = [each for each in options if getattr(parsed[0], each.dest, None) == each.default]
        recorder.facts["options"].update({each.option_strings[-1]: str(each.default) for each in taken})
        return parsed

    return parse_known_args


def _refuse(recorder: StepRecorder, why: str, *args: Any, **kwargs: Any) -> None:
    """Replaces functions whose effects cannot be compared."""
    recorder.facts["refused"] = why
    recorder.end()


def _seed_as_nobody_does(rank: int) -> None:
    """Seed generators by rank, in every run, because without a seed they would differ in each process."""
    import numpy as np
    import torch

    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(_UNSEEDED + rank)


def _replace_numbers(script: str, numbers: Sequence[Number]) -> None:
    """Let numbers in the script be others when it is read from its file."""

    def replaced(original: Callable[[Any, str], bytes]) -> Callable[[Any, str], bytes]:
        def get_data(loader: Any, path: str) -> bytes:
            data = original(loader, path)
            if path != script:
                return data
            lines = data.decode().split("\n")
            for line, column, old, new in sorted(numbers, reverse=True):  # the last of a line first: lengths may change
                text = lines[line - 1]
                lines[line - 1] = f"{text[:column]}{new}{text[column + len(old) :]}"
            return "\n".join(lines).encode()

        return get_data

    wrap(importlib.machinery.SourceFileLoader, "get_data", replaced)


def main(arguments: list[str]) -> None:
    """Start recording, and run the script.

    Args:
        arguments: the script and its arguments, or `-m`, a module and its arguments.
    """
    # The entry that `-m` set to the current folder; the script gets its own.
    if sys.path and sys.path[0] == os.getcwd():
        del sys.path[0]
    tempfile.tempdir = None  # the launcher has its own
    settings = VerifySettings.load()
    if settings.keeper:
        enter(settings.keeper)
    recorder = install(settings)
    if settings.changes.numbers:
        _replace_numbers(os.path.abspath(arguments[0]), settings.changes.numbers)
    try:
        run_target(arguments, settings.local_rank_option)
        recorder.facts["returned"] = True
    except Exception as error:
        if isinstance(error, SetupError) and not recorder.steps:  # the ranks have not met
            recorder.facts["refused"] = str(error)
            print(error, file=sys.stderr)  # for `Script.run_ranks`: the worker leaves it to the launcher
        if not recorder.is_cut and (recorder.until == sys.maxsize or not recorder.is_last_batch):
            raise
        # Its loader ended early, which not every script can handle.
        recorder.end(
            f"after the steps the script ended with {type(error).__name__}: {error}. Perhaps because verify ends "
            "loaders early; what comes later, such as an evaluation, was not compared"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
