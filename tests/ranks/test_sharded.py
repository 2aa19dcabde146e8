"""`lockstep.ZeroRedundancyOptimizer`: the training of the plain optimizer, in shares."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lockstep import DistributedDataParallel, ZeroRedundancyOptimizer
from lockstep.testing import run_ranks

backends = pytest.mark.parametrize("backend", ["lockstep", "gloo"])
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3}),
    "fused sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "fused": True}),
    "adam": (torch.optim.Adam, {"lr": 1e-2}),
    "fused adamw": (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    "foreach adamw": (torch.optim.AdamW, {"lr": 1e-2, "foreach": True, "amsgrad": True}),
    "nadam": (torch.optim.NAdam, {"lr": 1e-2}),
    "radam": (torch.optim.RAdam, {"lr": 1e-2}),
    "adamax": (torch.optim.Adamax, {"lr": 1e-2}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-2, "centered": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-2, "initial_accumulator_value": 0.1}),
    "adadelta": (torch.optim.Adadelta, {}),
    "rprop": (torch.optim.Rprop, {}),
    "asgd": (torch.optim.ASGD, {}),
    "adafactor": (torch.optim.Adafactor, {"lr": 1e-2}),
}


def net() -> nn.Module:
    """Parameters of which some are cut and some are not, one of them with strides of its own."""
    torch.manual_seed(1)
    convolution = nn.Conv2d(1, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return nn.Sequential(convolution, nn.Flatten(), nn.Linear(144, 300), nn.Tanh(), nn.Linear(300, 7)).double()


def batch(seed: int, rows: int = 5) -> tuple[Tensor, Tensor]:
    """Others on each rank."""
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    inputs = torch.randn(rows, 1, 8, 8, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(7, (rows,), generator=generator)


def backward(model: nn.Module, seed: int) -> None:
    inputs, targets = batch(seed)
    nn.functional.cross_entropy(model(inputs), targets).backward()


def pair(kind: str, make: Callable[[], nn.Module] = net) -> tuple[Any, Any, Any, Any]:
    """A model with a sharded optimizer, and its twin with a plain one."""
    cls, options = OPTIMIZERS[kind]
    sharded, plain = DistributedDataParallel(make()), DistributedDataParallel(make())
    return (
        sharded,
        ZeroRedundancyOptimizer(sharded.parameters(), cls, **options),
        plain,
        cls(plain.parameters(), **options),
    )


def distance(one: nn.Module, other: nn.Module) -> float:
    """The greatest, relative to the values."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float(((a - b).abs().max() / b.abs().max()).detach()) for a, b in pairs)


def train_both(kind: str) -> float:
    sharded, optimizer, plain, plain_optimizer = pair(kind)
    for seed in range(4):
        for model, each in ((sharded, optimizer), (plain, plain_optimizer)):
            each.zero_grad()
            backward(model, seed)
            each.step()
    return distance(sharded, plain)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@backends
def test_the_training_of_adamw(backend: str, world_size: int) -> None:
    assert max(run_ranks(train_both, world_size, "fused adamw", backend=backend)) <= 1e-12


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_training_of(kind: str) -> None:
    assert max(run_ranks(train_both, 2, kind)) <= 1e-12


# ---- what loops do ---------------------------------------------------------------------------------------


def train_with_everything() -> tuple[float, bool]:
    """Groups, a schedule, accumulation, a group that comes later, a layer that is frozen at first."""
    distances = []
    models, optimizers, schedulers = [], [], []
    for is_sharded in (True, False):
        module = net()
        module[2].requires_grad_(False)
        model = DistributedDataParallel(module)
        first, last = list(module[0].parameters()), list(module[4].parameters())
        groups = [{"params": first, "lr": 0.01}, {"params": last, "weight_decay": 0.0}]
        options: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}
        make = ZeroRedundancyOptimizer if is_sharded else lambda groups, cls, **options: cls(groups, **options)
        optimizer = make(groups, torch.optim.AdamW, **options)  # type: ignore[operator]
        models.append(model)
        optimizers.append(optimizer)
        schedulers.append(torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.01, 0.03], total_steps=20))
    same_rates = True
    for step in range(6):
        for model, optimizer, scheduler in zip(models, optimizers, schedulers, strict=True):
            if step == 3:
                model.module[2].requires_grad_(True)
                optimizer.add_param_group({"params": model.module[2].parameters(), "lr": 0.005})
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            with model.no_sync():
                backward(model, 10 * step)
            backward(model, 10 * step + 1)
            if step == 4:  # averaged twice: the means add up
                backward(model, 10 * step + 2)
            optimizer.step()
            if step < 3:
                scheduler.step()
        distances.append(distance(*models))
        same_rates &= [each["lr"] for each in optimizers[0].param_groups] == [
            each["lr"] for each in optimizers[1].param_groups
        ]
    return max(distances), same_rates


