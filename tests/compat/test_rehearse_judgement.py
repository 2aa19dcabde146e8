"""What the rehearsal makes of what it saw, and of the words it was given: without any process."""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.errors import LaunchError
from lockstep.tools.rehearse import source
from lockstep.tools.rehearse.events import Process, RehearsedJob, TraceEvent, read_records
from lockstep.tools.rehearse.findings import KINDS, Finding, judge
from lockstep.tools.rehearse.line import Site
from lockstep.tools.rehearse.plan import read_script
from lockstep.tools.rehearse.report import format_json, format_text
from lockstep.tools.rehearse.settings import RehearsalSettings, parse_memory
from lockstep.tools.rehearse.watch.contents import Contents

SITE = Site("/somewhere/train.py", 7, "main")
NONE: dict[str, Any] = {"foreign": [], "own": 0}
LINES = [[SITE.file, SITE.line, SITE.function], [SITE.file, 9, "main"]]


def rank(number: int, *events: TraceEvent, finished: bool = True, world_size: int = 2) -> Process:
    return Process(number, world_size, True, finished, 100 + number, events)


def job(*processes: Process) -> RehearsedJob:
    return RehearsedJob(processes, RehearsalSettings(devices=2, processes_per_node=2))


def sequence(*calls: tuple[int, int]) -> TraceEvent:
    data = {"group": "the default group", "ranks": [0, 1], "calls": calls, "texts": ["barrier()"], "lines": LINES}
    return TraceEvent("sequence", (), data)


def reduced(*means: list[Any], instances: int = 3, reads: int = 3, root: int | None = None) -> TraceEvent:
    return TraceEvent(
        "reduced", (SITE,), {"instances": instances, "reads": reads, "root": root, "means": means, "divided_at": []}
    )


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
    # Nobody knows how many samples are in a batch of a data set that stops when it likes.
    assert ids(rank(0, reduced([0, 0, 0, False])), rank(1, reduced(full))) == []


def test_a_value_that_its_root_reads_is_used() -> None:
    on_root, elsewhere = reduced(root=0), reduced(root=0, reads=0)
    assert ids(rank(0, on_root), rank(1, elsewhere)) == []
    assert ids(rank(0, elsewhere), rank(1, elsewhere)) == ["reduced-value-unused"]
    assert ids(rank(0, elsewhere, finished=False), rank(1, elsewhere)) == []  # it failed before it could look
    once = reduced(instances=1, reads=0)
    assert ids(rank(0, once), rank(1, once)) == []  # perhaps the script was about to


def test_a_scheduler_steps_as_often_as_it_likes_unless_it_is_once_for_each_rank() -> None:
    def seen(*gaps: int) -> list[str]:
        event = TraceEvent("scheduler", (SITE,), {"gaps": list(gaps), "rest": 0})
        return ids(rank(0, event), rank(1, event))

    assert seen(2, 2) == ["scheduler-steps-per-rank"]
    assert seen(2) == seen(1, 1, 1) == seen(1, 2, 2) == seen(3, 3) == []


def save(path: str = "/home/me/state.pt", *, is_local: bool = False) -> TraceEvent:
    return TraceEvent("save", (SITE,), {"path": path, "is_local": is_local, "prefixed": 0, "example": ""})


def on_two_nodes(*processes: Process, per_node: int = 2) -> RehearsedJob:
    return RehearsedJob(processes, RehearsalSettings(devices=2, nodes=2, processes_per_node=per_node))


def test_one_writer_per_node_is_right_on_disks_of_their_own() -> None:
    def writers(event: TraceEvent) -> list[Process]:
        return [rank(number, *([event] if number in (0, 2) else []), world_size=4) for number in range(4)]

    assert judge(on_two_nodes(*writers(save("/tmp/state.pt", is_local=True)))) == []
    (shared,) = judge(on_two_nodes(*writers(save())))
    assert (shared.id, shared.ranks) == ("checkpoint-by-every-node", (0, 2))
    (found,) = judge(RehearsedJob(tuple(writers(save())), RehearsalSettings(devices=4, processes_per_node=4)))
    assert (found.id, found.ranks) == ("checkpoint-by-every-rank", (0, 2))


def test_ranks_that_two_nodes_spawned_for_one_group_are_one_job() -> None:
    def spawned(family: str, number: int, world_size: int, *events: TraceEvent, starter: int = 8) -> Process:
        return replace(rank(number, *events, world_size=world_size), family=family, starter=starter)

    def found(*processes: Process) -> list[str]:
        return [one.id for one in judge(on_two_nodes(*processes, per_node=1))]

    # A group over both nodes: one of its ranks saves, or one of each node.
    others = [spawned("8-1", 1, 4), spawned("8-1", 3, 4, starter=9)]
    third = spawned("8-1", 2, 4, starter=9)
    assert found(spawned("8-1", 0, 4, save()), third, *others) == []
    saving = replace(third, events=(save(),))
    assert found(spawned("8-1", 0, 4, save()), saving, *others) == ["checkpoint-by-every-node"]
    # A group on each node, at the same time; and two, one after the other, of one parent.
    second = [spawned("8-1", 1, 2), spawned("9-1", 1, 2, starter=9)]
    other = spawned("9-1", 0, 2, save(), starter=9)
    assert found(spawned("8-1", 0, 2, save()), other, *second) == ["checkpoint-by-copies"]
    again = [spawned("8-1", 1, 2), spawned("8-2", 1, 2)]
    assert found(spawned("8-1", 0, 2, save()), spawned("8-2", 0, 2, save()), *again) == []


