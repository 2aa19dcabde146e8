"""Each mistake of `mistakes.py` is named with its stage and its cause, and the script without one is left in peace."""

from __future__ import annotations

import re
import tracemalloc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from another_answers import ANOTHER_ANSWERS
from lockstep.tools.verify import session
from lockstep.tools.verify.aftermath import judge_aftermath
from lockstep.tools.verify.report import format_text
from lockstep.tools.verify.rows import is_time_first, row_sketch, sample_keys
from lockstep.tools.verify.settings import Verification
from lockstep.tools.verify.step import Runs
from lockstep.tools.verify.verdict import Verdict
from lockstep.tools.verify.verification import verify
from lockstep.tools.verify.words import Difference
from met_beside import WRONG as BESIDE
from met_projects import WRONG as OF_PROJECTS
from met_wrong import WRONG

SCRIPT = str(Path(__file__).with_name("mistakes.py"))
CAUSES = {
    "no_sampler": ("samples", "no-sampler"),
    "own_part": ("samples", "order"),
    "set_epoch": ("samples", "set-epoch"),
    "padded": ("samples", "padded"),
    "augmentation": ("samples", "drawn"),
    "normalised_inputs": ("inputs", "batch"),
    "batch_norm": ("outputs", "batch-norm"),
    "mixed_inside": ("outputs", "batch"),
    "mask": ("loss", "count"),
    "class_weights": ("loss", "count"),
    "ignore_index": ("loss", "count"),
    "contrast": ("loss", "not-linear"),
    "root": ("loss", "function-of-mean"),
    "maximum": ("loss", "extreme"),
    "closure": ("loss", "closure"),
    "threshold": ("loss", "threshold"),
    "root_in_closure": ("loss", "function-of-mean"),
    "weight_by_epoch": ("loss", "kept-state"),
    "divided_by_itself": ("gradients", "not-linear"),
    "passes": ("loss", "passes"),
    "sum": ("gradients", "sum"),
    "inner": ("gradients", "inner-model"),
    "unwrapped": ("gradients", "unwrapped"),
    "criterion": ("gradients", "unwrapped"),
    "twin": ("gradients", "unwrapped"),
    "past_engine": ("gradients", "past-engine"),
    "never_averaged": ("gradients", "not-averaged"),
    "compressed": ("gradients", "before-averaging"),
    "whole": ("gradients", "whole-batch"),
    "lr": ("parameters", "settings"),
    "plateau": ("parameters", "settings"),
    "noise": ("parameters", "ranks-differ"),
    "own_rate": ("parameters", "optimizer"),
    "sharpness": ("parameters", "moved"),
    "buffers": ("buffers", "buffers"),
    "queue_of_rank": ("buffers", "buffers"),
    "rounded": ("gradients", "sum"),
    "nodes": ("loss", "count"),
    "hook": ("gradients", "before-averaging"),
    "noisy_gradients": ("gradients", "changed"),
    "twice": ("gradients", "past-engine"),
    "flips": ("inputs", "drawn"),
    "coin": ("loss", "drawn"),
    "skips": ("samples", "skips"),
    "constant_size": ("steps", "fails"),
    "stops": ("steps", "number-of-steps"),
    "padded_evaluation": ("evaluated", "padded-evaluation"),
    "mean_of_means": ("evaluated", "metric"),
    "mean_over_ranks": ("evaluated", "metric"),
    "summed_metric": ("evaluated", "metric"),
    "clipped_by_norm": ("gradients", "before-averaging"),
    "added_up": ("gradients", "factor"),
    "uneven": ("gradients", "uneven"),
    "own_seeds": ("samples", "order"),
    "all_save": ("saved", "all-ranks-save"),
}
# Of every stage some are seen at 3 ranks.
AT_THREE = {
    "own_seeds",
    "augmentation",
    "padded",
    "mixed_inside",
    "mask",
    "root",
    "sum",
    "criterion",
    "never_averaged",
    "clipped_by_norm",
    "uneven",
    "lr",
    "buffers",
    "skips",
    "padded_evaluation",
    "mean_over_ranks",
    "all_save",
}
# What has no mistake, and what is said of it.
RIGHT = {
    "per_rank_batch": "the answer of one process in",
    "batch_sampler": "the answer of one process in 24 steps",
    "sharded_state": "the answer of one process in 24 steps",
    "own_order": "it was given theirs",
    "queue": "the answer of one process in 12 steps",
    "episodes": "one process was given the ranks' batches",
    "pieces": "cuts its batches into pieces",
    "logs": "note: logged",
    "resumes": "note: files: yours are unchanged; the runs wrote",
    "one_epoch": "epochs: one was seen",
}
# Of what nobody can tell, and why.
UNKNOWN = {
    "own_data": "there is no loader, and each rank creates its own samples",
    "own_rollouts": "each rank creates its own dataset",
    "undetermined": "two runs on one process already differ",
}
# Stage, cause and what is said, from the table of docs/verify.md, where … stands for what is measured.
ROWS = re.findall(
    r"^\| `([a-z]+)` \| `([a-z-]+)` \| (.+) \|$", Path(__file__).parents[2].joinpath("docs/verify.md").read_text(), re.M
)
CORE = {"sum", "mask", "no_sampler", "inner"}


