"""Shards: the parts of layers that a tensor-parallel group shares out."""

from typing import NamedTuple


class Shards(NamedTuple):
    """How a tensor-parallel group cuts a message's layers.

    This rank holds one part.
    """

    place: int
    """This rank's part, counted in the group's order."""
    numels: tuple[int, ...]
    """How many elements of the message each part has."""
