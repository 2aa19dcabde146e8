"""What unit tests share: Hypothesis without time limits, and code that is parsed without a collection in between."""

from __future__ import annotations

import gc

import pytest
from hypothesis import HealthCheck, settings

# Examples that take long on a busy machine are not failures.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.fixture(scope="module")
def no_garbage() -> None:
    """Collect what earlier tests have left, for tests that parse much code.

    pytest formats the error of a finalizer, for which Python 3.11 calls `ast.parse`. If that happens in a collection
    within another `ast.parse`, the latter ends with SystemError (python/cpython#106905).
    """
    gc.collect()
