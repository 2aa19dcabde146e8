"""Slurm's shorthands, and who a task of it is."""

from __future__ import annotations

import itertools
import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import SetupError
from lockstep.testing import limit_s
from lockstep.topology import Topology, read_topology, slurm
from lockstep.topology.slurm import describe_allocation, read_step
from lockstep.topology.slurm_forms import expand_counts, expand_hosts

# What srun of Slurm 22.05 sets for the last of three tasks on two nodes.
TASK = {
    "SLURM_JOB_ID": "1",
    "SLURM_JOBID": "1",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_NODELIST": "n[1-2]",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_NPROCS": "3",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "2",
    "SLURM_STEPID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_TASKS_PER_NODE": "2,1",
}
# What the shell of its batch script sees.
BATCH = {name: text for name, text in TASK.items() if "STEP" not in name} | {"SLURM_PROCID": "0", "SLURM_NODEID": "0"}
ALLOCATION = {name: text for name, text in BATCH.items() if name not in ("SLURM_PROCID", "SLURM_NODEID")}

# One task on each of two nodes, on the second.
ONE_PER_NODE = TASK | {
    "SLURM_NTASKS": "2",
    "SLURM_NPROCS": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_TASKS_PER_NODE": "1(x2)",
}


def without(variables: dict[str, str], *names: str) -> dict[str, str]:
    return {name: text for name, text in variables.items() if name not in names}


# ---- host lists -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("login", "login"),
        ("n1,n2", "n1 n2"),
        ("n[1-3,7],gpu-a[01-04]x,login", "n1 n2 n3 n7 gpu-a01x gpu-a02x gpu-a03x gpu-a04x login"),
        ("n[08-11]", "n08 n09 n10 n11"),
        ("n[8-011]", "n8 n9 n10 n11"),
        ("n[001,2,03]", "n001 n2 n03"),
        ("n[98-102]", "n98 n99 n100 n101 n102"),
        ("r[1-2]n[3,5-6]", "r1n3 r1n5 r1n6 r2n3 r2n5 r2n6"),
        ("r[1-2]n[1-2]s[08-09].cluster.org", "r1n1s08 r1n1s09 r1n2s08 r1n2s09 r2n1s08 r2n1s09 r2n2s08 r2n2s09"),
        ("n[1-2][3-4]", "n13 n14 n23 n24"),
        ("[1-3]", "1 2 3"),
        ("n1,n1", "n1 n1"),
        ("a,,b,", "a b"),
    ],
)
def test_hosts(text: str, hosts: str) -> None:
    suffix = ".cluster.org" if text.endswith(".cluster.org") else ""
    assert expand_hosts(text) == tuple(host + suffix for host in hosts.split())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no host"),
        (",", "names no host"),
        ("n[1-2", "not closed"),
        ("n1]", "a bracket too many at ']'"),
        ("n[[1]]", "a bracket too many"),
        ("n[]", "'' is neither a number nor a range"),
        ("n[1,]", "'' is neither"),
        ("n[3-1]", "'3-1' ends before it begins"),
        ("n[a-b]", "'a-b' is neither"),
        ("n[1-2-3]", "'1-2-3' is neither"),
        ("n[-2]", "'-2' is neither"),
        ("n[1-3:2]", "'1-3:2' is neither"),
        ("n[²]", "'²' is neither"),
        ("n[1-99999]", "more than 65536"),
        ("n[1-300][1-300]", "more than 65536"),
        ("n[1-60000],m[1-60000]", "more than 65536"),
        ("n[1-99999999999999999999]", "more than 65536"),
    ],
)
def test_what_is_no_host_list(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("[", r"\[").replace("]", r"\]")):
        expand_hosts(text)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[str, list[str]]:
    """The inside of a bracket, and the numbers that it stands for."""
    texts, numbers = [], []
    for _ in range(draw(st.integers(1, 3))):
        first = draw(st.integers(0, 120))
        width = draw(st.integers(1, 4))
        last = first + draw(st.integers(0, 4))
        text = str(first).zfill(width)
        count = last - first + 1
        texts.append(text if count == 1 and draw(st.booleans()) else f"{text}-{str(last).zfill(width)}")
        numbers.extend(str(first + step).rjust(len(text), "0") for step in range(count))
    return ",".join(texts), numbers


