"""Random training programs: drawn from a seed, and shown as steps.

A program is what a training script may do with a model, a loader and an optimizer. `training_runs.train` runs it: with
the engine, on this rank's share of each batch, or plainly, on whole batches. Both give the same parameters, or the
program has something in it that the engine refuses, and then the error is one of those in `Program.may_raise`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "BATCH_SIZE",
    "CHANGES",
    "CHECKPOINTS",
    "EVENTS",
    "FROZEN",
    "HOOKS",
    "LOOPS",
    "NUM_HEADS",
    "Epoch",
    "Pass",
    "Program",
    "draw",
]

BATCH_SIZE = 6
NUM_HEADS = 3
# How the batches of an epoch come to its passes; `training_batches.py` has a function for each.
LOOPS = (
    "plain",
    "ahead",
    "list",
    "cycle",
    "thread",
    "zip",
    "interleaved",
    "inner",
    "windows",
    "skipped",
    "stopped",
)
# What is done to a batch between the loader and the model.
CHANGES = ("", "cloned", "normalised")
CHECKPOINTS = ("", "parts", "all", "parts re-entrant", "all re-entrant")
HOOKS = ("", "tensor", "post-accumulate", "post-accumulate, out of place")
FROZEN = ("conv", "trunk", "heads")
_NOT_DIVIDED = "that is not split evenly between the ranks"
_NOT_AVERAGED = "require a gradient that is not averaged"
# Things done between two passes of an epoch, with the kind of error that the engine has for each, if it has one.
EVENTS = {
    "functional call": "",
    "gradient by torch.func": "",
    "gradient of inputs by torch.func": _NOT_DIVIDED,
    "models by torch.func.vmap": "",
    "evaluate": "",
    "freeze and thaw": "",
    "assign and wrap again": "",
    "assign": _NOT_AVERAGED,
    "thaw what was frozen": "",
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
        frozen: the part of the model that is frozen for this pass; of `FROZEN`, or "".
        evaluates: the model is evaluated on all of the loader between the forward and the backward pass.
        scale: what is done to gradients behind it: "in place", "replace", "clip" or "".
        keeps: references to gradients are kept, and looked at in the end.
        event: what happens before it; of `EVENTS`.
    """

    zero: str = "none"
    syncs: bool = True
    forwards: int = 1
    again: bool = False
    heads: tuple[int, ...] = tuple(range(NUM_HEADS))
    frozen: str = ""
    evaluates: bool = False
    scale: str = ""
    keeps: bool = False
    event: str = ""

    @property
    def leaves_out(self) -> bool:
        """Whether some heads are not used."""
        return len(self.heads) < NUM_HEADS

    def __str__(self) -> str:
        parts = [self.event, f"freeze {self.frozen}" if self.frozen else ""]
        parts += [f"zero_grad({self.zero})" if self.zero else "accumulate"]
        parts += [f"{self.forwards} x forward(heads {self.heads})" if self.forwards > 1 else f"forward{self.heads}"]
        parts += ["evaluate on all of the loader" if self.evaluates else ""]
        parts += ["backward" + (" twice" if self.again else "") + ("" if self.syncs else " under no_sync")]
        parts += [f"gradients: {self.scale}" if self.scale else "", "keep .grad" if self.keeps else ""]
        return ", ".join(part for part in [*parts, "step" if self.syncs else ""] if part)


@dataclass
class Epoch:
    """A loop over the loader.

    Attributes:
        loop: how batches come to passes; of `LOOPS`.
        depth: batches that are fetched ahead, wait in a queue, or make a window.
        change: what is done to each batch; of `CHANGES`.
        passes: made over and over, one for each batch that comes.
    """

    loop: str
    passes: list[Pass]
    depth: int = 1
    change: str = ""

    def __str__(self) -> str:
        depth = f" by {self.depth}" if self.loop in ("ahead", "thread", "windows") else ""
        return f"{self.loop} loop{depth}{f', batches {self.change}' if self.change else ''}, over and over:"


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
        epochs: one after the other.
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
    epochs: list[Epoch] = field(default_factory=list)

    @property
    def passes(self) -> list[Pass]:
        return [one for epoch in self.epochs for one in epoch.passes]

    def may_raise(self, world_size: int) -> list[str]:
        """Parts of the errors that its features may have on so many ranks, by the engine's own rules."""
        events = {one.event for one in self.passes}
        found = {EVENTS[event] for event in events if event} - {""}
        if all(size % world_size == 0 for size in (BATCH_SIZE, self.num_samples % BATCH_SIZE)):
            found.discard(_NOT_DIVIDED)
        if "re-entrant" in self.checkpoint and "assign" in events:
            found.add("got no gradient")  # the checkpoint hides which parameters took the place of the engine's
        leaves_out = any(one.leaves_out for one in self.passes)
        if leaves_out and not self.options.get("find_unused_parameters"):
            found.add("got no gradient")
        if "re-entrant" in self.checkpoint and not self.options.get("static_graph"):
            # Each checkpoint has a backward pass of its own, so that a layer used twice gets two gradients.
            several = any(one.forwards > 1 for one in self.passes) or any(one.loop == "zip" for one in self.epochs)
            if several:
                found.add("received a second gradient in one backward pass")
            if several or leaves_out:
                found.add("got no gradient")
        return sorted(found)

    @property
    def features(self) -> set[str]:
        """What is in it, in words: for counting."""
        found = {f"loop: {one.loop}" for one in self.epochs} | {f"batches: {one.change}" for one in self.epochs}
        found |= {f"checkpoint: {self.checkpoint}", f"hook: {self.hook}", *self.options}
        found |= {name for name in ("tied", "channels_last", "sparse", "averaged") if getattr(self, name)}
        for one in self.passes:
            found |= {f"event: {one.event}", f"zero_grad: {one.zero}", f"gradients: {one.scale}"}
            found |= {f"frozen: {one.frozen}", f"forward passes: {one.forwards}"}
            for name in ("again", "evaluates", "keeps", "leaves_out"):
                found |= {name} if getattr(one, name) else set()
            found |= set() if one.syncs else {"no_sync"}
        return found

    def __str__(self) -> str:
        lines = [f"program {self.seed}: DistributedDataParallel(net, {self.options}), {self.num_samples} samples"]
        facts = {
            name: getattr(self, name) for name in ("checkpoint", "hook", "tied", "channels_last", "sparse", "averaged")
        }
        lines += [f"  {name}: {value}" for name, value in facts.items() if value]
        for epoch in self.epochs:
            lines += [f"  {epoch}", *(f"    {one}" for one in epoch.passes)]
        return "\n".join(lines)


