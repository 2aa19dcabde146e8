"""Markdown generated from results: full tables per case, summaries for the README.

A document holds markers; `fill_markers` replaces what stands between them::

    <!-- bench:all_reduce -->
    …
    <!-- /bench -->

`bench:<case>` takes the summary of that case, `bench:<case>:targets` its targets with what was
measured, `bench:<case>:missed` those of them that it misses, and `bench:<case>:full` everything.
Every number comes from `<case>.json`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.bench import stats
from lockstep.bench.pages import format_bytes, format_seconds, markdown_table, three_digits
from lockstep.bench.results import Result
from lockstep.bench.stats import Estimate

__all__ = [
    "Section",
    "Verdict",
    "count_of_workers",
    "fill_markers",
    "images_of_epoch",
    "layouts_of",
    "name_layout",
    "name_sharded",
    "render",
    "rows_cases",
    "sections",
    "sharded_cases",
    "verdicts",
]

MIB = 1024 * 1024
MODEL_NAMES = {
    "mlp_10m": "MLP, 10M parameters",
    "mlp_50m": "MLP, 50M parameters",
    "cnn_5m": "CNN, 5M parameters",
    "thin_100": "100 thin layers",
}
HOROVOD_LIMIT = 1.1
OVERHEAD_TARGETS = {"mlp_10m": 0.18, "cnn_5m": 0.02, "thin_100": 0.22}
RECORD_LIMIT = 0.05
ROWS_LIMIT = 1.2
TITLES = {
    "all_reduce": "all_reduce on one host",
    "train_step": "A training step",
    "threads": "A training step on all cores",
    "sharded": "A step in shares",
    "horovod": "A step of a Horovod script",
    "startup": "Start-up",
    "record": "What the flight record costs",
    "hosts": "Several hosts",
    "contention": "Beside busy programs",
    "decode": "Loading JPEGs",
    "rows": "Loading rows",
    "epoch": "An epoch on JPEGs",
    "listing": "Listing the files of ImageNet",
}
"""Of the pages, and of their entries in the site's menu."""
LAUNCH_NAMES = {
    "torchrun": "`torchrun`",
    "lockstep_run": "`lockstep run`, same script",
    "lockstep_run_init": "`lockstep run`, script uses `lockstep.init()`",
}
CONTESTANT_NAMES = {
    "gloo": "gloo",
    "torch": "torch's loader",
    "lockstep": "lockstep",
    "lockstep_symmetric": "lockstep, symmetric memory",
    "memcpy_one_rank": "memcpy, one rank",
    "memcpy_all_ranks": "memcpy, all ranks at once",
    "none": "no communication",
    "bound": "no communication, then a barrier",
    "lockstep_ddp": "lockstep DDP",
    "torch_ddp_lockstep": "torch DDP on lockstep",
    "torch_ddp_gloo": "torch DDP on gloo",
    "horovod": "Horovod's optimizer",
    "sharded": "lockstep, sharded",
    "torch_zero_gloo": "torch's ZeroRedundancyOptimizer on gloo",
    "fsdp2_gloo": "FSDP2 on gloo",
    "no_record": "no record",
    "record": "flight record",
    "record_launched": "flight record and status file",
    "torch_ddp_gloo_bf16": "torch DDP on gloo, its bf16 hook",
    "lockstep_fp32": "lockstep, exact",
    "lockstep_bf16": "lockstep, bf16",
    "lockstep_int8": "lockstep, int8",
    "lockstep_ddp_fp32": "lockstep DDP, exact",
    "lockstep_ddp_bf16": "lockstep DDP, bf16",
    "every_rank": "every rank walks the folder",
    "lockstep_again": "lockstep, every later run",
}
# Contestant, rival, and how many times as fast the first must be.
HOSTS_TARGETS = (
    ("lockstep_fp32", "gloo", 1.45),
    ("lockstep_bf16", "gloo", 2.8),
    ("lockstep_int8", "gloo", 5.0),
    ("lockstep_ddp_fp32", "torch_ddp_gloo", 1.4),
    ("lockstep_ddp_bf16", "torch_ddp_gloo", 2.5),
    ("lockstep_ddp_bf16", "torch_ddp_gloo_bf16", 1.3),
)

Section = str
_MARKER = re.compile(r"(<!-- bench:(\w+)(?::(\w+))? -->).*?(<!-- /bench -->)", re.DOTALL)


@dataclass(frozen=True)
class Verdict:
    """A target and what was measured.

    Attributes:
        target: in words.
        measured: the estimate, formatted.
        met: whether the estimate reaches the target; its interval may still straddle it.
    """

    target: str
    measured: str
    met: bool


def render(result: Result, *, with_picture: bool = True) -> str:
    """The page of one case: summary, targets, full tables, picture."""
    parts = sections(result)
    title = f"# {TITLES[result.case]}"
    if result.quick:
        title += "\n\n**A quick run: its numbers mean nothing.**"
    source = f"Generated from [{result.case}.json]({result.case}.json); do not edit."
    picture = [f"![{TITLES[result.case]}]({result.case}.png)"] if with_picture else []
    return "\n\n".join([title, parts["full"], *picture, source]) + "\n"


