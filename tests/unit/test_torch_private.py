"""What is private in torch, or patched, has a record in `lockstep.torch_private`, and no other module touches it."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from docs.site import torch_internals
from lockstep.errors import SetupError
from lockstep.testing import limit_s
from lockstep.torch_private import lookup, patching, tensors
from lockstep.torch_private.record import NameRecord, Use
from lockstep.torch_private.table import make_table, record_of, table
from package_sources import SRC, Module, each_module, modules

PAGE = SRC.parent / "docs" / "torch-internals.md"
FOLDERS = ("lockstep.torch_private", *(record.folder for record in table().values() if record.folder))

# Private names of Python's own library, and of what is no torch, on objects whose type no import shows.
NOT_TORCHS = {
    ("lockstep.launch.payload", "_fd"): "multiprocessing's resource tracker",
    ("lockstep.launch.payload", "_inheriting"): "multiprocessing's process",
    ("lockstep.tree", "_make"): "a named tuple's",
    ("lockstep.commands.launch", "_option_string_actions"): "argparse's",
    ("lockstep.commands.horovodrun", "_option_string_actions"): "argparse's",
    ("lockstep.compat.apex.amp.handle", "_amp_stash"): "a name of Apex's, which amp puts on optimizers",
    ("lockstep.compat.apex.amp.optimizers", "_amp_stash"): "the same",
    ("lockstep.compat.apex.amp.optimizers", "_amp_lazy_init"): "the same",
    ("lockstep.compat.apex.amp.optimizers", "_lazy_init_maybe_master_weights"): "the same",
    ("lockstep.compat.apex.amp.optimizers", "_prepare_amp_backward"): "the same",
    ("lockstep.compat.apex.amp.optimizers", "_post_amp_backward"): "the same",
}
# `setattr` on what is not torch's: the object that is written to, and whose it is.
SETS_ATTRIBUTES = {
    ("lockstep.replicas.replicate", "copy"): "replicas of the user's module",
    ("lockstep.comm.inference", "group"): "a class of ours, by its decorator",
    ("lockstep.comm.mixed_group", "group"): "the same",
    ("lockstep.compat.apex.amp.properties", "properties"): "amp's options",
    ("lockstep.compat.horovod.torch.elastic.state", "self"): "the user's state",
    ("lockstep.parallel.distributed", "module"): "the user's module, as torch's engine does",
}

# What metaclasses of torch and of Python put into every class.
BY_METACLASSES = {"_abc_impl", "_backward_cls"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def imported_roots(tree: ast.AST) -> dict[str, str]:
    """The names that a file's imports bind, each with the top package it comes from."""
    roots = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                roots[alias.asname or top] = top
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                roots[alias.asname or alias.name] = node.module.split(".")[0]
    return roots


def own_names() -> set[str]:
    """Private names that Lockstep's own source defines or assigns."""
    found = set()
    for module in modules().values():
        for node in ast.walk(module.tree):
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    found.add(name)
                case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                    found.add(name)
                case ast.Name(id=name, ctx=ast.Store()):
                    found.add(name)
    return found


OWN = own_names()
TORCHS = {record.name.rpartition(".")[2] for record in table().values() if is_private(record.name.rpartition(".")[2])}


def root_of(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


def private_imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(origin), names=names) if origin.split(".")[0] == "torch":
                parts = {*origin.split("."), *(alias.name for alias in names)}
                if any(is_private(part) for part in parts):
                    yield f"{node.lineno}: {ast.unparse(node)}"
            case ast.Import(names=names):
                for alias in names:
                    if alias.name.split(".")[0] == "torch" and any(map(is_private, alias.name.split("."))):
                        yield f"{node.lineno}: {ast.unparse(node)}"


def private_accesses(module: Module) -> Iterator[str]:
    """Private attributes of what is imported from torch, and of any object if Lockstep defines none of that name."""
    roots = imported_roots(module.tree)
    assigned = {
        node.attr
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and root_of(node) in ("self", "cls")
    }
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Attribute) or not is_private(node.attr):
            continue
        package = roots.get(root_of(node) or "")
        if package == "torch" or (
            package in (None, "lockstep")
            and (node.attr not in OWN or (node.attr in TORCHS and node.attr not in assigned | module.defined()))
            and (module.name, node.attr) not in NOT_TORCHS
            and not _is_own_member(module, node)
        ):
            yield f"{node.lineno}: {ast.unparse(node)}"


