"""`lockstep verify`: a script, unedited, on N processes and on one, and the first stage at which they part.

General layout, from the bottom up:

* `settings`: what a process of a verification is told.
* `rows`, `state`: samples, tensors and states in a form that two runs can compare and exchange.
* `recorder`: what a process keeps of its steps; `loaders`, `training`, `draws`, `outputs`: who tells it what.
* `starts`: ranks that the script starts itself.
* `scratch`: what the script writes, kept apart from the user's files.
* `rank`: what runs in a process before the script.
* `compare`: how far tensors are apart; `samples`: whose rows are whose; `step`: what was measured of a step.
* `words`: what a cause means, and what to write.
* `causes`: which cause it is; `linear`: the same of gradients that all ranks have alike.
* `aftermath`: the same for what follows the steps: evaluations, printed numbers, checkpoints.
* `verdict`: of all steps, and of what follows them; `report`: says it, to people, programs and as a picture.
* `script`: how the script is run; `reference`: what one process is given; `session`: one number of ranks;
  `verification`: the whole.

[Note: one process as the reference] The script runs on N ranks, and then on one process, which starts each step from
what the ranks had and gets the samples of all of them: Lockstep's loader gives it those by itself; a loader of
torch, whose sampler splits the data, by N times the batch size. A step differs if its gradients, parameters or
buffers do; where it parted from one process is then looked for from the samples on.
"""
