"""`apex.fp16_utils`, `apex.optimizers` and `apex.normalization`: against the same written out in plain PyTorch."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from apex_cases import batches, make_net, make_sgd
from lockstep.compat.apex import fp16_utils, normalization, optimizers
from lockstep.compat.apex.fp16_utils import DynamicLossScaler, FP16_Optimizer, LossScaler
from lockstep.compat.apex.multi_tensor_apply import multi_tensor_applier
from lockstep.compat.apex.parallel import LARC

STEPS = 3


def half_net() -> nn.Module:
    return fp16_utils.network_to_half(make_net())


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]).float(), batch[1])


# ---- by hand --------------------------------------------------------------------------------------


@pytest.mark.parametrize("flat", [False, True])
def test_masters_by_hand(flat: bool) -> None:
    """Training as Apex's examples write it, with one flat master or one for each parameter."""
    model = fp16_utils.FP16_Module(nn.Linear(4, 3))
    parameters, masters = fp16_utils.prep_param_lists(model, flat_master=flat)
    assert len(masters) == (1 if flat else 2)
    assert {each.dtype for each in masters} == {torch.float32}
    optimizer = torch.optim.SGD(masters, lr=0.5, momentum=0.9)
    twin = [each.detach().float().requires_grad_() for each in parameters]
    plain = torch.optim.SGD(twin, lr=0.5, momentum=0.9)
    for step in range(STEPS):
        inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
        model.zero_grad()
        output = model(inputs)
        assert output.dtype == torch.float32
        (output.square().mean() * 128).backward()
        fp16_utils.model_grads_to_master_grads(parameters, masters, flat_master=flat)
        for each in masters:
            assert each.grad is not None
            each.grad.div_(128)
        for each, parameter in zip(twin, parameters, strict=True):
            assert parameter.grad is not None
            each.grad = parameter.grad.float() / 128
        norms = [fp16_utils.clip_grad_norm(each, 0.1) for each in (masters, twin)]
        torch.testing.assert_close(norms[0], norms[1])
        optimizer.step()
        plain.step()
        fp16_utils.master_params_to_model_params(parameters, masters, flat_master=flat)
        for each, parameter in zip(twin, parameters, strict=True):
            assert torch.equal(each.half(), parameter)


def test_gradients_that_are_missing() -> None:
    parameters, masters = fp16_utils.prep_param_lists(nn.Linear(2, 1).half())
    masters[0].grad = torch.ones_like(masters[0])
    fp16_utils.model_grads_to_master_grads(parameters, masters)
    assert masters[0].grad is None
    mixed = nn.Sequential(nn.Linear(2, 2).half(), nn.Linear(2, 2))
    with pytest.raises(TypeError, match="the same dtype"):
        fp16_utils.prep_param_lists(mixed, flat_master=True)


def test_conversions() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3, affine=False), nn.LSTM(2, 2))
    fp16_utils.convert_network(model, torch.float16)
    dtypes = [next(iter([*each.parameters(), *each.buffers()])).dtype for each in model]
    assert dtypes == [torch.float32, torch.float16, torch.float16, torch.float16]
    assert model[2].num_batches_tracked.dtype == torch.int64
    layer = nn.Linear(1, 1)
    layer.weight.grad = torch.ones(1, 1)
    fp16_utils.convert_module(layer, torch.bfloat16)
    assert layer.weight.dtype == layer.weight.grad.dtype == torch.bfloat16
    assert fp16_utils.FP16Model(make_net())(batches(1)[0][0]).dtype == torch.float16
    pair = (torch.ones(1), [torch.ones(1).double(), 3])
    halves = fp16_utils.fp32_to_fp16(pair)
    assert (halves[0].dtype, halves[1][0].dtype, halves[1][1]) == (torch.float16, torch.float64, 3)
    assert fp16_utils.fp16_to_fp32(halves)[0].dtype == torch.float32
    assert fp16_utils.tofp16()(torch.ones(1)).dtype == torch.float16
    assert fp16_utils.to_python_float(torch.tensor(2.0)) == fp16_utils.to_python_float([2.0]) == 2.0


