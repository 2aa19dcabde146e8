"""The rows of docs/same-answer.md: each test has the name of the row that it proves.

What is the same is compared with one process. Of what is not, a test shows both: that it differs (or is refused), and
that what the row says to write makes it the same.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import lockstep
import loops
from lockstep.errors import DataError
from lockstep.testing import run_ranks
from loops import Net, loss_of, pairs, sgd, train

TOLERANCE = 1e-12
CLASSES = 4
IGNORED = -100

Program = Callable[["Site"], None]


class Site(loops.Site):
    """On one process with a plain model, or on a rank with an engine; with what the row says to write, or without it.

    Args:
        alone: on one process.
        heeds: writes what the row says.
    """

    def __init__(self, alone: bool, heeds: bool = True) -> None:
        super().__init__(alone)
        self.heeds = heeds

    @property
    def changes(self) -> bool:
        """Whether to write what the row says: on one process there is no need to."""
        return self.heeds and not self.alone

    def sum(self, total: Tensor) -> Tensor:
        return lockstep.sum(total) if self.changes else total

    def fraction(self, total: Tensor, count: Tensor) -> Tensor:
        return lockstep.mean(total, count) if self.changes else total / count


def distance(program: Program, heeds: bool = True) -> float:
    """How far the ranks end from one process."""
    alone, ranks = Site(alone=True), Site(alone=False, heeds=heeds)
    program(alone)
    program(ranks)
    return (ranks.parameters() - alone.parameters()).abs().max().item()


def assert_same(program: Program, world_size: int = 3) -> None:
    assert max(run_ranks(distance, world_size, program)) <= TOLERANCE


def assert_same_only_if_heeded(program: Program, world_size: int = 3) -> None:
    assert min(run_ranks(distance, world_size, program, False)) > 1e-4
    assert_same(program, world_size)


def unheeded(program: Program, site: Site) -> None:
    """The program as somebody writes it who has not read the row."""
    site.heeds = site.alone
    program(site)


def assert_refused(program: Program, words: str, world_size: int = 3, backend: str = "lockstep") -> None:
    """Whoever sees it raises; ranks that see nothing wait for those, and hear of it."""
    outcomes = run_ranks(distance, world_size, program, expect_errors=True, backend=backend)
    assert [text for text in map(str, outcomes) if words in text], outcomes


def steps(site: Site, loss: Callable[[Any, Tensor, Tensor], Tensor], count: int = 23, batch_size: int = 6) -> None:
    """An epoch and a half on labelled samples, with a loss of model, inputs and labels."""
    torch.manual_seed(2)
    model = site.wrap(nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, CLASSES)).double())
    optimizer = sgd(model)
    loader = site.loader(loops.Rows(count, lambda x, y, index: (x, index % CLASSES)), batch_size)
    for x, labels in itertools.chain(loader, itertools.islice(loader, 2)):
        optimizer.zero_grad()
        loss(model, x, labels).backward()
        optimizer.step()


# ---- what is the same --------------------------------------------------------------------------------


def of_all_ranks(dataset: Any, world_size: int, num_workers: int = 0) -> list[list[Any]]:
    """The samples of two epochs, batch by batch, as the ranks get them."""
    place = {"shuffle": True, "seed": 3, "num_workers": num_workers, "world_size": world_size, "collate_fn": list}
    loaders = [lockstep.DataLoader(dataset, 6, rank=rank, **place) for rank in range(world_size)]
    batches = itertools.chain(zip(*loaders, strict=True), zip(*loaders, strict=True))
    # Without tensors nothing says what a filler is; it stands last, and repeats the first sample.
    return [list(dict.fromkeys(itertools.chain(*parts))) for parts in batches]


def test_order_of_samples() -> None:
    expected = of_all_ranks(range(23), 1)
    for world_size in (2, 3, 7):
        assert of_all_ranks(range(23), world_size) == expected
    assert [sorted(itertools.chain(*epoch)) for epoch in (expected[:4], expected[4:])] == [list(range(23))] * 2


class Augmented:
    """Samples that draw from every generator there is."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return index, random.random(), torch.rand(()).item()


def test_augmentation() -> None:
    expected = of_all_ranks(Augmented(), 1)
    assert of_all_ranks(Augmented(), 3) == expected
    assert of_all_ranks(Augmented(), 2, num_workers=1) == expected


