"""Scripts that start their ranks themselves, in the ways that people write, are verified as others are."""

from __future__ import annotations

import multiprocessing
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest

from lockstep.launch.free_port import find_free_port
from lockstep.tools.verify.report import format_text
from lockstep.tools.verify.settings import RANKS, Verification, VerifySettings
from lockstep.tools.verify.starts import StartWatch
from lockstep.tools.verify.verdict import Verdict
from lockstep.tools.verify.verification import verify

# A rank of a training.
TRAINS = """
    import argparse, os, sys
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as mp
    from torch import nn
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    def train(how, epochs=2):
        generator = torch.Generator().manual_seed(1)
        data = TensorDataset(torch.randn(24, 4, generator=generator), torch.randint(0, 2, (24,), generator=generator))
        if how == "split":
            data = torch.utils.data.random_split(data, [24, 0])[0]
            how = "mean"
        torch.manual_seed(0)
        sampler = DistributedSampler(data)
        model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for inputs, targets in DataLoader(data, 4, sampler=sampler):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), targets, reduction=how).backward()
                optimizer.step()
        dist.destroy_process_group()

    def join(rank, size):
        os.environ["MASTER_ADDR"] = "192.0.2.1"  # of its author's cluster
        os.environ["MASTER_PORT"] = "PORT"
        dist.init_process_group("gloo", rank=rank, world_size=size)
"""
BY_DEVICES = """
    def work(rank, how):
        join(rank, torch.cuda.device_count())
        train(how)

    if __name__ == "__main__":
        mp.spawn(work, args=(sys.argv[1],), nprocs=torch.cuda.device_count())
"""
BY_OPTION = """
    def work(gpu, args):
        join(args.nr * args.gpus + gpu, args.world_size)
        train(args.how)

    if __name__ == "__main__":
        parser = argparse.ArgumentParser()
        parser.add_argument("how")
        parser.add_argument("--epochs", type=int, default=2)
        parser.add_argument("-g", "--gpus", type=int, default=1)
        parser.add_argument("-nr", type=int, default=0)
        args = parser.parse_args()
        args.world_size = args.gpus
        mp.spawn(work, nprocs=args.gpus, args=(args,))
"""
BY_NUMBER = """
    def work(rank, size, how):
        join(rank, size)
        train(how)

    if __name__ == "__main__":
        mp.spawn(work, args=(2, sys.argv[1]), nprocs=2)
        mp.spawn(work, args=(1, sys.argv[1]), nprocs=1)  # a further demonstration, which is left out
"""
BY_PROCESSES = """
    def work(rank, size, fn, how):
        join(rank, size)
        fn(how)

    if __name__ == "__main__":
        size, processes = 2, []
        if "spawn" in sys.argv:
            mp.set_start_method("spawn", force=True)  # the tests may have set another
        for rank in range(size):
            processes.append(mp.Process(target=work, args=(rank, size, train, sys.argv[1])))
            processes[-1].start()
        for process in processes:
            process.join()
        assert [each.exitcode for each in processes] == [0, 0]
"""
BESIDE_OTHERS = """
    import functools

    def count(queue):
        queue.put(1)

    class Counter(mp.Process):
        def run(self):
            pass

    if __name__ == "__main__":
        queue = mp.Queue()
        dist.init_process_group("gloo")
        for process in mp.Process(target=functools.partial(count, queue)), Counter():  # no ranks
            process.start()
            process.join()
            assert process.exitcode == 0
        assert queue.get() == 1
        train(sys.argv[1])
"""
BY_LOCKSTEP = """
    import lockstep

    def work(how):
        with lockstep.init():
            train(how)

    if __name__ == "__main__":
        lockstep.spawn(work, args=(sys.argv[1],), nproc=4)
"""
BY_HOROVOD = """
    import horovod
    import horovod.torch as hvd

    def work(how):
        hvd.init()
        train(how)

    if __name__ == "__main__":
        horovod.run(work, args=(sys.argv[1],), num_proc=2)
"""
SEEDED = """
    torch.manual_seed(3)
"""
SEEDED_IN_MAIN = """
    if __name__ == "__main__":
        torch.manual_seed(3)
"""
BY_LAUNCHER = """
    parser = argparse.ArgumentParser()
    parser.add_argument("how")
    parser.add_argument("--local_rank", type=int, default=-1)  # of torch.distributed.launch
    args = parser.parse_args()
    assert args.local_rank >= 0
    dist.init_process_group("gloo")
    train(args.how)
"""
BY_CONSTANT = """
    SIZE = 2

    def work(rank, how):
        join(rank, SIZE)
        train(how)

    if __name__ == "__main__":
        mp.spawn(work, args=(sys.argv[1],), nprocs=SIZE)
"""
BY_NUMBERS = """
    def work(rank, epochs, how):
        join(rank, 2)
        train(how, epochs)

    if __name__ == "__main__":
        mp.spawn(work, args=(2, sys.argv[1]), nprocs=2)
"""
BY_ARGUMENTS = """
    def work(rank, epochs, size, how):
        join(rank, size)
        train(how, epochs)

    if __name__ == "__main__":
        processes = [mp.Process(target=work, args=(rank, 2, 2, sys.argv[1])) for rank in range(2)]
        [each.start() for each in processes]
        [each.join() for each in processes]
"""
BY_VARIABLES = """
    def work(rank, how):
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="PORT", RANK=str(rank), WORLD_SIZE="2")
        dist.init_process_group("gloo")
        train(how)

    if __name__ == "__main__":
        mp.spawn(work, args=(sys.argv[1],), nprocs=2)
"""
# Each process that runs a rank in place finds another port, and another name.
BY_PORT = """
    import socket

    def work(rank, size, url, how):
        dist.init_process_group("gloo", init_method=url, rank=rank, world_size=size)
        train(how)

    if __name__ == "__main__":
        with socket.socket() as free:
            free.bind(("", 0))
            url = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        mp.spawn(work, args=(2, url, sys.argv[1]), nprocs=2)
"""
BY_FILE = """
    import tempfile

    def work(rank, size, file, how):
        store = dist.FileStore(file, size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        train(how)

    if __name__ == "__main__":
        mp.spawn(work, args=(2, tempfile.mktemp(), sys.argv[1]), nprocs=2)
"""
BY_NOTEBOOK = """
    from accelerate import Accelerator, notebook_launcher

    def work(how):
        Accelerator(cpu=True)
        train(how)

    if __name__ == "__main__":
        notebook_launcher(work, (sys.argv[1],), num_processes=2)
"""
BY_FABRIC = """
    from lightning_fabric import Fabric

    Fabric(accelerator="cpu", strategy="ddp", devices=2).launch()
    train(sys.argv[1])
"""
NEVER_ONE = """
    def work(rank, how):
        join(rank, 1 + 1)
        train(how)

    if __name__ == "__main__":
        mp.spawn(work, args=(sys.argv[1],), nprocs=1 + 1)
"""


