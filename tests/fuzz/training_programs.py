"""Random training programs: drawn from a seed, shown as steps, run by ranks with the engine or by one process without.

A program is what a training script may do with a model, a loader and an optimizer. `train` runs it: with the engine,
on this rank's share of each batch, or plainly, on whole batches. Both give the same parameters, or the program has
something in it that the engine refuses, and then the error is one of those in `Program.may_raise`.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import lockstep

__all__ = ["Program", "draw", "train"]

BATCH_SIZE = 6
WIDTH, NUM_HEADS = 9, 3
LEARNING_RATE = 0.02
LOOPS = ("plain", "ahead", "list", "zip")
CHECKPOINTS = ("", "parts", "all", "parts re-entrant", "all re-entrant")
HOOKS = ("", "tensor", "post-accumulate", "post-accumulate, out of place")
# Things done between two passes of an epoch, with the kind of error that the engine has for each, if it has one.
EVENTS = {
    "functional call": "",
    "gradient by torch.func": "",
    "evaluate": "",
    "freeze and thaw": "",
    "assign and wrap again": "",
    "assign": "require a gradient that nobody averages",
    "thaw what was frozen": "require a gradient that nobody averages",
    "fail": "",
}


@dataclass
class Pass:
    """One forward and backward pass, and what comes behind it.

    Attributes:
        zero: how gradients are cleared before: "none", "zeros", or "" for not at all.
        syncs: whether it averages, and the optimizer steps behind it.
        forwards: how many forward passes the loss is made of.
        again: the graph is kept, and a second backward pass goes over it.
        heads: which heads of the model are used.
        scale: what is done to gradients behind it: "in place", "replace", "clip" or "".
        keeps: references to gradients are kept, and looked at in the end.
        event: what happens before it; of `EVENTS`.
    """

    zero: str = "none"
    syncs: bool = True
    forwards: int = 1
    again: bool = False
    heads: tuple[int, ...] = tuple(range(NUM_HEADS))
    scale: str = ""
    keeps: bool = False
    event: str = ""

    def __str__(self) -> str:
        parts = [self.event, f"zero_grad({self.zero})" if self.zero else "accumulate"]
        parts += [f"{self.forwards} x forward(heads {self.heads})" if self.forwards > 1 else f"forward{self.heads}"]
        parts += ["backward" + (" twice" if self.again else "") + ("" if self.syncs else " under no_sync")]
        parts += [f"gradients: {self.scale}" if self.scale else "", "keep .grad" if self.keeps else ""]
        return ", ".join(part for part in [*parts, "step" if self.syncs else ""] if part)


@dataclass
class Program:
    """A training.

    Attributes:
        seed: that it was drawn from.
        options: of the engine.
        num_samples: of the dataset; the last batch may not divide over ranks.
        checkpoint: which parts of the model are checkpointed, and how.
        hook: what hooks of the user do to gradients.
        tied, channels_last, sparse, averaged: a weight is used twice; a layer's memory format; an embedding has sparse
            gradients; an AveragedModel goes along.
        epochs: kind of loop and passes of each.
    """

    seed: int
    options: dict[str, Any] = field(default_factory=dict)
    num_samples: int = 12
    checkpoint: str = ""
    hook: str = ""
    tied: bool = False
    channels_last: bool = False
    sparse: bool = False
    averaged: bool = False
    epochs: list[tuple[str, list[Pass]]] = field(default_factory=list)

    @property
    def may_raise(self) -> list[str]:
        """Parts of the errors that its features may have, by the engine's own rules."""
        passes = [one for _, passes in self.epochs for one in passes]
        found = {EVENTS[one.event] for one in passes if one.event} - {""}
        if self.sparse:
            found.add("sparse=False")
        leaves_out = any(len(one.heads) < NUM_HEADS for one in passes)
        if leaves_out and not self.options.get("find_unused_parameters"):
            found.add("got no gradient")
        if "re-entrant" in self.checkpoint and not self.options.get("static_graph"):
            found |= {"received a second gradient in one backward pass", "got no gradient"}
        return sorted(found)

    def __str__(self) -> str:
        lines = [f"program {self.seed}: DistributedDataParallel(net, {self.options}), {self.num_samples} samples"]
        facts = {
            name: getattr(self, name) for name in ("checkpoint", "hook", "tied", "channels_last", "sparse", "averaged")
        }
        lines += [f"  {name}: {value}" for name, value in facts.items() if value]
        for loop, passes in self.epochs:
            lines += [f"  {loop} loop, over and over:", *(f"    {one}" for one in passes)]
        return "\n".join(lines)


