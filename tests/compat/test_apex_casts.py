"""Opt level O1's casts: where they hold, what users add, what is refused; and the interface before `initialize`."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from apex_cases import batches, clean_amp, make_net, make_sgd
from lockstep.compat.apex import amp
from lockstep.compat.apex.amp._amp_state import AmpState
from lockstep.compat.apex.amp.casts import _registered


@pytest.fixture
def state() -> Iterator[AmpState]:
    with clean_amp() as clean:
        yield clean
    _registered.clear()


def product() -> torch.dtype:
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


def test_casts_hold_outside_of_models_but_not_in_backward_passes(state: AmpState) -> None:
    net = make_net()
    model, optimizer = amp.initialize(net, make_sgd(net), verbosity=0)
    assert product() == torch.float16
    with amp.disable_casts():
        assert product() == torch.float32
        with amp.disable_casts():
            pass
        assert product() == torch.float32
    with amp.scale_loss(model(batches(1)[0][0]).sum(), optimizer) as scaled_loss:
        assert product() == torch.float32
        scaled_loss.backward()
    assert product() == torch.float16
    with pytest.raises(ZeroDivisionError), amp.disable_casts():
        _ = 1 / 0
    assert product() == torch.float16
    assert state.handle is not None
    state.handle._deactivate()
    assert product() == torch.float32
    with amp.disable_casts():
        assert product() == torch.float32


def test_casts_in_force_for_one_step_do_not_serve_the_next(state: AmpState) -> None:
    """A forward pass without gradients and a changed weight: nothing of either is remembered."""
    layer, optimizer = amp.initialize(
        (linear := nn.Linear(2, 1)), torch.optim.SGD(linear.parameters(), lr=1.0), verbosity=0
    )
    state.loss_scalers[0]._loss_scale = 4.0
    inputs = torch.ones(1, 2)
    with torch.no_grad():
        layer(inputs)
    for _ in range(2):
        before = layer.weight.detach().clone()
        output = layer(inputs)
        assert torch.allclose(output.float(), inputs @ before.t() + layer.bias, atol=2e-3)
        with amp.scale_loss(output.float().sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
        assert layer.weight.grad is not None
        assert layer.weight.grad.tolist() == [[1.0, 1.0]]
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(layer.weight, before - 1)


def _dtypes(first: Tensor, *rest: Any, **named: Any) -> list[torch.dtype]:
    return [each.dtype for each in (first, *rest, *named.values()) if isinstance(each, Tensor)]


def test_decorators(state: AmpState) -> None:
    half, wide, double = torch.ones(1).half(), torch.ones(1), torch.ones(1).double()
    to_half, to_float, to_widest = (
        decorate(_dtypes) for decorate in (amp.half_function, amp.float_function, amp.promote_function)
    )
    assert to_half(half, wide) == [torch.float16, torch.float32], "before initialize nothing is cast"
    amp.initialize(nn.Linear(1, 1), verbosity=0)
    assert to_half(half, 3, named=wide) == [torch.float16] * 2
    assert to_float(half, named=wide) == [torch.float32] * 2
    assert to_widest(half, wide) == [torch.float32] * 2
    assert to_widest(half, half.bfloat16()) == [torch.float32] * 2
    assert to_widest(half, torch.tensor([1])) == [torch.float16, torch.int64]
    assert to_half(double) == [torch.float64]
    with amp.disable_casts():
        assert to_half(half, wide) == [torch.float16, torch.float32]
    assert to_half.__name__ == "_dtypes"
    assert amp.half_function(lambda pair: _dtypes(*pair))([half, wide]) == [torch.float16] * 2


def test_registrations(state: AmpState) -> None:
    module = types.SimpleNamespace(a=_dtypes, b=_dtypes, c=_dtypes)
    amp.register_half_function(module, "a")
    amp.register_float_function(module, "b")
    amp.register_promote_function(module, "c")
    half, wide = torch.ones(1).half(), torch.ones(1)
    assert module.a(wide) == [torch.float32], "from the next initialize on"
    for _ in range(2):  # not wrapped twice
        amp.initialize(nn.Linear(1, 1), verbosity=0)
    assert module.a(half, wide) == [torch.float16] * 2
    assert module.b(half, wide) == [torch.float32] * 2
    assert module.c(half, half) == [torch.float16] * 2
    assert module.c(half, wide) == [torch.float32] * 2
    assert state.handle is not None
    state.handle._deactivate()
    assert module.a is _dtypes
    with pytest.raises(ValueError, match="No function named missing"):
        amp.register_half_function(module, "missing")


def test_what_users_register_wins_over_autocast(state: AmpState) -> None:
    matrix = torch.ones(2, 2)
    amp.register_float_function(torch, "matmul")
    amp.register_half_function(functional, "cross_entropy")
    amp.initialize(nn.Linear(1, 1), verbosity=0)
    assert torch.matmul(matrix, matrix).dtype == torch.float32
    assert torch.mm(matrix, matrix).dtype == torch.float16
    assert functional.cross_entropy(matrix, torch.tensor([0, 1])).dtype == torch.float16

    @amp.float_function
    def own(inputs: Tensor) -> Tensor:
        return inputs @ inputs

    assert own(matrix).dtype == torch.float16, "inside of a user's function the usual casts hold, as in Apex"


class Doubled(torch.autograd.Function):
    @staticmethod
    @amp.half_function
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        assert inputs.dtype == product() == torch.float16
        return inputs * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def test_decorated_autograd_functions(state: AmpState) -> None:
    amp.initialize(nn.Linear(1, 1), verbosity=0)
    for apply in (Doubled.apply, amp.half_function(Doubled.apply)):
        inputs = torch.ones(2, requires_grad=True)
        apply(inputs).float().sum().backward()
        assert inputs.grad is not None
        assert (inputs.grad.dtype, inputs.grad.tolist()) == (torch.float32, [2.0, 2.0])


def test_functions_cast_on_the_cpu_as_on_cuda(state: AmpState) -> None:
    """Probabilities, sums and norms in float32, cells of recurrent layers in half: the CPU's own list has none."""
    half, wide = torch.ones(2, 2).half(), torch.ones(2, 2)
    before = half.softmax(0).dtype
    amp.initialize(nn.Linear(1, 1), verbosity=0)
    assert [half.softmax(0).dtype, half.sum().dtype, (half**2).dtype, (2**half).dtype] == [torch.float32] * 4
    assert functional.group_norm(half, 1).dtype == torch.float32
    assert nn.GRUCell(2, 2)(wide).dtype == nn.LSTM(2, 2)(wide)[0].dtype == torch.float16
    with amp.disable_casts():
        assert half.softmax(0).dtype == before
    assert state.handle is not None
    state.handle._deactivate()
    assert half.softmax(0).dtype == before == torch.float16


