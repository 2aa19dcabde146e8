"""`DataLoader`: torch's loader with the global batch size."""

from __future__ import annotations

import copy
import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias, TypeVar, cast

import torch
import torch.utils.data

from lockstep import batch, log
from lockstep.data.batch_sampler import GlobalBatches
from lockstep.data.checks import (
    STATE_VERSION,
    check_batch_sampler,
    check_dataset,
    check_flags,
    check_integer,
    check_own_batches,
    check_permutation,
    check_rank_and_size,
    check_refused,
    check_same_order,
    check_sampler,
    check_state,
    check_workers,
    find_rank_and_size,
    is_fixed,
)
from lockstep.data.device import DeviceIterator, check_device
from lockstep.data.fingerprints import fingerprint_of_data, fingerprint_of_order
from lockstep.data.handover import PackingSource, starting_workers
from lockstep.data.iteration import EpochIterator, EpochProgress, RankBatchSampler
from lockstep.data.order import (
    GlobalBatch,
    Order,
    OrderedBatches,
    Plan,
    RankBatches,
    computed_order,
    draw_order,
    seed_keys,
    shuffled_order,
)
from lockstep.data.sampler_epochs import OwnOrder, SamplerEpochs
from lockstep.data.seeding import derive_seed
from lockstep.data.source import DrawnFrom, WorkerInit, identity, make_source
from lockstep.data.worker_signals import held_back
from lockstep.drift.watch import EvaluationWatch, watch_optimizers, watch_shutdown
from lockstep.errors import DataError
from lockstep.torch_private.loader import end_workers_with, iterator_of, set_guarded

__all__ = ["DataLoader"]

T_co = TypeVar("T_co", covariant=True)

# The global batches; how many there are of each size, if known; the mark of the batches before them, see
# `EpochProgress`; and a number that identifies their order, if known.
_Cut: TypeAlias = tuple[Iterable[GlobalBatch], Mapping[int, int] | None, int, int]


