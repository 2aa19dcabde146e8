"""The meaning of each cause, and advice, in a table. `{name}` stands for a measured value.

A key is the name of the cause, followed by a space and a variant if it has several meanings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Difference", "difference"]


@dataclass(frozen=True)
class Difference:
    """Where N ranks differ from one process, and why.

    Attributes:
        step: number of the optimizer step, from 1; 0 if it belongs to none.
        stage: the stage, as in the table of docs/verify.md.
        cause: a short name, the same in every report.
        measured: the measurement, with numbers.
        meaning: its interpretation.
        advice: what to write instead.
        lines: lines of the script that fetched, called, computed or wrote the values that differ.
    """

    step: int
    stage: str
    cause: str
    measured: str
    meaning: str
    advice: str
    lines: tuple[str, ...] = ()


def difference(
    step: int, stage: str, key: str, measured: str, lines: tuple[str, ...] = (), **values: Any
) -> Difference:
    """A difference, in the words of its cause.

    Args:
        step: see `Difference`, also for `stage`, `measured` and `lines`.
        key: key in the table.
        values: values for the placeholders.
    """
    meaning, advice = (text.format(**values) for text in _WORDS[key])
    return Difference(step, stage, key.partition(" ")[0], measured, meaning, advice, lines)


_DECIDE = "decide what is skipped, and when to step, by what all ranks have (lockstep.mean, lockstep.sum)"
_WRAP = "wrap the model that holds them in DistributedDataParallel, and call that"
_UNEVEN = "the ranks had {rows} samples, and their means count {given} of the whole"
_COUNT = (
    "the ranks' losses weigh {weights} in one process, and their samples {shares}: the loss is divided by a count that "
    "ranks have more or less of (tokens, a mask, a selection, weights of classes)"
)
_NOT_LINEAR = (
    "no weights of the ranks make one process's gradient: the loss compares samples with each other, takes a "
    "statistic of the rank's rows (a mean, a deviation, a maximum, advantages, weights), or mixes terms that are "
    "divided by different things"
)
_WRITE_MEANS = (
    "lockstep.all_gather(output) before samples are compared, and for a mean of each feature; lockstep.mean(total, "
    "count) for each number that is a mean, and of which something else than a sum is made; lockstep.sum for terms "
    "that are sums"
)

_WORDS = {
    # steps
    "fails": (
        "the script cannot train on this number of ranks as it is written",
        "what the error says; where it asks how many samples a pass holds, first see whether samples are compared "
        "with each other there",
    ),
    "number-of-steps": (
        "ranks step, skip or stop by what they have themselves: a length, a size or a loss of their own part",
        "decide by what all ranks have: lockstep.mean(loss * len(y), len(y)), lockstep.any(…), the loader's length",
    ),
    # samples
    "no-sampler": (
        "nobody splits the data: each rank walks all of it",
        "give the loader a DistributedSampler, or use lockstep.DataLoader(dataset, batch_size=GLOBAL), which takes a "
        "sampler of your own, too; a stream of samples takes each world_size-th one, from that of its rank on",
    ),
    "order": (
        "the ranks were given other samples in this step than one process: another order, a part of the data for each "
        "rank by itself, or what collate_fn makes of other rows",
        "let one order be split batch by batch: lockstep.DataLoader, or a DistributedSampler with one seed",
    ),
    "padded": (
        "{extra} came twice: the last batch was filled up so that all ranks get equally many",
        "leave the last batch out (drop_last=True), or use lockstep.DataLoader, which splits it without filling it up",
    ),
    "drawn samples": (
        "what the dataset makes of an index differs: it draws from each rank's own stream (augmentation), or "
        "collate_fn computes it from the rank's rows",
        "draw by sample (lockstep.DataLoader seeds each sample's draws by its index), and let collate_fn join only",
    ),
    "split": (
        "the ranks have the same samples in other places: each drew its own split or order of the data",
        "draw it by a generator with one seed: random_split(…, generator=torch.Generator().manual_seed(0))",
    ),
    "batch-size": (
        "that is the size of the batch of all ranks together, and it depends on the number of ranks",
        "lockstep.DataLoader(dataset, batch_size=GLOBAL), neither divided nor multiplied by the number of ranks",
    ),
    "collate": (
        "lockstep.DataLoader fetches the samples of one process, so what is made of them differs: collate_fn mixes the "
        "rows that a rank holds, or leaves some out, or something is drawn that no sample owns",
        "let collate_fn join samples and nothing else; mix after lockstep.all_gather, or draw in __getitem__",
    ),
    "skips": (
        "ranks skip batches, or accumulate over another number of them, by what they have themselves",
        _DECIDE,
    ),
    "set-epoch": (
        "set_epoch is called on some ranks alone, so that their orders differ",
        "sampler.set_epoch(epoch) at the beginning of each epoch, on all ranks",
    ),
    "set-epoch never": (
        "a DistributedSampler draws its order from the epoch that it is told, and nobody tells it",
        "sampler.set_epoch(epoch) at the beginning of each epoch",
    ),
    "set-epoch anew": (
        "the loader is made anew for each epoch, and begins with the order of epoch 0",
        "make it once, before the epochs (and with a DistributedSampler, sampler.set_epoch(epoch) in each)",
    ),
    # inputs
    "drawn inputs": (
        "each rank draws its own numbers, where one process draws once for all samples",
        "draw a row for each sample (randn(len(x), …)), or once per step from a generator that all ranks seed alike",
    ),
    "batch inputs": (
        "they are computed from the other rows of a rank's batch (mixed with them, or normalised by their mean or "
        "maximum), or cut by a constant number of rows",
        "compute it from the batch of all ranks (lockstep.all_gather, lockstep.mean), or for each sample in the "
        "dataset",
    ),
    # outputs
    "batch-norm": (
        "it normalizes over this rank's rows, and one process over all",
        "lockstep.convert_sync_batchnorm(model) before the model is wrapped (torch.nn.SyncBatchNorm on GPUs)",
    ),
    "padding outputs": (
        "the model sees the padding, which a rank makes as long as the longest of its own samples",
        "pad to one length, or mask the padding",
    ),
    "mode": (
        "parts of the model are in eval() on some ranks alone, where dropout and batch normalization are off",
        "call model.train() on all ranks, after an evaluation by one of them too",
    ),
    "drawn outputs": (
        "each rank draws its own numbers, within forward() or handed to it",
        "draw them from a generator that all ranks seed alike",
    ),
    "batch outputs": (
        "rows are compared with each other or mixed within forward(), or a statistic of this rank's rows is taken "
        "there",
        "lockstep.all_gather(x) where the rows meet, or lockstep.mean(total, count) for a statistic",
    ),
    # loss
    "passes": ("ranks skip batches, or accumulate over another number of them, than one process", _DECIDE),
    "closure": (
        "{kind} decides by the loss that the closure returns, which is that of each rank's own samples",
        "return lockstep.mean(loss * len(y), len(y)) from the closure, after loss.backward()",
    ),
    "count": (_COUNT, "lockstep.mean(total, count)"),
    "count of a part": (
        "in the gradients of {names} the ranks' losses weigh {weights} in one process, and their samples {shares}: a "
        "part of the loss is divided by a count that ranks have more or less of (positives, tokens, a mask), and "
        "another part is not",
        "lockstep.mean(total, count) for that part",
    ),
    "count times": (
        _COUNT + ", and multiplied by the number of ranks",
        "lockstep.mean(total, count), and leave the number of ranks out",
    ),
    "count zero": (
        "the loss of rank {rank} is no number: it is divided by a count, which is 0 for that rank's samples",
        "lockstep.mean(total, count)",
    ),
    "function-of-mean": (
        "{odd}: the loss is a function of a mean over the batch (a root, a logarithm, a ratio, a threshold), or of a "
        "number of the rank's own rows",
        "take the mean of all ranks first: lockstep.mean(total, count), and then the function of it",
    ),
    "extreme": (
        "one rank's loss makes the whole gradient of one process (weights {weights}): the loss takes one value out of "
        "the batch, such as a maximum or median, or is cut off",
        "lockstep.all_gather(values) before max() or median()",
    ),
    "padding": (
        "the loss or the model sees the padding, which a rank makes as long as the longest of its own samples; or, if "
        "that is masked in both, the loss adds terms that are divided by different counts",
        "pad to one length, or mask the padding; and lockstep.mean(total, count) for each term",
    ),
    "threshold": (
        "the gradient of {who} is zero, and others are not: the loss is skipped, cut off or multiplied by zero by a "
        "value of the rank's own samples",
        "decide by what all ranks have: lockstep.mean(loss * len(y), len(y)), lockstep.any(…)",
    ),
    "not-linear": (_NOT_LINEAR, _WRITE_MEANS),
    "not-linear gradients": (
        _NOT_LINEAR + "; or a hook, or the backward of an autograd.Function, changes gradients by what a rank has "
        "itself",
        _WRITE_MEANS,
    ),
    "drawn": (
        "each rank draws its own numbers, which the loss may depend on. If it does not: {meaning}",
        "draw them once per step, from a generator that all ranks seed alike; else {advice}",
    ),
    "kept-state": (
        "the steps before were those of one process, and no mean of the ranks makes its gradient now: something that "
        "is kept from step to step (a centre, a queue, weights by earlier losses) follows one rank's rows; or a term "
        "came in, or counts were equal by chance before, and the loss compares samples, is cut off, or adds terms that "
        "are divided by different counts",
        "update what is kept by the samples of all ranks (lockstep.all_gather(rows)); in the loss, lockstep.mean("
        "total, count) for each mean, lockstep.sum for sums, lockstep.all_gather(output) before samples are compared",
    ),
    # gradients
    "sum": (
        "the loss is a sum over samples: averaging makes a mean of the ranks' sums",
        "lockstep.sum(loss), or divide by the number of samples; lockstep.global_loss(loss) where gradients are "
        "divided later",
    ),
    "factor": (
        "every rank's part counts {factor} times what it does in one process: the loss is multiplied or divided by a "
        "number that depends on the number of ranks or on a rank's rows, or gradients are added and not averaged "
        "(clipping by norm hides that, but for the 1e-6 that it adds)",
        "leave the number of ranks out of the loss, or lockstep.mean(total, count) for what is divided by a count",
    ),
    "whole-batch": (
        "each rank's loss is that of the whole batch, by collectives of torch, and the averaging takes it for that of "
        "the rank's own samples",
        "lockstep.all_gather(output) in place of torch's collectives",
    ),
    "before-averaging": (
        "the weighted mean of what the ranks computed is one process's gradient, and what the optimizer took is not: "
        "gradients were changed in each rank before they were averaged (clipped, unscaled, rounded), or divided once "
        "more after",
        "clip and unscale after the averaging: after backward(), and with Horovod between optimizer.synchronize() and "
        "step()",
    ),
    "after-averaging": (
        "the gradients were those of one process when backward() returned, and were then changed otherwise than there: "
        "clipped to a limit, or multiplied by a factor, that depends on the number of ranks",
        "leave the number of ranks out of max_norm, clip_value, and whatever else changes gradients",
    ),
    "uneven": (
        _UNEVEN,
        "give all ranks equally many samples in each step (drop_last=True), or train with lockstep.DataLoader and "
        "lockstep.DistributedDataParallel, which weigh ranks by their samples; model.samples(n) says how many a pass "
        "holds",
    ),
    "uneven means": (
        _UNEVEN,
        "lockstep.mean(loss * len(y), len(y)): a rank's part counts as much as it is given to",
    ),
    "uneven loader": (
        _UNEVEN,
        "with model.samples(0 if lockstep.is_filler(batch) else len(x)): output = model(x), where collate_fn or the "
        "loop leaves samples out",
    ),
    "changed": (
        "gradients were averaged, and then each rank changed its own (noise, a limit or a factor of its own)",
        "change them by what all ranks have (lockstep.mean), and draw from a generator that all ranks seed alike",
    ),
    "own-steps": (
        "each rank steps by its own gradients, and parameters are averaged or combined afterwards (local SGD, Adasum), "
        "which is another algorithm than one process's",
        "average gradients before each step where the answer of one process is wanted",
    ),
    "unwrapped": ("gradients are not averaged: no engine was made", _WRAP),
    "unwrapped part": (
        "no engine holds {names}, and so nobody averages their gradients",
        "let one module hold the model and the criterion, and wrap that once requires_grad is set",
    ),
    "inner-model": (
        "the model within the engine was called, and the engine was not: it averages what its own forward() leads to",
        "call the wrapped model, not model.module",
    ),
    "past-engine": (
        "a part of these gradients came past the engine: by another backward pass, by hand, or under no_sync",
        "compute it with the wrapped model, and add up all losses before one backward() that averages; or leave "
        "no_sync() before the last backward() of each window",
    ),
    "not-averaged": (
        "the engine was called, and averaged nothing: under no_sync up to the step, by gradients taken by hand "
        "(torch.autograd.grad), in a group of one rank, by a model that was moved to another device or type after it "
        "was wrapped, or since parameters that the step does not use kept it waiting",
        "let the last backward pass before each step average (outside of no_sync), take gradients by backward(), and "
        "move the model before it is wrapped; where parameters go unused, find_unused_parameters=True",
    ),
    # parameters and buffers
    "ranks-differ": (
        "the ranks have other parameters {when}: each has drawn, loaded or changed its own, or they were averaged by "
        "nobody",
        "draw what changes parameters from a generator that all ranks seed alike, let all of them load the same file, "
        "and " + _WRAP,
    ),
    "moved between": (
        "they are changed between the steps by what a rank has itself, such as weights that are put back or replaced "
        "by its own samples",
        "make the change of what all ranks have: lockstep.mean(total, count), lockstep.all_gather(rows)",
    ),
    "moved": (
        "they are changed within the step by what each rank has itself, such as its own gradients (sharpness-aware "
        "steps, perturbations, inner loops)",
        "make the change of what all ranks have: gradients that are averaged, so outside of no_sync",
    ),
    "settings": (
        "{name} depends on the number of ranks (a schedule that steps once for each, as one that Accelerate has "
        "prepared), or on what one rank has seen (a schedule by its own loss)",
        "set {name} without the number of ranks, and let schedules go by what all ranks have (lockstep.mean)",
    ),
    "settings on some": (
        "{name} is set or scheduled on some ranks alone (if rank == 0: scheduler.step()), or by what one has seen",
        "set {name} on all ranks alike, by what all of them have (lockstep.mean)",
    ),
    "optimizer": (
        "the same gradients make other steps: {kind} goes by something that each rank has of its own, such as a state "
        "that one rank alone has loaded",
        "give the optimizer what all ranks have; a closure returns lockstep.mean(loss * len(y), len(y))",
    ),
    "buffers": (
        "they follow the samples of one rank, where one process takes those of the whole batch",
        "update them by the samples of all ranks (lockstep.all_gather within forward()); for BatchNorm "
        "lockstep.convert_sync_batchnorm",
    ),
    # what follows
    "padded-evaluation": (
        "{extra} counted twice: the last batch was filled up so that all ranks get equally many",
        "lockstep.DataLoader(…, evaluation=True), or gather_for_metrics: each sample on one rank",
    ),
    "metric": (
        "the metric is that of one rank's samples, or a mean of the ranks' metrics, of which each counts alike{more}",
        "lockstep.metrics, or add up numerators and denominators of all ranks before dividing (lockstep.mean(total, "
        "count))",
    ),
    "other-weights": (
        "they are no optimizer's, and follow something else than in one process: the number of ranks (a decay), or "
        "what one rank has",
        "leave the number of ranks out of it, and let it follow parameters alone, or what all ranks have",
    ),
    "other-steps": (
        "what decides when to save is a number of rank 0's samples, such as the best metric so far",
        "decide by the metric of all ranks: lockstep.metrics, lockstep.mean(total, count)",
    ),
    "all-ranks-save": (
        "they write one file at the same time, which one process writes alone: it may end up damaged",
        "if rank == 0: torch.save(…), or lockstep.checkpoint.save, which all ranks call",
    ),
}
