"""One class name, one meaning: a name in a stack trace or a search leads to one class."""

from __future__ import annotations

import ast
from collections import defaultdict

from package_sources import modules

# Names that scripts write, because another library defined them: a shim has to have a class of that name as well.
FOREIGN = {
    "DistributedDataParallel": "torch and apex",
    "LossScaler": "apex.amp and apex.fp16_utils",
    "Reducer": "apex; ours is that of DDP, as torch calls it",
    "SyncBatchNorm": "torch, apex and horovod",
}


def test_class_names_are_unique() -> None:
    defined = defaultdict(list)
    for module in modules().values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                defined[node.name].append(f"{module.path}:{node.lineno}")
    wrong = [
        f"{name}: {', '.join(found)}"
        for name, found in sorted(defined.items())
        if len(found) > 1 and name not in FOREIGN
    ]
    assert not wrong, "say in the name which of them it is:\n" + "\n".join(wrong)
