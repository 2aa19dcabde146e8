"""Hosts that all tests of groups share: they end nothing but their own ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from netns_harness import Cluster, cluster


@pytest.fixture(scope="session")
def hosts() -> Iterator[Cluster]:
    """Four; a job that needs fewer has the first ones."""
    with cluster(4) as made:
        yield made
