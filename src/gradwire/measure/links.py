"""measure_cluster: what a message costs in the runtime, by verb and size, as a Cluster.

Messages run through the same engine, lanes and channels as a training step's, so the
hand-over between threads is in the figures; the all-reduce is a dense message, encode
and decode included. A time is that of a run of messages one behind the other, as they
are in a step, divided by their number: short messages are not hidden by the noise of
starting at the same moment, and a shaped link's burst after a pause is not taken for
its rate.

Source: US-Byte, section 3 (a and b of an all-reduce by least squares); HiPress, section
3.2.
Differences from the papers: every verb is measured, not the all-reduce alone; a run
    counts as long as it took on its slowest rank.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from ..collective.steps.travel import (
    NOTES,
    ahead_bytes,
    bytes_sent,
    hops,
    travel,
)
from ..compress.none import none
from ..contract import Exchange, Member
from ..contract.spec import TensorSpec
from ..contract.verbs import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Recv,
    ReduceScatter,
    Send,
    Steps,
    Verb,
)
from ..errors import InvalidSetting, UnknownName, invalid
from ..exchange.by_name import exchange_for
from ..exchange.two_level import among_hosts, on_hosts
from ..planning.data.cluster import VERBS, Cluster, CodecFit, Host, VerbName
from ..planning.data.distance import is_hidden
from ..planning.data.fit import LineFit, fit_line
from ..planning.data.stored import Stored
from ..runtime.engine.engine import CONTROL, Engine, figures_of_all
from ..runtime.engine.plain import announced_by
from ..runtime.transport.wire import Group
from .group import launched_group
from .layers import device_waiter, no_progress, today

Figures = TypeVar("Figures", bound=Stored)


def broadcast_figures(engine: Engine, figures: Figures) -> Figures:
    """Rank 0's figures on all ranks: floats' last bit differs between machines."""
    return type(figures).parse(
        announced_by(engine, 0, figures.to_json()), "rank 0's figures"
    )


# ---- shared_cores --------------------------------------------------------------------
#
# The part of its machine's cores that a rank has, where that is too little.

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def shared_cores(
    of_all: Callable[[Sequence[float]], list[list[float]]],
) -> float | None:
    """The cores of the rank that has fewest.

    None where each has more than threads that compute.

    ``of_all`` gives every rank's figures, so that all ranks come to the same answer.
    Ranks share cores if they may run on the same cores of one machine. Ranks are on one
    machine if their kernels have the same boot id, whatever host names they see. Sets
    of cores that overlap in part count as apart.
    """
    own_cores = os.sched_getaffinity(0)
    rows = of_all([_place(sorted(own_cores)), len(own_cores), torch.get_num_threads()])
    num_ranks = Counter(place for place, _, _ in rows)
    each = [(cores / num_ranks[place], threads) for place, cores, threads in rows]
    short = [cores for cores, threads in each if cores <= threads]
    return min(short, default=None)


def _place(cores: list[int]) -> float:
    """A number for these cores of this machine, the same in all its processes."""
    boot = _BOOT.read_text(encoding="ascii") if _BOOT.exists() else platform.node()
    return float(
        int.from_bytes(hashlib.sha256(f"{boot} {cores}".encode()).digest()[:6], "big")
    )


# ---- links ---------------------------------------------------------------------------


SIZES_BYTES = tuple(2**power for power in (14, 16, 18, 19, 20, 21, 22))
"""Sizes from where alpha decides to where beta does.

