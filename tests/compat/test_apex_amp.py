"""`apex.amp`: each opt level against the same training written out in plain PyTorch."""

from __future__ import annotations

import copy
import io
import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import lockstep
from apex_cases import Net, batches, clean_amp, make_net, make_sgd, same_parameters
from lockstep import errors, parallel
from lockstep.compat.apex import amp
from lockstep.compat.apex.amp._amp_state import AmpState
from lockstep.compat.apex.amp.scaler import LossScaler
from lockstep.compat.apex.fp16_utils import FP16_Optimizer
from lockstep.compat.apex.parallel import LARC

STEPS = 4
LEVELS = ("O0", "O1", "O2", "O3")


@pytest.fixture
def state() -> Iterator[AmpState]:
    with clean_amp() as clean:
        yield clean


def train_with_amp(model: Any, optimizer: Any, data: list[tuple[Tensor, Tensor]], **scale: Any) -> list[float]:
    losses = []
    for images, labels in data:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images), labels)
        with amp.scale_loss(loss, optimizer, **scale) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_plainly(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for images, labels in batches(STEPS):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# ---- opt levels -----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"loss_scale": 128.0}, {"loss_scale": "dynamic"}])
def test_o0_is_plain_pytorch_bit_for_bit(state: AmpState, options: dict[str, Any]) -> None:
    plain, model = make_net(), make_net()
    model, optimizer = amp.initialize(model, make_sgd(model), opt_level="O0", verbosity=0, **options)
    assert train_with_amp(model, optimizer, batches(STEPS)) == train_plainly(plain, make_sgd(plain))
    assert same_parameters(model, plain)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_o1_is_autocast_with_a_scaled_loss(state: AmpState, dtype: torch.dtype) -> None:
    plain, model = make_net(), make_net()
    optimizer, expected = make_sgd(plain), []
    for images, labels in batches(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = functional.cross_entropy(plain(images), labels)
        (loss * 2.0**16).backward()
        for parameter in plain.parameters():
            parameter.grad /= 2.0**16
        optimizer.step()
        expected.append(loss.item())
    chosen = None if dtype == torch.float16 else dtype
    model, ours = amp.initialize(model, make_sgd(model), opt_level="O1", patch_torch_functions=chosen, verbosity=0)
    assert train_with_amp(model, ours, batches(STEPS)) == expected
    assert same_parameters(model, plain)
    assert expected != train_plainly(make_net(), make_sgd(make_net()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_o2_is_a_16_bit_model_with_masters(state: AmpState, dtype: torch.dtype) -> None:
    plain, model = make_net(), make_net()
    plain.convolution.to(dtype)
    plain.head.to(dtype)
    parameters = list(plain.parameters())
    masters = [each.detach().float().requires_grad_() for each in parameters]
    optimizer = torch.optim.SGD(masters, lr=0.1, momentum=0.9, weight_decay=1e-3)
    expected = []
    for images, labels in batches(STEPS):
        loss = functional.cross_entropy(plain(images.to(dtype)).float(), labels)
        plain.zero_grad()
        (loss * 2.0**16).backward()
        for master, parameter in zip(masters, parameters, strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float() / 2.0**16
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, parameters, strict=True):
                parameter.copy_(master)
        expected.append(loss.item())
    model, ours = amp.initialize(model, make_sgd(model), opt_level="O2", cast_model_type=dtype, verbosity=0)
    assert train_with_amp(model, ours, batches(STEPS)) == expected
    assert model.head.weight.dtype == dtype
    assert model.norm.weight.dtype == model.norm.running_mean.dtype == torch.float32
    for master, parameter in zip(amp.master_params(ours), masters, strict=True):
        assert torch.equal(master, parameter)
    for parameter, twin in zip(model.parameters(), parameters, strict=True):
        assert torch.equal(parameter, twin)


def test_o3_is_all_16_bit(state: AmpState) -> None:
    plain, model = make_net().half(), make_net()
    optimizer, expected = make_sgd(plain), []
    for images, labels in batches(STEPS):
        optimizer.zero_grad()
        loss = functional.cross_entropy(plain(images.half()).float(), labels)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    model, ours = amp.initialize(model, make_sgd(model), opt_level="O3", verbosity=0)
    assert train_with_amp(model, ours, batches(STEPS)) == expected
    assert {each.dtype for each in model.parameters()} == {torch.float16}
    assert model.norm.running_mean.dtype == torch.float16


def test_overrides(state: AmpState) -> None:
    for given, kept in ((True, True), ("True", True), ("False", False), (False, False)):
        model, _ = amp.initialize(
            (net := make_net()), make_sgd(net), opt_level="O3", keep_batchnorm_fp32=given, verbosity=0
        )
        assert (model.norm.weight.dtype == torch.float32) == kept
        assert state.opt_properties is not None
        assert state.opt_properties.keep_batchnorm_fp32 is kept
    for given in (128, "128.0", 128.0):
        amp.initialize((net := make_net()), make_sgd(net), opt_level="O2", loss_scale=given, verbosity=0)
        assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 128.0, "unskipped": 0}}
    model, optimizer = amp.initialize(
        (net := make_net()), make_sgd(net), opt_level="O2", master_weights=False, loss_scale=8, verbosity=0
    )
    train_with_amp(model, optimizer, batches(1))
    assert {each.dtype for each in amp.master_params(optimizer)} == {torch.float16, torch.float32}
    model = amp.initialize(make_net(), opt_level="O2", cast_model_outputs=torch.bfloat16, verbosity=0)
    assert model(batches(1)[0][0]).dtype == torch.bfloat16
    model = amp.initialize(make_net(), opt_level="O1", cast_model_outputs=torch.float64, verbosity=0)
    assert model(batches(1)[0][0]).dtype == torch.float64
    model = amp.initialize(make_net(), opt_level="O2", cast_model_type=False, verbosity=0)
    assert model.head.weight.dtype == torch.float32


def test_what_does_not_go_together_is_refused(state: AmpState) -> None:
    net = make_net()

    def refused(error: type[Exception], match: str, models: Any = net, optimizers: Any = None, **options: Any) -> None:
        with pytest.raises(error, match=match):
            amp.initialize(models, optimizers, verbosity=0, **options)

    for level in ("02", "O4", 1):
        refused(RuntimeError, "letter O, not the number zero", opt_level=level)
    refused(RuntimeError, "O1 casts inputs of torch functions", cast_model_type=torch.float16)
    refused(RuntimeError, "keep_batchnorm_fp32 must stay None", keep_batchnorm_fp32=True)
    refused(RuntimeError, "so there are no master weights", master_weights=True)
    refused(RuntimeError, "for opt_level='O1', not O2", opt_level="O2", patch_torch_functions=True)
    refused(ValueError, "'True', 'False' or None, got 'yes'", opt_level="O2", keep_batchnorm_fp32="yes")
    refused(ValueError, "or 'dynamic', got 'large'", loss_scale="large")
    refused(ValueError, "cast_model_type must be", opt_level="O2", cast_model_type="half")
    refused(TypeError, "models must be .*, got dict", models={})
    refused(TypeError, "optimizers must be .*, got str", optimizers="sgd")
    refused(RuntimeError, "FP16_Optimizer already", optimizers=FP16_Optimizer(make_sgd(net)))
    refused(RuntimeError, "wrapped in DataParallel already", models=nn.DataParallel(net))
    refused(RuntimeError, r"parameter head.weight of the model is torch.float16", models=_with_half_head())
    optimizer = make_sgd(net)
    amp.initialize(net, optimizer, opt_level="O0", verbosity=0)
    refused(RuntimeError, "each once", optimizers=optimizer, opt_level="O0")
    state.hard_override = True
    amp.initialize(_with_half_head(), opt_level="O0", keep_batchnorm_fp32=True, verbosity=0)


def _with_half_head() -> Net:
    net = make_net()
    net.head.half()
    return net


def test_models_and_optimizers_come_back_as_they_went_in(state: AmpState) -> None:
    def pair() -> tuple[Net, torch.optim.SGD]:
        return (net := make_net()), make_sgd(net)

    (net, sgd), (net2, sgd2) = pair(), pair()
    for models, optimizers in ((net, sgd), ([net, net2], [sgd2])):
        came = amp.initialize(models, optimizers, opt_level="O0", verbosity=0)
        assert isinstance(came, tuple)
        assert came[0] is models
        assert came[1] is optimizers
    net, sgd = pair()
    assert amp.initialize(net, [sgd], opt_level="O0", verbosity=0) == (net, [sgd])
    assert amp.initialize([net], opt_level="O0", verbosity=0) == [net]
    assert amp.initialize(net, opt_level="O0", verbosity=0) is net
    assert amp.initialize(net, sgd, enabled=False) == (net, sgd)
    assert amp.initialize(net, enabled=False) is net


def test_not_enabled_is_as_if_amp_were_not_there(state: AmpState) -> None:
    plain, model = make_net(), make_net()
    model, optimizer = amp.initialize(model, make_sgd(model), opt_level="O2", enabled=False)
    assert train_with_amp(model, optimizer, batches(STEPS)) == train_plainly(plain, make_sgd(plain))
    assert amp.state_dict() == {}


# ---- loss scale -----------------------------------------------------------------------------------


def test_schedule_of_the_loss_scale() -> None:
    scaler = LossScaler("dynamic")
    assert scaler.loss_scale() == 2.0**16
    for _ in range(1999):
        assert not scaler.update_scale()
    assert (scaler.loss_scale(), scaler._unskipped) == (2.0**16, 1999)
    scaler.update_scale()
    assert (scaler.loss_scale(), scaler._unskipped) == (2.0**17, 0)
    for _ in range(2000 * 10):
        scaler.update_scale()
    assert scaler.loss_scale() == 2.0**24
    floor = LossScaler("dynamic", min_loss_scale=2.0**15, max_loss_scale=2.0**16)
    for expected in (2.0**15, 2.0**15):
        floor.unscale([torch.tensor([float("nan")])])
        assert floor.update_scale()
        assert floor._has_overflow
        floor.clear_overflow_state()
        assert not floor._has_overflow
        assert floor.loss_scale() == expected


@pytest.mark.parametrize("default", [torch.float32, torch.float64])
def test_a_fixed_scale_skips_no_step(default: torch.dtype) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        fixed = LossScaler(4.0)
        (same,) = fixed.unscale([torch.tensor([float("inf"), 8.0])])
    finally:
        torch.set_default_dtype(before)
    assert same.tolist() == [float("inf"), 2.0]
    assert not fixed.update_scale()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_skips_the_step_and_halves_the_scale(
    state: AmpState, level: str, capsys: pytest.CaptureFixture[str]
) -> None:
    net = make_net()
    sgd = make_sgd(net)
    schedulers = [torch.optim.lr_scheduler.StepLR(sgd, 1)]
    model, optimizer = amp.initialize(net, sgd, opt_level=level, verbosity=0)
    state.verbosity = 1
    schedulers.append(torch.optim.lr_scheduler.StepLR(optimizer, 1))
    (first, second) = batches(2)
    loss = functional.cross_entropy(model(first[0]), first[1])
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        (scaled_loss * float("inf")).backward()
    assert state.loss_scalers[0]._has_overflow, "which scripts read"
    before = copy.deepcopy(model.state_dict())
    optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for scheduler in schedulers:  # torch warns of those that step before optimizers, or whose optimizer changed
            scheduler.step()
    printed = "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0\n"
    assert capsys.readouterr().out == printed
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 32768.0, "unskipped": 0}}
    train_with_amp(model, optimizer, [second])
    assert not state.loss_scalers[0]._has_overflow
    assert not same_parameters(model, net) or not torch.equal(before["head.weight"], model.state_dict()["head.weight"])
    assert amp.state_dict()["loss_scaler0"]["unskipped"] == 1
    with amp.scale_loss(functional.cross_entropy(model(first[0]), first[1]), optimizer) as scaled_loss:
        (scaled_loss * float("nan")).backward()
    with pytest.raises(RuntimeError, match="closure"):
        optimizer.step(lambda: 0.0)


