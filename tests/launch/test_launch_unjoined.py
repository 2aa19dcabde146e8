"""What the launcher says when ranks end well and none of them has joined a process group."""

from __future__ import annotations

import subprocess

import pytest

from launching import Launches

TOLD = "none joined a process group"


def run(launches: Launches, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    return launches.run(*options, launches.script(text))


def test_says_that_nobody_joined(launches: Launches) -> None:
    done = run(launches, "import torch", "--nproc", "2")
    assert done.returncode == 0
    assert done.stderr.count(TOLD) == 1
    assert "lockstep: 2 ranks ended and none joined a process group" in done.stderr
    assert "lockstep.init()" in done.stderr


def test_says_nothing_if_the_script_only_shows_its_options(launches: Launches) -> None:
    script = launches.script("import argparse, torch\nargparse.ArgumentParser().parse_args()")
    done = launches.run("--nproc", "2", script, "--help")
    assert done.returncode == 0
    assert "show this help message" in done.stdout
    assert TOLD not in done.stderr


JOINED = {
    "lockstep": "import lockstep\nwith lockstep.init(): pass",
    "gloo, without a collective": """
        import torch.distributed as dist
        dist.init_process_group("gloo", init_method="env://")
        joined = dist.FileStore("joined", 2)  # gloo fails where the other one connects while this one leaves
        joined.set(str(RANK), "")
        joined.wait(["0", "1"])
        dist.destroy_process_group()
        """,
    "no torch": "print(RANK)",
    "rpc alone": """
        import torch.distributed.rpc as rpc
        rpc.init_rpc(f"w{RANK}", rank=RANK, world_size=2)
        rpc.shutdown()
        """,
    "a child of each": """
        import multiprocessing
        import torch
        import torch.distributed as dist

        def learn():
            dist.init_process_group("gloo")
            dist.barrier()
            dist.destroy_process_group()

        if __name__ == "__main__":
            child = multiprocessing.get_context("spawn").Process(target=learn)
            child.start()
            child.join()
            assert child.exitcode == 0
        """,
}


@pytest.mark.parametrize("text", JOINED.values(), ids=JOINED)
def test_is_silent_where_somebody_joined_or_nobody_trains(launches: Launches, text: str) -> None:
    done = run(launches, text, "--nproc", "2")
    assert done.returncode == 0, done.stderr
    assert TOLD not in done.stderr


@pytest.mark.parametrize("count", [2, 3])
def test_says_that_children_are_a_job_of_their_own(launches: Launches, count: int) -> None:
    """Each rank starts all ranks again. Forked, as spawning them would take seconds."""
    done = run(
        launches,
        f"""
        import multiprocessing, socket
        import torch
        import torch.distributed as dist

        def learn(rank, port):
            dist.init_process_group("gloo", f"tcp://127.0.0.1:{{port}}", rank=rank, world_size={count})
            dist.barrier()
            dist.destroy_process_group()

        if __name__ == "__main__":
            with socket.create_server(("127.0.0.1", 0)) as server:
                port = server.getsockname()[1]
            fork = multiprocessing.get_context("fork")
            children = [fork.Process(target=learn, args=(rank, port)) for rank in range({count})]
            for child in children:
                child.start()
            for child in children:
                child.join()
                assert child.exitcode == 0
        """,
        "--nproc",
        "2",
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(TOLD) == 1


def test_is_silent_when_one_rank_of_two_joined_alone(launches: Launches) -> None:
    done = run(
        launches,
        """
        import torch, lockstep
        if RANK == 0:
            with lockstep.init(rank=0, world_size=1): pass
        """,
        "--nproc",
        "2",
    )
    assert done.returncode == 0, done.stderr
    assert TOLD not in done.stderr


def test_is_silent_about_one_rank(launches: Launches) -> None:
    assert TOLD not in run(launches, "import torch", "--nproc", "1").stderr


def test_is_silent_when_a_rank_failed(launches: Launches) -> None:
    done = run(launches, "import torch\nsys.exit(3 * RANK)", "--nproc", "2")
    assert done.returncode == 3
    assert TOLD not in done.stderr
