"""Random numbers and sums, operator by operator: records the draws of N ranks, and replays them in the one process.

[Note: draws by sample] Dropout masks, and noise that a model draws, have one or several rows per sample, along the
dimension that is longer on one process. N ranks draw different numbers from one process, which must not count as a
difference. So the one process gets the ranks' rows, in the positions of their samples. If draws cannot be combined in
this way (one process permutes ten samples, two ranks five each), the one process keeps its own, which is reported.
Draws in a loop over the samples of a batch repeat on each rank as often as it has samples: each belongs to one sample.

[Note: draws by pass] A script without a loader may draw the positions of its samples in the data, with a different seed
on each rank (nanoGPT's `get_batch`), and divide the number of accumulated passes by the number of ranks. Its one
process then runs N times as many passes as a rank, of the same size, and gets one rank's draws for each: rank 0's first
pass, rank 1's first pass, and so on. Draws are counted by name and shape, because draws for the next pass come before
the backward pass of this one, and those for the first pass before all steps.

Fields of a step that this module writes:

* on ranks, `draws`: what was drawn, after how many batches, whether for a filler, and whether gradients were on. It is
  stored in a separate file, together with the samples of the step (identified without their padding), the number of
  backward passes, and for the first step what was drawn `before` it;
* on one process, `own_draws` (after how many batches each draw came), `given` (how many were replaced) and
  `unlike_draws` (name and shape of draws that were not replaced, and the shapes on the ranks; `by_pass` if the process
  runs N times as many passes as a rank, `in_turn` if for one sample);
* on both, `generated`: hashes of what the script's own generators drew; and `single`: 64-bit numbers were rounded to 32
  bits, so the step's result is no more precise.
"""

from __future__ import annotations

import functools
import itertools
import random
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.tools.rehearse.patching import wrap
from lockstep.tools.verify.halves import CUTS
from lockstep.tools.verify.recorder import StepRecorder
from lockstep.tools.verify.settings import HALVES, RANKS
from lockstep.tree import tensors_in

__all__ = ["PERMUTATIONS", "DrawWatch", "is_draw"]

_ATEN = torch.ops.aten
_RANDOM = ("random", "randint", "randrange", "uniform", "gauss", "normalvariate", "betavariate", "expovariate")
# Draws of arbitrary objects: only a hash is recorded, and the one process cannot get them.
_PICKS_OF_RANDOM = ("choices", "sample", "shuffle")
_PICKS_OF_NUMPY = {"shuffle", "permutation", "permuted", "bytes"}
_NO_DRAWS = {"seed", "get_state", "set_state", "spawn", "bit_generator"}
PERMUTATIONS = ("randperm", "shuffle", "permutation", "permuted")
# Largest draw that is recorded, in numbers; the one process does not get larger ones.
_MOST_NUMBERS = 1 << 26
# Largest draw recorded before the first step; and how many of the last ones are kept, for scripts that draw their data.
_MOST_BEFORE, _KEPT_BEFORE = 1 << 16, 4096
_MOST_PER_ROW = 4  # number of draws for a sample in a loop over the samples of a batch
_Draw = dict[str, Any]
_Kind = tuple[str, tuple[int, ...]]  # name and shape


