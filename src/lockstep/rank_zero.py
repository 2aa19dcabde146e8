"""One rank acts, every rank learns the outcome: the safe form of `if rank == 0`.

An action of rank 0 only (naming a folder, writing a file) can fail there. With a bare `if rank == 0` the other ranks
then run on into their next collective and wait. `on_rank_zero` tells them: it returns the same text on every rank, or
raises an error on every rank. `rank_zero_first` is for actions of every rank that one rank should take first, such as
downloading data that the others then find.

`get_logger` makes loggers that log on rank 0 only, for messages that would be the same on every rank.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lockstep import env, errors
from lockstep.agreement import any as any_rank
from lockstep.agreement import collective_device
from lockstep.world import current_world

__all__ = ["RankZeroLogger", "get_logger", "on_rank_zero", "rank_zero_first"]


def on_rank_zero(action: Callable[[], str]) -> str:
    """Run `action` on rank 0 and return its text on every rank.

    Collective over the default group; without one, it just runs `action`.

    Args:
        action: called without arguments, on rank 0 only; may return any text.

    Raises:
        Exception: on rank 0, the exception that `action` raised. On the others, an error with the same message: of the
            same class if that is in `lockstep.errors`, else `LockstepError`.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return action()
    any_rank(False)  # if a rank cannot take part, after Ctrl-C say, all ranks raise before anything is done
    text, failure = "", None
    if dist.get_rank() == 0:
        try:
            text = action()
        except Exception as error:  # told to the others first, then raised again below
            failure, text = error, f"{type(error).__name__}\n{error}"
    failed, text = _broadcast_text(failure is not None, text)
    if failure is not None:
        raise failure
    if failed:
        raise _rebuilt(text)
    return text


@contextlib.contextmanager
def rank_zero_first(*, local: bool = False, timeout: float | timedelta = 3600.0) -> Iterator[None]:
    """Run the block on rank 0 first, and on the other ranks once it is done::

        with lockstep.rank_zero_first():
            train_set = MNIST("data", download=True)        # one rank downloads, the others find the files

    Collective over the default group; without one it just runs the block. If the block raises on the first rank, it is
    not run on the others.

    Args:
        local: the first rank of each host goes first; for hosts that do not share a disk.
        timeout: how long the others wait, in seconds or as a timedelta. Separate from the group's, because a download
            may take longer than any collective should.

    Raises:
        Exception: on rank 0, the exception that the block raised. On the others, an error with the same message: of the
            same class if that is in `lockstep.errors`, else `LockstepError`.
    """
    if not (dist.is_available() and dist.is_initialized()):
        yield
        return
    rank = dist.get_rank()
    is_first = rank == 0 or (local and _local_rank() == 0)
    limit = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    failure: Exception | None = None
    if is_first:
        try:
            yield
        except Exception as error:  # told to the others first, then raised again below
            failure = error
    failed_rank = _largest_rank(rank if failure is not None else -1, limit)
    if failed_rank >= 0:
        text = f"{type(failure).__name__}\n{failure}" if rank == failed_rank else ""
        _, text = _broadcast_text(True, text, failed_rank)
        raise failure if failure is not None else _rebuilt(text, failed_rank)
    if not is_first:
        yield


def _local_rank() -> int:
    world = current_world()
    return world.local_rank if world is not None else env.LOCAL_RANK.get() or 0


def _largest_rank(rank: int, timeout: timedelta) -> int:
    """The maximum of `rank` over all ranks; waits up to `timeout` for each. Collective."""
    group = dist.group.WORLD
    assert group is not None
    largest = torch.full((), rank, dtype=torch.int32, device=collective_device())
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    options.timeout = timeout
    work = group.allreduce([largest], options)
    if work is not None:
        work.wait()
    return int(largest.item())


class RankZeroLogger(logging.LoggerAdapter):  # type: ignore[type-arg]
    """A logger that logs once, not once per rank: see `get_logger`."""

    def log(  # type: ignore[override]  # the stubs list what `kwargs` may hold
        self, level: int, msg: object, *args: object, all_ranks: bool = False, **kwargs: Any
    ) -> None:
        """Log on rank 0. Local: no rank waits for another.

        Args:
            level: as in `logging`; so are `msg`, `args` and `kwargs`. `debug`, `info`, `warning`, `error` and so on
                take the same arguments.
            all_ranks: log on every rank.
        """
        if all_ranks or _own_rank() == 0:
            kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1  # the caller's line, not this one
            self.logger.log(level, msg, *args, **kwargs)


def get_logger(name: str) -> RankZeroLogger:
    """Python's logger of this name, logging on rank 0 only.

    Levels, handlers and formats are Python's own: only warnings are shown until a script asks for more, as with
    `logging.basicConfig(level=logging.INFO)`. The rank is looked up when something is logged, so a module may make its
    logger before there is a world. A single process always logs.

    Args:
        name: usually `__name__`.

        >>> logging.basicConfig(level=logging.INFO)                       # else `info` shows nothing
        >>> logger = get_logger(__name__)
        >>> logger.info("loss %.3f", 0.25)                                # once
        >>> logger.info("holds %d samples", 16, all_ranks=True)           # on every rank
    """
    return RankZeroLogger(logging.getLogger(name), {})


def _own_rank() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return env.RANK.get() or 0


def _broadcast_text(flag: bool, text: str, src: int = 0) -> tuple[bool, str]:
    """Return the flag and text of rank `src` on every rank, by two broadcasts, the length first."""
    device = collective_device()
    payload = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
    header = torch.tensor([int(flag), payload.numel()], dtype=torch.int64, device=device)
    dist.broadcast(header, src=src)
    flag, num_bytes = bool(header[0].item()), int(header[1].item())
    if dist.get_rank() != src:
        payload = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    if num_bytes:
        dist.broadcast(payload, src=src)
    return flag, bytes(payload.tolist()).decode()


def _rebuilt(text: str, rank: int = 0) -> errors.LockstepError:
    """Rebuild an error of another rank from its text; only our own classes are looked up by name."""
    class_name, message = text.split("\n", 1)
    kind = getattr(errors, class_name, None) if class_name in errors.__all__ else None
    if kind is not None:
        with contextlib.suppress(TypeError):  # a class whose constructor needs more than a message
            rebuilt = kind(message)
            assert isinstance(rebuilt, errors.LockstepError)
            return rebuilt
        return errors.LockstepError(message)
    return errors.LockstepError(f"rank {rank} failed: {class_name}: {message}")
