"""What a module exports is what it defines, is documented, and costs no import of torch where it must not."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys

import pytest

import lockstep
from lockstep.testing import limit_s
from package_sources import Module, each_module, modules


@pytest.mark.parametrize("name", lockstep.__all__)
def test_public_name_resolves(name: str) -> None:
    assert getattr(lockstep, name) is not None
    assert name in dir(lockstep)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'DistributedDataParalel'"):
        _ = lockstep.DistributedDataParalel


def test_what_others_call_so_is_named() -> None:
    with pytest.raises(AttributeError, match=r"'barrier': use torch\.distributed\.barrier\(\)"):
        _ = lockstep.barrier  # type: ignore[attr-defined]
    assert not set(lockstep._ELSEWHERE) & set(lockstep._PUBLIC)


def test_every_public_name_is_known_to_type_checkers() -> None:
    """The lazy table and the imports for type checkers name the same things."""
    tree = modules()["lockstep"].tree
    (block,) = (n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
    imported = {alias.asname or alias.name for node in block.body for alias in node.names}
    submodules = {name for name, where in lockstep._PUBLIC.items() if where == f"lockstep.{name}"}
    assert imported - submodules == set(lockstep._PUBLIC) - submodules


@each_module
def test_all_is_what_the_module_defines(module: Module) -> None:
    exported = module.exported()
    public = {name for name in module.defined() if not name.startswith("_")}
    if module.name in {"lockstep", "lockstep.__main__"} or (module.is_package and not module.tree.body[1:]):
        assert exported is None or module.name == "lockstep"
        return
    assert exported is not None, f"{module.path} has no __all__"
    assert public <= set(exported), f"{module.path}: public but not in __all__: {sorted(public - set(exported))}"
    assert len(exported) == len(set(exported)), f"{module.path}: a name is twice in __all__"
    if not module.is_package:
        foreign = set(exported) - module.defined() - module.assigned()
        assert not foreign, f"{module.path}: in __all__ but defined elsewhere: {sorted(foreign)}"


@each_module
def test_names_in_all_exist(module: Module) -> None:
    if module.name in {"lockstep.__main__", "lockstep.compat.install"}:  # Those do something when imported.
        return
    loaded = importlib.import_module(module.name)
    missing = [name for name in module.exported() or [] if not hasattr(loaded, name)]
    assert not missing, f"{module.path}: in __all__ but not there: {missing}"


@each_module
def test_public_things_have_docstrings(module: Module) -> None:
    documented, without = set(), []
    for node in module.tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            # Of overloads, the implementation carries the docstring.
            (documented.add if ast.get_docstring(node) else without.append)(node.name)
    without = sorted(set(without) - documented)
    assert not without, f"{module.path}: no docstring: {without}"
    assert ast.get_docstring(module.tree) or not module.tree.body, f"{module.path} says not what it is for"


def test_launcher_does_not_import_torch() -> None:
    program = "import sys, lockstep, lockstep.cli; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], timeout=limit_s(60))
    assert done.returncode == 0, "the launcher imports torch or numpy, which delays every start by seconds"