def sections(result: Result) -> dict[str, Section]:
    """The parts that a marker can ask for: `summary`, `targets`, `missed` (of the targets), `full`."""
    summary, tables = _TABLES[result.case](result)
    targets = markdown_table(
        ["target", "measured", "met"],
        [[verdict.target, verdict.measured, "yes" if verdict.met else "**no**"] for verdict in verdicts(result)],
    )
    foot = f"*{result.environment.summary()}. Medians; brackets hold 95% of bootstrap resamples.*"
    missed = [verdict for verdict in verdicts(result) if not verdict.met]
    skipped = [
        f"- Not measured: {item.contestant} at {_describe(item.parameters)}: {item.reason}" for item in result.skipped
    ]
    full = [summary, "## Targets\n\n" + targets, tables, *(["\n".join(skipped)] if skipped else []), foot]
    return {
        "summary": f"{summary}\n\n{foot}",
        "targets": targets,
        "missed": markdown_table(["target missed", "measured"], [[one.target, one.measured] for one in missed])
        if missed
        else "No target is missed.",
        "full": "\n\n".join(part for part in full if part),
    }


def fill_markers(text: str, folder: Path) -> str:
    """Replace what stands between the markers of a document by what the results say.

    Args:
        text: the document.
        folder: holds `<case>.json` of every case that the document asks for.

    Raises:
        ValueError: a marker asks for a case without results, or for a section that there is not.
    """

    def fill(match: re.Match[str]) -> str:
        opening, case, name, closing = match[1], match[2], match[3] or "summary", match[4]
        path = folder / f"{case}.json"
        if not path.exists():
            raise ValueError(f"{opening} needs {path}: run `python -m benchmarks {case}`, or correct the marker")
        parts = sections(Result.load(path))
        if name not in parts:
            raise ValueError(f"{opening} asks for section {name!r}, expected one of {sorted(parts)}")
        return f"{opening}\n{parts[name]}\n{closing}"

    return _MARKER.sub(fill, text)


def verdicts(result: Result) -> list[Verdict]:
    """The targets of a case against its samples; those without samples are left out."""
    return _VERDICTS[result.case](result)


# ---------------------------------------------------------------- all_reduce


def _all_reduce_tables(result: Result) -> tuple[Section, Section]:
    world_sizes = [int(value) for value in result.values("world_size")]
    header = [
        "tensor",
        *(f"{name}, {_ranks(result, n)}" for n in world_sizes for name in ("gloo", "lockstep", "ratio")),
    ]
    rows = []
    for size in result.values("bytes"):
        row = [format_bytes(int(size))]
        for world_size in world_sizes:
            gloo, own = (result.samples(name, world_size=world_size, bytes=size) for name in ("gloo", "lockstep"))
            row += [_time(gloo), _time(own), _speedup(gloo, own)]
        rows.append(row)
    full = "\n\n".join(_all_reduce_table(result, world_size) for world_size in world_sizes)
    return markdown_table(header, rows), full


def _all_reduce_table(result: Result, world_size: int) -> Section:
    """All contestants at one world size: median with the spread of samples, and the ratios."""
    names = ("gloo", "lockstep", "lockstep_symmetric", "memcpy_one_rank", "memcpy_all_ranks")
    rows = []
    for size in result.values("bytes"):
        samples = {name: result.samples(name, world_size=world_size, bytes=size) for name in names}
        rows.append(
            [
                format_bytes(int(size)),
                *(_time_with_spread(samples[name]) for name in names),
                _speedup(samples["gloo"], samples["lockstep"], interval=True),
                _speedup(samples["gloo"], samples["lockstep_symmetric"], interval=True),
                _speedup(samples["lockstep_symmetric"], samples["memcpy_one_rank"], interval=True),
            ]
        )
    header = ["tensor", *(CONTESTANT_NAMES[name] for name in names)]
    header += ["gloo / lockstep", "gloo / symmetric", "symmetric / memcpy"]
    caption = "Median, and 10th to 90th percentile of the samples; float32, SUM, in place, 1 thread per rank."
    return f"## {_ranks(result, world_size)}\n\n{caption}\n\n{markdown_table(header, rows)}"


def _all_reduce_verdicts(result: Result) -> list[Verdict]:
    found: list[Verdict] = []
    for world_size in (int(value) for value in result.values("world_size")):
        pairs = []
        for size in result.values("bytes"):
            gloo, own = (result.samples(name, world_size=world_size, bytes=size) for name in ("gloo", "lockstep"))
            if gloo and own:
                pairs.append((format_bytes(int(size)), gloo, own))
        if not pairs:
            continue
        ratios = {label: stats.ratio(gloo, own) for label, gloo, own in pairs}
        worst = min(ratios, key=lambda label: ratios[label].value)
        ranks = _ranks(result, world_size)
        target = f"{ranks}: at least 4x gloo at every size"
        found.append(_at_least(target, ratios[worst], 4, note=f" at {worst}"))
        mean = stats.geometric_mean_ratio([(gloo, own) for _, gloo, own in pairs])
        found.append(_at_least(f"{ranks}: geometric mean at least 15x gloo", mean, 15))
        found += _symmetric_verdicts(result, world_size)
    return found


