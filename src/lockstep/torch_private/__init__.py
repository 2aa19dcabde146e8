"""Every patch of torch and every private name of torch that Lockstep uses, in one place.

* `record.py`: what is said of each name: what it is for and what happens without it. `table.py` has all records, from
  `records_groups.py` (torch.distributed), `records_training.py` (autograd, modules, data) and `records_compat.py`
  (old scripts, Apex, Horovod, rehearsals).
* `lookup.py` finds a name of the table in the torch that runs; `patching.py` replaces one. Both refuse others.
* `autograd.py`, `tensors.py`, `modules.py`, `groups.py`, `loader.py`, `trees.py`: what the rest of the package imports.
* `gloo_waits.py` calls what torch's library has and Python does not.
* `page.py` writes docs/torch-internals.md from the table.

A release of torch that lacks one of these names costs what the record says, with one warning, and no more. Everything
else in the package keeps to torch's public names; tests/unit/test_torch_private.py reads the source for others.
Importing this package, its table, `lookup` and `patching` imports no torch.
"""
