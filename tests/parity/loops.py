"""Training loops as people write them, each a function of a `Site`: on one process, or on a rank with an engine.

A loop gets everything that differs between the two from the site, and otherwise is one program. What it trains is
compared in `test_loops.py`.
"""

from __future__ import annotations

import copy
import gc
import itertools
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.data import Dataset, TensorDataset

import lockstep
from lockstep.batch.share import share_bounds

Loop = Callable[["Site"], None]

EXACT: dict[str, Loop] = {}
REFUSED: dict[str, Loop] = {}  # an error at world sizes that do not divide the batches, and elsewhere exact


def exact(loop: Loop) -> Loop:
    EXACT[loop.__name__] = loop
    return loop


def refused(loop: Loop) -> Loop:
    REFUSED[loop.__name__] = loop
    return loop


class Net(nn.Module):
    """Takes samples of 3 numbers, in whatever they come."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.hidden = nn.Linear(3, 4)
        self.out = nn.Linear(4, 1)
        self.double()

    def forward(self, inputs: Any) -> Tensor:
        if isinstance(inputs, dict):
            inputs = inputs["x"]
        if isinstance(inputs, Point):
            inputs = inputs.x
        if isinstance(inputs, list):
            inputs = torch.stack(inputs) if isinstance(inputs[0], Tensor) else encode(inputs)
        return self.out(torch.tanh(self.hidden(inputs)))


@dataclass
class Point:
    x: Tensor
    y: Tensor


def encode(texts: list[str]) -> Tensor:
    return torch.tensor([[float(ord(letter) % 7) for letter in text] for text in texts], dtype=torch.float64)


class Rows(Dataset[Any]):
    """Samples in the form that `shape` gives them."""

    def __init__(self, count: int, shape: Callable[[Tensor, Tensor, int], Any], seed: int = 0) -> None:
        self.x, self.y = numbers(count, seed)
        self.shape = shape

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.shape(self.x[index], self.y[index], index)


def numbers(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    return x, torch.randn(count, 1, generator=generator, dtype=torch.float64)


def pairs(count: int, seed: int = 0) -> TensorDataset:
    return TensorDataset(*numbers(count, seed))


class Site:
    """Where a loop runs.

    Args:
        alone: on one process, with the bare model, whatever the number of ranks.
    """

    def __init__(self, alone: bool) -> None:
        self.alone = alone
        self.models: list[nn.Module] = []
        self.notes: list[float] = []  # other numbers to compare

    def wrap(self, model: nn.Module) -> nn.Module:
        self.models.append(model)
        return model if self.alone else lockstep.DistributedDataParallel(model)

    def loader(self, dataset: Dataset[Any], batch_size: int, **options: Any) -> Any:
        place = {"rank": 0, "world_size": 1} if self.alone else {}
        return lockstep.DataLoader(dataset, batch_size, shuffle=True, seed=3, **place, **options)

    def part(self, begin: int, end: int) -> slice:
        """This rank's rows of other data."""
        if self.alone:
            return slice(begin, end)
        first, last = share_bounds(end - begin, dist.get_rank(), dist.get_world_size())
        return slice(begin + first, begin + last)

    def no_sync(self, model: Any) -> Any:
        return Nothing() if self.alone else model.no_sync()

    def samples(self, model: Any, count: int) -> Any:
        return Nothing() if self.alone else model.samples(count)

    def mean(self, total: Tensor, count: Any) -> Tensor:
        return total / count if self.alone else lockstep.mean(total, count)

    def parameters(self) -> Tensor:
        values = [parameter.detach().flatten() for model in self.models for parameter in model.parameters()]
        return torch.cat([*values, torch.tensor(self.notes, dtype=torch.float64)])


class Nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def loss_of(output: Tensor, y: Tensor) -> Tensor:
    return (output - y).square().mean()


def sgd(*models: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for model in models for parameter in model.parameters()], lr=0.1, momentum=0.5)


