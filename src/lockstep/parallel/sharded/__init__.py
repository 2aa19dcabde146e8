"""`lockstep.ZeroRedundancyOptimizer`: each rank updates a share of each parameter, and stores only that share's state.

General layout, from the bottom up:

* `shares`: which rank owns which elements of each parameter, and the mean of this rank's share.
* `exchange`: sends each rank's part of some tensors to all others.
* `gradients`: `.grad` between backward pass and step: a tensor that holds only this rank's share.
* `sums`: the sums of gradients in shared memory, which ranks add to in turns.
* `transport`: buckets whose gradients go to their owners, over shared memory or in messages.
* `engines`: the support in `DistributedDataParallel`.
* `memory`: parameters stored once per host.
* `inner`: the user's optimizer on this rank's shares, in pieces that fit a cache.
* `states`: converts its state to the form of one process, and back.
* `backings`: parameters stored on every rank, or once per host.
* `optimizer`: the public class.

[Note: a sharded step] On one host the cost of a step is memory traffic, and a sharded step moves a third of the memory
of an unsharded one. Each rank adds its gradients to the host's one sum as they come, and releases them ([Note: turns]
in `sums.py`). At the end of the backward pass the ranks meet. `step()` then processes this rank's share in pieces that
fit a cache: it divides the sum, and lets the optimizer update that piece of the parameters where all ranks of the host
read them. At the end the ranks meet again. No parameters are copied back, and no mean is written that is not read.
Without shared memory the elements are sent in messages, from where autograd wrote them, and parameters are sent after
the step. On several hosts, and over MPI, whole gradients are averaged, and the ranks of each host share step and
parameters.

[Note: shared parameters of a host] All ranks of a host share the memory of the parameters. So only `step()` may write
to them: a write by one rank would change them for all, in the middle of their computation. Scripts declare writes by
`changing_parameters`; `load_state_dict` of the model coordinates with the other ranks itself. Other writes are detected
in the next step, by the version of each parameter, which `p.data` does not increment, and by some of its values.
"""
