"""`lockstep bench` itself: its options, and what it leaves behind however a run ends."""

from __future__ import annotations

import argparse
import importlib.machinery
import io
import json
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep import cli
from lockstep.bench.figures import new_figure
from lockstep.bench.pages import Table, as_markdown, as_text
from lockstep.bench.results import Result, Series
from lockstep.bench.session import ProgressLine, Session, parse_duration
from lockstep.commands import bench
from lockstep.testing import limit_s

Measure = Callable[[argparse.Namespace, Session], None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[Measure], None]:
    """Makes a benchmark `fake` out of a function."""

    def put(measure: Measure) -> None:
        module = types.ModuleType("lockstep.bench.fake")
        module.__spec__ = importlib.machinery.ModuleSpec("lockstep.bench.fake", None)
        module.SUMMARY, module.DESCRIPTION = "measures nothing", "Measure nothing."  # type: ignore[attr-defined]
        module.add_arguments = lambda parser: parser.add_argument("--size", type=int, default=1)  # type: ignore[attr-defined]
        module.measure = measure  # type: ignore[attr-defined]
        module.blocks = lambda result: [  # type: ignore[attr-defined]
            Table("All.", ["who", "s"], [[one.contestant, str(one.samples_s)] for one in result.series])
        ]
        module.draw = lambda result: new_figure(2, 2, "fake")  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "lockstep.bench.fake", module)
        monkeypatch.setattr(bench, "_BENCHMARKS", ("fake",))

    return put


def measure_once(options: argparse.Namespace, session: Session) -> None:
    session.settings["size"] = options.size
    session.add(Series({"n": 1}, "a", 1, [0.25], {"peak_bytes": 7}))


def measure_and_stop(options: argparse.Namespace, session: Session) -> None:
    measure_once(options, session)
    raise KeyboardInterrupt


def measure_and_fail(options: argparse.Namespace, session: Session) -> None:
    measure_once(options, session)
    raise RuntimeError("rank 1 fell over")


def stop_at_once(options: argparse.Namespace, session: Session) -> None:
    raise KeyboardInterrupt


def run(tmp_path: Path, *more: str) -> int:
    return cli.main(["bench", "fake", "--nproc", "2", "--out", str(tmp_path), *more])


def test_leaves_result_table_and_picture(
    tmp_path: Path, install: Callable[[Measure], None], capfd: pytest.CaptureFixture[str]
) -> None:
    install(measure_once)
    assert run(tmp_path, "--size", "3", "--budget", "30s") == 0
    folder = tmp_path / "bench-fake"
    assert sorted(path.name for path in folder.iterdir()) == ["fake.json", "fake.md", "fake.png"]
    result = Result.load(folder / "fake.json")
    assert result.settings == {"nproc": 2, "budget_s": 30.0, "size": 3}
    assert result.complete
    assert result.series[0].facts == {"peak_bytes": 7}
    assert "a    [0.25]" in capfd.readouterr().out
    assert "| a | [0.25] |" in (folder / "fake.md").read_text()
    assert run(tmp_path) == 0
    assert (tmp_path / "bench-fake-2" / "fake.json").exists()
    assert run(tmp_path, "--name", "mine") == 0
    assert (tmp_path / "mine" / "fake.json").exists()


@pytest.mark.parametrize(
    ("measure", "code", "words"), [(measure_and_stop, 130, "interrupted"), (measure_and_fail, 1, "rank 1 fell over")]
)
def test_keeps_what_was_measured(
    tmp_path: Path,
    install: Callable[[Measure], None],
    capfd: pytest.CaptureFixture[str],
    measure: Measure,
    code: int,
    words: str,
) -> None:
    install(measure)
    assert run(tmp_path) == code
    out, err = capfd.readouterr()
    assert words in err
    assert "results so far are kept" in err
    assert "This run was cut short" in out
    assert not Result.load(tmp_path / "bench-fake" / "fake.json").complete


def test_nothing_measured_leaves_nothing(
    tmp_path: Path, install: Callable[[Measure], None], capfd: pytest.CaptureFixture[str]
) -> None:
    install(stop_at_once)
    assert run(tmp_path) == 130
    assert "nothing was measured" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_report_makes_the_same_again_from_the_json_alone(
    tmp_path: Path, install: Callable[[Measure], None], capfd: pytest.CaptureFixture[str]
) -> None:
    install(measure_once)
    run(tmp_path)
    first = capfd.readouterr().out
    folder = tmp_path / "bench-fake"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    (folder / "fake.md").unlink()
    (folder / "fake.png").unlink()
    assert cli.main(["bench", "report", str(folder)]) == 0
    assert capfd.readouterr().out == first
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    text = (folder / "fake.json").read_text().replace("0.25", "0.5")
    (folder / "fake.json").write_text(text)
    assert cli.main(["bench", "report", str(folder / "fake.json")]) == 0
    assert "[0.5]" in (folder / "fake.md").read_text()
    (folder / "fake.json").rename(folder / "other.json")
    assert cli.main(["bench", "report", str(folder / "other.json")]) == 0
    page = (folder / "other.md").read_text()
    assert "[other.json](other.json)" in page
    assert "(other.png)" in page
    assert "fake.json" not in page


