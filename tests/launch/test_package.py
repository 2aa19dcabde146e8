"""What a user installs: an archive of the sources, the wheel from it, and README's script in a new environment."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

from docs.samples import script_in
from lockstep.testing import limit_s

ROOT = Path(__file__).parents[2]


def run(*command: object, cwd: Path) -> str:
    """What a command prints, outside of the checkout and without what the tests see of it."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(cwd), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=limit_s(100),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "eprecat" not in done.stdout + done.stderr
    return done.stdout


def build(kind: str, source: Path, folder: Path) -> Path:
    """An sdist or a wheel, by the backend that pyproject.toml names."""
    hook = f"from setuptools import build_meta; build_meta.build_{kind}({str(folder)!r})"
    run(sys.executable, "-c", hook, cwd=source)
    (built,) = folder.glob("*.tar.gz" if kind == "sdist" else "*.whl")
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the archive of the sources, so that nothing is lacking there either."""
    folder = tmp_path_factory.mktemp("package")
    checkout = folder / "checkout"
    checkout.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    shutil.copytree(ROOT / "src", checkout / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    sdist = build("sdist", checkout, folder)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    return build("wheel", source, folder)


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel in it, which borrows torch and numpy of this one."""
    folder = tmp_path_factory.mktemp("new")
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    (packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
    # Of a folder named in a .pth file, .pth files are not read: the checkout, installed there, is not seen.
    packages.joinpath("torch.pth").write_text(f"{sysconfig.get_path('purelib')}\n{Path(torch.__file__).parents[1]}\n")
    return folder


def test_wheel_has_every_module_and_the_license(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (archive.read(name).decode() for name in names if name.endswith("/METADATA"))
    expected = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src" / "lockstep").rglob("*.py")}
    assert expected | {"lockstep/py.typed"} <= names
    assert {name for name in names if not name.startswith("lockstep/")} == {
        name for name in names if ".dist-info/" in name
    }
    assert "\nLicense-Expression: BSD-3-Clause\n" in metadata
    assert "\nLicense-File: LICENSE\n" in metadata
    assert any(name.endswith("/licenses/LICENSE") for name in names)


def test_script_of_readme_trains_alike_at_one_rank_and_two(environment: Path) -> None:
    """As it is printed, by the installed command, outside of the checkout."""
    environment.joinpath("train.py").write_text(script_in((ROOT / "README.md").read_text()))
    programs = environment / "venv" / "bin"
    where = run(programs / "python", "-c", "import lockstep; print(lockstep.__file__)", cwd=environment)
    assert Path(where.strip()).is_relative_to(environment)
    alone = run(programs / "python", "train.py", cwd=environment)
    together = run(programs / "lockstep", "run", "--nproc", "2", "--no-prefix", "train.py", cwd=environment)
    losses = [re.findall(r"^epoch \d: loss (\S+) on (\d) process", text, re.M) for text in (alone, together)]
    assert [[count for _, count in found] for found in losses] == [["1"] * 5, ["2"] * 5]
    one, two = ([float(loss) for loss, _ in found] for found in losses)
    assert one[-1] < one[0] / 2, "it learns, so the losses are of something"
    assert two == pytest.approx(one, rel=1e-5)
    assert run(programs / "lockstep", "--version", cwd=environment).strip()