Most are where plans have their messages.
"""

BUDGET_S = 0.5
"""Seconds that one verb of one size may take, about; slow links take longer."""

ROUNDS = 7

ITEM_BYTES = 4
LEAST_SHOWN = 1.1
LIMIT = datetime.timedelta(minutes=2)
Make = Callable[[], Steps[object]]
"""Makes the steps of one message."""


def measure_cluster(
    engine: Engine,
    *,
    rate_bytes_per_s: float | None = None,
    sizes_bytes: Sequence[int] = SIZES_BYTES,
    verbs: Sequence[VerbName] = VERBS,
    budget_s: float = BUDGET_S,
    rounds: int = ROUNDS,
    codecs: Mapping[str, CodecFit] | None = None,
    advance: Callable[..., None] = no_progress,
) -> Cluster:
    """Measures ``verbs`` among the engine's ranks, which all call this alike.

    ``verbs`` must have the all-reduce.

    ``rate_bytes_per_s`` is the links' known rate. Without it the rate of a ring is
    stated whose long all-reduces take as long, or of all-to-alls between far hosts.
    Short ones, which a link may take at once, tell no rate. ``sizes_bytes`` are those
    of the largest buffer of a verb, so of an all-gather's result, rounded up to whole
    float32 a rank. A time is the median of
    ``rounds``. ``codecs`` of rank 0 are passed on. ``advance(amount, note)`` is told of
    progress, 1 for a size of a verb. How often a size is repeated follows from the
    slowest rank's first time, which all ranks know; every rank returns rank 0's
    cluster. Raises ``InvalidSetting`` for one rank, fewer than three sizes or an
    unknown verb.
    """
    if engine.world < 2:
        raise InvalidSetting(
            f"a link joins at least two ranks, got {engine.world}; start more ranks"
        )
    if unknown := [verb for verb in verbs if verb not in VERBS]:
        raise UnknownName("verb", unknown[0], VERBS)
    if len(set(sizes_bytes)) < 3 or min(sizes_bytes) < 1:
        raise invalid(
            "sizes_bytes", sizes_bytes, "three sizes or more", "leave them out"
        )
    if engine.ranks_per_host > 1:
        return _measure_hosts(engine, sizes_bytes, verbs, budget_s, rounds, codecs)
    cases = _verb_cases(engine, verbs, _numels(engine, sizes_bytes))
    seconds = _message_s(engine, cases, budget_s, rounds, advance)
    fits = dict(zip(verbs, _lines(cases, seconds, len(sizes_bytes)), strict=True))
    link = _link(engine, fits, engine.world, budget_s, rounds)
    cluster = Cluster(
        num_ranks=engine.world,
        rate_bytes_per_s=rate_bytes_per_s or link.rate_bytes_per_s,
        collectives=fits,
        processors=_processors(engine, cases),
        source=_source(f"{engine.world} ranks"),
    )
    return _completed(engine, cluster, link, codecs, budget_s, rounds)


def _completed(
    engine: Engine,
    cluster: Cluster,
    link: _Link,
    codecs: Mapping[str, CodecFit] | None,
    budget_s: float,
    rounds: int,
) -> Cluster:
    """Rank 0's cluster with the figures that are measured alike on all clusters."""
    figures = {
        "hop_s": link.work_s,
        "latency_s": link.latency_s,
        "codecs": dict(codecs or {}),
        "host_share": host_share(engine, budget_s=budget_s, rounds=rounds),
        "cores": shared_cores(partial(figures_of_all, engine)),
    }
    return broadcast_figures(engine, cluster.model_copy(update=figures))


