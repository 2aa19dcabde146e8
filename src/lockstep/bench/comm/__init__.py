"""`lockstep bench comm`: times every verb over sizes, dtypes and backends, with the columns of nccl-tests.

General layout:

* `sizes`: parses sizes.
* `verbs`: how to call, count and check each verb. Pure.
* `measuring`: calls, checks and times verbs, in the ranks.
* `mpi`: finds MPI libraries.
* `peers`: programs without torch that time the same verbs; `mpi_program`: one of them.
* `columns`: formulas of bandwidths; the tables and the plot of a result.

The command calls this module, which does not import torch; `measure` does.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lockstep.bench.comm.columns import blocks, draw, wrong_elements
from lockstep.bench.comm.mpi import find_mpis
from lockstep.bench.comm.peers import Peer, PeerFailed, Sample, find_peers, is_imb
from lockstep.bench.comm.sizes import parse_sizes
from lockstep.bench.results import Series
from lockstep.bench.session import Session
from lockstep.bench.words import choose
from lockstep.errors import InputError

if TYPE_CHECKING:
    from lockstep.bench.comm.mpi import Mpi

__all__ = ["DESCRIPTION", "SUMMARY", "add_arguments", "blocks", "draw", "measure"]

SUMMARY = "latency and bandwidth of every verb, over sizes, dtypes and backends, and of MPI"
DESCRIPTION = """\
Time every verb of torch.distributed on every available backend, in the same processes and in turns, and print
the columns of nccl-tests. MPI libraries are timed as well, by separate programs.
"""

BACKENDS = ("lockstep", "gloo", "mpi", "nccl")
_DEFAULT_SIZES, _QUICK_SIZES = "4:64M", "4,64K,1M"
_PEERS_SHARE = 0.2  # of the budget, for all peers and both their runs
_START_S = 10.0
_WAYS_TO_FAIL = 2.0  # multiple of its budget after which a hanging job is killed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's own options to `parser`."""
    group = parser.add_argument_group("what is measured")
    group.add_argument("--verbs", metavar="A,B", help="comma-separated verbs (default: all)")
    group.add_argument(
        "--sizes",
        metavar="FROM:TO",
        help=f"bytes of the larger buffer, or a list: 4,64K,1M (default: {_DEFAULT_SIZES})",
    )
    group.add_argument("--factor", type=int, default=4, help="factor between the sizes of a range (default: 4)")
    group.add_argument("--dtypes", metavar="A,B", default="float32", help="dtypes of the elements (default: float32)")
    group.add_argument("--op", default="sum", help="reduction: sum, min or max (default: sum)")
    group.add_argument("--backends", metavar="A,B", help=f"of {', '.join(BACKENDS)} (default: all that are available)")
    group.add_argument("--no-peers", action="store_true", help="do not time programs without torch")
    group.add_argument(
        "--peer", action="append", default=[], metavar="PATH", help="another IMB-MPI1, or mpiexec of an MPI library"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="compare every result with that of one process; exit with 1 if any is wrong",
    )


def measure(options: argparse.Namespace, session: Session) -> None:
    """Measure as requested by the options.

    Raises:
        InputError: an option is invalid; says what to write.
        RankFailed: a rank failed.
    """
    from lockstep.bench.comm.verbs import DTYPES, OPS, VERBS

    verbs = choose(options.verbs or ",".join(VERBS), VERBS, "verb")
    dtypes = choose(options.dtypes, DTYPES, "dtype")
    (op,) = choose(options.op, OPS, "op", only_one=True)
    wanted = choose(options.backends or ",".join(BACKENDS), BACKENDS, "backend")
    sizes = parse_sizes(options.sizes or (_QUICK_SIZES if session.quick else _DEFAULT_SIZES), options.factor)
    for path in options.peer:
        if not os.access(path, os.X_OK):
            raise InputError(f"--peer {path} is not an executable program")
    session.progress.show("looking for backends and peers")
    mpis: list[Mpi] = []
    reasons: dict[str, str] = {}
    if "mpi" in wanted or not options.no_peers:
        mpis, reasons = find_mpis(session.nproc, [path for path in options.peer if not is_imb(path)])
    backends, mpi = _find_backends(wanted, session, mpis, reasons)
    has_peers = not options.no_peers and _has_peers(session, dtypes, op)
    peers = _find_peers(options.peer, session, mpis, reasons) if has_peers else []
    session.settings.update(
        {"backends": backends, "op": op, "check": options.check, "sizes_bytes": sizes, "threads_per_rank": 1}
        | {"peers": [peer.name for peer in peers], "started_by": mpi.name if mpi else "lockstep"}
    )
    _CommRun(session, peers, verbs, sizes).measure(
        {"verbs": verbs, "dtypes": dtypes, "op": op, "backends": backends, "check": options.check},
        mpi.command(session.nproc) if mpi else [],
    )


