"""Fidelity: which compressors a planner that chooses may take, and the evidence that admits them.

``LOSS_OVER_DENSE`` is the table of a GPT under AdamW in ``docs/measured.md``, made by ``gradwire
bench train``: held-out loss over that of dense training, every compressor with its default settings
through the collective that suits it, matrices only. So that is what a planner admits: a compressor
with its defaults, its suited collective and the error feedback that it asks for, for matrices.
``EXACT`` needs no such evidence.
"""

from __future__ import annotations

from math import inf
from typing import Literal, NamedTuple, get_args

from ..contract import Compressor
from ..contract.registry import load, names
from ..errors import invalid
from ..exchange.pair import suited
from .data.cluster import Cluster
from .data.plan import ExchangeSetting

Fidelity = Literal["exact", "half", "safe", "any"]
FIDELITIES: tuple[Fidelity, ...] = get_args(Fidelity)

LOSS_OVER_DENSE = {"cast16": 1.00, "fp8": 1.00, "int8": 1.00, "uniform": 1.00, "qsgd": 1.01}
"""The compressors that trained to the loss of dense training, or within 1 % of it.

In the other trainings there qsgd and uniform end up to 3 % behind."""

MOST_ERROR: dict[str, float] = {"exact": 0.01, "half": 0.01, "safe": 0.75, "any": inf}
"""The most that a step's means may be off those of dense training, as a share of their norm.

Without any loss sums are still made in another order, and those of bfloat16 are rounded to it.
In the first 25 steps of the tasks of ``gradwire bench train`` (GPT under AdamW, the others under
SGD, four ranks), the worst mean of a message of matrices was off by 0.0035 with cast16, 0.29 with
fp8, 0.21 with int8, 0.38 with qsgd and 0.49 with uniform; the average by 0.003 to 0.3.
"""

HALF = ("cast16",)
"""Compressors that send the gradient itself, in 16 bits."""

EXACT = ("lossless",)
"""Compressors that send the very bits, by fewer bytes. Where a fidelity admits more, those of
``HALF`` send less in less time."""

NO_CHOICE = ("none", "nonzero", *EXACT)
"""Compressors that "any" need not look at: what they send is dense training, by more bytes or by as
many, or ``EXACT``."""


class AdmittedExchanges(NamedTuple):
    """The exchanges that a fidelity admits on a cluster, and the compressors that it cannot."""

    exchanges: dict[str, ExchangeSetting]
    """By the compressor's name; those of ``LOSS_OVER_DENSE`` first, and in its order."""
    not_measured: tuple[str, ...]
    """Compressors that the fidelity admits, and of which the cluster knows no costs."""


def admitted(fidelity: str, cluster: Cluster) -> AdmittedExchanges:
    """The exchanges that may be chosen; raises ``InvalidSetting`` for a fidelity there is not.

    >>> admitted("half", Cluster(num_ranks=4, rate_bytes_per_s=1e9))
    AdmittedExchanges(exchanges={}, not_measured=('cast16',))
    """
    if not isinstance(fidelity, str) or fidelity not in FIDELITIES:
        accepted = ", ".join(map(repr, FIDELITIES))
        raise invalid("fidelity", fidelity, accepted, "leave it out for 'safe'")
    wanted: dict[str, tuple[str, ...]] = {
        "exact": EXACT,
        "half": HALF,
        "safe": tuple(LOSS_OVER_DENSE),
        "any": tuple(
            name
            for name in dict.fromkeys((*LOSS_OVER_DENSE, *names("compress")))
            if name not in NO_CHOICE
        ),
    }
    exchanges = {name: setting_of(name) for name in wanted[fidelity] if name in cluster.codecs}
    return AdmittedExchanges(
        exchanges, tuple(n for n in wanted[fidelity] if n not in cluster.codecs)
    )


def stricter(fidelity: str) -> str:
    """The next fidelity that admits less; "exact" for itself.

    >>> stricter("safe"), stricter("exact")
    ('half', 'exact')
    """
    return FIDELITIES[max(0, FIDELITIES.index(fidelity) - 1)]


def setting_of(compressor: str) -> ExchangeSetting:
    """A compressor as it trained: default settings, suited collective, feedback if it asks."""
    made = load("compress", compressor)()
    return ExchangeSetting(
        compressor=compressor,
        collective=type(suited(made)).__name__ if isinstance(made, Compressor) else None,
        error_feedback=made.traits.error_feedback,
    )
