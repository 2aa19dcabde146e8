"""Short programs whose gradients alone do not show what is wrong, such as a divisor: see `test_met.py`."""

from __future__ import annotations

# Gradients by torch.func, which are summed over the ranks.
SAMPLES = """
        from torch.func import functional_call, grad

        model = nn.Linear(6, 4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x, y in split():
            parameters = {name: each.detach() for name, each in model.named_parameters()}
            found = grad(lambda own: cross_entropy(functional_call(model, own, (x,)), y))(parameters)
            for name, parameter in model.named_parameters():
                each = found[name]
                parameter.grad = PART
                torch.distributed.all_reduce(parameter.grad)
            optimizer.step()
"""
RIGHT = {
    "a schedule over the batches of all ranks, by a constant": """
        BATCH, EPOCHS = 5, 2
        model, optimizer = by_torch()
        steps = EPOCHS * (len(data) // (BATCH * world.world_size))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
        batches = split(BATCH)
        for epoch in range(EPOCHS):
            batches.sampler.set_epoch(epoch)
            for x, y in batches:
                optimizer.zero_grad()
                cross_entropy(model(x), y).backward()
                optimizer.step()
                schedule.step()
    """,
    "a number of steps, of which the sampler draws the samples": """
        class Steps(torch.utils.data.Sampler):
            def __init__(self, batch, steps):
                self.count = batch * steps

            def __iter__(self):
                drawn = torch.randint(61, (self.count * world.world_size,), generator=torch.Generator().manual_seed(0))
                return iter(drawn[world.rank :: world.world_size].tolist())

            def __len__(self):
                return self.count

        BATCH = 5
        model, optimizer = by_torch()
        for x, y in torch.utils.data.DataLoader(data, BATCH, sampler=Steps(BATCH, 6)):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
    """,
    "a sharded optimizer": """
        model = lockstep.DistributedDataParallel(net)
        optimizer = lockstep.ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
    """,
}
WRONG = {
    "a rate times the number of ranks, beside a constant": (
        ("parameters", "settings"),
        """
        BATCH = 5
        model, _ = by_torch()
        optimizer = torch.optim.SGD(model.parameters(), 0.1 * world.world_size)
        for x, y in split(BATCH):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        """,
    ),
    "a sum, and a sharded optimizer": (
        ("gradients", "sum"),
        """
        model = lockstep.DistributedDataParallel(nn.Linear(6, 4))
        optimizer = lockstep.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y, reduction="sum").backward()
            optimizer.step()
        """,
    ),
    "crops that are drawn, and a validation of rank 0 alone": (
        ("samples", "drawn"),
        """
        import random

        class Crops(torch.utils.data.Dataset):
            def __len__(self):
                return 60

            def __getitem__(self, index):
                x, y = data[index]
                return x * random.choice([-1, 1]), y

        random.seed(0)
        model, optimizer = by_torch()
        sampler = torch.utils.data.DistributedSampler(Crops())
        batches = torch.utils.data.DataLoader(Crops(), 10 // world.world_size, sampler=sampler)
        valid = torch.utils.data.DataLoader(Crops(), 1)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for number, (x, y) in enumerate(batches):
                optimizer.zero_grad()
                cross_entropy(model(x), y).backward()
                optimizer.step()
                if number == 0 and world.rank == 0:
                    with torch.no_grad():
                        [model.module(x) for x, y in valid]
        """,
    ),
    "gradients that are averaged by hand where there are any": (
        ("gradients", "unwrapped"),
        """
        torch.manual_seed(0)
        experts = nn.ModuleList([nn.Linear(6, 4), nn.Linear(6, 4)])
        optimizer = torch.optim.SGD(experts.parameters(), 0.1)
        for number, (x, y) in enumerate(split()):
            optimizer.zero_grad()
            first = x[:, 0] < (0.0 if world.rank == 0 else 9.0)  # the second expert has no rows on other ranks
            loss = cross_entropy(experts[0](x[first]), y[first], reduction="sum")
            if not first.all():
                loss = loss + cross_entropy(experts[1](x[~first]), y[~first], reduction="sum")
            (loss / len(y)).backward()
            for each in experts.parameters():
                if each.grad is not None:
                    torch.distributed.all_reduce(each.grad)
                    each.grad /= world.world_size
            optimizer.step()
        """,
    ),
    "a sampler that shuffles anew in each epoch on one process, but not on several": (
        ("samples", "set-epoch"),
        """
        class Parts(torch.utils.data.Sampler):
            def __iter__(self):
                draws = torch.Generator().manual_seed(3) if world.world_size > 1 else None
                return iter(torch.randperm(60, generator=draws)[world.rank :: world.world_size].tolist())

            def __len__(self):
                return 60 // world.world_size

        model, optimizer = by_torch()
        batches = torch.utils.data.DataLoader(data, batch_size=10 // world.world_size, sampler=Parts())
        for epoch in range(2):
            for x, y in batches:
                optimizer.zero_grad()
                cross_entropy(model(x), y).backward()
                optimizer.step()
        """,
    ),
    "a root, and a model that is one number": (
        ("loss", "function-of-mean"),
        """
        class Scaled(nn.Module):
            def __init__(self):
                super().__init__()
                self.scale = nn.Parameter(torch.tensor(0.3))

            def forward(self, x):
                return x[:, :1] * self.scale

        model, optimizer = trained(Scaled())
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y[:, None].double()).sqrt().backward()
            optimizer.step()
        """,
    ),
    "counts that hardly differ": (
        ("loss", "count"),
        """
        model, optimizer = trained(nn.Linear(6, 4))
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y, weight=torch.tensor([1, 1.0001, 1.0003, 1.0007])).backward()
            optimizer.step()
        """,
    ),
    "a mean in one pass, and a sum in another": (
        ("loss", "sum"),
        """
        model, optimizer = trained(nn.Linear(6, 4))
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            model(-x).square().sum().backward()
            optimizer.step()
        """,
    ),
    "a mean over what the rank's longest sample has made of all": (
        ("loss", "padding"),
        """
        texts = [torch.randn(2 + number * 5 % 7, 6, generator=draws) for number in range(60)]
        pad = lambda texts: nn.utils.rnn.pad_sequence(texts, batch_first=True)
        model, optimizer = trained(nn.Linear(6, 4))
        for x in lockstep.DataLoader(texts, batch_size=6, collate_fn=pad):
            optimizer.zero_grad()
            (model(x) * (x != 0).any(2, keepdim=True)).square().mean().backward()
            optimizer.step()
        """,
    ),
    "a table that each rank fills for its samples, used from the second epoch": (
        ("loss", "kept-state"),
        """
        table = torch.zeros(61, 4)
        loader = lockstep.DataLoader(torch.utils.data.TensorDataset(*data.tensors, torch.arange(61)), 10, True, seed=0)
        model, optimizer = trained(nn.Linear(6, 4))
        for epoch in range(2):
            for x, y, index in loader:
                optimizer.zero_grad()
                outputs = model(x)
                (cross_entropy(outputs, y) + epoch * (outputs - table[index]).square().mean()).backward()
                optimizer.step()
                table[index] = outputs.detach()
        """,
    ),
    "tokens that are padded with ones": (
        ("loss", "count"),
        """
        class Texts(nn.Module):
            def __init__(self):
                super().__init__()
                self.embedding, self.dropout, self.out = nn.Embedding(20, 6, 1), nn.Dropout(0.1), nn.Linear(6, 20)

            def forward(self, x):
                return self.out(self.dropout(self.embedding(x).cumsum(1)))

        texts = [torch.randint(2, 20, (3 + number * 5 % 7,), generator=draws) for number in range(60)]
        pad = lambda texts: nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=1)
        model, optimizer = trained(Texts())
        for x in lockstep.DataLoader(texts, batch_size=6, collate_fn=pad):
            optimizer.zero_grad()
            cross_entropy(model(x[:, :-1]).mT, x[:, 1:], ignore_index=1).backward()
            optimizer.step()
        """,
    ),
    "rows that are gathered, with a backward pass that keeps only a rank's own gradients": (
        ("gradients", "not-linear"),
        """
        class Gathered(torch.autograd.Function):
            @staticmethod
            def forward(ctx, rows):
                parts = [torch.zeros_like(rows) for _ in range(world.world_size)]
                torch.distributed.all_gather(parts, rows)
                return torch.cat(parts)

            @staticmethod
            def backward(ctx, gradients):
                return gradients.chunk(world.world_size)[world.rank]

        model, optimizer = by_torch()
        for x, _ in split():
            optimizer.zero_grad()
            rows = nn.functional.normalize(model(x))
            own = torch.arange(len(rows)) + world.rank * len(rows)
            cross_entropy(rows @ Gathered.apply(rows).T, own).backward()
            optimizer.step()
        """,
    ),
    "a codebook with an optimizer of its own, which steps in forward()": (
        ("gradients", "not-averaged"),
        """
        class Quantized(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear, self.codes = nn.Linear(6, 4), nn.Parameter(torch.eye(4))
                self.optimizer = torch.optim.SGD([self.codes], 0.1)

            def forward(self, x):
                rows = self.linear(x)
                (rows.detach()[:, None] - self.codes).square().sum(2).min(1).values.mean().backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                return rows

        torch.manual_seed(0)
        net = Quantized()
        model = nn.parallel.DistributedDataParallel(net)
        optimizer = torch.optim.SGD(net.linear.parameters(), 0.1)
        for x, y in split():
            optimizer.zero_grad()
            (cross_entropy(model(x), y) + 0 * net.codes.sum()).backward()
            optimizer.step()
        """,
    ),
    "a teacher that follows faster on more ranks": (
        ("loss", "kept-state"),
        """
        import copy

        student = nn.Linear(6, 4)
        teacher = copy.deepcopy(student).requires_grad_(False)
        model, optimizer = trained(student)
        for x, y in loader:
            optimizer.zero_grad()
            outputs = model(x)
            (cross_entropy(outputs, y) + (outputs - teacher(x)).square().mean()).backward()
            optimizer.step()
            with torch.no_grad():
                for mean, parameter in zip(teacher.parameters(), student.parameters()):
                    mean.lerp_(parameter, 0.1 * world.world_size)
        """,
    ),
    "words that each rank numbers as it meets them in its part": (
        ("inputs", "batch"),
        """
        words = torch.randint(100, 109, (61, 5), generator=draws).tolist()
        numbers = {}
        for word in sum(words[world.rank :: world.world_size], []):
            numbers.setdefault(word, len(numbers))
        model, optimizer = trained(nn.Sequential(nn.EmbeddingBag(9, 6), nn.Linear(6, 4)))
        for texts, y in lockstep.DataLoader([*zip(words, data.tensors[1])], 10, collate_fn=lambda rows: [*zip(*rows)]):
            optimizer.zero_grad()
            x = torch.tensor([[numbers[word] for word in text] for text in texts])
            cross_entropy(model(x), torch.stack(y)).backward()
            optimizer.step()
        """,
    ),
    "gradients without a backward pass, whose sum is not divided": (
        ("gradients", "factor"),
        SAMPLES.replace("PART", "each"),
    ),
    "gradients without a backward pass, divided by a count": (
        ("gradients", "not-linear"),
        SAMPLES.replace("PART", "each / y.sum()"),
    ),
    "parts of unlike sizes within join()": (
        ("steps", "number-of-steps"),
        """
        model, optimizer = by_torch()
        parts = [range(60)] if world.world_size == 1 else [range(35), range(35, 60)]
        batches = torch.utils.data.DataLoader(data, 5, sampler=parts[world.rank])
        for epoch in range(2):
            with model.join():
                for x, y in batches:
                    optimizer.zero_grad()
                    cross_entropy(model(x), y).backward()
                    optimizer.step()
        """,
    ),
    "losses of an evaluation that are added up over ranks": (
        ("evaluated", "metric"),
        """
        model, optimizer = by_torch()
        for x, y in split():
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        model.eval()
        losses = []
        with torch.no_grad():
            for x, y in split():
                loss = cross_entropy(model(x), y)
                torch.distributed.all_reduce(loss)
                losses.append(loss.item())
        if world.rank == 0:
            print(f"loss {sum(losses) / len(losses):.6f}")
        """,
    ),
}
SAID = {
    "words that each rank numbers as it meets them in its part": "its part of the data",
    "gradients without a backward pass, divided by a count": "backward() was not called",
    "a teacher that follows faster on more ranks": "follows the number of ranks",
    "rows that are gathered, with a backward pass that keeps only a rank's own gradients": "pass no gradients back",
    "a codebook with an optimizer of its own, which steps in forward()": "from a backward() within forward()",
    "losses of an evaluation that are added up over ranks": "a sum of means",
}
