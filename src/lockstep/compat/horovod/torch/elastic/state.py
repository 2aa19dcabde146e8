"""The state of elastic training: committed in memory, and on disk if the launcher restarts ranks.

[Note: two kinds of recovery] If a collective fails and the processes survive, they go back to the last commit in
memory, and rejoin. If a process dies, `lockstep horovodrun` restarts all ranks; the last commit is then read from a
folder that the launcher has created for this job and removes at its end.
"""

from __future__ import annotations

import copy
import queue
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lockstep import checkpoint, env
from lockstep.compat.horovod.common.exceptions import HostsUpdatedInterrupt
from lockstep.compat.horovod.torch.context import rank
from lockstep.compat.horovod.torch.elastic.sampler import ElasticSampler
from lockstep.compat.horovod.torch.functions import (
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from lockstep.compat.horovod.torch.mpi_ops.reductions import Max, allreduce
from lockstep.errors import InputTypeError
from lockstep.log import get_logger, warn_once

__all__ = [
    "ModelStateHandler",
    "ObjectState",
    "OptimizerStateHandler",
    "SamplerStateHandler",
    "State",
    "StateHandler",
    "TorchState",
    "get_handler_registry",
    "set_handler_registry",
]


class State:
    """State that is synchronized before training, and restored after a failure.

    Args:
        bcast_object: function that broadcasts an object from rank 0.
        get_rank: function that returns this rank.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._host_messages: queue.Queue[tuple[float, int]] = queue.Queue()
        self._last_updated_timestamp = 0.0
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Register functions to call after every reset, for instance to scale the learning rate. Local."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Called by `elastic.run` after the ranks have rejoined. Local."""
        self._host_messages = queue.Queue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Note that hosts were added (1), removed (2) or both (3), for the next check. Local; any thread, any rank."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save, and then check for host updates. Collective."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise on all ranks if hosts have changed according to any. Collective.

        Raises:
            HostsUpdatedInterrupt: hosts have changed.
        """
        newest, updates = self._last_updated_timestamp, 0
        while not self._host_messages.empty():
            timestamp, update = self._host_messages.get()
            if timestamp > newest:
                newest, updates = timestamp, updates | update
        # Any rank that knows of an update tells the others; Horovod asks rank 0 only.
        facts = [newest, float(updates & 1), float((updates >> 1) & 1)]
        sent = torch.tensor(facts, dtype=torch.float64, device="cpu")
        latest, added, removed = allreduce(sent, op=Max, name="elastic.host_updates").tolist()
        previous, self._last_updated_timestamp = self._last_updated_timestamp, latest
        if latest > previous:
            raise HostsUpdatedInterrupt(skip_sync=removed > 0 and added == 0)

    def save(self) -> None:
        """Save the current state. Local."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to the saved state. Local."""
        raise NotImplementedError

    def sync(self) -> None:
        """Copy rank 0's state. Collective."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt to new ranks, before `sync`. Local; does nothing unless overridden."""

    def resume(self) -> None:
        """After a restart of all processes: load the last commit from disk, if there is one. Collective."""


class ObjectState(State):
    """A state of plain objects, which are passed as keyword arguments and become its attributes.

    Args:
        bcast_object: function that broadcasts an object from rank 0.
        get_rank: function that returns this rank.
        **kwargs: initial values by name.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state = kwargs
        self._set_attrs()

    def save(self) -> None:
        """Save the attributes. Local."""
        self._saved_state = {name: getattr(self, name) for name in self._saved_state}

    def restore(self) -> None:
        """Go back to the saved attributes. Local."""
        self._set_attrs()

    def sync(self) -> None:
        """Copy rank 0's current attributes. Collective."""
        if self._saved_state:
            ObjectState.save(self)
            self._saved_state = self._bcast_object(self._saved_state)
            self._set_attrs()

    def _set_attrs(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, value)


class StateHandler:
    """Saves a value that is not a plain object.

    Args:
        value: the object whose state to save.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        self.saved: Any = None
        self.save()

    def save(self) -> None:
        """Save its state. Local."""
        self.saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Go back to the saved state. Local."""
        self.value.load_state_dict(copy.deepcopy(self.saved))

    def sync(self) -> None:
        """Copy rank 0's state. Collective."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Replace the value. Local."""
        self.value = value
        self.save()


class ModelStateHandler(StateHandler):
    """Saves a model's parameters and buffers."""

    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)
        self.save()


class OptimizerStateHandler(StateHandler):
    """Saves an optimizer's state and options."""

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)
        self.save()


class SamplerStateHandler(StateHandler):
    """Saves a sampler's position. In `sync`, samples that any rank has not recorded count as not processed."""

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))
        self.save()


_registry: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """Handlers by type of value; the first that matches is used."""
    return _registry


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    """Replace the registry, for values with other handlers. Local."""
    global _registry
    _registry = registry


def _find_handler(value: Any) -> StateHandler | None:
    for kind, handler in _registry:
        if isinstance(value, kind):
            return handler(value)
    return None


class TorchState(ObjectState):
    """A state with a model, an optimizer, and anything else needed to resume training.

    Args:
        model: a module, or None.
        optimizer: an optimizer, wrapped or not, or None.
        **kwargs: further models, optimizers, samplers and plain objects, which become attributes.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        values = {**kwargs, "model": model, "optimizer": optimizer}
        found = {name: _find_handler(value) for name, value in values.items()}
        self._handlers = {name: handler for name, handler in found.items() if handler is not None}
        for name, handler in self._handlers.items():
            object.__setattr__(self, name, handler.value)
        self._num_commits = 0
        plain = {name: value for name, value in values.items() if name not in self._handlers}
        super().__init__(bcast_object=broadcast_object, get_rank=rank, **plain)

    def save(self) -> None:
        """Save everything. Local."""
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Go back to the saved state. Local."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Copy rank 0's state. Collective."""
        for handler in self._handlers.values():
            handler.sync()
        super().sync()

    def reset(self) -> None:
        """Divide the remaining samples of samplers between the current ranks. Local."""
        for handler in self._handlers.values():
            if isinstance(handler, SamplerStateHandler):
                handler.value.reset()

    def commit(self) -> None:
        """Save, in memory and in the launcher's folder, if any; then check for host updates. Collective."""
        self.save()
        folder = env.LOCKSTEP_ELASTIC_FOLDER.get()
        if folder is not None:
            self._num_commits += 1
            content = {
                "handlers": {name: handler.saved for name, handler in self._handlers.items()},
                "objects": self._saved_state,
                "num_commits": self._num_commits,
                "time": time.time(),
            }
            try:
                checkpoint.save(folder, content, step=self._num_commits, keep=1)
            except InputTypeError as error:
                warn_once(get_logger(__name__), f"commits will not survive a restart of this job: {error}")
        self.check_host_updates()

    def resume(self) -> None:
        folder = env.LOCKSTEP_ELASTIC_FOLDER.get()
        if folder is None or not env.TORCHELASTIC_RESTART_COUNT.get() or not checkpoint.available(folder):
            return
        content = checkpoint.load(folder)
        for name, handler in self._handlers.items():
            handler.saved = content["handlers"][name]
            handler.restore()
        self._saved_state.update(content["objects"])
        self._num_commits = content["num_commits"]  # number of the next commit's file
        self._set_attrs()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_handlers", ()):
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)
