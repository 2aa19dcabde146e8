"""Training programs that come with Lockstep, for `lockstep train`.

General layout:

* `digits`: the digits recipe; `imagenet`: the ImageNet program. Packages with maps of their own.
* `options`: what the options of all recipes have in common.
* `display`: what a person sees of a run while it runs.
* `run_folder`, `runlog`, `curves`: what a run leaves behind: its folder, its metrics, and a picture of them.
* `summary`: what a run came to; `mistakes`: what rank 0 says of options that cannot be used.
* `devices`: GPUs or the CPU.

The loop itself is `lockstep.train`.
"""