def verdict_on(kind: str, folder: Path) -> tuple[Verdict, str]:
    nproc = (3,) if kind in AT_THREE else (2,)
    (verdict,) = verify(Verification(SCRIPT, (kind, str(folder)), nproc, steps=3))
    return verdict, format_text(kind, [verdict])


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.core if kind in CORE else ()) for kind in CAUSES]
)
def test_mistake_is_named(kind: str, tmp_path: Path) -> None:
    verdict, text = verdict_on(kind, tmp_path)
    assert verdict.code == 1, text
    first = verdict.differences[0]
    assert (first.stage, first.cause) == CAUSES[kind], text
    assert first.measured in " ".join(text.split()), "the report has the measurement"
    assert is_documented(first), f"docs/verify.md says something else of {first.cause}: {first.meaning}"


def is_documented(found: Difference) -> bool:
    for _, cause, words in ROWS:
        if cause == found.cause and re.search(".*".join(map(re.escape, re.split(" ?… ?", words))), found.meaning):
            return True
    return False


def test_documented_causes_are_those_that_tests_run() -> None:
    others = {(stage, cause) for _, stage, cause in ANOTHER_ANSWERS.values()} | {
        cause for cause, _ in (WRONG | OF_PROJECTS | BESIDE).values()
    }
    assert {(stage, cause) for stage, cause, _ in ROWS} <= {*CAUSES.values(), *others}
    assert {cause for _, cause, _ in ROWS} == {cause for _, cause in {*CAUSES.values(), *others}}


@pytest.mark.core
def test_nothing_is_said_of_a_script_without_mistakes(tmp_path: Path) -> None:
    verdict, text = verdict_on("plain", tmp_path)
    assert verdict.code == 0, text
    assert verdict.steps >= 3
    assert max(value for step in verdict.digits for value in step.values()) < 1e-12


@pytest.mark.parametrize("kind", RIGHT)
def test_what_is_right_is_not_found(kind: str, tmp_path: Path) -> None:
    verdict, text = verdict_on(kind, tmp_path)
    assert verdict.code == 0, text
    assert RIGHT[kind] in " ".join(text.split())
    assert not list(tmp_path.iterdir()), "what the script writes into a folder that an argument names goes elsewhere"


def test_dropout_is_set_aside_and_said(tmp_path: Path) -> None:
    verdict, text = verdict_on("dropout", tmp_path)
    assert verdict.code == 0, text
    assert "random numbers drawn within" in text


def test_seeds_of_ranks_do_not_matter_where_an_engine_hands_out_parameters(tmp_path: Path) -> None:
    verdict, text = verdict_on("seeds", tmp_path)
    assert verdict.code == 0, text


@pytest.mark.parametrize("kind", UNKNOWN)
def test_what_cannot_be_told_is_no_finding(kind: str, tmp_path: Path) -> None:
    verdict, text = verdict_on(kind, tmp_path)
    assert verdict.code == 2, text
    assert UNKNOWN[kind] in " ".join(text.split())


