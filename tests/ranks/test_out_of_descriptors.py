"""A process that has no descriptor left: all ranks raise an error with its limit, and continue when there are some."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from failing import AT_ONCE_S, Caught, attempt, group_works
from lockstep.errors import SetupError
from lockstep.testing import limit_s, run_ranks

_WORLD_SIZE = 3


@contextlib.contextmanager
def none_left(spare: int) -> Iterator[None]:
    """Meanwhile this process can open so many descriptors more."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 8, before[1]))
    held: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        while spare and held:
            os.close(held.pop())
            spare -= 1
        yield
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def make_groups(starved: list[int], spare: int) -> tuple[Caught, bool, float]:
    """A group while some ranks have hardly any descriptor, and one when they have again."""
    dist.barrier()
    with none_left(spare) if dist.get_rank() in starved else contextlib.nullcontext():
        caught = attempt(dist.new_group)
    ones = torch.ones(1)
    dist.all_reduce(ones, group=dist.new_group())
    return caught, group_works(), ones.item()


@pytest.mark.parametrize("spare", [0, 1])
@pytest.mark.parametrize("starved", [[0], [2], [0, 1, 2]], ids=str)
def test_new_group_says_so_on_all_ranks(starved: list[int], spare: int) -> None:
    """It raised torch's error where rank 0 had none, and the others waited for the whole timeout."""
    for caught, works, total in run_ranks(make_groups, _WORLD_SIZE, starved, spare):
        assert type(caught.error) is SetupError, caught
        said = str(caught.error)
        assert any(f"rank {rank} cannot join a new group" in said for rank in starved), said
        assert f"descriptors: {spare} are left" in said
        assert "open at a time: close some, or raise the limit (ulimit -n)" in said
        assert caught.seconds < limit_s(AT_ONCE_S)
        assert works
        assert total == _WORLD_SIZE
