"""Makes torch.distributed know the name "lockstep", without importing torch before the user does.

`import lockstep` calls `ensure`. If torch.distributed is loaded the name is registered at once;
else when it is. So the launcher, which imports lockstep too, never pays for torch.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

__all__ = ["BACKEND_NAME", "ensure"]

BACKEND_NAME = "lockstep"
_TORCH_MODULE = "torch.distributed.distributed_c10d"


def _create(options: Any, backend_options: Any) -> Any:
    """What torch calls to make a group."""
    from lockstep.comm.backend import create

    return create(options, backend_options)


def _register(module: ModuleType) -> None:
    backend = module.Backend
    if BACKEND_NAME.upper() not in backend._plugins:
        backend.register_backend(BACKEND_NAME, _create, extended_api=True, devices=["cpu"])


class _AfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds torch's module as usual, and registers the backend when it has been executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _TORCH_MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        self._loader = spec.loader
        spec.loader = self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        _register(module)


def ensure() -> None:
    """Register the backend now, or as soon as torch.distributed is there. Local; may be called again."""
    module = sys.modules.get(_TORCH_MODULE)
    if module is not None and hasattr(module, "Backend"):
        _register(module)
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())