def start_apart() -> list[float]:
    torch.manual_seed(dist.get_rank())
    model = lockstep.DistributedDataParallel(nn.Linear(3, 1))
    return [value for parameter in model.parameters() for value in parameter.flatten().tolist()]


def test_initial_weights() -> None:
    first, *others = run_ranks(start_apart, 3)
    assert others == [first, first]


def test_gradients() -> None:
    assert_same(loops.plain)


def last_batches(site: Site) -> None:
    """Batches of 3, then one of 2: with 5 ranks most hold nothing."""
    model = site.wrap(Net())
    for _ in range(2):
        train(site, site.loader(pairs(11), 3), model, sgd(model))


def test_last_batch() -> None:
    assert_same(last_batches, 5)


def test_accumulation() -> None:
    assert_same(loops.accumulated)
    assert_same(loops.windows_fetched_first)


def test_look_ahead() -> None:
    assert_same(loops.three_batches_ahead)
    assert_same(loops.from_a_thread)
    assert_same(loops.by_the_loader_itself)


def test_replay() -> None:
    assert_same(loops.a_list_replayed)
    assert_same(loops.cycled)


def test_several_loaders() -> None:
    assert_same(loops.two_loaders_zipped)
    assert_same(loops.two_loaders_in_turn)


def test_several_models() -> None:
    assert_same(loops.two_models_on_one_loader)
    assert_same(loops.one_model_behind_another)


def looked_up(site: Site) -> None:
    """SparseAdam steps the rows that have an entry, and no others."""
    torch.manual_seed(2)
    embedding = nn.Embedding(23, 3, sparse=True)
    model = site.wrap(nn.Sequential(embedding, nn.Linear(3, 1)).double())
    optimizers = [torch.optim.SparseAdam([embedding.weight], lr=0.1), sgd(model[1] if site.alone else model.module[1])]
    dataset = loops.Rows(11, lambda x, y, index: (torch.tensor(2 * index), y))
    for index, y in itertools.chain(site.loader(dataset, 3), site.loader(dataset, 3)):
        model.zero_grad()
        loss_of(model(index), y).backward()
        for optimizer in optimizers:
            optimizer.step()


def test_sparse_gradients() -> None:
    assert_same(looked_up)
    assert_same(looked_up, 5)


def regularised(site: Site) -> None:
    def loss(model: Any, x: Tensor, labels: Tensor) -> Tensor:
        squares: Any = sum(parameter.square().sum() for parameter in model.parameters())
        return cross_entropy(model(x), labels) + 0.01 * squares

    steps(site, loss)


def test_forward_mode_derivatives() -> None:
    assert_same(loops.outputs_and_their_tangents)
    assert_same(loops.jacobians_of_samples)


def test_terms_on_parameters() -> None:
    assert_same(regularised)


def clipped(site: Site) -> None:
    loader, model, optimizer = loops.start(site)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for x, y in loader:
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        site.notes.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
        schedule.step()


def test_clipping_and_schedules() -> None:
    assert_same(clipped)


def evaluated(site: Site) -> None:
    model = site.wrap(Net()).eval()
    loss = lockstep.metrics.Mean()
    with torch.no_grad():
        for x, y in site.loader(pairs(11), 4, evaluation=True):
            loss.update(loss_of(model(x), y))
    site.notes.append(loss.compute() if site.alone else lockstep.metrics.synchronize(loss)[0])


def test_evaluation() -> None:
    assert_same(evaluated)
    assert_same(evaluated, 5)


def measured(site: Site) -> None:
    """Of a training with fillers; in the second epoch with batches ahead."""
    loader, model, optimizer = loops.start(site, 11, 3)
    for is_ahead in (False, True):
        loss = lockstep.metrics.Mean()
        for x, y in loops.ahead(loader) if is_ahead else loader:
            value = loss_of(model(x), y)
            loss.update(value, weight=len(y) if is_ahead else None)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
        site.notes.append(loss.compute() if site.alone else lockstep.metrics.synchronize(loss)[0])


def test_metrics() -> None:
    assert_same(measured, 5)


