"""Determines from its inputs how many samples of the global batch a forward pass holds.

[Note: what a forward pass holds] It is determined from, in this order:

1. The user's declaration: `with model.samples(n)`.
2. The tag (`lockstep.batch`) of a tensor that a loader yielded, or of a view of it.
3. If a `lockstep.DataLoader` that splits over these ranks is in use: the size of the inputs, see below. If on any rank
   batches with different numbers of samples have the same size, the ranks exchange their sizes, which together identify
   the batch.
4. Without such a loader, all ranks have the same weight, and their inputs must have the same size.

[Note: one size] A forward pass without a tag belongs to a training batch that a loader has already yielded, and of
which this rank has as many rows as the arguments ([Note: rows] in `rows.py`). If there is no such batch, it is an error
that asks for `samples`, unless all batches divide evenly: then every forward pass has the same weight, and as without a
loader, the inputs of all ranks must have the same size. So a single row that is no batch, such as the code of a
hypernetwork, is not taken for a last batch of one sample that is still to come.

If a rank relied on a size, a claim is sent with the gradients and compared (`rank_agreement.py`), so that ranks that
came to different results stop. Ranks exchange sizes in the backward pass, which all of them run; a forward pass never
waits for another rank.

[Note: gradients of an evaluation] In evaluation mode a script may compute gradients of inputs, for a few samples and on
one rank only (saliency maps, attacks). Inconsistent inputs are then an error only if gradients reach parameters.

[Note: parts of a batch] A slice of a batch (micro-batches cut from it) has the weight of the whole batch: with a loss
divided by the number of slices, that gives the mean over the batch, provided that all slices have the same size and
together make up the batch. The first condition is checked at once, the second when other batches come. Slices of
different tensors of a batch are counted separately (chosen and rejected answers), and each slice may come several
times, all equally often.
"""

from __future__ import annotations

import gc
import operator
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from lockstep import batch
from lockstep.agreement import all_reduce_number
from lockstep.batch.plans import Division
from lockstep.batch.share import BatchShare
from lockstep.batch.tags import Tag
from lockstep.errors import InputError, InputTypeError
from lockstep.parallel.rows import rows_in, show_inputs
from lockstep.torch_private.autograd import outside_transforms
from lockstep.tree import tensors_in

__all__ = ["PLAIN", "Feed", "Feeding", "Parts", "Slice", "describe_share", "share_said", "slice_of"]


@dataclass(frozen=True)
class Feed:
    """The samples that one forward pass holds.

    Attributes:
        weight: weight of its gradients, relative to an even share.
        share: its share of the global batch; None if it belongs to none.
        claim: the interpretation that must be the same on all ranks; "" if there is nothing to compare.
        question: determines the weight if it is not known yet; collective if it asks the other ranks. Called in the
            backward pass, which all ranks run: a forward pass waits for no rank, and may run on one rank alone.
    """

    weight: float = 1.0
    share: BatchShare | None = None
    claim: str = ""
    question: Callable[[], Feed] | None = None

    def settled(self) -> Feed:
        """The same with a known weight. Collective if there is a question."""
        return self if self.question is None else self.question().settled()


PLAIN = Feed()


def share_said(count: Any, group: dist.ProcessGroup, device: torch.device, joins: bool) -> BatchShare:
    """This rank's share as declared by the script. Collective, except within `join`.

    Args:
        count: an integer of Python or NumPy, or a tensor of one integer.
        group: the ranks that share the batch.
        device: device of small tensors in the group's collectives.
        joins: whether within `join`, whose steps add up the counts, because ranks that have joined are not here.

    Raises:
        InputError: negative, or 0 on all ranks.
        InputTypeError: not an integer.
    """
    try:
        # NumPy before 2.3 accepts its own bools as integers.
        is_truth = isinstance(count, bool) or str(getattr(count, "dtype", None)) in ("bool", "torch.bool")
        number = None if is_truth else operator.index(count)
    except TypeError:
        number = None
    if number is None:
        raise InputTypeError(f"samples({count!r}): expected the number of samples on this rank, an int")
    total = max(number, 1) if joins else all_reduce_number(number, dist.ReduceOp.SUM, group, device)
    if number < 0 or total <= 0:
        raise InputError(f"samples({number}): expected at least 0, and more than 0 on some rank")
    return BatchShare(number, total, 1 if joins else group.size())


