"""The law of exchanges that encode tensors before their message is whole.

It takes an exchange without error feedback, and a case.
"""

from __future__ import annotations

import random
from math import prod

import torch
from torch import Tensor

from ..contract import Exchange, Member, State
from ..error_feedback import ErrorFeedback
from ..local import drive
from .cases import Case, tensors_of
from .tolerance import must, same_bits

NUM_STEPS = 3


def law_encoding_ahead_changes_no_bit(exchange: Exchange, case: Case) -> bool:
    """Tensors of ``apart`` may be encoded before the others are there: the bits are the same.

    Whichever of them, on each rank others and in another order, over three steps.

    To do: in encode_ahead read and write that tensor's elements only, of gradient, residual and
    state, and have synchronise take it from me.ahead instead of encoding it again.
    """
    if not exchange.apart(case.spec) or case.world == 1:
        return False
    for tried in (exchange, ErrorFeedback(exchange)):
        for got, want in zip(_steps(tried, case, True), _steps(tried, case, False), strict=True):
            for a_N, b_N in zip(got, want, strict=True):
                must(same_bits(a_N, b_N), "a mean or a state differs")
    return True


def _steps(exchange: Exchange, case: Case, is_ahead: bool) -> list[list[Tensor]]:
    """The means and the tensors of all states after each step."""
    draw, found = random.Random(case.seed), []
    states = case.states(exchange)
    members = [Member(rank, case.world) for rank in range(case.world)]
    for step in range(NUM_STEPS):
        grads = case.grads(step)
        if is_ahead:
            for me, state, grad_N in zip(members, states, grads, strict=True):
                _encode_some(exchange, case, draw, (me, state, grad_N))
        texts = [
            exchange.synchronise(me, state, grad_N, grad_N)
            for me, state, grad_N in zip(members, states, grads, strict=True)
        ]
        states = drive(texts, seed=case.seed).results
        must(not any(me.ahead for me in members), "what was encoded ahead was not taken")
        found.append([*grads, *(tensor.clone() for tensor in tensors_of(tuple(states)))])
    return found


def _encode_some(
    exchange: Exchange, case: Case, draw: random.Random, operands: tuple[Member, State, Tensor]
) -> None:
    """Encodes some tensors ahead, each while the elements of all others are NaN."""
    me, state, grad_N = operands
    sizes, places = [prod(shape) for shape in case.spec.shapes], exchange.apart(case.spec)
    for place in draw.sample(places, draw.randint(1, len(places))):
        there_N = torch.full_like(grad_N, float("nan"))
        torch.split(there_N, sizes)[place].copy_(torch.split(grad_N, sizes)[place])
        exchange.encode_ahead(me, state, place, there_N)


LAWS = (law_encoding_ahead_changes_no_bit,)
