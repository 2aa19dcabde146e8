"""What the loader fetches: randomness per sample, and torch's ways to fetch and collate."""

from __future__ import annotations

import pickle
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

from loader_cases import WORLDS, Drawing, Numbers, Seeded, run_epoch, run_ranks_in_turn
from lockstep.data import DataLoader
from lockstep.data.device import dense_parts
from lockstep.data.source import DrawnFrom, WorkerInit, identity, make_source
from lockstep.errors import DataError
from lockstep.metrics import Mean

pytestmark = [
    # What torch says on a machine with one core, and Python 3.12 of any fork.
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning"),
]


class TestRandomSamples:
    @pytest.mark.parametrize("kind", [Seeded, Drawing, lambda length: Subset(Drawing(length), range(length))])
    def test_are_the_same_at_any_number_of_ranks_and_workers(self, kind):
        options = {"batch_size": 6, "shuffle": True, "seed": 3, "epochs": 2}
        expected = run_ranks_in_turn(kind(17), 1, **options)
        for world_size in WORLDS[1:]:
            assert run_ranks_in_turn(kind(17), world_size, **options) == expected
        assert run_ranks_in_turn(kind(17), 2, num_workers=2, **options) == expected
        assert run_ranks_in_turn(kind(17), 1, num_workers=1, persistent_workers=True, **options) == expected

    @pytest.mark.parametrize("kind", [Seeded, Drawing])
    def test_differ_by_seed_epoch_and_index(self, kind):
        def draws(seed, epoch):
            loader = DataLoader(kind(20), 20, seed=seed)
            loader.set_epoch(epoch)
            ((samples, _),) = run_epoch(loader)
            return [value for _, *values in samples for value in values]

        seen = [*draws(0, 0), *draws(0, 1), *draws(1, 0)]
        assert len(set(seen)) == len(seen)
        assert draws(0, 1) == draws(0, 1)

    def test_generator_reaches_datasets_inside_torchs_wrappers(self):
        plain = [tuple(sample) for samples, _ in run_epoch(DataLoader(Seeded(6), 6)) for sample in samples]
        subset = Subset(Subset(Seeded(6), range(6)), [*range(6)])
        concat = ConcatDataset([Seeded(6), Numbers(2)])
        assert [tuple(s) for s in run_epoch(DataLoader(subset, 6))[0][0]] == plain
        loaded = [run_epoch(DataLoader(concat, 1, sampler=[index]))[0][0][0] for index in (0, 5, 6, 7, -1)]
        assert tuple(loaded[0]) == plain[0]
        assert tuple(loaded[1]) == plain[5]
        assert loaded[2:] == [0, 1, 1]
        (pair,) = DataLoader(StackDataset(Seeded(6), Numbers(6)), 6)
        assert [tuple(sample) for sample in pair[0].tolist()] == plain
        (named,) = DataLoader(StackDataset(a=Seeded(6)), 6)
        assert [tuple(sample) for sample in named["a"].tolist()] == plain

    def test_wrapper_that_picks_samples_its_own_way_is_respected(self):
        class Negated(ConcatDataset):
            def __getitem__(self, index, generator):
                part = self.datasets[0].__getitem__(index, generator=generator)
                return -part

        (plain,), (negated,) = DataLoader(Seeded(4), 4), DataLoader(Negated([Seeded(4)]), 4)
        assert torch.equal(negated, -plain)

    @pytest.mark.parametrize("dataset", [Drawing(9), Seeded(9), Numbers(9), TensorDataset(torch.arange(9))])
    @pytest.mark.parametrize("collate_fn", [None, lambda samples: torch.stack([*map(torch.as_tensor, samples[:1])])])
    def test_streams_of_the_training_process_are_not_disturbed(self, dataset, collate_fn):
        if isinstance(dataset, TensorDataset):
            collate_fn = None

        def state():
            return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())

        before = state()
        for _ in DataLoader(dataset, 2, shuffle=True, collate_fn=collate_fn):
            assert state() == before
        for _ in DataLoader(dataset, 2, shuffle=True, num_workers=1, collate_fn=collate_fn):
            pass
        assert state() == before

    def test_collate_function_may_draw(self):
        def noisy(samples):
            return torch.rand(2), torch.tensor(samples)

        def draws(**options):
            return [noise.tolist() for noise, _ in DataLoader(range(8), 4, collate_fn=noisy, seed=1, **options)]

        torch.manual_seed(0)
        expected = draws()
        torch.manual_seed(1)
        assert draws() == expected
        assert draws(num_workers=2) == expected
        assert expected[0] != expected[1]

    def test_without_seeding_a_dataset_draws_from_the_callers_stream(self):
        torch.manual_seed(5)
        expected = torch.rand(2).tolist()
        torch.manual_seed(5)
        (loaded,) = DataLoader(Drawing(2), 2, seed_global_rng=False)
        assert loaded[:, 1].tolist() == expected

    def test_workers_without_seeding_start_from_seed_epoch_rank_and_worker(self):
        def draws(rank, epoch=0, **options):
            loader = DataLoader(Drawing(8), 8, seed_global_rng=False, num_workers=1, rank=rank, world_size=2, **options)
            loader.set_epoch(epoch)
            return [loaded[:, 1:].tolist() for loaded in loader]

        assert draws(0) == draws(0)
        assert len({str(draws(0)), str(draws(1)), str(draws(0, epoch=1)), str(draws(0, seed=1))}) == 4