# ---- FP16_Optimizer -------------------------------------------------------------------------------


def test_optimizer_with_masters() -> None:
    model, twin = half_net(), half_net()
    ours = FP16_Optimizer(make_sgd(model), static_loss_scale=128.0)
    parameters, masters = fp16_utils.prep_param_lists(twin)
    plain = torch.optim.SGD(masters, lr=0.1, momentum=0.9, weight_decay=1e-3)
    for batch in batches(STEPS):
        ours.zero_grad()
        loss = loss_of(model, batch)
        ours.backward(loss)
        ours.clip_master_grads(0.5)
        ours.step()
        twin.zero_grad()
        expected = loss_of(twin, batch)
        (expected * 128).backward()
        fp16_utils.model_grads_to_master_grads(parameters, masters)
        for each in masters:
            assert each.grad is not None
            each.grad.div_(128)
        nn.utils.clip_grad_norm_(masters, 0.5)
        plain.step()
        fp16_utils.master_params_to_model_params(parameters, masters)
        assert loss.item() == expected.item()
    assert ours.loss_scale == 128.0
    assert {each.dtype for group in ours.param_groups for each in group["params"]} == {torch.float32}


def test_optimizer_with_a_dynamic_scale(capsys: pytest.CaptureFixture[str]) -> None:
    model = half_net()
    optimizer = FP16_Optimizer(make_sgd(model), dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 2.0**10})
    before = [each.clone() for each in model.parameters()]
    optimizer.backward(loss_of(model, batches(1)[0]) * float("inf"))
    assert optimizer.overflow
    assert optimizer.clip_master_grads(1.0) == -1
    assert optimizer.inspect_master_grad_data() is None
    optimizer.step()
    assert "OVERFLOW! Skipping step. Attempted loss scale: 1024.0, reducing to 512.0" in capsys.readouterr().out
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    optimizer.zero_grad()
    first, second = batches(2)
    optimizer.backward(loss_of(model, first), update_master_grads=False)
    optimizer.backward(loss_of(model, second), update_master_grads=False)
    optimizer.update_master_grads()
    optimizer.step()
    assert not all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    with pytest.raises(TypeError, match="dynamic loss scale"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(RuntimeError, match=r"state_dict\(\)"):
        pickle.dumps(optimizer)


def test_optimizer_accumulates() -> None:
    """Several passes, each of which unscales: as if the losses had been added, for 16-bit parameters and others."""
    models = [nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1).half()) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    gradients = []
    for model, together in zip(models, (True, False), strict=True):
        optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), static_loss_scale=8.0)
        for _ in range(2):  # once more, over gradients of zero
            losses = [model[1](model[0](torch.full((1, 2), x)).half()).sum() for x in (1.0, 2.0, 4.0)]
            for loss in [sum(losses)] if together else losses:
                optimizer.backward(loss)  # type: ignore[arg-type]
            gradients.append([each.grad.clone() for group in optimizer.param_groups for each in group["params"]])
            optimizer.zero_grad(set_grads_to_None=False)
    for ours, theirs in zip(gradients[0], gradients[2], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=0.0)
    assert all(torch.equal(a, b) for a, b in zip(gradients[2], gradients[3], strict=True))


def test_optimizer_with_a_closure() -> None:
    """LBFGS asks several times, and sees the model move each time."""
    model = nn.Linear(2, 1).half()
    inputs = torch.randn(8, 2, generator=torch.Generator().manual_seed(0)).half()
    optimizer = FP16_Optimizer(torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4))
    seen = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(inputs).float() - 1).square().mean()
        optimizer.backward(loss)
        seen.append(loss.item())
        return loss

    optimizer.step(closure)
    assert len(seen) > 2
    assert seen[-1] < seen[0]


