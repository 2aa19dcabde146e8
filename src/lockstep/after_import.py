"""Calls a function as soon as another part of the program has imported a module."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.abc import Loader as _Loader
    from importlib.abc import MetaPathFinder as _Finder
    from importlib.machinery import ModuleSpec
    from types import ModuleType
else:  # the launcher imports this first of all, so without importlib.abc and what that imports

    class _Finder: ...

    class _Loader: ...


__all__ = ["call_after_import"]


class _AfterImport(_Finder, _Loader):
    """Import hook for one module, used once: imports it as usual, and then calls back."""

    def __init__(self, name: str, callback: Callable[[], None]) -> None:
        self._name = name
        self._callback = callback
        self._loader: _Loader | None = None

    def waits_for(self, name: str, callback: Callable[[], None]) -> bool:
        return (self._name, self._callback) == (name, callback)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        assert self._loader is not None
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert self._loader is not None
        # The module must see its real loader.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._callback()


def call_after_import(name: str, callback: Callable[[], None]) -> None:
    """Call back once a module has been imported; at once if it already is. Local.

    Args:
        name: name of the module.
        callback: called once, even if registered several times before the import.
    """
    if name in sys.modules:
        callback()
    elif not any(isinstance(finder, _AfterImport) and finder.waits_for(name, callback) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport(name, callback))
