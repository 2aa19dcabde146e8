"""Which spelling of `--local_rank` a script expects, by its source alone."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from lockstep.compat.legacy.spelling import find_spelling

ARGPARSE = "import argparse\nparser = argparse.ArgumentParser()\n"


@pytest.fixture
def write(tmp_path: Path):
    def write(**files: str) -> str:
        for name, text in files.items():
            path = tmp_path / (name.replace("__in__", "/") + ".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))
        return str(tmp_path / "main.py")

    return write


@pytest.mark.parametrize(
    ("text", "option"),
    [
        (ARGPARSE + "parser.add_argument('--local_rank', type=int)\nparser.parse_args()", "--local_rank"),
        (ARGPARSE + "parser.add_argument('--local-rank', type=int)\nparser.parse_args()", "--local-rank"),
        (ARGPARSE + "parser.add_argument('-l', '--local-rank', '--local_rank')\nparser.parse_args()", "--local-rank"),
        (ARGPARSE + "group = parser.add_argument_group()\ngroup.add_argument('-local_rank')", "-local_rank"),
        ("import click\n@click.option('--local-rank', type=int)\ndef main(local_rank): ...", "--local-rank"),
        ("import click\n@click.option('--local_rank', type=int)\ndef main(local_rank): ...", "--local_rank"),
        ("from optparse import OptionParser\np = OptionParser()\np.add_option('--local_rank')", "--local_rank"),
        ("from absl import flags\nflags.DEFINE_integer('local_rank', 0, 'help')", "--local_rank"),
        ("from absl.flags import DEFINE_integer\nDEFINE_integer('local-rank', 0, 'help')", "--local-rank"),
        ("import typer\ndef main(local_rank: int = typer.Option(0, '--local_rank')): ...", "--local_rank"),
        ("import typer\ndef main(local_rank: int = 0): ...\ntyper.run(main)", "--local-rank"),
        ("import fire\ndef main(local_rank=0): ...\nfire.Fire(main)", "--local_rank"),
        (
            "from transformers import HfArgumentParser, TrainingArguments\nHfArgumentParser(TrainingArguments)",
            "--local_rank",
        ),
        ("from dataclasses import dataclass\n@dataclass\nclass Config:\n    local_rank: int = 0", "--local_rank"),
        ("import sys\nrank = [a for a in sys.argv if a.startswith('--local-rank=')]", "--local-rank"),
        ("'''Usage: main.py [--local-rank=N]'''\nfrom docopt import docopt\ndocopt(__doc__)", "--local-rank"),
        ("'''Formerly used --local-rank.'''\nprint(1)", "--local_rank"),
        ("print 'python 2'\nparser.add_argument('--local-rank')", "--local-rank"),
        ("print 'python 2'", "--local_rank"),
        ("import os\nprint(os.environ['LOCAL_RANK'])", "--local_rank"),
        (ARGPARSE + "parser.add_argument('--lr')\nparser.parse_args()", None),
        (ARGPARSE + "parser.add_argument('--lr')\nparser.parse_known_args()", "--local_rank"),
        (ARGPARSE + "parser.add_argument('--local_ranks')\nparser.parse_args()", None),
    ],
)
def test_spelling(write, text: str, option: str | None) -> None:
    assert find_spelling(write(main=text)).option == option


def test_declarations_are_found_in_modules_of_the_script(write) -> None:
    main = write(
        main="from tools.options import get_args\nimport torch, json\nget_args()",
        tools__in____init__="",
        tools__in__options="from . import more\nfrom .deep.er import x\nfrom ..beyond import y",
        tools__in__more="import main",
        tools__in__deep__in____init__="",
        tools__in__deep__in__er="p.add_argument('--local-rank')",
    )
    spelling = find_spelling(main)
    assert spelling.option == "--local-rank"
    assert spelling.reason == "declared at er.py:1"


def test_the_nearest_declaration_counts(write) -> None:
    main = write(
        main="import far, near",
        near="p.add_argument('--local_rank')",
        far="import further",
        further="p.add_argument('--local-rank')",
    )
    assert find_spelling(main).option == "--local_rank"


def test_modules_and_folders(write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(
        pack__in____init__="raise RuntimeError('must not be imported')",
        pack__in____main__="from . import cli",
        pack__in__cli="p.add_argument('--local-rank')",
        pack__in__train="from pack.cli import p",
        folder__in____main__="p.add_argument('--local-rank')",
    )
    monkeypatch.chdir(tmp_path)
    assert find_spelling("pack", is_module=True).option == "--local-rank"
    assert find_spelling("pack.train", is_module=True).option == "--local-rank"
    assert find_spelling(str(tmp_path / "folder")).option == "--local-rank"
    assert find_spelling("missing", is_module=True).option == "--local_rank"
    assert find_spelling("missing.py").option == "--local_rank"
    write(other="p.add_argument('--local-rank')", pack__in__uses="import other")
    assert find_spelling("pack.uses", is_module=True).option == "--local-rank"
    monkeypatch.chdir("/")
    assert find_spelling("pack.uses", is_module=True, path=[str(tmp_path)]).option == "--local_rank", "a library"
    assert find_spelling("pack.train", is_module=True, path=[str(tmp_path)]).option == "--local-rank"
