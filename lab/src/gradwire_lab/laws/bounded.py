"""The laws that means stay near dense ones, and that what an exchange keeps stays
bounded.

Each takes an exchange without error feedback, and a case.
"""

import torch
from torch import Tensor

from gradwire.collective.casync_ps import casync_ps
from gradwire.contract import Exchange
from gradwire.exchange.error_feedback import feedback_refusal, with_error_feedback
from gradwire.exchange.pair import Pair
from gradwire_lab.collective.casync_ring import casync_ring

from .cases import Case, accuracy, kept_norm, kept_of, stepped, thinned, total_of
from .tolerance import assert_near, largest, must, same_bits

NUM_STEPS = 400
_EARLY = slice(100, 200)
_LATE = slice(300, 400)
_MOST = 1.3
"""The most by which residuals may be larger late than early. A sum of gradients that
are drawn independently is 1.53 times as large then, and one of equal gradients 2.3
times.
"""


def law_residuals_stay_bounded(exchange: Exchange, case: Case) -> bool:
    """Over 400 steps of gradients what is kept levels off, as everything is sent in the
    end.

    An encoder that is nonexpansive on every vector and loses the same elements each
    time keeps more and more.

    To do: let every element that is kept be sent at some time, the larger the sooner.
    """
    if feedback_refusal(exchange) is not None:
        return False
    kept = with_error_feedback(exchange)
    states = case.states(kept)
    members = case.members()
    norms: list[float] = []
    for number in range(NUM_STEPS):
        states = stepped(kept, members, states, case.grads(number), number)
        norms.append(kept_norm(states, case.numel))
    early, late = (float(Tensor(norms[some]).mean()) for some in (_EARLY, _LATE))
    must(
        late <= _MOST * early + 1e-6,
        f"the norm of what is kept is {early:.3g} in steps 100 to 200 and {late:.3g} "
        "in steps 300 to 400",
    )
    return True


NUM_FOLLOWED = 12
_EVERY = (1, 1, 16, 0, 1, 1)
"""Steps: one in so many elements is not zero; 0 stands for none."""
_LEAST = 200
"""Elements from which on sums are bounded: gradients of fewer may agree by chance."""
_FACTOR = 1.5
"""The most by which what means lack in all may exceed what is expected of independent
losses.
"""


def law_means_follow_the_dense_mean(exchange: Exchange, case: Case) -> None:
    """Over 12 steps all ranks have the same bits, nothing is lost, and means add up to
    dense ones.

    Each mean of a lossless codec is the dense one, to one rounding a rank.

    Steps have many, few, no and again many elements that are not zero, and buffers are
    kept. Let G be the root of the sum of all squared gradients, of every rank and step.
    Of 200 elements or more, as fewer may agree by chance:
    - With error feedback: W times what the means lack in all is at most 1.5 G.
    - Without: it is at most 1.5 G sqrt((1 + e^2)^h - 1). The codec loses e of a
      gradient's norm, and encodes h times on the way: W times by casync_ring, twice by
      casync_ps.

    To do: find the step that is named. Where its mean is off, look at what a buffer or
    a state held before it; where sums drift apart slowly, at what is encoded again.
    """
    keeps = feedback_refusal(exchange) is None
    tried = exchange
    if keeps:
        tried = with_error_feedback(exchange)
    states = case.states(tried)
    members = case.members()
    near = accuracy(exchange, case)
    exact = isinstance(exchange, Pair) and exchange.codec.traits.lossless
    old_N, owed_N = torch.zeros(2, case.numel, dtype=torch.float64)
    squares = 0.0
    loss = 0.0
    size = 0.0
    terms = case.world + 4
    for step in range(NUM_FOLLOWED):
        grads = [
            thinned(grad_N, _EVERY[step % len(_EVERY)]) for grad_N in case.grads(step)
        ]
        if not keeps:
            loss = max(loss, _loss(exchange, case, grads))
        outs = [torch.full_like(grad_N, 3.0) for grad_N in grads]
        states = stepped(tried, members, states, grads, step, outs)
        for rank, out_N in enumerate(outs):
            must(
                same_bits(out_N, outs[0]),
                f"step {step}: rank {rank} has other bits than rank 0",
            )
        got_N = case.world * outs[0].double()
        sum_N = total_of(grads)
        new_N = total_of([kept_of(state, case.numel) for state in states])
        size = max(size, case.world * largest(*grads, old_N, new_N))
        if exact:
            what = f"step {step}: W * mean against the sum"
            assert_near(
                got_N, sum_N, case.dtype, magnitude=size, terms=terms, what=what
            )
        if keeps:
            what = (
                f"step {step}: W * mean + new residuals against gradients + old "
                "residuals"
            )
            assert_near(
                got_N + new_N,
                sum_N + old_N,
                near,
                magnitude=size,
                terms=terms,
                what=what,
            )
        owed_N += sum_N - got_N
        squares += sum(float(grad_N.double().square().sum()) for grad_N in grads)
        share = 1.0
        if not keeps:
            share = ((1 + loss**2) ** _hops(exchange, case.world) - 1) ** 0.5
        rounding = NUM_FOLLOWED * size * case.numel**0.5 * torch.finfo(near).eps
        allowed = _FACTOR * squares**0.5 * share + rounding
        lack = float(owed_N.norm())
        what = f"after step {step} means lack {lack:.3g} in all, allowed {allowed:.3g}"
        must(case.numel < _LEAST or lack <= allowed, what)
        old_N = new_N


def _hops(exchange: Exchange, world: int) -> int:
    """How often what a rank sends is encoded on its way into the mean."""
    collective = exchange.collective if isinstance(exchange, Pair) else None
    if isinstance(collective, casync_ring):
        return world
    return 2 if isinstance(collective, casync_ps) else 1


def _loss(exchange: Exchange, case: Case, grads: list[Tensor]) -> float:
    """The share of a gradient's norm that the codec loses, the largest of all ranks."""
    if not isinstance(exchange, Pair):
        return float("inf")  # nobody knows
    codec = exchange.codec
    shares = [0.0]
    for grad_N in grads:
        payload, _ = codec.encode(codec.init(case.spec), grad_N)
        lost_N = (
            codec.decode(payload, torch.empty_like(grad_N)).double() - grad_N.double()
        )
        if grad_N.any():
            shares.append(float(lost_N.norm() / grad_N.double().norm()))
    return max(shares)


LAWS = (law_residuals_stay_bounded, law_means_follow_the_dense_mean)