def _symmetric_verdicts(result: Result, world_size: int) -> list[Verdict]:
    """A 25 MiB tensor in symmetric memory, against gloo and against one memcpy."""
    names = ("gloo", "lockstep_symmetric", "memcpy_one_rank")
    gloo, symmetric, memcpy = (result.samples(name, world_size=world_size, bytes=25 * MIB) for name in names)
    limits = {2: 10, 4: 6}
    found: list[Verdict] = []
    if gloo and symmetric and world_size in limits:
        limit = limits[world_size]
        target = f"{_ranks(result, world_size)}: 25 MiB in symmetric memory at least {limit}x gloo"
        found.append(_at_least(target, stats.ratio(gloo, symmetric), limit))
    if symmetric and memcpy and world_size == 2:
        times = stats.ratio(symmetric, memcpy)
        target = "2 ranks: 25 MiB in symmetric memory no slower than one memcpy"
        found.append(Verdict(target, f"{_format_ratio(times)} of a memcpy", times.value <= 1))
    return found


# ---------------------------------------------------------------- train_step

_ENGINES = ("lockstep_ddp", "torch_ddp_lockstep", "torch_ddp_gloo")


def _train_step_tables(result: Result) -> tuple[Section, Section]:
    overhead_rows, time_rows = [], []
    for model in (str(value) for value in result.values("model")):
        floor = result.samples("none", model=model)
        engines = [result.samples(name, model=model) for name in _ENGINES]
        label = MODEL_NAMES.get(model, model)
        overheads = [_percent(stats.overhead(samples, floor)) if samples and floor else "–" for samples in engines]
        overhead_rows.append([label, _time(floor), *overheads])
        time_rows.append([label, *(_time_with_spread(samples) for samples in (floor, *engines))])
    names = [CONTESTANT_NAMES[name] for name in _ENGINES]
    summary = markdown_table(
        ["model", "step without communication", *(f"{name} adds" for name in names)], overhead_rows
    )
    times = markdown_table(["model", CONTESTANT_NAMES["none"], *names], time_rows)
    caption = "Median, and 10th to 90th percentile of the samples."
    return summary, f"## Time per step\n\n{caption}\n\n{times}"


def _train_step_verdicts(result: Result) -> list[Verdict]:
    found: list[Verdict] = []
    for model in (str(value) for value in result.values("model")):
        floor = result.samples("none", model=model)
        own, torch_own, gloo = (result.samples(name, model=model) for name in _ENGINES)
        if not (floor and own and torch_own and gloo):
            continue
        label = MODEL_NAMES.get(model, model)
        if (limit := OVERHEAD_TARGETS.get(model)) is not None:
            cost = stats.overhead(own, floor)
            target = f"{label}: lockstep DDP adds at most {limit:.0%}"
            found.append(Verdict(target, _percent(cost), cost.value <= limit))
        share = stats.bootstrap(lambda ours, theirs, least: (ours - least) / (theirs - least), own, gloo, floor)
        target = f"{label}: lockstep DDP adds at most a quarter of what torch DDP on gloo adds"
        found.append(Verdict(target, _percent(share), share.value <= 0.25))
        lead = stats.ratio(torch_own, own)
        target = f"{label}: lockstep DDP ahead of torch DDP on the same group"
        found.append(Verdict(target, f"{_format_ratio(lead)}", lead.value > 1))
    return found


# ---------------------------------------------------------------- threads


def layouts_of(result: Result) -> list[tuple[int, int]]:
    """How many ranks, and how many intra-op threads each, in the order measured."""
    return list(
        dict.fromkeys((int(each.parameters["world_size"]), int(each.parameters["threads"])) for each in result.series)
    )


def name_layout(result: Result, world_size: int, threads: int) -> str:
    """In words, with the number of cores where threads outnumber them."""
    cores = result.environment.cores
    crowded = f" on {cores} {'core' if cores == 1 else 'cores'}" if world_size * threads > cores else ""
    return f"{world_size} ranks of {threads} {'thread' if threads == 1 else 'threads'}{crowded}"


def _threads_tables(result: Result) -> tuple[Section, Section]:
    ratio_rows, time_rows = [], []
    names = ("none", "bound", *_ENGINES)
    for world_size, threads in layouts_of(result):
        layout = name_layout(result, world_size, threads)
        for model in (str(value) for value in result.values("model")):
            times = [result.samples(name, model=model, world_size=world_size, threads=threads) for name in names]
            label, bound = MODEL_NAMES.get(model, model), times[1]
            ratios = [_format_ratio(stats.ratio(each, bound)) if each and bound else "–" for each in times[2:]]
            ratio_rows.append([layout, label, _time(bound), *ratios])
            time_rows.append([layout, label, *map(_time_with_spread, times)])
    engines = [CONTESTANT_NAMES[name] for name in _ENGINES]
    header = ["ranks", "model", "computing, and waiting for the slowest rank", *(f"{name} takes" for name in engines)]
    times = markdown_table(["ranks", "model", *(CONTESTANT_NAMES[name] for name in names)], time_rows)
    caption = "Median, and 10th to 90th percentile of the samples."
    return markdown_table(header, ratio_rows), f"## Time per step\n\n{caption}\n\n{times}"


