"""Measuring training and its communication: what `lockstep bench` and the repository's own benchmarks share.

General layout, from the bottom up:

* `stats`: median, spread, bootstrap intervals. Pure functions over samples.
* `results`: what one run leaves behind: environment, parameters and every sample, as JSON.
* `ranks`: starts rank processes and brings rank 0's answer back. No measuring in it.
* `harness`: runs inside the ranks; warms up, calibrates and times contestants round-robin.
* `session`: one run of `lockstep bench`: its time, its progress, and what it has measured so far.
* `strategies`: `lockstep bench strategies`.
* `pages`: tables, as text and as Markdown; `figures`: what all pictures have in common.
* `words`: options that are words out of a list.
* `comm`, `scaling`: benchmarks, which the command finds by their names.

`stats`, `results`, `session`, `pages`, `figures` and `words` do not import torch.
"""
