"""`apex.optimizers`: torch's optimizers under Apex's names, LAMB and NovoGrad. See the table in `lockstep.compat.apex`.

General layout, with a module per optimizer, as in Apex:

* `fused_adagrad`, `fused_adam`, `fused_sgd`: torch's, with Apex's arguments.
* `fused_lamb`, `fused_novograd`: implemented here; `fused_mixed_precision_lamb`: refused when constructed.
* `base`: shared by all.
"""

from __future__ import annotations

from lockstep.compat.apex.fp16_utils.fp16_optimizer import FP16_Optimizer
from lockstep.compat.apex.optimizers.fused_adagrad import FusedAdagrad
from lockstep.compat.apex.optimizers.fused_adam import FusedAdam
from lockstep.compat.apex.optimizers.fused_lamb import FusedLAMB
from lockstep.compat.apex.optimizers.fused_mixed_precision_lamb import FusedMixedPrecisionLamb
from lockstep.compat.apex.optimizers.fused_novograd import FusedNovoGrad
from lockstep.compat.apex.optimizers.fused_sgd import FusedSGD

__all__ = [
    "FP16_Optimizer",
    "FusedAdagrad",
    "FusedAdam",
    "FusedLAMB",
    "FusedMixedPrecisionLamb",
    "FusedNovoGrad",
    "FusedSGD",
]
