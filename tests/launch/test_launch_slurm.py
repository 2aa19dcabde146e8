"""`lockstep run --slurm` up to sbatch, which is a script of the test's here; tests/cluster asks a real Slurm."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep import cli
from lockstep.commands import run as run_command
from lockstep.errors import LaunchError
from lockstep.launch.slurm import BatchJob, submit
from lockstep.testing import limit_s


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a script in it and without anything of Slurm on PATH."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "bin").mkdir()
    for name in ("bash", "cat", "mv", "rm", "sleep", "touch"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name) or name)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


def fake_sbatch(folder: Path, commands: str) -> None:
    """An sbatch that keeps its script and arguments, and then does this."""
    program = folder / "bin" / "sbatch"
    program.write_text(f'#!/bin/sh\necho "$@" > {folder}/arguments\ncat > {folder}/batch.sh\n{commands}\n')
    program.chmod(0o755)


def directives(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]


def run_main(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["run", "--slurm", *arguments])
    out, err = capfd.readouterr()
    return code, out, err


def test_token_is_made_where_the_job_runs(folder: Path) -> None:
    """Slurm keeps the script, so no token stands in it; each run has another. On one host no port is opened."""
    script = BatchJob("train.py", sbatch_args=("--nodes=2",)).script()
    (line,) = [line for line in script.splitlines() if "LOCKSTEP_TOKEN" in line]
    said = [
        subprocess.run(
            ["bash", "-c", f'{line}\necho "$LOCKSTEP_TOKEN"'],
            env={"PATH": str(folder / "bin"), **given},
            capture_output=True,
            text=True,
            timeout=limit_s(30),
        ).stdout.strip()
        for given in (
            {"SLURM_NNODES": "2"},
            {"SLURM_NNODES": "2"},
            {"SLURM_NNODES": "2", "LOCKSTEP_TOKEN": "mine"},
            {"SLURM_NNODES": "1"},
        )
    ]
    assert len(said[0]) == len(said[1]) == 64
    assert said[0] != said[1]
    assert said[2:] == ["mine", ""]


@pytest.mark.parametrize(("given", "cores"), [({}, "1,none"), ({"SLURM_CPUS_PER_TASK": "8"}, "8,8")])
def test_srun_gets_the_cores_that_the_job_has_for_each_task(given: dict[str, str], cores: str) -> None:
    """Whoever asked for them; without a number srun is not told one, as it would keep each task to so many cores."""
    show = 'srun() { echo "$OMP_NUM_THREADS,${SRUN_CPUS_PER_TASK:-none}"; }'
    script = BatchJob("train.py", sbatch_args=("--cpus-per-task=8",)).script().replace("exec srun", "srun")
    done = subprocess.run(
        ["bash", "-c", f"{show}\n{script}"],
        env={"PATH": os.defpath, **given},
        capture_output=True,
        text=True,
        timeout=limit_s(30),
    )
    assert done.stdout.strip() == cores


# ---- the script -------------------------------------------------------------------------------------


def test_least_that_is_asked_for(folder: Path) -> None:
    script = BatchJob("train.py").script()
    assert directives(script) == [
        "--job-name=train",
        "--nodes=1",
        "--ntasks-per-node=1",
        f"--chdir={folder}",
        f"--output={folder}/%x-%j.out",
    ]
    assert script.splitlines()[0] == "#!/bin/bash"
    assert script.splitlines()[-1] == f"exec srun --kill-on-bad-exit=1 --label {sys.executable} -u train.py"


def test_all_that_can_be_asked_for(capfd: pytest.CaptureFixture[str], folder: Path) -> None:
    words = ["--partition=gpu", "--nodes=2", "--ntasks-per-node=4", "--gpus-per-node", "a100:4", "--cpus-per-task", "8"]
    words += ["--time", "1-0", "--requeue", "--job-name=big", "--output=logs/%x.txt", "--no-prefix", "--dry-run"]
    code, script, err = run_main(capfd, *words, "--sbatch-arg=--mem=64G", "train.py", "--lr", "0.1", "--slurm")
    assert (code, err) == (0, "")
    assert directives(script) == [
        "--job-name=big",
        "--partition=gpu",
        "--nodes=2",
        "--ntasks-per-node=4",
        "--gpus-per-node=a100:4",
        "--cpus-per-task=8",
        "--time=1-0",
        f"--chdir={folder}",
        f"--output={folder}/logs/%x.txt",
        "--requeue",
        "--open-mode=append",
        "--signal=B:USR1@60",
        "--mem=64G",
    ]
    start = f"srun --kill-on-bad-exit=1 {sys.executable} -u"
    assert f"{start} -m lockstep.compat.script train.py --lr 0.1 --slurm &\n" in script
    _, script, _ = run_main(capfd, *words, "--no-compat", "train.py", "--lr", "0.1", "--slurm")
    assert f"{start} train.py --lr 0.1 --slurm &\n" in script
    assert "trap stop USR1" in script
    assert not (folder / "logs").exists(), "nothing is made when nothing is submitted"


@pytest.mark.parametrize(
    ("gpus", "tasks", "ranks"),
    [(None, None, 2), ("4", None, 8), ("a100:4", None, 8), ("4", 1, 2), (None, 3, 6), ("a100", None, 2)],
)
def test_one_rank_per_gpu_unless_told(gpus: str | None, tasks: int | None, ranks: int) -> None:
    assert BatchJob("train.py", nodes=2, gpus_per_node=gpus, ntasks_per_node=tasks).num_ranks == ranks


def test_module_and_words_that_the_shell_would_split() -> None:
    script = BatchJob("json.tool", ("a b", "$HOME", "x'y", "z\nz"), is_module=True, python="/opt/my python").script()
    line = script.partition("exec ")[2]
    # What bash makes of it, with a program that shows its arguments in srun's place.
    shown = subprocess.run(
        ["bash", "-c", f'srun() {{ printf "<%s>" "$@"; }}; {line}'], capture_output=True, text=True, check=True
    ).stdout
    assert shown.endswith("</opt/my python><-u><-m><json.tool><a b><$HOME><x'y><z\nz>")
    assert directives(script)[0] == "--job-name=json.tool"


def test_directives_are_quoted_for_sbatch() -> None:
    script = BatchJob("x", job_name="my job", sbatch_args=('--comment=a "#1" \\ b',)).script()
    assert '"--job-name=my job"' in directives(script)
    assert '"--comment=a \\"#1\\" \\\\ b"' in directives(script)


@pytest.mark.parametrize("ending", [0, 3])
def test_script_with_requeue_ends_as_its_step_does(folder: Path, ending: int) -> None:
    done = run_batch(folder, BatchJob("train.py", requeue=True), f"exit {ending}")
    assert done.returncode == ending
    assert not (folder / "requeued").exists()


def test_signal_near_the_time_limit_goes_to_the_ranks_and_requeues_when_they_have_ended(folder: Path) -> None:
    step = "trap 'touch told; sleep 0.5; [ -e requeued ] || touch first; exit 75' USR1; kill -USR1 $PPID; "
    done = run_batch(folder, BatchJob("train.py", requeue=True), step + "while :; do sleep 0.01; done")
    assert (folder / "told").exists()
    assert (folder / "first").exists(), "the job is requeued when the ranks have saved, not before"
    assert (folder / "requeued").read_text() == "requeue 42\n"
    assert "the ranks are told to stop" in done.stderr
    assert "job 42 goes back into the queue" in done.stderr
    assert done.returncode == 75


def test_signal_that_comes_before_the_step_has_a_name(folder: Path) -> None:
    """The script then waited for its timer, and ended well when that did."""
    first = 'step="${step:-$!}"\nwhile'
    script = BatchJob("train.py", requeue=True).script()
    assert script.count(first) == 1
    signals = "while [ ! -e ready ]; do sleep 0.01; done; kill -USR1 $$\n"
    step = "trap 'exit 75' USR1; touch ready; while :; do sleep 0.01; done"
    done = run_batch(folder, script.replace(first, signals + first), step)
    assert (folder / "requeued").read_text() == "requeue 42\n"
    assert done.returncode == 75


def test_ranks_that_do_not_end_are_requeued_before_the_limit(folder: Path) -> None:
    """And only once. `--signal` says how long before it the signal comes."""
    job = BatchJob("train.py", requeue=True, sbatch_args=("--signal=B:USR1@1",))
    assert "sleep 200 " in BatchJob("train.py", requeue=True, sbatch_args=("--signal=B:USR1@300",)).script()
    step = "trap '' USR1; kill -USR1 $PPID; while [ ! -e requeued ]; do sleep 0.01; done; sleep 0.5; rm requeued"
    done = run_batch(folder, job, step)
    assert not (folder / "requeued").exists()
    assert done.stderr.count("goes back into the queue") == 1
    assert done.returncode == 0, "the step was waited for to its end"


def test_ranks_that_were_told_to_stop_are_requeued(folder: Path) -> None:
    """By whomever, and whatever became of the signal: their exit code says it."""
    assert run_batch(folder, BatchJob("train.py", requeue=True), "exit 75").returncode == 75
    assert (folder / "requeued").read_text() == "requeue 42\n"


def run_batch(folder: Path, job: BatchJob | str, step: str) -> subprocess.CompletedProcess[str]:
    """Run a batch script with an srun and an scontrol of the test's."""
    for name, commands in {"srun": step, "scontrol": f'echo "$@" > {folder}/draft; mv {folder}/draft requeued'}.items():
        program = folder / "bin" / name
        program.write_text(f"#!/bin/sh\n{commands}\n")
        program.chmod(0o755)
    return subprocess.run(
        ["bash", "-c", job if isinstance(job, str) else job.script()],
        env={**os.environ, "SLURM_JOB_ID": "42"},
        capture_output=True,
        text=True,
        timeout=limit_s(30),
        cwd=folder,
    )


