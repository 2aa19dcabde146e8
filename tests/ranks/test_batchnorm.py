"""`SyncBatchNorm`: any split of a batch over ranks gives what one process computes on the whole."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lockstep
from ddp_checks import backends, warnings_of_lockstep
from lockstep.errors import InputError, InputTypeError, ModelError
from lockstep.testing import run_ranks

# Sums over ranks are added in another order than in one process.
TOLERANCE = 1e-12
CHANNELS = 3


def split(sizes: list[int]) -> slice:
    """Where this rank's part lies, if rank r holds sizes[r] samples."""
    rank = dist.get_rank()
    return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))


def assert_close(ours: Tensor | None, expected: Tensor | None, what: str, tolerance: float = TOLERANCE) -> None:
    assert (ours is None) == (expected is None), what
    if ours is None or expected is None or not expected.numel():
        return
    assert (ours.shape, ours.dtype) == (expected.shape, expected.dtype), what
    scale = max(1.0, expected.abs().max().item())
    difference = (ours - expected).abs().max().item()
    assert difference <= tolerance * scale, f"{what}: off by {difference}"


def whole_batch(shape: list[int], offset: float = 0.0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * 3 + offset).to(dtype)


def randomized(layer: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return layer


def sum_over_ranks(tensor: Tensor) -> Tensor:
    total = tensor.detach().clone()
    dist.all_reduce(total)
    return total


def compare_with_whole(sizes: list[int], rest: list[int], offset: float = 0.0, **options: object) -> None:
    """Two steps in training mode, one in evaluation mode, against torch's layer on the concatenated batch."""
    kind = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[len(rest)]
    plain = randomized(kind(CHANNELS, dtype=torch.float64, **options))  # type: ignore[arg-type]
    ours = lockstep.convert_sync_batchnorm(copy.deepcopy(plain))
    part = split(sizes)
    # The mean is off by a unit in its last place, which is `offset` times as much of what remains without it.
    tolerance = TOLERANCE + 4 * offset * torch.finfo(torch.float64).eps
    for step in range(2):
        whole = whole_batch([sum(sizes), CHANNELS, *rest], offset + step).requires_grad_()
        upstream = torch.cos(torch.arange(whole.numel(), dtype=torch.float64)).view(whole.shape)
        expected = plain(whole)
        expected.backward(upstream)
        own = whole.detach()[part].clone().requires_grad_()
        output = ours(own)
        output.backward(upstream[part])
        assert_close(output, expected[part], "output", tolerance)
        assert whole.grad is not None
        # What cancels in the gradient grows with the offset.
        assert_close(own.grad, whole.grad[part], "gradient of the input", tolerance)
        for (name, mine), theirs in zip(ours.named_parameters(), plain.parameters(), strict=True):
            assert mine.grad is not None
            assert theirs.grad is not None
            assert_close(sum_over_ranks(mine.grad), theirs.grad, f"gradient of {name}", tolerance)
    for name, buffer in plain.named_buffers():
        assert_close(ours.get_buffer(name), buffer, name, tolerance)
    for layer in (ours, plain):
        layer.eval()
    own = whole_batch([2, CHANNELS, *rest]) + dist.get_rank()
    assert_close(ours(own), plain(own), "evaluation mode is local", tolerance)


def compare_splits(world_size: int) -> None:
    """Uneven and empty parts, all numbers of dimensions, all options."""
    uneven = [5, 2, 4][:world_size]
    for rest in ([], [6], [3, 4], [2, 3, 2]):
        compare_with_whole(uneven, rest)
    compare_with_whole(uneven, [4], momentum=None)
    compare_with_whole(uneven, [4], affine=False, momentum=0.3, eps=1e-2)
    compare_with_whole(uneven, [4], track_running_stats=False)
    if world_size > 1:
        compare_with_whole([4, 0, 0][:world_size], [2])
        compare_with_whole([0, 3, 1][:world_size], [])
        compare_with_whole([1, 1, 0][:world_size], [])
    # The variance is a hundred-billionth of the squared mean: sums of squares would leave nothing of it.
    compare_with_whole(uneven, [5], offset=1e6)


def all_empty() -> None:
    layer = randomized(lockstep.SyncBatchNorm(CHANNELS, dtype=torch.float64))
    inputs = torch.empty(0, CHANNELS, 4, dtype=torch.float64, requires_grad=True)
    output = layer(inputs)
    assert output.shape == inputs.shape
    output.sum().backward()
    assert inputs.grad is not None
    assert inputs.grad.shape == inputs.shape
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in layer.parameters())
    assert torch.equal(layer.running_var, torch.ones(CHANNELS, dtype=torch.float64))


