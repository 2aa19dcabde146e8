"""`torch.cuda` on stand-ins: devices and their properties, random numbers, and functions that torch itself calls."""

from __future__ import annotations

import contextlib
import types
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lockstep.tools.rehearse.devices import memory, streams
from lockstep.tools.rehearse.devices.mode import GeneratorOfDevice, generator_of
from lockstep.tools.rehearse.devices.naming import devices
from lockstep.tools.rehearse.patching import replace, wrap

__all__ = ["install"]

_NAME = "Lockstep rehearsal stand-in (CPU)"
_CAPABILITY = (8, 0)
_SENSORS = ("utilization", "memory_usage", "temperature", "power_draw", "clock_rate")
# Versions that stand-ins report; scripts usually check whether they are new enough for bfloat16.
_CUDA_VERSION = "12.4"
_NCCL_VERSION = (2, 21, 5)
_CUDNN_VERSION = 90100

_TYPES = {
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "CharTensor": torch.int8,
    "ShortTensor": torch.int16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
    "BoolTensor": torch.bool,
}


class _DeviceContext:
    """`torch.cuda.device(i)`; None and negative numbers change nothing."""

    def __init__(self, device: Any) -> None:
        is_none = device is None or (isinstance(device, int) and device < 0)
        self.idx = -1 if is_none else devices.cuda_index(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = devices.current
        if self.idx >= 0:
            devices.select(self.idx)

    def __exit__(self, *_: object) -> None:
        devices.select(self.prev_idx)


class _DeviceOf(_DeviceContext):
    """`torch.cuda.device_of(tensor)`."""

    def __init__(self, obj: Any) -> None:
        super().__init__(obj.get_device() if getattr(obj, "is_cuda", False) else -1)


class _LegacyType(type):
    """`torch.cuda.FloatTensor` and the like: constructors, names for `.type()`, classes for `isinstance`."""

    _lockstep_name: str
    _dtype: torch.dtype

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        host = getattr(torch, cls.__name__)(*args)
        return host.cuda(kwargs.get("device"))

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch.Tensor) and instance.is_cuda and instance.dtype is cls._dtype


def _legacy_types() -> dict[str, Any]:
    return {
        name: _LegacyType(name, (), {"_lockstep_name": f"torch.cuda.{name}", "_dtype": dtype})
        for name, dtype in _TYPES.items()
    }


def _properties(device: Any = None) -> Any:
    devices.cuda_index(device)
    return types.SimpleNamespace(
        name=_NAME,
        major=_CAPABILITY[0],
        minor=_CAPABILITY[1],
        total_memory=memory.total_bytes(),
        multi_processor_count=1,
        is_multi_gpu_board=False,
        is_integrated=False,
        warp_size=32,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=48 << 10,
        shared_memory_per_multiprocessor=164 << 10,
        L2_cache_size=40 << 20,
        uuid=uuid.UUID(int=devices.cuda_index(device)),
        pci_bus_id=devices.cuda_index(device),
        gcnArchName="",
    )


def _select(device: Any) -> None:
    index = -1 if isinstance(device, int) and device < 0 else devices.cuda_index(device)
    if index >= 0:
        devices.select(index)


def _seed(seed: int, index: int | None = None) -> None:
    for one in range(devices.count) if index is None else (index,):
        generator_of(one).manual_seed(int(seed))


def _seed_all_at_random() -> None:
    seed = generator_of(devices.current).seed()
    _seed(seed)


def _who_and_what() -> dict[str, Any]:
    return {
        "is_available": lambda: devices.count > 0,
        "device_count": lambda: devices.count,
        "current_device": lambda: devices.check(devices.current),
        "set_device": _select,
        "device": _DeviceContext,
        "device_of": _DeviceOf,
        "get_device_name": lambda device=None: _properties(device).name,
        "get_device_properties": _properties,
        "get_device_capability": lambda device=None: (devices.cuda_index(device), _CAPABILITY)[1],
        "get_arch_list": lambda: ["sm_80"],
        "is_bf16_supported": lambda including_emulation=True: True,
        "can_device_access_peer": lambda device, peer: device != peer,
        "init": devices.use,
        "_lazy_init": devices.use,
        "is_initialized": lambda: devices.is_used and not devices.is_forked,
        "_is_in_bad_fork": lambda: devices.is_forked,
        "synchronize": lambda device=None: (devices.index_of(device), None)[1],
        "ipc_collect": lambda: None,
        **dict.fromkeys(_SENSORS, lambda device=None: 0),
        "set_sync_debug_mode": lambda debug_mode: None,
        "get_sync_debug_mode": lambda: 0,
        "_sleep": lambda cycles: None,
        "is_current_stream_capturing": lambda: False,
    }


def _random() -> dict[str, Any]:
    def states() -> list[torch.Tensor]:
        return [generator_of(index).get_state() for index in range(devices.count)]

    def set_state(state: torch.Tensor, device: Any = None) -> None:
        generator_of(devices.cuda_index(device)).set_state(state)

    def set_states(new: Any) -> None:
        for index, state in enumerate(new):
            generator_of(index).set_state(state)

    return {
        "manual_seed": lambda seed: _seed(seed, devices.current),
        "manual_seed_all": _seed,
        "seed": lambda: _seed(generator_of(devices.current).seed(), devices.current),
        "seed_all": _seed_all_at_random,
        "initial_seed": lambda: generator_of(devices.current).initial_seed(),
        "get_rng_state": lambda device=None: generator_of(devices.cuda_index(device)).get_state(),
        "set_rng_state": set_state,
        "get_rng_state_all": states,
        "set_rng_state_all": set_states,
    }


