"""The benchmarks' own machinery: statistics, stored results, generated texts, measuring, rank processes."""

from __future__ import annotations

import doctest
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from benchmarks import report
from benchmarks.__main__ import main, regenerate
from benchmarks.plots import draw
from lockstep.bench import pages, results, session, stats
from lockstep.bench.harness import Budget, Configuration, Contestant, measure
from lockstep.bench.ranks import Job, RankFailed, run_ranks, tell
from lockstep.bench.results import Environment, Result, Series, Skipped
from lockstep.testing import limit_s

if TYPE_CHECKING:  # ranks that are started anew import this module, and do not find that one
    from warm_launcher import WarmLauncher

MIB = 1024 * 1024
ENVIRONMENT = Environment(
    commit="0123456789abcdef",
    dirty=False,
    date="2026-01-02T03:04:05+00:00",
    lockstep="0.1.0",
    torch="2.13.0",
    numpy="2.4.6",
    python="3.11.2",
    kernel="Linux 6.1",
    cpu="Some CPU",
    cores=2,
    memory_bytes=8 * 2**30,
    shm_bytes=2**30,
    shm_huge_pages="never",
    load=0.1,
)


def _series(parameters: results.Parameters, **medians_s: float) -> list[Series]:
    return [Series(parameters, name, 10, [value, value * 1.01, value * 0.99]) for name, value in medians_s.items()]


def _all_reduce() -> Result:
    """At 1 KiB lockstep is 20x gloo, at 25 MiB only 3x; symmetric memory is slower than a memcpy."""
    small: results.Parameters = {"world_size": 2, "bytes": 1024}
    large: results.Parameters = {"world_size": 2, "bytes": 25 * MIB}
    series = _series(small, gloo=400e-6, lockstep=20e-6, memcpy_one_rank=1e-6, memcpy_all_ranks=1e-6)
    series += _series(large, gloo=30e-3, lockstep=10e-3, lockstep_symmetric=2e-3)
    series += _series(large, memcpy_one_rank=1e-3, memcpy_all_ranks=1.5e-3)
    skipped = [Skipped(small, "lockstep_symmetric", "/dev/shm is full")]
    return Result("all_reduce", False, ENVIRONMENT, {"threads_per_rank": 1}, series, skipped)


def _train_step() -> Result:
    """The MLP meets its targets, the CNN misses its limit of 2% and trails torch's DDP."""
    series = _series({"model": "mlp_10m"}, none=0.050, lockstep_ddp=0.055, torch_ddp_lockstep=0.06, torch_ddp_gloo=0.08)
    series += _series({"model": "cnn_5m"}, none=0.1, lockstep_ddp=0.104, torch_ddp_lockstep=0.103, torch_ddp_gloo=0.11)
    return Result("train_step", False, ENVIRONMENT, {}, series)


def _threads() -> Result:
    """On two cores, two ranks of two threads: lockstep DDP is faster than gloo, torch's on our group slower."""
    where: results.Parameters = {"model": "mlp_10m", "world_size": 2, "threads": 2}
    times = {"none": 0.05, "bound": 0.06, "lockstep_ddp": 0.066, "torch_ddp_lockstep": 0.2, "torch_ddp_gloo": 0.1}
    return Result("threads", False, ENVIRONMENT, {}, _series(where, **times))


def _sharded() -> Result:
    """With Adam at the bound and under half of gloo, with SGD neither; memory is met at two ranks alone."""
    times = {"lockstep_ddp": 0.07, "torch_zero_gloo": 0.12, "fsdp2_gloo": 0.2}
    adam: results.Parameters = {"world_size": 2, "model": "mlp_10m", "optimizer": "adam"}
    sgd: results.Parameters = {"world_size": 4, "model": "mlp_50m", "optimizer": "sgd"}
    series = _series(adam, bound=0.05, sharded=0.049, torch_ddp_gloo=0.1, **times)
    series += _series(sgd, bound=0.05, sharded=0.06, torch_ddp_gloo=0.1, **times)
    memory = {
        "2 ranks, mlp_50m": {"torch_ddp_gloo": 2e9, "sharded": 1e9},
        "4 ranks, mlp_50m": {"torch_ddp_gloo": 4e9, "sharded": 2e9},
    }
    series[-1].facts["implementation"] = "foreach"
    skipped = [Skipped(adam, "torch_zero_gloo", "fused: no such operator")]
    return Result("sharded", False, ENVIRONMENT, {"resident_bytes": memory}, series, skipped)