def _threads_verdicts(result: Result) -> list[Verdict]:
    found: list[Verdict] = []
    for world_size, threads in layouts_of(result):
        for engine in _ENGINES[:2]:
            leads = {}
            for model in (str(value) for value in result.values("model")):
                own, gloo = (
                    result.samples(name, model=model, world_size=world_size, threads=threads)
                    for name in (engine, "torch_ddp_gloo")
                )
                if own and gloo:
                    leads[MODEL_NAMES.get(model, model)] = stats.ratio(gloo, own)
            if leads:
                worst = min(leads, key=lambda label: leads[label].value)
                target = f"{name_layout(result, world_size, threads)}: {CONTESTANT_NAMES[engine]} no slower than gloo"
                found.append(_at_least(target, leads[worst], 1, note=f" ({worst})"))
    return found


# ---------------------------------------------------------------- sharded

_SHARDED = ("sharded", "lockstep_ddp", "torch_ddp_gloo", "torch_zero_gloo", "fsdp2_gloo")
_OPTIMIZER_NAMES = {"adam": "Adam", "sgd": "SGD"}
_MOST_OF_GLOO = 0.5
_MOST_MEMORY = {2: 0.6, 4: 0.45}  # more ranks as 4


def sharded_cases(result: Result) -> list[dict[str, str | int]]:
    """Ranks, model and optimizer of each case, in the order measured."""
    return list({tuple(each.parameters.items()): dict(each.parameters) for each in result.series}.values())


def name_sharded(result: Result, case: dict[str, str | int]) -> str:
    """In words."""
    ranks = name_layout(result, int(case["world_size"]), 1).replace(" of 1 thread", "")
    return f"{ranks}, {MODEL_NAMES[str(case['model'])]}, {_OPTIMIZER_NAMES[str(case['optimizer'])]}"


def _sharded_tables(result: Result) -> tuple[Section, Section]:
    ratio_rows, time_rows = [], []
    for case in sharded_cases(result):
        bound, *times = (result.samples(name, **case) for name in ("bound", *_SHARDED))
        label = name_sharded(result, case)
        ratios = [_format_ratio(stats.ratio(each, bound)) if each and bound else "–" for each in times]
        ratio_rows.append([label, _time(bound), *ratios])
        time_rows.append([label, *map(_time_with_spread, (bound, *times))])
    names = [CONTESTANT_NAMES[name] for name in _SHARDED]
    header = ["", "computing, and waiting for the slowest rank", *(f"{name} takes" for name in names)]
    memory_rows = [[_in_words(where), *map(_gib, found.values())] for where, found in _memory_of(result).items()]
    memory = markdown_table(["all ranks together, Adam", "torch DDP on gloo", "lockstep, sharded"], memory_rows)
    times_table = markdown_table(["", CONTESTANT_NAMES["bound"], *names], time_rows)
    others = [
        f"{CONTESTANT_NAMES[each.contestant]}, {name_sharded(result, each.parameters)}: {each.facts['implementation']}"
        for each in result.series
        if each.facts.get("implementation", "fused") != "fused"
    ]
    caption = "Median, and 10th to 90th percentile of the samples. Optimizers are fused"
    caption += f", where there is a fused one ({'; '.join(others)})." if others else "."
    full = f"## Time per step\n\n{caption}\n\n{times_table}\n\n## Resident memory\n\n{memory}"
    return markdown_table(header, ratio_rows), full


def _memory_of(result: Result) -> dict[str, dict[str, float]]:
    found: Any = result.settings["resident_bytes"]
    return dict(found)


def _in_words(where: str) -> str:
    for model, words in (
        ("deep_50m", "50M parameters in 12 layers"),
        ("mlp_50m", "50M parameters"),
        ("mlp_10m", "10M parameters"),
    ):
        where = where.replace(model, words)
    return where


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def _sharded_verdicts(result: Result) -> list[Verdict]:
    found: list[Verdict] = []
    for case in sharded_cases(result):
        bound, own, gloo = (result.samples(name, **case) for name in ("bound", "sharded", "torch_ddp_gloo"))
        if not bound or not own or not gloo:
            continue
        label = name_sharded(result, case)
        times = stats.ratio(own, bound)
        found.append(Verdict(f"{label}: no longer than the bound", _format_ratio(times), times.value <= 1))
        share = stats.ratio(own, gloo)
        target = f"{label}: at most half of torch DDP on gloo"
        found.append(Verdict(target, _format_ratio(share), share.value <= _MOST_OF_GLOO))
    for where, memory in _memory_of(result).items():
        part = memory["sharded"] / memory["torch_ddp_gloo"]
        limit = _MOST_MEMORY[min(int(where.split()[0]), max(_MOST_MEMORY))]
        found.append(Verdict(f"{where}: at most {limit}x of torch DDP's memory", f"{part:.2f}x", part <= limit))
    return found


# ---------------------------------------------------------------- horovod

_HOROVOD = ("none", "lockstep_ddp", "horovod")


def _horovod_tables(result: Result) -> tuple[Section, Section]:
    rows = []
    for model in (str(value) for value in result.values("model")):
        times = [result.samples(name, model=model) for name in _HOROVOD]
        ratio = _format_ratio(stats.ratio(times[2], times[1])) if times[1] and times[2] else "–"
        rows.append([MODEL_NAMES.get(model, model), *map(_time_with_spread, times), ratio])
    header = ["model", *(CONTESTANT_NAMES[name] for name in _HOROVOD), "Horovod's optimizer / lockstep DDP"]
    return markdown_table(header, rows), ""


