"""Measurements of ``auto`` beside the steps themselves, and how ranks come to share them.

All ranks wait for the slowest of each step, so layers count as slower by the median of these. Links
count as slower by what dense steps take besides computation: messages in training take longer than
messages that are timed alone. Where ranks share cores, what messages take of a layer's seconds is
left out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache, partial
from statistics import median
from typing import Any, NamedTuple

import torch

from ...contract.travel import travel
from ...contract.verbs import Broadcast, Steps
from ...errors import InvalidSetting
from ...planning.data.cluster import PRIMITIVES, Cluster, CodecFit, VerbName
from ...planning.data.fit import LineFit
from ...planning.data.profile import Profile
from ...planning.measure.codecs import measure_codecs
from ...planning.measure.links import all_reduce_s, measure_cluster, measure_hosts, shared_cores
from ...planning.measure.living import LayerWatch
from ..step.engine import Engine, figures_of_all

VERBS: tuple[VerbName, ...] = ("all_reduce", "all_gather", "all_to_all")
MESSAGE_S = 0.04
"""Seconds that the largest message of a measurement takes, about."""
LEAST_BYTES, MOST_BYTES = 2**16, 2**22
BUDGET_S = 0.03
"""Seconds that one size of a verb, or of a compressor, may take, about."""
ROUNDS = 3
CODEC_SIZES = (2**12, 2**16, 2**20)
"""Few, as each is measured many times: from a bias to what no cache holds."""


def told_by(engine: Engine, src: int, own: Any) -> Any:
    """A value with a JSON form that rank ``src`` tells all others."""

    def text() -> Steps[Any]:
        data = torch.tensor(list(json.dumps(own).encode()), dtype=torch.uint8)
        size = torch.tensor([data.numel()])
        yield Broadcast(src, size)
        data = data if engine.rank == src else torch.zeros(int(size), dtype=torch.uint8)
        yield Broadcast(src, data)
        return json.loads(bytes(data.tolist()))

    end = engine.launch(0, "news", text(), is_news=True)
    engine.wait([end])
    return end.result


class Links(NamedTuple):
    """The cluster as it was measured, and the seconds that a message of some size took then."""

    cluster: Cluster
    size_bytes: int
    taken_s: float


def links(engine: Engine) -> Links:
    """The cluster by messages of up to 4 MiB, or of what the link carries in good time.

    Between training steps, so it takes a second or a few, whatever the link's rate. The largest
    message is found by sending: what short ones take says nothing of a link that passes some bytes
    at once after a pause.
    """
    all_reduce_s(engine, LEAST_BYTES, 1)
    largest, taken_s = LEAST_BYTES, all_reduce_s(engine, LEAST_BYTES)
    while taken_s < MESSAGE_S and largest < MOST_BYTES:
        largest *= 2
        taken_s = all_reduce_s(engine, largest)
    sizes = [largest >> shift for shift in (8, 5, 2, 1, 0) if largest >> shift >= 2**12]
    if engine.ranks_per_host > 1:
        found = measure_hosts(engine, sizes_bytes=sizes, budget_s=BUDGET_S, rounds=ROUNDS)
    else:
        found = _cluster(engine, sizes, taken_s)
    return Links(found, largest // 2, all_reduce_s(engine, largest // 2))


def _cluster(engine: Engine, sizes: Sequence[int], taken_s: float) -> Cluster:
    """Hosts of one rank each; the largest message took ``taken_s``."""
    measure = partial(
        measure_cluster, engine, sizes_bytes=sizes, verbs=VERBS, budget_s=BUDGET_S, rounds=ROUNDS
    )
    copies = travel("all_reduce", engine.world).copies
    try:
        found = measure()
    except InvalidSetting:  # more bytes took no longer, on all ranks' clocks; once more, then
        return measure(rate_bytes_per_s=copies * sizes[-1] / taken_s)
    # Short messages, which a link may take at once, make the fitted line too steep or too flat.
    tail_s = found.collectives["all_reduce"].tail_s
    return found.model_copy(update={"rate_bytes_per_s": copies / tail_s}) if tail_s else found


def slowness(engine: Engine, known: Links) -> float:
    """The seconds of a message over those that it took when the links were measured."""
    return all_reduce_s(engine, known.size_bytes) / known.taken_s


class SharedLayers(NamedTuple):
    """The layers' seconds that are planned with; no profile where no rank saw a whole step."""

    profile: Profile | None
    other_s: float
    """Seconds of a step beside layers and the exchange."""
    dense_s: float
    """Seconds of a step on the slowest rank."""


