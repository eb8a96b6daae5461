"""Exchanges without data: what predictions are made with.

``SizeOnlyCompressor`` has a compressor's sizes without its work. ``record`` runs steps
once on torch's meta device: its verbs do not depend on values, so it yields the same
ones here as in training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..errors import InvalidSetting
from .compressor import Compressor, Memory, Residual, State, Traits
from .member import Member, nothing
from .payload import Format, Payload
from .spec import TensorSpec
from .travel import members, sent_bytes
from .verbs import Broadcast, Compute, Verb, carried_out


@dataclass(frozen=True)
class SizeOnlyCompressor(Compressor):
    """Makes payloads of typical size that hold nothing, and touches no element."""

    codec: Compressor

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        return self.codec.traits

    @property
    def width(self) -> int:
        return self.codec.width

    def for_world(self, world: int, rank: int = 0) -> Compressor:
        return SizeOnlyCompressor(self.codec.for_world(world, rank))

    def chunk(self, start: int, stop: int) -> Compressor:
        return SizeOnlyCompressor(self.codec.chunk(start, stop))

    def format(self, spec: TensorSpec) -> Format:
        return self.codec.typical(spec)

    def encode(
        self,
        state: State,
        grad_N: Tensor,
        *,
        residual_N: Residual = None,
        buffer: Memory = None,
    ) -> tuple[Payload, State]:
        form = self.format(TensorSpec("", grad_N.numel(), grad_N.dtype))
        return Payload.empty(form, buffer, grad_N.device), state

    def decode(self, payload: Payload, out_N: Tensor, *, scale: float = 1.0) -> Tensor:
        return out_N

    def merge(self, payload: Payload, sum_N: Tensor, *, scale: float = 1.0) -> None:
        """Adds nothing."""


# ---- A member without data, which notes what steps ask it for while their verbs are re


class WritesNothing(TorchFunctionMode):
    """A mode that skips operations in place, which only take time without data."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = func.__name__
        if name.endswith("_") and not name.endswith("__"):
            return args[0]
        if kwargs and kwargs.get("out") is not None:
            return kwargs["out"]
        return func(*args, **(kwargs or {}))


class RecordingMember(Member):
    """A member without data.

    It notes whether its rank is asked for: if not, all ranks do the same; and its
    order: if not, all messages are alike. Its ``sizes`` are the usual ones where steps
    state them, and else the largest.
    """

    __slots__ = ("_order", "_order_was_asked", "_rank", "was_asked")

    def __init__(self, rank: int, world: int, order: int = 0) -> None:
        super().__init__(rank, world, order)
        self.was_asked = self._order_was_asked = False

    @property
    def rank(self) -> int:
        self.was_asked = True
        return self._rank

    @rank.setter
    def rank(self, rank: int) -> None:
        self._rank = rank

    @property
    def order(self) -> int:
        self._order_was_asked = True
        return self._order

    @order.setter
    def order(self, order: int) -> None:
        self._order = order

    def across(self, ranks_per_host: int) -> Member:
        was_asked = self._order_was_asked
        found = super().across(ranks_per_host)
        self._order_was_asked = was_asked  # handing it on is not asking
        return found

    @property
    def order_was_asked(self) -> bool:
        """Whether its order was asked for, among hosts or among all ranks."""
        among_hosts = (
            isinstance(self._across, RecordingMember) and self._across.order_was_asked
        )
        return self._order_was_asked or among_hosts

    def variant_of(self, codec: Compressor, *, world: int | None = None) -> Compressor:
        return codec.for_world(world or self.world)  # sizes are the same on every rank

    def sizes(
        self,
        announced_W: Tensor,
        limits: Sequence[int],
        *,
        unit: str = "bytes",
        ranks: Sequence[int] | None = None,
        usual: Sequence[int] | None = None,
    ) -> list[int]:
        return list(limits if usual is None else usual)

    def sized(
        self,
        name: str,
        fn: Callable[[], Any],
        numel: int,
        usual: Callable[[], Any] = nothing,
    ) -> Compute:
        return Compute(name, usual, numel)


# ---- steps without data --------------------------------------------------------------


class RecordedVerbs(NamedTuple):
    """The verbs that steps yielded, a row for each yield, and whether they depend on
    the rank and on the message's order.
    """

    rows: tuple[tuple[Verb, ...], ...]
    is_of_its_rank: bool
    is_of_its_order: bool


class _LooksAtValues(InvalidSetting):
    """An exchange cannot be run without data."""


def record(
    exchange: Any, spec: TensorSpec, rank: int, world: int, order: int = 0
) -> RecordedVerbs:
    """Runs one rank's steps without data and records the verbs that they yield."""
    hollow = without_data(exchange)
    me = RecordingMember(rank, world, order)
    rows = list[tuple[Verb, ...]]()

    def note(row: tuple[Verb, ...]) -> list[Any]:
        rows.append(row)
        return [verb.fn() if isinstance(verb, Compute) else None for verb in row]

    try:
        with torch.device("meta"), WritesNothing():
            state = hollow.init(replace(spec, rank=rank), world)
            grad_N = torch.empty(spec.numel, dtype=spec.dtype)
            carried_out(hollow.synchronise(me, state, grad_N, grad_N), note)
    except (
        RuntimeError,
        TypeError,
    ) as error:  # which torch raises where it is asked for values
        raise _LooksAtValues(
            f"{exchange!r} cannot be simulated: it looks at values, and there are none "
            f"({str(error).splitlines()[0]}); only exchanges whose verbs and sizes "
            "follow from the tensor's spec can"
        ) from error
    return RecordedVerbs(tuple(rows), me.was_asked, me.order_was_asked)


def bytes_of_rank(exchange: Any, spec: TensorSpec, world: int, rank: int) -> int | None:
    """Bytes that a rank sends for one gradient; see ``Exchange.bytes_of_rank``."""
    if world == 1:
        return 0
    counted = _bytes_sent if _is_hashable(exchange) else _bytes_sent.__wrapped__
    try:
        found, is_of_its_rank = counted(exchange, spec, world, 0)
        return counted(exchange, spec, world, rank)[0] if is_of_its_rank else found
    except _LooksAtValues:
        return None


def _is_hashable(exchange: Any) -> bool:
    """Whether bytes can be kept for it; a user's own exchange may be a dataclass that
    is not frozen.
    """
    try:
        hash(exchange)
    except TypeError:
        return False
    return True


@lru_cache(maxsize=4096)
def _bytes_sent(
    exchange: Any, spec: TensorSpec, world: int, rank: int
) -> tuple[int, bool]:
    """Bytes that a rank sends, and whether they may depend on which rank it is."""
    recorded = record(exchange, spec, rank, world)
    size_bytes = 0
    for verb in chain.from_iterable(recorded.rows):
        if not isinstance(verb, Compute):
            ranks = members(rank, world, exchange.ranks_per_host, verb.among)
            size_bytes += sent_bytes(verb, ranks.index(rank), len(ranks))
    roots = any(isinstance(verb, Broadcast) for row in recorded.rows for verb in row)
    return size_bytes, recorded.is_of_its_rank or roots


def without_data(part: Any) -> Any:
    """The same exchange with every compressor in it hollow."""
    if isinstance(part, Compressor):
        return SizeOnlyCompressor(part)
    own = algorithms_in(part)
    return (
        replace(part, **{n: without_data(v) for n, v in own.items()}) if own else part
    )


def algorithms_in(part: Any) -> Mapping[str, Any]:
    """The settings of an exchange or a collective, if it is made of fields."""
    if not is_dataclass(part):
        return {}
    return {f.name: getattr(part, f.name) for f in fields(part) if f.init}
