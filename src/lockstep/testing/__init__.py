"""Run functions on real ranks, and the conformance suite that every backend passes.

`run_ranks` is all that a test needs::

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

A test that waits, or must be quick, has limits in seconds; `limit_s` makes them longer on a slow or busy machine.

`lockstep.testing.conformance` checks every collective of a c10d backend; the author of
a backend calls `run_conformance("mine", world_size=3)`.

General layout:

* `pool`: `run_ranks`, and the workers that it uses again.
* `fork_server`: the process that workers are forked from; `worker`: what one worker does.
* `one_answer`: `assert_one_answer`, which runs a training script on N processes and on one.
* `limits`: `limit_s`.
* `conformance`: the suite, which has a map of its own.
"""

from __future__ import annotations

from lockstep.testing.limits import limit_s
from lockstep.testing.one_answer import assert_one_answer
from lockstep.testing.pool import run_ranks
from lockstep.testing.worker import WorkerDied

__all__ = ["WorkerDied", "assert_one_answer", "limit_s", "run_ranks"]
