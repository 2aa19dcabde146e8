"""Opt levels and their options."""

from __future__ import annotations

from typing import Any

import torch

from lockstep.compat.apex.amp._amp_state import AmpError, AmpValueError, say, warn_or_raise

__all__ = ["HALF_DTYPES", "Properties", "choose"]

HALF_DTYPES = (torch.float16, torch.bfloat16)

# level: description; cast_model_type, patch_torch_functions, keep_batchnorm_fp32, master_weights, loss_scale
_LEVELS: dict[str, tuple[str, dict[str, Any]]] = {
    "O0": ("plain float32", {"cast_model_type": torch.float32, "master_weights": False, "loss_scale": 1.0}),
    "O1": (
        "casts around torch functions, float32 parameters",
        {"patch_torch_functions": True, "loss_scale": "dynamic"},
    ),
    "O2": (
        "16-bit model with float32 batch normalization and float32 master weights",
        {
            "cast_model_type": torch.float16,
            "keep_batchnorm_fp32": True,
            "master_weights": True,
            "loss_scale": "dynamic",
        },
    ),
    "O3": (
        "16-bit model only",
        {
            "cast_model_type": torch.float16,
            "keep_batchnorm_fp32": False,
            "master_weights": False,
            "loss_scale": 1.0,
        },
    ),
}


class Properties:
    """Options of Amp; each is checked against the opt level when it is set.

    Attributes:
        options: values by name.
        enabled: whether Amp does anything.
        opt_level: "O0" to "O3".
        cast_model_type: dtype of the model's parameters; None or False leaves them alone.
        patch_torch_functions: whether torch functions cast their inputs, or the 16-bit dtype that they cast to.
        keep_batchnorm_fp32: whether batch normalization stays float32 in a 16-bit model.
        master_weights: whether the optimizer updates float32 copies of 16-bit parameters.
        loss_scale: a number, or "dynamic".
    """

    options: dict[str, Any]

    def __init__(self) -> None:
        options = {
            "enabled": False,
            "opt_level": None,
            "cast_model_type": None,
            "patch_torch_functions": False,
            "keep_batchnorm_fp32": None,
            "master_weights": None,
            "loss_scale": 1.0,
        }
        vars(self)["options"] = options

    def __getattr__(self, name: str) -> Any:
        options = vars(self).get("options", {})
        if name in options:
            return options[name]
        raise AttributeError(f"Amp has no option {name!r}; options are {', '.join(options)}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.options:
            raise AttributeError(f"Amp has no option {name!r}; options are {', '.join(self.options)}")
        check = getattr(self, f"_check_{name}", None)
        self.options[name] = value if check is None else check(value)

    def _check_cast_model_type(self, value: Any) -> Any:
        if value is None or value is False:
            return value
        if not (isinstance(value, torch.dtype) and value.is_floating_point):
            raise AmpValueError(f"cast_model_type must be a floating torch.dtype, None or False, got {value!r}")
        if self.opt_level == "O1" and value is not torch.float32:
            warn_or_raise(
                "O1 casts inputs of torch functions and leaves parameters float32, so cast_model_type="
                f"{value} is incompatible. Use O2 or O3 to cast the model; to have functions cast to bfloat16, "
                "pass patch_torch_functions=torch.bfloat16"
            )
        return value

    def _check_patch_torch_functions(self, value: Any) -> Any:
        if not isinstance(value, bool) and value not in HALF_DTYPES:
            raise AmpValueError(f"patch_torch_functions must be a bool, torch.float16 or torch.bfloat16, got {value!r}")
        if value and self.opt_level != "O1":
            warn_or_raise(f"patch_torch_functions is for opt_level='O1', not {self.opt_level}")
        return value

    def _check_keep_batchnorm_fp32(self, value: Any) -> Any:
        value = {"True": True, "False": False}.get(value, value) if isinstance(value, str) else value
        if value is not None and not isinstance(value, bool):
            raise AmpValueError(f"keep_batchnorm_fp32 must be a bool, 'True', 'False' or None, got {value!r}")
        if self.opt_level == "O1" and value is not None:
            warn_or_raise(
                "with O1 batch normalization has float32 parameters anyway, so keep_batchnorm_fp32 must stay None; got "
                f"{value}"
            )
        return value

    def _check_master_weights(self, value: Any) -> Any:
        if self.opt_level == "O1" and value is not None:
            warn_or_raise("with O1 the model's parameters are float32, so there are no master weights")
        return value

    def _check_loss_scale(self, value: Any) -> float | str:
        if value == "dynamic":
            return "dynamic"
        try:
            return float(value)
        except (TypeError, ValueError) as error:
            raise AmpValueError(
                f"loss_scale must be a number, a string with a number, or 'dynamic', got {value!r}"
            ) from error


def choose(opt_level: str, overrides: dict[str, Any]) -> Properties:
    """The options of a level, with overrides that are not None.

    Raises:
        AmpError: the level is unknown, or incompatible with an override.
        AmpValueError: the value of an override is invalid.
    """
    if opt_level not in _LEVELS:
        raise AmpError(
            f"Unexpected optimization level {opt_level!r}. Options are 'O0', 'O1', 'O2', 'O3'. Note that in 'O0', "
            "'O1' and so on the prefix is the letter O, not the number zero."
        )
    brief, defaults = _LEVELS[opt_level]
    properties = Properties()
    properties.options.update(defaults, enabled=True, opt_level=opt_level)
    say(f"Selected optimization level {opt_level}: {brief}", only_first_rank=True)
    say("Defaults for this optimization level are:", only_first_rank=True)
    _list(properties)
    for name, value in overrides.items():
        if value is not None:
            setattr(properties, name, value)
    say("After processing overrides, optimization options are:", only_first_rank=True)
    _list(properties)
    return properties


def _list(properties: Properties) -> None:
    for name, value in properties.options.items():
        say(f"{name:22} : {value}", only_first_rank=True)
