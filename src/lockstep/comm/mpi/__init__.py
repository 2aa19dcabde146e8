"""The process group "mpi4py": torch's verbs over MPI, with the PyTorch that everybody installs.

General layout:

* `name`: the plain name "mpi", where torch has no MPI.
* `waiter`: waiting without blocking in MPI.
* `team`: the ranks of one group, connected: notices, exchanges of tensors, and how a rank leaves.
* `departures`: how a process leaves MPI, in good order or not.
* `group`: the process group that torch sees.

Notices, arrival, collectives and point to point are those of groups whose ranks talk in messages:
`lockstep.comm.messages`.

[Note: who adds] MPI moves bytes here and does not add. `MPI_Allreduce` of bfloat16 adds bit patterns, knows
neither float8 nor torch's float16, and may add in another order for another size or on another rank. So
reductions are torch's own kernels (`lockstep.shm.kernels`) on parts that MPI has moved: every dtype and
operation, 16-bit floats accumulated in float32, one fixed pairwise tree over ranks, and hence the same bits on
every rank, in every run, and on a group of shared memory. A large all_reduce moves no more bytes than MPI's own.

[Note: nobody blocks] All calls into MPI return at once and are asked again until they are done, because a
call that blocks has no deadline and keeps a core busy. A rank begins a collective by telling all others what it
came for; data moves only when all have come for the same. So a mismatch is an error before a byte is
written, the error at the deadline names a rank that does not come, and a rank that fails or leaves says so.

[Note: one communicator] Each group has a communicator, and a thread that calls MPI on it holds the lock of its team:
two threads at a time on one communicator corrupt data silently (Open MPI 4.1). Collectives run one at a time,
in the thread that calls them or, if asynchronous, in the group's own thread.
"""
