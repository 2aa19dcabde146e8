"""Where sharded parameters live: once per host, or on every rank."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version
from torch.optim.optimizer import Optimizer

from lockstep.comm.backend import engine_of
from lockstep.comm.engine import Engine
from lockstep.errors import InputError, ModelError, SharedMemoryError
from lockstep.parallel.distributed import DistributedDataParallel
from lockstep.parallel.sharded.engines import shard
from lockstep.parallel.sharded.gradients import ShardedGradient
from lockstep.parallel.sharded.inner import ShardPiece
from lockstep.parallel.sharded.memory import HostMemory, trim
from lockstep.parallel.sharded.shares import Share, flat_of, share_out
from lockstep.torch_private.tensors import foreach_copy_

__all__ = ["Backing", "EveryRanksBacking", "HostBacking"]

_Member = tuple[Share, torch.Tensor]
_WORTH_SENDING = 32 << 10  # elements from which on a part is a message of its own


class HostBacking:
    """Parameters once per host, gradients in the buckets of engines. See [Note: shared parameters of a host].

    Args:
        owner: the optimizer.
        engine: of the group, whose ranks share memory.
        group: that group.
        models: the engines whose parameters these are.
        is_cut: whether parameters may be cut.
    """

    def __init__(
        self,
        owner: Optimizer,
        engine: Engine,
        group: dist.ProcessGroup,
        models: Sequence[DistributedDataParallel],
        is_cut: bool,
    ) -> None:
        self._owner = weakref.ref(owner)
        self._engine, self._group, self._models, self._is_cut = engine, group, models, is_cut
        self._loads = [0] * group.size()
        self._memories: list[HostMemory] = []
        self._gradients: list[ShardedGradient] = []
        self._members: list[_Member] = []
        self._expects_writes, self._num_steps = False, 0

    def add(self, parameters: Sequence[torch.Tensor], names: Sequence[str]) -> list[_Member]:
        """Take in parameters, which move into memory that the ranks of the host share. Collective.

        Returns:
            For each, this rank's share, and the memory of the whole parameter, flat.
        """
        shares = share_out(parameters, self._group.rank(), self._loads, self._is_cut)
        memory = HostMemory(self._engine, parameters, names)
        self._memories.append(memory)
        found = [ShardedGradient(share, self._gradients, self._group, self._owner) for share in shares]
        self._gradients += found
        by_parameter = {id(gradient.share.parameter): gradient for gradient in found}
        taking_back: list[Callable[[], None]] = [memory.leave]
        try:
            for model in self._models:
                own = {id(each) for each in model.module.parameters()}
                taking_back.append(shard(model, {key: each for key, each in by_parameter.items() if key in own}))
        except SharedMemoryError:
            for each in taking_back:
                each()
            raise
        for model in self._models:
            self._listen(model.module, by_parameter)
        members = list(zip(shares, memory.flats, strict=True))
        self._members += members
        return members

    # ---- a step --------------------------------------------------------------------------------------

    def gradient_of(self, piece: ShardPiece) -> torch.Tensor | None:
        """Of the elements of a piece, made where they lie."""
        share = piece.share
        return None if share.parameter.grad is None else share.mean_of(piece.start, piece.stop)

    def step(self, description: str, update: Callable[[], None]) -> None:
        """Update this rank's shares between two steps of all ranks. Collective.

        Args:
            description: the same on all ranks, or it is an error.
            update: calls `gradient_of`.
        """
        self._check()
        used = [each for each in self._gradients if each.is_held]

        def between() -> None:
            update()
            for each in used:
                each.share.settle()

        self._engine.run_steps(description, between)
        self._note()
        self._num_steps += 1
        if self._num_steps.bit_count() == 1:  # less and less often: what it gives away costs faults when it comes back
            trim()

    def _check(self) -> None:
        for memory in () if self._expects_writes else self._memories:
            memory.check()
        for gradient in self._gradients:
            found = gradient.share.parameter.grad
            if found is None or (found is gradient and gradient.share.has_gradient and gradient.added is None):
                continue
            raise ModelError(
                "a parameter of ZeroRedundancyOptimizer has a gradient that DistributedDataParallel has not averaged: "
                "make the last backward pass before each step outside of no_sync(), of what model(x) returns, and "
                "change gradients in place (p.grad.mul_(...), p.grad.copy_(...)) instead of putting others there"
            )

    def _note(self) -> None:
        """What the parameters hold now is what they are to hold."""
        self._expects_writes = False
        for memory in self._memories:
            memory.note()
        for share, _ in self._members:
            increment_version(share.parameter)

    def full_gradients(self) -> list[torch.Tensor | None]:
        """Every rank puts its means into its bucket, and all read them there. Collective."""
        held = [each.is_held for each in self._gradients]
        found: list[torch.Tensor | None] = [None] * len(held)
        mask = "".join(str(int(each)) for each in held)
        text = f"ZeroRedundancyOptimizer.full_gradients({mask})"

        def put() -> None:
            for gradient, is_held in zip(self._gradients, held, strict=True):
                if is_held:
                    gradient.share.show()

        def read() -> None:
            for index, (gradient, is_held) in enumerate(zip(self._gradients, held, strict=True)):
                if is_held:
                    found[index] = gradient.share.whole()

        self._engine.run_steps(text, put)
        self._engine.run_steps(text, read)
        return found

    # ---- writes of others ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Of what the ranks write, that of the first counts; the others write to copies."""
        text = "ZeroRedundancyOptimizer.changing_parameters()"
        self._engine.run_steps(text)
        is_first = self._group.rank() == 0
        shared = [share.parameter.data for share, _ in self._members]
        if not is_first:
            for share, _ in self._members:
                share.parameter.data = share.parameter.data.clone()
        try:
            yield
        finally:
            if not is_first:
                for (share, _), data in zip(self._members, shared, strict=True):
                    share.parameter.data = data
        self._engine.run_steps(text)
        self._note()

    def _listen(self, module: torch.nn.Module, known: Mapping[int, object]) -> None:
        """Hear of `load_state_dict` of each part of the model that holds some of these parameters."""
        for submodule in module.modules():
            if any(id(each) in known for each in submodule.parameters(recurse=False)):
                submodule.register_load_state_dict_pre_hook(_LoadHook(submodule, self))  # type: ignore[no-untyped-call]

    def loads(self, module: torch.nn.Module, state: Mapping[str, Any], prefix: str) -> None:
        """A state is about to be loaded into a module, on all ranks; see `_LoadHook`. Collective.

        Raises:
            CollectiveMismatch: the ranks load different ones.
        """
        values = []
        for name, parameter in module.named_parameters(recurse=False):
            given = state.get(prefix + name)
            if isinstance(given, torch.Tensor) and given.shape == parameter.shape and given.numel():
                flat = given.detach().reshape(-1)
                values.append(f"{name} {flat[0].item()} … {flat[-1].item()}")
        self._engine.run_steps(f"load_state_dict into parameters that the ranks share ({', '.join(values)})")
        self._expects_writes = True


