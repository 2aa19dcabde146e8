"""The record of torch's own groups, around stand-ins for its methods: what it holds, and what it does per call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d

from lockstep.comm import torch_record
from lockstep.rank_status import FINISHED, NUMBER


class Group:
    group_name = "7"


class Handle:
    """A torch Work."""


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the status file was told that the rank waits for, in order."""
    texts: list[str] = []
    monkeypatch.setattr(torch_record, "_module", distributed_c10d)
    monkeypatch.setattr(torch_record, "_handles", {})
    monkeypatch.setattr(torch_record, "_clears_at", 1024)
    monkeypatch.setattr(torch_record._GroupRecord, "publish_waiting", lambda _, text: texts.append(text))
    return texts


def wait(handle: object) -> None:
    torch_record._recorded_wait(lambda *_: True)(handle)


def test_messages_of_a_batch_have_the_handle_of_the_batch(said: list[str]) -> None:
    """Within a batch nccl's send and recv return None."""
    group = Group()
    send = torch_record._recorded_message(lambda *_: None, "send")
    receive = torch_record._recorded_message(lambda *_: None, "recv")
    end = torch_record._recorded_batch(lambda *_: Handle())
    for _ in range(2):
        assert send(group, [torch.ones(3)], 1, 0) is None
        assert receive(group, [torch.ones(3)], 1, 0) is None
        wait(end(group, torch.device("cpu")))
    first = f"send(float32[3], rank 1 of the group) at {__file__}"
    assert [text.partition(":")[0] for text in said] == [first, "", first, ""]
    assert all(text.endswith(" and 1 more of its batch") for text in said[::2])
    wait(end(group, torch.device("cpu")))
    assert len(said) == 4, "a batch without messages"


def test_a_single_message_is_shown_while_it_is_waited_for(said: list[str]) -> None:
    send = torch_record._recorded_message(lambda *_: Handle(), "send")
    handle = send(Group(), [torch.ones(2, 2)], 3, 0)
    wait(handle)
    assert said[0].startswith("send(float32[2, 2], rank 3 of the group) at ")
    assert said[1:] == [""]


def test_texts_are_made_once_and_calls_are_over_when_waited_for(
    said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    described: list[Any] = []
    monkeypatch.setattr(torch_record, "describe_shape", lambda *what: described.append(what) or "x")
    all_reduce = torch_record._recorded(lambda *_: Handle(), "all_reduce")
    group, tensor = Group(), torch.ones(4, 5)
    words = torch_record._record_of(group)._status.words
    for number in range(1, 50):
        handle = all_reduce(group, [tensor])
        assert (words[NUMBER], words[FINISHED]) == (number, number - 1)
        wait(handle)
        assert words[FINISHED] == number
    assert described == [(torch.float32, torch.Size([4, 5]))]
    all_reduce(group, [torch.ones(2)])
    wait(all_reduce(group, [torch.ones(2, dtype=torch.int32)]))
    assert words[FINISHED] == words[NUMBER] == 51
    assert len(described) == 3


def test_handles_that_nobody_waits_for_are_not_kept(said: list[str]) -> None:
    all_reduce = torch_record._recorded(lambda *_: Handle(), "all_reduce")
    group, tensor = Group(), torch.ones(1)
    held = [all_reduce(group, [tensor]) for _ in range(3000)]
    assert len(torch_record._handles) == 3000
    assert len(held) == 3000
    del held
    for _ in range(5000):
        all_reduce(group, [tensor])
        assert len(torch_record._handles) <= 2 * 3000
    key = id(group)
    assert key in torch_record._records
    del group
    assert key not in torch_record._records


def test_another_object_in_the_same_place_is_not_mistaken(said: list[str]) -> None:
    all_reduce = torch_record._recorded(lambda *_: Handle(), "all_reduce")
    group = Group()
    words = torch_record._record_of(group)._status.words
    other = Handle()
    handle = all_reduce(group, [torch.ones(1)])
    torch_record._handles[id(other)] = torch_record._handles[id(handle)]
    wait(other)
    assert words[FINISHED] == 0