# When a model was wrapped for the first time.
_since_wrapped: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()


class Feeding:
    """Determines the samples of each forward pass of one engine.

    Args:
        group: the ranks over which the engine averages.
        device: device of small tensors in the group's collectives.
        module: the model. Another engine for the same model uses the same loaders as the first one.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, module: torch.nn.Module) -> None:
        self._group = group
        self._device = device
        self._world_size = group.size()
        self._rank = group.rank()
        self._parts = Parts()
        self._since = _since_wrapped.setdefault(module, batch.hand.since_now())
        self._plain_shape: torch.Size | None = None  # of the last input while no loader was known, and its feed
        self._plain_feed = PLAIN

    def look(self, inputs: Any, trains: bool) -> BatchShare | None:
        """The share of a forward pass that needs no weight, if it is known without asking other ranks. Local."""
        held = batch.hand.held()
        if held is not None:
            return held
        tags = _tags_of(inputs)
        if tags:
            return tags[0][1].share
        return self._share_of(self._matches(rows_in(inputs), trains), trains)

    def count_rows(self, inputs: Any) -> int:
        """Number of rows of a forward pass within `join` on this rank; 1 if the inputs have none. Local."""
        held = batch.hand.held()
        if held is not None:
            return held.local_samples
        tags = _tags_of(inputs)
        if not tags:
            rows = rows_in(inputs)
            return 1 if rows is None else rows
        (tensor, tag), *_ = tags
        piece = slice_of(tensor, tag)
        return tag.share.local_samples if piece is None or not tag.share.local_samples else piece.rows

    def resolve(self, inputs: Any, trains: bool, syncs: bool) -> Feed:
        """The samples of a forward pass with gradients. Local; if the size is ambiguous, with a question.

        Args:
            inputs: positional and keyword arguments of the model.
            trains: the model is in training mode.
            syncs: whether its backward pass averages gradients. If not, only some ranks may run it, unless they iterate
                over a loader that splits over them.

        Raises:
            InputError: the samples cannot be determined, or the inputs are from several batches. In evaluation mode it
                is raised when gradients reach parameters.
        """
        try:
            return self._resolve(inputs, trains, syncs)
        except InputError as error:
            if trains:
                raise
            refusal = error.with_traceback(None)  # a traceback would keep the inputs alive

        def refuse() -> NoReturn:
            raise refusal

        return Feed(question=refuse)

    def _resolve(self, inputs: Any, trains: bool, syncs: bool) -> Feed:
        args, kwargs = inputs
        if len(args) == 1 and not kwargs and type(args[0]) is torch.Tensor and batch.knows_none():
            shape = None if args[0].is_nested else args[0].shape
            if shape is None or shape != self._plain_shape:
                self._plain_shape, self._plain_feed = shape, self._of_inputs(inputs, trains, syncs)
            return self._plain_feed
        return self._of_inputs(inputs, trains, syncs)

    def _of_inputs(self, inputs: Any, trains: bool, syncs: bool) -> Feed:
        held = batch.hand.held()
        if held is not None:
            return self._of_share(held, syncs)
        tags = _tags_of(inputs)
        if tags:
            return self._of_tags(tags, trains, syncs)
        rows = rows_in(inputs)
        if not batch.plans.must_ask(self._rank, self._world_size, self._since):
            feed = self._by_size(rows, trains, lambda: show_inputs(inputs))
            return feed if _is_sure(feed.share, trains) else Feed(question=lambda: feed)
        shown = show_inputs(inputs)  # now, because the question must not keep the inputs alive
        matches = self._matches(rows, trains)
        known = self._share_of(matches, trains)

        def follow(of_ranks: torch.Tensor) -> Feed:
            return self._by_size(rows, trains, lambda: shown, tuple(of_ranks.tolist()))

        return self._ask(rows if matches and rows else 0, follow, known)

    def _ask(self, rows: int, follow: Callable[[torch.Tensor], Feed], share: BatchShare | None = None) -> Feed:
        """A feed whose question asks all ranks for their rows, and passes them to `follow`."""

        def ask() -> Feed:
            of_ranks = torch.zeros(self._world_size, dtype=torch.int64, device="cpu")
            of_ranks[self._rank] = rows
            of_ranks = of_ranks.to(self._device, non_blocking=True)
            dist.all_reduce(of_ranks, group=self._group)
            return follow(of_ranks)

        return Feed(share=share, question=ask)

    def _by_size(
        self, rows: int | None, trains: bool, show: Callable[[], str], rows_of_ranks: tuple[int, ...] | None = None
    ) -> Feed:
        """The samples of inputs with this number of rows, or these on each rank, if the ranks were asked. Local.

        Raises:
            InputError: they match no batch, or several with different weights.
        """
        for is_last in (False, True):
            divisions = batch.plans.divisions(self._rank, self._world_size, self._since)
            matches = self._matches(rows, trains)
            if rows_of_ranks is not None:
                matches = [each for each in matches if each.rows_of_ranks == rows_of_ranks]
            if len(matches) == 1:
                share = matches[0].share(self._rank)
                return Feed(share.weight, share, f"{share.global_samples} samples")
            if all(division.is_even for division in divisions):
                break
            if is_last:
                raise InputError(self._explain(rows, show(), divisions))
            gc.collect()  # rare: an error would be next. Loaders in a reference cycle may be freed
            batch.tags.purge()
        # The number of samples is unknown, which is right if all ranks have the same.
        return Feed(claim=f"{'no' if rows is None else rows} rows")

    def _of_share(self, share: BatchShare, may_ask: bool) -> Feed:
        if share.world_size == self._world_size:
            return Feed(share.weight, share, f"{share.global_samples} samples")
        # The loader splits over other ranks than the engine averages over: add up the samples of the engine's ranks.
        if not may_ask:
            return Feed(share=share)

        def follow(of_ranks: torch.Tensor) -> Feed:
            samples = int(of_ranks.sum().item())
            weight = share.local_samples * self._world_size / samples if samples else 0.0
            return Feed(weight, share, f"{samples} samples on these ranks")

        return self._ask(share.local_samples, follow, share)

    def _of_tags(self, tags: Sequence[tuple[torch.Tensor, Tag]], trains: bool, syncs: bool) -> Feed:
        share = tags[0][1].share
        if share.evaluation and trains and self._world_size > 1:
            raise InputError(
                "the model trains on a batch from a DataLoader with evaluation=True. Such loaders give ranks "
                "different numbers of batches, so ranks would hang. Leave out evaluation=True for training; to "
                "evaluate, call model.eval() or use torch.no_grad()"
            )
        for _, tag in tags:
            if tag.share is share:
                continue
            if (tag.share.weight, tag.share.world_size) != (share.weight, share.world_size):
                raise InputError(
                    "the inputs of this forward pass come from two batches, of which this rank has different shares "
                    f"({describe_share(share)}: {share.local_samples}; {describe_share(tag.share)}: "
                    f"{tag.share.local_samples}). Call the model once per batch, and compute each loss from its own "
                    "output"
                )
        feed = self._of_share(share, syncs)
        piece = slice_of(*tags[0])
        if piece is not None and not trains:
            return Feed(share=share, question=lambda: self._cut(feed, piece))
        if piece is not None:
            feed = self._cut(feed, piece)
        if feed.question is None and share.rows and batch.plans.must_ask(self._rank, self._world_size, self._since):
            return self._ask(share.rows, lambda _: feed, feed.share)  # another rank may have lost the tag
        return feed

    def _cut(self, feed: Feed, piece: Slice) -> Feed:
        num_parts = self._parts.add(piece)
        return feed if num_parts == 1 else replace(feed, claim=f"{feed.claim} in {num_parts} parts")

    def _matches(self, rows: int | None, trains: bool) -> list[Division]:
        """The divisions with this number of rows on this rank, one per number of samples. See [Note: one size]."""
        divisions = batch.plans.divisions(self._rank, self._world_size, self._since)
        found = [
            each
            for each in divisions
            if each.rows(self._rank) == rows and batch.plans.was_yielded(each, trains, self._since)
        ]
        return list({each.num_samples: each for each in found}.values())

    def _share_of(self, divisions: Sequence[Division], trains: bool) -> BatchShare | None:
        """This rank's share, if it is the same in all of these divisions. Local."""
        shares = [each.share(self._rank) for each in divisions]
        are_one = len({share.local_samples for share in shares}) == 1
        return shares[0] if are_one and _is_sure(shares[0], trains) else None

    def _explain(self, rows: int | None, shown: str, divisions: Sequence[Division]) -> str:
        if divisions:
            expected = " or ".join(str(each) for each in sorted({each.rows(self._rank) for each in divisions}))
            known = f"the loaders' batches have {expected} rows on rank {self._rank}, and do not divide evenly over "
            known += f"{self._world_size} ranks"
        else:
            known = "ranks had different numbers of rows"
        return (
            f"cannot tell how many samples of the global batch this forward pass holds: its inputs are {shown}; "
            f"{known}. {_what_to_write(rows)}"
        )


