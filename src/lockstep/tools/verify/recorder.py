"""Records a process's first optimizer steps, sets the state at the beginning of each, and ends the process.

A *step* here is everything between two calls of an optimizer's `step`. [Note: when it ends] says how many there are.

[Note: when it ends] In the first epoch the script trains on K - 1 batches and then on the last one, which may be
partial. In each further epoch it trains on the first batch, and the loader ends there, so that the script evaluates,
saves and updates its schedules as after an epoch. If there are few batches, whole epochs are trained, since trainers
evaluate after as many batches as their loader has; without a loader, as many steps. Recording continues as long as
rank 0 has time; the process then ends at the next batch to train on, or the next step, once all ranks have come that
far. One process goes as far as the ranks did.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.frames import is_library_file, library_folders
from lockstep.tools.verify.rows import brief
from lockstep.tools.verify.settings import RANKS, VerifySettings
from lockstep.tools.verify.state import dump_state, load_state, others_than, write_at_once

__all__ = ["FEW_BATCHES", "StepRecorder", "is_of_library", "line_of", "line_of_script"]

# How long a process waits at its end for the others, which may be waiting for it, and how long it runs after the steps.
_END_S, _AFTERWARDS_S = 5.0, 120.0
# Time within which further epochs may begin, and the largest number of epochs.
_EPOCHS_S, _MOST_EPOCHS = 10.0, 8
# Limits for an epoch that is trained whole, and for the amount of data written.
FEW_BATCHES, _MOST_BYTES = 40, 1 << 31
# Number of steps of alternating optimizers after which their round need not be complete.
_LONGEST_ROUND = 8
# Number of steps until a batch is requested: more than in any round.
_LONGEST_WAIT = 32


def _empty_step() -> dict[str, Any]:
    calls = ("batches", "calls", "others", "engine_calls", "backwards")
    draws = ("draws", "before", "own_draws", "unlike_draws", "generated")
    counts = {"rounded": 0.0, "single": False, "given": 0, "forgotten": 0, "forwards": 0}
    return {part: [] for part in (*calls, *draws)} | {"lines": {}, **counts}


def line_of_script() -> str:
    """`train.py:81`, the innermost line of the script's own code on the stack; empty if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not is_of_library(file):
            return line_of(frame)
        frame = frame.f_back
    return ""


def line_of(frame: FrameType) -> str:
    """`train.py:81`, the line that a frame is at."""
    file = frame.f_code.co_filename
    return f"{min(file, os.path.relpath(file), key=len)}:{frame.f_lineno}"


@functools.lru_cache(maxsize=4096)
def is_of_library(file: str) -> bool:
    """Whether a source file is not the script's own."""
    return is_library_file(file, library_folders())


