"""`lockstep.DataParallel` on replicas on the CPU: what goes in, what comes out, and what stays."""

from __future__ import annotations

import collections
import copy
import threading
import warnings
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import rnn

import lockstep
from lockstep.errors import InputError, InputTypeError, ModelError
from lockstep.log import _warned
from lockstep.parallel import data_parallel, gather, parallel_apply, replicate, scatter, scatter_kwargs
from lockstep.replicas.devices import resolve_device
from lockstep.testing import limit_s


class Pair(NamedTuple):
    left: Any
    right: Any


class Recorder(nn.Module):
    """Calls a function with its arguments, on each replica."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def rows(count: int, width: int = 3) -> torch.Tensor:
    return torch.arange(float(count * width)).view(count, width)


def net(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).to(**options)


def whole_numbers(module: nn.Module) -> nn.Module:
    """Parameters with which sums are exact in any order."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randint(-3, 4, parameter.shape))
    return module


def gradients(module: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in module.parameters()]


# ---- scatter -------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_devices", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 7])
def test_pieces_are_those_of_chunk(size: int, num_devices: int) -> None:
    pieces = scatter(rows(size), num_devices)
    expected = rows(size).chunk(num_devices)
    assert [piece.tolist() for piece in pieces] == [piece.tolist() for piece in expected]
    assert isinstance(pieces, tuple)


def test_scatter_goes_into_containers_and_shares_the_rest() -> None:
    label = object()
    batch = {"x": rows(5), "both": Pair(rows(5), [rows(5), label]), "none": None, "empty": ()}
    first, second = scatter(batch, ["cpu", "cpu"])
    assert first["x"].tolist() == rows(5)[:3].tolist()
    assert second["both"].left.tolist() == rows(5)[3:].tolist()
    assert isinstance(second["both"], Pair)
    assert first["both"].right[1] is second["both"].right[1] is label
    assert (first["none"], first["empty"]) == (None, ())
    assert list(batch) == list(first), "the batch itself is left alone"
    assert batch["x"].shape == (5, 3)


def test_containers_without_tensors_are_copied_once_per_device() -> None:
    first, second = scatter({"seen": []}, 2)
    first["seen"].append(1)
    assert second == {"seen": []}


def test_dict_classes_are_kept() -> None:
    batch = collections.defaultdict(list, x=rows(2))
    pieces = scatter(batch, 2)
    assert [type(piece) for piece in pieces] == [collections.defaultdict] * 2
    assert pieces[1]["other"] == []


def test_scatter_along_another_dimension() -> None:
    pieces = scatter(rows(2, 5), 2, dim=1)
    assert [tuple(piece.shape) for piece in pieces] == [(2, 3), (2, 2)]
    pieces = scatter(rows(2, 5), 2, dim=-1)
    assert [tuple(piece.shape) for piece in pieces] == [(2, 3), (2, 2)]


def test_arguments_without_tensors_come_in_as_many_pieces_as_those_with() -> None:
    """torch hands replicas that get no rows the flag alone, and fails."""
    inputs, kwargs = scatter_kwargs((rows(2),), {"flag": True}, 4)
    assert [len(piece[0]) for piece in inputs] == [1, 1]
    assert kwargs == ({"flag": True}, {"flag": True})
    assert scatter_kwargs((), {}, 4) == ((), ())
    inputs, kwargs = scatter_kwargs((), {"x": rows(4)}, 2)
    assert inputs == ((), ())
    assert [len(each["x"]) for each in kwargs] == [2, 2]


def test_gradient_of_pieces_comes_back() -> None:
    x = rows(5).requires_grad_()
    first, second = scatter(x, 2)
    (first.sum() + 2 * second.sum()).backward()
    assert x.grad.tolist() == [[1.0] * 3] * 3 + [[2.0] * 3] * 2


def test_pieces_are_copies() -> None:
    x = rows(4)
    pieces = scatter(x, 2)
    pieces[0].zero_()
    assert x.tolist() == rows(4).tolist()


def test_rows_are_never_lost() -> None:
    with pytest.raises(InputError, match=r"5 \(3 pieces\)|4 \(4 pieces\).*5 \(3 pieces\); rows would be lost"):
        scatter((rows(5), rows(4)), 4)
    with pytest.raises(InputError, match="rows would be lost"):
        scatter_kwargs((rows(4),), {"weight": rows(1)}, 2)