class Product(nn.Module):
    """A float32 and a float16 parameter, each with an exact gradient."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.wide = nn.Parameter(start + torch.arange(2.0))
        self.narrow = nn.Parameter((1.0 + start + torch.arange(2.0)).half())

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs * self.wide.float() * self.narrow.float()).sum()


# Which models each loss adds up, and which each optimizer trains.
LAYOUTS = [
    (((0,), (1,)), ((0, 1),)),
    (((0, 2), (1, 2)), ((0, 1, 2),)),
    (((0,), (1,)), ((0,), (1,))),
    (((0, 1), (2, 1)), ((0, 1), (2,))),
]


def _optimizers_of(models: list[Product], layout: Any) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.SGD([{"params": models[i].parameters(), "lr": 0.25 / (i + 1)} for i in members], momentum=0.125)
        for members in layout
    ]


def _reaching(loss: int, layout: Any) -> list[int]:
    """Optimizers of which a parameter is in a loss."""
    return [index for index, members in enumerate(layout[1]) if set(members) & set(layout[0][loss])]


def _train_products(layout: Any, zero: str, bad: tuple[int, int] | None, steps: int, **options: Any) -> list[Tensor]:
    """Parameters after some steps. In step bad[0] the gradients of loss bad[1] overflow. Without options: no Amp."""
    models = [Product(start) for start in (1.0, 2.0, 3.0)]
    optimizers: Any = _optimizers_of(models, layout[1])
    if options:
        models, optimizers = amp.initialize(models, optimizers, cast_model_type=False, verbosity=0, **options)
        for index, scaler in enumerate(amp._amp_state.loss_scalers):
            scaler._loss_scale = 4.0 * (3 * index + 1) if scaler.dynamic else scaler._loss_scale
    for step in range(steps):
        for each in models if zero == "model" else optimizers:
            each.zero_grad()
        losses = [sum(models[i](torch.ones(2)) for i in members) for members in layout[0]]
        for index, loss in enumerate(losses):
            if not options:
                loss.backward()  # type: ignore[union-attr]
                continue
            reached = [optimizers[i] for i in _reaching(index, layout)]
            with amp.scale_loss(loss, reached, loss_id=index % options["num_losses"]) as scaled_loss:
                scaled_loss.backward()
                if bad == (step, index):
                    kind = "narrow" if index else "wide"
                    getattr(models[layout[0][index][0]], kind).grad[0] = float("inf")
        skipped = _reaching(bad[1], layout) if bad is not None and bad[0] == step else []
        for index, optimizer in enumerate(optimizers):
            if options or index not in skipped:
                optimizer.step()
    return [each.detach().clone() for model in models for each in model.parameters()]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_several_models_losses_and_optimizers(state: AmpState, layout: Any) -> None:
    state.allow_incoming_model_not_fp32 = True
    for level, zero, num_losses in itertools.product(LEVELS, ("model", "optimizer"), (1, 2)):
        injected = [None, (0, 0), (0, 1), (1, 0), (1, 1)] if level in ("O1", "O2") else [None]
        for bad in injected:
            steps = 2 if bad is None else 3
            expected = _train_products(layout, zero, bad, steps)
            came = _train_products(layout, zero, bad, steps, opt_level=level, num_losses=num_losses)
            if state.handle is not None:
                state.handle._deactivate()
            for index, (ours, theirs) in enumerate(zip(came, expected, strict=True)):
                # Masters keep what 16 bits lose in every step of the plain optimizer.
                torch.testing.assert_close(ours, theirs, rtol=2e-3 if index % 2 else 1e-3, atol=0.0)


def test_scales_of_several_losses_move_apart(state: AmpState) -> None:
    model, optimizer = amp.initialize((net := make_net()), make_sgd(net), opt_level="O2", num_losses=3, verbosity=0)
    for step in range(2):
        optimizer.zero_grad()
        for index in range(3):
            images, labels = batches(1, seed=index)[0]
            loss = functional.cross_entropy(model(images), labels)
            with amp.scale_loss(loss, optimizer, loss_id=index) as scaled_loss:
                (scaled_loss * (float("inf") if step < index else 1.0)).backward()
        optimizer.step()
    assert list(amp.state_dict().values()) == [
        {"loss_scale": 2.0 ** (16 - index), "unskipped": 2 - index} for index in range(3)
    ]
    with pytest.raises(errors.LockstepError, match=r"loss_id=3: .* num_losses=3"), amp.scale_loss(loss, optimizer, 3):
        pass


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("delay", [False, True])
def test_accumulation(state: AmpState, level: str, delay: bool) -> None:
    """Half batches added up are the whole batch; exact in float32, to half precision elsewhere."""
    plain, model = nn.Linear(4, 3), nn.Linear(4, 3)
    model.load_state_dict(plain.state_dict())
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    sgd = torch.optim.SGD(plain.parameters(), lr=0.5)
    for _ in range(2):
        plain(inputs[:4]).square().mean().backward()
        plain(inputs[4:]).square().mean().backward()
        sgd.step()
        sgd.zero_grad()
    model, optimizer = amp.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.5), opt_level=level, loss_scale=64.0, verbosity=0
    )
    for _ in range(2):
        for part, late in ((inputs[:4], delay), (inputs[4:], False)):
            with amp.scale_loss(model(part).square().mean(), optimizer, delay_unscale=late) as scaled_loss:
                scaled_loss.backward()
        optimizer.step()
        model.zero_grad()
    tolerance = {"O0": 1e-6}.get(level, 5e-3)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.float(), theirs, rtol=tolerance, atol=tolerance)


def test_clipping_sees_unscaled_gradients(state: AmpState) -> None:
    model, optimizer = amp.initialize((net := make_net()), make_sgd(net), opt_level="O2", verbosity=0)
    images, labels = batches(1)[0]
    with amp.scale_loss(functional.cross_entropy(model(images), labels), optimizer) as scaled_loss:
        scaled_loss.backward()
    plain = make_net()
    functional.cross_entropy(plain(images), labels).backward()
    norm = nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.01)
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    torch.testing.assert_close(norm, expected, rtol=1e-2, atol=0.0)


def test_sparse_gradients(state: AmpState) -> None:
    table, plain = nn.Embedding(4, 2, sparse=True), nn.Embedding(4, 2, sparse=True)
    plain.load_state_dict(table.state_dict())
    table, optimizer = amp.initialize(table, torch.optim.SGD(table.parameters(), lr=1.0), opt_level="O1", verbosity=0)
    sgd = torch.optim.SGD(plain.parameters(), lr=1.0)
    for rows in (torch.tensor([1, 1, 3]), torch.tensor([0, 3])):
        plain(rows).square().sum().backward()
        with amp.scale_loss(table(rows).square().sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
    sgd.step()
    optimizer.step()
    torch.testing.assert_close(table.weight, plain.weight)


# ---- optimizers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_groups_added_later(state: AmpState, level: str) -> None:
    state.allow_incoming_model_not_fp32 = True

    def train(with_amp: bool) -> list[Tensor]:
        models: Any = [Product(1.0), Product(2.0)]
        optimizer: Any = torch.optim.SGD(models[0].parameters(), lr=0.25, momentum=0.125)
        if with_amp:
            models, optimizer = amp.initialize(models, optimizer, opt_level=level, cast_model_type=False, verbosity=0)
            if state.loss_scalers[0].dynamic:
                state.loss_scalers[0]._loss_scale = 4.0
        for step in range(3):
            if step == 1:
                optimizer.add_param_group({"params": models[1].parameters(), "lr": 0.125})
            optimizer.zero_grad()
            loss = models[0](torch.ones(2)) + models[1](torch.ones(2))
            if with_amp:
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
            else:
                loss.backward()
            optimizer.step()
        return [each.detach().clone() for model in models for each in model.parameters()]

    for ours, theirs in zip(train(True), train(False), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=4e-3, atol=0.0)


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.SGD])
def test_resume_with_masters_is_bit_for_bit(state: AmpState, make: Any) -> None:
    """Model, optimizer and Amp saved after two steps and loaded continue as if nothing had been."""
    options = {"lr": 0.01} | ({"momentum": 0.9} if make is torch.optim.SGD else {})
    data = batches(4)
    model, optimizer = amp.initialize(
        (net := make_net()), make(net.parameters(), **options), opt_level="O2", verbosity=0
    )
    model.norm.running_mean += 1
    train_with_amp(model, optimizer, data[:2])
    # 16-bit parameters round in a checkpoint taken from the model; so compare with a run that does as well.
    saved = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}, saved)
    assert {value.dtype for value in model.state_dict().values()} == {torch.float32, torch.int64}
    for master, parameter in zip(amp.master_params(optimizer), model.parameters(), strict=True):
        master.data.copy_(parameter)
    expected = train_with_amp(model, optimizer, data[2:])
    saved.seek(0)
    loaded = torch.load(saved, weights_only=True)
    other, resumed = amp.initialize(
        (net := make_net(9)), make(net.parameters(), **options), opt_level="O2", verbosity=0
    )
    other.load_state_dict(loaded["model"])
    resumed.load_state_dict(loaded["optimizer"])
    amp.load_state_dict(loaded["amp"])
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 2}}
    assert train_with_amp(other, resumed, data[2:]) == expected
    assert same_parameters(other, model)


def test_masters_made_by_hand_before_a_checkpoint_is_loaded(state: AmpState) -> None:
    """As NVIDIA's BERT does it: masters, then the optimizer's state, then the masters' own values."""
    model, optimizer = amp.initialize((net := make_net()), make_sgd(net), opt_level="O2", verbosity=0)
    train_with_amp(model, optimizer, batches(2))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), list(amp.master_params(optimizer))))
    expected = train_with_amp(model, optimizer, batches(2, seed=5))
    other, resumed = amp.initialize((net := make_net(9)), make_sgd(net), opt_level="O2", verbosity=0)
    resumed._lazy_init_maybe_master_weights()
    resumed._amp_stash.lazy_init_called = True
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    for master, value in zip(amp.master_params(resumed), saved[2], strict=True):
        master.data.copy_(value.data)
    assert train_with_amp(other, resumed, batches(2, seed=5)) == expected


