"""Hosts for tests and measurements: namespaces of this machine, joined by virtual Ethernet. Needs root.

A test host has a network, process ids, a host name and mounts of its own, so nothing of what tells Lockstep that ranks
share a host holds between two of them, except the boot id; as for two containers. All hosts hang on one bridge, which
has a namespace of its own, too, so the machine's own network is not touched. Every namespace lives as long as
its first process, which dies with the tests, however these end; no names and no files are left behind.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lockstep import env
from lockstep.testing.limits import limit_s

__all__ = ["MASTER_PORT", "Cluster", "NamespaceHost", "RankDied", "cluster", "reason_to_skip"]

MASTER_PORT = 29511
INTERFACE = "eth0"
_START_S = 60.0
_PROGRAMS = {"ip": "iproute2", "nsenter": "util-linux", "unshare": "util-linux", "setpriv": "util-linux"}
_HOST_PROGRAM = str(Path(__file__).with_name("namespace_host.py"))
# Dies with the thread that starts it; --kill-child takes the rest along.
_DYING = ("setpriv", "--pdeathsig", "KILL")


def reason_to_skip() -> str:
    """Why there can be no such hosts here; empty if there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs root on Linux: test hosts are namespaces"
    missing = sorted({package for program, package in _PROGRAMS.items() if shutil.which(program) is None})
    if missing:
        return f"needs the Debian packages {' and '.join(missing)}"
    tried = subprocess.run(
        ["unshare", "--net", "--pid", "--fork", "--mount-proc", "ip", "link", "add", "v0", "type", "veth"],
        capture_output=True,
        text=True,
    )
    return "" if tried.returncode == 0 else f"namespaces or veth are not allowed here: {tried.stderr.strip()}"


class RankDied(Exception):
    """The process of a rank ended without an outcome."""


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=limit_s(_START_S))


