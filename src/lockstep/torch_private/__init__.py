"""Every patch of torch and every private name of torch that Lockstep uses, in one place.

General layout, from the bottom up:

* `record`: what is said of each name: what it is for and what happens without it.
* `records_groups`, `records_training`, `records_compat`: the names of torch.distributed; of autograd, modules and data;
  and those for old scripts, Apex, Horovod and rehearsals.
* `table`: all records, of which docs/torch-internals.md tells (`docs/site/torch_internals.py`).
* `lookup`: finds a name of the table in the torch that runs; `patching`: replaces one. Both refuse other names.
* `autograd`, `tensors`, `modules`, `groups`, `stores`, `loader`, `trees`: what the rest of the package imports, by
  subject.
* `cuda_casts`: the CPU casts what CUDA casts; `dynamo`: keeps functions out of what Dynamo compiles.
* `profiling`: ranges in the traces of torch's profilers.
* `gloo_waits`: ends a wait of Gloo's, by a call that torch keeps from Python.

A release of torch that lacks one of these names costs what the record says, with one warning, and no more. Everything
else in the package keeps to torch's public names; tests/unit/test_torch_private.py reads the source for others.
Importing this package, its table, `lookup` and `patching` imports no torch.
"""
