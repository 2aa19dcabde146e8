"""Known limitations of backends, whose cases are skipped with a reason.

Measured rather than taken from documentation: `run_conformance(name, world_size, skip_gaps=False)` runs every case, and
each entry stands for cases that failed in such a run. A feature is an element of a case's `requires`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lockstep.comm.torch_version import release_of
from lockstep.testing.conformance.case import Case

__all__ = ["BACKEND_GAPS", "reason_to_skip"]

# With torch 2.13, at 1, 2, 3 and 5 ranks.
_GLOO = {
    "all_to_all_uneven": "refuses a list of tensors of different sizes",
    "dtype:int16": "'Invalid scalar type' in every collective",
    "form:stacked": "refuses an output, or an input, with one more dimension than the parts",
    "gaps_in_memory": "collectives use the memory in the gaps as if it were the tensor, silently; send refuses",
    "gather/dtype:complex128": "'Invalid scalar type'",
    "gather/dtype:complex64": "'Invalid scalar type'",
    "in_order": "asynchronous calls run at once on several threads, in no order",
    "wide_accumulation": "adds 16-bit floats in 16 bits",
}
# Older releases lack more: until this release, the oldest one of docs/versions.md that has it.
_OLD_GLOO: Mapping[tuple[int, int], Mapping[str, str]] = {
    (2, 13): {"all_to_all": "not supported"},
    (2, 11): {
        "flat_meets_shaped": "uses reduce_scatter",
        "op:AVG": "refused; in reduce_scatter_tensor taken for SUM, silently",
        "reduce_scatter": "not supported",
        **{
            f"reduce_scatter_tensor/op:{op}": "taken for SUM, silently"
            for op in ("BAND", "BOR", "BXOR", "MAX", "MIN", "PRODUCT")
        },
        **{
            f"{verb}/dtype:{dtype}": "'Invalid scalar type'"
            for verb in ("broadcast", "reduce", "reduce_scatter_tensor")
            for dtype in ("complex64", "complex128")
        },
    },
}


def _gaps_of_gloo(release: tuple[int, int]) -> Mapping[str, str]:
    missing = [gaps for since, gaps in _OLD_GLOO.items() if release < since]
    return {feature: reason for gaps in (_GLOO, *missing) for feature, reason in gaps.items()}


# By backend, then by feature, for the installed torch.
BACKEND_GAPS: Mapping[str, Mapping[str, str]] = {"gloo": _gaps_of_gloo(release_of(torch.__version__))}


def reason_to_skip(case: Case, backend: str) -> str | None:
    """Why `backend` cannot pass `case`, or None if it should."""
    gaps = BACKEND_GAPS.get(backend, {})
    return next((f"{feature}: {gaps[feature]}" for feature in sorted(case.requires) if feature in gaps), None)
