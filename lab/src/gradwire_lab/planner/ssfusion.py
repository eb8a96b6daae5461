"""ssfusion: each tensor of a group sparsified by itself, the small ones dense.

Source: Ming et al., "SSFusion: Tensor Fusion with Selective Sparsification for
    Efficient Distributed DNN Training" (ICDE 2026), sections IV-B (selection, density),
    IV-C (-O: offloading) and IV-D (-I: interleaving).
Differences from the paper:
    - Equation 2 excludes tensors from sparsification, the smallest first, until a
      group's computation is as short as the message before it. Where backward alone
      takes longer that never comes about, and everything would go dense. So exclusion
      ends too where the others' density could no longer make up for it above ``floor``,
      and one tensor stays sparse. ``bound="none"`` is the rule as printed.
    - The first group has no message before it: there a tensor is excluded as long as
      its sparsification takes longer than it saves on the wire.
    - The density that makes up for dense elements is a closed form and no search: of N
      elements, X of them dense, the others get (d N - X) / (N - X). So groups are
      selected in backward order, each with the time that the message before it takes.
    - Offloaded tensors wait for each other on one lane, in backward order; what has
      ended by the end of the group's backward is offloaded. The last tensor of a group
      never is.
    - The all-reduce carries the dense tensors up to the place after which the group
      arrives earliest. Dense tensors behind it travel with the sparse ones.
    - A tensor of 2^31 elements or more travels dense, as an int32 tells an element's
      place.
    - Profiles and measured lines stand for the paper's five iterations of online
      profiling.
    - Groups are made by ``planning/sparse_fusion.py``, by Cupcake's cost.
    - Hosts of several ranks add up first, and each rank sparsifies its own tensors of
      the sum. So no computation before a message is its sparsification: equation 2 and
      offloading have no meaning, and all variants are one. As many of a group's
      smallest tensors are dense as lets the group arrive earliest. All of them go by
      the all-reduce, as no rank has all tensors to be gathered.
Settings: variant, "naive", "o", "i" or "oi"; sparsifier by name, its density, and the
    floor of a lowered one; bound, "compensated" or "none".
Order: backward, a group's all-reduce before its all-gather, one message at a time; the
    next forward starts when all communication has ended.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from math import inf
from operator import itemgetter

from gradwire.contract.bounds import check_choice, check_share
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.fit import LineFit
from gradwire.planning.data.plan import (
    Chunk,
    ExchangeSetting,
    Plan,
    PlannedMessage,
)
from gradwire.planning.data.profile import Profile
from gradwire.planning.simulation.closed_form import Lane

from ..planning.sparse_fusion import (
    ENTRY_BYTES,
    NOTHING,
    Arrival,
    SparseCost,
    arrivals,
    best_fusion,
    chunks_in,
    is_too_long,
)

VARIANTS = ("naive", "o", "i", "oi")
BOUNDS = ("compensated", "none")


def ssfusion(
    profile: Profile,
    cluster: Cluster,
    *,
    variant: str = "oi",
    density: float = 0.01,
    floor: float = 0.001,
    sparsifier: str = "dgc",
    bound: str = "compensated",
) -> Plan:
    """The plan of SSFusion for this profile and cluster.

    Args:
        profile: The model's layers.
        cluster: Ranks, links, and the measured costs of ``sparsifier``.
        variant: "naive", "o" (offloading), "i" (interleaving) or "oi" (both, the
            default).
        density: The kept fraction k/n of a group, by default 0.01.
        floor: The least density of what stays sparse in a group, by default 0.001.
        sparsifier: The compressor's name, by default "dgc".
        bound: "compensated" (the default), or "none" for equation 2 as printed.

    Returns:
        The plan.

    Raises:
        InvalidSetting: The cluster has not measured the sparsifier, or a value is out
            of range.

    >>> from gradwire import catalogue
    >>> from gradwire.planning.data.cluster import CodecFit
    >>> line = LineFit(alpha_s=1e-5, per_unit_s=1e-10)
    >>> codecs = {"dgc": CodecFit(encode=line, decode=line, merge=line)}
    >>> cluster = Cluster(num_ranks=8, rate_bytes_per_s=1.25e8, codecs=codecs)
    >>> plan = ssfusion(catalogue.load("vgg16"), cluster)
    >>> {one.compressor for one in plan.exchanges.values()}
    {'selective'}
    """
    check_choice("variant", variant, VARIANTS)
    check_choice("bound", bound, BOUNDS)
    check_share("floor", floor)
    cost = SparseCost.of(cluster, sparsifier, density)
    codec = cluster.codecs.get(sparsifier)
    maker = _Maker(
        cluster=cluster,
        cost=cost,
        floor=min(floor, density),
        is_bound=bound == "compensated",
        offloads=variant in ("o", "oi"),
        interleaves=variant in ("i", "oi"),
        beside=NOTHING if codec is None else codec.encode,
    )
    messages: list[PlannedMessage] = []
    exchanges: dict[str, ExchangeSetting] = {}
    for number, group in enumerate(best_fusion(arrivals(profile), cost, is_whole=True)):
        if is_too_long(group):
            messages.append(maker.dense(group))
            continue
        name = f"ssfusion {number}"
        made, lowered, num_dense = maker.messages(group, name)
        messages += made
        exchanges[name] = _selective(sparsifier, lowered, num_dense)
    return Plan(
        planner="ssfusion",
        model=profile.model,
        settings={
            "variant": variant,
            "density": density,
            "floor": floor,
            "sparsifier": sparsifier,
            "bound": bound,
        },
        messages=tuple(messages),
        exchanges=exchanges,
    )


def _selective(sparsifier: str, density: float, num_dense: int) -> ExchangeSetting:
    return ExchangeSetting(
        compressor="selective",
        settings={
            "sparsifier": sparsifier,
            "density": density,
            "num_dense": num_dense,
        },
        error_feedback=True,
    )


@dataclass
class _Maker:
    """Groups are made in turn, as each follows from when earlier ones end.

    ``dense``, ``offloaded`` and ``reduced`` are sets of places in a group.
    """

    cluster: Cluster
    cost: SparseCost
    floor: float
    is_bound: bool
    offloads: bool
    interleaves: bool
    beside: LineFit
    """The encode of an offloaded tensor, over its elements."""
    before_s: float | None = None
    """Seconds of the messages of the group before; None for the first group."""
    now_s: float = 0.0
    link: Lane = field(default_factory=Lane)
    """The link that hosts of several ranks share."""
    lane: Lane = field(default_factory=Lane)

    def messages(
        self, group: list[Arrival], name: str
    ) -> tuple[list[PlannedMessage], float, int]:
        """The next group in backward order: its messages, and of the last of them the
        density of what is sparse and the number of dense tensors.
        """
        if self.cost.num_shares > 1:
            return self._on_hosts(group, name)
        dense = self._excluded(group)
        total = _numel(group)
        whole = _numel(group[place] for place in dense)
        density = min(self.cost.density, max(self.floor, self._density(total, whole)))
        offloaded = self._offloaded(group, dense) if self.offloads else set()
        upto_s = list(
            accumulate(
                arrival.backward_s
                + self._encode_s(arrival) * (place not in dense | offloaded)
                for place, arrival in enumerate(group)
            )
        )
        gathered_bytes = self._payload_bytes(group, dense, density)
        reduced = set[int]()
        reduced_bytes = 0
        if self.interleaves:
            reduced, reduced_bytes = self._reduced(group, dense, upto_s, gathered_bytes)
            gathered_bytes -= sum(_dense_bytes(group[place]) for place in reduced)
        self.before_s = self.cluster.all_reduce_s(reduced_bytes)
        self.before_s += self.cost.gather_bytes_s(gathered_bytes)
        self.now_s += upto_s[-1]

        places = range(len(group))
        gathered = [place for place in places if place not in reduced]
        inline = [place for place in gathered if place not in dense | offloaded]
        messages = []
        if reduced:
            messages.append(PlannedMessage(chunks=_chunks(group, reduced)))
        messages.append(
            PlannedMessage(
                chunks=_chunks(group, gathered),
                exchange=name,
                inline=tuple(group[place].tensor.name for place in inline),
                early=tuple(group[place].tensor.name for place in sorted(offloaded)),
            )
        )
        return messages, density, len(dense - reduced)

    def dense(self, group: list[Arrival]) -> PlannedMessage:
        """The next group as one message that is not sparsified."""
        self.before_s = self.cluster.all_reduce_s(
            sum(arrival.tensor.size_bytes for arrival in group)
        )
        self.now_s += sum(arrival.backward_s for arrival in group)
        self.link.take(self.now_s, self.before_s)
        return PlannedMessage(chunks=chunks_in(group))

    def _on_hosts(
        self, group: list[Arrival], name: str
    ) -> tuple[list[PlannedMessage], float, int]:
        """``messages`` of hosts of several ranks.

        As many are dense as let all arrive earliest.
        """
        ready_s = list(
            accumulate((arrival.backward_s for arrival in group), initial=self.now_s)
        )[1:]
        free_s = self.link.free_s
        total = _numel(group)
        rising = _rising(group)
        best = set[int]()
        best_s = inf
        density = self.cost.density
        for count in range(len(group)):
            dense = set(rising[:count])
            sparse = [group[place] for place in rising[count:]]
            left = self._density(total, total - _numel(sparse))
            if count and self.is_bound and left < self.floor:
                break
            left = min(self.cost.density, max(self.floor, left))
            self.link.free_s = free_s
            if dense:
                size_bytes = sum(group[place].tensor.size_bytes for place in dense)
                self.link.take(
                    ready_s[max(dense)], self.cluster.all_reduce_s(size_bytes)
                )
            gathered_bytes = self._payload_bytes(sparse, set(), left)
            gathered_s = self.cost.apart_s(
                [arrival.tensor.numel for arrival in sparse], gathered_bytes
            )
            end_s = self.link.take(ready_s[-1], gathered_s)
            if end_s < best_s:
                best = dense
                best_s = end_s
                density = left
        self.link.free_s = best_s
        self.now_s = ready_s[-1]
        gathered = PlannedMessage(
            chunks=_chunks(group, set(range(len(group))) - best), exchange=name
        )
        messages = []
        if best:
            messages.append(PlannedMessage(chunks=_chunks(group, best)))
        messages.append(gathered)
        return messages, density, 0

    def _encode_s(self, arrival: Arrival) -> float:
        return self.cost.encode_s(arrival.tensor.numel)

    def _excluded(self, group: list[Arrival]) -> set[int]:
        """The tensors that are not sparsified: always the smallest of the group."""
        places: set[int] = set()
        total = _numel(group)
        whole = 0
        computes_s = sum(
            arrival.backward_s + self._encode_s(arrival) for arrival in group
        )
        for place in _rising(group)[:-1]:
            arrival = group[place]
            if self.before_s is None:
                if self._encode_s(arrival) < self._saved_s(arrival):
                    break
            elif self.before_s >= computes_s:  # equation 2
                break
            whole += arrival.tensor.numel
            if self.is_bound and self._density(total, whole) < self.floor:
                break
            places.add(place)
            computes_s -= self._encode_s(arrival)
        return places

    def _saved_s(self, arrival: Arrival) -> float:
        """Seconds that the sparsification of one tensor takes off an all-gather."""
        sparse_bytes = ENTRY_BYTES * self.cost.entries(arrival.tensor.numel)
        return self.cost.gather_bytes_s(
            _dense_bytes(arrival)
        ) - self.cost.gather_bytes_s(sparse_bytes)

    def _density(self, total: int, whole: int) -> float:
        """The density at which as many elements travel as if all were sparsified.

        ``whole`` of ``total`` elements are dense.
        """
        return (self.cost.density * total - whole) / (total - whole)

    def _offloaded(self, group: list[Arrival], dense: set[int]) -> set[int]:
        """The tensors that are encoded beside the backward pass before it has ended."""
        places: set[int] = set()
        ready_s = self.now_s
        until_s = self.now_s + sum(arrival.backward_s for arrival in group)
        for place, arrival in enumerate(group[:-1]):
            ready_s += arrival.backward_s
            seconds = self.beside.seconds(arrival.tensor.numel)
            if place not in dense and self.lane.start_s(ready_s) + seconds <= until_s:
                places.add(place)
                self.lane.take(ready_s, seconds)
        return places

    def _reduced(
        self,
        group: list[Arrival],
        dense: set[int],
        upto_s: list[float],
        behind_bytes: int,
    ) -> tuple[set[int], int]:
        """The dense tensors to send first so that the group arrives earliest.

        Also returns their bytes.
        """
        best = upto_s[-1] + self.cost.gather_bytes_s(behind_bytes), -1, 0
        reduced_bytes = 0
        for last in sorted(dense):
            reduced_bytes += group[last].tensor.size_bytes
            behind_bytes -= _dense_bytes(group[last])
            link = Lane()
            link.take(upto_s[last], self.cluster.all_reduce_s(reduced_bytes))
            end_s = link.take(upto_s[-1], self.cost.gather_bytes_s(behind_bytes))
            best = min(best, (end_s, last, reduced_bytes), key=itemgetter(0))
        return {place for place in dense if place <= best[1]}, best[2]

    def _payload_bytes(
        self, group: list[Arrival], dense: set[int], density: float
    ) -> int:
        return sum(
            _dense_bytes(arrival)
            if place in dense
            else ENTRY_BYTES * max(1, round(density * arrival.tensor.numel))
            for place, arrival in enumerate(group)
        )


def _chunks(group: list[Arrival], places: Iterable[int]) -> tuple[Chunk, ...]:
    return chunks_in(group[place] for place in sorted(places))


def _rising(group: list[Arrival]) -> list[int]:
    """The places of a group's tensors, the smallest first."""
    return sorted(
        range(len(group)), key=lambda place: (group[place].tensor.numel, place)
    )


def _numel(group: Iterable[Arrival]) -> int:
    return sum(arrival.tensor.numel for arrival in group)


def _dense_bytes(arrival: Arrival) -> int:
    """Bytes of a tensor that travels dense among sparse ones: in its working dtype."""
    return arrival.tensor.numel * (8 if arrival.tensor.dtype == "float64" else 4)


EXAMPLES = (
    ssfusion,
    partial(ssfusion, variant="naive", density=0.1),
    partial(ssfusion, variant="o", sparsifier="topk", density=0.2, floor=0.05),
    partial(ssfusion, variant="i", density=0.3, bound="none"),
)
