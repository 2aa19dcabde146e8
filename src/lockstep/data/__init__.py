"""Loading data so that N processes see what one process would have seen.

`DataLoader` is a `torch.utils.data.DataLoader` that takes the *global* batch size. What it
promises, and which file keeps the promise:

- the order of samples is a function of (seed, epoch); each global batch is a run of that order,
  split contiguously over the ranks; an epoch can be entered at any sample      (`order`, `feistel`)
- a user's batch sampler makes the global batches, and they are split likewise  (`batch_sampler`)
- whatever a sample draws at random is a function of (seed, epoch, index)       (`seeding`, `source`)
- all ranks hold the same data in the same order, or raise                      (`fingerprints`)
- every batch is tagged with the share of it that this rank holds, so that the engine and the
  metrics weight it exactly                                                     (`iteration`)
- torch's arguments still work, or are refused with the way to do it here    (`checks`, `loader`)

General layout, from the bottom up:

* `checks`: refuses arguments that cannot be met, and finds this rank and the world size.
* `seeding`: seeds the process-wide generators, and puts them back.
* `feistel`: computes a permutation that is not stored; `order`: which samples go to which rank, in which order.
* `batch_sampler`: the same where a user's batch sampler makes the batches.
* `sampler_epochs`: who tells a sampler its epoch.
* `fingerprints`: numbers by which ranks see that they hold other data.
* `source`: fetches and collates a batch, each sample with its own seed.
* `buffers`: shared memory that workers use again; `handover`: hands batches from workers to the training process.
* `worker_signals`: has workers leave signals to their rank.
* `iteration`: counts how far an epoch is consumed; `device`: moves batches to the device ahead of time.
* `loader`: `DataLoader`, which puts these together; `waits`: how long a loop waits for its batches.
"""

from lockstep.data.loader import DataLoader

__all__ = ["DataLoader"]