def test_what_goes_to_the_host_is_float32(state: AmpState) -> None:
    half = torch.ones(2, dtype=torch.float16, requires_grad=True)
    amp.initialize(nn.Linear(1, 1), verbosity=0)
    assert half.cpu().dtype == torch.float32
    half.cpu().sum().backward()
    assert half.grad is not None
    assert half.grad.dtype == torch.float16
    assert torch.tensor([1]).cpu().dtype == torch.int64
    assert state.handle is not None
    state.handle._deactivate()
    assert half.cpu() is half


def test_float32_functions_refuse_to_write_to_16_bits(state: AmpState) -> None:
    half, wide = torch.ones(2).half(), torch.ones(2)
    amp.initialize(nn.Linear(1, 1), verbosity=0)
    with pytest.raises(NotImplementedError, match=r"Tensor\.exp_ .*x = x\.exp\("):
        half.exp_()
    with pytest.raises(NotImplementedError, match=r"x = x\.pow\("):
        half **= 2
    assert half.tolist() == [1.0, 1.0]
    wide.log_()
    assert half.add_(wide).dtype == torch.float16, "what is no function of float32's writes as ever"
    with amp.disable_casts():
        half.exp_()
    assert state.handle is not None
    state.handle._deactivate()
    half.exp_()
    assert (half.dtype, wide.tolist()) == (torch.float16, [0.0, 0.0])