def test_optimizer_resumes_bit_for_bit() -> None:
    data = batches(4)

    def train(model: nn.Module, optimizer: FP16_Optimizer, part: list[tuple[Tensor, Tensor]]) -> list[float]:
        losses = []
        for batch in part:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            optimizer.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        return losses

    model = half_net()
    optimizer = FP16_Optimizer(make_sgd(model), dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 256.0})
    train(model, optimizer, data[:2])
    saved = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
    expected = train(model, optimizer, data[2:])
    saved.seek(0)
    loaded = torch.load(saved, weights_only=True)
    other = half_net()
    resumed = FP16_Optimizer(make_sgd(other), dynamic_loss_scale=True)
    other.load_state_dict(loaded["model"])
    resumed.load_state_dict(loaded["optimizer"])
    assert resumed.loss_scale == 256.0
    assert train(other, resumed, data[2:]) == expected
    as_apex_saved = loaded["optimizer"] | {"loss_scaler": DynamicLossScaler(init_scale=64.0)}
    resumed.load_state_dict(as_apex_saved)
    assert resumed.loss_scale == 64.0


def test_loss_scalers() -> None:
    fixed, dynamic = LossScaler(8), DynamicLossScaler(init_scale=4.0, scale_window=2)
    bad = nn.Parameter(torch.ones(1))
    bad.grad = torch.tensor([float("nan")])
    assert not fixed.has_overflow([bad])
    assert dynamic.has_overflow([bad])
    fixed.update_scale(True)
    assert fixed.loss_scale == 8
    scales = []
    for overflow in (True, False, False, True, True, True):
        dynamic.update_scale(overflow)
        scales.append(dynamic.loss_scale)
    assert scales == [2.0, 2.0, 4.0, 2.0, 1.0, 1.0]
    fixed.backward(bad * 2)
    assert fixed.scale_gradient(None, (torch.ones(1),), None)[0].item() == 8.0


# ---- fused names ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (optimizers.FusedAdam, torch.optim.AdamW),
        (lambda p, **o: optimizers.FusedAdam(p, adam_w_mode=False, **o), torch.optim.Adam),
        (
            lambda p, **o: optimizers.FusedSGD(p, momentum=0.9, **o),
            lambda p, **o: torch.optim.SGD(p, momentum=0.9, **o),
        ),
        (optimizers.FusedAdagrad, torch.optim.Adagrad),
    ],
)
def test_fused_optimizers_are_torchs(ours: Callable[..., Any], theirs: Callable[..., Any]) -> None:
    losses = []
    for make in (ours, theirs):
        model = make_net()
        optimizer = make(model.parameters(), lr=0.01, weight_decay=0.1)
        losses.append([])
        for batch in batches(STEPS):
            loss = loss_of(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0] == losses[1]


def _lamb_step(weights: list[Tensor], gradients: list[Tensor], decay: float) -> list[Tensor]:
    """The first step of LAMB as the paper has it: the means, corrected, are the gradient and its square."""
    norm = torch.cat([each.flatten() for each in gradients]).norm()
    clipped = [each / max(1.0, norm.item()) for each in gradients]
    moved = []
    for weight, gradient in zip(weights, clipped, strict=True):
        update = gradient / (gradient.abs() + 1e-6) + decay * weight
        ratio = weight.norm() / update.norm() if decay and weight.any() else 1.0
        moved.append(weight - 0.1 * ratio * update)
    return moved


@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_without_bias_correction(decoupled: bool) -> None:
    """Twice: m and v are running means from zero, and are used as they are; gradients are clipped before."""
    weight, first, second = torch.tensor([3.0, -4.0]), torch.zeros(2), torch.zeros(2)
    parameter = nn.Parameter(weight.clone())
    optimizer = optimizers.FusedAdam(
        [parameter], lr=0.1, weight_decay=0.3, bias_correction=False, adam_w_mode=decoupled, max_grad_norm=1.0
    )
    for gradient in (torch.tensor([3.0, 4.0]), torch.tensor([0.0, 0.5])):
        parameter.grad = gradient.clone()
        optimizer.step()
        gradient = gradient / max(1.0, gradient.norm().item())
        if decoupled:
            weight = weight * (1 - 0.1 * 0.3)
        else:
            gradient = gradient + 0.3 * weight
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient**2
        weight = weight - 0.1 * first / (second.sqrt() + 1e-8)
        torch.testing.assert_close(parameter.detach(), weight)
    plain = torch.optim.AdamW([parameter])
    plain.load_state_dict(optimizer.state_dict())
    assert plain.state[parameter]["step"].item() == 2


