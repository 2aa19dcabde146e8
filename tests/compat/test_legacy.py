"""Names that torch had: the functions over several tensors of one process, on every group; and the rest in a script."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from warm_launcher import WarmLauncher

from launching import Launches
from lockstep.compat import legacy
from lockstep.compat.legacy.needs import CHANGES, SAID_AT_USE, find_needs, hint_for
from lockstep.errors import InputError, InputTypeError
from lockstep.testing import limit_s, run_ranks

NUM_DEVICES = 3


def value(rank: int, device: int, size: int = 2) -> torch.Tensor:
    """What device `device` of process `rank` holds: small whole numbers, whose sums are exact."""
    return torch.arange(size, dtype=torch.float32) + 10 * rank + 3 * device


def held(rank: int) -> list[torch.Tensor]:
    return [value(rank, device) for device in range(NUM_DEVICES)]


def everything(world_size: int) -> list[torch.Tensor]:
    return [tensor for rank in range(world_size) for tensor in held(rank)]


def as_lists(tensors: Any) -> Any:
    return tensors.tolist() if isinstance(tensors, torch.Tensor) else [as_lists(each) for each in tensors]


def call(run: Callable[..., Any], is_async: bool) -> None:
    handle = run(async_op=is_async)
    assert (handle is not None) is is_async
    if handle is not None:
        assert handle.wait() is True
        assert handle.is_completed()
        handle.wait()


def reductions(is_async: bool) -> dict[str, Any]:
    rank = dist.get_rank()
    found = {}
    for name in ("SUM", "MAX", "MIN", "PRODUCT", "AVG"):
        op = getattr(dist.ReduceOp, name)
        tensors = held(rank)
        call(lambda tensors=tensors, op=op, **how: legacy.all_reduce_multigpu(tensors, op, **how), is_async)
        found[name] = as_lists(tensors)
    tensors = held(rank)
    call(lambda **how: legacy.reduce_multigpu(tensors, dst=0, dst_tensor=2, **how), is_async)
    found["reduce"] = as_lists(tensors)
    return found


def movements(is_async: bool) -> dict[str, Any]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tensors = held(rank)
    call(lambda **how: legacy.broadcast_multigpu(tensors, src=world_size - 1, src_tensor=1, **how), is_async)
    gathered = [[torch.empty(2) for _ in range(world_size * NUM_DEVICES)] for _ in range(NUM_DEVICES)]
    call(lambda **how: legacy.all_gather_multigpu(gathered, held(rank), **how), is_async)
    outputs = [torch.empty(2) for _ in range(NUM_DEVICES)]
    inputs = [
        [value(rank, device) * (1 + number) for number in range(world_size * NUM_DEVICES)]
        for device in range(NUM_DEVICES)
    ]
    call(lambda **how: legacy.reduce_scatter_multigpu(outputs, inputs, **how), is_async)
    return {"broadcast": as_lists(tensors), "gathered": as_lists(gathered), "scattered": as_lists(outputs)}


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(("backend", "world_size"), [("lockstep", 1), ("lockstep", 3), ("gloo", 2)])
def test_each_device_counts_as_a_rank(backend: str, world_size: int, is_async: bool) -> None:
    stacked = torch.stack(everything(world_size))
    expected = {
        "SUM": stacked.sum(0),
        "MAX": stacked.amax(0),
        "MIN": stacked.amin(0),
        "PRODUCT": stacked.prod(0),
        "AVG": stacked.sum(0) / len(stacked),
    }
    for rank, found in enumerate(run_ranks(reductions, world_size, is_async, backend=backend)):
        for name, result in expected.items():
            assert found[name] == [result.tolist()] * NUM_DEVICES, name
        own = as_lists(held(rank))
        assert found["reduce"] == ([*own[:2], stacked.sum(0).tolist()] if rank == 0 else own)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("world_size", [1, 3])
def test_tensors_are_numbered_by_process_and_device(world_size: int, is_async: bool) -> None:
    stacked = torch.stack(everything(world_size))
    for rank, found in enumerate(run_ranks(movements, world_size, is_async)):
        assert found["broadcast"] == [value(world_size - 1, 1).tolist()] * NUM_DEVICES
        assert found["gathered"] == [stacked.tolist()] * NUM_DEVICES
        total = stacked.sum(0)
        places = [rank * NUM_DEVICES + device for device in range(NUM_DEVICES)]
        assert found["scattered"] == [(total * (1 + place)).tolist() for place in places]


def in_a_group() -> Any:
    group = dist.new_group([1])
    tensors = held(dist.get_rank())
    legacy.all_reduce_multigpu(tensors, group=group)
    handle = legacy.all_reduce_multigpu(held(dist.get_rank()), group=group, async_op=True)
    assert handle.wait()
    return as_lists(tensors)


def test_processes_outside_the_group_are_left_alone() -> None:
    outside, inside = run_ranks(in_a_group, 2)
    assert outside == as_lists(held(0))
    assert inside == [torch.stack(held(1)).sum(0).tolist()] * NUM_DEVICES


def refusals() -> list[str]:
    one, other = torch.ones(2), torch.ones(3)
    calls = [
        lambda: legacy.all_reduce_multigpu(one),
        lambda: legacy.all_reduce_multigpu([]),
        lambda: legacy.all_reduce_multigpu([one, other]),
        lambda: legacy.all_reduce_multigpu([one > 0, one]),
        lambda: legacy.broadcast_multigpu([one], 0, src_tensor=1),
        lambda: legacy.reduce_multigpu([one], 0, dst_tensor=-1),
        lambda: legacy.all_gather_multigpu([[one]], [one, one]),
        lambda: legacy.all_gather_multigpu([[one, one]], [one]),
        lambda: legacy.reduce_scatter_multigpu([one], [[other, one]]),
        lambda: legacy.reduce_scatter_multigpu([one], []),
    ]
    found = []
    for each in calls:
        with pytest.raises((InputError, InputTypeError)) as caught:
            each()
        found.append(str(caught.value))
    return found


def test_what_cannot_be_is_turned_away_before_anybody_waits() -> None:
    expected = [
        "must be a list of tensors",
        "must be a list of tensors",
        "the same shape and dtype, got (2,) torch.float32, (3,) torch.float32",
        "torch.bool",
        "src_tensor=1 is out of range",
        "dst_tensor=-1",
        "needs 2 lists",
        "needs 1 tensors",
        "the same shape and dtype",
        "needs 1 lists",
    ]
    (found,) = run_ranks(refusals, 1)
    assert all(words in text for words, text in zip(expected, found, strict=True)), found


@pytest.mark.usefixtures("forked")
def test_old_script_runs_unedited(launches: Launches) -> None:
    """Everything in the table of `lockstep.compat.legacy`, in one script, as such scripts said it."""
    script = launches.script(
        """
        import warnings
        warnings.simplefilter('ignore')
        import torch
        import torch.distributed as dist
        from torch._six import container_abcs, inf, int_classes, string_classes
        from torch.autograd import Variable
        from torch.utils.data import BatchSampler, DataLoader, Sampler
        from torch.utils.data.distributed import DistributedSampler
        import torch.distributed.deprecated as old_dist
        import torch.cuda.comm

        assert isinstance('x', string_classes) and inf > 1e9 and hasattr(container_abcs, 'Mapping')
        world = int(os.environ['WORLD_SIZE'])
        dist.init_process_group('tcp', init_method='file://meeting', world_size=world, rank=RANK, group_name='all')
        assert os.path.exists('meeting') or RANK, os.listdir('.')
        assert old_dist.get_rank() == RANK and dist.get_backend() == 'gloo'
        assert dist._backend == dist.dist_backend.GLOO and dist._backend != dist.dist_backend.NCCL
        torch.nn.parallel.deprecated.DistributedDataParallel(torch.nn.Linear(1, 1), broadcast_buffers=False)

        tensors = [torch.ones(1), torch.ones(1)]
        dist.all_reduce_multigpu(tensors, op=dist.reduce_op.SUM)
        old_dist.all_reduce(tensors[0], op=dist.reduce_op.MAX, group=dist.group.WORLD)
        print('sum', [each.item() for each in tensors])

        class Halves(Sampler):
            def __init__(self, data):
                super(Halves, self).__init__(data)
                self.data = data
            def __iter__(self):
                return iter(range(len(self.data) // 2))
            def __len__(self):
                return len(self.data) // 2

        data = list(range(16))
        sizes = [len(batch) for batch in DataLoader(data, batch_size=16 / float(world), shuffle=True)]
        halves = [len(batch) for batch in BatchSampler(Halves(data), 4.0, False)]
        print('batches', sizes, [len(b) for b in DataLoader(data, 8.0, sampler=Halves(data))], halves)
        for wrong in (lambda: DataLoader(data, batch_size=2.5), lambda: BatchSampler(data, 2.5, False)):
            try:
                wrong()
            except ValueError as error:
                print('refused', 'int(2.5)' in str(error))

        output, target = torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.2, 0.3]]), torch.tensor([1, 2])
        pred = output.topk(2, 1, True, True)[1].t()
        correct = pred.eq(target.view(1, -1).expand_as(pred))
        print('accuracy', [correct[:k].view(-1).float().sum(0).item() for k in (1, 2)])
        import argparse, numpy, pickle
        held = {'args': argparse.Namespace(lr=0.1, arch='resnet18'), 'best': numpy.float64(0.5), 'mean': numpy.ones(2)}
        held.update(count=numpy.int64(3), flag=numpy.bool_(True))
        torch.save(held, f'checkpoint-{RANK}.pth.tar')
        again = torch.load(f'checkpoint-{RANK}.pth.tar', map_location='cpu')
        assert again['args'].arch == 'resnet18' and again['best'] == 0.5 and again['mean'].sum() == 2 and again['flag']
        class Other: pass
        torch.save(Other(), f'other-{RANK}')
        try:
            torch.load(f'other-{RANK}')
        except pickle.UnpicklingError:
            print('refused True')
        v = Variable(torch.ones(2), volatile=True)
        optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0)
        schedulers = torch.optim.lr_scheduler
        schedulers.ReduceLROnPlateau(optimizer, 'min', patience=2, verbose=True).step(1.0)
        step = schedulers.StepLR(optimizer, 1, gamma=0.5, verbose=True)
        optimizer.step()
        step.step()
        assert optimizer.param_groups[0]['lr'] == 0.5
        dist.destroy_process_group()
        """
    )
    done = launches.run("--nproc=2", script)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    opening = f"[0] lockstep: {Path(script).name} is written for an older torch: "
    assert lines[0].startswith(f"{opening}torch._six is there (")
    assert all(line.startswith(opening) and line.endswith("; --no-compat leaves torch alone") for line in lines)
    made = [name for name, what in CHANGES.items() if sum(what in line for line in lines) == 1]
    assert not any(CHANGES[name] in lines[0] for name in SAID_AT_USE), "of which the text cannot tell"
    text = (launches.folder / script).read_text().splitlines()
    (load,) = (line for line in lines if CHANGES["load"] in line)
    number = next(number for number, line in enumerate(text, 1) if "again = torch.load(" in line)
    assert f"({Path(script).name}:{number})" in load
    assert set(CHANGES) - set(made) <= {"full", "reduce_op", "torch.cuda.comm", "sampler", "verbose"}, (
        "which --compat alone gives, or some releases of torch have again"
    )
    assert sorted(line.partition("] ")[2] for line in done.stdout.splitlines()) == sorted(
        [
            "sum [4.0, 4.0]",
            "batches [8, 8] [8] [4, 4]",
            "refused True",
            "refused True",
            "refused True",
            "accuracy [1.0, 2.0]",
        ]
        * 2
    )


# ---- what a script needs, by its text --------------------------------------------------------------

ACCURACY = """
    pred = output.topk(5)[1].t()
    correct = pred.eq(target.view(1, -1).expand_as(pred))
    print(correct[:1].view(-1).float().sum(0))
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("from torch._six import inf", ["torch._six"]),
        ("from torch import _six", ["torch._six"]),
        ("import torch\nprint(torch._six.string_classes)", ["torch._six"]),
        ("import torch.cuda.comm as comm", ["torch.cuda.comm"]),
        ("import torch.distributed.deprecated as dist", ["torch.distributed.deprecated"]),
        ("model = torch.nn.parallel.deprecated.DistributedDataParallel(model)", ["torch.nn.parallel.deprecated"]),
        ("import torch.distributed as dist\nslow = dist._backend == dist.dist_backend.GLOO", ["dist_backend"]),
        (
            "import torch.distributed as dist\ndist.all_reduce_multigpu([t], op=dist.reduce_op.SUM)",
            ["multigpu", "reduce_op"],
        ),
        ("from torch.distributed import broadcast_multigpu", ["multigpu"]),
        ("dist.init_process_group('tcp', rank=0)", ["init_process_group"]),
        ("p.add_argument('--dist-backend', default='tcp')", ["init_process_group"]),
        ("dist_backend = 'TCP'", ["init_process_group"]),
        ("url = 'file://meeting'", ["init_process_group"]),
        ("DataLoader(data, batch_size=args.batch_size / n)", ["batch_size"]),
        ("DataLoader(data, 64 / float(n))", ["batch_size"]),
        ("args.batch_size /= n", ["batch_size"]),
        ("bsz = total / float(dist.get_world_size())", ["batch_size"]),
        ("p.add_argument('-b', '--batch-size', type=float)", ["batch_size"]),
        ("class S(Sampler):\n    def __init__(self, d):\n        super(S, self).__init__(d)", ["sampler"]),
        ("class S(data.Sampler[int]):\n    def __init__(self, d):\n        Sampler.__init__(self, d)", ["sampler"]),
        (textwrap.dedent(ACCURACY), ["eq"]),
        ("n = pred.eq(target)[:5].view(-1).sum()", ["eq"]),
        ("scheduler = lr_scheduler.StepLR(optimizer, 30, verbose=True)", ["verbose"]),
        ("class W(_LRScheduler):\n    def __init__(self, o):\n        super().__init__(o, verbose=True)", ["verbose"]),
        ("torch.load('x', map_location='cpu')", ["load"]),
        # Today's spellings.
        ("try:\n    from torch._six import inf\nexcept ImportError:\n    from torch import inf", []),
        ("import torch.distributed as dist\ndist.all_reduce(t, op=dist.ReduceOp.SUM)\nself.reduce_op = 1", []),
        ("dist.init_process_group('gloo', init_method='file:///tmp/meeting')", []),
        ("protocol = 'tcp'\nsock.connect('tcp')", []),
        ("DataLoader(data, batch_size=int(args.batch_size / n))", []),
        ("args.batch_size = args.batch_size // n", []),
        ("lr = args.lr * args.batch_size / 256\nloss = total / batch_size", []),
        ("num_batches = len(data) / batch_size", []),
        ("class S(Sampler):\n    def __init__(self, d):\n        super().__init__()\n        self.d = d", []),
        ("correct = pred.eq(target.view(1, -1))\nprint(correct[:1].reshape(-1).sum())\nx = y.view(-1)", []),
        ("correct += pred.eq(target.view_as(pred)).sum().item()", []),
        ("train(model, verbose=True)\nStepLR(optimizer, 30)", []),
        ("torch.save({'args': args}, 'x')\ntorch.load('x', weights_only=False)", []),
        ("torch.save(model.state_dict(), 'x')", []),
        ("print 'of Python 2'", []),
    ],
)
def test_needs_are_read_from_the_text(tmp_path: Path, text: str, expected: list[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    assert list(find_needs(str(script))) == expected


def test_needs_of_modules_beside_the_script_and_of_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import utils, torch\ntorch.distributed.init_process_group(args.backend)")
    (tmp_path / "utils.py").write_text("\nfrom torch._six import inf")
    script = str(tmp_path / "train.py")
    assert find_needs(script) == {"torch._six": "utils.py:2"}
    for words in (["--backend", "tcp"], ["--backend=tcp"], ["--init", "file://meeting"]):
        assert find_needs(script, words=words) == {"torch._six": "utils.py:2", "init_process_group": "its arguments"}
    assert find_needs("train", is_module=True, path=[str(tmp_path)]) == {}, "utils is no part of an installed train"
    assert find_needs("no_such.py") == {}


TOUCHED = """
    import argparse, importlib.util
    import torch
    import torch.distributed as dist
    from torch.optim import lr_scheduler
    from torch.utils.data import BatchSampler, DataLoader, Sampler

    def ours(thing):
        return getattr(thing, '__wrapped__', thing) is not thing or 'lockstep' in getattr(thing, '__module__', '')

    schedulers = [each for each in vars(lr_scheduler).values() if isinstance(each, type)]
    found = dict(
        eq=type(torch.Tensor.eq).__name__ != 'method_descriptor',
        DataLoader=ours(DataLoader.__init__), BatchSampler=ours(BatchSampler.__init__),
        Sampler=Sampler.__init__ is not object.__init__,
        schedulers=any('verbose' in each.__init__.__code__.co_varnames for each in schedulers
                       if hasattr(each.__init__, '__code__')),
        six=importlib.util.find_spec('torch.' + '_six') is not None or hasattr(torch, '_' + 'six'),
        multigpu=hasattr(dist, 'all_reduce_' + 'multigpu'),
        load=ours(torch.load),
    )
    print(sorted(name for name, is_changed in found.items() if is_changed))
"""


@functools.cache
def torchs_own() -> frozenset[str]:
    """What of it this torch has by itself: older ones still have some."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(TOUCHED)], capture_output=True, text=True, timeout=limit_s(120)
    )
    assert done.returncode == 0, done.stderr
    return frozenset(ast.literal_eval(done.stdout))


def changes_seen(launches: Launches, *words: str, more: str = "", command: str = "run") -> tuple[list[str], str]:
    """What a script finds changed in torch, as a list, and what stands on stderr."""
    script = launches.script(textwrap.dedent(TOUCHED) + textwrap.dedent(more))
    done = launches.run(*words, script, command=command)
    assert done.returncode == 0, done.stderr
    found = set(ast.literal_eval(done.stdout.removeprefix("[0] ").strip()))
    assert found >= torchs_own()
    return sorted(found - torchs_own()), done.stderr


def test_modern_script_finds_torch_untouched(launches: Launches) -> None:
    """Each thing that any change would change is torch's own, and nothing is said."""
    assert changes_seen(launches, "--nproc", "1") == ([], "")


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("command", "words"),
    [("launch", ["--nproc_per_node=1", "--use_env"]), ("horovodrun", ["-np", "1", sys.executable])],
)
def test_other_launchers_do_likewise(launches: Launches, command: str, words: list[str]) -> None:
    assert changes_seen(launches, *words, command=command) == ([], "")
    found, said = changes_seen(launches, *words, more="dist.reduce_multigpu if False else None", command=command)
    assert found == ["multigpu"]
    assert "script.py is written for an older torch: torch.distributed has *_multigpu (script.py:" in said


def test_old_script_gets_what_it_needs_and_no_more(launches: Launches, warm: WarmLauncher) -> None:
    old = "def accuracy(output, target):\n" + textwrap.indent(textwrap.dedent(ACCURACY), "    ")
    found, said = changes_seen(launches, "--nproc", "1", more=old)
    assert found == ["eq"]
    (line,) = said.splitlines()
    assert line.startswith("[0] lockstep: script.py is written for an older torch: Tensor.eq ")
    assert line.endswith("; --no-compat leaves torch alone")
    launches.warm = warm
    assert changes_seen(launches, "--nproc", "1", "--no-compat", more=old) == ([], "")


ONLY_LOOKS_OLD = """
    import numpy, tempfile
    def pair(opt):
        torch.save({'opt': opt, 'rate': numpy.float64(0.5).item()}, 'both.pt')
        return torch.load('both.pt')
    pair(torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0).state_dict())
    dist.init_process_group('gloo', init_method='file://{}.{}'.format(tempfile.mktemp(), 1), rank=0, world_size=1)
    dist.destroy_process_group()
    batch_size = 8
    batch_size /= 2
    loader = DataLoader(range(8), batch_size=int(batch_size))
"""


@pytest.mark.usefixtures("forked")
def test_nothing_is_said_of_calls_that_torch_takes(launches: Launches) -> None:
    """An optimizer named `opt`, a whole path that is put together, a quotient that becomes a whole number."""
    assert changes_seen(launches, "--nproc", "1", more=ONLY_LOOKS_OLD)[1] == ""


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("way", ["path", "file"])
def test_checkpoints_that_hold_other_classes_are_refused_as_by_torch(launches: Launches, way: str) -> None:
    script = launches.script(
        f"""
        import argparse, io, pickle, torch
        def load(held, **options):
            place = 'x.pt' if {way!r} == 'path' else io.BytesIO()
            torch.save(held, place)
            if {way!r} == 'file':
                place.seek(0)
            return torch.load(place, **options)
        class Other: pass
        args = argparse.Namespace(lr=0.1)
        print(load(args).lr, load([args, args])[0].lr, load(args, weights_only=False).lr)
        for held, options in ((Other(), {{}}), ([args, Other()], {{}}), (args, {{'weights_only': True}})):
            try:
                load(held, **options)
            except pickle.UnpicklingError as error:
                print('Other' in str(error))
        assert argparse.Namespace not in torch.serialization.get_safe_globals()
        """
    )
    done = launches.run("--nproc", "1", script)
    assert (done.returncode, done.stdout.split()) == (
        0,
        ["[0]", "0.1", "0.1", "0.1", *["[0]", "True"] * 2, "[0]", "False"],
    )
    assert done.stderr.count("written for an older torch") == 1


@pytest.mark.usefixtures("forked")
def test_compat_changes_all_for_any_script(launches: Launches) -> None:
    found, said = changes_seen(launches, "--nproc", "1", "--compat")
    everything = ["BatchSampler", "DataLoader", "Sampler", "eq", "load", "multigpu", "schedulers", "six"]
    assert found == sorted(set(everything) - torchs_own())
    (line,) = said.splitlines()
    assert line.startswith("[0] lockstep: torch is changed for old scripts because of --compat: torch._six is there, ")


@pytest.mark.usefixtures("forked")
def test_processes_that_a_script_spawns_are_changed_as_it_is(launches: Launches) -> None:
    script = launches.script(
        """
        import multiprocessing

        def child(queue):
            from torch._six import inf
            import torch
            queue.put((inf, type(torch.Tensor.eq).__name__))

        if __name__ == '__main__':
            context = multiprocessing.get_context('spawn')
            queue = context.Queue()
            process = context.Process(target=child, args=(queue,))
            process.start()
            print(queue.get(timeout=60))
            process.join()
        """
    )
    done = launches.run("--nproc", "1", script)
    assert (done.returncode, done.stdout) == (0, "[0] (inf, 'method_descriptor')\n"), done.stderr


def test_script_without_a_launcher_is_read_by_itself(tmp_path: Path) -> None:
    text = "from torch._six import inf\nimport torch\nprint(inf, type(torch.Tensor.eq).__name__)"
    (tmp_path / "script.py").write_text(text)
    ways = {"script.py is written for": ["script.py"], "script is written for": ["-m", "script"]}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "lockstep.compat.script", *words],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for words in ways.values()
    ]
    try:
        for process, said in zip(started, ways, strict=True):
            out, err = process.communicate(timeout=limit_s(120))
            assert (process.returncode, out) == (0, "inf method_descriptor\n"), err
            assert err.startswith(f"lockstep: {said} an older torch: torch._six is there (script.py:1)")
    finally:
        for process in started:
            process.kill()
            process.communicate()


