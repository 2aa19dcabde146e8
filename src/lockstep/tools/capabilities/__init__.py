"""Which verbs work on which backend and device: measured by running every one of them.

General layout:

* `verbs`: a small program for each verb; `probe`: one rank that runs them.
* `measure`: starts ranks for each backend and device; `table`: lays out what they found.
"""
