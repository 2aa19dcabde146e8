"""Convolutions in float16 on a CPU that stands in for a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import conv2d
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.tools.rehearse.devices.mode import StandIn


class Dtypes(TorchDispatchMode):
    """Notes in which dtype convolutions are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "convolution" in func._schema.name:
            self.seen.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
def test_convolutions_in_float16_are_computed_in_float32_and_rounded(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    inputs, weight, shift = (torch.randn(*shape, dtype=dtype) for shape in ((2, 3, 8, 8), (4, 3, 3, 3), (4,)))
    leaves = [each.requires_grad_() for each in ((inputs, weight, shift) if bias else (inputs, weight))]
    with Dtypes() as dtypes, StandIn():
        output = conv2d(*leaves, padding=1)
        output.sum().backward()
    computed = torch.float32 if dtype == torch.float16 else dtype
    assert set(dtypes.seen) == {computed}
    assert len(dtypes.seen) == 2
    assert output.dtype == dtype
    exact = conv2d(*(each.detach().to(computed) for each in leaves), padding=1).to(dtype)
    assert torch.equal(output, exact)
    assert [each.grad.dtype for each in leaves] == [dtype] * len(leaves)  # type: ignore[union-attr]
