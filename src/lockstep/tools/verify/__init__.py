"""`lockstep verify`: runs an unedited script on N processes and on one, and finds the first stage that differs.

General layout, from the bottom up:

* `settings`: the settings of a process in a verification.
* `rows`, `state`: samples, tensors and states in a form that two runs can compare and exchange.
* `recorder`: a process's record of its steps; `loaders`, `training`, `draws`, `outputs`: fill it in.
* `halves`: operators computed in two halves; `by_sample`: lets samples draw by their indices.
* `waits`: ends ranks that wait for each other; `starts`: ranks that the script starts itself.
* `scratch`: keeps the script's output apart from the user's files.
* `rank`: runs in each process before the script.
* `compare`: distances between tensors; `samples`: matches rows of processes; `step`: the measurements of a step.
* `words`: the meaning of each cause, and advice.
* `causes`: finds the cause of a difference; `linear`: the same for gradients that are equal on all ranks.
* `aftermath`: the same for everything after the steps: evaluations, printed numbers, checkpoints.
* `verdict`: judges all steps and their aftermath; `report`: formats the result as text, JSON and a plot.
* `script`: runs the script; `reference`: the input of the one process; `session`: handles one number of ranks;
  `verification`: the whole verification.

[Note: one process as the reference] The script runs on N ranks, and then on one process, which starts each step from
the state of the ranks and gets the samples of all of them: from Lockstep's loader automatically; from a loader of
torch, whose sampler splits the data, by N times the batch size. A step differs if its gradients, parameters or buffers
do; the first stage that differs is then searched from the samples on.
"""
