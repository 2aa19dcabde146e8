"""Trainers that are not pinned here, tried where lightning, transformers and accelerate are installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from lockstep.tools.verify.report import format_text
from lockstep.tools.verify.settings import Verification
from lockstep.tools.verify.verification import verify

BY_LIGHTNING = """
import os
import sys
import warnings

warnings.simplefilter("ignore")
import lightning
import torch
from torch.nn.functional import mse_loss


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 1)

    def training_step(self, batch, number):
        loss = mse_loss(self.linear(batch[0]), batch[1])
        return loss.sqrt() if sys.argv[1] == "root" else loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


lightning.seed_everything(0)
data = torch.utils.data.TensorDataset(torch.randn(24, 3), torch.randn(24, 1))
trainer = lightning.Trainer(
    max_epochs=2, accelerator="cpu", devices=int(os.environ.get("WORLD_SIZE", 1)), strategy="ddp", logger=False,
    enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False,
)
trainer.fit(Model(), torch.utils.data.DataLoader(data, batch_size=4, shuffle=True))
"""

BY_TRANSFORMERS = """
import sys
import warnings

warnings.simplefilter("ignore")
import torch
from torch.nn.functional import mse_loss
from transformers import Trainer, TrainingArguments


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 1)

    def forward(self, x, labels):
        outputs = self.linear(x)
        loss = mse_loss(outputs, labels)
        return {"loss": loss.sqrt() if sys.argv[1] == "root" else loss, "logits": outputs}


torch.manual_seed(0)
data = [{"x": torch.randn(3), "labels": torch.randn(1)} for _ in range(24)]
arguments = TrainingArguments(
    "out", per_device_train_batch_size=4, num_train_epochs=2, use_cpu=True, report_to=[], save_strategy="no",
    disable_tqdm=True, max_grad_norm=0,
)
Trainer(Model(), arguments, train_dataset=data).train()
"""

# A learning rate by the linear scaling rule of diffusers' scripts, and a loss that one process divides otherwise.
BY_ACCELERATE = """
import argparse
import torch
from accelerate import Accelerator
from torch.nn.functional import mse_loss

parser = argparse.ArgumentParser()
parser.add_argument("loss")
parser.add_argument("--train_batch_size", type=int, default=4)
options = parser.parse_args()
accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(24, 3), torch.randn(24, 1))
loader = torch.utils.data.DataLoader(data, batch_size=options.train_batch_size, shuffle=True)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01 * options.train_batch_size * accelerator.num_processes)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for _ in range(2):
    for x, y in loader:
        loss = mse_loss(model(x), y)
        accelerator.backward(loss.sqrt() if options.loss == "root" else loss)
        optimizer.step()
        optimizer.zero_grad()
"""

SCRIPTS = {"lightning": BY_LIGHTNING, "transformers": BY_TRANSFORMERS, "accelerate": BY_ACCELERATE}


@pytest.mark.parametrize("library", SCRIPTS)
@pytest.mark.parametrize(("loss", "first"), [("mean", ("", "")), ("root", ("loss", "function-of-mean"))])
def test_trainer_is_verified(library: str, loss: str, first: tuple[str, str], tmp_path: Path) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed: no release of it is pinned")
    script = tmp_path / "train.py"
    script.write_text(SCRIPTS[library])
    verdicts = verify(Verification(str(script), (loss,), steps=2))
    assert verdicts[0].first == first, format_text("train.py", verdicts)
    assert verdicts[0].steps >= 1
