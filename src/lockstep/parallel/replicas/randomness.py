"""Whether a module's forward pass draws random numbers, as far as its code shows without running it."""

from __future__ import annotations

import types
from collections.abc import Iterator

from torch import nn

from lockstep.torch_private.modules import Dropout

__all__ = ["seems_to_draw"]

# Functions of torch, torch.nn.functional and tensors that draw from the default generator.
_DRAWING = frozenset(
    {
        "alpha_dropout",
        "bernoulli",
        "bernoulli_",
        "cauchy_",
        "dropout",
        "dropout1d",
        "dropout2d",
        "dropout3d",
        "exponential_",
        "feature_alpha_dropout",
        "feature_dropout",
        "geometric_",
        "gumbel_softmax",
        "log_normal_",
        "multinomial",
        "normal",
        "normal_",
        "poisson",
        "rand",
        "rand_like",
        "randint",
        "randint_like",
        "randn",
        "randn_like",
        "random_",
        "randperm",
        "rrelu",
        "rsample",
        "sample",
        "uniform_",
    }
)


def seems_to_draw(module: nn.Module) -> bool:
    """Whether the module, or one inside it, drops out or names a function that draws. Local.

    Reads the module's classes, as they are when training; a function that forward calls elsewhere is not looked into.

    >>> seems_to_draw(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))), seems_to_draw(nn.Linear(2, 2))
    (True, False)
    """
    return any(_drops_out(each) or not _names_in(type(each)).isdisjoint(_DRAWING) for each in module.modules())


def _drops_out(module: nn.Module) -> bool:
    if isinstance(module, Dropout):
        return module.p > 0
    # Recurrent layers and attention keep the probability under this name.
    rate = getattr(module, "dropout", 0)
    return isinstance(rate, float) and rate > 0


def _names_in(kind: type[nn.Module]) -> set[str]:
    """Names that the code of a user's module class mentions; of torch's own classes none, as they are known."""
    if kind.__module__.split(".")[0] == "torch":
        return set()
    return {
        name
        for each in vars(kind).values()
        if isinstance(each, types.FunctionType) and each.__name__ != "__init__"
        for name in _names_of(each.__code__)
    }


def _names_of(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_of(constant)
