"""Programs after `COMMON` of `met.py` as well-known projects train, on which an earlier verification was wrong."""

from __future__ import annotations

# Texts that each rank pads to the longest of its own, and batches that are fetched one step ahead.
TEXTS = """
        def join(samples):
            rows = [x[: 1 + y] for x, y in samples]
            return nn.utils.rnn.pad_sequence(rows, True), torch.stack([y for _, y in samples])

        def ahead(batches):
            batches = iter(batches)
            held = next(batches)
            for following in batches:
                yield held
                held = following
            yield held

        class Reader(nn.Module):
            def __init__(self):
                super().__init__()
                self.embed, self.head = nn.Linear(1, 8), nn.Linear(8, 4)

            def forward(self, x):
                return self.head((self.embed(x[..., None]) * (x != 0)[..., None]).sum(1))

        def reader():
            torch.manual_seed(0)
            model = nn.parallel.DistributedDataParallel(Reader())
            return model, torch.optim.SGD(model.parameters(), 0.1)
"""
# As those of nanochat and modded-nanogpt do, each rank for its own part of the parameters.
AVERAGING = """
        class Averaging(torch.optim.Optimizer):
            @torch.no_grad()
            def step(self):
                for each in self.param_groups[0]["params"]:
                    mean = each.grad / world.world_size
                    torch.distributed.all_reduce(mean)
                    each.sub_(mean, alpha=self.param_groups[0]["lr"])

        def averaging():
            torch.manual_seed(0)
            model = nn.Linear(6, 4)
            return model, Averaging(model.parameters(), {"lr": 0.1})
"""
RIGHT = {
    "pieces of a batch, for which times are chosen and noise is drawn": """
        model, optimizer = by_torch()
        batches = split(12 // world.world_size)
        np.random.seed(world.rank)
        torch.manual_seed(world.rank)
        for x, y in batches:
            optimizer.zero_grad()
            for rows, labels in zip(x.chunk(2), y.chunk(2)):
                times = torch.from_numpy(np.random.choice(20, size=(len(rows),), p=np.full(20, 0.05)))
                rows = rows + times[:, None] / 20 * torch.randn_like(rows)
                (cross_entropy(model(rows), labels) / 2).backward()
            optimizer.step()
    """,
    "noise for images that are fetched ahead, and a smaller last batch": TEXTS
    + """
        model, optimizer = by_torch()
        images = torch.utils.data.Subset(data, range(60))
        sampler = torch.utils.data.DistributedSampler(images, shuffle=False)
        torch.manual_seed(world.rank)
        for x, y in ahead(torch.utils.data.DataLoader(images, 8, sampler=sampler)):
            optimizer.zero_grad()
            cross_entropy(model(x + torch.randn_like(x)), y).backward()
            optimizer.step()
    """,
    "dropout of the nodes of graphs that are joined": """
        def join(graphs):
            parts = [x.expand(2 + y, 6) + torch.arange(2.0 + y)[:, None] for x, y in graphs]
            places = torch.arange(len(parts)).repeat_interleave(torch.tensor([len(each) for each in parts]))
            return {"x": torch.cat(parts), "graph": places, "y": torch.stack([y for _, y in graphs])}

        model, optimizer = by_torch()
        torch.manual_seed(world.rank)
        batches = split(collate_fn=join)
        for epoch in range(2):
            batches.sampler.set_epoch(epoch)
            for batch in batches:
                nodes = nn.functional.dropout(batch["x"], 0.5)
                graphs = torch.zeros(len(batch["y"]), 6).index_add(0, batch["graph"], nodes)
                optimizer.zero_grad()
                cross_entropy(model(graphs), batch["y"]).backward()
                optimizer.step()
            if world.rank == 0:
                with torch.no_grad():
                    list(torch.utils.data.DataLoader(data, 5))
    """,
    "dropout of texts that each rank pads to the longest of its own": """
        def join(samples):
            rows = [x[: 1 + y] for x, y in samples]
            return nn.utils.rnn.pad_sequence(rows, True), torch.stack([y for _, y in samples])

        class Reader(nn.Module):
            def __init__(self):
                super().__init__()
                self.embed, self.head = nn.Linear(1, 8), nn.Linear(8, 4)

            def forward(self, x):
                words = nn.functional.dropout(self.embed(x[..., None]), 0.5) * (x != 0)[..., None]
                return self.head(words.sum(1))

        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(Reader())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        torch.manual_seed(world.rank)
        for x, y in split(collate_fn=join):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
    """,
    "as many batches for a step as make a size together, fewer on each of N ranks": """
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(net)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        torch.manual_seed(world.rank)
        count = 6 // world.world_size
        for number, (x, y) in enumerate(split(2), 1):
            model.require_backward_grad_sync = number % count == 0
            (cross_entropy(model(x), y) / count).backward()
            if number % count == 0:
                optimizer.step()
                optimizer.zero_grad()
    """,
    "windows of a text without a loader, of which each of N ranks takes fewer": """
        model, optimizer = by_torch()
        x, y = data.tensors
        for first in range(0, 60, 12):
            places = range(first + 2 * world.rank, first + 12, 2 * world.world_size)
            optimizer.zero_grad()
            for place in places:
                model.require_backward_grad_sync = place == places[-1]
                (cross_entropy(model(x[place : place + 2]), y[place : place + 2]) / len(places)).backward()
            optimizer.step()
    """,
    "samples that each rank draws ahead, for its part of the passes of a step": """
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(net)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        torch.manual_seed(world.rank)

        def draw():
            places = torch.randint(60, (5,))
            return data.tensors[0][places], data.tensors[1][places]

        count = 4 // world.world_size
        x, y = draw()
        for step in range(4):
            if step % 2 == 0 and world.rank == 0:
                with torch.no_grad():
                    print(sum(cross_entropy(model.module(x), y) for x, y in [draw(), draw()]))
            optimizer.zero_grad()
            for place in range(count):
                model.require_backward_grad_sync = place == count - 1
                loss = cross_entropy(model(x), y) / count
                x, y = draw()
                loss.backward()
            optimizer.step()
    """,
    "places that each rank draws one by one, for its part of the passes of a step": """
        import random

        model, optimizer = by_torch()
        random.seed(world.rank)
        count = 4 // world.world_size
        for step in range(4):
            optimizer.zero_grad()
            for _ in range(count):
                places = [random.randint(0, 60) for _ in range(5)]
                (cross_entropy(model(data.tensors[0][places]), data.tensors[1][places]) / count).backward()
            optimizer.step()
    """,
    "batches that are fetched ahead, for a step of fewer on each of N ranks": """
        model, optimizer = by_torch()
        count = 6 // world.world_size
        batches = iter(split(2))
        x, y = next(batches)
        for step in range(4):
            optimizer.zero_grad()
            for place in range(count):
                model.require_backward_grad_sync = place == count - 1
                loss = cross_entropy(model(x), y) / count
                x, y = next(batches)
                loss.backward()
            optimizer.step()
    """,
    "a branch that is dropped for whole rows of two views that are joined": """
        class Views(nn.Module):
            def __init__(self):
                super().__init__()
                self.embed, self.branch, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)

            def forward(self, views):
                z = self.embed(torch.cat(views))
                z = z + self.branch(z).tanh() * (torch.rand(len(z), 1) < 0.5)
                return self.head(z)

        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(Views())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        torch.manual_seed(world.rank)
        for x, y in split():
            optimizer.zero_grad()
            cross_entropy(model([x, x.flip(1)]), y.repeat(2)).backward()
            optimizer.step()
    """,
    "a step for all samples, of which each rank has one half": """
        part = range(60 // world.world_size * world.rank, 60 // world.world_size * (world.rank + 1))
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(net)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        batches = torch.utils.data.DataLoader(data, batch_size=12 // world.world_size, sampler=list(part))
        torch.manual_seed(world.rank)
        for epoch in range(3):
            optimizer.zero_grad()
            for x, y in batches:
                (cross_entropy(model(x), y) / len(batches)).backward()
            optimizer.step()
    """,
    "an evaluation that turns gradients off for each batch, and says how far it is": """
        model, optimizer = by_torch()
        batches = split(12 // world.world_size)
        held = torch.utils.data.Subset(data, range(48))
        phases = {"train": batches, "test": torch.utils.data.DataLoader(held, 12, sampler=range(world.rank, 48, 2))}
        if world.world_size == 1:
            phases["test"] = torch.utils.data.DataLoader(held, 12)
        for epoch in range(3):
            batches.sampler.set_epoch(epoch)
            for phase in phases:
                total = torch.zeros(2)
                for x, y in phases[phase]:
                    with torch.set_grad_enabled(phase == "train"):
                        z = model(x)
                        loss = cross_entropy(z, y)
                    if phase == "train":
                        optimizer.zero_grad()
                        loss.backward()
                        optimizer.step()
                    total += torch.tensor([loss.item() * len(y), len(y)])
                    if world.rank == 0:
                        print(f"{phase}: loss {total[0] / total[1]:.5f}, so far")
                torch.distributed.all_reduce(total)
                if world.rank == 0:
                    print(f"{phase}: loss {total[0] / total[1]:.5f}, batches of {batches.batch_size}")
    """,
    "a model that is made without numbers between the steps": """
        model, optimizer = by_torch()
        for x, y in split():
            nn.Sequential(nn.Dropout(), nn.Linear(6, 4, device="meta"))(torch.ones(2, 6, device="meta"))
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
    """,
    "a script that does nothing with less than two GPUs": """
        if torch.cuda.device_count() < 2:
            print("this example takes two GPUs")
            raise SystemExit
        model, optimizer = by_torch()
        for x, y in split():
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
    """,
    "an optimizer that averages within its step": AVERAGING
    + """
        model, optimizer = averaging()
        for x, y in split():
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
    """,
}
WRONG = {
    "an optimizer that averages within its step, of a loss that is a sum": (
        ("gradients", "sum"),
        AVERAGING
        + """
        model, optimizer = averaging()
        for x, y in split():
            optimizer.zero_grad()
            cross_entropy(model(x), y, reduction="sum").backward()
            optimizer.step()
        """,
    ),
    "a rate by the number of ranks, for texts that are padded and fetched ahead": (
        ("parameters", "settings"),
        TEXTS
        + """
        model, optimizer = reader()
        for number, (x, y) in enumerate(ahead(split(collate_fn=join)), 1):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.param_groups[0]["lr"] = 0.1 * world.world_size ** (number == 6)
            optimizer.step()
        """,
    ),
    "texts that are padded and fetched ahead, and a last batch that is filled up": (
        ("samples", "padded"),
        TEXTS
        + """
        model, optimizer = reader()
        sampler = torch.utils.data.DistributedSampler(data, shuffle=False)
        for x, y in ahead(torch.utils.data.DataLoader(data, 10, sampler=sampler, collate_fn=join)):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        """,
    ),
    "noise for images that are fetched ahead, and a last batch that is filled up": (
        ("samples", "padded"),
        TEXTS
        + """
        model, optimizer = by_torch()
        sampler = torch.utils.data.DistributedSampler(data, shuffle=False)
        torch.manual_seed(world.rank)
        for x, y in ahead(torch.utils.data.DataLoader(data, 8, sampler=sampler)):
            optimizer.zero_grad()
            cross_entropy(model(x + torch.randn_like(x)), y).backward()
            optimizer.step()
        """,
    ),
    "parameters that are averaged after each second step": (
        ("gradients", "own-steps"),
        """
        torch.manual_seed(0)
        model = nn.Linear(6, 4)
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        for number, (x, y) in enumerate(split(), 1):
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] = 0.1 * (number > 1)
            cross_entropy(model(x), y).backward()
            optimizer.step()
            for each in model.parameters() if number % 2 == 0 else ():
                torch.distributed.all_reduce(each.data)
                each.data /= world.world_size
        """,
    ),
    "boxes whose loss is divided by how many there are, beside a mean": (
        ("loss", "count"),
        """
        class Detector(nn.Module):
            def __init__(self):
                super().__init__()
                self.body, self.score, self.box = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(8, 3)

            def forward(self, x):
                x = self.body(x).tanh()
                return self.score(x), self.box(x)

        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(Detector())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x, y in split():
            optimizer.zero_grad()
            score, box = model(x)
            distances = (box - x[:, :3]).abs().sum(1) * (y > 0)
            (cross_entropy(score, y) + distances.sum() / (y > 0).sum()).backward()
            optimizer.step()
        """,
    ),
    "images that each rank flips by itself, with more boxes than there are images": (
        ("samples", "drawn"),
        """
        class Boxes(torch.utils.data.Dataset):
            def __len__(self):
                return 60

            def __getitem__(self, index):
                x, y = data[index]
                return x * (torch.rand(1) - 0.5).sign(), {"boxes": x.repeat(3 + y, 1), "labels": y.repeat(3 + y)}

        def join(samples):
            images, targets = zip(*samples)
            return torch.stack(images), targets

        model, optimizer = by_torch()
        torch.manual_seed(world.rank)
        boxes = Boxes()
        sampler = torch.utils.data.DistributedSampler(boxes)
        for x, targets in torch.utils.data.DataLoader(boxes, 2, sampler=sampler, collate_fn=join):
            optimizer.zero_grad()
            cross_entropy(model(x), torch.stack([each["labels"][0] for each in targets])).backward()
            optimizer.step()
        """,
    ),
    "texts that are packed into one row, and a mean over their tokens": (
        ("loss", "count"),
        """
        def pack(samples):
            rows = [x[: 2 + y].round() for x, y in samples]
            return torch.cat(rows), torch.cat([torch.full((len(x),), place) for place, x in enumerate(rows)])

        class Reader(nn.Module):
            def __init__(self):
                super().__init__()
                self.embed, self.head = nn.Linear(1, 8), nn.Linear(8, 1)

            def forward(self, x, text):
                words = self.embed(x[:, None]).tanh()
                scores = (words @ words.T).masked_fill(text[:, None] != text[None], -1e9)
                return self.head(scores.softmax(1) @ words)

        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(Reader())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x, text in split(collate_fn=pack):
            optimizer.zero_grad()
            (model(x, text)[:, 0] - x.square()).square().mean().backward()
            optimizer.step()
        """,
    ),
    "samples that each rank makes, and gradients that nobody averages": (
        ("gradients", "unwrapped"),
        """
        torch.manual_seed(0)
        model = nn.Linear(6, 4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        plays = torch.Generator().manual_seed(world.rank)
        for _ in range(4):
            x = torch.randn(8, 6, generator=plays)
            optimizer.zero_grad()
            cross_entropy(model(x), x[:, :4].argmax(1)).backward()
            optimizer.step()
        """,
    ),
    "columns of a text, on ranks that want GPUs and whose gradients nobody averages": (
        ("gradients", "unwrapped"),
        """
        torch.cuda.set_device(world.rank)
        torch.manual_seed(0)
        model = nn.Linear(6, 4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x in torch.randn(4, 3, 8, 6, generator=draws).chunk(world.world_size, 2)[world.rank]:
            optimizer.zero_grad()
            cross_entropy(model(x).flatten(0, 1), x[..., :4].argmax(2).flatten()).backward()
            optimizer.step()
        """,
    ),
    "a generator that is called without its engine, and a discriminator that is called with it": (
        ("gradients", "inner-model"),
        """
        torch.manual_seed(0)
        judge = nn.parallel.DistributedDataParallel(nn.Linear(6, 1))
        make = nn.parallel.DistributedDataParallel(nn.Linear(3, 6))
        optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (judge, make)]
        torch.manual_seed(world.rank)
        for x, y in split():
            optimizers[0].zero_grad()
            made = make.module(torch.randn(len(x), 3))
            (judge(made.detach()).square().mean() + (judge(x) - 1).square().mean()).backward()
            optimizers[0].step()
            optimizers[1].zero_grad()
            (judge(made) - 1).square().mean().backward()
            optimizers[1].step()
        """,
    ),
    "a batch norm that two views pass joined, some of which have other sizes": (
        ("outputs", "batch-norm"),
        """
        class Views(nn.Module):
            def __init__(self):
                super().__init__()
                self.embed = nn.Linear(1, 8)
                self.head = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))

            def forward(self, views):
                return self.head(torch.cat([self.embed(view[..., None]).tanh().mean(1) for view in views]))

        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(Views())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x, y in split():
            optimizer.zero_grad()
            cross_entropy(model([x, x.flip(1), x[:, :3]]), y.repeat(3)).backward()
            optimizer.step()
        """,
    ),
    "windows of a text that all ranks take alike": (
        ("samples", "no-sampler"),
        """
        model, optimizer = by_torch()
        x, y = data.tensors
        for first in range(0, 60, 12):
            places = range(first, first + 12, 2 * world.world_size)
            optimizer.zero_grad()
            for place in places:
                (cross_entropy(model(x[place : place + 2]), y[place : place + 2]) / len(places)).backward()
            optimizer.step()
        """,
    ),
    "windows of a text, whose losses are not divided by how many there are": (
        ("loss", "sum"),
        """
        model, optimizer = by_torch()
        x, y = data.tensors
        for first in range(0, 60, 12):
            optimizer.zero_grad()
            for place in range(first + 2 * world.rank, first + 12, 2 * world.world_size):
                cross_entropy(model(x[place : place + 2]), y[place : place + 2]).backward()
            optimizer.step()
        """,
    ),
    "an order that is begun anew to fill the last batch up": (
        ("samples", "padded"),
        """
        class Rounded(torch.utils.data.Sampler):
            def __len__(self):
                return -(-61 // world.world_size)

            def __iter__(self):
                order = torch.randperm(61, generator=torch.Generator().manual_seed(3)).tolist()
                return iter((order * 2)[: len(self) * world.world_size][world.rank :: world.world_size])

        model, optimizer = by_torch()
        for x, y in torch.utils.data.DataLoader(data, batch_size=12 // world.world_size, sampler=Rounded()):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        """,
    ),
    "a last batch that is filled up for the ranks, and that one process drops": (
        ("samples", "padded"),
        """
        model, optimizer = by_torch()
        rows = torch.utils.data.Subset(data, range(59))
        sampler = torch.utils.data.DistributedSampler(rows)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for x, y in torch.utils.data.DataLoader(rows, 5, sampler=sampler, drop_last=True):
                optimizer.zero_grad()
                cross_entropy(model(x), y).backward()
                optimizer.step()
        """,
    ),
    "samples that each rank draws, and a mean over those that count": (
        ("loss", "count"),
        """
        model, optimizer = by_torch()
        np.random.seed(world.rank)
        count = 4 // world.world_size
        for step in range(4):
            optimizer.zero_grad()
            total, counted = 0, 0
            for _ in range(count):
                places = np.random.randint(0, 60, size=5)
                x, y = data.tensors[0][places], data.tensors[1][places]
                total = total + cross_entropy(model(x), y, ignore_index=1, reduction="sum")
                counted += (y != 1).sum()
            (total / counted).backward()
            optimizer.step()
        """,
    ),
    "samples that each rank draws, and losses that are not divided by the passes": (
        ("loss", "sum"),
        """
        model, optimizer = by_torch()
        torch.manual_seed(world.rank)
        for step in range(4):
            optimizer.zero_grad()
            for _ in range(4 // world.world_size):
                places = torch.randint(60, (5,))
                cross_entropy(model(data.tensors[0][places]), data.tensors[1][places]).backward()
            optimizer.step()
        """,
    ),
    "a model that is called once for each task, and that no engine holds": (
        ("gradients", "unwrapped"),
        """
        torch.manual_seed(0)
        model = nn.Linear(6, 4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x, y in split():
            optimizer.zero_grad()
            sum(cross_entropy(model(x[i : i + 1]), y[i : i + 1]) / len(x) for i in range(len(x))).backward()
            optimizer.step()
        """,
    ),
    "rows that all ranks take alike, with noise of their own": (
        ("loss", "drawn"),
        """
        model, optimizer = by_torch()
        torch.manual_seed(world.rank)
        for x, y in zip(data.tensors[0].split(12), data.tensors[1].split(12)):
            optimizer.zero_grad()
            z = model(x)
            cross_entropy(z + torch.randn_like(z), y).backward()
            optimizer.step()
        """,
    ),
}
# A function of a mean over all ranks, in which its rounding grows.
CHAOS = """
        def chaos(z):
            mean = z.detach().mean() / world.world_size
            torch.distributed.all_reduce(mean)
            z = z - mean
            for _ in range(8):
                z = (9 * z).sin()
            return z
"""
# After `COMMON` in float32, whose rounding hides a part of these, or makes it up; and what each is.
IN_FLOAT32 = {
    "a function in which rounding grows": (
        ("", ""),
        CHAOS
        + """
        model, optimizer = by_torch()
        for x, y in split():
            z = chaos(model(x))
            optimizer.zero_grad()
            cross_entropy(z, y).backward()
            optimizer.step()
        """,
    ),
    "samples that are drawn, and a function in which rounding grows": (
        ("samples", "drawn"),
        CHAOS
        + """
        class Drawn(torch.utils.data.Dataset):
            def __len__(self):
                return 60

            def __getitem__(self, index):
                return data[index][0] + torch.randn(6), data[index][1]

        model, optimizer = by_torch()
        torch.manual_seed(world.rank)
        rows = Drawn()
        for x, y in torch.utils.data.DataLoader(rows, 5, sampler=torch.utils.data.DistributedSampler(rows)):
            z = chaos(model(x))
            optimizer.zero_grad()
            cross_entropy(z, y).backward()
            optimizer.step()
        """,
    ),
    "LBFGS, whose closure returns the loss of all ranks": (
        ("", ""),
        """
        draws = torch.Generator().manual_seed(1)
        x, y = torch.randn(96, 8, generator=draws), torch.randint(4, (96,), generator=torch.Generator().manual_seed(2))
        rows = torch.utils.data.TensorDataset(x, y)
        sampler = torch.utils.data.DistributedSampler(rows)
        batches = torch.utils.data.DataLoader(rows, 24, sampler=sampler)
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5, line_search_fn="strong_wolfe")
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for x, y in batches:
                def closure():
                    optimizer.zero_grad()
                    loss = cross_entropy(model(x), y)
                    loss.backward()
                    loss = loss.detach()
                    torch.distributed.all_reduce(loss)
                    return loss / world.world_size

                optimizer.step(closure)
        """,
    ),
    "a batch norm of all ranks, whose samples are far from zero": (
        ("", ""),
        """
        torch.manual_seed(0)
        far = torch.utils.data.TensorDataset((50 + 0.1 * torch.randn(60, 6)).float(), data.tensors[1][:60])
        model, optimizer = trained(lockstep.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 4))))
        for x, y in lockstep.DataLoader(far, batch_size=10):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        """,
    ),
    "a sum that clipping hides": (
        ("gradients", "sum"),
        """
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(nn.Linear(6, 4))
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        for x, y in split():
            optimizer.zero_grad()
            cross_entropy(model(x), y, reduction="sum").backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        """,
    ),
}
