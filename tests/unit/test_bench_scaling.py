"""`lockstep bench scaling`: fits, formulas at known points, tables from a result, and a run of two ranks."""

from __future__ import annotations

import argparse
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from warm_launcher import WarmLauncher

import lockstep.bench.scaling as scaling
from lockstep.bench.pages import Table, as_markdown
from lockstep.bench.results import Parameters, Result, Series
from lockstep.bench.scaling import charts, predictions
from lockstep.bench.scaling.model import (
    Line,
    Network,
    all_reduce_s,
    fit_curve,
    fit_line,
    step_on_one_host_s,
    step_s,
)
from lockstep.bench.session import ProgressLine, Session
from lockstep.errors import InputError
from test_benchmarks import ENVIRONMENT

MIB = 1 << 20
# 1 Gbit/s with 100 µs of latency; an all_reduce on one host at 2 GB/s.
LINK, HOST = Line(100e-6, 8e-9), Line(20e-6, 0.5e-9)
COMPUTING = {"forward": Line(1e-3, 10e-6), "backward": Line(2e-3, 20e-6), "optimizer": Line(0.5e-3, 0.0)}
BUCKETS = [MIB, 4 * MIB]


# ---- fits ----------------------------------------------------------------------------------------


def test_a_fit_finds_latency_and_bandwidth_through_noise() -> None:
    draw = np.random.default_rng(0)
    samples = {size: list(LINK.at(size) * draw.lognormal(0.0, 0.2, 101)) for size in (4, 4096, 65536, MIB, 16 * MIB)}
    samples[4][:20] = [1.0] * 20  # a neighbour wakes up: the median does not see it
    found = fit_line(samples)
    assert found.fixed_s == pytest.approx(LINK.fixed_s, rel=0.1)
    assert found.per_unit_s == pytest.approx(LINK.per_unit_s, rel=0.1)


def test_a_fit_has_no_negative_part() -> None:
    falling = fit_line({1: [2.0], 100: [1.0]})
    assert falling.per_unit_s == 0.0
    assert 1.0 <= falling.fixed_s <= 2.0
    through_nothing = fit_line({10: [1.0], 20: [2.5]})
    assert through_nothing.fixed_s == 0.0
    assert 0.1 <= through_nothing.per_unit_s <= 0.125
    assert fit_line({7: [3.0]}) == Line(3.0, 0.0)
    with pytest.raises(ValueError, match="at least one"):
        fit_line({})


def test_a_curve_goes_through_medians_and_on_beyond_them() -> None:
    samples = {4: [1e-4, 1e-4, 9.0], 4096: [0.9e-4], MIB: [5e-3], 2 * MIB: [15e-3]}
    found = fit_curve(samples)
    assert found.at(0) == found.at(4) == found.at(4096) == 1e-4  # time does not fall as messages grow
    assert found.at(1.5 * MIB) == pytest.approx(10e-3)
    assert found.at(4 * MIB) == pytest.approx(35e-3)
    assert found.per_unit_s == pytest.approx(10e-3 / MIB)
    with pytest.raises(ValueError, match="at least two"):
        fit_curve({4: [1.0]})
    # In an all_reduce of 3 hosts each of two hops takes what two thirds of the bytes take; in a ring four hops a third.
    network = Network(found, Line(0.0, 0.0))
    assert all_reduce_s(1.5 * MIB, 3, network) == pytest.approx(1e-4 + 2 * found.at(MIB))
    assert all_reduce_s(6 * MIB, 3, network) == pytest.approx(1e-4 + 4 * found.at(2 * MIB))


# ---- formulas ------------------------------------------------------------------------------------


