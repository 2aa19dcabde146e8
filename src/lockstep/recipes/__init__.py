"""Training programs that come with Lockstep, for `lockstep train`.

General layout:

* `digits`: the digits recipe: its options, and the ranks that it starts.
* `digits_task`: its data and its model.
* `digits_training`: what each of its ranks does.
* `imagenet`: the ImageNet program, a package with a map of its own.
* `options`: what the options of all recipes have in common.
* `display`: what a person sees of a run while it goes on.
* `runlog`, `curves`: what a run leaves behind: its folder, its metrics, and a picture of them.
* `summary`: what a run came to.

The loop itself is `lockstep.train`.
"""
