"""The laws of exchanges that show over many steps: what is drawn, and what is kept.

Each takes an exchange without error feedback, and a case.
"""

from functools import lru_cache

import torch
from torch import Tensor

from gradwire.contract import Exchange
from gradwire.exchange.by_name import run_local
from gradwire.exchange.error_feedback import feedback_refusal, with_error_feedback
from gradwire.exchange.pair import Pair

from .cases import Case, kept_norm, states_of, stepped
from .tolerance import laws_in, must

NUM_KEPT_STEPS = 60
"""Steps with gradients and steps without, where a law is about what is kept."""
NUM_DRAWS = 100
"""Steps, where a law is about what is drawn."""


@lru_cache(maxsize=1)
def _drawn(exchange: Pair, case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """The results of S steps with equal gradients on all ranks, in float64.

    They are the gradient_N, the means_SN, and what ranks contributed, given_SWN.
    """
    states = None
    means = []
    given = []
    for _ in range(NUM_DRAWS):
        results = run_local(
            exchange, case.grads()[:1] * case.world, states, seed=case.seed
        )
        states = states_of(results)
        means.append(results[0][0].double())
        given.append(
            torch.stack([contributed_N.double() for _, contributed_N, _ in results])
        )
    return case.grads()[0].double(), torch.stack(means), torch.stack(given)


def _rounds_at_random(exchange: Exchange, case: Case) -> bool:
    """Whether the codec is unbiased, and the case large enough for statistics."""
    traits = None
    if isinstance(exchange, Pair):
        traits = exchange.codec.traits
    is_random = traits is not None and traits.unbiased and not traits.lossless
    return (
        is_random
        and case.world > 1
        and case.numel >= 200
        and case.dtype == torch.float32
    )


def law_ranks_draw_apart(exchange: Exchange, case: Case) -> bool:
    """Equal gradients are rounded on each rank by itself, where rounding is drawn.

    Then the mean has 1/W of the variance of what a rank contributes. Were the same
    numbers drawn everywhere, it would have all of it.

    To do: give each rank another seed in for_world(world, rank), and encode with
    me.variant_of(codec).
    """
    if not isinstance(exchange, Pair) or not _rounds_at_random(exchange, case):
        return False
    grad_N, means_SN, given_SWN = _drawn(exchange, case)
    of_mean, of_one = (
        float((t - grad_N).square().mean()) for t in (means_SN, given_SWN)
    )
    share = case.world * of_mean / of_one
    must(0.8 < share < 1.25, f"the mean has {share:.3g} / W of the variance of one")
    return True


def law_unbiased_codecs_make_unbiased_means(exchange: Exchange, case: Case) -> bool:
    """The mean of an unbiased codec is unbiased, also where it is encoded again.

    The numbers drawn for it were not used before: over steps and elements, means miss
    the gradient by no more than chance has them miss it.

    To do: draw other random numbers for the mean than for the gradients that it is made
    of.
    """
    if not isinstance(exchange, Pair) or not _rounds_at_random(exchange, case):
        return False
    grad_N, means_SN, _ = _drawn(exchange, case)
    spread_N = means_SN.std(0)
    is_spread_N = spread_N > 0.3 * spread_N.median()  # others were drawn too few times
    off_N = (means_SN.mean(0) - grad_N) * NUM_DRAWS**0.5 / spread_N
    chance = float(off_N[is_spread_N].square().mean())
    must(chance < 1.25, f"means miss by {chance**0.5:.3g} times what is to be expected")
    return True


def law_what_is_kept_does_not_grow_by_itself(exchange: Exchange, case: Case) -> bool:
    """After 60 steps of gradients, 60 of zeros deliver what was kept, or leave it as it
    is.

    A loss that comes back larger than it was, through an encoder that is not
    nonexpansive or through one after another, grows in every step. Between ranks what
    is kept may move: W times at most.

    To do: add what is kept to the next gradient once, on one rank; declare
    nonexpansive=True and error_feedback=True only of what never loses more than it was
    given.
    """
    if feedback_refusal(exchange) is not None:
        return False
    kept = with_error_feedback(exchange)
    states = case.states(kept)
    members = case.members()

    def step(grads: list[Tensor]) -> float:
        states[:] = stepped(kept, members, states, grads, case.seed)
        return kept_norm(states, case.numel)

    for number in range(NUM_KEPT_STEPS):
        before = step(case.grads(number))
    for number in range(NUM_KEPT_STEPS):
        left = step([torch.zeros_like(grad_N) for grad_N in case.grads()])
        must(
            left <= 2 * case.world * before,
            f"{number + 1} steps of zeros after gradients, what is kept grew from "
            f"{before:.3g} to {left:.3g}",
        )
    return True


LAWS = laws_in(globals())
