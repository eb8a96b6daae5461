"""The local driver: all ranks in one process, in a seeded random interleaving.

It is the strictest of the drivers. A send completes only when its receiver is there, so
steps that rely on buffering deadlock here. All ranks must call collectives in the same
order and with matching sizes. When no rank can move, an error names the ranks that
wait.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from ..collective.steps.travel import members, sent_bytes
from ..contract.verbs import (
    AllGather,
    AllReduce,
    AllToAll,
    Among,
    Broadcast,
    Communication,
    Compute,
    Recv,
    ReduceScatter,
    Send,
    Steps,
    Verb,
)
from ..errors import Deadlock, InvalidSetting, invalid

T = TypeVar("T")


@dataclass
class Outcome(Generic[T]):
    """Every rank's return value, and the bytes that each rank put on the wire."""

    results: list[T]
    sent_bytes: list[int]


@dataclass(eq=False, slots=True)
class _Pending:
    """One verb of one rank that is not done yet.

    ``ends`` are a message's: the steps that send, the steps that receive, and the
    group.
    """

    rank: int
    verb: Verb
    slot: int
    ends: tuple[int, int, str] | None


@dataclass
class _Rank:
    """The progress of one rank's steps."""

    steps: Steps[Any]
    waiting: int = 0
    single: bool = True
    values: list[Any] = field(default_factory=list)
    done: bool = False
    result: Any = None


def drive(
    all_steps: Sequence[Steps[T]],
    *,
    seed: int = 0,
    num_shards: int = 1,
    ranks_per_host: int = 1,
    lends: bool = False,
) -> Outcome[T]:
    """Runs each rank's steps to their end.

    With ``num_shards`` the steps are of a grid, shard after shard: of W ranks each,
    entry s * W + r is of rank r among the ranks that average shard s. Ranks are named
    by their entry then. With ``ranks_per_host`` these W ranks are on hosts of so many,
    host after host. If it ``lends``, they read each other's rooms.

    Raises ``Deadlock`` when ranks wait for each other, with what each of them waits
    for, and ``InvalidSetting`` when ranks disagree on a verb or a size.
    """
    if len(all_steps) % num_shards:
        accepted = f"a multiple of num_shards, {num_shards}"
        raise InvalidSetting(
            f"drive takes the steps of {accepted} ranks, got {len(all_steps)}; "
            "pass all ranks'"
        )
    world = len(all_steps) // num_shards
    check_hosts(ranks_per_host, world)
    ranks = [_Rank(steps) for steps in all_steps]
    driver = _Driver(ranks, random.Random(seed), world, ranks_per_host, lends)
    driver.run()
    return Outcome([rank.result for rank in driver.ranks], driver.sent)


def check_hosts(ranks_per_host: int, world: int) -> None:
    """Refuses a world that is not made of hosts of so many ranks each.

    One rank is always alone.
    """
    if world > 1 and world % ranks_per_host:
        raise invalid(
            "the number of ranks",
            world,
            f"a multiple of ranks_per_host, {ranks_per_host}",
            "give every host as many ranks",
        )


class _Driver:
    def __init__(
        self,
        ranks: list[_Rank],
        rng: random.Random,
        world: int,
        ranks_per_host: int,
        lends: bool,
    ) -> None:
        self.ranks = ranks
        self.rng = rng
        self.lends = lends
        self.world = world
        self.ranks_per_host = min(ranks_per_host, world)
        self.members = {
            among: [self._members(index, among) for index in range(len(ranks))]
            for among in Among
        }
        self.groups = dict.fromkeys(
            (among, entries)
            for among, every in self.members.items()
            for entries in every
        )
        self.pending: list[_Pending] = []
        self.sent = [0] * len(ranks)

    def run(self) -> None:
        for rank in range(len(self.ranks)):
            self._resume(rank, None)
        while self.pending:
            ready = self._ready()
            if not ready:
                raise self._deadlock()
            self._carry_out(self.rng.choice(ready))

    def _resume(self, index: int, value: Any) -> None:
        rank = self.ranks[index]
        try:
            asked = rank.steps.send(value)
        except StopIteration as stop:
            rank.done = True
            rank.result = stop.value
            return
        verbs = asked if isinstance(asked, tuple) else (asked,)
        rank.single = not isinstance(asked, tuple)
        rank.waiting = len(verbs)
        rank.values = [None] * len(verbs)
        for slot, verb in enumerate(verbs):
            self.pending.append(self._asked(index, verb, slot))
        if not verbs:
            self._resume(index, ())

    def _asked(self, index: int, verb: Verb, slot: int) -> _Pending:
        """A verb of some steps as it waits; what it sends is counted."""
        ends = None
        if not isinstance(verb, Compute):
            entries = self.members[verb.among][index]
            self.sent[index] += sent_bytes(verb, entries.index(index), len(entries))
            if isinstance(verb, Send):
                ends = (index, entries[verb.dst], verb.among.value)
            elif isinstance(verb, Recv):
                ends = (entries[verb.src], index, verb.among.value)
        return _Pending(index, verb, slot, ends)

    def _ready(self) -> list[tuple[_Pending, ...]]:
        """Sets of pending verbs that can be carried out now."""
        computes: dict[int, tuple[_Pending, ...]] = {}
        sends: dict[Any, _Pending] = {}
        receives: dict[Any, _Pending] = {}
        heads: dict[int, _Pending] = {}
        for p in self.pending:
            if p.ends is not None:
                (sends if isinstance(p.verb, Send) else receives).setdefault(p.ends, p)
            elif isinstance(p.verb, Compute):
                computes.setdefault(p.rank, (p,))
            else:
                heads.setdefault(p.rank, p)
        found = list(computes.values())
        found += [(p, receives[ends]) for ends, p in sends.items() if ends in receives]
        for among, entries in self.groups if heads else ():
            here = [heads[rank] for rank in entries if rank in heads]
            verbs = [p.verb for p in here if not isinstance(p.verb, Compute)]
            if len(here) == len(entries) and {v.among for v in verbs} == {among}:
                found.append(tuple(here))
        return found

    def _members(self, index: int, among: Among) -> range:
        """The entries, ``index`` too, that its verbs ``among`` ranks are for."""
        first = index - index % self.world
        rank = index % self.world
        if among is Among.SHARDS:
            return range(rank, len(self.ranks), self.world)
        found = members(rank, self.world, self.ranks_per_host, among)
        return range(first + found.start, first + found.stop, found.step)

    def _carry_out(self, chosen: tuple[_Pending, ...]) -> None:
        first = chosen[0].verb
        value = None
        if isinstance(first, Compute):
            value = first.fn()
        elif isinstance(first, Send):
            _transfer(chosen[0], chosen[1])
        else:
            value = _lent(chosen) if self.lends else None
            if value is None:
                # files of rooms that nobody uses, of which a process may have few
                for p in chosen:
                    if isinstance(p.verb, AllToAll) and p.verb.room:
                        p.verb.room.settle(is_lent=False)
                _collect(chosen)
        for p in chosen:
            self.pending.remove(p)
        for p in chosen:
            rank = self.ranks[p.rank]
            rank.values[p.slot] = value
            rank.waiting -= 1
            if rank.waiting == 0:
                self._resume(
                    p.rank, rank.values[0] if rank.single else tuple(rank.values)
                )

    def _deadlock(self) -> Deadlock:
        waiting = (f"rank {p.rank} waits in {_describe(p.verb)}" for p in self.pending)
        return Deadlock.of(waiting, [i for i, r in enumerate(self.ranks) if r.done])