def _two_steps(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> Tensor:
    for gradient in (torch.tensor([0.5, -2.0]), torch.tensor([1e-4, 1.0])):
        parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()
    return parameter.detach().clone()


_OF_APEX = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.3, "params": [0]}


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("step_in", ["group", "state", "torch"])
def test_adam_loads_checkpoints_of_apex(decoupled: bool, step_in: str) -> None:
    """The optimizer says how weights decay, and the checkpoint does not; Apex keeps the step in the group."""
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    weight = torch.tensor([3.0, -4.0])
    means = [{"exp_avg": torch.ones(2), "exp_avg_sq": torch.full((2,), 2.0)} for _ in range(2)]
    other = torch.optim.Adam if decoupled else torch.optim.AdamW
    torchs = other([nn.Parameter(weight.clone())], lr=0.1, weight_decay=0.3).state_dict()["param_groups"][0]
    group = torchs if step_in == "torch" else {**_OF_APEX, "bias_correction": True}
    saved = {"state": {0: means[0]}, "param_groups": [group]}
    (group if step_in == "group" else saved["state"][0])["step"] = 5
    expected, parameter = nn.Parameter(weight.clone()), nn.Parameter(weight.clone())
    plain = kind([expected], lr=0.1, weight_decay=0.3)
    plain.load_state_dict(
        {"state": {0: {**means[1], "step": torch.tensor(5.0)}}, "param_groups": plain.state_dict()["param_groups"]}
    )
    optimizer = optimizers.FusedAdam([parameter], adam_w_mode=decoupled)
    optimizer.load_state_dict(saved)
    assert torch.equal(_two_steps(optimizer, parameter), _two_steps(plain, expected))
    again = optimizers.FusedAdam([parameter], adam_w_mode=decoupled)
    again.load_state_dict(optimizer.state_dict())
    assert again.state[parameter]["step"].item() == 7


@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_of_16_bit_parameters_computes_in_float32(decoupled: bool) -> None:
    """Moments too, after a checkpoint as well: squares of 1e-4 and the eps are 0 in float16."""
    parameter, wide = nn.Parameter(torch.tensor([3.0, -4.0]).half()), nn.Parameter(torch.tensor([3.0, -4.0]))
    optimizer = optimizers.FusedAdam([parameter], lr=0.01, weight_decay=0.1, adam_w_mode=decoupled)
    reference = (torch.optim.AdamW if decoupled else torch.optim.Adam)([wide], lr=0.01, weight_decay=0.1)
    for value in (1e-4, 3e-4, 0.0):
        for each in (parameter, wide):
            each.grad = torch.full_like(each, value)
        optimizer.step()
        reference.step()
        assert torch.equal(parameter, wide.half())
        wide.data.copy_(parameter)
        loaded = optimizers.FusedAdam([parameter], adam_w_mode=decoupled)
        loaded.load_state_dict(optimizer.state_dict())
        optimizer = loaded
    assert {name: each.dtype for name, each in optimizer.state[parameter].items()} == dict.fromkeys(
        ("step", "exp_avg", "exp_avg_sq"), torch.float32
    )


def test_adam_with_masters_under_a_scaler() -> None:
    """Capturable on CPUs, where torch's is not. The steps are below float16's, as the unscaled gradients are."""
    narrow, wide = nn.Parameter(torch.tensor([3.0, -4.0]).half()), nn.Parameter(torch.tensor([3.0, -4.0]))
    options = {"lr": 1e-4, "weight_decay": 0.1}
    optimizer = optimizers.FusedAdam([narrow], capturable=True, master_weights=True, **options)
    reference, scaler = torch.optim.AdamW([wide], **options), torch.amp.GradScaler("cpu")
    for value in (1e-3, float("inf"), 3e-3):
        scaler.scale(torch.ones(()))  # makes the scale
        narrow.grad = torch.full_like(narrow, value)
        wide.grad = narrow.grad.float() / scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if value < 1:
            reference.step()
    loaded = optimizers.FusedAdam([narrow], capturable=True, master_weights=True)
    loaded.load_state_dict(optimizer.state_dict())
    assert loaded.state[narrow]["step"] == 2
    torch.testing.assert_close(loaded.state[narrow]["master"], wide.detach())
    assert torch.equal(narrow, wide.half())
    assert not torch.equal(wide, wide.half().float())


