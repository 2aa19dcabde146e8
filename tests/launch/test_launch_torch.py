"""A script written for torchrun, with nothing of Lockstep in it."""

from __future__ import annotations

import pytest

import lockstep
import spawned
from launching import Launches


def test_script_written_for_torchrun_runs_unchanged(launches: Launches) -> None:
    script = launches.script(
        """
        import torch
        import torch.distributed as dist
        from torch.distributed.elastic.multiprocessing.errors import record

        @record
        def main():
            dist.init_process_group('gloo')
            assert dist.is_torchelastic_launched()
            total = torch.tensor([float(dist.get_rank() + 1)])
            dist.all_reduce(total)
            print('total', total.item(), 'of', dist.get_world_size(), flush=True)
            dist.destroy_process_group()
            if '--fail' in sys.argv and RANK == 1:
                raise ValueError('asked to')

        if __name__ == '__main__':
            main()
        """
    )
    done = launches.run("--nproc-per-node=2", script, "--fail")
    assert done.returncode == 1
    assert sorted(done.stdout.splitlines()) == ["[0] total 3.0 of 2", "[1] total 3.0 of 2"]
    assert "rank 1 " in done.stderr
    assert "failed with ValueError at script.py:16: asked to" in done.stderr


def test_spawn_takes_and_returns_tensors() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(4, dtype=torch.float64)
    results = lockstep.spawn(spawned.add_tensor, (tensor,), nproc=2)
    for rank, result in enumerate(results):
        assert torch.equal(result, tensor + rank)


def test_interpreter_ends_well_with_groups_that_nobody_destroys(launches: Launches) -> None:
    """The record hooks torch's groups: a hook that outlives the interpreter ends the process with SIGSEGV.

    And one of gloo's threads that would ask the dead interpreter for the GIL ends it with SIGABRT; so it ends only when
    these rest.
    """
    script = launches.script(
        """
        import ctypes, threading
        import torch, torch.distributed as dist

        SET_NAME = 15
        started = threading.Event()

        def work():
            ctypes.CDLL(None).prctl(SET_NAME, b'pt_gloo_runloop', 0, 0, 0)
            started.set()
            until = time.monotonic() + 0.3
            while time.monotonic() < until:
                pass
            print('done', flush=True)
            threading.Event().wait()

        dist.init_process_group('gloo')
        pair = dist.new_group([0, 1])
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2), process_group=pair)
        model(torch.ones(1, 2)).sum().backward()
        threading.Thread(target=work, daemon=True).start()
        started.wait()
        """
    )
    done = launches.run("--nproc=2", script)
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, ["[0] done", "[1] done"]), done.stderr


@pytest.mark.usefixtures("forked")
def test_groups_are_made_although_something_cleaned_up_temporary_files(launches: Launches) -> None:
    script = launches.script(
        """
        import shutil
        import torch, torch.distributed as dist
        import lockstep

        folder = os.environ['LOCKSTEP_RENDEZVOUS']
        tensor = torch.ones(1)
        for number in range(2):
            with lockstep.init(timeout=10):
                dist.barrier()
                if RANK == number == 1:
                    shutil.rmtree(folder)
                dist.barrier()
                dist.all_reduce(tensor, group=dist.new_group([0, 1]))
                dist.all_reduce(tensor, group=dist.new_group([0, 1], backend='gloo'))
        print(tensor.item(), flush=True)
        lockstep.init()
        """
    )
    done = launches.run("--nproc", "2", script)
    assert sorted(done.stdout.splitlines()) == ["[0] 16.0", "[1] 16.0"], done.stderr
    assert "something else has removed it, such as a cleanup of temporary files" in done.stderr