def alone(number: int, *events: TraceEvent) -> Process:
    """A process in no group."""
    return Process(number, 1, False, True, 100 + number, events)


def test_processes_that_train_for_themselves_without_knowing_of_each_other() -> None:
    trained = TraceEvent("optimizer", (SITE,), {"lr": 0.1, "first_lr": 0.1, "steps": 3, "device": 0})
    asked = TraceEvent("variable", (SITE,), {"name": "RANK", "value": "1", "asks": True})
    by_torch = replace(asked, data={**asked.data, "asks": False})
    mpi = TraceEvent("peers", (), {"modules": ["mpi4py"]})
    assert ids(alone(0, trained), alone(1, trained)) == ["never-joined"]
    assert ids(alone(0, trained), alone(1, trained, by_torch)) == ["never-joined"]
    assert ids(alone(0, trained), alone(1, trained, asked)) == []
    assert ids(alone(0, trained), alone(1, trained, mpi)) == []
    assert ids(alone(0, trained), alone(1)) == []  # one trains, and the other does something else
    assert judge(RehearsedJob((alone(0, trained),), RehearsalSettings(devices=2, processes_per_node=1))) == []
    nothing = format_text("train.py", [], job(alone(0), alone(1)), 0)
    assert nothing == "lockstep rehearse: nothing found in train.py in 2 processes that joined no group\n"
    for came_to_nothing in (job(alone(0), alone(1)), job(alone(0)), None):
        said = format_text("train.py", [], came_to_nothing, 130)
        assert said.startswith(
            "lockstep rehearse: no report on train.py: it ended with exit code 130 before joining a group\n"
        )


def test_ranks_that_were_killed_in_a_group_are_known_to_have_joined_one() -> None:
    killed = replace(job(), settings=RehearsalSettings(devices=2, processes_per_node=2), joined=(0, 1))
    said = format_text("train.py", [], killed, 1).splitlines()
    assert said[0] == "lockstep rehearse: nothing found in train.py on 2 ranks before it failed"
    assert said[2].startswith("lockstep rehearse: ranks 0, 1 left no record")


def test_a_process_that_a_rank_has_started_writes_for_that_rank() -> None:
    # As those do that save in the background, one after the other.
    assert ids(alone(0, save()), replace(alone(0, save()), pid=500), alone(1)) == []
    assert ids(alone(0, save()), alone(1, save())) == ["checkpoint-by-copies"]


def test_a_line_is_said_for_each_path_to_it_where_the_caller_is_to_blame() -> None:
    def unused(line: int) -> TraceEvent:
        data = {"instances": 3, "reads": 0, "root": None, "means": [], "divided_at": []}
        return TraceEvent("reduced", (SITE, Site(SITE.file, line, "validate")), data)

    found = judge(job(rank(0, unused(20), unused(30)), rank(1, unused(20), unused(30))))
    assert [one.sites[1].line for one in found] == [20, 30]
    text = format_text("train.py", found, job(rank(0), rank(1)), 0)
    assert (text.count(KINDS[found[0].id].title), text.count("from ")) == (1, 2)
    assert f"{SITE.file}:20" in text
    assert f"{SITE.file}:30" in text
    # A load is wrong by itself, whoever comes to it.
    loads = [
        TraceEvent(
            "load", (SITE, Site(SITE.file, line, "f")), {"has_map_location": True, "has_weights_only": False, **NONE}
        )
        for line in (20, 30)
    ]
    assert ids(rank(0, *loads), rank(1)) == ["load-without-weights-only"]


def test_the_option_for_a_local_rank_is_found_where_nothing_else_says_it(tmp_path: Path) -> None:
    script = tmp_path / "train.py"

    def found(text: str, *events: TraceEvent, option: str = "--local_rank") -> list[str]:
        script.write_text(text)
        declared = TraceEvent("option", (Site(str(script), 1, "main"),), {"name": "--local_rank"})
        settings = RehearsalSettings(devices=2, processes_per_node=2, local_rank_option=option)
        return [one.id for one in judge(RehearsedJob((rank(0, declared, *events), rank(1)), settings))]

    source.parse.cache_clear()
    assert found("torch.cuda.set_device(args.local_rank)\n") == ["local-rank-option"]
    assert found("torch.cuda.set_device(args.local_rank)\n", option="") == []
    for name in ("LOCAL_RANK", "SLURM_LOCALID"):
        asked = TraceEvent("variable", (SITE,), {"name": name, "value": "1", "asks": True})
        assert found("torch.cuda.set_device(args.local_rank)\n", asked) == []
    source.parse.cache_clear()
    assert found("torch.cuda.set_device(rank % torch.cuda.device_count())\n") == []