def test_adam_is_capturable_on_cpus() -> None:
    parameter, expected = nn.Parameter(torch.tensor([3.0, -4.0])), nn.Parameter(torch.tensor([3.0, -4.0]))
    moved = _two_steps(optimizers.FusedAdam([parameter], capturable=True), parameter)
    torch.testing.assert_close(moved, _two_steps(torch.optim.AdamW([expected], weight_decay=0.0), expected))


def test_adagrad_loads_checkpoints_of_apex() -> None:
    expected, parameter = nn.Parameter(torch.tensor([3.0, -4.0])), nn.Parameter(torch.tensor([3.0, -4.0]))
    plain = torch.optim.Adagrad([expected], lr=0.1, weight_decay=0.3, eps=1e-8)
    plain.state[expected]["sum"] = torch.ones(2)
    optimizer = optimizers.FusedAdagrad([parameter])
    group = {"lr": 0.1, "eps": 1e-8, "weight_decay": 0.3, "params": [0]}
    optimizer.load_state_dict({"state": {0: {"sum": torch.ones(2)}}, "param_groups": [group]})
    assert torch.equal(_two_steps(optimizer, parameter), _two_steps(plain, expected))


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("order", [0, 2])
@pytest.mark.parametrize("init_zero", [True, False])
def test_novograd(inside: bool, order: int, init_zero: bool) -> None:
    """Twice, with another optimizer from the first one's checkpoint the second time."""
    weight, mean, norm = torch.tensor([3.0, -4.0]), torch.zeros(2), torch.tensor(0.0)
    parameter = nn.Parameter(weight.clone())
    options = {"betas": (0.9, 0.5), "weight_decay": 0.3, "norm_type": order, "init_zero": init_zero}
    saved = None
    for step, gradient in enumerate((torch.tensor([3.0, 4.0]), torch.tensor([0.0, 0.5])), start=1):
        optimizer = optimizers.FusedNovoGrad([parameter], lr=0.1, reg_inside_moment=inside, **options)
        if saved is not None:
            optimizer.load_state_dict(saved)
        parameter.grad = gradient.clone()
        optimizer.step()
        saved = optimizer.state_dict()
        own = gradient.abs().max() if order == 0 else gradient.norm()
        before = own if step == 1 and not init_zero else norm
        norm = 0.5 * before + 0.5 * own if order == 0 else (0.5 * before**2 + 0.5 * own**2).sqrt()
        update = gradient
        if inside:
            update = update / (norm / (1 - 0.5**step) ** 0.5) + 0.3 * weight
        mean = 0.9 * mean + 0.1 * update
        update = mean / (1 - 0.9**step)
        if not inside:
            update = update / (norm / (1 - 0.5**step) ** 0.5) + 0.3 * weight
        weight = weight - 0.1 * update
        torch.testing.assert_close(parameter.detach(), weight)
    parameter.grad = None
    with pytest.raises(ValueError, match="0 parameters of a group have gradients, but 1 had"):
        optimizer.step()


def test_novograd_keeps_16_bit_parameters_apart() -> None:
    parameters = [nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in (torch.float32, torch.float16)]
    optimizer = optimizers.FusedNovoGrad(parameters, lr=0.1)
    for value, parameter in zip((3.0, 1e-4), parameters, strict=True):
        parameter.grad = torch.full_like(parameter, value)
    optimizer.step()
    narrow, wide = optimizer.param_groups[0]["exp_avg_sq"]
    torch.testing.assert_close(torch.cat([narrow, wide]), torch.tensor([1e-4, 3.0]) * 2**0.5, rtol=1e-3, atol=0)
    assert optimizer.state[parameters[1]]["exp_avg"].dtype == torch.float16


