"""A soak: random programs of collectives, messages, groups and threads on real ranks, checked against one process.

General layout:

* `operations`, `messages`: one call each, with a model of what must come out.
* `program`: draws programs from seeds.
* `rank`: runs them on a rank.
* `runner`: starts ranks, and looks at what is left behind.

`python -m lockstep.testing.soak` is the command.
"""

from lockstep.testing.soak.runner import Ledger, command, seeds_from, soak

__all__ = ["Ledger", "command", "seeds_from", "soak"]
