"""The virtual clock: one iteration of a plan, on one rank for all or on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import NamedTuple

from ...contract import Exchange
from ...contract.spec import TensorSpec
from ...contract.trace.span import Span
from ...exchange.planned import planned_spec, sound_exchanges
from ...exchange.two_level import on_hosts
from ..data.check import check
from ..data.cluster import Cluster
from ..data.plan import DENSE, Plan, PlannedMessage
from ..data.profile import Profile
from .closed_form import backward_ends, forward_times
from .events import Timetable, Traffic, play
from .representative import alone
from .supersteps import (
    NOT_MEASURED,
    Superstep,
    Tariff,
    Work,
    all_reduce,
    is_all_reduce,
)

# ---- one iteration -------------------------------------------------------------------


class Encode(NamedTuple):
    """An encode elsewhere than on the compute lane at its message's launch."""

    layer: int
    """It begins when this layer's backward has ended."""
    message: int
    name: str
    seconds: float
    is_inline: bool = True
    """Whether the backward pass waits for it."""


@dataclass(frozen=True)
class Timing:
    """The starts and ends of everything in one iteration, in seconds from the start of
    the backward pass; layers are in forward order, messages in issue order. A layer's
    backward ends when what is encoded behind it is encoded.
    """

    backward_start_s: list[float]
    backward_end_s: list[float]
    message_start_s: list[float]
    message_end_s: list[float]
    forward_start_s: list[float]
    forward_end_s: list[float]
    inline: Sequence[Encode]
    """Encodes that the backward pass waits for, after their layers' computation."""
    early_s: float
    """Seconds of the compute lane in which tensors are encoded before their message is
    whole. Where cores are shared, these encodes are ``inline``.
    """
    spans: Sequence[Span]
    """Spans of the rank's messages, on the lanes "compute" and "communication"."""

    @property
    def inline_s(self) -> float:
        """Seconds by which encodes lengthen the backward pass."""
        return sum(work.seconds for work in self.inline)

    @property
    def lane_s(self) -> float:
        """Seconds in which the compute lane is busy."""
        return sum(span.duration_s for span in self.spans if span.lane == "compute")

    @property
    def iteration_s(self) -> float:
        """Seconds from the start of the backward pass to the end of the next forward
        pass (equation 12).
        """
        return self.forward_end_s[-1]