def facts_of(line: str, count: int, first: int = 0) -> dict[str, Any]:
    keys = [(number, number) for number in range(first, first + count)]
    one = {"loader": 0, "trains": False, "finished": True, "keys": [keys]}
    return {
        "loaders": [],
        "made": [],
        "saves": [],
        "shapes": {},
        "by_hand": False,
        "draws_in_evaluation": False,
        "untrained": {},
        "end": "",
        "begun": [],
        "passes": [one],
        "texts": [(True, line, "")],
    }


def judge(
    ranks: list[dict[str, Any]],
    one: dict[str, Any],
    moved: dict[str, Any] | None = None,
    again: dict[str, Any] | None = None,
) -> tuple[list[Difference], list[str]]:
    runs = ({"facts": each, "steps": []} for each in (one, again or one, moved) if each)
    return judge_aftermath(Runs([{"facts": each, "steps": []} for each in ranks], *runs))


@pytest.mark.parametrize("moved", ["1.41213", "1.41257"])
def test_a_number_is_of_the_evaluation_if_it_moves_with_that_at_all(moved: str) -> None:
    line = "epoch 0: val loss {}"
    ranks, one = (
        [facts_of(line.format(1.40817), 16), facts_of(line.format(1.42), 16)],
        facts_of(line.format(1.41257), 31),
    )
    found, notes = judge(ranks, one, facts_of(line.format(moved), 16))
    assert [each.stage for each in found] == (["evaluated"] if moved != "1.41257" else [])
    assert len(notes) == (moved == "1.41257")


@pytest.mark.parametrize(("moved", "cause"), [("1.40817", "metric"), ("1.41213", "padded-evaluation")])
def test_a_number_of_rank_0s_samples_is_none_that_padding_has_moved(moved: str, cause: str) -> None:
    line = "epoch 0: val loss {}"
    ranks = [facts_of(line.format(1.40817), 16), facts_of(line.format(1.42), 16, 15)]
    (found,), _ = judge(ranks, facts_of(line.format(1.41257), 31), facts_of(line.format(moved), 16))
    assert found.cause == cause


def test_a_number_that_one_epoch_has_of_rank_0s_samples_by_chance_is_one_that_padding_has_moved() -> None:
    def facts(count: int, first: int, *accuracies: float) -> dict[str, Any]:
        texts = [(True, f"epoch {epoch}: {each:.5f}", "") for epoch, each in enumerate(accuracies)]
        return facts_of("", count, first) | {"texts": texts}

    ranks = [facts(20, 0, 0.85, 0.875), facts(20, 17, 0.85, 0.875)]
    (found,), _ = judge(ranks, facts(37, 0, 0.83784, 0.86486), facts(20, 0, 0.85, 0.8))
    assert found.cause == "padded-evaluation"


def test_a_small_difference_counts_if_the_ranks_evaluate_other_samples() -> None:
    """One of 1501 samples counted twice moves a loss by 0.007 %; otherwise rounding may do that."""
    line = "val loss {}"
    texts = [line.format(each) for each in (0.750037, 0.750091, 0.749)]
    (found,), _ = judge([facts_of(texts[0], 751), facts_of(texts[0], 751, 750)], *map(facts_of, texts[1:], (1501, 751)))
    assert found.cause == "padded-evaluation"
    ranks = [facts_of(texts[0], 750), facts_of(texts[0], 750, 750)]
    assert judge(ranks, *map(facts_of, texts[1:], (1500, 750))) == ([], [])


def test_seconds_that_are_the_same_twice_by_chance_are_no_number_of_an_evaluation() -> None:
    def facts(*seconds: float) -> dict[str, Any]:
        return facts_of("", 31) | {
            "texts": [(True, f"epoch {epoch}: {each} s", "") for epoch, each in enumerate(seconds)]
        }

    ranks, one, again, moved = facts(0.0772, 0.0651), facts(0.055, 0.061), facts(0.055, 0.0688), facts(0.0541, 0.07)
    assert judge([ranks] * 2, one, moved, again) == ([], [])