class DrawWatch:
    """Watches the random numbers of this process. See [Note: draws by sample].

    Args:
        recorder: the recorder of this process.
    """

    def __init__(self, recorder: StepRecorder) -> None:
        self._recorder = recorder
        self._settings = recorder.settings
        # Number of a step -> what each rank recorded; and -> the samples of all ranks, batch by batch.
        self._files: dict[int, list[Any]] = {}
        self._keys: dict[int, list[list[int]]] = {}
        # The step and the number of its batches at the last draw; the ranks' draws since then, but those in turn; how
        # many of them were used; and those in turn, for the next samples.
        self._now, self._drawn, self._place, self._turns = (-1, 0, 0), list[list[_Draw]](), 0, list[Tensor]()
        self._apart: set[str] = set()  # names of draws in turn that ranks draw differently; some may be alike by chance
        self._of_passes = _DrawsOfPasses(self._of_ranks, recorder.settings.world_size)

    def install(self) -> None:
        """Start watching."""
        _watch_numpy_and_random(self._see, self._note_own)
        _Operators(self._recorder, self._see).__enter__()  # type: ignore[no-untyped-call]

    def _note_own(self, name: str, value: int) -> None:
        """Record a draw from a generator that the script created, whether for all ranks, this one, or a sample."""
        if self._recorder.is_recording:
            self._recorder.step["generated"].append((name, value))

    def _see(self, name: str, values: Tensor, is_replaceable: bool = True) -> Tensor | None:
        """Record a draw of the script, or return what the ranks drew instead."""
        self._note_evaluation()
        if not self._recorder.is_recording:
            self._note_before(name, values)
            return None
        step = self._recorder.step
        after = len(step["batches"])
        with self._recorder.aside():
            if self._settings.role == RANKS:
                is_filler = bool(after and step["batches"][-1]["filler"])
                noted = _noted(name, values) | {"after_batches": after, "forwards": step["forwards"]}
                step["draws"].append({**noted, "filler": is_filler})
                return None
            joined = self._of_passes.take(len(self._recorder.steps), name, values)
            if joined is not None:
                same = [values] * self._settings.world_size
                step["unlike_draws"].append(_unlike(name, values, same, after, by_pass=True))
                step["given"] += not torch.equal(joined, values)
                return joined
            step["own_draws"].append(after)
            every, place = self._place_of(after)
            joined = None if self._order_of_ranks() else self._of_other_batches(name, values)
            joined = self._of_pieces(name, values, every, place) if joined is None else joined
            turn = self._in_turn(name, values, every, place) if joined is None else None
            self._place += turn is None
            joined = turn if joined is None else joined
            joined = self._joined(name, values, every, place) if joined is None else joined
            if joined is None or not (is_replaceable or torch.equal(joined, values)):
                drawn = [draws[place]["values"] for draws in every if place < len(draws)] if turn is None else [turn]
                step["unlike_draws"].append(_unlike(name, values, drawn, after, in_turn=turn is not None))
            else:
                step["given"] += not torch.equal(joined, values)
            return joined

    def _note_evaluation(self) -> None:
        is_evaluating = self._recorder.is_evaluating and not torch.is_grad_enabled()
        self._recorder.facts["draws_in_evaluation"] |= is_evaluating and not self._recorder.busy

    def _note_before(self, name: str, values: Tensor) -> None:
        if self._recorder.is_before_steps and self._settings.role == RANKS and values.numel() <= _MOST_BEFORE:
            with self._recorder.aside():
                before = self._recorder.step["before"]
                if len(before) >= 2 * _KEPT_BEFORE:
                    del before[:_KEPT_BEFORE]
                if torch.is_grad_enabled():
                    before.append(_noted(name, values))

    def _of_ranks(self, number: int) -> list[Any]:
        """What each rank recorded of a step."""
        if number not in self._files:
            files = [self._settings.file("draws", number, rank) for rank in range(self._settings.world_size)]
            found = [torch.load(file, weights_only=True, map_location="cpu") for file in files if file.exists()]
            found = found if len(found) == len(files) else []
            self._files = {number: found}  # the last one only: these may be large
            batches = itertools.zip_longest(*(each["keys"] for each in found), fillvalue=[])
            self._keys[number] = [[key for part in parts for key in part] for parts in batches]
        return self._files[number]

    def _place_of(self, after: int) -> tuple[list[list[_Draw]], int]:
        """The draws of each rank after a batch of this step, without those in turn, and the position of the next one.

        From the batch on, so that earlier draws on only one rank, such as to show samples, are ignored.
        """
        number = len(self._recorder.steps)
        now = (number, after, self._recorder.step["forgotten"])
        if self._now != now:
            self._now, self._place, self._turns = now, 0, []
            self._drawn = [
                [draw for draw in rank["draws"] if draw["after_batches"] == after] for rank in self._of_ranks(number)
            ]
        return self._drawn, self._place

    def _in_turn(self, name: str, own: Tensor, every: list[list[_Draw]], place: int) -> Tensor | None:
        """The draw of a rank for a sample, if ranks draw for their samples in turn; takes these draws out of `every`.

        Each rank then repeats the same few kinds of draws as often as it has samples.
        """
        # Of most draws, the ranks' have other shapes, with a row for each of their samples.
        is_alike = bool(every) and _kinds(every[0][place : place + 1]) == [(name, tuple(own.shape))]
        if not self._turns and not (is_alike and self._take_turns(name, every, place)):
            return None
        values = self._turns.pop(0)
        return values.to(own.device) if values.shape == own.shape else None

    def _take_turns(self, name: str, every: list[list[_Draw]], place: int) -> bool:
        """Take the draws in turn that begin at this place out of `every`, in the order of this process's samples."""
        order, (step, after, _) = self._order_of_ranks(), self._now
        # No batch of this step if several steps use one.
        batches = [each["keys"][after - 1 : after] for each in self._of_ranks(step)]
        rows = [len(each[0]) for each in batches] if order and all(batches) else []
        per_row = _draws_per_row([draws[place:] for draws in every], rows)
        if not per_row:
            return False
        drawn = [draws[place : place + per_row * count] for draws, count in zip(every, rows, strict=True)]
        if name not in self._apart and _are_alike(drawn):
            # With one seed on all ranks: drawn for all samples, unless that leads to a difference.
            self._recorder.facts["several"] = True
            if not self._settings.across:
                return False
        self._apart.add(name)
        joined = list(itertools.chain(*drawn))
        self._turns = [joined[at * per_row + number]["values"] for at in order for number in range(per_row)]
        for draws, each in zip(every, drawn, strict=True):
            del draws[place : place + len(each)]
        return True

    def _joined(self, name: str, own: Tensor, every: list[list[_Draw]], place: int) -> Tensor | None:
        """The ranks' numbers that replace a draw of the one process; None if they cannot be combined."""
        if any(place >= len(draws) or draws[place]["name"] != name for draws in every) or not every:
            return None
        every = [draws for draws in every if not draws[place]["filler"]] or every
        parts = [draws[place]["values"] for draws in every]
        if all(each.shape == own.shape for each in parts):
            alike = all(torch.equal(each, parts[0]) for each in parts[1:])
            return parts[0].to(own.device) if alike else None
        axis = None if name == "randperm" else _axis_of_samples(own, parts)
        return None if axis is None else self._in_own_order(own, every, place, axis).to(own.device)

    def _in_own_order(self, own: Tensor, every: list[list[_Draw]], place: int, axis: int) -> Tensor:
        order, size = self._order_of_ranks(sum(draws[place]["values"].size(axis) for draws in every)), own.size(axis)
        piece, first = divmod(place, per_piece := _draws_per_piece(every, len(order), size))
        drawn = [_filled_up(each["values"], own, axis) for draws in every for each in draws[first::per_piece]]
        joined = torch.cat(drawn, axis)
        if not order or joined.size(axis) % len(order):
            self._recorder.facts["unplaced"] |= bool(order)
            return joined
        each_has = joined.size(axis) // len(order)  # rows per sample
        is_several = each_has > 1 and size == joined.size(axis)
        self._recorder.facts["several"] |= is_several
        if self._settings.across and is_several:
            views = zip(*(part.tensor_split(each_has, axis) for part in drawn), strict=True)
            joined = torch.cat([torch.cat(view, axis) for view in views], axis)
            places = [number * len(order) + place for number in range(each_has) for place in order]
        else:
            places = [place * each_has + number for place in order for number in range(each_has)]
        return joined.index_select(axis, torch.tensor(places[piece * size : (piece + 1) * size], device="cpu"))

    def _of_pieces(self, name: str, own: Tensor, every: list[list[_Draw]], place: int) -> Tensor | None:
        """The draw for a piece of a batch, if ranks cut their batches into several of its size and draw for each."""
        order, counts = self._order_of_ranks(), {*map(len, every)}
        size = _rows_of(every[0][0]["values"]) if counts and 0 not in counts else 0
        rows = len(order) // max(1, len(every))
        if len(counts) != 1 or size == 1 or not 0 < _rows_of(own) <= size <= rows:
            return None  # draws for one row at a time are those in turn
        per_piece, rest = divmod(max(counts), -(-rows // size))
        if rest or not per_piece:
            return None
        number, at = divmod(place, per_piece)
        drawn = [each for draws in every for each in draws[at::per_piece]]
        if any(each["name"] != name or each["values"].shape[1:] != own.shape[1:] for each in drawn):
            return None
        joined, chosen = torch.cat([each["values"] for each in drawn]), order[number * size :][: _rows_of(own)]
        is_whole = (len(joined), len(chosen)) == (len(order), _rows_of(own))
        return joined[chosen].to(own.device) if is_whole else None

    def _of_other_batches(self, name: str, own: Tensor) -> Tensor | None:
        """`_joined`, sample by sample, if the ranks had the samples in other batches, each with a backward pass."""
        step, ranks = self._recorder.step, self._of_ranks(len(self._recorder.steps))
        counts = {(each["passes"], len(each["keys"]), len(each["draws"])) for each in ranks}
        passes, batches, draws = counts.pop() if len(counts) == 1 else (0, 0, 0)
        if not own.ndim or not draws or passes != batches or draws % passes:
            return None
        number, place = divmod(len(step["own_draws"]) - 1, draws // passes)
        found = _by_sample(ranks, name, place, draws // passes)
        keys = [key for batch in step["batches"][number : number + 1] for _, key in batch["keys"]]
        parts = [found[key] for key in keys if key in found]
        if len(parts) < len(keys) or not _make(own, parts, 0):
            return None
        return torch.cat([_filled_up(each, own, 0) for each in parts]).to(own.device)

    def _order_of_ranks(self, rows: int = 0) -> list[int]:
        """For each sample of the last batch, its position in the concatenation of the ranks' batches.

        If that has other than `rows` samples, but the first of its loader's batches without a backward pass has as
        many, it is taken instead: batches may be fetched ahead.
        """
        # If several steps use one batch, it belongs to an earlier step.
        steps = [*self._recorder.steps, self._recorder.step]
        batches = [
            (number, place, batch) for number, step in enumerate(steps) for place, batch in enumerate(step["batches"])
        ]
        if not batches:
            return []
        order, loader = self._order_in(*batches[-1]), batches[-1][2]["loader"]
        batches = [each for each in batches if each[2]["loader"] == loader]
        done = sum(len(step["backwards"]) for step in steps)
        if rows in (0, len(order)) or done >= len(batches):
            return order
        earlier = self._order_in(*batches[done])
        return earlier if len(earlier) == rows else order

    def _order_in(self, number: int, place: int, batch: dict[str, Any]) -> list[int]:
        """`_order_of_ranks` of the batch at this place in the step of this number."""
        if number not in self._keys:
            self._of_ranks(number)
        theirs = self._keys[number]
        parts = theirs[place] if place < len(theirs) else []
        places: dict[int, list[int]] = {}
        for position, key in enumerate(parts):
            places.setdefault(key, []).append(position)
        order = [places[key].pop(0) for _, key in batch["keys"] if places.get(key)]
        return order if len(order) == len(parts) else []


class _DrawsOfPasses:
    """Independent draws of ranks without a loader, for the passes of the one process. See [Note: draws by pass].

    Args:
        read: returns what each rank recorded of a step, by number; empty if any rank recorded nothing.
        world_size: number of ranks.
    """

    def __init__(self, read: Callable[[int], list[Any]], world_size: int) -> None:
        self._read = read
        self._num_read = 0  # steps of the ranks
        self._of_ranks: list[dict[_Kind, list[Tensor]]] = [defaultdict(list) for _ in range(world_size)]
        self._per_pass: Counter[_Kind] = Counter()  # number of draws per backward pass, by kind
        self._own: Counter[_Kind] = Counter()  # number of draws of this process

    def take(self, step: int, name: str, own: Tensor) -> Tensor | None:
        """The draw of a rank that replaces this draw, if its kind is drawn by pass; else None."""
        if not self._num_read:
            self._begin()
        kind = (name, tuple(own.shape))
        per_pass, number = self._per_pass[kind], self._own[kind]
        if not per_pass or not torch.is_grad_enabled():
            return None
        while self._num_read <= step:
            self._read_next()
        self._own[kind] += 1
        number, place = divmod(number, per_pass)
        earlier, rank = divmod(number, len(self._of_ranks))
        drawn = self._of_ranks[rank][kind][earlier * per_pass + place :]
        return drawn[0].to(own.device) if drawn else None

    def _begin(self) -> None:
        """Find the kinds of draws that differ between ranks in the second step; some of the first come before it."""
        first = self._read(0)
        second = [] if any(each["keys"] for each in first) else self._read(1)
        if not second:  # ranks have a loader, or one step
            self._num_read = 1
            return
        passes, (one, *others) = max(1, second[0]["passes"]), [_by_kind(each["draws"]) for each in second]
        for kind, drawn in one.items():
            theirs = [each.get(kind, []) for each in others]
            are_apart = all(len(each) == len(drawn) and not all(map(torch.equal, each, drawn)) for each in theirs)
            if are_apart and len(drawn) % passes == 0:
                self._per_pass[kind] = len(drawn) // passes
        for kind, count in self._per_pass.items():
            for rank, each in enumerate(first):
                self._of_ranks[rank][kind] += _by_kind(each["before"]).get(kind, [])[-count:]
            self._own[kind] = len(self._of_ranks[0][kind])
        self._read_next()

    def _read_next(self) -> None:
        for rank, each in enumerate(self._read(self._num_read)):
            for kind, drawn in _by_kind(each["draws"]).items():
                self._of_ranks[rank][kind] += drawn
        self._num_read += 1


def _noted(name: str, values: Tensor) -> _Draw:
    """The record of a draw, including whether gradients were on."""
    return {"name": name, "values": values.detach().cpu().clone(), "trains": torch.is_grad_enabled()}


def _rows_of(values: Tensor) -> int:
    return values.size(0) if values.ndim else 0


def _kinds(draws: list[_Draw]) -> list[_Kind]:
    return [(each["name"], tuple(each["values"].shape)) for each in draws]


def _are_alike(every: list[list[_Draw]]) -> bool:
    """Whether all ranks draw the same numbers, or the same first ones."""
    pairs = (pair for draws in every for pair in zip(draws, every[0], strict=False))
    return all(torch.equal(a["values"], b["values"]) for a, b in pairs)


def _draws_per_row(drawn: list[list[_Draw]], rows: list[int]) -> int:
    """How many draws each rank makes for a sample, if it makes the same ones for all its samples in turn; else 0."""
    most = _MOST_PER_ROW if max(rows, default=0) > 1 else 0
    kinds, pairs = [*map(_kinds, drawn)], zip(drawn, rows, strict=False)
    most = 1 if most and all(_is_a_round(own, count) for own, count in pairs) else most
    every = [*zip(kinds, rows, strict=False)]
    fits = (n for n in range(most, 0, -1) if all(own[: n * count] == kinds[0][:n] * count for own, count in every))
    return next(fits, 0)


def _is_a_round(draws: list[_Draw], count: int) -> bool:
    """Whether a model is called after a draw for each sample, as in a loop over time, and not between these draws."""
    calls = [each["forwards"] for each in draws[: count + 1]]
    return len(calls) > count > 1 and calls[0] == calls[count - 1] != calls[count]


def _by_kind(draws: list[_Draw]) -> dict[_Kind, list[Tensor]]:
    found: dict[_Kind, list[Tensor]] = {}
    for each in draws:
        if each["trains"]:
            found.setdefault((each["name"], tuple(each["values"].shape)), []).append(each["values"])
    return found


def _unlike(
    name: str, own: Tensor, drawn: list[Tensor], after: int, by_pass: bool = False, in_turn: bool = False
) -> dict[str, Any]:
    what = {"name": name, "shape": list(own.shape), "ranks": [list(each.shape) for each in drawn]}
    return {**what, "by_pass": by_pass, "in_turn": in_turn, "after_batches": after}


def _by_sample(ranks: list[Any], name: str, place: int, per_batch: int) -> dict[int, Tensor]:
    """For each sample, its part of the draw with this name and position in a rank's batch."""
    found = dict[int, Tensor]()
    for rank in ranks:
        for keys, draw in zip(rank["keys"], rank["draws"][place::per_batch], strict=True):
            if draw["name"] == name and draw["values"].ndim:
                found |= dict(zip(keys, draw["values"].tensor_split(len(keys) or 1), strict=False))
    return found


def _axis_of_samples(own: Tensor, drawn: list[Tensor]) -> int | None:
    """The only dimension along which the ranks' draws add up to that of one process; else None."""
    axes = [axis for axis in range(own.ndim) if _make(own, drawn, axis)]
    return axes[0] if len(axes) == 1 else None


def _make(whole: Tensor, parts: list[Tensor], axis: int) -> bool:
    """Whether parts add up to the whole along a dimension; in others they may be shorter (padded samples)."""
    if not parts or any(each.ndim != whole.ndim for each in parts):
        return False
    sizes = zip(*(each.shape for each in parts), strict=True)
    return all((sum if at == axis else max)(each) == whole.size(at) for at, each in enumerate(sizes))


def _filled_up(part: Tensor, own: Tensor, axis: int) -> Tensor:
    """The part, extended by zeros where one process pads further because another rank has the longest sample."""
    filled = part.new_zeros([part.size(axis) if each == axis else own.size(each) for each in range(own.ndim)])
    filled[tuple(map(slice, part.shape))] = part
    return filled


def _draws_per_piece(every: list[list[_Draw]], rows: int, size: int) -> int:
    """The number of draws per piece of a batch that is cut into pieces of `size` rows; all draws if it is not cut."""
    most = max(map(len, every))
    pieces, rest = divmod(rows, max(1, size))
    kinds = [[(each["name"], each["values"].shape) for each in draws] for draws in every]
    is_cut = pieces > 1 and not rest and all(each == each[: most // pieces] * pieces for each in kinds)
    return most // pieces if is_cut else most


# ---- operators of torch ------------------------------------------------------------------------------


@functools.cache
def is_draw(func: Any) -> bool:
    """Whether an operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Intercepts every operator of this thread.

    Args:
        recorder: the recorder of this process.
        see: called with the operator's name and its draw; returns a replacement, or None.
    """

    supports_higher_order_operators = True  # such as flex_attention

    def __init__(self, recorder: StepRecorder, see: Callable[[str, Tensor], Tensor | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder
        self._see = see
        self._cuts = recorder.settings.role == HALVES
        self._thread = threading.get_ident()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator, then record or replace its draw."""
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        cut = CUTS.get(func) if self._cuts and self._recorder.is_computing else None
        result = None if cut is None else cut(*args, **kwargs)
        if result is None:
            result = func(*args, **kwargs)
        if func is _ATEN._to_copy.default and (args[0].dtype, result.dtype) == (torch.float64, torch.float32):
            self._recorder.step["single"] |= self._recorder.is_recording
        return self._noted(func, args, result) if is_draw(func) and threading.get_ident() == self._thread else result

    def _noted(self, func: Any, args: Any, result: Any) -> Any:
        if any(each.is_meta for each in tensors_in(result)):  # libraries create models like this before loading them
            return result
        if func is _ATEN.native_dropout.default:
            mask = self._see("native_dropout", result[1])
            if mask is None:
                return result
            return args[0] * mask * (0.0 if args[1] >= 1 else 1 / (1 - args[1])), mask
        if not isinstance(result, Tensor) or result.numel() > _MOST_NUMBERS:
            return result
        name = func._schema.name.removeprefix("aten::").rstrip("_")
        other = self._see(name, result)
        return result if other is None else result.copy_(other)


# ---- numpy and random --------------------------------------------------------------------------------


def _watch_numpy_and_random(see_draw: Callable[..., Tensor | None], see_own: Callable[[str, int], None]) -> None:
    """Start watching the draws of numpy and `random` in this thread.

    Args:
        see_draw: called with the name of a function and its draw, and False if it cannot be replaced; returns a
            replacement, or None.
        see_own: called with the method of a `random.Random` that the script created, and a hash of its draw.
    """
    thread, depth = threading.get_ident(), [0]

    def give(place: str, drawn: Any, result: Any) -> Any:
        values = np.asarray(result)
        other = see_draw(place, torch.from_numpy(values)) if values.dtype.kind in "iuf" else None
        if other is None:
            return result
        return other.numpy() if isinstance(result, np.ndarray) else type(result)(other.item())

    def pick(place: str, drawn: Any, result: Any) -> Any:
        see_draw(place, torch.tensor(crc32(repr(drawn).encode()), device="cpu"), False)
        return result

    def choose(place: str, drawn: Any, result: Any) -> Any:
        is_of_numbers = np.asarray(result).dtype.kind in "iuf"
        return give(place, drawn, result) if is_of_numbers else pick(place, drawn, result)

    def note(place: str, drawn: Any, result: Any) -> Any:
        see_own(place, crc32(repr(drawn).encode()))
        return result

    def watch(owner: Any, names: Iterable[str], see: Callable[[str, Any, Any], Any]) -> None:
        def watched(place: str, original: Callable[..., Any]) -> Callable[..., Any]:
            def draw(*args: Any, **kwargs: Any) -> Any:
                is_outer = threading.get_ident() == thread and not depth[0]  # gauss() calls random()
                depth[0] += is_outer
                try:
                    result = original(*args, **kwargs)
                finally:
                    depth[0] -= is_outer
                if not is_outer:
                    return result
                # A choice from other values, such as another number of rows, gets another name.
                asked = [*args[isinstance(owner, type) :][:1], kwargs.get("a"), kwargs.get("p")]
                name = f"{place} {crc32(repr(asked).encode())}" if see is choose else place
                # A shuffle works in place.
                return see(name, args[-1:] if result is None else result, result)

            return draw

        for name in names:
            wrap(owner, name, functools.partial(watched, f"{owner.__name__}.{name}"))

    watch(random, _RANDOM, give)
    watch(random, _PICKS_OF_RANDOM, pick)
    # An index can be given to the one process, unlike an object; the numbers drawn are the same.
    wrap(random, "choice", lambda original: lambda seq: seq[random.randrange(len(seq))] if len(seq) else original(seq))
    watch(random.Random, (*_RANDOM, *_PICKS_OF_RANDOM, "choice"), note)
    generator, state = _subclass(np.random.Generator), _subclass(np.random.RandomState)
    for owner, kind in ((np.random, state), (generator, generator), (state, state)):
        names = {name for name in dir(kind) if name[0] != "_" and hasattr(owner, name)} - _NO_DRAWS
        watch(owner, names - _PICKS_OF_NUMPY - {"choice"}, give)
        watch(owner, names & _PICKS_OF_NUMPY, pick)
        watch(owner, names & {"choice"}, choose)
    wrap(np.random, "default_rng", lambda original: lambda seed=None: generator(original(seed).bit_generator))
    for kind in (generator, state):
        setattr(np.random, kind.__name__, kind)


def _subclass(kind: Any) -> Any:
    """A subclass whose methods can be replaced, and of which all instances of `kind` count as instances."""
    meta = type("Kind", (type(kind),), {"__instancecheck__": lambda _, value: isinstance(value, kind)})
    return meta(kind.__name__, (kind,), {})
