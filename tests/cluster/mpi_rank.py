"""What a rank under mpirun does for `mpi_harness.launch`: call a function, and write down what came of it."""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from pathlib import Path


def main(folder: str) -> None:
    import torch

    import lockstep  # noqa: F401 - registers the backends
    from lockstep import env
    from lockstep.topology import read_topology

    torch.set_num_threads(1)
    torch.manual_seed(0)
    fn, args, paths = pickle.loads(Path(folder, "job").read_bytes())
    sys.path[:] = paths
    rank = read_topology(env.snapshot()).rank
    try:
        outcome = fn(*args)
    except Exception as error:
        traceback.print_exc()
        outcome = error
    partial = Path(folder, f"partial{rank}")
    partial.write_bytes(pickle.dumps(outcome))
    os.replace(partial, Path(folder, f"outcome{rank}"))


if __name__ == "__main__":
    main(sys.argv[1])
