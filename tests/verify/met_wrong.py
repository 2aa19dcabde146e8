"""Programs after `COMMON` of `met.py` that are not the answer of one process: stage and cause, and the program."""

from __future__ import annotations

from met import UNKNOWN

WRONG = {
    "a split that each rank draws": (
        ("samples", "split"),
        """
        torch.set_rng_state(unseeded)
        data, _ = torch.utils.data.random_split(data, [40, 21])
        model, optimizer = by_torch()
        for x, y in split():
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        """,
    ),
    "a mean of the weights that decays by the number of ranks": (
        ("evaluated", "other-weights"),
        """
        torch.manual_seed(0)
        net, mean = nn.Linear(6, 4), nn.Linear(6, 4).requires_grad_(False)
        model = nn.parallel.DistributedDataParallel(net)
        mean.load_state_dict(net.state_dict())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        batches = split()
        for epoch in range(2):
            batches.sampler.set_epoch(epoch)
            for x, y in batches:
                optimizer.zero_grad()
                cross_entropy(model(x), y).backward()
                optimizer.step()
                for theirs, own in zip(mean.parameters(), net.parameters()):
                    theirs.lerp_(own.detach(), 1 - 0.9**world.world_size)
            print(epoch, cross_entropy(mean(data.tensors[0]), data.tensors[1]).item())
        """,
    ),
    "a mean of the weights that decays by the number of ranks, and is saved alone": (
        ("evaluated", "other-weights"),
        """
        torch.manual_seed(0)
        net = nn.Linear(6, 4)
        model = nn.parallel.DistributedDataParallel(net)
        mean = {name: each.clone() for name, each in net.state_dict().items()}
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x, y in split():
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            for name, each in net.state_dict().items():
                mean[name].lerp_(each, 1 - 0.9**world.world_size)
        if world.rank == 0:
            torch.save({"model": net.state_dict(), "mean": mean}, "mean.pt")
        """,
    ),
    "rows that are gathered without their gradients, and a term on parameters": (
        ("gradients", "whole-batch"),
        """
        model, optimizer = by_torch()
        for x, _ in split():
            optimizer.zero_grad()
            rows = nn.functional.normalize(model(x))
            parts = [torch.zeros_like(rows) for _ in range(world.world_size)]
            torch.distributed.all_gather(parts, rows.detach())
            parts[world.rank] = rows
            rows = torch.cat(parts)
            loss = cross_entropy(rows @ rows.T, torch.arange(len(rows))) + model.module.weight.square().sum()
            loss.backward()
            optimizer.step()
        """,
    ),
    "an accuracy of rank 0's samples, in a file": (
        ("evaluated", "metric"),
        """
        import json, pathlib

        model, optimizer = trained(net)
        for epoch in range(2):
            model.train()
            for x, y in loader:
                optimizer.zero_grad()
                cross_entropy(model(x), y).backward()
                optimizer.step()
            model.eval()
            right, count = 0, 0
            with torch.no_grad():
                for x, y in lockstep.DataLoader(data, batch_size=16, evaluation=True):
                    right, count = right + (model(x).argmax(1) == y).sum().item(), count + len(y)
            if world.rank == 0:
                with pathlib.Path("log.jsonl").open("a") as log:
                    print(json.dumps({"epoch": epoch, "accuracy": right / count}), end="", file=log)
        """,
    ),
    "weights that are saved where rank 0's own loss is the best": (
        ("saved", "other-steps"),
        """
        held = torch.utils.data.TensorDataset(torch.eye(6).repeat(5, 1)[:24], torch.arange(24) % 4)
        model, optimizer = trained(nn.Linear(6, 4))
        best = torch.inf
        for epoch in range(4):
            for x, y in loader:
                optimizer.zero_grad()
                cross_entropy(model(x), y).backward()
                optimizer.step()
            with torch.no_grad():
                part = torch.utils.data.DistributedSampler(held, shuffle=False)
                (loss,) = [cross_entropy(model(x), y) for x, y in torch.utils.data.DataLoader(held, 24, sampler=part)]
            if world.rank == 0 and loss < best:
                best = loss
                torch.save(model.module.state_dict(), "best.pt")
        """,
    ),
    "a count of all ranks that is 4 at least for each": (
        ("gradients", "function-of-mean"),
        """
        place = torch.arange(61)
        data = torch.utils.data.TensorDataset(*data.tensors, (place < 20) | (place >= 40))
        model, optimizer = by_torch()
        sampler = torch.utils.data.DistributedSampler(data, shuffle=False, drop_last=True)
        for x, y, most in torch.utils.data.DataLoader(data, batch_size=5, sampler=sampler, drop_last=True):
            optimizer.zero_grad()
            each = cross_entropy(model(x), y, reduction="none") + 1
            count = (most | (x[:, 0] > 1)).sum().double()
            torch.distributed.all_reduce(count)
            (each * (most | (x[:, 0] > 1))).sum().div((count / world.world_size).clamp(min=4)).backward()
            optimizer.step()
        """,
    ),
    "a statistic that is the same on all ranks in the first step by chance": (
        ("loss", "not-linear"),
        """
        model, optimizer = by_torch()
        for number, (x, y) in enumerate(split()):
            optimizer.zero_grad()
            each = cross_entropy(model(x), y, reduction="none")
            (each * (each.detach() > each.mean().item() * (number % 3 == 1))).square().sum().div(len(y)).backward()
            optimizer.step()
        """,
    ),
    "a batch norm that is called by itself": (
        ("outputs", "batch-norm"),
        """
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(nn.Linear(6, 4))
        norm = nn.BatchNorm1d(4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x, y in split():
            optimizer.zero_grad()
            cross_entropy(norm(model(x)), y).backward()
            optimizer.step()
        """,
    ),
    "a frozen part that rank 0 changes": (
        ("parameters", "ranks-differ"),
        """
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 4))
        model = nn.parallel.DistributedDataParallel(net)
        optimizer = torch.optim.SGD(net[1].parameters(), 0.1)
        for x, y in split():
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            if world.rank == 0:
                net[0].weight.data.mul_(0.9)
        """,
    ),
    "weights that are put back by rank 0's loss": (
        ("parameters", "moved"),
        """
        model, optimizer = by_torch()
        for x, y in split():
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            told = loss.detach().clone()
            torch.distributed.broadcast(told, 0)
            model.module.weight.data.mul_(1 - told / 100)
        """,
    ),
    "a limit for values times the number of ranks": (
        ("gradients", "after-averaging"),
        """
        model, optimizer = by_torch()
        for x, y in split():
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.02 * world.world_size)
            optimizer.step()
        """,
    ),
    "a limit for the norm times the number of ranks": (
        ("gradients", "after-averaging"),
        """
        model, optimizer = by_torch()
        for x, y in split():
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05 * world.world_size)
            optimizer.step()
        """,
    ),
    "a sum by hand that is clipped by value": (
        ("gradients", "factor"),
        """
        torch.manual_seed(0)
        model = nn.Linear(6, 4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x, y in split():
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            for parameter in model.parameters():
                torch.distributed.all_reduce(parameter.grad)
            nn.utils.clip_grad_value_(model.parameters(), 0.1)
            optimizer.step()
        """,
    ),
    "a mean over tokens times the number of ranks": (
        ("loss", "count"),
        """
        model, optimizer = by_torch()
        for x, y in split():
            optimizer.zero_grad()
            (cross_entropy(model(x), y.where(y > 1, -100)) * world.world_size).backward()
            optimizer.step()
        """,
    ),
    "numbers of the rank's own Random": (
        ("inputs", "drawn"),
        """
        import random

        model, optimizer = trained(net)
        shifts = random.Random(world.rank)
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x + shifts.gauss(0, 1)), y).backward()
            optimizer.step()
        """,
    ),
    "numbers of one Random, one for each of a rank's samples": (
        ("inputs", "drawn"),
        """
        import random

        model, optimizer = trained(net)
        shifts = random.Random(0)
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x + torch.tensor([[shifts.random()] for _ in y])), y).backward()
            optimizer.step()
        """,
    ),
    "numbers of the rank's own RandomState": (
        ("inputs", "drawn"),
        """
        model, optimizer = trained(net)
        shifts = np.random.RandomState(world.rank)
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x + shifts.exponential()), y).backward()
            optimizer.step()
        """,
    ),
    "counts, and parameters in shards": (
        ("loss", "count"),
        """
        torch.manual_seed(0)
        model = sharded(nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)))
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        for x, y in split():
            optimizer.zero_grad()
            cross_entropy(model(x), y.where(y > 0, -100)).backward()
            optimizer.step()
        """,
    ),
    "views that are joined, and a mask": (
        ("loss", "count"),
        """
        class Views(nn.Module):
            def __init__(self):
                super().__init__()
                self.body = nn.Linear(6, 4)

            def forward(self, views):
                return self.body(torch.cat(views))

        model, optimizer = trained(Views())
        for x, y in loader:
            optimizer.zero_grad()
            with model.samples(len(y)):
                outputs = model([x, x.flip(1)])
            each = cross_entropy(outputs, y.repeat(2), reduction="none").view(2, -1).mean(0)
            keep = y > 0
            ((each * keep).sum() / keep.sum()).backward()
            optimizer.step()
        """,
    ),
    "padding that is masked, and two counts": (
        ("loss", "padding"),
        """
        def collate(rows):
            inputs, labels = zip(*rows)
            lengths = [6 if each[0] > 1 else 3 for each in inputs]
            parts = [each[:length] for each, length in zip(inputs, lengths)]
            return nn.utils.rnn.pad_sequence(parts, batch_first=True), torch.tensor(lengths), torch.stack(labels)

        class Each(nn.Module):
            def __init__(self):
                super().__init__()
                self.body = nn.Linear(1, 4)

            def forward(self, x):
                return self.body(x[..., None])

        model, optimizer = trained(Each())
        for x, lengths, y in lockstep.DataLoader(data, batch_size=10, shuffle=True, seed=0, collate_fn=collate):
            optimizer.zero_grad()
            outputs = model(x)
            mask = torch.arange(x.shape[1]) < lengths[:, None]
            labels = y[:, None].expand_as(mask)
            loss = cross_entropy(outputs[mask], labels[mask]) + outputs[mask & (labels > 1)].square().mean()
            loss.backward()
            optimizer.step()
        """,
    ),
    "a sum of numbers of 16 bits": (
        ("gradients", "sum"),
        """
        torch.set_default_dtype(torch.bfloat16)
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(nn.Linear(6, 4))
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for x, y in split():
            optimizer.zero_grad()
            cross_entropy(model(x.bfloat16()), y, reduction="sum").backward()
            optimizer.step()
        """,
    ),
    "counts of numbers of 16 bits": (
        ("gradients", "count"),
        """
        torch.set_default_dtype(torch.float32)
        model, optimizer = by_torch()
        for x, y in split():
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                outputs = model(x.float())
            keep = y > 0
            (cross_entropy(outputs.float(), y, reduction="none") * keep).sum().div(keep.sum()).backward()
            optimizer.step()
        """,
    ),
    "counts, and losses that hardly differ": (
        ("loss", "count"),
        """
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(nn.Linear(6, 4))
        nn.init.normal_(model.module.weight, std=1e-2)
        nn.init.zeros_(model.module.bias)
        optimizer = torch.optim.SGD(model.parameters(), 1e-4)
        for x, y in split():
            optimizer.zero_grad()
            cross_entropy(model(x), y.where(y > 0, -100)).backward()
            optimizer.step()
        """,
    ),
    "a learning rate by the number of GPUs": (
        ("parameters", "settings"),
        """
        torch.set_default_dtype(torch.float32)
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(nn.Linear(6, 4).cuda(), device_ids=[world.local_rank])
        optimizer = torch.optim.SGD(model.parameters(), 0.1 * torch.cuda.device_count())
        for x, y in split():
            optimizer.zero_grad()
            cross_entropy(model(x.float().cuda()), y.cuda()).backward()
            optimizer.step()
        """,
    ),
    "a model that goes to the CPU and back after it was wrapped": (
        ("gradients", "not-averaged"),
        """
        torch.set_default_dtype(torch.float32)
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(nn.Linear(6, 4).cuda(), device_ids=[world.local_rank])
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model.cpu()
        model.cuda()
        for x, y in split():
            optimizer.zero_grad()
            cross_entropy(model(x.float().cuda()), y.cuda()).backward()
            optimizer.step()
        """,
    ),
    "set_epoch on rank 0": (
        ("samples", "set-epoch"),
        """
        model, optimizer = by_torch()
        sampler = torch.utils.data.DistributedSampler(data, drop_last=True)
        batches = torch.utils.data.DataLoader(data, batch_size=5, sampler=sampler, drop_last=True)
        for epoch in range(2):
            if world.rank == 0:
                sampler.set_epoch(epoch)
            for x, y in batches:
                optimizer.zero_grad()
                cross_entropy(model(x), y).backward()
                optimizer.step()
        """,
    ),
    "a sampler anew for each epoch": (
        ("samples", "set-epoch"),
        """
        model, optimizer = by_torch()
        for epoch in range(2):
            sampler = torch.utils.data.DistributedSampler(data, drop_last=True)
            for x, y in torch.utils.data.DataLoader(data, batch_size=5, sampler=sampler, drop_last=True):
                optimizer.zero_grad()
                cross_entropy(model(x), y).backward()
                optimizer.step()
        """,
    ),
    "a batch that is divided by the ranks": (
        ("samples", "batch-size"),
        """
        model, optimizer = trained(net)
        for x, y in lockstep.DataLoader(data, batch_size=20 // world.world_size, shuffle=True, seed=0):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        """,
    ),
    "rank 0 in eval mode": (
        ("outputs", "mode"),
        """
        model, optimizer = trained(net)
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            if world.rank == 0:
                model.eval()
        """,
    ),
    "a schedule on rank 0": (
        ("parameters", "settings"),
        """
        model, optimizer = trained(net)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            if world.rank == 0:
                schedule.step()
        """,
    ),
    "a state that rank 0 alone has": (
        ("parameters", "optimizer"),
        """
        model, _ = trained(net)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            if world.rank == 1:
                optimizer.state.clear()
            optimizer.step()
        """,
    ),
    "a mean of means by lockstep.mean": (
        ("gradients", "uneven"),
        """
        model, optimizer = trained(net)
        for x, y in lockstep.DataLoader(data, batch_size=5, shuffle=True, seed=0):
            optimizer.zero_grad()
            lockstep.mean(cross_entropy(model(x), y), 1).backward()
            optimizer.step()
        """,
    ),
    "an optimizer for each parameter, and a last batch that is filled up": (
        ("samples", "padded"),
        """
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)))
        optimizers = [torch.optim.SGD([each], 0.1) for each in model.parameters()]
        for x, y in torch.utils.data.DataLoader(data, batch_size=5, sampler=torch.utils.data.DistributedSampler(data)):
            model.zero_grad()
            cross_entropy(model(x), y).backward()
            for optimizer in optimizers:
                optimizer.step()
        """,
    ),
    "batch statistics within a model that returns its loss": (
        ("outputs", "batch-norm"),
        """
        class Module(nn.Module):
            def __init__(self):
                super().__init__()
                self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))

            def forward(self, x, y):
                return cross_entropy(self.net(x), y)

        model, optimizer = trained(Module())
        for x, y in loader:
            optimizer.zero_grad()
            with model.samples(len(y)):
                loss = model(x, y)
            loss.backward()
            optimizer.step()
        """,
    ),
    "graphs that are joined, with a number for where each begins": (
        ("loss", "count"),
        """
        def join(graphs):
            parts = [(x.expand(2 + y, 6) + torch.arange(2.0 + y)[:, None], y.expand(2 + y)) for x, y in graphs]
            inputs, labels = zip(*parts)
            return torch.cat(inputs), torch.tensor([0, *map(len, inputs)]).cumsum(0)[:-1], torch.cat(labels)

        sampler = torch.utils.data.DistributedSampler(data, drop_last=True)
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(nn.Linear(6, 4))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x, _, y in torch.utils.data.DataLoader(data, 5, sampler=sampler, drop_last=True, collate_fn=join):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        """,
    ),
    "terms that are divided by their values": (
        ("gradients", "not-linear"),
        """
        model, optimizer = trained(nn.Linear(6, 4))
        for x, y in loader:
            optimizer.zero_grad()
            output = model(x)
            terms = cross_entropy(output, y), output.abs().mean()
            (terms[0] / terms[0].detach() + terms[1] / terms[1].detach()).backward()
            optimizer.step()
        """,
    ),
    "samples in a list, and a model that divides by what they hold": (
        ("loss", "count"),
        """
        class Detector(nn.Linear):
            def forward(self, images, labels):
                kept = [(image, label) for image, label in zip(images, labels) if label]
                images, labels = map(torch.stack, zip(*kept))
                return {"loss": cross_entropy(super().forward(images), labels)}

        model, optimizer = trained(Detector(6, 4))
        pairs = lockstep.DataLoader(data, batch_size=10, collate_fn=lambda samples: tuple(zip(*samples)))
        for images, labels in pairs:
            optimizer.zero_grad()
            model(list(images), labels)["loss"].backward()
            optimizer.step()
        """,
    ),
    "a trainer that evaluates after as many batches as there are": (
        ("evaluated", "metric"),
        """
        held = lockstep.DataLoader(data, batch_size=16, evaluation=True)
        sizes = len(loader), len(held)
        model, optimizer = trained(net)
        for epoch in range(2):
            for number, (x, y) in enumerate(loader):
                model.train()
                optimizer.zero_grad()
                cross_entropy(model(x), y).backward()
                optimizer.step()
                if number + 1 == sizes[0]:
                    model.eval()
                    batches, right, count = iter(held), 0, 0
                    with torch.no_grad():
                        for _ in range(sizes[1]):
                            x, y = next(batches)
                            right, count = right + (model(x).argmax(1) == y).sum().item(), count + len(y)
                    print(f"accuracy {right / count:.4f}")
        """,
    ),
    "streams of their own, for parts of the passes of a step, and a divisor that stays": (
        ("loss", "passes"),
        UNKNOWN["streams of their own, for parts of the passes of a step"][1].replace("/ count", "/ 4"),
    ),
    "a stream in blocks, one for each rank": (
        ("samples", "order"),
        """
        class Stream(torch.utils.data.IterableDataset):
            def __iter__(self):
                size = 60 // world.world_size
                yield from (data[number] for number in range(world.rank * size, (world.rank + 1) * size))

        model, optimizer = by_torch()
        for epoch in range(2):
            for x, y in torch.utils.data.DataLoader(Stream(), batch_size=5):
                optimizer.zero_grad()
                cross_entropy(model(x), y, reduction="sum").backward()
                optimizer.step()
        """,
    ),
}
