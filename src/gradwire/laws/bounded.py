"""The law that what an exchange keeps stays bounded while gradients go on coming.

It takes an exchange without error feedback, and a case.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..contract import Exchange, Member
from ..error_feedback import feedback_refusal, with_error_feedback
from ..local import drive
from .cases import Case, kept_of
from .tolerance import must

NUM_STEPS = 400
_EARLY, _LATE = slice(100, 200), slice(300, 400)
_MOST = 1.3
"""The most by which residuals may be larger late than early. A sum of gradients that are drawn
independently is 1.53 times as large then, and one of equal gradients 2.3 times."""


def law_residuals_stay_bounded(exchange: Exchange, case: Case) -> bool:
    """Over 400 steps of gradients what is kept levels off, as everything is sent in the end.

    A contraction on every vector that loses the same elements each time keeps more and more.

    To do: let every element that is kept be sent at some time, the larger the sooner.
    """
    if feedback_refusal(exchange) is not None:
        return False
    kept = with_error_feedback(exchange)
    states, members = case.states(kept), [Member(rank, case.world) for rank in range(case.world)]
    norms: list[float] = []
    for number in range(NUM_STEPS):
        texts = [
            kept.synchronise(me, state, grad_N, grad_N)
            for me, state, grad_N in zip(members, states, case.grads(number), strict=True)
        ]
        states = drive(texts, seed=number, ranks_per_host=exchange.ranks_per_host).results
        norms.append(float(torch.stack([kept_of(state, case.numel) for state in states]).norm()))
    early, late = (float(Tensor(norms[some]).mean()) for some in (_EARLY, _LATE))
    must(
        late <= _MOST * early + 1e-6,
        f"the norm of what is kept is {early:.3g} in steps 100 to 200 and {late:.3g} in steps 300 "
        "to 400",
    )
    return True


LAWS = (law_residuals_stay_bounded,)
