"""The schemes that SSFusion is compared with, as data: a name, and how its plan is
made.

A planner that is new in ``planning/planner/`` is a line of ``CONTENDERS``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gradwire.contract.registry import load
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.plan import DENSE, ExchangeSetting, Plan, PlannedMessage
from gradwire.planning.data.profile import Profile
from gradwire_lab.planning.sparse_fusion import Arrival, arrivals, chunks_in

from .printed import BASELINES, CUPCAKE, ESPRESSO, HIPRESS, OKTOPK, OMGS, SPARDL
from .setting import DENSITY, SPARSIFIER


@dataclass(frozen=True)
class Choice:
    """The settings that all schemes of one comparison have in common."""

    sparsifier: str = SPARSIFIER
    density: float = DENSITY
    bound: str = "compensated"
    """The bound of SSFusion's exclusions: "none" is equation 2 as printed."""


COMMON = Choice()
"""DGC at a density of 0.01, as in most experiments."""
Make = Callable[[Profile, Cluster, Choice], Plan]


@dataclass(frozen=True)
class Contender:
    """A scheme, and how its plan is made."""

    name: str
    plan: Make
    on_gpu: bool = False
    """Whether it plans with the GPU's seconds of selections for all, and not the
    CPU's.
    """


def by_planner(name: str) -> Make:
    """The plans of a planner that takes a compressor and a density."""

    def plan(profile: Profile, cluster: Cluster, choice: Choice) -> Plan:
        made: Plan = load("planner", name)(
            profile, cluster, compressor=choice.sparsifier, density=choice.density
        )
        return made

    return plan


def in_backward(make: Make) -> Make:
    """The plans of ``make`` with every encode in the backward pass, which waits for
    it.
    """

    def plan(profile: Profile, cluster: Cluster, choice: Choice) -> Plan:
        made = make(profile, cluster, choice)
        messages = tuple(
            one.model_copy(
                update={"inline": tuple(chunk.tensor for chunk in one.chunks)}
            )
            if one.exchange != DENSE
            else one
            for one in made.messages
        )
        return made.model_copy(update={"messages": messages})

    return plan


def by_variant(variant: str) -> Make:
    """The plans of a variant of SSFusion: "naive", "o" or "oi"."""

    def plan(profile: Profile, cluster: Cluster, choice: Choice) -> Plan:
        made: Plan = load("planner", "ssfusion")(
            profile,
            cluster,
            variant=variant,
            sparsifier=choice.sparsifier,
            density=choice.density,
            bound=choice.bound,
        )
        return made

    return plan


def as_one(compressor: str) -> Make:
    """The plans that send the whole model in one message, through an exchange of its
    own.

    An index has 31 bits, so a model of more elements takes as few messages as hold
    them.
    """

    def plan(profile: Profile, cluster: Cluster, choice: Choice) -> Plan:
        exchange = ExchangeSetting(
            compressor=compressor,
            settings={"density": choice.density},
            error_feedback=True,
        )
        return Plan(
            planner=compressor,
            model=profile.model,
            messages=tuple(
                PlannedMessage(chunks=chunks_in(group), exchange=compressor)
                for group in addressable(arrivals(profile))
            ),
            exchanges={compressor: exchange},
        )

    return plan


def addressable(every: Sequence[Arrival], most: int = 2**31 - 1) -> list[list[Arrival]]:
    """The tensors in order, as few groups as hold at most so many elements each."""
    groups: list[list[Arrival]] = [[]]
    numel = 0
    for one in every:
        numel += one.tensor.numel
        if groups[-1] and numel > most:
            groups.append([])
            numel = one.tensor.numel
        groups[-1].append(one)
    return groups


def dense(planner: str) -> Make:
    """The plans of a planner that sends whole gradients, whatever is to be selected."""

    def plan(profile: Profile, cluster: Cluster, choice: Choice) -> Plan:
        made: Plan = load("planner", planner)(profile, cluster)
        return made

    return plan


VARIANTS = {"naive": "SSFusion(naive)", "o": "SSFusion-O", "oi": "SSFusion-(O+I)"}
SSFUSION = VARIANTS["oi"]
"""SSFusion where the paper does not say which."""
UNCOMPRESSED = ("dense, DDP", "dense, MG-WFBP")
CONTENDERS = (
    Contender(OKTOPK, as_one("oktopk")),
    Contender(SPARDL, as_one("spardl")),
    Contender(HIPRESS, in_backward(by_planner("secopa")), on_gpu=True),
    Contender(ESPRESSO, by_planner("espresso")),
    Contender(OMGS, by_planner("omgs")),
    Contender(CUPCAKE, by_planner("cupcake")),
    *(Contender(name, by_variant(variant)) for variant, name in VARIANTS.items()),
    Contender(UNCOMPRESSED[0], dense("ddp")),
    Contender(UNCOMPRESSED[1], dense("mgwfbp")),
)
RIVALS = tuple(one.name for one in CONTENDERS if one.name in BASELINES)
"""The paper's baselines that gradwire has."""
LACKING = tuple(name for name in BASELINES if name not in RIVALS)
"""The paper's baselines that gradwire has not."""