def _horovod() -> Result:
    """The MLP's step is within 1.1x of DDP's, the CNN's is not."""
    series = _series({"model": "mlp_10m"}, none=0.050, lockstep_ddp=0.055, horovod=0.056)
    series += _series({"model": "cnn_5m"}, none=0.1, lockstep_ddp=0.1, horovod=0.12)
    return Result("horovod", False, ENVIRONMENT, {}, series)


def _startup() -> Result:
    series = _series({"nproc": 2}, lockstep_run=2.0, torchrun=3.2, lockstep_run_init=1.8)
    return Result("startup", True, ENVIRONMENT, {}, series)


def _record() -> Result:
    """Alone the record costs 3%, with the status file 6%."""
    series = _series({"world_size": 2, "bytes": 4}, no_record=10e-6, record=10.3e-6, record_launched=10.6e-6)
    return Result("record", False, ENVIRONMENT, {}, series)


def test_ranks_that_outnumber_cores_are_called_so() -> None:
    """In tables and targets; and targets that are missed can be asked for by themselves."""
    result = replace(_all_reduce(), environment=replace(ENVIRONMENT, cores=1))
    parts = report.sections(result)
    assert "| tensor | gloo, 2 ranks on 1 core | lockstep, 2 ranks on 1 core |" in parts["summary"]
    assert "## 2 ranks on 1 core" in parts["full"]
    assert "on 1 core" not in report.render(_all_reduce())
    assert "| 2 ranks on 1 core: at least 4x gloo at every size | 3.00x at 25 MiB" in parts["missed"]
    assert "at least 10x" not in parts["missed"], "that one is met"
    assert report.sections(_startup())["missed"] == "No target is missed."
    assert "lockstep.init()" not in report.sections(_startup())["summary"]
    assert "lockstep.init()" in report.render(_startup())


def test_cost_of_the_record_is_held_against_its_limit() -> None:
    assert [verdict.met for verdict in report.verdicts(_record())] == [True, False]
    assert "| 2 ranks, 4 B | 10.0 µs" in report.render(_record())


def test_step_with_several_threads_is_held_against_gloo_and_shown_beside_the_bound() -> None:
    judged = report.verdicts(_threads())
    assert [verdict.met for verdict in judged] == [True, False]
    assert judged[1].target == "2 ranks of 2 threads on 2 cores: torch DDP on lockstep no slower than gloo"
    assert "| 2 ranks of 2 threads on 2 cores | MLP, 10M parameters | 60.0 ms | 1.10x" in report.render(_threads())


def test_sharded_step_is_held_against_the_bound_gloo_and_memory() -> None:
    judged = report.verdicts(_sharded())
    assert [verdict.met for verdict in judged] == [True, True, False, False, True, False]
    assert judged[0].target == "2 ranks, MLP, 10M parameters, Adam: no longer than the bound"
    text = report.render(_sharded())
    assert "| 4 ranks on 2 cores, MLP, 50M parameters, SGD | 50.0 ms | 1.20x" in text
    assert "| 2 ranks, 50M parameters | 1.86 GiB | 0.93 GiB |" in text
    assert "fused, where there is a fused one (FSDP2 on gloo, 4 ranks on 2 cores, MLP, 50M parameters, SGD: fo" in text
    assert "Not measured: torch_zero_gloo at " in text


def _contention() -> Result:
    """Beside two neighbours 4 bytes are slower than gloo's; waiters take less than gloo's in barrier, more in recv."""
    series = _series({"world_size": 2, "bytes": 4, "neighbours": 0}, gloo=100e-6, lockstep=10e-6)
    series += _series({"world_size": 2, "bytes": 4, "neighbours": 2}, gloo=100e-6, lockstep=200e-6)
    series += _series({"world_size": 4, "bytes": MIB, "neighbours": 2}, gloo=9e-3, lockstep=1e-3)
    for wait, own in (("barrier", 0.001), ("recv", 0.06)):
        series += _series({"world_size": 8, "wait": wait, "measure": "waiter"}, gloo=0.003, lockstep=own)
        series += _series({"world_size": 8, "wait": wait, "measure": "work"}, gloo=1.02, lockstep=1.01)
    return Result("contention", False, ENVIRONMENT, {"work_s": 1.0}, series)


