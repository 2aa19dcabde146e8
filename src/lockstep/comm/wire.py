"""Wire formats: how float sums are encoded between hosts.

A reduction over several hosts first adds within each host, in the dtype in which it accumulates. One partial sum per
host then crosses the network, and a wire format encodes these. Every rank, including the one that encoded them,
continues with the decoded values, so all ranks end with the same bits.

| name | bits per value | error of one encoding of x |
|---|---|---|
| fp32 | 32 | none |
| bf16 | 16 | at most 2**-8 abs(x) |
| fp16 | 16 | at most 2**-11 abs(x) + 2**-29 m, m the largest magnitude in the block |
| int8 | 8.06 | at most (max - min) / 509 of the block + 2**-22 m |

Blocks hold 1024 consecutive values. A format applies to SUM, AVG and PREMUL_SUM of float32, float16 and bfloat16, which
accumulate in float32. float64, integers and all other operations are sent exactly, whatever the format.

[Note: error of a reduction] With two hosts each partial sum is encoded once, so the error of a SUM is at most the sum
of the two bounds; for an AVG, that divided by the world size. With more hosts, each value is reduced on one of them,
from the encoded sums of all, and the result is encoded once more on its way back: the bound is the sum over all hosts,
plus that of the result. Rounding of the additions themselves is added, as always.

[Note: not a number] An infinity or NaN in a partial sum is decoded as an infinity or NaN: in its place with bf16, for
its whole block with fp16 and int8. So a gradient scaler sees an overflow.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Iterator, Mapping

import torch

from lockstep import env
from lockstep.errors import SetupError
from lockstep.torch_private.tensors import byte_prepack, byte_unpack

__all__ = ["BLOCK", "WIRES", "Wire", "choose_wire", "current_wire", "find_wire"]

BLOCK = 1024
_INT8_LIFT = 2.0**48
_SCALE_BYTES = 4
_INT8_HEAD_BYTES = 8  # scale and minimum, after each block: the layout of torch's row-wise quantisation
# 65504 is float16's largest number; 2**15 leaves room for rounding.
_FP16_EXPONENT = 15
# Multipliers outside of this range would themselves be subnormal or infinite.
_LARGEST_EXPONENT = 126


class Wire(abc.ABC):
    """One wire format. Stateless; all methods are local.

    Attributes:
        name: the name by which users choose it.
        is_exact: whether decoding restores exactly what was encoded.
    """

    name: str
    is_exact = False

    @abc.abstractmethod
    def num_bytes(self, numel: int) -> int:
        """Bytes of `numel` encoded values."""

    @abc.abstractmethod
    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """Encode.

        Args:
            values: float32, shape (n,), contiguous.
            out: uint8, shape (num_bytes(n),), contiguous.
        """

    @abc.abstractmethod
    def decode(self, data: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Decode what `encode` wrote.

        Args:
            data: uint8, shape (num_bytes(n),).
            out: float32, shape (n,), contiguous; may be used as memory.

        Returns:
            float32, shape (n,): `out`, or other memory if that is faster.
        """


class _Fp32(Wire):
    """The values unchanged, without error."""

    name = "fp32"
    is_exact = True

    def num_bytes(self, numel: int) -> int:
        return 4 * numel

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        out.view(torch.float32).copy_(values)

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(data.view(torch.float32))


class _Bf16(Wire):
    """Rounded to nearest, 8 bits of significand: an error of at most 2**-8 abs(x), or 2**-134 if that is more.

    Values above 3.39e38, float32's own limit being 3.40e38, become infinite.
    """

    name = "bf16"

    def num_bytes(self, numel: int) -> int:
        return 2 * numel

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        out.view(torch.bfloat16).copy_(values)

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(data.view(torch.bfloat16))


