"""The conformance suite: what every c10d backend must do, with one check per collective and variant.

Each check is a function that runs on every rank, derives the expected value in its docstring and raises AssertionError
if the backend returns another. `CASES` are the checks with their dtypes, shapes and operations. The author of a backend
runs them all::

    report = run_conformance("mine", world_size=3, register="my_package.backend")
    assert not report.failures, str(report)

Cases that a backend cannot pass are listed in `BACKEND_GAPS`, with a reason, and skipped.

General layout:
    case            the definition of a case; the values sent and expected
    reductions      all_reduce, reduce, reduce_scatter
    data_movement   broadcast, all_gather, gather, scatter, all_to_all
    point_to_point  send, recv and their batches
    ordering        barriers, sub-groups, asynchronous calls
    gaps            known limitations of backends
    progress        how far each rank is, reported without the backend that is being tested
    runner          runs cases on ranks and reports
"""

from __future__ import annotations

from lockstep.testing.conformance.case import Case, Context
from lockstep.testing.conformance.gaps import BACKEND_GAPS
from lockstep.testing.conformance.runner import CASES, CaseResult, Report, run_conformance

__all__ = ["BACKEND_GAPS", "CASES", "Case", "CaseResult", "Context", "Report", "run_conformance"]