class DataLoader(torch.utils.data.DataLoader[T_co]):
    """A `torch.utils.data.DataLoader` that takes the global batch size and splits it over the ranks.

    **Order.** The order of samples depends only on `seed` and epoch, never on the number of ranks or workers. Each
    global batch is `batch_size` consecutive samples of it, split contiguously over the ranks into shares whose sizes
    differ by at most one, larger ones first. Every sample comes once per epoch, including those of a last partial
    batch. In training every rank yields the same number of batches: a rank that gets no sample of a batch yields one
    filler sample (the batch's first), which engine and metrics weight with zero.

    **Epochs** advance automatically: each new iteration is the next epoch, also after a `break`; only the first one
    after `load_state_dict` continues an epoch. `while loader.next_epoch < EPOCHS:` around the loop over batches trains
    that many epochs, resumed or not. A new loader starts with the order of epoch 0 again, so create it once, before
    the epochs. Merely creating an iterator (`next(iter(loader))`) begins an epoch, so all ranks must do it; for a look
    at the data on one rank, create a separate loader with `rank` and `world_size`.

    **Weights.** The loader tags the memory of each tensor it yields with the batch's share (`lockstep.batch`), by which
    engine, metrics and losses recognise it, whenever it is used.

    **Randomness per sample.** If `dataset.__getitem__` has a keyword argument `generator`, it is passed a
    `torch.Generator` seeded by (seed, epoch, index), also inside torch's `Subset`, `ConcatDataset` and `StackDataset`.
    Draws from the process-wide generators of torch, numpy and `random` are covered as well, see `seed_global_rng`.
    Both give the same samples for any number of ranks and workers.

    Args:
        dataset: map-style: `__getitem__` and `__len__`; at least one sample. `__getitems__` is used where torch uses
            it, unless `__getitem__` takes a `generator`.
        batch_size: samples per step, in total over all ranks.
        shuffle: a new permutation every epoch.
        permutation: how `shuffle` makes it. "stored": in memory, 4 bytes per sample (8 from 2**32 / 20 samples on).
            "computed": on demand, by a Feistel network, without preparation or memory, for 10^8 samples and more. From
            65,537 samples on the two are different orders; a resumed run keeps the one it began with.
        seed: seed of shuffling and per-sample randomness; the same on all ranks.
        evaluation: no fillers. A rank without a share of a batch does not get that batch, so ranks may differ in their
            number of batches, and every sample counts once.
        drop_last: leave out the last global batch if it is smaller than `batch_size`.
        num_workers: worker processes per rank; 0 loads in the training process.
        collate_fn: as in torch; sees one rank's share of a batch.
        pin_memory: as in torch; None pins if `device` is a GPU.
        timeout: seconds to wait for a worker's batch; 0 waits as long as the workers live.
        worker_init_fn: as in torch; called with the worker's number, in the worker.
        multiprocessing_context: as in torch.
        persistent_workers: as in torch; a new iteration then ends the previous one.
        prefetch_factor: batches that each worker loads ahead; they do not count as consumed.
        pin_memory_device: as in torch.
        sampler: a custom order: yields the indices of one global epoch, and has a length. It runs once per epoch with
            the process-wide generators seeded by (seed, epoch), so stock samplers agree on all ranks; a sampler that
            draws from another source must ensure that itself. If it has a `set_epoch`, that is called, unless the
            script calls it. An index that comes several times is seeded differently each time.
        seed_global_rng: seed the process-wide generators before each sample, from (seed, epoch, index), and before a
            custom `collate_fn`, from the first index. On by default, because most transforms draw there and would
            otherwise depend on ranks and workers. It costs a few microseconds per sample if samples draw, a few tens
            of microseconds per batch if they do not, and nothing for `TensorDataset`, lists and arrays. To see whether
            samples draw, generator states are compared; the first sample that draws is fetched twice. The training
            process's own streams are restored after each batch. A dataset that fetches whole batches (`__getitems__`)
            is seeded once per fetch, so its samples do depend on the number of ranks: let its `__getitem__` take a
            `generator` instead. If False, workers start from seeds that depend on (seed, epoch, rank, worker).
        device: move batches there; None leaves them on the CPU. Copies to a GPU are made from pinned memory on a
            separate stream, in parallel with the loop.
        prefetch: batches to copy to a GPU ahead of the loop; they do not count as consumed.
        rank: this process's rank; requires `world_size`. By default that of the open world, else of the default group
            of `torch.distributed`, else 0 of 1; read when an iteration begins.
        world_size: number of ranks.
        batch_sampler: yields the global batches of an epoch, of any sizes, as lists of indices; each rank gets its
            share of each. For buckets by length, token budgets, balanced classes. Every rank runs it with the
            process-wide generators seeded by (seed, epoch), so that stock samplers agree; ranks notice if theirs do
            not. It may lack a length and be endless, but must start afresh with each `iter()` and not split by rank. If
            it or its `sampler` has a `set_epoch`, that is called, unless the script calls it. Requires `batch_size`
            None. With `evaluation` all batches are made when the iteration begins.
        generator: refused; pass `seed` instead.
        in_order: False is refused.

    Attributes:
        batch_size: the global batch size; None with a `batch_sampler`.

    Raises:
        DataError: an argument cannot work; raised on construction or when an iteration begins. Names the argument and
            what to pass instead.
        ValueError: torch refuses the options for worker processes.

    Local: no call waits for other ranks.

        >>> loader = DataLoader(range(10), batch_size=4, rank=1, world_size=2)
        >>> [batch.tolist() for batch in loader]
        [[2, 3], [6, 7], [9]]
    """

    def __init__(
        self,
        dataset: torch.utils.data.Dataset[T_co],
        batch_size: int = 1,
        shuffle: bool | None = False,
        *,
        seed: int = 0,
        evaluation: bool = False,
        drop_last: bool = False,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool | None = None,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        persistent_workers: bool = False,
        prefetch_factor: int | None = None,
        pin_memory_device: str = "",
        sampler: Iterable[int] | None = None,
        seed_global_rng: bool = True,
        device: torch.device | str | int | None = None,
        prefetch: int = 1,
        permutation: str = "stored",
        rank: int | None = None,
        world_size: int | None = None,
        batch_sampler: Iterable[Iterable[int]] | None = None,
        generator: None = None,
        in_order: bool = True,
    ) -> None:
        check_refused(generator, in_order)
        check_flags(shuffle=shuffle, evaluation=evaluation, drop_last=drop_last, seed_global_rng=seed_global_rng)
        check_dataset(dataset)
        is_cut_already = batch_size != 1 or bool(shuffle) or sampler is not None or bool(drop_last)
        check_batch_sampler(batch_sampler, is_cut_already, world_size)
        check_sampler(sampler, bool(shuffle), world_size)
        batch_size = check_integer("batch_size", batch_size, 1, "It counts the samples of all ranks together")
        num_workers = check_workers(num_workers, prefetch_factor, timeout)
        self.seed = check_integer("seed", seed, -(2**63))
        self.shuffle = bool(shuffle)
        self.permutation = check_permutation(permutation, self.shuffle)
        self.evaluation = bool(evaluation)
        self.seed_global_rng = bool(seed_global_rng)
        self.device = check_device(device, prefetch)
        self.prefetch = check_integer("prefetch", prefetch, 0, "It counts the batches copied to the device ahead")
        if pin_memory is None:
            pin_memory = self.device is not None and self.device.type == "cuda"
        self._rank_and_size = check_rank_and_size(rank, world_size)
        told = OwnOrder() if sampler is None else sampler
        self._rank_batches = RankBatchSampler(sampler=told, batch_size=batch_size, drop_last=bool(drop_last))
        # The value of `loader.batch_sampler`: the user's, as with torch, or our own.
        self._shown_batches: Any = self._rank_batches if batch_sampler is None else batch_sampler
        self._is_cut_by_user = batch_sampler is not None
        self._batch_source = batch.plans.LoaderToken()
        super().__init__(
            dataset,
            batch_sampler=cast(Any, self._rank_batches),
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            timeout=timeout,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            # torch draws the workers' seed from here, and otherwise from the global stream.
            generator=torch.Generator(),
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
        )
        # torch has set these to the values that go with a batch_sampler, and forbids assigning them.
        set_guarded(self, "batch_sampler", self._shown_batches)
        if batch_sampler is None:
            set_guarded(self, "batch_size", batch_size)
            set_guarded(self, "drop_last", bool(drop_last))
        if sampler is not None:
            set_guarded(self, "sampler", sampler)
        self._ordered_by_sampler = sampler is not None
        makers = (told,) if batch_sampler is None else (batch_sampler, getattr(batch_sampler, "sampler", None))
        self._sampler_epochs = SamplerEpochs.of(*makers)
        self._thread = threading.get_ident()
        self._drawn_from = DrawnFrom()
        self._next_epoch = 0
        self._next_start = 0
        self._resumed_mark = 0  # the order's mark in the loaded state; see `EpochProgress`
        self._epoch_after = 0  # the epoch after a resumed one, if others had begun within it
        # Progress of the unfinished iterations, and of the newest one, which is last.
        self._progresses: list[EpochProgress] = []
        self._evaluations = EvaluationWatch()
        if batch_sampler is None:
            self._plan()

    def __setattr__(self, name: str, value: object) -> None:
        try:
            super().__setattr__(name, value)
        except ValueError:  # torch also forbids changing these attributes, but does not say what to do
            if name == "multiprocessing_context":  # not forbidden: torch refuses the value
                raise
            raise is_fixed(name, name, value) from None

    def __len__(self) -> int:
        """Number of global batches in an epoch, the same on every rank.

        With `evaluation` a rank may yield fewer: those of which it holds a sample. With a `batch_sampler` this is its
        length, or a TypeError if it has none.
        """
        return len(self._shown_batches) if self._is_cut_by_user else len(self._plan())

    def __iter__(self) -> EpochIterator:  # type: ignore[override]
        """Begin the next epoch on this rank."""
        check_own_batches(self.batch_sampler, self._shown_batches)
        told = self._sampler_epochs.told
        if told is not None:
            self._go_to(told)
        epoch, start = self._next_epoch, self._next_start
        rank, world_size = self._rank_and_size or find_rank_and_size()
        if not self.evaluation:
            watch_optimizers(world_size)
        if not any(each.is_open for each in self._progresses):
            self._rank_batches.schedule = None  # no iteration needs the last order: free it before making the next
        self._sampler_epochs.begin(epoch)
        cut = self._cut_by_user if self._is_cut_by_user else self._cut
        made, sizes, mark, of_order = cut(epoch, start, world_size > 1)
        rank_batches = RankBatches(
            *(made, sizes, self.batch_size or world_size, self.seed, epoch, rank, world_size),
            *(self.evaluation, self._batch_source, self._data_fingerprint ^ of_order if world_size > 1 else 0),
        )
        if self.evaluation:
            batch.hand.note_evaluation(rank_batches.fingerprint, world_size)
        self._evaluations.begin()
        watch_shutdown()
        assert self.generator is not None
        self.generator.manual_seed(derive_seed(b"workers", self.seed, epoch, rank))
        number = batch.plans.register(self._batch_source, rank, rank_batches.divisions())
        self._rank_batches.schedule = rank_batches
        batches: Iterator[Any] = super().__iter__()
        if self.device is not None:
            batches = DeviceIterator(batches, self.device, self.prefetch)
        self._next_epoch, self._next_start, self._epoch_after = max(epoch + 1, self._epoch_after), 0, 0
        progress = EpochProgress(epoch, start, mark)
        self._progresses = [each for each in self._progresses if each.is_open] + [progress]
        return EpochIterator(
            *(batches, rank_batches, progress, number),
            shared_workers=self._rank_batches if self.persistent_workers else None,
            has_workers=self.num_workers > 0,
            evaluations=self._evaluations,
        )

    def _cut(self, epoch: int, start: int, is_compared: bool) -> _Cut:
        """The global batches of the epoch, beginning at sample `start`."""
        order = self._order(epoch)  # first: a sampler's length may depend on the epoch
        mark = fingerprint_of_order(order, self.seed) if self._ordered_by_sampler else 0
        check_same_order(self._resumed_mark if start else 0, mark, self.sampler, epoch)
        keys = seed_keys(cast(Any, order)) if self._ordered_by_sampler else None
        plan = self._plan(start)
        of_order = fingerprint_of_order(order, self.seed) if is_compared and not mark else mark
        return OrderedBatches(order, plan, keys, mark), plan.sizes(), mark, of_order

    def _cut_by_user(self, epoch: int, start: int, _: bool) -> _Cut:
        """The same for the batches of a user's batch sampler."""
        batches = GlobalBatches(self._shown_batches, self.seed, epoch, check_dataset(self.dataset), self._thread)
        batches.skip(start, self._resumed_mark)
        mark = batches.mark
        if not self.evaluation:
            return batches, None, mark, 0
        all_of_them = list(batches)
        return all_of_them, Counter(each.size for each in all_of_them), mark, batches.mark

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration run `epoch`, from its first sample on.

        Epochs also advance without it; a script written for torch's `DistributedSampler` may keep calling it. Without a
        custom sampler, `loader.batch_sampler.sampler.set_epoch` does the same. Calling it with the epoch that
        `load_state_dict` has just restored keeps the position in that epoch.

        Raises:
            DataError: `epoch` is not an integer, or negative.
        """
        self._sampler_epochs.told = None
        self._go_to(check_integer("epoch", epoch, 0))

    def _go_to(self, epoch: int) -> None:
        if epoch != self._next_epoch:
            self._next_epoch, self._next_start, self._epoch_after = epoch, 0, 0
        self._progresses.clear()

    @property
    def next_epoch(self) -> int:
        """The epoch, counted from 0, that the next iteration begins, or continues after `load_state_dict`.

        It counts iterations that have begun, however they end. So it shows whether all epochs are done, even if a loop
        over batches is left by `break`.
        """
        told = self._sampler_epochs.told
        return self._next_epoch if told is None else told

    @property
    def epoch(self) -> int:
        """The epoch, counted from 0, that `state_dict` refers to: running, left by a `break`, or else the next one."""
        return self._position()[0]

    def _position(self) -> tuple[int, int, int]:
        """Epoch, samples consumed in it, and the mark of its order; see `EpochProgress`."""
        under_way = [each for each in self._progresses if each.is_open] or self._progresses
        progress = max(under_way, key=lambda each: each.active, default=None)
        if progress is None or progress.finished:
            return self._next_epoch, self._next_start, self._resumed_mark if self._next_start else 0
        return progress.epoch, progress.consumed, progress.order_mark

    def state_dict(self) -> dict[str, Any]:
        """The loader's position, in global samples; JSON-serialisable, the same on every rank.

        Taken inside a loop, after batch k was yielded, it resumes with batch k+1 of that epoch; so take it when the
        step on batch k is done. After a `break` it resumes with the batch that would have come next, although iterating
        again in the same process begins the next epoch. After the end of an epoch it resumes with the next one. Batches
        that workers have loaded ahead do not count. If several iterations can continue (an evaluation on the training
        data, within an epoch), it describes the one that yielded last.

        An evaluation loader whose batches are smaller than the world counts only batches that this rank was given: take
        the state on rank 0, which gets a part of every batch.
        """
        epoch, consumed, mark = self._position()
        return {
            "version": STATE_VERSION,
            "seed": self.seed,
            "epoch": epoch,
            "samples_consumed": consumed,
            "samples_per_epoch": self._samples_per_epoch(),
            "dataset_length": check_dataset(self.dataset),
            "order": self._order_name(),
            "next_epoch": self._next_epoch,
            "epoch_after": max(self._next_epoch, self._epoch_after),
            "order_mark": mark,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next iteration continue from `state`, at any world size.

        Every rank loads the same state. The batch size may differ from that of the run that saved it: the rest of the
        epoch is then split into batches of the new size. A batch sampler makes the batches of the epoch again, and
        those consumed are skipped. The state's seed is adopted.

        Raises:
            DataError: the state has another version, dataset length or kind of order. If a sampler then gives another
                order of the remaining samples, it is raised when the iteration begins.
        """
        numbers = check_state(state, self._order_name(), check_dataset(self.dataset), self._samples_per_epoch())
        if numbers["seed"] != self.seed:
            log.get_logger(__name__).warning(
                f"DataLoader: seed={self.seed} is replaced by {numbers['seed']}, the seed of the loaded state"
            )
        self.seed = numbers["seed"]
        self._sampler_epochs.told = None
        self._next_epoch, self._next_start = numbers["epoch"], numbers["samples_consumed"]
        # Not `next_epoch`: the next iteration of this loader is the rest of the state's epoch.
        self._epoch_after = check_integer("state['epoch_after']", state.get("epoch_after", 0), 0)
        self._resumed_mark = check_integer("state['order_mark']", state.get("order_mark", 0), 0)
        self._progresses.clear()

    def _get_iterator(self) -> Any:
        # torch's iterator copies what it needs from the loader it is given. It gets a shallow copy of this one, whose
        # dataset is the seeded source, while `loader.dataset` stays the user's.
        view = copy.copy(self)
        source = make_source(
            self.dataset, self.collate_fn, self._drawn_from if self.seed_global_rng else None, self._thread
        )
        set_guarded(view, "dataset", source)
        set_guarded(view, "batch_sampler", self._rank_batches)
        view.worker_init_fn = WorkerInit(self.worker_init_fn)
        view.collate_fn = identity
        if self.num_workers == 0:
            return iterator_of(view)
        set_guarded(view, "dataset", PackingSource(source, self.num_workers))
        with held_back(), starting_workers():
            iterator = iterator_of(view)
        end_workers_with(iterator)
        return iterator

    def _samples_per_epoch(self) -> int | None:
        """None if only the batch sampler knows."""
        if self._is_cut_by_user:
            return None
        length = check_dataset(self.dataset)
        return len(cast(Any, self.sampler)) if self._ordered_by_sampler else length

    def _order_name(self) -> str:
        if self._is_cut_by_user:
            return "batch_sampler"
        if self._ordered_by_sampler:
            return "sampler"
        if not self.shuffle:
            return "sequential"
        return "shuffled" if self.permutation == "stored" else "shuffled, computed"

    def _order(self, epoch: int) -> Order:
        if self._ordered_by_sampler:
            return draw_order(self.sampler, self.seed, epoch)
        length = check_dataset(self.dataset)
        if not self.shuffle:
            return range(length)
        return (shuffled_order if self.permutation == "stored" else computed_order)(length, self.seed, epoch)

    @functools.cached_property
    def _data_fingerprint(self) -> int:
        """Computed before anything is fetched: a dataset may change as it is used."""
        return fingerprint_of_data(self.dataset)

    def _plan(self, start: int = 0) -> Plan:
        """The batches of an epoch; computed each time, as the dataset may have grown."""
        num_samples = self._samples_per_epoch()
        assert num_samples is not None
        assert self.batch_size is not None
        plan = Plan(num_samples, self.batch_size, self.drop_last, start)
        if len(plan) == 0 and start == 0:
            raise DataError(
                f"drop_last=True leaves no batch: {plan.num_samples} samples do not fill a batch of "
                f"{self.batch_size}. batch_size counts the samples of all ranks together. Lower it, or pass "
                "drop_last=False"
            )
        return plan