class TestFetching:
    def test_datasets_that_fetch_batches_are_asked_for_plain_lists(self):
        class Batched(Numbers):
            def __getitems__(self, indices):
                assert type(indices) is list
                return [100 + index for index in indices]

        assert run_epoch(DataLoader(Batched(5), 3))[1][0] == [103, 104]
        assert run_epoch(DataLoader(Subset(Batched(5), [4, 0]), 3))[0][0] == [104, 100]

    @pytest.mark.parametrize("num_workers", [0, 1])
    def test_tensor_datasets_give_what_torch_gives(self, num_workers):
        dataset = TensorDataset(
            torch.randn(10, 3), torch.arange(10), torch.randn(10, 2, 2, requires_grad=True).detach()
        )
        ours = list(DataLoader(dataset, 4, num_workers=num_workers))
        theirs = list(torch.utils.data.DataLoader(dataset, 4))
        assert [type(loaded) for loaded in ours] == [type(loaded) for loaded in theirs]
        for one, other in zip(ours, theirs, strict=True):
            assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(one, other, strict=True))

    def test_batches_do_not_alias_the_dataset(self):
        data = torch.ones(4)
        for (values,) in DataLoader(TensorDataset(data), 2):
            values.zero_()
        assert data.sum() == 4

    def test_default_arguments_of_torch_go_on_working(self):
        started = []

        class Marked(Numbers):
            mark = 0

            def __getitem__(self, index):
                return self.mark

        def mark(worker_id):
            torch.utils.data.get_worker_info().dataset.mark = 10 + worker_id

        loader = DataLoader(
            Marked(8), 2, num_workers=2, worker_init_fn=mark, prefetch_factor=1, multiprocessing_context="fork",
            collate_fn=lambda samples: started.append(1) or torch.tensor(samples), timeout=60,
        )  # fmt: skip
        assert [samples for samples, _ in run_epoch(loader)] == [[10, 10], [11, 11], [10, 10], [11, 11]]
        assert started == [], "collation runs in the workers"
        assert isinstance(loader.dataset, Marked)
        assert loader.batch_size == 2
        assert isinstance(loader, torch.utils.data.DataLoader)
        assert len(loader) == 4

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned memory needs an accelerator")
    def test_batches_are_pinned(self):
        for dataset in (Numbers(4), TensorDataset(torch.arange(4))):
            for loaded in DataLoader(dataset, 2, pin_memory=True):
                tensor = loaded if isinstance(loaded, torch.Tensor) else loaded[0]
                assert tensor.is_pinned()

    @pytest.mark.parametrize("dataset", [Drawing(3), TensorDataset(torch.arange(3))])
    def test_what_workers_are_sent_can_be_pickled(self, dataset):
        # As the start methods spawn and forkserver ask.
        source = make_source(dataset, torch.utils.data.default_collate, DrawnFrom(), thread=0)
        pickle.loads(pickle.dumps((source, WorkerInit(None), identity)))

    def test_error_in_a_sample_is_the_datasets_own_and_the_batch_is_not_consumed(self):
        class Broken(Numbers):
            def __getitem__(self, index):
                if index == 3:
                    raise KeyError("sample 3 is broken")
                return torch.tensor(index)

        loader = DataLoader(Broken(8), 2)
        batches = iter(loader)
        assert next(batches).tolist() == [0, 1]
        with pytest.raises(KeyError, match="sample 3"):
            next(batches)
        assert loader.state_dict()["samples_consumed"] == 2
        assert next(batches).tolist() == [4, 5]
        assert loader.state_dict()["samples_consumed"] == 6
        assert len(list(batches)) == 1