def test_all_reduce_at_known_points() -> None:
    network = Network(LINK, HOST, ranks_per_host=2)
    large, small, tiny = 8 * MIB, 10_000, 1000
    inner = HOST.at(large)
    assert all_reduce_s(large, 1, network) == inner
    # Two ranks on each host: to the first of the host, to the first of all, and back.
    told = 400e-6
    assert all_reduce_s(MIB, 2, network) == pytest.approx(told + LINK.at(MIB) + HOST.at(MIB))
    in_a_ring = 2 * LINK.at(large / 2)
    assert all_reduce_s(large, 2, network) == pytest.approx(told + in_a_ring + inner)
    three_hosts = told + 400e-6 + 4 / 3 * large * 8e-9 + inner
    assert all_reduce_s(large, 3, network) == pytest.approx(three_hosts)
    in_two_pieces = told + 400e-6 + 8 / 3 * large * 8e-9 + HOST.at(2 * large) / 2
    assert all_reduce_s(2 * large, 3, network) == pytest.approx(in_two_pieces)
    # Small: told, then two ranks' messages to each other host, the host itself.
    assert all_reduce_s(small, 3, network) == pytest.approx(told + 100e-6 + 2 * 2 * small * 8e-9 + HOST.at(small))
    # With partners: to one host, then to another; medium: half to one, a quarter to another, and back.
    doubling = 2 * (100e-6 + 2 * small * 8e-9)
    assert all_reduce_s(small, 4, network) == pytest.approx(told + doubling + HOST.at(small))
    halving = 2 * (2 * 100e-6 + 3 / 4 * MIB * 8e-9)
    assert all_reduce_s(MIB, 4, network) == pytest.approx(told + halving + HOST.at(MIB))
    # Tiny: all of them with the message to each host.
    assert all_reduce_s(tiny, 4, network) == pytest.approx(told + 8 * 3 * tiny * 8e-9)
    assert all_reduce_s(tiny, 5, network) == pytest.approx(told + 10 * 4 * tiny * 8e-9)
    assert all_reduce_s(tiny, 2, Network(LINK, HOST)) == pytest.approx(100e-6 + tiny * 8e-9)
    told_slowly = Network(LINK, HOST, 2, told_s=500e-6)
    assert all_reduce_s(tiny, 2, told_slowly) == pytest.approx(500e-6 + 4 * tiny * 8e-9)
    assert all_reduce_s(large, 2, told_slowly) == pytest.approx(500e-6 + in_a_ring + inner)
    slow_host = Network(LINK, HOST.times(100))
    expected = 100e-6 + slow_host.host.at(2 * large) + 2 * LINK.at(large) / 2
    assert all_reduce_s(2 * large, 2, slow_host) == pytest.approx(expected), "the slower stage counts"


def test_step_at_known_points() -> None:
    network = Network(Line(0.0, 1.0), Line(0.0, 0.0))  # a second for each byte on the link
    # Two buckets of 10 B: full at 2 s and 3 s, so on the link from 2 to 12 and from 12 to 22; then the optimizer.
    network = Network(Line(0.0, 1e-3), Line(0.0, 0.0))
    buckets = [20_000, 20_000]
    assert step_s((1.0, 2.0, 0.5), buckets, 2, network) == pytest.approx(2.0 + 20 + 20 + 0.5)
    # What computes longer than it communicates hides all but the last bucket.
    assert step_s((1.0, 100.0, 0.5), buckets, 2, network) == pytest.approx(101.0 + 20 + 0.5)
    assert step_on_one_host_s((1.0, 2.0, 0.5), buckets, Line(1.0, 0.0)) == pytest.approx(5.5)
    assert step_s((1.0, 2.0, 0.5), buckets, 1, network) == pytest.approx(3.5)


# ---- from a result -------------------------------------------------------------------------------


def _series(parameters: Parameters, contestant: str, seconds: float) -> Series:
    return Series(parameters, contestant, 1, [seconds, 1.01 * seconds, 0.99 * seconds])


