"""`DataParallel`: replicas of a model on several devices, in one process. Modules are named as in torch.

General layout, from the top down:

* `data_parallel`: `DataParallel` and `data_parallel`.
* `scatter_gather`: splits a batch into pieces, and concatenates outputs.
* `replicate`: copies the module to the devices; `parallel_apply`: runs the replicas.
* `devices`: resolves device ids.
"""
