"""Workers use the memory of batches again, and nobody ever reads what was meant for another batch."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset, default_collate

from lockstep.data import DataLoader
from lockstep.data.buffers import BufferPool, BufferReader
from lockstep.shm.segment import Segment
from lockstep.testing import limit_s

pytestmark = [
    # What torch says on a machine with one core, and Python 3.12 of any fork.
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning"),
]

DEADLINE_S = 60
WIDTH = 5000  # 20 kB a sample: too much to travel by value


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """Sample i is a row of the number i."""

    def __init__(self, length: int, width: int = WIDTH) -> None:
        self.length, self.width = length, width

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.width,), float(index))


def loader_of(dataset: Any, batch_size: int = 2, num_workers: int = 2, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size, num_workers=num_workers, timeout=DEADLINE_S, **options)


def mappings() -> set[str]:
    """The lines of /proc/self/maps for buffers, each with its address and number."""
    gc.collect()
    return {line for line in Path("/proc/self/maps").read_text().splitlines() if "/memfd:lockstep" in line}


def mapped_buffers() -> int:
    return len(mappings())


def memory_at(address: int) -> str:
    """The line of /proc/self/maps for an address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        if first <= address < last:
            return line
    raise AssertionError(hex(address))


class TestThroughLoader:
    def test_memory_is_used_again(self) -> None:
        addresses = [rows.data_ptr() for rows in loader_of(Rows(100))]
        assert len(addresses) == 50
        assert len(set(addresses)) <= 12

    @pytest.mark.parametrize("keep", [lambda rows: rows, lambda rows: rows[1, 7:8], lambda rows: rows[1:].numpy()])
    def test_what_is_kept_stays(self, keep: Callable[[torch.Tensor], Any]) -> None:
        kept = [keep(rows) for rows in loader_of(Rows(400), num_workers=1)]  # more than a worker has buffers
        assert [float(each.reshape(-1)[-1]) for each in kept] == [2.0 * i + 1 for i in range(200)]

    def test_what_every_second_step_keeps_for_a_while_stays(self) -> None:
        window: list[tuple[int, torch.Tensor]] = []
        for number, rows in enumerate(loader_of(Rows(120, WIDTH), batch_size=1)):
            assert rows.unique().tolist() == [number]
            if number % 2:
                window = [*window[-5:], (number, rows)]
            assert all((held == float(wanted)).all() for wanted, held in window)

    def test_sizes_may_differ(self) -> None:
        def collate(samples: list[torch.Tensor]) -> torch.Tensor:
            number = int(samples[0][0])
            return samples[0][: 1 + (number * 7919) % WIDTH].clone()

        dataset = Rows(150)
        for number, row in enumerate(loader_of(dataset, 1, collate_fn=collate)):
            assert row.shape == (1 + (number * 7919) % WIDTH,)
            assert (row == number).all()

    @pytest.mark.parametrize("persistent_workers", [False, True])
    def test_nothing_is_left(self, persistent_workers: bool) -> None:
        before, descriptors = mapped_buffers(), len(os.listdir("/proc/self/fd"))
        loader = loader_of(Rows(40), persistent_workers=persistent_workers)
        for _ in range(3):
            for number, last in enumerate(loader):  # noqa: B007
                if number == 8:
                    break
        del loader
        assert mapped_buffers() <= before + 2  # the control segment, and what is kept
        assert last.unique().tolist() == [16.0, 17.0]
        del last
        assert mapped_buffers() == before
        # torch closes the workers' queues in a thread, which may still be at it.
        deadline = time.monotonic() + limit_s(10)
        while len(os.listdir("/proc/self/fd")) > descriptors and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(os.listdir("/proc/self/fd")) <= descriptors

    @pytest.mark.parametrize("method", ["fork", "spawn"])
    def test_start_methods(self, method: str) -> None:
        batches = loader_of(Rows(6), multiprocessing_context=method, num_workers=1)
        assert [rows[:, 0].tolist() for rows in batches] == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]

    def test_process_forked_meanwhile_keeps_what_it_inherited(self) -> None:
        context = multiprocessing.get_context("fork")
        go, (answers, answer) = context.Event(), context.Pipe(duplex=False)

        def child(inherited: torch.Tensor) -> None:
            go.wait(DEADLINE_S)
            answer.send(inherited.unique().tolist())

        batches = iter(loader_of(Rows(200), num_workers=1))
        rows = next(batches)
        process = context.Process(target=child, args=(rows,))
        process.start()
        for rows in batches:  # noqa: B007
            pass
        go.set()
        assert answers.poll(DEADLINE_S)
        assert answers.recv() == [0.0, 1.0]
        process.join()

    def test_process_forked_by_a_worker_keeps_what_it_inherited(self, tmp_path: Path) -> None:
        def collate(samples: list[torch.Tensor]) -> torch.Tensor:
            rows = default_collate(samples)
            if float(samples[0][0]) == 2:
                go, said = os.pipe(), tmp_path / "said"
                if os.fork() == 0:
                    os.close(go[1])
                    os.read(go[0], 1)  # until the worker is gone
                    said.with_suffix(".new").write_text(str(rows.unique().tolist()))
                    said.with_suffix(".new").rename(said)
                    os._exit(0)
            return rows

        for _ in loader_of(Rows(60), 1, num_workers=1, collate_fn=collate):
            pass
        deadline = time.monotonic() + DEADLINE_S
        while not (tmp_path / "said").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (tmp_path / "said").read_text() == "[2.0]"

    def test_what_a_worker_keeps_stays(self) -> None:
        kept: list[tuple[float, torch.Tensor]] = []

        def collate(samples: list[torch.Tensor]) -> torch.Tensor:
            assert all((rows == number).all() for number, rows in kept)
            rows = default_collate(samples)
            if float(samples[0][0]) % 3 == 0:
                kept.append((float(samples[0][0]), rows))
            return rows

        for number, rows in enumerate(loader_of(Rows(90), 1, num_workers=1, collate_fn=collate)):
            assert (rows == number).all()

    def test_what_is_collated_and_not_sent_is_free_again(self) -> None:
        def collate(samples: list[torch.Tensor]) -> torch.Tensor:
            return default_collate(samples) + 1

        addresses = set()
        for number, rows in enumerate(loader_of(Rows(90), 1, num_workers=1, collate_fn=collate)):
            assert (rows == number + 1).all()
            addresses.add(rows.data_ptr())
        assert len(addresses) <= 8

    def test_what_a_collate_function_fills_anew_arrives_as_it_was(self) -> None:
        memory = torch.empty(2, WIDTH)

        def collate(samples: list[torch.Tensor]) -> torch.Tensor:
            return torch.stack(samples, out=memory)

        kept = list(loader_of(Rows(40), num_workers=1, collate_fn=collate))
        assert [rows[:, -1].tolist() for rows in kept] == [[i, i + 1.0] for i in range(0, 40, 2)]

    def test_views_of_one_tensor_arrive_as_such(self) -> None:
        def collate(samples: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
            rows = torch.stack(samples)
            return rows[:, :-1], rows[:, 1:]

        for inputs, targets in loader_of(Rows(4), collate_fn=collate):
            inputs[0, 1] = -5
            assert targets[0, 0] == -5

    def test_part_of_a_large_tensor_is_not_copied_whole(self) -> None:
        everything = torch.arange(40 * WIDTH, dtype=torch.float32).view(40, WIDTH)

        def collate(samples: list[int]) -> torch.Tensor:
            return everything[samples[0] : samples[-1] + 1]

        batches = list(loader_of(range(40), num_workers=1, collate_fn=collate))
        assert torch.equal(torch.cat(batches), everything)
        assert len({rows.untyped_storage().data_ptr() for rows in batches}) == 1

    @pytest.mark.filterwarnings("ignore:Sparse invariant checks")
    def test_every_kind_of_tensor_arrives(self) -> None:
        def collate(samples: list[int]) -> dict[str, Any]:
            large = torch.arange(20_000)
            return {
                **{str(dtype): (large % 2).to(dtype) for dtype in (torch.bool, torch.bfloat16, torch.complex64)},
                "transposed": large.view(100, 200).t(),
                "scalar": torch.tensor(3.5),
                "empty": torch.empty(0, 4),
                "sparse": torch.eye(300).to_sparse(),
                "parameter": torch.nn.Parameter(torch.ones(20_000)),
                "grad": torch.ones(20_000, requires_grad=True),
                "array": np.ones(20_000),
                "nested": [{"deep": (torch.ones(20_000), "text")}],
                "shared": torch.ones(20_000).share_memory_(),
                "conjugate": torch.full((20_000,), 2j).conj(),
                "negative": torch.full((20_000,), 2j).conj().imag,
            }

        expected = collate([])
        ((found),) = loader_of(range(2), num_workers=1, collate_fn=collate)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            if isinstance(value, torch.Tensor):
                assert type(found[name]) is type(value)
                assert torch.equal(found[name].to_dense(), value.to_dense())
                assert (found[name].dtype, found[name].stride(), found[name].requires_grad) == (
                    value.dtype,
                    value.stride(),
                    value.requires_grad,
                ) or (value.is_sparse or value.is_neg())
        assert torch.equal(found["nested"][0]["deep"][0], torch.ones(20_000))
        found["transposed"][3, 4] = 1  # writable
        found["scalar"].fill_(2)

    def test_view_of_a_batch_that_moves_elsewhere_stays(self) -> None:
        kept = []
        for rows in loader_of(Rows(60), 1, num_workers=1):
            kept.append(rows.numpy())
            rows.share_memory_()
        del rows
        gc.collect()
        assert [float(row[0, -1]) for row in kept] == [float(i) for i in range(60)]

    def test_batches_that_move_elsewhere_do_not_use_up_the_buffers(self) -> None:
        for number, rows in enumerate(loader_of(Rows(200), 1, num_workers=1)):
            assert "memfd:lockstep" in memory_at(rows.data_ptr()), f"batch {number} came in torch's way"
            rows.share_memory_()

    def test_collate_function_of_the_user_for_tensors_is_called(self, monkeypatch: pytest.MonkeyPatch) -> None:
        functions = torch.utils.data._utils.collate.default_collate_fn_map
        monkeypatch.setitem(functions, torch.Tensor, lambda batch, *, collate_fn_map=None: -torch.stack(batch))
        assert [rows[:, 0].tolist() for rows in loader_of(Rows(4))] == [[-0.0, -1.0], [-2.0, -3.0]]
        whole = TensorDataset(torch.ones(4, 3))
        assert [float(rows.mean()) for (rows,) in DataLoader(whole, 2)] == [-1.0, -1.0]

    @pytest.mark.parametrize("width", [3, WIDTH])
    def test_dtype_is_that_of_the_first_sample(self, width: int) -> None:
        dataset = [torch.zeros(width), torch.ones(width, dtype=torch.float64)]
        (rows,) = loader_of(dataset)
        assert rows.dtype is torch.float32

    def test_what_a_collate_function_hands_out_again_is_as_it_was(self) -> None:
        made: dict[float, torch.Tensor] = {}

        def collate(samples: list[torch.Tensor]) -> torch.Tensor:
            return made.setdefault(float(samples[0][0]), default_collate(samples))

        loader = loader_of(Rows(8, 2_500_000), num_workers=1, persistent_workers=True, collate_fn=collate)
        for _ in range(3):
            assert [float(rows[0, -1]) for rows in loader] == [0.0, 2.0, 4.0, 6.0]

    def test_stacks_of_the_default_collate_function_are_torchs(self) -> None:
        dataset = [(torch.full((WIDTH,), i), np.full(WIDTH, i), i, torch.tensor(i) > 1) for i in range(4)]
        for one, other in zip(loader_of(dataset), torch.utils.data.DataLoader(dataset, 2), strict=True):
            for mine, theirs in zip(one, other, strict=True):
                assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
                assert torch.equal(mine, theirs)

    def test_whole_batches_by_gather(self) -> None:
        rows = torch.randn(64, WIDTH)
        assert torch.equal(torch.cat([each for (each,) in loader_of(TensorDataset(rows))]), rows)

    def test_shapes_that_differ_are_torchs_error(self) -> None:
        dataset = [torch.zeros(WIDTH), torch.zeros(WIDTH + 1)]
        with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
            list(loader_of(dataset))


class TestPool:
    @pytest.fixture
    def reader(self) -> BufferReader:
        return BufferReader(2)

    @pytest.fixture
    def pool(self, reader: BufferReader) -> BufferPool:
        return BufferPool(reader.control, 1, 2)

    @staticmethod
    def carry(pool: BufferPool, reader: BufferReader, size_bytes: int) -> torch.Tensor:
        """A tensor that has gone from the pool to the reader."""
        made = pool.new(size_bytes)
        assert made is not None
        place = pool.send(made.untyped_storage())
        assert place is not None
        return torch.empty(0, dtype=torch.uint8).set_(reader.storage(place))

    def test_buffer_that_has_come_back_is_taken_again(self, pool: BufferPool, reader: BufferReader) -> None:
        first = self.carry(pool, reader, 100_000)
        second = self.carry(pool, reader, 100_000)
        assert first.data_ptr() != second.data_ptr()
        address = first.data_ptr()
        del first
        assert self.carry(pool, reader, 99_000).data_ptr() == address
        assert pool.retired() == []

    def test_buffer_in_use_on_one_side_is_not_taken(self, pool: BufferPool, reader: BufferReader) -> None:
        made = pool.new(100_000)
        assert made is not None
        place = pool.send(made.untyped_storage())
        assert place is not None
        assert pool.send(made.untyped_storage()) is None, "it is on its way"
        storage = reader.storage(place)
        del storage  # back, but the worker has kept it
        other = pool.new(100_000)
        assert other is not None
        assert other.data_ptr() != made.data_ptr()
        assert pool.send(made.untyped_storage()) == place

    def test_much_too_large_a_buffer_is_not_taken(self, pool: BufferPool, reader: BufferReader) -> None:
        large = self.carry(pool, reader, 1_000_000)
        address = large.data_ptr()
        del large
        small = self.carry(pool, reader, 20_000)
        assert small.data_ptr() != address

    @pytest.mark.parametrize("size_bytes", [16_385, 1_966_081, 2_000_000, 2_095_071, 2_097_152, 5_000_001])
    def test_buffer_fits_what_it_was_made_for(self, pool: BufferPool, reader: BufferReader, size_bytes: int) -> None:
        assert len({self.carry(pool, reader, size_bytes).data_ptr() for _ in range(5)}) <= 2

    def test_useless_buffer_is_let_go(self, pool: BufferPool, reader: BufferReader) -> None:
        before = mappings()
        self.carry(pool, reader, 1_000_000)
        for _ in range(300):
            self.carry(pool, reader, 20_000)
        (handle,) = pool.retired()
        assert pool.retired() == []
        reader.forget([handle])
        assert len(mappings() - before) == 2, "both sides have the small one mapped"

    def test_no_more_buffers_than_words(self, pool: BufferPool, reader: BufferReader) -> None:
        kept = [self.carry(pool, reader, 20_000) for _ in range(64)]
        assert pool.new(20_000) is None
        address = kept[5].data_ptr()
        del kept[5]
        large = pool.new(1_000_000)
        assert large is not None, "a free one that does not fit makes room"
        assert address not in {each.data_ptr() for each in kept}
        assert pool.new(20_000) is None

    def test_buffer_in_use_during_a_fork_is_abandoned(self, pool: BufferPool, reader: BufferReader) -> None:
        before = mapped_buffers()
        inherited = self.carry(pool, reader, 100_000)
        process = multiprocessing.get_context("fork").Process(target=int)
        process.start()
        process.join()
        del inherited
        after = pool.new(100_000)
        assert after is not None
        assert pool.retired() == [], "the reader has let go of it by itself"
        assert mapped_buffers() == before + 1, "a new one, in the worker"

    def test_buffer_whose_tensor_moves_elsewhere_is_let_go(self, pool: BufferPool, reader: BufferReader) -> None:
        before = mapped_buffers()
        for _ in range(100):  # more than there are words
            made = pool.new(100_000)
            assert made is not None
            made.share_memory_()  # by a dataset, in the worker
            carried = self.carry(pool, reader, 100_000)
            carried.share_memory_()
        assert mapped_buffers() <= before + 8
        del made, carried

    def test_buffer_that_a_fork_of_the_worker_may_read_is_let_go(self, pool: BufferPool) -> None:
        for _ in range(100):
            made = pool.new(100_000)
            assert made is not None
            process = multiprocessing.get_context("fork").Process(target=int)
            process.start()
            process.join()

    def test_what_was_not_sent_in_the_end_is_free(self, pool: BufferPool, reader: BufferReader) -> None:
        made = pool.new(100_000)
        assert made is not None
        address, place = made.data_ptr(), pool.send(made.untyped_storage())
        assert place is not None
        pool.take_back([place])
        del made
        carried = self.carry(pool, reader, 100_000)
        again = pool.new(100_000)
        assert again is not None
        assert carried.numel() == 100_000
        assert address != again.data_ptr(), "it was sent the second time"

    def test_other_memory_is_not_sent(self, pool: BufferPool) -> None:
        assert pool.send(torch.zeros(10).untyped_storage()) is None

    def test_sizes_of_whole_segments_are_not_wasted(self, pool: BufferPool) -> None:
        made = pool.new(3 * 2**20)
        assert made is not None
        assert pool.new(3 * 2**20) is not None
        assert Segment.whole(3 * 2**20 + 64) == 4 * 2**20