def go_on(state: dict[str, Any] | None, num_steps: int) -> dict[str, Any]:
    """Train for some steps from a state, and return the next."""
    loader = lockstep.DataLoader(pairs(23), 6, shuffle=True, seed=3)
    model = lockstep.DistributedDataParallel(Net())
    optimizer = sgd(model)
    if state is not None:
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["loader"])
    while num_steps > 0:
        for x, y in itertools.islice(loader, num_steps):
            train(Site(alone=False), [(x, y)], model, optimizer)
            num_steps -= 1
            at = loader.state_dict()
    return {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "loader": at}


def test_checkpoints() -> None:
    (expected,) = run_ranks(go_on, 1, None, 7)
    state = run_ranks(go_on, 3, None, 2)[0]
    found = run_ranks(go_on, 2, state, 5)[0]
    assert found["loader"] == expected["loader"]
    for name, value in expected["model"].items():
        torch.testing.assert_close(found["model"][name], value, rtol=0, atol=TOLERANCE)


# ---- losses that are no mean over samples ------------------------------------------------------------


def summed(site: Site) -> None:
    steps(site, lambda model, x, labels: site.sum(0.1 * cross_entropy(model(x), labels, reduction="sum")))


def test_sums() -> None:
    assert_same_only_if_heeded(summed)


def by_tokens(site: Site) -> None:
    def loss(model: Any, x: Tensor, labels: Tensor) -> Tensor:
        labels = torch.where(labels == 3, IGNORED, labels)
        total = cross_entropy(model(x), labels, ignore_index=IGNORED, reduction="sum")
        return site.fraction(total, (labels != IGNORED).sum())

    steps(site, loss)


def test_means_over_tokens() -> None:
    assert_same_only_if_heeded(by_tokens)


def by_class_weights(site: Site) -> None:
    weight = torch.tensor([1.0, 5.0, 0.2, 2.0], dtype=torch.float64)

    def loss(model: Any, x: Tensor, labels: Tensor) -> Tensor:
        total = cross_entropy(model(x), labels, weight=weight, reduction="sum")
        return site.fraction(total, weight[labels].sum())

    steps(site, loss)


def test_class_weights() -> None:
    assert_same_only_if_heeded(by_class_weights)


def masked(site: Site) -> None:
    def loss(model: Any, x: Tensor, labels: Tensor) -> Tensor:
        mask = x > -0.5
        return site.fraction((model(x)[:, :3].square() * mask).sum(), mask.sum())

    steps(site, loss)


def test_masks() -> None:
    assert_same_only_if_heeded(masked)


def contrastive(site: Site) -> None:
    def loss(model: Any, x: Tensor, labels: Tensor) -> Tensor:
        features = model(x)
        features = lockstep.all_gather(features) if site.changes else features
        return (features @ features.t()).logsumexp(1).mean()

    steps(site, loss)


def test_contrastive_losses() -> None:
    assert_same_only_if_heeded(contrastive)


def by_a_global_count(site: Site) -> None:
    """As for torch's engine: divided by the count of all ranks, and multiplied by their number."""

    def loss(model: Any, x: Tensor, labels: Tensor) -> Tensor:
        counted = (labels != 3).sum()
        labels = torch.where(labels == 3, IGNORED, labels)
        total = cross_entropy(model(x), labels, ignore_index=IGNORED, reduction="sum")
        if site.alone:
            return total / counted
        dist.all_reduce(counted)
        value = total * dist.get_world_size() / counted
        return lockstep.global_loss(value) if site.heeds else value

    steps(site, loss)


def test_manually_divided_losses() -> None:
    assert_same_only_if_heeded(by_a_global_count)


# ---- what goes into the model ------------------------------------------------------------------------


def cut_by_the_sampler(site: Site) -> None:
    loader, model, optimizer = loops.start(site, 60, 15)
    chosen = torch.utils.data.Subset(loader.dataset, range(0, 60, 7))
    train(site, site.loader(chosen, 2), model, optimizer)


def test_slices_of_a_batch() -> None:
    assert_refused(loops.the_first_rows_of_each_batch, "with model.samples(n)", 2)
    assert_same(cut_by_the_sampler)


def test_batches_split_into_micro_batches() -> None:
    assert_same(loops.micro_batches_cut_from_a_batch, 2)
    assert_refused(loops.micro_batches_cut_from_a_batch, "All parts of a batch must have the same size", 5)
    assert_same(loops.accumulated, 5)


