"""Figures of a message in one step, which an exchange leaves in its member."""

from typing import NamedTuple


class Selection(NamedTuple):
    """How many elements of one message a step asked for, took and averaged."""

    asked: float
    """The density asked for, times the number of elements.

    NaN where a codec has no density.
    """
    selected: int
    """The number of elements that this rank took."""
    arrived: int
    """The number of elements in the mean: in the union of what all ranks took."""


class Imbalance(NamedTuple):
    """How much more than its equal share the busiest part had: 1 is balanced, W is all
    on one rank.

    Source: ZEN (OSDI 2025), definition 8. The same on every rank.
    """

    push: float
    """max over ranks i and parts j of W * |what i pushed to j| / |what i pushed|."""
    pull: float
    """max over parts j of W * |what j holds of all ranks| / |what all hold|."""
