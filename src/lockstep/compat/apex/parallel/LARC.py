"""Layer-wise adaptive rates (You, Gitman and Ginsburg 2017, arXiv:1708.03888), for any optimizer."""  # noqa: N999

from __future__ import annotations

from typing import Any

import torch

from lockstep.compat.apex.optimizers.base import norm_of

__all__ = ["LARC"]


class LARC:
    """Scales each parameter's gradient by the ratio of the norms of parameter and gradient.

    The rate of a parameter is `trust_coefficient * |w| / (|g| + weight_decay * |w| + eps)`. Weight
    decay moves from the wrapped optimizer into the gradient. Everything else is the wrapped optimizer's.

    Args:
        optimizer: a torch optimizer.
        trust_coefficient: see above.
        clip: whether the rate is limited to the optimizer's; False: it multiplies the optimizer's.
        eps: see above.
    """

    def __init__(self, optimizer: Any, trust_coefficient: float = 0.02, clip: bool = True, eps: float = 1e-8) -> None:
        self.optim = optimizer
        self.trust_coefficient = trust_coefficient
        self.clip = clip
        self.eps = eps

    def step(self, closure: Any = None) -> Any:
        """Scale the gradients, then step the wrapped optimizer without its weight decay."""
        groups = self.optim.param_groups
        decays = [group.get("weight_decay", 0.0) for group in groups]
        try:
            with torch.no_grad():
                for group, decay in zip(groups, decays, strict=True):
                    if "weight_decay" in group:
                        group["weight_decay"] = 0.0
                    for parameter in group["params"]:
                        if parameter.grad is not None:
                            self._scale(parameter, decay, group["lr"])
            return self.optim.step() if closure is None else self.optim.step(closure)
        finally:
            for group, decay in zip(groups, decays, strict=True):
                if "weight_decay" in group:
                    group["weight_decay"] = decay

    def _scale(self, parameter: torch.Tensor, decay: float, rate: float) -> None:
        assert parameter.grad is not None
        size, slope = norm_of(parameter), norm_of(parameter.grad)
        adaptive = self.trust_coefficient * size / (slope + size * decay + self.eps)
        if self.clip:
            adaptive = (adaptive / rate).clamp(max=1.0)
        scaled = (parameter.grad + decay * parameter) * adaptive
        # If a norm is zero, the gradient is unchanged. Not an `if`, which would wait for a GPU.
        parameter.grad.copy_(torch.where((size != 0) & (slope != 0), scaled, parameter.grad))

    def __getattr__(self, name: str) -> Any:
        # Special methods, such as for copying, are its own; and during a copy, `optim` is not set yet.
        if name == "optim" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.optim, name)

    def __repr__(self) -> str:
        return f"LARC({self.optim!r})"

    @property
    def param_groups(self) -> Any:
        """Groups of the wrapped optimizer."""
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, value: Any) -> None:
        self.optim.param_groups = value

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of the wrapped optimizer. Amp calls it through the class."""
        self.optim.load_state_dict(state_dict)