@dataclass(frozen=True)
class Iteration:
    """The messages of one iteration; lists have an entry for each, in issue order."""

    profile: Profile
    cluster: Cluster
    layers: Sequence[Collection[int]]
    """Numbers in forward order of the layers whose gradients each message carries."""
    credit: int
    overlap_forward: bool
    labels: Sequence[str]
    after: Sequence[Sequence[int]] = ()
    inline: Sequence[Encode] = ()
    """In backward order, and within a layer in issue order."""
    early: Sequence[Encode] = ()
    """Encodes on the compute lane that may begin before their message is launched."""

    def timings(
        self,
        supersteps: list[list[tuple[Superstep, ...]]],
        slower: Sequence[float] = (),
        carry: Callable[[Traffic], Timetable] = play,
    ) -> list[Timing]:
        """The times on each rank: of ``supersteps[rank][message]``.

        ``slower`` are factors of each rank's backward seconds; empty: all are 1.
        ``carry`` carries messages out.
        """
        inline = [self.inline] * len(supersteps)
        early = self.early
        if self.cluster.cores is not None:
            held_up = [
                [*self.inline, *early, *self._held_up(message)]
                for message in supersteps
            ]
            inline = [sorted(works, key=lambda work: -work.layer) for works in held_up]
            early = ()
            supersteps = [
                [without_encode(superstep) for superstep in message]
                for message in supersteps
            ]
        ends_s = [self._backward_ends(works) for works in inline]
        for own_s, factor in zip(ends_s, slower, strict=False):
            own_s[:] = [factor * end_s for end_s in own_s]
        played = carry(
            Traffic(
                supersteps,
                # the smaller a layer's number, the later its backward ends
                [[ends[min(needed)] for needed in self.layers] for ends in ends_s],
                self.labels,
                self.credit,
                self.after,
                [self._early_from(ends) for ends in ends_s] if early else (),
                self.cluster.ranks_per_host if len(supersteps) > 1 else 1,
                self.cluster.speeds if len(supersteps) > 1 else (),
            )
        )
        of_rank: list[list[Span]] = [[] for _ in supersteps]
        for span in played.spans:
            of_rank[span.rank].append(span)
        every = zip(
            inline,
            ends_s,
            supersteps,
            of_rank,
            played.start_s,
            played.end_s,
            strict=True,
        )
        return [self._timing(*parts) for parts in every]

    def _backward_ends(self, inline: Sequence[Encode]) -> list[float]:
        """The end of each layer's backward computation, which awaits these encodes."""
        added_s = [0.0] * len(self.profile.layers)
        for work in inline:
            added_s[work.layer] += work.seconds
        return backward_ends(self.profile, self.cluster, added_s)

    def _timing(
        self,
        inline: Sequence[Encode],
        backward_end_s: list[float],
        supersteps: list[tuple[Superstep, ...]],
        spans: list[Span],
        start_s: list[float],
        end_s: list[float],
    ) -> Timing:
        may_start_s = [backward_end_s[0]] * len(backward_end_s)
        for needed, ended_s in zip(self.layers, end_s, strict=True):
            for layer in needed if self.overlap_forward else (0,):
                may_start_s[layer] = max(may_start_s[layer], ended_s)
        forward_s = [layer.forward_s for layer in self.profile.layers]
        forward_start_s, forward_end_s = forward_times(forward_s, may_start_s)
        timing = Timing(
            backward_start_s=[*backward_end_s[1:], 0.0],
            backward_end_s=backward_end_s,
            message_start_s=start_s,
            message_end_s=end_s,
            forward_start_s=forward_start_s,
            forward_end_s=forward_end_s,
            inline=inline,
            early_s=0.0
            if self.cluster.cores
            else sum(work.seconds for work in self.early),
            spans=spans,
        )
        if self.cluster.cores is not None:
            computing_s = backward_end_s[0] + sum(forward_s) + timing.lane_s
            self._delay(timing, computing_s + self._carrying_s(supersteps))
        return timing

    def _early_from(
        self, backward_end_s: list[float]
    ) -> list[list[tuple[float, Work]]]:
        starts: list[list[tuple[float, Work]]] = [[] for _ in self.layers]
        for one in self.early:
            work = Work(one.name, one.seconds)
            starts[one.message].append((backward_end_s[one.layer], work))
        return starts

    # Where ranks have too few cores, all that a rank does takes its turn. An encode
    # takes the core from the backward pass, which goes on when that is done. Layers and
    # the compute lane were measured on all ranks at once, so their seconds are those of
    # cores that are shared. What is left is what messages take of the cores themselves:
    # system calls, copies, checksums. Where computation hides the wire, a clock of
    # lanes alone would have that for nothing.

    def _held_up(self, supersteps: list[tuple[Superstep, ...]]) -> Iterator[Encode]:
        """Encodes of messages that the backward pass waits for on a shared core."""
        last = len(self.profile.layers)
        for number, message in enumerate(supersteps):
            # when the gradients of all messages before it are ready too
            last = min(last, *self.layers[number])
            if seconds := encode_s(message):
                yield Encode(last, number, f"encode {self.labels[number]}", seconds)

    def _carrying_s(self, supersteps: list[tuple[Superstep, ...]]) -> float:
        """Seconds in which a rank's cores carry its messages' verbs, not computing."""
        return sum(
            superstep.num_verbs
            * self.cluster.busy_s(superstep.sent_bytes / superstep.num_verbs)
            for message in supersteps
            for superstep in message
            if superstep.wire and superstep.num_verbs
        )

    def _delay(self, timing: Timing, busy_s: float) -> None:
        """Makes an iteration as long as its rank's cores are busy.

        Only sums are known: the next forward pass stands for whatever of it waits for
        cores.
        """
        late_s = max(0.0, busy_s - timing.iteration_s)
        for times_s in (timing.forward_start_s, timing.forward_end_s):
            times_s[:] = [one_s + late_s for one_s in times_s]


# ---- the iteration of a plan ---------------------------------------------------------


