"""`lockstep bench strategies` without its processes: the ways, an epoch's parts, and what is told from a result."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import cli
from lockstep.bench.pages import as_markdown, as_text
from lockstep.bench.results import Environment, Result, Series, Skipped
from lockstep.bench.session import ProgressLine, Session
from lockstep.bench.strategies import blocks, draw, jobs, turns, ways
from lockstep.bench.strategies.epochs import train_epoch
from lockstep.bench.strategies.jobs import Orders, WayFailed, WayJob
from lockstep.bench.strategies.report import View
from lockstep.bench.strategies.setups import TrainingConfig, alone, build
from lockstep.bench.strategies.task import build_task
from lockstep.bench.strategies.ways import PARTS, WAYS, Way, command_of, why_not
from lockstep.testing import limit_s

CPU = torch.device("cpu")
DIGITS = {"recipe": "digits", "dtype": "float64", "batch_size": 32, "images": 70, "seed": 0, "workers": 0}


def series_of(name: str, step_s: float, *, exposed_s: float = 0.0, loss: float = 2.0, ranks: int = 2) -> list[Series]:
    """A way whose steps take 1, 2, 3 and `rest` parts of their time, with some noise, in 5 rounds of 10 steps."""
    shares = dict(zip(PARTS, (0.1, 0.2, 0.5, 0.2), strict=True))
    noise = (1.0, 1.1, 0.9, 1.02, 0.98)
    facts: dict[str, float | str | list[float]] = {
        "losses": [loss, loss / 2],
        "held_out_loss": 0.5,
        "held_out_accuracy": 0.875,
        "samples_per_epoch": 640.0,
        "steps_per_epoch": 10.0,
        "peak_bytes": 300e6,
        "gpu_peak_bytes": 0.0,
        "start_s": 2.5,
        "processes": float(ranks),
    }
    found = [Series({"measure": "epoch"}, name, 1, [10 * (step_s + exposed_s) * each for each in noise], facts)]
    for part, share in shares.items():
        whole = share * step_s + (exposed_s if part == "backward" else 0)
        found.append(Series({"measure": part}, name, 10, [whole * each for each in noise]))
    if ranks > 1:
        found.append(Series({"measure": "alone_epoch"}, name, 1, [10 * step_s * each for each in noise]))
        found += [
            Series({"measure": f"alone_{part}"}, name, 10, [share * step_s * each for each in noise])
            for part, share in shares.items()
        ]
    return found


def result_of(*series: list[Series]) -> Result:
    settings = {
        "nproc": 2,
        "budget_s": 60.0,
        "task": DIGITS,
        "threads_per_rank": 1,
        "parameters": 66_000,
        "device": "cpu",
        "epochs": 2,
    }
    everything = [one for way in series for one in way]
    return Result("strategies", False, ENVIRONMENT, settings, everything, [Skipped({}, "ignite", "not installed here")])


ENVIRONMENT = Environment("0" * 40, False, "2026-01-02T03:04:05+00:00", "0.1", "2.13", "2.0", "3.11", "Linux 6",
                          "a CPU", 2, 8 << 30, 1 << 30, "never", 0.1)  # fmt: skip
SINGLE = series_of("single", 0.02, ranks=1)
FAST_OURS = series_of("ddp", 0.010, exposed_s=0.001)
SLOW_PEER = series_of("torch_ddp", 0.010, exposed_s=0.003)


def test_times_are_held_against_one_process_and_the_ideal() -> None:
    text = as_markdown(blocks(result_of(SINGLE, FAST_OURS, SLOW_PEER)))
    (row,) = [line for line in text.splitlines() if line.startswith("| **`ddp`** | 110 ms")]
    assert "5,818 | 1.82x [1.82, 1.82] | 91% | 1.18x [1.18, 1.18] |" in row


def test_communication_is_what_a_step_takes_beyond_the_same_step_without() -> None:
    text = as_markdown(blocks(result_of(SINGLE, FAST_OURS, SLOW_PEER)))
    assert "| **`ddp`** | 11.0 ms | 1.00 ms | 2.00 ms | 5.00 ms | 2.00 ms | +1.00 ms [+" in text
    assert "| `single` | 20.0 ms | 2.00 ms | 4.00 ms | 10.0 ms | 4.00 ms | none | – |" in text


@pytest.mark.parametrize(
    ("series", "words"),
    [
        ([FAST_OURS, SLOW_PEER], "ddp is the fastest: torch_ddp, the fastest of the others, takes 1.18x"),
        ([series_of("ddp", 0.010, exposed_s=0.003), SLOW_PEER], "cannot be told apart"),
        (
            [series_of("ddp", 0.010, exposed_s=0.004), SLOW_PEER],
            "torch_ddp is faster than Lockstep's fastest, ddp: it takes 0.93x [0.93, 0.93] of its time. In a step: "
            "backward +1.00 ms.",
        ),
        (
            [FAST_OURS, SLOW_PEER, series_of("horovod", 0.010, exposed_s=0.002)],
            "- horovod takes 1.09x [1.09, 1.09] of the time of ddp. In a step: backward +1.00 ms.",
        ),
        ([FAST_OURS, SLOW_PEER, series_of("single_threads", 0.005, ranks=1)], "threads are faster than any averaging"),
    ],
)  # fmt: skip
def test_which_way_is_fastest_or_why_not(series: list[list[Series]], words: str) -> None:
    assert words in as_text(blocks(result_of(SINGLE, *series)))


def test_one_round_has_no_bracket_and_no_winner() -> None:
    one_round = [replace(one, samples_s=one.samples_s[:1]) for way in (SINGLE, FAST_OURS, SLOW_PEER) for one in way]
    tables, _, rest = as_text(blocks(result_of(one_round))).partition("Not measured")
    assert rest
    assert "[" not in tables
    assert "is the fastest" not in tables
    assert "Only one round was measured, so ways are not ranked" in tables
    assert "1.18x" in tables, "the ratio itself is there"


class _Started:
    """A way that is started in no time."""

    def __init__(self, way: Way, *_: object) -> None:
        self.way, self.world_size, self.log = way, 1, None

    def ask(self, order: object, timeout_s: float) -> list[dict[str, object]]:
        return [{"parameters": 1, "device": "cpu", "world_size": 1}]


def test_peers_are_started_before_ways_that_are_ddp_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "WayJob", _Started)
    session = Session("strategies", 2, 60.0, False, tmp_path, ProgressLine("x", 60.0))
    contestants: list[turns._Contestant] = []
    turns._start(list(WAYS.values()), 1, None, session, contestants)  # type: ignore[arg-type]
    names = [one.name for one in contestants]
    assert names[:6] == ["single", "ddp", "torch_ddp", "accelerate", "fabric", "single_threads"]
    assert sorted(names) == sorted(WAYS)
    assert session.skipped == []
    contestants.clear()
    session.started -= 40  # of 60 s 20 are left, and 24 belong to the rounds
    turns._start(list(WAYS.values()), 1, None, session, contestants)  # type: ignore[arg-type]
    assert [one.name for one in contestants] == ["single"], "without which there is nothing to compare with"
    assert {one.reason for one in session.skipped} == {"skipped: out of time; raise --budget or pass fewer --ways"}


def test_a_way_that_learns_something_else_is_flagged() -> None:
    rounding = series_of("torch_ddp", 0.01, loss=2.0 * (1 + 1e-12))
    wrong = series_of("fabric", 0.01, loss=2.0 * (1 + 1e-6))
    text = as_markdown(blocks(result_of(SINGLE, rounding, wrong)))
    assert "**`fabric` did not learn the same as one process.**" in text
    assert text.count("**NO**") == 1
    view = View(result_of(SINGLE, rounding, wrong))
    assert [view.agrees(name) for name in ("single", "torch_ddp", "fabric")] == [True, True, False]


def test_rounding_that_a_training_multiplies_is_not_flagged() -> None:
    grown = [replace(one, facts=one.facts | {"losses": [2.0, 1.01]} if "losses" in one.facts else one.facts)
             for one in series_of("torch_ddp", 0.01, loss=2.0)]  # fmt: skip
    result = result_of(SINGLE, grown)
    assert View(result).differences("torch_ddp") == pytest.approx([0, 0.01])
    assert View(result).agrees("torch_ddp")
    assert "1.0e-02" in as_markdown(blocks(result))


def test_a_run_that_was_cut_short_has_its_tables_too() -> None:
    series = [replace(one, facts={key: value for key, value in one.facts.items() if not key.startswith("held_out")})
              for one in SINGLE]  # fmt: skip
    text = as_text(blocks(result_of(series)))
    assert "not installed here" in text
    assert "4138.3" in text.replace(",", "")


def test_picture(tmp_path: Path) -> None:
    figure = draw(result_of(SINGLE, FAST_OURS, SLOW_PEER, series_of("dp", 0.02, ranks=1)))
    texts = {text.get_text() for axes in figure.axes for text in axes.texts}
    assert {"4,138.3", "1,188.5", "110 ms"} <= texts
    figure.savefig(tmp_path / "strategies.png")


def test_which_ways_can_run() -> None:
    assert {name for name, way in WAYS.items() if way.package is None and why_not(way, 2, 0)} == {"torch_dp"}
    assert {name for name, way in WAYS.items() if way.package is None and why_not(way, 4, 4)} == {
        "single_threads",
        "torch_ddp_lockstep",
    }
    missing = replace(WAYS["ignite"], package=("no_such_module", "no-such-package"))
    assert why_not(missing, 2, 0) == "not installed: pip install no-such-package"


def test_every_way_is_started_by_the_launcher_that_its_users_have() -> None:
    found = {name: command_of(way, 3, "python", ["-m", "worker"]) for name, way in WAYS.items()}
    assert found["single"] == ["python", "-m", "worker"]
    assert found["ddp"][:6] == ["python", "-m", "lockstep", "run", "--nproc", "3"]
    assert found["torch_ddp"][:5] == ["python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    assert found["horovod_itself"] == ["horovodrun", "-np", "3", "python", "-m", "worker"]


@pytest.fixture(scope="module")
def config() -> TrainingConfig:
    return TrainingConfig(build_task(DIGITS), 2, CPU)


def epoch_of(config: TrainingConfig, epoch: int, setup: Any = None) -> Mapping[str, Any]:
    setup = setup or alone(config)
    return train_epoch(setup, config.task.loader(0, 1, CPU), config.task, CPU, epoch)


def test_parts_of_an_epoch_are_all_of_it(config: TrainingConfig) -> None:
    reply = epoch_of(config, 0)
    assert reply["steps"] == 2  # 70 images in batches of 32; the rest is left out
    assert reply["samples"] == 64
    assert len(reply["parts_s"]) == len(PARTS)
    assert min(reply["parts_s"]) > 0
    assert sum(reply["parts_s"]) == pytest.approx(reply["epoch_s"])


def test_a_rank_alone_does_as_much_as_in_its_share(config: TrainingConfig) -> None:
    for rank, images in enumerate((11, 11, 10)):  # of batches of 32
        setup = alone(config, rank, 3)
        reply = train_epoch(setup, config.task.loader_alone(rank, 3, CPU), config.task, CPU, 0)
        assert (reply["steps"], reply["samples"]) == (2, 2 * images)


def test_epoch_0_begins_again(config: TrainingConfig) -> None:
    setup = alone(config)
    first, second, again = (epoch_of(config, epoch, setup)["loss_sum"] for epoch in (0, 1, 0))
    assert first == again
    assert second < first


@pytest.mark.parametrize("name", ["single", "dp"])
def test_ways_of_one_process_learn_the_same(config: TrainingConfig, name: str) -> None:
    expected = epoch_of(config, 0)["loss_sum"]
    setup = build(name, config)
    try:
        assert epoch_of(config, 0, setup)["loss_sum"] == pytest.approx(expected, rel=1e-12)
    finally:
        setup.close()


def test_evaluation_counts_every_image_once(config: TrainingConfig) -> None:
    found = config.task.evaluate(alone(config).module, CPU)
    assert found["images"] == 359
    assert 0 <= found["accuracy"] <= 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ways", "dpd"], "unknown way 'dpd', did you mean 'dp'? Ways: single, "),
        (["--ways", ""], "unknown way ''"),
        (["--recipe", "mnist"], "invalid choice: 'mnist'"),
        (["--epochs", "0"], "0 is too small; expected 1 or more"),
        (["--batch-size", "x"], "'x' is not a whole number"),
        (["--data", "/no/such/folder"], "folder '/no/such/folder' does not exist"),
        (["--budget", "x"], "write 30s, 5m or 1h30m"),
    ],
)
def test_mistakes_are_one_line(capfd: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    assert cli.main(["bench", "strategies", *arguments]) == 2
    err = capfd.readouterr().err
    assert words in err
    assert err.count("\n") == 1


def test_a_way_whose_processes_end_says_what_they_said_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import sys; sys.exit('line\\nValueError: the reason\\nand more')"
    monkeypatch.setattr(jobs, "command_of", lambda *_: [sys.executable, "-c", script])
    job = WayJob(ways.WAYS["ddp"], 2, 1, Orders({}, tmp_path / "logs"))
    with pytest.raises(WayFailed, match=r"^ValueError: the reason$"):
        job.ask({"do": "describe"}, limit_s(60))
    job.kill()


def test_a_way_that_does_not_answer_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "command_of", lambda *_: ["sleep", "1000"])
    job = WayJob(ways.WAYS["single"], 2, 1, Orders({}, tmp_path / "logs"))
    with pytest.raises(WayFailed, match="did not reply"):
        job.ask({"do": "describe"}, 0)
    job.kill()
    assert job._process.returncode == -15


def test_orders_and_replies_go_by_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = """if True:
        import json, sys
        from torch.distributed import TCPStore
        store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False)
        order = json.loads(store.get("ddp/order/0"))
        for rank in range(2):
            reply = {"rank": rank, "order": order, **json.loads(store.get("task"))}
            store.set(f"ddp/reply/0/{rank}", json.dumps(reply))
        assert json.loads(store.get("ddp/order/1")) == {"do": "leave"}
    """
    monkeypatch.setattr(jobs, "command_of", lambda way, nproc, python, worker: [python, "-c", script, worker[3]])
    job = WayJob(ways.WAYS["ddp"], 2, 1, Orders({"a": 1}, tmp_path / "logs"))
    replies = job.ask({"do": "x"}, limit_s(60))
    assert replies == [{"rank": rank, "order": {"do": "x"}, "a": 1} for rank in range(2)]
    monkeypatch.setattr(jobs, "_ENDING_S", limit_s(60))
    job.end()
    assert job._process.returncode == 0
    job.forget_log()
    assert json.dumps(list((tmp_path / "logs").iterdir())) == "[]"