class _LoadHook:
    """Called before a module loads its own parameters. Goes with neither a copy of the module nor a pickle of it."""

    def __init__(self, module: torch.nn.Module, backing: HostBacking) -> None:
        self._module, self._backing = weakref.ref(module), weakref.ref(backing)

    def __call__(self, module: torch.nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
        backing = self._backing()
        if backing is not None and module is self._module():
            backing.loads(module, state, prefix)

    def __deepcopy__(self, _: dict[int, Any]) -> functools.partial[str]:
        return _NOTHING

    def __reduce__(self) -> tuple[object, ...]:
        return functools.partial, (str.format, "")


_NOTHING = functools.partial(str.format, "")  # takes any arguments, and is known wherever Python is


class EveryRanksBacking:
    """Parameters on every rank, which it gets from the others after each step; gradients are whole, and averaged.

    That is torch's ZeroRedundancyOptimizer, and works with any engine, over any group.

    Args:
        group: the ranks that share; None for this process alone.
        is_cut: whether parameters may be cut.
    """

    def __init__(self, group: dist.ProcessGroup | None, is_cut: bool) -> None:
        self._group, self._is_cut = group, is_cut
        self._world_size = 1 if group is None else group.size()
        self._rank = 0 if group is None else group.rank()
        self._loads = [0] * self._world_size
        self._shares: list[Share] = []

    def add(self, parameters: Sequence[torch.Tensor], names: Sequence[str]) -> list[_Member]:
        """Take in parameters, which stay where they are."""
        shares = share_out(parameters, self._rank, self._loads, self._is_cut)
        self._shares += shares
        return [(share, self._flat(share)) for share in shares]

    def _flat(self, share: Share) -> torch.Tensor:
        parameter = share.parameter
        flat = flat_of(parameter.data, parameter)
        if flat.data_ptr() != parameter.data_ptr():  # with gaps between its elements
            parameter.data = torch.empty_like(parameter.data).copy_(parameter.data)
            flat = flat_of(parameter.data, parameter)
        return flat

    def gradient_of(self, piece: ShardPiece) -> torch.Tensor | None:
        """Of the elements of a piece, of `.grad`."""
        gradient, share = piece.share.parameter.grad, piece.share
        if gradient is None:
            return None
        if gradient.layout != torch.strided:
            raise InputError("ZeroRedundancyOptimizer: a parameter has a sparse gradient; use Embedding(sparse=False)")
        parameter = share.parameter
        offset = (share.first + piece.start) * parameter.element_size()
        if piece.parameter.data_ptr() != parameter.data_ptr() + offset:  # moved since, as by model.to()
            piece.move(self._flat(share))
        return share.own(gradient)[piece.start : piece.stop]

    def step(self, description: str, update: Callable[[], None]) -> None:
        """Update this rank's shares, and get those of the others."""
        update()
        for share in self._shares:
            increment_version(share.parameter)
        if self._world_size > 1:
            self._exchange()

    def _exchange(self) -> None:
        kinds: dict[tuple[torch.dtype, torch.device], list[Share]] = {}
        for share in self._shares:
            kinds.setdefault((share.parameter.dtype, share.parameter.device), []).append(share)
        for (_, device), shares in kinds.items():
            flats = [flat_of(share.parameter.data, share.parameter) for share in shares]
            by_rank = [
                [flat[share.bounds[rank] : share.bounds[rank + 1]] for flat, share in zip(flats, shares, strict=True)]
                for rank in range(self._world_size)
            ]
            if device.type == "cpu" and engine_of(self._group) is None:
                self._broadcast(by_rank)
            else:
                self._gather(by_rank)

    def _broadcast(self, by_rank: Sequence[Sequence[torch.Tensor]]) -> None:
        """Over gloo, whose all_gather takes several times as long: large parts in place, small ones in one message."""
        group = self._group
        assert group is not None
        works = []
        rows: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
        for rank, parts in enumerate(by_rank):
            small = [each for each in parts if 0 < each.numel() < _WORTH_SENDING]
            rows += [(torch.cat(small), small)] if small else []
            sent = [each for each in parts if each.numel() >= _WORTH_SENDING] + [row for row, _ in rows[-1:] if small]
            source = dist.get_global_rank(group, rank)
            works += [dist.broadcast(each, source, group=group, async_op=True) for each in sent]
        for work in works:
            work.wait()
        for row, parts in rows:
            foreach_copy_(list(parts), list(torch.split(row, [each.numel() for each in parts])))

    def _gather(self, by_rank: Sequence[Sequence[torch.Tensor]]) -> None:
        numels = [sum(each.numel() for each in parts) for parts in by_rank]
        own = by_rank[0][0].new_empty(max(numels))
        own[: numels[self._rank]] = torch.cat(list(by_rank[self._rank]))
        rows = [torch.empty_like(own) for _ in numels]
        dist.all_gather(rows, own, group=self._group)
        for rank, (parts, row) in enumerate(zip(by_rank, rows, strict=True)):
            if rank != self._rank:
                sizes = [each.numel() for each in parts]
                foreach_copy_(list(parts), list(torch.split(row[: numels[rank]], sizes)))

    def full_gradients(self) -> list[torch.Tensor | None]:
        """They are whole."""
        return [share.parameter.grad for share in self._shares]

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Each rank has its own."""
        yield


Backing = HostBacking | EveryRanksBacking
