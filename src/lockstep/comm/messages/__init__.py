"""What the groups over MPI and over several hosts share: their ranks exchange messages instead of sharing memory.

General layout:

* `notices`: control messages, which fill the control blocks: what every rank is doing.
* `arrival`: how control messages reach all ranks: directly, or forwarded along a tree.
* `message_team`: the ranks of one group: arrival, waits, and how a rank leaves. Subclasses transfer the messages.
* `message_algorithms`: the collectives, as exchanges of tensors, if no ranks share memory.
* `message_mailbox`: point to point.
* `message_engine`: the collectives of one group on one rank.

`lockstep.comm.mpi` sends messages by MPI, `lockstep.comm.hosts` over its own connections and by Gloo.
"""