def _is_own_member(module: Module, node: ast.Attribute) -> bool:
    """`self._name` or `super()._name` in a class that defines the name."""
    if root_of(node) not in ("self", "cls"):
        return False
    return any(
        isinstance(each, ast.FunctionDef) and each.name == node.attr
        for kind in ast.walk(module.tree)
        if isinstance(kind, ast.ClassDef)
        for each in kind.body
    )


def assignments(module: Module) -> Iterator[str]:
    roots = imported_roots(module.tree)
    for node in ast.walk(module.tree):
        targets: list[ast.expr] = []
        match node:
            case ast.Assign(targets=found):
                targets = found
            case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
                targets = [target]
            case ast.Delete(targets=found):
                targets = found
            case ast.Call(func=ast.Name(id="setattr" | "delattr"), args=[owner, *_]):
                if (module.name, ast.unparse(owner)) not in SETS_ATTRIBUTES:
                    yield f"{node.lineno}: {ast.unparse(node)}"
        for target in targets:
            if isinstance(target, ast.Attribute) and roots.get(root_of(target) or "") == "torch":
                yield f"{target.lineno}: {ast.unparse(node)}"


@each_module
def test_no_private_name_of_torch_outside(module: Module) -> None:
    if module.name.startswith(FOLDERS):
        return
    wrong = [*private_imports(module.tree), *private_accesses(module)]
    assert not wrong, f"{module.path}: ask lockstep.torch_private, with a record there:\n" + "\n".join(wrong)


@each_module
def test_no_patch_of_torch_outside(module: Module) -> None:
    if module.name.startswith(FOLDERS):
        return
    wrong = list(assignments(module))
    assert not wrong, f"{module.path}: use torch_private.patching, with a record there:\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    "line",
    [
        "import torch\ntorch._C._cuda_init()",
        "import torch.distributed as dist\nx = dist.distributed_c10d._world",
        "from torch.nn.modules.batchnorm import _BatchNorm",
        "from torch._utils import ExceptionWrapper",
        "import torch._dynamo",
        "def f(tensor):\n    return tensor._version",
        "def f(model):\n    return model._something_of_torchs",
        "import torch\ntorch.Tensor.eq = None",
        "import torch.distributed as dist\ndist.reduce_op = 1",
        "from torch.utils import data\nsetattr(data.DataLoader, '__init__', None)",
        "def f(owner):\n    setattr(owner, 'x', 1)",
    ],
)
def test_uses_are_found(line: str) -> None:
    module = Module("lockstep.example", Path("example.py"), ast.parse(line))
    assert [*private_imports(module.tree), *private_accesses(module), *assignments(module)]


def test_exemptions_are_needed() -> None:
    used = {
        (name, ast.unparse(node.args[0]))
        for name, module in modules().items()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr"
    }
    assert set(SETS_ATTRIBUTES) <= used
    attributes = {
        (name, node.attr)
        for name, module in modules().items()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute)
    }
    assert set(NOT_TORCHS) <= attributes


def _is_here(since: str) -> bool:
    """Whether the torch that runs is of that release or newer."""
    running = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return not since[0].isdigit() or tuple(int(part) for part in since.split()[0].split(".")) <= running


def test_every_name_is_in_this_torch() -> None:
    """Else its record says until which release it was there."""
    importlib.import_module("torch.distributed.elastic.agent.server.api")
    missing = []
    for record in table().values():
        can_be_found = record.use not in (Use.ATTRIBUTE, Use.BEHAVIOUR, Use.ADD) and not record.folder
        if (
            can_be_found
            and "*" not in record.name
            and not record.until
            and _is_here(record.since)
            and lookup.resolve(record.name) is lookup.MISSING
        ):
            missing.append(record.name)
    assert not missing


def test_every_name_in_the_folder_has_a_record() -> None:
    """Names are handed to `find`, `need`, … as texts; a wrong one is an AssertionError when it is looked up."""
    named = set()
    for module in modules().values():
        for node in ast.walk(module.tree):
            match node:
                case ast.Call(
                    func=ast.Name(id="find" | "need" | "attribute"), args=[ast.Constant(value=str(name)), *_]
                ) if name.startswith("torch."):
                    named.add(name)
    assert named
    assert all(record_of(name) for name in named)
    with pytest.raises(AssertionError, match="has no record"):
        record_of("torch._surprise")