class TestThreads:
    """Process-wide generators are seeded only where nobody else draws from them meanwhile."""

    @staticmethod
    def in_a_thread(work):
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(work).result()

    def test_fetching_in_another_thread_than_that_of_the_loader_is_an_error(self):
        batches = iter(DataLoader(Drawing(4), 2))
        with pytest.raises(DataError, match=r"a thread other than.*num_workers=1"):
            self.in_a_thread(lambda: next(batches))

    @pytest.mark.parametrize(
        ("dataset", "options"),
        [
            (Drawing(4), {"num_workers": 1}),
            (Drawing(4), {"seed_global_rng": False}),
            (TensorDataset(torch.arange(4)), {}),
            ([1, 2, 3, 4], {}),
        ],
    )
    def test_where_nothing_is_seeded_any_thread_may_fetch(self, dataset, options):
        batches = iter(DataLoader(dataset, 2, **options))
        assert len(self.in_a_thread(lambda: list(batches))) == 2

    def test_a_thread_that_makes_its_loader_may_fetch(self):
        expected = run_epoch(DataLoader(Drawing(4), 2))
        assert self.in_a_thread(lambda: run_epoch(DataLoader(Drawing(4), 2))) == expected


class TestInterrupts:
    def test_batch_that_was_broken_off_is_left_out_with_its_share(self):
        class Interrupted(Numbers):
            def __getitem__(self, index):
                if index == 3:
                    raise KeyboardInterrupt
                return super().__getitem__(index)

        batches = iter(DataLoader(Interrupted(7), 2))
        next(batches)
        with pytest.raises(KeyboardInterrupt):
            next(batches)
        next(batches)
        assert batches.share.local_samples == 2
        next(batches)
        assert batches.share.local_samples == 1
        with pytest.raises(StopIteration):
            next(batches)


class TestNestedTensors:
    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
    # torch's queues do not carry jagged ones.
    @pytest.mark.parametrize(("layout", "num_workers"), [(torch.strided, 0), (torch.strided, 1), (torch.jagged, 0)])
    def test_make_a_batch(self, layout, num_workers):
        def collate(numbers):
            return torch.nested.nested_tensor([torch.full((n + 1,), float(n)) for n in numbers], layout=layout)

        mean = Mean()
        for batch in DataLoader(range(4), 2, collate_fn=collate, num_workers=num_workers):
            assert batch.is_nested
            mean.update(torch.nested.to_padded_tensor(batch, 0.0).sum())
        assert mean.compute() == 10


class TestDenseParts:
    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse")
    def test_hold_all_memory(self):
        ones = torch.ones(4, 4)
        jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        assert [part.numel() for part in dense_parts(ones)] == [16]
        assert [part.numel() for part in dense_parts(ones.to_sparse())] == [32, 16]
        assert [part.numel() for part in dense_parts(ones.to_sparse_csr())] == [5, 16, 16]
        assert [part.numel() for part in dense_parts(ones.to_sparse_bsc((2, 2)))] == [3, 4, 16]
        assert [part.numel() for part in dense_parts(nested)] == [5]
        assert [part.numel() for part in dense_parts(jagged)] == [5, 3]
