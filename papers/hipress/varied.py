"""Figure 15 of HiPress: training by the links' rate, and by how much is compressed,
simulated.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.plan import Plan
from gradwire.planning.data.profile import Profile
from gradwire_lab.planner.secopa import secopa

from ..frame import Ask, Claim, Findings, Row, effect
from ..rows import number
from .printed import DGC_LOSS, PS_ONEBIT, RING, TERNGRAD_LOSS
from .setting import EC2_AS_TABLE_1, EC2_GBIT, HOSTS, LOCAL_AS_TABLE_1, LOCAL_GBIT, Site
from .systems import SYSTEMS, System, row_of
from .throughput import spent, where

NEAR = 0.05
"""The most that may be lost where training counts as about as fast, and how far a loss
of ours may lie from the paper's, and agree, where a quarter of it is more.
"""
RATES = ((EC2_AS_TABLE_1, EC2_GBIT, 25), (LOCAL_AS_TABLE_1, LOCAL_GBIT, 10))
"""Sites, and the Gbit/s of their faster and slower links."""
FEWEST_BITS = 2
LEAST_DENSITY = 0.001
BITS = "TernGrad bits"
ELEMENTS = "DGC density"
"""The labels of the rows in which figure 15b varies something."""


def figure15(ask: Ask, num_hosts: int = HOSTS) -> Findings:
    """Bert-base on faster and slower links; VGG19 with more bits and with more
    elements.
    """
    by_rate = _by_rate(ask, num_hosts)
    by_size = _by_size(ask, num_hosts)
    claims = [_same_speed(by_rate, site, slow) for site, _, slow in RATES]
    for label, stated in ((BITS, TERNGRAD_LOSS), (ELEMENTS, DGC_LOSS)):
        least = FEWEST_BITS if stated is TERNGRAD_LOSS else LEAST_DENSITY
        claims += [
            _loss(by_size, label, least, many, loss) for many, loss in stated.items()
        ]
    note = (
        "TernGrad of other widths is figure 5's quantiser (uniform); which gradients "
        "are compressed and how they are cut is chosen as for 4 bits. Of the links' "
        "rate the share arrives that table 1 implies"
    )
    return Findings((*by_rate, *by_size), tuple(claims), (note,))


def slowed(site: Site, gbit: float, fast_gbit: float) -> Site:
    """The site with links of another rate, of which the same share arrives."""
    share = gbit / fast_gbit
    return replace(
        site,
        name=f"links of {gbit:g} Gbit/s",
        rate_gbit=share * site.rate_gbit,
        push_pull_gbit=share * site.push_pull_gbit,
    )


def _by_rate(ask: Ask, num_hosts: int) -> list[Row]:
    rows = []
    for done, (site, fast, slow) in ask.each(RATES):
        ask.report(done / 2, f"bert_base on links of {fast} and {slow} Gbit/s")
        for gbit in (fast, slow):
            at = slowed(site, gbit, fast)
            rows += [
                row_of(at, "bert_base", num_hosts, SYSTEMS[one])
                for one in (RING, PS_ONEBIT)
            ]
    return rows


def _same_speed(rows: list[Row], site: Site, slow: int) -> Claim:
    fast = next(fast for one, fast, _ in RATES if one is site)
    quick, late = (
        where(rows, name=PS_ONEBIT, reading=f"links of {gbit:g} Gbit/s")[0]
        for gbit in (fast, slow)
    )
    loss = 1 - number(quick, "iteration_s") / number(late, "iteration_s")
    agrees = loss <= NEAR
    return Claim(
        f"Bert-base trains about as fast on links of {slow} as of {fast} Gbit/s",
        "figure 15a",
        f"{100 * loss:.1f} % slower, where {100 * NEAR:g} % is about as fast",
        agrees,
        "" if agrees else spent(late),
    )


def _by_size(ask: Ask, num_hosts: int) -> list[Row]:
    systems = [
        *(
            ("TernGrad bits", bits, with_bits(bits))
            for bits in (FEWEST_BITS, *TERNGRAD_LOSS)
        ),
        *(
            ("DGC density", density, with_density(density))
            for density in (LEAST_DENSITY, *DGC_LOSS)
        ),
    ]
    rows = []
    for done, (label, value, system) in ask.each(systems):
        ask.report(0.5 + done / 2, f"vgg19, {label} {value:g}")
        density = {"density": float(value)} if label == ELEMENTS else {}
        row = row_of(LOCAL_AS_TABLE_1, "vgg19", num_hosts, system, **density)
        rows.append(row | {"varied": label, "value": value})
    return rows


def with_bits(bits: int) -> System:
    """HiPress with a quantiser of so many bits."""

    def plan(profile: Profile, cluster: Cluster) -> Plan:
        made = secopa(profile, cluster, compressor="uniform")
        exchanges = {
            name: one.model_copy(update={"settings": {"bitwidth": bits}})
            for name, one in made.exchanges.items()
        }
        return made.model_copy(update={"exchanges": exchanges})

    return System(f"HiPress-PS({bits} bits)", plan)


def with_density(density: float) -> System:
    """HiPress with DGC of this density."""
    make = partial(secopa, compressor="dgc", density=density)
    return System(f"HiPress-PS(DGC {100 * density:g} %)", make)


def _loss(
    rows: list[Row], label: str, least: float, many: float, stated: float
) -> Claim:
    own = [row for row in rows if row.get("varied") == label]
    first, then = (where(own, value=value)[0] for value in (least, many))
    loss = 1 - number(first, "iteration_s") / number(then, "iteration_s")
    says = f"{label} {many:g} trains VGG19 {100 * stated:.1f} % slower than {least:g}"
    return effect(
        says, "figure 15b", f"{100 * loss:.1f} %", loss, stated, spent(then), NEAR
    )