class StepRecorder:
    """The record of this process.

    Attributes:
        settings: settings of this run.
        rank: rank of this process.
        step: the record since the last optimizer step; the modules that write its parts document them.
        steps: complete steps.
        facts: facts about the whole run.
        roots: models, in the order of their first call in training.
        optimizers: optimizers, in the order of their first steps.
        is_by_hand: whether a model was evaluated without a loader since the last step.
        busy: above 0 while a loader fetches, which is not part of the step.
        is_cut: whether training is not recorded until the next epoch begins.
        until: the number of steps after which recording is cut.
        has_last_batch: whether the training loader has a last batch that can be reached.
        is_last_batch: whether the last batch of the first epoch has been yielded.
    """

    def __init__(self, settings: VerifySettings, rank: int) -> None:
        self.settings = settings
        self.rank = rank
        self.step = _empty_step()
        self.steps: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {
            "loaders": [],
            "made": [],
            "asked": [],
            "options": {},  # of the script's argparse, those that took their default -> its text
            "unplaced": False,  # whether draws were replaced whose rows belong to no sample in particular
            "several": False,  # whether draws were replaced that may have another layout, see `across` of the settings
            "passes": [],
            "ends": [],  # the last numbers of rows of batches, which may be padding
            "engines": [],
            "saves": [],
            "texts": [],
            "refused": "",  # why there can be no verdict
            "starts": None,  # see `starts.py`
            "scales": False,
            "goes_on": False,
            "shapes": {},
            "untrained": {},  # for other models, called or saved: two numbers per tensor, and the line
            "begun": [],  # parameters that differed in one process before the first step
            "draws_in_evaluation": False,
            "by_hand": False,  # whether a model was evaluated without a loader
            "joins": False,  # whether fewer ranks may rightly share a step, within torch's Join
            "mpi": False,  # whether the script uses mpi4py, in which this process is alone
            "wants_gpus": False,  # whether the script asked for nccl
            "joined": False,  # whether there was a process group at the end of a step
            "returned": False,
            "end": "",
        }
        self.roots: list[nn.Module] = []
        self.optimizers: list[Any] = []
        self.is_by_hand = False
        self.busy = 0
        self.is_cut = False
        self.until = settings.steps
        self.has_last_batch = self.is_last_batch = False
        self._has_begun = False
        self._begun_before = 0  # forward passes before the first batch that seemed to begin the training
        self._is_active = False
        self._is_written = False
        self._began_at = self._cut_at = self._first_cut_at = 0.0
        self._epochs = 1
        self._progress = (0, 0, 0)  # pass, steps and lines, when a batch was last yielded

    @property
    def is_evaluating(self) -> bool:
        """Whether steps have been taken, and the last pass over data did not train, or there was a call without one."""
        passes = self.facts["passes"]
        return bool(self.steps and ((passes and not passes[-1]["trains"]) or self.is_by_hand))

    @property
    def is_recording(self) -> bool:
        """Whether this thread's work belongs to a recorded step."""
        return self._is_active and not self.is_cut and self.busy == 0

    @property
    def is_before_steps(self) -> bool:
        """Whether neither a batch nor a forward pass of a step has been seen yet."""
        return not self._is_active and self.busy == 0

    @property
    def is_computing(self) -> bool:
        """`is_recording`, from the step's first batch or forward pass on; what comes before may create data."""
        return self.is_recording and bool(self.step["batches"] or self.step["calls"])

    def begin_work(self) -> None:
        """Called at a batch or the first forward pass: draws from now on belong to a step."""
        self._is_active, self.is_by_hand = True, False

    def begin_batch(self) -> None:
        """Called at a batch to train on. A forward pass before the first one, as in a constructor, trained nothing."""
        self.begin_work()
        step = self.step
        if step["calls"] and not (self.steps or step["batches"] or step["backwards"]):
            step["calls"], step["others"], self._has_begun, self.facts["begun"] = [], [], False, []
            self._begun_before += 1

    def forget_batches(self, gone: set[int]) -> None:
        """Drop batches of the step, by position, and what was drawn and called after each: they only evaluated."""
        if not gone:
            return
        step = self.step
        kept = [number - sum(each < number for each in gone) for number in range(len(step["batches"]) + 1)]
        step["batches"] = [each for place, each in enumerate(step["batches"]) if place not in gone]
        for part in ("draws", "others", "unlike_draws"):
            left = [each for each in step[part] if each["after_batches"] - 1 not in gone]
            step[part] = [{**each, "after_batches": kept[each["after_batches"]]} for each in left]
        step["own_draws"] = [kept[after] for after in step["own_draws"] if after - 1 not in gone]
        for part, event in (("batches", "batch"), ("calls", "call")):
            if not step[part]:
                step["lines"].pop(event, None)
        step["forgotten"] += 1

    def note_evaluation(self) -> bool:
        """At a call in eval mode, without gradients: whether it evaluates a model, between steps, without a loader."""
        passes, step = self.facts["passes"], self.step
        is_walking = bool(passes) and not passes[-1]["trains"] and not passes[-1]["finished"]
        is_by_hand = bool(self.steps) and not (is_walking or step["batches"] or step["calls"])
        self.is_by_hand |= is_by_hand
        self.facts["by_hand"] |= is_by_hand
        return is_by_hand

    def begin_training(self, root: nn.Module) -> None:
        """Called before a forward pass that trains `root`; the first of each model exchanges its initial state."""
        is_new = not any(root is one for one in self.roots)
        self.roots += [root] * is_new
        if not self._has_begun:
            self._has_begun = True
            self._began_at = time.monotonic()
            self._exchange_state(0)
        elif is_new and not self.steps:
            with torch.random.fork_rng(devices=[]):  # the step has its random state already
                self._exchange_state(0, root)

    def _exchange_state(self, step: int, later: nn.Module | None = None) -> None:
        """Give one process rank 0's state; before the first step, only that of a model which is called `later`."""
        # For each beginning, and each of its models, a file, as one process comes to all of them.
        which: list[str | int] = [self._begun_before] if self._begun_before and not step else []
        which += [] if later is None else ["model", len(self.roots) - 1]
        path = self.settings.file("state", step, *which)
        roots, optimizers = ([later], []) if later is not None else (self.roots, self.optimizers)
        with torch.no_grad(), self.aside():
            if self.settings.is_reference:
                if step == 0:
                    self.facts["begun"] += others_than(path, roots[0])
                load_state(path, roots, optimizers)
            else:
                dump_state(path if self.rank == 0 else None, roots, optimizers)

    def end_step(self) -> None:
        """Called after a step of an optimizer."""
        self.steps.append(self.step)
        self.facts["joined"] |= dist.is_initialized()
        if self.settings.role == RANKS:
            keys = [[] if each["filler"] else [key for _, key in each["keys"]] for each in self.step["batches"]]
            drawn = {each: self.step.pop(each) for each in ("draws", "before")}
            drawn |= {"keys": keys, "passes": len(self.step["backwards"])}
            torch.save(drawn, self.settings.file("draws", len(self.steps) - 1, self.rank))
        self.step = _empty_step()
        self._exchange_state(len(self.steps))
        if len(self.steps) == self.settings.most_steps:
            self.end()
        self._train_like_an_epoch()
        over = len(self.steps) - self.until
        is_round = self.steps[-1]["optimizer"] == len(self.optimizers) - 1
        # With several optimizers, the last step to record may end before the last batch is requested.
        waits = self.has_last_batch and not self.is_last_batch and over < _LONGEST_WAIT
        if over >= 0 and (is_round or over >= _LONGEST_ROUND) and not waits:
            self.is_cut, self._cut_at = True, time.monotonic()
            self._first_cut_at = self._first_cut_at or self._cut_at

    def _train_like_an_epoch(self) -> None:
        """Without a loader, record as many steps as a short epoch has, if there is time for them."""
        is_time = len(self.steps) == self.settings.steps and not self.facts["passes"]
        if is_time and self.train_whole_epochs(FEW_BATCHES):
            self.until = FEW_BATCHES

    def begin_epoch(self) -> None:
        """Record the first step of a further epoch, if there is time. See [Note: when it ends]."""
        goes = self._goes_on(self._first_cut_at)
        self.facts["goes_on"] = goes is None
        if goes:
            self.is_cut, self.until = False, len(self.steps) + 1

    def train_whole_epochs(self, batches: int) -> bool:
        """Whether epochs of this many batches are trained whole. See [Note: when it ends]."""
        per_batch_s = (time.monotonic() - self._began_at) / max(1, len(self.steps))
        is_short = batches <= FEW_BATCHES and batches * per_batch_s < _EPOCHS_S
        size = self.settings.file("state", len(self.steps)).stat().st_size if self.rank == 0 else 0
        goes = self._of_rank_0(1, is_short and size * batches * _MOST_EPOCHS < _MOST_BYTES)
        self.until = sys.maxsize if goes else max(self.until, len(self.steps))
        return bool(goes)

    def end_whole_epoch(self) -> None:
        """At the end of a loader, decide whether to train the next epoch whole, too, or only its first step.

        For a stream, which some ranks leave before its end, only the first step of a further epoch is taken.
        """
        if self.until == sys.maxsize and not self._goes_on(self._began_at):
            self.until = len(self.steps) + 1

    def _goes_on(self, since: float) -> bool | None:
        """Whether another epoch is recorded; not if there were many, or much time has passed `since`."""
        self._epochs += 1
        has_time = self._epochs <= _MOST_EPOCHS and time.monotonic() - since < _EPOCHS_S
        return self._of_rank_0(self._epochs, has_time)

    def _of_rank_0(self, epoch: int, goes_on: bool) -> bool | None:
        """Rank 0's decision, for all ranks and for one process; None if there was none."""
        goes, stops = (self.settings.file("epoch", epoch, word) for word in ("goes", "stops"))
        if self.settings.role == RANKS and self.rank == 0:
            (goes if goes_on else stops).touch()
        limit = time.monotonic() + (_END_S if self.settings.role == RANKS else 0.0)
        while not (goes.exists() or stops.exists()) and time.monotonic() < limit:
            time.sleep(0.001)
        return goes.exists() or (False if stops.exists() else None)

    def check_time(self) -> None:
        """End the process if its work after the steps takes too long."""
        if self.is_cut and time.monotonic() - self._cut_at > _AFTERWARDS_S:
            self.end(f"the code after the steps ran over {_AFTERWARDS_S:g} s, and was stopped")

    def note_line(self, event: str) -> None:
        """Record the script's line for a kind of event: "batch", "call", "backward" or "step"."""
        lines, line = self.step["lines"].setdefault(event, []), line_of_script()
        if line and line not in lines:
            lines.append(line)

    def note_progress(self, number: int) -> None:
        """At a batch or the end of a pass: lines since its last batch, without a step, are not evaluation results."""
        before, steps, lines = self._progress
        texts = self.facts["texts"]
        for line in texts[lines:] if (before, steps) == (number, len(self.steps)) else ():
            line[0] = False
        self._progress = number, len(self.steps), len(texts)

    def note_untrained(self, name: str, weights: Callable[[], list[Tensor]]) -> None:
        """Record weights that no optimizer updates, such as averages, once per step count; not with 16-bit numbers.

        Args:
            name: name of the model, or of the file that it is saved in.
            weights: returns its tensors.
        """
        key = f"{name} after {len(self.steps)} steps"
        if not self.steps or key in self.facts["untrained"] or any(each["rounded"] for each in self.steps):
            return
        with self.aside(), torch.no_grad():
            found = weights()
            if found:
                self.facts["untrained"][key] = (brief(found), line_of_script())

    @contextlib.contextmanager
    def aside(self) -> Any:
        """Context manager for work that is not the script's."""
        self.busy += 1
        try:
            yield
        finally:
            self.busy -= 1

    # ---- the end -------------------------------------------------------------------------------------

    def write(self) -> None:
        """Write the record to the folder, once."""
        if self._is_written:
            return
        self._is_written = True
        with self.aside():
            mpi: Any = getattr(sys.modules.get("mpi4py"), "MPI", None)
            is_open = mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized()
            self.facts["mpi"] = is_open and mpi.COMM_WORLD.Get_size() == 1
            path = self.settings.file("record", self.settings.role, self.rank)
            write_at_once(path, {"steps": self.steps, "facts": self.facts})

    def end(self, why: str = "") -> None:
        """Write the record, wait for the other ranks' records, and end the process with exit code 0.

        Args:
            why: the reason, for the report.
        """
        self.facts["end"] = why
        self.write()
        files = [self.settings.file("record", RANKS, rank) for rank in range(self.settings.world_size)]
        limit = time.monotonic() + _END_S
        while self.settings.role == RANKS and time.monotonic() < limit and not all(each.exists() for each in files):
            time.sleep(0.01)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(0)
