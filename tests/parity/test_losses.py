"""Losses that are no mean over samples, with the function that each needs: one process's training on any ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import lockstep
from lockstep import batch
from lockstep.metrics import Accuracy, Mean, synchronize
from lockstep.parallel import loss_kinds
from lockstep.testing import limit_s, run_ranks

TOLERANCE = 1e-12
WORLDS = (1, 2, 3, 5)
IGNORED = -100
CLASSES = 5


class Words(torch.utils.data.Dataset[Any]):
    """Sequences of 6 words of which the last ones are padding; every fourth is all padding."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(count, 6, 3, generator=generator, dtype=torch.float64)
        self.y = torch.randint(CLASSES, (count, 6), generator=generator)
        for index in range(count):
            self.y[index, 0 if index % 4 == 0 else index % 6 :] = IGNORED

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index].clone(), self.y[index].clone()


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()


class Site:
    """On one process with a plain model, or on a rank with an engine."""

    def __init__(self, alone: bool) -> None:
        self.alone = alone
        self.values: list[float] = []

    def wrap(self, model: nn.Module) -> Any:
        self.model = model
        return model if self.alone else lockstep.DistributedDataParallel(model)

    def loader(self, count: int, batch_size: int, **options: Any) -> Any:
        place = {"rank": 0, "world_size": 1} if self.alone else {}
        return lockstep.DataLoader(Words(count), batch_size, shuffle=True, seed=3, **place, **options)

    def mean(self, total: Tensor, count: Any) -> Tensor:
        return total / count if self.alone else lockstep.mean(total, count)

    def sum(self, total: Tensor) -> Tensor:
        return total if self.alone else lockstep.sum(total)

    def result(self) -> Tensor:
        parameters = [parameter.detach().flatten() for parameter in self.model.parameters()]
        return torch.cat([*parameters, torch.tensor(self.values, dtype=torch.float64)])


