"""Imports point strictly down the layers; and other rules about where things may stand."""

from __future__ import annotations

import ast
import graphlib

from package_sources import Module, each_module, imports_of, modules

# From the bottom up. A module belongs to the longest name here that it begins with; modules in
# one line do not know each other. `lockstep` alone is the package's own __init__, which what
# stands above it uses as a user's script does.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("lockstep.errors",),
    ("lockstep.env",),
    (
        "lockstep.log",
        "lockstep.libc",
        "lockstep.after_import",
        "lockstep.secret",
        "lockstep.json_records",
        "lockstep.similar",
    ),
    ("lockstep.torch_private", "lockstep.network_interfaces"),
    ("lockstep.rank_status", "lockstep.frames"),
    ("lockstep.topology",),
    ("lockstep.tree", "lockstep.mpi_library"),
    ("lockstep.batch", "lockstep.seeding"),
    ("lockstep.shm", "lockstep.rendezvous"),
    ("lockstep.comm",),
    ("lockstep.placement", "lockstep.agreement", "lockstep.device_choice"),
    ("lockstep.stopping",),
    ("lockstep.world",),
    ("lockstep.rank_zero", "lockstep.drift", "lockstep.replicas"),
    ("lockstep.parallel", "lockstep.data", "lockstep.metrics", "lockstep.checkpoint"),
    ("lockstep.train",),
    ("lockstep.launch",),
    ("lockstep",),
    ("lockstep.compat", "lockstep.recipes", "lockstep.testing"),
    ("lockstep.tools", "lockstep.bench"),
    ("lockstep.commands",),
    ("lockstep.cli", "lockstep.__main__"),
)

MAX_LINES = 600

_LEVELS = {name: level for level, names in enumerate(LAYERS) for name in names}


def _layer_of(module: str) -> str:
    """The entry of LAYERS that a module belongs to; the package itself only by its own name."""
    parts = module.split(".")
    for length in range(len(parts), 1, -1):
        if ".".join(parts[:length]) in _LEVELS:
            return ".".join(parts[:length])
    assert module == "lockstep", f"{module} is in no layer: give it one in LAYERS and in ARCHITECTURE.md"
    return module


@each_module
def test_imports_point_down(module: Module) -> None:
    own = _layer_of(module.name)
    wrong = []
    for imported, line in imports_of(module):
        layer = _layer_of(imported)
        if layer == own or (own, layer) == ("lockstep.__main__", "lockstep.cli"):
            continue
        if _LEVELS[layer] >= _LEVELS[own]:
            wrong.append(f"{module.path}:{line}: {module.name} imports {imported}, which is not below it")
    assert not wrong, "\n".join(wrong)


def test_no_import_cycle() -> None:
    # Imports inside functions and those for type checkers count, too: without exception, so there is no list of them.
    graph = {name: {imported for imported, _ in imports_of(module)} - {name} for name, module in modules().items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which shows the cycle


@each_module
def test_only_env_touches_the_environment(module: Module) -> None:
    forbidden = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    wrong = []
    for node in ast.walk(module.tree):
        match node:
            case ast.Attribute(value=ast.Name(id="os"), attr=name) if name in forbidden:
                wrong.append(f"{module.path}:{node.lineno}: os.{name}")
            case ast.ImportFrom(module="os", names=names) if forbidden & {alias.name for alias in names}:
                wrong.append(f"{module.path}:{node.lineno}: {ast.unparse(node)}")
    assert module.name == "lockstep.env" or not wrong, "use lockstep.env instead:\n" + "\n".join(wrong)


@each_module
def test_file_is_short_enough_to_read(module: Module) -> None:
    lines = len(module.path.read_text().splitlines())
    assert lines <= MAX_LINES, f"{module.path} has {lines} lines, more than {MAX_LINES}: split it"
