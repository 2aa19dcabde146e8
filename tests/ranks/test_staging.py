"""Tensors of a GPU on a lockstep group, with a stand-in for the GPU: what is copied where, and behind which event.

The stand-in is a tensor of the CPU that says it is on a GPU, and streams that write down what they are asked for. What
a real GPU does with that `make gpu` shows.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lockstep.errors import InputError
from lockstep.testing import run_ranks

GPU = torch.device("cuda", 0)
SAYS_WHO_WAITS = hasattr(dist.AllreduceOptions(), "asyncOp")  # torch 2.6 does not, and a thread runs every call


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cpu = property(lambda self: False)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    device = property(lambda self: GPU)  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def on_gpu(*values: float) -> torch.Tensor:
    return torch.tensor(values).as_subclass(OnGpu)


class Stream:
    """Writes down who waits for what."""

    def __init__(self, log: list[tuple[str, Any, bool]], name: str) -> None:
        self.log, self.name = log, name

    def wait_event(self, event: Any) -> None:
        self.log.append(("wait", (self.name, event.stream), threading.current_thread() is threading.main_thread()))


class Event:
    """Knows the stream it was recorded on."""

    def record(self, stream: Stream) -> None:
        self.stream = stream.name


@contextlib.contextmanager
def stand_in(is_capturing: bool = False) -> Iterator[list[tuple[str, Any, bool]]]:
    """A CUDA whose streams write down what they are asked for."""
    log: list[tuple[str, Any, bool]] = []
    current = threading.local()

    @contextlib.contextmanager
    def use(stream: Stream) -> Iterator[None]:
        current.stream = stream
        yield
        del current.stream

    def current_stream(device: torch.device) -> Stream:
        assert device == GPU
        name = "main" if threading.current_thread() is threading.main_thread() else "of the thread"
        return getattr(current, "stream", None) or Stream(log, name)

    real_empty = torch.empty

    def empty(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        if pin_memory:
            log.append(("pinned", tuple(args[0]), threading.current_thread() is threading.main_thread()))
        return real_empty(*args, **kwargs)

    with (
        mock.patch.multiple(
            torch.cuda,
            Stream=lambda device: Stream(log, "side"),
            Event=Event,
            stream=use,
            current_stream=current_stream,
            is_current_stream_capturing=lambda: is_capturing,
            get_device_capability=lambda device: (8, 0),
        ),
        mock.patch.object(torch, "empty", empty),
        # A future that is told of a GPU asks for the real one.
        mock.patch("lockstep.comm.work._devices", return_value=None),
    ):
        yield log


def all_verbs() -> dict[str, Any]:
    rank = dist.get_rank()
    found: dict[str, Any] = {}
    with stand_in():
        one = on_gpu(1.0 + rank, 2.0)
        dist.all_reduce(one)
        found["all_reduce"] = one.tolist()
        given = on_gpu(5.0 + rank)
        dist.broadcast(given, 1)
        found["broadcast"] = given.tolist()
        rows = [on_gpu(0.0), on_gpu(0.0)]
        dist.all_gather(rows, on_gpu(7.0 + rank))
        found["all_gather"] = [row.item() for row in rows]
        whole = on_gpu(0.0, 0.0)
        dist.all_gather_into_tensor(whole, on_gpu(7.0 + rank))
        found["all_gather_into_tensor"] = whole.tolist()
        part = on_gpu(0.0)
        dist.reduce_scatter(part, [on_gpu(1.0 + rank), on_gpu(10.0 + rank)])
        found["reduce_scatter"] = part.item()
        to_root = on_gpu(1.0 + rank)
        dist.reduce(to_root, 0)
        found["reduce"] = to_root.item()
        gathered = [on_gpu(0.0), on_gpu(0.0)] if rank == 0 else None
        dist.gather(on_gpu(3.0 + rank), gathered)
        found["gather"] = [] if gathered is None else [each.item() for each in gathered]
        scattered = on_gpu(0.0)
        dist.scatter(scattered, [on_gpu(8.0), on_gpu(9.0)] if rank == 0 else None)
        found["scatter"] = scattered.item()
        outputs = [on_gpu(0.0), on_gpu(0.0)]
        dist.all_to_all(outputs, [on_gpu(10.0 * rank), on_gpu(10.0 * rank + 1)])
        found["all_to_all"] = [each.item() for each in outputs]
        message = on_gpu(4.0, 2.0)
        dist.send(message, 1) if rank == 0 else dist.recv(message.zero_(), 0)
        found["recv"] = message.tolist()
    return found


def test_every_verb() -> None:
    """Expected: what the same calls do on the CPU, derived by hand for ranks 0 and 1."""
    common = {
        "all_reduce": [3.0, 4.0],
        "broadcast": [6.0],
        "all_gather": [7.0, 8.0],
        "all_gather_into_tensor": [7.0, 8.0],
        "recv": [4.0, 2.0],
    }
    first, second = run_ranks(all_verbs, 2)
    assert first == common | {
        "reduce_scatter": 3.0,
        "reduce": 3.0,
        "gather": [3.0, 4.0],
        "scatter": 8.0,
        "all_to_all": [0.0, 10.0],
    }
    assert second == common | {
        "reduce_scatter": 21.0,
        "reduce": second["reduce"],  # what a rank that is not the root keeps is not said
        "gather": [],
        "scatter": 9.0,
        "all_to_all": [1.0, 11.0],
    }


def call_twice() -> tuple[Any, Any, list[float]]:
    with stand_in() as synchronous:
        if SAYS_WHO_WAITS:
            dist.all_reduce(on_gpu(1.0))
    with stand_in() as asynchronous:
        tensor = on_gpu(1.0)
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        work.wait()
    return synchronous, asynchronous, tensor.tolist()


def test_a_call_in_another_thread_runs_behind_what_the_caller_has_queued() -> None:
    for synchronous, asynchronous, values in run_ranks(call_twice, 2):
        assert values == [2.0]
        if SAYS_WHO_WAITS:
            assert synchronous == [("pinned", (1,), True), ("wait", ("main", "main"), True)]
        # The thread's own stream waits for the caller's before anything is copied, and only then.
        assert asynchronous == [
            ("wait", ("side", "main"), False),
            ("pinned", (1,), False),
            ("wait", ("side", "side"), False),
        ]


def reduce_while_capturing() -> str:
    with stand_in(is_capturing=True), pytest.raises(InputError) as caught:
        dist.all_reduce(on_gpu(1.0))
    return str(caught.value)


def test_cuda_graph() -> None:
    assert all("use nccl inside of graphs" in message for message in run_ranks(reduce_while_capturing, 1))


def gather_with_input_on_gpu() -> list[tuple[str, Any, bool]]:
    """On the rank that is not the root the call writes nothing, and must wait for what it reads."""
    with stand_in() as log:
        rows = [on_gpu(0.0), on_gpu(0.0)] if dist.get_rank() == 0 else None
        work = dist.gather(on_gpu(1.0), rows, async_op=True)
        assert work is not None
        work.wait()
    return log


def test_what_is_only_read_is_waited_for_too() -> None:
    for log in run_ranks(gather_with_input_on_gpu, 2):
        assert log[0] == ("wait", ("side", "main"), False)