def draw(seed: int) -> Program:
    """The program of a seed: the same on all ranks."""
    rng = random.Random(seed)

    def some(*values: Any, odds: float = 0.5) -> Any:
        return rng.choice(values) if rng.random() < odds else type(values[0])()

    options = rng.choice(
        [{}, {}, {"static_graph": True}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}]
    )
    options = {**options, **rng.choice([{}, {"bucket_cap_mb": 0}, {"bucket_cap_mb": 0.0005}])}
    program = Program(
        seed,
        options,
        num_samples=rng.choice([12, 12, 13, 14, 16, 17]),
        checkpoint=some(*CHECKPOINTS[1:], odds=0.4),
        hook=some(*HOOKS[1:], odds=0.3),
        tied=rng.random() < 0.4,
        channels_last=rng.random() < 0.4,
        sparse=rng.random() < 0.04,
        averaged=rng.random() < 0.3,
    )
    if program.checkpoint.startswith("all"):
        options.pop("find_unused_parameters", None)  # which head is used is not seen from outside of the checkpoint
    for _ in range(rng.randint(1, 3)):
        program.epochs.append((rng.choice(LOOPS), [_draw_pass(rng, program) for _ in range(rng.randint(1, 4))]))
    if not any(one.syncs for _, passes in program.epochs for one in passes):
        program.epochs[0][1][0].syncs = True
    return program


def _draw_pass(rng: random.Random, program: Program) -> Pass:
    one = Pass(
        zero=rng.choice(["none", "none", "none", "zeros", ""]),
        syncs=rng.random() < 0.75,
        forwards=rng.choice([1, 1, 1, 2]),
        again=not program.checkpoint and rng.random() < 0.15,
        scale=rng.choice(["", "", "", "in place", "replace", "clip"]),
        keeps=rng.random() < 0.3,
        event=rng.choice([*EVENTS, *("functional call", "evaluate", "fail") * 2]) if rng.random() < 0.25 else "",
    )
    if program.options.get("find_unused_parameters") or rng.random() < 0.03:
        one.heads = tuple(sorted(rng.sample(range(NUM_HEADS), rng.randint(1, NUM_HEADS))))
    return one


