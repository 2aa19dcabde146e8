"""The `lockstep` command: help, errors in one line, and the recipes."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import lockstep
from launching import Launches
from lockstep import cli
from lockstep.commands import parsing
from lockstep.commands import train as train_command
from lockstep.errors import LaunchError
from lockstep.testing import limit_s


def run_main(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(arguments)
    out, err = capfd.readouterr()
    return code, out, err


def test_version(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_main(capfd, "--version") == (0, f"lockstep {lockstep.__version__}\n", "")


@pytest.mark.parametrize("arguments", [("--version",), ("--help",), ("doctor", "--json")])
def test_reader_that_goes_away_is_no_error(arguments: tuple[str, ...]) -> None:
    """As in `lockstep doctor --json | head -1`; two ranks, which doctor starts, are none of this test's."""
    text = (
        "import sys\nfrom lockstep import cli\nfrom lockstep.tools import doctor\n"
        "doctor.examine = lambda: iter(())\nsys.exit(cli.main(sys.argv[1:]))"
    )
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    done = subprocess.run(
        [sys.executable, "-c", text, *arguments],
        stdout=write_fd,
        stderr=subprocess.PIPE,
        text=True,
        timeout=limit_s(30),
        check=False,
    )
    os.close(write_fd)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("arguments", [("--help",), ("-h",), ("help",)])
def test_overview(capfd: pytest.CaptureFixture[str], arguments: tuple[str]) -> None:
    code, out, _ = run_main(capfd, *arguments)
    assert code == 0
    assert "lockstep run --nproc 2 train.py" in out


