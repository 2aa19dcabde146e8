"""Settings that the command passes to every process of a rehearsal through one environment variable."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from lockstep import env
from lockstep.errors import LaunchError
from lockstep.tools.shared import read_settings

__all__ = ["RehearsalSettings", "parse_memory"]

_UNITS = {"": 1, "K": 1, "M": 2, "G": 3, "T": 4}
_MEMORY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(?:([KMGT])(i?)B?|B)?\s*", re.IGNORECASE)


def parse_memory(text: str) -> int:
    """Number of bytes in a text such as `8GiB`, `512 MB` or `1000000`.

    Raises:
        LaunchError: the text is malformed, or means less than one byte.

    >>> parse_memory("8GiB"), parse_memory("1.5 kB")
    (8589934592, 1500)
    """
    found = _MEMORY.fullmatch(text)
    if found is None:
        raise LaunchError(f"memory is {text!r}; expected a number with a unit, such as 8GiB or 512MB")
    number, unit, binary = found.group(1), (found.group(2) or "").upper(), bool(found.group(3))
    size = int(float(number) * (1024 if binary else 1000) ** (_UNITS[unit] if unit else 0))
    if size < 1:
        raise LaunchError(f"memory is {text!r}; a device has at least one byte")
    return size


@dataclass(frozen=True)
class RehearsalSettings:
    """One rehearsal.

    Attributes:
        devices: stand-ins on each simulated node.
        nodes: number of nodes to simulate.
        processes_per_node: processes that the rehearsal itself starts on each.
        memory_bytes: memory of each stand-in; 0 for no limit.
        plain: for a script of which there is one process in all, the variables to change, so that it sees those of
            plain `python`: name -> value, None to unset it. Empty for others.
        slurm: whether to set the variables of a Slurm step.
        local_rank_option: the option in which the script expects its local rank; empty for none.
        horovod: whether the script imports Horovod, and gets Lockstep's shim for it.
    """

    devices: int
    nodes: int = 1
    processes_per_node: int = 1
    memory_bytes: int = 0
    plain: Mapping[str, str | None] = field(default_factory=dict)
    slurm: bool = False
    local_rank_option: str = ""
    horovod: bool = False

    def dump(self) -> str:
        """The text of the environment variable."""
        return json.dumps(asdict(self))

    @classmethod
    def load(cls) -> RehearsalSettings:
        """The settings of the rehearsal that this process belongs to; see `read_settings`."""
        return cls(**read_settings(env.LOCKSTEP_REHEARSAL, "rehearse"))
