"""`lockstep bench comm`: sizes, columns, checks, peers' outputs, and a run of two ranks."""

from __future__ import annotations

import argparse
import io
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lockstep.bench.comm as comm
from lockstep.bench import words
from lockstep.bench.comm import columns, measuring, mpi, peers, sizes, verbs
from lockstep.bench.comm.measuring import Buffers, Call, check_call
from lockstep.bench.comm.verbs import DTYPES, OPS, VERBS, VerbContext
from lockstep.bench.harness import Budget, Configuration, Contestant, measure
from lockstep.bench.pages import Table
from lockstep.bench.results import Result, Series, Skipped
from lockstep.bench.session import ProgressLine, Session
from lockstep.errors import InputError
from lockstep.testing.conformance import BACKEND_GAPS
from test_benchmarks import ENVIRONMENT

# ---- options -------------------------------------------------------------------------------------


def test_sizes_as_people_write_them() -> None:
    assert sizes.parse_sizes("4:64", 4) == [4, 16, 64]
    assert sizes.parse_sizes("4:70", 2) == [4, 8, 16, 32, 64]
    assert sizes.parse_sizes("1MiB,64K,4", 4) == [4, 1 << 16, 1 << 20]


@pytest.mark.parametrize(
    ("text", "about"),
    [
        ("4:banana", "'banana' in '4:banana' is not a size"),
        ("", "is not a size"),
        ("0:4", "'0' in '0:4' is not a size"),
        ("64:4", "starts above its end"),
        ("4:8:16", "not a range"),
        ("-4", "is not a size"),
    ],
)
def test_sizes_that_are_none(text: str, about: str) -> None:
    with pytest.raises(InputError, match=about):
        sizes.parse_sizes(text)


def test_words_that_are_none() -> None:
    with pytest.raises(InputError, match="unknown verb 'allreduce', did you mean 'all_reduce'"):
        words.choose("barrier,allreduce", VERBS, "verb")
    with pytest.raises(InputError, match="expected one"):
        words.choose("sum,min", OPS, "op", only_one=True)
    with pytest.raises(InputError, match="expected at least one"):
        words.choose(" , ", OPS, "op")


def _session(tmp_path: Path, nproc: int = 2) -> Session:
    return Session("comm", nproc, 60.0, True, tmp_path, ProgressLine("x", 60, io.StringIO()), environment=ENVIRONMENT)


def _options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    comm.add_arguments(parser)
    return parser.parse_args(arguments)


@pytest.mark.parametrize(
    ("arguments", "about"),
    [
        (["--verbs", "sned_recv"], "did you mean 'send_recv'"),
        (["--dtypes", "float31"], "did you mean 'float32'"),
        (["--backends", "glo"], "did you mean 'gloo'"),
        (["--sizes", "4:banana"], "'banana'"),
        (["--factor", "1"], "at least 2"),
        (["--op", "sub"], "unknown op 'sub'"),
        (["--peer", "/nowhere/IMB-MPI1"], "not an executable program"),
        (["--backends", "nccl", "--no-peers"], "none of the backends can run here: needs a GPU"),
    ],
)
def test_options_that_mean_nothing(tmp_path: Path, arguments: list[str], about: str) -> None:
    if "nccl" in arguments and torch.cuda.device_count() >= 2:
        pytest.skip("this machine has GPUs")
    with pytest.raises(InputError, match=about):
        comm.measure(_options(*arguments), _session(tmp_path))


def test_a_backend_that_is_missing_is_skipped_with_a_reason(tmp_path: Path) -> None:
    session = _session(tmp_path)
    there, started_by = comm._find_backends(["gloo", "mpi"], session, [], {})
    assert (there, started_by) == (["gloo"], None)
    assert comm._find_backends(["gloo", "mpi"], session, [], {"/bin/mpirun": "no mpi4py"}) == (["gloo"], None)
    assert [one.contestant for one in session.skipped] == ["mpi", "mpi"]
    assert ["mpirun" in one.reason for one in session.skipped] == [True, False]