def _what_to_write(rows: int | None) -> str:
    """Advice for an error, as far as the latest batches allow it. Local."""
    latest = [each.rows or each.local_samples for each in batch.hand.latest_of_each()]
    if rows and len(latest) > 1 and sum(latest) == rows:
        return (
            "These are the batches of several loaders, concatenated. Call the model once per batch, and compute each "
            "loss from its own output"
        )
    times = next((times for times in (2, 3, 4) if rows and rows in [times * each for each in latest]), None)
    if times is not None:
        return (
            f"These are {times} times the rows of the batch. Call the model once per view: a, b = model(a), model(b). "
            "A loss that compares samples with each other, such as a contrastive loss, needs those of all ranks: "
            "lockstep.all_gather(a), lockstep.all_gather(b)"
        )
    return (
        "No batch has as many rows as the first tensor. Say how many samples this rank's loss is the mean over: "
        "`with model.samples(n): model(…)` (0 if lockstep.is_filler(batch)). If the loss compares samples with each "
        "other, also pass it lockstep.all_gather(model(…))"
    )


def _is_sure(share: BatchShare | None, trains: bool) -> bool:
    """Whether inputs of this share's size may be taken for it.

    In evaluation mode a single row, the size of a filler, may come from any other loader. Then the loop decides which
    batch is in hand.
    """
    return trains or share is None or share.local_samples > 0


