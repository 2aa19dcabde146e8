"""`mpirun -np N lockstep run script.py`: mpirun has started the ranks, so the launcher only runs the script."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from lockstep import env
from lockstep.errors import LaunchError, SetupError
from lockstep.launch.config import check_target
from lockstep.launch.worker import run_target
from lockstep.topology import check_no_left_over
from lockstep.topology.mpi import read_mpi

__all__ = ["is_rank_of_mpirun", "run_as_rank"]


def is_rank_of_mpirun(variables: Mapping[str, str]) -> bool:
    """Whether mpirun started this process as one of several ranks, with no launcher in between."""
    if any(one.get(variables) is not None for one in (env.LOCKSTEP_RENDEZVOUS, env.TORCHELASTIC_RUN_ID)):
        return False
    topology = read_mpi(variables)
    return topology is not None and topology.world_size > 1


def run_as_rank(target: str, args: Collection[str], *, is_module: bool, given: Collection[str]) -> int:
    """Run the script in this process, as the MPI rank that it is. Returns only if the script ends without an error.

    As under our launcher, torch.distributed knows Lockstep's names.

    Args:
        target: path of a script, or name of a module.
        args: passed on unchanged.
        is_module: `target` is a module, run as `python -m` does.
        given: options of the launcher that the user gave, but that mpirun decides here.

    Raises:
        LaunchError: there is nothing to run, such an option was given, or RANK and WORLD_SIZE are left over.
    """
    if given:
        names = ", ".join(sorted(given))
        raise LaunchError(
            f"mpirun started this process as one of several ranks, so `lockstep run` cannot set {names}: leave it "
            "out, or start without mpirun"
        )
    check_target(target, is_module)
    try:
        check_no_left_over(env.snapshot())
    except SetupError as error:
        raise LaunchError(str(error)) from None
    run_target(target, list(args), is_module=is_module)
    return 0
