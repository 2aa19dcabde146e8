"""Accelerate's own way: its scheduler steps once for each rank, by design. Nothing is to be found here."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator()
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    data = TensorDataset(torch.randn(16, 3), torch.randn(16, 1))
    loaders = DataLoader(data, batch_size=2, shuffle=True), DataLoader(data, batch_size=4)
    model, optimizer, scheduler, loader, valid_loader = accelerator.prepare(model, optimizer, scheduler, *loaders)
    for _ in range(2):
        model.train()
        for inputs, labels in loader:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.mse_loss(model(inputs), labels))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
        model.eval()
        errors = []
        for inputs, labels in valid_loader:
            with torch.no_grad():
                outputs = model(inputs)
            errors.append(accelerator.gather_for_metrics((outputs - labels).square()))
        accelerator.print(f"error {torch.cat(errors).mean().item():.3f}")
    accelerator.wait_for_everyone()
    accelerator.save_state("state", safe_serialization=False)
    accelerator.wait_for_everyone()
    accelerator.load_state("state")
    accelerator.end_training()


if __name__ == "__main__":
    main()
