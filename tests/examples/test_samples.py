"""The first page and the guides show what programs print; test_guides.py runs those of the guides."""

from __future__ import annotations

import re
import subprocess

import pytest

from docs.samples import GUIDES, README, SAMPLES, START, fill, masked, samples_in
from lockstep.testing import limit_s


def test_every_sample_is_on_its_page() -> None:
    """And filling the page with what it shows changes nothing."""
    pages = {path: path.read_text() for path in (START, *GUIDES.values())}
    shown = {path: samples_in(page) for path, page in pages.items()}
    assert [name for path in shown for name in shown[path]] == list(SAMPLES)
    assert {name: list(shown[path]) for name, path in GUIDES.items()} == {name: [name] for name in GUIDES}
    assert {path: fill(page, shown[path]) for path, page in pages.items()} == pages


@pytest.mark.parametrize("name", ["train", "script", "mismatch"])
def test_sample_is_what_is_printed(name: str) -> None:
    """Run `python -m docs.samples` after a change of what is printed."""
    assert masked(SAMPLES[name]()) == masked(samples_in(START.read_text())[name])


@pytest.mark.parametrize(
    ("target", "command"), [("train", "lockstep train digits --nproc 2"), ("test", "python -m pytest .* --minutes 4")]
)
def test_commands_do_what_the_page_says(target: str, command: str) -> None:
    """And the first is the one whose output stands below it."""
    assert re.search(rf"(^|`)make {target}\b", START.read_text(), re.MULTILINE)
    done = subprocess.run(
        ["make", "-n", "--no-print-directory", target],
        cwd=README.parent,
        capture_output=True,
        text=True,
        check=True,
        timeout=limit_s(30),
    )
    assert re.search(f"/{command}", done.stdout.splitlines()[-1])


def test_extras_of_the_page_exist() -> None:
    """With the packages that each brings."""
    project = (README.parent / "pyproject.toml").read_text()
    extras = re.findall(r"^\| `\.\[(\w+)\]` \|.*\| ([^|]+?) \|$", START.read_text(), re.MULTILINE)
    assert len(extras) == 4
    for name, brings in extras:
        (packages,) = re.findall(rf"^{name} = \[(.*)\]$", project, re.MULTILINE)
        assert brings.partition(", which")[0].lower() == packages.replace('"', "")