@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_lamb(decay: float) -> None:
    weights = [torch.tensor([3.0, -4.0]), torch.tensor([0.0])]
    gradients = [torch.tensor([0.5, 2.0]), torch.tensor([1.0])]
    parameters = [nn.Parameter(each.clone()) for each in weights]
    optimizer = optimizers.FusedLAMB(parameters, lr=0.1, weight_decay=decay)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    optimizer.step()
    for parameter, expected in zip(parameters, _lamb_step(weights, gradients, decay), strict=True):
        torch.testing.assert_close(parameter.detach(), expected)
    assert optimizer.state_dict()["param_groups"][0]["step"] == 1
    optimizer.zero_grad()
    assert parameters[0].grad is None
    assert optimizer.step(lambda: torch.tensor(1.0)).item() == 1.0


@pytest.mark.parametrize("name", ["FusedLAMB", "FusedNovoGrad", "LARC"])
def test_norms_of_large_parameters(name: str) -> None:
    """torch's own norm of 4 million floats on the CPU is off by 1e-4."""
    parameter = nn.Parameter(torch.linspace(0.5, 1.5, 1 << 22))
    before = parameter.detach().double()
    parameter.grad = parameter.detach().flip(0)
    optimizer, expected = {
        "FusedLAMB": lambda: (optimizers.FusedLAMB([parameter], lr=1.0, max_grad_norm=0.0), before.norm()),
        "FusedNovoGrad": lambda: (optimizers.FusedNovoGrad([parameter], lr=10.0, betas=(0.9, 0.0)), 10.0),
        "LARC": lambda: (LARC(torch.optim.SGD([parameter], lr=1.0), clip=False), 0.02 * before.norm()),
    }[name]()
    optimizer.step()
    assert float((parameter.detach() - before).norm()) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lamb_of_16_bit_parameters_computes_in_float32(dtype: torch.dtype, decoupled: bool, decay: float) -> None:
    """Squares of 1e-3 and the eps are 0 in float16."""
    start = torch.linspace(1.0, 2.0, 8)
    narrow, wide = nn.Parameter(start.to(dtype)), nn.Parameter(start.to(dtype).float())
    options = {"lr": 1e-2, "weight_decay": decay, "adam_w_mode": decoupled, "max_grad_norm": 0.0}
    for parameter in (narrow, wide):
        parameter.grad = torch.linspace(1e-3, 2e-3, 8).to(dtype).to(parameter.dtype)
        optimizer = optimizers.FusedLAMB([parameter], **options)
        optimizer.step()
    torch.testing.assert_close(narrow.detach(), wide.detach().to(dtype), rtol=torch.finfo(dtype).eps, atol=0)
    assert not torch.equal(narrow, start.to(dtype))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("FusedAdam", {"amsgrad": True}),
        ("FusedAdam", {"master_weights": True}),
        ("FusedSGD", {"lr": 0.1, "wd_after_momentum": True}),
        ("FusedAdagrad", {"adagrad_w_mode": True}),
        ("FusedLAMB", {"amsgrad": True}),
        ("FusedNovoGrad", {"amsgrad": True}),
        ("FusedNovoGrad", {"norm_type": 1}),
    ],
)
def test_what_torch_does_not_have_is_refused(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=name):
        getattr(optimizers, name)([nn.Parameter(torch.ones(1))], **options)


def test_set_grad_none() -> None:
    parameter = nn.Parameter(torch.ones(1))
    for chosen in (True, False):
        parameter.grad = torch.ones(1)
        optimizers.FusedSGD([parameter], lr=0.1, set_grad_none=chosen).zero_grad()
        assert (parameter.grad is None) == chosen


def test_multi_tensor_applier_is_not_available() -> None:
    assert not multi_tensor_applier.available
    with pytest.raises(RuntimeError, match="_foreach_mul_"):
        multi_tensor_applier(None, None, [])