def sum_of_words(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def steps(site: Site, loss_of: Callable[..., Tensor], count: int = 22, batch_size: int = 6) -> None:
    model = site.wrap(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(2):
        for x, y in site.loader(count, batch_size):
            optimizer.zero_grad()
            loss = loss_of(model, x, y)
            loss.backward()
            site.values.append(loss.item())
            optimizer.step()


def a_mean_over_words(site: Site) -> None:
    steps(site, lambda model, x, y: site.mean(sum_of_words(model(x), y), (y != IGNORED).sum()))


def a_mean_over_words_where_sizes_tell_nothing(site: Site) -> None:
    """The batch has lost its tag, and on some ranks the last one is as large as the others."""
    steps(site, lambda model, x, y: site.mean(sum_of_words(model(x * 2), y), (y != IGNORED).sum()), 23, 8)


def a_mean_with_weights_of_classes(site: Site) -> None:
    weight = torch.linspace(0.5, 2, CLASSES, dtype=torch.float64)

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        logits, labels = model(x)[:, 0], y[:, 0]
        total = cross_entropy(logits, labels, weight=weight, ignore_index=IGNORED, reduction="sum")
        return site.mean(total, weight[labels[labels != IGNORED]].sum())

    steps(site, loss_of)


def a_masked_mean(site: Site) -> None:
    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        mask = (y != IGNORED).double()
        return site.mean((model(x).square().mean(-1) * mask).sum(), mask.sum())

    steps(site, loss_of)


def a_sum(site: Site) -> None:
    steps(site, lambda model, x, y: site.sum(0.01 * sum_of_words(model(x), y)))


def terms_with_divisors_of_their_own(site: Site) -> None:
    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        logits = model(x)
        words = site.mean(sum_of_words(logits, y), (y != IGNORED).sum())
        squares = logits.square().mean()  # over samples
        value = site.mean(squares.detach() * len(y), len(y))
        return words + 0.1 * squares + (0.1 * (value - squares)).detach()  # the value of one process, for comparison

    steps(site, loss_of)


def statistics_with_a_graph(site: Site) -> None:
    """A spread of the scores: each rank makes something else of the mean, and another gradient comes back to it."""

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        scores = model(x).mean(1)
        center = site.mean(scores[:, 0].sum(), len(x))
        return site.mean((scores[:, 0] - center).square().sum(), len(x)) + (scores[:, 1] * center).mean()

    steps(site, loss_of)
    site.values.clear()  # the last term's mean is this rank's


def a_temperature(site: Site) -> None:
    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        scores, labels = model(x)[:, 1], y[:, 1].clamp(min=0)
        center = site.mean(scores.sum(), scores.numel())
        spread = site.mean((scores - center).square().sum(), scores.numel()).sqrt()
        return cross_entropy(scores / spread, labels)

    steps(site, loss_of)
    site.values.clear()


def norms_over_the_batch(site: Site) -> None:
    """A norm, and a ratio of norms."""

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        made = model(x)
        differences = site.sum((made - 1).square().sum())
        return differences.sqrt() + (differences / site.sum((made + 2).square().sum())).sqrt()

    steps(site, loss_of)


class Tagger(nn.Module):
    """Returns its loss, as models of Hugging Face do."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.net, self.site = make_model(), site

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.site.mean(sum_of_words(self.net(x), y), (y != IGNORED).sum())


def a_loss_within_the_model(site: Site) -> None:
    model = site.wrap(Tagger(site))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for x, y in site.loader(22, 6):
        optimizer.zero_grad()
        loss = model(x, y)
        loss.backward()
        site.values.append(loss.item())
        optimizer.step()


def totals_of_which_some_have_no_graph(site: Site) -> None:
    """A rank without a word makes a total of nothing."""

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        logits, has_words = model(x), bool((y != IGNORED).any())
        total = sum_of_words(logits, y) if has_words else torch.zeros((), dtype=torch.float64)
        loss = site.mean(total, (y != IGNORED).sum())
        return loss + 0.0 * logits.sum() if has_words else loss.detach() * 0 + loss + 0.0 * logits.sum()

    steps(site, loss_of, 24, 4)


def through_a_gradient(site: Site) -> None:
    """A penalty on the gradient of a mean, which each rank goes on computing with."""

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        scores = model(x).mean(1)[:, 0]
        center = site.mean(scores.sum(), len(x))
        (slope,) = torch.autograd.grad(site.mean((scores - center).square().sum(), len(x)), x, create_graph=True)
        share = 1 if site.alone else dist.get_world_size()
        return site.mean((slope / share).square().sum(), len(x))

    steps(site, loss_of, 18, 6)


def a_focal_loss_by_positives(site: Site) -> None:
    """The total is not 0 where there is no positive: on some ranks, and in some batches on none."""

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        chances, is_positive = model(x)[:, 0, 0].sigmoid(), y[:, 1] == 2
        each = torch.where(
            is_positive, -chances.log() * (1 - chances).square(), -(1 - chances).log() * chances.square()
        )
        return site.sum(each.sum()) / site.sum(is_positive.double().sum()).clamp(min=1) + (
            site.mean(each.sum(), is_positive.sum()) if site.sum(is_positive.double().sum()) else 0.0
        )

    steps(site, loss_of, 23, 6)


def a_mean_times_its_count(site: Site) -> None:
    """What a model that returns its loss gives: nan where a rank has no word."""

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        logits, count = model(x), int((y != IGNORED).sum())
        return site.mean(cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=IGNORED) * count, count)

    steps(site, loss_of, 24, 4)


def accumulated(site: Site) -> None:
    """Each micro-batch by its own count; the last window and its last batch are smaller."""
    model = site.wrap(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = site.loader(22, 4)
    for number, (x, y) in enumerate(loader):
        loss = site.mean(sum_of_words(model(x), y), (y != IGNORED).sum()) / 2
        if not loss.isfinite():  # no word in the whole batch
            continue
        loss.backward()
        site.values.append(loss.item())
        if number % 2 == 1 or number == len(loader) - 1:
            optimizer.step()
            optimizer.zero_grad()


def accumulated_without_averaging(site: Site) -> None:
    """A window of batches is divided by its words, which are counted first."""
    model = site.wrap(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batches = list(site.loader(22, 6))
    for start in range(0, len(batches), 2):
        window = batches[start : start + 2]
        count = sum(int((y != IGNORED).sum()) for x, y in window if site.alone or not lockstep.is_filler(x))
        words = site.sum(torch.tensor(float(count)))
        optimizer.zero_grad()
        for number, (x, y) in enumerate(window):
            if not site.alone:
                model.require_backward_grad_sync = number == len(window) - 1  # what no_sync() sets
            loss = site.sum(sum_of_words(model(x), y)) / words
            loss.backward()
            site.values.append(loss.item())
        optimizer.step()


def measured(site: Site) -> None:
    """Evaluation and metrics by words."""
    model = site.wrap(make_model())
    metrics = Mean(), Mean()
    with torch.no_grad():
        for x, y in site.loader(23, 8, evaluation=True):
            count = (y != IGNORED).sum()
            logits = model(x).flatten(0, 1)
            for weight, metric in zip((int(count), count), metrics, strict=True):
                metric.update(cross_entropy(logits, y.flatten(), ignore_index=IGNORED), weight=weight)
    site.values += [metric.compute() for metric in metrics] if site.alone else synchronize(*metrics)


def measured_by_words(site: Site) -> None:
    """Words are laid in a row, of fillers too."""
    model = site.wrap(make_model())
    accuracy, loss = Accuracy(), Mean()
    for x, y in site.loader(22, 6):
        logits = model(x).flatten(0, 1)
        accuracy.update(logits, y.flatten())
        loss.update(cross_entropy(logits, y.flatten().clamp(min=0), reduction="none"))
    site.values += [accuracy.compute(), loss.compute()] if site.alone else synchronize(accuracy, loss)


class Perplexity(Mean):
    def update(self, logits: Tensor, labels: Tensor) -> None:  # type: ignore[override]
        super().update(cross_entropy(logits, labels))

    def from_sums(self, sums: Sequence[float]) -> float:
        return math.exp(super().from_sums(sums))


def measured_by_a_metric_of_another(site: Site) -> None:
    """The loss that the parent's update gets does not tell which batch it is of; the labels do."""
    perplexity = Perplexity()
    site.model = model = make_model()
    with torch.no_grad():
        for x, y in site.loader(23, 6, evaluation=True):
            perplexity.update(model(x)[:, 0], y[:, 0].clamp_(min=0))
    site.values.append(perplexity.compute() if site.alone else synchronize(perplexity)[0])


def evaluated_within_the_loop(site: Site) -> None:
    """An evaluation behind the last batch, which is a filler on some ranks; and totals behind the loop."""
    model = site.wrap(make_model())
    seen = torch.zeros((), dtype=torch.float64)
    total = count = 0
    loader = site.loader(22, 6)
    for number, (x, _) in enumerate(loader):
        if site.alone or not lockstep.is_filler(x):
            total, count = total + float(x.sum()), count + len(x)
        if number + 1 == len(loader):
            model.eval()
            inner = torch.zeros((), dtype=torch.float64)
            rows = [torch.empty(0, dtype=torch.float64)]
            with torch.no_grad():
                for other, _ in site.loader(23, 6, evaluation=True):
                    inner += model(other).sum()
                    rows.append(other.sum((1, 2)))
            seen = site.mean(inner, sum(map(len, rows)))
            everybodys = torch.cat(rows) if site.alone else lockstep.all_gather(torch.cat(rows))
            site.values += [len(everybodys), everybodys.sum().item()]
    site.values += [seen.item(), site.mean(torch.tensor(total, dtype=torch.float64), count).item()]


LOSSES = {
    loss.__name__: loss
    for loss in (
        a_mean_over_words,
        a_mean_over_words_where_sizes_tell_nothing,
        a_mean_with_weights_of_classes,
        a_masked_mean,
        a_focal_loss_by_positives,
        a_sum,
        terms_with_divisors_of_their_own,
        statistics_with_a_graph,
        a_temperature,
        norms_over_the_batch,
        a_loss_within_the_model,
        accumulated,
        accumulated_without_averaging,
        measured,
        measured_by_words,
        measured_by_a_metric_of_another,
        evaluated_within_the_loop,
    )
}


def differences() -> dict[str, float]:
    loss_kinds._found.clear()
    found = {}
    for name, program in LOSSES.items():
        alone, ranks = Site(alone=True), Site(alone=False)
        program(alone)
        program(ranks)
        found[name] = (ranks.result() - alone.result()).abs().max().item()
    assert not loss_kinds._found, f"a right program was warned of: {loss_kinds._found}"
    return found


@pytest.mark.parametrize("world_size", WORLDS)
def test_losses_are_those_of_one_process(world_size: int) -> None:
    for found in run_ranks(differences, world_size, timeout=limit_s(120)):
        assert {name: what for name, what in found.items() if not what <= TOLERANCE} == {}


def in_a_fresh_process(program: Callable[[Site], None]) -> float:
    batch.reset()  # else sizes of earlier loaders make ranks ask each other what a forward pass holds
    alone, ranks = Site(alone=True), Site(alone=False)
    for site in (alone, ranks):
        program(site)
    return (ranks.result() - alone.result()).abs().max().item()


@pytest.mark.parametrize("program", [totals_of_which_some_have_no_graph, a_mean_times_its_count, through_a_gradient])
@pytest.mark.parametrize("world_size", [2, 3])
def test_further_losses(program: Callable[[Site], None], world_size: int) -> None:
    assert max(run_ranks(in_a_fresh_process, world_size, program)) <= TOLERANCE


def totals_without_a_count(dtype: torch.dtype) -> list[tuple[float, float]]:
    """Value and gradient of `mean` where rank 0 has an item, where no rank has one, and where nobody has anything."""
    rank = dist.get_rank()
    found = []
    for totals, counts in (([3.0, 5.0], [2, 0]), ([3.0, 5.0], [0, 0]), ([0.0, 0.0], [0, 0]), ([3.0, math.nan], [2, 0])):
        weight = torch.ones((), dtype=dtype, requires_grad=True)
        value = lockstep.mean(weight * totals[rank], torch.tensor(counts[rank]) if rank else counts[rank])
        value.backward()
        assert weight.grad is not None
        assert value.dtype == weight.grad.dtype == dtype
        found.append((value.item(), weight.grad.item()))
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_a_total_counts_also_where_its_count_is_0(dtype: torch.dtype) -> None:
    """The gradients are those of rank r's own parameter, so twice those of the mean over ranks."""
    for rank, found in enumerate(run_ranks(totals_without_a_count, 2, dtype)):
        (some, of_some), (infinite, of_infinite), (nothing, of_nothing), (with_nan, of_nan) = found
        assert (some, of_some) == (4.0, 2 * (3.0, 5.0)[rank] / 2)
        assert (infinite, of_infinite) == (math.inf, 0.0)
        assert math.isnan(nothing)
        assert of_nothing == 0.0
        assert with_nan == 1.5
        assert of_nan == 3.0 if rank == 0 else math.isnan(of_nan) or of_nan == 0.0


# ---- what each rank computes over the data of all --------------------------------------------------


def contrast(own: Tensor, features: Tensor) -> Tensor:
    """Every row of `own` against all features; a mean over `own`."""
    return (own @ features.t()).logsumexp(1).mean()


def contrast_over_all_ranks() -> float:
    """Differences to one process: with the loss over all rows on every rank, and with that over its own rows."""
    worst = 0.0
    for is_local in (False, True):
        for count, batch_size in ((23, 6), (7, 3), (23, 8)):
            alone, ranks = Site(alone=True), Site(alone=False)
            for site in (alone, ranks):
                gather = (lambda features: features) if site.alone else lockstep.all_gather

                def loss_of(
                    model: nn.Module, x: Tensor, y: Tensor, gather: Any = gather, is_local: bool = is_local
                ) -> Tensor:
                    own = model(x * 1.0).mean(1)
                    features = gather(own)
                    return contrast(own if is_local else features, features) + own.square().mean()

                steps(site, loss_of, count, batch_size)
                site.values.clear()
            worst = max(worst, (ranks.result() - alone.result()).abs().max().item())
    return worst


def match_pairs() -> float:
    """Each row against all: its own place among them is the answer; labels of all ranks tell who belongs together."""
    worst = 0.0
    for count, batch_size in ((23, 6), (7, 3), (24, 6)):
        alone, ranks = Site(alone=True), Site(alone=False)
        for site in (alone, ranks):
            rank = 0 if site.alone else dist.get_rank()
            gather = (lambda rows: rows) if site.alone else lockstep.all_gather

            def loss_of(model: nn.Module, x: Tensor, y: Tensor, gather: Any = gather, rank: int = rank) -> Tensor:
                own, classes = model(x).mean(1), y[:, 0].clamp(min=0) % 2
                everybodys, labels = gather(own), gather(classes)
                owners = gather(torch.full((len(own),), rank))
                place = ((owners < rank).sum() + torch.arange(len(own))).clamp(max=len(owners) - 1)
                scores = own @ everybodys.t()
                alike = (classes[:, None] == labels).double()
                return cross_entropy(scores, place) - (alike * scores.log_softmax(1)).sum(1).mean()

            steps(site, loss_of, count, batch_size)
            site.values.clear()
        worst = max(worst, (ranks.result() - alone.result()).abs().max().item())
    return worst


@pytest.mark.parametrize("world_size", WORLDS)
def test_labels_and_places_of_gathered_rows(world_size: int) -> None:
    assert max(run_ranks(match_pairs, world_size)) <= TOLERANCE


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_loss_over_the_features_of_all_ranks(world_size: int) -> None:
    assert max(run_ranks(contrast_over_all_ranks, world_size)) <= TOLERANCE


def divide_by_hand() -> float:
    alone, ranks = Site(alone=True), Site(alone=False)
    steps(alone, lambda model, x, y: sum_of_words(model(x), y) / (y != IGNORED).sum())

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        count = (y != IGNORED).sum()
        dist.all_reduce(count)
        return lockstep.global_loss(sum_of_words(model(x), y) * dist.get_world_size() / count)

    steps(ranks, loss_of)
    for site in (alone, ranks):
        site.values.clear()
    return (ranks.result() - alone.result()).abs().max().item()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_loss_that_was_divided_by_hand(world_size: int) -> None:
    assert max(run_ranks(divide_by_hand, world_size)) <= TOLERANCE


def gather_by_torch() -> None:
    from torch.distributed._functional_collectives import all_gather_tensor_autograd

    model = lockstep.DistributedDataParallel(make_model())
    features = all_gather_tensor_autograd(model(torch.ones(2, 3, dtype=torch.float64)), 0, dist.group.WORLD)
    lockstep.global_loss(features.sum())


def test_a_loss_over_what_torch_has_gathered_is_an_error() -> None:
    for outcome in run_ranks(gather_by_torch, 2, expect_errors=True):
        assert "Gather with lockstep.all_gather" in str(outcome)


def hand_over_a_filler() -> None:
    model = lockstep.DistributedDataParallel(make_model())
    for x, _ in site_loader():
        lockstep.global_loss(model(x).sum())


def site_loader() -> Any:
    return Site(alone=False).loader(7, 6)


def test_a_global_loss_with_a_filler_is_an_error() -> None:
    outcomes = run_ranks(hand_over_a_filler, 2, expect_errors=True)
    assert outcomes[0] is None
    assert "holds a filler" in str(outcomes[1])
    assert "drop_last=True" in str(outcomes[1])


@pytest.mark.parametrize("function", [lambda x: lockstep.mean(x, 1), lockstep.sum, lockstep.global_loss])
def test_a_loss_with_dimensions_is_an_error(function: Callable[[Any], Tensor]) -> None:
    for wrong in (torch.ones(2), torch.tensor(1), 1.0):
        with pytest.raises(lockstep.errors.InputTypeError, match="without dimensions"):
            function(wrong)
    with pytest.raises(lockstep.errors.InputTypeError, match=r"count\.sum"):
        lockstep.mean(torch.ones(()), torch.ones(2))


def test_a_count_with_a_gradient_is_an_error() -> None:
    """Its gradient was left out without a word."""
    with pytest.raises(lockstep.errors.InputError, match=r"lockstep\.sum\(total\) / lockstep\.sum\(count\)"):
        lockstep.mean(torch.ones(()), torch.ones((), requires_grad=True))


def learned_weights(alone: bool) -> Tensor:
    """A mean weighted by what the model has computed, as `mean` says to write it."""
    site = Site(alone)
    model = site.wrap(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, _ in site.loader(14, 4):
        optimizer.zero_grad()
        output = model(x)
        weight = output[:, :, 0].exp()
        (site.sum((output[:, :, 1].square() * weight).sum()) / site.sum(weight.sum())).backward()
        optimizer.step()
    return site.result()


def test_what_mean_says_to_write_for_learned_weights_is_exact() -> None:
    (expected,) = run_ranks(learned_weights, 1, True)
    for found in run_ranks(learned_weights, 3, False):
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


def global_loss_of_gathered() -> None:
    model = lockstep.DistributedDataParallel(make_model())
    for x, _ in Site(alone=False).loader(4, 4):
        with pytest.raises(
            lockstep.errors.InputError, match=r"lockstep\.all_gather has gathered.*leave global_loss out"
        ):
            lockstep.global_loss(lockstep.all_gather(model(x)).square().sum())


def test_a_loss_of_what_was_gathered_is_no_global_loss() -> None:
    run_ranks(global_loss_of_gathered, 2)


# ---- warnings -----------------------------------------------------------------------------------------


def plain_ways() -> dict[str, dict[str, str]]:
    """What is warned of when a loss is written as for one process."""
    found = {}
    weight = torch.linspace(0.5, 2, CLASSES, dtype=torch.float64)
    scaler = torch.amp.GradScaler("cpu")
    numbers = itertools.count(16)

    def masked(logits: Tensor, y: Tensor) -> Tensor:
        mask = (y != IGNORED).double()
        return (logits.square().mean(-1) * mask).sum() / mask.sum()

    ways: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "ignored": lambda logits, y: cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=IGNORED),
        "weighted": lambda logits, y: cross_entropy(logits[:, 0], y[:, 0].clamp(min=0), weight=weight),
        "sum": lambda logits, y: logits.square().sum(),
        "masked": masked,
        "selected by a mask": lambda logits, y: logits[y != IGNORED].square().mean(),
        "selected by masked_select": lambda logits, y: logits.masked_select((y != IGNORED)[..., None]).mean(),
        "selected by positions": lambda logits, y: cross_entropy(
            logits.flatten(0, 1)[(y.flatten() != IGNORED).nonzero()[:, 0]], y[y != IGNORED]
        ),
        "packed": lambda logits, y: cross_entropy(*pack(logits, y, 2 + torch.arange(len(y)) % 2)),
        "a count of whole numbers": lambda logits, y: logits.square().sum() / (len(y) * next(numbers)),
        "a count that overflows": lambda logits, y: logits.square().sum() / torch.full((9,), 6e4).half().sum(),
        "hardest by topk": lambda logits, y: logits.square().sum((1, 2)).topk(2).values.mean(),
        "hardest by sort": lambda logits, y: logits.square().sum((1, 2)).sort(descending=True)[0][:1].mean(),
        "hardest of each sample": lambda logits, y: logits.square().flatten(1).topk(2).values.mean(),
        "sorted only": lambda logits, y: logits.square().sum((1, 2)).sort()[0].mean(),
        "sum over what was gathered": lambda logits, y: lockstep.all_gather(logits).square().sum(),
        "selected from what was gathered": lambda logits, y: (
            lockstep.all_gather(logits).flatten().topk(2).values.mean()
        ),
        "sum of a loss for each sample": lambda logits, y: torch.stack([row.square().mean() for row in logits]).sum(),
        "sum of a mean and a sum": lambda logits, y: torch.stack(
            [logits.mean(), *logits.square().mean((0, 1))[:3], logits.square().sum()]
        ).sum(),
        "sum over places of means": lambda logits, y: (logits.square().mean(0) * weight).sum(),
        "sum behind a scaler": lambda logits, y: scaler.scale(logits.square().sum()),
        "sum times a number": lambda logits, y: -1.0 * logits.square().sum() * 1.0,
        "mean": lambda logits, y: cross_entropy(logits[:, 0], y[:, 0].clamp(min=0)),
        "one place of each sample": lambda logits, y: logits[torch.arange(len(y)), 0, y[:, 0].clamp(min=0)].mean(),
        "a mask that leaves nothing out": lambda logits, y: logits[torch.ones_like(y, dtype=torch.bool)].mean(),
        "mean by hand": lambda logits, y: logits.square().sum() / len(y),
        "mean over all by hand": lambda logits, y: logits.square().sum() / logits.numel(),
        "mean and a term on parameters": lambda logits, y: logits.mean() + weight.requires_grad_().sum(),
        "mean, accumulated": lambda logits, y: logits.square().mean() / 3,
        "mean behind a scaler": lambda logits, y: scaler.scale(logits.square().mean()),
        "share of a sum": lambda logits, y: logits.square().sum() * (1 / len(y)),
        "share of a sum behind a scaler": lambda logits, y: scaler.scale((1 / len(y)) * logits.square().sum()),
        "divided before the sum": lambda logits, y: (logits.square() / 2 / len(y)).sum(),
        "scaled to the whole data": lambda logits, y: (12 / len(y)) * logits.square().sum(),
    }
    ways_of_all = ways | constants() | sums_of_losses() | norms() | norms_beside() | ratios() | ratios_beside()
    for name, way in ways_of_all.items():
        loss_kinds._found.clear()
        model = lockstep.DistributedDataParallel(make_model())
        for x, y in Site(alone=False).loader(12, 6):
            way(model(x), y).backward()
        found[name] = dict(loss_kinds._found)
    return found


def pack(logits: Tensor, y: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Scores and targets of sequences that are laid in a row, as `pack_padded_sequence` does for image captions."""
    packed = (
        nn.utils.rnn.pack_padded_sequence(each, lengths, batch_first=True, enforce_sorted=False).data
        for each in (logits, y.clamp(min=0))
    )
    scores, targets = packed
    return scores, targets


def constants() -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Means over samples, times a constant; and what has as many words of each sample."""
    patches = torch.arange(6) < 4

    def pairs(logits: Tensor, y: Tensor) -> Tensor:
        """As lightly's DINOLoss: a sum over samples for each of six pairs of views."""
        views = torch.stack([logits[:, 0], logits[:, 1], logits[:, 2]])
        return torch.einsum("tbd,sbd->ts", views[:2].detach(), views).sum() / (4 * len(y))

    def of_patches(logits: Tensor, y: Tensor) -> Tensor:
        """As IBOTPatchLoss: each patch under the mask is divided by how many its sample has."""
        mask = torch.arange(6) <= torch.arange(len(y))[:, None]
        return (logits.square().mean(-1)[mask] / mask.sum(1)[mask.nonzero()[:, 0]]).sum() / len(y)

    def masked_patches(logits: Tensor, y: Tensor) -> Tensor:
        """As in masked autoencoders, which hide as many patches of each picture."""
        mask = patches.expand(len(y), 6).double()
        return (logits.square().mean(-1) * mask).sum() / mask.sum()

    def without_diagonal(logits: Tensor, y: Tensor) -> Tensor:
        """As lightly's NTXentLoss."""
        scores = logits[:, 0] @ logits[:, 0].T
        return scores[~torch.eye(len(y), dtype=torch.bool)].view(len(y), -1).logsumexp(1).mean()

    def many_targets(logits: Tensor, y: Tensor) -> Tensor:
        """More than bfloat16 can count."""
        return cross_entropy(logits.repeat(1, 235, 1).flatten(0, 1).bfloat16(), y.clamp(min=0).repeat(1, 235).flatten())

    return {
        "pairs of views": pairs,
        "patches": of_patches,
        "masked patches": masked_patches,
        "selected patches": lambda logits, y: logits[patches.expand(len(y), 6)].square().mean(),
        "without the diagonal": without_diagonal,
        "greatest length": lambda logits, y: logits.square().sum() / (len(y) * 64),  # as Dr. GRPO
        "variation": lambda logits, y: (logits[:, 1:] - logits[:, :-1]).square().sum() / logits.numel(),
        "mean with an epsilon": lambda logits, y: (
            logits.square().mean((1, 2)).sum() / (torch.ones(len(y)).sum() + 1e-6)
        ),
        "packed, all of one length": lambda logits, y: cross_entropy(*pack(logits, y, torch.full((len(y),), 3))),
        "many targets in 16 bits": many_targets,
    }


def norms() -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Over all samples of a rank; their gradients are not those of one process."""

    def stft_loss(logits: Tensor, y: Tensor) -> Tensor:
        """As vocoders have it: ParallelWaveGAN, auraloss, StyleTTS2."""
        window = torch.ones(8, dtype=torch.float64)
        waves = torch.stft(logits.flatten(1), 8, 4, 8, window, return_complex=True)
        made = (waves.real**2 + waves.imag**2).clamp(min=1e-7).sqrt().transpose(2, 1)
        wanted = made.detach() + 1
        spectral = torch.norm(wanted - made, p="fro") / torch.norm(wanted, p="fro")
        return spectral + torch.nn.functional.l1_loss(wanted.log(), made.log())

    return {
        "norm": lambda logits, y: torch.norm(logits - 1),
        "norm of a mean, and over all": lambda logits, y: logits.mean() + 0.1 * (logits - 1).flatten().norm(),
        "matrix norm": lambda logits, y: torch.linalg.matrix_norm(logits.flatten(1) - 1),
        "spectral convergence": stft_loss,
        "norms of several": lambda logits, y: torch.stack([logits.norm(), *(2 * logits.square()).norm()[None]]).sum(),
        "deviation": lambda logits, y: ((logits - logits.mean()) / logits.std()).pow(4).mean(),
    }


def norms_beside() -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Norms that are right as they are: of each sample, squared, of parameters, of means."""
    own = torch.ones(3, 3, dtype=torch.float64, requires_grad=True)
    return {
        "norm of each sample": lambda logits, y: (logits - 1).flatten(1).norm(dim=1).mean(),
        "relative, of each sample": lambda logits, y: (
            (logits - 1).flatten(1).norm(dim=1) / (logits.detach() + 2).flatten(1).norm(dim=1)
        ).mean(),
        "norms in a loop": lambda logits, y: sum(((row - 1).norm() for row in logits), torch.zeros(())) / len(y),
        "norms by number": lambda logits, y: (logits[0].norm() + logits[1].norm() + logits[2].norm()) / 3,
        "squared norm": lambda logits, y: torch.norm(logits - 1) ** 2 / len(y),
        "square of a norm": lambda logits, y: torch.norm(logits - 1).square() / len(y),
        "norm times itself": lambda logits, y: (lambda norm: norm * norm / len(y))((logits - 1).norm()),
        "first norm": lambda logits, y: torch.norm(logits, p=1) / len(y),
        "unit vectors": lambda logits, y: (logits / logits.norm(dim=-1, keepdim=True)).mean(),
        "norm of parameters": lambda logits, y: logits.mean() + own.norm() + own.std(),
        "norm of a mean": lambda logits, y: (logits.mean(0) - 1).norm(),
        "norm without a gradient": lambda logits, y: (logits / logits.detach().norm()).mean(),
        "deviation of each sample": lambda logits, y: logits.flatten(1).std(1).mean(),
    }


def ratios() -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Of sums over all samples of a rank for each class, as dice losses of a whole batch have them."""

    def dice(logits: Tensor, y: Tensor) -> Tensor:
        """As segmentation_models_pytorch has it, and MONAI with `batch=True`."""
        chances, wanted = logits.sigmoid().transpose(1, 2), (logits.detach() > 0).double().transpose(1, 2)
        both = (chances * wanted).sum(dim=(0, 2))
        scores = (2 * both + 1) / ((chances + wanted).sum(dim=(0, 2)) + 1).clamp_min(1e-7)
        return ((1 - scores) * (wanted.sum((0, 2)) > 0)).mean()

    return {
        "dice": dice,
        "share of each sample": lambda logits, y: (logits.exp() / logits.exp().sum(0)).square().sum() / len(y),
    }


def ratios_beside() -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Ratios that are right as they are."""
    own = torch.ones(6, CLASSES, dtype=torch.float64, requires_grad=True)

    def dice_of_each(logits: Tensor, y: Tensor) -> Tensor:
        chances, wanted = logits.sigmoid(), (logits.detach() > 0).double()
        return 1 - ((2 * (chances * wanted).sum(1) + 1) / ((chances + wanted).sum(1) + 1)).mean()

    def places_first(logits: Tensor, y: Tensor) -> Tensor:
        scores = logits.exp().transpose(0, 1)  # of 6 places, and 3 samples
        return (scores / scores.sum(0)).mean()

    return {
        "dice of each sample": dice_of_each,
        "places before samples": places_first,
        "share without a gradient": lambda logits, y: (logits / logits.detach().exp().sum(0)).mean(),
        "ratio of parameters": lambda logits, y: (logits / own.square().sum(0)).mean(),
        "ratio of what was gathered": lambda logits, y: lockstep.global_loss(
            1 - lockstep.sum(logits.sigmoid().sum()) / lockstep.sum(logits.exp().sum())
        ),
    }


def sums_of_losses() -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Sums that add up no samples, as programs have them: means over samples, all of them."""
    spread, scales = torch.ones(CLASSES, dtype=torch.float64, requires_grad=True), torch.linspace(0.5, 2, CLASSES)

    def of_classes(logits: Tensor) -> Tensor:
        """More losses than a rank has samples. Float64 [5]."""
        return torch.stack([logits[..., each].square().mean() for each in range(CLASSES)])

    def balance(logits: Tensor, y: Tensor) -> Tensor:
        """Of experts, as in a Switch Transformer: by the mean probability of each, over all words."""
        chances = logits.flatten(0, 1).softmax(1)
        chosen = torch.nn.functional.one_hot(chances.argmax(1), CLASSES).double().mean(0)
        return logits.square().mean() + CLASSES * torch.sum(chosen * chances.mean(0))

    def entropy_of_codes(logits: Tensor, y: Tensor) -> Tensor:
        usage = logits.flatten(0, 1).softmax(1).sum(0) / y.numel()
        return logits.square().mean() - (usage * usage.log()).sum()

    return {
        "stack of means": lambda logits, y: torch.stack([logits.mean(), logits.square().mean()]).sum(),
        "many means": lambda logits, y: of_classes(logits).sum(),
        "weighted stack": lambda logits, y: torch.sum(scales * of_classes(logits)),
        "list of weighted means": lambda logits, y: torch.sum(torch.stack([2 * each for each in of_classes(logits)])),
        "learned weights": lambda logits, y: torch.sum(0.5 / spread**2 * of_classes(logits) + (1 + spread**2).log()),
        "concatenated": lambda logits, y: torch.cat([each.unsqueeze(0) for each in of_classes(logits)]).sum(),
        "dictionary": lambda logits, y: (
            torch.stack(
                list({"words": logits.mean(), "class": cross_entropy(logits[:, 0], y[:, 0].clamp(min=0))}.values())
            )
        ).sum(),
        "sum of a loss without dimensions": lambda logits, y: logits.square().mean().sum(),
        "sum of a loss of one element": lambda logits, y: logits.square().mean().view(1).sum(),
        "balance of experts": balance,
        "entropy of codes": entropy_of_codes,
    }


def test_losses_that_are_no_mean_over_samples_are_noticed() -> None:
    found, of_rank_1 = run_ranks(plain_ways, 2)
    assert not any(of_rank_1.values()), "one rank speaks for all"
    for name, what in {
        "ignored": "targets, the others being ignored (ignore_index=)",
        "weighted": "weighted by class (weight=)",
        "sum": "a sum",
        "sum of a loss for each sample": "a sum",
        "sum of a mean and a sum": "a sum",
        "sum behind a scaler": "a sum",
        "sum times a number": "a sum",
        **dict.fromkeys(norms(), "made of a norm over this rank's samples alone"),
        "deviation": "made of a standard deviation",
        **dict.fromkeys(ratios(), "made of a ratio, by sums over this rank's samples alone"),
        "masked": "a sum divided by",
        "selected by a mask": "that a mask has selected",
        "selected by masked_select": "that a mask has selected",
        "selected by positions": "selected positions",
        "packed": "a mean over 7 targets of 3 samples",
        "a count of whole numbers": "a sum divided by",
        "a count that overflows": "a sum divided by inf",
        "hardest by topk": "first 2 of 3 in their order",
        "hardest by sort": "first 1 of 3 in their order",
    }.items():
        assert found[name], name
        ((line, text),) = found.pop(name).items()
        assert line.startswith("test_losses.py:")
        assert what in text
    assert not any(found.values()), found


class Flow(nn.Module):
    """Returns z and the logarithms of scales, of which there are half as many."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(3, 8).double(), nn.Linear(3, 4).double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.wide(x), self.narrow(x)


def divided_by_the_elements_of_another() -> list[dict[str, str]]:
    """What is warned of in losses of two terms that have one divisor."""
    losses: list[Callable[[Tensor, Tensor], Tensor]] = [
        lambda z, log_s: (torch.sum(z * z) / 2 - torch.sum(log_s)) / z.numel(),  # as WaveGlow has it
        lambda z, log_s: (torch.sum(z * z) / (2 * 0.7 * 0.7) - log_s.sum()) / (z.size(0) * z.size(1) * z.size(2)),
        lambda z, log_s: (torch.sum(z * z) / 2 + log_s.square().sum() / 2) / len(z),
        lambda z, log_s: z.mean() + torch.sum(log_s) / (z.numel() - 1),
        lambda z, log_s: z.mean() + torch.sum(log_s) / (z > 0).sum(),
    ]
    found = []
    for loss in losses:
        loss_kinds._found.clear()
        model = lockstep.DistributedDataParallel(Flow())
        for x, _ in Site(alone=False).loader(12, 6):
            loss(*model(x)).backward()
        found.append(dict(loss_kinds._found))
    return found


def test_terms_of_other_widths_have_the_divisor_of_one() -> None:
    waveglow, with_sigma, halved, *others = run_ranks(divided_by_the_elements_of_another, 2)[0]
    assert waveglow == with_sigma == halved == {}
    for found in others:
        assert "a sum divided by" in "".join(found.values())


def without_warning_alone() -> dict[str, str]:
    loss_kinds._found.clear()
    model = lockstep.DistributedDataParallel(make_model())
    for x, _ in Site(alone=False).loader(12, 6):
        model(x).sum().backward()
    return dict(loss_kinds._found)


def test_one_process_divides_by_what_it_likes() -> None:
    assert run_ranks(without_warning_alone, 1) == [{}]


class WithLoss(nn.Module):
    """A model that is handed the labels, and returns its loss."""

    def __init__(self, divides: str) -> None:
        super().__init__()
        self.inner = make_model()
        self.divides = divides

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.inner(x / x.square().sum())  # a sum that is no loss
        if self.divides == "of all ranks":
            return lockstep.mean(sum_of_words(logits, y), (y != IGNORED).sum())
        if self.divides == "by hand":  # as models of Hugging Face do with `num_items_in_batch`
            return sum_of_words(logits, y) / (y != IGNORED).sum()
        return cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=IGNORED)


def losses_inside() -> list[dict[str, str]]:
    found = []
    for divides in ("", "by hand", "of all ranks"):
        loss_kinds._found.clear()
        model = lockstep.DistributedDataParallel(WithLoss(divides))
        for x, y in Site(alone=False).loader(12, 6):
            (model(x, y) / 2).backward()
        found.append(dict(loss_kinds._found))
    return found


def test_a_loss_that_the_model_computes_is_noticed() -> None:
    (text,), (by_hand,), none = (list(found.values()) for found in run_ranks(losses_inside, 2)[0])
    for found in (text, by_hand):
        assert "the others being ignored (ignore_index=)" in found
    assert none == []


def two_loaders() -> dict[str, str]:
    """One loss of two batches, as semi-supervised training has it."""
    loss_kinds._found.clear()
    model = lockstep.DistributedDataParallel(make_model())
    few, more = (Site(alone=False).loader(4 * size, size) for size in (8, 12))
    for (x, y), (other, labels) in zip(few, more, strict=True):
        loss = cross_entropy(model(x)[:, 0], y[:, 0].clamp(min=0))
        scores = model(other)
        (loss + cross_entropy(scores[:, 0], labels[:, 0].clamp(min=0)) + scores.square().sum() / len(other)).backward()
    return dict(loss_kinds._found)


def test_samples_of_one_of_several_batches_are_not_those_of_the_loss() -> None:
    assert run_ranks(two_loaders, 2) == [{}, {}]


def with_one_sample_each() -> dict[str, dict[str, str]]:
    """What is warned of where any whole number may be that of samples: constants are quiet, counts speak."""
    numbers = itertools.count(2)
    patches = torch.arange(6)[None]
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "greatest length": lambda logits: logits.square().sum() / 64,
        "patches": lambda logits: logits[patches < 4].mean(),
        "count": lambda logits: logits.square().sum() / (19 + next(numbers)),
        "mask": lambda logits: logits[patches < next(numbers) % 5 + 1].mean(),
    }
    found = {}
    for name, way in ways.items():
        loss_kinds._found.clear()
        model = lockstep.DistributedDataParallel(make_model())
        for x, _ in Site(alone=False).loader(6, 2):
            way(model(x)).backward()
        found[name] = dict(loss_kinds._found)
    return found


