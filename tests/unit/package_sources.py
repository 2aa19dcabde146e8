"""The package's source files as syntax trees, for the tests that read code instead of running it."""

from __future__ import annotations

import ast
import functools
import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

SRC = Path(__file__).resolve().parents[2] / "src"


@dataclass(frozen=True)
class Module:
    name: str
    path: Path
    tree: ast.Module

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    def defined(self) -> set[str]:
        """Functions and classes of the module itself, also those under an `if` or a `try`."""
        return {node.name for node in _outside_scopes(self.tree) if isinstance(node, _SCOPES)}

    def assigned(self) -> set[str]:
        """Names that the module itself assigns."""
        names = [node for node in _outside_scopes(self.tree) if isinstance(node, ast.Name)]
        return {name.id for name in names if isinstance(name.ctx, ast.Store)}

    def exported(self) -> list[str] | None:
        """The names in `__all__`, or None without one."""
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
                assert isinstance(node.value, ast.List)
                return [element.value for element in node.value.elts if isinstance(element, ast.Constant)]
        return None


_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def _outside_scopes(node: ast.AST) -> Iterator[ast.AST]:
    """What lies below a node, without the insides of functions and classes."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, _SCOPES):
            yield from _outside_scopes(child)


@functools.cache
def modules() -> Mapping[str, Module]:
    """Every module of the package, by its dotted name."""
    gc.collect()  # as `no_garbage`
    found = {}
    for path in sorted(SRC.glob("lockstep/**/*.py")):
        parts = path.relative_to(SRC).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = Module(name, path, ast.parse(path.read_text(), str(path)))
    assert found
    return found


def _broken_by(check: Callable[[Module], None], module: Module) -> str:
    try:
        check(module)
    except AssertionError as error:
        return str(error) or "?"
    return ""


def each_module(check: Callable[[Module], None]) -> Callable[[], None]:
    """Make a rule of modules one test, which fails with all of those that break it: thousands would cost a minute."""

    @functools.wraps(check)
    def test() -> None:
        broken = [text for module in modules().values() if (text := _broken_by(check, module))]
        assert not broken, "\n".join(broken)

    del test.__wrapped__  # type: ignore[attr-defined]  # pytest would ask for a fixture of its argument's name
    return test


def imports_of(module: Module) -> Iterator[tuple[str, int]]:
    """The package's own modules that a module imports, each with the line.

    Includes imports inside functions, those for type checkers, and `import_module("lockstep…")`.
    """
    for node in ast.walk(module.tree):
        match node:
            case ast.Import(names=names):
                yield from ((alias.name, node.lineno) for alias in names if _is_ours(alias.name))
            case ast.ImportFrom(module=str(origin), names=names, level=0) if _is_ours(origin):
                for alias in names:
                    submodule = f"{origin}.{alias.name}"
                    yield (submodule if submodule in modules() else origin, node.lineno)
            case ast.ImportFrom(level=level) if level > 0:
                raise AssertionError(f"{module.path}:{node.lineno}: write relative imports with the full name")
            case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(name)), *_]):
                if _is_ours(name):
                    yield name, node.lineno


def _is_ours(name: str) -> bool:
    return name == "lockstep" or name.startswith("lockstep.")