def _tags_of(inputs: Any) -> list[tuple[torch.Tensor, Tag]]:
    """The tagged tensors among the inputs, with their tags."""
    args, kwargs = inputs
    tensors = map(outside_transforms, tensors_in(inputs if kwargs else args))
    return [(tensor, tag) for tensor in tensors if (tag := batch.tags.find_tag(tensor)) is not None]


def describe_share(share: BatchShare) -> str:
    """`batch 3 of epoch 0: 128 samples`: the form in which errors name a batch."""
    return f"{share.name}: {share.global_samples} samples" if share.name else f"{share.global_samples} samples"


class Slice(NamedTuple):
    """A slice of a batch, as seen from one tensor.

    Attributes:
        of: description of the batch.
        rows: number of samples in the slice.
        of_rows: number of samples of the batch on this rank.
        memory: address of the batch's memory.
        offset: offset of the slice's first element in that memory.
    """

    of: str
    rows: int
    of_rows: int
    memory: int
    offset: int


def slice_of(tensor: torch.Tensor, tag: Tag) -> Slice | None:
    """The slice of a batch that this view of a tagged tensor is; None if it is all of it. Local."""
    rows = _rows_of(tensor, tag)
    if rows is None or rows == tag.rows:
        return None
    memory = tensor.untyped_storage().data_ptr()
    return Slice(describe_share(tag.share), rows, tag.rows, memory, int(tensor.storage_offset()))


