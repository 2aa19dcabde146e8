"""Measures training and communication: shared by `lockstep bench` and the repository's own benchmarks.

General layout, from the bottom up:

* `stats`: median, spread, bootstrap intervals. Pure functions over samples.
* `results`: the result of a run: environment, parameters and every sample, as JSON.
* `ranks`: starts rank processes and returns rank 0's result. Does not measure.
* `harness`: runs inside the ranks; warms up, calibrates and times contestants round-robin.
* `session`: a run of `lockstep bench`: its time, its progress, and its measurements so far.
* `strategies`: `lockstep bench strategies`.
* `pages`: tables, as text and as Markdown; `figures`: shared by all plots.
* `words`: options that are lists of names.
* `comm`, `scaling`: benchmarks, which the command finds by name.

`stats`, `results`, `session`, `pages`, `figures` and `words` do not import torch.
"""