def test_contention_is_held_against_gloo() -> None:
    judged = report.verdicts(_contention())
    assert [verdict.met for verdict in judged] == [False, True, True, False]
    assert judged[0].measured.startswith("0.50x at 4 B beside 2")
    page = report.render(_contention())
    assert "| 2 ranks, 4 B | 10.0 µs, 10.0x | 200 µs, 0.50x |" in page
    assert "| 4 ranks on 2 cores, 1 MiB | – | 1.00 ms, 9.00x |" in page
    assert "| 7 ranks on 2 cores in `recv` | 0.30% | 6.00% | 1.02 s | 1.01 s |" in page


def test_contention_end_to_end(tmp_path: Path, warm: WarmLauncher) -> None:
    from benchmarks import case_contention

    budget = Budget(seconds=0.05, sample_s=0.001, min_rounds=2, max_rounds=3, sweeps=1)
    plan = case_contention.Plan({2: (4,)}, {2: (0, 1)}, budget, 0.05, {2: 1}, turns=2)
    result = warm.call(case_contention.run, plan, quick=True, folder=tmp_path)
    found = {(one.contestant, *one.parameters.values()) for one in result.series}
    assert {("gloo", 2, 4, 0), ("lockstep", 2, 4, 1), ("lockstep", 2, "recv", "waiter")} <= found
    assert len(result.series) == 2 * (2 + 2 * 2)
    work = result.samples("lockstep", world_size=2, wait="barrier", measure="work")
    waiter = result.samples("lockstep", world_size=2, wait="barrier", measure="waiter")
    assert work is not None
    assert waiter is not None
    assert len(work) == len(waiter) == 2
    assert work[0] > 0.04  # the clocks of wall and CPU differ a little
    assert 0 < waiter[0] < 1
    loaded = Result.load(result.save(tmp_path))
    assert report.verdicts(loaded)[0].target == "2 ranks: never slower than gloo, whatever runs beside it"