def train(site: Site, batches: Iterable[Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for x, y in batches:
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()


def start(site: Site, count: int = 23, batch_size: int = 6, **options: Any) -> tuple[Any, nn.Module, Any]:
    model = site.wrap(Net())
    return site.loader(pairs(count), batch_size, **options), model, sgd(model)


# ---- look-ahead ------------------------------------------------------------------------------------


def ahead(batches: Iterable[Any], depth: int = 1, change: Callable[[Any], Any] = lambda batch: batch) -> Iterator[Any]:
    waiting: list[Any] = []
    for batch in batches:
        waiting.append(change(batch))
        if len(waiting) > depth:
            yield waiting.pop(0)
    yield from waiting


@exact
def plain(site: Site) -> None:
    loader, model, optimizer = start(site)
    for _ in range(3):
        train(site, loader, model, optimizer)


@exact
def one_batch_ahead(site: Site) -> None:
    loader, model, optimizer = start(site)
    for _ in range(3):
        train(site, ahead(loader), model, optimizer)


@exact
def three_batches_ahead(site: Site) -> None:
    loader, model, optimizer = start(site)
    for _ in range(2):
        train(site, ahead(loader, 3), model, optimizer)


@exact
def ahead_and_copied(site: Site) -> None:
    """What a prefetcher to a device does: the yielded tensors are gone at once."""
    loader, model, optimizer = start(site)
    for _ in range(2):
        train(site, ahead(loader, 1, lambda batch: tuple(tensor.clone() for tensor in batch)), model, optimizer)


@exact
def ahead_and_copied_where_sizes_tell_nothing(site: Site) -> None:
    """23 = 3 * 8 - 1: on some ranks the last share is as large as the others."""
    loader, model, optimizer = start(site, 23, 8)
    for _ in range(2):
        train(site, ahead(loader, 2, lambda batch: tuple(tensor.clone() for tensor in batch)), model, optimizer)


@exact
def ahead_with_small_batches(site: Site) -> None:
    """Ranks without samples have fillers, which may look like the share of a full batch."""
    loader, model, optimizer = start(site, 11, 3)
    for _ in range(2):
        train(site, ahead(loader, 2), model, optimizer)


def fetched_by_a_thread(
    loader: Iterable[Any], depth: int, change: Callable[[Any], Any] = lambda batch: batch
) -> Iterator[Any]:
    """The batches of one epoch, which a thread fetches, changes, and puts into a queue of that depth."""
    queued: queue.Queue[Any] = queue.Queue(depth)

    def fetch() -> None:
        for batch in loader:
            queued.put(change(batch))
        queued.put(None)

    thread = threading.Thread(target=fetch)
    thread.start()
    yield from iter(queued.get, None)
    thread.join()


@exact
def from_a_thread(site: Site) -> None:
    loader, model, optimizer = start(site)
    for _ in range(2):
        train(site, fetched_by_a_thread(loader, 2), model, optimizer)


@exact
def from_a_thread_and_copied(site: Site) -> None:
    loader, model, optimizer = start(site, 23, 8)
    for _ in range(2):
        train(site, fetched_by_a_thread(loader, 3, lambda batch: [tensor * 1.0 for tensor in batch]), model, optimizer)


@exact
def by_the_loader_itself(site: Site) -> None:
    loader, model, optimizer = start(site, device="cpu", prefetch=2)
    train(site, loader, model, optimizer)


# ---- kept and replayed -------------------------------------------------------------------------------


@exact
def a_list_replayed(site: Site) -> None:
    loader, model, optimizer = start(site)
    batches = list(loader)
    for _ in range(3):
        train(site, reversed(batches), model, optimizer)


@exact
def a_list_replayed_and_normalised(site: Site) -> None:
    loader, model, optimizer = start(site, 23, 8)
    batches = list(loader)
    for _ in range(2):
        train(site, [((x - 0.3) / 2, y) for x, y in batches], model, optimizer)


@exact
def cycled(site: Site) -> None:
    loader, model, optimizer = start(site)
    train(site, itertools.islice(itertools.cycle(loader), 11), model, optimizer)


@exact
def used_after_the_loop(site: Site) -> None:
    loader, model, optimizer = start(site)
    for batch in loader:
        last = batch
    train(site, [last], model, optimizer)


@exact
def stopped_early(site: Site) -> None:
    loader, model, optimizer = start(site)
    for _ in range(2):
        train(site, itertools.islice(loader, 2), model, optimizer)
    train(site, loader, model, optimizer)


@exact
def a_deep_copy(site: Site) -> None:
    loader, model, optimizer = start(site, 23, 8)
    train(site, (copy.deepcopy(batch) for batch in ahead(loader)), model, optimizer)


# ---- several loaders, several iterations ---------------------------------------------------------------


@exact
def two_loaders_zipped(site: Site) -> None:
    model = site.wrap(Net())
    optimizer = sgd(model)
    first, second = site.loader(pairs(23), 6), site.loader(pairs(19, seed=1), 5)
    for (x, y), (u, v) in zip(first, second):  # noqa: B905  # of different lengths
        optimizer.zero_grad()
        (loss_of(model(x), y) + 0.5 * loss_of(model(u), v)).backward()
        optimizer.step()


@exact
def two_loaders_in_turn(site: Site) -> None:
    model = site.wrap(Net())
    optimizer = sgd(model)
    other = itertools.cycle(site.loader(pairs(17, seed=1), 7))
    for x, y in site.loader(pairs(23), 6):
        train(site, [(x * 2, y), next(other)], model, optimizer)


def one_after_another(site: Site, keep: Callable[[Any, int], object]) -> None:
    """Loaders whose last batches have one size on some rank; of the first, something stays on rank 0 alone."""
    model = site.wrap(Net())
    optimizer = sgd(model)
    is_first_rank = dist.get_rank() == 0
    kept = []
    for seed, count in enumerate((14, 13, 17)):
        loader = site.loader(pairs(count, seed=seed), 6)
        train(site, loader, model, optimizer)
        if seed == 0 and is_first_rank:
            kept.append(keep(loader, count))
    assert len(kept) == is_first_rank


@exact
def loaders_one_after_another_and_a_batch_kept(site: Site) -> None:
    one_after_another(site, lambda loader, _: next(iter(loader)))


@exact
def loaders_one_after_another_and_one_kept(site: Site) -> None:
    one_after_another(site, lambda loader, _: loader)


@exact
def loaders_in_a_reference_cycle(site: Site) -> None:
    """The garbage collector comes by on rank 0 alone; batches are changed, so that their sizes tell."""
    model = site.wrap(Net())
    optimizer = sgd(model)
    gc.disable()
    try:
        for seed, count in enumerate((14, 13)):
            holder: dict[str, Any] = {"loader": site.loader(pairs(count, seed=seed), 6)}
            holder["itself"] = holder
            if seed == 1 and dist.get_rank() == 0:
                gc.collect()
            train(site, ((x * 2, y) for x, y in holder["loader"]), model, optimizer)
    finally:
        gc.enable()


class Headed(Net):
    """Is told by numbers how often to count each output."""

    def forward(self, inputs: Any, heads: tuple[int, ...]) -> Tensor:
        return super().forward(inputs) * float(sum(heads))


@exact
def numbers_beside_a_changed_batch(site: Site) -> None:
    """As many as a rank has rows of full batches; they are no batch."""
    model = site.wrap(Headed())
    optimizer = sgd(model)
    for x, y in site.loader(pairs(13), 6):
        optimizer.zero_grad()
        loss_of(model(x * 2, (0, 1, 2)), y).backward()
        optimizer.step()


@exact
def evaluated_on_the_training_data(site: Site) -> None:
    loader, model, optimizer = start(site)
    for _ in range(2):
        for step, (x, y) in enumerate(loader):
            if step % 2 == 1:
                with torch.no_grad():
                    for u, v in loader:
                        loss_of(model(u), v)
            train(site, [(x, y)], model, optimizer)


@exact
def evaluated_between_forward_and_backward(site: Site) -> None:
    loader, model, optimizer = start(site)
    for x, y in loader:
        loss = loss_of(model(x), y)
        with torch.no_grad():
            for u, _ in loader:
                model(u)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@exact
def evaluated_with_the_loader_of_torch(site: Site) -> None:
    loader, model, optimizer = start(site)
    held_out = torch.utils.data.DataLoader(pairs(9, seed=2), 4)
    for x, y in loader:
        with torch.no_grad():
            for u, v in held_out:
                loss_of(model(u), v)
        train(site, [(x, y)], model, optimizer)


@exact
def a_validation_iterator_kept_open(site: Site) -> None:
    loader, model, optimizer = start(site)
    validation = itertools.cycle(site.loader(pairs(10, seed=2), 4, evaluation=False))
    for x, y in loader:
        u, v = next(validation)
        train(site, [(x, y)], model, optimizer)
        with torch.no_grad():
            loss_of(model(u), v)


@exact
def two_epochs_interleaved(site: Site) -> None:
    loader, model, optimizer = start(site)
    for first, second in zip(loader, loader, strict=True):
        train(site, [second, first], model, optimizer)


@exact
def two_models_on_one_loader(site: Site) -> None:
    generator, critic = site.wrap(Net(1)), site.wrap(nn.Sequential(Net(2), nn.Sigmoid()))
    of_generator, of_critic = sgd(generator), sgd(critic)
    for x, _ in site.loader(pairs(23), 8):
        noise = x.flip(1) * 0.5  # of the batch's size
        fake = generator(noise).expand(-1, 3)
        of_critic.zero_grad()
        (critic(x).log().mean() + (1 - critic(fake.detach())).log().mean()).neg().backward()
        of_critic.step()
        of_generator.zero_grad()
        critic(fake).log().mean().neg().backward()
        of_generator.step()


@exact
def one_model_behind_another(site: Site) -> None:
    encoder, decoder = site.wrap(Net(1)), site.wrap(nn.Sequential(nn.Linear(1, 3).double(), Net(2)))
    optimizer = sgd(encoder, decoder)
    for x, y in ahead(site.loader(pairs(23), 6)):
        optimizer.zero_grad()
        loss_of(decoder(encoder(x)), y).backward()
        optimizer.step()


@exact
def two_forward_passes_per_batch(site: Site) -> None:
    loader, model, optimizer = start(site)
    for x, y in ahead(loader):
        optimizer.zero_grad()
        first, second = model(x), model(x * 1.1)
        (loss_of(first, y) + (first - second).square().mean()).backward()
        optimizer.step()


# ---- accumulation --------------------------------------------------------------------------------------


def windows(batches: Iterable[Any], size: int) -> Iterator[list[Any]]:
    iterator = iter(batches)
    while window := list(itertools.islice(iterator, size)):
        yield window


@exact
def accumulated(site: Site) -> None:
    loader, model, optimizer = start(site, 23, 4)
    for number, (x, y) in enumerate(loader):
        closes = number % 3 == 2 or number == len(loader) - 1
        with Nothing() if closes else site.no_sync(model):
            (loss_of(model(x), y) / 3).backward()
        if closes:
            optimizer.step()
            optimizer.zero_grad()


@exact
def windows_fetched_first(site: Site) -> None:
    loader, model, optimizer = start(site, 23, 4)
    for window in windows(loader, 3):
        optimizer.zero_grad()
        for number, (x, y) in enumerate(window):
            with Nothing() if number == len(window) - 1 else site.no_sync(model):
                (loss_of(model(x), y) / len(window)).backward()
        optimizer.step()


@exact
def windows_fetched_first_and_changed(site: Site) -> None:
    loader, model, optimizer = start(site, 22, 4)
    for window in windows(loader, 2):
        optimizer.zero_grad()
        for number, (x, y) in enumerate([(x + 0.1, y) for x, y in window]):
            with Nothing() if number == len(window) - 1 else site.no_sync(model):
                (loss_of(model(x), y) / len(window)).backward()
        optimizer.step()


@exact
def many_backward_passes_without_no_sync(site: Site) -> None:
    loader, model, optimizer = start(site)
    for window in windows(loader, 2):
        optimizer.zero_grad()
        for x, y in window:
            (loss_of(model(x), y) / 2).backward()
        optimizer.step()


# ---- what a batch is made of ---------------------------------------------------------------------------


def changed(site: Site, change: Callable[[Tensor], Tensor], count: int = 23, batch_size: int = 6) -> None:
    loader, model, optimizer = start(site, count, batch_size)
    for _ in range(2):
        train(site, ((change(x), y) for x, y in loader), model, optimizer)


@exact
def converted(site: Site) -> None:
    changed(site, lambda x: x.float().double())


@exact
def normalised(site: Site) -> None:
    changed(site, lambda x: (x - 0.1) / 0.7, 23, 8)


@exact
def transposed_and_back(site: Site) -> None:
    changed(site, lambda x: x.t().contiguous().t())


@exact
def columns(site: Site) -> None:
    model = site.wrap(Net())
    optimizer = sgd(model)
    wide = Rows(23, lambda x, y, index: torch.cat([x, y]))
    for batch in ahead(site.loader(wide, 6)):
        train(site, [(batch[:, :3], batch[:, 3:])], model, optimizer)


@exact
def dictionaries(site: Site) -> None:
    model = site.wrap(Net())
    optimizer = sgd(model)
    rows = Rows(23, lambda x, y, index: {"x": x, "y": y, "name": f"sample {index}"})
    for batch in ahead(site.loader(rows, 6)):
        train(site, [(batch, batch["y"])], model, optimizer)


@exact
def dataclasses_made_by_collate(site: Site) -> None:
    model = site.wrap(Net())
    optimizer = sgd(model)
    collate = lambda rows: Point(*(torch.stack(part) for part in zip(*rows, strict=True)))  # noqa: E731
    for point in ahead(site.loader(pairs(23), 6, collate_fn=collate)):
        train(site, [(point, point.y)], model, optimizer)


@exact
def lists_of_tensors(site: Site) -> None:
    model = site.wrap(Net())
    optimizer = sgd(model)
    samples = Rows(23, lambda x, y, index: (x.clone(), y))
    for rows in ahead(site.loader(samples, 6, collate_fn=list)):
        train(site, [([x for x, _ in rows], torch.stack([y for _, y in rows]))], model, optimizer)


@exact
def texts(site: Site) -> None:
    model = site.wrap(Net())
    optimizer = sgd(model)
    words = Rows(23, lambda x, y, index: (f"{index * 37 % 1000:03d}", y))
    for text, y in ahead(site.loader(words, 8)):
        train(site, [(list(text), y)], model, optimizer)


@exact
def with_workers(site: Site) -> None:
    loader, model, optimizer = start(site, num_workers=1)
    train(site, ahead(loader), model, optimizer)


# ---- steps that are left out ---------------------------------------------------------------------------


@exact
def batches_skipped(site: Site) -> None:
    loader, model, optimizer = start(site)
    train(site, (batch for number, batch in enumerate(loader) if number % 2 == 0), model, optimizer)


@exact
def an_exception_then_on(site: Site) -> None:
    loader, model, optimizer = start(site)
    for number, (x, y) in enumerate(loader):
        try:
            loss = loss_of(model(x), y)
            if number == 1:
                raise FloatingPointError
        except FloatingPointError:
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@exact
def half_of_the_steps_without_averaging(site: Site) -> None:
    """Frozen for a step: no parameter of the model gets a gradient."""
    loader, model, optimizer = start(site)
    probe = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    for x, y in loader:
        torch.autograd.grad(loss_of(model(x) + probe, y), probe)
        train(site, [(x, y)], model, optimizer)


@exact
def the_loader_of_torch(site: Site) -> None:
    """Split by hand, evenly."""
    model = site.wrap(Net())
    optimizer = sgd(model)
    x, y = numbers(60)
    for first in range(0, 60, 30):
        own = site.part(first, first + 30)
        train(site, torch.utils.data.DataLoader(TensorDataset(x[own], y[own]), 30), model, optimizer)


@exact
def rows_of_other_data_said(site: Site) -> None:
    """Split by hand, and not evenly."""
    model = site.wrap(Net())
    optimizer = sgd(model)
    x, y = numbers(23)
    own = site.part(0, 23)
    for _ in range(2):
        with site.samples(model, own.stop - own.start):
            train(site, [(x[own], y[own])], model, optimizer)


class Part(torch.utils.data.IterableDataset[Any]):
    """As docs/same-answer.md prints it."""

    def __init__(self, stream: Iterable[Any], share: int, rank: int, world_size: int) -> None:
        self.stream, self.share, self.rank, self.world_size = stream, share, rank, world_size

    def __iter__(self) -> Iterator[Any]:
        for number, sample in enumerate(self.stream):
            if number // self.share % self.world_size == self.rank:
                yield sample


def a_stream_split_by_hand(site: Site) -> None:
    """Of batches that the ranks divide; of the last one some ranks have no whole share."""
    model = site.wrap(Net())
    optimizer = sgd(model)
    rank, world_size = (0, 1) if site.alone else (dist.get_rank(), dist.get_world_size())
    share = 6 // world_size
    stream = list(zip(*numbers(6 * 4 + 3), strict=True))
    loader = torch.utils.data.DataLoader(Part(stream, share, rank, world_size), batch_size=share, drop_last=True)
    any_rank = bool if site.alone else lockstep.any
    batches = iter(loader)
    while not any_rank((batch := next(batches, None)) is None):
        train(site, [batch], model, optimizer)


def train_on_slices(site: Site, passes: Callable[[Tensor, Tensor], list[list[Tensor]]]) -> None:
    """Four batches, each in two parts, for each of which the model is called several times."""
    model = site.wrap(Net())
    optimizer = sgd(model)
    for x, y in site.loader(Rows(240, lambda x, _, __: (x, x.flip(0))), 60):
        optimizer.zero_grad()
        for number, of_part in enumerate(passes(x, y)):
            with Nothing() if number == 1 else site.no_sync(model):
                (torch.stack([model(part).exp().mean() for part in of_part]).sum() / 2).backward()
        optimizer.step()


@exact
def slices_that_come_twice(site: Site) -> None:
    """As with R-Drop, which compares two dropout masks."""
    train_on_slices(site, lambda x, y: [[part, part] for part in x.chunk(2)])


@exact
def slices_of_several_tensors_of_a_batch(site: Site) -> None:
    """As with DPO, of which each sample has two answers."""
    train_on_slices(site, lambda x, y: [list(parts) for parts in zip(x.chunk(2), y.chunk(2), strict=True)])


class Implicit(Net):
    """Returns the coordinates by which its output is differentiated, as SIREN does."""

    def forward(self, coordinates: Any) -> Any:
        coordinates = coordinates.clone().detach().requires_grad_(True)
        return super().forward(coordinates), coordinates


@exact
def slopes_by_what_the_model_returns(site: Site) -> None:
    model = site.wrap(Implicit())
    optimizer = sgd(model)
    for x, y in site.loader(pairs(60), 30):
        optimizer.zero_grad()
        output, coordinates = model(x)
        (slope,) = torch.autograd.grad(output.sum(), coordinates, create_graph=True)
        (loss_of(output, y) + slope.square().mean()).backward()
        optimizer.step()


class Graphs:
    """A batch that may be called, as those of PyTorch Geometric."""

    def __init__(self, rows: list[tuple[Tensor, Tensor]]) -> None:
        self.x, self.y = map(torch.stack, zip(*rows, strict=True))

    def __call__(self) -> None:
        raise AssertionError


class OfGraphs(Net):
    def forward(self, graphs: Any) -> Tensor:
        return super().forward(graphs.x)


@exact
def batches_that_may_be_called(site: Site) -> None:
    model = site.wrap(OfGraphs())
    optimizer = sgd(model)
    for graphs in site.loader(pairs(23), 6, collate_fn=Graphs):
        optimizer.zero_grad()
        loss_of(model(graphs), graphs.y).backward()
        optimizer.step()


# ---- what the engine cannot read ----------------------------------------------------------------------


@refused
def rows_of_other_data(site: Site) -> None:
    """Split by hand, and not evenly."""
    model = site.wrap(Net())
    optimizer = sgd(model)
    x, y = numbers(61)
    own = site.part(0, 61)
    train(site, [(x[own], y[own])], model, optimizer)


@refused
def micro_batches_cut_from_a_batch(site: Site) -> None:
    loader, model, optimizer = start(site, 24, 12)
    for x, y in loader:
        optimizer.zero_grad()
        parts = list(zip(x.chunk(2), y.chunk(2), strict=True))
        for number, (part, of_part) in enumerate(parts):
            with Nothing() if number == len(parts) - 1 else site.no_sync(model):
                (loss_of(model(part), of_part) / len(parts)).backward()
        optimizer.step()


@refused
def slices_of_which_some_come_twice(site: Site) -> None:
    train_on_slices(site, lambda x, y: [[x.chunk(2)[0]] * 2, [x.chunk(2)[1]]])


@refused
def rows_that_a_mask_has_selected(site: Site) -> None:
    """Of batches that the ranks divide, but a mean over what a mask has selected, another number on each rank."""
    loader, model, optimizer = start(site, 60, 30)
    for x, _ in loader:
        optimizer.zero_grad()
        model(x[x[:, 0] > 0]).square().mean().backward()
        optimizer.step()


@refused
def the_first_rows_of_each_batch(site: Site) -> None:
    loader, model, optimizer = start(site, 60, 15)
    train(site, ((x[:2], y[:2]) for x, y in loader), model, optimizer)


@refused
def lists_of_views_of_the_data(site: Site) -> None:
    """The memory says nothing, and a sample's size may be that of a batch."""
    model = site.wrap(Net())
    optimizer = sgd(model)
    for rows in ahead(site.loader(pairs(23), 6, collate_fn=list)):
        train(site, [([x for x, _ in rows], torch.stack([y for _, y in rows]))], model, optimizer)


@refused
def batches_joined(site: Site) -> None:
    model = site.wrap(Net())
    optimizer = sgd(model)
    both = zip(site.loader(pairs(23), 6), site.loader(pairs(20, seed=1), 5), strict=True)
    train(site, ((torch.cat([x, u]), torch.cat([y, v])) for (x, y), (u, v) in both), model, optimizer)


@refused
def noise_beside_the_batch(site: Site) -> None:
    """The same noise on every rank: averaging plainly would be right for it, but nothing says so."""
    loader, model, optimizer = start(site)
    noise = numbers(13, seed=5)[0]
    for x, y in loader:
        optimizer.zero_grad()
        (loss_of(model(x), y) + model(noise).square().mean()).backward()
        optimizer.step()


@refused
def sequence_first(site: Site) -> None:
    model = site.wrap(Recurrent())
    optimizer = sgd(model)
    sequences = Rows(23, lambda x, y, index: (x.repeat(13, 1), y))
    train(site, ((x.transpose(0, 1) * 1.0, y) for x, y in site.loader(sequences, 6)), model, optimizer)


class Recurrent(nn.Module):
    """Takes sequences of 3 numbers, sequence first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.LSTM(3, 1).double()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs)[0][-1]


# ---- said by the user -----------------------------------------------------------------------------------


@exact
def noise_beside_the_batch_said(site: Site) -> None:
    loader, model, optimizer = start(site)
    noise = numbers(13, seed=5)[0]
    for x, y in loader:
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        with site.samples(model, len(noise)):
            loss = loss + model(noise).square().mean()
        loss.backward()
        optimizer.step()


@exact
def sequence_first_said(site: Site) -> None:
    model = site.wrap(Recurrent())
    optimizer = sgd(model)
    sequences = Rows(23, lambda x, y, index: (x.repeat(4, 1), y))
    for batch in ahead(site.loader(sequences, 6)):
        x, y = batch
        with site.samples(model, 0 if lockstep.is_filler(batch) else len(x)):
            train(site, [(x.transpose(0, 1) * 1.0, y)], model, optimizer)


@exact
def batches_joined_said(site: Site) -> None:
    model = site.wrap(Net())
    optimizer = sgd(model)
    both = zip(site.loader(pairs(23), 6), site.loader(pairs(20, seed=1), 5), strict=True)
    for first, second in both:
        parts = [part for part in (first, second) if not lockstep.is_filler(part)] or [first]
        x, y = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        with site.samples(model, 0 if lockstep.is_filler(parts[0]) else len(x)):
            train(site, [(x, y)], model, optimizer)


# ---- models in transforms of torch.func ------------------------------------------------------------------


def transformed(site: Site, outputs_of: Callable[[nn.Module, Tensor], tuple[Tensor, ...]]) -> None:
    """The loss contains all of `outputs_of(model, x)`, the first of which is the model's output."""
    loader, model, optimizer = start(site)
    for x, y in loader:
        optimizer.zero_grad()
        output, *derivatives = outputs_of(model, x)
        (loss_of(output, y) + sum(each.square().mean() for each in derivatives)).backward()
        optimizer.step()


def along_ones(function: Callable[[Tensor], Any], x: Tensor) -> Any:
    return torch.func.jvp(function, (x,), (torch.ones_like(x),))


@exact
def outputs_and_their_tangents(site: Site) -> None:
    transformed(site, along_ones)


@exact
def tangents_in_a_target(site: Site) -> None:
    """As consistency and mean flow models are trained."""
    loader, model, optimizer = start(site)
    for x, y in loader:
        optimizer.zero_grad()
        output, tangent = along_ones(model, x)
        loss_of(output, y - 0.1 * tangent.detach()).backward()
        optimizer.step()


@exact
def second_derivatives_in_forward_mode(site: Site) -> None:
    def outputs_of(model: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        (output, first), (_, second) = along_ones(lambda point: along_ones(model, point), x)
        return output, first, second

    transformed(site, outputs_of)


@exact
def a_level_of_forward_mode(site: Site) -> None:
    def outputs_of(model: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        with forward_ad.dual_level():
            output, tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x))))
        assert tangent is not None
        return output, tangent

    transformed(site, outputs_of)


@exact
def jacobians_of_samples(site: Site) -> None:
    transformed(site, lambda model, x: (torch.func.vmap(model)(x), torch.func.vmap(torch.func.jacfwd(model))(x)))


@exact
def the_output_of_vjp(site: Site) -> None:
    transformed(site, lambda model, x: (torch.func.vjp(model, x)[0],))


@exact
def tangents_of_two_models_in_a_row(site: Site) -> None:
    first, second = site.wrap(nn.Sequential(Net(2), nn.Linear(1, 3).double())), site.wrap(Net())
    optimizer = sgd(first, second)
    for x, y in site.loader(pairs(23), 6):
        optimizer.zero_grad()
        output, tangent = along_ones(lambda point: second(first(point)), x)
        (loss_of(output, y) + tangent.square().mean()).backward()
        optimizer.step()