BY_LOCAL_RANK = """
    dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]), world_size=torch.cuda.device_count())
    raise RuntimeError("what it called was removed")
"""


def verdict_on(program: str, folder: Path, *args: str, nproc: tuple[int, ...] = (2,)) -> tuple[Verdict, str]:
    script = folder / "main.py"
    script.write_text(textwrap.dedent(TRAINS.replace("PORT", str(find_free_port())) + program))
    (verdict,) = verify(Verification(str(script), args, nproc=nproc))
    return verdict, " ".join(format_text("main.py", [verdict]).split())


@pytest.mark.parametrize(
    ("program", "args"),
    [
        pytest.param(BY_DEVICES, (), id="by devices"),
        pytest.param(BY_OPTION, ("--epochs=2", "-g", "2"), id="by an option"),
        pytest.param(BY_NUMBER, (), id="by a number that is handed to them"),
        pytest.param(BY_PROCESSES, (), id="as processes"),
        pytest.param(BY_PROCESSES, ("spawn",), id="as processes that are spawned"),
        pytest.param(BY_LOCKSTEP, (), id="by lockstep.spawn"),
        pytest.param(BESIDE_OTHERS, (), id="not, but other processes"),
        pytest.param(BY_HOROVOD, (), id="by horovod.run"),
        pytest.param(BY_LAUNCHER, (), id="by torch.distributed.launch"),
        pytest.param(BY_CONSTANT, (), id="by a constant"),
        pytest.param(BY_NUMBERS, (), id="by numbers"),
        pytest.param(BY_ARGUMENTS, (), id="by a number beside another one"),
        pytest.param(BY_VARIABLES, (), id="by variables"),
        pytest.param(BY_PORT, (), id="who meet at a free port"),
        pytest.param(BY_FILE, (), id="who meet in a new file"),
        pytest.param(BY_NOTEBOOK, (), id="by notebook_launcher"),
        pytest.param(BY_FABRIC, (), id="by Fabric(devices=2)"),
    ],
)
def test_ranks_that_a_script_starts_are_compared(program: str, args: tuple[str, ...], tmp_path: Path) -> None:
    verdict, text = verdict_on(program, tmp_path, "mean", *args)
    assert verdict.code == 0, text
    assert verdict.steps > 2


