"""A plan carried out: chunks become messages, and their order is kept."""

from collections.abc import Sequence
from typing import Any

from ..contract import Exchange
from ..contract.collective import Collective
from ..contract.spec import NamedParam
from ..errors import InvalidSetting
from ..exchange.orders import orders_of
from ..exchange.pair import Pair
from ..exchange.planned import exchanges_of, sound_exchanges
from ..exchange.two_level import on_hosts
from ..planning.data.check import check
from ..planning.data.plan import Plan
from ..planning.data.profile import Layer, Profile, ProfiledTensor
from .device.devices import HOST, home_of
from .engine.engine import COMPUTE, INLINE, OFFLOAD
from .liveness.membership import Membership
from .step.layout import ParamRange
from .step.messages import Message, Placement
from .step.row_message import RowMessage


def messages_of(
    plan: Plan,
    params: Sequence[NamedParam],
    sparse: set[int],
    who: Membership,
    ranks_per_host: int = 1,
) -> list[Message]:
    """The messages of ``plan`` in issue order, for what ``check_for`` accepted."""
    of = dict(params)
    exchanges = exchanges_of(plan)
    orders = orders_of(message.exchange for message in plan.messages)
    made: list[Message] = []
    for index, (message, order) in enumerate(zip(plan.messages, orders, strict=True)):
        exchange = exchanges[message.exchange]
        name = message.chunks[0].tensor
        if id(of[name]) in sparse:
            rows = RowMessage(
                index,
                name,
                of[name],
                who.rank,
                who.world,
                collective=_rows_way(exchange),
                after=message.after,
            )
            made.append(rows)
            continue
        ranges = [
            ParamRange(c.tensor, of[c.tensor], c.start, c.stop) for c in message.chunks
        ]
        carrier = on_hosts(exchange, ranks_per_host)
        host_only = carrier.declared.host_only
        is_on_host = home_of((r.param for r in ranges), host_only=host_only) == HOST
        lanes: dict[str, str] = {}
        # On hosts of several ranks a host's sum is encoded, and no gradient before it.
        if ranks_per_host == 1:
            lanes = dict.fromkeys(message.inline, INLINE)
            lanes |= dict.fromkeys(message.early, COMPUTE if is_on_host else OFFLOAD)
        placement = Placement(order=order, after=message.after, lanes=lanes)
        made.append(Message(index, ranges, carrier, who.rank, who.world, placement))
    return made


def _rows_way(exchange: Exchange) -> Collective | None:
    """The collective of ``exchange`` by which rows can travel; None if it has none.

    Rows travel as they are, so an exchange that compresses has none.
    """
    if not isinstance(exchange, Pair) or not exchange.codec.traits.lossless:
        return None
    return exchange.collective if exchange.collective.carries_rows else None


def stated_profile(params: Sequence[NamedParam], model: str) -> Profile:
    """A profile that tells these parameters and no seconds: one layer has them all."""
    dtypes: list[Any] = [str(param.dtype).removeprefix("torch.") for _, param in params]
    try:
        tensors = tuple(
            ProfiledTensor(name=name, shape=tuple(param.shape), dtype=dtype)
            for (name, param), dtype in zip(params, dtypes, strict=True)
        )
    except ValueError as error:
        raise InvalidSetting(f"this model cannot use a plan: {error}") from None
    layer = Layer(name="all", tensors=tensors, forward_s=0.0, backward_s=0.0)
    return Profile(model=model, source="attached", batch_size=1, layers=(layer,))


def check_for(plan: Plan, params: Sequence[NamedParam], sparse: set[int]) -> None:
    """Raises ``InvalidSetting`` unless these parameters can carry ``plan`` out.

    ``sparse`` holds the ids of parameters whose gradients are row-sparse. Each of these
    must be a message of its own, without loss and through a collective that carries
    rows, as in plans of the planner zen.
    """
    profile = stated_profile(params, plan.model)
    check(plan, profile)
    exchanges = sound_exchanges(
        plan, {tensor.name: tensor for tensor in profile.layers[0].tensors}
    )
    of = dict(params)
    for number, message in enumerate(plan.messages):
        rows = [c.tensor for c in message.chunks if id(of[c.tensor]) in sparse]
        if not rows:
            continue
        (first, *others) = message.chunks
        if others:
            why = "with others"
        elif first.numel < of[first.tensor].numel():
            why = "cut"
        elif _rows_way(exchanges[message.exchange]) is None:
            why = f"through {message.exchange!r}, which carries no rows"
        else:
            continue
        raise InvalidSetting(
            f"message {number} of the plan of {plan.planner!r} sends {rows[0]} "
            f"{why}, and its gradients are row-sparse; plan with zen and a profile "
            "with sparsity, build its embedding with sparse=False, or attach an "
            "exchange instead of a plan"
        )
