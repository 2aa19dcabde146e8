"""`horovod.run`: runs a function on N processes, by `lockstep.spawn`."""

from __future__ import annotations

import contextlib
import importlib
import pickle
import socket
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lockstep import env
from lockstep.errors import InputError
from lockstep.launch import spawn as launcher
from lockstep.log import get_logger

__all__ = ["is_this_host", "parse_hosts", "run"]

_HERE = frozenset({"localhost", "127.0.0.1", "::1"})


def is_this_host(name: str) -> bool:
    """Whether a name is one of this host's names; the name itself is not resolved."""
    own = socket.gethostname()
    return name in _HERE or name in (own, own.partition(".")[0], socket.getfqdn())


def parse_hosts(text: str) -> list[tuple[str, int]]:
    """Parse `h1:2,h2:4` into names and slots; one slot by default.

    Raises:
        InputError: the text is malformed.

    >>> parse_hosts("h1:2,h2")
    [('h1', 2), ('h2', 1)]
    """
    hosts = []
    for item in text.split(","):
        name, _, slots = item.strip().partition(":")
        if not name or (slots and not (slots.isdigit() and int(slots) > 0)):
            raise InputError(f"hosts: {item!r} in {text!r} is not of the form host:slots, such as localhost:2")
        hosts.append((name, int(slots or 1)))
    return hosts


def _call(payload: bytes) -> Any:
    """In a rank: unpack and make the call; the payload is from the parent process."""
    func, args, kwargs = pickle.loads(payload)
    return func(*args, **kwargs)


def _pack(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes | None:
    """The call, pickled by cloudpickle, for lambdas and local functions; None without cloudpickle."""
    with contextlib.suppress(ImportError):
        content: bytes = importlib.import_module("cloudpickle").dumps((func, tuple(args), dict(kwargs)))
        return content
    return None


def _call_plain(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Any = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: Any = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: Any = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Run `func(*args, **kwargs)` on `num_proc` new processes of this host; returns their results. Local.

    Call it under `if __name__ == "__main__":`, because the processes import the main module again.

    Args:
        func: a function that calls `hvd.init()`; if cloudpickle is installed, also a lambda or a local function.
        args: positional arguments of `func`.
        kwargs: keyword arguments of `func`.
        num_proc: number of ranks.
        hosts: hosts and slots, such as "localhost:4"; other hosts are refused.
        hostfile: a file with lines `host slots=N` instead.
        use_mpi: refused; start the script with mpirun.
        np: deprecated name of `num_proc`.
        min_num_proc, max_num_proc, slots, reset_limit, cooldown_range, host_discovery_script, start_timeout, ssh_port,
            ssh_identity_file, disable_cache, output_filename, verbose, use_gloo, mpi_args, network_interface,
            network_interfaces, executable, min_np, max_np: ignored on one host, with a warning if they
            are given.

    Returns:
        The results, by rank.

    Raises:
        InputError: other hosts, more ranks than slots, both hosts and hostfile, or MPI.
        Exception: raised by the first failing rank; see `lockstep.spawn`.
    """
    given = dict(locals())
    if np is not None:
        warnings.warn("np is deprecated, use num_proc instead", DeprecationWarning, stacklevel=2)
        num_proc = np
    if use_gloo and use_mpi:
        raise InputError("Argument use_gloo and use_mpi only allow one set True.")
    if use_mpi:
        raise InputError(
            "use_mpi is not supported: start the script with `mpirun -np N python script.py`, where hvd.init() uses MPI"
        )
    if hosts is not None and hostfile is not None:
        raise InputError("Argument hosts and hostfile only allow one provided.")
    _check_hosts(hosts if hosts is not None else _read_hostfile(hostfile), num_proc)
    _name_ignored(given)
    variables = {env.HOROVOD_SIZE.name: str(num_proc)}
    payload = _pack(func, args, kwargs or {})
    if payload is not None:
        return launcher.spawn(_call, (payload,), num_proc, env=variables)
    return launcher.spawn(_call_plain, (func, tuple(args), dict(kwargs or {})), num_proc, env=variables)


_IGNORED = (
    *("min_num_proc", "max_num_proc", "slots", "reset_limit", "cooldown_range", "host_discovery_script"),
    *("start_timeout", "ssh_port", "ssh_identity_file", "disable_cache", "output_filename", "mpi_args"),
    *("network_interface", "network_interfaces", "min_np", "max_np"),
)


def _name_ignored(given: Mapping[str, Any]) -> None:
    ignored = [name for name in _IGNORED if given[name] is not None]
    if given["executable"] not in (None, sys.executable):
        ignored.append("executable")
    if ignored:
        get_logger(__name__).warning(
            "horovod.run() starts its processes on this host and ignores %s", ", ".join(ignored)
        )


def _read_hostfile(path: str | None) -> str | None:
    """Read the lines `host slots=N` of a file, in the form of `hosts`."""
    if path is None:
        return None
    with open(path, encoding="utf-8") as file:
        lines = [line.split("#")[0].strip() for line in file]
    return ",".join(":".join(part.strip() for part in line.split("slots=")) for line in lines if line) or None


def _check_hosts(hosts: str | None, num_proc: int) -> None:
    if hosts is None:
        return
    listed = parse_hosts(hosts)
    others = [name for name, _ in listed if not is_this_host(name)]
    if others:
        raise InputError(
            f"horovod.run() starts processes on this host only, got {', '.join(others)}; start a script on several "
            "hosts with `lockstep run --nnodes …`, or on a cluster with `lockstep run --slurm`"
        )
    slots = sum(count for _, count in listed)
    if slots < num_proc:
        raise InputError(f"num_proc is {num_proc}, but there are {slots} slots in {hosts!r}")
