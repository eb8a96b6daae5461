"""The laws of exchanges that encode tensors before their message is whole.

They take an exchange without error feedback, and a case.
"""

import random
from collections.abc import Callable
from contextlib import suppress
from math import prod

import torch
from torch import Tensor

from gradwire.contract import EncodesTensors, Exchange, Member, Residual, State
from gradwire.exchange.error_feedback import (
    ErrorFeedback,
    encoder_state,
    tensor_encoder,
)

from .cases import Case, stepped, tensors_of
from .tolerance import all_same_bits, must

NUM_STEPS = 3
Encode = Callable[[EncodesTensors, Member, State, int, Tensor, Residual], None]


def law_encoding_ahead_changes_no_bit(exchange: Exchange, case: Case) -> bool:
    """Tensors of ``apart`` may be encoded before the others are there: the bits are the
    same.

    Whichever of them, on each rank others and in another order, over three steps.

    To do: in encode_ahead read and write that tensor's elements only, of gradient,
    residual and state, and have synchronise take it from me.ahead instead of encoding
    it again.
    """
    return _same_bits(exchange, case, lambda encoder, *of: encoder.encode_ahead(*of))


def law_encoding_on_the_host_changes_no_bit(exchange: Exchange, case: Case) -> bool:
    """Tensors of ``apart`` may be copied to the host and encoded there: the bits are
    the same.

    To do: in encode_on_host yield all that is selected from, with the residual in it,
    and leave in the residual what the entries lack of it.
    """
    return _same_bits(exchange, case, _by_copies)


def _by_copies(
    encoder: EncodesTensors,
    me: Member,
    state: State,
    place: int,
    grad_N: Tensor,
    residual_N: Residual,
) -> None:
    """Encodes a tensor from a copy, and goes on with a copy of what was made of it."""
    steps = encoder.encode_on_host(me, state, place, grad_N, residual_N)
    made = steps.send(tuple(tensor.clone() for tensor in next(steps)))
    with suppress(StopIteration):
        steps.send(tuple(tensor.clone() for tensor in made))
        must(False, "it asks for a third copy")


def _same_bits(exchange: Exchange, case: Case, encode: Encode) -> bool:
    encoder = tensor_encoder(exchange)
    if encoder is None or not encoder.apart(case.spec) or case.world == 1:
        return False
    for tried in (exchange, ErrorFeedback(exchange)):
        for got, want in zip(
            _steps(tried, case, encode), _steps(tried, case), strict=True
        ):
            must(all_same_bits(got, want), "a mean or a state differs")
    return True


def _steps(
    exchange: Exchange, case: Case, encode: Encode | None = None
) -> list[list[Tensor]]:
    """The means and the tensors of all states after each step."""
    draw = random.Random(case.seed)
    rows = []
    states = case.states(exchange)
    members = case.members()
    for step in range(NUM_STEPS):
        grads = case.grads(step)
        if encode is not None:
            for me, state, grad_N in zip(members, states, grads, strict=True):
                _encode_some(exchange, case, draw, (me, state, grad_N), encode)
        states = stepped(exchange, members, states, grads, case.seed)
        must(
            not any(me.ahead for me in members), "what was encoded ahead was not taken"
        )
        rows.append([*grads, *(tensor.clone() for tensor in tensors_of(tuple(states)))])
    return rows


def _encode_some(
    exchange: Exchange,
    case: Case,
    draw: random.Random,
    operands: tuple[Member, State, Tensor],
    encode: Encode,
) -> None:
    """Encodes some tensors ahead, each while the elements of all others are NaN."""
    me, state, grad_N = operands
    inner, residual_N = encoder_state(state)
    encoder = tensor_encoder(exchange)
    assert encoder is not None
    sizes = [prod(shape) for shape in case.spec.shapes]
    places = encoder.apart(case.spec)
    for place in draw.sample(places, draw.randint(1, len(places))):
        there_N = torch.full_like(grad_N, float("nan"))
        torch.split(there_N, sizes)[place].copy_(torch.split(grad_N, sizes)[place])
        encode(encoder, me, inner, place, there_N, residual_N)


LAWS = (law_encoding_ahead_changes_no_bit, law_encoding_on_the_host_changes_no_bit)
