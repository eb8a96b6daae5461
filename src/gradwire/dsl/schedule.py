"""The schedule: in how many passes over a block a kernel runs, and what each pass does.

A reduction is known after the pass that makes it; what depends on it waits for a later
one. The elements themselves are computed anew in each pass that needs them: the block
lies in the cache, and a few operations cost less than a second array would. Every store
happens in the first pass that can do it, except that what a kernel also reads is
overwritten in the last pass that reads it.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import ClassVar

from .ir import FLOAT32, Buffer, DType, Extent, Fold, Kernel, Node, Op, neutral, walk


@dataclass(frozen=True)
class Pass:
    """One loop over a block's elements, with values computed once a block before it."""

    before: tuple[Node, ...]
    """Values and stores a block, allowed by earlier reductions, operands first."""
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
    written = {
        target: _pass_of_store(target, order, levels) for target in kernel.stores
    }
    made = []
    last = max([*levels.values(), *written.values()], default=0)
    for number in range(last + 1):
        known = [
            n for n in order if n.extent < Extent.ELEMENT and n.op is not Op.REDUCE
        ]
        made.append(
            Pass(
                before=tuple(n for n in known if written.get(n, levels[n]) == number),
                reductions=tuple(
                    n for n in order if n.op is Op.REDUCE and levels[n] == number + 1
                ),
                stores=tuple(
                    n
                    for n in kernel.stores
                    if n.extent >= Extent.ELEMENT and written[n] == number
                ),
            )
        )
    return tuple(made)


def _levels(kernel: Kernel) -> dict[Node, int]:
    """The first pass in which each node can be computed."""
    levels: dict[Node, int] = {}
    for node in walk(kernel.stores):
        ready = max((levels[source] for source in node.sources), default=0)
        levels[node] = ready + (node.op is Op.REDUCE)
    # Kept elements have one place in all their buffers, so one pass stores them.
    kept = [target for target in kernel.stores if target.extent is Extent.KEPT]
    levels.update(
        dict.fromkeys(kept, max((levels[target] for target in kept), default=0))
    )
    return levels


def _pass_of_store(target: Node, order: list[Node], levels: dict[Node, int]) -> int:
    loops = [(levels[n] - 1, n) for n in order if n.op is Op.REDUCE]
    loops += [
        (levels[n], n) for n in order if n.op is Op.STORE and n.extent >= Extent.ELEMENT
    ]
    reading = [number for number, n in loops if _reads(n, target.arg)]
    return max([levels[target], *reading])


def _reads(node: Node, buffer: Buffer) -> bool:
    inner = walk(node.sources, Extent.ELEMENT)
    return any(n.op is Op.LOAD and n.arg == buffer for n in inner)


# ---- the text of a block, whatever the back end --------------------------------------

_LONGEST_INLINE = 48  # a longer expression gets a name


class Text(ABC):
    """The text within a block; remembers which names values have."""

    texts: ClassVar[Mapping[Op, str]]
    """The template of each operation of elements but casts and registered ones."""

    def __init__(self) -> None:
        self.names: dict[Node, str] = {}
        self.numbers = count(1)
        self.uses: Counter[Node] | None = None
        """How often each value is an operand.

        None where that counts within one pass.
        """

    @abstractmethod
    def literal(self, value: float, dtype: DType) -> str:
        """A constant of this type."""

    def applied(self, node: Node, operands: Sequence[str]) -> str:
        """An operation of operand texts, in parentheses unless it is a call."""
        template = self.texts[node.op]
        is_call = template.endswith(")") and not template.startswith("{")
        return template.format(*(operands if is_call else map(grouped, operands)))

    @abstractmethod
    def expression(self, node: Node) -> str:
        """A value, by the names of its operands."""

    @abstractmethod
    def named(self, node: Node, name: str, text: str) -> str:
        """The line that gives a value its name."""

    @abstractmethod
    def stored(self, target: Node) -> str:
        """The line of a store."""

    def statements(
        self, order: tuple[Node, ...], roots: set[Node], prefix: str
    ) -> list[str]:
        """A line for each value, except constants and elements used once."""
        uses = self.uses or Counter(source for node in order for source in node.sources)
        lines = []
        for node in order:
            if node.op is Op.STORE:
                lines.append(self.stored(node))
                continue
            text = self.expression(node)
            is_short = len(text) <= _LONGEST_INLINE
            is_used_once = uses[node] == 1 and node not in roots
            # Values of a block are named, as later passes use them too.
            is_of_element = node.extent is Extent.ELEMENT
            if node.op is Op.CONST or (is_of_element and is_used_once and is_short):
                self.names[node] = text
                continue
            name = self.names[node] = f"{prefix}{next(self.numbers)}"
            lines.append(self.named(node, name, text))
        return lines

    def name_reductions(self, pass_: Pass) -> None:
        """Gives the results of a pass their names."""
        for reduction in pass_.reductions:
            self.names[reduction] = f"{fold_name(reduction.arg)}{next(self.numbers)}"

    def lane(self, node: Node) -> str:
        """The name of a reduction's lanes."""
        return f"{self.names[node]}_lane"

    def fold(self, body: Node, a: str, b: str) -> str:
        """The body of a fold as one expression of two names."""
        if body.op is Op.ARG:
            return (a, b)[body.arg]
        if body.op is Op.CONST:
            return self.literal(body.arg, body.dtype)
        return self.applied(body, [self.fold(source, a, b) for source in body.sources])


def pointer(buffer: Buffer) -> str:
    """The buffer's name and an underscore: then it is no keyword or own name."""
    return f"{buffer.name}_"


def any_order(fold: Fold) -> bool:
    """Whether the lanes may be combined in any order: sums, least, most."""
    return neutral(fold.body) is not None


def sums_floats(fold: Fold) -> bool:
    """Whether the lanes are doubles."""
    return any_order(fold) and fold.body.op is Op.ADD and fold.body.dtype is FLOAT32


def fold_name(fold: Fold) -> str:
    """The beginning of a result's name."""
    return {Op.ADD: "sum", Op.SMALLER: "least", Op.GREATER: "most"}.get(
        fold.body.op, "fold"
    )


def is_always(keep: Node) -> bool:
    """Whether a condition holds of every element."""
    return keep.op is Op.CONST and bool(keep.arg)


def grouped(text: str) -> str:
    """``text`` in parentheses, unless it is one name, number or call."""
    depth = 0
    for letter in text:
        depth += (letter in "([") - (letter in ")]")
        if letter == " " and not depth:
            return f"({text})"
    return text
