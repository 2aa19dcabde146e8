"""Process groups for torch.distributed: what a rank calls, who runs it, and what every rank knows of the others.

General layout:

* `tensors`, `staging`, `inference`, `sparse`: which tensors a group takes, and how it gets at their memory.
* `wire`: what float sums travel as between hosts.
* `callsite`, `wording`, `clock`: the user's line, names in messages, seconds spent communicating.
* `flight_recorder`, `descriptions`: the flight record, which tells every rank what the others are doing.
* `deadlock`, `reorder`: what the record alone does not show: ranks that wait in a cycle, calls in another order;
  `user_threads`: which threads may still call one; `flat_shapes`: which shapes may meet.
* `work`: handles of collectives and of messages, and the thread that runs asynchronous calls.
* `contract`: what a backend provides: what engine, flight recorder and point to point know of it.
* `symmetric_memory`: gives a script tensors in memory that the ranks of a host share.
* `engine`: the collectives of one group on one rank: checks, record, and who runs them; `symmetric_regions`: which
  tensors lie in its symmetric memory.
* `p2p`: send, recv and their kin, the same way.
* `messages`: what groups share whose ranks talk in messages. A package with a map of its own, as the next two.
* `hosts`: the `lockstep` group over several hosts; `mpi`: the group "mpi4py".
* `shared_memory`: the engine of a group on one host.
* `backend`: the `lockstep` process group that torch sees, and what it shares with that of `mpi`.
* `mixed`, `mixed_group`: a `lockstep` group with torch's groups for other devices behind it.
* `group_setup`, `group_nonce`: how a group comes to be.
* `exit_hooks`, `nccl_end`: how a rank tells its peers that it leaves.
* `group_stores`: what ranks leave for each other in the store of a group that is there.
* `monitored`, `ephemeral`: `monitored_barrier`, and torch's deadlines for one call.
* `names`, `registration`: "lockstep" and "mpi4py", and how torch comes to know these names.
* `torch_record`, `native_calls`: the flight record of torch's own groups, for the launcher.
* `torch_functions`, `gloo_threads`, `torch_version`: what functions of torch that know its own groups alone, gloo's
  threads and releases of torch need.

What moves bytes on one host is `lockstep.shm`, which knows nothing of this package.
"""
