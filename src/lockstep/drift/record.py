"""What is known of one optimizer whose steps are watched, and of what gives ranks different data.

[Note: short lives] Attacks on the inputs, inner loops of meta-learning and searches for latents make optimizers that
step tensors of one batch and are gone with it; those differ between ranks on purpose. So beside an engine an optimizer
of other tensors must have outlived two steps of the engine's optimizers before it is suspected, or have made very many.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch

from lockstep.drift.engines import engines
from lockstep.drift.gradients import LoneGradients

__all__ = ["ENGINE", "LOADER", "SAMPLER", "IdleEngine", "OptimizerRecord", "Splitter", "splitter_named"]

_MAX_SYNCED = 16
_ADVICE = "Before the loop write model = lockstep.DistributedDataParallel(model), and call that in the loop"
_ADVICE_BESIDE = (
    "Have the model that lockstep.DistributedDataParallel wraps hold them, and its forward() call what they belong to, "
    "such as the criterion; or average their gradients before each step by dist.all_reduce. Where each rank is to have "
    "other ones (its classes of a head, its experts), write parameter.allreduce = False, as Megatron-LM does"
)
_LOOKS = 3
# See [Note: short lives].
_ENGINE_STEPS_OUTLIVED = 2
_VERY_MANY_STEPS = 500


class Splitter(NamedTuple):
    """What gives ranks different data.

    Attributes:
        deed: what it does, as a sentence.
        undo: what to write where ranks are to train models of their own.
    """

    deed: str
    undo: str


LOADER = Splitter(
    "lockstep.DataLoader gives each rank its own part of every batch", "give each loader rank=0 and world_size=1"
)
SAMPLER = Splitter(
    "torch's DistributedSampler gives each rank its own part of the data", "give each sampler num_replicas=1 and rank=0"
)

# No proof as the other two are: see [Note: engines alone] in `watch.py`.
ENGINE = Splitter(
    "lockstep.DistributedDataParallel trains beside it, by gradients of each rank's own data",
    "write parameter.allreduce = False for each of its parameters",
)


def splitter_named(sampler: str) -> Splitter:
    """A sampler of another library, by the name of its class."""
    return Splitter(f"{sampler} gives each rank its own part of the data", "give each rank a sampler of all its data")


class OptimizerRecord:
    """What one optimizer did.

    Args:
        splitter: what gives ranks different data.
        engine_steps: how many steps optimizers of engines had made before its first.
        has_engine: an engine averages some of what it steps.

    Attributes:
        marker: how much this process had communicated at its last step.
        version: of its first parameter then. Steps of subclasses call those of their parents, and both call the hooks.
        parameters: those it steps, once it is suspected.
        label: its class and the user's line.
        synced: hashes of the parameters before steps that had a collective since the last one.
        is_beside: it is suspected beside an engine; see [Note: beside an engine] in `watch.py`.
        looks_left: steps after which it is looked for parameters that no engine has.
        num_steps: that it has made.
        was_quiet: one of them was; see [Note: quiet steps] in `watch.py`.
        num_weighed: how often the script had asked how samples count, at its last step.
        may_round: False.
        lone: looks whether its gradients are this rank's alone; None where they are an engine's, or in parts.
    """

    may_round = False

    def __init__(self, splitter: Splitter, engine_steps: int, has_engine: bool) -> None:
        self.splitter = splitter
        self.has_engine = has_engine
        self._engine_steps = engine_steps
        self.marker: object = None
        self.version = -1
        self.parameters: list[torch.Tensor] = []
        self.label = ""
        self.synced: deque[str] = deque(maxlen=_MAX_SYNCED)
        self.is_beside = False
        self.looks_left = _LOOKS
        self.num_steps = 0
        self.was_quiet = False
        self.num_weighed = 0
        self.lone: LoneGradients | None = None

    def lives_long(self, engine_steps: int) -> bool:
        """See [Note: short lives].

        Args:
            engine_steps: how many steps optimizers of engines have made by now.
        """
        if self.has_engine or (engine_steps == 0 and not engines()):
            return True
        if engine_steps - self._engine_steps >= _ENGINE_STEPS_OUTLIVED:
            return True
        return self.splitter is not ENGINE and self.num_steps >= _VERY_MANY_STEPS

    @property
    def advice(self) -> str:
        """What to write instead."""
        return _ADVICE_BESIDE if self.is_beside else _ADVICE

    @property
    def undo(self) -> str:
        """What to write where each rank is to train a model of its own."""
        return self.splitter.undo

    def stop(self) -> None:
        """Watch no more of it than is needed at the end."""
        if self.lone is not None:
            self.lone.stop()


class IdleEngine:
    """An engine that has averaged nothing, while something may have stepped its parameters. A suspect.

    Args:
        module: that it wraps.
        parameters: that it would average.

    Attributes:
        label: what has stepped them.
        synced: empty.
        may_round: True.
        advice: what to write instead.
        undo: what to write where each rank is to train a model of its own.
    """

    advice = (
        "Have backward() compute what is stepped, of what model(x) returns; or average by dist.all_reduce what is not "
        "its work (gradients of torch.autograd.grad, or of another copy of the model), before it changes parameters"
    )
    undo = "do not wrap it in lockstep.DistributedDataParallel"
    may_round = True

    def __init__(self, module: torch.nn.Module, parameters: list[torch.Tensor]) -> None:
        self.parameters = parameters
        self.label = f"what came past DistributedDataParallel({type(module).__name__})"
        self.synced: deque[str] = deque()