def keep_fillers_out() -> None:
    """A rank that holds a filler gets the others' statistics and adds nothing to them."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sizes = [3, 2, 0][-world_size:]
    whole = whole_batch([sum(sizes), CHANNELS]).requires_grad_()
    plain = nn.BatchNorm1d(CHANNELS, dtype=torch.float64)
    expected = plain(whole)
    expected.square().sum().backward()
    layer = lockstep.SyncBatchNorm(CHANNELS, dtype=torch.float64)
    with lockstep.batch.hand.active(lockstep.batch.share.BatchShare(sizes[rank], sum(sizes), world_size)):
        own = (whole.detach()[split(sizes)] if sizes[rank] else torch.full((1, CHANNELS), 9.0).double()).clone()
        output = layer(own.requires_grad_())
        (output.square().sum() * (1.0 if sizes[rank] else 0.0)).backward()
    assert_close(layer.running_mean, plain.running_mean, "running mean")
    assert_close(layer.running_var, plain.running_var, "running variance")
    assert own.grad is not None
    assert whole.grad is not None
    if sizes[rank]:
        assert_close(output, expected[split(sizes)], "output")
        assert_close(own.grad, whole.grad[split(sizes)], "gradient")
    else:
        assert not own.grad.any()


def narrow_dtypes() -> None:
    """16-bit inputs: float32 statistics, and the output one rounding away from that of float64."""
    sizes = [6, 3, 4][: dist.get_world_size()]
    for dtype in (torch.float16, torch.bfloat16):
        for parameters in (torch.float32, dtype):
            whole = whole_batch([sum(sizes), CHANNELS, 5], 20.0, dtype)
            layer = lockstep.SyncBatchNorm(CHANNELS, dtype=parameters)
            own = whole[split(sizes)].clone().requires_grad_()
            output = layer(own)
            output.float().square().sum().backward()
            assert own.grad is not None
            assert output.dtype == own.grad.dtype == dtype
            assert layer.weight.grad is not None
            assert layer.weight.grad.dtype == parameters
            expected = nn.BatchNorm1d(CHANNELS, dtype=torch.float64)(whole.double())[split(sizes)]
            # |output| < 4, with half a unit in the last place of rounding, and float32's 20 * 2**-24 * 64 before it.
            assert (output.double() - expected).abs().max().item() <= 4 * torch.finfo(dtype).eps
            assert layer.running_mean.dtype == parameters


class Small(nn.Module):
    """Convolution, normalization and a head, on inputs that need no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, CHANNELS, 3, dtype=torch.float64)
        self.norm = nn.BatchNorm2d(CHANNELS, dtype=torch.float64)
        self.first = nn.BatchNorm2d(2, dtype=torch.float64)
        self.head = nn.Linear(CHANNELS * 9, 2, dtype=torch.float64)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.norm(self.convolution(self.first(images))).relu().flatten(1))