def _numels(engine: Engine, sizes_bytes: Sequence[int]) -> list[int]:
    """The elements of messages of these sizes: as many for each rank."""
    world = engine.world
    return [
        -(-size_bytes // (ITEM_BYTES * world)) * world for size_bytes in sizes_bytes
    ]


def _verb_cases(
    engine: Engine, verbs: Sequence[VerbName], numels: Sequence[int]
) -> list[_Case]:
    """Cases of verbs among hosts, for the shares of messages of ``numels`` elements.

    Where each host has one rank, its share is the message.
    """
    count = engine.ranks_per_host
    cases = []
    for verb in verbs:
        for numel in numels:
            share = numel // (engine.world if verb == "all_gather" else count)
            make = _maker(verb, share, engine.rank // count, engine.world // count)
            cases.append(_Case(verb, share, [_across(engine, make)]))
    return cases


def _across(engine: Engine, make: Make) -> Make:
    """Makes the same steps, among the ranks of one place on all hosts."""
    if engine.ranks_per_host == 1:
        return make
    return lambda: among_hosts(make())


class _Link(NamedTuple):
    """A link's bytes a second, and the seconds of a hop.

    A hop has a message's own work, and latencies, which pass at once for many messages.
    """

    rate_bytes_per_s: float
    work_s: float
    latency_s: float


FAR_S = 1e-3
"""The least seconds of a hop that count as distance: near hosts hand over for less."""
AT_ONCE = 8
"""The transfers that are under way at once, to tell distance from work."""


def _link(
    engine: Engine,
    fits: Mapping[VerbName, LineFit],
    world: int,
    budget_s: float,
    rounds: int,
) -> _Link:
    """The link of ``world`` hosts, whose verbs cost ``fits``.

    Bytes hide the distance in a near ring, and not in a far one. So far links have the
    rate of all-to-alls, which take one hop.
    """
    line = fits["all_reduce"]
    ring = travel("all_reduce", world)
    latency_s = _distance_s(engine, world, budget_s, rounds) / (1 + NOTES)
    rate = ring.copies / _slope(line)
    short_s = line.alpha_s
    if not is_hidden(latency_s, world, max(line.samples)[1]):
        if "all_to_all" in fits:
            rate = _far_rate(fits["all_to_all"], world, latency_s)
        size_bytes, shortest_s = min(line.samples)
        short_s = max(0.0, shortest_s - ring.copies * size_bytes / rate)
    num_hops = hops("all_reduce", world)
    latency_s = min(latency_s, short_s / num_hops)
    return _Link(rate, (short_s - num_hops * latency_s) / ring.rounds, latency_s)


def _far_rate(line: LineFit, world: int, latency_s: float) -> float:
    """Bytes a second by the longest all-to-all, without its distance."""
    size_bytes, longest_s = max(line.samples)
    ahead = ahead_bytes("all_to_all", world)
    per_byte_s = (longest_s - latency_s) / size_bytes
    if size_bytes > ahead:
        # the first bytes are under way while notes come
        beyond_s = longest_s - (1 + NOTES) * latency_s
        per_byte_s = min(per_byte_s, beyond_s / (size_bytes - ahead))
    bytes_s = max(per_byte_s * size_bytes, longest_s / 10)
    return travel("all_to_all", world).copies * size_bytes / bytes_s


def _distance_s(engine: Engine, world: int, budget_s: float, rounds: int) -> float:
    """Seconds that pass at once for many messages to the next host; 0 if it is near.

    Hosts send to the next one at the same time, so the farthest neighbours count. Both
    directions are alike here: a payload waits for a note that comes the other way.
    """
    count = engine.ranks_per_host
    host = engine.rank // count
    right = (host + 1) % world
    left = (host - 1) % world
    own = torch.zeros(1)
    verbs: list[Verb] = []
    for _ in range(AT_ONCE):
        verbs += [Send(right, own), Recv(left, torch.zeros(1))]
    cases = []
    for some in (verbs[:2], verbs):
        make = partial(_verbs, *some)
        cases.append(_Case("send", 1, [_across(engine, make)]))
    one_s, all_s = _message_s(engine, cases, budget_s, rounds)
    distance_s = one_s - (all_s - one_s) / (AT_ONCE - 1)
    return distance_s if distance_s >= FAR_S else 0.0


def _processors(engine: Engine, cases: Sequence[_Case]) -> LineFit | None:
    """Seconds of a core that an all-reduce costs a rank, over bytes sent.

    The ranks' mean.
    """
    cases = [case for case in cases if case.verb == "all_reduce"]
    rows = figures_of_all(engine, [statistics.median(case.busy_s) for case in cases])
    means = [statistics.fmean(row) for row in zip(*rows, strict=True)]
    if min(means) <= 0:  # a clock of processors that ticks more slowly than messages go
        return None
    sizes = [
        bytes_sent("all_reduce", case.numel * ITEM_BYTES, engine.world)
        for case in cases
    ]
    return fit_line(zip(sizes, means, strict=True))


def _measure_hosts(
    engine: Engine,
    sizes_bytes: Sequence[int],
    verbs: Sequence[VerbName],
    budget_s: float,
    rounds: int,
    codecs: Mapping[str, CodecFit] | None,
) -> Cluster:
    """Measures hosts of several ranks: links between them, and within a host.

    Both parts of a dense message are measured, each by itself and on all hosts at once:
    what a host's ranks give each other, and the all-reduce of their shares, which go
    over one link. So are all ``verbs`` for shares, of which ``all_reduce`` is the
    first. ``sizes_bytes`` are those of all shares together; see ``measure_cluster``.
    Every rank returns rank 0's figures.
    """
    count = engine.ranks_per_host
    num_hosts = engine.world // count
    sizes = len(sizes_bytes)
    numels = _numels(engine, sizes_bytes)
    place = engine.rank % count
    within_host = on_hosts(exchange_for(none()), count)
    cases = [
        _Case("all_reduce", n, [_dense_maker(within_host, place, count, n)])
        for n in numels
    ]
    if num_hosts > 1:
        cases += _verb_cases(engine, verbs, numels)
    whole = _Case("all_reduce", numels[0], [_all_reduce_maker(numels[0], engine)])
    *seconds, whole_s = _message_s(engine, [*cases, whole], budget_s, rounds)
    if num_hosts > 1:
        # Both parts have a message's hand-overs between threads, which a whole message
        # has once.
        twice_s = seconds[0] + seconds[sizes] - whole_s
        seconds[:sizes] = [max(s - twice_s, s / 10) for s in seconds[:sizes]]
    rounds_within, copies_within = travel("all_to_all", count)
    within, *lines = _lines(cases, seconds, sizes)
    shares = dict(zip(verbs, lines, strict=False))
    host = Host(
        num_ranks=count,
        rate_bytes_per_s=(copies_within + (count - 1) / count) / _slope(within),
        hop_s=within.alpha_s / (rounds_within + 1),
        line=within,
        shares=shares,
    )
    link = _Link(host.rate_bytes_per_s / count, host.hop_s, 0.0)
    if "all_reduce" in shares:
        link = _link(engine, shares, num_hosts, budget_s, rounds)
    cluster = Cluster(
        num_ranks=engine.world,
        rate_bytes_per_s=count * link.rate_bytes_per_s,
        host=host,
        source=_source(f"{num_hosts} hosts of {count} ranks"),
    )
    return _completed(engine, cluster, link, codecs, budget_s, rounds)


def _lines(
    cases: Sequence[_Case], seconds: Sequence[float], sizes: int
) -> list[LineFit]:
    """The lines of cases of so many sizes each, over bytes."""
    every = [
        (ITEM_BYTES * case.numel, s) for case, s in zip(cases, seconds, strict=True)
    ]
    return [fit_line(every[at : at + sizes]) for at in range(0, len(every), sizes)]


def _slope(fit: LineFit) -> float:
    """Seconds of a byte in long messages.

    Where longer ones take no longer, all seconds of the longest count.
    """
    size_bytes, taken_s = max(fit.samples)
    return fit.tail_s or taken_s / size_bytes


def _all_reduce_maker(numel: int, engine: Engine) -> Make:
    return _maker("all_reduce", numel, engine.rank, engine.world, engine.ranks_per_host)


def _dense_maker(exchange: Exchange, rank: int, world: int, numel: int) -> Make:
    grad_N = torch.zeros(numel, dtype=torch.float32)
    member = Member(rank, world)
    state = exchange.init(TensorSpec("measured", numel), world)
    return lambda: exchange.synchronise(member, state, grad_N, grad_N)


def all_reduce_s(engine: Engine, size_bytes: int, count: int = 3) -> float:
    """Seconds of a dense message's all-reduce: median of ``count``, slowest rank.

    Where hosts have several ranks it is one of both levels. All ranks call this alike
    and return the same.
    """
    makers = [_all_reduce_maker(-(-size_bytes // ITEM_BYTES), engine)]
    return statistics.median(
        _slowest(engine, [_run_s(engine, makers, 1) for _ in range(count)])
    )


def host_share(
    engine: Engine, *, budget_s: float = BUDGET_S, rounds: int = ROUNDS
) -> float:
    """The share of a short all-reduce's seconds that concurrent ones cannot hide.

    0: as many at once as there are channels take as long as one; 1: they take as long
    as one behind the other, as where ranks share the cores that move their bytes. All
    ranks call this alike and return the same.
    """
    num_channels = engine.num_channels
    if engine.world < 2 or num_channels < 2:
        return 0.0
    makers = [_all_reduce_maker(1024, engine) for _ in range(num_channels)]
    cases = [_Case("all_reduce", 1024, makers[:1]), _Case("all_reduce", 1024, makers)]
    alone_s, together_s = _message_s(engine, cases, budget_s, rounds)
    share = min(1.0, together_s / alone_s)
    # So many channels cannot show a smaller share than this: it is theirs, not the
    # host's.
    return 0.0 if share < LEAST_SHOWN / num_channels else share


@dataclass
class _Case:
    """One verb of one size; each of ``makers`` has a channel to itself."""

    verb: VerbName
    numel: int
    makers: Sequence[Make]
    busy_s: list[float] = field(default_factory=list)
    """Seconds of a core that this process took for a message, one for each run."""


def _message_s(
    engine: Engine,
    cases: Sequence[_Case],
    budget_s: float,
    rounds: int,
    advance: Callable[..., None] = no_progress,
) -> list[float]:
    """Seconds a message of each case: the median of one run in each round.

    Every round goes through all cases. So other work on the machine slows all cases for
    a while, and is in no median.
    """
    per_run = []
    for case in cases:
        warming_s = [_run_s(engine, case.makers, len(case.makers)) for _ in range(2)]
        # Known to all ranks: how many messages are sent may not be decided by one of
        # them.
        first_s = _slowest(engine, warming_s)[-1]
        per_run.append(
            len(case.makers) * max(2, min(20, round(budget_s / rounds / first_s)))
        )
    runs_s: list[list[float]] = [[] for _ in cases]
    for _ in range(rounds):
        for case, count, taken_s in zip(cases, per_run, runs_s, strict=True):
            busy_s = time.process_time()
            taken_s.append(_run_s(engine, case.makers, count) / count)
            case.busy_s.append((time.process_time() - busy_s) / count)
            advance(1 / rounds, f"{case.verb} {case.numel * ITEM_BYTES} bytes")
    return [statistics.median(_slowest(engine, taken_s)) for taken_s in runs_s]


def _run_s(engine: Engine, makers: Sequence[Make], count: int) -> float:
    """Seconds of ``count`` messages from the makers in turn, after all ranks met."""
    meeting = _verbs(AllReduce(torch.zeros(1)))
    engine.wait([engine.launch(0, "meet", meeting, CONTROL)])
    start_s = time.perf_counter()
    ends = []
    for number in range(count):
        turn, channel = divmod(number, len(makers))
        ends.append(
            engine.launch(
                turn * engine.num_channels + channel, "measured", makers[channel]()
            )
        )
    engine.wait(ends)
    return time.perf_counter() - start_s


def _slowest(engine: Engine, runs_s: list[float]) -> list[float]:
    """Each run's seconds on the rank that took longest; known to all ranks."""
    return list(map(max, zip(*figures_of_all(engine, runs_s), strict=True)))


def _maker(
    verb: VerbName, numel: int, rank: int, world: int, ranks_per_host: int = 1
) -> Make:
    """Makes messages of one verb on one set of buffers; ``numel`` as in ``VERBS``."""
    if verb == "all_reduce":
        dense = on_hosts(exchange_for(none()), ranks_per_host)
        return _dense_maker(dense, rank, world, numel)
    buf_N = torch.zeros(numel, dtype=torch.float32)
    shares = (numel // world,) * world
    right = (rank + 1) % world
    left = (rank - 1) % world
    verbs: tuple[Verb, ...]
    match verb:
        case "all_gather":
            verbs = (AllGather(buf_N.new_zeros(numel * world), buf_N),)
        case "all_to_all":
            verbs = (AllToAll(torch.zeros_like(buf_N), buf_N, shares, shares),)
        case "reduce_scatter":
            verbs = (ReduceScatter(buf_N.new_zeros(numel // world), buf_N),)
        case "broadcast":
            verbs = (Broadcast(0, buf_N),)
        case _:  # a send to the right while one arrives from the left, as in a ring
            verbs = Send(right, buf_N), Recv(left, torch.zeros_like(buf_N))

    return lambda: _verbs(*verbs)


def _verbs(*verbs: Verb) -> Steps[None]:
    """A message of these verbs alone, at once."""
    yield verbs


def _source(where: str) -> str:
    return (
        f"measured on {where} ({platform.machine()}, {torch.get_num_threads()} "
        f"threads each), {today()}, torch {torch.__version__}, gloo: messages through "
        "gradwire's runtime"
    )


# ---- torch's own all-reduce ----------------------------------------------------------

TORCH_SIZES_BYTES = tuple(2**power for power in (12, 15, 18, 20, 22, 24))
"""Sizes from where alpha decides to where beta does, on links of 0.1 to 100 Gbit/s."""


NUM_TRIPS = 5


class LinkReport(NamedTuple):
    """A measured group: its ranks, back end, and the line through size medians.

    ``round_trip_s`` are the seconds to the farthest rank and back, on rank 0; None
    where only a GPU's library carries messages.
    """

    world: int
    backend: str
    fit: LineFit
    round_trip_s: float | None = None

    @property
    def rate_bytes_per_s(self) -> float:
        """Bytes a second that a rank sends of long messages.

        A ring sends 2(W-1)/W of a buffer.
        """
        copies = travel("all_reduce", self.world).copies
        beta_s = self.fit.per_unit_s
        return copies / beta_s if beta_s > 0 else float("inf")


def torch_all_reduces(
    group: Group,
    *,
    device: torch.device | None = None,
    advance: Callable[..., None] = no_progress,
) -> LinkReport:
    """Times torch's own all-reduces of float32 in a group.

    Every rank of it must call this alike.

    It is a quick look at a link, by this rank's clock. Raises ``InvalidSetting`` for a
    group of one.
    """
    world = group.size()
    wait = device_waiter({device} if device else set())
    samples = []
    if world < 2:
        raise InvalidSetting(
            f"a link joins at least two ranks, got {world}; start more ranks"
        )
    for size_bytes in TORCH_SIZES_BYTES:
        buffer_N = torch.zeros(size_bytes // ITEM_BYTES, device=device)
        taken_s = []
        # Decided by the size alone: all ranks must call equally often. Short ones
        # scatter more.
        for _ in range(26 if size_bytes <= 2**18 else 8):
            group.barrier().wait()
            wait()
            start_s = time.perf_counter()
            group.allreduce([buffer_N]).wait()
            wait()
            taken_s.append(time.perf_counter() - start_s)
        # The first one opens connections and touches fresh pages.
        samples.append((size_bytes, statistics.median(taken_s[1:])))
        advance(note=f"{size_bytes} bytes")
    trip_s = _round_trip_s(group) if device is None else None
    return LinkReport(world, group.name(), fit_line(samples), trip_s)


def _round_trip_s(group: Group) -> float:
    """Seconds from rank 0 to its farthest rank and back; 0 on other ranks."""
    rank = group.rank()
    word = torch.zeros(1)
    answer = torch.zeros(1)
    farthest_s = 0.0
    for other in range(1, group.size()):
        trips_s = []
        for _ in range(NUM_TRIPS):
            peer = {0: other, other: 0}.get(rank)
            arriving = None if peer is None else group.recv([answer], peer, 0)
            # gloo sends only what it knows to be awaited
            group.barrier().wait()
            start_s = time.perf_counter()
            if rank == 0:
                group.send([word], other, 0).wait()
            if arriving is not None:
                arriving.wait()
            if rank == other:
                group.send([word], 0, 0).wait()
            trips_s.append(time.perf_counter() - start_s)
        farthest_s = max(farthest_s, statistics.median(trips_s))
    return farthest_s if rank == 0 else 0.0


def launched_link(advance: Callable[..., None]) -> LinkReport:
    """The link of the group that torchrun's variables describe.

    By NCCL where every rank of this host has a GPU of its own, otherwise by gloo.
    """
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    on_gpu = dist.is_nccl_available() and torch.cuda.device_count() >= num_local
    device = (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else None
    )
    if device is not None:
        torch.cuda.set_device(device)
    with launched_group("nccl" if on_gpu else "gloo", LIMIT):
        return torch_all_reduces(dist.group.WORLD, device=device, advance=advance)
