"""Exchanges without data: predictions are made with them.

``record`` runs an exchange's steps once on torch's meta device: its verbs do not depend
on values, so they yield the same verbs as in training. The bytes that an exchange sends
are counted in these verbs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..collective.steps.size_only import SizeOnlyCompressor
from ..collective.steps.travel import members, sent_bytes
from ..contract import Compressor, Exchange, Member
from ..contract.member import nothing
from ..contract.spec import TensorSpec
from ..contract.verbs import Broadcast, Compute, Verb, carried_out
from ..errors import InvalidSetting

# ---- bytes that an exchange sends ----------------------------------------------------


def wire_bytes(exchange: Exchange, spec: TensorSpec, world: int) -> list[int] | None:
    """Bytes that each rank sends for one gradient, the network's own headers aside.

    Args:
        exchange: The exchange.
        spec: The gradient's spec.
        world: The number of ranks.

    Returns:
        A number for each rank. None if the bytes vary with the gradient's values, or
        from step to step.

    >>> import gradwire as gw
    >>> exchange = gw.exchange_for(gw.compress.none())
    >>> wire_bytes(exchange, gw.TensorSpec("weight", 1000), world=2)
    [4000, 4000]
    """
    is_exact = exchange.declared.exact_size or world == 1
    return expected_bytes(exchange, spec, world) if is_exact else None


def expected_bytes(
    exchange: Exchange, spec: TensorSpec, world: int
) -> list[int] | None:
    """Bytes that each rank sends for one gradient, in payloads of typical size.

    They are the bytes of a first step: if ranks take turns at a broadcast, rank 0 is
    its root.

    Args:
        exchange: The exchange.
        spec: The gradient's spec.
        world: The number of ranks.

    Returns:
        A number for each rank. None if the exchange looks at values, as a run without
        data has none.
    """
    sizes = []
    for rank in range(world):
        size_bytes = bytes_of_rank(exchange, spec, world, rank)
        if size_bytes is None:
            return None
        sizes.append(size_bytes)
    return sizes


def bytes_of_rank(
    exchange: Exchange, spec: TensorSpec, world: int, rank: int = 0
) -> int | None:
    """The bytes of ``expected_bytes`` that one rank sends.

    Args:
        exchange: The exchange.
        spec: The gradient's spec.
        world: The number of ranks.
        rank: The rank; default 0.

    Returns:
        The bytes, or None as ``expected_bytes``.
    """
    if world == 1:
        return 0
    counted = _counted if _is_hashable(exchange) else _counted.__wrapped__
    try:
        first = counted(exchange, spec, world, 0)
        return counted(exchange, spec, world, rank).sent if first.varies else first.sent
    except _LooksAtValues:
        return None


def _is_hashable(exchange: Exchange) -> bool:
    """Whether bytes can be kept for it; a user's dataclass may not be frozen."""
    try:
        hash(exchange)
    except TypeError:
        return False
    return True


class _Count(NamedTuple):
    """The bytes that a rank sends, and whether they may differ from rank to rank."""

    sent: int
    varies: bool


@lru_cache(maxsize=4096)
def _counted(exchange: Exchange, spec: TensorSpec, world: int, rank: int) -> _Count:
    recorded = record(exchange, spec, rank, world)
    size_bytes = 0
    has_root = False
    for verb in chain.from_iterable(recorded.rows):
        if isinstance(verb, Compute):
            continue
        has_root = has_root or isinstance(verb, Broadcast)
        ranks = members(rank, world, exchange.ranks_per_host, verb.among)
        size_bytes += sent_bytes(verb, ranks.index(rank), len(ranks))
    return _Count(size_bytes, recorded.is_of_its_rank or has_root)


# ---- a run without data --------------------------------------------------------------


@dataclass(frozen=True)
class RecordedVerbs:
    """The verbs that steps yielded.

    Args:
        rows: A row for each yield.
        is_of_its_rank: Whether the verbs depend on the rank.
        is_of_its_order: Whether they depend on the message's order.
    """

    rows: tuple[tuple[Verb, ...], ...]
    is_of_its_rank: bool
    is_of_its_order: bool


class _LooksAtValues(InvalidSetting):
    """An exchange cannot be run without data."""


def record(
    exchange: Exchange, spec: TensorSpec, rank: int, world: int, order: int = 0
) -> RecordedVerbs:
    """Runs one rank's steps without data and records the verbs that they yield.

    Raises ``InvalidSetting`` if the exchange looks at values.
    """
    size_only = _without_values(exchange)
    me = RecordingMember(rank, world, order)
    rows = []

    def note(row: tuple[Verb, ...]) -> list[Any]:
        rows.append(row)
        return [verb.fn() if isinstance(verb, Compute) else None for verb in row]

    try:
        with torch.device("meta"), _WritesNothing():
            state = size_only.init(replace(spec, rank=rank), world)
            grad_N = torch.empty(spec.numel, dtype=spec.dtype)
            carried_out(size_only.synchronise(me, state, grad_N, grad_N), note)
    # torch raises these where it is asked for values.
    except (RuntimeError, TypeError) as error:
        raise _LooksAtValues(
            f"{exchange!r} cannot be simulated: it looks at values, and there are none "
            f"({str(error).splitlines()[0]}); only exchanges whose verbs and sizes "
            "follow from the tensor's spec can"
        ) from error
    return RecordedVerbs(tuple(rows), me.was_asked, me.order_was_asked)


def algorithms_in(part: Any) -> Mapping[str, Any]:
    """The settings of an exchange or a collective, if it is made of fields."""
    if not is_dataclass(part):
        return {}
    return {f.name: getattr(part, f.name) for f in fields(part) if f.init}


def _without_values(part: Any) -> Any:
    """The same exchange, each of whose compressors has sizes only."""
    if isinstance(part, Compressor):
        return SizeOnlyCompressor(part)
    settings = algorithms_in(part)
    if not settings:
        return part
    return replace(part, **{n: _without_values(v) for n, v in settings.items()})


class _WritesNothing(TorchFunctionMode):
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
        keywords = kwargs or {}
        out = keywords.get("out")
        return func(*args, **keywords) if out is None else out


class RecordingMember(Member):
    """A member without data, which notes the facts that steps ask it for.

    If steps do not ask for the rank, all ranks do the same. If they do not ask for
    the order, all messages are alike. ``sizes`` are the usual ones where steps state
    them, and else the largest.
    """

    __slots__ = ("_order", "_order_was_asked", "_rank", "was_asked")

    def __init__(self, rank: int, world: int, order: int = 0) -> None:
        super().__init__(rank, world, order)
        self.was_asked = False
        self._order_was_asked = False

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
        member = super().across(ranks_per_host)
        # Handing it on is not asking.
        self._order_was_asked = was_asked
        return member

    @property
    def order_was_asked(self) -> bool:
        """Whether its order was asked for, among hosts or among all ranks."""
        across = self._across
        among_hosts = isinstance(across, RecordingMember) and across.order_was_asked
        return self._order_was_asked or among_hosts

    def variant_of(self, codec: Compressor, *, world: int | None = None) -> Compressor:
        # Sizes are the same on every rank.
        return codec.for_world(world or self.world)

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
