"""Apex's O1 on GPUs: what is cast, in forward and backward passes; each line of it holds with Apex on a GPU."""

import pytest
import torch
from apex import amp
from torch import nn
from torch.nn import functional

HALF, FLOAT = "torch.cuda.HalfTensor", "torch.cuda.FloatTensor"


def casts():
    handle = amp.init(enabled=True)
    torch.set_default_tensor_type(torch.cuda.FloatTensor)
    for dtype, own in ((torch.float32, FLOAT), (torch.float16, HALF)):
        inputs = torch.randn(4, 8, dtype=dtype).requires_grad_()
        for function, expected in (
            (nn.Linear(8, 8), HALF),
            (lambda x: x @ x.t(), HALF),
            (lambda x: x.softmax(-1), FLOAT),
            (lambda x: functional.group_norm(x, 2), FLOAT),
            (lambda x: x**2, FLOAT),
            (lambda x: x.sum(), FLOAT),
            (nn.ReLU(), own),
            (nn.GRUCell(8, 4), HALF),
            (lambda x: nn.LSTM(8, 4)(x)[0], HALF),
            (lambda x: torch.atan2(x, x.float()), FLOAT),
            (lambda x: x.cpu(), "torch.FloatTensor"),
        ):
            outputs = function(inputs)
            assert outputs.type() == expected, (function, outputs.type())
            outputs.float().sum().backward()
            assert inputs.grad.type() == own
    with pytest.raises(NotImplementedError):
        torch.ones(2, dtype=torch.float16).exp_()
    handle._deactivate()
    assert (inputs @ inputs.t()).dtype is torch.float16
    assert inputs.softmax(-1).dtype is torch.float16
    assert inputs.cpu().type() == "torch.HalfTensor"
    torch.set_default_tensor_type(torch.FloatTensor)


def models():
    for level in ("O1", "O2", "O3"):
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))
        model = model.cuda().to(memory_format=torch.channels_last)
        assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
        model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), 0.1), opt_level=level, verbosity=0)
        images = torch.randn(2, 3, 4, 4, device="cuda").contiguous(memory_format=torch.channels_last)
        seen = []
        model[0].register_forward_hook(lambda module, inputs, outputs, seen=seen: seen.append(outputs.type()))
        loss = functional.cross_entropy(model(images), torch.tensor([0, 1], device="cuda"))
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        assert seen == [HALF], (level, seen)
        assert model[1].num_batches_tracked.dtype is torch.int64


if __name__ == "__main__":
    casts()
    models()
    print("all of it holds")