def test_without_matplotlib_one_line_says_so(
    tmp_path: Path,
    install: Callable[[Measure], None],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    install(measure_once)
    found = bench.find_spec
    monkeypatch.setattr(bench, "find_spec", lambda name: None if name == "matplotlib" else found(name))
    assert run(tmp_path) == 0
    assert "matplotlib is not installed: pip install matplotlib" in capfd.readouterr().err
    assert sorted(path.name for path in (tmp_path / "bench-fake").iterdir()) == ["fake.json", "fake.md"]
    assert ".png" not in (tmp_path / "bench-fake" / "fake.md").read_text()


WITHOUT_EXTRAS = """
import importlib, pkgutil, sys

for name in ("matplotlib", "PIL", "rich", "tensorboard"):
    sys.modules[name] = None
import lockstep.bench
from lockstep import cli

for each in pkgutil.walk_packages(lockstep.bench.__path__, "lockstep.bench."):
    if each.name.rpartition(".")[2] not in ("figures", "charts", "plots"):  # for who draws
        importlib.import_module(each.name)
sys.exit(cli.main(["bench", "comm", "--nproc", "1", "--quick", "--verbs", "all_reduce", "--backends", "lockstep",
                   "--no-peers", "--out", sys.argv[1]]))
"""


def test_core_install_is_enough(tmp_path: Path) -> None:
    """All modules that measure are imported without the packages of extras, and one measures."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS, str(tmp_path)], capture_output=True, text=True, timeout=limit_s(120)
    )
    assert done.returncode == 0, done.stderr
    assert "matplotlib is not installed: pip install matplotlib" in done.stderr
    assert sorted(path.name for path in (tmp_path / "bench-comm").iterdir()) == ["comm.json", "comm.md"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fkae"], "unknown benchmark 'fkae', did you mean 'fake'? Benchmarks: fake, report"),
        (["fake", "--budget", "soon"], "'soon' is not a duration; write 30s, 5m or 1h30m"),
        (["fake", "--budget", "0s"], "'0s' is not a duration"),
        (["fake", "--budgte", "5m"], "did you mean '--budget'?"),
        (["fake", "--nproc", "0"], "nproc is 0; expected at least 1 process"),
        (["fake", "--size", "big"], "invalid int value: 'big'"),
        (["fake", "--name", "a/b"], "is not a folder name"),
        (["report"], "the following arguments are required: path"),
        (["report", "nowhere"], "no result at 'nowhere'"),
    ],
)
def test_mistakes_are_one_line(
    install: Callable[[Measure], None], capfd: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    install(measure_once)
    assert cli.main(["bench", *arguments]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert words in err
    assert err.count("\n") == 1


def test_report_refuses_what_is_no_result(
    tmp_path: Path, install: Callable[[Measure], None], capfd: pytest.CaptureFixture[str]
) -> None:
    install(measure_once)
    for text in ("no json", "[]", json.dumps({"schema": 1}), json.dumps({"schema": 0})):
        (tmp_path / "fake.json").write_text(text)
        assert cli.main(["bench", "report", str(tmp_path)]) == 2
        assert "is not a result of `lockstep bench`" in capfd.readouterr().err


def test_overview_and_help(install: Callable[[Measure], None], capfd: pytest.CaptureFixture[str]) -> None:
    install(measure_once)
    assert cli.main(["bench", "--help"]) == 0
    assert "fake         measures nothing" in capfd.readouterr().out
    assert cli.main(["bench"]) == 2
    capfd.readouterr()
    with pytest.raises(SystemExit):
        cli.main(["bench", "fake", "--help"])
    assert "--budget TIME" in capfd.readouterr().out


@pytest.mark.parametrize("text", ["", "m", "-5s", "5x", "1m2h", "nan", "inf", "5m,"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="write 30s, 5m or 1h30m"):
        parse_duration(text)


def test_progress_is_one_line_on_a_terminal_and_few_elsewhere() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

        def fileno(self) -> int:
            raise OSError

    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        progress = ProgressLine("bench fake", 300, stream)
        for number in range(5):
            progress.show(f"round {number}")
        progress.say("a line that stays")
    assert terminal.getvalue().count("\n") == 1
    assert terminal.getvalue().count("\r") == 6
    assert file.getvalue() == "bench fake: 0:00 of 5:00  round 0\na line that stays\n"


def test_text_and_markdown_of_one_table() -> None:
    blocks = ["## Title", Table("A [link](x.md).", ["way", "time"], [["**ddp**", "1.0 µs"], ["`x`", "–"]])]
    assert as_text(blocks) == "Title\n\nway    time\nddp  1.0 µs\nx         –\nA link."
    assert as_markdown(blocks).startswith("## Title\n\n| way | time |\n| --- | ---: |\n| **ddp** | 1.0 µs |")
