"""What is said of a torch that is too old or too new, and the hook that torch 2.15 must not attach."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from lockstep import log
from lockstep.comm import gloo_threads, torch_functions, torch_version
from lockstep.errors import SetupError
from lockstep.torch_private import patching


def test_a_torch_that_is_too_old_is_an_error() -> None:
    for version in ("2.6.0+cpu", "2.13.0", "3.0.0a0+git1234567", "a build of one's own"):
        torch_version.check_oldest(version)
    for version in ("2.5.1+cpu", "1.13.1"):
        with pytest.raises(SetupError, match=rf"this is torch {version.replace('+', '.')}.*needs 2\.6 or newer.*pip"):
            torch_version.check_oldest(version)


def test_one_rank_warns_once_of_a_torch_that_is_too_new(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(log, "_warned", set())
    newest = ".".join(map(str, torch_version.NEWEST_TESTED))
    for version in (f"{newest}.3+cpu", "2.6.0", "a build of one's own"):
        torch_version.warn_if_untested(version, rank=0)
    torch_version.warn_if_untested("9.1.0", rank=1)
    assert capsys.readouterr().err == ""
    for _ in range(2):
        torch_version.warn_if_untested("9.1.0", rank=0)
    (line,) = capsys.readouterr().err.splitlines()
    assert f"torch 9.1.0 is newer than {newest}, the newest" in line


@pytest.fixture
def torchs_own(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[..., Any]], None]:
    """Puts a function into `distributed_c10d`, as if it were that of the torch that runs; it is taken back."""

    def put(name: str, function: Callable[..., Any]) -> None:
        monkeypatch.setattr(distributed_c10d, name, function, raising=False)

    return put


def test_only_our_groups_are_spared_torchs_recorder(
    torchs_own: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    attached: list[Any] = []
    torchs_own("_maybe_attach_flight_recorder", lambda group, *_: attached.append(group))
    for _ in range(2):
        torch_functions.register()
    ours, torchs = SimpleNamespace(engine=None), SimpleNamespace()
    for group in (ours, torchs):
        distributed_c10d._maybe_attach_flight_recorder(group, "config", [0])
    assert attached == [torchs]
    monkeypatch.delattr(distributed_c10d, "_maybe_attach_flight_recorder")  # as before torch 2.15
    monkeypatch.setattr(patching, "warn_missing", pytest.fail)
    torch_functions.register()
    assert not hasattr(distributed_c10d, "_maybe_attach_flight_recorder")


def test_old_torch_shuts_our_groups_down(torchs_own: Callable[..., None]) -> None:
    seen: list[Any] = []
    torchs_own("_shutdown_backend", lambda group: seen.append(group))
    for _ in range(2):
        torch_functions.register()
    torchs = SimpleNamespace()
    distributed_c10d._shutdown_backend(SimpleNamespace(engine=None, shutdown=lambda: seen.append("ours")))
    distributed_c10d._shutdown_backend(torchs)
    assert seen == ["ours", torchs]


def test_gloos_threads_rest_before_groups_are_destroyed(
    torchs_own: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(gloo_threads, "_await_rest", lambda: seen.append("rest"))
    torchs_own("destroy_process_group", seen.append)
    monkeypatch.setattr(dist, "destroy_process_group", distributed_c10d.destroy_process_group)
    for _ in range(2):
        gloo_threads.register()
    dist.destroy_process_group("group")
    assert seen == ["rest", "group"]


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # it has threads, and forks
def test_a_forked_process_knows_its_own_thread_from_those_of_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a torch that gives gloo's threads no names, it would wait in vain for itself to be at rest."""
    monkeypatch.setattr(gloo_threads, "_has_names", lambda: False)
    pid = os.fork()
    if pid == 0:
        others: set[str] = set()
        gloo_threads._asleep(others)
        os._exit(0 if str(os.getpid()) in others else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