class Net(nn.Module):
    """Every kind of parameter: of a convolution, tied, complex, without dimensions, empty, frozen at first."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        torch.manual_seed(program.seed)
        self.program = program
        conv = nn.Conv2d(2, 3, 2)
        self.conv = conv.to(memory_format=torch.channels_last) if program.channels_last else conv
        self.trunk = nn.Sequential(nn.Linear(12, WIDTH), nn.Tanh())
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.heads = nn.ModuleList([nn.Linear(WIDTH, 2) for _ in range(NUM_HEADS)])
        self.tie()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        if program.sparse:
            self.words = nn.Embedding(4, WIDTH, sparse=True)
        self.double()
        self.turn = nn.Parameter(torch.randn(2, 2, dtype=torch.complex128))

    def tie(self) -> None:
        """One weight in two places, where the program wants that."""
        if self.program.tied:
            self.heads[1].weight = self.heads[0].weight

    def forward(self, inputs: Tensor, heads: tuple[int, ...]) -> Tensor:
        which, _, how = self.program.checkpoint.partition(" ")
        if which == "all":
            return checkpoint(self.run, inputs, heads, use_reentrant=bool(how))  # type: ignore[no-any-return]
        return self.run(inputs, heads)

    def run(self, inputs: Tensor, heads: tuple[int, ...]) -> Tensor:
        features = self.conv(inputs).relu().flatten(1)
        which, _, how = self.program.checkpoint.partition(" ")
        features = (
            checkpoint(self.trunk, features, use_reentrant=bool(how)) if which == "parts" else self.trunk(features)
        )
        features = features + self.frozen(features)
        if self.program.sparse:
            features = features + self.words(inputs.new_zeros(len(inputs), dtype=torch.int64))
        outputs = sum((self.heads[head](features) * (head + 1) for head in heads), torch.zeros(2, dtype=inputs.dtype))
        turned = outputs.to(torch.complex128) @ self.turn
        # Its gradients are bounded: no program diverges, and rounding stays what it is.
        return (turned.real.square() + turned.imag.square()).log1p() * self.scale + self.empty.sum()


class BackwardError(Exception):
    """What a backward pass fails with that is meant to fail."""


def _dataset(program: Program, shift: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(program.seed + shift)
    return TensorDataset(torch.randn(program.num_samples + shift, 2, 3, 3, generator=generator, dtype=torch.float64))


def train(program: Program, with_engine: bool) -> dict[str, Tensor]:
    """Run a program. Collective with the engine; local without.

    Returns:
        Parameters in the end, those of the averaged model, and how far kept gradients have changed.
    """
    return _Training(program, with_engine).run()


class _Training:
    def __init__(self, program: Program, with_engine: bool) -> None:
        self.program = program
        self.with_engine = with_engine
        self.net = Net(program)
        self.wrap()
        self.average = AveragedModel(self.model) if program.averaged else None
        self.kept: list[tuple[Tensor, Tensor]] = []

    def wrap(self) -> None:
        self.model: Any = self.net
        if self.with_engine:
            self.model = lockstep.DistributedDataParallel(self.net, **self.program.options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE, momentum=0.5)
        for parameter in self.net.parameters():
            if parameter.requires_grad and self.program.hook:
                self.set_hook(parameter)

    def set_hook(self, parameter: nn.Parameter) -> None:
        def in_place(one: Tensor) -> None:
            assert one.grad is not None
            one.grad.mul_(0.75)

        def out_of_place(one: Tensor) -> None:
            assert one.grad is not None
            one.grad = one.grad * 0.75

        if self.program.hook == "tensor":
            parameter.register_hook(lambda gradient: gradient * 0.75)
        else:
            parameter.register_post_accumulate_grad_hook(out_of_place if "out" in self.program.hook else in_place)

    def run(self) -> dict[str, Tensor]:
        for loop, passes in self.program.epochs:
            for number, batches in enumerate(self.batches(loop)):
                self.make_pass(passes[number % len(passes)], batches)
        state = {name: parameter.detach() for name, parameter in self.net.named_parameters()}
        if self.average is not None:
            found = [parameter.detach() for parameter in self.average.parameters()]
            state |= {f"average {number}": parameter for number, parameter in enumerate(found)}
        for number, (gradient, content) in enumerate(self.kept):
            state[f"kept gradient {number}"] = (gradient - content).abs().sum().reshape(1)
        return state

    def loader(self, shift: int = 0) -> Any:
        dataset = _dataset(self.program, shift)
        if self.with_engine:
            return lockstep.DataLoader(dataset, BATCH_SIZE)
        return [(part,) for part in dataset.tensors[0].split(BATCH_SIZE)]

    def batches(self, loop: str) -> Iterator[list[Tensor]]:
        loader = self.loader()
        if loop == "ahead":
            iterator = iter(loader)
            batch = next(iterator)
            while batch is not None:
                following = next(iterator, None)
                yield [batch[0]]
                batch = following
        elif loop == "zip":
            for one, other in zip(loader, self.loader(1), strict=False):
                yield [one[0], other[0]]
        else:
            for (inputs,) in list(loader) if loop == "list" else loader:
                yield [inputs]

    def make_pass(self, one: Pass, batches: list[Tensor]) -> None:
        if one.event:
            self.happen(one.event, batches[0])
        if one.zero:
            self.optimizer.zero_grad(set_to_none=one.zero == "none")
        with nullcontext() if one.syncs or not self.with_engine else self.model.no_sync():
            loss = self.loss(one, batches)
            if one.again:
                loss.backward(retain_graph=True)
            loss.backward()
        self.look_at_gradients(one)
        if one.syncs:
            self.optimizer.step()
            if self.average is not None:
                self.average.update_parameters(self.model)
        if one.keeps and one.zero == "none" and not self.program.options.get("gradient_as_bucket_view"):
            gradients = [each.grad for each in self.net.parameters() if each.grad is not None]
            self.kept += [(gradient, gradient.clone()) for gradient in gradients]
            self.optimizer.zero_grad()

    def loss(self, one: Pass, batches: list[Tensor]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for inputs in batches:
            for number in range(one.forwards):
                # Re-entrant checkpoints need an input with a gradient.
                total = total + self.model(inputs.detach().requires_grad_(), one.heads).mean() * (number + 1)
        return total

    def look_at_gradients(self, one: Pass) -> None:
        for parameter in self.net.parameters():
            if parameter.grad is not None and one.scale == "in place":
                parameter.grad.mul_(0.5)
            if parameter.grad is not None and one.scale == "replace":
                parameter.grad = parameter.grad * 0.5
        if one.scale == "clip" and one.syncs:
            nn.utils.clip_grad_norm_(self.net.parameters(), 0.1)

    def happen(self, event: str, inputs: Tensor) -> None:
        every = tuple(range(NUM_HEADS))
        if event == "functional call":
            values = {name: each.detach() * 2 for name, each in self.model.named_parameters()}
            functional_call(self.model, values, (inputs.detach(), every))
        elif event == "gradient by torch.func" and not self.program.checkpoint:
            values = {name: each.detach() for name, each in self.net.named_parameters()}
            grad(lambda named: functional_call(self.net, named, (inputs.detach(), every)).mean())(values)
        elif event == "evaluate":
            with torch.no_grad():
                self.model.eval()(inputs, every)
            self.model.train()
        elif event == "freeze and thaw":
            trained = [each for each in self.net.parameters() if each.requires_grad]
            for each in trained:
                each.requires_grad_(False)
            self.net(inputs.detach(), every)
            for each in trained:
                each.requires_grad_()
        elif event.startswith("assign"):
            self.net.load_state_dict(copy.deepcopy(self.net.state_dict()), assign=True)
            self.net.tie()
            if event.endswith("again"):
                self.wrap()
            else:
                self.optimizer = torch.optim.SGD(self.net.parameters(), lr=LEARNING_RATE, momentum=0.5)
        elif event.startswith("thaw"):
            self.net.frozen.requires_grad_()
        elif event == "fail":
            self.fail(inputs)

    def fail(self, inputs: Tensor) -> None:
        """A backward pass that ends in the middle, on all ranks, whose gradients are thrown away."""
        self.optimizer.zero_grad()

        def refuse(_: Tensor) -> None:
            raise BackwardError

        handle = self.net.trunk[0].bias.register_hook(refuse)
        try:
            self.model(inputs.detach().requires_grad_(), tuple(range(NUM_HEADS))).mean().backward()
        except BackwardError:
            pass
        else:
            raise AssertionError("it did not fail")
        finally:
            handle.remove()
        self.optimizer.zero_grad()
