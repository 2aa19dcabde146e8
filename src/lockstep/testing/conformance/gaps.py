"""What backends are known not to have, so that their cases are skipped with a reason.

Measured, not read: `run_conformance(name, world_size, skip_gaps=False)` runs every case, and
each entry stands for cases that failed there. A feature is a word from a case's `requires`.
"""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.testing.conformance.case import Case

__all__ = ["BACKEND_GAPS", "reason_to_skip"]

# By backend, then by feature. gloo's with torch 2.13, at 1, 2, 3 and 5 ranks.
BACKEND_GAPS: Mapping[str, Mapping[str, str]] = {
    "gloo": {
        "all_to_all_uneven": "refuses a list of tensors of different sizes",
        "dtype:int16": "'Invalid scalar type' in every collective",
        "form:stacked": "refuses an output, or an input, with one more dimension than the parts",
        "gaps_in_memory": "collectives use the memory in the gaps as if it were the tensor, silently; send refuses",
        "gather/dtype:complex128": "'Invalid scalar type'",
        "gather/dtype:complex64": "'Invalid scalar type'",
        "in_order": "asynchronous calls run at once on several threads, in no order",
        "wide_accumulation": "adds 16-bit floats in 16 bits",
    },
}


def reason_to_skip(case: Case, backend: str) -> str | None:
    """Why `backend` cannot pass `case`, or None if it should."""
    gaps = BACKEND_GAPS.get(backend, {})
    return next((f"{feature}: {gaps[feature]}" for feature in sorted(case.requires) if feature in gaps), None)
