"""What a script finds when `lockstep run` starts it: its ranks, its environment, a real `__main__`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from launching import NOTE_PID, Launches, children_of, wait_until
from lockstep.testing import limit_s

DUMP = "import json\njson.dump({what}, open(f'out{{RANK}}.json', 'w'))\n"


def results(launches: Launches, nproc: int) -> list[dict[str, object]]:
    return [json.loads((launches.folder / f"out{rank}.json").read_text()) for rank in range(nproc)]


def test_ranks_get_what_torchrun_gives(launches: Launches) -> None:
    script = launches.script(DUMP.format(what="dict(os.environ)"))
    done = launches.run(
        "--nproc", "3", script, env=launches.environment(NODE_RANK="7", OMP_NUM_THREADS="", PYTHONHASHSEED="")
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    for rank, variables in enumerate(results(launches, 3)):
        folder = variables["LOCKSTEP_RENDEZVOUS"]
        assert isinstance(folder, str)
        assert not os.path.exists(folder)
        size, number = "3", str(rank)
        expected = {
            "RANK": number, "ROLE_RANK": number, "LOCAL_RANK": number, "GROUP_RANK": "0", "ROLE_NAME": "default",
            "WORLD_SIZE": size, "ROLE_WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "GROUP_WORLD_SIZE": "1",
            "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "False", "TORCHELASTIC_RUN_ID": variables["LOCKSTEP_JOB"],
            "TORCHELASTIC_ERROR_FILE": f"{folder}/torchelastic-rank{rank}.json", "MASTER_ADDR": "127.0.0.1",
            "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // 3)), "PYTHONHASHSEED": "0",
        }  # fmt: skip
        assert expected.items() <= variables.items()
    ports = {variables["MASTER_PORT"] for variables in results(launches, 3)}
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert len(ports) == 1
    assert int(str(ports.pop())) < low or low <= 10_000


def test_explicit_settings_win(launches: Launches) -> None:
    script = launches.script(DUMP.format(what="dict(os.environ)"))
    options = ("--nproc-per-node", "1", "--master-addr", "localhost", "--master_port=4321")
    assert (
        launches.run(*options, script, env=launches.environment(OMP_NUM_THREADS="5", PYTHONHASHSEED="7")).returncode
        == 0
    )
    (variables,) = results(launches, 1)
    names = ("MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "PYTHONHASHSEED")
    assert [variables[name] for name in names] == ["localhost", "4321", "5", "7"]


def test_options_after_the_script_belong_to_it(launches: Launches) -> None:
    script = launches.script(DUMP.format(what="sys.argv"))
    arguments = ["--nproc", "9", "-m", "--", "--no-prefix", "-h", "", "a b"]
    assert launches.run("--nproc=1", "--", script, *arguments).returncode == 0
    assert results(launches, 1) == [[script, *arguments]]


MAIN_FACTS = """
    import json, __main__
    names = ('__name__', '__file__', '__package__', '__cached__', '__doc__')
    facts = {name: repr(getattr(__main__, name, 'absent')) for name in names}
    facts.update(
        argv=sys.argv, path=sys.path[:2], cwd=os.getcwd(), spec=getattr(__spec__, 'name', None),
        loader=type(__loader__).__name__, builtins=type(__builtins__).__name__,
        same=sys.modules['__main__'].__dict__ is globals(),
    )
    json.dump(facts, open(f'out{RANK}.json', 'w'))
