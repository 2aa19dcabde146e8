"""What the group over MPI and the group over several hosts share: their ranks exchange messages, and no memory.

General layout:

* `notices`: control blocks that messages fill: what every rank is doing.
* `arrival`: how notices reach all ranks: from each to each, or forwarded.
* `message_team`: the ranks of one group: arrival, waits, and how a rank leaves. Subclasses move the messages.
* `message_algorithms`: the collectives, as exchanges of tensors, where no ranks share memory.
* `message_mailbox`: point to point.
* `message_engine`: the collectives of one group on one rank.

`lockstep.comm.mpi` moves messages by MPI, `lockstep.comm.hosts` by connections of its own and by Gloo.
"""
