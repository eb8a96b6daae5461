"""Kept elements: a filtered gradient that travels as a list of places and values.

    top(K, share)     of what a filter kept, the largest     scatter(I, K)   the gradient again,
    indices(K)        the places of what was kept                            0 elsewhere

A payload's kept fields have one entry for each kept element, by rising place. They lie behind its
other fields, so that the payload's size alone tells how many there are.
"""

from __future__ import annotations

from . import ir
from .ir import FLOAT32, INT32, Extent, Node, Op
from .rewrite import GRADIENT
from .symbols import Scalar, Symbol, Vector, cast, refuse, working


class Scattered(Symbol):
    """A whole gradient: values at the places that ``indices`` lists, zeros elsewhere."""

    __slots__ = ("indices", "node")

    def __init__(self, indices: Node, node: Node) -> None:
        self.indices = indices
        self.node = node


def top(kept: Vector, share: float) -> Vector:
    """The largest by magnitude of what a filter kept: at most ``share`` of the whole gradient.

    That is max(1, round(share * N)) of N elements: all that were kept if they are no more than
    that. Ties go to the lowest place; NaN ranks above infinity, and that above all numbers.
    """
    if not isinstance(kept, Vector) or kept.keep is None or kept.top is not None:
        refuse("top of something that no filter kept", "filter first, then cut: top(kept, share)")
    if kept.node is not ir.load_buffer(GRADIENT):
        refuse("top of a mapped vector", "cut the gradient's own values, map what is left")
    if not isinstance(share, float | int) or not 0 < share <= 1:
        refuse(f"top of a share of {share!r}", "give a number in (0, 1]: 0.01 for 1 %")
    return Vector(kept.node, kept.keep, share)


def indices(kept: Vector) -> Vector:
    """The place in the gradient of each kept element, an int32."""
    if not isinstance(kept, Vector) or kept.keep is None:
        refuse("indices of what no filter kept", "every element is there: leave its place out")
    return Vector(ir.node(Op.PLACE), kept.keep, kept.top)


def scatter(places: Vector, values: Vector) -> Scattered:
    """The decoded gradient: ``values`` at ``places``, two kept fields or a map of one; else 0."""
    if not (isinstance(places, Vector) and places.node.extent is Extent.KEPT):
        refuse("scatter to something that is no field of kept elements", "send indices(kept)")
    if places.node.op is not Op.LOAD or places.node.dtype is not INT32:
        refuse("scatter to computed places", "scatter to the field that indices(kept) filled")
    if not isinstance(values, Vector):
        refuse("scatter of something that is not a vector", "scatter(indices, values)")
    number = cast(working(Scalar(values.node)), FLOAT32)
    if any(n.extent in (Extent.BLOCK, Extent.ELEMENT) for n in ir.walk([number])):
        remedy = "send one value a kept element, or whole(...) of the blocks' values"
        refuse("scatter of values that depend on a block or on every element", remedy)
    return Scattered(places.node, number)
