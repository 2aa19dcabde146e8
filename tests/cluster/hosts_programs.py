"""What ranks on test hosts do, for `test_hosts.py`. Each function runs on every rank."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from wire_bounds import error_bound

import lockstep
from lockstep import env
from lockstep.comm.hosts.layout import is_summed_by_first_ranks
from lockstep.comm.messages import arrival
from lockstep.comm.messages.notices import NoticeKind, notice_kind
from lockstep.errors import CollectiveError, LockstepError
from lockstep.testing import limit_s
from random_programs.runner import run_programs

TIMEOUT_S = 20.0


@contextlib.contextmanager
def world(**options: Any) -> Iterator[lockstep.World]:
    """A world whose ranks do not wait for long."""
    with lockstep.init(**{"device": "cpu", "timeout": limit_s(TIMEOUT_S), **options}) as opened:
        yield opened


def set_deadline(opened: lockstep.World, seconds: float) -> None:
    """Give the default group a deadline after everybody has come; collective."""
    dist.barrier()
    opened.process_group.set_timeout(timedelta(seconds=seconds))


def listening() -> list[tuple[str, int]]:
    """Addresses and ports at which this host listens, from /proc/net."""
    found = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A":
            address, port = fields[1].split(":")
            found.append((".".join(str(byte) for byte in bytes.fromhex(address)[::-1]), int(port, 16)))
    lines = Path("/proc/net/tcp6").read_text().splitlines()[1:]
    return found + [(line.split()[1], 0) for line in lines if line.split()[3] == "0A"]


# ---- without trouble ---------------------------------------------------------------------------------


def what_init_says(timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """What a world over several hosts looks like from within."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), world(backend="auto", timeout=timeout_s) as opened:
        ports = listening()
        value = torch.tensor([opened.rank + 1.0])
        dist.all_reduce(value)
        inner = dist.new_group(backend="gloo")
        dist.all_reduce(value, group=inner)
        dist.barrier()
        ports += listening()
        return {
            "backend": opened.backend,
            "sum": value.item(),
            "said": said.getvalue(),
            "ports": sorted(set(ports)),
            "interfaces": (env.GLOO_SOCKET_IFNAME.get(), env.NCCL_SOCKET_IFNAME.get()),
        }


def knock(address: str, port: int) -> str:
    """How an attempt to connect ends."""
    try:
        socket.create_connection((address, port), 0.5).close()
    except OSError as error:
        return type(error).__name__
    return "open"


def knocks_at_gloo() -> dict[str, Any]:
    """Whether ranks can connect to what other ranks listen at, once their group is there."""
    with world() as opened:
        dist.all_reduce(torch.ones(1))
        master = int(os.environ["MASTER_PORT"])
        doors: list[Any] = [None] * opened.world_size
        dist.all_gather_object(doors, [one for one in listening() if one[1] != master])
        found = [knock(*one) for one in {tuple(one) for each in doors for one in each}]
        dist.barrier()
        value = torch.full((300_000,), 1.0)
        dist.all_reduce(value)
        dist.all_reduce(value, group=dist.new_group())
        return {"doors": sorted(found), "sum": value.unique().tolist()}


def little_left(starved: int) -> tuple[str, float]:
    """A new group while one rank has few descriptors left, and another one later."""
    with world() as opened:
        dist.barrier()
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        if opened.rank == starved:
            resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 8, before[1]))
        try:
            dist.new_group()
            said = "nothing was raised"
        except LockstepError as error:
            said = str(error)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        value = torch.ones(1)
        dist.all_reduce(value, group=dist.new_group())
        return said, value.item()


def wrong_interface() -> str:
    """With a variable that names an interface which is not here."""
    try:
        with world():
            return "nothing was raised"
    except LockstepError as error:
        return f"{type(error).__name__}: {error}"


