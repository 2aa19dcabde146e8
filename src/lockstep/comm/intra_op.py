"""Which threads compute what a group's own thread computes.

A group's thread adds and copies while the thread that called it keeps computing with all its intra-op threads. OpenMP
gives every thread that computes a team of its own: with eight intra-op threads a rank would have sixteen, and those
that wait at the end of each operation take the cores by asking (torch's DDP over a group, 2 ranks of 8 threads on 16
cores: 1.3 to 7.5 times slower than our engine, which computes in the caller's thread). So it computes alone, as
gloo's threads do.
"""

from __future__ import annotations

import torch

from lockstep import libc

__all__ = ["compute_alone"]


def compute_alone() -> None:
    """Have torch compute in the calling thread with this thread alone; all others keep what they have. Local.

    Without OpenMP (macOS, some builds) torch's threads are one pool for all callers, and there is nothing to limit.
    """
    limit = libc.function("omp_set_num_threads")
    if limit is not None:
        # First, torch gives the thread its number, as it does once for each thread.
        torch.get_num_threads()
        limit(1)  # `torch.set_num_threads` would hold for all threads that begin from now on