@pytest.mark.parametrize("world_size", [1, 2, 3])
@backends
def test_groups_schedules_accumulation_and_unfreezing(backend: str, world_size: int) -> None:
    for far, same_rates in run_ranks(train_with_everything, world_size, backend=backend):
        assert far <= 1e-10
        assert same_rates


class Branches(nn.Module):
    """Of two branches a step takes one, or both; their last layer is one parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.left, self.right = nn.Linear(200, 200), nn.Linear(200, 200)
        self.last = nn.Linear(200, 200)
        self.tied = nn.Linear(200, 200)
        self.tied.weight = self.last.weight
        self.double()

    def forward(self, inputs: Tensor, which: str) -> Tensor:
        found = sum(getattr(self, name)(inputs) for name in which.split())
        return self.tied(self.last(found))  # type: ignore[no-any-return]


def train_branches() -> tuple[float, list[float]]:
    """Ranks take other branches; a parameter that nobody uses is not stepped, and its count of steps stays."""
    models = [DistributedDataParallel(Branches(), find_unused_parameters=True) for _ in range(2)]
    sharded = ZeroRedundancyOptimizer(models[0].parameters(), torch.optim.Adam, lr=0.01)
    plain = torch.optim.Adam(models[1].parameters(), lr=0.01)
    ways = [("left", "left"), ("right", "left"), ("left right", "right"), ("left", "left")]
    for seed, ranks in enumerate(ways):
        for model, optimizer in zip(models, (sharded, plain), strict=True):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
            inputs = torch.randn(3, 200, generator=generator, dtype=torch.float64)
            model(inputs, ranks[dist.get_rank() % 2]).square().mean().backward()
            optimizer.step()
    steps, expected = (
        [float(each["step"]) for _, each in sorted(optimizer.state_dict()["state"].items())]
        for optimizer in (sharded, plain)
    )
    assert steps == expected
    return distance(*models), steps


@backends
def test_unused_and_tied_parameters(backend: str) -> None:
    for far, steps in run_ranks(train_branches, 2, backend=backend):
        assert far <= 1e-10
        assert steps == [4, 4, 2, 2, 4, 4, 4]  # left, right, last, tied.bias


def train_two_optimizers() -> float:
    """Several over one engine, one of them plain; and one over two engines."""
    models = [DistributedDataParallel(net()) for _ in range(2)]
    heads = [DistributedDataParallel(nn.Linear(7, 7).double()) for _ in range(2)]
    heads[1].module.load_state_dict(heads[0].module.state_dict())
    kinds: list[Any] = []
    for model, head, is_sharded in zip(models, heads, (True, False), strict=True):
        parts = [model.module[0], nn.ModuleList([model.module[2], head.module])]
        groups = [[*part.parameters()] for part in parts]
        plain = torch.optim.SGD(model.module[4].parameters(), lr=0.1)
        if is_sharded:
            kinds.append(
                [
                    ZeroRedundancyOptimizer(groups[0], torch.optim.SGD, lr=0.1),
                    ZeroRedundancyOptimizer(groups[1], torch.optim.Adam, lr=0.01),
                    plain,
                ]
            )
        else:
            kinds.append([torch.optim.SGD(groups[0], lr=0.1), torch.optim.Adam(groups[1], lr=0.01), plain])
    for seed in range(3):
        for model, head, optimizers in zip(models, heads, kinds, strict=True):
            inputs, targets = batch(seed)
            nn.functional.cross_entropy(head(model(inputs)), targets).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return max(distance(*models), distance(*heads))


@backends
def test_several_optimizers_and_engines(backend: str) -> None:
    assert max(run_ranks(train_two_optimizers, 2, backend=backend)) <= 1e-12


def train_in_phases() -> float:
    """The model is wrapped anew, with a layer unfrozen and one replaced, while the first phase's engine is there."""
    found = []
    for is_sharded in (True, False):
        module = net()
        module[2].requires_grad_(False)
        model: Any = None
        optimizer: Any = None
        for phase in range(2):
            if phase:
                module[2].requires_grad_(True)
                torch.manual_seed(2)
                module[4] = nn.Linear(300, 7).double()
            model = DistributedDataParallel(module)
            own = [each for each in module.parameters() if each.requires_grad]
            if is_sharded:
                optimizer = ZeroRedundancyOptimizer(own, torch.optim.AdamW, lr=0.01)
            else:
                optimizer = torch.optim.AdamW(own, lr=0.01)
            for seed in range(2):
                optimizer.zero_grad()
                backward(model, seed)
                optimizer.step()
        found.append(module)
    return distance(*found)


