"""`hvd.elastic`: training that resumes after a failure. See [Note: two kinds of recovery] in `state.py`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from lockstep.compat.horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from lockstep.compat.horovod.torch.context import init, shutdown
from lockstep.compat.horovod.torch.elastic.sampler import ElasticSampler
from lockstep.compat.horovod.torch.elastic.state import ObjectState, State, TorchState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a training function so that it resumes from its state when ranks fail or change.

    The state is synchronized before each call. When a collective fails, on this rank or on another, all ranks go back
    to the last commit, rejoin, and call the function again; when hosts change, without going back.

    Args:
        func: takes a `State` and other arguments; must not communicate before that.

    Returns:
        A function with the same arguments.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        state.resume()
        skips_sync = False
        while True:
            try:
                if not skips_sync:
                    state.sync()
                return func(state, *args, **kwargs)
            except HorovodInternalError:
                state.restore()
                skips_sync = False
            except HostsUpdatedInterrupt as interrupt:
                skips_sync = interrupt.skip_sync
            shutdown()
            init()
            state.on_reset()

    return wrapper