"""


@pytest.mark.parametrize("kind", ["script", "symlink", "folder", "zip", "module", "package"])
def test_main_is_as_under_plain_python(launches: Launches, kind: str) -> None:
    launches.script(MAIN_FACTS, "code/main.py")
    launches.script("", "pack/__init__.py")
    launches.script(MAIN_FACTS, "pack/__main__.py")
    launches.script(MAIN_FACTS, "pack/sub.py")
    (launches.folder / "link.py").symlink_to("code/main.py")
    with zipfile.ZipFile(launches.folder / "app.zip", "w") as archive:
        archive.write(launches.folder / "pack/__main__.py", "__main__.py")
    target = {
        "script": ["code/main.py"], "symlink": ["link.py"], "folder": ["pack"], "zip": ["app.zip"],
        "module": ["-m", "pack.sub"], "package": ["-m", "pack"],
    }[kind]  # fmt: skip
    command = [sys.executable, *target, "--flag"]
    subprocess.run(command, cwd=launches.folder, env={**os.environ, "RANK": "0"}, check=True, timeout=limit_s(30))
    (expected,) = results(launches, 1)
    assert launches.run("--nproc", "1", *target, "--flag").returncode == 0
    assert results(launches, 1) == [expected]


def test_files_in_the_current_folder_do_not_shadow_the_library(launches: Launches) -> None:
    launches.script("raise SystemExit('wrong module')", "json.py")
    launches.script("raise SystemExit('wrong module')", "socket.py")
    launches.script("import json; print(json.__name__)", "code/main.py")
    # As the console script does, whose folder and not the current one comes first.
    program = "import sys; del sys.path[0]; from lockstep.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "run", "--nproc", "1", "code/main.py"]
    done = subprocess.run(command, cwd=launches.folder, capture_output=True, text=True, timeout=limit_s(30))
    assert (done.returncode, done.stdout) == (0, "[0] json\n"), done.stderr


def test_classes_of_main_survive_pickling_and_spawned_children(launches: Launches) -> None:
    script = launches.script(
        """
        import multiprocessing, pickle
        class Point:
            def __init__(self, x):
                self.x = x
        def child(point, queue):
            queue.put(Point(point.x + 1))
        if __name__ == '__main__':
            assert pickle.loads(pickle.dumps(Point(3))).x == 3
            context = multiprocessing.get_context('spawn')
            queue = context.Queue()
            process = context.Process(target=child, args=(Point(4), queue))
            process.start()
            answer = queue.get(timeout=30)
            process.join()
            print(type(answer) is Point, answer.x)
        """
    )
    done = launches.run("--nproc", "1", script)
    assert (done.returncode, done.stdout) == (0, "[0] True 5\n"), done.stderr


def test_lines_are_prefixed_and_whole(launches: Launches) -> None:
    script = launches.script(
        """
        for number in range(200):
            print(str(RANK) * 50, end='')
            print(str(RANK) * 50)
            print('e' * 100, file=sys.stderr)
        sys.stdout.flush()
        os.write(1, b'caf\\xe9 \\xff without newline')
        """
    )
    done = launches.run("--nproc", "3", script, text=False)
    assert done.returncode == 0
    for rank in range(3):
        prefix = f"[{rank}] ".encode()
        lines = [line for line in done.stdout.split(b"\n") if line.startswith(prefix)]
        assert lines == [prefix + str(rank).encode() * 100] * 200 + [prefix + b"caf\xe9 \xff without newline"]
        assert done.stderr.count(prefix + b"e" * 100 + b"\n") == 200
    assert done.stdout.count(b"\n") == 603
    assert done.stderr.count(b"\n") == 600


def test_line_appears_when_it_is_printed(launches: Launches) -> None:
    """Python would hold it back, as it writes into a pipe."""
    script = launches.script("print('up')\nwhile not os.path.exists('go'): time.sleep(0.01)")
    process = launches.start("--nproc", "1", script)
    assert process.stdout is not None
    assert process.stdout.readline() == "[0] up\n"
    (launches.folder / "go").touch()
    assert process.wait(timeout=limit_s(30)) == 0


def test_huge_output_does_not_deadlock(launches: Launches) -> None:
    script = launches.script("for _ in range(200): os.write(1 + RANK, b'x' * 65535 + b'\\n')")
    done = launches.run("--nproc", "2", script, text=False)
    line = b"x" * 65535 + b"\n"
    assert done.returncode == 0
    assert done.stdout == (b"[0] " + line) * 200
    assert done.stderr == (b"[1] " + line) * 200


def test_no_prefix_hands_over_the_terminal_and_stdin_to_rank_0(launches: Launches) -> None:
    # One write a line: without prefixes, the ranks share the terminal, and print() writes each part for itself.
    script = launches.script("sys.stdout.write(f'{RANK} {sys.stdin.read()!r}\\n')")
    done = launches.run("--nproc", "2", "--no-prefix", script, input="typed")
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == ["0 'typed'", "1 ''"]


def test_rank_0_may_read_the_terminal(launches: Launches) -> None:
    """It has a session of its own, which job control must not stop for reading."""
    primary, secondary = os.openpty()
    script = launches.script("print('got', input('name? '))")
    process = launches.start(
        "--nproc", "1", "--no-prefix", script, stdin=secondary, stdout=secondary, stderr=secondary,
        start_new_session=True, preexec_fn=_take_terminal,
    )  # fmt: skip
    os.close(secondary)
    text = _read_until(primary, b"name? ")
    os.write(primary, b"Ada\n")
    assert b"got Ada" in text + _read_until(primary, b"got Ada")
    assert process.wait(timeout=limit_s(30)) == 0
    os.close(primary)


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _read_until(fd: int, end: bytes) -> bytes:
    text = b""
    os.set_blocking(fd, False)

    def is_complete() -> bool:
        nonlocal text
        with contextlib.suppress(BlockingIOError):
            text += os.read(fd, 4096)
        return end in text

    wait_until(is_complete, f"{end!r} appears on the terminal")
    return text


def test_log_dir_gets_one_file_per_rank(launches: Launches) -> None:
    (launches.folder / "logs").mkdir()
    (launches.folder / "logs/rank0.log").write_text("of an earlier job")
    script = launches.script("print('out', RANK, flush=True); print('err', RANK, file=sys.stderr)")
    done = launches.run("--nproc", "2", "--log-dir", "logs", script)
    assert (done.returncode, done.stdout) == (0, "")
    assert "rank*.log" in done.stderr
    for rank in range(2):
        assert (launches.folder / f"logs/rank{rank}.log").read_text() == f"out {rank}\nerr {rank}\n"


def test_command_line_of_torchrun_on_one_host(launches: Launches) -> None:
    launches.script("print(os.environ['WORLD_SIZE'], *sys.argv[1:])", name="01_train.py")
    done = launches.run("--standalone", "--nproc-per-node", "1", "-m", "01_train", "--lr", "1")
    assert (done.returncode, done.stdout) == (0, "[0] 1 --lr 1\n"), done.stderr


def test_launcher_listens_on_no_port(launches: Launches) -> None:
    script = launches.script(NOTE_PID + "note('rank'); time.sleep(60)")
    process = launches.start("--nproc", "1", script)
    launches.pids("rank")
    for pid in [process.pid, *children_of(process.pid)]:
        links = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir() if os.path.lexists(entry)]
        assert not [link for link in links if link.startswith("socket:")], f"process {pid} has a socket"
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=limit_s(30)) == 128 + signal.SIGTERM


def test_nothing_is_imported_that_slows_the_start() -> None:
    program = """
import sys
import lockstep.cli, lockstep.launch.spawn, lockstep.launch.payload, lockstep.launch.worker
heavy = {'torch', 'numpy', 'rich', 'asyncio'} & set(sys.modules)
sys.exit(' '.join(sorted(heavy)) or 0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=limit_s(60))
    assert done.returncode == 0, f"the launcher imports {done.stderr}"
