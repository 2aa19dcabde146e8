"""Parameters stored once per host, in memory that all of its ranks read, and each writes its share of."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lockstep.comm.engine import Engine
from lockstep.errors import InputError, ModelError
from lockstep.libc import function
from lockstep.parallel.buckets import view_like
from lockstep.parallel.sharded.shares import flat_of
from lockstep.torch_private.autograd import version_of

__all__ = ["HostMemory", "trim"]

_ALIGNMENT_BYTES = 128
_PAGE_BYTES, _HUGE_PAGE_BYTES = 4096, 2 << 20
_PURPOSE = "ZeroRedundancyOptimizer's memory for parameters"
# Of each parameter, as far apart as it takes: whoever writes to one mostly writes to all of it.
_SAMPLES = 4


class HostMemory:
    """The memory of some parameters, with a check that only steps have written to it.

    Collective to create: all ranks get the parameters of the group's first rank.

    Args:
        engine: engine of a group whose ranks share memory.
        parameters: the same on all ranks; their `data` become views of the memory.
        names: the parameters' names, for errors.
    """

    def __init__(self, engine: Engine, parameters: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        _check_apart(parameters, names)
        self._parameters, self._names = list(parameters), list(names)
        world_size, self._rank = engine.team.world_size, engine.team.rank
        starts, total = [], 0
        for parameter in parameters:
            starts.append(total)
            num_bytes = parameter.numel() * parameter.element_size()
            total += -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        whole = engine.allocate(_part_bytes(total, world_size), _PURPOSE).whole
        self.flats = [
            whole[start : start + parameter.numel() * parameter.element_size()].view(parameter.dtype)
            for start, parameter in zip(starts, parameters, strict=True)
        ]
        if self._rank == 0:
            for flat, parameter in zip(self.flats, parameters, strict=True):
                flat.copy_(flat_of(parameter.data, parameter))
        engine.run_steps(_PURPOSE)
        for flat, parameter in zip(self.flats, parameters, strict=True):
            parameter.data = view_like(flat, parameter.data)
        self._addresses = [flat.data_ptr() for flat in self.flats]
        self._bytes = whole
        self._places = torch.tensor(list(_places(starts, parameters)), dtype=torch.int64, device="cpu")
        self._owners = [index for index, each in enumerate(parameters) for _ in range(_num_places(each))]
        self.note()

    def leave(self) -> None:
        """Move each parameter back to this rank's own memory. Local."""
        for parameter in self._parameters:
            parameter.data = parameter.data.clone()

    def _sample(self) -> torch.Tensor:
        return self._bytes.index_select(0, self._places)

    def note(self) -> None:
        """Record the parameters' current values as right. Local; no rank may be writing."""
        self._left = self._sample()
        self._versions = list(map(version_of, self._parameters))

    def check(self) -> None:
        """Check that parameters have the values and memory recorded by `note`. Local; no rank may be writing.

        Raises:
            ModelError: one of them was written to, or has other memory; names it.
        """
        for index, (parameter, address) in enumerate(zip(self._parameters, self._addresses, strict=True)):
            if parameter.data_ptr() != address:
                raise ModelError(
                    f"parameter {self._names[index]} no longer uses the memory that ZeroRedundancyOptimizer gave it, "
                    "which all ranks of this host share (p.data = ..., model.to(...), model.half()). Move and "
                    "convert the model before creating the optimizer; copy values with p.data.copy_(...) inside of "
                    "`with optimizer.changing_parameters():`"
                )
        now, versions = self._sample(), list(map(version_of, self._parameters))
        if torch.equal(now, self._left) and versions == self._versions:
            return
        pairs = enumerate(zip(versions, self._versions, strict=True))
        changed = sorted(  # values tell of p.data, and of other ranks; versions of whatever this rank wrote to p
            {self._owners[place] for place in (now != self._left).nonzero().flatten().tolist()}.union(
                index for index, (version, before) in pairs if version != before
            )
        )
        raise ModelError(
            f"{len(changed)} parameter(s), such as {self._names[changed[0]]}, were changed outside of "
            "ZeroRedundancyOptimizer.step(). All ranks of this host share their memory, so others see the change "
            "while they compute. Write inside of `with optimizer.changing_parameters():`, on all ranks"
        )


def trim() -> None:
    """With glibc, return unused memory that parameters have left to the system. Local.

    Freed memory of the size of gradients stays with the process, for the next step (`gradient_memory.py`).
    """
    trim = function("malloc_trim")
    if trim is not None:
        trim(0)


def _part_bytes(total: int, world_size: int) -> int:
    """Size of each rank's part, in whole pages or huge pages, so that the parts are contiguous."""
    part_bytes = -(-max(total, 1) // world_size)
    unit = _HUGE_PAGE_BYTES if part_bytes >= _HUGE_PAGE_BYTES else _PAGE_BYTES
    return -(-part_bytes // unit) * unit


def _check_apart(parameters: Sequence[torch.Tensor], names: Sequence[str]) -> None:
    """Check that no two parameters share memory. Local.

    Raises:
        InputError: some do; names two.
    """
    seen: dict[int, str] = {}
    for name, parameter in zip(names, parameters, strict=True):
        if parameter.numel() == 0:
            continue
        other = seen.setdefault(parameter.data_ptr(), name)
        if other != name:
            raise InputError(
                f"parameters {other} and {name} are two views of the same memory. Make them one parameter (b.weight = "
                "a.weight) before wrapping the model"
            )


def _num_places(parameter: torch.Tensor) -> int:
    return min(_SAMPLES, parameter.numel()) * parameter.element_size()


def _places(starts: Sequence[int], parameters: Sequence[torch.Tensor]) -> list[int]:
    """Indices of all bytes of some elements of each parameter."""
    found: list[int] = []
    for start, parameter in zip(starts, parameters, strict=True):
        numel, size = parameter.numel(), parameter.element_size()
        for sample in range(min(_SAMPLES, numel)):
            element = start + (sample * (numel - 1) // max(1, min(_SAMPLES, numel) - 1)) * size
            found += range(element, element + size)
    return found
