"""Who is held to the laws: the registries' examples, who pairs with whom, and in which
cases.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial
from itertools import product
from types import FunctionType
from typing import Any
from zlib import crc32

import pytest

from gradwire import compress
from gradwire.collective.casync_ps import casync_ps
from gradwire.contract import Collective, Compressor, Exchange, Layout
from gradwire.contract.registry import examples
from gradwire.contract.spec import TensorSpec
from gradwire.errors import IncompatiblePair
from gradwire.exchange.pair import Pair, pair, suited
from gradwire_lab.collective.casync_ring import casync_ring
from gradwire_lab.laws.cases import FEW, Case

ALWAYS = Case(world=3, numel=300, seed=3)
"""A case of no special size."""


@dataclass(frozen=True, kw_only=True)
class Shaped(Case):
    """A case of tensors of these shapes."""

    shapes: tuple[tuple[int, ...], ...]

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec("gradient", self.numel, self.dtype, self.shapes)


def of_one(exchange: Exchange, world: int, rows: int, seed: int) -> Case:
    """A case for laws of many steps: of one matrix where an exchange only encodes each
    tensor.
    """
    numel = 10 * rows
    if isinstance(exchange, Pair):
        return Shaped(world=world, numel=numel, seed=seed, shapes=((rows, 10),))
    return Case(world=world, numel=numel, seed=seed)


SEED = 1
"""Of all draws below. Another one asks other exchanges in other cases."""


def draw_of(*names: object) -> int:
    """A number that follows from names alone, in every process and whatever is added to
    the registries.
    """
    return crc32(" ".join(map(str, (SEED, *names))).encode())


def in_drawn_order(
    law: Callable[..., None], exchanges: Sequence[Exchange]
) -> list[Exchange]:
    """In an order that the names of the law and the exchanges draw; the library's own
    come first.
    """

    def place(made: Exchange) -> tuple[bool, int]:
        return not of_library(made), draw_of(law.__name__, full_name_of(made))

    return sorted(exchanges, key=place)


def part_of(
    law: Callable[..., None], exchanges: Sequence[Exchange], share: int
) -> list[Exchange]:
    """The first ``1 / share`` of exchanges in drawn order, and at least one: those of
    one wrapper that `make test` asks a law of; others are slow.
    """
    return in_drawn_order(law, exchanges)[: -(-len(exchanges) // share)]


class Share(Enum):
    """The runs that ask a law of an exchange."""

    SAMPLE = "sample"
    """All, `make test` first."""
    DAY = "day"
    """`make test-slow`, and those of the night. The lab's sample is among them."""
    NIGHT = "night"
    """`make test-nightly` and `make test-all`."""


NIGHTLY = (pytest.mark.slow, pytest.mark.nightly)
MARKS: dict[Share, Sequence[pytest.MarkDecorator]] = {
    Share.SAMPLE: (),
    Share.DAY: (pytest.mark.slow,),
    Share.NIGHT: NIGHTLY,
}
SHARES = pytest.mark.parametrize(
    "share",
    [pytest.param(share, marks=MARKS[share]) for share in Share],
    ids=lambda share: share.value,
)
"""The share of the exchanges that a test asks."""


def share_of(law: Callable[..., None], subject: object, is_sample: bool) -> Share:
    """The share that an exchange, or a compressor, belongs to: of the library's that
    are not in the sample, names draw a third for the day.

    Of the lab's the day has the sample.
    """
    is_own = of_library(subject)
    if is_sample:
        return Share.SAMPLE if is_own else Share.DAY
    drawn = draw_of("night", law.__name__, full_name_of(subject))
    return Share.DAY if is_own and drawn % 3 == 0 else Share.NIGHT


def sample_of(law: Callable[..., None], exchanges: Sequence[Exchange]) -> set[Exchange]:
    """The exchanges that `make test` asks a law of; others are slow.

    In drawn order an exchange is taken if it has an algorithm that none before it has.
    So the law is asked of every algorithm, of the lab's in a slow test.
    """
    found: set[Exchange] = set()
    asked: set[type] = set()
    for made in in_drawn_order(law, exchanges):
        if not asked.issuperset(kind_of(made)):
            asked.update(kind_of(made))
            found.add(made)
    return found


def drawn_case(law: Callable[..., None], exchange: Exchange) -> Case:
    """One of ``FEW``, as the names of the law and the exchange draw it."""
    return rotated(draw_of("case", law.__name__, full_name_of(exchange)))


def rotated(turn: int) -> Case:
    """One of ``FEW``: over nine turns each comes up.

    All cases for all exchanges under all laws would take minutes and find the same.
    """
    return FEW[turn % len(FEW)]


def compressors() -> tuple[Compressor, ...]:
    """The examples of ``compress/`` that are compressors; the others are
    ``own_exchanges``.
    """
    return tuple(made for made in examples("compress") if isinstance(made, Compressor))


