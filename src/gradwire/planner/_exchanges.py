"""The exchanges that a plan names, made: what the runtime carries out and the simulator prices."""

from __future__ import annotations

from ..compress.none import none
from ..exchange import Exchange, by_name, exchange_for
from ._types import DENSE, Plan


def exchanges_of(plan: Plan) -> dict[str, Exchange]:
    """Every exchange by its name in the plan, "dense" among them.

    Raises ``InvalidSetting`` for an unknown compressor, collective or setting, and for a pair that
    cannot be.
    """
    made = {
        name: by_name(
            one.compressor, one.settings, one.collective, error_feedback=one.error_feedback
        )
        for name, one in plan.exchanges.items()
    }
    return {DENSE: exchange_for(none()), **made}