def test_inputs_whose_first_dimension_is_not_the_batch() -> None:
    assert_refused(loops.sequence_first, "with model.samples(n)")
    assert_same(loops.sequence_first_said)


def test_lists() -> None:
    assert_same(loops.lists_of_tensors)
    assert_same(loops.lists_of_views_of_the_data)


def test_noise_as_an_extra_input() -> None:
    assert_refused(loops.noise_beside_the_batch, "with model.samples(n)")
    assert_same(loops.noise_beside_the_batch_said)


def test_data_from_other_loaders() -> None:
    assert_same(loops.the_loader_of_torch)
    assert_refused(loops.rows_of_other_data, "with model.samples(n)")
    assert_same(loops.rows_of_other_data_said)


class Endless(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(23))


def test_iterable_data() -> None:
    with pytest.raises(DataError, match=r"pass list\(dataset\)"):
        lockstep.DataLoader(Endless(), 6)
    assert of_all_ranks(list(Endless()), 3) == of_all_ranks(range(23), 1)
    assert_same(loops.a_stream_split_by_hand)


# ---- what the loop does ------------------------------------------------------------------------------


def count_by_hand() -> dict[str, float]:
    """The number of samples, summed over ranks."""
    counts = {"len": 0.0, "is_filler": 0.0, "evaluation": 0.0}
    metric = lockstep.metrics.Sum()
    for x, y in lockstep.DataLoader(pairs(11), 3):
        counts["len"] += len(y)
        counts["is_filler"] += 0 if lockstep.is_filler(x) else len(y)
        metric.update(torch.ones_like(y))
    for _, y in lockstep.DataLoader(pairs(11), 3, evaluation=True):
        counts["evaluation"] += len(y)
    sums = torch.tensor(list(counts.values()))
    dist.all_reduce(sums)
    return {**dict(zip(counts, sums.tolist(), strict=True)), "metric": lockstep.metrics.synchronize(metric)[0]}


def test_counting_samples() -> None:
    counts = run_ranks(count_by_hand, 5)[0]
    assert counts.pop("len") > 11
    assert set(counts.values()) == {11}


def logged(site: Site) -> None:
    loader, model, optimizer = loops.start(site, 11, 3)
    for x, y in loader:
        loss = loss_of(model(x), y)
        shown = lockstep.mean(loss * len(y), len(y)) if site.changes else loss
        site.notes.append(shown.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_logged_losses() -> None:
    assert_same_only_if_heeded(logged, 2)


def stopped(site: Site) -> None:
    """Trains until the loss is small: on every rank at the same step."""
    loader, model, optimizer = loops.start(site, 23, 8)
    for x, y in itertools.islice(itertools.cycle(loader), 40):
        loss = loss_of(model(x), y)
        value = lockstep.mean(loss * len(y), len(y)) if site.changes else loss
        if value.item() < 0.3:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        site.notes[:] = [len(site.notes) + 1.0]


def test_branches_on_a_loss() -> None:
    outcomes = run_ranks(distance, 2, stopped, False, expect_errors=True)
    assert any(isinstance(outcome, Exception) for outcome in outcomes), outcomes
    assert_same(stopped, 2)


def mixed(site: Site) -> None:
    """Mixup with a coefficient that is drawn for each step."""
    if not site.alone:
        random.seed(dist.get_rank())
    generator = torch.Generator().manual_seed(9)

    def loss(model: Any, x: Tensor, labels: Tensor) -> Tensor:
        by_all = torch.rand((), generator=generator, dtype=torch.float64)
        share = by_all if site.alone or site.heeds else random.random()
        return cross_entropy(model(x * share), labels)

    steps(site, loss)


def test_random_choices_in_the_loop() -> None:
    assert_same_only_if_heeded(mixed)


def minimised(site: Site) -> None:
    """By LBFGS on the whole data set, which neither 2 nor 3 ranks divide."""
    model = site.wrap(Net())
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.3, max_iter=4, line_search_fn="strong_wolfe")
    for x, y in itertools.chain(site.loader(pairs(23), 23), site.loader(pairs(23), 23)):

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)


