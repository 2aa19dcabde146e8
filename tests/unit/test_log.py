"""Lockstep's own logger, and what configures logging around it."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import io, logging, logging.config
from lockstep.log import get_logger, warn_once

logger = get_logger("lockstep.parallel")
if {silence!r}:
    logging.getLogger("lockstep").setLevel("ERROR")
{configure}
assert logger.disabled
warn_once(logger, "not one process's answer")
logger.disabled = True
get_logger("lockstep.parallel").warning("of another kind")
"""
HYDRA = 'logging.config.dictConfig({"version": 1, "disable_existing_loggers": True, "root": {"level": "CRITICAL"}})'
INI = "[loggers]\nkeys=root\n[handlers]\nkeys=\n[formatters]\nkeys=\n[logger_root]\nlevel=ERROR\nhandlers="


@pytest.mark.parametrize("silence", [False, True])
@pytest.mark.parametrize(
    "configure",
    [HYDRA, 'logging.config.dictConfig({"version": 1})', f"logging.config.fileConfig(io.StringIO({INI!r}))"],
)
def test_configurations_of_other_loggers_silence_no_warning(configure: str, silence: bool) -> None:
    script = SCRIPT.format(configure=configure, silence=silence)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    texts = ["[lockstep] WARNING: not one process's answer", "[lockstep] WARNING: of another kind"]
    assert (done.returncode, done.stderr.splitlines()) == (0, [] if silence else texts), done.stderr
