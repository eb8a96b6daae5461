"""Predicted seconds of the schemes that ZEN's paper compares with, by formula.

gradwire's planner ``zen``, and what chooses anew in each step, find them where this
package is installed (``gradwire.exchange.sparse_schemes``).

Source: ZEN (OSDI 2025), section 2.3, equation 2 (SparCML), appendix B.1 for the
    parameter server; OmniReduce by its row of table 3.
Differences from the paper: those of gradwire's own formulas. For schemes that cut by
    ranges, the imbalances measured of push and pull count. Any number of ranks: SparCML
    folds those beyond a power of two, which is a round before and one after.
"""

from gradwire.collective.steps.sizes import SIZE_BYTES
from gradwire.exchange.sparse_schemes import Prediction, SchemeInputs, push_pull_cost
from gradwire.planning.data.sparsity import UnitSparsity, between

from ..collective.omnireduce import omnireduce
from ..collective.sparse_ps import sparse_ps
from ..collective.sparse_ps_broadcast import broadcast_bytes, sparse_ps_broadcast

_OF_RANGES = "(ranges have unlike many, and every entry an index) "


def skew(units: UnitSparsity, num_parts: int) -> float:
    """The skewness ratio of any number of even partitions, as ``gamma`` has it."""
    if not units.skewness:
        return 1.0
    measured = [(entry.parts, entry.ratio) for entry in units.skewness]
    ratio = between([(1, 1.0), *measured], num_parts)
    return max(1.0, min(ratio, float(num_parts)))


def range_imbalance(units: UnitSparsity, num_ranks: int) -> tuple[float, float]:
    """Imbalance of push and pull where ranks serve even partitions (definition 8).

    Beyond the ranks measured it grows as the skewness ratio does; without any it is
    that.
    """
    skewed = skew(units, num_ranks)
    if not units.imbalances:
        return skewed, skewed
    measured = min(num_ranks, units.imbalances[-1].ranks)
    growth = skewed / skew(units, measured)
    most = float(num_ranks)

    def among_ranks(ratios: list[tuple[int, float]]) -> float:
        ratio = growth * between([(1, 1.0), *ratios], measured)
        return max(1.0, min(ratio, most))

    push = among_ranks([(one.ranks, one.push) for one in units.imbalances])
    pull = among_ranks([(one.ranks, one.pull) for one in units.imbalances])
    return push, pull


def sparcml_cost(at: SchemeInputs) -> Prediction:
    """Equation 2: in round i two groups of 2^(i-1) ranks swap their sums, dense where
    smaller.
    """
    units = at.units
    rounds = at.world.bit_length() - 1
    power = 2**rounds
    group = [at.merged(units, 2**i * at.world / power) for i in range(rounds)]
    if power < at.world:
        group = [at.own(units), *group, at.merged(units, at.world)]
    verbs: list[tuple[str, float]] = []
    for count in group:
        size = min(at.coo_bytes(count, units), at.dense_bytes)
        verbs.append(("send", SIZE_BYTES))
        verbs.append(("send", size))
    num_handled = at.own(units) + 2 * sum(group)
    host_s = at.host_s(num_handled, units)
    why = "(what ranks share comes in every round) "
    return Prediction("sparcml", *at.parts_s(*verbs), host_s, why)


def omnireduce_cost(at: SchemeInputs) -> Prediction:
    """Non-zero blocks to aggregators of even ranges, and the blocks of their sums
    back.
    """
    why = "(blocks carry zeros, and ranges have unlike many) "
    imbalance = range_imbalance(at.blocks, at.world)
    return push_pull_cost(omnireduce(), at, at.blocks, imbalance, why)


def sparse_ps_cost(at: SchemeInputs) -> Prediction:
    """Coordinates to the servers of even ranges, and those of their sums back: appendix
    B.1.
    """
    imbalance = range_imbalance(at.units, at.world)
    return push_pull_cost(sparse_ps(), at, at.units, imbalance, _OF_RANGES)


def sparse_ps_broadcast_cost(at: SchemeInputs) -> Prediction:
    """Coordinates to the servers of even ranges, and their sums broadcast at once:
    appendix B.1.
    """
    imbalance = range_imbalance(at.units, at.world)
    return push_pull_cost(
        sparse_ps_broadcast(), at, at.units, imbalance, _OF_RANGES, _broadcast_s
    )


def _broadcast_s(at: SchemeInputs, fullest: int, usual: int) -> tuple[float, float]:
    """Broadcasts go at once: they wait out their latency together, and share the
    busiest link.
    """
    others = at.world - 1
    latency_s, _ = at.parts_s(("broadcast", fullest))
    sent = broadcast_bytes([fullest] + [usual] * others, 0)
    busiest = max(sent, fullest + (others - 1) * usual)
    _, wire_s = at.parts_s(("all_gather", busiest / others))
    return latency_s, wire_s
