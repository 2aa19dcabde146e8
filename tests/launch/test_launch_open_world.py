"""`lockstep.init()` without `with`: what leaving the world raises is an error at the end of the script as well."""

from __future__ import annotations

import subprocess
import sys

import pytest

from launching import Launches
from lockstep.testing import limit_s

# What is checked when a world is left is the affair of others; here it is an error of its own.
OPEN = """
import atexit, os, sys, threading
import lockstep
from lockstep import world as worlds
from lockstep.errors import ModelError
atexit.register(print, "tidy", flush=True)
def check(world):
    raise ModelError("the ranks have trained different models")
worlds.check_at_shutdown(check)
world = lockstep.init()
atexit.register(print, "tidy", flush=True)
"""
# Ends after the script. A line in one piece: exit handlers print, too.
THREAD = """
def work():
    threading.main_thread().join()
    os.write(1, b"%d\\n" % world.process_group.size())
threading.Thread(target=work).start()
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [("", 120), ("sys.exit(0)", 120), ("raise ValueError('first')", 1), ("world.shutdown = int; sys.exit(4)", 4)],
)
def test_alone(launches: Launches, end: str, code: int) -> None:
    """120 is Python's code for an error while it ends; all exit handlers run, and another error stays the only one."""
    (launches.folder / "script.py").write_text(OPEN + end)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=launches.folder, capture_output=True, text=True, timeout=limit_s(60)
    )
    assert (done.returncode, done.stdout) == (code, "tidy\ntidy\n"), done.stderr
    assert ("ModelError: the ranks have trained" in done.stderr) == (code == 120)
    assert done.stderr.count("Traceback") == (0 if code == 4 else 1)
    assert "Exception ignored" not in done.stderr


def test_no_line_of_ours_says_where_the_script_has_ended(launches: Launches) -> None:
    script = (
        "import torch, lockstep\n"
        "world = lockstep.init(seed=0)\n"
        "net = torch.nn.Linear(2, 1)\n"
        "model = lockstep.DistributedDataParallel(net)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "net(torch.ones(1, 2) * world.rank).sum().backward()\n"
        "optimizer.step()\n"
    )
    done = launches.run("--nproc", "2", launches.script(script))
    assert "failed with lockstep.errors.ModelError: the 2 ranks end with different models" in done.stderr
    assert "so call model(x), not model.module(x)" in done.stderr
    assert "comparison.py" not in done.stderr


@pytest.mark.parametrize("end", ["", "sys.exit(0)", THREAD])
def test_under_the_launcher(launches: Launches, end: str) -> None:
    """The launcher says which error it was, also where a thread that still uses the world makes it wait."""
    done = launches.run("--nproc", "2", launches.script(OPEN + end))
    assert done.returncode in ((1, 120) if end == THREAD else (1,)), done.stderr
    assert "failed with lockstep.errors.ModelError at script.py" in done.stderr
    assert done.stderr.count("Traceback") == 1
    assert done.stdout.count("tidy") == 4
    assert done.stdout.count("2\n") == (2 if end == THREAD else 0)
