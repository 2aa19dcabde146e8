"""Evaluation on all ranks that gives one process's numbers: every sample once, sums and counts in one collective.

    lockstep run --nproc 2 examples/distributed_evaluation.py

Two things go wrong in most scripts. A sampler that gives every rank as many samples repeats some to get there, so
they count twice. And a mean over ranks of their means is not the mean over samples where ranks have different numbers
of them.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import lockstep


def main() -> None:
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float64) / 16, torch.tensor(digits.target)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).double()

    with lockstep.init() as world:
        model.to(world.device)
        # 1797 images: the last batch has 97. Ranks may get different numbers of batches, and no image comes twice.
        loader = lockstep.DataLoader(TensorDataset(images, labels), batch_size=100, evaluation=True)
        mean_loss, top1, top5 = lockstep.metrics.Mean(), lockstep.metrics.Accuracy(), lockstep.metrics.Accuracy(top_k=5)
        model.eval()
        with torch.no_grad():
            for inputs, targets in loader:
                outputs = model(inputs.to(world.device)).cpu()
                mean_loss.update(cross_entropy(outputs, targets, reduction="none"))
                top1.update(outputs, targets)
                top5.update(outputs, targets)
        found = lockstep.metrics.synchronize(mean_loss, top1, top5)  # once, not in every step, and no barrier

        outputs = model(images.to(world.device)).cpu()
        ranked = outputs.topk(5, dim=1).indices == labels[:, None]
        alone = (
            cross_entropy(outputs, labels).item(),
            ranked[:, :1].any(1).double().mean().item(),
            ranked.any(1).double().mean().item(),
        )
        assert all(abs(ours - one) < 1e-12 for ours, one in zip(found, alone, strict=True))
        if world.rank == 0:
            print("loss {:.6f}, top-1 {:.2%}, top-5 {:.2%}".format(*found), f"on {world.world_size} process(es)")


if __name__ == "__main__":
    main()
