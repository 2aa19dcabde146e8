"""`lockstep.train.Trainer`: evaluation, early stopping, checkpoints, and a save when the job is told to stop.

Run it alone, or with `lockstep run --nproc 4 examples/trainer.py`; the same command again resumes.
"""

import argparse
import sys

import torch
from torch.nn.functional import cross_entropy

import lockstep
from lockstep import checkpoint
from lockstep.metrics import Accuracy, Mean, synchronize
from lockstep.train import EarlyStopping, EpochReport, Trainer

parser = argparse.ArgumentParser()
parser.add_argument("--folder", default="runs/trainer", help="for checkpoints")
folder = parser.parse_args().folder

torch.manual_seed(0)
inputs = torch.randn(1200, 20)
labels = (inputs @ torch.randn(20, 5) + 2 * torch.randn(1200, 5)).argmax(1)
train_set = torch.utils.data.TensorDataset(inputs[:1000], labels[:1000])
held_out = torch.utils.data.TensorDataset(inputs[1000:], labels[1000:])

with lockstep.init(seed=0) as world:
    model = lockstep.DistributedDataParallel(torch.nn.Linear(20, 5).to(world.device))
    loader = lockstep.DataLoader(train_set, batch_size=64, shuffle=True, seed=0, device=world.device)
    held_out_loader = lockstep.DataLoader(held_out, batch_size=64, evaluation=True, device=world.device)

    def loss_of(model, batch):
        x, y = batch
        return cross_entropy(model(x), y)

    def evaluate(net):
        loss, accuracy = Mean(), Accuracy()
        for x, y in held_out_loader:
            logits = net(x)
            loss.update(cross_entropy(logits, y))
            accuracy.update(logits, y)
        return synchronize({"held_out_loss": loss, "accuracy": accuracy})

    def show(report):
        if world.rank == 0 and isinstance(report, EpochReport):
            values = ", ".join(f"{name} {value:.5f}" for name, value in report.evaluation.items())
            print(f"epoch {report.epoch}: loss {report.loss:.5f}, {values}")

    stop = EarlyStopping("held_out_loss", patience=2)
    trainer = Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.5),
        loader,
        loss_of,
        evaluate=evaluate,
        callbacks=[show],
        checkpoints=folder,
        stop=stop,
        stop_on_signals=True,
    )
    if checkpoint.available(folder):
        trainer.load_state_dict(checkpoint.load(folder, map_location=world.device))
        if trainer.is_stopped and world.rank == 0:
            print(f"the training in {folder} has already stopped: delete that folder to train anew")
    if not trainer.fit(50):
        sys.exit(lockstep.EXIT_STOPPED)  # told to stop: the same command resumes
    if world.rank == 0:
        print(f"best held-out loss {stop.best:.5f} in epoch {stop.best_epoch}, on {world.world_size} process(es)")
