"""A lockstep group with groups of others behind it, for other kinds of devices. See [Note: mixed groups]."""

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
    """The kind of device of the first tensor among arguments, also in lists of lists."""
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
    """A class decorator: every verb, under all its names, looks at its tensors first."""
    verbs = {id(vars(EngineProcessGroup)[verb]) for verb in VERBS}
    for name, method in list(vars(EngineProcessGroup).items()):
        if id(method) in verbs:
            setattr(group, name, _by_device(name, method))
    return group


@_routes
class MixedProcessGroup(LockstepProcessGroup):
    """Takes the tensors of its own kinds of devices and hands on the others.

    Args:
        kinds_behind: kind of device -> backend, of the groups that are to be put behind it.
        options: those of a `LockstepProcessGroup`.

    Attributes:
        kinds_behind: kind of device -> backend.
    """

    def __init__(self, kinds_behind: dict[str, str], options: Any) -> None:
        super().__init__(options)
        self.kinds_behind = kinds_behind
        self._behind: dict[str, Any] = {}
        self._global_ranks = ranks_of(options)

    def put_behind(self, device: str, group: dist.ProcessGroup) -> None:
        """Hand tensors of that kind of device to a group from now on. Local."""
        self._behind[device] = group
        note_ranks(group, self._global_ranks)

    def behind(self, device: torch.device) -> dist.ProcessGroup | None:
        """The group that moves tensors of that device; None for this one."""
        return self._behind.get(device.type)

    @property
    def _device_types(self) -> list[torch.device]:
        """The devices whose tensors it moves, and the groups behind it."""
        return [torch.device("cpu"), *(torch.device(device) for device in self._behind if device != "cpu")]

    def get_backend(self, device: torch.device) -> Any:
        """The group that moves tensors of that device."""
        group = self.behind(torch.device(device))
        return self if group is None else backend_of(group, device)

    _get_backend = get_backend

    def _start_coalescing(self, device: torch.device) -> None:
        """Begin to collect several collectives of tensors of that device into one."""
        start_coalescing(self.behind(device) or self, device)

    def _end_coalescing(self, device: torch.device) -> Any:
        """Run the collectives that were collected."""
        return end_coalescing(self.behind(device) or self, device)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long later calls wait, also those of the groups behind it. Local; calls under way keep theirs."""
        super().set_timeout(timeout)
        for group in self._behind.values():
            set_timeout(group, timeout)

    def shutdown(self) -> None:
        """Leave the group, and those behind it. Local; `dist.destroy_process_group` calls it."""
        super().shutdown()
        self._destroy_behind()

    def abort(self) -> None:
        """Leave the group at once, and those behind it. Local."""
        super().abort()
        self._destroy_behind()

    def _destroy_behind(self) -> None:
        while self._behind:
            _, group = self._behind.popitem()
            if dist.group.WORLD is not self and is_registered(group):  # else torch ends it, as all groups
                dist.destroy_process_group(group)