class _Fp16(Wire):
    """Rounded to nearest, 11 bits of significand, each block scaled by a power of two so that nothing overflows.

    The largest magnitude m of a block is scaled into [2**14, 2**15). A value that is then a normal number has an error
    of at most 2**-11 abs(x); otherwise the absolute error is at most half of float16's smallest step, 2**-25, which
    unscaled is at most 2**-39 m. The bound given is 2**-11 abs(x) + 2**-29 m + 2**-134: it leaves room for blocks whose
    m is so small or so large that its scale has reached its limit of 2**±126.
    """

    name = "fp16"

    def num_bytes(self, numel: int) -> int:
        return _SCALE_BYTES * _num_blocks(numel) + 2 * numel

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        for source, target, scales in self._parts(values, out):
            largest = source.abs().amax(dim=1)
            exponents = torch.frexp(largest).exponent
            shifts = (_FP16_EXPONENT - exponents).clamp_(-_LARGEST_EXPONENT, _LARGEST_EXPONENT).float()
            torch.exp2(-shifts, out=scales)
            scales[~largest.isfinite()] = torch.nan
            target.copy_(source * torch.exp2(shifts).unsqueeze(1))

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        for target, source, scales in self._parts(out, data):
            torch.mul(source, scales.unsqueeze(1), out=target)
        return out

    def _parts(
        self, values: torch.Tensor, data: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Values, their float16 counterparts and scales: the full blocks, then the last one."""
        num_blocks = _num_blocks(values.numel())
        scales = data[: _SCALE_BYTES * num_blocks].view(torch.float32)
        halves = data[_SCALE_BYTES * num_blocks :].view(torch.float16)
        num_full = values.numel() // BLOCK
        end = num_full * BLOCK
        if num_full:
            yield values[:end].view(-1, BLOCK), halves[:end].view(-1, BLOCK), scales[:num_full]
        if num_blocks > num_full:
            yield values[end:].view(1, -1), halves[end:].view(1, -1), scales[num_full:]


class _Int8(Wire):
    """Affine quantised: each block has its minimum and a step of (max - min) / 255, and each value its nearest step.

    The error is at most half a step, (max - min) / 510, and the rounding of min + step * q in float32: together at most
    (max - min) / 509 + 2**-22 m, m the largest magnitude in the block; or 2**-126 if that is more. The last block is
    padded with its last value.
    """

    name = "int8"

    def num_bytes(self, numel: int) -> int:
        return _num_blocks(numel) * (BLOCK + _INT8_HEAD_BYTES)

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        blocks = _padded(values)
        if blocks.numel() == 0:
            return
        rows = out.view(blocks.size(0), BLOCK + _INT8_HEAD_BYTES)
        # Quantisation adds 1e-8 to every range, which would erase small gradients: scale them far above that.
        lifted = blocks * _INT8_LIFT
        if not math.isfinite(float(lifted.sum())):  # the quantisation also ignores a NaN; a sum does not
            self._encode_carefully(blocks, rows)
            return
        rows.copy_(byte_prepack(lifted))
        heads = rows[:, BLOCK:].contiguous().view(torch.float32).div_(_INT8_LIFT)
        rows[:, BLOCK:] = heads.view(torch.uint8)

    def _encode_carefully(self, blocks: torch.Tensor, rows: torch.Tensor) -> None:
        """The same for values that may be too large to be scaled, or not finite: their blocks are decoded as NaN."""
        is_odd = ~(blocks.amax(dim=1) - blocks.amin(dim=1)).isfinite()
        rows.copy_(byte_prepack(blocks.masked_fill(is_odd.unsqueeze(1), 0.0)))
        heads = rows[:, BLOCK:].contiguous().view(torch.float32)
        heads[is_odd] = torch.nan
        rows[:, BLOCK:] = heads.view(torch.uint8)

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        rows = data.view(-1, BLOCK + _INT8_HEAD_BYTES)
        if not rows.numel():
            return out
        values: torch.Tensor = byte_unpack(rows)
        return values.view(-1)[: out.numel()]


def _num_blocks(numel: int) -> int:
    return -(-numel // BLOCK)


def _padded(values: torch.Tensor) -> torch.Tensor:
    """Whole blocks, shape (blocks, BLOCK); the last one is filled up with its last value."""
    missing = -values.numel() % BLOCK
    if missing:
        values = torch.cat([values, values[-1:].expand(missing)])
    return values.view(-1, BLOCK)


WIRES: Mapping[str, Wire] = {wire.name: wire for wire in (_Fp32(), _Bf16(), _Fp16(), _Int8())}

_chosen: str | None = None


def find_wire(name: object) -> Wire:
    """The wire format of that name.

    Raises:
        SetupError: there is none; lists the existing ones.
    """
    wire = WIRES.get(name.lower()) if isinstance(name, str) else None
    if wire is None:
        raise SetupError(f"wire is {name!r}; give one of {', '.join(WIRES)}")
    return wire


def choose_wire(name: str | None) -> None:
    """Set the format of groups created from now on; None for that of LOCKSTEP_WIRE. The same on all ranks.

    Raises:
        SetupError: there is no such format.
    """
    global _chosen
    if name is not None:
        find_wire(name)
    _chosen = name


def current_wire() -> Wire:
    """The format for a new group. Local."""
    return find_wire(_chosen or env.LOCKSTEP_WIRE.get() or "fp32")
