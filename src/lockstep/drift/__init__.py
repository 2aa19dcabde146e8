"""Detects ranks whose models diverge without any collective failing.

General layout, from the bottom up:

* `engines`: the engines of this process.
* `comparison`: compares every engine's model between ranks when the world is left.
* `watch`: the single hook on optimizer steps; warns if nothing is communicated where it must be.
"""