@pytest.mark.parametrize("program", [BY_DEVICES, BY_PROCESSES], ids=["spawn", "processes"])
def test_what_they_do_wrong_is_named(program: str, tmp_path: Path) -> None:
    verdict, text = verdict_on(program, tmp_path, "sum")
    assert verdict.first == ("gradients", "sum"), text


def test_they_have_the_seeds_of_new_processes(tmp_path: Path) -> None:
    verdict, text = verdict_on(SEEDED + BY_NUMBER, tmp_path, "split")
    assert verdict.code == 0, text
    verdict, text = verdict_on(SEEDED_IN_MAIN + BY_NUMBER, tmp_path, "split")
    assert verdict.first == ("samples", "split"), text


def test_their_number_is_what_the_script_says(tmp_path: Path) -> None:
    verdict, text = verdict_on(BY_NUMBER, tmp_path, "mean", nproc=(3, 4))
    assert (verdict.code, verdict.world_size) == (0, 2)
    assert "the script starts 2 ranks, whatever --nproc says" in text


def test_a_script_that_never_starts_one_cannot_be_judged(tmp_path: Path) -> None:
    verdict, text = verdict_on(NEVER_ONE, tmp_path, "mean")
    assert verdict.code == 2
    assert "the script starts 2 ranks, and no argument or number in it makes it start one" in text


BY_MPI = """
    import torch
    from mpi4py import MPI

    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x in torch.randn(24, 4).split(4)[MPI.COMM_WORLD.Get_rank() :: MPI.COMM_WORLD.Get_size()]:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        for each in model.parameters():
            MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, each.grad.numpy())
        optimizer.step()
"""
FAILS_WITH_LARGER_BATCHES = """
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as mp
    from torch import nn
    from torch.utils.data import DataLoader

    class Buckets:
        def __init__(self, rank, world_size):
            self.batch_size = 4
            self.batches = [[*range(at, at + 4)] for at in range(4 * rank, 24, 4 * world_size)]

        def __iter__(self):
            assert all(len(each) == self.batch_size for each in self.batches), "the buckets have another size"
            return iter(self.batches)

        def __len__(self):
            return len(self.batches)

    def train(rank, world_size):
        dist.init_process_group("nccl", init_method="tcp://127.0.0.1:PORT", rank=rank, world_size=world_size)
        torch.cuda.set_device(rank)
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2).cuda(), [rank])
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x in DataLoader(torch.randn(24, 4), batch_sampler=Buckets(rank, world_size)):
            optimizer.zero_grad()
            model(x.cuda()).square().mean().backward()
            optimizer.step()

    if __name__ == "__main__":
        mp.spawn(train, nprocs=torch.cuda.device_count(), args=(torch.cuda.device_count(),))
"""


def test_the_error_of_one_process_is_shown_even_if_it_was_also_tried_with_all_gpus(tmp_path: Path) -> None:
    verdict, text = verdict_on(FAILS_WITH_LARGER_BATCHES, tmp_path, "mean")
    assert verdict.code == 2, text
    assert "the buckets have another size" in text
    assert "no argument or number" not in text


def test_ranks_of_mpi_alone_cannot_be_judged(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    verdict, text = verdict_on(BY_MPI, tmp_path, "mean")
    assert verdict.code == 2, text
    assert "the ranks meet through mpi4py" in " ".join(text.split())


def test_an_error_on_all_ranks_is_shown(tmp_path: Path) -> None:
    """Even if one process joins a group of several, as it sees several GPUs."""
    verdict, text = verdict_on(BY_LOCAL_RANK, tmp_path)
    assert verdict.code == 2
    assert "what it called was removed" in text
    assert "no argument" not in text


def test_a_number_that_was_replaced_is_said(tmp_path: Path) -> None:
    _, text = verdict_on(BY_CONSTANT, tmp_path, "mean")
    assert "note: numbers: to start one process instead of several, one in the script was replaced: the 2 in" in text


def test_ranks_are_run_in_place_in_all_processes_of_a_run_or_in_none(tmp_path: Path) -> None:
    """A process that starts late does not read which function runs ranks: another one may have found it already."""
    settings = VerifySettings(RANKS, 2, 4, str(tmp_path))
    settings.file("target").write_text(f"{__name__}.verdict_on")
    watch = StartWatch(SimpleNamespace(settings=settings, rank=1), seed=lambda rank: None)  # type: ignore[arg-type]
    started: list[multiprocessing.Process] = []
    watch._start(started.append)(multiprocessing.Process(target=verdict_on))
    assert len(started) == 1


def test_a_script_that_starts_one_is_told_so(tmp_path: Path) -> None:
    verdict, text = verdict_on(BY_OPTION, tmp_path, "mean")
    assert verdict.code == 2
    assert "the script asks for 1 rank, but verify started another number" in text
