"""The exchanges that a plan names, made for the runtime and the simulator."""

from __future__ import annotations

from collections.abc import Mapping

from ..compress.none import none
from ..contract import Exchange
from ..errors import InvalidSetting
from ..exchange import by_name, exchange_for
from .plan import DENSE, Plan


def exchanges_of(plan: Plan) -> dict[str, Exchange]:
    """Every exchange by its name in the plan, "dense" among them.

    Raises ``InvalidSetting`` for an unknown compressor, collective or setting, and for a compressor
    and a collective that do not go together.
    """
    made = {
        name: by_name(
            one.compressor, one.settings, one.collective, error_feedback=one.error_feedback
        )
        for name, one in plan.exchanges.items()
    }
    return {DENSE: exchange_for(none()), **made}


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
