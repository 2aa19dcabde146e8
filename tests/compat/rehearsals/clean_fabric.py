"""Fabric's own way: what it loads, it loads as it sees fit. Nothing is to be found here."""

import torch
from lightning_fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    fabric = Fabric(accelerator="cuda", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = fabric.setup(model, optimizer)
    data = TensorDataset(torch.randn(16, 3), torch.randn(16, 1))
    loader, valid_loader = fabric.setup_dataloaders(
        DataLoader(data, batch_size=2, shuffle=True), DataLoader(data, batch_size=4)
    )
    for _ in range(2):
        for inputs, labels in loader:
            optimizer.zero_grad()
            fabric.backward(nn.functional.mse_loss(model(inputs), labels))
            optimizer.step()
        model.eval()
        with torch.no_grad():
            errors = [fabric.all_gather((model(inputs) - labels).square()) for inputs, labels in valid_loader]
        fabric.print(f"error {torch.cat(errors).mean().item():.3f}")
        model.train()
    fabric.save("state.ckpt", {"model": model, "optimizer": optimizer})
    fabric.load("state.ckpt", {"model": model, "optimizer": optimizer})


if __name__ == "__main__":
    main()