def train_in_engines(engine: str) -> None:
    """Three steps inside an engine are those of one process on the whole batch."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    plain = Small()
    wrap: Callable[[nn.Module], nn.Module] = (
        lockstep.DistributedDataParallel if engine == "lockstep" else nn.parallel.DistributedDataParallel
    )
    model = wrap(lockstep.convert_sync_batchnorm(copy.deepcopy(plain)))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (plain, model)]
    for step in range(3):
        images = whole_batch([4 * world_size, 2, 5, 5], float(step))
        targets = torch.arange(4 * world_size) % 2
        for each, optimizer, part in zip(
            (plain, model), optimizers, (slice(None), slice(4 * rank, 4 * rank + 4)), strict=True
        ):
            optimizer.zero_grad()
            nn.functional.cross_entropy(each(images[part]), targets[part]).backward()
            optimizer.step()
    trained = model.module.state_dict()
    for name, expected in plain.state_dict().items():
        assert_close(trained[name], expected, name, 1e-10)


def one_value_everywhere() -> None:
    layer = lockstep.SyncBatchNorm(CHANNELS)
    own = torch.ones(1 if dist.get_rank() == 0 else 0, CHANNELS)
    with pytest.raises(InputError, match="more than 1 value per channel"):
        layer(own)
    assert layer(torch.ones(2, CHANNELS)).shape == (2, CHANNELS), "the group continues working"


def in_a_subgroup() -> None:
    groups = [dist.new_group([0, 2]), dist.new_group([1])]
    rank = dist.get_rank()
    layer = lockstep.SyncBatchNorm(CHANNELS, process_group=groups[rank % 2], dtype=torch.float64)
    whole = whole_batch([6, CHANNELS])
    output = layer(whole[2 * rank : 2 * rank + 2])
    members = torch.cat([whole[:2], whole[4:]]) if rank != 1 else whole[2:4]
    expected = nn.BatchNorm1d(CHANNELS, dtype=torch.float64)(members)
    assert_close(output, expected[{0: slice(0, 2), 1: slice(0, 2), 2: slice(2, 4)}[rank]], "output")
    stranger = lockstep.SyncBatchNorm(CHANNELS, process_group=groups[1 - rank % 2])
    with pytest.raises(InputError, match="not a member"):
        stranger(torch.ones(2, CHANNELS))


def keep_fillers_out_of_a_subgroup(sizes: list[int]) -> None:
    """Two ranks of four share statistics, and the last batch leaves fillers to some."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    part = slice(rank // 2 * 2, rank // 2 * 2 + 2)
    members = whole_batch([sum(sizes), CHANNELS, 4])[sum(sizes[: part.start]) : sum(sizes[: part.stop])]
    plain, layer = nn.BatchNorm1d(CHANNELS).double(), nn.BatchNorm1d(CHANNELS).double()
    layer = lockstep.convert_sync_batchnorm(layer, groups[rank // 2])
    # What repeats through many layers stays finite: a gradient of zero times infinity would be nan.
    filler = torch.linspace(-9, 9, CHANNELS * 4).view(1, CHANNELS, 4).double()
    with lockstep.batch.hand.active(lockstep.batch.share.BatchShare(sizes[rank], sum(sizes), world_size)):
        own = members[split([0] * part.start + sizes[part])] if sizes[rank] else filler
        own = own.clone().requires_grad_()
        output = layer(own)
        (output.square() * torch.arange(4) * bool(sizes[rank])).sum().backward()
    assert own.grad is not None
    if not sizes[rank]:
        assert output.abs().max() < 10 if len(members) == 0 else output.isfinite().all()
        assert not own.grad.any()
    if len(members):
        members.requires_grad_()
        expected = plain(members)
        (expected.square() * torch.arange(4)).sum().backward()
        if sizes[rank]:
            assert_close(output, expected[split([0] * part.start + sizes[part])], "output")
            assert members.grad is not None
            assert_close(own.grad, members.grad[split([0] * part.start + sizes[part])], "gradient")
    assert_close(layer.running_mean, plain.running_mean, "running mean")
    assert_close(layer.running_var, plain.running_var, "running variance")


def told_when_wrapped() -> list[list[str]]:
    """What is said when each of these is wrapped."""
    norm = nn.BatchNorm1d(4)
    models = (
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False), nn.BatchNorm1d(4)),
        lockstep.convert_sync_batchnorm(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))),
        nn.Sequential(nn.Linear(4, 4), norm.eval()),
        nn.Sequential(nn.Linear(4, 4), nn.GroupNorm(2, 4), nn.LayerNorm(4)),
        nn.BatchNorm1d(4),
    )
    found = []
    for model in models:
        with warnings_of_lockstep() as told:
            for _ in range(2):
                lockstep.DistributedDataParallel(model)
        found.append(told)
    logging.getLogger("lockstep.parallel.batchnorm").setLevel("ERROR")
    with warnings_of_lockstep() as told:
        lockstep.DistributedDataParallel(nn.BatchNorm1d(4))
    logging.getLogger("lockstep.parallel.batchnorm").setLevel("NOTSET")
    return [*found, told]


