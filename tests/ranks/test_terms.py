"""Ranks that go by different terms, and memory that something else has written into."""

from __future__ import annotations

import json
import time

import pytest
import torch
import torch.distributed as dist

import lockstep
from failing import attempt
from lockstep import env, rank_status
from lockstep.errors import RendezvousError, SegmentDamaged, SetupError
from lockstep.shm import pool, team, terms
from lockstep.shm.bootstrap import Bootstrap
from lockstep.shm.sync import PeerState
from lockstep.shm.team import SharedMemoryTeam
from lockstep.testing import limit_s, run_ranks

CHANGES = {
    "small slots": (team, "SMALL_SLOT_BYTES", 32 << 10),
    "large slots": (team, "LARGE_SLOT_BYTES", 1 << 20),
    "calls kept": (team, "RING", 48),
    "chunks": (team, "CHUNK_BYTES", 4096),
    "layout": (terms, "LAYOUT", 9999),
    "Lockstep": (lockstep, "__version__", "9.9"),
}


def join_with(term: str) -> str:
    """Rank 1 of these ranks is another Lockstep."""
    with pytest.MonkeyPatch.context() as patch:  # the processes go on to other tests
        if env.RANK.get() == 1 and term == "wire":
            patch.setenv("LOCKSTEP_WIRE", "int8")
        elif env.RANK.get() == 1:
            patch.setattr(*CHANGES[term])
        try:
            with lockstep.init(timeout=20, device="cpu"):
                return "met"
        except SetupError as error:
            return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("term", [*CHANGES, "wire"])
def test_ranks_with_other_terms_are_refused_on_all(term: str) -> None:
    """With slots of another size, sums were of other elements; nobody raised."""
    for said in run_ranks(join_with, 3, term, init=False):
        assert said.startswith("SetupError: "), said
        assert "rank 0" in said
        assert "rank 1" in said
        if term == "wire":
            assert "rank 1 was given the wire format int8, rank 0 fp32" in said
        else:
            was, now = {"calls kept": rank_status.RING, "chunks": pool.CHUNK_BYTES}.get(term), CHANGES[term][2]
            assert f"{term} {now} on rank 1 and {was or ''}" in said


def damage(word: str) -> tuple[str, str]:
    """Rank 1's block is written by somebody else, between two collectives."""
    dist.all_reduce(torch.ones(4))
    recorder = dist.group.WORLD.engine.recorder
    words, own = recorder._words, recorder._blocks
    if dist.get_rank() == 1 and word == "step":
        words[own.step_words[1]] += 1 << 20
        until = time.monotonic() + limit_s(20)
        while own.state(0) != PeerState.FAILED and time.monotonic() < until:
            time.sleep(0.001)
    if dist.get_rank() == 1 and word == "fingerprint":
        enter = recorder.enter

        def enter_and_flip(*arguments: object) -> None:
            enter(*arguments)
            words[recorder._slot.fingerprint_word] ^= 1 << 40

        recorder.enter = enter_and_flip
    for _ in range(2):
        caught = attempt(lambda: dist.all_reduce(torch.ones(4)))
        if caught.error is not None:
            break
    return type(caught.error).__name__, str(caught.error)


@pytest.mark.parametrize("word", ["step", "fingerprint"])
def test_damaged_control_segment_is_called_that(word: str) -> None:
    outcomes = run_ranks(damage, 2, word)
    assert outcomes[0][0] == SegmentDamaged.__name__, outcomes
    for _, said in outcomes:
        assert "control segment of this group is damaged" in said
        assert "of rank 1" in said
        assert "Look for a branch" not in said


def read_state() -> str:
    own = dist.group.WORLD.engine.recorder._blocks
    before = own.words[own.state_words[0]]
    own.words[own.state_words[0]] = 4503676936786553
    try:
        own.state(0)
    except SegmentDamaged as error:
        return str(error)
    finally:
        own.words[own.state_words[0]] = before
    return ""


def test_state_that_is_none_is_damage() -> None:
    (said,) = run_ranks(read_state, 1)
    assert "the state of rank 0 is 4503676936786553" in said


class Told:
    """A store in which somebody else has written."""

    def __init__(self, text: str) -> None:
        self._text = text

    def set(self, key: str, value: str) -> None:
        pass

    def find(self, key: str) -> str | None:
        return self._text if key == "segment" else None

    def delete(self, key: str) -> None:
        pass


@pytest.mark.parametrize(
    "text",
    [
        *("not json", "[]", '{"handle": 5}', json.dumps({"error": "x"}), "[" * 100_000),
        json.dumps({"error": "x", "published_at_s": 1}),
        json.dumps({"error": "x", "published_at_s": 1, "boot_id": "b"}),
    ],
)
def test_garbage_in_the_store_is_named(text: str) -> None:
    with pytest.raises(RendezvousError, match="rank 1 found a value in the store that rank 0 did not write"):
        SharedMemoryTeam.connect(Bootstrap(Told(text), 1, (0, 1), 20.0))
