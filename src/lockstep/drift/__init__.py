"""Ranks that drift apart: optimizers that step parameters which nobody averages.

* `engines`: the engines of this process, and what they average.
* `watch`: looks at the steps of optimizers, and warns.
* `gradients`: whether anything is communicated between a gradient and the step that uses it.
* `comparison`: parameters that ranks compare when they leave their world.
"""
