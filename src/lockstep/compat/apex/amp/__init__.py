"""`apex.amp`: automatic mixed precision at opt levels, on torch's autocast. See the table in `lockstep.compat.apex`.

General layout, from the bottom up:

* `properties`: opt levels and their options; `scaler`: loss scales.
* `_amp_state`: Amp's state in this process; scripts read it under this name.
* `casts`: functions that cast their inputs; `forward`: models that cast their inputs.
* `optimizers`: master weights, unscaling and skipped steps; `handle`: `scale_loss`.
* `frontend`: `initialize`, and state for checkpoints.
* `legacy`: the interface before `initialize`; `amp`: Apex's module of decorators.
"""

from __future__ import annotations

from lockstep.compat.apex.amp._amp_state import AmpError, _amp_state, master_params
from lockstep.compat.apex.amp.casts import (
    disable_casts,
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from lockstep.compat.apex.amp.frontend import initialize, load_state_dict, state_dict
from lockstep.compat.apex.amp.handle import scale_loss
from lockstep.compat.apex.amp.legacy import init

__all__ = [
    "AmpError",
    "_amp_state",
    "disable_casts",
    "float_function",
    "half_function",
    "init",
    "initialize",
    "load_state_dict",
    "master_params",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "state_dict",
]
