"""Ranks that train apart: what no collective meets.

General layout, from the bottom up:

* `engines`: the engines of this process.
* `comparison`: every engine's model, compared over the ranks when the world is left.
* `watch`: the one hook on steps of optimizers; warns where nothing is communicated that must be.
"""
