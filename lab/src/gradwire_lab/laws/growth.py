"""The law that a mean does not grow with the ranks that a partial sum passes, nor with
steps.

It takes an exchange without error feedback, and a case of many ranks: see
``MANY_RANKS``.
"""

import torch

from gradwire.contract import Exchange
from gradwire.exchange.error_feedback import feedback_refusal, with_error_feedback

from .cases import Case, stepped
from .tolerance import must

NUM_STEPS = 12
MOST = 2.0
"""The most by which the sum of means may miss the sum of gradients' means, in norms of
the latter.

Sending nothing at all misses by 1, and so much do shipped exchanges with 8 and 16 ranks
at most.
"""
MANY_RANKS = (Case(world=8, numel=600, seed=8), Case(world=16, numel=1200, seed=16))


def law_means_do_not_grow_over_ranks_and_steps(exchange: Exchange, case: Case) -> bool:
    """Means of 12 steps add up to the sum of the gradients' means, within twice the
    sum's norm.

    Ranks have a gradient in common, which stays, and noise of the same size each. An
    encoder that makes vectors larger, applied at every rank to the sum so far,
    multiplies: means grow exponentially with the number of ranks, and conservation
    holds all the while.

    To do: write the compressor's for_sums, a variant that makes no vector larger, and
    set encodes_sums = True in a collective that encodes partial sums again. Or take a
    collective that encodes a gradient and a mean once each, as casync_ps.
    """
    if case.world == 1 or case.numel == 0:
        return False
    kept = exchange
    if feedback_refusal(exchange) is None:
        kept = with_error_feedback(exchange)
    states = case.states(kept)
    members = case.members()
    common_N = case.grads()[0]
    got_N, want_N = (torch.zeros(case.numel, dtype=torch.float64) for _ in range(2))
    for number in range(NUM_STEPS):
        grads = [common_N + noise_N for noise_N in case.grads(1 + number)]
        want_N += torch.stack([grad_N.double() for grad_N in grads]).mean(0)
        states = stepped(kept, members, states, grads, case.seed + number)
        got_N += grads[0]  # the mean took the gradient's place
    off = float((got_N - want_N).norm() / want_N.norm())
    must(
        off <= MOST,
        f"after {NUM_STEPS} steps of {case.world} ranks the sum of means misses that "
        f"of gradients' means by {off:.3g} times its norm, allowed {MOST:g}",
    )
    return True


LAWS = (law_means_do_not_grow_over_ranks_and_steps,)
