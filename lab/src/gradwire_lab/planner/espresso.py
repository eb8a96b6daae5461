"""espresso: each tensor takes the option after which the iteration is shortest.

Source: Wang, Lin, Zhu and Ng, "Hi-Speed DNN Training with Espresso: Unleashing the Full
    Potential of Gradient Compression with Near-Optimal Usage Strategies" (EuroSys
    2023), section 4.4: algorithms 1 (which tensors to compress, and how) and 2 (which
    of them to offload to the CPU).
Differences from the paper:
    - The paper has trees of choices within and among hosts. Here the options are:
      uncompressed by an all-reduce, or compressed and sent whole to all ("indivisible":
      an all-gather) or in parts that ranks merge ("divisible": push and pull by
      ``casync_ps``).
    - Hosts of several ranks add up uncompressed in every option, and compress only
      among hosts. Their sum is encoded between two transfers, on the compute lane. So
      none is encoded within the backward pass there, and algorithm 2 has nothing to
      offload.
    - An encode "on the GPU" is one within the backward pass, and one that is offloaded
      is one on the compute lane, by the host for gradients in host memory. A device
      makes both itself, as ``runtime/device/streams.py`` serves ``selective`` alone.
      Copies are in the measured lines.
    - Algorithm 2 offloads tensors of a group from the one that is farthest from the
      output layer (lemma 1). Its reason, that they come earlier, fits the nearest. Both
      are tried.
    - Where there are more than 500 combinations of how many to offload in each group,
      groups are gone through in turn until none gains; the paper searches them all.
    - Plans without compression, without push and pull and without offloading are
      compared with the whole one by the simulator, and the fastest is returned. So a
      greedy choice never costs time.
    - Costs are the cluster's lines and the clock of ``planning/lanes.py``; the paper's
      are measured curves and its own timeline.
Settings: compressor, a sparsifier by name, and its density; divisible, whether push and
    pull is an option; offload, whether algorithm 2 is carried out.
Order: backward, a message for each tensor, one at a time; the next forward starts when
    all communication has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from math import prod
from typing import NamedTuple

from gradwire.errors import invalid
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.fit import LineFit
from gradwire.planning.data.plan import (
    DENSE,
    ExchangeSetting,
    Plan,
    PlannedMessage,
    Setting,
)
from gradwire.planning.data.profile import Profile, ProfiledTensor
from gradwire.planning.price import iteration_s

from ..planning.lanes import (
    BackwardOrder,
    TimedMessage,
    backward_order,
    carry_parts,
    end_of,
    link_ends,
    ready_times,
)
from ..planning.sparse_fusion import (
    NOTHING,
    Arrival,
    chunks_in,
    sparsified,
)

MOST_COMBINED = 500
"""The most combinations of offloaded tensors that are all tried."""


def espresso(
    profile: Profile,
    cluster: Cluster,
    *,
    compressor: str = "dgc",
    density: float = 0.01,
    divisible: bool = True,
    offload: bool = True,
) -> Plan:
    """The plan of Espresso for this profile and cluster.

    Args:
        profile: The model's layers.
        cluster: Ranks, links, and the measured costs of ``compressor``.
        compressor: The name of a sparsifier; default "dgc".
        density: The kept fraction k/n of a sparsified message, in (0, 1]; default 0.01.
        divisible: True (the default): compressed tensors may also be pushed in parts to
            ranks that merge them, and pulled. False: they are sent whole to all ranks.
        offload: True (the default): encodes may move off the backward pass, by
            algorithm 2 of the paper. False: they stay there.

    Returns:
        The plan.

    Raises:
        InvalidSetting: The cluster has not measured the compressor, or a value is out
            of range.
    """
    for what, given in (("divisible", divisible), ("offload", offload)):
        if not isinstance(given, bool):
            raise invalid(what, given, "True or False", "leave it out")
    exchanges = _exchanges(compressor, density, divisible)
    lanes = _Lanes.of(profile, cluster, compressor, exchanges)
    settings: dict[str, Setting] = {"compressor": compressor, "density": density}
    settings |= {"divisible": divisible, "offload": offload}
    plans = []
    for count in range(1, len(lanes.carries) + 1):
        own_lanes = replace(lanes, carries=dict(list(lanes.carries.items())[:count]))
        select(own_lanes)
        plans.append(own_lanes.plan(profile.model, settings, exchanges))
        if offload and lanes.has_inline:
            take_off(own_lanes)
            plans.append(own_lanes.plan(profile.model, settings, exchanges))
    return min(plans, key=lambda plan: iteration_s(plan, profile, cluster))


def _exchanges(
    compressor: str, density: float, divisible: bool
) -> dict[str, ExchangeSetting]:
    collectives = ["allgather_sparse"]
    if divisible:
        collectives.append("casync_ps")
    settings = [sparsified(compressor, density, name) for name in collectives]
    return {f"{compressor} by {one.collective}": one for one in settings}


class _Carry(NamedTuple):
    """The seconds of a tensor by an option: on the wire, also cut into parts, and of
    its encode.
    """

    seconds: float
    parts: tuple[tuple[float, float], ...] = ()
    """See ``TimedMessage``."""
    encode_s: float = 0.0
    """On the compute lane; 0 where the encode is among ``parts``."""

    @classmethod
    def of(
        cls, tensor: ProfiledTensor, exchange: ExchangeSetting, cluster: Cluster
    ) -> _Carry:
        parts = carry_parts([tensor], exchange, cluster, is_encoded=False)
        encode_s = 0.0
        if cluster.ranks_per_host == 1 and parts and not parts[0][0]:
            (_, encode_s), *rest = parts
            parts = tuple(rest)
        return cls(sum(map(sum, parts)), parts, encode_s)


@dataclass
class _Lanes(BackwardOrder):
    """The tensors in backward order with the seconds of their options, and what is
    chosen so far.

    Letters: L tensors.
    """

    inline: LineFit
    carries: dict[str, list[_Carry]]
    """The seconds of each tensor by each option; ``DENSE`` is one of them."""
    has_inline: bool
    """Whether encodes may be within the backward pass; else they are among the
    parts.
    """
    options: list[str] = field(init=False)
    offloaded: list[bool] = field(init=False)

    def __post_init__(self) -> None:
        self.options = [DENSE] * len(self.tensors)
        self.offloaded = [False] * len(self.tensors)

    @classmethod
    def of(
        cls,
        profile: Profile,
        cluster: Cluster,
        compressor: str,
        exchanges: dict[str, ExchangeSetting],
    ) -> _Lanes:
        order = backward_order(profile)
        tensors = order.tensors
        carries = {
            DENSE: [
                _Carry(cluster.all_reduce_s(tensor.size_bytes)) for tensor in tensors
            ]
        }
        alike = {(tensor.numel, tensor.dtype): tensor for tensor in tensors}
        for name, exchange in exchanges.items() if cluster.num_ranks > 1 else ():
            alone = {
                key: _Carry.of(tensor, exchange, cluster)
                for key, tensor in alike.items()
            }
            carries[name] = [alone[tensor.numel, tensor.dtype] for tensor in tensors]
        return cls(
            tensors=tensors,
            layers=order.layers,
            backward_s=order.backward_s,
            inline=cluster.inline_line(compressor) or NOTHING,
            carries=carries,
            has_inline=cluster.ranks_per_host == 1,
        )

    def timed(self) -> tuple[list[float], list[TimedMessage]]:
        """When layers are ready, and the messages, under the present choice."""
        inline_s = [0.0] * len(self.backward_s)
        messages = []
        for place, option in enumerate(self.options):
            layer = self.layers[place]
            carry = self.carries[option][place]
            works: tuple[tuple[int, float], ...] = ()
            if option != DENSE and self.offloaded[place]:
                works = ((layer, carry.encode_s),)
            elif option != DENSE:
                inline_s[layer] += self.inline.seconds(self.tensors[place].numel)
            messages.append(TimedMessage(layer, works, carry.seconds, carry.parts))
        return ready_times(self.backward_s, inline_s), messages

    def seconds(self) -> float:
        """F: when the next forward pass may begin, under the present choice."""
        return end_of(*self.timed())

    def before_bubbles(self) -> int:
        """The number of tensors that are sent before the last gap on the link.

        What is sent before a gap would end no earlier behind it if it were shorter.
        """
        ready_s, messages = self.timed()
        end_s = list(link_ends(ready_s, messages))
        for number in range(len(end_s) - 1, 0, -1):
            start_s = end_s[number] - messages[number].carry_s
            if start_s > end_s[number - 1] * (1 + 1e-12):
                return number
        return 0

    def best_option(self, place: int) -> str:
        """The option of least F for a tensor, with all others as they are.

        The present option is the first of those that tie.
        """
        present = self.options[place]
        seconds = {}
        for option in (present, *self.carries):
            self.options[place] = option
            seconds[option] = self.seconds()
        self.options[place] = present
        return min(seconds, key=seconds.__getitem__)

    def plan(
        self,
        model: str,
        settings: dict[str, Setting],
        exchanges: dict[str, ExchangeSetting],
    ) -> Plan:
        """The plan of the present choice."""
        return Plan(
            planner="espresso",
            model=model,
            settings=settings,
            messages=tuple(map(self._message, range(len(self.tensors)))),
            exchanges={
                name: exchange
                for name, exchange in exchanges.items()
                if name in self.options
            },
        )

    def _message(self, place: int) -> PlannedMessage:
        tensor = self.tensors[place]
        option = self.options[place]
        is_inline = self.has_inline and option != DENSE and not self.offloaded[place]
        return PlannedMessage(
            chunks=chunks_in([Arrival(tensor, 0.0)]),
            exchange=option,
            inline=(tensor.name,) if is_inline else (),
        )


def select(lanes: _Lanes) -> None:
    """Algorithm 1: the largest first, the option of least F while all others stay as
    they are.

    Of tensors of one size the one closest to the output layer goes first. Tensors sent
    before a bubble stay uncompressed, and are dropped.
    """
    if lanes.carries.keys() == {DENSE}:
        return
    falling = sorted(
        range(len(lanes.tensors)),
        key=lambda place: (-lanes.tensors[place].size_bytes, place),
    )
    dropped = lanes.before_bubbles()
    for place in falling:
        if place < dropped:
            continue
        lanes.options[place] = lanes.best_option(place)
        if lanes.options[place] != DENSE:
            dropped = lanes.before_bubbles()


def take_off(lanes: _Lanes) -> None:
    """Algorithm 2: of each group of equal size and option, how many go to the compute
    lane.
    """
    groups: dict[tuple[int, str], list[int]] = {}
    for place, option in enumerate(lanes.options):
        if option != DENSE:
            groups.setdefault((lanes.tensors[place].numel, option), []).append(place)
    nearest = list(groups.values())
    farthest = [group[::-1] for group in nearest]
    taken_off = []
    for ordered in (farthest, nearest):
        counts, seconds = _least_counts(
            [len(group) for group in ordered], partial(_offloaded_s, lanes, ordered)
        )
        taken_off.append((seconds, sum(counts), counts, ordered))
    _, _, counts, ordered = min(taken_off, key=lambda row: row[:2])
    _offloaded_s(lanes, ordered, counts)


def _offloaded_s(
    lanes: _Lanes, ordered: list[list[int]], counts: Iterable[int]
) -> float:
    """F with the first tensors of each group offloaded, so many of each."""
    lanes.offloaded = [False] * len(lanes.tensors)
    for group, count in zip(ordered, counts, strict=True):
        for place in group[:count]:
            lanes.offloaded[place] = True
    return lanes.seconds()


def _least_counts(
    sizes: Sequence[int], seconds_of: Callable[[Sequence[int]], float]
) -> tuple[Sequence[int], float]:
    """The numbers, one up to each size, of least seconds; the smallest of those that
    tie.
    """
    if prod(size + 1 for size in sizes) <= MOST_COMBINED:
        every = product(*(range(size + 1) for size in sizes))
        return min(
            ((counts, seconds_of(counts)) for counts in every), key=lambda row: row[1]
        )
    best = [0] * len(sizes)
    best_s = seconds_of(best)
    before_s = float("inf")
    while best_s < before_s:
        before_s = best_s
        for group, size in enumerate(sizes):
            for count in range(size + 1):
                tried = [*best[:group], count, *best[group + 1 :]]
                if (found_s := seconds_of(tried)) < best_s:
                    best = tried
                    best_s = found_s
    return best, best_s


EXAMPLES = (
    espresso,
    partial(espresso, compressor="topk", density=0.1),
    partial(espresso, density=0.25, offload=False),
    partial(espresso, density=0.25, divisible=False),
)
