"""Finds out which operations of torch.distributed work on which backend and device, by running them.

General layout:

* `verbs`: a small program per operation; `probe`: a rank that runs them.
* `measure`: starts ranks for each backend and device; `table`: formats the results.
"""
