"""Loading data so that N processes see what one process would have seen.

`DataLoader` is a `torch.utils.data.DataLoader` that takes the *global* batch size: order, shares and randomness are
functions of seed and epoch, and never of the number of ranks.

General layout, from the bottom up:

* `checks`: refuses arguments that cannot be met, and finds this rank and the world size.
* `seeding`: what a sample draws: seeds the process-wide generators, and puts them back.
* `order`: which samples go to which rank, in which order; `feistel`: computes a permutation that is not stored.
* `batch_sampler`: the global batches that a user's batch sampler makes.
* `sampler_epochs`: who tells a sampler its epoch.
* `fingerprints`: numbers by which ranks see that they hold other data.
* `source`: fetches and collates a batch, each sample with its own seed.
* `buffers`: shared memory that workers use again; `handover`: hands batches from workers to the training process.
* `worker_signals`: has workers leave signals to their rank.
* `iteration`: counts how far an epoch is consumed, and tags each batch with this rank's share of it; `device`: moves
  batches to the device ahead of time.
* `loader`: `DataLoader`, which puts these together.
"""

from lockstep.data.loader import DataLoader

__all__ = ["DataLoader"]
