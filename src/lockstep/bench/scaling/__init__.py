"""`lockstep bench scaling`: 1 to N ranks, strong and weak; and what a model fitted to it says of many hosts.

General layout:

* `model`: fits, and the formulas of an all_reduce and of a step. Pure.
* `measuring`: inside the ranks.
* `predictions`: a result's fits, predictions and residuals; `charts`: the tables and the picture.

This module is what the command calls. It does not import torch; `measure` does.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from lockstep.bench.results import Series
from lockstep.bench.scaling.charts import blocks, draw
from lockstep.bench.session import Session
from lockstep.bench.words import choose
from lockstep.errors import InputError

__all__ = ["DESCRIPTION", "SUMMARY", "add_arguments", "blocks", "draw", "measure"]

SUMMARY = "training on 1 to N ranks, strong and weak, and a model's projection to many hosts"
DESCRIPTION = """\
Train on 1 to N ranks of this machine, with the same batch for each rank (weak) and with one batch for all (strong). Fit
latency, time per byte and time per sample to runs on one host and to messages between two hosts; project to 64 hosts;
and check the projection on two hosts, which are network namespaces of this machine, held to --rate (needs root).
"""

RECIPES = ("digits", "imagenet")
HOSTS, RANKS_PER_HOST = 2, 2
KIB, MIB = 1 << 10, 1 << 20
_SPENT = "the budget was spent; --budget gives more"
HOST_SIZES = (4 * KIB, 64 * KIB, 512 * KIB, 4 * MIB)
LINK_SIZES = (4, 4 * KIB, 32 * KIB, 128 * KIB, 512 * KIB, 2 * MIB, 8 * MIB)
CHECK_SIZES = (4 * KIB, 128 * KIB, 1 * MIB, 8 * MIB, 25 * MIB)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    group = parser.add_argument_group("what is measured")
    group.add_argument(
        "--recipe", default="digits", help="digits, or imagenet: ResNet-18 at 64 pixels (default: digits)"
    )
    group.add_argument("--batch", type=int, metavar="N", help="samples of each rank (default: 64; imagenet: 16)")
    group.add_argument(
        "--rate", default="1gbit", help="of the hosts' links in the check, as tc writes it (default: 1gbit)"
    )
    group.add_argument("--no-hosts", action="store_true", help="no namespaces: neither link nor check")


def measure(options: argparse.Namespace, session: Session) -> None:
    """Measure what the options ask for.

    Raises:
        InputError: an option means nothing; says what to write.
        RankFailed: a rank failed.
    """
    (recipe,) = choose(options.recipe, RECIPES, "recipe", only_one=True)
    batch = options.batch if options.batch is not None else 64 if recipe == "digits" else 16
    if batch < 1:
        raise InputError(f"--batch must be at least 1, got {batch}")
    from lockstep.bench.scaling.measuring import bucket_bytes

    session.settings.update(
        recipe=recipe,
        batch=batch,
        buckets_bytes=bucket_bytes(recipe),
        hosts=HOSTS,
        ranks_per_host=RANKS_PER_HOST,
        rate=options.rate,
        threads_per_rank=1,
    )
    run = _ScalingRun(session, recipe, batch)
    ranks = _world_sizes(session.nproc)
    passes = 1 if session.quick else 2
    # Two passes, so that a noisy minute does not hit one number of ranks alone.
    for number in range(passes):
        for n in ranks:
            if session.left_s <= 0:
                session.skip(f"{n} ranks, pass {number + 1}", _SPENT)
                continue
            run.on_one_host(n, passes * len(ranks), f"pass {number + 1}: {n} ranks on one host")
    if options.no_hosts:
        session.skip("hosts", "--no-hosts: no link was measured and nothing is projected")
    elif session.left_s <= 0:
        session.skip("hosts", _SPENT)
    else:
        run.on_hosts(options.rate)


def _world_sizes(nproc: int) -> list[int]:
    """1, 2, 4 … up to N, N itself, and what the check needs: the ranks of one host, and of all of them."""
    powers = [1 << power for power in range(nproc.bit_length()) if 1 << power <= nproc]
    return sorted({*powers, nproc, RANKS_PER_HOST, HOSTS * RANKS_PER_HOST})


class _ScalingRun:
    """One run.

    Args:
        session: where samples go.
        recipe: name.
        batch: of each rank.
    """

    def __init__(self, session: Session, recipe: str, batch: int) -> None:
        self._session, self._recipe, self._batch = session, recipe, batch
        self._earlier: list[Series] = []

    def _budget(self, num_configurations: int, share_s: float) -> dict[str, object]:
        from lockstep.bench.harness import Budget

        if self._session.quick:
            return asdict(Budget(seconds=0.05, sample_s=0.002, min_rounds=2, max_rounds=3, sweeps=1))
        seconds = max(0.05, share_s / max(1, num_configurations))
        return asdict(Budget(seconds=seconds, sample_s=min(0.02, seconds / 8), min_rounds=3, max_rounds=60, sweeps=1))

    def _add(self, found: Sequence[dict[str, Any]]) -> None:
        """Keep series: behind the samples of an earlier pass, where there was one."""
        for item in found:
            one = Series(**item)
            before = [
                old for old in self._earlier if (old.contestant, old.parameters) == (one.contestant, one.parameters)
            ]
            samples = [*(sample for old in before for sample in old.samples_s), *one.samples_s]
            self._session.add(Series(one.parameters, one.contestant, one.iterations, samples))

    def on_one_host(self, n: int, num_runs: int, doing: str) -> None:
        """Steps and all_reduces of `n` ranks of this host."""
        from lockstep.bench.ranks import run_ranks
        from lockstep.bench.scaling.measuring import measure_on_host

        session = self._session
        session.progress.show(doing)
        self._earlier = list(session.series)
        batches = sorted({self._batch, max(1, self._batch // n), *self._smaller(n)})
        sizes = list(HOST_SIZES) if n == RANKS_PER_HOST else []
        budget = self._budget(4 * len(batches) + len(sizes), 0.35 * session.budget_s / num_runs)
        job: dict[str, object] = {"recipe": self._recipe, "batches": batches, "sizes": sizes, "budget": budget}
        job["seconds"] = session.left_s
        run_ranks(measure_on_host, n, job, threads=1, timeout_s=120 + 2 * session.budget_s, on_part=self._add)

    def _smaller(self, n: int) -> list[int]:
        """Batches to fit time per sample to, with as many ranks as a host of the check has."""
        return [max(1, self._batch // divisor) for divisor in (2, 4, 8)] if n == RANKS_PER_HOST else []

    def on_hosts(self, rate: str) -> None:
        """The link between two hosts, its pieces with all ranks at once, then the check on them."""
        from lockstep.testing.namespaces import Cluster, cluster, reason_to_skip

        session = self._session
        if reason := reason_to_skip():
            session.skip("hosts", reason)
            return
        from lockstep.bench.scaling.measuring import measure_crowded, measure_link, measure_together

        def run(made: Cluster, function: Callable[..., object], ranks: int, job: Mapping[str, object]) -> None:
            outcomes = made.run(function, [ranks] * HOSTS, job, timeout=60 + 2 * session.budget_s)
            for rank, outcome in enumerate(outcomes):
                if isinstance(outcome, BaseException):
                    raise RuntimeError(f"rank {rank} of {ranks * HOSTS} on {HOSTS} hosts failed: {outcome!r}")
            self._add(outcomes[0])

        self._earlier = []
        share_s = 0.12 * session.budget_s
        with cluster(HOSTS, rate=rate) as made:
            session.progress.show("messages between two hosts")
            sizes = list(LINK_SIZES)
            run(made, measure_link, 1, {"sizes": sizes, "budget": self._budget(len(sizes), share_s)})
            session.progress.show(f"messages between {HOSTS} hosts with {RANKS_PER_HOST} ranks each")
            budget = self._budget(len(sizes) + len(HOST_SIZES) + 1, share_s)
            job = {"per_host": RANKS_PER_HOST, "sizes": sizes, "host_sizes": list(HOST_SIZES), "budget": budget}
            run(made, measure_crowded, RANKS_PER_HOST, job)
            session.progress.show(f"the check: {HOSTS} hosts with {RANKS_PER_HOST} ranks each")
            sizes = list(CHECK_SIZES[:3] if session.quick else CHECK_SIZES)
            budget = self._budget(len(sizes) + 1, share_s)
            job = {"recipe": self._recipe, "batches": [self._batch], "sizes": sizes, "budget": budget}
            run(made, measure_together, RANKS_PER_HOST, job)
