"""A job that is told to stop saves at the same step on all ranks, with workers too, and says that it is not done."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import lockstep
from launching import NOTE_PID, Launches, is_alive, wait_until
from lockstep.testing import limit_s

BATCH, SAMPLES = 6, 30


# What signals do to ranks does not hang on how their interpreters were started.
pytestmark = pytest.mark.usefixtures("forked")


# argv: workers, signals for stop_on or "default". Saves what the loader says, and trains until it is told to stop.
TRAINS = (
    "import os, signal, sys\n"
    + NOTE_PID
    + f"""
import torch, lockstep
class Numbers(torch.utils.data.Dataset):
    def __len__(self): return {SAMPLES}
    def __getitem__(self, index): return torch.full((4,), float(index))
if __name__ == "__main__":
    torch.set_num_threads(1)
    workers, *signals = sys.argv[1:]
    with lockstep.init(seed=0) as world:
        if signals:
            world.stop_on(*(signal.Signals[name] for name in signals))
        model = lockstep.DistributedDataParallel(torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        loader = lockstep.DataLoader(
            Numbers(), batch_size={BATCH}, shuffle=True, num_workers=int(workers), persistent_workers=workers != "0"
        )
        step = 0
        while True:
            for batch in loader:
                optimizer.zero_grad()
                model(batch).mean().backward()
                optimizer.step()
                step += 1
                if world.should_stop():
                    state = {{"step": step, "loader": loader.state_dict(), "model": model.module.state_dict()}}
                    lockstep.checkpoint.save("saved", state, step=step)
                    os.write(1, f"saved {{step}}\\n".encode())  # at once: ranks of torchrun share a pipe
                    sys.exit(lockstep.EXIT_STOPPED)
                if step == 3:
                    note(f"rank{{world.rank}}")
"""
)


def saved_step(launches: Launches, out: str, nproc: int) -> int:
    """The step of the checkpoint: the same on all ranks, and the loader has counted no batch that was not stepped."""
    steps = [int(step) for step in re.findall(r"saved (\d+)", out)]
    assert len(steps) == nproc, out
    assert len(set(steps)) == 1, out
    state = lockstep.checkpoint.load(launches.folder / "saved")
    consumed = state["loader"]["epoch"] * SAMPLES + state["loader"]["samples_consumed"]
    assert (state["step"], consumed) == (steps[0], steps[0] * BATCH)
    return steps[0]


@pytest.mark.parametrize(
    ("nproc", "workers", "number", "whom"),
    [
        (2, 2, "SIGTERM", "launcher"),
        (3, 0, "SIGUSR1", "rank2"),
        (2, 1, "SIGTERM", "everything"),
        (2, 1, "SIGINT", "launcher"),
        (1, 1, "SIGUSR1", "everything"),
    ],
)
def test_signal_saves_on_all_ranks_alike(launches: Launches, nproc: int, workers: int, number: str, whom: str) -> None:
    script = launches.script(TRAINS)
    signals = [number] if number == "SIGINT" else []
    process = launches.start("--nproc", str(nproc), script, str(workers), *signals)
    pids = launches.pids(*(f"rank{rank}" for rank in range(nproc)))
    if whom == "launcher":
        process.send_signal(signal.Signals[number])
    elif whom == "everything":  # as Slurm and systemd do: each process of the job, workers included
        for pid in [pid for leader in pids for pid in session_of(leader)]:
            os.kill(pid, signal.Signals[number])
    else:
        os.kill(pids[-1], signal.Signals[number])
    out, err = process.communicate(timeout=limit_s(60))
    assert process.returncode == lockstep.EXIT_STOPPED, err
    assert saved_step(launches, out, nproc) >= 3
    assert f"{number}: all ranks stop after this step" in err
    assert ("have 30 s" in err) == (whom == "launcher")
    assert "Traceback" not in err
    assert not launches.leftovers()


def session_of(leader: int) -> list[int]:
    """The processes of a rank's session."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == leader:
                found.append(int(entry.name))
    return found


TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]


