"""Finds the changes to torch that a script of 2018 to 2021 needs, by its source, without running it.

The script, and its own modules that it imports, are parsed. `signs.py` finds the signs in one file;
here those of all files are combined. Without any sign, torch is not changed.

    >>> find_needs("no_such_script.py")
    {}
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from lockstep.compat.legacy.signs import OLD_FILE_URL, signs_in
from lockstep.compat.legacy.sources import locate_target, nearest_first, parse

__all__ = ["CHANGES", "HINTS", "SAID_AT_USE", "find_needs", "hint_for"]

_MAX_FILES = 100

CHANGES: Mapping[str, str] = MappingProxyType(
    {
        "torch._six": "torch._six is there",
        "torch.cuda.comm": "torch.cuda.comm is there",
        "torch.distributed.deprecated": "torch.distributed.deprecated is there",
        "torch.nn.parallel.deprecated": "torch.nn.parallel.deprecated is there",
        "multigpu": "torch.distributed has *_multigpu",
        "reduce_op": "torch.distributed has reduce_op",
        "dist_backend": "torch.distributed has dist_backend and _backend",
        "init_process_group": 'init_process_group takes "tcp" and file://name',
        "batch_size": "DataLoader and BatchSampler take whole floats as batch_size",
        "sampler": "Sampler takes data_source",
        "eq": "Tensor.eq gives rows that view(-1) takes",
        "verbose": "schedulers take verbose=",
        "full": "torch.full of a whole number gives floats",
        "load": "torch.load takes argparse.Namespace and numpy's numbers",
    }
)
"""Every change, by its name in the choice, and what it does, for messages. Nothing
selects "full" automatically: it changes calls that torch accepts, and no error reveals the origin of integers."""

SAID_AT_USE = frozenset({"init_process_group", "batch_size", "sampler", "verbose", "load"})
"""Changes that calls may or may not need, according to the source; announced when a call does."""

HINTS: tuple[tuple[str, str, str], ...] = (
    ("torch._six", "ModuleNotFoundError", r"No module named 'torch\._six'"),
    ("torch.cuda.comm", "ModuleNotFoundError", r"No module named 'torch\.cuda\.comm'"),
    ("torch.distributed.deprecated", "ModuleNotFoundError", r"No module named 'torch\.distributed\.deprecated'"),
    ("torch.nn.parallel.deprecated", "ModuleNotFoundError", r"No module named 'torch\.nn\.parallel\.deprecated'"),
    # In torch.nn.parallel, this name is typing_extensions' decorator.
    ("torch.nn.parallel.deprecated", "AttributeError", r"'deprecated' has no attribute '\w*Parallel"),
    ("multigpu", "AttributeError|ImportError", r"torch\.distributed.* '\w+_multigpu'"),
    ("multigpu", "ImportError", r"'\w+_multigpu' from 'torch\.distributed"),
    ("reduce_op", "AttributeError|ImportError", r"'reduce_op'"),
    ("dist_backend", "AttributeError|ImportError", r"torch\.distributed.*'(_backend|dist_backend)'"),
    ("dist_backend", "ImportError", r"'(_backend|dist_backend)' from 'torch\.distributed"),
    ("batch_size", "ValueError", r"batch_size should be a positive integer value, but got batch_size=\d+\.0\b"),
    ("sampler", "TypeError", r"object\.__init__\(\) takes exactly one argument|Sampler\.__init__\(\) takes 1 pos"),
    ("eq", "RuntimeError", r"view size is not compatible with input tensor's size and stride"),
    ("verbose", "TypeError", r"__init__\(\) got an unexpected keyword argument 'verbose'"),
    ("load", r".*UnpicklingError", r"(?s)Weights only load failed.*(argparse\.Namespace|numpy)"),
    ("init_process_group", "ValueError|RuntimeError", r"[Bb]ackend\W.*\btcp\b"),
)
"""Errors that a change would have prevented: its name, the error's type, and a pattern in its text."""


def find_needs(
    target: str, is_module: bool = False, words: Sequence[str] = (), path: Sequence[str] | None = None
) -> dict[str, str]:
    """Find the changes that a script needs, and where. Local; reads files and runs nothing.

    Args:
        target: path of a script or of a folder with a `__main__.py`; or name of a module.
        is_module: whether `target` is the name of a module.
        words: the script's arguments, which may name the backend "tcp" or a rendezvous file.
        path: folders to search for modules, in addition to the script's own; by default `sys.path`.

    Returns:
        Names in `CHANGES`, in that order, each with the file and line that shows it; empty if the script needs none.
    """
    if is_module and target.split(".")[0] == "lockstep":
        return {}
    found: dict[str, str] = {}
    start = locate_target(target, is_module, path)
    calls_init = False
    for source in nearest_first(start, _MAX_FILES) if start is not None else ():
        tree = parse(source.file)
        if tree is None:
            continue
        signs = signs_in(tree)
        calls_init |= signs.calls_init_process_group
        for name, line in signs.needs:
            found.setdefault(name, f"{os.path.basename(source.file)}:{line}")
    if calls_init and any(_is_old_word(word) for word in words):
        found.setdefault("init_process_group", "its arguments")
    return {name: found[name] for name in CHANGES if name in found}


def _is_old_word(word: str) -> bool:
    value = word.partition("=")[2] if word.startswith("-") else word
    return value.lower() == "tcp" or OLD_FILE_URL.fullmatch(value) is not None


def hint_for(error: BaseException) -> str | None:
    """The change that would have prevented an error, judging by its text; None for any other error."""
    kinds = [kind.__name__ for kind in type(error).__mro__]
    text = str(error)
    for name, kind, pattern in HINTS:
        if any(re.fullmatch(kind, each) for each in kinds) and re.search(pattern, text):
            return name
    return None