literals = st.text("abcxyz-._09", max_size=5)


@st.composite
def host_lists(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A host list as Slurm writes it, and its hosts."""
    names, hosts = [], []
    for _ in range(draw(st.integers(1, 4))):
        head = "n" + draw(literals)
        text, choices = head, [[head]]
        for _ in range(draw(st.integers(0, 2))):
            inside, numbers = draw(ranges())
            tail = draw(literals)
            text += f"[{inside}]{tail}"
            choices += [numbers, [tail]]
        names.append(text)
        hosts.extend("".join(parts) for parts in itertools.product(*choices))
    return ",".join(names), hosts


@given(host_lists())
def test_every_host_list_comes_back(case: tuple[str, list[str]]) -> None:
    text, hosts = case
    assert list(expand_hosts(text)) == hosts


@given(st.text("n1-[],(x)0 ", max_size=12))
def test_any_text_is_hosts_or_a_value_error(text: str) -> None:
    try:
        hosts = expand_hosts(text)
    except ValueError:
        return
    assert hosts
    assert all(hosts)
    assert not any(set("[],") & set(host) for host in hosts)


# ---- counts per host ------------------------------------------------------------------------------


def compress(counts: list[int]) -> str:
    """As Slurm writes them."""
    runs = [(count, len(list(group))) for count, group in itertools.groupby(counts)]
    return ",".join(str(count) if length == 1 else f"{count}(x{length})" for count, length in runs)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30))
def test_counts_come_back(counts: list[int]) -> None:
    assert list(expand_counts(compress(counts))) == counts


@pytest.mark.parametrize(("text", "counts"), [("2(x2),1", (2, 2, 1)), ("1(x2)", (1, 1)), ("3,1", (3, 1)), ("4", (4,))])
def test_counts(text: str, counts: tuple[int, ...]) -> None:
    assert expand_counts(text) == counts


@pytest.mark.parametrize("text", ["", "x2", "2(x)", "2x2", "2(x2", "-1", "2,,1", "1(x99999999)", "1 "])
def test_what_are_no_counts(text: str) -> None:
    with pytest.raises(ValueError):
        expand_counts(text)


# ---- inside a step --------------------------------------------------------------------------------


def test_task_of_a_step() -> None:
    assert read_topology(TASK) == Topology(2, 3, 0, 1, 1, 2, "slurm", ("n1", "n2"))


def test_uneven_tasks_per_node() -> None:
    first = TASK | {"SLURM_NODEID": "0", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"}
    topology = read_topology(first)
    assert (topology.local_rank, topology.local_world_size, topology.node_rank) == (1, 2, 0)


def test_step_on_some_of_the_nodes_of_its_job() -> None:
    step = TASK | {
        "SLURM_STEP_NODELIST": "n2",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_NNODES": "1",
        "SLURM_NODEID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "3",
        "SLURM_TASKS_PER_NODE": "3",
        "SLURM_LOCALID": "2",
    }
    assert read_topology(step) == Topology(2, 3, 2, 3, 0, 1, "slurm", ("n2",))


def test_step_of_one_task_is_a_world_of_one() -> None:
    alone = without(TASK, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_STEP_NUM_NODES", "SLURM_NNODES")
    alone |= {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_NODEID": "0"}
    assert read_topology(alone) == Topology(0, 1, 0, 1, 0, 1, "slurm"), "the job's two nodes are not the step's"


def test_older_names_suffice() -> None:
    old = without(TASK, *(name for name in TASK if name.startswith(("SLURM_STEP_", "SLURM_JOB_"))), "SLURM_NTASKS")
    assert read_topology(old) == read_topology(TASK)


def test_step_knows_its_job() -> None:
    step = read_step(TASK | {"SLURM_RESTART_COUNT": "3", "SLURM_STEP_ID": "5"})
    assert step is not None
    assert (step.job_id, step.step_id, step.restart_count) == (1, 5, 3)
    assert (step.num_tasks, step.num_nodes) == (3, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, r"3 tasks on 2 nodes, but tasks per node are \[2, 2\]"),
        ({"SLURM_STEP_TASKS_PER_NODE": "3"}, r"tasks per node are \[3\]"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2;1"}, "SLURM_STEP_TASKS_PER_NODE='2;1' '2;1' is neither a number"),
        ({"SLURM_STEP_NODELIST": "n[1-"}, r"SLURM_STEP_NODELIST='n\[1-' has a bracket that is not closed"),
        ({"SLURM_NODEID": "2"}, "SLURM_NODEID is 2, but the step has 2 nodes: expected 0 … 1"),
        ({"SLURM_LOCALID": ""}, "SLURM_LOCALID is not set, but SLURM_STEP_ID is"),
        ({"SLURM_LOCALID": "1"}, "local_rank is 1, but local_world_size is 1"),
        ({"SLURM_PROCID": "3"}, "rank is 3, but world_size is 3"),
        ({"SLURM_PROCID": "three"}, "SLURM_PROCID='three'"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE is 4, but slurm started 3 ranks"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "RANK is 0 and WORLD_SIZE is 1, but slurm started 3 ranks: unset RANK and"),
    ],
)
def test_contradictions_are_said(changes: dict[str, str], message: str) -> None:
    with pytest.raises(SetupError, match=message):
        read_topology({**TASK, **changes})


# ---- beside a step --------------------------------------------------------------------------------


SINGLE = Topology(0, 1, 0, 1)


@pytest.mark.parametrize(
    "variables",
    [
        BATCH,
        ALLOCATION,
        pytest.param({**BATCH, "SLURM_STEP_ID": "4294967291"}, id="step of the batch script"),
        pytest.param({**TASK, "SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "0"}, id="shell that salloc opens"),
        pytest.param({**TASK, "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, id="submitted from inside of a step"),
    ],
)
def test_shell_of_a_job_is_one_process(variables: dict[str, str]) -> None:
    assert read_topology(variables) == SINGLE
    assert "job 1 of Slurm has" in (describe_allocation(variables) or "")


PTY = TASK | {"SLURM_PTY_PORT": "40001", "SLURM_PROCID": "0", "SLURM_NODEID": "0"}


def test_what_is_started_in_a_shell_of_srun_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """`srun -n3 --pty bash`, and then `python train.py`: no other task runs the script."""
    monkeypatch.setattr(slurm, "is_in_a_shell_of_slurm", lambda pid: pid == os.getppid())
    assert read_topology(PTY) == SINGLE
    assert describe_allocation(PTY) == "job 1 of Slurm has 3 tasks on 2 nodes"
    assert read_topology(PTY | {"SLURM_PROCID": "1", "SLURM_LOCALID": "1"}).world_size == 3, "srun has started it"
    monkeypatch.setattr(slurm, "is_in_a_shell_of_slurm", lambda pid: False)
    assert read_topology(PTY).world_size == 3, "srun --pty python train.py"


@pytest.mark.parametrize(
    ("options", "is_dialog"),
    [(["-s"], True), (["--norc", "-i"], True), (["-c", "cat; true"], False), (["x.sh"], False)],
)
def test_shell_that_somebody_types_into(options: list[str], is_dialog: bool, tmp_path: Path) -> None:
    """Told from one that runs a script; and so is what is started from there."""
    (tmp_path / "x.sh").write_text("echo here; cat")
    shell = subprocess.Popen(
        ["bash", *options], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert shell.stdin is not None
    assert shell.stdout is not None
    try:
        shell.stdin.write(b"echo here\n")
        shell.stdin.flush()
        assert b"here" in shell.stdout.readline()
        # This test itself may have been started in such a shell.
        assert slurm.is_in_a_shell_of_slurm(shell.pid) is (is_dialog or slurm.is_in_a_shell_of_slurm(os.getpid()))
    finally:
        shell.communicate(timeout=limit_s(30))


def test_allocation_is_described_where_one_process_leaves_it_unused() -> None:
    assert describe_allocation(BATCH) == "job 1 of Slurm has 3 tasks on 2 nodes"
    assert describe_allocation(without(ALLOCATION, "SLURM_NTASKS", "SLURM_NPROCS")) == (
        "job 1 of Slurm has 2 tasks on 2 nodes"
    )
    assert describe_allocation(BATCH | {"SLURM_NNODES": "1"}) == "job 1 of Slurm has 3 tasks on 1 node"
    assert describe_allocation(BATCH | {"SLURM_NNODES": "1", "SLURM_NTASKS": "1"}) is None
    assert describe_allocation(TASK) is None
    assert describe_allocation({}) is None


# ---- together with other launchers and with arguments ----------------------------------------------


def test_launcher_inside_of_a_step_knows_better() -> None:
    torchrun = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1"}
    assert read_topology({**ONE_PER_NODE, **torchrun, "TORCHELASTIC_RUN_ID": "x"}) == (
        Topology(5, 8, 1, 4, 1, 2, "torchrun")
    )
    alone = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    assert read_topology({**ONE_PER_NODE, **alone, "LOCKSTEP_RENDEZVOUS": "/tmp/x"}) == (
        Topology(1, 2, 1, 2, 0, 1, "lockstep")
    )


def test_ranks_of_a_launcher_may_be_fewer_than_the_tasks_of_the_step() -> None:
    """`srun lockstep run` starts a job in each task, and says so."""
    one = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for launcher in ("LOCKSTEP_RENDEZVOUS", "TORCHELASTIC_RUN_ID"):
        assert read_topology({**TASK, **one, launcher: "x"}).world_size == 1
    assert read_topology({**TASK, "RANK": "3", "WORLD_SIZE": "6"}).world_size == 6, "a script that starts ranks itself"
    assert read_topology(TASK, rank=0, world_size=1).world_size == 1, "arguments say what is meant"


@pytest.mark.parametrize("by_argument", [True, False])
def test_numbers_of_the_step_given_by_hand_are_placed_in_it(by_argument: bool) -> None:
    placed = (
        read_topology(TASK, rank=2, world_size=3)
        if by_argument
        else read_topology({**TASK, "RANK": "2", "WORLD_SIZE": "3"})
    )
    assert placed == read_topology(TASK)


def test_world_size_alone_may_be_exported_if_it_is_true() -> None:
    assert read_topology({**TASK, "WORLD_SIZE": "3"}) == read_topology(TASK)


@pytest.mark.parametrize(("rank", "local_rank"), [(4, 0), (7, 3)])
def test_one_task_per_node_that_spawns_its_ranks(rank: int, local_rank: int) -> None:
    topology = read_topology(ONE_PER_NODE, rank=rank, world_size=8)
    assert topology == Topology(rank, 8, local_rank, 4, 1, 2, "slurm", ("n1", "n2"))


@pytest.mark.parametrize(
    ("variables", "rank", "world_size"),
    [
        (ONE_PER_NODE, 0, 8),  # of the other node
        (ONE_PER_NODE, 3, 7),  # not the same number on each node
        (ONE_PER_NODE, 0, 1),  # fewer than nodes
        (TASK, 1, 4),  # several tasks on a node
        (TASK, 1, 3),  # another task's
        (BATCH, 1, 2),  # not in a step
    ],
)
def test_other_numbers_are_taken_as_they_are(variables: dict[str, str], rank: int, world_size: int) -> None:
    assert read_topology(variables, rank=rank, world_size=world_size) == (
        Topology(
            rank,
            world_size,
            rank,
            world_size,
            0,
            1,
            "environment",
            unsaid=("local_world_size", "local_rank", "node_rank", "num_nodes"),
        )
    )
