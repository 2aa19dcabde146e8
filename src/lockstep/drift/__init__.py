"""Ranks that drift apart: optimizers that step parameters which nobody averages.

General layout, from the bottom up:

* `engines`: the engines of this process, and what they average.
* `copies`: master weights, and what they are copies of.
* `gradients`: whether anything is communicated between a gradient and the step that uses it.
* `samplers`: which samplers give each rank its own part of the data.
* `record`: what is known of one optimizer, and what splits the data.
* `comparison`: parameters that ranks compare when they leave their world.
* `watch`: looks at the steps of optimizers, and warns.
"""
