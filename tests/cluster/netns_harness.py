"""Hosts for tests, and the mark of tests that need them."""

from __future__ import annotations

import pytest

from tests.namespaces import MASTER_PORT, Cluster, NamespaceHost, RankDied, cluster, reason_to_skip

__all__ = ["MASTER_PORT", "REASON", "Cluster", "NamespaceHost", "RankDied", "cluster", "needs_namespaces"]

REASON = reason_to_skip()
needs_namespaces = pytest.mark.skipif(bool(REASON), reason=REASON)
