"""What wire formats do to numbers: their bounds, and what is no number."""

from __future__ import annotations

import pytest
import torch
from wire_bounds import error_bound

from lockstep.comm.wire import BLOCK, WIRES, Wire, find_wire
from lockstep.errors import SetupError

NUMELS = (0, 1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 333)


def travel(wire: Wire, values: torch.Tensor) -> torch.Tensor:
    data = torch.full((wire.num_bytes(values.numel()),), 0xA5, dtype=torch.uint8)
    wire.encode(values, data)
    return wire.decode(data, torch.full_like(values, 123.0))


def samples(numel: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(numel)
    normal = torch.randn(numel, generator=generator)
    return {
        "normal": normal,
        "shifted": normal + 1000.0,
        "gradients": normal * 1e-6,
        "heavy tails": normal**9,
        "one outlier": torch.where(torch.arange(numel) == numel // 2, 1e6, normal),
        "large": normal * 1e37,
        "tiny": normal * 1e-39,
        "constant": torch.full((numel,), -2.7),
        "zeros": torch.zeros(numel),
    }


@pytest.mark.parametrize("wire", WIRES.values(), ids=lambda wire: wire.name)
@pytest.mark.parametrize("numel", NUMELS)
def test_error_is_within_the_bound(wire: Wire, numel: int) -> None:
    for name, values in samples(numel).items():
        error = (travel(wire, values).double() - values.double()).abs()
        excess = error - error_bound(wire.name, values)
        assert numel == 0 or float(excess.max()) <= 0.0, name
        assert wire.is_exact == (wire.name == "fp32")


@pytest.mark.parametrize("wire", WIRES.values(), ids=lambda wire: wire.name)
def test_bound_is_worth_something(wire: Wire) -> None:
    """A bound that is never approached says nothing: some error must reach a quarter of it."""
    values = torch.randn(64 * BLOCK, generator=torch.Generator().manual_seed(0))
    error = (travel(wire, values).double() - values.double()).abs()
    bound = error_bound(wire.name, values)
    assert bool((error >= bound / 4).any())
    assert float(bound.max()) <= {"fp32": 0.0, "bf16": 0.02, "fp16": 0.0025, "int8": 0.02}[wire.name]


@pytest.mark.parametrize("wire", WIRES.values(), ids=lambda wire: wire.name)
@pytest.mark.parametrize("numel", [5, BLOCK + 5])
@pytest.mark.parametrize("odd", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_stays_so(wire: Wire, numel: int, odd: float) -> None:
    values = torch.ones(numel)
    values[3] = odd
    arrived = travel(wire, values)
    assert not bool(arrived[3].isfinite())
    if numel > BLOCK:
        assert bool(arrived[BLOCK:].isfinite().all()), "other blocks are not touched"


def test_same_bits_every_time() -> None:
    values = torch.randn(3 * BLOCK + 17, generator=torch.Generator().manual_seed(3))
    for wire in WIRES.values():
        first = torch.empty(wire.num_bytes(values.numel()), dtype=torch.uint8)
        second = torch.full_like(first, 77)
        wire.encode(values, first)
        wire.encode(values, second)
        assert torch.equal(first, second), wire.name


def test_sizes() -> None:
    numel = 1 << 20
    sizes = {name: wire.num_bytes(numel) / numel for name, wire in WIRES.items()}
    assert sizes == {"fp32": 4.0, "bf16": 2.0, "fp16": 2.00390625, "int8": 1.0078125}


def test_names() -> None:
    assert find_wire("BF16") is WIRES["bf16"]
    for wrong in ("fp8", 16, None):
        with pytest.raises(SetupError, match="one of fp32, bf16, fp16, int8"):
            find_wire(wrong)