# ---- submitting -------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", ["42", "42;cluster"])
def test_submitted_job_and_its_log_are_named(capfd: pytest.CaptureFixture[str], folder: Path, answer: str) -> None:
    fake_sbatch(folder, f"echo '{answer}'")
    code, out, err = run_main(capfd, "--nodes", "2", "--nproc", "3", "--output", "logs/%x-%%-%j-%t.out", "train.py")
    assert (code, err) == (0, "")
    assert out == f"job 42: 6 ranks of train.py\nlog: {folder}/logs/train-%-42-%t.out\n"
    assert (folder / "logs").is_dir(), "Slurm would fail without it, and say so nowhere"
    said = (folder / "arguments").read_text().split()
    assert said == ["--parsable", "--nodes=2", "--ntasks-per-node=3", f"--output={folder}/logs/%x-%%-%j-%t.out"]
    assert "--ntasks-per-node=3" in directives((folder / "batch.sh").read_text())


def test_what_was_asked_for_wins_over_variables_of_sbatch(folder: Path) -> None:
    """They win over the lines of a script, and arguments over them."""
    fake_sbatch(folder, "echo 42")
    job = BatchJob("train.py", partition="gpu", time="30", requeue=True, sbatch_args=("--account=me", "--job-name=x"))
    submit(job)
    said = (folder / "arguments").read_text().split()
    assert said == [
        *("--parsable", "--partition=gpu", "--nodes=1", "--ntasks-per-node=1", "--time=30", "--requeue"),
        *("--open-mode=append", "--signal=B:USR1@60", "--account=me", "--job-name=x"),
    ]
    assert [option for option in directives((folder / "batch.sh").read_text()) if option in said] == said[1:]


