"""Supersteps: the work and the transfers of one rank for one message, with their costs.

They are read off the steps themselves, which are run once without data: tensors lie on
torch's meta device, and its compressors make payloads of the right size and touch no
element. The verbs that steps yield do not depend on values, so they yield the same
ones here as in training.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch

from ...collective.steps.travel import NAMES, members, sent_bytes, travel
from ...collective.steps.wide_sums import NARROW
from ...contract import Compressor, Exchange, Layout
from ...contract.spec import TensorSpec
from ...contract.verbs import (
    AllToAll,
    Among,
    Broadcast,
    Communication,
    Compute,
    Recv,
    Send,
    Verb,
)
from ...errors import InvalidSetting, invalid
from ...exchange.sends import as_sends
from ...exchange.without_data import algorithms_in, record
from ..data.cluster import PRIMITIVES, VERBS, Cluster, CodecFit
from ..data.fit import LineFit

NOT_MEASURED = "not measured"
"""A mark in the name of a computation that counts as 0 s, as nobody measured it."""


class Price(NamedTuple):
    """A verb's cost: seconds before it is on the link, then seconds of a whole link."""

    latency_s: float
    work_s: float


class Hop(NamedTuple):
    """One end of a transfer between two ranks."""

    peer: int
    sends: bool
    size_bytes: int
    price: Price
    among: Among = Among.RANKS


class Joint(NamedTuple):
    """A collective that all ranks, or the ranks ``among`` names, enter.

    ``like`` must agree there.
    """

    name: str
    like: tuple[Any, ...]
    size_bytes: int
    price: Price
    among: Among = Among.RANKS


class Work(NamedTuple):
    """A computation; 0 seconds take no place on the compute lane."""

    name: str
    seconds: float


class Superstep(NamedTuple):
    """Computations and verbs that may run at once.

    The next superstep begins when all are done.
    """

    works: tuple[Work, ...]
    wire: tuple[Hop | Joint, ...]
    sent_bytes: float
    """The bytes that this rank sends in the superstep."""
    num_verbs: float = 1.0
    """The verbs, one behind the other, that its wire stands for."""

    @property
    def name(self) -> str:
        """The verbs for the network, as the runtime's spans name them."""
        return "+".join(
            transfer.name
            if isinstance(transfer, Joint)
            else "Send"
            if transfer.sends
            else "Recv"
            for transfer in self.wire
        )


