"""The process group "mpi4py": torch's verbs over MPI, with the standard builds of PyTorch.

General layout:

* `name`: makes the plain name "mpi" work if torch has no MPI.
* `waiter`: waiting without blocking in MPI.
* `team`: the connected ranks of one group: control messages, exchanges of tensors, and how a rank leaves.
* `departures`: how a process leaves MPI, in good order or after a failure.
* `group`: the process group that torch sees.

Control messages, arrival, collectives and point to point are those of all groups whose ranks communicate by messages:
`lockstep.comm.messages`.

[Note: who adds] MPI only moves bytes here and does not add. `MPI_Allreduce` of bfloat16 adds bit patterns, supports
neither float8 nor torch's float16, and may add in another order for another size or on another rank. So reductions are
torch's own kernels (`lockstep.shm.kernels`) on parts that MPI has moved: every dtype and operation, 16-bit floats
accumulated in float32, one fixed pairwise tree over ranks, and hence the same bits on every rank, in every run, and as
on a shared-memory group. A large all_reduce moves no more bytes than MPI's own.

[Note: nobody blocks] All calls into MPI are nonblocking and polled until they are done, because a blocking call has no
deadline and keeps a core busy. A rank begins a collective by telling all others what it calls; data moves only when all
calls agree. So a mismatch is an error before a byte is written, a timeout error names the missing rank, and a rank that
fails or leaves announces it.

[Note: one communicator] Each group has a communicator, and a thread that calls MPI on it holds the lock of its team:
two concurrent threads on one communicator corrupt data silently (Open MPI 4.1). Collectives run one at a time, in the
thread that calls them or, if asynchronous, in the group's thread.
"""