def test_ranks_that_wait_hold_no_group_of_the_other_contestant(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import case_contention

    jobs = []

    def note(
        function: object, world_size: int, job: Job, *, backend: str, **_: object
    ) -> list[tuple[str, float, float]]:
        jobs.append((function, backend))
        return [("barrier", 1.0, 0.1 * len(jobs)), ("recv", 1.0, 0.2)]

    monkeypatch.setattr(case_contention, "run_ranks", note)
    series = case_contention._measure_waits(4, rounds=1, turns=2, work_s=1.0)
    assert jobs == [(case_contention._wait_on_rank, name) for name in ("gloo", "lockstep")] * 2
    found = {(one.contestant, one.parameters["wait"], one.parameters["measure"]): one.samples_s for one in series}
    assert found["gloo", "barrier", "waiter"] == pytest.approx([0.1, 0.3])
    assert found["lockstep", "barrier", "waiter"] == pytest.approx([0.2, 0.4])
    assert found["lockstep", "recv", "work"] == [1.0, 1.0]


def _hosts() -> Result:
    """Two hosts are ahead of gloo everywhere; four are behind it with small tensors on a network without a limit."""
    slow: results.Parameters = {"bytes": 25 * MIB}
    series = _series(slow, gloo=0.3, lockstep_fp32=0.2, lockstep_bf16=0.1, lockstep_int8=0.05)
    for hosts in (2, 4):
        for rate in ("1gbit", "unlimited"):
            shape: results.Parameters = {"hosts": hosts, "ranks_per_host": 1, "rate": rate}
            small = 200e-6 if hosts == 4 and rate == "unlimited" else 50e-6
            series += _series({**shape, "bytes": 4}, gloo=100e-6, lockstep=small)
            series += _series({**shape, "bytes": 64 * 1024}, gloo=2e-3, lockstep=1e-3)
    return Result("hosts", False, ENVIRONMENT, {}, series)


def test_hosts_are_held_against_gloo() -> None:
    judged = report.verdicts(_hosts())
    assert [verdict.met for verdict in judged] == [True] * 6 + [False]
    assert judged[-1].target == "4 hosts with 1 rank each, unlimited: no slower than gloo at any size"
    assert judged[-1].measured.startswith("0.50x at 4 B")
    page = report.render(_hosts())
    assert (
        "| all_reduce, hosts x ranks on each, all on 2 cores | 1 Gbit/s, 4 B | 1 Gbit/s, 64 KiB | unlimited, 4 B |"
        in page
    )
    assert "| 4 x 1 | 50.0 µs, 2.00x | 1.00 ms, 2.00x | 200 µs, 0.50x |" in page
    assert "| all_reduce, bytes 25 MiB | time | ratio |\n| --- | ---: | ---: |\n| gloo | 300 ms" in page


def _decode() -> Result:
    """Ahead of torch's loader without workers, behind it with two."""
    series = _series({"pixels": 256, "workers": 0}, torch=1.1, lockstep=1.0)
    series += _series({"pixels": 256, "workers": 2}, torch=0.5, lockstep=0.8)
    return Result("decode", False, ENVIRONMENT, {}, [replace(one, facts={"images": 512}) for one in series])


def test_decode_is_held_against_torchs_loader() -> None:
    judged = report.verdicts(_decode())
    assert [verdict.met for verdict in judged] == [True, False]
    assert judged[1].target == "256 pixels, 2 workers: no slower than torch's loader"
    assert "| 256 pixels, 0 workers | 465 | 512 | 1.10x" in report.render(_decode())


def test_decode_end_to_end(tmp_path: Path, warm: WarmLauncher) -> None:
    from benchmarks import case_decode

    budget = Budget(seconds=0.05, sample_s=0.001, min_rounds=2, max_rounds=2, sweeps=1)
    result = warm.call(
        case_decode.run, case_decode.Plan({32: 5}, (0, 1), 2, budget, turns=2), quick=True, folder=tmp_path
    )
    assert [(one.contestant, one.parameters["workers"]) for one in result.series] == [
        (name, workers) for workers in (0, 1) for name in ("torch", "lockstep")
    ]
    assert all(len(one.samples_s) == 4 and one.facts == {"images": 5} for one in result.series), "two in each turn"
    assert "| 32 pixels, 1 worker |" in report.render(Result.load(result.save(tmp_path)))


def test_decode_notices_an_epoch_that_lacks_images() -> None:
    from benchmarks import case_decode

    with pytest.raises(RuntimeError, match="an epoch of 4 images gave 3, 2 of them different"):
        case_decode._load("torch", [(None, torch.tensor([0, 1, 1]))], 4)  # type: ignore[arg-type]


def test_rows_end_to_end(tmp_path: Path, warm: WarmLauncher) -> None:
    from benchmarks import case_rows

    budget = Budget(seconds=0.05, sample_s=0.001, min_rounds=2, max_rounds=2, sweeps=1)
    result = warm.call(case_rows.run, case_rows.Plan(24, (4, 8), budget), quick=True, folder=tmp_path)
    assert [(one.contestant, one.parameters["data"]) for one in result.series] == [
        (name, data) for data in ("indexing", "drawing", "tensors") for _ in range(2) for name in ("torch", "lockstep")
    ]
    loaded = Result.load(result.save(tmp_path))
    assert "| `TensorDataset`, batches of 8 |" in report.render(loaded)
    draw(loaded, tmp_path / "rows.png")


def test_rows_are_held_against_torchs_loader() -> None:
    series = _series({"data": "indexing", "batch_size": 8}, torch=1.0, lockstep=1.3)
    series += _series({"data": "indexing", "batch_size": 64}, torch=1.0, lockstep=1.1)
    judged = report.verdicts(Result("rows", False, ENVIRONMENT, {"rows": 8192}, series))
    assert [verdict.met for verdict in judged] == [False, True]
    assert judged[0].target == "Python class, `x[i], y[i]`, batches of 8: at most 1.2 times torch's time"


def test_rows_notices_an_epoch_that_lacks_rows() -> None:
    from benchmarks import case_rows

    with pytest.raises(RuntimeError, match="an epoch of 4 rows gave 3, 2 of them different"):
        case_rows._load("torch", [(None, torch.tensor([0, 1, 1]))], 4)  # type: ignore[arg-type]


def test_epoch_end_to_end(tmp_path: Path, warm: WarmLauncher) -> None:
    from benchmarks import case_epoch

    budget = Budget(seconds=0.05, sample_s=0.001, min_rounds=2, max_rounds=2, sweeps=1)
    result = warm.call(case_epoch.run, case_epoch.Plan(8, 4, (0, 1), 2, "cnn_5m", budget), quick=True, folder=tmp_path)
    assert [(one.contestant, one.parameters["workers"]) for one in result.series] == [
        (name, workers) for workers in (0, 1) for name in ("torch", "lockstep")
    ]
    loaded = Result.load(result.save(tmp_path))
    assert "| 1 worker |" in report.render(loaded)
    draw(loaded, tmp_path / "epoch.png")
    judged = report.verdicts(loaded)
    assert judged[1].target == "1 worker for each rank: an epoch takes no longer than torch's"


def test_epoch_notices_that_images_lack() -> None:
    from benchmarks import case_epoch

    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(2, 10))
    epoch = case_epoch._epoch("torch", model, [(torch.zeros(3, 2), torch.arange(3))], 4)  # type: ignore[arg-type]
    with (
        mock.patch.object(torch.distributed, "all_reduce"),
        pytest.raises(RuntimeError, match="an epoch of 4 images gave 3"),
    ):
        epoch()


