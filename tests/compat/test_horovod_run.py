"""`horovod.run`, the command line of horovodrun, and the table of names."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from lockstep.commands import horovodrun
from lockstep.compat import horovod
from lockstep.compat.horovod.runner import is_this_host, parse_hosts
from lockstep.errors import InputError, LaunchError

# What scripts find in Horovod.
NAMES = """
init shutdown is_initialized size local_size cross_size rank local_rank cross_rank is_homogeneous mpi_threads_supported
mpi_enabled mpi_built gloo_enabled gloo_built nccl_built ddl_built ccl_built cuda_built rocm_built start_timeline
stop_timeline Average Sum Adasum Min Max Product HorovodInternalError HostsUpdatedInterrupt global_process_set allreduce
allreduce_async allreduce_ allreduce_async_ grouped_allreduce grouped_allreduce_async grouped_allreduce_
grouped_allreduce_async_ sparse_allreduce_async allgather allgather_async grouped_allgather grouped_allgather_async
broadcast broadcast_async broadcast_ broadcast_async_ alltoall alltoall_async reducescatter reducescatter_async
grouped_reducescatter grouped_reducescatter_async join barrier poll synchronize DistributedOptimizer Compression
broadcast_parameters broadcast_optimizer_state broadcast_object allgather_object SyncBatchNorm ProcessSet
add_process_set remove_process_set elastic elastic.run elastic.TorchState elastic.ElasticSampler
"""

_ROW = re.compile(r"^(?P<names>\S[^|]*?) *\| (?P<what>supported|different|refused) *\| ?(?P<remark>.*)$", re.MULTILINE)


def _tables() -> list[dict[str, tuple[str, str]]]:
    assert horovod.__doc__ is not None
    tables = []
    for part in horovod.__doc__.split("\n\n"):
        rows = {
            name.strip(): (match["what"], match["remark"])
            for match in _ROW.finditer(part)
            for name in match["names"].split(",")
        }
        if rows:
            tables.append(rows)
    return tables


def _resolve(module: Any, dotted: str) -> Any:
    for part in dotted.split("."):
        module = getattr(module, part)
    return module


def test_table_and_module_agree() -> None:
    hvd = importlib.import_module("lockstep.compat.horovod.torch")
    names, top = _tables()
    assert set(NAMES.split()) <= names.keys()
    for name, (what, remark) in names.items():
        assert what != "refused"
        assert _resolve(hvd, name) is not None
        assert bool(remark) or what == "supported", f"{name} is different, but the table does not say how"
    assert {name for name in hvd.__all__ if name not in names} == set()
    for name, (what, _) in top.items():
        module = importlib.util.find_spec(f"lockstep.compat.horovod.{name}")
        assert (what == "refused") == (module is None and not hasattr(horovod, name)), name


@pytest.mark.parametrize(
    "module", ["mpi_ops", "functions", "compression", "optimizer", "sync_batch_norm", "elastic.state"]
)
def test_modules_that_scripts_import_by_name(module: str) -> None:
    importlib.import_module(f"lockstep.compat.horovod.torch.{module}")


def where(offset: int, scale: int = 1) -> list[Any]:
    import lockstep.compat.horovod.torch as hvd

    hvd.init()
    numbers = hvd.allgather_object(scale * hvd.rank() + offset)
    hvd.shutdown()
    return [numbers, os.environ["HOROVOD_RANK"], os.environ["HOROVOD_LOCAL_SIZE"]]


def test_run_returns_what_ranks_return() -> None:
    results = horovod.run(where, args=(5,), kwargs={"scale": 10}, num_proc=2, hosts="localhost:2", use_gloo=True)
    assert results == [[[5, 15], "0", "2"], [[5, 15], "1", "2"]]


def test_run_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("elsewhere slots=2\n")
    for options, text in (
        ({"hosts": "elsewhere:2"}, "elsewhere"),
        ({"hostfile": str(hostfile)}, "elsewhere"),
        ({"hosts": "localhost:1"}, "1 slots"),
        ({"hosts": "localhost:1", "hostfile": "x"}, "only allow one"),
        ({"use_gloo": True, "use_mpi": True}, "only allow one"),
        ({"use_mpi": True}, "mpirun"),
    ):
        with pytest.raises(InputError, match=text):
            horovod.run(where, num_proc=2, **options)  # type: ignore[arg-type]


def _plan(line: str) -> Any:
    words = line.split()
    return horovodrun.plan(horovodrun._make_parser().parse_args(words))


def test_options_become_a_job(tmp_path: Path) -> None:
    job = _plan(
        "-np 2 -H localhost:1,127.0.0.1:1 --output-filename logs --timeline-filename t.json --timeline-mark-cycles "
        "--no-stall-check --log-level trace --fusion-threshold-mb 32 python -u train.py -np 3 --lr 1"
    )
    assert (job.target, job.args, job.nproc, job.is_module) == ("train.py", ("-np", "3", "--lr", "1"), 2, False)
    assert (job.log_dir, job.max_restarts) == ("logs", 0)
    variables = job.environment
    assert variables["HOROVOD_TIMELINE"] == os.path.abspath("t.json")
    assert variables["HOROVOD_TIMELINE_MARK_CYCLES"] == variables["HOROVOD_STALL_CHECK_DISABLE"] == "1"
    assert variables["LOCKSTEP_LOG_LEVEL"] == "DEBUG"
    assert _plan("-np 1 python -m pkg.train a").is_module
    assert _plan("-np 1 sh -c true").args == ("sh", "-c", "true")
    assert _plan("-np 2 --min-np 1 --max-np 4 python x.py").max_restarts > 0
    assert _plan("-np 2 --reset-limit 7 python x.py").max_restarts == 7
    hostfile = tmp_path / "hosts"
    hostfile.write_text("# ours\nlocalhost slots=3\n")
    assert _plan(f"-np 3 --hostfile {hostfile} python x.py").nproc == 3
    assert _plan("-np 2 --slots-per-host 2 -H localhost python x.py").nproc == 2


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("python x.py", "-np"),
        ("-np 0 python x.py", "at least 1"),
        ("-np 2", "name a command"),
        ("-np 2 --mpi python x.py", "mpirun -np 2 python x.py"),
        ("-np 4 -H localhost:2 python x.py", "2 slots"),
        ("-np 2 --min-np 3 python x.py", "--min-np is 3"),
        ("-np 2 -H local:host:x python x.py", "host:slots"),
        ("-np 1 no-such-program-here", "not found"),
        ("-np 2 --no-such-option python x.py", "unrecognized|no-such-option"),
        (
            "-np 3 -H a:2,b:2 python x.py --lr 1",
            r"on b: lockstep run --nproc 1 --nnodes 2 --node-rank 1 --master-addr a",
        ),
    ],
)
def test_what_cannot_be_started_is_refused_with_a_reason(line: str, text: str) -> None:
    with pytest.raises(LaunchError, match=text):
        _plan(line)


def test_hosts() -> None:
    assert parse_hosts("a:2, b") == [("a", 2), ("b", 1)]
    assert is_this_host("localhost")
    assert not is_this_host("elsewhere.example")
    with pytest.raises(InputError, match="host:slots"):
        parse_hosts("a:b")


def test_check_build(capsys: Any) -> None:
    assert horovodrun.main(["--check-build"]) == 0
    assert "[X] PyTorch" in capsys.readouterr().out


def _options_with(tmp_path: Path, text: str, *words: str) -> Any:
    """The options of a command line with a file of these."""
    pytest.importorskip("yaml")
    path = tmp_path / "config.yaml"
    path.write_text(textwrap.dedent(text))
    parser = horovodrun._make_parser()
    arguments = ["-np", "2", "--config-file", str(path), *words, "python", "x.py"]
    return horovodrun._with_config(parser, parser.parse_args(arguments), arguments)


def test_every_section_of_a_config_file(tmp_path: Path, capfd: Any) -> None:
    """With the keys that Horovod has."""
    chosen = _options_with(
        tmp_path,
        """
        controller: gloo
        verbose: true
        params: {fusion_threshold_mb: 32, cycle_time_ms: 10, cache_capacity: 2048, hierarchical_allreduce: true}
        autotune: {enabled: true, log_file: tune.txt, warmup_samples: 5, gaussian_process_noise: 0.9}
        timeline: {filename: trace.json, mark_cycles: true}
        stall_check: {enabled: false, warning_time_seconds: 120, shutdown_time_seconds: 240}
        library_options: {mpi_threads_disable: true, num_nccl_streams: 2, ccl_bgt_affinity: 1, gloo_timeout_seconds: 9}
        logging: {level: INFO, with_timestamp: true}
        """,
    )
    assert capfd.readouterr().err == ""
    assert (chosen.use_gloo, chosen.use_mpi, chosen.verbose, chosen.fusion_threshold_mb) == (True, False, True, ["32"])
    assert (chosen.autotune, chosen.autotune_log_file, chosen.thread_affinity) == (True, ["tune.txt"], ["1"])
    assert (chosen.timeline_filename, chosen.timeline_mark_cycles, chosen.log_level) == ("trace.json", True, "INFO")
    times = chosen.stall_check_warning_time_seconds, chosen.stall_check_shutdown_time_seconds
    assert (chosen.stall_check, *times) == (False, 120.0, 240.0)
    job = horovodrun.plan(chosen)
    assert job.environment["HOROVOD_STALL_CHECK_DISABLE"] == "1"
    ignored = capfd.readouterr().err
    for option in ("--fusion-threshold-mb", "--autotune-warmup-samples", "--num-nccl-streams", "--log-with-timestamp"):
        assert option in ignored


def test_command_line_wins_over_a_config_file(tmp_path: Path) -> None:
    text = "controller: mpi\nstall_check: {enabled: true, warning_time_seconds: 5}\ntimeline: {filename: a}\n"
    with pytest.raises(LaunchError, match=r"mpirun -np 2 python x\.py"):
        horovodrun.plan(_options_with(tmp_path, text))
    chosen = _options_with(tmp_path, text, "--gloo", "--no-stall-check", "--timeline-filename", "b")
    assert (chosen.use_mpi, chosen.stall_check, chosen.timeline_filename) == (False, False, "b")
    assert chosen.stall_check_warning_time_seconds == 5


def test_keys_of_a_config_file_that_mean_nothing_are_named(tmp_path: Path, capfd: Any) -> None:
    assert _options_with(tmp_path, "stal_check: {enabled: false}\nautotune: {enable: true}\nversion: 1\n").command
    assert "config.yaml: stal_check, autotune.enable, version are not options and are ignored" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- a\n", "expected sections"),
        ("controller: ssh\n", "controller is 'ssh'; expected one of gloo, mpi, jsrun"),
        ("stall_check: {warning_time_seconds: soon}\n", "invalid float value: 'soon'"),
        ("a: [\n", "config.yaml"),
    ],
)
def test_config_files_that_cannot_be_used(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(LaunchError, match=said):
        _options_with(tmp_path, text)


def test_command_starts_ranks_with_horovods_variables(tmp_path: Path, capfd: Any) -> None:
    script, config = tmp_path / "show.py", tmp_path / "config.yaml"
    script.write_text(
        textwrap.dedent(
            """
            import os, sys, torch
            import lockstep.compat.horovod.torch as hvd
            names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
            told = [os.environ["HOROVOD_" + name] for name in names]
            hvd.init()
            hvd.allreduce(torch.ones(1), name="one")
            assert told == [str(n) for n in (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), 0, 1)]
            print("ready", *sys.argv[1:], os.environ["HOROVOD_HOSTNAME"] != "", flush=True)
            """
        )
    )
    trace = tmp_path / "trace.json"
    words = ["-np", "2", "--verbose", "--timeline-filename", str(trace)]
    if importlib.util.find_spec("yaml") is not None:
        config.write_text(f"verbose: true\ntimeline:\n  filename: {trace}\n")
        words = ["-np", "2", "--config-file", str(config)]
    assert horovodrun.main([*words, sys.executable, str(script), "--verbose"]) == 0
    captured = capfd.readouterr()
    assert captured.out.count("ready --verbose True") == 2
    assert "2 rank(s)" in captured.err
    assert "allreduce.one" in trace.read_text()