def test_what_cannot_be_cut_is_an_error() -> None:
    with pytest.raises(InputError, match=r"shape \(\) cannot be split along dim 0"):
        scatter(torch.tensor(1.0), 2)
    with pytest.raises(InputError, match=r"shape \(2, 3\) cannot be split along dim 2"):
        scatter(rows(2), 2, dim=2)
    packed = rnn.pack_sequence([rows(2), rows(1)])
    with pytest.raises(InputTypeError, match="PackedSequence"):
        scatter(packed, 2)


# ---- gather --------------------------------------------------------------------------------------


def test_gather_joins_what_scatter_cut() -> None:
    batch = {"x": rows(5), "both": Pair(rows(5), [rows(5)]), "none": None}
    joined = gather(scatter(batch, 3), "cpu")
    assert joined["x"].tolist() == rows(5).tolist()
    assert isinstance(joined["both"], Pair)
    assert joined["both"].right[0].tolist() == rows(5).tolist()
    assert joined["none"] is None
    assert gather(scatter(rows(2, 5), 2, dim=1), 0, dim=1).tolist() == rows(2, 5).tolist()


def test_scalars_become_a_vector_with_a_warning() -> None:
    scalars = [torch.tensor(1.0, requires_grad=True), torch.tensor(2.0, requires_grad=True)]
    with pytest.warns(UserWarning, match="all input tensors were scalars"):
        vector = gather(scalars, "cpu")
    assert vector.tolist() == [1.0, 2.0]
    (vector * torch.tensor([3.0, 4.0])).sum().backward()
    assert [scalar.grad.item() for scalar in scalars] == [3.0, 4.0]