# ---- verbs: every rank in this process -----------------------------------------------------------


class _FakeRanks:
    """What every verb gives each of n ranks, moved by plain indexing: independent of the tables that are tested."""

    def __init__(self, n: int, op: str) -> None:
        self.n, self.op = n, op

    def results(self, name: str, sent: list[torch.Tensor]) -> list[torch.Tensor | None]:
        n = self.n
        stacked = torch.stack(sent)
        whole = {"sum": stacked.sum(0), "min": stacked.amin(0), "max": stacked.amax(0)}[self.op].to(sent[0].dtype)
        chunks = [tensor.chunk(n) for tensor in sent]
        match name:
            case "all_reduce":
                return [whole] * n
            case "reduce":
                return [whole, *[None] * (n - 1)]
            case "broadcast":
                return [sent[0]] * n
            case "all_gather" | "all_gather_into_tensor":
                return [torch.cat(sent)] * n
            case "gather":
                return [torch.cat(sent), *[None] * (n - 1)]
            case "scatter":
                return list(chunks[0])
            case "reduce_scatter" | "reduce_scatter_tensor":
                return list(whole.chunk(n))
            case "all_to_all" | "all_to_all_single":
                return [torch.cat([chunks[source][rank] for source in range(n)]) for rank in range(n)]
            case "send_recv":
                return [sent[0] if rank < 2 else None for rank in range(n)]
        raise AssertionError(name)


MOVING = [name for name in VERBS if name != "barrier"]


@pytest.mark.parametrize("dtype", list(DTYPES.values()), ids=str)
@pytest.mark.parametrize("name", MOVING)
def test_a_check_passes_what_is_right_and_catches_what_is_not(name: str, dtype: torch.dtype) -> None:
    n, count, seed = 3, 5, 11
    verb = VERBS[name]
    for op in OPS if verb.reduces else ["sum"]:
        sent = [torch.empty(count * (n if verb.sends_parts else 1), dtype=dtype) for _ in range(n)]
        for rank, buffer in enumerate(sent):
            verbs.fill_inputs(buffer, rank, n, seed)
        for rank, result in enumerate(_FakeRanks(n, op).results(name, sent)):
            pieces = verb.pieces(n, rank, count)
            assert (result is None) == (not pieces)
            if result is None:
                continue
            assert verbs.count_wrong(result, pieces, count, op, n, seed) == 0
            broken = result.clone()
            broken[2] = broken[2] + 1
            assert verbs.count_wrong(broken, pieces, count, op, n, seed) == 1
            assert verbs.count_wrong(result, pieces, count, op, n, seed + 1) > 0, "values of another check pass"
            rolled = result.roll(1)
            assert verbs.count_wrong(rolled, pieces, count, op, n, seed) > 0, "misplaced values pass"


def test_inputs_stay_exact_and_differ() -> None:
    for dtype, n in itertools.product(DTYPES.values(), (2, 8)):
        inputs = [torch.empty(1000, dtype=dtype) for _ in range(n)]
        for rank, buffer in enumerate(inputs):
            verbs.fill_inputs(buffer, rank, n, 3)
        exact = sum(buffer.to(torch.int64) for buffer in inputs)
        assert torch.equal(exact, exact.to(dtype).to(torch.int64)), dtype  # type: ignore[union-attr]
        assert all(not torch.equal(*pair) for pair in itertools.combinations(inputs, 2))


# ---- a check, with groups that are right or wrong ------------------------------------------------