@dataclass(frozen=True)
class Tariff:
    """The figures of a cluster that decide the price of one exchange.

    Hashable, unlike a cluster.

    ``codec`` holds the measured costs of the exchange's algorithm, None where it was
    not measured. With ``plain`` payloads are the gradient itself, so encode and decode
    cost nothing.
    """

    num_ranks: int
    lines: tuple[LineFit, ...]
    """The seconds of each verb of ``VERBS``, in their order, as functions of bytes;
    where hosts have several ranks, of verbs among hosts.
    """
    host_lines: tuple[LineFit, ...]
    """The same of verbs among a host's ranks."""
    ranks_per_host: int
    host_share: float
    codec: CodecFit | None
    encode: LineFit | None
    """An encode's line: that of ``codec``, or of the compressor the algorithm calls."""
    plain: bool
    nearer_s: tuple[tuple[float, ...], ...] = ()
    """Seconds by which a hop between two hosts is shorter than between the farthest, by
    sender and receiver. Empty where all hosts are alike.
    """
    speeds: tuple[tuple[float, float], ...] = ()
    """See ``Cluster.speeds``; empty where all hosts are alike."""
    in_sends: bool = False
    """Whether verbs are made of sends where they can be, for a coordinator."""

    @classmethod
    def of(cls, exchange: Exchange, cluster: Cluster) -> Tariff:
        """The prices that a cluster asks of an exchange."""
        codecs = list(_algorithms(exchange))
        traits = [codec.traits for codec in codecs]
        plain = bool(codecs) and all(
            traits is not None and traits.lossless and traits.layout is Layout.DENSE
            for traits in traits
        )
        only = type(codecs[0]).__name__ if len(codecs) == 1 else ""
        codec = cluster.codecs.get(only)
        encoder = codec or cluster.codecs.get(
            getattr(codecs[0], "sparsifier", "") if only else ""
        )
        return cls(
            num_ranks=cluster.num_ranks,
            lines=tuple(map(cluster.across.line, VERBS)),
            host_lines=tuple(map(cluster.within.line, VERBS)),
            ranks_per_host=cluster.ranks_per_host,
            host_share=cluster.host_share,
            codec=codec,
            encode=None if encoder is None else encoder.encode,
            plain=plain,
            nearer_s=() if cluster.is_even else _nearer_s(cluster),
            speeds=cluster.speeds,
        )

    def verb(self, name: str, size_bytes: float, among: Among = Among.RANKS) -> Price:
        """The price of a verb of ``VERBS``; 0 for one of 0 bytes."""
        if not size_bytes:
            return Price(0.0, 0.0)
        # A hop is no collective: how much of it is the host's is not measured.
        share = 0.0 if name == "send" or among is Among.HOST else self.host_share
        lines = self.host_lines if among is Among.HOST else self.lines
        line = lines[VERBS.index(name)]
        latency_s, work_s = line.parts(size_bytes)
        host_s = share * line.near_part_s(latency_s)
        # All ranks of a host put their part on its link.
        per_host = self.ranks_per_host if among is Among.HOSTS else 1
        return Price(latency_s - host_s, work_s + host_s / per_host)

    def send(
        self, size_bytes: float, src: int, dst: int, among: Among = Among.RANKS
    ) -> Price:
        """The price of a transfer from rank ``src`` to rank ``dst``."""
        price = self.verb("send", size_bytes, among)
        if not self.nearer_s or among is Among.HOST:
            return price
        count = self.ranks_per_host
        latency_s = price.latency_s - self.nearer_s[src // count][dst // count]
        return Price(max(0.0, latency_s), price.work_s)

    def members(self, rank: int, among: Among) -> range:
        """The ranks, ``rank`` with them, that its verbs are for."""
        return members(rank, self.num_ranks, self.ranks_per_host, among)

    def work(self, verb: Compute) -> Work | None:
        """A computation and its seconds.

        None for encode and decode of plain payloads.
        """
        if self.plain and verb.name in ("encode", "decode"):
            return None
        if verb.name == "encode" and self.encode is not None:
            return Work(verb.name, self.encode.seconds(verb.numel))
        if self.codec is None or verb.name not in PRIMITIVES:
            return Work(f"{verb.name} ({NOT_MEASURED})", 0.0)
        return Work(verb.name, getattr(self.codec, verb.name).seconds(verb.numel))


def is_all_reduce(dtype: torch.dtype, cluster: Cluster) -> bool:
    """Whether a dense message of this dtype is priced as one all-reduce.

    One of 16-bit values is summed in float32, by other verbs: it has their prices. More
    ranks than can be played are priced by formula, where both cost the same.
    """
    return dtype not in NARROW or not 1 < cluster.num_ranks <= MOST_PLAYED


def all_reduce(size_bytes: int, cluster: Cluster) -> Superstep:
    """The superstep of a dense message that is one all-reduce, by formula."""
    price = Price(*cluster.parts_s("all_reduce", size_bytes))
    joint = Joint("AllReduce", (), size_bytes, price)
    return Superstep((), (joint,), cluster.wire_bytes(size_bytes))


MOST_PLAYED = 1024
"""The most ranks played one by one.

If each sends to each, a step has a million sends.
"""


def check_played(exchange: Exchange, world: int) -> None:
    """Refuses more ranks than can be played one by one."""
    if world > MOST_PLAYED:
        raise invalid(
            f"ranks of {exchange!r}",
            world,
            f"at most {MOST_PLAYED}, since each rank is simulated",
            "simulate fewer, or dense plans",
        )


def supersteps_of(
    exchange: Exchange, spec: TensorSpec, tariff: Tariff, order: int = 0
) -> list[tuple[Superstep, ...]]:
    """The supersteps of every rank in the exchange of one gradient, ranks ascending.

    ``order`` is the message's: see ``Member.order``. Raises ``InvalidSetting`` if
    the exchange looks at values, and for more ranks than can be played one by one.
    """
    world = tariff.num_ranks
    check_played(exchange, world)
    first = record(exchange, spec, 0, world, order)
    priced = [_priced(first.rows, 0, tariff)]
    for rank in range(1, world):
        rows = (
            record(exchange, spec, rank, world, order)
            if first.is_of_its_rank
            else first
        )
        priced.append(_priced(rows.rows, rank, tariff))
    return priced


def supersteps_of_rank(
    exchange: Exchange, spec: TensorSpec, tariff: Tariff, rank: int = 0
) -> tuple[Superstep, ...]:
    """The supersteps of one rank in the exchange of one gradient.

    Raises ``InvalidSetting`` if the exchange looks at values.
    """
    return _priced(record(exchange, spec, rank, tariff.num_ranks).rows, rank, tariff)


def _priced(
    rows: tuple[tuple[Verb, ...], ...], rank: int, tariff: Tariff
) -> tuple[Superstep, ...]:
    supersteps = []
    for asked in rows:
        row = asked
        if tariff.in_sends:
            parts = (as_sends(verb, rank, tariff.num_ranks) for verb in asked)
            row = tuple(chain.from_iterable(parts))
        works = tuple(
            w for v in row if isinstance(v, Compute) and (w := tariff.work(v))
        )
        wire = tuple(
            _on_the_wire(v, rank, tariff) for v in row if not isinstance(v, Compute)
        )
        if works or wire:
            size_bytes = 0
            for verb in row:
                if not isinstance(verb, Compute):
                    among = tariff.members(rank, verb.among)
                    size_bytes += sent_bytes(verb, among.index(rank), len(among))
            supersteps.append(Superstep(works, wire, size_bytes))
    return tuple(supersteps)


def _on_the_wire(verb: Communication, rank: int, tariff: Tariff) -> Hop | Joint:
    among = tariff.members(rank, verb.among)
    if verb.among is Among.SHARDS:
        raise InvalidSetting(
            "a gather among shards cannot be simulated: a cluster has no "
            "tensor-parallel links; "
            "have the exchange ask for it only where me.shards is not None"
        )
    size_bytes = verb.buf.nbytes
    like: tuple[Any, ...] = (verb.buf.dtype, size_bytes)
    priced_bytes: float = size_bytes
    if isinstance(verb, AllToAll):
        # Bytes of one of equal parts that keeps the link's busier direction as busy.
        place = among.index(rank)
        copies = travel("all_to_all", len(verb.in_sizes)).copies
        busier = max(
            sum(sizes) - sizes[place] for sizes in (verb.in_sizes, verb.out_sizes)
        )
        priced_bytes = busier * verb.buf.element_size() / copies if copies else 0.0
        like = like[:1]
    elif isinstance(verb, Broadcast):
        like = (*like, verb.src)
    match verb:
        case Send(dst, _):
            price = tariff.send(size_bytes, rank, among[dst], verb.among)
            return Hop(among[dst], True, size_bytes, price, verb.among)
        case Recv(src, _):
            price = tariff.send(size_bytes, among[src], rank, verb.among)
            return Hop(among[src], False, size_bytes, price, verb.among)
    price = tariff.verb(NAMES[type(verb)], priced_bytes, verb.among)
    return Joint(type(verb).__name__, like, size_bytes, price, verb.among)


def _nearer_s(cluster: Cluster) -> tuple[tuple[float, ...], ...]:
    farthest_s = cluster.evened.hop_between_s(0, 1)
    hosts = range(cluster.num_hosts)
    return tuple(
        tuple(farthest_s - cluster.hop_between_s(src, dst) for dst in hosts)
        for src in hosts
    )


def _algorithms(part: Any) -> Iterator[Compressor | Exchange]:
    """The algorithms of ``compress/`` in an exchange: its compressors, or itself."""
    if isinstance(part, Compressor) or (
        isinstance(part, Exchange) and part.traits is not None
    ):
        yield part
    else:
        for value in algorithms_in(part).values():
            yield from _algorithms(value)
