"""Storage of sharded parameters: on every rank, or once per host."""

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

from lockstep.agreement import collective_device, texts_that_differ
from lockstep.comm.engine import Engine
from lockstep.drift.comparison import digest
from lockstep.errors import InputError, ModelError, SharedMemoryError
from lockstep.parallel.distributed import DistributedDataParallel
from lockstep.parallel.sharded.engines import shard
from lockstep.parallel.sharded.exchange import compare, exchange
from lockstep.parallel.sharded.gradients import ShardedGradient, whole_gradients
from lockstep.parallel.sharded.inner import ShardPiece
from lockstep.parallel.sharded.memory import HostMemory, trim
from lockstep.parallel.sharded.shares import Share, flat_of, layout_of, share_out

__all__ = ["Backing", "HostBacking"]

_Member = tuple[Share, torch.Tensor]
_Models = Sequence[DistributedDataParallel]


class Backing:
    """Parameters stored on every rank, which receives the others' updates after each step.

    Args:
        owner: the optimizer.
        group: the ranks that share; None for a single process.
        models: the engines that leave the gradients of these parameters to owners of shares; empty if gradients are
            whole, and averaged elsewhere.
        is_cut: whether parameters may be split.

    Attributes:
        group: the ranks that share.
    """

    def __init__(self, owner: Optimizer, group: dist.ProcessGroup | None, models: _Models, is_cut: bool) -> None:
        self._owner = weakref.ref(owner)
        self.group, self._models, self._is_cut = group, models, is_cut
        self._rank, self._loads = (0, [0]) if group is None else (group.rank(), [0] * group.size())
        self._shares: list[Share] = []
        self._gradients: list[ShardedGradient] = []  # of the same parameters, or none
        self._num_steps = 0

    def add(self, parameters: Sequence[torch.Tensor], names: Sequence[str]) -> list[_Member]:
        """Add parameters. Collective.

        Returns:
            For each, this rank's share, and the memory of the whole parameter, flat.

        Raises:
            SharedMemoryError: on every rank; there is no shared memory. Nothing was changed.
        """
        shares = share_out(parameters, self._rank, self._loads, self._is_cut)
        members = [(share, self._flat(share)) for share in shares]
        if self._models:
            self._shard(shares)
        self._shares += shares
        return members

    def _shard(self, shares: Sequence[Share]) -> None:
        """Let the engines send gradients to the owners of shares."""
        assert self.group is not None
        made = {id(each.parameter): ShardedGradient(each, self._gradients, self.group, self._owner) for each in shares}
        taking_back: list[Callable[[], None]] = []
        try:
            for model in self._models:
                own = {id(each) for each in model.module.parameters()}
                taking_back.append(shard(model, {key: each for key, each in made.items() if key in own}))
        except SharedMemoryError:
            for each in taking_back:
                each()
            raise
        self._gradients += made.values()

    def _flat(self, share: Share) -> torch.Tensor:
        parameter = share.parameter
        flat = flat_of(parameter.data, parameter)
        if flat.data_ptr() != parameter.data_ptr():  # with gaps between its elements
            parameter.data = torch.empty_like(parameter.data).copy_(parameter.data)
            flat = flat_of(parameter.data, parameter)
        return flat

    # ---- a step --------------------------------------------------------------------------------------

    def gradient_of(self, piece: ShardPiece) -> torch.Tensor | None:
        """The gradient of a piece's elements; for a `ShardedGradient`, computed in place."""
        share = piece.share
        parameter, gradient = share.parameter, share.parameter.grad
        if gradient is None:
            return None
        if gradient.layout != torch.strided:
            raise InputError("ZeroRedundancyOptimizer: a parameter has a sparse gradient. Use Embedding(sparse=False)")
        offset = (share.first + piece.start) * parameter.element_size()
        is_elsewhere = piece.parameter.data_ptr() != parameter.data_ptr() + offset  # moved since, as by model.to()
        if is_elsewhere or layout_of(parameter) != piece.layout:
            piece.move(self._flat(share))
        if isinstance(gradient, ShardedGradient):
            return share.mean_of(piece.start, piece.stop)
        return share.own(gradient)[piece.start : piece.stop]

    def step(self, description: str, update: Callable[[], None]) -> None:
        """Update this rank's shares; afterwards all ranks have the new parameters. Collective.

        Args:
            description: must be the same on all ranks.
            update: calls `gradient_of`.

        Raises:
            CollectiveMismatch: on every rank, before any update; shows two ranks' descriptions.
        """
        self._check()
        if len(self._loads) > 1:
            assert self.group is not None
            self._num_steps += 1
            device = collective_device(self.group, self._shares[0].parameter.device)
            if device.type == "cpu" or self._num_steps.bit_count() == 1:  # a host waits for its GPU to compare
                compare(description, self.group, device)
        self._update(update)
        self._note()
        if len(self._loads) > 1:
            assert self.group is not None
            exchange(self._shares, [self._flat(each) for each in self._shares], self.group)

    def _check(self) -> None:
        """Check that every gradient is averaged over all ranks. Collective if gradients were set by hand."""
        others = [each for each in self._gradients if not (each.is_held or each.share.gradient is None)]
        is_late = any(
            each.is_sent or (each.is_held and (each.added is not None or not each.share.has_gradient))
            for each in self._gradients
        )
        if not is_late and others:
            assert self.group is not None
            given = digest(each.share.gradient for each in others if each.share.gradient is not None)
            text = f"ZeroRedundancyOptimizer.step() with {len(others)} gradients set by hand ({given[:8]})"
            is_late = bool(texts_that_differ(text, self.group, collective_device(self.group, others[0].device)))
        if is_late:
            raise ModelError(
                "a parameter of ZeroRedundancyOptimizer has a gradient that DistributedDataParallel has not "
                "averaged. Run the last backward pass before each step outside of no_sync(), from the output of "
                "model(x); gradients set by hand (p.grad = ...) must be set on every rank, to the same values"
            )

    def _update(self, update: Callable[[], None]) -> None:
        used = [each for each in self._gradients if each.is_held]
        update()
        for each in used:
            each.share.settle()

    def _note(self) -> None:
        """Record the parameters' current values as right."""
        for share in self._shares:
            increment_version(share.parameter)

    def full_gradients(self) -> list[torch.Tensor | None]:
        """The gradients of all parameters; None if there is none. Collective."""
        if not self._gradients:
            return [share.gradient for share in self._shares]
        found = zip(self._gradients, whole_gradients(self._gradients), strict=True)
        return [whole if each.is_held else each.share.gradient for each, whole in found]

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Nothing to coordinate, as each rank has its own parameters."""
        yield


class HostBacking(Backing):
    """Parameters stored once per host, gradients in engines' buckets. See [Note: shared parameters of a host].

    Args:
        engine: engine of the group, whose ranks share memory.
        owner, group, models, is_cut: as in `Backing`.
        holders: the engines that hold the parameters.
    """

    def __init__(
        self,
        engine: Engine,
        owner: Optimizer,
        group: dist.ProcessGroup,
        models: _Models,
        is_cut: bool,
        holders: _Models,
    ) -> None:
        super().__init__(owner, group, models, is_cut)
        self._engine, self._holders = engine, holders
        self._memories: list[HostMemory] = []
        self._expects_writes = False

    def add(self, parameters: Sequence[torch.Tensor], names: Sequence[str]) -> list[_Member]:
        """Add parameters, which are moved into the host's shared memory. Collective."""
        memory = HostMemory(self._engine, parameters, names)
        try:
            members = super().add(parameters, names)
        except SharedMemoryError:
            memory.leave()
            raise
        self._memories.append(memory)
        for model in self._holders:
            self._listen(model.module, {id(each) for each in parameters})
        return members

    def step(self, description: str, update: Callable[[], None]) -> None:
        """Update this rank's shares between two steps of all ranks. Collective."""
        for memory in () if self._expects_writes else self._memories:
            memory.check()
        self._check()
        self._engine.run_steps(description, lambda: self._update(update))
        self._note()
        self._num_steps += 1
        if self._num_steps.bit_count() == 1:  # less and less often: what it gives away costs faults when it comes back
            trim()

    def _note(self) -> None:
        super()._note()
        self._expects_writes = False
        for memory in self._memories:
            memory.note()

    def full_gradients(self) -> list[torch.Tensor | None]:
        """The gradients of all parameters; it is an error if ranks have gradients of different ones. Collective."""
        held = "".join(str(int(each.is_held)) for each in self._gradients)
        self._engine.run_steps(f"ZeroRedundancyOptimizer.full_gradients({held})")
        return super().full_gradients()

    # ---- writes of others ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Every rank writes to a copy; the first rank's counts. Tensors kept from `p.data` stay local."""
        text = "ZeroRedundancyOptimizer.changing_parameters()"
        shared = [share.parameter.data for share in self._shares]
        for share in self._shares:  # before the ranks meet: the first may be through, and write, while others copy
            share.parameter.data = share.parameter.data.clone()
        try:
            self._engine.run_steps(text)
            yield
        finally:
            written = [share.parameter.data for share in self._shares]
            for share, data in zip(self._shares, shared, strict=True):
                share.parameter.data = data
        self._put_back(written)
        self._engine.run_steps(text)
        self._note()

    def _put_back(self, written: Sequence[torch.Tensor]) -> None:
        """Copy the first rank's values to the shared memory. Local.

        Raises:
            ModelError: a parameter was given another shape or dtype.
        """
        for share, data in zip(self._shares, written, strict=True):
            own = share.parameter.data
            if (data.shape, data.dtype) != (own.shape, own.dtype):
                raise ModelError(
                    f"inside of changing_parameters(), a parameter of shape {list(own.shape)} and {own.dtype} was "
                    f"given one of shape {list(data.shape)} and {data.dtype}. Reshape and convert the model before "
                    "wrapping it, then create the optimizer"
                )
            if self._rank == 0:
                own.copy_(data)

    def _listen(self, module: torch.nn.Module, known: set[int]) -> None:
        """Register for `load_state_dict` of each module that has some of these parameters."""
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
