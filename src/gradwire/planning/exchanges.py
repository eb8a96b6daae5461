"""The exchanges that a plan names, made for the runtime and the simulator."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..compress.none import none
from ..contract import Exchange
from ..contract.spec import TensorSpec
from ..errors import InvalidSetting
from ..exchange.by_name import by_name, exchange_for
from ..exchange.error_feedback import TensorEncoder
from .data.plan import DENSE, ExchangeSetting, Plan, PlannedMessage
from .data.profile import ProfiledTensor


def exchanges_of(plan: Plan) -> dict[str, Exchange]:
    """Every exchange by its name in the plan, "dense" among them.

    Raises ``InvalidSetting`` for an unknown compressor, collective or setting, and for a compressor
    and a collective that do not go together.
    """
    return {
        DENSE: exchange_for(none()),
        **{name: exchange_of_setting(one) for name, one in plan.exchanges.items()},
    }


def exchange_of_setting(setting: ExchangeSetting) -> Exchange:
    """The exchange that a plan's setting names; raises ``InvalidSetting`` as ``exchanges_of``."""
    return by_name(
        setting.compressor,
        setting.settings,
        setting.collective,
        collective_settings=setting.collective_settings,
        error_feedback=setting.error_feedback,
    )


def keeping_whole(plan: Plan) -> set[str]:
    """Names of the exchanges that act on tensors in their shapes."""
    return {name for name, made in exchanges_of(plan).items() if made.keeps_whole}


def refuse_cuts(plan: Plan, numels: Mapping[str, int]) -> None:
    """Raises ``InvalidSetting`` where a tensor (``numels`` by name) is cut that must be whole."""
    whole = keeping_whole(plan)
    for number, message in enumerate(plan.messages):
        for chunk in message.chunks if message.exchange in whole else ():
            if chunk.numel < numels[chunk.tensor]:
                algorithm = plan.exchanges[message.exchange].compressor
                raise InvalidSetting(
                    f"plan of {plan.planner!r} for {plan.model!r} cannot be used: message {number} "
                    f"sends elements {chunk.start}:{chunk.stop} of {chunk.tensor!r} through "
                    f"{algorithm}, which takes whole tensors; plan that tensor uncut, or give the "
                    "message another exchange"
                )


def planned_spec(
    message: PlannedMessage, tensors: Mapping[str, ProfiledTensor], *, is_shaped: bool
) -> TensorSpec:
    """The spec of the gradient that a message exchanges; ``is_shaped`` is for uncut tensors."""
    found = [tensors[chunk.tensor] for chunk in message.chunks]
    return TensorSpec(
        "",
        sum(chunk.numel for chunk in message.chunks),
        getattr(torch, found[0].dtype),
        tuple(tensor.shape for tensor in found) if is_shaped else (),
    )


def refuse_encodes(plan: Plan, tensors: Mapping[str, ProfiledTensor]) -> None:
    """Raises ``InvalidSetting`` for an ``inline`` or ``early`` that is not what is encoded.

    What an exchange encodes tensor by tensor it states itself (``EncodesTensors``). The plan is one
    that ``check`` and ``refuse_cuts`` accept, for these tensors by name.
    """
    encoded = [one for one in enumerate(plan.messages) if one[1].inline or one[1].early]
    made = exchanges_of(plan) if encoded else {}
    for number, message in encoded:
        named, exchange = {*message.inline, *message.early}, made[message.exchange]
        setting, apart = plan.exchanges[message.exchange], set[str]()
        encoder = TensorEncoder.of(exchange)
        if encoder is not None and exchange.keeps_whole:
            places = encoder.exchange.apart(planned_spec(message, tensors, is_shaped=True))
            apart = {message.chunks[place].tensor for place in places}
        if named == apart or (not apart and setting.sparsifier is None):
            continue
        name = min(named ^ apart, default="")
        why = f"is to be encoded by itself, and {setting.compressor} does not encode it so"
        if name in apart:
            why = "is encoded by itself, and named neither inline nor early as others are"
        raise InvalidSetting(
            f"plan of {plan.planner!r} for {plan.model!r} cannot be used: in message {number} "
            f"{name!r} {why}; name all tensors that are not sent dense, or none of the message's"
        )