@pytest.mark.usefixtures("forked")
def test_failure_that_a_change_would_prevent_says_so(launches: Launches) -> None:
    """Where the text does not show what is needed."""
    script = launches.script("import importlib\nimportlib.import_module('torch._' + 'six')")
    done = launches.run("--nproc", "2", script)
    assert done.returncode == 1
    hints = [line for line in done.stderr.splitlines() if "--compat" in line]
    assert hints == ["[0] lockstep: older releases of torch allowed this; with `--compat`, torch._six is there"]
    assert launches.run("--nproc", "1", "--compat", script).returncode == 0


@pytest.mark.usefixtures("forked")
def test_torch_full_gives_floats_where_that_is_asked_for(launches: Launches) -> None:
    script = launches.script(
        """
        import torch
        label = 1
        print(torch.nn.BCELoss()(torch.ones(2), torch.full((2,), label)).item(), torch.full((2,), 1, dtype=int).dtype)
        print(torch.nn.functional.one_hot(torch.tensor([1])).dtype)
        """
    )
    done = launches.run("--nproc", "1", "--compat", script)
    assert (done.returncode, done.stdout.split()) == (0, ["[0]", "0.0", "torch.int64", "[0]", "torch.int64"])
    failed = launches.run("--nproc", "1", script)
    assert failed.returncode == 1
    assert "--compat" not in failed.stderr  # no error tells that its integers came from torch.full


