"""Training programs for `lockstep train`.

General layout:

* `digits`: the digits recipe; `imagenet`: the ImageNet program. Each package has its own map.
* `options`: options that all recipes share.
* `display`: progress and results on the terminal.
* `run_folder`, `runlog`, `curves`: what a run writes: its folder, its metrics, and a plot of them.
* `summary`: the results of a run; `mistakes`: errors in options, reported by rank 0.
* `devices`: the choice between GPUs and the CPU.

The loop itself is `lockstep.train`.
"""
