"""Runs random training programs, with the engine or without."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.optim.swa_utils import AveragedModel

import lockstep
from training_batches import batches
from training_models import Net, dataset
from training_programs import BATCH_SIZE, NUM_HEADS, Epoch, Pass, Program

__all__ = ["train"]

LEARNING_RATE = 0.02
EVERY_HEAD = tuple(range(NUM_HEADS))


class BackwardError(Exception):
    """What a backward pass fails with that is meant to fail."""


def train(program: Program, with_engine: bool) -> dict[str, Tensor]:
    """Run a program. Collective with the engine; local without.

    Returns:
        Parameters in the end, those of the averaged model, how far kept gradients have changed, and how far what
        torch.func gives for the model is from what it gives for the bare one.
    """
    return _Training(program, with_engine).run()


class _Training:
    def __init__(self, program: Program, with_engine: bool) -> None:
        self.program = program
        self.with_engine = with_engine
        self.net = Net(program)
        self.wrap()
        self.loader = self.make_loader(0)
        self.average = AveragedModel(self.model) if program.averaged else None
        self.kept: list[tuple[Tensor, Tensor]] = []
        self.differences = [torch.zeros(1, dtype=torch.float64)]

    def wrap(self) -> None:
        self.model: Any = self.net
        if self.with_engine:
            self.model = lockstep.DistributedDataParallel(self.net, **self.program.options)
        self.make_optimizer()
        for parameter in self.net.parameters():
            if parameter.requires_grad and self.program.hook:
                self.set_hook(parameter)

    def make_optimizer(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE, momentum=0.5)

    def make_loader(self, shift: int) -> Any:
        samples = dataset(self.program, shift)
        if self.with_engine:
            return lockstep.DataLoader(samples, BATCH_SIZE)
        return [[part] for part in samples.tensors[0].split(BATCH_SIZE)]

    def set_hook(self, parameter: nn.Parameter) -> None:
        def in_place(one: Tensor) -> None:
            assert one.grad is not None
            one.grad.mul_(0.75)

        def out_of_place(one: Tensor) -> None:
            assert one.grad is not None
            one.grad = one.grad * 0.75

        if self.program.hook == "tensor":
            parameter.register_hook(lambda gradient: gradient * 0.75)
        else:
            parameter.register_post_accumulate_grad_hook(out_of_place if "out" in self.program.hook else in_place)

    def run(self) -> dict[str, Tensor]:
        for epoch in self.program.epochs:
            self.train_epoch(epoch)
        state = {name: parameter.detach() for name, parameter in self.net.named_parameters()}
        if self.average is not None:
            found = [parameter.detach() for parameter in self.average.parameters()]
            state |= {f"average {number}": parameter for number, parameter in enumerate(found)}
        for number, (gradient, content) in enumerate(self.kept):
            state[f"kept gradient {number}"] = (gradient - content).abs().sum().reshape(1)
        return {**state, "torch.func": torch.cat(self.differences).max().reshape(1)}

    def train_epoch(self, epoch: Epoch) -> None:
        found = batches(epoch, self.loader, lambda: self.make_loader(1), self.evaluate)
        for number, inputs in enumerate(found):
            self.make_pass(epoch.passes[number % len(epoch.passes)], inputs)

    def make_pass(self, one: Pass, inputs: list[Tensor]) -> None:
        if one.event:
            self.happen(one.event, inputs[0])
        frozen = [each for each in self.parameters_of(one.frozen) if each.requires_grad]
        for each in frozen:
            each.requires_grad_(False)
        if one.zero:
            self.optimizer.zero_grad(set_to_none=one.zero == "none")
        with nullcontext() if one.syncs or not self.with_engine else self.model.no_sync():
            loss = self.loss(one, inputs)
            if one.evaluates:
                self.evaluate()
            if one.again:
                loss.backward(retain_graph=True)
            loss.backward()
        self.look_at_gradients(one)
        if one.syncs:
            self.optimizer.step()
            if self.average is not None:
                self.average.update_parameters(self.model)
        if one.keeps and one.zero == "none" and not self.program.options.get("gradient_as_bucket_view"):
            gradients = [each.grad for each in self.net.parameters() if each.grad is not None]
            self.kept += [(gradient, gradient.clone()) for gradient in gradients]
            self.optimizer.zero_grad()
        for each in frozen:
            each.requires_grad_()

    def parameters_of(self, part: str) -> list[nn.Parameter]:
        return list(self.net.get_submodule(part).parameters()) if part else []

    def loss(self, one: Pass, inputs: list[Tensor]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for each in inputs:
            for number in range(one.forwards):
                # Re-entrant checkpoints need an input with a gradient.
                total = total + self.model(each.detach().requires_grad_(), one.heads).mean() * (number + 1)
        return total

    @torch.no_grad()
    def evaluate(self) -> None:
        for (inputs,) in self.loader:
            self.model(inputs, EVERY_HEAD)

    def look_at_gradients(self, one: Pass) -> None:
        for parameter in self.net.parameters():
            if parameter.grad is not None and one.scale == "in place":
                parameter.grad.mul_(0.5)
            if parameter.grad is not None and one.scale == "replace":
                parameter.grad = parameter.grad * 0.5
        if one.scale == "clip" and one.syncs:
            nn.utils.clip_grad_norm_(self.net.parameters(), 0.1)

    def happen(self, event: str, inputs: Tensor) -> None:
        inputs = inputs.detach()
        match event:
            case "functional call":
                values = {name: each.detach() * 2 for name, each in self.model.named_parameters()}
                functional_call(self.model, values, (inputs, EVERY_HEAD))
            case "evaluate":
                with torch.no_grad():
                    self.model.eval()(inputs, EVERY_HEAD)
                self.model.train()
            case "freeze and thaw":
                trained = [each for each in self.net.parameters() if each.requires_grad]
                for each in trained:
                    each.requires_grad_(False)
                self.model(inputs, EVERY_HEAD)
                for each in trained:
                    each.requires_grad_()
            case "assign" | "assign and wrap again":
                self.net.load_state_dict(copy.deepcopy(self.net.state_dict()), assign=True)
                self.net.tie()
                (self.wrap if event.endswith("again") else self.make_optimizer)()
            case "thaw what was frozen":
                self.net.frozen.requires_grad_()
            case "fail":
                self.fail(inputs)
            case _:
                self.transform(event, inputs)

    def transform(self, event: str, inputs: Tensor) -> None:
        """What torch.func gives for the model, on this rank, compared with what it gives for the bare one."""

        def loss(model: nn.Module, values: dict[str, Tensor]) -> Tensor:
            return functional_call(model, values, (inputs, EVERY_HEAD)).mean()  # type: ignore[no-any-return]

        def transformed(model: nn.Module) -> list[Tensor]:
            values = {name: each.detach() for name, each in model.named_parameters()}
            match event:
                case "gradient by torch.func":
                    return list(grad(lambda own: loss(model, own))(values).values())
                case "gradient of inputs by torch.func":
                    return [grad(lambda own: model(own, EVERY_HEAD).mean())(inputs)]
                case "models by torch.func.vmap":
                    several = {name: torch.stack([each, each * 2]) for name, each in values.items()}
                    return [vmap(lambda own: loss(model, own))(several)]
            raise AssertionError(event)

        for ours, bare in zip(transformed(self.model), transformed(self.net), strict=True):
            self.differences += [(ours - bare).abs().flatten().double()]

    def fail(self, inputs: Tensor) -> None:
        """A backward pass that ends in the middle, on all ranks, whose gradients are thrown away."""
        self.optimizer.zero_grad()

        def refuse(_: Tensor) -> None:
            raise BackwardError

        handle = self.net.trunk[0].bias.register_hook(refuse)
        try:
            self.model(inputs.requires_grad_(), EVERY_HEAD).mean().backward()
        except BackwardError:
            pass
        else:
            raise AssertionError("it did not fail")
        finally:
            handle.remove()
        self.optimizer.zero_grad()