class _Namespaces:
    """Namespaces that live as long as a process that sleeps in them."""

    def __init__(self, *kinds: str) -> None:
        self._kinds = kinds
        self._process = subprocess.Popen(
            [*_DYING, "unshare", *kinds, "--fork", "--kill-child", "sh", "-c", "echo up; exec sleep infinity"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for whoever made the hosts
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "up\n"
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        self.pid = int(children[0])

    def enter(self, *command: str) -> list[str]:
        """The command that runs `command` in here."""
        kinds = [kind for kind in self._kinds if kind != "--mount-proc"]
        return ["nsenter", "--target", str(self.pid), *kinds, *command]

    def run(self, *command: str) -> None:
        """Run a command in here."""
        _run(*self.enter(*command))

    def close(self) -> None:
        """End all processes in here, and so the namespaces."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def _name(number: int) -> str:
    return f"host{chr(ord('a') + number)}"


def _address(number: int) -> str:
    return f"10.77.0.{number + 1}"


class NamespaceHost:
    """One test host.

    Attributes:
        name: its host name.
        address: its address.
    """

    def __init__(self, number: int, num_hosts: int, switch: _Namespaces, rate: str | None) -> None:
        self.name = _name(number)
        self.address = _address(number)
        self.namespaces = _Namespaces("--net", "--pid", "--uts", "--mount", "--mount-proc")
        port = f"port{number}"
        ends = ("ip", "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", str(self.namespaces.pid))
        switch.run(*ends)
        switch.run("ip", "link", "set", port, "master", "br0", "up")
        inside = self.namespaces.run
        inside("hostname", self.name)
        # Names that resolve, so that nobody asks a name server that is not there; files that go with the mounts.
        names = "127.0.0.1 localhost" + "".join(f"\n{_address(one)} {_name(one)}" for one in range(num_hosts))
        inside("mount", "-t", "tmpfs", "tmpfs", "/mnt")
        inside("sh", "-c", f"printf '{names}\n' > /mnt/hosts; : > /mnt/resolv.conf")
        for file in ("hosts", "resolv.conf"):
            inside("mount", "--bind", f"/mnt/{file}", f"/etc/{file}")
        inside("ip", "link", "set", "lo", "up")
        inside("ip", "address", "add", f"{self.address}/24", "dev", INTERFACE)
        inside("ip", "link", "set", INTERFACE, "up")
        inside("ip", "route", "add", "default", "dev", INTERFACE)
        if rate is not None:
            inside(*f"tc qdisc add dev {INTERFACE} root tbf rate {rate} burst 256kb latency 100ms".split())

    def close(self) -> None:
        """End everything on it."""
        self.namespaces.close()


class Cluster:
    """Test hosts on one network. Needs root.

    Args:
        num_hosts: how many.
        rate: of each host's link, in tc's words, such as 1gbit; default as fast as it goes.
    """

    def __init__(self, num_hosts: int, rate: str | None = None) -> None:
        self._switch = _Namespaces("--net")
        self.hosts: list[NamespaceHost] = []
        self._forker: subprocess.Popen[bytes] | None = None
        self._requests: list[int] = []  # of each host, the end of a pipe to its first process
        self._answers: list[int] = []  # and of one from there
        try:
            self._switch.run("ip", "link", "add", "br0", "type", "bridge")
            self._switch.run("ip", "link", "set", "br0", "up")
            for number in range(num_hosts):
                self.hosts.append(NamespaceHost(number, num_hosts, self._switch, rate))
        except BaseException:
            self.close()
            raise
        self._jobs = 0

    def close(self) -> None:
        """End all hosts, and the network."""
        for host in self.hosts:
            host.close()
        self._switch.close()
        for descriptor in (*self._requests, *self._answers):
            os.close(descriptor)
        if self._forker is not None:
            self._forker.kill()
            self._forker.wait()

    def variables(self, sizes: Sequence[int]) -> list[dict[str, str]]:
        """What a launcher would tell each rank, with so many of them on each host."""
        found: list[dict[str, str]] = []
        for node, size in enumerate(sizes):
            for local_rank in range(size):
                variables = env.snapshot()
                env.LOCKSTEP_RENDEZVOUS.unset(variables)
                env.RANK.set(len(found), variables)
                env.WORLD_SIZE.set(sum(sizes), variables)
                env.LOCAL_RANK.set(local_rank, variables)
                env.LOCAL_WORLD_SIZE.set(size, variables)
                env.GROUP_RANK.set(node, variables)
                env.MASTER_ADDR.set(self.hosts[0].address, variables)
                env.MASTER_PORT.set(MASTER_PORT + self._jobs, variables)
                env.OMP_NUM_THREADS.set("1", variables)
                env.LOCKSTEP_TOKEN.set("0123456789abcdef" * 4, variables)
                found.append(variables)
        return found

    def run(
        self,
        fn: Callable[..., Any],
        sizes: Sequence[int],
        *args: Any,
        timeout: float = 60.0,
        more: Callable[[int], dict[str, str]] = lambda rank: {},
    ) -> list[Any]:
        """Call `fn(*args)` on `sizes[h]` ranks of each host.

        Args:
            fn: a function of a module; the ranks are forked from processes that have imported torch.
            sizes: ranks on each host.
            args: arguments, to be pickled.
            timeout: seconds for all of it.
            more: further variables of a rank.

        Returns:
            By rank what it returned, or its exception; RankDied where there is neither.

        Raises:
            TimeoutError: not all ranks were done in time. They are ended by `close`.
        """
        if self._forker is None:
            self._start_forker()
        with tempfile.TemporaryDirectory(prefix="ls-hosts-") as folder:
            job = Path(folder, "job")
            job.write_bytes(pickle.dumps((fn, args)))
            node_of = [node for node, size in enumerate(sizes) for _ in range(size)]
            for rank, variables in enumerate(self.variables(sizes)):
                request = pickle.dumps((rank, variables | more(rank), list(sys.path), str(job)))
                message = len(request).to_bytes(8, "little") + request
                while message:
                    message = message[os.write(self._requests[node_of[rank]], message) :]
            self._jobs += 1
            codes = self._await(sum(sizes), time.monotonic() + limit_s(timeout))
            return [_outcome(Path(folder, f"outcome{rank}"), codes[rank]) for rank in range(sum(sizes))]

    def _start_forker(self) -> None:
        """Start the process that imports torch, and forks the first one of each host."""
        ends: list[tuple[int, int]] = []
        for _ in self.hosts:
            (request_end, request), (answer, answer_end) = os.pipe(), os.pipe()
            self._requests.append(request)
            self._answers.append(answer)
            ends.append((request_end, answer_end))
        places = [f"{host.namespaces.pid},{a},{b}" for host, (a, b) in zip(self.hosts, ends, strict=True)]
        inherited = [end for both in ends for end in both]
        self._forker = subprocess.Popen(
            [*_DYING, sys.executable, _HOST_PROGRAM, *places],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=inherited,
            start_new_session=True,
        )
        for end in inherited:
            os.close(end)
        deadline = time.monotonic() + limit_s(_START_S)
        for host, answer in zip(self.hosts, self._answers, strict=True):
            ready, _, _ = select.select([answer], [], [], max(deadline - time.monotonic(), 0.0))
            assert ready, f"torch could not be imported in {_START_S:g} s"
            assert os.read(answer, 6) == b"ready\n", f"there is no process on {host.name}"

    def _await(self, world_size: int, deadline: float) -> dict[int, int]:
        codes: dict[int, int] = {}
        while len(codes) < world_size:
            ready, _, _ = select.select(self._answers, [], [], max(deadline - time.monotonic(), 0.0))
            if not ready:
                raise TimeoutError(f"ranks {sorted(set(range(world_size)) - codes.keys())} were not done in time")
            for answer in ready:
                text = os.read(answer, 1 << 16).decode()
                assert text, "a host has no process any more that forks ranks"
                for line in text.splitlines():
                    rank, code = line.split()
                    codes[int(rank)] = int(code)
        return codes


def _outcome(path: Path, code: int) -> Any:
    return pickle.loads(path.read_bytes()) if path.exists() else RankDied(f"ended with {code}")


@contextlib.contextmanager
def cluster(num_hosts: int, rate: str | None = None) -> Iterator[Cluster]:
    """Test hosts for a while."""
    made = Cluster(num_hosts, rate)
    try:
        yield made
    finally:
        made.close()
