"""The rank of this process and the world size, read from the launcher's environment.

Pure functions over a mapping of environment variables, so every launcher's format can be tested without that launcher.
Each launcher (`torchrun`, …) has a reader, which recognises its variables and returns a `Topology` or None; `detection`
calls them in order, and the first that recognises its variables wins.

General layout:

* `topology`: the result, and how messages name ranks.
* `torchrun`, `slurm`, `mpi`: a reader for each launcher; `slurm_forms`: parses Slurm's lists of hosts and numbers;
  `processes`: names and parents of processes, to find a launcher among the ancestors.
* `detection`: calls the readers in order.
"""

from __future__ import annotations

from lockstep.topology.detection import check_no_left_over, read_topology
from lockstep.topology.topology import Topology, name_each, name_ranks

__all__ = ["Topology", "check_no_left_over", "name_each", "name_ranks", "read_topology"]
