"""Every patch of torch and every private name of torch that Lockstep uses, in one place.

General layout, from the bottom up:

* `record`: the fields that describe a name: why it is used and what happens without it.
* `records_groups`, `records_training`, `records_compat`: the names of torch.distributed; of autograd, modules and data;
  and those for old scripts, Apex, Horovod and rehearsals.
* `table`: all records, from which docs/torch-internals.md is generated (`docs/site/torch_internals.py`).
* `lookup`: finds a name of the table in the installed torch; `patching`: replaces one. Both refuse other names.
* `autograd`, `tensors`, `modules`, `groups`, `stores`, `loader`, `trees`: wrappers that the rest of the package
  imports, by subject.
* `cuda_casts`: makes autocast on the CPU cast like on CUDA; `dynamo`: excludes functions from compilation by Dynamo.
* `profiling`: ranges in the traces of torch's profilers.
* `gloo_waits`: ends a wait of Gloo's, by a call that torch does not expose to Python.

If a release of torch lacks one of these names, that has the consequence stated in the record, with one warning, and no
other. The rest of the package uses only torch's public names; tests/unit/test_torch_private.py searches the source for
others. Importing this package, its table, `lookup` and `patching` does not import torch.
"""
