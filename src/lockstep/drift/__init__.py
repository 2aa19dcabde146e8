"""Ranks that train apart: what no collective meets.

General layout, from the bottom up:

* `engines`: the engines of this process.
* `samplers`: which samplers give each rank its own part of the data.
* `communication`: what tells whether anything was communicated between two moments.
* `evaluations`: those that each rank has counted by itself.
* `comparison`: every engine's model, compared over the ranks when the world is left.
* `watch`: the one hook on steps of optimizers; warns where nobody averages.
"""