def test_hints_know_what_torch_says() -> None:
    """Each error is raised by torch itself."""

    class Halves(torch.utils.data.Sampler):
        def __init__(self, data: Any) -> None:
            super().__init__(data)

    data = list(range(8))
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0)
    pred = torch.ones(3, 2, dtype=torch.int64).t()
    calls: list[tuple[str | None, Callable[[], Any]]] = [
        ("batch_size", lambda: torch.utils.data.DataLoader(data, batch_size=4.0)),
        ("sampler", lambda: Halves(data)),
        ("eq", lambda: pred.eq(pred)[:2].view(-1)),
        ("verbose", lambda: torch.optim.lr_scheduler.StepLR(optimizer, 1, verbose=True)),
        (None, lambda: torch.nn.BCELoss()(torch.rand(2), torch.full((2,), 1))),
        ("torch._six", lambda: __import__("torch._six")),
        ("torch.nn.parallel.deprecated", lambda: torch.nn.parallel.deprecated.DistributedDataParallel),
        ("torch.nn.parallel.deprecated", lambda: __import__("torch.nn.parallel.deprecated")),
        ("dist_backend", lambda: dist._backend),
        ("multigpu", lambda: dist.all_reduce_multigpu([torch.ones(1)])),
        (None, lambda: {}["missing"]),
        (None, lambda: torch.ones(2) @ torch.ones(3)),
    ]
    taken = {"sampler": "Sampler", "verbose": "schedulers"}
    for name, call_it in calls:
        if taken.get(name or "") in torchs_own():
            continue  # no error with this torch
        with pytest.raises(Exception) as caught:
            call_it()
        assert hint_for(caught.value) == name, caught.value
