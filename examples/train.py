"""A complete training script: run it alone, or with `lockstep run --nproc 4 examples/train.py`."""

import torch
from torch.nn.functional import cross_entropy

import lockstep

torch.manual_seed(0)
images = torch.randn(1001, 64)
train_set = torch.utils.data.TensorDataset(images, (images @ torch.randn(64, 10)).argmax(1))

with lockstep.init(seed=0) as world:  # from lockstep run, torchrun, srun, mpirun, or plain python
    model = lockstep.DistributedDataParallel(torch.nn.Linear(64, 10).to(world.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    # batches of 128 over all ranks together, on this rank's device
    loader = lockstep.DataLoader(train_set, batch_size=128, shuffle=True, seed=0, device=world.device)
    loss_over_all = lockstep.metrics.Mean()
    for epoch in range(5):
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), labels)  # the mean over this rank's share of the batch
            loss.backward()
            optimizer.step()  # by the gradient of the mean over all 128
            loss_over_all.update(loss.detach())
        (loss_mean,) = lockstep.metrics.synchronize(loss_over_all)
        loss_over_all.reset()
        if world.rank == 0:
            print(f"epoch {epoch}: loss {loss_mean:.12f} on {world.world_size} process(es)")
