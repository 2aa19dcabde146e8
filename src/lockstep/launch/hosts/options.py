"""The command line options about hosts, checked before anything is started. Never imports torch."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, field

from lockstep.errors import LaunchError
from lockstep.secret import Secret

__all__ = ["OPTIONS", "HostsConfig", "add_arguments", "hosts_from", "parse_conf", "parse_endpoint", "parse_nnodes"]

# The options of `add_arguments`, by their names in argparse.
OPTIONS = ("nnodes", "node_rank", "rdzv_endpoint", "rdzv_id", "rdzv_backend", "rdzv_conf", "local_addr", "standalone")

# torchrun's default ports for --master-port and --rdzv-endpoint.
_DEFAULT_PORT = 29500
_DEFAULT_RDZV_PORT = 29400
# A user who lets the number of hosts change wants the job to continue.
_ELASTIC_RESTARTS = 3
_BACKENDS = ("c10d", "static")


@dataclass(frozen=True)
class HostsConfig:
    """The hosts of a job, according to the options of one of them.

    Attributes:
        min_nodes: minimum number of hosts for the job to run.
        max_nodes: maximum number; further hosts wait until one of the job leaves.
        address: name or address of the host where the launchers meet.
        port: port on which they meet there.
        node_rank: number of this host; None if the launchers agree on their numbers.
        is_holder: whether this launcher holds the store; None: it does if `address` is one of this host's.
        run_id: name of the job; launchers with another name belong to another job.
        local_addr: address by which the other hosts reach this one; None for the one from which it reaches the store.
        join_s: seconds until missing hosts are an error.
        last_call_s: seconds to wait for more hosts once there are `min_nodes`.
        heartbeat_s: seconds between two heartbeats.
        lost_after_s: seconds without a heartbeat until a host counts as lost.
        token_file: path of a file with the job's token; None for LOCKSTEP_TOKEN, or no token.
        secret: the secret of the job, once the launcher has started.
    """

    min_nodes: int
    max_nodes: int
    address: str
    port: int
    node_rank: int | None = None
    is_holder: bool | None = None
    run_id: str = "lockstep"
    local_addr: str | None = None
    join_s: float = 600.0
    last_call_s: float = 5.0
    heartbeat_s: float = 1.0
    lost_after_s: float = 6.0
    token_file: str | None = None
    secret: Secret = field(default=Secret(None), repr=False, compare=False)

    @property
    def endpoint(self) -> str:
        """The rendezvous endpoint, for messages."""
        return f"{self.address}, port {self.port}"

    @property
    def is_elastic(self) -> bool:
        """Whether the number of hosts may change."""
        return self.min_nodes < self.max_nodes


def parse_nnodes(text: str) -> tuple[int, int]:
    """Parse `--nnodes`: a number of hosts, or MIN:MAX.

    Raises:
        LaunchError: the text is neither.

    >>> parse_nnodes("2"), parse_nnodes("1:4")
    ((2, 2), (1, 4))
    """
    low, colon, high = text.partition(":")
    try:
        least, most = int(low), int(high if colon else low)
    except ValueError:
        least = most = 0
    if not 1 <= least <= most:
        raise LaunchError(
            f"--nnodes is {text!r}; expected a number of hosts, or MIN:MAX with 1 <= MIN <= MAX, such as 2 or 1:4"
        )
    return least, most


def parse_endpoint(text: str) -> tuple[str, int]:
    """Parse `--rdzv-endpoint`: HOST or HOST:PORT, an IPv6 address in brackets.

    Raises:
        LaunchError: no host, or an invalid port.

    >>> parse_endpoint("node7:29401"), parse_endpoint("node7"), parse_endpoint("[::1]:5")
    (('node7', 29401), ('node7', 29400), ('::1', 5))
    """
    host, port_text = text.strip(), ""
    if host.startswith("["):
        host, _, port_text = host[1:].partition("]")
        port_text = port_text.removeprefix(":")
    elif host.count(":") == 1:
        host, _, port_text = host.partition(":")
    try:
        port = int(port_text) if port_text else _DEFAULT_RDZV_PORT
    except ValueError:
        port = 0
    if not host or not 1 <= port <= 65535:
        raise LaunchError(f"--rdzv-endpoint is {text!r}; expected HOST:PORT, such as node0:29400")
    return host, port


# torchrun's keys of --rdzv-conf, and those of them that have no effect here.
_CONF_FIELDS = {
    "join_timeout": "join_s",
    "timeout": "join_s",
    "last_call_timeout": "last_call_s",
    "keep_alive_interval": "heartbeat_s",
}
_CONF_IGNORED = ("close_timeout", "read_timeout", "heartbeat_timeout", "store_type")


def parse_conf(text: str) -> dict[str, float | bool | str]:
    """Parse `--rdzv-conf`: KEY=VALUE,… with torchrun's keys, into fields of `HostsConfig`.

    `join_timeout`, `last_call_timeout`, `keep_alive_interval` are in seconds; `keep_alive_max_attempt` is the number of
    heartbeats that may be missing; `is_host` is 0 or 1. `token_file`, which torchrun does not know, is the path of a
    file.

    Raises:
        LaunchError: an unknown key, or a value that is not a number of seconds above 0.

    >>> parse_conf("join_timeout=30,keep_alive_interval=0.5,keep_alive_max_attempt=4")
    {'join_s': 30.0, 'heartbeat_s': 0.5, 'lost_after_s': 2.0}
    """
    found: dict[str, float | bool | str] = {}
    heartbeat_s = HostsConfig.heartbeat_s
    pairs = dict(_split_pair(part) for part in text.split(",") if part.strip())
    for key, value in pairs.items():
        if key in _CONF_FIELDS:
            found[_CONF_FIELDS[key]] = seconds = _seconds(key, value)
            heartbeat_s = seconds if key == "keep_alive_interval" else heartbeat_s
        elif key == "token_file":
            if not value:
                raise LaunchError("--rdzv-conf has token_file= without a path; give that of a file with a token")
            found["token_file"] = value
        elif key in ("token", "secret"):
            raise LaunchError(
                f"--rdzv-conf has {key}=…, but everybody on the host can read command lines. Put the token into a "
                "file, and pass token_file=PATH"
            )
        elif key == "is_host":
            if value.lower() not in ("0", "1", "true", "false"):
                raise LaunchError(f"--rdzv-conf has is_host={value}; expected 0 or 1")
            found["is_holder"] = value.lower() in ("1", "true")
        elif key not in (*_CONF_IGNORED, "keep_alive_max_attempt"):
            known = ", ".join((*_CONF_FIELDS, "keep_alive_max_attempt", "is_host", "token_file"))
            raise LaunchError(f"--rdzv-conf has no key {key!r}; there are: {known}")
    if "keep_alive_max_attempt" in pairs or "heartbeat_s" in found:
        attempts = _seconds("keep_alive_max_attempt", pairs.get("keep_alive_max_attempt", "6"))
        found["lost_after_s"] = attempts * heartbeat_s
    return found


def _split_pair(text: str) -> tuple[str, str]:
    key, equals, value = text.strip().partition("=")
    if not equals:
        raise LaunchError(f"--rdzv-conf has {text.strip()!r}; expected KEY=VALUE, several separated by commas")
    return key.strip(), value.strip()


def _seconds(key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise LaunchError(f"--rdzv-conf has {key}={text}; expected a number above 0")
    return value


def add_arguments(parser: argparse._ActionsContainer) -> None:
    """Add the options of `lockstep run` that concern several hosts, in torchrun's spellings too."""
    parser.add_argument(
        "--nnodes",
        metavar="N",
        default="1",
        help="number of hosts, or MIN:MAX; each runs this command with the same options (default: %(default)s)",
    )
    parser.add_argument("--standalone", action="store_true", help="this host alone, which is the default")
    parser.add_argument("--node-rank", "--node_rank", type=int, metavar="R", help="number of this host, from 0")
    parser.add_argument(
        "--rdzv-endpoint",
        "--rdzv_endpoint",
        metavar="HOST[:PORT]",
        help="one of the hosts, where the launchers meet, instead of --master-addr and --node-rank",
    )
    parser.add_argument("--rdzv-id", "--rdzv_id", metavar="NAME", help="a name for the job, the same on all hosts")
    parser.add_argument(
        "--rdzv-backend", "--rdzv_backend", metavar="KIND", help="c10d (default) or static; here they are the same"
    )
    parser.add_argument(
        "--rdzv-conf",
        "--rdzv_conf",
        metavar="KEY=VALUE,...",
        default="",
        help="seconds: join_timeout (600), last_call_timeout (5), keep_alive_interval (1); keep_alive_max_attempt (6); "
        "token_file=PATH: the secret of the job, a file of mode 0600 that every host has (made if there is none)",
    )
    parser.add_argument(
        "--local-addr",
        "--local_addr",
        metavar="ADDR",
        help="address of this host for the others (default: that from which it reaches the rendezvous endpoint)",
    )


