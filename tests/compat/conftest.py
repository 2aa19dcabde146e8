"""Programs are started as their users would start them, by the same means as in tests/launch."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "launch"))
sys.path.append(str(Path(__file__).with_name("programs")))

from launch_fixtures import forked, launches

__all__ = ["forked", "launches"]
