"""Programs on top of the package: what one runs beside training, not in it.

General layout:

* `rehearse`: runs scripts for GPUs on CPU processes and reports what would fail.
* `verify`: runs a script on N processes and on one, and says where they part.
* `shared`: what these two have in common.
* `doctor`: reports what this machine has for training.
* `capabilities`: measures which verbs work on which backend.
"""