def subclasses_of_torch() -> Iterator[type]:
    skipped = {"lockstep.__main__", "lockstep.compat.install"}  # They do something when imported.
    for name in modules():
        if name in skipped or name.startswith(FOLDERS):
            continue
        for kind in vars(importlib.import_module(name)).values():
            if inspect.isclass(kind) and kind.__module__ == name and any(map(is_torchs, kind.__mro__)):
                yield kind


def is_torchs(kind: type) -> bool:
    return kind.__module__.split(".")[0] == "torch"


def test_every_override_of_a_private_method_has_a_record() -> None:
    """A private name that a class of ours shares with its base in torch is a hook that torch may rename, or a clash."""
    known = {record.name for record in table().values() if record.use is Use.OVERRIDE}
    wrong = []
    for kind in subclasses_of_torch():
        bases = [base for base in kind.__mro__ if is_torchs(base)]
        for name in filter(is_private, set(vars(kind)) - BY_METACLASSES):
            overridden = [f"{base.__module__}.{base.__qualname__}.{name}" for base in bases if name in vars(base)]
            ends = {".".join(full.split(".")[-2:]) for full in overridden}
            if overridden and not any(".".join(each.split(".")[-2:]) in ends for each in known):
                wrong.append(f"{kind.__module__}.{kind.__name__}: {overridden}")
    assert not wrong, "\n".join(wrong)


PROGRAM = """
import sys
import torch, torch.distributed, torch.utils.data, torch.optim.lr_scheduler
import torch.distributed.rendezvous

if not hasattr(torch._C._dynamo.eval_frame, "set_code_exec_strategy"):  # torch 2.6
    import torch._dynamo  # which changes torch, and comes with torch.compiler.disable

def state():
    found = {}
    for name, module in list(sys.modules.items()):
        if module is not None and name.split(".")[0] == "torch":
            for key, value in list(vars(module).items()):
                found[f"{name}.{key}"] = value
                if isinstance(value, type) and value.__module__.split(".")[0] == "torch":
                    found.update({f"{name}.{key}.{each}": thing for each, thing in list(vars(value).items())})
    return found

before, modules_before = state(), set(sys.modules)
import lockstep
for name in lockstep.__all__:
    getattr(lockstep, name)
after = state()
for name in sorted(before):
    if after.get(name) is not before[name] and not name.startswith("torch.overrides"):
        print(name)
"""


