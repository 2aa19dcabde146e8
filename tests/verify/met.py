"""Programs as others write them, on which an earlier verification was wrong, and what each is: see `test_met.py`."""

from __future__ import annotations

COMMON = """
import numpy as np
import torch
import lockstep
from torch import nn
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
draws = torch.Generator().manual_seed(1)
data = torch.utils.data.TensorDataset(torch.randn(61, 6, generator=draws), torch.randint(4, (61,), generator=draws))
unseeded = torch.get_rng_state()
world = lockstep.init(seed=0)
loader = lockstep.DataLoader(data, batch_size=10, shuffle=True, seed=0)
net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 4))


def split(batch_size=5, **options):
    sampler = torch.utils.data.DistributedSampler(data, drop_last=True)
    return torch.utils.data.DataLoader(data, batch_size=batch_size, sampler=sampler, drop_last=True, **options)


def sharded(net):
    from torch.distributed.fsdp import fully_shard

    for each in [*net, net]:
        fully_shard(each, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (world.world_size,)))
    return net


def trained(net):
    model = lockstep.DistributedDataParallel(net)
    return model, torch.optim.SGD(model.parameters(), 0.1)


def by_torch():
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(6, 4))
    return model, torch.optim.SGD(model.parameters(), 0.1)
"""
RIGHT = {
    "numbers of each sample, by its own generator": """
        import random

        model, optimizer = trained(net)
        for x, y in loader:
            flips = [random.Random(str(each.tolist())).choice([-1, 1]) for each in x]
            optimizer.zero_grad()
            cross_entropy(model(x * torch.tensor(flips)[:, None]), y).backward()
            optimizer.step()
    """,
    "a row for each sample by the rank's own generator, and a rank without samples": """
        model, optimizer = trained(net)
        noise = np.random.default_rng(world.rank)
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x + torch.from_numpy(noise.normal(size=(len(x), 1)))), y).backward()
            optimizer.step()
    """,
    "files for temporary use, that are read where nobody has closed them": """
        import csv, pathlib, tempfile

        folder = pathlib.Path(tempfile.gettempdir(), f"verify-{world.rank}")
        folder.mkdir()  # no run sees what another has made
        open(folder / "log", "w").write("é")
        assert open(folder / "log").read() == "é"
        with open(folder / "table", "w", newline="") as table:
            csv.writer(table).writerow([1, 2])
        assert (folder / "table").read_bytes() == b"1,2\\r\\n"
        with open(folder / "both", "w+") as both:
            both.write("abc")
            both.seek(1)
            assert (both.read(), both.mode) == ("bc", "w+")
        model, optimizer = trained(net)
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
    """,
    "a loss of rank 0 that is saved, and a parameter that is one number": """
        class Scaled(nn.Linear):
            def forward(self, x):
                return super().forward(x) * self.scale

        torch.manual_seed(0)
        module = Scaled(6, 4)
        module.scale = nn.Parameter(torch.ones(()))
        model = nn.parallel.DistributedDataParallel(module)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x, y in split():
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        if world.rank == 0:
            torch.save({"model": module.state_dict(), "loss": loss.detach()}, "last.pt")
    """,
    "columns of a text without a loader, of which each rank has a part": """
        class Reader(nn.Module):
            def __init__(self):
                super().__init__()
                self.embed, self.cells, self.head = nn.Embedding(4, 8), nn.GRU(8, 8), nn.Linear(8, 4)

            def forward(self, words, state):
                state = None if state is None else state[0]
                found, state = self.cells(nn.functional.dropout(self.embed(words), 0.5), state)
                return self.head(found), state.expand(2, -1, -1, -1)

        text = torch.randint(4, (33, 8), generator=draws).chunk(world.world_size, 1)[world.rank]
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(Reader())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        state = None
        for at in range(0, 32, 4):
            optimizer.zero_grad()
            words, state = model(text[at : at + 4], None if state is None else state.detach())
            cross_entropy(words.flatten(0, 1), text[at + 1 : at + 5].flatten()).backward()
            optimizer.step()
    """,
    "images that are padded to the largest of a rank, with a mask of what is padding": """
        def join(samples):
            images = [x[: (1 + y % 2) * (1 + y // 2)].view(1 + y % 2, -1) for x, y in samples]
            padded, mask = torch.zeros(len(images), 2, 2), torch.ones(len(images), 2, 2, dtype=torch.bool)
            for image, place, hidden in zip(images, padded, mask):
                place[: image.size(0), : image.size(1)] = image
                hidden[: image.size(0), : image.size(1)] = False
            height, width = (max(each.size(axis) for each in images) for axis in (0, 1))
            return padded[:, :height, :width], mask[:, :height, :width], torch.stack([y for _, y in samples])

        class Reader(nn.Module):
            def __init__(self):
                super().__init__()
                self.embed, self.head = nn.Linear(1, 8), nn.Linear(8, 4)

            def forward(self, images, mask):
                return self.head((self.embed(images[..., None]).tanh() * ~mask[..., None]).sum((1, 2)))

        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(Reader())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for images, mask, y in split(2, collate_fn=join):
            optimizer.zero_grad()
            cross_entropy(model(images, mask), y).backward()
            optimizer.step()
    """,
    "parameters in shards": """
        torch.manual_seed(0)
        model = sharded(nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)))
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        for x, y in split():
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
    """,
    "a learning rate of numpy": """
        model, optimizer = trained(net)
        for epoch in range(2):
            for number, (x, y) in enumerate(loader):
                optimizer.param_groups[0]["lr"] = 0.1 * (1 + np.cos(np.pi * number / len(loader)))
                optimizer.zero_grad()
                cross_entropy(model(x), y).backward()
                optimizer.step()
    """,
    "several steps by one batch": """
        model, optimizer = trained(net)
        x, y = next(iter(loader))
        for _ in range(4):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
    """,
    "rank 0 draws what it shows": """
        model, optimizer = trained(net)
        for epoch in range(3):
            for number, (x, y) in enumerate(loader):
                optimizer.zero_grad()
                cross_entropy(model(x + 0.1 * torch.randn_like(x)), y).backward()
                optimizer.step()
                if number % 2 == 0 and world.rank == 0:
                    torch.randn(3)
    """,
    "a scaled loss": """
        model, optimizer = trained(net)
        scaler = torch.amp.GradScaler("cpu")
        for x, y in loader:
            optimizer.zero_grad()
            scaler.scale(cross_entropy(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
    """,
    "numbers of 16 bits": """
        torch.set_default_dtype(torch.float32)
        torch.manual_seed(0)
        data = torch.utils.data.TensorDataset(torch.randn(96, 8), torch.randint(0, 3, (96,)))
        sampler = torch.utils.data.DistributedSampler(data)
        net = nn.Sequential(nn.Linear(8, 16), nn.Identity(), nn.ReLU(), nn.Linear(16, 3))
        model = nn.parallel.DistributedDataParallel(net)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu")
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for x, y in torch.utils.data.DataLoader(data, batch_size=8, sampler=sampler):
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.float16):
                    loss = cross_entropy(model(x), y)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
    """,
    "a loader anew for each training": """
        for _ in range(3):
            model, optimizer = trained(nn.Linear(6, 4))
            loader = lockstep.DataLoader(data, batch_size=10, shuffle=True, seed=0)
            for epoch in range(2):
                for x, y in loader:
                    optimizer.zero_grad()
                    cross_entropy(model(x), y).backward()
                    optimizer.step()
    """,
    "numbers of 16 bits alone": """
        torch.set_default_dtype(torch.bfloat16)
        model, optimizer = by_torch()
        for x, y in split():
            optimizer.zero_grad()
            cross_entropy(model(x.bfloat16()), y).backward()
            optimizer.step()
    """,
    "gradients of each sample by torch.func": """
        from torch.func import functional_call, grad, vmap

        model, optimizer = trained(nn.Linear(6, 4))

        def loss_of(weights, x, y):
            return cross_entropy(functional_call(model.module, weights, (x[None],)), y[None])

        for x, y in loader:
            weights = dict(model.module.named_parameters())
            norms = vmap(grad(loss_of), (None, 0, 0))(weights, x, y)["weight"].flatten(1).norm(dim=1)
            optimizer.zero_grad()
            loss = (cross_entropy(model(x), y, reduction="none") / norms.detach().clamp(min=1)).mean()
            loss.backward()
            optimizer.step()
    """,
    "draws on GPUs, in rows that do not begin with the sample": """
        import torch.distributed as dist
        torch.set_default_dtype(torch.float32)
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(
            nn.TransformerEncoderLayer(6, 2, 8, 0.3).cuda(), device_ids=[world.local_rank]
        )
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x, y in split():
            optimizer.zero_grad()
            steps = x.float().cuda()[None].repeat(3, 1, 1)
            cross_entropy(model(steps).mean(0), y.cuda()).backward()
            optimizer.step()
    """,
    "a module that is wrapped on several ranks alone": """
        torch.manual_seed(0)
        module = nn.ModuleDict({"net": nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))})
        module.forward = lambda x: module["net"](x)
        model = nn.parallel.DistributedDataParallel(module) if world.world_size > 1 else module["net"]
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x, y in split():
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
    """,
    "accumulation whose last pass is in a closure": """
        model, optimizer = by_torch()
        sampler = torch.utils.data.DistributedSampler(data, drop_last=True)
        batches = torch.utils.data.DataLoader(data, batch_size=5, sampler=sampler, drop_last=True)
        for number, (x, y) in enumerate(batches):
            def compute():
                if number % 2 == 0:
                    optimizer.zero_grad()
                loss = cross_entropy(model(x), y) / 2
                loss.backward()
                return loss
            if number % 2:
                optimizer.step(compute)
            else:
                compute()
    """,
    "a further training until rounding is left, of data that is made after the first": """
        torch.set_default_dtype(torch.float32)
        for rate in 0.05, 0.2:
            draws = torch.Generator().manual_seed(1)
            rows = torch.randn(205, 6, generator=draws)
            rows = torch.utils.data.TensorDataset(rows, rows.sum(1, keepdim=True))
            batches = lockstep.DataLoader(rows, batch_size=16, shuffle=True)
            model, optimizer = trained(nn.Linear(6, 1))
            optimizer.param_groups[0]["lr"] = rate
            for epoch in range(2):
                for x, y in batches:
                    optimizer.zero_grad()
                    nn.functional.mse_loss(model(x), y).backward()
                    optimizer.step()
    """,
    "how many samples rank 0 had, beside an evaluation": """
        model, optimizer = trained(nn.Linear(6, 4))
        for epoch in range(2):
            trained_on = 0
            for x, y in lockstep.DataLoader(data, batch_size=20, drop_last=True):
                optimizer.zero_grad()
                cross_entropy(model(x), y).backward()
                optimizer.step()
                trained_on += len(y)
            loss = lockstep.metrics.Mean()
            with torch.no_grad():
                for x, y in lockstep.DataLoader(data, batch_size=16, evaluation=True):
                    loss.update(cross_entropy(model(x), y))
            (loss,) = lockstep.metrics.synchronize(loss)
            if world.rank == 0:
                print(f"epoch {epoch}: loss {loss:.6f}, {trained_on} samples")
    """,
    "a stream that ends on some ranks first": """
        class Part(torch.utils.data.IterableDataset):
            def __iter__(self):
                for number, sample in enumerate(data):
                    if number // share % world.world_size == world.rank:
                        yield sample

        share = 12 // world.world_size
        model, optimizer = trained(nn.Linear(6, 4))
        data = [data[number % 61] for number in range(79)]
        for epoch in range(3):
            batches = iter(torch.utils.data.DataLoader(Part(), batch_size=share, drop_last=True))
            while not lockstep.any((batch := next(batches, None)) is None):
                optimizer.zero_grad()
                cross_entropy(model(batch[0]), batch[1]).backward()
                optimizer.step()
    """,
    "whole batches of a stream, by turns": """
        class Stream(torch.utils.data.IterableDataset):
            def __iter__(self):
                for number in range(world.rank, 12, world.world_size):
                    x, y = data[5 * number : 5 * number + 5]
                    yield {"x": x, "y": y, "kind": "a"}

        model, optimizer = by_torch()
        for epoch in range(2):
            for batch in torch.utils.data.DataLoader(Stream(), batch_size=None):
                optimizer.zero_grad()
                cross_entropy(model(batch["x"]), batch["y"]).backward()
                optimizer.step()
    """,
    "so many batches by next()": """
        model, optimizer = trained(net)
        for epoch in range(3):
            batches = iter(loader)
            for _ in range(len(loader) // 2):
                optimizer.zero_grad()
                for x, y in [next(batches) for _ in range(2)]:
                    (cross_entropy(model(x), y) / 2).backward()
                optimizer.step()
    """,
}
# Of what nothing can be told, and why.
UNKNOWN = {
    "classes that are split over the ranks": (
        "the shape of a parameter (weight) is [4, 6] in one process, and [2, 6] on a rank",
        """
        torch.manual_seed(0)
        own = torch.arange(4).chunk(world.world_size)[world.rank]
        head = nn.Linear(6, 4, bias=False)
        head.weight = nn.Parameter(head.weight.detach()[own].clone())
        optimizer = torch.optim.SGD(head.parameters(), 0.1)
        for x, y in split():
            optimizer.zero_grad()
            every, labels = (lockstep.all_gather(each) for each in (x, y))
            (head(every).exp().sum(1) / len(every)).sum().backward()
            optimizer.step()
        """,
    ),
    "a script that wants two ranks": (
        "Its last output: | rank0: one is not enough",
        """
        if world.world_size < 2:
            print("one is not enough")
            raise SystemExit
        model, optimizer = by_torch()
        for x, y in split():
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        """,
    ),
    "ranks that never meet": (
        "ranks of an MPI job are started by",
        """
        raise lockstep.errors.SetupError("ranks of an MPI job are started by `mpirun`")
        """,
    ),
    "parameters in flat shards": (
        "FullyShardedDataParallel's shards of parameters cannot be compared",
        """
        from torch.distributed.fsdp import FullyShardedDataParallel

        torch.manual_seed(0)
        model = FullyShardedDataParallel(nn.Linear(6, 4), device_id=torch.device("cpu"))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x, y in split():
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        """,
    ),
    "streams of their own, for parts of the passes of a step": (
        "One process that was given the ranks' batches gave their answer",
        """
        import random

        class Stream(torch.utils.data.IterableDataset):
            def __iter__(self):
                draw = random.Random(world.rank)
                while True:
                    yield data[draw.randrange(60)]

        model, optimizer = by_torch()
        count = 4 // world.world_size
        batches = iter(torch.utils.data.DataLoader(Stream(), batch_size=5))
        x, y = next(batches)
        for step in range(4):
            optimizer.zero_grad()
            for place in range(count):
                loss = cross_entropy(model(x), y) / count
                x, y = next(batches)
                loss.backward()
            optimizer.step()
        """,
    ),
}
