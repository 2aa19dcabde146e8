"""Loading data so that N processes see what one process would have seen.

`DataLoader` is a `torch.utils.data.DataLoader` that takes the *global* batch size. What it
promises, and which file keeps the promise:

- the order of samples is a function of (seed, epoch); each global batch is a run of that order,
  split contiguously over the ranks; an epoch can be entered at any sample      (`order`, `feistel`)
- whatever a sample draws at random is a function of (seed, epoch, index)       (`seeding`, `source`, `drawing`)
  or is warned of                                                               (`source`, `own_generators`)
- all ranks hold the same data in the same order, or raise                      (`fingerprints`)
- every batch is tagged with the share of it that this rank holds, so that the engine and the
  metrics weight it exactly                                                     (`iteration`)
- torch's arguments go on working, or are refused with the way to do it here    (`checks`, `loader`)
"""

from lockstep.data.loader import DataLoader

__all__ = ["DataLoader"]