@pytest.fixture
def alone() -> Iterator[None]:
    """A gloo group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _call(name: str, run: Any = None) -> Call:
    verb = VERBS[name]
    send, recv = Buffers(64, "cpu").take(verb, 4, torch.float32, 1)
    call = Call("fake", verb, VerbContext(None, 0, 1, "sum"), send, recv, 4)
    if run is not None:
        call.run = lambda: run(call)
    return call


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", [name for name in MOVING if name != "send_recv"])
def test_a_backend_that_is_wrong_is_caught(name: str) -> None:
    if name in BACKEND_GAPS["gloo"]:
        pytest.skip(f"gloo: {BACKEND_GAPS['gloo'][name]}")
    assert check_call(_call(name), 1, None) == 0

    def break_one(call: Call) -> None:
        call.verb.bind(call.context, call.send, call.recv)()
        call.recv[3] += 1

    assert check_call(_call(name, break_one), 2, None) == 1
    if not VERBS[name].in_place:
        assert check_call(_call(name, lambda call: None), 3, None) == 4, "a backend that does nothing passes"


@pytest.mark.usefixtures("alone")
def test_a_barrier_that_does_not_wait_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_call(_call("barrier"), 1, None) == 0
    monkeypatch.setattr(measuring, "agree_on_maximum", lambda values, meeting: [values[0] + 1.0])  # somebody came later
    assert check_call(_call("barrier"), 2, None) == 1


@pytest.mark.usefixtures("alone")
def test_a_backend_that_cannot_is_skipped_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("this backend  has no\nall_to_all")

    monkeypatch.setattr(dist, "all_to_all", refuse)
    groups: Any = {"fake": (None, Buffers(64, "cpu"), None)}
    assert measuring.prepare(VERBS["all_to_all"], 1, torch.float32, "sum", groups, None) == (
        [],
        {"fake": "this backend has no all_to_all"},
    )
    assert measuring.prepare(VERBS["send_recv"], 1, torch.float32, "sum", groups, None)[1] == {
        "fake": "needs two ranks"
    }


# ---- columns -------------------------------------------------------------------------------------


def test_bandwidths_by_hand() -> None:
    # 4 ranks, 10^6 bytes in 1 ms are 1 GB/s.
    factors = {"all_reduce": 1.5, "broadcast": 1, "reduce": 1, "send_recv": 1}
    for name in MOVING:
        expected = factors.get(name, 0.75)
        assert columns.bus_bandwidth(name, 10**6, 1e-3, 4) == pytest.approx(expected), name
    assert columns.algorithm_bandwidth(10**6, 1e-3) == pytest.approx(1.0)


def test_counts_and_sizes_as_nccl_tests_has_them() -> None:
    assert (VERBS["all_reduce"].count(1024, 4, 4), VERBS["all_reduce"].size_bytes(256, 4, 4)) == (256, 1024)
    assert (VERBS["all_gather"].count(1024, 4, 4), VERBS["all_gather"].size_bytes(64, 4, 4)) == (64, 1024)
    assert (VERBS["reduce_scatter"].count(4, 4, 4), VERBS["reduce_scatter"].size_bytes(1, 4, 4)) == (1, 16)
    assert (VERBS["barrier"].count(4, 4, 4), VERBS["barrier"].size_bytes(0, 4, 4)) == (0, 0)


def _result(*series: Series, skipped: tuple[Skipped, ...] = ()) -> Result:
    return Result("comm", False, ENVIRONMENT, {"nproc": 2}, list(series), list(skipped))


def test_rows() -> None:
    parameters = verbs.parameters_of(VERBS["all_gather"], 128, "float32", "sum", 2)
    good = Series(parameters, "gloo", 10, [1e-6, 1e-6, 1e-6], {"wrong": 0})
    bad = Series(parameters, "lockstep", 10, [2e-6, 1e-6, 3e-6], {"wrong": 7})
    unchecked = Series(parameters, "Open MPI 4 (mpi4py)", 10, [1e-6])
    skips = (
        Skipped({}, "nccl", "no GPU"),
        Skipped({"verb": "gather", "dtype": "int8"}, "gloo", "cannot"),
        Skipped({"verb": "scatter", "dtype": "int8"}, "gloo", "cannot"),
    )
    found = columns.blocks(_result(good, bad, unchecked, skipped=skips))
    (table,) = [block for block in found if isinstance(block, Table)]
    rows = [dict(zip(table.header, row, strict=True)) for row in table.rows]
    assert [row["#wrong"] for row in rows] == ["0", "**7**", "N/A"]
    assert rows[1] == {
        "backend": "lockstep",
        "size B": "1024",
        "count": "128",
        "type": "float32",
        "redop": "none",
        "time µs": "2.00",
        "10–90 %": "1.20–2.80",
        "algbw GB/s": "0.512",
        "busbw GB/s": "0.256",
        "#wrong": "**7**",
    }
    assert found[-1] == "- nccl: no GPU\n- gloo: gather int8, scatter int8: cannot"
    assert len(columns.draw(_result(good, bad, unchecked)).axes) == 2


# ---- peers ---------------------------------------------------------------------------------------

IMB_OUTPUT = """\
# Benchmarking Allgather
# #processes = 2
#----------------------------------------------------------------
       #bytes #repetitions  t_min[usec]  t_max[usec]  t_avg[usec]
            0          100         0.10         0.20         0.15
         4096          200         1.00         1.25         1.10
            8 time-out.; Time limit (secs_per_sample * msg_sizes_list_len) is over