def test_state_of_another_number_of_losses(state: AmpState, capsys: pytest.CaptureFixture[str]) -> None:
    amp.initialize(make_net(), opt_level="O1", num_losses=2, verbosity=0)
    state.verbosity = 1
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0, "unskipped": 7}})
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 2.0, "unskipped": 7}
    assert amp.state_dict()["loss_scaler1"]["loss_scale"] == 65536.0
    assert "state_dict contains 1 entries, while 2 loss_scalers are used" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match=r"unexpected key.*'scaler'"):
        amp.load_state_dict({"scaler": {}})


@pytest.mark.parametrize("level", LEVELS)
def test_larc(state: AmpState, level: str) -> None:
    model, optimizer = amp.initialize((net := make_net()), LARC(make_sgd(net)), opt_level=level, verbosity=0)
    losses = train_with_amp(model, optimizer, batches(1) * 4)
    assert losses[-1] < losses[0]


def test_what_is_missing_is_said(state: AmpState) -> None:
    net = make_net()
    loss = net(batches(1)[0][0]).sum()
    with pytest.raises(RuntimeError, match=r"before amp\.initialize"), amp.scale_loss(loss, make_sgd(net)):
        pass
    amp.initialize(net, opt_level="O1", verbosity=0)
    with pytest.raises(RuntimeError, match="this SGD was not passed to"), amp.scale_loss(loss, make_sgd(net)):
        pass


