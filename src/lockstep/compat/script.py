"""`python -m lockstep.compat.script [--compat] TARGET ARGS…`: runs a script, or `-m MODULE`, with the shims.

For unedited scripts under other launchers than Lockstep's::

    srun python -m lockstep.compat.script train.py
    mpirun -np 4 python -m lockstep.compat.script -m package.train --epochs 3
    torchrun --nproc-per-node 4 -m lockstep.compat.script train.py
    python multiproc.py -m lockstep.compat.script train.py    # starts [sys.executable, *sys.argv[1:]] for each rank

The script is the main module, as with plain `python`. `--compat` is as in `lockstep run`.
"""

from __future__ import annotations

import sys

from lockstep import env
from lockstep.compat.legacy.choice import choose
from lockstep.errors import LaunchError
from lockstep.launch.config import check_target
from lockstep.launch.worker import run_module, run_script

__all__ = ["run"]

_USAGE_CODE = 2


def run(words: list[str]) -> None:
    """Install the shims and run a script, as `python` would. Local; returns when the script does.

    Args:
        words: a script, or `-m` and a module, and its arguments.

    Raises:
        LaunchError: the script or module does not exist.
        BaseException: raised by the script.
    """
    if words[:1] == ["--compat"]:
        env.LOCKSTEP_COMPAT.set(True)
        words = words[1:]
    is_module, rest = words[:1] == ["-m"], words[1:] if words[:1] == ["-m"] else words
    if not rest:
        raise LaunchError("name a script to run, or -m and a module: python -m lockstep.compat.script train.py")
    check_target(rest[0], is_module)
    from lockstep.compat.install import explain, install  # importing it installs the shims

    if env.LOCKSTEP_COMPAT.get() is None:
        install(choose(rest[0], is_module, rest[1:]))
    try:
        (run_module if is_module else run_script)(rest[0], rest[1:])
    except (Exception, SystemExit) as error:
        explain(error)
        raise


if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # the current folder, from `-m`; a script has its own folder
    try:
        run(sys.argv[1:])
    except LaunchError as error:
        print(f"lockstep: error: {error}", file=sys.stderr)
        sys.exit(_USAGE_CODE)
