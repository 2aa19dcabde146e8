"""`DataParallel`: one process, replicas of one model on several devices. The modules have the names that torch's have.

General layout, from the top down:

* `data_parallel`: what users see.
* `scatter_gather`: cuts a batch into pieces and joins outputs.
* `replicate`: copies the module to the devices; `parallel_apply`: runs the replicas.
* `devices`: which devices a user means.
"""
