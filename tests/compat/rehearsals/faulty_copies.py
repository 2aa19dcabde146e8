"""Written for one GPU, and started on several: each process trains a model of its own."""

import torch
from torch import nn

model = nn.Linear(2, 1).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # fault: never-joined
for _ in range(2):
    model(torch.ones(4, 2).cuda()).mean().backward()
    optimizer.step()
torch.save(model.state_dict(), "state.pt")  # fault: checkpoint-by-copies
