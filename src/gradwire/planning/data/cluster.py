"""Cluster: the number of ranks, what links carry, and what every verb then takes.

Source: US-Byte, equations 1 and 14: seconds = a + b * bytes with a = 2(N-1) times the
    cost of a hop and b = 2(N-1)/N times that of a byte on a link: a ring. HiPress,
    section 3.2, for encode, decode and merge as lines over the number of elements.
Differences from the papers: the line of a measured verb counts. Hops and bytes of other
    verbs are in ``collective/steps/travel.py``, and b comes from the link's rate. The
    two values of b that US-Byte prints contradict its own links. The time to add two
    numbers (its gamma) counts as none. Its a = 910 us at 8 nodes is 65 us a hop, which
    is the default.
"""

from __future__ import annotations

from itertools import chain, permutations
from math import inf
from typing import Annotated, ClassVar, Literal, Self, get_args

from pydantic import Field, model_validator

from ...collective.steps.travel import NOTES, bytes_sent, hops, travel
from ...contract.bounds import check_number, check_whole
from ...contract.units import format_rate, format_seconds
from ...errors import InvalidSetting, invalid
from .distance import far_line, is_hidden
from .fit import LineFit
from .stored import MOST_RANKS, MOST_S, Frozen, NonNegative, Stored

HOP_S = 65e-6
"""Seconds that each hop of the ring costs: US-Byte's 910 us at 8 nodes."""

LEAST_RATE = 1e-3
MOST_RATE = 1e18
"""Bytes a second of a link: what lies beyond makes seconds that are none."""


def check_rate(what: str, given: float) -> None:
    """Refuses what no link carries, in bytes a second."""
    accepted = f"{LEAST_RATE:g} to {MOST_RATE:g} bytes a second"
    check_number(
        what, given, accepted, "state or measure another one", LEAST_RATE, MOST_RATE
    )


VerbName = Literal[
    "all_reduce", "all_gather", "all_to_all", "reduce_scatter", "broadcast", "send"
]
VERBS: tuple[VerbName, ...] = get_args(VerbName)
"""Names of the verbs that cost something on the wire. Sizes are bytes of the buffer;
for all_gather of the rank's own contribution, for all_to_all and reduce_scatter of the
whole input buffer.
"""

Rate = Annotated[float, Field(ge=LEAST_RATE, le=MOST_RATE, allow_inf_nan=False)]

Primitive = Literal["encode", "decode", "merge"]
PRIMITIVES: tuple[Primitive, ...] = get_args(Primitive)


class CodecFit(Frozen):
    """Seconds of a compressor's three primitives, as lines over the number of elements.

    Of an exchange of its own each line is that of one computation of this name, on
    average.

    Args:
        encode: The line of an encode, error feedback with it where the compressor's
            traits ask for that.
        decode: The line of a decode.
        merge: The line of a merge.
    """

    encode: LineFit
    decode: LineFit
    merge: LineFit


class Host(Frozen):
    """The ranks of a host, and the links among them.

    Args:
        num_ranks: The number of ranks of each host, 2 or more.
        rate_bytes_per_s: Bytes a second that a rank can send to other ranks of its
            host, and receive from them.
        hop_s: Seconds of latency of a message within the host, by default 0.
        line: Measured seconds of a message within the hosts, over its bytes; see
            ``within_line``. Default: by formula.
        shares: Measured lines of verbs for shares, over a share's bytes, by verb. All
            ranks of a host call these verbs at once, each for its own share. Default:
            by formula.
    """

    num_ranks: Annotated[int, Field(ge=2, le=MOST_RANKS)]
    rate_bytes_per_s: Rate
    hop_s: NonNegative = 0.0
    line: LineFit | None = None
    shares: dict[VerbName, LineFit] = Field(default_factory=dict)


