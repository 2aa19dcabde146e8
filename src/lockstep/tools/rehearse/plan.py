"""How a script must be started, determined from its text without running it.

[Note: ways to start] A script that starts its ranks itself (`mp.spawn`), or drives all devices from one process
(`DataParallel`), is started once per node. All others are started once per device, with the variables of torchrun. On
one node, a script that is started once sees none of these, as under plain `python`: many scripts and libraries take
RANK to mean that a launcher has started the ranks. On several nodes the variables tell which node it is on.
Modules that the script imports are not read, as the script need not use all that they offer.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from lockstep.compat.legacy.sources import dotted_name, parse
from lockstep.compat.legacy.spelling import find_spelling

__all__ = ["Needs", "option_for_local_rank", "read_script"]

_SPAWNERS = frozenset({"spawn", "start_processes"})
_JOINERS = frozenset({"init_process_group", "init"})
_LOCAL_RANK_OPTIONS = frozenset({"--local_rank", "--local-rank"})


@dataclass(frozen=True)
class Needs:
    """What a script needs from its launcher.

    Attributes:
        starts_ranks: whether it starts its ranks itself.
        joins: whether it joins a process group.
        is_parallel: whether it uses DataParallel.
        declares_local_rank: whether it has an option for its local rank, as passed by torch.distributed.launch.
        reads_slurm: whether it reads variables that Slurm sets.
        uses_horovod: whether it imports horovod.
    """

    starts_ranks: bool = False
    joins: bool = False
    is_parallel: bool = False
    declares_local_rank: bool = False
    reads_slurm: bool = False
    uses_horovod: bool = False

    @property
    def is_one_process(self) -> bool:
        """Whether to start it once per node. See [Note: ways to start]."""
        return self.starts_ranks or (self.is_parallel and not self.joins)


def _modules_of(tree: ast.Module) -> dict[str, str]:
    """Local name -> dotted name of what it was imported from."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def _full_name(node: ast.expr, imported: dict[str, str]) -> str:
    """`torch.multiprocessing.spawn` for `mp.spawn` after `import torch.multiprocessing as mp`; empty for no name."""
    first, dot, rest = dotted_name(node).partition(".")
    return imported.get(first, first) + dot + rest


def read_script(path: str) -> Needs:
    """Needs of the script at `path`; the defaults if it cannot be parsed."""
    tree = parse(path)
    if tree is None:
        return Needs()
    imported = _modules_of(tree)
    starts = joins = parallel = False
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = _full_name(node.func, imported)
        owner, _, last = name.rpartition(".")
        starts = starts or (last in _SPAWNERS and ("multiprocessing" in owner or owner == "lockstep"))
        joins = joins or (last in _JOINERS and owner.split(".")[0] in ("torch", "horovod", "lockstep"))
        parallel = parallel or last == "DataParallel"
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return Needs(
        starts_ranks=starts,
        joins=joins,
        is_parallel=parallel,
        declares_local_rank=bool(_LOCAL_RANK_OPTIONS.intersection(texts)),
        reads_slurm=any(text.startswith("SLURM_") for text in texts),
        uses_horovod=any(name.startswith("horovod") for name in imported.values()),
    )


def option_for_local_rank(needs: Needs, target: str, is_module: bool) -> str:
    """The option with which `torch.distributed.launch` passes the local rank; empty if the script declares none."""
    return (find_spelling(target, is_module).option or "") if needs.declares_local_rank else ""
