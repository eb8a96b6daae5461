"""The schedule: in how many passes over a block a kernel runs, and what each pass does.

A reduction is known after the pass that makes it; what depends on it waits for a later one. The
elements themselves are computed anew in each pass that needs them: the block lies in the cache, and
a few operations cost less than a second array would. Every store happens in the first pass that can
do it, except that what a kernel also reads is overwritten in the last pass that reads it.
"""

from __future__ import annotations

from dataclasses import dataclass

from .ir import Buffer, Extent, Kernel, Node, Op, walk


@dataclass(frozen=True)
class Pass:
    """One loop over the elements of a block, and what is computed once a block before it."""

    before: tuple[Node, ...]
    """Values and stores a block that earlier passes' reductions allow, operands first."""
    reductions: tuple[Node, ...]
    stores: tuple[Node, ...]

    @property
    def elements(self) -> tuple[Node, ...]:
        """The nodes that the loop computes for each element, operands first."""
        roots = (*self.reductions, *self.stores)
        return tuple(walk([s for root in roots for s in root.sources], Extent.ELEMENT))

    @property
    def loops(self) -> bool:
        return bool(self.reductions or self.stores)


def passes(kernel: Kernel) -> tuple[Pass, ...]:
    """The passes in order; the last may have no loop, only values a block."""
    levels = _levels(kernel)
    order = list(walk(kernel.stores))
    written = {found: _pass_of_store(found, order, levels) for found in kernel.stores}
    made: list[Pass] = []
    for number in range(max([*levels.values(), *written.values()], default=0) + 1):
        known = [n for n in order if n.extent < Extent.ELEMENT and n.op is not Op.REDUCE]
        made.append(
            Pass(
                before=tuple(n for n in known if written.get(n, levels[n]) == number),
                reductions=tuple(n for n in order if n.op is Op.REDUCE and levels[n] == number + 1),
                stores=tuple(
                    n for n in kernel.stores if n.extent >= Extent.ELEMENT and written[n] == number
                ),
            )
        )
    return tuple(made)


def _levels(kernel: Kernel) -> dict[Node, int]:
    """The first pass in which each node can be computed."""
    levels: dict[Node, int] = {}
    for found in walk(kernel.stores):
        ready = max((levels[source] for source in found.sources), default=0)
        levels[found] = ready + (found.op is Op.REDUCE)
    # Kept elements have one place in all their buffers, so one pass stores them.
    kept = [found for found in kernel.stores if found.extent is Extent.KEPT]
    levels.update(dict.fromkeys(kept, max((levels[found] for found in kept), default=0)))
    return levels


def _pass_of_store(target: Node, order: list[Node], levels: dict[Node, int]) -> int:
    loops = [(levels[n] - 1, n) for n in order if n.op is Op.REDUCE]
    loops += [(levels[n], n) for n in order if n.op is Op.STORE and n.extent >= Extent.ELEMENT]
    reading = [number for number, n in loops if _reads(n, target.arg)]
    return max([levels[target], *reading])


def _reads(found: Node, buffer: Buffer) -> bool:
    inner = walk(found.sources, Extent.ELEMENT)
    return any(n.op is Op.LOAD and n.arg == buffer for n in inner)