def test_binary_cross_entropy_is_banned_with_advice(state: AmpState) -> None:
    original = functional.binary_cross_entropy
    net = nn.Sequential(nn.Linear(2, 1), nn.Sigmoid())
    amp.initialize(net, verbosity=0)
    inputs, target = torch.ones(3, 2), torch.ones(3, 1)
    with pytest.raises(NotImplementedError, match="binary_cross_entropy_with_logits"):
        nn.BCELoss()(net(inputs), target)
    assert functional.binary_cross_entropy(net(inputs).float(), target).dtype == torch.float32
    assert nn.BCEWithLogitsLoss()(net[0](inputs), target).dtype == torch.float32
    amp.register_float_function(torch, "sigmoid")
    amp.initialize(net, verbosity=0)
    assert nn.BCELoss()(net(inputs), target).dtype == torch.float32
    handle = amp.init(allow_banned=True)
    assert nn.BCELoss()(net(inputs).half(), target).dtype == torch.float32
    handle._deactivate()
    assert functional.binary_cross_entropy is original


def test_the_handle_of_init(state: AmpState) -> None:
    handle = amp.init(enabled=True, enable_caching=True)
    assert handle.is_active()
    handle._clear_cache()  # as scripts do that cache and step without the handle
    amp._amp_state.handle._clear_cache()
    assert product() == torch.float16
    net = make_net()
    optimizer = make_sgd(net)
    images, labels = batches(1)[0]
    before = net.head.weight.detach().clone()
    with handle.scale_loss(functional.cross_entropy(net(images), labels), optimizer) as scaled_loss:
        (scaled_loss * float("inf")).backward()
    optimizer.step()
    assert torch.equal(net.head.weight, before), "an overflow skips the step"
    optimizer.zero_grad()
    with handle.scale_loss(functional.cross_entropy(net(images), labels), optimizer) as scaled_loss:
        scaled_loss.backward()
    plain = make_net()
    with handle._disable_casts():
        functional.cross_entropy(plain(images), labels).backward()
    torch.testing.assert_close(net.head.weight.grad, plain.head.weight.grad, rtol=2e-2, atol=2e-3)
    optimizer.step()
    assert not torch.equal(net.head.weight, before)


def test_wrapped_optimizers(state: AmpState) -> None:
    handle = amp.init()
    net = make_net()
    optimizer = handle.wrap_optimizer(make_sgd(net), num_loss=2)
    images, labels = batches(1)[0]
    before = net.head.weight.detach().clone()
    for factor in (1.0, float("inf")):
        with optimizer.scale_loss(functional.cross_entropy(net(images), labels)) as scaled_loss:
            (scaled_loss * factor).backward()
    with pytest.raises(RuntimeError, match="more than num_loss=2"), optimizer.scale_loss(torch.ones(1)):
        pass
    optimizer.step()
    assert torch.equal(net.head.weight, before)
    assert [scaler.loss_scale() for scaler in optimizer._loss_scaler] == [2.0**16, 2.0**15]
    optimizer.zero_grad()
    for _ in range(2):
        with optimizer.scale_loss(functional.cross_entropy(net(images), labels)) as scaled_loss:
            scaled_loss.backward()
    optimizer.step()
    assert not torch.equal(net.head.weight, before)
    assert len(optimizer.param_groups) == 1


def test_init_not_enabled(state: AmpState) -> None:
    handle = amp.init(enabled=False)
    assert not handle.is_active()
    assert product() == torch.float32
    loss = torch.ones(1)
    optimizer = handle.wrap_optimizer(make_sgd(make_net()))
    with handle.scale_loss(loss, None) as same, optimizer.scale_loss(loss) as also:
        assert same is also is loss
    optimizer.step()
    handle._clear_cache()
    handle._deactivate()