def hosts_from(options: argparse.Namespace) -> HostsConfig | None:
    """The hosts described by `add_arguments`' options, `--master-addr` and `--master-port`; removes these options.

    The latter two are kept for a job on this host only. If the number of hosts may change, `--max-restarts` defaults to
    3.

    Returns:
        None for a job on this host only.

    Raises:
        LaunchError: names the option, its value and what is expected.
    """
    given = vars(options)
    nnodes, node_rank, endpoint, run_id, backend, conf, local_addr, is_standalone = (given.pop(one) for one in OPTIONS)
    if is_standalone:
        nnodes, node_rank, endpoint = "1", None, None
    least, most = parse_nnodes(nnodes)
    if node_rank is not None and not 0 <= node_rank < most:
        raise LaunchError(
            f"--node-rank is {node_rank}, but --nnodes is {nnodes}: hosts are counted from 0 to {most - 1}"
        )
    if backend not in (None, *_BACKENDS):
        raise LaunchError(f"--rdzv-backend is {backend!r}; expected {' or '.join(_BACKENDS)}")
    settings: dict[str, object] = {**parse_conf(conf), "node_rank": node_rank, "local_addr": local_addr}
    if run_id:
        settings["run_id"] = run_id
    if most == 1:
        return None
    if least < most and given.get("max_restarts") is None:
        given["max_restarts"] = _ELASTIC_RESTARTS
    address, port = _choose_endpoint(nnodes, node_rank, endpoint, given.pop("master_addr"), given.pop("master_port"))
    if endpoint is None:
        settings.setdefault("is_holder", node_rank == 0)
    return HostsConfig(least, most, address, port, **settings)  # type: ignore[arg-type]


def _choose_endpoint(
    nnodes: str, node_rank: int | None, endpoint: str | None, master_addr: str | None, master_port: int | None
) -> tuple[str, int]:
    """The address and port where the launchers meet."""
    if endpoint is not None and master_addr is not None:
        raise LaunchError(
            f"--rdzv-endpoint {endpoint} and --master-addr {master_addr} are two rendezvous endpoints; give one of them"
        )
    if endpoint is not None:
        return parse_endpoint(endpoint)
    last = parse_nnodes(nnodes)[1] - 1
    if master_addr is None:
        raise LaunchError(
            f"--nnodes {nnodes} needs a rendezvous endpoint: --master-addr ADDR with --node-rank R, or "
            "--rdzv-endpoint HOST:PORT, the same address on all hosts"
        )
    port = _DEFAULT_PORT if master_port is None else master_port
    if not 1 <= port <= 65535:
        raise LaunchError(f"--master-port is {port}; expected 1 to 65535")
    if node_rank is None:
        raise LaunchError(
            f"--master-addr needs --node-rank, the number of this host from 0 to {last}; number 0 is the host that has "
            f"the address {master_addr}. Without numbers: --rdzv-endpoint {master_addr}:{port}"
        )
    return master_addr, port