def _listing() -> Result:
    series = _series({}, every_rank=6.0, lockstep=4.0, lockstep_again=0.02)
    return Result("listing", False, ENVIRONMENT, {"images": 1_281_167, "classes": 1000}, series)


def test_listing_is_held_against_ranks_that_walk_for_themselves() -> None:
    assert [verdict.met for verdict in report.verdicts(_listing())] == [True]
    assert "| 1,281,167 images in 1,000 folders | time |" in report.render(_listing())
    assert "| lockstep, every later run | 20.0 ms" in report.render(_listing())


def test_listing_end_to_end(tmp_path: Path, warm: WarmLauncher) -> None:
    from benchmarks import case_listing

    budget = Budget(seconds=0.05, sample_s=0.001, min_rounds=2, max_rounds=2, sweeps=1)
    result = warm.call(case_listing.run, case_listing.Plan(3, 20, budget), quick=True, folder=tmp_path)
    assert [one.contestant for one in result.series] == ["every_rank", "lockstep", "lockstep_again"]
    assert "20 images in 3 folders" in report.render(Result.load(result.save(tmp_path)))


ALL_RESULTS = [
    _all_reduce(),
    _train_step(),
    _threads(),
    _sharded(),
    _horovod(),
    _startup(),
    _record(),
    _contention(),
    _decode(),
]
ALL_RESULTS += [_listing(), _hosts()]


def test_horovod_step_is_held_against_ddps() -> None:
    assert [verdict.met for verdict in report.verdicts(_horovod())] == [True, False]
    assert "1.02x" in report.render(_horovod())


# ---------------------------------------------------------------- statistics


@pytest.mark.parametrize("module", [stats, pages, session])
def test_docstring_examples_hold(module: object) -> None:
    tried = doctest.testmod(module)  # type: ignore[arg-type]
    assert tried.attempted > 0
    assert tried.failed == 0


def test_median_and_percentiles() -> None:
    assert stats.median([3.0, 1.0, 2.0]) == 2.0
    assert stats.median([4.0, 1.0, 2.0, 3.0]) == 2.5
    assert stats.percentiles([float(value) for value in range(101)]) == (10.0, 90.0)


def test_noise_that_hits_a_round_alike_cancels_in_the_ratio() -> None:
    base = np.random.default_rng(0).lognormal(sigma=1.0, size=30)
    estimate = stats.ratio([*(3 * base)], [*base])
    assert (estimate.value, estimate.low, estimate.high) == pytest.approx((3, 3, 3))


