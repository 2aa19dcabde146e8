"""`lockstep verify`: a script, unedited, on N processes and on one, and the first stage at which they part.

General layout, from the bottom up:

* `settings`: what a process of a verification is told.
* `rows`, `state`: samples, tensors and states in a form that two runs can compare and exchange.
* `draws`: random numbers and sums, operator by operator.
* `recorder`: what a process keeps of its steps; `loaders`, `forwards`, `gradients`, `outputs`: who tells it what.
* `scratch`: what the script writes, kept apart from the user's files.
* `rank`: what runs in a process before the script.
* `orders`: the ranks' orders of samples, for one process to walk in.
* `samples`, `calls`, `compare`: how far N ranks are from one process, stage by stage.
* `words`: what a cause means, and what to write; `step`: what was measured of a step.
* `causes`, `splits`, `linear`: which cause it is, of samples, of gradients and else.
* `aftermath`: the same for what follows the steps: evaluations, printed numbers, checkpoints.
* `verdict`: of all steps, and of what follows them; `report`: says it, to people, programs and as a picture.
* `session`: the runs for one number of ranks; `verification`: the whole.

[Note: one process as the reference] The script runs on N ranks, and then on one process, which starts each step from
what the ranks had and gets the samples of all of them: Lockstep's loader gives it those by itself; a loader of
torch, whose sampler splits the data, by N times the batch size. A step differs if its gradients, parameters or
buffers do; where it parted from one process is then looked for from the samples on.
"""
