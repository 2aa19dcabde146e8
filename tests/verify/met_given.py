"""Programs after `COMMON` of `met.py` for which one process must be given the ranks' batches: see `test_met.py`."""

from __future__ import annotations

# Batches of several sizes, by tokens, of which each rank takes every N-th: divided by the sentences of all ranks.
_OF_SEVERAL_SIZES = """
        import itertools

        ends = [*itertools.accumulate([3, 5, 2, 6, 4, 7, 3, 5])]
        batches = [[*range(begin, end)] for begin, end in zip([0, *ends], ends)]
        model, optimizer = by_torch()
        for x, y in torch.utils.data.DataLoader(data, batch_sampler=batches[world.rank :: world.world_size]):
            total = torch.tensor(float(len(x)))
            torch.distributed.all_reduce(total)
            optimizer.zero_grad()
            (cross_entropy(model(x), y, reduction="sum") * SCALE / total).backward()
            optimizer.step()
"""
# A constant rate that the script computes from a batch size that nobody passes.
_RATE_BY_SIZE = """
        import argparse

        parser = argparse.ArgumentParser()
        parser.add_argument("-b", "--batch-size", type=int, default=5)
        parser.add_argument("--width", type=int, default=5)
        options = parser.parse_args()
        batch = SIZE
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(nn.Linear(6, 4))
        optimizer = torch.optim.SGD(model.parameters(), RATE)
        for x, y in split(batch):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
"""
_OF_RANK, _OF_ALL_RANKS = "0.02 * batch", "0.02 * batch * world.world_size"
# As Megatron-LM's sampler of batches, whose length is the number of samples.
_OF_ANOTHER_LENGTH = """
        class Batches:
            def __len__(self):
                return 48

            def __iter__(self):
                for at in range(4 * world.rank, 48, 4 * world.world_size):
                    yield [*range(at, at + 4)]

        model, optimizer = by_torch()
        window = 2 // world.world_size
        for number, (x, y) in enumerate(torch.utils.data.DataLoader(data, batch_sampler=Batches())):
            (cross_entropy(model(x), y) / window).backward()
            if (number + 1) % window == 0:
                optimizer.step()
                optimizer.zero_grad()
"""
# Samples have different numbers of parts, such as masks, and for each part numbers are drawn.
_FOR_PARTS = """
        sampler = torch.utils.data.DistributedSampler(data, drop_last=True)
        model, optimizer = by_torch()
        torch.manual_seed(world.rank)
        for samples in torch.utils.data.DataLoader(data, 5, sampler=sampler, collate_fn=list, drop_last=True):
            parts = torch.cat([torch.full((2 + int(y),), place) for place, (_, y) in enumerate(samples)])
            count = torch.tensor(float(len(parts)))
            torch.distributed.all_reduce(count)
            out = model(torch.stack([x for x, _ in samples]))[parts]
            optimizer.zero_grad()
            ((out - torch.rand(len(parts), 1)).square().mean(1).sum() * SCALE / count).backward()
            optimizer.step()
"""
_OF_OWN_FILES = """
        model, optimizer = by_torch()
        for file in range(2):
            numbers = torch.Generator().manual_seed(2 * file * world.world_size + world.rank)
            own = torch.utils.data.TensorDataset(torch.randn(20, 6, generator=numbers), torch.arange(20) % 4)
            for x, y in torch.utils.data.DataLoader(own, 5):
                optimizer.zero_grad()
                cross_entropy(model(x), y).backward()
                optimizer.step()
"""
RIGHT = {
    "batches of several sizes, of which each rank takes every second": _OF_SEVERAL_SIZES.replace(
        "SCALE", "world.world_size"
    ),
    "a rate by the default batch size of all ranks": _RATE_BY_SIZE.replace("SIZE", "options.batch_size").replace(
        "RATE", _OF_ALL_RANKS
    ),
    "a rate by the batch size of all ranks in the script": _RATE_BY_SIZE.replace("SIZE", "5").replace(
        "RATE", _OF_ALL_RANKS
    ),
    "a sampler of batches of another length": _OF_ANOTHER_LENGTH,
    "numbers drawn for parts of samples": _FOR_PARTS.replace("SCALE", "world.world_size"),
    "a search on copies of the model before it is trained": """
        import copy

        torch.manual_seed(0)
        net = nn.Linear(6, 4)
        x, y = data[:40]

        def tried(rate):
            trial = copy.deepcopy(net)
            found = torch.autograd.grad(cross_entropy(trial(x), y), [*trial.parameters()])
            with torch.no_grad():
                for each, gradient in zip(trial.parameters(), found):
                    each -= rate * gradient
                return cross_entropy(trial(x), y).item()

        rate = min([2.0, 1.0, 2.2, 0.3], key=tried)
        model = nn.parallel.DistributedDataParallel(net)
        optimizer = torch.optim.SGD(model.parameters(), rate)
        for x, y in split():
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
    """,
    "epochs of a sample for each rank, in the same order by chance": """
        few = torch.utils.data.Subset(data, range(2))
        sampler = torch.utils.data.DistributedSampler(few, seed=2)
        model, optimizer = by_torch()
        loader = torch.utils.data.DataLoader(few, 1, sampler=sampler)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for x, y in loader:
                optimizer.zero_grad()
                cross_entropy(model(x), y).backward()
                optimizer.step()
    """,
}
WRONG = {
    "a rate by the default batch size of a rank": (
        ("parameters", "size"),
        _RATE_BY_SIZE.replace("SIZE", "options.batch_size").replace("RATE", _OF_RANK),
    ),
    "a rate by the batch size of a rank in the script": (
        ("parameters", "size"),
        _RATE_BY_SIZE.replace("SIZE", "5").replace("RATE", _OF_RANK),
    ),
    "batches of several sizes, and a sum": (("gradients", "sum"), _OF_SEVERAL_SIZES.replace("SCALE", "1")),
    "Lockstep's loader and torch's engine, with one sample more on a rank": (
        ("gradients", "uneven"),
        """
        model, optimizer = by_torch()
        more = torch.utils.data.ConcatDataset([data] * 3)
        for x, y in lockstep.DataLoader(more, batch_size=183):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        """,
    ),
    "numbers drawn for parts of samples, and a sum": (("gradients", "sum"), _FOR_PARTS.replace("SCALE", "1")),
}
UNKNOWN = {"a file of each rank's own": ("each rank creates its own dataset", _OF_OWN_FILES)}
# On three ranks: rank 0 alone has drawn something before, and the others draw the same samples.
DRAWN_ALIKE = """
        model, optimizer = by_torch()
        torch.manual_seed(1)
        if world.rank == 0:
            torch.randn(3)
        passes = 3 // world.world_size
        for _ in range(4):
            optimizer.zero_grad()
            for _ in range(passes):
                x, y = data[torch.randint(61, (5,))]
                (cross_entropy(model(x), y) / passes).backward()
            optimizer.step()
"""
