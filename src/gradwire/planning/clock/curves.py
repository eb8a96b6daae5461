"""Curves: costs of an exchange's messages, between sizes of which one rank was looked at.

They serve planners that compare hundreds of plans of a kind. The simulator plays each size on all
ranks, which among many takes seconds. Here rank 0 alone is asked for its verbs, at powers of four
elements, as if no other rank kept it waiting, and sizes between two of these cost in proportion.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from ...contract import Exchange
from ...contract.spec import TensorSpec, squarest
from .alike import alone_on
from .supersteps import Joint, Price, Superstep, Tariff, Work, supersteps_of_rank


class MessageParts(NamedTuple):
    """Seconds of one message: of its computations, and of the wire."""

    before_s: float
    """Seconds of computations before the first transfer."""
    beside_s: float
    """Seconds of computations beside transfers."""
    latency_s: float
    work_s: float
    """The seconds of a whole link."""
    after_s: float
    """Seconds of computations between transfers and behind them."""
    sent_bytes: float = 0.0
    num_verbs: float = 0.0
    """The supersteps in which it is on the wire."""

    @property
    def computing_s(self) -> float:
        """Seconds of all its computations."""
        return self.before_s + self.beside_s + self.after_s


@lru_cache(maxsize=4096)
def parts_between(
    exchange: Exchange, numel: int, dtype: torch.dtype, tariff: Tariff
) -> MessageParts:
    """The seconds of a message of ``numel`` elements, one at least."""
    low = 1
    while low * 4 <= numel:
        low *= 4
    below = _parts_at(exchange, low, dtype, tariff)
    if low == numel:
        return below
    share = (numel - low) / (3 * low)
    above = _parts_at(exchange, 4 * low, dtype, tariff)
    return MessageParts(
        *(one + share * (other - one) for one, other in zip(below, above, strict=True))
    )


@lru_cache(maxsize=4096)
def _parts_at(exchange: Exchange, numel: int, dtype: torch.dtype, tariff: Tariff) -> MessageParts:
    if tariff.num_ranks == 1:
        return MessageParts(0.0, 0.0, 0.0, 0.0, 0.0)
    shapes = squarest(numel) if exchange.keeps_whole else ()
    before_s = beside_s = latency_s = work_s = after_s = 0.0
    all_bytes = num_verbs = 0
    for works, wire, sent_bytes in supersteps_of_rank(
        exchange, TensorSpec("", numel, dtype, shapes), tariff
    ):
        seconds = sum(work.seconds for work in works)
        if wire:
            latency, work = alone_on(wire)
            latency_s, work_s = latency_s + latency, work_s + work
            all_bytes, num_verbs = all_bytes + sent_bytes, num_verbs + 1
            beside_s += seconds
        elif num_verbs:
            after_s += seconds
        else:
            before_s += seconds
    return MessageParts(before_s, beside_s, latency_s, work_s, after_s, all_bytes, num_verbs)


def supersteps_of_parts(parts: MessageParts) -> tuple[Superstep, ...]:
    """Three supersteps of these seconds: before the wire, on it, and behind it."""
    joint = Joint("estimate", (), 0, Price(parts.latency_s, parts.work_s))
    return (
        Superstep((Work("encode", parts.before_s),), (), 0),
        Superstep((Work("beside", parts.beside_s),), (joint,), 0),
        Superstep((Work("decode", parts.after_s),), (), 0),
    )