def _find_backends(
    wanted: Collection[str], session: Session, mpis: Sequence[Mpi], unusable: Mapping[str, str]
) -> tuple[list[str], Mpi | None]:
    """The backends that can run here, and the MPI that starts the ranks, if one of them needs it.

    Args:
        wanted: names of backends.
        session: notes those that cannot run, and why.
        mpis: the MPI libraries found.
        unusable: command -> why its library does not work.
    """
    import sys

    import torch
    import torch.distributed as dist

    mpi = next((one for one in mpis if one.python == sys.executable), None)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    no_mpi = "mpirun is not installed, or mpi4py does not run under it; see `lockstep doctor`"
    reasons = {
        "mpi": "" if mpi else next(iter(unusable.values()), no_mpi),
        "nccl": ""
        if dist.is_nccl_available() and gpus >= session.nproc
        else f"needs a GPU per rank: {session.nproc} ranks, {gpus} GPUs",
    }
    there = []
    for backend in wanted:
        if reasons.get(backend):
            session.skip(backend, reasons[backend])
        else:
            there.append(backend)
    if not there:
        raise InputError(f"none of the backends can run here: {'; '.join(reasons[one] for one in wanted)}")
    return there, mpi if "mpi" in there else None


def _find_peers(
    paths: Sequence[str], session: Session, mpis: Sequence[Mpi], reasons: Mapping[str, str]
) -> Sequence[Peer]:
    """The programs without torch that can be timed; the session notes why others cannot."""
    peers, missing = find_peers(paths, mpis, reasons)
    for name, reason in missing.items():
        session.skip(name, reason)
    return peers


def _has_peers(session: Session, dtypes: Sequence[str], op: str) -> bool:
    """Whether the programs without torch can measure any of this."""
    reason = ""
    if "float32" not in dtypes or op != "sum":
        reason = "they support float32 and sum only"
    elif session.nproc < 2:
        reason = "needs two ranks"
    if reason:
        session.skip("peers", reason)
    return not reason


class _CommRun:
    """A run: peers, ranks, peers again.

    Args:
        session: gets the samples.
        peers: programs without torch.
        verbs: names of verbs.
        sizes: sizes in bytes.
    """

    def __init__(self, session: Session, peers: Sequence[Peer], verbs: Sequence[str], sizes: Sequence[int]) -> None:
        self._session, self._peers, self._verbs, self._sizes = session, list(peers), verbs, sizes
        self._num_items = 0
        self._of_peers: dict[tuple[str, str, int], list[Sample]] = {}

    def measure(self, job: dict[str, object], through: Sequence[str]) -> None:
        """Run everything, within the budget."""
        from lockstep.bench.comm.measuring import measure_on_rank
        from lockstep.bench.ranks import run_ranks

        session = self._session
        share_s = _PEERS_SHARE * session.budget_s / max(1, 2 * len(self._peers)) if not session.quick else 0.2
        self._time_peers(share_s)
        kept_s = len(self._peers) * share_s
        seconds = max(1.0, session.left_s - kept_s - min(_START_S, 0.2 * session.budget_s))
        job = {**job, "sizes_bytes": list(self._sizes), "seconds": seconds, "quick": session.quick}
        answer = run_ranks(
            measure_on_rank,
            session.nproc,
            job,
            threads=1,
            timeout_s=120 + _WAYS_TO_FAIL * session.budget_s,
            on_part=self._take,
            through=through,
        )
        assert isinstance(answer, dict)
        if not answer["complete"]:
            session.skip("the larger sizes", "skipped: out of time; raise --budget or pass fewer --verbs or --sizes")
        if session.left_s > 0 or session.quick:
            self._time_peers(share_s)
        wrong = sum(wrong_elements(one) or 0 for one in session.series)
        if wrong:
            session.failure = f"{wrong} wrong elements: see the rows with #wrong"

    def _take(self, part: Any) -> None:
        """Handle what rank 0 sends."""
        for backend, reason, parameters in part.get("skipped", ()):
            self._session.skip(backend, reason, parameters)
        for series in part.get("series", ()):
            self._session.add(Series(**series))
        self._num_items = part.get("items", self._num_items)
        if part.get("series") and "done" in part:
            found = part["series"][0]["parameters"]
            done = f"{part['done']} of {self._num_items}"
            self._session.progress.show(f"{done}: {found['verb']} of {found['bytes']} B, {found['dtype']}")

    def _time_peers(self, share_s: float) -> None:
        """Run every peer once; one that fails is not run again."""
        for peer in list(self._peers):
            self._session.progress.show(peer.name)
            try:
                samples = peer.run(self._session.nproc, self._verbs, self._sizes, share_s)
            except PeerFailed as failure:
                self._session.skip(peer.name, str(failure))
                self._peers.remove(peer)
                continue
            for one in samples:
                self._add_sample(peer.name, one)

    def _add_sample(self, name: str, one: Sample) -> None:
        from lockstep.bench.comm.verbs import DTYPES, VERBS, parameters_of

        n = self._session.nproc
        verb = VERBS[one.verb]
        count = verb.count(one.size_bytes, DTYPES["float32"].itemsize, n)
        found = self._of_peers.setdefault((name, one.verb, one.size_bytes), [])
        found.append(one)
        self._session.add(
            Series(
                parameters_of(verb, count, "float32", "sum", n),
                name,
                min(sample.iterations for sample in found),
                [sample.seconds for sample in found],
            )
        )
