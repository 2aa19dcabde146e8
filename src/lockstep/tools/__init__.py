"""Programs on top of the package, which are run before or after training, not in it.

General layout:

* `rehearse`: runs scripts for GPUs on CPU processes and reports what would fail.
* `verify`: runs a script on N processes and on one, and finds where they differ.
* `shared`: code that these two share.
* `doctor`: reports what this machine has for training.
* `capabilities`: measures which collectives and messages work on which backend.
"""