def shared_layers(engine: Engine, layers: LayerWatch, step_s: float) -> SharedLayers:
    """The layers of the rank that computes longest, as the others wait for it.

    In another step another rank may be the slowest. So the layers count as slower, by what all
    ranks waited for in each step. ``step_s`` are the typical seconds of this rank's steps.
    """
    own = layers.profile() if layers.num_steps else None
    own_s = -1.0 if own is None else own.forward_s + own.backward_s
    figures = [own_s, step_s, *computing_s(engine, layers.seconds)]
    rows = figures_of_all(engine, figures)
    dense_s = max(row[1] for row in rows)
    slowest = max(range(engine.world), key=lambda rank: rows[rank][0])
    if rows[slowest][0] < 0:
        return SharedLayers(None, 0.0, dense_s)
    mine = None if own is None else {"profile": own.to_json(), "other_s": layers.other_s}
    told = told_by(engine, slowest, mine)
    profile, other_s = Profile.parse(told["profile"], "layers"), told["other_s"]
    whole_s = other_s + profile.forward_s + profile.backward_s
    longest_s = [max(step) for step in zip(*(row[2:] for row in rows), strict=True)]
    factor = median(filter(None, longest_s)) / whole_s if whole_s else 1.0
    return SharedLayers(profile.slower(factor), factor * other_s, dense_s)


def computing_s(engine: Engine, steps_s: Sequence[tuple[float, float]]) -> list[float]:
    """Seconds that this rank computed in each step, as if no message had taken them from it.

    ``steps_s`` are those of each step, and how many of them a core worked for it. Where ranks share
    cores, the rest of these passed while others had them, and messages did, which cost extra.
    """
    cores = shared_cores(partial(figures_of_all, engine))
    if cores is None:
        return [step_s for step_s, _ in steps_s]
    stretch = torch.get_num_threads() / cores
    return [min(step_s, stretch * core_s) for step_s, core_s in steps_s]


def codecs(engine: Engine, compressors: tuple[str, ...], world: int) -> dict[str, CodecFit]:
    """The costs of compressors, each figure the median of all ranks."""
    if not compressors:
        return {}
    own = _own_codecs(compressors, world, torch.get_num_threads())
    lines = [getattr(own[name], key) for name in compressors for key in PRIMITIVES]
    figures = [figure for line in lines for figure in (line.alpha_s, line.per_unit_s)]
    return median_codecs(compressors, figures_of_all(engine, figures))


def median_codecs(
    compressors: Sequence[str], rows: Sequence[Sequence[float]]
) -> dict[str, CodecFit]:
    """The costs of compressors by each rank's figures: the two of a line, line after line."""
    figures = iter([median(those) for those in zip(*rows, strict=True)])
    return {
        name: CodecFit(
            **{key: LineFit(alpha_s=next(figures), per_unit_s=next(figures)) for key in PRIMITIVES}
        )
        for name in compressors
    }


@cache
def _own_codecs(compressors: tuple[str, ...], world: int, threads: int) -> dict[str, CodecFit]:
    """The costs of compressors on this machine, measured once by each process."""
    return measure_codecs(compressors, world=world, sizes=CODEC_SIZES, budget_s=BUDGET_S)