@pytest.mark.parametrize("starter", [[], TORCHRUN], ids=["python", "torchrun"])
def test_other_launchers(launches: Launches, starter: list[str]) -> None:
    """A signal to the process group, as of `kill -TERM -- -PID`, and one to torchrun alone, which hands it on."""
    (launches.folder / "script.py").write_text(TRAINS)
    variables = {name: value for name, value in launches.environment().items() if name not in ("RANK", "WORLD_SIZE")}
    with subprocess.Popen(
        [sys.executable, *starter, "script.py", "1"],
        cwd=launches.folder,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        launches.pids(*(["rank0", "rank1"] if starter else ["rank0"]))
        (os.kill if starter else os.killpg)(process.pid, signal.SIGTERM)
        out, err = process.communicate(timeout=limit_s(60))
    assert saved_step(launches, out, 2 if starter else 1) >= 3
    assert process.returncode != 0
    assert bool(starter) or process.returncode == lockstep.EXIT_STOPPED, err


def test_handler_of_the_script_itself(launches: Launches) -> None:
    """The launcher's signal reaches the rank and leaves its workers alone, torch's loader's, too."""
    script = launches.script(
        NOTE_PID
        + """
import torch
class Slow(torch.utils.data.Dataset):
    def __len__(self): return 100000
    def __getitem__(self, index): return index
def loader():  # of no tensors: torch hands those on through a socket, whose path may have 108 bytes
    return torch.utils.data.DataLoader(Slow(), batch_size=2, num_workers=1, collate_fn=list)
if __name__ == "__main__":
    stop = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
    for number, batch in enumerate(loader()):
        if stop:
            for batch, _ in zip(range(20), loader()):
                pass
            print("saved", flush=True)
            sys.exit(0)
        if number == 3:
            note(f"rank{RANK}")
        time.sleep(0.001)
"""
    )
    process = launches.start("--nproc", "1", script)
    launches.pids("rank0")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=limit_s(30))
    assert out == "[0] saved\n", err


def test_kill_in_the_middle_of_the_save_leaves_the_one_before(launches: Launches) -> None:
    """What comes after the grace: the file that is half written is none."""
    script = launches.script(
        TRAINS.replace(
            '                    lockstep.checkpoint.save("saved", state, step=step)\n',
            """                    lockstep.checkpoint.save("saved", {"step": 1}, step=1)
                    fsync = os.fsync
                    def hang(fd):
                        note(f"saving{world.rank}")
                        signal.pause()
                    os.fsync = hang
                    lockstep.checkpoint.save("saved", state, step=step)
""",
        )
    )
    process = launches.start("--nproc", "2", "--grace", "0.5", script, "0")
    pids = launches.pids("rank0", "rank1")
    process.send_signal(signal.SIGTERM)
    launches.pids("saving0")
    out, err = process.communicate(timeout=limit_s(60))
    assert "have 0.5 s" in err
    assert process.returncode == 128 + signal.SIGTERM, out
    wait_until(lambda: not any(map(is_alive, pids)), "the ranks are gone")
    assert lockstep.checkpoint.load(launches.folder / "saved") == {"step": 1}


def test_workers_end_with_their_rank(launches: Launches) -> None:
    """They leave signals to it, and die with it: by `kill -9` of it, and at its good end while one of them hangs."""
    text = """
import torch, lockstep
class Hangs(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, index):
        if index > 1:
            note("worker")
            while True: signal.pause()
        return torch.ones(1)
if __name__ == "__main__":
    batches = iter(lockstep.DataLoader(Hangs(), batch_size=1, num_workers=1, persistent_workers=True))
    next(batches)
    while not os.path.exists("worker"): time.sleep(0.005)
    note("rank")
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    os.kill(int(open("worker").read()), signal.SIGTERM)
    sys.exit(3)
"""
    (launches.folder / "script.py").write_text("import os, sys, time, signal\n" + NOTE_PID + text)
    for how, code in (("killed", -signal.SIGKILL), ("done", 3)):
        done = subprocess.run(
            [sys.executable, "script.py", how], cwd=launches.folder, env=launches.environment(), timeout=limit_s(60)
        )
        assert done.returncode == code
        (worker,) = launches.pids("worker")
        wait_until(lambda worker=worker: not is_alive(worker), "the worker is gone", 3)
        (launches.folder / "worker").unlink()


@pytest.mark.parametrize("delay", [0, 1])
def test_save_after_ctrl_c_that_met_a_collective_says_what_to_write(launches: Launches, delay: int) -> None:
    """Ranks are interrupted at different lines: nothing is written, on any rank, and the error names the way.

    Also where a rank is still in its collective when the others have come to the save.
    """
    script = launches.script(
        NOTE_PID
        + f"slow = {delay}\n"
        + """
import torch, lockstep
with lockstep.init() as world:
    if slow and world.rank == 2:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        lockstep.sum(torch.ones(()))
        note(f"rank{world.rank}")
        if world.rank < 1 + slow:
            while True: time.sleep(60)
        lockstep.sum(torch.ones(()))
    except KeyboardInterrupt:
        lockstep.checkpoint.save("saved", {"step": 1}, step=1)
"""
    )
    process = launches.start("--nproc", "3", script)
    launches.pids("rank0", "rank1", "rank2")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=limit_s(60))
    assert process.returncode == 128 + signal.SIGINT
    assert "world.stop_on(signal.SIGINT)" in err
    assert "nothing was saved" in err
    assert not (launches.folder / "saved").exists()
