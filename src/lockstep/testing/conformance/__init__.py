"""The conformance suite: what every c10d backend must do, one check per collective and form.

Each check is a function that runs on every rank, derives the expected value in its docstring
and raises AssertionError if the backend gave another. `CASES` are the checks with their dtypes,
shapes and operations. A backend's author runs them all::

    report = run_conformance("mine", world_size=3, register="my_package.backend")
    assert not report.failures, str(report)

Cases that a backend cannot pass are named in `BACKEND_GAPS`, with a reason, and skipped.

General layout:
    case            what a case is; the values sent and expected
    reductions      all_reduce, reduce, reduce_scatter
    data_movement   broadcast, all_gather, gather, scatter, all_to_all
    point_to_point  send, recv and their batches
    ordering        barriers, sub-groups, asynchronous calls
    gaps            what backends are known not to have
    progress        how far each rank is, told without the backend that is being checked
    runner          runs cases on ranks and reports
"""

from __future__ import annotations

from lockstep.testing.conformance.case import Case, Context
from lockstep.testing.conformance.gaps import BACKEND_GAPS
from lockstep.testing.conformance.runner import CASES, CaseResult, Report, run_conformance

__all__ = ["BACKEND_GAPS", "CASES", "Case", "CaseResult", "Context", "Report", "run_conformance"]
