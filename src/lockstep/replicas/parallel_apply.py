"""`parallel_apply`: runs replicas of a module in parallel, each in its own thread.

[Note: what a thread inherits] Some of torch's state is per thread, so each replica's thread gets the caller's: whether
gradients are recorded, inference mode, autocast; and Python's context variables.

[Note: replicas that meet] Layers of some libraries wait for the other replicas within the forward pass, such as batch
normalization synchronized between threads. If a replica raises, the others would wait forever: they are abandoned
after some seconds, in daemon threads.
"""

from __future__ import annotations

import contextvars
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.nn.parallel as torch_parallel
from torch import nn

from lockstep.errors import InputError
from lockstep.replicas.devices import Device, are_on_cpu, resolve_devices
from lockstep.torch_private.modules import ExceptionWrapper

__all__ = ["parallel_apply"]

_SECONDS_FOR_OTHERS = 10.0  # time to finish after a replica has raised; see [Note: replicas that meet]


def parallel_apply(
    modules: Sequence[nn.Module],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[Mapping[str, Any]] | None = None,
    devices: Sequence[Device] | None = None,
    *,
    in_turn: bool = False,
) -> list[Any]:
    """Call each module with its own input, in parallel. Local. Mirrors `torch.nn.parallel.parallel_apply`.

    Args:
        modules: replicas, one per device.
        inputs: for each module its positional arguments (a tuple or list), or its single argument.
        kwargs_tup: for each module its keyword arguments.
        devices: device of each module. On accelerators this is torch's own function.
        in_turn: run one after another, in the caller's thread; on the CPU only.

    Returns:
        The output of each module.

    Raises:
        InputError: the arguments have different lengths.
        Exception: raised by a module, with the same type, and the number of its replica, its device and the
            original traceback in the message; of several, that of the first replica.
    """
    kwargs = [{} for _ in modules] if kwargs_tup is None else [dict(each) for each in kwargs_tup]
    _check_lengths(modules, inputs, kwargs, devices)
    if not modules:
        return []
    chosen = None if devices is None else resolve_devices(devices)
    if _holds_accelerated(inputs) if chosen is None else not are_on_cpu(chosen):
        return torch_parallel.parallel_apply(modules, inputs, kwargs, chosen)
    arguments = [each if isinstance(each, tuple | list) else (each,) for each in inputs]
    calls = [_ReplicaCall(*each) for each in zip(range(len(modules)), modules, arguments, kwargs, strict=True)]
    if in_turn or len(calls) == 1:
        for call in calls:
            call.run_here()
    else:
        _run_in_threads(calls)
    return [call.result() for call in calls]


def _check_lengths(
    modules: Sequence[nn.Module],
    inputs: Sequence[Any],
    kwargs: Sequence[Mapping[str, Any]],
    devices: Sequence[Device] | None,
) -> None:
    lengths = {"modules": len(modules), "inputs": len(inputs), "kwargs_tup": len(kwargs)}
    if devices is not None:
        lengths["devices"] = len(devices)
    if len(set(lengths.values())) > 1:
        raise InputError(f"parallel_apply takes one of each per replica, got {lengths}")


def _holds_accelerated(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.device.type != "cpu"
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, tuple | list):
        return False
    return any(map(_holds_accelerated, value))


class _ReplicaCall:
    """One replica's forward pass.

    Args:
        number: number of the replica, from 0.
        module: the replica.
        inputs: its positional arguments.
        kwargs: its keyword arguments.
    """

    def __init__(self, number: int, module: nn.Module, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._number = number
        self._module = module
        self._inputs = inputs
        self._kwargs = kwargs
        self._output: Any = None
        self._error: BaseException | None = None
        self._wrapped: Any = None

    @property
    def has_failed(self) -> bool:
        return self._error is not None

    def run_here(self) -> None:
        try:
            self._output = self._module(*self._inputs, **self._kwargs)
        except BaseException as error:  # SystemExit too, which would end a thread silently.
            where = f"in replica {self._number} on device cpu"
            self._wrapped = ExceptionWrapper(where=where)  # type: ignore[no-untyped-call]
            # Its frames hold tensors of the forward pass.
            self._error = error.with_traceback(None)

    def result(self) -> Any:
        if self._error is None:
            return self._output
        raise _with_message(self._error, self._wrapped)


def _with_message(error: BaseException, wrapped: Any) -> BaseException:
    """The same exception with another message, even if its constructor does not take one."""
    try:
        wrapped.reraise()
    except RuntimeError as told:
        if type(error) is not type(told):
            # torch could not create one: change the message of the original, unless the class formats its own.
            text = str(told)
            error.args = (text,)
            return error.with_traceback(None) if str(error) == text else told
        return told
    except BaseException as told:
        return told
    raise AssertionError("reraise returned")


def _run_in_threads(calls: Sequence[_ReplicaCall]) -> None:
    enter = _inherited_state()
    context = contextvars.copy_context()

    ended: queue.SimpleQueue[_ReplicaCall] = queue.SimpleQueue()

    def run(call: _ReplicaCall) -> None:
        try:
            with enter():
                call.run_here()
        finally:
            ended.put(call)

    for number, call in enumerate(calls):
        arguments = (run, call)
        threading.Thread(target=context.copy().run, args=arguments, name=f"replica-{number}", daemon=True).start()
    deadline: float | None = None
    for _ in calls:
        try:
            call = ended.get(timeout=None if deadline is None else max(deadline - time.monotonic(), 0.0))
        except queue.Empty:
            return
        if call.has_failed and deadline is None:
            deadline = time.monotonic() + _SECONDS_FOR_OTHERS


def _inherited_state() -> Callable[[], AbstractContextManager[None]]:
    """A context manager that sets this thread's state in another. See [Note: what a thread inherits]."""
    with_gradients, with_inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    casts, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    caches = torch.is_autocast_cache_enabled()

    @contextmanager
    def enter() -> Iterator[None]:
        with (
            torch.inference_mode(with_inference),
            torch.set_grad_enabled(with_gradients),
            torch.autocast("cpu", dtype=dtype, enabled=casts, cache_enabled=caches),
        ):
            yield

    return enter
