"""`lockstep.ZeroRedundancyOptimizer`: any optimizer, sharded over ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer

from lockstep.agreement import collective_device
from lockstep.comm.backend import engine_of
from lockstep.drift.comparison import digest
from lockstep.drift.engines import engines
from lockstep.errors import CheckpointError, InputError, InputTypeError, ModelError
from lockstep.parallel.checks import check_group
from lockstep.parallel.rank_agreement import check_same_model
from lockstep.parallel.sharded.backings import Backing, HostBacking
from lockstep.parallel.sharded.engines import find_models, group_of_host
from lockstep.parallel.sharded.gradients import JOIN_ADVICE
from lockstep.parallel.sharded.inner import InnerOptimizer, check_class, is_elementwise
from lockstep.parallel.sharded.states import PieceStates, collect_states, cut_state
from lockstep.parallel.sharded.transport import find_way

__all__ = ["ZeroRedundancyOptimizer"]

_NOT_OPTIONS = ("params", "param_names")


class ZeroRedundancyOptimizer(Optimizer):
    """Shards an optimizer: each rank updates a share of the parameters, and stores only that share's state.

    Training is the same as with the optimizer itself. If the ranks share a host, and `DistributedDataParallel` averages
    over a lockstep group, the parameters are stored once per host, the ranks add their gradients to one sum in turns,
    and a step costs little more than its computation. On several hosts, and over MPI, the ranks of each host share
    parameters in this way, and whole gradients are averaged over all ranks. Over gloo and nccl each part of a gradient
    is summed by its owner; after the step each rank receives the parameters that others have updated. Over other
    groups, with other engines, and without one, `step` gets whole, averaged gradients, as with torch's optimizer of
    this name.

        model = lockstep.DistributedDataParallel(model)
        optimizer = lockstep.ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)

    Schedulers, parameter groups, `clip_grad_norm_`, `clip_grad_value_`, GradScaler and accumulation under `no_sync()`
    work as with a plain optimizer. After `backward()` each rank has only the mean of its own share, and `p.grad` is a
    tensor that represents the whole gradient, which `full_gradients` returns. Parameters may only be written by `step`,
    by the model's `load_state_dict` on all ranks, and inside `changing_parameters`.

    Collective: every rank constructs it, with the same arguments, after the model was wrapped.

    Args:
        params: parameters, or groups of them, the same on all ranks.
        optimizer_class: such as `torch.optim.AdamW`. Classes of torch.optim that update each element independently can
            split parameters between ranks; others, and user-defined classes, update whole parameters, each on one rank.
        process_group: the ranks that share; by default the engine's group, else the default group.
        parameters_as_bucket_view: ignored; for compatibility with torch.
        overlap_with_ddp: True is refused; in torch it runs the step within a communication hook.
        elementwise: whether a user-defined class updates each element independently of shapes; None means no.
        **defaults: arguments for `optimizer_class`.

    Attributes:
        optim: the optimizer of this rank's share; torch's name for it.
        process_group: the ranks that share; None without a group.

    Raises:
        InputError: there are no parameters, the class cannot be sharded (`LBFGS`, `SparseAdam`), or a gradient is
            sparse.
        InputTypeError: `params` is a model, or `optimizer_class` no class of optimizers.
        ModelMismatch: on every rank; classes, groups, options or parameters differ between ranks.
        ModelError: from `step`, if a parameter has a gradient that was not averaged, was written to elsewhere, has
            another memory layout than on construction, or was put into a group by hand.
        CollectiveMismatch: from `step`, if options or states differ between ranks, or a rank lacks a gradient that
            others have.
    """

    _backing: Backing  # created after torch's constructor

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[Optimizer],
        process_group: dist.ProcessGroup | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        *,
        elementwise: bool | None = None,
        **defaults: Any,
    ) -> None:
        if isinstance(params, torch.nn.Module):
            raise InputTypeError("ZeroRedundancyOptimizer: params is the model. Pass model.parameters()")
        self._class = check_class(optimizer_class)
        if overlap_with_ddp:
            raise InputError(
                "overlap_with_ddp=True would step the optimizer in a communication hook. Leave both out, and call "
                "step(): gradients are sent during the backward pass anyway"
            )
        self._whole_state: dict[Any, Any] | None = None  # while torch's methods write or read it
        self._taken_in: list[list[int]] = []  # parameters of each group
        self._news = ""  # what has been done to the state since the last step
        self._collected: tuple[int, dict[int, dict[str, Any]] | None] | None = None
        given = params if isinstance(params, torch.Tensor) else list(params)
        super().__init__(given, dict(defaults))
        parameters = self._parameters
        if not parameters:
            raise InputError("ZeroRedundancyOptimizer got no parameters")
        is_cut = is_elementwise(self._class, elementwise)
        self._inner = InnerOptimizer(self._class, defaults, is_cut, in_groups=isinstance(given[0], dict))
        self.process_group = _choose_group(parameters, process_group)
        self._backing = self._choose_backing(is_cut)
        self._take_in(self.param_groups)
        self.defaults.update(self._inner.optimizer.defaults)

    @property
    def _parameters(self) -> list[torch.Tensor]:
        return [each for group in self.param_groups for each in group["params"]]

    @property
    def optim(self) -> Optimizer:
        """The optimizer of this rank's share. Its parameters are pieces of the model's."""
        return self._inner.optimizer

    @property
    def state(self) -> Any:
        """The state of this rank's pieces, see [Note: the state that a script sees]."""
        if self._whole_state is not None:
            return self._whole_state
        return PieceStates(self._inner, self.optim.state, self._note_news)

    @state.setter
    def state(self, value: Mapping[Any, Any]) -> None:
        if not hasattr(self, "_backing"):  # torch's constructor
            return
        if value:
            raise ModelError(
                "optimizer.state = ...: load a whole state into ZeroRedundancyOptimizer with load_state_dict"
            )
        self.state.clear()

    def _note_news(self, text: str) -> None:
        self._news += f"{text}; "
        self._collected = None

    # ---- parameters ----------------------------------------------------------------------------------

    def _choose_backing(self, is_cut: bool) -> Backing:
        group = self.process_group
        if group is None or group.size() == 1:
            return Backing(self, group, [], is_cut)
        models, engine = find_models(self._parameters, group), engine_of(group)
        devices = {each.device for each in self._parameters}
        if models and engine is not None and all(each.type == "cpu" for each in devices):
            if engine.team.shares_memory:
                return HostBacking(engine, self, group, models, is_cut, models)
            near = group_of_host(group, engine)
            # The engines average whole gradients over all hosts, so no host needs parameters updated by another one.
            if near is not None and near.size() == 1:
                return Backing(self, near, [], is_cut)
            if near is not None and (near_engine := engine_of(near)) is not None:
                return HostBacking(near_engine, self, near, [], is_cut, models)
        return Backing(self, group, models if all(find_way(group, each) for each in devices) else [], is_cut)

    def _take_in(self, groups: Sequence[dict[str, Any]]) -> None:
        """Shard the parameters of these groups. Collective."""
        parameters = [each for group in groups for each in group["params"]]
        first = len(self._parameters) - len(parameters)
        known = _names_in_engines()
        names = [known.get(id(each), f"number {first + position}") for position, each in enumerate(parameters)]
        for group in groups:
            if "param_names" in group:
                names = [name for each in groups for name in each["param_names"]]
        self._check_alike(groups, parameters)
        members = iter(self._backing.add(parameters, names))
        self._inner.add_groups(groups, [[next(members) for _ in group["params"]] for group in groups])
        self._taken_in += [[id(each) for each in group["params"]] for group in groups]

    def _check_alike(self, groups: Sequence[dict[str, Any]], parameters: Sequence[torch.Tensor]) -> None:
        for each in parameters:
            if each.layout != torch.strided:
                raise InputError("ZeroRedundancyOptimizer: a parameter is sparse; use a dense one")
        group = self.process_group
        if group is None or group.size() == 1:
            return
        settings: dict[str, object] = {"optimizer_class": f"{self._class.__module__}.{self._class.__qualname__}"}
        for number, options in enumerate(groups):
            settings[f"options of group {number}"] = _describe_options(options)
        for number, parameter in enumerate(parameters):
            settings[f"parameter {number}"] = f"{list(parameter.shape)} {parameter.dtype} {digest([parameter])}"
        check_same_model({}, settings, group, collective_device(group, self._parameters[0].device))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters. Collective, except during construction.

        Args:
            param_group: `params` and options, as for a plain optimizer.
        """
        super().add_param_group(param_group)
        if hasattr(self, "_backing"):
            self._take_in(self.param_groups[-1:])

    # ---- a step --------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's share; when it returns, all ranks have the new parameters. Collective.

        Args:
            closure: called once before the step, as in plain optimizers.

        Returns:
            The result of the closure.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        backing = self._backing
        self._check_groups()
        self._collected = None
        backing.step(self._describe_step(), lambda: self._inner.step(self.param_groups, backing.gradient_of))
        self._news = ""
        return result

    def _check_groups(self) -> None:
        if [[id(each) for each in group["params"]] for group in self.param_groups] != self._taken_in:
            raise ModelError(
                "optimizer.param_groups has parameters that ZeroRedundancyOptimizer was not given, so they are not "
                "sharded. Add them with add_param_group; to replace or remove some, create a new optimizer "
                "(state_dict() has the state of the old one)"
            )

    def _describe_step(self) -> str:
        group = self.process_group
        if group is None or group.size() == 1:
            return ""
        parameters = self._parameters
        used = sum(each.grad is not None for each in parameters)
        options = "; ".join(map(_describe_options, self.param_groups))
        which = "all"
        if used < len(parameters):
            which = str([number for number, each in enumerate(parameters) if each.grad is not None])
        said = f"{self._news}gradients of {which} parameters; {options}"
        return f"ZeroRedundancyOptimizer({self._class.__name__}).step({said})"

    def full_gradients(self) -> list[torch.Tensor | None]:
        """The whole mean gradients of all parameters, in the order of the groups; None if a parameter has none.

        Collective; valid until the next `backward`. They are copies: to change gradients, modify `p.grad` in place.
        """
        return self._backing.full_gradients()

    @contextlib.contextmanager
    def changing_parameters(self) -> Iterator[None]:
        """A context in which parameters may be written to, on all ranks alike: clipped, averaged, redrawn. Collective.

        If a host's ranks share the parameters, the first rank's writes count.
        """
        with self._backing.changing():
            yield

    # ---- state ---------------------------------------------------------------------------------------

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the whole state on one rank, for `state_dict` on that rank only. Collective.

        Args:
            to: the rank in the group.

        Raises:
            InputError: there is no such rank.
        """
        group, sharing = self.process_group, self._backing.group
        size = 1 if group is None else group.size()
        if not isinstance(to, int) or not 0 <= to < size:
            raise InputError(f"consolidate_state_dict(to={to!r}): expected a rank of the group, 0 … {size - 1}")
        only = to
        if group is not None and sharing is not None and sharing is not group:
            ranks = dist.get_process_group_ranks(sharing)
            wanted = dist.get_global_rank(group, to)
            only = ranks.index(wanted) if wanted in ranks else -1
        states = collect_states(self._inner, self.optim.state, self._parameters, sharing, only)
        self._collected = (to, states)

    def state_dict(self) -> dict[str, Any]:
        """The whole state in the plain optimizer's form, which can be loaded by either, at any world size.

        Collective; after `consolidate_state_dict`, until the next step, local on the rank that has it.

        Raises:
            CheckpointError: `consolidate_state_dict` gathered it on another rank.
        """
        if self._collected is None:
            states = collect_states(self._inner, self.optim.state, self._parameters, self._backing.group)
        else:
            to, states = self._collected
            if states is None:
                raise CheckpointError(
                    f"consolidate_state_dict(to={to}) collected the state on rank {to} only. Call state_dict() there, "
                    "or on all ranks without consolidate_state_dict()"
                )
        parameters = self._parameters
        self._whole_state = {parameters[number]: state for number, state in (states or {}).items()}
        try:
            return super().state_dict()
        finally:
            self._whole_state = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the whole state of this optimizer or of a plain one.

        Local; load the same state on all ranks, or the next step is an error.
        """
        try:
            super().load_state_dict(state_dict)  # hands it to `__setstate__`
            states = self._whole_state or {}
        finally:
            self._whole_state = None
        tensors = [each for state in states.values() for each in state.values() if isinstance(each, torch.Tensor)]
        self._note_news(f"after load_state_dict of {len(states)} states, {digest(tensors)[:8]}")
        for piece in self._inner:
            state = states.get(piece.share.parameter)
            if state is None:
                self.optim.state.pop(piece.parameter, None)
            else:
                self.optim.state[piece.parameter] = cut_state(piece, state)

    def join_hook(self, **_: Any) -> NoReturn:
        """Refuses torch's `Join`, which calls this."""
        raise ModelError(f"Join: {JOIN_ADVICE}")

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Called by torch's `load_state_dict`, with `state` and `param_groups`."""
        self._whole_state = state["state"]
        super().__setstate__({key: value for key, value in state.items() if key != "state"})

    def __getstate__(self) -> NoReturn:
        raise ModelError(
            "ZeroRedundancyOptimizer cannot be copied or pickled: its shares are tied to this process and its group. "
            "Use state_dict(), on all ranks"
        )

    # ---- names of torch's ----------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        """Number of ranks that share."""
        return 1 if self.process_group is None else self.process_group.size()

    @property
    def rank(self) -> int:
        """This rank in the group."""
        return 0 if self.process_group is None else self.process_group.rank()


def _describe_options(group: dict[str, Any]) -> str:
    return ", ".join(f"{key}={_text(value)}" for key, value in group.items() if key not in _NOT_OPTIONS)


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return str(value.item()) if value.numel() == 1 else f"tensor{list(value.shape)}"
    is_plain = isinstance(value, (bool, int, float, str, type(None), tuple, list))
    return str(value) if is_plain else type(value).__name__


def _names_in_engines() -> dict[int, str]:
    """Names of parameters in their models, by `id`."""
    return {id(each): name for engine in engines() for name, each in engine.module.named_parameters()}


def _choose_group(parameters: Sequence[torch.Tensor], given: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    if given is not None:
        return check_group(given)
    own = {id(each) for each in parameters}
    for engine in reversed(engines()):  # the newest, as in `find_models`
        if any(id(each) in own for each in engine.module.parameters()):
            return engine.process_group  # type: ignore[no-any-return]
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
