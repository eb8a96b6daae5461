"""Fused: the messages of a model for which there is no plan."""

from __future__ import annotations

from functools import cache

from torch import Tensor, nn

from ..collective.allreduce import allreduce
from ..contract import Exchange
from ..data.exchanges import turns_of
from ..exchange import named_collective
from ..pairing import Pair
from ..planning.default_fusion import default_cap_bytes, fuse
from ..wrap.hosts import on_hosts
from ..wrap.momentum import beside
from ..wrap.natural import is_pair, with_natural_sparsity
from .driver import INLINE
from .fusing import NamedParam
from .membership import Membership
from .messages import Message, ParamRange
from .settings import Settings, sparse_weights, tables
from .sparse_message import SparseMessage
from .synchroniser import AnyMessage


def fused_messages(
    model: nn.Module,
    params: list[NamedParam],
    settings: Settings,
    exchange: Exchange,
    who: Membership,
    *,
    first: int = 0,
) -> list[AnyMessage]:
    """The messages of a model without a plan, in issue order, numbered from ``first``.

    Gradients that ``compress_if`` leaves out and row-sparse ones do not take the exchange.
    Embeddings' tables take it in steps in which sending their rows would take longer.
    """
    sparse, width_of, dense = sparse_weights(model), tables(model), beside(exchange)
    num_hosts = who.world // settings.ranks_per_host

    def asked_for(name: str, param: Tensor) -> Exchange:
        return exchange if settings.compress_if(name, param) else dense

    def flat_of(name: str, param: Tensor) -> Exchange:
        asked, width = asked_for(name, param), width_of.get(id(param))
        natural = width is not None and is_pair(asked)
        return with_natural_sparsity(asked, width) if natural and width else asked

    def kind(name: str, param: Tensor) -> object:
        own = width_of.get(id(param)), asked_for(name, param) != dense
        return name if id(param) in sparse else own

    @cache
    def cap_bytes(this_kind: object) -> int:
        if settings.bucket_cap_mb is not None:
            return int(settings.bucket_cap_mb * 2**20)
        members = [(name, p) for name, p in params if kind(name, p) == this_kind]
        # The link's bytes count: those of the exchange among hosts.
        return default_cap_bytes(members, flat_of(*members[0]), num_hosts)

    made: list[AnyMessage] = []
    fused = fuse(params, kind=kind, cap_bytes=cap_bytes)
    turns = turns_of(kind(*members[0]) for members in fused)
    for index, (members, turn) in enumerate(zip(fused, turns, strict=True), first):
        name, param = members[0]
        if id(param) in sparse:
            named = named_collective(asked_for(name, param))
            way = named if named is not None and named.carries_rows else None
            made.append(SparseMessage(index, name, param, who.rank, who.world, collective=way))
        else:
            carrier = on_hosts(flat_of(name, param), settings.ranks_per_host)
            made.append(_message(index, members, carrier, who, turn))
    return made


def _message(
    index: int, members: list[NamedParam], exchange: Exchange, who: Membership, turn: int
) -> Message:
    ranges = [ParamRange.whole(*member) for member in members]
    # Elsewhere the copy to the host would hold up whoever launches the kernels of backward.
    is_here = all(param.device.type == "cpu" for _, param in members)
    is_light = is_here and _is_light(exchange, who.world)
    lanes = dict.fromkeys(dict(members), INLINE) if is_light else {}
    return Message(index, ranges, exchange, who.rank, who.world, lanes=lanes, turn=turn)


def _is_light(exchange: Exchange, world: int) -> bool:
    """Whether encoding takes less than the wake-up of the lane that would do it.

    Uncompressed gradients are divided by the number of ranks, in their place. DDP does that in the
    backward pass too.
    """
    if not isinstance(exchange, Pair) or not isinstance(exchange.collective, allreduce):
        return False
    return exchange.codec.for_world(world).is_decoded(scale=1 / world)