def groups() -> dict[str, Any]:
    """Groups that span hosts, and that do not."""
    found: dict[str, Any] = {}
    with world() as opened:
        for ranks in ([0, 1], [2, 3], [1, 2], [0, 2, 3], [3, 0]):
            group = dist.new_group(ranks)
            if opened.rank in ranks:
                value = torch.full((100_000,), float(opened.rank))
                dist.all_reduce(value, group=group)
                assert isinstance(group, dist.ProcessGroup)
                found[str(ranks)] = (value.unique().tolist(), type(group.engine.team).__name__)  # type: ignore[attr-defined]
        objects: list[Any] = [None] * opened.world_size
        dist.all_gather_object(objects, {"rank": opened.rank})
        found["objects"] = [one["rank"] for one in objects]
        works = [dist.all_reduce(torch.full((n * 1000,), 1.0), async_op=True) for n in range(1, 30)]
        for work in works:
            work.wait()
        found["async"] = [float(work.result()[0].mean()) for work in works]
    return found


def premultiplied_late(late: int) -> float:
    """A sum of symmetric tensors, each multiplied before, where one rank comes to multiplying later than the others."""
    with world() as opened:
        tensor = lockstep.symmetric_empty(100_000).fill_(1.0)
        dist.all_reduce(tensor)  # the first one also agrees on sizes, for which the ranks wait
        tensor.fill_(1.0)
        team = opened.process_group.engine.team  # type: ignore[attr-defined]
        arrive = team.arrive

        def arrive_and_linger(timeout_s: float) -> None:
            arrive(timeout_s)
            until = time.monotonic() + 0.2
            while time.monotonic() < until:
                team.poll()

        if opened.rank == late:
            team.arrive = arrive_and_linger
        dist.all_reduce(tensor, dist._make_nccl_premul_sum(0.5))  # type: ignore[attr-defined]
        return float(tensor.max())


def soak(seeds: range) -> str:
    """Random programs, each checked against one process."""
    with world():
        run_programs(seeds, num_steps=40)
    return "no mismatch"


def messages() -> dict[str, Any]:
    """Point to point: large and small, tags, from any source, to all at once."""
    found: dict[str, Any] = {}
    with world() as opened:
        rank, size = opened.rank, opened.world_size
        for numel in (3, 1000, 700_000):
            sends = [dist.isend(torch.full((numel,), float(rank)), peer, tag=rank) for peer in range(size)]
            got = [torch.empty(numel) for _ in range(size)]
            for peer in reversed(range(size)):
                dist.recv(got[peer], peer, tag=peer)
            for send in sends:
                assert send is not None
                send.wait()
            found[str(numel)] = [one.unique().tolist() for one in got]
        if rank == 0:
            any_source = torch.empty(5)
            found["any"] = sorted((dist.recv(any_source), any_source[0].item()) for _ in range(size - 1))
        else:
            dist.send(torch.full((5,), float(rank)), 0)
    return found


# The last is summed in two chunks by two hosts, and by the first ranks of more.
LENGTHS = (7, 3000, 70_001, 1_100_003)


def sums(lengths: tuple[int, ...], *wires: str | None) -> dict[str, Any]:
    """For each wire format: sums of random numbers, in bits, and how far they are from exact ones beyond the bound."""
    return {str(wire): _sums(lengths, wire) for wire in wires}