def _describe(verb: Verb) -> str:
    if isinstance(verb, Compute):
        return f"Compute({verb.name})"
    ends = f"{verb.buf.numel()} elements"
    if isinstance(verb, Send):
        ends += f" to rank {verb.dst}"
    elif isinstance(verb, Recv):
        ends += f" from rank {verb.src}"
    return f"{type(verb).__name__}({ends}{verb.among.ending})"


def _transfer(send: _Pending, recv: _Pending) -> None:
    assert isinstance(send.verb, Send)
    assert isinstance(recv.verb, Recv)
    source = send.verb.buf
    target = recv.verb.buf
    if source.numel() != target.numel() or source.dtype != target.dtype:
        raise InvalidSetting(
            f"rank {send.rank} sends {source.numel()} {source.dtype} to rank "
            f"{recv.rank}, which "
            f"receives {target.numel()} {target.dtype}; both ends must agree"
        )
    target.copy_(source)


def _lent(members: tuple[_Pending, ...]) -> list[torch.Tensor] | None:
    """The rooms of all ranks of an all-to-all.

    None where they are not in their verbs.
    """
    rooms = [
        p.verb.room for p in members if isinstance(p.verb, AllToAll) and p.verb.room
    ]
    if len(rooms) < len(members):
        return None
    for room in rooms:
        room.parts = [one.own_M for one in rooms]
    return rooms[0].parts


def _collect(members: tuple[_Pending, ...]) -> None:
    """Carries out one collective; ``members`` holds every rank's verb in rank order."""
    verbs = [p.verb for p in members if not isinstance(p.verb, Compute)]
    if len({type(verb) for verb in verbs}) > 1:
        raise _unequal("different collectives", members)
    if len({_agreed(verb) for verb in verbs}) > 1:
        raise _unequal("a collective with different sizes, dtypes or roots", members)
    bufs = [verb.buf.clone() for verb in verbs]
    for rank, verb in enumerate(verbs):
        match verb:
            case AllReduce(buf):
                buf.copy_(sum(bufs[1:], bufs[0]))
            case ReduceScatter(out, _):
                out.copy_(sum(bufs[1:], bufs[0]).chunk(len(verbs))[rank])
            case AllGather(out, _):
                out.copy_(torch.cat(bufs))
            case Broadcast(src, buf):
                buf.copy_(bufs[src])
            case AllToAll(out, _, out_sizes, _):
                out.copy_(torch.cat(_parts_for(rank, verbs, bufs, out_sizes)))


def _agreed(verb: Communication) -> tuple[object, ...]:
    """The facts of a collective that all ranks must share."""
    # each part of an all-to-all has a size of its own
    numel = 0 if isinstance(verb, AllToAll) else verb.buf.numel()
    root = verb.src if isinstance(verb, Broadcast) else None
    return verb.buf.dtype, numel, root


def _unequal(what: str, members: tuple[_Pending, ...]) -> InvalidSetting:
    calls = (f"rank {p.rank} {_describe(p.verb)}" for p in members)
    return InvalidSetting(f"ranks call {what}: {'; '.join(calls)}")


def _parts_for(
    rank: int,
    verbs: Sequence[Communication],
    bufs: Sequence[torch.Tensor],
    out_sizes: Sequence[int],
) -> list[torch.Tensor]:
    """The part of every rank's buffer that an all-to-all gives to one rank."""
    parts = [
        torch.split(buf, list(verb.in_sizes))[rank]
        for verb, buf in zip(verbs, bufs, strict=True)
        if isinstance(verb, AllToAll)
    ]
    sent_sizes = tuple(part.numel() for part in parts)
    if sent_sizes != out_sizes:
        raise InvalidSetting(
            f"rank {rank} expects {out_sizes} elements in an all-to-all, its peers "
            f"send {sent_sizes}; sizes must agree"
        )
    return parts
