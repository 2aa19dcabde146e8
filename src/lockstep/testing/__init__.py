"""Helpers for tests: run functions on real ranks, and the conformance suite for backends.

Most tests need only `run_ranks`::

    from lockstep.testing import run_ranks

    def add_ranks():                       # at module level: ranks import it by name
        tensor = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(tensor)
        return tensor.item()

    def test_add_ranks():
        assert run_ranks(add_ranks, 3) == [3.0, 3.0, 3.0]

`assert_one_answer` runs a training script on N processes and on one, and asserts that they agree::

    def test_training():
        assert_one_answer("train.py", "--epochs", "1", nproc=(1, 2, 3))

Tests with time limits in seconds should scale them by `limit_s`, which extends them on a slow or busy machine.

`lockstep.testing.conformance` checks every collective of a c10d backend; authors of backends call
`run_conformance("mine", world_size=3)`.

General layout:

* `pool`: `run_ranks`, and the workers that it reuses.
* `fork_server`: the process from which workers are forked; `worker`: the main loop of a worker.
* `one_answer`: `assert_one_answer`, which runs a training script on N processes and on one.
* `limits`: `limit_s`.
* `conformance`: the suite, a package with its own layout.
"""

from __future__ import annotations

from lockstep.testing.limits import limit_s
from lockstep.testing.one_answer import assert_one_answer
from lockstep.testing.pool import run_ranks
from lockstep.testing.worker import WorkerDied

__all__ = ["WorkerDied", "assert_one_answer", "limit_s", "run_ranks"]
