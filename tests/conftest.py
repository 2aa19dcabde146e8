"""Fixtures for tests of every kind."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture
def tiny_tmpfs(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a tmpfs of a given size (such as "64k") and returns its folder; unmounts it after the test."""
    mounted: list[Path] = []

    def mount(size: str) -> Path:
        folder = tmp_path / f"tmpfs-{len(mounted)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True) if os.getuid() == 0 else None
        if done is None or done.returncode != 0:
            pytest.skip(f"cannot mount a tmpfs: {'not root' if done is None else done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