def _result(check_factor: float = 1.0) -> Result:
    """Everything exactly as the model has it; the check so many times as slow."""
    series = []
    for n, batches in ((1, (64,)), (2, (8, 16, 32, 64)), (4, (16, 64))):
        crowd = max(1, n // 2)  # two cores
        for batch in batches:
            forward, backward, optimizer = (crowd * COMPUTING[name].at(batch) for name in COMPUTING)
            parameters: Parameters = {"part": "step", "world_size": n, "batch": batch}
            alone = forward + backward + optimizer
            together = alone if n == 1 else step_on_one_host_s((forward, backward, optimizer), BUCKETS, HOST)
            for name, seconds in zip(
                ("forward", "forward_backward", "step_alone", "step"),
                (forward, forward + backward, alone, together),
                strict=True,
            ):
                series.append(_series(parameters, name, seconds))
    series += [
        _series({"part": "host", "world_size": 2, "bytes": size}, "all_reduce", HOST.at(size))
        for size in (4096, MIB, 4 * MIB)
    ]
    series += [_series({"part": "link", "bytes": size}, "message", LINK.at(size)) for size in (4, 65536, 2 * MIB)]
    crowded = Network(LINK.times(3), HOST.times(2), 2, told_s=5e-4)
    series.append(_series({"part": "crowded", "bytes": 4}, "barrier", 5e-4))
    for size in (4, 65536, 2 * MIB):
        series.append(_series({"part": "crowded", "bytes": size}, "exchange", LINK.times(3).at(2 * size)))
    for size in (4, 4096):
        series.append(_series({"part": "crowded", "bytes": size}, "all_reduce", HOST.times(2).at(size)))
    for size in (4096, 8 * MIB):
        seconds = check_factor * all_reduce_s(size, 2, crowded)
        series.append(_series({"part": "check", "bytes": size}, "all_reduce", seconds))
    parts = tuple(2 * COMPUTING[name].at(64) for name in COMPUTING)
    step = check_factor * step_s((parts[0], parts[1], parts[2]), BUCKETS, 2, crowded)
    series.append(_series({"part": "check", "batch": 64}, "step", step))
    settings = {
        "nproc": 4, "recipe": "digits", "batch": 64, "buckets_bytes": BUCKETS, "hosts": 2, "ranks_per_host": 2,
        "rate": "1gbit",
    }  # fmt: skip
    return Result("scaling", False, ENVIRONMENT, settings, series)


def test_fits_recover_what_the_samples_were_made_of() -> None:
    fits = predictions.fit(_result())
    assert fits is not None
    assert fits.network is not None
    assert fits.crowded is not None
    assert fits.crowded.told_s == pytest.approx(5e-4)
    for found, made in (
        (fits.network.link, LINK),
        (fits.crowded.link, LINK.times(3)),
        (fits.crowded.host, HOST.times(2)),
        (fits.host, HOST),
        (fits.computing.forward, COMPUTING["forward"]),
        (fits.computing.backward, COMPUTING["backward"]),
    ):
        assert found.fixed_s == pytest.approx(made.fixed_s, rel=1e-3)
        assert found.per_unit_s == pytest.approx(made.per_unit_s, rel=1e-3)
    assert fits.computing.optimizer.at(64) == pytest.approx(0.5e-3, rel=1e-3)


@pytest.mark.parametrize(("factor", "met"), [(1.0, True), (1.1, True), (1.3, False), (0.8, False)])
def test_a_prediction_is_held_against_the_check_and_never_sees_it(factor: float, met: bool) -> None:
    result = _result(factor)
    fits = predictions.fit(result)
    assert fits == predictions.fit(_result())
    assert fits is not None
    checks = [one for one in predictions.residuals(result, fits) if one.is_check]
    assert len(checks) == 3
    assert [one.is_met for one in checks] == [met] * 3
    assert checks[0].error == pytest.approx(1 / factor - 1, abs=1e-3)


def test_what_the_engine_takes_is_fitted_to_one_host() -> None:
    result = _result()
    for one in result.series:
        if one.contestant == "step" and one.parameters.get("world_size") == 2:
            one.samples_s[:] = [sample + 1e-3 for sample in one.samples_s]
    before, fits = predictions.fit(_result()), predictions.fit(result)
    assert before is not None
    assert fits is not None
    assert before.engine_s < 1e-5
    assert fits.engine_s == pytest.approx(1e-3, rel=0.01)
    step_before, step = (predictions.residuals(result, each)[-1].predicted_s for each in (before, fits))
    assert step - step_before == pytest.approx(2e-3, rel=0.01), "four ranks on two cores"
    one_host, one_before = (predictions.projection(result, each)["weak"][0].step_s for each in (fits, before))
    assert one_host - one_before == pytest.approx(1e-3, rel=0.01)


def test_rates_by_hand() -> None:
    found = {(rate.mode, rate.world_size): rate for rate in predictions.rates(_result())}
    alone = 3.5e-3 + 30e-6 * 64
    assert found["weak", 1].samples_per_s == pytest.approx(64 / alone)
    assert found["weak", 1].efficiency == pytest.approx(1.0)
    together = alone + sum(map(HOST.at, BUCKETS))
    assert found["weak", 2].efficiency == pytest.approx(alone / together)
    assert (found["strong", 2].batch, found["strong", 4].batch) == (32, 16)
    strong = 3.5e-3 + 30e-6 * 32 + sum(map(HOST.at, BUCKETS))
    assert found["strong", 2].samples_per_s == pytest.approx(64 / strong)


def test_projection_at_known_points() -> None:
    fits = predictions.fit(_result())
    assert fits is not None
    found = predictions.projection(_result(), fits)
    assert [rate.world_size for rate in found["weak"]] == [1, 2, 4, 8, 16, 32, 64]
    assert found["weak"][0].efficiency == 1.0
    parts = (COMPUTING["forward"].at(64), COMPUTING["backward"].at(64), COMPUTING["optimizer"].at(64))
    expected = step_s(parts, BUCKETS, 8, Network(LINK, HOST, 2))
    assert found["weak"][3].step_s == pytest.approx(expected, rel=1e-3)
    assert found["strong"][-1].batch == 1, "a rank without a sample is no projection"


def test_tables_and_picture() -> None:
    text = as_markdown(charts.blocks(_result(1.3)))
    assert "| weak, 2 ranks | 64 |" in text
    assert text.count("**no**") == 3
    assert "link: message between two hosts | 100 µs | 0.125 GB/s" in text
    assert len(charts.draw(_result()).axes) == 3


def test_a_run_cut_short_shows_what_it_has() -> None:
    result = _result()
    begun = Result("scaling", False, ENVIRONMENT, result.settings, result.series[:4], complete=False)
    (table,) = [block for block in charts.blocks(begun) if isinstance(block, Table)]
    assert [row[0] for row in table.rows] == ["weak, 1 ranks", "strong, 1 ranks"]
    assert charts.draw(begun).axes
    without_link = [one for one in result.series if one.parameters["part"] not in ("link", "crowded", "check")]
    alone = Result("scaling", False, ENVIRONMENT, result.settings, without_link)
    assert "Projected" not in as_markdown(charts.blocks(alone))
    assert charts.draw(alone).axes


# ---- options and runs ----------------------------------------------------------------------------


def _session(tmp_path: Path, nproc: int) -> Session:
    return Session(
        "scaling", nproc, 60.0, True, tmp_path, ProgressLine("x", 60, io.StringIO()), environment=ENVIRONMENT
    )


def _options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    scaling.add_arguments(parser)
    return parser.parse_args(arguments)


@pytest.mark.parametrize(
    ("arguments", "about"),
    [(["--recipe", "digit"], "did you mean 'digits'"), (["--batch", "0"], "must be at least 1, got 0")],
)
def test_options_that_mean_nothing(tmp_path: Path, arguments: list[str], about: str) -> None:
    with pytest.raises(InputError, match=about):
        scaling.measure(_options(*arguments), _session(tmp_path, 2))


def test_numbers_of_ranks() -> None:
    assert scaling._world_sizes(1) == [1, 2, 4]
    assert scaling._world_sizes(6) == [1, 2, 4, 6]
    assert scaling._world_sizes(8) == [1, 2, 4, 8]


def test_a_spent_budget_begins_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(*_: object) -> None:
        raise AssertionError("something was begun")

    monkeypatch.setattr(scaling._ScalingRun, "on_one_host", begin)
    monkeypatch.setattr(scaling._ScalingRun, "on_hosts", begin)
    session = _session(tmp_path, 2)
    session.budget_s = 0.0
    scaling.measure(_options(), session)
    assert [one.contestant for one in session.skipped] == [
        "1 ranks, pass 1", "2 ranks, pass 1", "4 ranks, pass 1", "hosts",
    ]  # fmt: skip
    assert all("--budget" in one.reason for one in session.skipped)


def test_without_root_there_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.testing import namespaces

    monkeypatch.setattr(namespaces, "reason_to_skip", lambda: "needs root on Linux: test hosts are namespaces")
    session = _session(tmp_path, 2)
    scaling._ScalingRun(session, "digits", 4).on_hosts("1gbit")
    assert [one.reason for one in session.skipped] == ["needs root on Linux: test hosts are namespaces"]


def measure_two_ranks(folder: Path) -> tuple[list[Series], dict[str, Any]]:
    scaling._world_sizes = lambda nproc: [2]
    session = _session(folder, 2)
    scaling.measure(_options("--no-hosts", "--batch", "8"), session)
    return session.series, session.settings


def test_two_ranks(tmp_path: Path, warm: WarmLauncher) -> None:
    series, settings = warm.call(measure_two_ranks, tmp_path, folder=tmp_path)
    steps = {int(one.parameters["batch"]) for one in series if one.contestant == "step"}
    sizes = {int(one.parameters["bytes"]) for one in series if one.contestant == "all_reduce"}
    assert (steps, sizes) == ({1, 2, 4, 8}, set(scaling.HOST_SIZES))
    (bucket_bytes,) = settings["buckets_bytes"]
    assert 0 <= bucket_bytes - 66_314 * 4 < 14 * 64, "not the digits model's parameters, each at a cache line"


def test_a_second_pass_adds_samples(tmp_path: Path) -> None:
    session = _session(tmp_path, 2)
    run = scaling._ScalingRun(session, "digits", 4)
    item: dict[str, Any] = {"parameters": {"part": "step"}, "contestant": "step", "iterations": 1, "samples_s": [1.0]}
    run._add([item])
    run._earlier = list(session.series)
    run._add([{**item, "samples_s": [2.0]}])
    assert [one.samples_s for one in session.series] == [[1.0, 2.0]]
