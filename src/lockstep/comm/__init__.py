"""Process groups for torch.distributed: operations, how they run, and what each rank knows about the others.

General layout:

* `tensors`, `staging`, `inference`, `sparse`: which tensors a group accepts, and how it accesses their memory.
* `wire`: the format in which float sums travel between hosts.
* `callsite`, `wording`, `clock`: the user's line, names in messages, seconds spent communicating.
* `flight_recorder`, `descriptions`: the flight record, which tells every rank what the others are doing.
* `deadlock`, `reorder`: what the record alone does not show: ranks waiting in a cycle, calls in a different order;
  `user_threads`: which threads may still make a call; `flat_shapes`: which different shapes may be combined.
* `work`: handles of collectives and messages, and the thread that runs asynchronous calls.
* `contract`: the interface of a backend, as used by engine, flight recorder and point to point.
* `symmetric_memory`: gives a script tensors in memory that the ranks of a host share.
* `engine`: the collectives of one group on one rank: checks, record, and which thread runs them; `symmetric_regions`:
  which tensors lie in the group's symmetric memory.
* `p2p`: the same for send, recv and their variants.
* `messages`: shared by groups whose ranks communicate by messages. A package with its own map, like the next two.
* `hosts`: the `lockstep` group over several hosts; `mpi`: the group "mpi4py".
* `shared_memory`: the engine of a group on one host.
* `backend`: the `lockstep` process group that torch sees, and the parts that it shares with the one of `mpi`.
* `mixed`, `mixed_group`: a `lockstep` group combined with torch's groups for other devices.
* `group_setup`, `group_nonce`: how a group is created.
* `exit_hooks`, `nccl_end`: how a rank tells its peers that it is leaving.
* `group_stores`: our keys in the store of an existing group.
* `monitored`, `ephemeral`: `monitored_barrier`, and torch's temporary extension of timeouts.
* `names`, `registration`: "lockstep" and "mpi4py", and how these names are registered with torch.
* `torch_record`, `native_calls`: the flight record of torch's own groups, for the launcher.
* `torch_functions`, `gloo_threads`, `torch_version`: adaptations to torch: functions that only work on its own groups,
  gloo's threads at exit, supported releases.

`lockstep.shm` moves the bytes on one host; it knows nothing of this package.
"""
