"""Programs without torch that time the same verbs: Intel MPI's IMB-MPI1, and other MPI libraries through mpi4py.

They are separate processes, and cannot take turns with the backends call by call; they run before the ranks
and once more after them. Each reports for every verb and size the mean time of the slowest rank, as the ranks do. All
use 4-byte floats and sums; other dtypes and reductions have no rows of peers.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.bench.comm.mpi import Mpi, clean_environment

__all__ = ["Imb", "Peer", "PeerFailed", "Sample", "find_peers", "is_imb", "parse_imb"]

_FLOAT_BYTES = 4
_LEAST_IMB_S = 0.05  # with less, it gives up on a busy machine, without any times
_PROGRAM = Path(__file__).with_name("mpi_program.py")
# IMB's name of each verb, and whether its size is that of one rank's part.
_IMB_NAMES = {
    "all_reduce": ("Allreduce", False),
    "reduce": ("Reduce", False),
    "broadcast": ("Bcast", False),
    "reduce_scatter": ("Reduce_scatter", False),
    "send_recv": ("PingPong", False),
    "barrier": ("Barrier", False),
    "all_gather": ("Allgather", True),
    "gather": ("Gather", True),
    "scatter": ("Scatter", True),
    "all_to_all": ("Alltoall", True),
}
# Verbs with two names in torch, and one in MPI.
_SAME = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}


class PeerFailed(Exception):
    """A peer failed; says why."""


@dataclass(frozen=True)
class Sample:
    """A timing.

    Attributes:
        verb: as in `VERBS`.
        size_bytes: size as in `VERBS`; 0 for a barrier.
        seconds: seconds per call.
        iterations: number of calls averaged.
    """

    verb: str
    size_bytes: int
    seconds: float
    iterations: int


@dataclass(frozen=True)
class Peer:
    """A program that times verbs.

    Attributes:
        name: its name in the table.
        command: number of ranks -> the command line, without its own arguments.
        time_verbs: called with this peer, ranks, verbs, sizes and seconds; returns samples.
    """

    name: str
    command: Callable[[int], list[str]]
    time_verbs: Callable[[Peer, int, Sequence[str], Sequence[int], float], list[Sample]]

    def run(self, num_ranks: int, verbs: Sequence[str], sizes: Sequence[int], seconds: float) -> list[Sample]:
        """Samples of the verbs that it supports, under the requested names.

        Args:
            num_ranks: number of ranks.
            verbs: names of verbs.
            sizes: sizes of the larger buffer, in bytes.
            seconds: approximate time limit.

        Raises:
            PeerFailed: it exited with an error, or did not exit in time.
        """
        wanted = {_SAME.get(verb, verb) for verb in verbs} & _IMB_NAMES.keys()
        if not wanted:
            return []
        found = self.time_verbs(self, num_ranks, sorted(wanted), sizes, seconds)
        names = {verb: [name for name in verbs if _SAME.get(name, name) == verb] for verb in wanted}
        return [
            Sample(name, one.size_bytes, one.seconds, one.iterations)
            for one in found
            for name in names.get(one.verb, [])
        ]


def find_peers(
    paths: Sequence[str], mpis: Sequence[Mpi], reasons: Mapping[str, str]
) -> tuple[list[Peer], dict[str, str]]:
    """The peers on this machine; and those that are missing, with the reason.

    Args:
        paths: paths of further programs; only those of an IMB-MPI1 are used here.
        mpis: the MPI libraries found.
        reasons: command -> why its library does not work.
    """
    peers = [_through_mpi4py(mpi) for mpi in mpis]
    missing = {f"MPI by {command}": reason for command, reason in reasons.items()}
    if not mpis and not reasons:
        missing["MPI"] = "mpirun is not installed (Debian: apt install openmpi-bin libopenmpi-dev; pip install mpi4py)"
    beside = Path(sys.executable).with_name("IMB-MPI1")
    found = [*filter(is_imb, paths), *filter(None, [shutil.which("IMB-MPI1")]), *([str(beside)] * beside.exists())]
    if found:
        peers.insert(0, Imb(found[0]).peer())
    else:
        missing["Intel MPI (IMB)"] = "IMB-MPI1 is not installed: pip install impi-rt, or --peer PATH"
    return peers, missing


def is_imb(path: str) -> bool:
    """Whether a program is IMB, by its name."""
    return Path(path).name.startswith("IMB")


# ---- IMB -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Imb:
    """IMB-MPI1, with the mpiexec in its folder.

    Attributes:
        path: path of the program.
    """

    path: str

    def peer(self) -> Peer:
        """This program as a peer."""
        return Peer("Intel MPI (IMB)", self._command, self._time_verbs)

    def _command(self, num_ranks: int) -> list[str]:
        beside = [Path(self.path).with_name(name) for name in ("mpiexec.hydra", "mpiexec", "mpirun")]
        mpiexec = next((str(path) for path in beside if path.exists()), shutil.which("mpiexec") or "mpiexec")
        return [mpiexec, "-n", str(num_ranks), self.path]

    def _time_verbs(
        self, peer: Peer, num_ranks: int, verbs: Sequence[str], sizes: Sequence[int], seconds: float
    ) -> list[Sample]:
        of_parts = [verb for verb in verbs if _IMB_NAMES[verb][1]]
        of_whole = [verb for verb in verbs if verb not in of_parts]
        found = []
        for names, parts in ((of_whole, 1), (of_parts, num_ranks)):
            lengths = sorted({max(1, size // (_FLOAT_BYTES * parts)) * _FLOAT_BYTES for size in sizes})
            if not names:
                continue
            share = max(_LEAST_IMB_S, seconds * len(names) / len(verbs) / (len(names) * len(lengths)) / 2)
            text = self._run(peer.command(num_ranks), names, lengths, share, 60.0 + 4 * seconds)
            found += [
                Sample(one.verb, one.size_bytes * parts, one.seconds, one.iterations)
                for one in parse_imb(text)
                if one.verb in names
            ]
        return found

    def _run(
        self, command: Sequence[str], verbs: Sequence[str], lengths: Sequence[int], share_s: float, timeout_s: float
    ) -> str:
        libraries = Path(self.path).parent.parent / "lib"
        with tempfile.TemporaryDirectory(prefix="lockstep-imb-") as folder:
            file = Path(folder, "lengths")
            file.write_text("".join(f"{length}\n" for length in lengths))
            options = ["-npmin", command[2], "-msglen", str(file), "-iter", "1000", "-time", f"{share_s:.4f}"]
            names = [_IMB_NAMES[verb][0] for verb in verbs]
            return _output_of([*command, *options, *names], timeout_s, libraries if libraries.is_dir() else None)


def parse_imb(text: str) -> list[Sample]:
    """Parse IMB-MPI1's output: the slowest rank's time of each benchmark; a ping-pong has only one time.

    Args:
        text: its output.

    >>> header = "#bytes #repetitions t_min[usec] t_max[usec] t_avg[usec]"
    >>> text = "\\n".join(["# Benchmarking Allreduce", header, " 4 100 1.0 2.5 1.5"])
    >>> parse_imb(text)
    [Sample(verb='all_reduce', size_bytes=4, seconds=2.5e-06, iterations=100)]
    """
    ours = {name: verb for verb, (name, _) in _IMB_NAMES.items()}
    samples: list[Sample] = []
    verb: str | None = None
    columns: list[str] = []
    for line in text.splitlines():
        if heading := re.match(r"# Benchmarking (\w+)", line):
            verb, columns = ours.get(heading[1]), []
        elif "#repetitions" in line:
            columns = line.replace("#bytes", "bytes").replace("#repetitions", "repetitions").split()
        elif verb and columns and re.fullmatch(r"\s*\d+(\s+[\d.]+)+\s*", line):
            row = dict(zip(columns, map(float, line.split()), strict=False))
            micros = row.get("t_max[usec]", row.get("t[usec]"))
            size = int(row.get("bytes", 0))
            if micros is not None and (size or verb == "barrier"):
                samples.append(Sample(verb, size, round(micros * 1e-6, 12), int(row["repetitions"])))
        elif not line.strip():
            columns = []
    return samples


# ---- other libraries -----------------------------------------------------------------------------


def _through_mpi4py(mpi: Mpi) -> Peer:
    return Peer(f"{mpi.name} (mpi4py)", lambda n: [*mpi.command(n), mpi.python, str(_PROGRAM)], _time_by_mpi4py)


def _time_by_mpi4py(
    peer: Peer, num_ranks: int, verbs: Sequence[str], sizes: Sequence[int], seconds: float
) -> list[Sample]:
    job = {"verbs": list(verbs), "sizes_bytes": list(sizes), "seconds": seconds / 2}
    sample_s = min(0.01, seconds / 6 / max(1, len(verbs) * len(sizes)))
    command = [*peer.command(num_ranks), json.dumps({**job, "sample_s": sample_s})]
    text = _output_of(command, 60.0 + 4 * seconds, None)
    found = []
    for line in text.splitlines():
        if line.startswith("["):
            verb, size_bytes, duration, iterations = json.loads(line)
            found.append(Sample(verb, size_bytes, duration, iterations))
    return found


def _output_of(command: Sequence[str], timeout_s: float, libraries: Path | None) -> str:
    """The output of a program; it and its children have ended when this returns."""
    variables = clean_environment()
    if libraries is not None:
        variables["LD_LIBRARY_PATH"] = os.pathsep.join(
            filter(None, [str(libraries), variables.get("LD_LIBRARY_PATH", "")])
        )
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=variables,
            start_new_session=True,
        )
    except OSError as error:
        raise PeerFailed(f"{command[0]} cannot be started: {error.strerror}") from error
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise PeerFailed(f"it did not exit within {timeout_s:.0f} s") from None
    finally:
        _end(process)
    if process.returncode:
        lines = [line for line in (errors + output).splitlines() if line.strip()]
        raise PeerFailed(f"it exited with {process.returncode}: {(lines or ['no output'])[-1].strip()[:160]}")
    return output


def _end(process: subprocess.Popen[str]) -> None:
    """Ask it to stop its ranks, then kill them."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
