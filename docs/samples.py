"""What the first page and the guides show of programs' output, by running these programs.

A sample stands between `<!-- sample: NAME -->` and `<!-- /sample -->`. `python -m docs.samples` runs all of them and
writes what they print to the pages; tests/examples/ runs them and compares. Times, rates and rounding are
not the same twice, nor on two machines: these numbers are masked in the comparison, all others must be right.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

__all__ = ["GUIDES", "README", "SAMPLES", "START", "fill", "masked", "samples_in", "script_in"]

README = Path(__file__).parents[1] / "README.md"
START = Path(__file__).with_name("start.md")
# The name of the sample of a guide, and of its script.
GUIDES = {
    name: Path(__file__).with_name(f"guide-{page}.md")
    for name, page in {
        "loop": "loop",
        "data": "data",
        "sharded": "sharded",
        "evaluation": "evaluation",
        "checkpoints": "checkpoints",
        "coming": "coming-from",
    }.items()
}

_SAMPLE = re.compile(r"(<!-- sample: (?P<name>\w+) -->\n```\n)(?P<text>.*?)(```\n<!-- /sample -->)", re.DOTALL)


def _train() -> str:
    """What `make train` prints, without the epochs before the last and the tables."""
    epochs, _, tables = _output_of("train", "digits", "--nproc", "2").partition("\n\n")
    lines = epochs.splitlines()
    return "\n".join((lines[0], "…", lines[-1], "…", tables.splitlines()[-1], ""))


def _mismatch() -> str:
    """The example, broken by the lines of the first page; with made-up names of host and processes."""
    name = "examples/train.py"
    script = (README.parent / name).read_text()
    (step,) = re.findall(r"^.*optimizer\.step\(\).*\n", script, re.MULTILINE)
    broken = script.replace(step, step + script_in(START.read_text()))
    printed = _output_of("run", "--nproc", "2", name, files={name: broken}, fails=True)
    printed = re.sub(r"^=+\n", "", printed, flags=re.MULTILINE)
    for pid in ("4711", "4712"):
        printed = re.sub(r"\((?!node1)\S+, pid \d+\)", f"(node1, pid {pid})", printed, count=1)
    return printed


def _guide(name: str) -> str:
    """What the script of a guide prints on two processes."""
    script = f"{name}.py"
    return _output_of("run", "--nproc", "2", "--no-prefix", script, files={script: script_in(GUIDES[name].read_text())})


def _script() -> str:
    """What README's script prints on two processes."""
    return _output_of(
        "run", "--nproc", "2", "--no-prefix", "train.py", files={"train.py": script_in(README.read_text())}
    )


def _verify() -> str:
    """What `lockstep verify` says of README's script."""
    return _output_of("verify", "train.py", files={"train.py": script_in(README.read_text())})


SAMPLES: Mapping[str, Callable[[], str]] = {
    "train": _train,
    "script": _script,
    "verify": _verify,
    "mismatch": _mismatch,
    **{name: partial(_guide, name) for name in GUIDES},
}


def script_in(page: str) -> str:
    """The first block of Python of a page: the program of a guide. What follows are variations of it, and recipes."""
    return str(re.findall(r"```python\n(.+?)```", page, re.DOTALL)[0])


def _output_of(*arguments: str, files: Mapping[str, str] | None = None, fails: bool = False) -> str:
    """What a `lockstep` command prints, in a folder with these files; one that fails, on stderr."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in (files or {}).items():
            path = Path(folder, name)
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        command = [sys.executable, "-m", "lockstep", *arguments]
        stderr = subprocess.PIPE if fails else None
        done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=stderr, text=True)
    if (done.returncode != 0) is not fails:
        raise RuntimeError(f"{shlex.join(command)} ended with {done.returncode}")
    return (done.stderr if fails else done.stdout).replace(f"{folder}/", "")


def samples_in(page: str) -> dict[str, str]:
    """The samples of a page, by name.

    >>> samples_in("Like this:\\n<!-- sample: x -->\\n```\\none\\ntwo\\n```\\n<!-- /sample -->\\nOr not.")
    {'x': 'one\\ntwo\\n'}
    """
    return {found["name"]: found["text"] for found in _SAMPLE.finditer(page)}


def fill(page: str, outputs: Mapping[str, str]) -> str:
    """The page with these outputs in place of its samples."""
    return _SAMPLE.sub(lambda found: found[1] + outputs[found["name"]] + found[4], page)


def masked(text: str) -> str:
    """A sample without what differs from run to run.

    Numbers with a fraction are measured or rounded, and so are rates, digits and how many images were recognized. Cells
    of tables are as wide as what stands in them.

    >>> masked("training  460 steps in 17.6 s   1,631 samples/s")
    'training 460 steps in # s # samples/s'
    >>> masked("held out  99.16% (356/359)"), masked("99.16%   356 of 359 images")
    ('held out #% (#/359)', '#% # of 359 images')
    """
    text = re.sub(r"(?<=to )\d+(?= digits)|\d[\d,]*\.\d+|\d[\d,]*(?= samples/s)|\d+(?=/359| of 359)", "#", text)
    return re.sub(r"[ ─]+", " ", text)


def main() -> None:
    """Run every sample and write the pages."""
    outputs = {name: run() for name, run in SAMPLES.items()}
    for page in (START, *GUIDES.values()):
        page.write_text(fill(page.read_text(), outputs))


if __name__ == "__main__":
    main()
