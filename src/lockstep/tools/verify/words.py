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


_FAILS = "the script cannot train on this number of ranks as it is written"
_DECIDE = "agree across ranks on what to skip and when to step (lockstep.any, lockstep.all; lockstep.mean for a loss)"
_WRAP = "wrap their model in DistributedDataParallel, and call the wrapped model"
_UNEVEN = "the ranks had {rows} samples, but their means were weighted {given}"
_COUNT = (
    "in one process's gradient, the ranks' losses have the weights {weights}, but their shares of the samples "
    "are {shares}: the loss is divided by a count that differs between ranks (tokens, a "
    "mask, a selection, class weights)"
)
_NOT_LINEAR = (
    "no weighting of the ranks gives one process's gradient: the loss compares samples "
    "with each other, uses a statistic of the rank's rows (a mean, a deviation, a "
    "maximum, advantages, weights), mixes terms with different divisors, or has a "
    "coefficient that depends on the number of ranks"
)
_WRITE_MEANS = (
    "lockstep.all_gather(output) before samples are compared, and for a per-feature "
    "mean; lockstep.mean(total, count) for each mean that goes into anything but a sum; "
    "lockstep.sum for terms that are sums"
)

_WORDS = {
    # steps
    "fails": (_FAILS, "what the error advises"),
    "fails waits": (_FAILS, "let all ranks make the same calls in the same order"),
    "fails samples": (
        _FAILS,
        "check first whether that pass compares samples with each other; if it does not, what the error advises",
    ),
    "number-of-steps": (
        "each rank decides for itself when to step, skip or stop: by a length, size or loss of its own part; or the "
        "ranks' sampler leaves out samples that one process trains on",
        "agree across ranks: lockstep.mean(loss * len(y), len(y)), lockstep.any(…), the loader's length; drop_last "
        "for the sampler and the loader, or for neither",
    ),
    # samples
    "no-sampler": (
        "the data is not split: every rank reads all of it",
        "give the loader a DistributedSampler, or use lockstep.DataLoader(dataset, "
        "batch_size=GLOBAL), which also takes your own sampler; for a stream, let each rank take "
        "every world_size-th sample, starting at its rank",
    ),
    "no-sampler drawn": (
        "ranks draw the same samples, from streams with one seed, which other ranks have moved on",
        "seed what draws samples by rank, such as seed + rank",
    ),
    "order": (
        "the ranks got different samples in this step from one process: another order, a "
        "separate part of the data per rank, values prepared from each rank's part (a scaler), or a collate_fn that "
        "combined other rows",
        "split one order batch by batch: lockstep.DataLoader, or a DistributedSampler with one seed; a sampler "
        "inside it needs a generator with one seed, too",
    ),
    "padded": (
        "{extra} used twice: the last batch was padded so that all ranks get the same number",
        "drop the last batch (drop_last=True for the DistributedSampler, too), or use lockstep.DataLoader, which "
        "splits it without padding",
    ),
    "drawn samples": (
        "the same index gives different data: it is drawn from each rank's own stream (augmentation), collate_fn "
        "computes it from the rank's rows, or each rank prepared the data by its own part (a scaler, a vocabulary)",
        "draw per sample (lockstep.DataLoader seeds each sample's draws by its index), let collate_fn only join, and "
        "prepare the data alike on all ranks",
    ),
    "split": (
        "the same samples have different indices: each rank drew its own split or order of the data, or selected "
        "samples by its own part of them",
        "draw it with a seeded generator: random_split(…, generator=torch.Generator().manual_seed(0)); select by the "
        "values of all samples (lockstep.all_gather)",
    ),
    "batch-size": (
        "lockstep.DataLoader's batch_size counts the samples of all ranks together, but the script computes it from "
        "the number of ranks",
        "lockstep.DataLoader(dataset, batch_size=GLOBAL), neither divided nor multiplied by the number of ranks",
    ),
    "collate": (
        "lockstep.DataLoader fetches the samples of one process, but the batches differ: "
        "collate_fn mixes a rank's rows or drops some, or random numbers are drawn that "
        "belong to no sample",
        "let collate_fn only join samples; mix after lockstep.all_gather, or draw in __getitem__",
    ),
    "skips": (
        "each rank decides for itself which batches to skip, or how many to accumulate",
        _DECIDE,
    ),
    "set-epoch": (
        "set_epoch is called on some ranks only, so their orders differ",
        "sampler.set_epoch(epoch) at the start of each epoch, on all ranks",
    ),
    "set-epoch never": (
        "a DistributedSampler shuffles by its epoch, and set_epoch is never called",
        "sampler.set_epoch(epoch) at the start of each epoch",
    ),
    "set-epoch alone": (
        "the ranks draw one order for all epochs, and one process draws a new one for each",
        "lockstep.DataLoader, or a sampler whose order depends on the epoch: sampler.set_epoch(epoch) in each",
    ),
    "set-epoch anew": (
        "the loader is recreated for each epoch, and starts with the order of epoch 0",
        "create it once, before the epochs, and call sampler.set_epoch(epoch) in each",
    ),
    # inputs
    "drawn inputs": (
        "each rank draws its own numbers; one process draws once for all samples",
        "draw one row per sample (randn(len(x), …)), or once per step from a generator with one seed on all ranks",
    ),
    "batch inputs": (
        "they depend on the other rows of the rank's batch (mixed with them, or normalized by their mean "
        "or maximum) or of its part of the data (a vocabulary), or are sliced at a fixed number of rows",
        "compute them from the batch of all ranks (lockstep.all_gather, lockstep.mean), or per sample in the dataset",
    ),
    # outputs
    "batch-norm": (
        "it normalizes over this rank's rows, not over the whole batch",
        "lockstep.convert_sync_batchnorm(model) before wrapping the model (torch.nn.SyncBatchNorm on GPUs)",
    ),
    "padding outputs": (
        "the model sees the padding, and each rank pads to its own longest sample",
        "pad to one length, or mask the padding",
    ),
    "mode": (
        "parts of the model are in eval() on some ranks only, so dropout and batch normalization are off there",
        "call model.train() on all ranks, even if only one has evaluated",
    ),
    "drawn outputs": (
        "each rank draws its own numbers, in forward() or passed to it",
        "draw them from a generator with one seed on all ranks",
    ),
    "batch outputs": (
        "forward() compares or mixes rows, or computes a statistic of this rank's rows",
        "lockstep.all_gather(x) where rows are combined, or lockstep.mean(total, count) for a statistic",
    ),
    # loss
    "passes": ("ranks skip batches, or accumulate a different number of them from one process", _DECIDE),
    "closure": (
        "{kind} uses the loss that the closure returns, which covers only the rank's own samples",
        "return lockstep.mean(loss * len(y), len(y)) from the closure, after loss.backward()",
    ),
    "count": (_COUNT, "lockstep.mean(total, count)"),
    "count of a part": (
        "in one process's gradients of {names}, the ranks' losses have the weights {weights}, "
        "but their shares of the samples are {shares}: part of the loss is divided by a "
        "count that differs between ranks (positives, tokens, a mask), and another part is "
        "not",
        "lockstep.mean(total, count) for that part",
    ),
    "count of a part later": (
        "earlier steps matched one process; now, in one process's gradients of {names}, the ranks' losses have the "
        "weights {weights}, but their shares of the samples are {shares}: part of the loss is divided by a count that "
        "differs between ranks (positives, tokens, a mask), or by state kept between steps (a running mean of a rank's "
        "losses)",
        "lockstep.mean(total, count) for that part; update the state from the samples of all ranks",
    ),
    "count times": (
        _COUNT + ", and multiplied by the number of ranks",
        "lockstep.mean(total, count), without the number of ranks",
    ),
    "count zero": (
        "the loss of rank {rank} is not finite: it is divided by a count, which is 0 for that rank's samples",
        "lockstep.mean(total, count)",
    ),
    "function-of-mean": (
        "{odd}: the loss is a function of a mean over the batch (a root, a logarithm, a "
        "ratio, a threshold), or of a number from the rank's own rows",
        "average over all ranks first, with lockstep.mean(total, count), then apply the function",
    ),
    "extreme": (
        "one rank's loss gives the whole gradient of one process (weights {weights}): the "
        "loss picks one value from the batch, such as a maximum or median, or is clamped",
        "lockstep.all_gather(values) before max() or median()",
    ),
    "padding": (
        "the loss or the model sees the padding, and each rank pads to its own longest "
        "sample; or, if both mask it, the loss adds terms that are divided by different "
        "counts, or compares samples",
        "pad to one length, or mask the padding; lockstep.mean(total, count) for each term; and "
        "lockstep.all_gather(output) before samples are compared",
    ),
    "threshold": (
        "the gradient of {who} is zero, others are not: the rank's own samples decide "
        "whether the loss is skipped, clamped or multiplied by zero",
        "agree across ranks: lockstep.mean(loss * len(y), len(y)), lockstep.any(…)",
    ),
    "not-linear": (_NOT_LINEAR, _WRITE_MEANS),
    "not-linear later": (
        _NOT_LINEAR + ". Or, since earlier steps were those of one process, state kept between steps (counts, "
        "thresholds, a queue) follows one rank's rows",
        _WRITE_MEANS + "; state from the samples of all ranks",
    ),
    "not-linear gradients": (
        _NOT_LINEAR + "; or rows gathered from other ranks pass no gradients back to them; or a hook, or the backward "
        "of an autograd.Function, changes gradients by a rank's own values",
        _WRITE_MEANS,
    ),
    "not-linear unseen": (
        "backward() was not called, so nothing shows how the ranks' gradients make up one process's: they are divided "
        "by a count that differs between ranks, changed on each rank before averaging, or the loss compares samples",
        "average each gradient over the ranks before it is changed; in the loss, " + _WRITE_MEANS,
    ),
    "drawn": (
        "each rank draws its own numbers, which may affect the loss. If they do not: {meaning}",
        "draw them once per step, with one seed on all ranks; otherwise {advice}",
    ),
    "kept-state model": (
        "that model (a target, a teacher, an average of weights) is kept between steps, and follows the number of "
        "ranks, or one rank's values",
        "update it alike on all ranks: after numbers of steps and with decays that do not depend on the number of "
        "ranks, from parameters that are equal on all",
    ),
    "kept-state": (
        "earlier steps matched one process, but now no weighting of the ranks gives its "
        "gradient. Either state kept between steps (a centre, a queue, a teacher, weights by "
        "earlier losses) follows one rank's rows or the number of ranks; or a term was added, "
        "or counts were equal by chance before, and the loss compares samples, is clamped, or "
        "adds terms with different divisors",
        "update that state from the samples of all ranks (lockstep.all_gather(rows)), whatever "
        "their number; in the loss, lockstep.mean(total, count) for each mean, lockstep.sum for "
        "sums, lockstep.all_gather(output) before samples are compared",
    ),
    # gradients
    "sum": (
        "the loss is a sum over samples; averaging gives the mean of the ranks' sums. Or a mean is divided by the "
        "number of ranks, as averaging does, too",
        "lockstep.sum(loss), or divide by the number of samples, and not by that of ranks; lockstep.global_loss(loss) "
        "if gradients are divided later",
    ),
    "factor": (
        "each rank counts {factor} times as much as in one process: the loss is multiplied "
        "or divided by a number that depends on the number of ranks or on a rank's rows, or "
        "gradients are summed instead of averaged (clipping by norm hides this, except for "
        "the 1e-6 that it adds)",
        "leave the number of ranks out of the loss, use lockstep.mean(total, count) for what is divided by a count, "
        "or divide gradients that the script sums over the ranks by their number",
    ),
    "whole-batch": (
        "each rank computes the loss of the whole batch with torch's collectives; averaging "
        "assumes a loss over the rank's own samples",
        "lockstep.all_gather(output) instead of torch's collectives",
    ),
    "before-averaging one": (
        "the weighted mean of the ranks' gradients is that of one process, but all ranks used the gradients of rank "
        "{rank} alone, as after a broadcast",
        "average them: dist.all_reduce(gradient), divided by the number of ranks, or wrap the model",
    ),
    "before-averaging": (
        "the weighted mean of the ranks' gradients is that of one process, but the optimizer "
        "used something else: gradients were changed on each rank before averaging (clipped, "
        "unscaled, rounded, not set to zero on some), or divided again afterwards",
        "clip and unscale after averaging: after backward(), and with Horovod between "
        "optimizer.synchronize() and step(); call zero_grad() on all ranks",
    ),
    "after-averaging": (
        "the gradients matched one process when backward() returned, and were then changed "
        "differently: clipped to a limit, or multiplied by a factor, that depends on the "
        "number of ranks",
        "leave the number of ranks out of max_norm, clip_value and anything else that changes gradients",
    ),
    "uneven": (
        _UNEVEN,
        "give all ranks the same number of samples in each step (drop_last=True), or use "
        "lockstep.DataLoader and lockstep.DistributedDataParallel, which weight ranks by "
        "samples; model.samples(n) says how many a pass holds",
    ),
    "uneven means": (
        _UNEVEN,
        "lockstep.mean(loss * len(y), len(y)), which weights each rank by its len(y)",
    ),
    "uneven engine": (
        _UNEVEN,
        "lockstep.DistributedDataParallel(model), which weights ranks by the samples that lockstep.DataLoader gives "
        "them; other engines average ranks equally",
    ),
    "uneven loader": (
        _UNEVEN,
        "with model.samples(0 if lockstep.is_filler(batch) else len(x)): output = model(x), "
        "if collate_fn or the loop drops samples",
    ),
    "changed": (
        "gradients were averaged, and then each rank changed its own (noise, or its own limit or factor)",
        "change them by values of all ranks (lockstep.mean), and draw from a generator with one seed on all ranks",
    ),
    "own-steps": (
        "each rank steps with its own gradients, and parameters are averaged or combined "
        "afterwards (local SGD, Adasum): the steps of one process only with plain SGD, averaged after each step",
        "average gradients before each step if you want the answer of one process",
    ),
    "unwrapped": ("no gradient is averaged: no model was wrapped", _WRAP),
    "unwrapped some": (
        "these gradients are not averaged: no model was wrapped; if the script averages by itself, it leaves some out, "
        "such as those that are None on a rank (if p.grad is not None)",
        _WRAP + "; or average zeros where a rank has no gradient, so that all ranks make the same calls",
    ),
    "unwrapped part": (
        "no wrapped model holds {names}, or they were frozen when it was wrapped, so their gradients are not averaged",
        "wrap their model, or put it into one module with the wrapped one, and wrap after requires_grad is set",
    ),
    "inner-model": (
        "the inner model was called instead of the wrapper, which averages only what its own forward() computes",
        "call the wrapped model, not model.module",
    ),
    "past-engine": (
        "part of these gradients bypassed the wrapper: by another backward pass, by hand, or under no_sync",
        "compute them with the wrapped model, and add up all losses before one backward() "
        "that averages; or leave no_sync() before the last backward() of each window",
    ),
    "not-averaged": (
        "the wrapper was called, but averaged nothing: no_sync lasted until the step, "
        "gradients came from torch.autograd.grad or from a backward() within forward(), the group "
        "has one rank, the model was moved to another device or dtype after it was wrapped, or "
        "the wrapper still waited for parameters that the step does not use",
        "run the last backward pass before each step outside of no_sync, compute gradients with "
        "backward() after the model has returned, and move the model before wrapping it; for unused "
        "parameters, find_unused_parameters=True",
    ),
    # parameters and buffers
    "ranks-differ": (
        "the ranks have different parameters {when}: each drew, loaded or changed its own, or they were never averaged",
        "draw changes of parameters from a generator with one seed on all ranks, load the "
        "same file on all of them, and " + _WRAP,
    ),
    "ranks-differ untrained": (
        "the ranks have different parameters in a model that no optimizer trains: it is updated, drawn or loaded on "
        "some ranks only (if rank == 0: …), or by each rank's own values",
        "update it on all ranks, from values that are the same on all of them",
    ),
    "moved between": (
        "they are changed between the steps by a rank's own values, such as weights that are "
        "restored or replaced by its own samples",
        "compute the change from all ranks: lockstep.mean(total, count), lockstep.all_gather(rows)",
    ),
    "moved": (
        "they are changed within the step by each rank's own values, such as its gradients "
        "(sharpness-aware steps, perturbations, inner loops)",
        "compute the change from all ranks: from averaged gradients, so outside of no_sync",
    ),
    "moved called": (
        "the model changes them when it is called, where it sees the rank's own rows (an Embedding with max_norm, "
        "weights that forward() updates)",
        "change them alike on all ranks: after the step, and for all rows",
    ),
    "settings": (
        "{name} depends on the number of ranks (a schedule that steps once per rank, as "
        "Accelerate's prepared ones do), or on one rank's data (a schedule by its own loss)",
        "set {name} independently of the number of ranks, and schedule by all ranks' values (lockstep.mean)",
    ),
    "ranks-differ alone": (
        "the script creates no process group, so each rank trains by itself; DataParallel is for one process",
        "torch.distributed.init_process_group or lockstep.init, a sampler that splits the data, and "
        "DistributedDataParallel",
    ),
    "settings by size": (
        "the schedule is computed from the batch size of a rank, as if one process trained on it: it is longer or "
        "slower than the steps that the ranks take",
        "count steps by len(loader), or multiply the batch size by the number of ranks: len(data) // (batch * world)",
    ),
    "size": (
        "the script computes a number from the batch size of a rank, such as a learning rate, a decay, or a "
        "coefficient that grows with the samples seen",
        "multiply the batch size by the number of ranks wherever it stands for the samples of a step",
    ),
    "settings on some": (
        "{name} is set or scheduled on some ranks only (if rank == 0: scheduler.step()), or by one rank's data",
        "set {name} on all ranks, from all ranks' values (lockstep.mean)",
    ),
    "optimizer": (
        "the same gradients give different steps: {kind} uses something of each rank's own, "
        "such as a state that only one rank has loaded, or combines them in some way other than their mean",
        "use the same values on all ranks; a closure returns lockstep.mean(loss * len(y), len(y))",
    ),
    "buffers": (
        "they follow the samples of one rank instead of the whole batch",
        "update them from the samples of all ranks (lockstep.all_gather in forward()); for "
        "BatchNorm lockstep.convert_sync_batchnorm",
    ),
    "buffers between": (
        "they are changed between the steps by a rank's own values, such as masks by its gradients, or by batches that "
        "it evaluates in training mode",
        "compute the change from all ranks: averaged gradients, lockstep.mean(total, count), lockstep.all_gather(rows)",
    ),
    "buffers combined": (
        "all ranks have the same, which depend on the number of ranks: a sum over ranks that is divided by the rows of "
        "one rank, or a mean of their means",
        "lockstep.mean(total, count)",
    ),
    # what follows
    "padded-evaluation": (
        "{extra} counted twice: the last batch was padded so that all ranks get the same number",
        "lockstep.DataLoader(…, evaluation=True), or gather_for_metrics on a value per sample: each on one rank",
    ),
    "left-out-evaluation": (
        "{missing} left out: the sampler drops the last ones, so that all ranks get the same number",
        "lockstep.DataLoader(…, evaluation=True), which gives each sample to one rank; or drop_last=False, and counts "
        "without the repeated ones",
    ),
    "metric": (
        "the metric covers one rank's samples, or the ranks' parts are combined wrongly: a mean with equal weights, "
        "a sum of means, a state that is reduced twice, or ranks evaluate different parameters (the best by their own "
        "metric){more}",
        "lockstep.metrics, or sum numerators and denominators over all ranks before dividing "
        "(lockstep.mean(total, count)); evaluation=True for a lockstep.DataLoader, whose batches count a sample twice "
        "where ranks need equal numbers",
    ),
    "other-weights": (
        "no optimizer trains them, and they depend on the number of ranks (a decay) or on one rank's data",
        "leave the number of ranks out, and compute them from parameters alone, or from all ranks' values",
    ),
    "part": (
        "the file holds only rank 0's part: its shard of a parameter, or the results for its own samples",
        "gather the parts first: full_tensor() or get_model_state_dict(…, full_state_dict=True) for shards, "
        "lockstep.all_gather(rows) for results",
    ),
    "other-steps": (
        "a number from rank 0's samples decides when to save, such as the best metric so far",
        "decide by the metric of all ranks: lockstep.metrics, lockstep.mean(total, count)",
    ),
    "all-ranks-save": (
        "they write the same file at the same time and may damage it; one process writes it alone",
        "put `if rank == 0:` around the code that writes it, or call lockstep.checkpoint.save on all ranks",
    ),
}
