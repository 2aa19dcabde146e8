"""Short programs with something beside the trained model, such as a teacher or an evaluation: see `test_met.py`."""

from __future__ import annotations

import met_small

# A loop over the batches of the ranks, without its loss.
_LOOP = """
        model, optimizer = by_torch()
        teacher = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        for number, (x, y) in enumerate(split()):
            with torch.no_grad():
                wanted = TEACHES
            loss = nn.functional.mse_loss(model(x), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            AFTER
"""
_TARGET = """if (number + 1) % (4 // world.world_size) == 0:
                teacher[2].weight.data += model.module.weight.detach().mean()"""
_EVALUATED = """
        model, optimizer = by_torch()
        for x, y in split():
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            x, y = data[PART]
            number = torch.tensor([cross_entropy(model.module(x), y, reduction="HOW"), len(x)])
        torch.distributed.all_reduce(number)
        if world.rank == 0:
            print(f"loss {number[0] / DIVISOR:.6f}")
"""
# Each rank has the gradients of the parameters that it owns, steps these, and sends them to the others.
_OWNERS = """
        class Owners(torch.optim.SGD):
            def step(self):
                owned = [*enumerate(self.param_groups[0]["params"])]
                for place, each in owned:
                    torch.distributed.reduce(each.grad.div_(DIVISOR), dst=place % world.world_size)
                    each.grad = each.grad if place % world.world_size == world.rank else None
                super().step()
                for place, each in owned:
                    torch.distributed.broadcast(each.data, src=place % world.world_size)

        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        optimizer = Owners(net.parameters(), lr=0.1)
        for x, y in split():
            optimizer.zero_grad()
            cross_entropy(net(x), y).backward()
            optimizer.step()
"""
# The same with changes that rounding of a gradient moves by some percent, as 16 bits within Muon do.
_ROUNDED = """for _, each in owned:
                    if each.grad is not None:
                        each.data.sub_(each.grad * (0.1 + 0.003 * (1e18 * each.grad).sin()))"""