def changed_by_importing_lockstep(**variables: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=limit_s(120),
        env={**os.environ, **variables},
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


COMPILED = """
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives
import lockstep

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

@torch.compile(backend="eager")
def send(tensor):
    return dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor * 2, 0)])

try:
    send(torch.ones(1))
except (RuntimeError, ValueError) as error:
    print(type(error))
dist.destroy_process_group()
"""


def test_compiler_knows_what_is_patched_where_it_has_listed_functions_before() -> None:
    """Else `torch.compile` fails at `dist.batch_isend_irecv`; here gloo does, at a send to oneself."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPILED], capture_output=True, text=True, timeout=limit_s(120)
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout in ("<class 'RuntimeError'>\n", "<class 'ValueError'>\n")


@pytest.mark.parametrize("is_launched", [False, True])
def test_import_changes_what_the_table_says(is_launched: bool, tmp_path: Path) -> None:
    """Every attribute of every module and class of torch, before `import lockstep` and after."""
    changed = changed_by_importing_lockstep(**({"LOCKSTEP_RENDEZVOUS": str(tmp_path)} if is_launched else {}))
    patched = [record for record in table().values() if record.use is Use.PATCH]
    always = {record.name for record in patched if record.when == "always"} - {
        "torch.distributed.rendezvous._rendezvous_handlers"  # a dict, whose entries change
    }
    launched = ("torch._C._distributed_c10d.",)
    unknown = set()
    for name in changed:
        # The same class or function is seen under every module that has taken it over.
        tail = (
            ".".join(name.split(".")[-2:]) if ".__" in name or name.split(".")[-2][0].isupper() else name.split(".")[-1]
        )
        owners = [record.name for record in patched if record.name.endswith(f".{tail}")]
        is_verb = is_launched and tail.startswith("ProcessGroup.") and f"{launched[0]}{tail}"
        if not (set(owners) & (always | {each for each in owners if is_launched}) or is_verb):
            unknown.add(name)
    assert not unknown
    assert "torch.distributed.distributed_c10d.monitored_barrier" in changed
    assert is_launched == ("torch._C._distributed_c10d.Work.wait" in changed)


def test_page_is_what_the_table_says() -> None:
    how = "run `python -m docs.site.torch_internals > docs/torch-internals.md`"
    assert PAGE.read_text() == torch_internals.render(), how


# ---- a torch that lacks a name ---------------------------------------------------------------------


@pytest.fixture
def lacking(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module that has none of the names of which a table of its own tells."""
    module = ModuleType("torch_of_tomorrow")
    records = make_table(
        [
            NameRecord("torch_of_tomorrow._gone", Use.READ, "counts sheep", "nobody counts them"),
            NameRecord("torch_of_tomorrow.patched", Use.PATCH, "wakes them", "they sleep"),
            NameRecord("torch_of_tomorrow.added", Use.ADD, "more of them", "fewer"),
        ]
    )
    monkeypatch.setitem(sys.modules, "torch_of_tomorrow", module)

    def record_of(name: str, use: Use | None = None) -> NameRecord:
        assert use in (None, records[name].use)
        return records[name]

    for where in (lookup, patching):
        monkeypatch.setattr(where, "record_of", record_of)
    return module


def test_missing_name_is_one_warning(
    lacking: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lockstep.log._warned", set())
    for _ in range(2):
        assert lookup.find("torch_of_tomorrow._gone") is None
    said = capsys.readouterr().err
    assert lookup.attribute("torch_of_tomorrow._gone", default=7)(object()) == 7
    assert capsys.readouterr().err == ""
    assert said.count("this torch has no torch_of_tomorrow._gone (counts sheep): nobody counts them") == 1
    assert patching.patch("torch_of_tomorrow.patched", 1) is False
    assert patching.wrap("torch_of_tomorrow.patched", lambda original: original) is False
    assert not hasattr(lacking, "patched")
    assert capsys.readouterr().err.count("they sleep") == 1


def test_missing_name_that_is_needed_raises_when_used(lacking: ModuleType) -> None:
    needed = lookup.need("torch_of_tomorrow._gone")
    with pytest.raises(
        SetupError, match=r"torch .* has no torch_of_tomorrow._gone \(counts sheep\): nobody counts them"
    ):
        needed(1)
    with pytest.raises(SetupError):
        _ = needed.apply


def test_patching(lacking: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands in the place of a function, and of what another module took from there; what is there stays."""
    other = ModuleType("other_of_tomorrow")
    monkeypatch.setitem(sys.modules, "other_of_tomorrow", other)

    def original(number: int) -> int:
        """Counts."""
        return number

    lacking.patched = other.patched = original  # type: ignore[attr-defined]
    assert patching.wrap("torch_of_tomorrow.patched", lambda own: lambda number: own(number) + 1, "other_of_tomorrow")
    assert lacking.patched(1) == other.patched(1) == 2
    assert lacking.patched.__doc__ == "Counts."
    patching.add("torch_of_tomorrow.added", 1)
    patching.add("torch_of_tomorrow.added", 2)
    assert lacking.added == 1
    with pytest.raises(AssertionError):
        patching.add("torch_of_tomorrow.patched", 1)


def test_fallbacks_compute_the_same() -> None:
    """What stands in for kernels of torch that a release may lack."""
    generator = torch.Generator().manual_seed(7)
    rows = torch.randn(9, 64, generator=generator) * torch.logspace(-3, 3, 9).unsqueeze(1)
    packed = torch.ops.quantized.embedding_bag_byte_prepack(rows)
    own = tensors._prepack_by_operators(rows)
    # A value in the middle between two steps may be rounded either way; the head may differ in its last bit.
    assert (packed[:, :-8].int() - own[:, :-8].int()).abs().max() <= 1
    unpacked, by_operators = torch.ops.quantized.embedding_bag_byte_unpack(packed), tensors._unpack_by_operators(packed)
    torch.testing.assert_close(by_operators, unpacked, rtol=1e-5, atol=1e-3)
    places = [torch.zeros(3), torch.zeros(2)]
    tensors._copy_one_by_one(places, [torch.ones(3), torch.ones(2)])
    tensors._mul_one_by_one(places, 2.0)
    assert [each.tolist() for each in places] == [[2.0] * 3, [2.0] * 2]
