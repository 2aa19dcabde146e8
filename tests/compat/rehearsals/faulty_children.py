"""Trains one shared model in several processes, each with its part of the work, and does not look how they end."""

import os

import torch
import torch.multiprocessing as mp
from torch import nn


def work(number, model, total):
    assert model.weight.device == total.device == torch.device("cuda:0")
    with torch.no_grad():
        model.weight += 1
        total += model(torch.ones(1, 2, device="cuda"))
    if number == 1:
        raise ValueError("this part of the work is lost")
    if number == 2:
        os._exit(7)


def idle():
    mp.Event().wait()


if __name__ == "__main__":
    mp.set_start_method("spawn")
    watched = mp.Process(target=os._exit, args=(3,))
    watched.start()
    stopped = mp.Process(target=idle)
    stopped.start()
    stopped.terminate()
    stopped.join()
    model = nn.Linear(2, 1, bias=False).cuda()
    nn.init.zeros_(model.weight)
    model.share_memory()
    total = torch.zeros(1, 1, device="cuda").share_memory_()
    for number in range(1, 3):
        process = mp.Process(target=work, args=(number, model, total))
        process.start()  # fault: child-failed
        process.join()
    assert model.weight.tolist() == [[2.0, 2.0]]
    assert total.item() == 2.0 + 4.0
    watched.join()
    assert watched.exitcode == 3