def _refuse(name: str) -> Callable[..., Any]:
    def refused(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"torch.cuda.{name} records GPU kernels, but a rehearsal has none. Run without it (for a rehearsal eager "
            "execution computes the same)"
        )

    return refused


class _Generator(type):
    """`torch.Generator`, which can also create one for a GPU."""

    def __call__(cls, device: Any = "cpu") -> Any:
        index = devices.index_of(device)
        return torch._C.Generator(device) if index is None else GeneratorOfDevice(index)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch._C.Generator)


class _Device(type):
    """`torch.device`, where a number alone means a GPU."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        word = args[0] if args else kwargs.get("device", kwargs.get("type"))
        if len(args) + len(kwargs) == 1 and isinstance(word, int) and not isinstance(word, bool):
            return _real_device_type("cuda", int(word))
        return _real_device_type(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _real_device_type)

    # torch.fx and TorchScript imported the original type earlier; it must compare equal to this one.
    def __eq__(cls, other: object) -> bool:
        return other is cls or other is _real_device_type

    def __hash__(cls) -> int:
        return hash(_real_device_type)


_real_device_type = torch.device


def _accelerator() -> dict[str, Any]:
    def current(check_available: bool = False) -> torch.device:
        return torch.device("cuda")

    return {
        "is_available": lambda: devices.count > 0,
        "device_count": lambda: devices.count,
        "current_accelerator": current,
        "current_device_index": lambda: devices.check(devices.current),
        "current_device_idx": lambda: devices.check(devices.current),
        "set_device_index": _select,
        "set_device_idx": _select,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "current_stream": streams.current_stream,
        "device_index": _DeviceContext,
    }


@contextlib.contextmanager
def _range(*_: Any, **__: Any) -> Iterator[None]:
    """`torch.cuda.nvtx.range`, a context and a decorator."""
    yield


def _install_nvtx() -> None:
    for name in ("range_push", "range_pop", "mark", "range_start", "range_end"):
        replace(torch.cuda.nvtx, name, lambda *args, **kwargs: 0)
    replace(torch.cuda.nvtx, "range", _range)


_CUDART_CALLS = ("cudaProfilerStart", "cudaProfilerStop", "cudaHostRegister", "cudaHostUnregister")


def _cudart() -> Any:
    """The library that `torch.cuda.cudart()` returns; every call succeeds."""
    return types.SimpleNamespace(
        cudaError=types.SimpleNamespace(success=0),
        cudaMemGetInfo=memory.info,
        **dict.fromkeys(_CUDART_CALLS, lambda *args: 0),
    )


def _profile_host(original: Callable[..., Any]) -> Callable[..., Any]:
    """Profile the CPU instead of a GPU, for which torch would warn that there is none."""

    def init(self: Any, enabled: bool = True, **options: Any) -> None:
        if options.pop("use_cuda", False) or options.get("use_device") == "cuda":
            options.update(use_device=None, use_cpu=True)
        original(self, enabled, **options)

    return init


def install() -> None:
    """Replace the functions of `torch.cuda` and `torch.accelerator`, `torch.device` and `torch.Generator`."""
    for name, value in {**_who_and_what(), **_random(), **_legacy_types()}.items():
        replace(torch.cuda, name, value)
        if hasattr(torch.cuda.random, name):
            replace(torch.cuda.random, name, value)
    memory.install()
    replace(torch.cuda, "make_graphed_callables", _refuse("make_graphed_callables"))
    for name in ("CUDAGraph", "graph"):  # must remain classes for annotations such as `CUDAGraph | None`
        original = getattr(torch.cuda, name)
        replace(torch.cuda, name, type(name, (original,), {"__new__": _refuse(name), "__module__": "torch.cuda"}))
    for name, value in _accelerator().items():
        replace(torch.accelerator, name, value)
    # Called by torch's own code: FSDP2 uses it to choose the devices of its mesh.
    replace(torch._C, "_get_accelerator", lambda check=None: torch.device("cuda"))
    # Called by Lightning after training; a CPU build of torch lacks it.
    replace(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)
    _install_nvtx()
    replace(torch.cuda, "_cudart", _cudart())
    replace(torch.cuda, "default_generators", tuple(map(generator_of, range(devices.total))))
    replace(torch.version, "cuda", torch.version.cuda or _CUDA_VERSION)
    replace(torch.cuda.nccl, "version", lambda: _NCCL_VERSION)
    wrap(torch.autograd.profiler.profile, "__init__", _profile_host)
    # Called by every RNN; a CPU build's own function warns.
    replace(torch.backends.cudnn, "is_acceptable", lambda tensor: False)
    replace(torch.backends.cudnn, "version", lambda: _CUDNN_VERSION)
    streams.install()
    replace(torch, "Generator", _Generator("Generator", (), {"__module__": "torch"}))
    replace(torch, "device", _Device("device", (), {"__module__": "torch"}))