def by_first_example() -> list[Any]:
    """The compressors as parameters: those of other settings than an algorithm's first
    are slow, and the lab's.
    """
    first = {type(codec): codec for codec in reversed(compressors())}.values()
    return [
        codec
        if codec in first and of_library(codec)
        else pytest.param(codec, marks=pytest.mark.slow)
        for codec in compressors()
    ]


def own_exchanges() -> tuple[Exchange, ...]:
    """The examples of ``compress/`` that talk in the middle, and so are exchanges
    themselves.
    """
    return tuple(made for made in examples("compress") if isinstance(made, Exchange))


@cache
def pairs() -> tuple[Pair, ...]:
    """Every example of a compressor with the collective that suits it, one with all
    that take it.

    That one is the last, whose blocks are the shortest. All with all would take minutes
    more. For the same reason a scheme that sees entries alone (its bytes follow from
    which elements are taken) is tried with two kinds: a lossless codec, and one that
    takes equally many each time.
    """
    widest = {type(codec): codec for codec in compressors()}.values()
    made = []
    for codec in compressors():
        for collective in examples("collective"):
            if codec not in widest and collective != suited(codec):
                continue
            if not (
                collective.exact_size
                or codec.traits.lossless
                or codec.traits.exact_size
            ):
                continue
            try:
                made.append(pair(codec, collective))
            except IncompatiblePair:
                continue
    return tuple(made)


@cache
def other_ways() -> tuple[Pair, ...]:
    """Pairs that go in rounds, in halves, or in fewer chunks than there are ranks."""
    codecs = (
        compress.none(),
        compress.onebit(block=64),
        compress.qsgd(bitwidth=4, block=64),
        compress.threelc(block=64),
        compress.topk(density=0.3),
        compress.hardthreshold(threshold=1.0, max_density=0.3),
    )
    ways: tuple[Collective, ...] = (
        *(casync_ps(room_bytes=0), casync_ps(partitions=1), casync_ps(partitions=2)),
        *(casync_ps(partitions=1, room_bytes=0), casync_ps(partitions=2, room_bytes=0)),
        *(
            casync_ring(half_bytes=0),
            casync_ring(partitions=1),
            casync_ring(partitions=2),
        ),
        casync_ring(partitions=2, half_bytes=0),
    )
    every = product(codecs, ways)
    return tuple(
        pair(*both) for both in every if not both[1].needs.refusal(both[0].traits)
    )


def places_of_each_path(exchanges: Sequence[Exchange]) -> set[int]:
    """The places of a few exchanges, in which every algorithm takes each of its ways.

    Every collective is there with a codec of each kind of payload, every compressor
    with the collective that suits it, and every algorithm that is an exchange itself.
    """
    found: dict[Hashable, int] = {}
    # the last is taken
    last = sorted(enumerate(exchanges), key=lambda one: of_library(one[1]))
    for place, exchange in last:
        if not isinstance(exchange, Pair):
            found[type(exchange)] = place
            continue
        traits = exchange.codec.traits
        is_dense = traits.layout is Layout.DENSE
        found[exchange.collective, is_dense, is_dense and traits.shared_scale] = place
        if exchange.collective == suited(exchange.codec):
            found[type(exchange.codec)] = place
    return {*found.values()}


def planners() -> list[Any]:
    """The examples of planners as parameters: those of other settings than an
    algorithm's first are slow, and the lab's.
    """
    first: dict[str, Any] = {}
    for made in examples("planner"):
        first.setdefault(getattr(made, "func", made).__name__, made)
    return [
        made
        if made in first.values() and of_library(made)
        else pytest.param(made, marks=pytest.mark.slow)
        for made in examples("planner")
    ]


def of_library(made: object) -> bool:
    """Whether the library has an algorithm, or both of a pair; the lab has others."""
    parts = (made.codec, made.collective) if isinstance(made, Pair) else (made,)
    return not any(
        getattr(part, "func", part).__module__.startswith("gradwire_lab.")
        for part in parts
    )


def kind_of(exchange: Exchange) -> tuple[type, ...]:
    """The files that an exchange is of, whatever their settings."""
    if isinstance(exchange, Pair):
        return type(exchange.codec), type(exchange.collective)
    return (type(exchange),)


def name_of(exchange: object) -> str:
    """A short test id, the same in every process: functions have no addresses in it."""
    if isinstance(exchange, partial):
        settings = ", ".join(
            f"{name}={value}" for name, value in exchange.keywords.items()
        )
        return f"{name_of(exchange.func)}({settings})"
    if isinstance(exchange, FunctionType):
        return exchange.__name__
    if isinstance(exchange, Pair):
        return f"{exchange.codec!r}-{type(exchange.collective).__name__}".replace(
            "torch.", ""
        )
    return repr(exchange)


def full_name_of(exchange: object) -> str:
    """The name with the collective's settings."""
    own = f"-{exchange.collective!r}" if isinstance(exchange, Pair) else ""
    return name_of(exchange) + own
