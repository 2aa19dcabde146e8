"""How ranks meet that call `dist.init_process_group` themselves: by `mpi://`, `env://` and `tcp://`.

torch looks up a handler by the scheme of `init_method`. `mpi://` is ours: rank, world size and store come from MPI.
`env://`, the default, and `tcp://` behave as with torch's own handlers, except that rank 0 only listens on the given
address, whether rank and world size come from variables or from the caller. Under mpirun torch's variables are not set,
and torch would raise: there rank and world size come from mpirun's variables, and the rendezvous from MASTER_ADDR and
MASTER_PORT or, without these, from the job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from types import ModuleType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from lockstep import env, rank_status
from lockstep.errors import RendezvousError
from lockstep.topology.mpi import read_mpi

if TYPE_CHECKING:
    from lockstep.torch_private.stores import Store

__all__ = ["register"]

_Met = Iterator["tuple[Store, int, int]"]

_DEFAULT_TIMEOUT = timedelta(minutes=30)


def register(_: ModuleType) -> None:
    """Register the URLs with torch. Local; called when torch.distributed has been imported, possibly more than once."""
    from lockstep.torch_private.groups import rendezvous_handlers

    handlers = rendezvous_handlers()
    if handlers is None:
        return
    handlers.setdefault("mpi", _meet_by_mpi)
    torchs_own = handlers["env"]
    if not isinstance(torchs_own, _EnvHandler):
        handlers["env"] = _EnvHandler(torchs_own)
    torchs_own = handlers["tcp"]
    if not isinstance(torchs_own, _TcpHandler):
        handlers["tcp"] = _TcpHandler(torchs_own)


def _meet_by_mpi(url: str, timeout: timedelta = _DEFAULT_TIMEOUT, **_: Any) -> _Met:
    """`mpi://`; rank and world size, if given, must be those of MPI."""
    from lockstep.rendezvous.mpi import meet_by_mpi

    topology, store = meet_by_mpi(timeout)
    for name, given in _query(url).items():
        actual = getattr(topology, name, None)
        if given != str(actual):
            raise RendezvousError(f"{url}: {name} is given as {given}, but MPI says {actual}; leave it out")
    yield store, topology.rank, topology.world_size
    raise RendezvousError("the ranks of an MPI job meet once; start it again to have others")


class _EnvHandler:
    """`env://`: torch's own handler, extended for mpirun.

    Args:
        torchs_own: the handler that torch has registered.
    """

    def __init__(self, torchs_own: Callable[..., _Met]) -> None:
        self._torchs_own = torchs_own

    def __call__(self, url: str, timeout: timedelta = _DEFAULT_TIMEOUT, **options: Any) -> _Met:
        variables = env.snapshot()
        topology = read_mpi(variables)
        given = _query(url)
        is_said = bool(given) or env.RANK.get(variables) is not None or env.WORLD_SIZE.get(variables) is not None
        if topology is None or is_said:
            met = _listen_on_one_address(variables, given, timeout)
            return _noted(iter([met]) if met is not None else self._torchs_own(url, timeout=timeout, **options))
        rank, world_size = topology.rank, topology.world_size
        if env.MASTER_ADDR.get(variables) is not None and env.MASTER_PORT.get(variables) is not None:
            given = {"rank": str(rank), "world_size": str(world_size)}
            met = _listen_on_one_address(variables, given, timeout)
            if met is not None:
                return _noted(iter([met]))
            own_url = f"env://?rank={rank}&world_size={world_size}"
            return _noted(self._torchs_own(own_url, timeout=timeout, **options))
        from lockstep.rendezvous.mpi import meet_under_mpirun

        store = meet_under_mpirun(variables, topology, timeout)
        if store is None:
            raise RendezvousError(
                f"rank {rank} of {world_size} does not know where to meet the others, which are on several hosts: "
                "install mpi4py (`pip install mpi4py`), or set MASTER_ADDR and MASTER_PORT"
            )
        return _noted(iter([(store, rank, world_size)]))


class _TcpHandler:
    """`tcp://HOST:PORT`: torch's own handler, except that rank 0 listens on that host's address only.

    Args:
        torchs_own: the handler that torch has registered.
    """

    def __init__(self, torchs_own: Callable[..., _Met]) -> None:
        self._torchs_own = torchs_own

    def __call__(self, url: str, timeout: timedelta = _DEFAULT_TIMEOUT, **options: Any) -> _Met:
        numbers = _numbers(_query(url))
        place = _place(url)
        if numbers is None or place is None or _is_torchruns_store(env.snapshot()):
            return _noted(self._torchs_own(url, timeout=timeout, **options))
        from lockstep.rendezvous import tcp

        return _noted(iter([(tcp.open_store(*place, *numbers, timeout, url=url.partition("?")[0]), *numbers)]))


def _noted(met: _Met) -> _Met:
    """Tell the launcher that this rank has met others: torch's RPC uses these URLs, but creates no process group."""
    for each in met:
        rank_status.note_joined(*each[1:])
        yield each


def _listen_on_one_address(
    variables: dict[str, str], given: dict[str, str], timeout: timedelta
) -> tuple[Store, int, int] | None:
    """Do the same as torch's own handler, but let rank 0 listen on MASTER_ADDR instead of all addresses of its host.

    Args:
        variables: the environment.
        given: explicit arguments of the caller, which win: possibly rank and world_size.
        timeout: time until a missing rank is an error.

    Returns:
        None if torch's handler has to do it: torchrun's own process listens, or a value is missing or not a number,
        which that handler reports.
    """
    said = {"rank": env.RANK.get(variables), "world_size": env.WORLD_SIZE.get(variables)}
    numbers = _numbers({**{name: str(value) for name, value in said.items() if value is not None}, **given})
    address, port = env.MASTER_ADDR.get(variables), env.MASTER_PORT.get(variables)
    if numbers is None or address is None or port is None or _is_torchruns_store(variables):
        return None
    from lockstep.rendezvous import tcp

    return tcp.open_store(address, port, *numbers, timeout), *numbers


def _is_torchruns_store(variables: dict[str, str]) -> bool:
    """Whether torchrun's own process listens, and all ranks connect to it."""
    return env.TORCHELASTIC_USE_AGENT_STORE.get(variables) == "True"


def _numbers(given: dict[str, str]) -> tuple[int, int] | None:
    """Rank and world_size, if both are given, and nothing else that only torch's handler may know."""
    try:
        rank, world_size = int(given["rank"]), int(given["world_size"])
    except (KeyError, ValueError):
        return None
    return (rank, world_size) if given.keys() == {"rank", "world_size"} and 0 <= rank < world_size else None


def _place(url: str) -> tuple[str, int] | None:
    """Host and port of a `tcp://` URL, if both are given."""
    try:
        parts = urlsplit(url)
        return None if parts.hostname is None or parts.port is None else (parts.hostname, parts.port)
    except ValueError:
        return None


def _query(url: str) -> dict[str, str]:
    """The values that torch has put after the `?`: rank and world_size, if the caller gave them."""
    _, _, text = url.partition("?")
    return dict(pair.split("=", 1) for pair in text.split("&") if "=" in pair)
