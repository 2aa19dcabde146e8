"""The finder that lets shims stand in for packages, on a package and a shim of the test's own."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launching import Launches
from lockstep.after_import import call_after_import
from lockstep.compat import asking, finder
from lockstep.testing import limit_s

SHIM = {
    "__init__": "import doorway_log; doorway_log.seen.append(__name__)\nREFUSED = {'mlp': 'use nn', 'deep': 'use sea'}",
    "amp": "import doorway_log; doorway_log.seen.append(__name__)\nclass Scaler: pass\nvalue = 3",
    "deep/__init__": "",
    "deep/inner": "from doorway.amp import Scaler",
}


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """On the module path: the shim `doorway` for `oldpack`, which is not there."""
    write(tmp_path / "doorway", SHIM)
    write(tmp_path, {"doorway_log": "seen = []"})
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(finder, "SHIMS", {"oldpack": "doorway"})
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "meta_path", [finder.ShimFinder(), *sys.meta_path])
    yield tmp_path
    for name in list(sys.modules):
        if name.split(".")[0] in ("oldpack", "doorway", "doorway_log"):
            del sys.modules[name]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("rank", "size"),
    [("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE")],
)
def test_notice_is_of_the_first_rank_of_mpirun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: str, size: str
) -> None:
    monkeypatch.setenv(size, "2")
    notices = []
    for number in "01":
        monkeypatch.setenv(rank, number)
        sys.modules.pop("oldpack", None)
        importlib.import_module("oldpack")
        notices.append(capsys.readouterr().err.count("oldpack is not installed"))
    assert notices == [1, 0]


@pytest.mark.usefixtures("folder")
def test_one_module_under_two_names(capsys: pytest.CaptureFixture[str]) -> None:
    import oldpack.amp as amp
    import oldpack.deep.inner as inner

    shim = importlib.import_module("doorway.amp")
    assert amp is shim is sys.modules["oldpack.amp"]
    assert inner is importlib.import_module("doorway.deep.inner")
    assert isinstance(inner.Scaler(), amp.Scaler)
    assert type(pickle.loads(pickle.dumps(amp.Scaler()))) is amp.Scaler
    assert importlib.import_module("doorway_log").seen == ["doorway", "doorway.amp"], "each is executed once"
    assert (amp.__name__, amp.__spec__.name) == ("doorway.amp", "doorway.amp")
    assert sys.modules["oldpack"].amp is amp
    words = capsys.readouterr().err
    assert words.count("\n") == 1
    assert words.startswith("lockstep: oldpack is not installed, so `import oldpack` finds doorway;")


def test_an_object_of_a_submodules_name_stays(folder: Path) -> None:
    """A package may put an object in the place of a submodule that it has imported, as Apex's amp and LARC."""
    state = "from doorway.state.inner import inner\nfrom doorway.state.inner import value"
    write(folder / "doorway", {"state/__init__": state, "state/inner": "inner = object()\nvalue = 5"})
    kept = importlib.import_module("oldpack.state").inner
    assert importlib.import_module("oldpack.state.inner").value == 5
    exec("import oldpack.state.inner")
    assert sys.modules["oldpack.state"].inner is kept
    assert sys.modules["oldpack.state.inner"] is sys.modules["doorway.state.inner"]