def test_lines_are_told_apart_without_seconds_that_have_their_unit_attached() -> None:
    def facts(*seconds: float) -> dict[str, Any]:
        texts = [f"epoch {epoch}: val loss {1.5 - epoch / 10} ({each}s/it)" for epoch, each in enumerate(seconds)]
        return facts_of("", 31) | {"texts": [(True, text, "") for text in texts]}

    ranks, one, again, moved = facts(0.2, 0.21), facts(0.21, 0.22), facts(0.23, 0.2), facts(0.2, 0.24)
    assert judge([ranks] * 2, one, moved, again) == ([], [])


def test_numbers_that_are_padded_to_a_width_are_those_of_one_line() -> None:
    pairs = ((9.75, 16), (10.25, 31), (9.75, 16))
    ranks, one, moved = (facts_of(f"loss {each:6.2f}", count) for each, count in pairs)
    (found,), _ = judge([ranks] * 2, one, moved)
    assert found.cause == "metric"


@pytest.mark.parametrize(
    "line",
    ["val loss 1.4, val time: {} s", "Averaged stats: model_time: {0} ({0})", "took {}s", "{} samples/s", "{} it/s"],
)
def test_seconds_and_speeds_are_no_numbers_of_an_evaluation_even_if_one_process_repeats_them(line: str) -> None:
    ranks, one, moved = (facts_of(line.format(each), count) for each, count in ((0.25, 16), (0.27, 31), (0.26, 16)))
    assert judge([ranks] * 2, one, moved) == ([], [])


def test_the_time_of_day_is_no_number_of_an_evaluation() -> None:
    line = "12:59:{},871 epoch 0: val loss 1.41257"
    ranks, one, moved = (
        [facts_of(line.format("07"), 16)] * 2,
        facts_of(line.format("08"), 31),
        facts_of(line.format("09"), 16),
    )
    assert judge(ranks, one, moved) == ([], [])


OF_TOKENS = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, DistributedSampler

torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo")
texts = [torch.randint(1, 9, (length,)) for length in [3, 9, 5, 4, 7, 6, 8, 3, 4, 9, 6, 5]]
model = DistributedDataParallel(nn.Sequential(nn.Embedding(9, 4), nn.Tanh(), nn.Linear(4, 9)))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
sampler = DistributedSampler(texts, shuffle=False)
loader = DataLoader(texts, 2, sampler=sampler, collate_fn=lambda rows: pad_sequence(rows, batch_first=True))
for rows in loader:
    optimizer.zero_grad()
    cross_entropy(model(rows[:, :-1]).transpose(1, 2), rows[:, 1:], ignore_index=0).backward()
    optimizer.step()
