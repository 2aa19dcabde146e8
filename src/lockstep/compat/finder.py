"""`import horovod` and `import apex` where neither is installed: shims stand in, as the same module objects.

[Note: the real package wins] The finder stands first on `sys.meta_path`, and asks all others before it answers for
`horovod` or `apex` itself. It must stand first because of what is inside: once `horovod` is the module
`lockstep.compat.horovod`, Python's own finder would look for `horovod.torch` in that package's folder and load the
file once more under another name, with other classes. A folder of that name without an `__init__.py` is no package
(data of a script, or a clone of a repository that holds the package deeper), unless it has a submodule that
the shim has too.

[Note: the same modules] `horovod.torch` is `lockstep.compat.horovod.torch`, one object under two names in
`sys.modules`. So `isinstance` works whichever name a script used, and what is pickled names the module that is
installed. The submodules that a package has imported itself are entered under both names with it: the import system
binds what it imports in the parent, over `apex.amp._amp_state`, an object, and `apex.parallel.LARC`, a class, which
Apex's packages put in the place of their submodules of those names.

Nothing here imports torch, nor a shim before a script does.
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
"""Those of them that programs have a way without; see [Note: who only asks] in `asking.py`."""


class ShimFinder(MetaPathFinder):
    """Finds the packages in `SHIMS` that are not installed. Put first on `sys.meta_path`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module behind the name, the real package's own if that is installed, or None.

        Raises:
            ModuleNotFoundError: a module that the shim refuses, and knows an alternative to.
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
    except ModuleNotFoundError:  # A module, and not a package, stands above it.
        return None


def _refuse(package: str, rest: str) -> None:
    """Raise what a shim has to say about a module that it does not have, if anything."""
    advices = getattr(sys.modules[package], "REFUSED", {}) if rest else {}
    name = rest
    while name and name not in advices:
        name = name.rpartition(".")[0]
    if name:
        full = f"{package}.{rest}"
        raise ModuleNotFoundError(f"{full} is not supported by {SHIMS[package]}; {advices[name]}", name=full)


def _is_stray(spec: ModuleSpec, shim: str) -> bool:
    """Whether this is a folder that only has the package's name. See [Note: the real package wins]."""
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
    """Gives a module another name.

    Args:
        name: the name under which the shim is imported, such as `lockstep.compat.apex`.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._own_spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        if spec.name in SHIMS:
            print_notice(
                f"{spec.name} is not installed here, so `import {spec.name}` finds {self._name}; "
                f"{opt_out()} leaves it out"
            )
        module = importlib.import_module(self._name)
        self._own_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        other = module.__spec__.name if module.__spec__ is not None else ""
        # The import system has put the other name's spec here; the module has been executed under its own.
        module.__spec__ = self._own_spec
        # See [Note: the same modules].
        for name, loaded in list(sys.modules.items()):
            if name.startswith(f"{self._name}."):
                sys.modules.setdefault(other + name[len(self._name) :], loaded)

    def get_code(self, fullname: str) -> CodeType | None:
        """For `python -m` with the other name."""
        spec = importlib.util.find_spec(self._name)
        get_code = getattr(spec.loader if spec is not None else None, "get_code", None)
        code: CodeType | None = get_code(self._name) if get_code is not None else None
        return code