def test_importing_submodules_of_the_shims_changes_nothing() -> None:
    """By the foreign name, after the package: each package has the same objects as before."""
    program = """
import importlib, pkgutil, sys, types
import lockstep.compat.install
for name in ("apex", "horovod"):
    package = importlib.import_module(name)
    below = [each.name for each in pkgutil.walk_packages(package.__path__, name + ".")]
    assert len(below) > 10, below
    for each in below:
        parent, _, child = each.rpartition(".")
        before = vars(importlib.import_module(parent)).get(child)
        module = importlib.import_module(each)
        own = sys.modules["lockstep.compat." + each]
        assert module is own and vars(sys.modules[parent])[child] in (before, own), each
        assert before is None or vars(sys.modules[parent])[child] is before, each
import apex.amp._amp_state
from apex.parallel.LARC import LARC
assert apex.amp._amp_state.loss_scalers == [] and apex.parallel.LARC is LARC
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=limit_s(60))
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("folder")
def test_what_the_shim_does_not_have_cannot_be_imported() -> None:
    for name in ("oldpack.contrib", "oldpack.amp.more", "oldpack.deep.inner.more"):
        with pytest.raises(ModuleNotFoundError, match=name.replace(".", r"\.")):
            importlib.import_module(name)
    assert importlib.util.find_spec("oldpack.contrib") is None
    assert importlib.util.find_spec("oldpack.amp").origin.endswith("doorway/amp.py")


@pytest.mark.usefixtures("folder")
def test_what_the_shim_refuses_is_refused_with_its_advice() -> None:
    for name, advice in (("mlp", "use nn"), ("deep.other", "use sea"), ("deep.other.more", "use sea")):
        with pytest.raises(ModuleNotFoundError, match=rf"oldpack\.\S+ is not supported by doorway; {advice}"):
            importlib.import_module(f"oldpack.{name}")
    with pytest.raises(ModuleNotFoundError, match=r"oldpack\.mlp is not supported by doorway; use nn"):
        exec("from oldpack.mlp import MLP")
    assert importlib.import_module("oldpack.deep.inner").__name__ == "doorway.deep.inner"


def test_looking_for_it_loads_no_shim(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert importlib.util.find_spec("oldpack") is not None
    assert capsys.readouterr().err == ""
    assert "oldpack" not in sys.modules


ASKING = (
    "from importlib.util import find_spec\nfound = find_spec('oldpack')",
    "import pkgutil, importlib.util\nfound = importlib.util.find_spec('oldpack')\nif found:\n    import oldpack",
)


@pytest.mark.parametrize("text", ASKING)
def test_who_only_asks_is_told_no(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(finder, "CHOICES", {"oldpack"})
    write(folder, {"doorway_asks": text})
    try:
        assert importlib.import_module("doorway_asks").found is None
        sys.modules.pop("doorway_asks")
        monkeypatch.setenv("LOCKSTEP_COMPAT", "1")
        assert importlib.import_module("doorway_asks").found is not None
    finally:
        sys.modules.pop("doorway_asks", None)
        asking._told.clear()
    assert importlib.import_module("oldpack.amp").value == 3
    assert importlib.util.find_spec("oldpack") is not None, "it is there now"


@pytest.mark.parametrize(
    ("text", "is_about_it"),
    [
        ("has_oldpack = found is not None\nassert has_oldpack", True),
        ("import sys\nsys.exit('Please install OldPack.')", True),
        ("has_oldpack = found is not None\nother", False),
    ],
)
def test_errors_of_who_was_told_no(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, is_about_it: bool) -> None:
    monkeypatch.setattr(finder, "CHOICES", {"oldpack"})
    monkeypatch.setattr(asking, "_told", set())
    write(folder, {"doorway_fails": f"from importlib.util import find_spec\nfound = find_spec('oldpack')\n{text}"})
    with pytest.raises((Exception, SystemExit)) as caught:
        importlib.import_module("doorway_fails")
    assert asking.hint_for_told(caught.value) == ("oldpack" if is_about_it else None)


@pytest.mark.core
@pytest.mark.usefixtures("forked")
def test_a_script_that_asks_for_apex(launches: Launches) -> None:
    script = launches.script(
        """
        from importlib.util import find_spec
        print(find_spec("apex") is None, find_spec("horovod") is None)
        def train():
            from apex import amp
            return amp.__name__
        print(train(), find_spec("apex").name)
        """
    )
    done = launches.run("--nproc", "1", script)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[0] True False\n[0] lockstep.compat.apex.amp lockstep.compat.apex\n"
    insists = launches.script(
        """
        from importlib.util import find_spec
        has_apex = find_spec("apex") is not None
        if not has_apex:
            raise ImportError("Please install apex from https://www.github.com/nvidia/apex")
        print("continues")
        """
    )
    refused = launches.run("--nproc", "1", insists)
    assert refused.returncode == 1
    assert "with `--compat` it finds lockstep.compat.apex" in refused.stderr
    done = launches.run("--nproc", "1", "--compat", insists)
    assert (done.returncode, done.stdout) == (0, "[0] continues\n"), done.stderr
    exits = launches.script("import importlib.util\nimportlib.util.find_spec('apex') or exit('Please install Apex.')")
    refused = launches.run("--nproc", "1", exits)
    assert refused.returncode == 1
    assert "with `--compat` it finds lockstep.compat.apex" in refused.stderr


def test_the_real_package_wins(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder / "oldpack", {"__init__": "", "amp": "value = 'real'"})
    assert importlib.import_module("oldpack.amp").value == "real"
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("oldpack.deep")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("content", ["data.txt", "setup.py", "oldpack/__init__.py"])
def test_a_folder_of_that_name_is_no_package(folder: Path, content: str) -> None:
    path = folder / "oldpack" / content
    path.parent.mkdir(parents=True)
    path.touch()
    assert importlib.import_module("oldpack.amp").value == 3


@pytest.mark.parametrize("content", ["amp.py", "amp/x.py"])
def test_a_package_without_init_wins_if_it_has_the_same_modules(folder: Path, content: str) -> None:
    path = folder / "oldpack" / content
    path.parent.mkdir(parents=True)
    path.write_text("value = 'real'")
    assert getattr(importlib.import_module("oldpack.amp"), "value", "real") == "real"


@pytest.mark.parametrize(("variable", "value"), [("RANK", "1"), ("TORCHELASTIC_RESTART_COUNT", "1")])
def test_one_rank_says_it_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    importlib.import_module("oldpack")
    assert capsys.readouterr().err == ""


def test_a_shim_that_fails_to_load_says_why(folder: Path) -> None:
    write(folder / "doorway", {"broken": "import no_such_thing"})
    with pytest.raises(ModuleNotFoundError, match="no_such_thing"):
        importlib.import_module("oldpack.broken")
    assert "oldpack.broken" not in sys.modules


def test_callback_after_import(folder: Path) -> None:
    write(folder, {"doorway_log": "assert __spec__.loader is __loader__\nkind = type(__loader__).__name__"})
    seen = []
    before = list(sys.meta_path)
    call_after_import("doorway_log", lambda: seen.append(hasattr(sys.modules["doorway_log"], "kind")))
    assert seen == []
    assert importlib.import_module("doorway_log").kind == "SourceFileLoader"
    assert seen == [True]
    assert sys.meta_path == before
    call_after_import("doorway_log", lambda: seen.append(True))
    assert seen == [True, True]


def test_callback_that_is_given_twice_is_called_once(folder: Path) -> None:
    write(folder, {"doorway_twice": ""})
    seen: list[str] = []

    def callback() -> None:
        seen.append("called")

    for _ in range(2):
        call_after_import("doorway_twice", callback)
    importlib.import_module("doorway_twice")
    assert seen == ["called"]


def test_installing_the_shims_imports_neither_torch_nor_a_shim() -> None:
    program = """
