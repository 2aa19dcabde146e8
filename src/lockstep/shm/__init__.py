"""The ranks of one host: their shared memory, lock-free waiting, and collectives through that memory.

Knows nothing of torch.distributed. General layout:

* `support`: what sharing memory requires of the system, and whether it is available.
* `descriptors`: errors for a process that has run out of file descriptors.
* `segment`: memory shared by the processes of one host.
* `futex`: sleeps until a word of shared memory changes.
* `sentry`: one thread that sleeps until a process ends; `liveness`: whether a process is still running.
* `cores`: how a wait yields its core; `doorbell`: wakes a rank that sleeps until a peer has done something.
* `control_blocks`: the control segment, with one control block for each rank.
* `sync`: counters in that segment, by which ranks wait for each other.
* `terms`: the handshake parameters: what must be the same on all ranks of a group.
* `bootstrap`: creates a group: its ranks find each other through a store.
* `large_slots`: the slots for large tensors, and which groups' slots are backed by memory.
* `team`: the connected ranks of one group, with the memory through which they move data.
* `processor`: choices that depend on the CPU model.
* `kernels`: combines the parts of all ranks, always in the same tree.
* `row_tree`: the same tree over reused memory, for small tensors.
* `algorithms`: the collectives, as transfers through the slots of a team.
* `ring`, `mail_area`, `pool`: how messages are transferred: a ring for each pair of ranks, chunks for large ones.
* `messages`, `base_mailbox`: which receive gets which message; shared by all groups.
* `mailbox`: point to point on one host.
"""
