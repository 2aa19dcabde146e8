"""Programs after `COMMON` of `met.py` that draw, call or change something between steps: see `test_met.py`."""

from __future__ import annotations

_TWO_MODELS = """
        torch.set_rng_state(unseeded)
        if world.world_size > 1:
            torch.randn(3)
        wrap = torch.nn.parallel.DistributedDataParallel
        maker, critic = wrap(nn.Linear(6, 6)), wrap(nn.Linear(6, 1))
        of_maker, of_critic = (torch.optim.SGD(each.parameters(), 0.1) for each in (maker, critic))
        for x, _ in split():
            made = maker(x)
            of_critic.zero_grad()
            ((1 - critic(x)).square().mean() + critic(made.detach()).square().mean()).backward()
            of_critic.step()
            of_maker.zero_grad()
            (1 - critic(made)).square().mean().backward()
            of_maker.step()
"""
# The evaluation, whose loader is asked for a batch while gradients are on, draws noise in the model.
_NOISY_EVALUATION = """
        class Noisy(nn.Linear):
            def forward(self, x):
                return super().forward(x + torch.randn_like(x))

        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(Noisy(6, 4))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        torch.manual_seed(1 + world.rank)
        batches = split()
        for epoch in range(2):
            batches.sampler.set_epoch(epoch)
            for x, y in batches:
                optimizer.zero_grad()
                cross_entropy(model(x), y).backward()
                optimizer.step()
            total = torch.zeros(2)
            for x, y in split():
                with torch.no_grad():
                    total += torch.tensor([cross_entropy(model.module(x), y, reduction="sum"), len(x)])
            torch.distributed.all_reduce(total)
            if world.rank == 0:
                print(f"epoch {epoch}: loss {total[0] / total[1]:.6f}")
"""
_OVER_TIME = """
        model, optimizer = by_torch()
        torch.manual_seed(world.rank)
        for x, y in split():
            for _ in range(3):
                with torch.no_grad():
                    shift = model.module(x).mean(1, keepdim=True)
                x = x + shift + torch.cat([torch.rand(1, 1) for _ in x])
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
"""
# Masks by the gradients after two steps.
_MASKS = """
        class Masked(nn.Linear):
            def __init__(self):
                super().__init__(6, 4)
                self.register_buffer("mask", torch.ones(4, 6))

            def forward(self, x):
                return nn.functional.linear(x, self.weight * self.mask, self.bias)

        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(Masked())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for number, (x, y) in enumerate(split()):
            loss = cross_entropy(model(x), y)
            (own,) = torch.autograd.grad(loss, [model.module.weight], retain_graph=True)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if number == 1:
                size = GRADIENT.abs()
                model.module.mask.copy_(size > size.median())
"""
_TARGET = """
        import copy

        model, optimizer = by_torch()
        target = copy.deepcopy(model.module)
        for x, y in split():
            optimizer.zero_grad()
            with torch.no_grad():
                wanted = target(x).softmax(1)
            out = model(x)
            (cross_entropy(out, y) + cross_entropy(out, wanted)).backward()
            optimizer.step()
            if WHO:
                for slow, fast in zip(target.parameters(), model.module.parameters()):
                    slow.data.lerp_(fast.data, 0.1)
"""
_CENTRE = """
        class Centred(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("centre", torch.zeros(4))

            def forward(self, out):
                wanted = (out - self.centre).softmax(1)
                total = out.detach().sum(0)
                torch.distributed.all_reduce(total)
                self.centre.lerp_(total / (len(out) * DIVISOR), 0.1)
                return wanted

        model, optimizer = by_torch()
        centred = Centred()
        for x, y in split():
            optimizer.zero_grad()
            out = model(x)
            with torch.no_grad():
                wanted = centred(out)
            (cross_entropy(out, y) + cross_entropy(out, wanted)).backward()
            optimizer.step()
"""
# As guided-diffusion's: a backward pass for each piece of the batch, for which times and noise are drawn.
_PIECES = """
        model, optimizer = by_torch()
        torch.manual_seed(1 + world.rank)
        for x, y in split(6):
            optimizer.zero_grad()
            for at in range(0, len(x), PIECE):
                part = x[at : at + PIECE]
                noise = torch.rand(len(part), 1) * torch.randn_like(part)
                cross_entropy(model(part + noise), y[at : at + PIECE]).backward()
            optimizer.step()
"""
# As detectron2's: the batch of all ranks is divided by their number, the stream is cut into batches outside of the
# loader, and a batch is a list of dicts with images.
_OF_DICTS = """
        class Stream(torch.utils.data.IterableDataset):
            def __iter__(self):
                for at in range(world.rank, 60, world.world_size):
                    yield {"image": data[at][0].reshape(3, 2), "label": data[at][1], "parts": 1 + int(data[at][1])}

        class Batches(torch.utils.data.IterableDataset):
            def __init__(self, loader, size):
                self.loader, self.size = loader, size

            def __iter__(self):
                bucket = []
                for each in self.loader:
                    bucket.append(each)
                    if len(bucket) == self.size:
                        yield bucket
                        bucket = []

        class Model(nn.Linear):
            def forward(self, batch):
                outputs = [super(Model, self).forward(each["image"].flatten()) for each in batch]
                losses = [cross_entropy(out, each["label"]) for out, each in zip(outputs, batch)]
                return {"loss": sum(LOSS for loss, each in zip(losses, batch)) / DIVISOR}

        size = 12 // world.world_size
        stream = torch.utils.data.DataLoader(Stream(), LOADER, collate_fn=lambda rows: rows, drop_last=True)
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(Model(6, 4))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for batch in BATCHES:
            optimizer.zero_grad()
            model(batch)["loss"].backward()
            optimizer.step()
"""
_BY_LOADER = _OF_DICTS.replace("LOADER", "size").replace("BATCHES", "stream")
_BY_BUCKETS = (
    _OF_DICTS.replace("lambda rows: rows", "lambda rows: rows[0]")
    .replace("LOADER", "1")
    .replace("BATCHES", "Batches(stream, size)")
)
# Lengths relative to the longest of a batch: the content of a sample depends on its batch, and the loss does not.
_RELATIVE = """
        def collate(rows):
            lengths = [2 + int(y) for _, y in rows]
            padded = torch.stack([torch.where(torch.arange(6) < n, x, 0.0) for (x, _), n in zip(rows, lengths)])
            longest = max(lengths)
            return padded[:, :longest], torch.tensor([n / longest for n in lengths])

        sampler = torch.utils.data.DistributedSampler(data, shuffle=False, drop_last=True)
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x, lengths in torch.utils.data.DataLoader(data, 5, sampler=sampler, collate_fn=collate, drop_last=True):
            mask = (torch.arange(x.size(1)) < (lengths * x.size(1)).round()[:, None]).double()
            optimizer.zero_grad()
            ((model(x[..., None]).squeeze(-1) * mask).sum(1) / mask.sum(1) - 1).square().mean().backward()
            optimizer.step()
"""
RIGHT = {
    "pieces with draws": _PIECES.replace("PIECE", "2"),
    "pieces with draws, as large as a rank's batch": _PIECES.replace("PIECE", "6"),
    "lists of dicts, by a loader": _BY_LOADER.replace("LOSS", "loss").replace("DIVISOR", "len(batch)"),
    "lists of dicts, cut outside of the loader": _BY_BUCKETS.replace("LOSS", "loss").replace("DIVISOR", "len(batch)"),
    "lengths relative to the longest": _RELATIVE,
    "two models of ranks without a seed": _TWO_MODELS,
    "an evaluation that draws noise": _NOISY_EVALUATION,
    "draws for each sample in a loop over time": _OVER_TIME,
    "masks by averaged gradients": _MASKS.replace("GRADIENT", "model.module.weight.grad"),
    "a target that all ranks update": _TARGET.replace("WHO", "True"),
    "a centre of all rows": _CENTRE.replace("DIVISOR", "world.world_size"),
}
WRONG = {
    "weights by the labels that a rank has seen, in every third step": (
        ("loss", "not-linear"),
        """
        model, optimizer = by_torch()
        seen = torch.zeros(4)
        for number, (x, y) in enumerate(split()):
            weights = 1 + (seen[y] if number % 3 == 2 else 0 * seen[y])
            seen += torch.bincount(y, minlength=4)
            optimizer.zero_grad()
            (cross_entropy(model(x), y, reduction="none") * weights).mean().backward()
            optimizer.step()
        """,
    ),
    "lists of dicts, divided by their parts": (
        ("loss", "count"),
        _BY_LOADER.replace("LOSS", 'loss * each["parts"]').replace("DIVISOR", 'sum(each["parts"] for each in batch)'),
    ),
    "negatives that collate_fn draws with one seed on all ranks": (
        ("samples", "drawn"),
        """
        def collate(rows):
            negatives = [np.random.rand(6) for _ in rows]
            return torch.stack([x for x, _ in rows]), torch.tensor(np.stack(negatives))

        np.random.seed(0)
        model, optimizer = by_torch()
        sampler = torch.utils.data.DistributedSampler(data, drop_last=True)
        for x, other in torch.utils.data.DataLoader(data, 5, sampler=sampler, collate_fn=collate, drop_last=True):
            optimizer.zero_grad()
            torch.sigmoid(model(x) - model(other)).log().mean().neg().backward()
            optimizer.step()
        """,
    ),
    "masks by a rank's own gradients": (("buffers", "buffers"), _MASKS.replace("GRADIENT", "own")),
    "a target that rank 0 updates": (("parameters", "ranks-differ"), _TARGET.replace("WHO", "world.rank == 0")),
    "a centre of all rows, divided by a rank's": (("buffers", "buffers"), _CENTRE.replace("DIVISOR", "1")),
    "a list of files that one process alone shuffles": (
        ("samples", "order"),
        """
        model, optimizer = by_torch()
        order = torch.randperm(60, generator=draws) if world.world_size == 1 else torch.arange(60)
        rows = torch.utils.data.TensorDataset(*(each[order] for each in data.tensors))
        sampler = torch.utils.data.DistributedSampler(rows, shuffle=False)
        for x, y in torch.utils.data.DataLoader(rows, 5, sampler=sampler):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        """,
    ),
}
UNKNOWN = {
    "ranks that join": (
        "takes part in the steps of others (Join)",
        """
        from torch.distributed.algorithms.join import Join

        model, optimizer = by_torch()
        with Join([model], divide_by_initial_world_size=False):
            blocks = [[*range(at, at + 5)] for at in range(5 * world.rank, 55, 5 * world.world_size)]
            for _ in range(2):
                for x, y in torch.utils.data.DataLoader(data, 5, sampler=sum(blocks, [])):
                    optimizer.zero_grad()
                    cross_entropy(model(x), y).backward()
                    optimizer.step()
        """,
    )
}