def test_examples_of_the_overview_stand_in_one_column(capfd: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run_main(capfd, "--help")
    columns = {line.rindex("  lockstep ") for line in out.splitlines() if "  lockstep " in line}
    assert len(columns) == 1
    assert max(map(len, out.splitlines())) <= 110


def test_no_command_shows_the_overview(capfd: pytest.CaptureFixture[str]) -> None:
    code, out, err = run_main(capfd)
    assert (code, out) == (2, "")
    assert "usage: lockstep" in err


def test_help_of_run_explains_every_option(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        cli.main(["run", "--help"])
    assert leaving.value.code == 0
    out = capfd.readouterr().out
    for option in (
        "--nproc",
        "-m",
        "--no-prefix",
        "--log-dir",
        "--max-restarts",
        "--grace",
        "--master-addr",
        "--master-port",
    ):
        assert f"  {option}" in out or f", {option}" in out, option


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rum"], "unknown command 'rum', did you mean 'run'? Commands: run, "),
        (["train.py"], "did you mean `lockstep run train.py`?"),
        (["run"], "name a script to run; see `lockstep run --help`"),
        (["run", "-m"], "name a module to run after -m"),
        (["run", "--nproc", "two", __file__], "nproc is 'two'"),
        (["run", "--nproc", "0", __file__], "nproc is 0; expected at least 1 process"),
        (["run", "--nproc"], "expected one argument"),
        (["run", "--nprocs", "2", __file__], "unrecognized arguments: --nprocs 2, did you mean '--nproc'?; see"),
        (["run", "--max-restart=2", __file__], "--max-restart=2, did you mean '--max-restarts'?"),
        (["rehearse", "--nporc", "2", __file__], "did you mean '--nproc'?"),
        (["train", "digits", "--epoc", "3"], "did you mean '--epochs'?"),
        (["run", "-n", "two", __file__], "nproc is 'two'"),
        (["run", "-np", "two", __file__], "nproc is 'two'"),
        (["run", "-n", "2", "python3", __file__], "; leave it out: the ranks run the Python that lockstep runs on"),
        (["run", "--grace", "soon", __file__], "invalid float value: 'soon'"),
        (["run", "missing.py"], "script 'missing.py' not found in"),
        (["run", "--no-prefix", "--log-dir", "x", __file__], "not allowed with argument"),
        (["run", "--nproc", "1", "--log-dir", "/proc/none", __file__], "log_dir '/proc/none' cannot be written"),
        (["train", "digit"], "unknown recipe 'digit', did you mean 'digits'? Recipes: digits, imagenet"),
        (["train", "digits", "--epoch", "x"], "see `lockstep train digits --help`"),
    ],
)
def test_errors_are_one_line(capfd: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    code, out, err = run_main(capfd, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("lockstep: error: ")
    assert err.count("\n") == 1
    assert words in err


def test_number_that_nobody_named_is_said(launches: Launches) -> None:
    script = launches.script("pass")
    cores = len(os.sched_getaffinity(0))
    hidden = launches.environment(CUDA_VISIBLE_DEVICES="")
    line = f"lockstep: {cores} {'rank' if cores == 1 else 'ranks'}, one per core; set another number with --nproc N\n"
    assert launches.run(script, env=hidden).stderr == line
    assert launches.run("-n", "1", script, "-n", "3", env=hidden).stderr == ""
    done = launches.run(script, "--lr", "0.1", "--nproc", "2", "x y", env=hidden)
    assert done.stderr == (
        f"{line}lockstep: `--nproc 2` comes after the script name, so it was passed to the script; did you mean "
        "`lockstep run --nproc 2 script.py --lr 0.1 'x y'`?\n"
    )
    done = launches.run("-m", "platform", "--nproc=2", env=hidden)
    assert "did you mean `lockstep run --nproc=2 -m platform`?" in done.stderr


def test_a_number_that_went_to_the_script_is_told_by_other_commands_too(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Else `verify` would say of two ranks what was asked of three."""
    from lockstep.commands import rehearse, verify

    monkeypatch.setattr(rehearse, "rehearse", lambda rehearsal: 0)
    monkeypatch.setattr(verify, "verify", lambda verification: [])
    for command, name in ((rehearse, "rehearse"), (verify, "verify")):
        assert command.main([__file__, "--nproc", "3", "x"]) == 0
        assert f"did you mean `lockstep {name} --nproc 3 {__file__} x`?" in capfd.readouterr().err
        command.main(["--nproc", "4", __file__, "--nproc", "3"])
        assert capfd.readouterr().err == ""


@pytest.mark.parametrize("name", ["rehearse", "verify"])
def test_commands_that_start_ranks_are_not_for_mpirun(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    command = importlib.import_module(f"lockstep.commands.{name}")
    with pytest.raises(LaunchError, match=f"mpirun has started 2 copies of `lockstep {name}`. Start it once"):
        command.main([__file__])


def test_options_end_where_the_script_begins() -> None:
    def split(words: list[str]) -> object:
        return parsing.split_at_script(words, {"-m", "--no-prefix", "--help"})

    assert split(["--nproc", "2", "-m", "a.b", "-m"]) == (["--nproc", "2", "-m"], "a.b", ("-m",))
    assert split(["--nproc=2", "x.py", "--", "y"]) == (["--nproc=2"], "x.py", ("--", "y"))
    assert split(["--no-prefix", "--", "-odd.py"]) == (["--no-prefix"], "-odd.py", ())
    assert split(["-n4", "x.py"]) == (["-n4"], "x.py", ())
    assert split(["--no-prefix", "-ma.b", "-m"]) == (["--no-prefix", "-m"], "a.b", ("-m",))
    assert split(["--help"]) == (["--help"], None, ())
    assert split([]) == ([], None, ())


def test_recipe_runs_as_a_module_on_the_bare_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(train_command, "launch_job", lambda config: seen.append(config) or 0)
    assert cli.main(["train", "digits", "--nproc", "2", "--epochs", "3", "--grace", "1"]) == 0
    (config,) = seen
    assert (config.target, config.is_module, config.prefix) == ("lockstep.recipes.digits", True, False)
    assert (config.nproc, config.grace_s, config.args) == ("2", 1.0, ("--epochs", "3"))


def test_recipe_options_are_asked_for_without_torch() -> None:
    program = """
import sys
from lockstep.cli import main
try:
    main(['train', 'digits', '--help'])
except SystemExit as leaving:
    assert leaving.code == 0
sys.exit('torch is imported' if 'torch' in sys.modules else 0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=limit_s(60))
    assert done.returncode == 0, done.stderr
    assert "--nproc" in done.stdout
    assert "--epochs" in done.stdout


def test_command_is_installed(launches: Launches) -> None:
    command = [Path(sys.executable).with_name("lockstep"), "run", "--nproc", "1", launches.script("print('up')")]
    done = subprocess.run(command, cwd=launches.folder, capture_output=True, text=True, timeout=limit_s(30))
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0] up\n", "")