# ---- models ---------------------------------------------------------------------------------------


def test_copies_and_pickles_of_a_cast_model_run_themselves(state: AmpState) -> None:
    model = amp.initialize(make_net(), opt_level="O2", verbosity=0).eval()
    images = batches(1)[0][0]
    expected = model(images)
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    for other in (copy.deepcopy(model), torch.load(saved, weights_only=False)):
        assert torch.equal(other(images), expected)
        assert torch.equal(other.forward(images), expected)
        with torch.no_grad():
            other.head.bias += 1
        assert not torch.equal(other(images), expected)
    assert torch.equal(model(images), expected)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_replicas_of_a_cast_model_run_themselves(state: AmpState, level: str) -> None:
    """Inside `DataParallel` the gradients are those of the model alone on the whole batch."""
    images, labels = batches(1)[0]
    gradients = []
    for wrap in (lambda model: model, lambda model: lockstep.DataParallel(model, ["cpu:0", "cpu:1"])):
        model, optimizer = amp.initialize((net := make_net().eval()), make_sgd(net), opt_level=level, verbosity=0)
        with amp.scale_loss(functional.cross_entropy(wrap(model)(images), labels), optimizer) as scaled_loss:
            scaled_loss.backward()
        gradients.append([each.grad for each in amp.master_params(optimizer)])
    for ours, theirs in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=5e-3, atol=1e-3)
    with torch.no_grad():
        expected = model(images)
        for replica in parallel.replicate(model, ["cpu:0", "cpu:1"]):
            assert torch.equal(replica(images), expected)
            replica.head.bias = replica.head.bias + 1
            assert not torch.equal(replica(images), expected)
            assert torch.equal(model(images), expected)


class Nested(nn.Linear):
    def forward(self, inputs: dict[str, Any]) -> dict[str, Any]:
        assert inputs["pair"][0].dtype == torch.float16
        assert inputs["index"].dtype == torch.int64
        return {"output": super().forward(inputs["pair"][0]), "name": inputs["name"]}


def test_inputs_and_outputs_are_cast_inside_containers(state: AmpState) -> None:
    model = amp.initialize(Nested(2, 2), opt_level="O3", verbosity=0)
    inputs = {"pair": (torch.ones(1, 2), None), "index": torch.tensor([1]), "name": "x"}
    output = model(inputs)
    assert (output["output"].dtype, output["name"]) == (torch.float32, "x")
    assert inputs["pair"][0].dtype == torch.float32, "the caller's own is left alone"


def test_verbosity(state: AmpState, capsys: pytest.CaptureFixture[str]) -> None:
    amp.initialize(make_net(), opt_level="O0", verbosity=0)
    assert capsys.readouterr().out == ""
    amp.initialize(make_net(), opt_level="O2", loss_scale=2)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Selected optimization level O2")
    assert f"{'loss_scale':22} : 2.0" in lines
    assert f"{'cast_model_type':22} : torch.float16" in lines
