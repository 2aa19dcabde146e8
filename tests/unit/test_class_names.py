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

# Names that stand twice for a reason of their own.
EXCEPTIONS = {
    "Engine": "the group's, and what `bench.strategies` measures: an engine of data-parallel training",
    "Event": "torch.cuda.Event in rehearsals, and what the events of a rehearsal record",
    "Finding": "of the doctor and of a rehearsal: each is what its tool finds",
    "Host": "a host of a job, and a network namespace that tests take for one",
    "Progress": "of an epoch, of a conformance run, of a measurement: each shows that something goes on",
    "Setting": "what is measured, of engines and of collectives",
    "Settings": "of a rehearsal, and of Horovod's gradients",
    "_Call": "private: of a replica, and in the source of a script",
    "_Run": "private: of two benchmarks",
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
        if len(found) > 1 and name not in FOREIGN and name not in EXCEPTIONS
    ]
    assert not wrong, "say in the name which of them it is:\n" + "\n".join(wrong)
