"""A language model on sentences of different lengths: alone, or `lockstep run --nproc 3 examples/language_model.py`.

The loss is the mean over words, of which ranks hold different numbers: sentences are padded, and padding does not count
(`ignore_index`). `lockstep.mean` divides by the words of all ranks, so that every step is that of one process, and the
printed losses are the same at any number of ranks.
"""

import random

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

import lockstep

NOUNS, VERBS = ["dog", "cat", "bird", "child"], ["sees", "hears", "chases", "loves"]
WORDS = ["<end>", "the", "a", "that", *NOUNS, *VERBS]
IGNORED = -100  # what cross_entropy leaves out by itself


def make_sentence(draw: random.Random) -> list[str]:
    """Such as "a dog hears the cat that sees a bird": 5, 9, 13, or more words."""
    words = ["the", draw.choice(NOUNS)]
    while True:
        words += [draw.choice(VERBS), draw.choice(["the", "a"]), draw.choice(NOUNS)]
        if draw.random() < 0.5:
            return words
        words += ["that"]


def encode(words: list[str]) -> torch.Tensor:
    return torch.tensor([0, *(WORDS.index(word) for word in words), 0])


def collate(sentences: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs, and the word that follows each, int64 [sentences, longest of these]."""
    inputs = pad_sequence([sentence[:-1] for sentence in sentences], batch_first=True)
    return inputs, pad_sequence([sentence[1:] for sentence in sentences], batch_first=True, padding_value=IGNORED)


class LanguageModel(nn.Module):
    """Tells from the words before which one follows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(WORDS), 24)
        self.memory = nn.GRU(24, 48, batch_first=True)  # causal: padding comes last, and reaches nothing before it
        self.out = nn.Linear(48, len(WORDS))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.out(self.memory(self.embed(inputs))[0])


def sum_and_count(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss summed over this rank's words, and their number."""
    logits = model(inputs)
    total = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return total, (labels != IGNORED).sum()


def main() -> None:
    draw = random.Random(0)
    sentences = [encode(make_sentence(draw)) for _ in range(550)]
    torch.manual_seed(0)
    with lockstep.init() as world:
        model = lockstep.DistributedDataParallel(LanguageModel().to(world.device))
        # Each rank steps a share, with the answer of torch.optim.SGD: less memory, and for large models less time.
        optimizer = lockstep.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.3, momentum=0.9)
        options = {"batch_size": 32, "collate_fn": collate, "device": world.device}
        train_loader = lockstep.DataLoader(sentences[:450], shuffle=True, seed=0, **options)
        held_out_loader = lockstep.DataLoader(sentences[450:], evaluation=True, **options)
        for epoch in range(4):
            trained, held_out = lockstep.metrics.Mean(), lockstep.metrics.Mean()
            model.train()
            for inputs, labels in train_loader:
                total, count = sum_and_count(model, inputs, labels)
                loss = lockstep.mean(total, count)  # not total / count, the mean over the words of this rank
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                trained.update(loss, weight=count)
            model.eval()
            with torch.no_grad():
                for inputs, labels in held_out_loader:
                    total, count = sum_and_count(model, inputs, labels)
                    held_out.update(total / count, weight=count)
            of_training, of_held_out = lockstep.metrics.synchronize(trained, held_out)
            if world.rank == 0:
                losses = f"loss {of_training:.5f} per word, held out {of_held_out:.5f}"
                print(f"epoch {epoch}: {losses}, on {world.world_size} process(es)")


if __name__ == "__main__":
    main()