import sys
import lockstep.compat.install
found = [name for name in ("torch", "lockstep.compat.horovod", "lockstep.compat.apex") if name in sys.modules]
before = list(sys.meta_path)
lockstep.compat.install.install()
sys.exit(str(found) if found or sys.meta_path != before else 0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=limit_s(60))
    assert done.returncode == 0, done.stderr


@pytest.mark.core
def test_program_for_horovod_and_apex_finds_the_shims(launches: Launches) -> None:
    """In the ranks and in processes that they spawn; said once; and turned off by an option."""
    script = launches.script(
        """
        import multiprocessing
        import horovod.torch as hvd
        import horovod
        from apex import amp

        def child(queue):
            import lockstep.compat.horovod.torch as shim
            queue.put(shim is hvd and hvd.Average.__module__.startswith('lockstep'))

        if __name__ == '__main__':
            import lockstep.compat.apex.amp as shim
            assert amp is shim and sys.modules['horovod.torch'] is hvd is horovod.torch
            context = multiprocessing.get_context('spawn')
            queue = context.Queue()
            process = context.Process(target=child, args=(queue,))
            process.start()
            print(hvd.__name__, queue.get(timeout=60))
            process.join()
        """
    )
    done = launches.run("--nproc", "1", script)
    assert (done.returncode, done.stdout) == (0, "[0] lockstep.compat.horovod.torch True\n"), done.stderr
    said = sorted(done.stderr.splitlines())
    assert [line.split(",")[0] for line in said] == [
        "[0] lockstep: apex is not installed",
        "[0] lockstep: horovod is not installed",
    ]
    refused = launches.run("--nproc", "1", "--no-compat", script)
    assert refused.returncode == 1
    assert "No module named 'horovod'" in refused.stderr


def test_script_without_a_launcher(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "main": """
import importlib.util, os, pickle, sys
class Thing: pass
assert type(pickle.loads(pickle.dumps(Thing()))) is Thing
print(__name__, os.path.basename(sys.argv[0]), sys.argv[1:], importlib.util.find_spec("horovod").origin is not None)
assert os.getcwd() not in sys.path[1:], sys.path
"""
        },
    )
    command = [sys.executable, "-m", "lockstep.compat.script"]
    for target in (["main.py"], ["-m", "main"]):
        done = subprocess.run(
            [*command, *target, "x"], cwd=tmp_path, capture_output=True, text=True, timeout=limit_s(60)
        )
        assert (done.stdout, done.stderr) == ("__main__ main.py ['x'] True\n", ""), done.stderr
    write(tmp_path, {"multiproc": "import subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:], 'x'])"})
    done = subprocess.run(
        [sys.executable, "multiproc.py", *command[1:], "main.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=limit_s(60),
    )
    assert (done.stdout, done.stderr) == ("__main__ main.py ['x'] True\n", ""), done.stderr
    for target, words in ((["gone.py"], "script 'gone.py' not found"), ([], "name a script to run")):
        done = subprocess.run([*command, *target], cwd=tmp_path, capture_output=True, text=True, timeout=limit_s(60))
        assert done.returncode == 2
        assert words in done.stderr
