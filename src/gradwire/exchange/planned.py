"""The exchanges that a plan names, made for the runtime and the simulator."""

from collections.abc import Mapping

import torch

from ..compress.none import none
from ..contract import Exchange
from ..contract.spec import TensorSpec
from ..errors import InvalidSetting
from ..planning.data.plan import DENSE, ExchangeSetting, Plan, PlannedMessage
from ..planning.data.profile import ProfiledTensor
from .by_name import by_name, exchange_for
from .error_feedback import tensor_encoder


def exchanges_of(plan: Plan) -> dict[str, Exchange]:
    """Every exchange by its name in the plan, "dense" among them.

    Raises ``InvalidSetting`` for an unknown compressor, collective or setting, and for
    a compressor and a collective that do not go together.
    """
    return {
        DENSE: exchange_for(none()),
        **{
            name: exchange_of_setting(setting)
            for name, setting in plan.exchanges.items()
        },
    }


def exchange_of_setting(setting: ExchangeSetting) -> Exchange:
    """The exchange that a plan's setting names.

    Raises ``InvalidSetting`` as ``exchanges_of``.
    """
    return by_name(
        setting.compressor,
        setting.settings,
        setting.collective,
        collective_settings=setting.collective_settings,
        error_feedback=setting.error_feedback,
    )


def planned_spec(
    message: PlannedMessage, tensors: Mapping[str, ProfiledTensor], *, is_shaped: bool
) -> TensorSpec:
    """The spec of the gradient that a message exchanges.

    ``is_shaped`` is for uncut tensors.
    """
    profiled = [tensors[chunk.tensor] for chunk in message.chunks]
    return TensorSpec(
        "",
        sum(chunk.numel for chunk in message.chunks),
        getattr(torch, profiled[0].dtype),
        tuple(tensor.shape for tensor in profiled) if is_shaped else (),
    )


def sound_exchanges(
    plan: Plan, tensors: Mapping[str, ProfiledTensor]
) -> dict[str, Exchange]:
    """``exchanges_of`` a plan that ``check`` accepts, for a model's tensors by name.

    Raises ``InvalidSetting`` as ``exchanges_of`` does, and if a tensor is cut that must
    be whole. It also raises if ``inline`` or ``early`` names other tensors than the
    exchange encodes one by one (``EncodesTensors``).
    """
    made = exchanges_of(plan)
    for number, message in enumerate(plan.messages):
        exchange = made[message.exchange]
        setting = plan.exchanges.get(message.exchange)
        if setting is None:
            continue
        start = f"plan of {plan.planner!r} for {plan.model!r} cannot be used: "
        for chunk in message.chunks if exchange.declared.whole_tensors else ():
            if chunk.numel < tensors[chunk.tensor].numel:
                raise InvalidSetting(
                    f"{start}message {number} sends elements "
                    f"{chunk.start}:{chunk.stop} of {chunk.tensor!r} through "
                    f"{setting.compressor}, which takes whole tensors; plan that "
                    "tensor uncut, or give the message another exchange"
                )
        named = {*message.inline, *message.early}
        apart = set[str]()
        encoder = (
            tensor_encoder(exchange)
            if named and exchange.declared.whole_tensors
            else None
        )
        if encoder is not None:
            places = encoder.apart(planned_spec(message, tensors, is_shaped=True))
            apart = {message.chunks[place].tensor for place in places}
        if not named or named == apart or (not apart and setting.sparsifier is None):
            continue
        name = min(named ^ apart, default="")
        why = (
            f"is to be encoded by itself, and {setting.compressor} does not encode "
            "it so"
        )
        if name in apart:
            why = (
                "is encoded by itself, and named neither inline nor early as others are"
            )
        raise InvalidSetting(
            f"{start}in message {number} {name!r} {why}; name all tensors that are not "
            "sent dense, or none of the message's"
        )
    return made