@backends
def test_a_model_that_is_wrapped_anew(backend: str) -> None:
    assert max(run_ranks(train_in_phases, 2, backend=backend)) <= 1e-12


class Sign(torch.optim.Optimizer):
    """A user's class: of each element by itself."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    momentum = self.state[each].setdefault("momentum", torch.zeros_like(each))
                    momentum.mul_(0.9).add_(each.grad, alpha=0.1)
                    each.sub_(momentum.sign() * group["lr"])


class Trust(Sign):
    """A user's class that looks at whole parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    self.state[each]["ratio"] = ratio = each.norm() / (each.grad.norm() + 1e-8)
                    each.sub_(each.grad * ratio * group["lr"])


def train_users(kind: type[Sign], elementwise: bool | None) -> tuple[float, int]:
    models = [DistributedDataParallel(net()) for _ in range(2)]
    sharded = ZeroRedundancyOptimizer(models[0].parameters(), kind, elementwise=elementwise, lr=0.01)
    plain = kind(models[1].parameters(), lr=0.01)
    for seed in range(3):
        for model, optimizer in zip(models, (sharded, plain), strict=True):
            optimizer.zero_grad()
            backward(model, seed)
            optimizer.step(closure=lambda: None)
    return distance(*models), len(sharded.optim.state)


@backends
@pytest.mark.parametrize(("kind", "elementwise"), [(Sign, None), (Sign, True), (Trust, None)])
def test_classes_of_users(backend: str, kind: type[Sign], elementwise: bool | None) -> None:
    found = run_ranks(train_users, 2, kind, elementwise, backend=backend)
    assert max(far for far, _ in found) <= 1e-12
    # Whole parameters are on one rank or the other; of what is cut both have a part.
    assert (sum(count for _, count in found) == 6) is (elementwise is None)


class Eager(Sign):
    """A user's class that takes no groups, looks at the first parameter, and makes its state at once."""

    def __init__(self, params: Any, lr: float) -> None:
        parameters = list(params)
        self.is_matrix = parameters[0].dim() == 2
        super().__init__(parameters, lr)
        for each in self.param_groups[0]["params"]:
            self.state[each]["momentum"] = torch.zeros_like(each)


class EagerInGroups(Sign):
    """One that takes groups, and looks at the first parameter of each."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.dtypes = [group["params"][0].dtype for group in self.param_groups]


def train_few(kind: type[Sign]) -> tuple[float, int]:
    """Fewer parameters than ranks, so that some have none of them, or none of a group."""
    module = nn.Linear(64, 7).double()
    models = [DistributedDataParallel(each) for each in (module, copy.deepcopy(module))]
    optimizers: list[torch.optim.Optimizer] = []
    for model in models:
        given: Any = model.parameters()
        if kind is EagerInGroups:
            given = [{"params": [each]} for each in given]
        is_first = model is models[0]
        optimizers.append(ZeroRedundancyOptimizer(given, kind, lr=0.01) if is_first else kind(given, lr=0.01))
    for seed in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            inputs, targets = batch(seed)
            nn.functional.cross_entropy(model(inputs.flatten(1)), targets).backward()
            optimizer.step()
    return distance(*models), len(optimizers[0].state)


@backends
@pytest.mark.parametrize("kind", [Eager, EagerInGroups])
def test_classes_of_users_that_look_at_the_first_parameter(backend: str, kind: type[Sign]) -> None:
    found = run_ranks(train_few, 3, kind, backend=backend)
    assert max(far for far, _ in found) <= 1e-12
    assert sorted(count for _, count in found) == [0, 1, 1]


class Counting(torch.optim.Optimizer):
    """A user's class that counts its steps, in itself and in groups, keeps gradients, and decays what has none."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.num_steps += 1
        for group in self.param_groups:
            group["num_steps"] = group.get("num_steps", 0) + 1
            for each in group["params"]:
                if each.grad is None:
                    each.mul_(0.99)
                    continue
                earlier = self.state[each].get("earlier", each.grad)
                self.state[each]["earlier"] = each.grad
                each.sub_((2 * each.grad - earlier) / self.num_steps, alpha=group["lr"] / group["num_steps"])


