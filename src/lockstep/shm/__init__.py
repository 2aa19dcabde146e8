"""The ranks of one host: memory that they share, waiting without locks, and collectives through that memory.

Knows nothing of torch.distributed. General layout:

* `support`: what ranks need of the system to share memory, and whether it is there.
* `descriptors`: what happens where a process has none left.
* `segment`: memory shared by the processes of one host.
* `futex`: sleeps until a word of shared memory changes.
* `sentry`: one thread that sleeps until a process ends; `liveness`: whether a process is still there.
* `cores`: how a wait gives up the core; `doorbell`: waking a rank that sleeps until a peer has done something.
* `control_blocks`: the control segment, one control block for each rank.
* `sync`: counters in that segment, by which ranks wait for each other.
* `terms`: what the ranks of a group must have alike.
* `bootstrap`: brings a group up: its ranks find each other through a store.
* `large_slots`: the slots for large tensors, and which groups' slots have memory.
* `team`: the ranks of one group, met, with the memory they move data through.
* `processor`: what depends on the make of the processor.
* `kernels`: adds up the parts of all ranks, always in the same tree.
* `row_tree`: the same tree over memory that stays, for small tensors.
* `algorithms`: the collectives, as transfers through the slots of a team.
* `ring`, `mail_area`, `pool`: how the bytes of messages travel: a ring for each pair of ranks, chunks for large ones.
* `messages`, `base_mailbox`: which receive gets which message, in all groups.
* `mailbox`: point to point on one host.
"""
