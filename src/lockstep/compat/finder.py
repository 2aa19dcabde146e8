"""Makes `import horovod` and `import apex` find the shims if the packages are not installed.

[Note: the real package wins] The finder is first on `sys.meta_path`, and asks all others before it finds
`horovod` or `apex` itself. It must be first because of submodules: once `horovod` is the module
`lockstep.compat.horovod`, Python's finder would look for `horovod.torch` in that package's folder and load the
file again under another name, with other classes. A folder of that name without an `__init__.py` is not the package
(but data of a script, or a clone of the repository with the package further down), unless it has a submodule that
the shim has too.

[Note: the same modules] `horovod.torch` is `lockstep.compat.horovod.torch`, one object under two names in
`sys.modules`. So `isinstance` works with either name, and pickles refer to the module that is
installed. Submodules that a package imports itself are registered under both names with it: the import system
would bind them in the parent, over `apex.amp._amp_state`, an object, and `apex.parallel.LARC`, a class, which
replace the submodules of those names in Apex's packages.

This does not import torch, nor a shim before the script does.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, MappingProxyType, ModuleType

from lockstep.compat.asking import hears_no
from lockstep.compat.notice import opt_out, print_notice

__all__ = ["CHOICES", "SHIMS", "ShimFinder"]

SHIMS: Mapping[str, str] = MappingProxyType({"apex": "lockstep.compat.apex", "horovod": "lockstep.compat.horovod"})
CHOICES = frozenset({"apex"})
"""Those that programs use optionally; see [Note: who only asks] in `asking.py`."""


class ShimFinder(MetaPathFinder):
    """Finds the packages in `SHIMS` that are not installed. Must be first on `sys.meta_path`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of the shim, or that of the real package if it is installed, or None.

        Raises:
            ModuleNotFoundError: the shim refuses the module; names the alternative.
        """
        package, _, rest = fullname.partition(".")
        shim = SHIMS.get(package)
        if shim is None:
            return None
        if not rest:
            real = self._ask_others(fullname, path, target)
            if real is not None and not _is_stray(real, shim):
                return real
            if package in CHOICES and hears_no(package, depth=1):
                return None
        elif sys.modules.get(package) is not sys.modules.get(shim, self):
            return None
        name = f"{shim}.{rest}" if rest else shim
        behind = _find(name)
        if behind is None:
            _refuse(package, rest)
            return None
        return ModuleSpec(fullname, _ShimLoader(name), origin=behind.origin)

    def _ask_others(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        for finder in list(sys.meta_path):
            if finder is not self and (spec := finder.find_spec(fullname, path, target)) is not None:
                return spec
        return None


def _find(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError:  # Its parent is a module, not a package.
        return None


def _refuse(package: str, rest: str) -> None:
    """Raise an error if the shim refuses the module, naming the alternative."""
    advices = getattr(sys.modules[package], "REFUSED", {}) if rest else {}
    name = rest
    while name and name not in advices:
        name = name.rpartition(".")[0]
    if name:
        full = f"{package}.{rest}"
        raise ModuleNotFoundError(f"{full} is not supported by {SHIMS[package]}; {advices[name]}", name=full)


def _is_stray(spec: ModuleSpec, shim: str) -> bool:
    """Whether this is just a folder with the package's name. See [Note: the real package wins]."""
    if spec.origin is not None or spec.submodule_search_locations is None:
        return False
    behind = _find(shim)
    offered = {
        os.path.splitext(entry)[0]
        for folder in (behind.submodule_search_locations or () if behind is not None else ())
        for entry in os.listdir(folder)
        if not entry.startswith("_")
    }
    for folder in spec.submodule_search_locations:
        for entry in os.listdir(folder) if os.path.isdir(folder) else ():
            stem, suffix = os.path.splitext(entry)
            if stem in offered and suffix in (".py", ".so", ""):
                return False
    return True


class _ShimLoader(Loader):
    """Loads a shim under another name.

    Args:
        name: the shim's own name, such as `lockstep.compat.apex`.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._own_spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        if spec.name in SHIMS:
            print_notice(
                f"{spec.name} is not installed, so `import {spec.name}` finds {self._name}; {opt_out()} prevents this"
            )
        module = importlib.import_module(self._name)
        self._own_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        other = module.__spec__.name if module.__spec__ is not None else ""
        # The import system has set the other name's spec; the module was executed under its own.
        module.__spec__ = self._own_spec
        # See [Note: the same modules].
        for name, loaded in list(sys.modules.items()):
            if name.startswith(f"{self._name}."):
                sys.modules.setdefault(other + name[len(self._name) :], loaded)

    def get_code(self, fullname: str) -> CodeType | None:
        """The code, for `python -m` with the other name."""
        spec = importlib.util.find_spec(self._name)
        get_code = getattr(spec.loader if spec is not None else None, "get_code", None)
        code: CodeType | None = get_code(self._name) if get_code is not None else None
        return code
