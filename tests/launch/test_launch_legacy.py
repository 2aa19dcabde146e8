"""`lockstep launch`: the command line of torch.distributed.launch, as it was typed between 2018 and today."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from launching import Launches
from lockstep import cli
from lockstep.commands import launch
from lockstep.errors import LaunchError
from lockstep.launch.config import LaunchConfig
from lockstep.launch.free_port import find_free_port
from lockstep.testing import limit_s

SCRIPT = """
import argparse, json
parser = argparse.ArgumentParser()
parser.add_argument('{option}', type=int, default=-1)
parser.add_argument('--lr', type=float)
args = parser.parse_args()
names = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'MASTER_ADDR', 'MASTER_PORT', 'GROUP_RANK')
sys.stdout.write(json.dumps([args.local_rank, args.lr, sys.argv[1:], *(os.environ[name] for name in names)]) + '\\n')
assert 'torch' not in sys.modules
"""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[LaunchConfig]:
    """Jobs that would have been started on this host."""
    configs: list[LaunchConfig] = []
    monkeypatch.setattr(launch, "launch_job", lambda config: configs.append(config) or 0)
    return configs


@pytest.mark.parametrize("option", ["--local_rank", "--local-rank"])
def test_local_rank_comes_as_the_script_declares_it(launches: Launches, option: str) -> None:
    script = launches.script(SCRIPT.format(option=option))
    done = launches.run("--nproc_per_node=2", "--master_port=29876", script, "--lr", "0.1", command="launch")
    assert (done.returncode, done.stderr) == (0, "")
    found = sorted(json.loads(line) for line in done.stdout.splitlines())
    for rank, (local_rank, lr, argv, *variables) in enumerate(found):
        assert (local_rank, lr) == (rank, 0.1)
        assert argv == [f"{option}={rank}", "--lr", "0.1"]
        assert variables == [str(rank), "2", str(rank), "127.0.0.1", "29876", "0"]


def test_as_a_module(launches: Launches) -> None:
    script = launches.script(SCRIPT.format(option="--local-rank"))
    command = [sys.executable, "-m", "lockstep", "launch", "--nproc-per-node", "1", script]
    done = subprocess.run(
        command, cwd=launches.folder, env=launches.environment(), capture_output=True, text=True, timeout=limit_s(60)
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)[0] == 0
    wrong = subprocess.run([*command[:4], "missing.py"], capture_output=True, text=True, timeout=limit_s(60))
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("lockstep: error: script 'missing.py' not found")


def test_two_hosts(launches: Launches) -> None:
    script = launches.script(SCRIPT.format(option="--local_rank"))
    port = find_free_port()
    nodes = [
        launches.start(
            *("--nproc_per_node=2", "--nnodes=2", f"--node_rank={node}", "--master_addr=127.0.0.1"),
            *(f"--master_port={port}", script),
            command="launch",
        )
        for node in (0, 1)
    ]
    found = []
    for process in nodes:
        out, err = process.communicate(timeout=limit_s(60))
        assert process.returncode == 0, err
        found += [json.loads(line) for line in out.splitlines()]
    assert [(each[3], each[0], each[8]) for each in sorted(found, key=lambda each: each[3])] == [
        ("0", 0, "0"),
        ("1", 1, "0"),
        ("2", 0, "1"),
        ("3", 1, "1"),
    ]


def test_a_program_that_is_no_script(launches: Launches) -> None:
    words = ("--no_python", "--use_env", "--nproc_per_node", "2", "sh", "-c", "echo $LOCAL_RANK $0; exit $LOCAL_RANK")
    done = launches.run(*words, "--local_rank", command="launch")
    assert sorted(done.stdout.splitlines()) == ["0 --local_rank", "1 --local_rank"]
    assert done.returncode == 1


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], {"nproc": "1", "local_rank_option": "--local_rank", "master_port": None, "prefix": False}),
        (["--nproc_per_node", "4"], {"nproc": "4"}),
        (["--nproc-per-node=gpu"], {"nproc": "gpu"}),
        (["--nproc", "3"], {"nproc": "3"}),
        (["--nproc_per", "3"], {"nproc": "3"}),
        (["--nnodes=1", "--node_rank=0", "--master_addr=localhost"], {"master_addr": "localhost"}),
        (["--nnodes=1:1", "--master-port", "29500"], {"master_port": 29500}),
        (["--use_env"], {"local_rank_option": None}),
        (["--use-env"], {"local_rank_option": None}),
        (["--use_env=True"], {"local_rank_option": None}),
        (["--use_env=False"], {"local_rank_option": "--local_rank"}),
        (["--nproc_per", "2", "--use-env=1", "--master_port", "7"], {"local_rank_option": None, "nproc": "2"}),
        (["--standalone", "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", "--rdzv_id", "x"], {"nproc": "1"}),
        (["--max_restarts=3"], {"max_restarts": 3}),
        (["--max-restarts", "3", "--shutdown-timeout=2"], {"max_restarts": 3, "grace_s": 2.0}),
        (["--logdir", "logs"], {"log_dir": "logs"}),
        (["--log_dir", "logs", "-r", "3"], {"log_dir": "logs"}),
        (["--log-dir=logs", "--redirects=0:1"], {"log_dir": "logs"}),
    ],
)
def test_every_spelling(started: list[LaunchConfig], words: list[str], expected: dict[str, Any]) -> None:
    assert cli.main(["launch", *words, "main.py", "--lr", "1", "--nproc_per_node=9", "--use_env=False"]) == 0
    (config,) = started
    assert config.target == "main.py"
    assert config.args == ("--lr", "1", "--nproc_per_node=9", "--use_env=False")
    assert {name: getattr(config, name) for name in expected} == expected


def test_modules_and_no_shims(started: list[LaunchConfig]) -> None:
    assert cli.main(["launch", "-m", "--no-compat", "json.tool", "x"]) == 0
    assert cli.main(["launch", "--no_python", "--use_env", "sh", "-c", "true"]) == 0
    module, program = started
    assert (module.target, module.is_module, module.args) == ("json.tool", True, ("x",))
    assert module.environment is not None
    assert module.environment["LOCKSTEP_COMPAT"] == "False"
    assert (program.target, program.is_module) == ("lockstep.launch.program", True)
    assert program.args == ("sh", "-c", "true")
    assert program.local_rank_option is None
    assert program.environment is not None
    assert not {"LOCKSTEP_COMPAT", "LOCKSTEP_OLD_TORCH"} & set(program.environment)


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["--monitor_interval", "5"], "--monitor_interval"),
        (["--start-method=spawn"], "--start_method"),
        (["-t", "3"], "--tee"),
        (["--log_dir", "logs"], "--log_dir"),
    ],
)
def test_what_changes_nothing_says_so(
    started: list[LaunchConfig], capfd: pytest.CaptureFixture[str], words: list[str], option: str
) -> None:
    assert cli.main(["launch", *words, "main.py"]) == 0
    assert capfd.readouterr().err.startswith(f"lockstep: warning: {option} has no effect: ")
    assert started[0].log_dir is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the following arguments are required: training_script"),
        (["--master_adderss", "1.2.3.4", "main.py"], "--master_adderss, did you mean '--master_addr'?"),
        (["--nproc_per_node=x", __file__], "nproc is 'x'"),
        (["--no_python", "sh"], "--no_python needs --use_env"),
        (["--no_python", "--use_env", "-m", "sh"], "mutually exclusive"),
        (["--no_python", "--use_env", "no-such-program"], "program 'no-such-program' not found"),
        (["--local_ranks_filter=0", "main.py"], "--local_ranks_filter is not supported here; use --log_dir"),
        (["--virtual-local-rank", "main.py"], "--virtual_local_rank is not supported"),
        (["--nnodes=2", "--node_rank=2", "--master_addr=a", "main.py"], "hosts are counted from 0 to 1"),
        (["missing.py"], "script 'missing.py' not found"),
    ],
)
def test_errors_are_one_line(capfd: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert cli.main(["launch", *words]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("lockstep: error: ")
    assert err.count("\n") == 1
    assert message in err


def test_several_hosts_take_torchs_defaults() -> None:
    chosen = launch.parse(["--nnodes=2", "main.py"])
    options = launch._host_options(chosen)
    assert (options.master_addr, options.node_rank) == ("127.0.0.1", 0)
    chosen = launch.parse(["--nnodes=1:4", "--rdzv_backend=c10d", "--rdzv_endpoint=h:1", "--master_port=3", "main.py"])
    options = launch._host_options(chosen)
    assert (options.rdzv_endpoint, options.master_addr, options.master_port) == ("h:1", None, None)
    with pytest.raises(LaunchError, match="ambiguous option"):
        launch.parse(["--no", "main.py"])