#---------------------------------------------------
# Benchmarking PingPong
# #processes = 2
       #bytes #repetitions      t[usec]   Mbytes/sec
            4          200         0.53         7.55

# Benchmarking Barrier
 #repetitions  t_min[usec]  t_max[usec]  t_avg[usec]
          200         0.33         0.35         0.34

# Benchmarking Exotic
       #bytes #repetitions  t_min[usec]  t_max[usec]  t_avg[usec]
            4          200         0.33         0.35         0.34
"""


def test_what_imb_prints() -> None:
    found = [(one.verb, one.size_bytes, one.seconds, one.iterations) for one in peers.parse_imb(IMB_OUTPUT)]
    assert found == [
        ("all_gather", 4096, 1.25e-6, 200),
        ("send_recv", 4, 0.53e-6, 200),
        ("barrier", 0, 0.35e-6, 200),
    ]


def _script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_imb_is_asked_for_the_part_of_a_rank(tmp_path: Path) -> None:
    """8 KiB gathered from 2 ranks are messages of 4 KiB; and torch's two names are one verb of MPI's."""
    (tmp_path / "said").write_text(IMB_OUTPUT)
    _script(tmp_path / "mpiexec", f'printf "%s\\n" "$*" >> {tmp_path}/asked; cat {tmp_path}/said')
    peer = peers.Imb(_script(tmp_path / "IMB-MPI1", "exit 1")).peer()
    found = peer.run(2, ["all_gather_into_tensor", "barrier"], [8192], 1.0)
    assert [(one.verb, one.size_bytes) for one in found if one.verb.startswith("all")] == [
        ("all_gather_into_tensor", 8192)
    ]
    asked = (tmp_path / "asked").read_text().splitlines()
    assert [line.rpartition(" ")[2] for line in asked] == ["Barrier", "Allgather"]


def test_a_peer_that_fails_says_why(tmp_path: Path) -> None:
    _script(tmp_path / "mpiexec", "echo cannot open libmpi.so.12 >&2; exit 127")
    peer = peers.Imb(_script(tmp_path / "IMB-MPI1", "exit 1")).peer()
    with pytest.raises(peers.PeerFailed, match="exited with 127: cannot open libmpi"):
        peer.run(2, ["all_reduce"], [4], 0.1)


def test_peers_that_are_missing_have_reasons(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(peers.shutil, "which", lambda name: None)
    monkeypatch.setattr(peers.sys, "executable", str(tmp_path / "python"))
    found, missing = peers.find_peers([], [], {"/bin/mpirun": "it sees 1 rank"})
    assert (found, set(missing)) == ([], {"Intel MPI (IMB)", "MPI by /bin/mpirun"})


def test_an_mpi_of_another_library_is_no_peer(tmp_path: Path) -> None:
    command = _script(tmp_path / "mpiexec", '[ "$1" = --version ] && exit; echo "found 1 MPICH Version: 4.0"')
    found, reason = mpi.probe(command, 2)
    assert found is None
    assert "it sees 1 rank, not 2" in reason


def test_an_mpirun_without_mpi4py_says_how_to_get_it(tmp_path: Path) -> None:
    said = "ModuleNotFoundError: No module named 'mpi4py'"
    command = _script(tmp_path / "mpiexec", f'[ "$1" = --version ] && exit; echo "{said}" >&2; exit 1')
    assert mpi.probe(command, 2) == (None, "mpi4py is not installed: pip install mpi4py")


# ---- end to end ----------------------------------------------------------------------------------


def test_two_ranks(tmp_path: Path) -> None:
    session = _session(tmp_path)
    options = _options(
        "--check",
        "--no-peers",
        "--backends",
        "gloo,lockstep",
        "--sizes",
        "4,4K",
        "--verbs",
        "all_reduce,gather,barrier",
    )
    comm.measure(options, session)
    found = {(one.parameters["verb"], one.parameters["bytes"], one.contestant) for one in session.series}
    expected = {("barrier", 0), ("all_reduce", 4), ("all_reduce", 4096), ("gather", 8), ("gather", 4096)}
    assert found == {(*key, backend) for key in expected for backend in ("gloo", "lockstep")}
    assert all(one.facts == {"wrong": 0} and one.samples_s for one in session.series)
    assert session.failure == ""
    assert columns.blocks(session.result(complete=True))


def test_ctrl_c_keeps_what_has_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.bench import ranks

    parameters = verbs.parameters_of(VERBS["barrier"], 0, "float32", "sum", 2)
    series = {"parameters": parameters, "contestant": "gloo", "iterations": 1, "samples_s": [1e-6]}

    def run_ranks(*_: object, on_part: Any, **__: object) -> None:
        on_part({"series": [series], "done": 1})
        raise KeyboardInterrupt

    monkeypatch.setattr(ranks, "run_ranks", run_ranks)
    session = _session(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        comm.measure(_options("--no-peers", "--backends", "gloo", "--verbs", "barrier"), session)
    assert [one.contestant for one in session.series] == ["gloo"]


@pytest.mark.usefixtures("alone")
def test_nothing_is_measured_when_the_budget_is_spent() -> None:
    calls: list[int] = []
    reported: list[object] = []
    budget = Budget(seconds=0.001, sample_s=1e-6, min_rounds=2, max_rounds=2, sweeps=2)
    configurations = [
        Configuration({"n": number}, [Contestant("a", lambda number=number: calls.append(number))])
        for number in range(2)
    ]
    left = iter([1.0, 0.0])  # seconds: the first configuration has some, the second has none
    found = measure(configurations, budget, left_s=lambda: next(left), report=reported.append)
    assert [one.parameters for one in found] == [{"n": 0}]
    assert set(calls) == {0}
    assert len(reported) == 1


@pytest.mark.usefixtures("alone")
def test_what_only_begins_is_settled_in_its_own_time() -> None:
    said: list[str] = []
    contestant = Contestant("gpu", lambda: said.append("call"), lambda: said.append("settle"))
    measure([Configuration({}, [contestant])], Budget(1e-6, 1e-9, min_rounds=1, max_rounds=1, sweeps=1))
    assert said[-3:] == ["settle", "call", "settle"]


def test_wrong_elements_make_the_run_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.bench import ranks

    parameters = verbs.parameters_of(VERBS["reduce"], 1, "float32", "sum", 2)

    def run_ranks(*_: object, on_part: Any, **__: object) -> dict[str, bool]:
        on_part({"items": 1})
        on_part(
            {
                "series": [
                    {
                        "parameters": parameters,
                        "contestant": "gloo",
                        "iterations": 1,
                        "samples_s": [1e-6],
                        "facts": {"wrong": 3},
                    }
                ],
                "done": 1,
            }
        )
        return {"complete": False}

    monkeypatch.setattr(ranks, "run_ranks", run_ranks)
    session = _session(tmp_path)
    comm.measure(_options("--no-peers", "--backends", "gloo", "--verbs", "reduce"), session)
    assert session.failure == "3 wrong elements: see the rows with #wrong"
    assert [one.contestant for one in session.skipped] == ["the larger sizes"], "an early end is not said"