def test_interval_holds_the_true_ratio_as_often_as_it_claims() -> None:
    generator = np.random.default_rng(1)
    runs = 200
    hits = 0
    for _ in range(runs):
        slow, fast = (scale * generator.lognormal(sigma=0.2, size=25) for scale in (2.0, 1.0))
        estimate = stats.bootstrap(lambda a, b: a / b, [*slow], [*fast], num_resamples=300)
        hits += estimate.low <= 2.0 <= estimate.high
    # A percentile bootstrap of 25 medians covers about 93–96%; 3 binomial deviations are 5%.
    assert hits / runs >= 0.88


def test_interval_narrows_with_more_samples_and_repeats_exactly() -> None:
    generator = np.random.default_rng(2)
    slow, fast = (generator.lognormal(sigma=0.3, size=400) for _ in range(2))
    few, many = stats.ratio([*slow[:10]], [*fast[:10]]), stats.ratio([*slow], [*fast])
    assert many.high - many.low < few.high - few.low
    assert stats.ratio([*slow], [*fast]) == many


def test_overhead_is_relative_to_the_floor() -> None:
    assert stats.overhead([1.2] * 3, [1.0] * 3).value == pytest.approx(0.2)


def test_geometric_mean_of_ratios() -> None:
    assert stats.geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    estimate = stats.geometric_mean_ratio([([2.0] * 5, [1.0] * 5), ([16.0] * 3, [2.0] * 3)])
    assert (estimate.value, estimate.low, estimate.high) == pytest.approx((4.0, 4.0, 4.0))