"""


TIME_FIRST = (
    OF_TOKENS.replace(", batch_first=True", "").replace("rows[:, :-1]", "rows[:-1]").replace("rows[:, 1:]", "rows[1:]")
)


# Batches as long as wide, on the ranks and then on one process.
SQUARE, SQUARE_OF_ONE = (
    TIME_FIRST.replace("[3, 9, 5, 4, 7, 6, 8, 3, 4, 9, 6, 5]", f"[{length}] * 12")
    .replace("loader = DataLoader(texts, 2", "loader = DataLoader(texts, 3")
    .replace("ignore_index=0", "ignore_index=1")
    for length in (3, 6)
)


@pytest.mark.parametrize(
    "text",
    [OF_TOKENS, TIME_FIRST, SQUARE, SQUARE_OF_ONE],
    ids=["batch-first", "time-first", "square", "square-of-one-process"],
)
def test_outputs_of_tokens_that_are_padding_are_not_compared(text: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    (verdict,) = verify(Verification(str(script), steps=2))
    assert verdict.first == ("loss", "count"), format_text("train.py", [verdict])


def test_samples_are_columns_only_where_the_first_tensor_has_them_so() -> None:
    boxes = [{"boxes": torch.zeros(number, 4)} for number in range(1, 5)]
    assert is_time_first(torch.zeros(7, 4), 4)
    assert is_time_first((torch.zeros(7, 4, 3), torch.zeros(4)), 4)
    assert not is_time_first((torch.zeros(4, 3, 8, 8), boxes), 4)
    assert not is_time_first((torch.zeros(18, 5), torch.zeros(2, 36), torch.zeros(18)), 5)


def test_images_in_a_list_are_samples_where_they_have_as_many_channels_too() -> None:
    images, targets = torch.randn(3, 3, 4, 5).unbind(), [{"boxes": torch.rand(number, 4)} for number in range(1, 4)]
    alone = [sample_keys(([image], [target]), 1) for image, target in zip(images, targets, strict=True)]
    assert sample_keys((images, targets), 3) == [key for (key,) in alone]


def test_a_sketch_of_many_rows_needs_little_memory() -> None:
    rows = torch.randn(256, 1 << 14)
    tracemalloc.start()
    sketch = row_sketch(rows, 256)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sketch is not None
    assert peak_bytes < 4 * rows.numel()
    whole = torch.stack([rows.mean(1), rows.square().mean(1).sqrt(), rows.abs().amax(1)], 1)
    assert torch.allclose(sketch[:, -3:], whole.double(), atol=1e-5)


def test_what_only_float64_shows_to_be_augmentation_is_repeated_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = iter([("steps", "number-of-steps"), ("samples", "drawn"), ("outputs", "batch")])
    runs = []

    def compared(script: session.Script) -> Verdict:
        runs.append((script.what.double, script._by_sample))
        return Verdict(2, [Difference(1, *next(found), "", "", "")], wants_double="it rounds" if len(runs) == 1 else "")

    monkeypatch.setattr(session, "_compared", compared)
    verdict = session.verify_at(Verification(SCRIPT), 2, tmp_path)
    assert [each.cause for each in verdict.differences] == ["drawn", "batch"]
    assert runs == [(False, False), (True, False), (True, True)]
    assert [note.partition(":")[0] for note in verdict.notes] == ["samples", "precision"]


BY_ACCELERATE = """
import sys

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader = DataLoader(TensorDataset(torch.randn(int(sys.argv[1]), 3)), batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(2):
    for (x,) in loader:
        optimizer.zero_grad()
        accelerator.backward(model(x).square().mean())
        optimizer.step()
"""


@pytest.mark.parametrize(("count", "first"), [("24", ("", "")), ("21", ("samples", "padded"))])
def test_accelerate_draws_another_order_and_fills_up_the_last_batch(
    count: str, first: tuple[str, str], tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(BY_ACCELERATE)
    (verdict,) = verify(Verification(str(script), (count,), steps=2))
    assert verdict.first == first, format_text("train.py", [verdict])
    assert any(note.startswith("order: ") for note in verdict.notes) == (count == "24")


def causes_of_epochs(loaders: Sequence[Mapping[str, bool]], *passes: Mapping[str, Any]) -> list[str]:
    """The causes found in passes that all begin with the same samples, of loaders by number."""
    one: dict[str, Any] = {"loader": 0, "anew": False, "line": "", "optimizer": 0, "trains": True, "finished": True}
    one |= {"keys": [[(1, 1), (2, 2)]], "drawn": [[1, 2]]}
    facts = facts_of("", 0) | {"loaders": loaders, "texts": []}
    facts["passes"] = [{**one, **each} for each in passes]
    found, _ = judge([facts, facts], facts)
    return [each.cause for each in found]


@pytest.mark.parametrize("trains", [False, True])
def test_a_pass_that_does_not_train_is_no_epoch(trains: bool) -> None:
    found = causes_of_epochs([{"shuffles": True, "own": False}], {"trains": trains}, {})
    assert found == (["set-epoch"] if trains else [])


def test_a_loader_whose_epochs_are_alike_by_right_hides_no_other_one() -> None:
    loaders = [{"shuffles": False, "own": True}, {"shuffles": True, "own": False}]
    assert causes_of_epochs(loaders, {}, {}, {"loader": 1}, {"loader": 1}) == ["set-epoch"]