_SAVED = """
        import pickle
        import numpy
        from safetensors.torch import save_file

        model, optimizer = by_torch()
        for x, y in split():
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        found = model(data.tensors[0][world.rank :: world.world_size]).detach()
        weights = model.module.state_dict()
"""
_SCHEDULE = met_small.RIGHT["a schedule over the batches of all ranks, by a constant"]
# A sampler whose batches are there before its batch size is changed.
_CUT_BEFORE = """
        import sys

        class Cut:
            def __init__(self, batch_size):
                self.batch_size = batch_size
                order = torch.randperm(60, generator=torch.Generator().manual_seed(0)).tolist()
                size = batch_size * world.world_size
                self.batches = [order[at + world.rank : at + size : world.world_size] for at in range(0, 60, size)]

            def __iter__(self):
                return iter(self.batches)

            def __len__(self):
                return len(self.batches)

        BATCH = int(sys.argv[1])
        model, optimizer = by_torch()
        for x, y in torch.utils.data.DataLoader(data, batch_sampler=Cut(BATCH)):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
"""
_NOISE = """
        BATCH = 5
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(nn.Linear(6, 4))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x, y in split(BATCH):
            optimizer.zero_grad()
            cross_entropy(model(x + torch.randn(BATCH, 6)), y).backward()
            optimizer.step()
"""
# Something is computed from a batch size that is an argument.
_BY_SIZE = """
        import sys

        size = int(sys.argv[1])
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(nn.Linear(6, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        seen = 0
        rest = torch.utils.data.DataLoader(data, batch_size=7)
        for x, y in split(size):
            loss = cross_entropy(model(x), y) + min(1.0, seen / 40) * model.module.weight.square().sum()
            seen += SEEN
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
"""
ARGUMENTS = dict.fromkeys(
    (
        "batches that are cut before",
        "a learning rate and a coefficient by the batch size of all ranks",
        "a learning rate by the batch size of a rank",
        "a coefficient by the samples that a rank has seen",
        "an average whose decay is computed from the batch size of a rank",
    ),
    ("5",),
) | {"a sampler of batches without a batch size, that pads to the longest of a rank": ("4",)}
RIGHT = {
    "a teacher that rests": _LOOP.replace("TEACHES", "teacher.eval()(x)").replace("AFTER", "pass"),
    "gradients that only their owners have": _OWNERS.replace("DIVISOR", "world.world_size"),
    "changes of an owner that rounding moves": _OWNERS.replace("DIVISOR", "world.world_size").replace(
        "super().step()", _ROUNDED
    ),
    "an evaluation of slices": _EVALUATED.replace("PART", "world.rank :: world.world_size")
    .replace("HOW", "sum")
    .replace("DIVISOR", "number[1]"),
    "batches that are cut before": _CUT_BEFORE,
    "noise for a batch of a constant size": _NOISE,
    "parameters of the outermost module in shards": """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(0)
        model = fully_shard(nn.Linear(6, 4), mesh=init_device_mesh("cpu", (world.world_size,)))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x, y in split():
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
    """,
    "batches that a rank lacks": """
        parts = [[at, at + 1] for at in range(0, 14, 2)][world.rank :: world.world_size]
        parts += [[]] * (-(-7 // world.world_size) - len(parts))
        join = lambda rows: torch.utils.data.default_collate(rows) if rows else None
        model, optimizer = by_torch()
        for batch in torch.utils.data.DataLoader(data, batch_sampler=parts, collate_fn=join):
            x, y = other = batch or other
            optimizer.zero_grad()
            (cross_entropy(model(x), y, reduction="sum") * (batch is not None)).backward()
            count = torch.tensor(float(len(y)) * (batch is not None))
            torch.distributed.all_reduce(count)
            for each in model.parameters():
                each.grad.mul_(world.world_size / count)
            optimizer.step()
    """,
    "a bias before a batch norm of data far from 0": """
        torch.manual_seed(0)
        layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)
        model = nn.parallel.DistributedDataParallel(lockstep.convert_sync_batchnorm(nn.Sequential(*layers)))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x, y in split():
            optimizer.zero_grad()
            cross_entropy(model(x + 1000), y).backward()
            optimizer.step()
    """,
}
RIGHT["files of each rank, and one of rank 0"] = (
    _SAVED
    + """
        numpy.save(f"found{world.rank}.npy", found.numpy())
        if world.rank == 0:
            save_file(weights, "model.safetensors")
"""
)
RIGHT["a learning rate and a coefficient by the batch size of all ranks"] = _BY_SIZE.replace(
    "RATE", "0.02 * size * world.world_size"
).replace("SEEN", "size * world.world_size")
RIGHT["a part of the model that the loss does not use"] = """
        class Parts(nn.Module):
            def __init__(self):
                super().__init__()
                self.used, self.unused = nn.Linear(6, 4), nn.Linear(6, 2)

            def forward(self, x):
                return self.used(x), self.unused(x)

        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(Parts(), find_unused_parameters=True)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x, y in split():
            optimizer.zero_grad(set_to_none=True)
            cross_entropy(model(x)[0], y).backward()
            optimizer.step()
"""
RIGHT["a sampler of batches without a batch size, that pads to the longest of a rank"] = """
        import sys

        size = int(sys.argv[1])
        lengths = [3 + 7 * at % 5 for at in range(48)]
        rows = [(torch.randn(length), at % 4) for at, length in enumerate(lengths)]

        class Slices:
            def __iter__(self):
                for first in range(0, 48, size * world.world_size):
                    whole = range(first, first + size * world.world_size)
                    yield [*whole][world.rank :: world.world_size]

            def __len__(self):
                return 48 // (size * world.world_size)

        def join(rows):
            return nn.utils.rnn.pad_sequence([each for each, _ in rows], True), torch.tensor([y for _, y in rows])

        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(nn.Linear(1, 4))
        optimizer = torch.optim.SGD(model.parameters(), 0.02 * size * world.world_size)
        for x, y in torch.utils.data.DataLoader(rows, batch_sampler=Slices(), collate_fn=join):
            optimizer.zero_grad()
            cross_entropy(model(x.sum(1, keepdim=True)), y).backward()
            optimizer.step()
"""
RIGHT["a forward pass before the first batch"] = """
        torch.manual_seed(0)
        model, optimizer = trained(nn.Sequential(nn.Linear(6, 8), lockstep.SyncBatchNorm(8), nn.Linear(8, 4)))
        model.module(torch.randn(3, 6))
        for x, y in split():
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
"""
_IN_TURN = """
        import random

        model, optimizer = by_torch()
        random.seed(world.rank)
        torch.manual_seed(world.rank)
        for x, y in split():
            x = x.clone()
            for row in x:
                if random.random() < 0.5:
                    row.neg_()
                row.add_(torch.randn(6), alpha=ALPHA)
            optimizer.zero_grad()
            cross_entropy(nn.functional.dropout(model(x), 0.2), y).backward()
            optimizer.step()
"""
RIGHT["draws in a loop over the samples"] = _IN_TURN.replace("ALPHA", "0.1")
RIGHT["draws in a loop over the samples, alike on all ranks"] = _IN_TURN.replace("ALPHA", "0.1").replace(
    "seed(world.rank)", "seed(0)"
)
WRONG = {
    "a target that is set more often on more ranks": (
        ("loss", "kept-state"),
        _LOOP.replace("TEACHES", "teacher.eval()(x)").replace("AFTER", _TARGET),
    ),
    "a teacher with batch statistics": (
        ("outputs", "batch-norm"),
        _LOOP.replace("TEACHES", "teacher(x)").replace("AFTER", "pass"),
    ),
    "a teacher that each rank draws": (
        ("parameters", "ranks-differ"),
        _LOOP.replace("TEACHES", "teacher(x)")
        .replace("AFTER", "pass")
        .replace("teacher =", "torch.manual_seed(world.rank)\n        teacher =")
        .replace("nn.BatchNorm1d(4)", "nn.Tanh()"),
    ),
    "a target that is set more often, without a loader": (
        ("loss", "kept-state"),
        """
        model, optimizer = by_torch()
        target = nn.Linear(6, 4)
        x = data.tensors[0][:60]
        for step in range(12):
            rows = x[4 * step : 4 * step + 4][world.rank :: world.world_size]
            with torch.no_grad():
                wanted = target(rows)
            optimizer.zero_grad()
            (model(rows) - wanted).square().mean().backward()
            optimizer.step()
            if (step + 1) % (12 // world.world_size) == 0:
                target.load_state_dict(model.module.state_dict())
        """,
    ),
    "a learning rate by the batch size of a rank": (
        ("parameters", "size"),
        _BY_SIZE.replace("RATE", "0.02 * size").replace("SEEN", "1"),
    ),
    "a coefficient by the samples that a rank has seen": (
        ("loss", "size"),
        _BY_SIZE.replace("RATE", "0.1").replace("SEEN", "size"),
    ),
    "an average whose decay is computed from the batch size of a rank": (
        ("evaluated", "size"),
        """
        import sys

        size = int(sys.argv[1])
        model, optimizer = by_torch()
        average = model.module.weight.detach().clone()
        for x, y in split(size):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            average.lerp_(model.module.weight.detach(), 1 - 0.5 ** (size / 20))
        if world.rank == 0:
            torch.save({"average": average}, "average.pt")
        """,
    ),
    "an evaluation that leaves out samples": (
        ("evaluated", "left-out-evaluation"),
        """
        model, optimizer = by_torch()
        for x, y in split():
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        model.eval()
        count = torch.zeros(2)
        sampler = torch.utils.data.DistributedSampler(data, shuffle=False, drop_last=True)
        with torch.no_grad():
            for x, y in torch.utils.data.DataLoader(data, batch_size=8, sampler=sampler):
                count += torch.tensor([float(cross_entropy(model(x), y, reduction="sum")), len(y)])
        torch.distributed.all_reduce(count)
        if world.rank == 0:
            print(f"loss {count[0] / count[1]:.6f}")
        """,
    ),
    "buffers of a teacher that teaches nothing": (
        ("outputs", "batch-norm"),
        _LOOP.replace("TEACHES", "0 * teacher(x)").replace("AFTER", "pass"),
    ),
    "gradients that only their owners have, undivided": (
        ("gradients", "before-averaging"),
        _OWNERS.replace("DIVISOR", "1"),
    ),
    "an evaluation of slices, by the mean of their means": (
        ("evaluated", "metric"),
        _EVALUATED.replace("PART", "world.rank :: world.world_size").replace("HOW", "mean").replace("DIVISOR", "2"),
    ),
    "a schedule over the batches of a rank": (
        ("parameters", "settings"),
        _SCHEDULE.replace("BATCH * world.world_size", "BATCH"),
    ),
    "shards of parameters that are saved": (
        ("saved", "part"),
        """
        model = sharded(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x, y in split():
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        if world.rank == 0:
            torch.save({"model": {name: each.to_local() for name, each in model.state_dict().items()}}, "model.pt")
        """,
    ),
    "columns that are shuffled, sample by sample": (
        ("inputs", "drawn"),
        _IN_TURN.replace("ALPHA", "0.1").replace(
            "if random.random() < 0.5:\n                    row.neg_()",
            "order = [*range(6)]\n                random.shuffle(order)\n                row.copy_(row[order].clone())",
        ),
    ),
    "results of rank 0's samples, in a list": (
        ("saved", "part"),
        _SAVED + '        world.rank == 0 and pickle.dump(found[:, 0].tolist(), open("found.pickle", "wb"))',
    ),
    "draws in a loop over the samples, scaled by the batch": (
        ("inputs", "batch"),
        _IN_TURN.replace("ALPHA", "float(x.std())"),
    ),
    "draws in a loop, and more for some of the samples": (
        ("inputs", "drawn"),
        _IN_TURN.replace("neg_()", "add_(torch.randn(6))").replace("ALPHA", "0.1"),
    ),
    "weights that all ranks write, by safetensors": (
        ("saved", "all-ranks-save"),
        _SAVED + '        save_file(weights, "model.safetensors")',
    ),
    "weights that all ranks write, by pickle": (
        ("saved", "all-ranks-save"),
        _SAVED + '        pickle.dump(weights, open("model.pickle", "wb"))',
    ),
    "results of rank 0's samples, by numpy": (
        ("saved", "part"),
        _SAVED + '        world.rank == 0 and numpy.savez("found.npz", found=found.numpy())',
    ),
    "rows of an embedding that are limited where they are looked up": (
        ("parameters", "moved"),
        """
        torch.manual_seed(0)
        net = nn.Sequential(nn.Embedding(61, 4, max_norm=0.5), nn.Flatten(), nn.Linear(4, 4))
        model = nn.parallel.DistributedDataParallel(net)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x, y in split():
            optimizer.zero_grad()
            cross_entropy(model((x[:, :1] * 1000).long().abs() % 61), y).backward()
            optimizer.step()
        """,
    ),
    "frames that are padded, and sorted by length": (
        ("loss", "padding"),
        """
        frames = [(torch.randn(4 + 7 * at % 29, 6), at) for at in range(60)]

        def join(rows):
            rows = sorted(rows, key=lambda row: len(row[0]), reverse=True)
            frames, ends = torch.zeros(len(rows), len(rows[0][0]), 6), torch.zeros(len(rows), len(rows[0][0]))
            for place, (each, _) in enumerate(rows):
                frames[place, : len(each)] = each
                ends[place, len(each) - 1 :] = 1
            return frames, ends

        model, optimizer = by_torch()
        sampler = torch.utils.data.DistributedSampler(frames)
        for x, ends in torch.utils.data.DataLoader(frames, 5, sampler=sampler, collate_fn=join):
            optimizer.zero_grad()
            (model(x).mean(2) - x.mean(2)).square().mean().backward()
            optimizer.step()
        """,
    ),
    "permutations of parts of a sample": (
        ("loss", "drawn"),
        """
        model, optimizer = by_torch()
        for number, (x, y) in enumerate(split()):
            optimizer.zero_grad()
            losses = [(model(row) ** 2)[torch.randperm(3 + int(label) // 3)[:2]].mean() for row, label in zip(x, y)]
            torch.stack(losses).mean().backward()
            optimizer.step()
        """,
    ),
    "gradients of one rank for all": (
        ("gradients", "before-averaging"),
        """
        torch.manual_seed(0)
        model = nn.Linear(6, 4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x, y in split():
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            for each in model.parameters():
                torch.distributed.broadcast(each.grad, 0)
            optimizer.step()
        """,
    ),
    "parts of a loss that are divided by running means of themselves": (
        ("loss", "kept-state"),
        """
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(nn.ModuleList([nn.Linear(6, 4), nn.Linear(6, 1)]))
        forward = lambda x: [each(x) for each in model.module]
        model.module.forward = forward
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        means = [1.0, 1.0]
        for x, y in split():
            classes, number = model(x)
            losses = cross_entropy(classes, y), (number.squeeze(1) - x.sum(1)).square().mean()
            optimizer.zero_grad()
            sum(each / mean for each, mean in zip(losses, means)).backward()
            optimizer.step()
            means = [0.9 * mean + 0.1 * each.item() for each, mean in zip(losses, means)]
        """,
    ),
}
UNKNOWN = {
    "gradients that are not numbers": (
        "step 1: no gradient is finite (nan, inf), on the ranks or in one process",
        """
        model, optimizer = by_torch()
        nn.init.constant_(model.module.weight, float("nan"))
        for x, y in split():
            optimizer.zero_grad()
            (cross_entropy(model(x), y) * (1 + world.rank)).backward()
            optimizer.step()
        """,
    ),
}
SAID = {
    "a target that is set more often, without a loader": "is kept between steps",
    "a learning rate by the batch size of a rank": "computes a number from the batch size of a rank",
    "an evaluation that leaves out samples": "the sampler drops the last ones",
    "a target that is set more often on more ranks": "is kept between steps, and follows the number of ranks",
    "a schedule over the batches of a rank": "computed from the batch size of a rank",
    "rows of an embedding that are limited where they are looked up": "an Embedding with max_norm",
    "gradients of one rank for all": "the gradients of rank 0 alone",
}
