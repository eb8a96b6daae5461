"""Fused: the messages of a model for which there is no plan.

Vectors (biases, norms) travel uncompressed unless ``compress_if`` says otherwise: they
have few bytes and are sensitive. Uncompressed gradients are scaled within the backward
pass, as DDP does it, because waking a lane up takes longer. Their mean needs no decode
(``Compressor.is_decoded``).
"""

from __future__ import annotations

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
from .step.messages import Message, ParamRange, Placement


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

    The last carries ``num_flags`` flags, of which parameters ranks use, if it can.
    Gradients that ``compress_if`` leaves out and row-sparse ones do not take the
    exchange. Embeddings' tables take it in every step where it names a collective, else
    in steps in which sending their rows would take longer.
    """
    kinds = _Kinds(model, settings, exchange)
    world = who.world
    num_hosts = world // settings.ranks_per_host

    @cache
    def cap_bytes(this_kind: object) -> int:
        if settings.options.bucket_cap_mb is not None:
            return int(settings.options.bucket_cap_mb * 2**20)
        members = [(name, p) for name, p in params if kinds.of(name, p) == this_kind]
        # The link's bytes count: those of the exchange among hosts.
        return default_cap_bytes(members, kinds.exchange_of(*members[0]), num_hosts)

    made: list[Message] = []
    fused = fuse(params, kind=kinds.of, cap_bytes=cap_bytes)
    orders = orders_of(kinds.of(*members[0]) for members in fused)
    for index, (members, order) in enumerate(zip(fused, orders, strict=True), first):
        name, param = members[0]
        if kinds.is_sparse(param):
            named = named_collective(kinds.asked_for(name, param))
            way = named if named is not None and named.carries_rows else None
            from .step.row_message import RowMessage  # an embedding with sparse=True

            made.append(RowMessage(index, name, param, who.rank, world, collective=way))
        else:
            carrier = kinds.exchange_of(name, param)
            if settings.ranks_per_host > 1:
                from ..exchange.two_level import on_hosts

                carrier = on_hosts(carrier, settings.ranks_per_host)
            is_light = _is_light(carrier, world)
            # A gradient that travels alone would be copied for the flags.
            has_flags = (
                is_light and world > 1 and len(members) > 1 and members is fused[-1]
            )
            flags = num_flags if has_flags else 0
            # Elsewhere the copy to the host would hold up whoever launches the kernels
            # of backward.
            is_here = all(param.device.type == "cpu" for _, param in members)
            lanes = dict.fromkeys(dict(members), INLINE) if is_light and is_here else {}
            ranges = [ParamRange.whole(*member) for member in members]
            placement = Placement(lanes=lanes, order=order, num_flags=flags)
            made.append(Message(index, ranges, carrier, who.rank, world, placement))
    return made


class _Kinds:
    """How a model's gradients travel: those of one kind may share a message."""

    def __init__(
        self, model: nn.Module, settings: Settings, exchange: Exchange
    ) -> None:
        self._sparse = sparse_weights(model)
        self._width_of = tables(model)
        self._asked = exchange
        self._dense = beside(exchange)
        self._settings = settings

    def is_sparse(self, param: Tensor) -> bool:
        """Whether a parameter's gradients are row-sparse."""
        return id(param) in self._sparse

    def asked_for(self, name: str, param: Tensor) -> Exchange:
        """The exchange that the user's settings name for a parameter."""
        return (
            self._asked
            if self._settings.options.compress_if(name, param)
            else self._dense
        )

    def exchange_of(self, name: str, param: Tensor) -> Exchange:
        """The exchange that carries a parameter whose gradients are not row-sparse."""
        asked = self.asked_for(name, param)
        width = self._width_of.get(id(param))
        is_free = is_pair(asked) and named_collective(asked) is None
        if not (is_free and width):
            return asked
        from ..exchange.natural import with_natural_sparsity  # an embedding's table

        return with_natural_sparsity(asked, width)

    def of(self, name: str, param: Tensor) -> object:
        """A parameter's kind."""
        own = self._width_of.get(id(param)), self.asked_for(name, param) != self._dense
        return name if self.is_sparse(param) else own


def _is_light(exchange: Exchange, world: int) -> bool:
    """Whether encoding takes less than the wake-up of the lane that would do it.

    Uncompressed gradients are divided by the number of ranks, in their place. DDP does
    that in the backward pass too.
    """
    if not isinstance(exchange, Pair) or not isinstance(exchange.collective, allreduce):
        return False
    return exchange.codec.for_world(world).is_decoded(scale=1 / world)