def draw(seed: int) -> Program:
    """The program of a seed: the same on all ranks."""
    rng = random.Random(seed)

    def some(*values: Any, odds: float = 0.5) -> Any:
        return rng.choice(values) if rng.random() < odds else type(values[0])()

    checkpoint = some(*CHECKPOINTS[1:], odds=0.4)
    options = rng.choice(
        [{}, {}, {"static_graph": True}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}]
    )
    if "re-entrant" in checkpoint and rng.random() < 0.6:
        options = {"static_graph": True}  # what the engine asks for where a layer gets several gradients
    options = {**options, **rng.choice([{}, {"bucket_cap_mb": 0}, {"bucket_cap_mb": 0.0005}])}
    if checkpoint.startswith("all"):
        options.pop("find_unused_parameters", None)  # which head is used is not seen from outside of the checkpoint
    program = Program(
        seed,
        options,
        num_samples=rng.choice([12, 12, 13, 14, 16, 17]),
        checkpoint=checkpoint,
        hook=some(*HOOKS[1:], odds=0.3),
        tied=rng.random() < 0.4,
        channels_last=rng.random() < 0.4,
        sparse=rng.random() < 0.2,
        averaged=rng.random() < 0.3,
    )
    program.epochs = [_draw_epoch(rng, program) for _ in range(rng.randint(1, 3))]
    if not any(one.syncs for one in program.passes):
        program.passes[0].syncs = True
    return program


def _draw_epoch(rng: random.Random, program: Program) -> Epoch:
    passes = [_draw_pass(rng, program) for _ in range(rng.randint(1, 4))]
    loop, change = rng.choice(LOOPS), rng.choice(CHANGES[1:]) if rng.random() < 0.4 else ""
    goes_by_size = change or any(one.event == "gradient of inputs by torch.func" for one in passes)
    if loop == "zip" and goes_by_size and program.num_samples in (13, 14):
        loop = "plain"  # a last batch of 1 or 2 samples beside one of 2 or 3: they may have the same sizes on all ranks
    return Epoch(loop, passes, rng.randint(1, 3), change)


def _draw_pass(rng: random.Random, program: Program) -> Pass:
    one = Pass(
        zero=rng.choice(["none", "none", "none", "zeros", ""]),
        syncs=rng.random() < 0.75,
        forwards=rng.choice([1, 1, 1, 2]),
        again=not program.checkpoint and rng.random() < 0.15,
        evaluates=rng.random() < 0.1,
        scale=rng.choice(
            ["", "", "", "in place", "replace", "" if program.sparse else "clip"]
        ),  # torch clips dense ones
        keeps=rng.random() < 0.3,
        event=_draw_event(rng, program) if rng.random() < 0.25 else "",
    )
    may_leave_out = program.options.get("find_unused_parameters")
    if may_leave_out or rng.random() < 0.03:
        one.heads = tuple(sorted(rng.sample(range(NUM_HEADS), rng.randint(1, NUM_HEADS))))
    if may_leave_out and rng.random() < 0.25:
        one.frozen = rng.choice(FROZEN)
    return one


def _draw_event(rng: random.Random, program: Program) -> str:
    # Most programs have no error: what has one comes more rarely.
    events = [event for event, error in EVENTS.items() for _ in range(1 if error else 3)]
    # A transform of torch.func goes through no checkpoint, and gives no sparse gradients: torch refuses it.
    is_transformed = not (program.checkpoint or program.sparse)
    return rng.choice([event for event in events if is_transformed or "torch.func" not in event])