def test_normalization() -> None:
    inputs = torch.randn(2, 4)
    for options in ({}, {"memory_efficient": True}):
        torch.testing.assert_close(normalization.FusedLayerNorm(4, **options)(inputs), nn.LayerNorm(4)(inputs))
        torch.testing.assert_close(normalization.FusedRMSNorm(4, **options)(inputs), nn.RMSNorm(4, eps=1e-5)(inputs))
        for kind in (normalization.MixedFusedLayerNorm, normalization.MixedFusedRMSNorm):
            assert kind(4, **options)(inputs).dtype == torch.float32


class T5Norm(nn.Module):
    """Hugging Face's T5LayerNorm, in whose place its T5 takes FusedRMSNorm where Apex can be imported."""

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, inputs: Tensor) -> Tensor:
        variance = inputs.to(torch.float32).pow(2).mean(-1, keepdim=True)
        inputs = inputs * torch.rsqrt(variance + self.eps)
        if self.weight.dtype in (torch.float16, torch.bfloat16):
            inputs = inputs.to(self.weight.dtype)
        return self.weight * inputs


DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@pytest.mark.parametrize("of_inputs", DTYPES)
@pytest.mark.parametrize("of_weights", DTYPES)
@pytest.mark.parametrize("autocast", [False, True])
def test_rms_norm_is_that_of_t5(of_inputs: torch.dtype, of_weights: torch.dtype, autocast: bool) -> None:
    """Bit for bit. T5 keeps one layer in float32 in a 16-bit model, so dtypes mix.

    Gradients to the inputs' precision: T5's own are the sum of two that have been rounded to it.
    """
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(64, 48, generator=generator)
    weight = torch.randn(48, generator=generator)
    seen = []
    for norm in (T5Norm(48), normalization.FusedRMSNorm(48, eps=1e-6)):
        norm.weight.data.copy_(weight)
        norm.to(of_weights)
        own = inputs.to(of_inputs).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            result = norm(own)
        result.float().square().sum().backward()
        seen.append((result, own.grad, norm.weight.grad))
    (expected, *gradients), (result, *ours) = seen
    assert result.dtype == expected.dtype
    assert torch.equal(result, expected)
    for mine, theirs in zip(ours, gradients, strict=True):
        atol = 4 * max(torch.finfo(each).eps for each in (of_inputs, of_weights)) * float(theirs.abs().max())
        torch.testing.assert_close(mine, theirs, rtol=0, atol=atol)


@pytest.mark.parametrize("of_inputs", DTYPES)
@pytest.mark.parametrize("of_weights", DTYPES)
@pytest.mark.parametrize("name", ["FusedLayerNorm", "FusedRMSNorm", "MixedFusedLayerNorm", "MixedFusedRMSNorm"])
def test_normalization_has_the_dtype_of_the_weights(name: str, of_inputs: torch.dtype, of_weights: torch.dtype) -> None:
    inputs = torch.randn(3, 8).to(of_inputs)
    norm = getattr(normalization, name)(8).to(of_weights)
    result = norm(inputs)
    assert result.dtype == of_weights
    plain = (nn.RMSNorm if "RMS" in name else nn.LayerNorm)(8, eps=1e-5)
    torch.testing.assert_close(result.float(), plain(inputs.float()), rtol=2e-2, atol=2e-2)
    bare = getattr(normalization, name)(8, elementwise_affine=False)(inputs)
    assert bare.dtype == of_inputs


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("name", ["FusedLayerNorm", "FusedRMSNorm", "MixedFusedLayerNorm", "MixedFusedRMSNorm"])
def test_normalization_can_be_compiled(name: str) -> None:
    for options in ({}, {"elementwise_affine": False}):
        for of_weights in (torch.float32, torch.bfloat16):
            norm = getattr(normalization, name)(8, **options).to(of_weights)
            compiled: Any = torch.jit.script(norm)  # type: ignore[no-untyped-call]
            for inputs in (torch.randn(3, 8), torch.randn(3, 8, dtype=torch.bfloat16)):
                assert torch.equal(compiled(inputs), norm(inputs))


def test_layer_norm_with_float32_weights_is_one_kernel() -> None:
    """16-bit inputs come with every forward pass of opt level O1."""
    norm, inputs = normalization.FusedLayerNorm(8), torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=True)
    assert norm(inputs).grad_fn.name() == "NativeLayerNormBackward0"