def _horovod_verdicts(result: Result) -> list[Verdict]:
    found: list[Verdict] = []
    for model in (str(value) for value in result.values("model")):
        ddp, own = (result.samples(name, model=model) for name in _HOROVOD[1:])
        if ddp and own:
            times = stats.ratio(own, ddp)
            target = f"{MODEL_NAMES.get(model, model)}: a Horovod step at most {HOROVOD_LIMIT}x one with lockstep DDP"
            found.append(Verdict(target, _format_ratio(times), times.value <= HOROVOD_LIMIT))
    return found


# ---------------------------------------------------------------- startup


def _startup_tables(result: Result) -> tuple[Section, Section]:
    """In summary the same script under both launchers; in full with `lockstep.init()` too."""
    rows = []
    for nproc in result.values("nproc"):
        peer = result.samples("torchrun", nproc=nproc)
        for name, label in LAUNCH_NAMES.items():
            samples = result.samples(name, nproc=nproc)
            rows.append([label, str(nproc), _time_with_spread(samples), _speedup(peer, samples, interval=True)])
    header = ["launched with", "ranks", "until the first all_reduce is done", "times as fast as torchrun"]
    same_script = [row for row in rows if row[0] != LAUNCH_NAMES["lockstep_run_init"]]
    return markdown_table(header, same_script), "## Every way to start\n\n" + markdown_table(header, rows)


def _startup_verdicts(result: Result) -> list[Verdict]:
    found: list[Verdict] = []
    for nproc in result.values("nproc"):
        peer, own = (result.samples(name, nproc=nproc) for name in ("torchrun", "lockstep_run"))
        if peer and own:
            target = f"{nproc} ranks: `lockstep run` at least 1.5x faster than torchrun, same script"
            found.append(_at_least(target, stats.ratio(peer, own), 1.5))
    return found


# ---------------------------------------------------------------- record

_RECORDS = ("no_record", "record", "record_launched")


def _record_tables(result: Result) -> tuple[Section, Section]:
    rows = []
    for world_size in result.values("world_size"):
        (size,) = result.values("bytes")
        floor, *others = (result.samples(name, world_size=world_size, bytes=size) for name in _RECORDS)
        costs = [_percent(stats.overhead(samples, floor)) if samples and floor else "–" for samples in others]
        times = [_time_with_spread(samples) for samples in (floor, *others)]
        rows.append(
            [
                f"{_ranks(result, int(world_size))}, {format_bytes(int(size))}",
                times[0],
                times[1],
                costs[0],
                times[2],
                costs[1],
            ]
        )
    names = [CONTESTANT_NAMES[name] for name in _RECORDS]
    return markdown_table(["all_reduce", names[0], names[1], "adds", names[2], "adds"], rows), ""


def _record_verdicts(result: Result) -> list[Verdict]:
    found: list[Verdict] = []
    for world_size in result.values("world_size"):
        (size,) = result.values("bytes")
        floor, *others = (result.samples(name, world_size=world_size, bytes=size) for name in _RECORDS)
        for name, samples in zip(_RECORDS[1:], others, strict=True):
            if floor and samples:
                cost = stats.overhead(samples, floor)
                target = f"{world_size} ranks, {format_bytes(int(size))}: {CONTESTANT_NAMES[name]} adds at most 5%"
                found.append(Verdict(target, _percent(cost), cost.value <= RECORD_LIMIT))
    return found


# ---------------------------------------------------------------- hosts


def _hosts_tables(result: Result) -> tuple[Section, Section]:
    """Tables of reductions and of steps, in times of the first contestant; in full of reductions over more hosts."""
    tables = []
    two_hosts = [one for one in result.series if "hosts" not in one.parameters]
    for title, names in (
        ("all_reduce", ("gloo", "lockstep_fp32", "lockstep_bf16", "lockstep_int8")),
        ("training step", ("torch_ddp_gloo", "torch_ddp_gloo_bf16", "lockstep_ddp_fp32", "lockstep_ddp_bf16")),
    ):
        rows = []
        found = {one.contestant: one for one in two_hosts if one.contestant in names}
        for name in names:
            if name in found and names[0] in found:
                own, first = found[name].samples_s, found[names[0]].samples_s
                rows.append([CONTESTANT_NAMES[name], _time_with_spread(own), _speedup(first, own, interval=True)])
        if rows:
            tables.append(markdown_table([f"{title}, {_describe(found[names[0]].parameters)}", "time", "ratio"], rows))
    rows, full = [], []
    for hosts, ranks in hosts_of(result):
        cells = []
        for rate in result.values("rate"):
            for size in result.values("bytes"):
                samples = hosts_samples(result, hosts, ranks, str(rate), int(size))
                if samples is None:
                    continue
                gloo, own = samples
                cells.append(f"{_time(own)}, {_speedup(gloo, own)}")
                times = [_time_with_spread(gloo), _time_with_spread(own), _speedup(gloo, own, interval=True)]
                full.append([f"{hosts} x {ranks}", _name_rate(rate), format_bytes(int(size)), *times])
        rows.append([f"{hosts} x {ranks}", *cells])
    if rows:
        header = [
            f"{_name_rate(rate)}, {format_bytes(int(size))}"
            for rate in result.values("rate")
            for size in result.values("bytes")
            if any(hosts_samples(result, *shape, str(rate), int(size)) for shape in hosts_of(result))
        ]
        on = f", all on {result.environment.cores} cores"
        tables.append(markdown_table([f"all_reduce, hosts x ranks on each{on}", *header], rows))
    names = [CONTESTANT_NAMES[name] for name in _CONTENDERS]
    full_table = markdown_table(["hosts x ranks", "rate", "bytes", *names, "gloo / lockstep"], full) if full else ""
    return "\n\n".join(tables), full_table