class Beside(nn.Module):
    """Two layers, so that the first sees what the second hands back."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def forward(self, values: Tensor) -> Tensor:
        return self.net(values)


def through_a_critic(how: str) -> Tensor:
    """What a generator has learned through a critic, on batches of 5, 5 and 2: of the last, rank 2 of 3 gets a filler.

    Args:
        how: the critic is "trained" (its parameters get gradients, too), "frozen" in an engine, left out of the
            gradients by "inputs", in no engine ("bare"), or "teaching": in no engine, without a graph.
    """
    torch.manual_seed(0)
    generator = lockstep.DistributedDataParallel(nn.Linear(3, 6).double())
    critic: nn.Module = lockstep.convert_sync_batchnorm(Beside().double())
    if how in ("trained", "frozen", "inputs"):
        critic = lockstep.DistributedDataParallel(critic)
    critic.requires_grad_(how in ("trained", "inputs"))
    optimizer = torch.optim.SGD(generator.parameters(), lr=0.5)
    latents = torch.utils.data.TensorDataset(whole_batch([12, 3]))
    for (latent,) in lockstep.DataLoader(latents, batch_size=5):
        optimizer.zero_grad()
        made = generator(latent)
        with torch.set_grad_enabled(how != "teaching"):
            judged = critic(made if how != "teaching" else made.detach())
        loss = (judged.exp() + made.square()).mean() if how != "teaching" else (made - judged).square().mean()
        loss.backward(inputs=list(generator.parameters()) if how == "inputs" else None)
        optimizer.step()
    critic = getattr(critic, "module", critic)
    statistics = [critic.net[0].running_mean, critic.net[0].running_var, critic.net[3].running_var]
    return torch.cat([each.detach().flatten() for each in (*generator.parameters(), *statistics)])


def all_checks() -> None:
    compare_splits(dist.get_world_size())
    if dist.get_world_size() > 1:
        all_empty()
        keep_fillers_out()
        one_value_everywhere()
    narrow_dtypes()


@backends
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_any_split_gives_what_one_process_computes(backend: str, world_size: int) -> None:
    run_ranks(all_checks, world_size, backend=backend)


@pytest.mark.parametrize("engine", ["lockstep", "torch"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_inside_an_engine(engine: str, world_size: int) -> None:
    run_ranks(train_in_engines, world_size, engine)


def test_inside_an_engine_over_gloo() -> None:
    run_ranks(train_in_engines, 2, "lockstep", backend="gloo")


@pytest.mark.parametrize("how", ["trained", "frozen", "inputs", "bare", "teaching"])
def test_a_network_without_a_weight_of_its_own(how: str) -> None:
    """The gradient through it is that of one process, on batches that the ranks do not divide."""
    (expected,) = run_ranks(through_a_critic, 1, how)
    for world_size in (2, 3):
        for found in run_ranks(through_a_critic, world_size, how):
            assert_close(found, expected, f"{world_size} ranks")


def test_batchnorm_that_sees_one_rank_is_told_once() -> None:
    assert not any(run_ranks(told_when_wrapped, 1)[0]), "one process has one function"
    of_first, of_second = run_ranks(told_when_wrapped, 2)
    assert not any(of_second), "one rank speaks for all"
    (several,), *quiet, (alone,), silenced = of_first
    assert "BatchNorm in training mode (1 and 1 more) normalizes over each rank's own samples" in several
    assert "lockstep.convert_sync_batchnorm" in several
    assert "setLevel('ERROR')" in several
    assert "(BatchNorm1d)" in alone
    assert quiet == [[], [], []]
    assert silenced == []


def test_groups() -> None:
    run_ranks(in_a_subgroup, 3)


@pytest.mark.parametrize("sizes", [[1, 1, 1, 0], [2, 1, 0, 0]])
def test_fillers_count_in_no_group(sizes: list[int]) -> None:
    run_ranks(keep_fillers_out_of_a_subgroup, 4, sizes)


def test_without_a_process_group_it_is_batch_norm() -> None:
    layer, plain = lockstep.SyncBatchNorm(CHANNELS), nn.BatchNorm1d(CHANNELS)
    inputs = torch.randn(4, CHANNELS)
    assert torch.equal(layer(inputs), plain(inputs))
    assert torch.equal(layer.running_var, plain.running_var)


def test_state_dicts_are_torchs() -> None:
    theirs = nn.SyncBatchNorm(CHANNELS)
    theirs.running_mean.fill_(2.0)
    layer = lockstep.SyncBatchNorm(CHANNELS)
    layer.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(layer.state_dict())
    assert layer.running_mean.tolist() == [2.0] * CHANNELS
    assert repr(layer) == repr(theirs)


def test_conversion_keeps_everything() -> None:
    shared = nn.BatchNorm2d(4, eps=1e-3, momentum=None).half().eval()
    seen = []
    shared.register_forward_hook(lambda *_: seen.append(True))
    model = nn.Sequential(nn.Conv2d(2, 4, 1), shared, nn.Sequential(nn.InstanceNorm2d(4), shared), nn.SyncBatchNorm(4))
    weight = shared.weight
    converted = lockstep.SyncBatchNorm.convert_sync_batchnorm(model)
    assert converted is model
    assert isinstance(model[1], lockstep.SyncBatchNorm)
    assert model[1] is model[2][1]
    assert model[1].weight is weight
    assert model[1].running_mean.dtype == torch.float16
    assert (model[1].eps, model[1].momentum, model[1].training) == (1e-3, None, False)
    assert isinstance(model[2][0], nn.InstanceNorm2d)
    assert isinstance(model[3], lockstep.SyncBatchNorm)
    assert model[3].training
    model[1](torch.ones(1, 4, 2, 2).half())
    assert seen
    bare = lockstep.convert_sync_batchnorm(nn.BatchNorm1d(3, affine=False, track_running_stats=False))
    assert isinstance(bare, lockstep.SyncBatchNorm)
    assert not bare.state_dict()
    assert lockstep.SyncBatchNorm(3, bias=False).bias is None


class NormThenActivation(nn.BatchNorm2d):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs).relu()


def test_what_cannot_be_converted_is_named_and_nothing_changes() -> None:
    model = nn.Sequential(nn.BatchNorm2d(2), NormThenActivation(2))
    with pytest.raises(ModelError, match=r"'1' \(NormThenActivation\) overrides forward\(\)"):
        lockstep.convert_sync_batchnorm(model)
    assert type(model[0]) is nn.BatchNorm2d
    with pytest.raises(ModelError, match=r"'0' \(LazyBatchNorm1d\) is lazy"):
        lockstep.convert_sync_batchnorm(nn.Sequential(nn.LazyBatchNorm1d()))


@pytest.mark.parametrize("training", [True, False])
def test_traced_models_have_it_as_one_call(training: bool) -> None:
    """As torch's, and so in the mode of the model that was traced, and later of its own."""
    plain = Small().train(training)
    theirs = torch.fx.symbolic_trace(nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain)))
    model = lockstep.convert_sync_batchnorm(copy.deepcopy(plain))
    traced = torch.fx.symbolic_trace(model)
    assert [(node.op, node.target) for node in traced.graph.nodes] == [
        (node.op, node.target) for node in theirs.graph.nodes
    ]
    assert not model.norm.num_batches_tracked, "tracing leaves the model as it is"
    assert traced.norm is model.norm
    images = whole_batch([4, 2, 5, 5])
    for mode in (training, not training):
        assert torch.equal(traced.train(mode)(images), plain.train(mode)(images))
    for name, buffer in plain.named_buffers():
        assert torch.equal(traced.get_buffer(name), buffer)


def test_wrong_inputs() -> None:
    layer = lockstep.SyncBatchNorm(CHANNELS)
    with pytest.raises(InputError, match="at least 2 dimensions"):
        layer(torch.ones(CHANNELS))
    with pytest.raises(InputError, match=r"shape \(2, 4\), which has 4 channels"):
        layer(torch.ones(2, 4))
    with pytest.raises(InputTypeError, match="floating"):
        layer(torch.ones(2, CHANNELS, dtype=torch.int64))
