"""Nothing that came over a network or from a file is unpickled, except where a user sends objects: read in the source.

Whoever needs another place names it here, with a reason why what is read there is our own.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from package_sources import Module, each_module, modules

# Modules that make objects, or code, out of bytes.
PICKLERS = {"_pickle", "cloudpickle", "dill", "joblib", "marshal", "multiprocessing.connection", "pickle", "shelve"}
# Calls that do so though nothing of the kind is imported.
OBJECT_VERBS = {
    "all_gather_object", "broadcast_object_list", "gather_object", "recv_object_list", "scatter_object_list",
}  # fmt: skip

_SENDS_OBJECTS = "a verb by which users send objects, as Horovod documents it"
_OWN_CHILDREN = "pipes and private folders between a process and the children that it has started itself"
ALLOWED = {
    "lockstep.bench.ranks": "waits until processes have ended, and reads nothing",
    "lockstep.checkpoint": "the name of an exception; files are loaded with weights_only=True",
    "lockstep.compat.horovod.runner": "the function that horovod.run was given, in the launcher's private folder",
    "lockstep.compat.horovod.torch.functions": _SENDS_OBJECTS,
    "lockstep.compat.legacy.patches": "the name of an exception; torch.load reads plain data alone",
    "lockstep.data.handover": "batches of the worker processes that this rank has started",
    "lockstep.launch.payload": _OWN_CHILDREN,
    "lockstep.launch.worker": "exec: runs the user's script",
    "lockstep.testing.conformance.data_movement": "checks the verbs that send objects",
    "lockstep.testing.conformance.point_to_point": "checks the verbs that send objects",
    "lockstep.testing.fork_server": _OWN_CHILDREN,
    "lockstep.testing.pool": _OWN_CHILDREN,
    "lockstep.testing.worker": _OWN_CHILDREN,
    "lockstep.tools.capabilities.verbs": "tries the verbs that send objects, on objects of its own",
    "lockstep.tools.verify.loaders": "batches that ranks of the same script have saved, in verify's own folder",
}


def risks(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of everything that could run what it reads."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names if alias.name in PICKLERS)
            case ast.ImportFrom(module=str(origin)) if origin in PICKLERS:
                yield node.lineno, origin
            case ast.ImportFrom(module="multiprocessing", names=names):
                yield from ((node.lineno, alias.name) for alias in names if alias.name in ("Pipe", "connection"))
            case ast.Call():
                risk = _risk_of_call(node)
                if risk:
                    yield node.lineno, risk


def _risk_of_call(call: ast.Call) -> str:
    called = ast.unparse(call.func)
    name = called.rpartition(".")[2]
    keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    first = call.args[0] if call.args else None
    if name in ("import_module", "__import__") and isinstance(first, ast.Constant) and first.value in PICKLERS:
        return f"{name}({first.value!r})"
    if called in ("eval", "exec") or name in OBJECT_VERBS:
        return called
    if called in ("torch.load", "jit.load", "torch.jit.load") and keywords.get("weights_only") != "True":
        return f"{called} without weights_only=True"
    if called in ("np.load", "numpy.load") and keywords.get("allow_pickle", "False") != "False":
        return f"{called} with allow_pickle"
    return "yaml.load" if called in ("yaml.load", "yaml.unsafe_load") else ""


@each_module
def test_only_named_places_unpickle(module: Module) -> None:
    if module.name not in ALLOWED:
        found = [f"{module.path}:{line}: {text}" for line, text in risks(module.tree)]
        assert not found, "this could run what it reads; if that cannot come from others, say so in ALLOWED:\n" + (
            "\n".join(found)
        )


def test_named_places_still_need_it() -> None:
    for name, reason in ALLOWED.items():
        assert reason
        if name in modules():
            assert list(risks(modules()[name].tree)), f"{name} unpickles nothing any more: take it out of ALLOWED"


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "import os, marshal", "from pickle import loads", "from multiprocessing import Pipe",
        "def f():\n    import dill", "importlib.import_module('cloudpickle')", "torch.load(p)",
        "torch.load(p, weights_only=False)", "numpy.load(p, allow_pickle=True)", "dist.all_gather_object(a, b)",
        "eval(text)", "yaml.load(text)", "from multiprocessing.connection import Client",
    ],
)  # fmt: skip
def test_risk_is_seen(source: str) -> None:
    assert len(list(risks(ast.parse(source)))) == 1


@pytest.mark.parametrize(
    "source",
    ["torch.load(p, weights_only=True)", "model.eval()", "json.loads(text)", "np.load(p)", "yaml.safe_load(t)"],
)
def test_harmless_is_not(source: str) -> None:
    assert not list(risks(ast.parse(source)))
