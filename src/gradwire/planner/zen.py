"""zen: sparse gradients take the scheme that measured sparsity makes fastest, each by itself.

Source: ZEN (OSDI 2025), section 3: the sparsity of the first iterations decides between equations
    1 and 2.
Differences from the paper: latency, host work and formats count as well, and all schemes are
    compared, the dense all-reduce among them (``cost/sparse_schemes.py``). Gradients that are
    dense, or that dense is fastest for, are merged as MG-WFBP does.
Settings: none; the profile's ``sparsity`` says what is sparse, and by which sparsifier if by one.
    Without it the plan is MG-WFBP's. Gradients that come as rows take a scheme that carries these,
    without loss, whatever dense would take.
Order: backward; a sparse tensor is a message of its own. Nothing is cut; the next forward starts
    when all communication has ended.
"""

from __future__ import annotations

from ..contract import Compressor
from ..data.cluster import Cluster
from ..data.plan import DENSE, Chunk, ExchangeSetting, Plan, PlannedMessage, Setting
from ..data.profile import Profile
from ..data.sparsity import SparsityProfile, UnitSparsity
from ..exchange import algorithm_by_name
from ..planning.sparse import schemes_of
from .mgwfbp import mgwfbp


def zen(profile: Profile, cluster: Cluster) -> Plan:
    """The plan of the fastest scheme for each tensor, by the profile's sparsity."""
    chosen = {
        name: (at, found.scheme)
        for name, (at, found) in schemes_of(profile, cluster).items()
        if found.scheme != DENSE
    }
    layer_of = {t.name: i for i, layer in enumerate(profile.layers) for t in layer.tensors}
    exchanges, own = {}, []
    for name, (at, scheme) in chosen.items():
        assert profile.sparsity is not None
        exchanges[f"{scheme}: {name}"] = _exchange(profile.sparsity, name, at.units, scheme)
        chunk = Chunk(tensor=name, start=0, stop=at.numel)
        own.append(PlannedMessage(chunks=(chunk,), exchange=f"{scheme}: {name}"))
    rest = mgwfbp(_without(profile, set(chosen)), cluster).messages
    # A message is ready with the layer that ends its backward last, the lowest of its own.
    ordered = sorted((*own, *rest), key=lambda m: -min(layer_of[c.tensor] for c in m.chunks))
    return Plan(planner="zen", model=profile.model, messages=tuple(ordered), exchanges=exchanges)


def _exchange(
    sparsity: SparsityProfile, name: str, units: UnitSparsity, scheme: str
) -> ExchangeSetting:
    one = sparsity.of(name)
    if sparsity.compressor is None or (one is not None and one.is_rows):
        settings: dict[str, Setting] = {
            "width": units.width,
            "expected_density": float(f"{units.density:.3g}"),
        }
        return ExchangeSetting(compressor="nonzero", settings=settings, collective=scheme)
    codec: Compressor = algorithm_by_name(sparsity.compressor, sparsity.settings)
    return ExchangeSetting(
        compressor=sparsity.compressor,
        settings=sparsity.settings,
        collective=scheme,
        error_feedback=codec.traits.error_feedback,
    )


def _without(profile: Profile, names: set[str]) -> Profile:
    """The profile of the other tensors alone; layers keep their times."""
    layers = tuple(
        layer.model_copy(update={"tensors": tuple(t for t in layer.tensors if t.name not in names)})
        for layer in profile.layers
    )
    return profile.model_copy(update={"layers": layers, "sparsity": None})


EXAMPLES = (zen,)
