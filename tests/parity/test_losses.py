"""Losses that are no mean over samples, with the function that each needs: one process's training on any ranks."""

from __future__ import annotations

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
    """A penalty on the gradient of a mean, which each rank keeps computing with."""

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
    found = {}
    for name, program in LOSSES.items():
        alone, ranks = Site(alone=True), Site(alone=False)
        program(alone)
        program(ranks)
        found[name] = (ranks.result() - alone.result()).abs().max().item()
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


def gather_by_torch() -> float:
    from torch.distributed._functional_collectives import all_gather_tensor_autograd

    alone = make_model()
    alone(torch.ones(2 * dist.get_world_size(), 3, dtype=torch.float64)).square().sum().backward()
    model = lockstep.DistributedDataParallel(make_model())
    features = all_gather_tensor_autograd(model(torch.ones(2, 3, dtype=torch.float64)), 0, dist.group.WORLD)
    lockstep.global_loss(features.square().sum()).backward()
    pairs = zip(alone.parameters(), model.parameters(), strict=True)
    return max((one.grad - other.grad).abs().max().item() for one, other in pairs)


def test_a_loss_over_what_torch_has_gathered_is_right_where_the_ranks_divide_the_batch() -> None:
    assert max(run_ranks(gather_by_torch, 2)) <= TOLERANCE


def hand_over_a_filler() -> None:
    model = lockstep.DistributedDataParallel(make_model())
    for x, _ in site_loader():
        lockstep.global_loss(model(x).sum())


def site_loader() -> Any:
    return Site(alone=False).loader(7, 6)


def test_a_global_loss_with_a_filler_is_an_error() -> None:
    outcomes = run_ranks(hand_over_a_filler, 2, expect_errors=True)
    assert outcomes[0] is None
    assert "has a filler" in str(outcomes[1])
    assert "lockstep.is_filler" in str(outcomes[1])


@pytest.mark.parametrize("function", [lambda x: lockstep.mean(x, 1), lockstep.sum, lockstep.global_loss])
def test_a_loss_with_dimensions_is_an_error(function: Callable[[Any], Tensor]) -> None:
    for wrong in (torch.ones(2), torch.tensor(1), 1.0):
        with pytest.raises(lockstep.errors.InputTypeError, match="without dimensions"):
            function(wrong)
    with pytest.raises(lockstep.errors.InputTypeError, match=r"count\.sum"):
        lockstep.mean(torch.ones(()), torch.ones(2))


@pytest.mark.parametrize("count", ["3", -1, None, [2]])
def test_a_count_that_counts_nothing_is_an_error(count: Any) -> None:
    """Text that is a number was taken, and so was -1."""
    with pytest.raises(lockstep.errors.InputError, match="expected how many items"):
        lockstep.mean(torch.ones(()), count)


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
            lockstep.errors.InputError, match=r"the result of lockstep\.all_gather.*Leave global_loss out"
        ):
            lockstep.global_loss(lockstep.all_gather(model(x)).square().sum())


def test_a_loss_of_what_was_gathered_is_no_global_loss() -> None:
    run_ranks(global_loss_of_gathered, 2)