def train_counting(elementwise: bool | None) -> tuple[float, int]:
    """More elements than a piece of torch's optimizers has, and parameters that a step leaves out."""
    models = []
    for _ in range(2):
        torch.manual_seed(3)
        layers = nn.ModuleDict({"a": nn.Linear(1200, 1200), "b": nn.Linear(1200, 1), "c": nn.Linear(1200, 1)})
        models.append(DistributedDataParallel(Chosen(layers.double()), find_unused_parameters=True))
    sharded = ZeroRedundancyOptimizer(models[0].parameters(), Counting, elementwise=elementwise, lr=0.1)
    plain = Counting(models[1].parameters(), lr=0.1)
    inputs = torch.randn(2, 1200, dtype=torch.float64, generator=torch.Generator().manual_seed(dist.get_rank()))
    for step in range(4):
        for model, optimizer in zip(models, (sharded, plain), strict=True):
            optimizer.zero_grad()
            model(inputs, "bc"[step % 2]).square().mean().backward()
            optimizer.step()
    return distance(*models), sharded.state_dict()["param_groups"][0]["num_steps"]


class Chosen(nn.Module):
    """Of two last layers a step takes one."""

    def __init__(self, layers: nn.ModuleDict) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, inputs: Tensor, last: str) -> Tensor:
        return self.layers[last](self.layers["a"](inputs))  # type: ignore[no-any-return]


@backends
@pytest.mark.parametrize("elementwise", [None, True])
def test_classes_of_users_step_once(backend: str, elementwise: bool | None) -> None:
    for far, num_steps in run_ranks(train_counting, 3, elementwise, backend=backend):
        assert far <= 1e-12
        assert num_steps == 4


def share_memory() -> tuple[int, bool, bool, bool]:
    """Parameters are once per host, and as good as any others for copies and files."""

    module = net()
    model = DistributedDataParallel(module)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)
    backward(model, 0)
    optimizer.step()
    twin = copy.deepcopy(module)
    is_apart = all(a.data_ptr() != b.data_ptr() for a, b in zip(twin.parameters(), module.parameters(), strict=True))
    average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    average.update_parameters(model)
    file = io.BytesIO()
    torch.save({"weight": module[2].weight.data}, file)
    state = sum(each.numel() for one in optimizer.optim.state.values() for each in one.values() if each.dim())
    twin.load_state_dict(module.state_dict())  # a copy, which nobody shares
    return state, is_apart, distance(average.module.module, module) == 0.0, len(file.getvalue()) < 8 * 144 * 300 + 4096


def test_memory_is_shared_and_state_is_not() -> None:
    found = run_ranks(share_memory, 2)
    numel = 2 * sum(each.numel() for each in net().parameters())
    assert sum(state for state, *_ in found) == numel
    assert max(state for state, *_ in found) < 0.6 * numel
    for _, is_apart, is_averaged, is_small in found:
        assert is_apart
        assert is_averaged
        assert is_small


def let_go() -> list[bool]:
    """Whether the memory of autograd's gradients is free after the backward pass."""
    model = DistributedDataParallel(net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)
    found: list[StorageWeakRef] = []
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: found.append(StorageWeakRef(gradient.untyped_storage())))
    backward(model, 0)
    are_free = [each.expired() for each in found]
    optimizer.step()
    return are_free


@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_are_not_kept_until_the_step(world_size: int) -> None:
    assert run_ranks(let_go, world_size) == [[True] * 6] * world_size


def same_bits() -> bool:
    """Those of torch's DDP over gloo, in float32."""
    gloo = dist.new_group(backend="gloo")
    torch.manual_seed(0)
    theirs = nn.parallel.DistributedDataParallel(net().float(), process_group=gloo)
    ours = DistributedDataParallel(net().float())
    sharded = ZeroRedundancyOptimizer(ours.parameters(), torch.optim.Adam, lr=0.01)
    plain = torch.optim.Adam(theirs.parameters(), lr=0.01)
    for seed in range(5):
        inputs, targets = batch(seed)
        for model, optimizer in ((ours, sharded), (theirs, plain)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs.float()), targets).backward()
            optimizer.step()
    return all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


@backends
def test_the_bits_of_torchs_ddp(backend: str) -> None:
    assert run_ranks(same_bits, 2, backend=backend) == [True, True]
