"""Who am I among whom: rank and world size, read from the launcher's environment.

Pure functions over a mapping of environment variables, so every launcher's form can be
tested without that launcher. A reader per launcher (`torchrun`, …) recognises its own variables and
returns a `Topology` or None; `detection` asks them in turn, and the first that recognises them wins.

General layout:

* `topology`: the result, and how messages name ranks.
* `torchrun`, `slurm`, `mpi`: a reader for each launcher; `slurm_forms`: reads Slurm's lists of hosts and numbers;
  `processes`: names and parents of processes, above which a launcher may stand.
* `detection`: asks the readers in turn.
"""

from __future__ import annotations

from lockstep.topology.detection import check_no_left_over, read_topology
from lockstep.topology.topology import Topology, name_each, name_ranks

__all__ = ["Topology", "check_no_left_over", "name_each", "name_ranks", "read_topology"]