def _name_rate(rate: int | str) -> str:
    """The rate of a link for people: `1gbit` is tc's word."""
    return str(rate).replace("gbit", " Gbit/s")


def hosts_of(result: Result) -> list[tuple[int, int]]:
    """The numbers of hosts, and of ranks on each, over which tensors were reduced beside gloo; in order."""
    found = (one.parameters for one in result.series if "hosts" in one.parameters)
    return list(dict.fromkeys((int(one["hosts"]), int(one["ranks_per_host"])) for one in found))


def hosts_samples(
    result: Result, hosts: int, ranks: int, rate: str, size: int
) -> tuple[list[float], list[float]] | None:
    """The samples of gloo and of lockstep over so many hosts; None if there are none."""
    parameters: dict[str, int | str] = {"hosts": hosts, "ranks_per_host": ranks, "rate": rate, "bytes": size}
    gloo, own = (result.samples(name, **parameters) for name in _CONTENDERS)
    return None if gloo is None or own is None else (gloo, own)


def _hosts_verdicts(result: Result) -> list[Verdict]:
    samples = {one.contestant: one.samples_s for one in result.series if "hosts" not in one.parameters}
    found = [
        _at_least(
            f"{CONTESTANT_NAMES[name]}: at least {limit:g}x {CONTESTANT_NAMES[rival]}",
            stats.ratio(samples[rival], samples[name]),
            limit,
        )
        for name, rival, limit in HOSTS_TARGETS
        if name in samples and rival in samples
    ]
    for hosts, ranks in hosts_of(result):
        for rate in result.values("rate"):
            times = {}
            for size in result.values("bytes"):
                pair = hosts_samples(result, hosts, ranks, str(rate), int(size))
                if pair is not None:
                    times[format_bytes(int(size))] = stats.ratio(*pair)
            if times:
                worst = min(times, key=lambda size: times[size].value)
                shape = f"{hosts} hosts with {ranks} {'rank' if ranks == 1 else 'ranks'} each"
                target = f"{shape}, {_name_rate(rate)}: no slower than gloo at any size"
                found.append(_at_least(target, times[worst], 1, note=f" at {worst}"))
    return found


# ---------------------------------------------------------------- contention

_CONTENDERS = ("gloo", "lockstep")
_WAIT_NAMES = {"barrier": "`barrier`", "recv": "`recv`"}


def _contention_tables(result: Result) -> tuple[Section, Section]:
    """all_reduce by neighbours, and what waiting costs; the full table has the spread of both contestants."""
    counts = [int(value) for value in result.values("neighbours")]
    names = [f"{count or 'no'} busy {'process' if count == 1 else 'processes'}" for count in counts]
    rows, full = [], []
    for world_size, size in _contention_sizes(result):
        cells = []
        for count in counts:
            gloo, own = _contention_samples(result, world_size=world_size, bytes=size, neighbours=count)
            cells.append(f"{_time(own)}, {_speedup(gloo, own)}" if gloo and own else "–")
            if gloo and own:
                times = [_time_with_spread(gloo), _time_with_spread(own), _speedup(gloo, own, interval=True)]
                full.append([f"{_ranks(result, world_size)}, {format_bytes(size)}", str(count), *times])
        rows.append([f"{_ranks(result, world_size)}, {format_bytes(size)}", *cells])
    summary = markdown_table(["all_reduce beside", *names], rows)
    header = ["all_reduce", "busy processes", *(CONTESTANT_NAMES[name] for name in _CONTENDERS), "gloo / lockstep"]
    caption = "Median, and 10th to 90th percentile of the samples; float32, SUM, in place, 1 thread per rank."
    return (
        f"{summary}\n\n{_waits_table(result)}".rstrip(),
        f"## Time per call\n\n{caption}\n\n{markdown_table(header, full)}",
    )


def _contention_sizes(result: Result) -> list[tuple[int, int]]:
    pairs = (
        (one.parameters["world_size"], one.parameters["bytes"]) for one in result.series if "bytes" in one.parameters
    )
    return list(dict.fromkeys((int(world_size), int(size)) for world_size, size in pairs))


def _contention_samples(result: Result, **parameters: int | str) -> tuple[list[float] | None, list[float] | None]:
    return result.samples("gloo", **parameters), result.samples("lockstep", **parameters)


def _contention_waits(result: Result) -> list[tuple[int, str]]:
    pairs = (
        (one.parameters["world_size"], one.parameters["wait"]) for one in result.series if "wait" in one.parameters
    )
    return list(dict.fromkeys((int(world_size), str(wait)) for world_size, wait in pairs))


