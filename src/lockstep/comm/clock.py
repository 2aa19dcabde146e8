"""Seconds this process has spent communicating, waiting included."""

from __future__ import annotations

__all__ = ["add", "total"]

_total_s = 0.0


def add(seconds: float) -> None:
    """Count `seconds` as spent in communication. Local."""
    global _total_s
    _total_s += seconds


def total() -> float:
    """Seconds counted since the process started. Local."""
    return _total_s
