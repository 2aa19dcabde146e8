"""What the rehearsal makes of what it saw, and of the words it was given: without any process."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import LaunchError
from lockstep.tools.rehearse.findings import KINDS, Finding, judge
from lockstep.tools.rehearse.line import Site
from lockstep.tools.rehearse.plan import read_script
from lockstep.tools.rehearse.record import Event, Job, Process, read_records
from lockstep.tools.rehearse.report import format_json, format_text
from lockstep.tools.rehearse.settings import Settings, parse_memory

SITE = Site("/somewhere/train.py", 7, "main")
LINES = [[SITE.file, SITE.line, SITE.function], [SITE.file, 9, "main"]]


def rank(number: int, *events: Event, finished: bool = True, world_size: int = 2) -> Process:
    return Process(number, world_size, True, finished, 100 + number, events)


def job(*processes: Process) -> Job:
    return Job(processes, Settings(devices=2, processes_per_node=2))


def sequence(*calls: tuple[int, int]) -> Event:
    data = {"group": "the default group", "ranks": [0, 1], "calls": calls, "texts": ["barrier()"], "lines": LINES}
    return Event("sequence", (), data)


def reduced(*means: list[Any], instances: int = 3, reads: int = 3, root: int | None = None) -> Event:
    return Event("reduced", (SITE,), {"instances": instances, "reads": reads, "root": root, "means": means})


def ids(*processes: Process) -> list[str]:
    return [finding.id for finding in judge(job(*processes))]


def test_a_rank_that_failed_by_itself_is_not_one_that_went_another_way() -> None:
    both, one = sequence((0, 0), (0, 1)), sequence((0, 0))
    assert ids(rank(0, both, finished=False), rank(1, one)) == ["branch-dependent-collective"]
    assert ids(rank(0, both, finished=False), rank(1, one, finished=False)) == []
    assert ids(rank(0, both), rank(1, both)) == []


def test_ranks_are_compared_with_those_they_were_started_with() -> None:
    def family(name: str, *calls: tuple[int, int]) -> list[Process]:
        return [replace(rank(number, sequence(*calls)), family=name) for number in range(2)]

    first, second = family("1", (0, 0)), family("2", (0, 1), (0, 1))
    assert judge(job(first[0], second[0], second[1], first[1])) == []
    assert [one.id for one in judge(job(first[0], replace(second[1], family="1")))] == ["branch-dependent-collective"]


def test_the_same_collective_from_two_lines_is_right() -> None:
    assert ids(rank(0, sequence((0, 0))), rank(1, sequence((0, 1)))) == []


def test_means_are_compared_call_by_call() -> None:
    # Rank 1 did not divide the first one (its value was 0, say): its second is compared with the other's second.
    full, rest = [0, 4, 4, False], [1, 1, 5, False]
    assert ids(rank(0, reduced(full, rest)), rank(1, reduced(rest))) == []
    assert ids(rank(0, reduced(full, rest)), rank(1, reduced(full, [1, 2, 6, False]))) == ["mean-of-unequal-means"]
    # After the pass what counts is the pass; outside of one, nothing is known.
    ended = [0, 1, 9, True]
    assert ids(rank(0, reduced(ended)), rank(1, reduced([0, 4, 9, True]))) == []
    assert ids(rank(0, reduced([0, -1, -1, False])), rank(1, reduced(ended))) == []


def test_a_value_that_its_root_reads_is_used() -> None:
    on_root, elsewhere = reduced(root=0), reduced(root=0, reads=0)
    assert ids(rank(0, on_root), rank(1, elsewhere)) == []
    assert ids(rank(0, elsewhere), rank(1, elsewhere)) == ["reduced-value-unused"]
    once = reduced(instances=1, reads=0)
    assert ids(rank(0, once), rank(1, once)) == []  # perhaps the script was about to


def test_a_scheduler_steps_as_often_as_it_likes_unless_it_is_once_for_each_rank() -> None:
    def seen(*gaps: int) -> list[str]:
        event = Event("scheduler", (SITE,), {"gaps": list(gaps), "rest": 0})
        return ids(rank(0, event), rank(1, event))

    assert seen(2, 2) == ["scheduler-steps-per-rank"]
    assert seen(2) == seen(1, 1, 1) == seen(1, 2, 2) == seen(3, 3) == []


def test_one_writer_per_node_is_right_and_two_are_not() -> None:
    save = Event("save", (SITE,), {"path": "/disk/state.pt", "prefixed": 0, "example": ""})
    ranks = [rank(number, *([save] if number in (0, 2) else []), world_size=4) for number in range(4)]
    assert judge(Job(tuple(ranks), Settings(devices=2, nodes=2, processes_per_node=2))) == []
    (found,) = judge(Job(tuple(ranks), Settings(devices=4, processes_per_node=4)))
    assert (found.id, found.ranks) == ("checkpoint-by-every-rank", (0, 2))


def test_what_is_seen_by_all_ranks_is_said_once() -> None:
    event = Event("load", (SITE,), {"has_map_location": True, "has_weights_only": False, "foreign": [], "own": 0})
    assert ids(rank(0, event), rank(1, event, event)) == ["load-without-weights-only"]


@pytest.mark.parametrize(
    ("text", "size"), [("8GiB", 8 * 2**30), ("512 MB", 512 * 10**6), ("100", 100), ("1.5kib", 1536), ("2b", 2)]
)
def test_sizes_of_memory(text: str, size: int) -> None:
    assert parse_memory(text) == size


@pytest.mark.parametrize("text", ["", "much", "0", "-1GiB", "8 GB each"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(LaunchError, match="memory is"):
        parse_memory(text)


def test_how_a_script_wants_to_be_started(tmp_path: Path) -> None:
    def read(text: str) -> Any:
        script = tmp_path / "script.py"
        script.write_text(text)
        return read_script(str(script))

    assert read("import torch.multiprocessing as mp\nmp.spawn(f, nprocs=2)").is_one_process
    assert read("from torch.multiprocessing import spawn\nspawn(f, nprocs=2)").is_one_process
    assert read("import torch.nn as nn\nmodel = nn.DataParallel(net)").is_one_process
    joined = "import torch\ntorch.distributed.init_process_group('nccl')\ntorch.nn.DataParallel(net)"
    assert not read(joined).is_one_process
    assert not read("import os\nos.spawn('x')").is_one_process
    assert read("parser.add_argument('--local_rank', type=int)").declares_local_rank
    assert read("import os\nos.environ['SLURM_PROCID']").reads_slurm
    assert read("import horovod.torch as hvd").uses_horovod
    assert read("this is no Python") == read("")


def test_a_damaged_record_is_named_and_the_rest_counts(tmp_path: Path) -> None:
    content = {"rank": 1, "world_size": 2, "joined": True, "finished": True, "pid": 5, "family": ""}
    event = {"kind": "clip", "sites": LINES[:1], "data": {"count": 3}}
    (tmp_path / "rehearsal-5-0.json").write_text(json.dumps({**content, "events": [event]}))
    (tmp_path / "rehearsal-6-0.json").write_text("{")
    read = read_records(tmp_path, Settings(devices=1))
    assert [process.rank for process in read.processes] == [1]
    assert [finding.id for finding in judge(read)] == ["clip-before-unscale"]
    assert "rehearsal-6-0.json" in format_text("train.py", [], read, 0)


def test_reports_say_where_what_why_and_how() -> None:
    finding = Finding("clip-before-unscale", (SITE, Site(SITE.file, 20, "loop")), "gradients were clipped", (1,))
    text = format_text("train.py", [finding], job(rank(0), rank(1)), 0)
    kind = KINDS[finding.id]
    flat = " ".join(text.split())
    for part in (f"{SITE.file}:7: {kind.title} [{kind.id}]", "gradients were clipped.", kind.why, kind.fix, ":20"):
        assert part in flat
    assert max(map(len, text.splitlines())) <= 100
    report = json.loads(format_json("train.py", [finding], job(rank(0), rank(1)), 3))
    (only,) = report["findings"]
    assert (report["version"], report["exit_code"], report["ranks"]) == (1, 3, 2)
    assert (only["file"], only["line"], only["called_from"][0]["line"], only["ranks"]) == (SITE.file, 7, 20, [1])
    assert "nothing found in train.py on 2 ranks before it failed" in format_text("train.py", [], job(rank(0)), 1)


def losses(count: int, *found: tuple[int, str, float | None]) -> Event:
    return Event("loss", (SITE,), {"count": count, "found": found})


def test_losses_are_compared_backward_by_backward() -> None:
    five, six = losses(2, (1, "a sum divided by 5", 5.0)), losses(2, (1, "a sum divided by 6", 6.0))
    assert ids(rank(0, five), rank(1, six)) == ["loss-over-other-counts"]
    assert ids(rank(0, five), rank(1, losses(2))) == ["loss-over-other-counts"]
    assert ids(rank(0, five), rank(1, losses(2, (1, "a sum divided by 5", 5.0 + 1e-9)))) == []
    # Another backward, one that a rank has not come to, and another kind of loss.
    assert ids(rank(0, five), rank(1, losses(1))) == []
    summed = losses(2, (1, "a sum", None))
    assert ids(rank(0, summed), rank(1, five)) == ids(rank(0, summed), rank(1, losses(2))) == []
    assert ids(rank(0, summed), rank(1, summed)) == ["loss-over-other-counts"]