def test_a_parameter_is_what_the_calls_pass(tmp_path: Path) -> None:
    script = tmp_path / "train.py"

    def passed(calls: str, name: str = "parts") -> list[str | None]:
        script.write_text(f"def average(value, parts): ...\nclass A:\n    def f(self, own): ...\n{calls}\n")
        source.parse.cache_clear()
        return [None if each is None else ast.unparse(each) for each in source.assigned_values(str(script), name)]

    assert passed("average(loss, gpus)\naverage(loss, parts=n)") == ["gpus", "n"]
    assert passed("a.f(1)", "own") == ["1"]
    assert passed("A.f(a, 1)\nspawn(average)") == [None]  # called by others, with what they like
    assert passed("average(*both)\naverage(loss)") == [None, None]


def evaluation(content: str, samples: int = 8, **changes: Any) -> TraceEvent:
    data = {"finished": True, "trained": 0, "backwards": 0, "content": content, "samples": samples, "number": 0}
    sampler = {"has_sampler": False, "loader": LINES[:1], "sampler": [], "padding": 0, "shuffles": False}
    return TraceEvent("pass", (SITE,), {**data, **sampler, **changes})


def test_evaluation_is_shared_unless_all_ranks_see_the_same_samples() -> None:
    same = evaluation("abc")
    assert ids(rank(0, same), rank(1, same)) == ["evaluation-on-every-rank"]
    assert ids(rank(0, same), rank(1, evaluation("abd"))) == []
    assert ids(rank(0, same), rank(1)) == []  # one rank evaluates for all
    unknown, trained = evaluation(""), evaluation("abc", backwards=1)
    cut = evaluation("abc", finished=False)
    for event in (unknown, trained, cut):
        assert ids(rank(0, event), rank(1, event)) == []


def test_samples_are_told_apart_in_any_order() -> None:
    def content(*batches: list[torch.Tensor]) -> str:
        contents = Contents()
        for batch in batches:
            contents.add(batch, batch[0].size(0))
        return contents.text()

    inputs, labels = torch.randn(6, 3, 40), torch.arange(6)
    whole = content([inputs, labels])
    assert whole
    order = torch.tensor([3, 1, 0, 5, 4, 2])
    assert content([inputs[order[:4]], labels[order[:4]]], [inputs[order[4:]], labels[order[4:]]]) == whole
    assert content([inputs, labels.flip(0)]) != whole
    assert content([inputs[:5], labels[:5]]) != whole
    assert content([inputs.to(torch.bfloat16), labels]) not in ("", whole)
    # Nothing can be told of samples that are all alike, nor of what is no tensor.
    assert content([torch.zeros(4, 2)], [torch.zeros(2, 2)]) == content() == ""
    nothing = Contents()
    nothing.add(["a", "b"], 2)
    assert nothing.text() == ""


def test_numbers_that_are_computed_with_are_no_local_ranks(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    first = 'local_rank = int(os.environ["SLURM_PROCID"])'

    def found(use: str, *processes: Process, per_node: int = 2) -> list[str]:
        script.write_text(f"{first}\n{use}\n")
        source.parse.cache_clear()
        asked = TraceEvent(
            "variable", (Site(str(script), 1, "main"),), {"name": "SLURM_PROCID", "value": "1", "asks": True}
        )
        settings = RehearsalSettings(devices=2, nodes=2, processes_per_node=per_node)
        return [one.id for one in judge(RehearsedJob((rank(0, asked), *processes), settings))]

    wrong = ["local-rank-from-global-rank"]
    assert found("torch.cuda.set_device(local_rank)") == wrong
    assert found('print("rank %d" % local_rank)') == wrong
    assert found("rank = local_rank * gpus + gpu") == []
    assert found("torch.cuda.set_device(local_rank % torch.cuda.device_count())") == []
    assert found("args.rank = args.local_rank * args.gpus + gpu") == []
    # One process of each node starts the ranks: the number is that of the node.
    spawns = TraceEvent("spawn", (SITE,), {"nprocs": 2})
    script.write_text(f"{first}\nprint(local_rank)\n")
    source.parse.cache_clear()
    asked = TraceEvent(
        "variable", (Site(str(script), 1, "main"),), {"name": "SLURM_PROCID", "value": "1", "asks": True}
    )
    assert judge(on_two_nodes(rank(0, asked, spawns), rank(1), per_node=1)) == []


def test_what_is_seen_by_all_ranks_is_said_once() -> None:
    event = TraceEvent("load", (SITE,), {"has_map_location": True, "has_weights_only": False, "foreign": [], "own": 0})
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
        script = tmp_path / f"script{hash(text)}.py"  # what a process has read of a file it knows
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
    content = {"rank": 1, "world_size": 2, "joined": True, "finished": True, "pid": 5}
    content |= {"family": "", "starter": 0}
    event = {"kind": "clip", "sites": LINES[:1], "data": {"count": 3}}
    (tmp_path / "rehearsal-5-0.json").write_text(json.dumps({**content, "events": [event]}))
    (tmp_path / "rehearsal-6-0.json").write_text("{")
    read = read_records(tmp_path, RehearsalSettings(devices=1))
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