def test_constants_and_counts_where_ranks_hold_one_sample() -> None:
    found = run_ranks(with_one_sample_each, 2)[0]
    assert found["greatest length"] == found["patches"] == {}
    assert "a sum divided by 22" in "".join(found["count"].values())
    assert "that a mask has selected" in "".join(found["mask"].values())


def forward_three_times() -> dict[str, str]:
    """What is found in the second loss, where each has several forward passes."""
    loss_kinds._found.clear()
    model = lockstep.DistributedDataParallel(make_model())
    for number, (x, _) in enumerate(Site(alone=False).loader(12, 6)):
        views = [model(x + each) for each in range(3)]
        (sum(view.mean() for view in views) if number == 0 else views[0].sum()).backward()  # type: ignore[union-attr]
    return dict(loss_kinds._found)


def test_several_forward_passes_of_one_loss_are_one_look() -> None:
    assert list(run_ranks(forward_three_times, 2)[0].values()) == ["a sum"]


class Returning(nn.Module):
    """A model whose forward() returns what a function makes of its logits."""

    def __init__(self, function: Callable[[nn.Module, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.function = make_model(), function
        self.weights = nn.Parameter(torch.zeros(CLASSES, dtype=torch.float64))

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.function(self, self.inner(x), y)


def returned_sums() -> dict[str, Callable[[nn.Module, Tensor, Tensor], Tensor]]:
    """Sums over samples that forward() returns."""

    def ctc(model: nn.Module, logits: Tensor, y: Tensor) -> Tensor:
        """As `Wav2Vec2ForCTC` has it, whose `ctc_loss_reduction` is "sum" by default."""
        lengths, count = torch.full((len(y),), 6), torch.ones(len(y), dtype=torch.int64)
        chances = logits.log_softmax(-1).transpose(0, 1)
        return torch.nn.functional.ctc_loss(chances, y[:, :1].clamp(min=1), lengths, count, reduction="sum")

    return {
        "ctc": ctc,
        "cross entropy": lambda model, logits, y: sum_of_words(logits, y),
        "with a mean": lambda model, logits, y: logits.square().mean() - logits.log_softmax(-1)[..., 0].sum(),
        "stacked": lambda model, logits, y: torch.stack([logits.square().mean(), logits.square().sum()]).sum(),
    }


def returned_means() -> dict[str, Callable[[nn.Module, Tensor, Tensor], Tensor]]:
    """Losses that forward() returns, as programs have them, which add up samples with a divisor or not at all."""

    def detector(model: nn.Module, logits: Tensor, y: Tensor) -> Tensor:
        """As torchvision's: by the anchors that were sampled; and a branch that found nothing."""
        chosen = logits[:, :2]
        boxes = torch.nn.functional.smooth_l1_loss(chosen, torch.ones_like(chosen), reduction="sum") / 13
        return boxes + logits[:, 3].sum() * 0 + cross_entropy(logits[:, 0], y[:, 0].clamp(min=0))

    def by_boxes(model: nn.Module, logits: Tensor, y: Tensor) -> Tensor:
        """As DETR's: by the boxes of all ranks, which a collective has counted."""
        return 5 * ((logits - 1).abs().sum() / torch.tensor(7.0).clamp(min=1).item())

    def autoencoder(model: nn.Module, logits: Tensor, y: Tensor) -> Tensor:
        divergence = -0.5 * torch.sum(1 + logits - logits.exp())
        return (torch.nn.functional.mse_loss(logits, logits.detach() + 1, reduction="sum") + divergence) / len(y)

    def correlated(model: nn.Module, logits: Tensor, y: Tensor) -> Tensor:
        """As Barlow Twins': statistics of the batch."""
        one, other = logits[:, 0], logits[:, 1]
        c = one.T @ other
        c.div_(2 * len(y))
        return torch.diagonal(c).add(-1).pow(2).sum() + 0.005 * c.flatten()[1:].pow(2).sum()

    def covariance(model: nn.Module, logits: Tensor, y: Tensor) -> Tensor:
        """As VICReg's."""
        rows = logits[:, 0] - logits[:, 0].mean(0)
        spread = torch.relu(1 - (rows.var(0) + 1e-4).sqrt()).mean()
        return spread + (rows.T @ rows / (len(y) - 1)).flatten()[1:].pow(2).sum().div(CLASSES)

    def regularised(model: Any, logits: Tensor, y: Tensor) -> Tensor:
        weight = model.inner[0].weight
        orthogonal = (weight @ weight.T - torch.eye(len(weight), dtype=weight.dtype)).square().sum()
        return logits.square().mean() + orthogonal + sum(each.square().sum() for each in model.parameters())

    def weighted(model: Any, logits: Tensor, y: Tensor) -> Tensor:
        """By learned uncertainties, of more losses than samples."""
        losses = torch.stack([logits[..., each].square().mean() for each in range(CLASSES)])
        return torch.sum(torch.exp(-model.weights) * losses) + model.weights.sum()

    def balanced(model: nn.Module, logits: Tensor, y: Tensor) -> Tensor:
        chances = logits.flatten(0, 1).softmax(-1)
        return logits.square().mean() + torch.sum(chances.mean(0) * chances.detach().mean(0))

    return {
        "detector": detector,
        "by boxes": by_boxes,
        "autoencoder": autoencoder,
        "correlated": correlated,
        "covariance": covariance,
        "regularised": regularised,
        "weighted": weighted,
        "balanced": balanced,
        "divided before": lambda model, logits, y: (logits.square() / 2 / len(y)).sum(),
        "of another's count": lambda model, logits, y: sum_of_words(logits, y) / ((y != IGNORED).sum() + 1),
        "lockstep.sum": lambda model, logits, y: lockstep.sum(sum_of_words(logits, y)),
    }


def found_in(function: Callable[[nn.Module, Tensor, Tensor], Any], finish: Callable[..., Tensor]) -> dict[str, str]:
    """What is warned of in a loss that forward() returns, and `finish` goes on with."""
    loss_kinds._found.clear()
    model = lockstep.DistributedDataParallel(Returning(function), find_unused_parameters=True)
    for x, y in Site(alone=False).loader(12, 6):
        finish(model(x, y), y).backward()
    return dict(loss_kinds._found)


def sums_that_models_return() -> tuple[dict[str, dict[str, str]], dict[str, dict[str, str]]]:
    scaler = torch.amp.GradScaler("cpu")
    cross = returned_sums()["cross entropy"]
    warned = {name: found_in(way, lambda loss, y: loss) for name, way in returned_sums().items()}
    warned["behind a scaler"] = found_in(cross, lambda loss, y: scaler.scale(loss))
    warned["in halves"] = found_in(cross, lambda loss, y: loss / 2)
    quiet = {name: found_in(way, lambda loss, y: loss) for name, way in returned_means().items()}
    quiet["scaled"] = found_in(returned_means()["balanced"], lambda loss, y: scaler.scale(loss))
    quiet["divided outside"] = found_in(cross, lambda loss, y: loss / len(y))
    quiet["averaged outside"] = found_in(lambda model, logits, y: logits.mean().view(1), lambda loss, y: loss.sum())
    # A prediction without dimensions, which a loss compares; and parts of a loss, whose sum is taken outside.
    quiet["energy"] = found_in(lambda model, logits, y: logits.sum(), lambda energy, y: (energy - 1).square())
    parts = lambda model, logits, y: torch.stack([logits.mean(), logits.square().mean()])  # noqa: E731
    quiet["parts"] = found_in(parts, lambda loss, y: loss.sum() * len(y))
    quiet["dictionary"] = found_in(
        lambda model, logits, y: {"a": logits.mean(), "b": logits.square().mean(), "c": logits.exp().mean()},
        lambda losses, y: torch.stack(list(losses.values())).sum(),
    )
    return warned, quiet


def test_a_sum_that_the_model_returns_is_noticed() -> None:
    warned, quiet = run_ranks(sums_that_models_return, 2)[0]
    assert {name: list(found.values()) for name, found in warned.items()} == {
        **{name: ["a sum"] for name in (*returned_sums(), "behind a scaler")},
        "in halves": ["a sum divided by 2"],
    }
    assert not any(quiet.values()), quiet
