"""A soak: random programs of collectives, messages, groups and threads on real ranks, checked against one process.

General layout:

* `operations`, `messages`: one call each, with a model of what must come out.
* `program`: draws programs from seeds.
* `rank`: runs them on a rank.
* `runner`: starts ranks, and looks at what is left behind.

`python tests/soak/run.py` runs them, `tests/soak/test_soak.py` finds the shortest that fails.
"""

from random_programs.runner import Ledger, command, seeds_from, soak

__all__ = ["Ledger", "command", "seeds_from", "soak"]
