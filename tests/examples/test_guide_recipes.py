"""The recipes of docs/guide-evaluation.md give the values of one process, at uneven shares and without samples."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

import lockstep
from docs.samples import GUIDES
from lockstep.testing import run_ranks

CLASSES = 3


def recipe(name: str) -> str:
    page = GUIDES["evaluation"].read_text()
    (code,) = re.findall(rf"<!-- recipe: {name} -->\n```python\n(.*?)```", page, re.DOTALL)
    return code


def run_recipe(name: str, num_samples: int, result: str) -> Any:
    """What the recipe leaves in `result`."""
    lockstep.init()
    torch.manual_seed(0)
    inputs = torch.randn(num_samples, 6, dtype=torch.float64)
    labels = torch.arange(num_samples) % CLASSES
    held_out = torch.utils.data.TensorDataset(inputs, labels)
    net = torch.nn.Linear(6, CLASSES).double()
    torch.set_default_dtype(torch.float64)
    names = {
        "lockstep": lockstep,
        "torch": torch,
        "cross_entropy": cross_entropy,
        "CLASSES": CLASSES,
        "net": net.eval(),
        "loader": lockstep.DataLoader(held_out, batch_size=4, evaluation=True),
    }
    try:
        if name == "best":
            names["model"] = lockstep.DistributedDataParallel(net)
            names["optimizer"] = torch.optim.SGD(net.parameters(), lr=0.5)
            names["train_loader"] = lockstep.DataLoader(held_out, batch_size=4, shuffle=True, seed=0)
            exec(recipe(name), names)
        else:
            with torch.no_grad():
                exec(recipe(name), names)
    finally:
        torch.set_default_dtype(torch.float32)
    found = names[result]
    return {key: np.asarray(value).tolist() for key, value in found.items()} if isinstance(found, dict) else found


def test_metrics_are_those_of_one_process() -> None:
    """Of 5 samples in batches of 4, a rank of three has two, and of 2 the last has none."""
    for num_samples in (23, 5, 3):
        (alone,) = run_ranks(run_recipe, 1, "all_gather", num_samples, "values")
        for world_size in (1, 2, 3):
            for name in ("all_gather", "torchmetrics"):
                for values in run_ranks(run_recipe, world_size, name, num_samples, "values"):
                    assert values["confusion"] == alone["confusion"], (name, world_size, num_samples)
                    for key in ("auc", "f1", "map"):
                        assert values[key] == pytest.approx(alone[key], rel=1e-6), (name, key, world_size, num_samples)


def test_best_weights_are_alike_on_all_ranks() -> None:
    (alone,) = run_ranks(run_recipe, 1, "best", 21, "best_weights")
    for world_size in (2, 3):
        for weights in run_ranks(run_recipe, world_size, "best", 21, "best_weights"):
            assert weights.keys() == alone.keys()
            for key in alone:
                np.testing.assert_allclose(weights[key], alone[key], rtol=1e-9)