class Cluster(Stored):
    """``num_ranks`` in a ring of full-duplex links.

    Each carries ``rate_bytes_per_s`` in each direction.

    With ``host`` several ranks share a host's link, and exchange messages as
    ``attach(mesh=)`` does. A message then has three parts: sums within the host, of a
    share for each rank; an exchange of shares among hosts; a gather within the host.
    ``within_line`` has the seconds of the first and the last part, ``shares`` those of
    verbs for shares. A formula gives the time of a verb that was not measured.

    Args:
        num_ranks: The number of ranks.
        rate_bytes_per_s: Bytes a second of a host's link, each way.
        hop_s: Seconds that a message costs whatever its size and distance, by default
            65 us.
        latency_s: Seconds that a packet takes from a host to another, one way: half of
            a round trip. Default: 0, near hosts.
        latencies_s: The same by direction: a row for each host, with the seconds to
            every host. Default: ``latency_s`` between any two.
        up_bytes_per_s: Bytes a second that each host sends at most, or one figure for
            all hosts. Default: ``rate_bytes_per_s``.
        down_bytes_per_s: Bytes a second that each host receives at most, or one figure
            for all hosts. Default: ``rate_bytes_per_s``.
        host: The hosts' ranks. Default: each rank is a host of its own.
        collectives: Measured lines over bytes, by verb; see ``VERBS`` for the meaning
            of a size. Default: by formula.
        codecs: Measured lines over elements, by compressor. Default: compressors cost
            nothing.
        inline: Measured lines over elements of an encode within the backward pass, by
            compressor. Without a line here the line of ``codecs`` counts. The lines
            differ for gradients on a device. A device encodes faster than the host, and
            computes nothing else in this time. Default: none.
        host_share: The share of a collective's latency in which the host works for this
            collective alone, 0 (the default) to 1. Distance is no such work. The other
            parts of several collectives' latencies pass at the same time. Where hosts
            have several ranks it is the share of both levels' latencies.
        cores: Each rank's share of its machine's cores. The backward pass then waits
            for encodes. None (the default): more cores than computing threads, or
            unknown.
        processors: Measured seconds of a core that a verb costs each rank, over the
            bytes that it sends. Default: not measured.
        step: Measured seconds of a core that a step costs each rank beside its layers
            and verbs, over the number of its gradients: hooks, tasks, the report.
            Default: not measured.
        source: How the figures were got, by default "stated".

    Raises:
        ValueError: pydantic's, for figures that no cluster can have.

    >>> cluster = Cluster(num_ranks=8, rate_bytes_per_s=1.25e9)
    >>> f"{cluster.alpha_s * 1e6:.0f} us"
    '910 us'
    >>> f"{cluster.beta_s_per_byte * 1e9:.1f} ns per byte"
    '1.4 ns per byte'
    """

    WRITTEN_BY: ClassVar[str] = "gradwire profile"

    num_ranks: Annotated[int, Field(ge=1, le=MOST_RANKS)]
    rate_bytes_per_s: Rate
    hop_s: NonNegative = HOP_S
    latency_s: NonNegative = 0.0
    latencies_s: tuple[tuple[NonNegative, ...], ...] = ()
    up_bytes_per_s: tuple[Rate, ...] = ()
    down_bytes_per_s: tuple[Rate, ...] = ()
    host: Host | None = None
    collectives: dict[VerbName, LineFit] = Field(default_factory=dict)
    codecs: dict[str, CodecFit] = Field(default_factory=dict)
    inline: dict[str, LineFit] = Field(default_factory=dict)
    host_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    cores: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    processors: LineFit | None = None
    step: LineFit | None = None
    source: Annotated[str, Field(min_length=1)] = "stated"

    def __hash__(self) -> int:  # its lines are dicts, which have none
        return hash((self.num_ranks, self.rate_bytes_per_s, self.hop_s))

    @model_validator(mode="after")
    def _has_equal_hosts(self) -> Self:
        if self.host is None or self.num_ranks == 1:
            return self
        if self.num_ranks % self.host.num_ranks:
            raise ValueError(
                f"{self.num_ranks} ranks are not on hosts of {self.host.num_ranks} "
                "each; give every host as many"
            )
        if self.collectives:
            raise ValueError(
                "collectives were measured among hosts of one rank each, and host says "
                "that these have more; leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _has_figures_of_all_hosts(self) -> Self:
        count = self.num_hosts
        rows = self.latencies_s
        if rows and {len(rows), *map(len, rows)} != {count}:
            raise ValueError(
                f"latencies_s has not a row of {count} for each of {count} hosts; give "
                "the seconds from each host to every host"
            )
        for name, rates in (
            ("up_bytes_per_s", self.up_bytes_per_s),
            ("down_bytes_per_s", self.down_bytes_per_s),
        ):
            if len(rates) not in (0, 1, count):
                raise ValueError(
                    f"{name} has {len(rates)} figures for {count} hosts; give one for "
                    "each, or one for all"
                )
        return self

    @property
    def num_hosts(self) -> int:
        """The number of hosts."""
        return self.num_ranks // self.ranks_per_host

    @property
    def ranks_per_host(self) -> int:
        """The number of ranks on each host."""
        return 1 if self.host is None or self.num_ranks == 1 else self.host.num_ranks

    @property
    def is_even(self) -> bool:
        """Whether all hosts are alike: equally far, and with links of one rate."""
        return not (self.latencies_s or self.up_bytes_per_s or self.down_bytes_per_s)

    def hop_between_s(self, src: int, dst: int) -> float:
        """Seconds of distance of a send from a host to another one.

        Args:
            src: The number of the sending host.
            dst: The number of the receiving host.

        Returns:
            The payload's latency, and that of the note for which it waits.

        >>> far = {"latencies_s": [[0, 0.04], [0.01, 0]]}
        >>> Cluster(num_ranks=2, rate_bytes_per_s=1e6, **far).hop_between_s(0, 1)
        0.05
        """
        if not self.latencies_s:
            return (1 + NOTES) * self.latency_s
        return self.latencies_s[src][dst] + NOTES * self.latencies_s[dst][src]

    @property
    def speeds(self) -> tuple[tuple[float, float], ...]:
        """Each host's rates up and down, as multiples of the slowest of all.

        Empty where all hosts are alike.
        """
        if self.is_even:
            return ()
        slowest = self._slowest_rate()
        ups, downs = self._rates()
        return tuple(
            (ups[host % len(ups)] / slowest, downs[host % len(downs)] / slowest)
            for host in range(self.num_hosts)
        )

    def _rates(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Rates up, and rates down: one for each host, or one for all."""
        rate = (self.rate_bytes_per_s,)
        return self.up_bytes_per_s or rate, self.down_bytes_per_s or rate

    def _slowest_rate(self) -> float:
        return min(chain(*self._rates()))

    @property
    def evened(self) -> Cluster:
        """The same hosts, as collectives meet them: all wait for the slowest.

        Any two are as far as the farthest two, and each direction of a link is as slow
        as the slowest.

        >>> home = Cluster(num_ranks=4, rate_bytes_per_s=1e7, up_bytes_per_s=[1e6])
        >>> home.evened.rate_bytes_per_s
        1000000.0
        """
        if self.is_even:
            return self
        pairs = permutations(range(self.num_hosts), 2)
        farthest_s = max((self.hop_between_s(*pair) for pair in pairs), default=0.0)
        return self.model_copy(
            update={
                "rate_bytes_per_s": self._slowest_rate(),
                "latency_s": farthest_s / (1 + NOTES),
                "latencies_s": (),
                "up_bytes_per_s": (),
                "down_bytes_per_s": (),
            }
        )

    @property
    def within(self) -> Cluster:
        """The ranks of one host, and nothing else.

        Without ``host`` that is one rank.
        """
        if self.host is None:
            return Cluster(num_ranks=1, rate_bytes_per_s=self.rate_bytes_per_s)
        return Cluster(
            num_ranks=self.ranks_per_host,
            rate_bytes_per_s=self.host.rate_bytes_per_s,
            hop_s=self.host.hop_s,
        )

    @property
    def across(self) -> Cluster:
        """One rank of each host, which has the host's link for itself."""
        if self.ranks_per_host == 1:
            return self
        assert self.host is not None
        count = self.ranks_per_host
        lines = {verb: line.part_of(count) for verb, line in self.host.shares.items()}
        update = {
            "num_ranks": self.num_ranks // count,
            "host": None,
            "collectives": lines,
        }
        return self.model_copy(update=update)

    def share(self, numel: int) -> int:
        """The elements of a message that each rank exchanges with other hosts.

        Args:
            numel: The elements of the message.

        Returns:
            An L-th of them for L ranks a host, rounded up.

        >>> host = Host(num_ranks=4, rate_bytes_per_s=1e9)
        >>> Cluster(num_ranks=8, rate_bytes_per_s=1e6, host=host).share(10)
        3
        """
        return -(-numel // self.ranks_per_host)

    @property
    def within_line(self) -> LineFit:
        """Seconds of a message within the hosts, beside its exchange, over its bytes.

        Each rank gets the sum of one share, and gives the share's mean to all others of
        its host. Nothing where each rank is a host of its own.
        """
        count = self.ranks_per_host
        within = self.within
        if count > 1 and self.host is not None and self.host.line is not None:
            return self.host.line
        rounds, copies = travel("all_to_all", count)
        # A share is given to all others at once, which is one message behind the
        # all-to-all.
        return LineFit.model_construct(
            alpha_s=(rounds + 1) * within.hop_s if count > 1 else 0.0,
            per_unit_s=(copies + (count - 1) / count) / within.rate_bytes_per_s,
        )

    @property
    def flat(self) -> Cluster:
        """The same ranks as an exchange that knows no hosts meets them.

        Where each sends to all others, all ranks of a host send over its one link at
        once; what they send each other does not take it. A ring through all ranks
        crosses each host's link once, so it has the link for itself.

        >>> host = Host(num_ranks=2, rate_bytes_per_s=1e9)
        >>> flat = Cluster(num_ranks=4, rate_bytes_per_s=6e6, host=host, hop_s=0.0).flat
        >>> flat.rate_bytes_per_s, flat.collective_s("all_gather", 6e6)
        (4500000.0, 3.0)
        """
        count = self.ranks_per_host
        others = self.num_ranks - 1
        if count in (1, self.num_ranks):
            return self if count == 1 else self.within
        if not self.is_even:
            return self.evened.flat
        rate = self.rate_bytes_per_s * others / (count * (self.num_ranks - count))
        ring = self.model_copy(update={"host": None})
        rings = {verb: ring.line(verb) for verb in ("all_reduce", "all_gather")}
        return ring.model_copy(update={"rate_bytes_per_s": rate, "collectives": rings})

    @property
    def shares(self) -> Cluster:
        """One rank of each host, as all ranks of a host send over its one link.

        A verb for a share costs here what it costs on the cluster.
        """
        if self.ranks_per_host == 1:
            return self
        if not self.is_even:
            return self.evened.shares
        assert self.host is not None
        rate = self.rate_bytes_per_s / self.ranks_per_host
        update = {"rate_bytes_per_s": rate, "collectives": self.host.shares}
        return self.across.model_copy(update=update)

    @property
    def alpha_s(self) -> float:
        """Seconds that every all-reduce costs, whatever its size; 0 for one rank."""
        return self.line("all_reduce").alpha_s

    @property
    def beta_s_per_byte(self) -> float:
        """Seconds that each byte of an all-reduce's buffer adds; 0 for one rank."""
        return self.line("all_reduce").per_unit_s

    def collective_s(self, verb: str, size_bytes: float) -> float:
        """Seconds of one verb by itself: as it was measured, else by formula.

        Args:
            verb: One of ``VERBS``.
            size_bytes: Bytes of the verb's buffer; 0 bytes take 0 seconds.

        Returns:
            The seconds.

        Raises:
            UnknownName: There is no such verb.
            InvalidSetting: Hosts have several ranks, and the verb is no all-reduce.

        >>> cluster = Cluster(num_ranks=4, rate_bytes_per_s=1e6, hop_s=0.1)
        >>> cluster.collective_s("send", 500_000)
        0.6
        """
        return self.line(verb).measured_s(size_bytes)

    def all_reduce_s(self, size_bytes: float) -> float:
        """Seconds of an all-reduce.

        Args:
            size_bytes: Bytes of the buffer; 0 bytes take 0 seconds.

        Returns:
            The seconds.

        >>> Cluster(num_ranks=2, rate_bytes_per_s=1e6, hop_s=0.0).all_reduce_s(1e6)
        1.0
        """
        return self.collective_s("all_reduce", size_bytes)

    def inline_line(self, compressor: str) -> LineFit | None:
        """The line of an encode that holds up the backward pass.

        Args:
            compressor: The compressor's name.

        Returns:
            The line; None where it is not measured. It is 0 where hosts have several
            ranks: their sum, which is encoded, comes after the backward pass.

        >>> Cluster(num_ranks=2, rate_bytes_per_s=1e6).inline_line("topk") is None
        True
        """
        if self.ranks_per_host > 1:
            return LineFit(alpha_s=0.0, per_unit_s=0.0)
        if compressor in self.inline:
            return self.inline[compressor]
        codec = self.codecs.get(compressor)
        return None if codec is None else codec.encode

    def wire_bytes(self, size_bytes: int) -> int:
        """Bytes that each rank sends in an all-reduce.

        Args:
            size_bytes: Bytes of the buffer.

        Returns:
            The bytes, within the host and among hosts.

        >>> Cluster(num_ranks=4, rate_bytes_per_s=1e6).wire_bytes(1000)
        1500
        """
        count = self.ranks_per_host
        share_bytes = -(-size_bytes // count)
        among_hosts = bytes_sent("all_reduce", share_bytes, self.num_ranks // count)
        return 2 * (count - 1) * share_bytes + among_hosts

    def scaled(
        self,
        *,
        num_ranks: int | None = None,
        rate_bytes_per_s: float | None = None,
        latency_s: float | None = None,
    ) -> Cluster:
        """The same kind of cluster with other ranks, another rate or another latency.

        If an all-reduce was measured, two figures of it are kept: the hop, alpha /
        2(N-1) without the distance, and the share of the rate that is not headers.
        Measured lines of verbs are dropped, since they hold for their own size and
        rate. Lines of codecs and latencies stay. Hosts' own rates change as the rate
        does.

        Args:
            num_ranks: The new number of ranks. Default: as now.
            rate_bytes_per_s: The new rate of a host's link. Default: as now.
            latency_s: The new latency between any two hosts, in seconds one way.
                Default: as now.

        Returns:
            The other cluster.

        Raises:
            InvalidSetting: Nothing was given, no cluster can have these figures, or
                ``has_rate`` is False.

        >>> Cluster(num_ranks=4, rate_bytes_per_s=1e6).scaled(num_ranks=8).num_ranks
        8
        """
        if (num_ranks, rate_bytes_per_s, latency_s) == (None, None, None):
            raise invalid(
                "scaled()", "nothing", "given a figure", "pass a rate or num_ranks"
            )
        hop_s, arriving = self._hop_and_rate()
        rate = self.rate_bytes_per_s if rate_bytes_per_s is None else rate_bytes_per_s
        ranks = self.num_ranks if num_ranks is None else num_ranks
        scaled = rate * arriving / self.rate_bytes_per_s
        check_whole("ranks", ranks, "write --ranks 8", most=MOST_RANKS)
        check_rate(f"rate of a cluster scaled to {rate:g} bytes a second", scaled)
        if self.host is not None and ranks > 1 and ranks % self.host.num_ranks:
            raise invalid(
                "ranks",
                ranks,
                f"a multiple of the {self.host.num_ranks} ranks of a host",
                "scale to whole hosts",
            )
        source = (
            f"scaled to {ranks} ranks and links of {format_rate(rate)}, with a hop of "
            f"{format_seconds(hop_s)} and {100 * arriving / self.rate_bytes_per_s:.3g} "
            f"% of the rate, from {self.num_ranks} ranks at "
            f"{format_rate(self.rate_bytes_per_s)}: {self.source}"
        )
        figures = (self.latencies_s, self.up_bytes_per_s, self.down_bytes_per_s)
        if ranks != self.num_ranks and max(map(len, figures)) > 1:
            raise invalid(
                "ranks",
                ranks,
                f"{self.num_ranks}, whose hosts have figures of their own",
                "state a Cluster of these ranks",
            )
        host = (
            None if self.host is None else self.host.model_copy(update={"shares": {}})
        )
        far = {}
        if latency_s is not None:
            remedy = "give the seconds of half a round trip"
            accepted = f"0 to {MOST_S:g} seconds"
            check_number("latency_s", latency_s, accepted, remedy, 0, MOST_S)
            far = {"latency_s": latency_s, "latencies_s": ()}
            source = f"{format_seconds(latency_s)} one way, {source}"
        return self.model_copy(
            update={
                **self._own_rates_times(scaled / self.rate_bytes_per_s),
                **far,
                "num_ranks": ranks,
                "rate_bytes_per_s": scaled,
                "hop_s": hop_s,
                "host": host,
                "collectives": {},
                "source": source,
            }
        )

    def busy_s(self, sent_bytes: float) -> float:
        """Seconds in which all cores that a rank has carry a verb and compute nothing.

        Args:
            sent_bytes: Bytes that the rank sends.

        Returns:
            The seconds; 0 without ``cores`` or ``processors``.

        >>> line = LineFit(alpha_s=1e-3, per_unit_s=1e-9)
        >>> cluster = Cluster(
        ...     num_ranks=4, rate_bytes_per_s=1e8, cores=0.5, processors=line
        ... )
        >>> round(cluster.busy_s(1e6), 6)
        0.004
        """
        if self.cores is None or self.processors is None:
            return 0.0
        return self.processors.seconds(sent_bytes) / self.cores

    @property
    def step_line(self) -> LineFit:
        """Seconds of a step beside its layers and verbs, over its number of gradients.

        They are 0 without ``step``. Ranks that share a core take as many times longer.

        >>> line = LineFit(alpha_s=1e-3, per_unit_s=1e-5)
        >>> cluster = Cluster(num_ranks=4, rate_bytes_per_s=1e8, cores=0.5, step=line)
        >>> cluster.step_line.seconds(10)
        0.0022
        """
        if self.step is None:
            return LineFit(alpha_s=0.0, per_unit_s=0.0)
        return self.step.times(1 / min(1.0, self.cores or 1.0))

    def slower(self, factor: float) -> Cluster:
        """The same cluster with slower links between hosts.

        Args:
            factor: The factor on the seconds of all that hosts send each other.

        Returns:
            The other cluster.

        >>> cluster = Cluster(num_ranks=4, rate_bytes_per_s=1e6)
        >>> round(cluster.slower(2.0).all_reduce_s(1e6) / cluster.all_reduce_s(1e6), 6)
        2.0
        """
        lines = {verb: line.times(factor) for verb, line in self.collectives.items()}
        rate = self.rate_bytes_per_s / factor
        figures = {
            "collectives": lines,
            "rate_bytes_per_s": rate,
            "hop_s": factor * self.hop_s,
            "latency_s": factor * self.latency_s,
            "latencies_s": tuple(
                tuple(factor * latency_s for latency_s in row)
                for row in self.latencies_s
            ),
            **self._own_rates_times(1 / factor),
        }
        if self.host is not None:
            shares = {
                verb: line.times(factor) for verb, line in self.host.shares.items()
            }
            figures["host"] = self.host.model_copy(update={"shares": shares})
        return self.model_copy(update=figures)

    def _own_rates_times(self, factor: float) -> dict[str, tuple[float, ...]]:
        """Hosts' own rates times a factor, as entries of a cluster."""
        return {
            "up_bytes_per_s": tuple(factor * rate for rate in self.up_bytes_per_s),
            "down_bytes_per_s": tuple(factor * rate for rate in self.down_bytes_per_s),
        }

    @property
    def has_rate(self) -> bool:
        """Whether ``scaled`` can derive other rates. It cannot if the measured
        all-reduce takes no longer for more bytes.
        """
        fit = self.collectives.get("all_reduce")
        return self.num_ranks == 1 or fit is None or fit.per_unit_s > 0

    def _hop_and_rate(self) -> tuple[float, float]:
        """Seconds a hop and bytes a second a link, from the measured all-reduce if
        there is one.
        """
        fit = self.collectives.get("all_reduce")
        ranks = self.num_ranks
        if fit is None or ranks == 1:
            return self.hop_s, self.rate_bytes_per_s
        if not self.has_rate:
            raise InvalidSetting(
                "the measured all-reduce takes no longer for more bytes, so no rate "
                "follows from it; measure larger messages, or state rate_bytes_per_s "
                "in a new Cluster"
            )
        rounds, copies = travel("all_reduce", ranks)
        latency_s = self.evened.latency_s
        longest_s = max(fit.samples, default=(0, inf))[1]
        if not is_hidden(latency_s, ranks, longest_s):
            # A byte's seconds in the line are not those on the link.
            return self.hop_s, self.rate_bytes_per_s
        far_s = hops("all_reduce", ranks) * latency_s
        return max(0.0, fit.alpha_s - far_s) / rounds, copies / fit.per_unit_s

    def parts_s(self, verb: str, size_bytes: float) -> tuple[float, float]:
        """Seconds of latency, and of a whole link, that ``collective_s`` is made of.

        What passes within a host takes nothing of its link, and counts as latency.

        Args:
            verb: One of ``VERBS``.
            size_bytes: Bytes of the verb's buffer.

        Returns:
            Both parts.

        Raises:
            InvalidSetting: Hosts have several ranks, and the verb is no all-reduce.

        >>> Cluster(num_ranks=2, rate_bytes_per_s=1e6, hop_s=0.25).parts_s("send", 1e6)
        (0.25, 1.0)
        """
        if self.ranks_per_host > 1:
            self._check_of_messages(verb)
            latency_s, work_s = self.shares.parts_s(
                verb, size_bytes / self.ranks_per_host
            )
            within_s, copied_s = self.within_line.parts(size_bytes)
            host_s = self.host_share * within_s
            return within_s - host_s + copied_s + latency_s, work_s + host_s
        return self.line(verb).parts(size_bytes, self.host_share)

    def _check_of_messages(self, verb: str) -> None:
        """Refuses verbs that only shares have where hosts have several ranks."""
        if verb != "all_reduce":
            raise invalid(
                "verb",
                verb,
                "all_reduce, the only one of whole messages where hosts have "
                "several ranks",
                "ask shares for a verb of shares, and within_line for the host",
            )

    def line(self, verb: str) -> LineFit:
        """The cost of a verb by its size in bytes: as it was measured, else by formula.

        Args:
            verb: One of ``VERBS``.

        Returns:
            The line; 0 for one rank.

        Raises:
            UnknownName: There is no such verb.
            InvalidSetting: Hosts have several ranks, and the verb is no all-reduce.

        >>> Cluster(num_ranks=2, rate_bytes_per_s=1e6, hop_s=0.25).line("send").alpha_s
        0.25
        """
        if self.num_ranks == 1 and verb in VERBS:
            return LineFit(alpha_s=0.0, per_unit_s=0.0)
        if self.ranks_per_host > 1:
            self._check_of_messages(verb)
            within = self.within_line
            among = self.shares.line(verb)
            count = self.ranks_per_host
            sizes = [(count * size, seconds) for size, seconds in among.samples]
            return LineFit.model_construct(
                alpha_s=within.alpha_s + among.alpha_s,
                per_unit_s=within.per_unit_s + among.per_unit_s / count,
                samples=tuple(
                    (size, within.measured_s(size) + own_s) for size, own_s in sizes
                ),
            )
        measured = self.collectives.get(verb)  # type: ignore[call-overload]
        if measured is not None:
            return measured  # type: ignore[no-any-return]
        rounds, copies = travel(verb, self.num_ranks)
        even = self.evened
        # Not held to the bounds of what is read: many hops of the longest are longer.
        line = LineFit.model_construct(
            alpha_s=rounds * even.hop_s, per_unit_s=copies / even.rate_bytes_per_s
        )
        if not even.latency_s:
            return line
        return far_line(verb, self.num_ranks, line, even.latency_s)