@dataclass(frozen=True)
class Demand:
    """The demand of a plan on the network, for one profile and cluster."""

    plan: Plan
    iteration: Iteration
    specs: list[TensorSpec]
    """The gradient that each message exchanges.

    It has shapes only where the exchange acts on whole tensors. Elsewhere it has none,
    so that messages of one size and dtype are priced only once.
    """
    exchanges: dict[str, Exchange]
    """By their names in the plan, as the cluster's hosts carry them out."""
    of_rows: set[str]
    """Names of exchanges of gradients that come as rows, not added up by hosts."""

    @classmethod
    def of(cls, plan: Plan, profile: Profile, cluster: Cluster) -> Demand:
        """The demand of a plan.

        Raises ``InvalidSetting`` if it is not sound for the profile.
        """
        check(plan, profile)
        tensors = profile.tensors
        made = sound_exchanges(plan, tensors)
        layer_of = profile.layer_of
        layers = [
            {layer_of[c.tensor] for c in message.chunks} for message in plan.messages
        ]
        specs = [
            planned_spec(
                message,
                tensors,
                is_shaped=made[message.exchange].declared.whole_tensors,
            )
            for message in plan.messages
        ]
        labels = [_label(message) for message in plan.messages]
        encodes = list(encodes_of(plan, cluster, layer_of, layers, labels))
        inline = [work for work in encodes if work.is_inline]
        iteration = Iteration(
            profile,
            cluster,
            layers,
            plan.credit,
            plan.overlap_forward,
            labels,
            [message.after for message in plan.messages],
            sorted(inline, key=lambda work: -work.layer),
            [work for work in encodes if not work.is_inline],
        )
        measured = profile.sparsity.tensors if profile.sparsity else ()
        rows = {tensor.name for tensor in measured if tensor.is_rows}
        of_rows = {
            message.exchange
            for message in plan.messages
            if message.chunks[0].tensor in rows
        } - {DENSE}
        exchanges = {
            name: exchange
            if name in of_rows
            else on_hosts(exchange, cluster.ranks_per_host)
            for name, exchange in made.items()
        }
        return cls(plan, iteration, specs, exchanges, of_rows)

    def tariff(self, name: str) -> Tariff:
        """The prices that an exchange is asked for."""
        cluster = self.iteration.cluster
        tariff = Tariff.of(
            self.exchanges[name], cluster.flat if name in self.of_rows else cluster
        )
        return replace(tariff, in_sends=self.plan.bulk is not None)

    def one_rank(self) -> Timing:
        """The times on a rank that stands for all."""
        cluster = self.iteration.cluster
        tariffs = {name: self.tariff(name) for name in self.exchanges}
        every = list[tuple[Superstep, ...]]()
        for message, spec in zip(self.plan.messages, self.specs, strict=True):
            name = message.exchange
            if name == DENSE and is_all_reduce(spec.dtype, cluster):
                every.append((all_reduce(spec.numel * spec.dtype.itemsize, cluster),))
            else:
                supersteps = alone(self.exchanges[name], spec, tariffs[name])
                every.append(at_launch(message, supersteps))
        return self.iteration.timings([every])[0]


def run_on_clock(plan: Plan, profile: Profile, cluster: Cluster) -> Timing:
    """Carries ``plan`` out on the virtual clock, for a rank that stands for all.

    Raises ``InvalidSetting`` for a plan that is not sound for the profile, or that uses
    an exchange that cannot be made or looks at values.
    """
    return Demand.of(plan, profile, cluster).one_rank()


def _label(message: PlannedMessage) -> str:
    first, *others = message.chunks
    label = f"{first.tensor}[{first.start}:{first.stop}]"
    return f"{label} and {len(others)} more" if others else label


def encodes_of(
    plan: Plan,
    cluster: Cluster,
    layer_of: dict[str, int],
    layers: list[set[int]],
    labels: list[str],
) -> Iterator[Encode]:
    """The encodes that messages name.

    Among one rank nothing is encoded, and hosts of several ranks encode their sums,
    which come after the launch. What is not measured takes no time.
    """
    is_flat = cluster.num_ranks > 1 == cluster.ranks_per_host
    for number, message in enumerate(plan.messages if is_flat else ()):
        if not message.inline and not message.early:
            continue
        exchange = plan.exchanges[message.exchange]
        codec = cluster.codecs.get(exchange.encoder)
        inline_line = cluster.inline_line(exchange.encoder)
        # Launched when the gradients of all messages before it are ready too.
        last = min(min(needed) for needed in layers[: number + 1])
        pieces = [(labels[number], last, sum(c.numel for c in message.chunks), True)]
        if exchange.sparsifier is not None:
            pieces = [
                (c.tensor, layer_of[c.tensor], c.numel, c.tensor in message.inline)
                for c in message.chunks
                if c.tensor in (*message.inline, *message.early)
            ]
        for what, layer, numel, is_inline in pieces:
            line = inline_line if is_inline else codec and codec.encode
            name = f"encode {what}" if line else f"encode {what} ({NOT_MEASURED})"
            seconds = line.seconds(numel) if line else 0.0
            yield Encode(layer, number, name, seconds, is_inline)


def at_launch(
    message: PlannedMessage, supersteps: tuple[Superstep, ...]
) -> tuple[Superstep, ...]:
    """The supersteps without the encodes that the message names by themselves."""
    is_apart = message.inline or message.early
    return without_encode(supersteps) if is_apart else supersteps


def encode_s(supersteps: tuple[Superstep, ...]) -> float:
    """The seconds of a message's encodes before its first transfer."""
    ahead = takewhile(lambda superstep: not superstep.wire, supersteps)
    works = (work for superstep in ahead for work in superstep.works)
    return sum(work.seconds for work in works if _is_encode(work))


def without_encode(supersteps: tuple[Superstep, ...]) -> tuple[Superstep, ...]:
    """A message's supersteps without the encodes before its first transfer."""
    without = []
    is_ahead = True
    for superstep in supersteps:
        is_ahead = is_ahead and not superstep.wire
        works = tuple(work for work in superstep.works if not _is_encode(work))
        if not is_ahead:
            without.append(superstep)
        elif works:
            without.append(superstep._replace(works=works))
    return tuple(without)


def _is_encode(work: Work) -> bool:
    return work.name.startswith("encode")