def _waits_table(result: Result) -> Section:
    rows = []
    for world_size, wait in _contention_waits(result):
        waiter, work = (
            _contention_samples(result, world_size=world_size, wait=wait, measure=what) for what in ("waiter", "work")
        )
        shares = [f"{stats.median(samples):.2%}" if samples else "–" for samples in waiter]
        rows.append([f"{_ranks(result, world_size - 1)} in {_WAIT_NAMES[wait]}", *shares, *map(_time, work)])
    if not rows:
        return ""
    work_s = result.settings.get("work_s")
    header = ["waiting ranks, beside one that works", *(f"{name}: of a core, each" for name in _CONTENDERS)]
    header += [f"{name}: {work_s:g} s of work takes" for name in _CONTENDERS]
    return markdown_table(header, rows)


def _contention_verdicts(result: Result) -> list[Verdict]:
    found: list[Verdict] = []
    for world_size in dict.fromkeys(world_size for world_size, _ in _contention_sizes(result)):
        ratios = {}
        for size in (size for ranks, size in _contention_sizes(result) if ranks == world_size):
            for count in (int(value) for value in result.values("neighbours")):
                gloo, own = _contention_samples(result, world_size=world_size, bytes=size, neighbours=count)
                if gloo and own:
                    ratios[f"{format_bytes(size)} beside {count}"] = stats.ratio(gloo, own)
        worst = min(ratios, key=lambda label: ratios[label].value)
        target = f"{_ranks(result, world_size)}: never slower than gloo, whatever runs beside it"
        found.append(_at_least(target, ratios[worst], 1, note=f" at {worst}"))
    for world_size, wait in _contention_waits(result):
        gloo, own = _contention_samples(result, world_size=world_size, wait=wait, measure="waiter")
        if gloo and own:
            share = stats.ratio(own, gloo)
            target = f"{_ranks(result, world_size - 1)} in {_WAIT_NAMES[wait]} take at most what gloo's take"
            found.append(Verdict(target, f"{_format_ratio(share)} of gloo's", share.value <= 1))
    return found


# ---------------------------------------------------------------- decode

_LOADERS = ("torch", "lockstep")


def _decode_tables(result: Result) -> tuple[Section, Section]:
    """Images per second of both loaders; the full table has the time of an epoch with its spread."""
    rates, times = [], []
    for pixels, workers in _decode_configurations(result):
        theirs, own = (result.samples(name, pixels=pixels, workers=workers) for name in _LOADERS)
        images = images_of_epoch(result, pixels)
        label = f"{pixels} pixels, {count_of_workers(workers)}"
        speeds = [f"{images / stats.median(samples):,.0f}" if samples else "–" for samples in (theirs, own)]
        ratio = _speedup(theirs, own, interval=True)
        rates.append([label, *speeds, ratio])
        times.append([label, str(images), _time_with_spread(theirs), _time_with_spread(own), ratio])
    names = [CONTESTANT_NAMES[name] for name in _LOADERS]
    summary = markdown_table(["JPEGs", *(f"{name}: images/s" for name in names), "ratio"], rates)
    caption = "Median, and 10th to 90th percentile of the samples."
    full = markdown_table(["JPEGs", "images", *names, "torch / lockstep"], times)
    return summary, f"## Time per epoch\n\n{caption}\n\n{full}"


def _decode_configurations(result: Result) -> list[tuple[int, int]]:
    pairs = ((int(one.parameters["pixels"]), int(one.parameters["workers"])) for one in result.series)
    return list(dict.fromkeys(pairs))


def images_of_epoch(result: Result, pixels: int) -> int:
    """How many JPEGs of that edge one sample of `decode` has read."""
    found = next(one.facts["images"] for one in result.series if one.parameters["pixels"] == pixels)
    assert isinstance(found, int | float)
    return int(found)


def count_of_workers(workers: int) -> str:
    """So many workers, in words."""
    return f"{workers} worker" if workers == 1 else f"{workers} workers"


def _decode_verdicts(result: Result) -> list[Verdict]:
    found: list[Verdict] = []
    for pixels, workers in _decode_configurations(result):
        theirs, own = (result.samples(name, pixels=pixels, workers=workers) for name in _LOADERS)
        if theirs and own:
            target = f"{pixels} pixels, {count_of_workers(workers)}: no slower than torch's loader"
            found.append(_at_least(target, stats.ratio(theirs, own), 1))
    return found


# ---------------------------------------------------------------- rows

DATA_NAMES = {
    "indexing": "Python class, `x[i], y[i]`",
    "drawing": "the same with noise from `torch.randn`",
    "tensors": "`TensorDataset`",
}


def rows_cases(result: Result) -> list[tuple[str, Sequence[float] | None, Sequence[float] | None]]:
    """Each data set and batch size in words, with the samples of torch's loader and of Lockstep's."""
    found = []
    for data, label in DATA_NAMES.items():
        for size in map(int, result.values("batch_size")):
            theirs, own = (result.samples(name, data=data, batch_size=size) for name in _LOADERS)
            found.append((f"{label}, batches of {size}", theirs, own))
    return found


def _rows_tables(result: Result) -> tuple[Section, Section]:
    rows = [
        [label, _time_with_spread(theirs), _time_with_spread(own), _speedup(own, theirs, interval=True)]
        for label, theirs, own in rows_cases(result)
    ]
    names = [CONTESTANT_NAMES[name] for name in _LOADERS]
    header = [f"an epoch of {result.settings['rows']:,} rows", *names, "lockstep / torch"]
    return markdown_table(header, rows), ""


