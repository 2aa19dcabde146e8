"""Runs tests of PyTorch's own suite for process groups, one after the other. A process of its own: see run.py.

    echo '{"backend": "lockstep", "world_size": 3, "tests": ["test_isend", …]}' | python batch.py

Writes a line of JSON for each test as soon as it is over. Takes the tests from
`torch.testing._internal.distributed.distributed_test`, which lies in every wheel, and changes three things:

- The suite decides by the variable BACKEND which tests a backend takes part in, and knows no others than its own. So it
  is imported with BACKEND=gloo ("pose" in the order: or mpi, for the tests that gloo is not in), and the name is
  changed afterwards: a test runs with our group if it runs with gloo. Four tests have branches only for the
  names that the suite knows: they keep that name. Whatever the name, every default group is made with
  the backend that was ordered, and that is checked.
- Ranks are forked from this process, which has imported torch and done nothing with it, instead of started anew.
- What the suite leaves in the temporary folder is removed.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
import unittest
from types import ModuleType
from typing import Any, TextIO

# A rank that is stuck is as good as failed; the suite's own patience is five minutes for each test.
TEST_DEADLINE_S = 100


# Without a branch for other names than nccl, gloo and mpi.
NAMED_BRANCHES = frozenset(
    f"test_accumulate_gradients_{kind}"
    for kind in (
        "no_sync",
        "no_sync_grad_is_view",
        "no_sync_allreduce_hook",
        "no_sync_allreduce_with_then_hook",
    )
)


def import_suite(world_size: int, folder: str, pose: str) -> ModuleType:
    """The suite, as the backend `pose` sees it."""
    for name in ("barrier", "test_dir", "init_dir"):
        os.makedirs(os.path.join(folder, name))
    os.environ.update(
        BACKEND=pose,
        WORLD_SIZE=str(world_size),
        TEMP_DIR=folder,
        TMPDIR=folder,
        # For the one test that makes its default group a second time; the others meet in a file anyway.
        INIT_METHOD=f"file://{folder}/init_dir/second",
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(TEST_DEADLINE_S),
    )
    import torch
    from torch.testing._internal.distributed import distributed_test

    import lockstep  # noqa: F401 - registers the backend

    torch.set_num_threads(1)
    return distributed_test


def make_case(suite: ModuleType, backend: str, pose: str) -> type[unittest.TestCase]:
    """The class that holds the tests; ranks are forked."""
    meet = suite.dist.init_process_group

    def meet_by_backend(**arguments: Any) -> None:
        meet(**{**arguments, "backend": backend})
        assert suite.dist.get_backend() == backend, suite.dist.get_backend()

    class TorchSuite(suite.TestDistBackend, suite.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
        def setUp(self) -> None:
            super().setUp()
            import torch.multiprocessing

            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        def tearDown(self) -> None:
            ranks = self.processes
            super().tearDown()
            for rank in ranks:
                rank.join(5)
                if rank.is_alive():
                    rank.kill()
                    rank.join()

        @classmethod
        def _run(cls, rank: int, test_name: str, *arguments: Any, **options: Any) -> None:
            """In the rank."""
            named = test_name in NAMED_BRANCHES
            suite.BACKEND = os.environ["BACKEND"] = pose if named else backend
            suite.dist.init_process_group = meet_by_backend
            super()._run(rank, test_name, *arguments, **options)

    return TorchSuite


def run_one(case: type[unittest.TestCase], name: str) -> dict[str, Any]:
    """One test: its name, status (passed, failed, skipped), seconds, and why it did not pass."""
    result = unittest.TestResult()
    started = time.perf_counter()
    case(name).run(result)
    seconds = round(time.perf_counter() - started, 2)
    status, detail = "passed", ""
    if result.skipped:
        status, detail = "skipped", result.skipped[0][1]
    elif result.failures or result.errors:
        status, detail = "failed", (result.failures + result.errors)[0][1]
    elif result.expectedFailures:
        detail = "fails as expected"
    return {"name": name, "status": status, "seconds": seconds, "detail": detail}


def list_tests(suite: ModuleType) -> list[str]:
    """Every test of the class."""
    return unittest.TestLoader().getTestCaseNames(suite.DistributedTest._DistTestBase)


def run(order: dict[str, Any], output: TextIO) -> None:
    folder = tempfile.mkdtemp(prefix="lockstep-torch-suite-")
    tempfile.tempdir = folder
    try:
        pose = order.get("pose", "gloo")
        suite = import_suite(order["world_size"], folder, pose)
        if order.get("list"):
            output.write(json.dumps(list_tests(suite)) + "\n")
            return
        case = make_case(suite, order["backend"], pose)
        for name in order["tests"]:
            # So that a reader knows where this process ended, should it end before the test does.
            output.write(json.dumps({"name": name, "status": "started"}) + "\n")
            output.flush()
            output.write(json.dumps(run_one(case, name)) + "\n")
            output.flush()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    order = json.load(sys.stdin)
    # Tests print what they like; results go out by a descriptor of their own.
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    run(order, output)


if __name__ == "__main__":
    main()
