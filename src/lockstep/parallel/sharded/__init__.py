"""`lockstep.ZeroRedundancyOptimizer`: every rank steps a share of each parameter, and keeps the state of that alone.

General layout, from the bottom up:

* `shares`: which elements of each parameter are whose, and the mean of this rank's.
* `exchange`: what each rank has of some tensors goes to all others.
* `gradients`: what `.grad` is between backward pass and step: a tensor that knows its own share.
* `transport`: buckets whose gradients go to owners, over shared memory or in messages.
* `engines`: what `DistributedDataParallel` does for them.
* `memory`: parameters once per host.
* `inner`: the user's optimizer over the own shares, in pieces that a cache holds.
* `states`: its state in the form of one process, and back.
* `backings`: parameters on every rank, or once per host.
* `optimizer`: what users see.

[Note: a sharded step] On one host a step moves memory, and a sharded one a third of what an unsharded one does. Each
rank copies its gradients to its bucket as they come, and lets go of them: a share left where autograd wrote it would
save a copy, and keep all of the gradient until the step. When the backward pass is over the ranks have met, and that is
all. `step()` then goes through this rank's share in pieces that fit a cache: the peers' elements are added to the own,
the sum is divided, and the optimizer updates that piece of the parameters where all ranks of the host read them. At the
end the ranks meet again. Nobody copies parameters back, and nobody writes a mean that nobody reads. Without shared
memory the elements come in messages, from where autograd wrote them, and parameters go out after the step. On several
hosts, and over MPI, gradients are averaged whole, and the ranks of each host share the step and the parameters.

[Note: shared parameters of a host] The parameters of all ranks of the host are one memory. So nobody may write them
but `step()`: a write of one rank would be one of all, in the middle of what they compute. `changing_parameters` says
when a script wants to; `load_state_dict` of the model asks the others by itself. What was written otherwise is found
in the next step, by the version of each parameter, which `p.data` does not raise, and by some of its values.
"""