class Parts:
    """Batches that went through the model in slices. See [Note: parts of a batch]."""

    # Two loaders may alternate; with a third batch, the slices of the first are complete.
    _MAX_OPEN = 2

    def __init__(self) -> None:
        self._open: dict[str, dict[int, _Part]] = {}  # by batch, and by memory

    def add(self, piece: Slice) -> int:
        """Note that a forward pass uses that slice. Returns the number of parts of its batch.

        Raises:
            InputError: the parts do not add up to the mean over the batch.
        """
        rows, of_rows = piece.rows, piece.of_rows
        parts = self._open.setdefault(piece.of, {})
        part = parts.setdefault(piece.memory, _Part(rows, of_rows))
        if not rows or of_rows % rows or rows != part.rows:
            raise InputError(
                f"this forward pass uses {rows} of this rank's {of_rows} samples of {piece.of}. All parts of a "
                "batch must have the same size on every rank, and together cover the batch. For micro-batches, let the "
                "loader make them (a smaller batch_size, and model.no_sync()), or say how many samples the loss is the "
                "mean over: `with model.samples(n):`"
            )
        part.passes[piece.offset] += 1
        if part.is_whole and part.is_level:
            del parts[piece.memory]
        if not parts:
            del self._open[piece.of]
        elif len(self._open) > self._MAX_OPEN:
            self._refuse_first()
        return of_rows // rows

    def _refuse_first(self) -> NoReturn:
        what, parts = next(iter(self._open.items()))
        part = next(iter(parts.values()))  # incomplete, or not equally often
        self._open.clear()
        if part.is_whole:
            raise InputError(
                f"the model saw some slices of {what} more often than others, so which samples count more depends "
                "on the number of ranks. Call it equally often on every part of the batch, or say how many samples "
                "the loss is the mean over: `with model.samples(n):`"
            )
        raise InputError(
            f"only {part.num_rows} of this rank's {part.of_rows} samples of {what} went through the model, as a slice "
            "of the batch. Which samples of the global batch are left out depends on the number of ranks. Leave "
            "samples out in the dataset or sampler, or say how many samples the loss is the mean over: `with "
            "model.samples(n):`"
        )


@dataclass(frozen=True)
class _Part:
    """The slices of one tensor of a batch that have come so far.

    Attributes:
        passes: how often each slice came, by offset.
    """

    rows: int
    of_rows: int
    passes: Counter[int] = field(default_factory=Counter)

    @property
    def num_rows(self) -> int:
        return len(self.passes) * self.rows

    @property
    def is_whole(self) -> bool:
        return self.num_rows == self.of_rows

    @property
    def is_level(self) -> bool:
        """Whether all slices came equally often."""
        return len(set(self.passes.values())) == 1


def _rows_of(tensor: torch.Tensor, tag: Tag) -> int | None:
    """Number of rows of the yielded tensor in this view of it; None if unknown, or all of them."""
    if tensor.numel() == tag.numel or tag.rows < 2 or tag.rows != (tag.share.local_samples or tag.rows):
        return None
    strides = list(zip(tensor.stride(), tensor.shape, strict=True))
    for stride, size in strides:
        if stride == tag.stride:
            return size
    for stride, size in strides:  # every second row
        if stride > tag.stride and stride % tag.stride == 0:
            return size
    return 1 if tensor.numel() * tag.rows == tag.numel else None
