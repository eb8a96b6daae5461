"""The scheme of sparse synchronisation for every tensor whose sparsity was measured."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from gradwire.contract import Compressor
from gradwire.exchange.by_name import algorithm_by_name
from gradwire.exchange.sparse_schemes import (
    SchemeChoice,
    SchemeInputs,
    fastest_scheme,
    schemes,
)
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.plan import (
    DENSE,
    Chunk,
    ExchangeSetting,
    Plan,
    PlannedMessage,
    Setting,
)
from gradwire.planning.data.profile import Profile, ProfiledTensor
from gradwire.planning.data.sparsity import (
    SparsityProfile,
    TensorSparsity,
    UnitSparsity,
)


def scheme_of(
    one: TensorSparsity,
    tensor: ProfiledTensor,
    sparsity: SparsityProfile,
    cluster: Cluster,
) -> tuple[SchemeInputs, SchemeChoice]:
    """The setting of a sparse tensor on this cluster, and the scheme chosen for it.

    Hosts of several ranks add up first, and the setting is that of a rank's share of
    their sum. But gradients that come as rows are not added up: they travel among all
    ranks.
    """
    count = cluster.ranks_per_host
    at = SchemeInputs(
        numel=tensor.numel,
        units=one.units,
        blocks=one.blocks,
        cluster=cluster.flat,
        dtype=getattr(torch, tensor.dtype),
        handling=sparsity.handling,
    )
    if count > 1 and not one.is_rows:
        is_selected = sparsity.compressor is not None
        at = replace(
            at,
            numel=cluster.share(tensor.numel),
            units=one.units.on_hosts(count, is_selected=is_selected),
            blocks=one.blocks.on_hosts(count, is_selected=is_selected),
            cluster=cluster.shares,
            within_s=cluster.within_line.seconds(tensor.size_bytes),
        )
    return at, fastest_scheme(at, schemes(of_rows=True) if one.is_rows else None)


@dataclass(frozen=True)
class SparsePart:
    """Tensors that take a sparse scheme, a message each, and the others' profile."""

    profile: Profile
    messages: tuple[PlannedMessage, ...]
    exchanges: dict[str, ExchangeSetting]
    rest: Profile
    """The profile of the other tensors; layers keep their times."""

    @classmethod
    def of(
        cls, profile: Profile, cluster: Cluster, *, only_rows: bool = False
    ) -> SparsePart:
        """The part for which a sparse scheme is fastest, or alone carries its rows."""
        sparsity = profile.sparsity
        if sparsity is None:
            return cls(profile, (), {}, profile)
        tensors = profile.tensors
        exchanges = {}
        messages = []
        for one in sparsity.tensors:
            tensor = tensors[one.name]
            at, choice = scheme_of(one, tensor, sparsity, cluster)
            if choice.scheme == DENSE or (only_rows and not one.is_rows):
                continue
            key = f"{choice.scheme}: {one.name}"
            exchanges[key] = _exchange(sparsity, one.is_rows, at.units, choice.scheme)
            chunk = Chunk(tensor=one.name, start=0, stop=tensor.numel)
            messages.append(PlannedMessage(chunks=(chunk,), exchange=key))
        names = {message.chunks[0].tensor for message in messages}
        return cls(profile, tuple(messages), exchanges, _without(profile, names))

    def beside(self, plan: Plan) -> Plan:
        """A plan of the rest with these messages among its own.

        Each stands before the first one that is ready no sooner than it is.
        """
        layer_of = self.profile.layer_of

        def first_layer(message: PlannedMessage) -> int:
            return min(layer_of[chunk.tensor] for chunk in message.chunks)

        # The lower a layer, the later its backward ends.
        every = list(plan.messages)
        for own in sorted(self.messages, key=first_layer):
            later = (
                n
                for n, other in enumerate(every)
                if first_layer(other) <= first_layer(own)
            )
            every.insert(next(later, len(every)), own)
        exchanges = {**plan.exchanges, **self.exchanges}
        return plan.model_copy(
            update={"messages": tuple(every), "exchanges": exchanges}
        )


def sparse_parts(profile: Profile, cluster: Cluster) -> list[SparsePart]:
    """The parts whose plans ``auto`` compares: of rows alone, and of all sparse ones.

    The second is there if it is another, and if nothing is selected.
    """
    rows = SparsePart.of(profile, cluster, only_rows=True)
    if profile.sparsity is None or profile.sparsity.compressor is not None:
        return [rows]
    every = SparsePart.of(profile, cluster)
    if len(every.messages) > len(rows.messages):
        return [rows, every]
    return [rows]


def _exchange(
    sparsity: SparsityProfile, is_rows: bool, units: UnitSparsity, scheme: str
) -> ExchangeSetting:
    if sparsity.compressor is None or is_rows:
        settings: dict[str, Setting] = {
            "width": units.width,
            "expected_density": float(f"{units.density:.3g}"),
        }
        return ExchangeSetting(
            compressor="nonzero", settings=settings, collective=scheme
        )
    codec: Compressor = algorithm_by_name(sparsity.compressor, sparsity.settings)
    return ExchangeSetting(
        compressor=sparsity.compressor,
        settings=sparsity.settings,
        collective=scheme,
        error_feedback=codec.traits.error_feedback,
    )


def _without(profile: Profile, names: set[str]) -> Profile:
    layers = tuple(
        layer.model_copy(
            update={"tensors": tuple(t for t in layer.tensors if t.name not in names)}
        )
        for layer in profile.layers
    )
    return profile.model_copy(update={"layers": layers, "sparsity": None})