def test_slurms_refusal_is_passed_on(folder: Path) -> None:
    fake_sbatch(folder, "echo 'sbatch: error: invalid partition specified: gpu' >&2; exit 1")
    with pytest.raises(LaunchError, match="Slurm refuses the job: error: invalid partition specified: gpu"):
        submit(BatchJob("train.py", partition="gpu"))


@pytest.mark.parametrize(
    ("commands", "message"),
    [("exit 3", "sbatch ended with 3"), ("echo Submitted", "sbatch printed no job number, but 'Submitted'")],
)
def test_strange_sbatch(folder: Path, commands: str, message: str) -> None:
    fake_sbatch(folder, commands)
    with pytest.raises(LaunchError, match=message):
        submit(BatchJob("train.py"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train.py"], "sbatch is not installed here, or not on PATH"),
        ([], "name a script to run; see `lockstep run --slurm --help`"),
        (["-m"], "name a module to run after -m"),
        (["missing.py"], "script 'missing.py' not found"),
        (["--nodes", "0", "train.py"], "--nodes is 0; expected at least 1"),
        (["--nodes", "two", "train.py"], "invalid int value: 'two'"),
        (["--ntasks-per-node", "0", "train.py"], "--ntasks-per-node is 0"),
        (["--cpus-per-task", "-1", "train.py"], "--cpus-per-task is -1"),
        (["--sbatch-arg", "mem=4G", "train.py"], "--sbatch-arg is 'mem=4G'; expected an option of sbatch"),
        (["--sbatch-arg=--comment=a\nb", "train.py"], "cannot be in a line of a batch script"),
        (["--job-name", "a\nb", "train.py"], "cannot be in a line of a batch script"),
        (["--output", "/proc/none/x", "train.py"], "cannot make /proc/none, where the log is to be"),
        (["--max-restarts", "3", "train.py"], "unrecognized arguments: --max-restarts 3"),
    ],
)
def test_errors_are_one_line(capfd: pytest.CaptureFixture[str], folder: Path, arguments: list[str], words: str) -> None:
    code, out, err = run_main(capfd, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("lockstep: error: ")
    assert err.count("\n") == 1
    assert words in err


def test_help(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        cli.main(["run", "--slurm", "--help"])
    assert leaving.value.code == 0
    out = capfd.readouterr().out
    for option in ("--dry-run", "--partition", "--gpus-per-node", "--time", "--requeue", "--sbatch-arg"):
        assert f"  {option}" in out
    assert "%x-%j.out" in out


# ---- a launcher inside of a step ---------------------------------------------------------------------


@pytest.mark.parametrize(("rank", "tasks", "is_said"), [(0, 2, True), (1, 2, False), (0, 1, False)])
def test_launchers_side_by_side_are_told(
    capfd: pytest.CaptureFixture[str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    rank: int,
    tasks: int,
    is_said: bool,
) -> None:
    monkeypatch.setattr(run_command, "launch_job", lambda config: 0)
    for name, value in {
        "JOB_ID": 1,
        "STEP_ID": 0,
        "PROCID": rank,
        "NTASKS": tasks,
        "LOCALID": rank,
        "NODEID": 0,
        "NNODES": 1,
    }.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    assert cli.main(["run", "--nproc", "1", "train.py"]) == 0
    err = capfd.readouterr().err
    assert ("srun started 2 launchers here" in err) is is_said
    assert err.count("\n") == is_said