def decided(site: Site) -> None:
    """A closure whose loss an optimizer of one's own judges: it goes back if a step was too far."""
    model = site.wrap(Net())
    optimizer = sgd(model)
    for x, y in itertools.islice(itertools.cycle(site.loader(pairs(23), 23)), 6):

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            return lockstep.mean(loss * len(y), len(y)) if site.changes else loss

        before = closure().item()
        optimizer.step()
        gained = before - closure().item()
        optimizer.param_groups[0]["lr"] *= 1.3 + gained


def test_optimizers_that_use_the_loss() -> None:
    # A line search passes on what a mean is rounded by.
    assert max(run_ranks(distance, 3, minimised)) <= 1e-9
    assert_refused(functools.partial(unheeded, decided), "have received the same gradients since")
    assert_same(decided)


# ---- layers and arithmetic ---------------------------------------------------------------------------


def draw_masks(seed: int | None) -> tuple[list[float], list[list[bool]]]:
    """Initial weights, and the masks of two steps."""
    with lockstep.init(seed=seed):
        net = nn.Linear(3, 2)
        weights = net.weight.flatten().tolist()
        model = lockstep.DistributedDataParallel(nn.Sequential(net, nn.Dropout()))
        return weights, [(model(torch.ones(32, 3)) == 0).flatten().tolist() for _ in range(2)]


def test_dropout() -> None:
    alike = run_ranks(draw_masks, 3, None, init=False)  # seeded with 0 by the rig
    assert alike == [alike[0]] * 3
    ((weights, masks),) = run_ranks(draw_masks, 1, 7, init=False)
    found = run_ranks(draw_masks, 3, 7, init=False)
    assert [one for one, _ in found] == [weights] * 3
    assert found[0][1] == masks
    assert not any(one == other for one, other in itertools.combinations([own for _, own in found], 2))
    assert run_ranks(draw_masks, 3, 7, init=False) == found


def normalised(site: Site, count: int = 22) -> None:
    torch.manual_seed(2)
    net: nn.Module = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)).double()
    model = site.wrap(lockstep.convert_sync_batchnorm(net) if site.changes else net)
    train(site, site.loader(pairs(count), 6), model, sgd(model))


def test_batch_normalization() -> None:
    assert_same_only_if_heeded(normalised, 2)


def normalised_with_one(site: Site) -> None:
    """The last batch leaves 2 samples to one rank, and 1 to the other."""
    normalised(site, 21)


def normalised_without_it(site: Site) -> None:
    torch.manual_seed(2)
    model = site.wrap(nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)).double())
    train(site, site.loader(pairs(21), 6, drop_last=True), model, sgd(model))
    site.notes, site.models = [1.0], []  # it trains, with the statistics of each rank's samples


def test_one_sample_on_a_rank() -> None:
    outcomes = run_ranks(distance, 2, normalised_with_one, False, expect_errors=True)
    assert any("model = lockstep.convert_sync_batchnorm(model)" in str(outcome) for outcome in outcomes), outcomes
    assert_same(normalised_with_one, 2)
    assert run_ranks(distance, 2, normalised_without_it) == [0.0, 0.0]


def train_twice(dtype: torch.dtype) -> list[Tensor]:
    """Parameters of two trainings."""
    found = []
    for _ in range(2):
        model = lockstep.DistributedDataParallel(Net().to(dtype))
        optimizer = sgd(model)
        for x, y in lockstep.DataLoader(pairs(23), 6, shuffle=True, seed=3):
            train(Site(alone=False), [(x.to(dtype), y.to(dtype))], model, optimizer)
        found.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    return found


def test_rounding() -> None:
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-14)):
        ((expected, _),) = run_ranks(train_twice, 1, dtype)
        of_ranks = [one for both in run_ranks(train_twice, 3, dtype) for one in both]
        assert all(torch.equal(one, of_ranks[0]) for one in of_ranks), "not the same bits on all ranks, and again"
        torch.testing.assert_close(of_ranks[0], expected, rtol=0, atol=tolerance)


def train_deterministically() -> list[Tensor]:
    torch.use_deterministic_algorithms(True)
    try:
        return train_twice(torch.float32)
    finally:
        torch.use_deterministic_algorithms(False)


def test_nondeterministic_operators() -> None:
    of_ranks = [one for both in run_ranks(train_deterministically, 2) for one in both]
    assert all(torch.equal(one, of_ranks[0]) for one in of_ranks)
