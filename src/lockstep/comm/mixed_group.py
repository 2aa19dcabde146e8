"""A lockstep group that passes tensors on other devices to other groups. See [Note: mixed groups]."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lockstep.comm.backend import VERBS, EngineProcessGroup, LockstepProcessGroup, ranks_of
from lockstep.torch_private.dynamo import untraced
from lockstep.torch_private.groups import (
    backend_of,
    end_coalescing,
    is_registered,
    note_ranks,
    set_timeout,
    start_coalescing,
)

__all__ = ["MixedProcessGroup"]

_Class = TypeVar("_Class", bound=type)


def _device_type_in(values: Any) -> str | None:
    """The device type of the first tensor among the arguments, even in nested lists."""
    for value in values:
        if isinstance(value, torch.Tensor):
            return value.device.type
        if isinstance(value, list | tuple):
            found = _device_type_in(value)
            if found is not None:
                return found
    return None


def _by_device(name: str, of_ours: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: MixedProcessGroup, *args: Any, **kwargs: Any) -> Any:
        group = self._behind.get(_device_type_in((*args, *kwargs.values())) or "")
        return of_ours(self, *args, **kwargs) if group is None else getattr(group, name)(*args, **kwargs)

    return untraced(call)


def _routes(group: _Class) -> _Class:
    """A class decorator: every verb, by all its names, dispatches on the device of its tensors."""
    verbs = {id(vars(EngineProcessGroup)[verb]) for verb in VERBS}
    for name, method in list(vars(EngineProcessGroup).items()):
        if id(method) in verbs:
            setattr(group, name, _by_device(name, method))
    return group


@_routes
class MixedProcessGroup(LockstepProcessGroup):
    """Moves tensors of its own device types, and passes the others to underlying groups.

    Args:
        kinds_behind: device type -> backend, of the underlying groups.
        options: see `LockstepProcessGroup`.

    Attributes:
        kinds_behind: device type -> backend.
    """

    def __init__(self, kinds_behind: dict[str, str], options: Any) -> None:
        super().__init__(options)
        self.kinds_behind = kinds_behind
        self._behind: dict[str, Any] = {}
        self._global_ranks = ranks_of(options)

    def put_behind(self, device: str, group: dist.ProcessGroup) -> None:
        """Pass tensors of that device type to a group from now on. Local."""
        self._behind[device] = group
        note_ranks(group, self._global_ranks)

    def behind(self, device: torch.device) -> dist.ProcessGroup | None:
        """The underlying group that moves tensors of that device; None for this one."""
        return self._behind.get(device.type)

    @property
    def _device_types(self) -> list[torch.device]:
        """The devices whose tensors this group and the underlying ones move."""
        return [torch.device("cpu"), *(torch.device(device) for device in self._behind if device != "cpu")]

    def get_backend(self, device: torch.device) -> Any:
        """The group that moves tensors of that device."""
        group = self.behind(torch.device(device))
        return self if group is None else backend_of(group, device)

    _get_backend = get_backend

    def _start_coalescing(self, device: torch.device) -> None:
        """Start coalescing collectives on tensors of that device into one."""
        start_coalescing(self.behind(device) or self, device)

    def _end_coalescing(self, device: torch.device) -> Any:
        """Run the coalesced collectives."""
        return end_coalescing(self.behind(device) or self, device)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later calls, including those of underlying groups. Local; calls under way keep theirs."""
        super().set_timeout(timeout)
        for group in self._behind.values():
            set_timeout(group, timeout)

    def shutdown(self) -> None:
        """Leave the group, and the underlying ones. Local; `dist.destroy_process_group` calls it."""
        super().shutdown()
        self._destroy_behind()

    def abort(self) -> None:
        """Leave the group at once, and the underlying ones. Local."""
        super().abort()
        self._destroy_behind()

    def _destroy_behind(self) -> None:
        while self._behind:
            _, group = self._behind.popitem()
            if dist.group.WORLD is not self and is_registered(group):  # otherwise torch destroys it, with all groups
                dist.destroy_process_group(group)