@pytest.mark.parametrize(
    ("outputs", "kind", "words"),
    [
        ([], InputError, "no outputs"),
        ([1, 2], InputTypeError, r"returned a int.*torch\.tensor"),
        (["a", "b"], InputTypeError, "returned a str"),
        ([rows(1), None], InputTypeError, "different types: NoneType, Tensor"),
        ([{"a": rows(1)}, {"b": rows(1)}], ValueError, "All dicts must have the same number of keys"),
        ([[rows(1)], [rows(1), rows(1)]], ValueError, r"lists of lengths \[1, 2\]"),
    ],
)
def test_what_cannot_be_joined_is_an_error(outputs: list[Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        gather(outputs, "cpu")


# ---- replicate -----------------------------------------------------------------------------------


def test_first_replica_shares_memory_and_others_have_copies() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    first, second = replicate(module, 2)
    assert first[0].weight.data_ptr() == module[0].weight.data_ptr() != second[0].weight.data_ptr()
    assert first[1].running_mean is module[1].running_mean
    assert second[1].running_mean.data_ptr() != module[1].running_mean.data_ptr()
    assert list(second.parameters()) == []
    assert not second[0].weight.is_leaf
    assert all(not each[0].weight.requires_grad for each in replicate(module, 2, detach=True))


def test_shared_modules_and_parameters_stay_shared() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = module[0].weight
    module.add_module("again", module[0])
    for replica in replicate(module, 2):
        assert replica[1].weight is replica[0].weight
        assert replica.again is replica[0]


def test_gradients_are_added_in_the_tree_of_the_ranks() -> None:
    weight = nn.Parameter(torch.zeros(4))
    holder = nn.Module()
    holder.weight = weight
    parts = [torch.tensor([1e8, 1.0, -1e8, 0.1]).roll(shift) for shift in range(5)]
    loss = sum((replica.weight * part).sum() for replica, part in zip(replicate(holder, 5), parts, strict=True))
    loss.backward()
    expected = ((parts[0] + parts[1]) + (parts[2] + parts[3])) + parts[4]
    assert torch.equal(weight.grad, expected)


def test_unused_frozen_and_narrow_parameters() -> None:
    module = nn.ParameterDict(
        {
            "some": nn.Parameter(torch.ones(2)),
            "none": nn.Parameter(torch.ones(2)),
            "frozen": nn.Parameter(torch.ones(2), requires_grad=False),
            "narrow": nn.Parameter(torch.ones(1, dtype=torch.bfloat16)),
        }
    )
    replicas = replicate(module, 3)
    replicas[1]["some"].sum().backward()
    assert module["some"].grad.tolist() == [1.0, 1.0]
    assert module["none"].grad is None
    # 256 + 1 + 1 is 256 if each sum is rounded to bfloat16, and 258 if only the last is.
    sum((replica["narrow"] * factor).sum() for replica, factor in zip(replicas, (256, 1, 1), strict=True)).backward()
    assert module["narrow"].grad.item() == 258
    assert not replicas[2]["frozen"].requires_grad


def test_gradients_of_gradients() -> None:
    module = nn.Linear(1, 1, bias=False)
    loss = sum((replica.weight**3).sum() for replica in replicate(module, 2))
    (first,) = torch.autograd.grad(loss, [module.weight], create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), [module.weight])
    assert torch.allclose(first, 6 * module.weight**2)
    assert torch.allclose(second, 12 * module.weight)


def test_modules_that_keep_their_parameters_elsewhere() -> None:
    lstm = nn.LSTM(3, 4, num_layers=2)
    wrapped = lockstep.DataParallel(lstm, 2, dim=1)
    x = torch.randn(5, 4, 3)
    output, (h, c) = wrapped(x)
    expected, (h_one, c_one) = lstm(x)
    assert torch.allclose(output, expected)
    assert torch.allclose(h, h_one)
    assert torch.allclose(c, c_one)
    output.sum().backward()
    assert all(parameter.grad is not None for parameter in lstm.parameters())
    listed = nn.Module()
    listed.weights = nn.ParameterList([torch.ones(2), torch.zeros(2)])
    assert [each.tolist() for each in replicate(listed, 2)[1].weights] == [[1.0, 1.0], [0.0, 0.0]]


def test_modules_that_cannot_be_replicated() -> None:
    with pytest.raises(RuntimeError, match="uninitialized parameters"):
        replicate(nn.LazyLinear(2), 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(ModelError, match="ScriptModule"):
        replicate(scripted, 2)


# ---- parallel_apply ------------------------------------------------------------------------------


def test_replicas_run_at_the_same_time() -> None:
    """But for the first pass in training mode, which shows whether they draw random numbers."""
    everybody = threading.Barrier(3, timeout=limit_s(20))
    module = Recorder(lambda x, meets: (meets and everybody.wait(), x + 1)[1])
    wrapped = lockstep.DataParallel(module, 3)
    for meets in (False, True, True):
        assert wrapped(rows(3), meets).tolist() == (rows(3) + 1).tolist()


def test_threads_inherit_what_torch_keeps_per_thread() -> None:
    def state(x: torch.Tensor) -> dict[str, torch.Tensor]:
        flags = [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")]
        return {"flags": torch.tensor([flags]), "product": x @ x.T}

    module = lockstep.DataParallel(Recorder(state), 2)
    assert module(rows(2))["flags"].tolist() == [[True, False, False]] * 2
    with torch.no_grad():
        assert module(rows(2))["flags"].tolist() == [[False, False, False]] * 2
    with torch.inference_mode():
        assert module(rows(2))["flags"].tolist() == [[False, True, False]] * 2
    with torch.autocast("cpu", dtype=torch.float16):
        seen = module(rows(2))
    assert seen["flags"].tolist() == [[True, False, True]] * 2
    assert seen["product"].dtype == torch.float16


class Unusual(Exception):
    """Cannot be made from a message."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code, reason)
        self.code = code


class Silent(Unusual):
    def __str__(self) -> str:
        return "no word"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("bad"), ValueError),
        (KeyError("bad"), KeyError),
        (RuntimeError("bad"), RuntimeError),
        (Unusual(3, "bad"), Unusual),
        (Silent(3, "bad"), RuntimeError),
        (SystemExit("bad"), SystemExit),
    ],
)
def test_exception_of_a_replica_names_it(error: BaseException, kind: type[BaseException]) -> None:
    def fail(x: torch.Tensor) -> torch.Tensor:
        if x[0, 0] > 0:
            raise error
        return x

    name = type(error).__name__
    with pytest.raises(kind) as caught:
        lockstep.DataParallel(Recorder(fail), 3)(rows(3))
    assert type(caught.value) is kind
    assert f"Caught {name} in replica 1 on device cpu.\nOriginal Traceback" in str(caught.value)
    assert "in fail" in str(caught.value)
    if kind is Unusual:
        assert caught.value.code == 3


def test_parallel_apply_takes_bare_arguments_and_counts_them() -> None:
    double = Recorder(lambda x, factor=2: x * factor)
    assert parallel_apply([double, double], [torch.ones(1), (torch.ones(1),)], [{}, {"factor": 3}]) == [2, 3]
    assert parallel_apply([], []) == []
    with pytest.raises(InputError, match="'modules': 2, 'inputs': 1"):
        parallel_apply([double, double], [1])


# ---- the whole -----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_devices", [1, 2, 3, 5])
@pytest.mark.parametrize("size", [1, 4, 7])
def test_same_outputs_and_gradients_as_one_device(size: int, num_devices: int) -> None:
    """Whole numbers add up exactly in any order, so the bits are the same."""
    module = whole_numbers(net())
    wrapped = lockstep.DataParallel(copy.deepcopy(module), num_devices)
    x, weights = rows(size), torch.arange(1.0, size + 1)[:, None]
    (module(x) * weights).sum().backward()
    output = wrapped(x)
    assert torch.equal(output, module(x))
    (output * weights).sum().backward()
    assert all(map(torch.equal, gradients(wrapped), gradients(module)))


def test_losses_of_replicas_add_up_as_those_of_ranks_do() -> None:
    module = net(dtype=torch.float64)
    wrapped = lockstep.DataParallel(copy.deepcopy(module), 4)
    x = torch.randn(8, 3, dtype=torch.float64)
    wrapped(x).square().sum().backward()
    parts = []
    for piece in x.chunk(4):
        module.zero_grad()
        module(piece).square().sum().backward()
        parts.append(gradients(module))
    for grad, (a, b, c, d) in zip(gradients(wrapped), zip(*parts, strict=True), strict=True):
        assert torch.equal(grad, (a + b) + (c + d))


def test_buffers_are_those_of_the_first_replica() -> None:
    norm = nn.BatchNorm1d(3)
    expected = nn.BatchNorm1d(3)
    x = torch.randn(6, 3)
    lockstep.DataParallel(norm, 3)(x)
    expected(x[:2])
    assert torch.equal(norm.running_mean, expected.running_mean)
    assert norm.num_batches_tracked == 1


def test_attributes_that_forward_assigns_are_lost() -> None:
    class Counter(nn.Module):
        count = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return x

    module = Counter()
    lockstep.DataParallel(module, 2)(rows(2))
    assert module.count == 0


def test_keyword_arguments_and_nested_inputs() -> None:
    def mix(pair: Pair, *, scale: float, extra: dict[str, torch.Tensor]) -> dict[str, Any]:
        return {"sum": pair.left * scale + extra["bias"], "again": (pair.right,)}

    wrapped = lockstep.DataParallel(Recorder(mix), 3)
    out = wrapped(Pair(rows(4), rows(4)), scale=2.0, extra={"bias": rows(4)})
    assert torch.equal(out["sum"], 3 * rows(4))
    assert torch.equal(out["again"][0], rows(4))


def test_module_without_inputs_runs_once() -> None:
    assert lockstep.DataParallel(Recorder(lambda: rows(2)), 3)().shape == (2, 3)
    assert lockstep.DataParallel(Recorder(lambda flag: rows(2)), 3)(flag=True).shape == (6, 3)


def test_scalar_losses_warn_as_in_torch() -> None:
    wrapped = lockstep.DataParallel(Recorder(torch.mean), 2)
    with pytest.warns(UserWarning, match="scalars"):
        assert wrapped(torch.tensor([1.0, 3.0, 5.0])).tolist() == [2.0, 5.0]


def test_training_ends_where_one_device_ends() -> None:
    torch.manual_seed(1)
    x, y = torch.randn(12, 3, dtype=torch.float64), torch.randint(0, 2, (12,))
    ends = []
    for wrap in (lambda module: module, lambda module: lockstep.DataParallel(module, [0, 1, 2], output_device=0)):
        module = wrap(net(dtype=torch.float64))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        for _ in range(5):
            optimizer.zero_grad()
            F.cross_entropy(module(x), y).backward()
            optimizer.step()
        ends.append(list(module.parameters()))
    # Sums over 12 rows in another order: some units in the last place of float64.
    for one, several in zip(*ends, strict=True):
        torch.testing.assert_close(one, several, rtol=1e-12, atol=1e-12)


def test_names_classes_and_copies() -> None:
    wrapped = lockstep.DataParallel(net(), ["cpu"] * 2)
    assert isinstance(wrapped, nn.DataParallel)
    assert next(iter(wrapped.state_dict())) == "module.0.weight"
    again = copy.deepcopy(wrapped)
    assert torch.equal(again(rows(3)), wrapped(rows(3)))
    assert data_parallel(wrapped.module, rows(3), 2).shape == (3, 2)
    assert data_parallel(Recorder(lambda: rows(1)), None, 2).shape == (1, 3)


@pytest.mark.parametrize("name", ["current_device_index", "current_device_idx"])
def test_current_accelerator_under_both_of_torchs_names(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    accelerator = SimpleNamespace(
        current_accelerator=lambda *_: torch.device("cuda"),
        is_available=lambda: True,
        device_count=lambda: 4,
        **{name: lambda: 2},
    )
    monkeypatch.setattr(torch, "accelerator", accelerator)
    assert resolve_device("cuda") == torch.device("cuda", 2)


def test_without_device_ids_the_module_alone() -> None:
    if torch.accelerator.is_available():
        pytest.skip("means the accelerators")
    wrapped = lockstep.DataParallel(Recorder(lambda number: number + 1))
    assert wrapped.device_ids == []
    assert wrapped(1) == 2


@pytest.mark.parametrize(
    ("device_ids", "options", "kind", "words"),
    [
        ([], {}, InputError, "at least one device"),
        (0, {}, InputError, "at least one device"),
        ("cpu", {}, InputTypeError, "expected a list"),
        ([1.5], {}, InputTypeError, "1.5 is not a device"),
        ([True], {}, InputTypeError, "True is not a device"),
        ([-2], {}, InputError, "indices start at 0"),
        (["tpu7"], {}, InputError, "'tpu7' is not a device"),
        (["xla"], {}, InputError, "no xla device for"),
        (2, {"output_device": "xla"}, InputError, "no xla device for"),
    ],
)
def test_devices_that_are_not_there(
    device_ids: Any, options: dict[str, Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        lockstep.DataParallel(net(), device_ids, **options)


def test_misplaced_modules() -> None:
    with pytest.raises(InputTypeError, match=r"wraps a torch\.nn\.Module, got function"):
        lockstep.DataParallel(rows, 2)
    wrapped = lockstep.DataParallel(nn.Linear(3, 3, device="meta"), 2)
    with pytest.raises(RuntimeError, match=r"on device cpu.*found one of them on device: meta"):
        wrapped(rows(2))


# ---- random numbers ------------------------------------------------------------------------------


class Functional(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.5, self.training)


def noisy(x: torch.Tensor) -> torch.Tensor:
    return x + torch.randn_like(x)


@pytest.mark.parametrize("dropout", [nn.Dropout(0.5), Functional()])
def test_random_numbers_come_in_the_order_of_replicas(dropout: nn.Module) -> None:
    """Also where the first replica is the last to get there."""
    others_drew = threading.Event()
    before = Recorder(lambda x: (x[0, 0] == 0 and others_drew.wait(0.1), x + 1)[1])
    after = Recorder(lambda x: (others_drew.set(), x)[1])
    x = torch.arange(3.0)[:, None].expand(3, 50)
    torch.manual_seed(3)
    out = lockstep.DataParallel(nn.Sequential(before, dropout, after), 3)(x)
    torch.manual_seed(3)
    assert torch.equal(out, torch.cat([F.dropout(piece, 0.5) for piece in (x + 1).chunk(3)]))


def test_late_random_numbers_are_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    _warned.clear()
    wrapped = lockstep.DataParallel(Recorder(lambda x, draws: noisy(x) if draws else x), 2)
    x = torch.zeros(4, 50)
    wrapped(x, False)
    assert capsys.readouterr().err == ""
    wrapped(x, True)
    assert "Recorder draws random numbers" in capsys.readouterr().err
    torch.manual_seed(3)
    noise = wrapped(x, True)
    torch.manual_seed(3)
    assert torch.equal(noise, torch.cat([noisy(piece) for piece in x.chunk(2)]))
    assert capsys.readouterr().err == ""


def test_dropout_does_not_slow_down_evaluation() -> None:
    everybody = threading.Barrier(2, timeout=limit_s(20))
    module = nn.Sequential(nn.Dropout(0.5), Recorder(lambda x: (everybody.wait(), x)[1])).eval()
    assert torch.equal(lockstep.DataParallel(module, 2).eval()(rows(2)), rows(2))


class Meeting(nn.Module):
    """Waits for the other replica, as batch normalization that threads synchronize does, of which one raises."""

    def __init__(self, everybody: threading.Barrier) -> None:
        super().__init__()
        self.everybody = everybody
        self.linear, self.dropout = nn.Linear(3, 2), nn.Dropout(0.5)

    def __data_parallel_replicate__(self, context: Any, number: int) -> None:
        """That package's hook."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x[0, 0] > 0:
            raise ValueError("expects all inputs to be on GPUs")
        self.everybody.wait()
        return self.dropout(self.linear(x))


def test_a_replica_that_raises_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do replicas run in turn that wait for each other: the first would wait for one that has not begun."""
    monkeypatch.setattr(parallel_apply.__module__ + "._SECONDS_FOR_OTHERS", 0.5)
    model = lockstep.DataParallel(Meeting(threading.Barrier(2, timeout=limit_s(5))), ["cpu", "cpu"])
    with pytest.raises(ValueError, match=r"replica 1 on device cpu(.|\n)*expects all inputs"):
        model(torch.tensor([[0.0] * 3, [1.0] * 3]))
    model = lockstep.DataParallel(Meeting(threading.Barrier(2, timeout=limit_s(20))), ["cpu", "cpu"])
    assert model(torch.zeros(4, 3)).shape == (4, 2)