def test_statistics_refuse_what_they_cannot_answer() -> None:
    with pytest.raises(ValueError, match="at least one"):
        stats.median([])
    with pytest.raises(ValueError, match="the same length"):
        stats.ratio([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="positive"):
        stats.geometric_mean([1.0, 0.0])


# ---------------------------------------------------------------- results


@pytest.mark.parametrize("result", ALL_RESULTS, ids=lambda result: result.case)
def test_results_survive_the_round_trip(result: Result, tmp_path: Path) -> None:
    path = result.save(tmp_path)
    assert path == tmp_path / f"{result.case}.json"
    assert [file.name for file in tmp_path.iterdir()] == [path.name]  # nothing partial stays behind
    loaded = Result.load(path)
    assert loaded.environment == result.environment
    assert loaded.skipped == result.skipped
    for before, after in zip(result.series, loaded.series, strict=True):
        assert replace(before, samples_s=[]) == replace(after, samples_s=[])
        assert after.samples_s == pytest.approx(before.samples_s, rel=1e-5)
    assert loaded.to_json() == path.read_text()


def test_every_sample_is_stored_on_one_line_per_series() -> None:
    text = _all_reduce().to_json()
    lines = [line for line in text.splitlines() if "samples_s" in line]
    assert len(lines) == len(_all_reduce().series)
    assert all(line.endswith("]") for line in lines)
    assert json.loads(text)["series"][0]["samples_s"] == [400e-6, 404e-6, 396e-6]


def test_results_of_another_schema_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "all_reduce.json"
    path.write_text(_all_reduce().to_json().replace('"schema": 1', '"schema": 0'))
    with pytest.raises(ValueError, match="schema 0, expected 1"):
        Result.load(path)


def test_samples_are_found_by_all_their_parameters() -> None:
    result = _all_reduce()
    assert result.samples("gloo", world_size=2, bytes=1024) == pytest.approx([400e-6, 404e-6, 396e-6])
    assert result.samples("gloo", world_size=4, bytes=1024) is None
    assert result.samples("gloo", world_size=2) is None
    assert result.values("bytes") == [1024, 25 * MIB]


def test_environment_names_the_machine_and_the_versions() -> None:
    environment = Environment.read()
    assert environment.cores >= 1
    assert environment.memory_bytes > 0
    assert environment.torch.startswith("2.")
    assert environment.commit == "unknown" or len(environment.commit) == 40
    assert environment.commit[:10] in environment.summary()


# ---------------------------------------------------------------- report and plots


def test_targets_are_judged_by_the_samples() -> None:
    judged = {verdict.target: verdict for verdict in report.verdicts(_all_reduce())}
    assert len(judged) == 4
    every_size = judged["2 ranks: at least 4x gloo at every size"]
    assert not every_size.met
    assert every_size.measured.startswith("3.00x at 25 MiB")
    mean = judged["2 ranks: geometric mean at least 15x gloo"]
    assert (mean.met, mean.measured[:5]) == (False, "7.75x")
    assert judged["2 ranks: 25 MiB in symmetric memory at least 10x gloo"].met
    memcpy = judged["2 ranks: 25 MiB in symmetric memory no slower than one memcpy"]
    assert (memcpy.met, memcpy.measured[:5]) == (False, "2.00x")


def test_overheads_are_judged_per_model() -> None:
    met = [verdict.met for verdict in report.verdicts(_train_step())]
    assert met == [True, True, True, False, False, False]
    [launch] = report.verdicts(_startup())
    assert (launch.met, launch.measured[:5]) == (True, "1.60x")


def test_tables_hold_what_was_measured_and_what_was_not() -> None:
    page = report.render(_all_reduce())
    assert "| 1 KiB | 400 µs | 20.0 µs | 20.0x |" in page
    assert "| 25 MiB | 30.0 ms | 10.0 ms | 3.00x |" in page
    assert "Not measured: lockstep_symmetric at world_size 2, bytes 1 KiB: /dev/shm is full" in page
    assert "| – |" in page
    assert "0123456789" in page
    assert "quick" not in page
    assert "| MLP, 10M parameters | 50.0 ms | 10.0% [" in report.render(_train_step())
    assert "quick run" in report.render(_startup())


def test_tables_are_rectangular() -> None:
    for result in ALL_RESULTS:
        tables = report.render(result).split("\n\n")
        for lines in (block.splitlines() for block in tables if block.startswith("|")):
            assert len({line.count("|") for line in lines}) == 1


def test_markers_are_filled_and_nothing_else_changes(tmp_path: Path) -> None:
    _all_reduce().save(tmp_path)
    text = "before\n<!-- bench:all_reduce -->\nformer table\n<!-- /bench -->\nbetween\n"
    text += "<!-- bench:all_reduce:targets --><!-- /bench -->\nafter\n"
    filled = report.fill_markers(text, tmp_path)
    assert filled.startswith("before\n<!-- bench:all_reduce -->\n| tensor |")
    assert "<!-- /bench -->\nbetween\n<!-- bench:all_reduce:targets -->\n| target |" in filled
    assert "former table" not in filled
    assert filled.endswith("\n<!-- /bench -->\nafter\n")
    assert report.fill_markers(filled, tmp_path) == filled


def test_markers_that_cannot_be_filled_say_why(tmp_path: Path) -> None:
    _all_reduce().save(tmp_path)
    with pytest.raises(ValueError, match="python -m benchmarks startup"):
        report.fill_markers("<!-- bench:startup --><!-- /bench -->", tmp_path)
    with pytest.raises(ValueError, match="'nonsense', expected one of"):
        report.fill_markers("<!-- bench:all_reduce:nonsense --><!-- /bench -->", tmp_path)


@pytest.mark.parametrize("result", ALL_RESULTS, ids=lambda result: result.case)
def test_pictures_are_drawn_and_repeat_bit_for_bit(result: Result, tmp_path: Path) -> None:
    first, second = tmp_path / "first.png", tmp_path / "second.png"
    draw(result, first)
    draw(result, second)
    assert first.read_bytes().startswith(b"\x89PNG")
    assert first.read_bytes() == second.read_bytes()


def test_report_regenerates_and_check_notices_stale_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = tmp_path / "README.md"
    document.write_text("<!-- bench:startup --><!-- /bench -->")
    assert regenerate(tmp_path, document) == 1
    assert "no results" in capsys.readouterr().err
    _startup().save(tmp_path)
    assert regenerate(tmp_path, document, check=True) == 1
    assert "startup.md is stale" in capsys.readouterr().err
    assert regenerate(tmp_path, document) == 0
    assert (tmp_path / "startup.png").exists()
    assert "1.60x" in document.read_text()
    assert regenerate(tmp_path, document, check=True) == 0
    replace(_startup(), series=_series({"nproc": 2}, lockstep_run=2.0, torchrun=9.0)).save(tmp_path)
    assert regenerate(tmp_path, document, check=True) == 1


def test_command_line_refuses_nonsense(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["nothing"], ["report", "all_reduce"], ["all_reduce", "--check"]):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 2
    capsys.readouterr()


# ---------------------------------------------------------------- measuring


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A gloo group of this process alone, which is what the harness needs to run here."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_contestants_take_turns_in_every_round() -> None:
    calls: list[str] = []
    contestants = [Contestant(name, lambda name=name: calls.append(name)) for name in "AB"]  # type: ignore[misc]
    budget = Budget(seconds=0, sample_s=0, min_rounds=3, max_rounds=5, sweeps=2)
    series = measure([Configuration({"n": 1}, contestants), Configuration({"n": 2}, contestants)], budget)

    assert [(one.parameters["n"], one.contestant) for one in series] == [(1, "A"), (1, "B"), (2, "A"), (2, "B")]
    assert all(len(one.samples_s) == 2 * 3 for one in series)  # min_rounds in each of two sweeps
    assert all(one.iterations == 1 for one in series)
    # Before its first sweep a configuration is calibrated: one call, then a batch of lead-in and one iteration. A sweep
    # is 1 + 3 rounds of lead-in and one iteration each, contestants in turns.
    calibration, sweep = "AAABBB", "AABB" * (1 + 3)
    assert "".join(calls) == (calibration + sweep) * 2 + sweep * 2


@pytest.mark.usefixtures("alone")
def test_iterations_are_chosen_so_that_a_batch_lasts() -> None:
    total = 0

    def add() -> None:
        nonlocal total
        total += sum(range(200))

    budget = Budget(seconds=0.02, sample_s=0.002, min_rounds=2, max_rounds=4, sweeps=1)
    [series] = measure([Configuration({}, [Contestant("add", add)])], budget)
    assert series.iterations > 10
    assert 2 <= len(series.samples_s) <= 4
    assert all(0 < sample < 0.002 for sample in series.samples_s)


# ---------------------------------------------------------------- rank processes


def test_rank_zero_answers_and_failures_are_raised(capfd: pytest.CaptureFixture[str]) -> None:
    # Functions of the standard library stand in for a case: a rank process can import them.
    assert run_ranks(json.dumps, 2, {"bytes": 4}, threads=1, timeout_s=limit_s(60)) == '{"bytes": 4}'
    with pytest.raises(RankFailed, match="rank 0 of 1 exited with code 1"):
        run_ranks(json.loads, 1, {}, threads=1, timeout_s=limit_s(60))  # type: ignore[arg-type]
    assert "TypeError" in capfd.readouterr().err
    with pytest.raises(RankFailed, match=r"ranks \[0, 1\] did not finish"):
        run_ranks(json.dumps, 2, {}, threads=1, timeout_s=0)


def _tell_and_fail(job: Job) -> object:
    tell({"rank": dist.get_rank(), "job": dict(job)})
    tell("x" * (1 << 20))  # more than a pipe holds
    raise RuntimeError("after it has told")


def test_what_rank_zero_tells_is_heard_though_it_fails(capfd: pytest.CaptureFixture[str]) -> None:
    parts: list[object] = []
    with pytest.raises(RankFailed):
        run_ranks(_tell_and_fail, 2, {"a": 1}, threads=1, timeout_s=limit_s(60), on_part=parts.append)
    assert parts == [{"rank": 0, "job": {"a": 1}}, "x" * (1 << 20)]
    assert "after it has told" in capfd.readouterr().err


def test_all_reduce_end_to_end(tmp_path: Path, warm: WarmLauncher) -> None:
    from benchmarks import case_all_reduce

    budget = Budget(seconds=0.05, sample_s=0.001, min_rounds=2, max_rounds=3, sweeps=2)
    result = warm.call(case_all_reduce.run, case_all_reduce.Plan((2,), (1024,), budget), quick=True, folder=tmp_path)
    assert {series.contestant for series in result.series} == {
        "gloo",
        "lockstep",
        "lockstep_symmetric",
        "memcpy_one_rank",
        "memcpy_all_ranks",
    }
    for series in result.series:
        assert series.parameters == {"world_size": 2, "bytes": 1024}
        assert 4 <= len(series.samples_s) <= 6
        assert all(0 <= sample < 1 for sample in series.samples_s)
    assert result.skipped == []
    loaded = Result.load(result.save(tmp_path))
    assert report.verdicts(loaded)[0].target == "2 ranks: at least 4x gloo at every size"