def _rows_verdicts(result: Result) -> list[Verdict]:
    found: list[Verdict] = []
    for label, theirs, own in rows_cases(result):
        if theirs and own:
            ratio = stats.ratio(own, theirs)
            target = f"{label}: at most {ROWS_LIMIT} times torch's time"
            found.append(Verdict(target, _format_ratio(ratio), ratio.value <= ROWS_LIMIT))
    return found


# ---------------------------------------------------------------- epoch


def _epoch_tables(result: Result) -> tuple[Section, Section]:
    rows = []
    for workers in map(int, result.values("workers")):
        theirs, own = (result.samples(name, workers=workers) for name in _LOADERS)
        ratio = _speedup(theirs, own, interval=True)
        rows.append([count_of_workers(workers), _time_with_spread(theirs), _time_with_spread(own), ratio])
    images = f"{result.settings['images']} JPEGs"
    header = [f"an epoch of {images}, for each rank", "torch's loader and DDP on gloo", "lockstep", "ratio"]
    return markdown_table(header, rows), ""


def _epoch_verdicts(result: Result) -> list[Verdict]:
    found: list[Verdict] = []
    for workers in map(int, result.values("workers")):
        theirs, own = (result.samples(name, workers=workers) for name in _LOADERS)
        if theirs and own:
            target = f"{count_of_workers(workers)} for each rank: an epoch takes no longer than torch's"
            found.append(_at_least(target, stats.ratio(theirs, own), 1))
    return found


# ---------------------------------------------------------------- listing

LISTERS = {
    "every_rank": CONTESTANT_NAMES["every_rank"],
    "lockstep": "lockstep, first run",
    "lockstep_again": CONTESTANT_NAMES["lockstep_again"],
}


def _listing_tables(result: Result) -> tuple[Section, Section]:
    peer = result.samples("every_rank")
    rows = []
    for name, label in LISTERS.items():
        samples = result.samples(name)
        rows.append([label, _time_with_spread(samples), _speedup(peer, samples, interval=True)])
    images, classes = (f"{result.settings[key]:,}" for key in ("images", "classes"))
    header = [f"{images} images in {classes} folders", "time", "times as fast as walking"]
    return markdown_table(header, rows), ""


def _listing_verdicts(result: Result) -> list[Verdict]:
    peer, own = (result.samples(name) for name in ("every_rank", "lockstep"))
    if not peer or not own:
        return []
    return [_at_least("the first run lists no slower than ranks that walk for themselves", stats.ratio(peer, own), 1)]


_TABLES: dict[str, Callable[[Result], tuple[Section, Section]]] = {
    "all_reduce": _all_reduce_tables,
    "train_step": _train_step_tables,
    "threads": _threads_tables,
    "sharded": _sharded_tables,
    "horovod": _horovod_tables,
    "startup": _startup_tables,
    "record": _record_tables,
    "hosts": _hosts_tables,
    "contention": _contention_tables,
    "decode": _decode_tables,
    "rows": _rows_tables,
    "epoch": _epoch_tables,
    "listing": _listing_tables,
}
_VERDICTS: dict[str, Callable[[Result], list[Verdict]]] = {
    "all_reduce": _all_reduce_verdicts,
    "train_step": _train_step_verdicts,
    "threads": _threads_verdicts,
    "sharded": _sharded_verdicts,
    "horovod": _horovod_verdicts,
    "startup": _startup_verdicts,
    "record": _record_verdicts,
    "hosts": _hosts_verdicts,
    "contention": _contention_verdicts,
    "decode": _decode_verdicts,
    "rows": _rows_verdicts,
    "epoch": _epoch_verdicts,
    "listing": _listing_verdicts,
}

# ---------------------------------------------------------------- formatting


def _format_ratio(estimate: Estimate, note: str = "") -> str:
    value, low, high = (three_digits(number) for number in (estimate.value, estimate.low, estimate.high))
    return f"{value}x{note} [{low}–{high}]"


def _percent(estimate: Estimate) -> str:
    return f"{estimate.value:.1%} [{estimate.low:.1%} – {estimate.high:.1%}]"


def _at_least(target: str, estimate: Estimate, limit: float, note: str = "") -> Verdict:
    return Verdict(target, _format_ratio(estimate, note), estimate.value >= limit)


def _time(samples: Sequence[float] | None) -> str:
    return format_seconds(stats.median(samples)) if samples else "–"


def _time_with_spread(samples: Sequence[float] | None) -> str:
    if not samples:
        return "–"
    low, high = stats.percentiles(samples)
    return f"{_time(samples)} ({format_seconds(low)} – {format_seconds(high)})"


def _speedup(slow: Sequence[float] | None, fast: Sequence[float] | None, *, interval: bool = False) -> str:
    if not slow or not fast:
        return "–"
    estimate = stats.ratio(slow, fast)
    return _format_ratio(estimate) if interval else f"{three_digits(estimate.value)}x"


def _ranks(result: Result, count: int) -> str:
    """So many ranks, with the number of cores where it is smaller: they then wait for each other's turn."""
    cores = result.environment.cores
    return f"{count} ranks" + (f" on {cores} {'core' if cores == 1 else 'cores'}" if count > cores else "")


def _describe(parameters: dict[str, int | str]) -> str:
    return ", ".join(
        f"{name} {format_bytes(int(value)) if name == 'bytes' else value}" for name, value in parameters.items()
    )
