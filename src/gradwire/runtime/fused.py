"""Fused: the messages of a model for which there is no plan.

Vectors (biases, norms) travel uncompressed unless ``compress_if`` says otherwise: they
have few bytes and are sensitive. Uncompressed gradients are scaled within the backward
pass, as DDP does it, because waking a lane up takes longer. Their mean needs no decode
(``Compressor.is_decoded``).
"""

from collections.abc import Sequence
from functools import cache

from torch import Tensor, nn

from ..collective.allreduce import allreduce
from ..contract import Exchange
from ..contract.spec import NamedParam
from ..exchange.by_name import beside, is_pair, named_collective
from ..exchange.orders import orders_of
from ..exchange.pair import Pair
from ..planning.default_fusion import default_cap_bytes, fuse
from .engine.engine import INLINE
from .liveness.membership import Membership
from .settings import Settings, sparse_weights, tables
from .step.layout import ParamRange
from .step.messages import Message, Placement


def fused_messages(
    model: nn.Module,
    params: list[NamedParam],
    settings: Settings,
    exchange: Exchange,
    who: Membership,
    *,
    first: int = 0,
    num_flags: int = 0,
) -> list[Message]:
    """The messages of a model without a plan, in issue order, numbered from ``first``.

    If it can, the last message carries ``num_flags`` flags, which say the parameters
    that ranks use. Gradients that ``compress_if`` leaves out, and row-sparse gradients,
    do not take the exchange. Embeddings' tables take it in every step if it names a
    collective. Otherwise they take it in steps in which their rows would take longer.
    """
    ways = _Ways(model, settings, exchange, who)
    num_hosts = who.world // settings.ranks_per_host

    @cache
    def cap_bytes(kind: object) -> int:
        if settings.options.bucket_cap_mb is not None:
            return int(settings.options.bucket_cap_mb * 2**20)
        members = [param for param in params if ways.kind_of(*param) == kind]
        # The link's bytes count: the bytes of the exchange among hosts.
        return default_cap_bytes(members, ways.exchange_of(*members[0]), num_hosts)

    groups = fuse(params, kind=ways.kind_of, cap_bytes=cap_bytes)
    orders = orders_of(ways.kind_of(*group[0]) for group in groups)
    messages = []
    for index, (group, order) in enumerate(zip(groups, orders, strict=True), first):
        if ways.is_sparse(group[0][1]):
            messages.append(ways.row_message(index, *group[0]))
        else:
            flags = num_flags if group is groups[-1] else 0
            messages.append(ways.dense_message(index, group, order, flags))
    return messages


class _Ways:
    """The ways of a model's gradients. Gradients of one kind may share a message."""

    def __init__(
        self, model: nn.Module, settings: Settings, exchange: Exchange, who: Membership
    ) -> None:
        self._sparse = sparse_weights(model)
        self._width_of = tables(model)
        self._asked = exchange
        self._dense = beside(exchange)
        self._settings = settings
        self._who = who

    def kind_of(self, name: str, param: Tensor) -> object:
        """A parameter's kind; a row-sparse one is of its own."""
        if self.is_sparse(param):
            return name
        is_compressed = self._asked_for(name, param) != self._dense
        return self._width_of.get(id(param)), is_compressed

    def is_sparse(self, param: Tensor) -> bool:
        """Whether a parameter's gradients are row-sparse."""
        return id(param) in self._sparse

    def _asked_for(self, name: str, param: Tensor) -> Exchange:
        """The exchange that the user's settings name for a parameter."""
        is_compressed = self._settings.options.compress_if(name, param)
        return self._asked if is_compressed else self._dense

    def exchange_of(self, name: str, param: Tensor) -> Exchange:
        """The exchange that carries a parameter whose gradients are not row-sparse."""
        asked = self._asked_for(name, param)
        width = self._width_of.get(id(param))
        is_free = is_pair(asked) and named_collective(asked) is None
        if not (is_free and width):
            return asked
        from ..exchange.natural import with_natural_sparsity  # an embedding's table

        return with_natural_sparsity(asked, width)

    def row_message(self, index: int, name: str, param: Tensor) -> Message:
        """The message of an embedding with sparse=True."""
        from .step.row_message import RowMessage

        way = named_collective(self._asked_for(name, param))
        if way is not None and not way.carries_rows:
            way = None
        rank = self._who.rank
        return RowMessage(index, name, param, rank, self._who.world, collective=way)

    def dense_message(
        self, index: int, group: Sequence[NamedParam], order: int, num_flags: int
    ) -> Message:
        """The message of gradients that do not come as rows.

        Flags travel in it where they cost nothing.
        """
        world = self._who.world
        carrier = self.exchange_of(*group[0])
        if self._settings.ranks_per_host > 1:
            from ..exchange.two_level import on_hosts

            carrier = on_hosts(carrier, self._settings.ranks_per_host)
        is_light = _is_light(carrier, world)
        # Elsewhere the copy to the host would hold up the thread that launches
        # backward's kernels.
        is_inline = is_light and all(param.is_cpu for _, param in group)
        # A gradient that travels alone would be copied for the flags.
        has_flags = is_light and world > 1 and len(group) > 1
        placement = Placement(
            order=order,
            lanes=dict.fromkeys(dict(group), INLINE) if is_inline else {},
            num_flags=num_flags if has_flags else 0,
        )
        ranges = [ParamRange.whole(*member) for member in group]
        return Message(index, ranges, carrier, self._who.rank, world, placement)


def _is_light(exchange: Exchange, world: int) -> bool:
    """Whether encoding takes less than the wake-up of the lane that would do it.

    Uncompressed gradients are divided by the number of ranks, in their place. DDP does
    that in the backward pass too.
    """
    if not isinstance(exchange, Pair) or not isinstance(exchange.collective, allreduce):
        return False
    return exchange.codec.for_world(world).is_decoded(scale=1 / world)