def _sums(lengths: tuple[int, ...], wire: str | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with world(wire=wire) as opened:
        size = opened.world_size
        layout = opened.process_group.engine.team.layout  # type: ignore[attr-defined]
        for numel in lengths:
            parts = [torch.randn(numel, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]
            bound = _bound(wire or "fp32", parts, layout.hosts)
            exact = torch.stack(parts).double().sum(0)
            bits = set()
            for op, divisor in ((dist.ReduceOp.SUM, 1), (dist.ReduceOp.AVG, size), (dist.ReduceOp.SUM, 1)):
                value = parts[opened.rank].clone()
                dist.all_reduce(value, op)
                excess = float(((value.double() * divisor - exact).abs() - bound).max())
                bits.add((divisor, value.numpy().tobytes()[:4096], float(value.double().sum()), excess <= 0.0))
            small = parts[opened.rank][:100].clone()  # comes with the notices, in another order of steps
            dist.all_reduce(small)
            is_in_tree = len(layout.hosts) == 2 or not is_summed_by_first_ranks(4 * numel)
            if wire in (None, "fp32") and is_in_tree:
                assert torch.equal(small, value[:100]), f"{numel}: not the bits of a large one"
            found[str(numel)] = sorted(bits)
        whole = torch.arange(1000)
        dist.all_reduce(whole)
        doubles = torch.full((70_000,), 1 / 3, dtype=torch.float64)
        dist.all_reduce(doubles)
        found["exact"] = bool((whole == torch.arange(1000) * size).all() and (doubles - size / 3).abs().max() < 1e-15)
    return found


def _bound(wire: str, parts: list[torch.Tensor], hosts: Sequence[Sequence[int]]) -> torch.Tensor:
    """What `comm/wire.py` says of the error of a sum, for blocks that may lie anywhere."""
    sums = [torch.stack([parts[rank] for rank in ranks]).sum(0) for ranks in hosts]
    if len(hosts) > 2:
        sums.append(torch.stack(sums).sum(0) * 1.05)  # as it is after the first errors
    rounding = len(parts) * 2.0**-23 * torch.stack(parts).abs().sum(0).double()
    if wire == "int8":
        return rounding + sum(float(one.max() - one.min()) for one in sums) / 509
    if wire == "fp16":
        return rounding + sum(one.double().abs() * 2.0**-11 + float(one.abs().max()) * 2.0**-29 for one in sums)
    return rounding + sum(error_bound(wire, one) for one in sums)


def train(steps: int) -> dict[str, Any]:
    """Train a small model in float64 on the global batch; weights at the end, and after each step the loss."""
    torch.manual_seed(0)
    with world() as opened:
        generator = torch.Generator().manual_seed(1)
        data = [
            (torch.randn(30, generator=generator, dtype=torch.float64), index % 5) for index in range(37)
        ]  # does not divide evenly
        loader = lockstep.DataLoader(data, batch_size=10, shuffle=True, seed=0)
        net = torch.nn.Sequential(torch.nn.Linear(30, 64), torch.nn.Tanh(), torch.nn.Linear(64, 5)).double()
        model = lockstep.DistributedDataParallel(net)
        for _ in range(steps):
            for inputs, labels in loader:
                model.zero_grad()
                cross_entropy(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
                with torch.no_grad():  # SGD by hand: torch's optimizers import half of torch first
                    for parameter in model.parameters():
                        assert parameter.grad is not None
                        parameter -= 0.3 * parameter.grad
        weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        return {"rank": opened.rank, "weights": weights.tolist()}


def overflow(wire: str) -> list[str]:
    """Steps over a wire that rounds; the second has an infinite gradient, as with a GradScaler, the last other rows."""
    with world(wire=wire) as opened:
        model = lockstep.DistributedDataParallel(torch.nn.Linear(3, 1))

        def step(rows: int, factor: float) -> str:
            model.zero_grad()
            name, *_ = raised_by(lambda: (model(torch.ones(rows, 3)).sum() * factor).backward())  # type: ignore[no-untyped-call]
            return name or str(model.module.bias.grad)

        return [step(2, 1.0), step(2, float("inf")), step(2, -7.0), step(2 + opened.rank // 2, 1.0)]


# ---- trouble -----------------------------------------------------------------------------------------

_Outcome = tuple[str, str, float, tuple[int, ...]]


def raised_by(call: Callable[[], object]) -> _Outcome:
    """What a call raises: kind, text, seconds until then, and culprits."""
    started = time.monotonic()
    try:
        call()
    except LockstepError as error:
        culprits = error.culprits if isinstance(error, CollectiveError) else ()
        return type(error).__name__, str(error), time.monotonic() - started, culprits
    return "", "nothing was raised", time.monotonic() - started, ()


def mismatches() -> dict[str, _Outcome]:
    """The last rank comes for something else. The group stays usable."""
    found = {}
    with world() as opened:
        is_odd = opened.rank == opened.world_size - 1
        dist.barrier()
        found["shape"] = raised_by(lambda: dist.all_reduce(torch.ones(4 if is_odd else 3)))
        found["operation"] = raised_by(
            lambda: dist.broadcast(torch.ones(3), 0) if is_odd else dist.all_reduce(torch.ones(3))
        )
        found["large"] = raised_by(lambda: dist.all_reduce(torch.ones(500_001 if is_odd else 500_000)))
        value = torch.ones(2)
        dist.all_reduce(value)
        found["after"] = ("", str(value.tolist()), 0.0, ())
        last = opened.world_size - 1
        found["message"] = raised_by(
            lambda: (
                dist.send(torch.ones(4), 0) if is_odd else dist.recv(torch.ones(3), last) if opened.rank == 0 else None
            )
        )
    return found


def lose_one(culprit: int, how: str) -> dict[str, _Outcome]:
    """One rank dies or fails while the others wait for it: in a collective, or in the middle of one."""
    opened = lockstep.init(device="cpu", timeout=limit_s(TIMEOUT_S))
    dist.all_reduce(torch.ones(100))
    dist.all_reduce(torch.ones(2_000_000))  # makes connections, which is another moment to die in
    dist.barrier()
    if opened.rank == culprit:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "killed in the middle":
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            while True:
                dist.all_reduce(torch.ones(2_000_000))
        if how == "raised":
            opened.abort(ValueError("out of cheese"))
            return {}
        opened.shutdown()
        return {}

    def call() -> None:
        while True:
            dist.all_reduce(torch.ones(2_000_000 if how == "killed in the middle" else 1000))

    found = {"first": raised_by(call), "again": raised_by(lambda: dist.all_reduce(torch.ones(1)))}
    opened.shutdown()
    return found


def before_handing_on(world: lockstep.World, action: Callable[[], object]) -> None:
    """Do something before this rank hands on a notice of another rank."""
    team = world.process_group.engine.team  # type: ignore[attr-defined]
    send = team.send_message

    def act_and_send(peer: int, message: bytes | memoryview) -> None:
        if notice_kind(memoryview(message)) in (NoticeKind.FORWARDED, NoticeKind.JOINED):
            action()
        send(peer, message)

    team.send_message = act_and_send


def leaves_after_its_part(slow: int) -> str:
    """Ranks go as soon as their collective is over, while one is slow that hands on their notices to others."""
    opened = lockstep.init(device="cpu", timeout=limit_s(TIMEOUT_S))
    dist.barrier()
    if opened.rank == slow:
        before_handing_on(opened, lambda: time.sleep(0.3))
    _, said, _, _ = raised_by(dist.barrier)
    opened.shutdown()
    return said


def dies_handing_on(culprit: int) -> _Outcome:
    """One rank tells all that it has come, and dies before it hands on what others told it. They do not tell all."""
    opened = lockstep.init(device="cpu", timeout=limit_s(TIMEOUT_S))
    dist.barrier()
    arrival._PATIENCE_S = TIMEOUT_S
    team = opened.process_group.engine.team  # type: ignore[attr-defined]

    def tell_all_and_die() -> None:
        for peer in team.peers:
            team.send_message(peer, bytes(team._entries.notice(culprit, team._number)))
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)

    if opened.rank == culprit:
        before_handing_on(opened, tell_all_and_die)
    found = raised_by(dist.barrier)
    opened.shutdown()
    return found


def one_ahead(late: int) -> list[float]:
    """Sums, for every other one of which ranks tell all at once, while one hands on late what was said for the last."""
    with world() as opened:
        dist.barrier()
        team = opened.process_group.engine.team  # type: ignore[attr-defined]
        if opened.rank == late:
            before_handing_on(opened, lambda: time.sleep(0.02))
        found = []
        for number in range(40):
            arrival._PATIENCE_S = TIMEOUT_S * (number % 2)  # seconds, for every other one
            value = torch.full((3,), float(number * opened.world_size + opened.rank))
            dist.all_reduce(value)
            found.append(value[0].item())
        assert team.forwardings
        return found


def never_comes(deadline_s: float) -> dict[str, _Outcome]:
    """The last rank does not come in time."""
    opened = lockstep.init(device="cpu", timeout=limit_s(TIMEOUT_S))
    set_deadline(opened, deadline_s)
    if opened.rank == opened.world_size - 1:
        started = time.monotonic()
        while time.monotonic() - started < 1.5 * deadline_s:
            torch.ones(1000).sum()
    found = {"all_reduce": raised_by(lambda: dist.all_reduce(torch.ones(10)))}
    opened.shutdown()
    return found


def lose_partner(culprit: int) -> dict[str, _Outcome]:
    """A receive from a rank of another host, which is killed."""
    opened = lockstep.init(device="cpu", timeout=limit_s(TIMEOUT_S))
    dist.barrier()
    if opened.rank == culprit:
        os.kill(os.getpid(), signal.SIGKILL)
    found = {"recv": raised_by(lambda: dist.recv(torch.ones(10), culprit))}
    opened.shutdown()
    return found


def horovod_step() -> tuple[list[float], list[float]]:
    """One step of a `hvd.DistributedOptimizer`: the mean gradient, and the weight behind it."""
    import lockstep.compat.horovod.torch as hvd

    hvd.init()
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
    model(torch.full((1, 2), hvd.rank() + 1.0)).sum().backward()
    optimizer.synchronize()
    assert model.weight.grad is not None
    mean = model.weight.grad[0].tolist()
    with optimizer.skip_synchronize():
        optimizer.step()
    hvd.shutdown()
    return mean, model.weight[0].tolist()


def serve_after_a_leaver(leaver: int) -> dict[str, _Outcome]:
    """Rank 0 has posted a receive from each of two clients when one of them leaves; it continues with the other."""
    opened = lockstep.init(device="cpu", timeout=limit_s(TIMEOUT_S))
    found = {}
    if opened.rank == leaver:
        dist.send(torch.ones(10), 0)
    elif opened.rank:
        found = {f"call {number}": raised_by(lambda: _exchange_with(0)) for number in range(3)}
    else:
        requests = {client: dist.irecv(torch.ones(10), client) for client in (1, 2)}
        requests[leaver].wait()
        requests[leaver] = dist.irecv(torch.ones(10), leaver)
        while not requests[leaver].is_completed():
            time.sleep(0.001)
        found["gone"] = raised_by(requests[leaver].wait)
        found["first"] = raised_by(requests[3 - leaver].wait)
        found["answer"] = raised_by(lambda: dist.send(torch.ones(10), 3 - leaver))
        found.update({f"call {number}": raised_by(lambda: _exchange_with(3 - leaver)) for number in range(2)})
    opened.shutdown()
    return found


def _exchange_with(peer: int) -> None:
    sent = dist.isend(torch.ones(10), peer)
    dist.recv(torch.ones(10), peer)
    sent.wait()


def destroys_ahead(late: int) -> list[float]:
    """All ranks but one leave right after their asynchronous calls, for which that one comes late."""
    opened = lockstep.init(device="cpu", timeout=limit_s(TIMEOUT_S))
    tensors = [torch.full((size,), opened.rank + 1.0) for size in (3, 100_000, 3)]
    if opened.rank == late:
        time.sleep(0.2)
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    if opened.rank == late:
        for work in works:
            work.wait()
    opened.shutdown()
    return [tensor[-1].item() for tensor in tensors]
