"""Wrapped exchanges keep the laws of exchanges, in the form that each wrapper gives
them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire.contract import Exchange
from gradwire.exchange.by_name import run_local
from gradwire.exchange.natural import Natural
from gradwire_lab.exchange.adapt import Adapted
from gradwire_lab.exchange.clipping import norm
from gradwire_lab.exchange.measured_scheme import MeasuredScheme
from gradwire_lab.exchange.momentum import MomentumCorrection
from gradwire_lab.exchange.warmup import Warmup
from gradwire_lab.laws import collectives, exchanges, many_steps
from gradwire_lab.laws.cases import FEW, Case
from gradwire_lab.laws.subjects import FEW_LONG
from gradwire_lab.laws.tolerance import same_bits
from tests.each import each
from tests.laws import broken_decoupled, broken_momentum, decoupled_laws, momentum_laws
from tests.laws.cases import (
    ALWAYS,
    SHARES,
    Share,
    drawn_case,
    name_of,
    part_of,
    rotated,
    share_of,
)
from tests.laws.test_laws_bite import rejected

codecs, together, pair = gw.compress, gw.collective, gw.pair


def hold(
    law: Callable[..., None],
    exchanges: Sequence[Exchange],
    of: int,
    share: Share,
) -> None:
    """A law holds for a share of the exchanges, each in a case that is drawn; the
    sample is one ``of`` so many.
    """
    sample = part_of(law, exchanges, of)
    for exchange in exchanges:
        if share_of(law, exchange, exchange in sample) is share:
            law(exchange, drawn_case(law, exchange))


MOMENTUM: tuple[MomentumCorrection, ...] = tuple(
    gw.with_momentum_correction(*given)
    for given in (
        (codecs.topk(density=0.1),),
        (codecs.topk(density=0.3), 0.5, True),
        (codecs.topk(density=0.3), 0.9, False, False),
        (codecs.topk(density=0.3, values=torch.bfloat16),),
        (codecs.topk(density=1.0), 0.9, True),
        (codecs.dgc(density=0.3),),
        (codecs.adacomp(block=64),),
        (codecs.onebit(block=64),),
        (codecs.powersgd(rank=1),),
        (codecs.deft(density=0.2),),
        (pair(codecs.topk(density=0.3), together.casync_ps()),),
    )
)
MOMENTUM_LAWS = momentum_laws.LAWS + exchanges.OF_ANY_ACCOUNT


@SHARES
@each("law", MOMENTUM_LAWS, ids=name_of)
def test_exchanges_with_momentum_keep_every_law(
    law: Callable[..., None], share: Share
) -> None:
    hold(law, MOMENTUM, 2, share)


DECOUPLED = tuple(
    gw.with_decoupled_momentum(inner, decay)
    for inner, decay in (
        (codecs.demo(), 0.999),
        (codecs.demo(side=8, keep=4, values=torch.float32), 0.9),
        (codecs.topk(density=0.3), 0.5),
        (codecs.onebit(block=64), 0.9),
        (codecs.powersgd(rank=1), 0.9),
        (pair(codecs.demo(), together.casync_ps()), 0.9),
    )
)
DECOUPLED_LAWS = decoupled_laws.LAWS + exchanges.OF_ANY_ACCOUNT


@SHARES
@each("law", DECOUPLED_LAWS, ids=name_of)
def test_exchanges_with_decoupled_momentum_keep_every_law(
    law: Callable[..., None], share: Share
) -> None:
    hold(law, DECOUPLED, 2, share)


CHANGING = (
    *(
        gw.with_density_warmup(inner, steps_per_stage=2, densities=(0.5, 0.2, 0.05))
        for inner in (
            pair(codecs.topk(), together.allgather_sparse()),
            pair(codecs.dgc(), together.allgather_sparse()),
        )
    ),
    gw.with_warmup(pair(codecs.onebit(block=64), together.casync_ps()), steps=2),
    Warmup(codecs.powersgd(rank=1), steps=1),
    MeasuredScheme(
        pair(codecs.topk(density=0.1), together.allgather_sparse()), num_steps=2
    ),
    MeasuredScheme(
        pair(codecs.dgc(density=0.3), together.allgather_sparse()), num_steps=2
    ),
    MeasuredScheme(pair(codecs.nonzero(), together.allgather_sparse()), num_steps=2),
    Natural(pair(codecs.topk(density=0.1), together.allgather_sparse()), 7),
    Natural(pair(codecs.none(), together.allreduce()), 7),
)
"""The law's few steps go through all stages, or a scheme is chosen in their midst;
drawn gradients are dense. Each law wraps these in error feedback itself.
"""


def by_law(laws: tuple[Callable[..., Any], ...]) -> pytest.MarkDecorator:
    """A test for each law; those of many steps are slow, and others of their kind are
    above.
    """
    slow = [
        pytest.param(law, marks=pytest.mark.slow)
        for law in laws
        if law in many_steps.LAWS
    ]
    brief = [law for law in laws if law not in many_steps.LAWS]
    return pytest.mark.parametrize("law", [*brief, *slow], ids=lambda law: law.__name__)


@by_law(exchanges.LAWS)
@each("exchange", CHANGING)
def test_exchanges_that_change_over_steps_keep_every_law(
    law: Callable[..., None], exchange: Exchange
) -> None:
    place = CHANGING.index(exchange) + exchanges.LAWS.index(law)
    usual = FEW_LONG[place % 2] if law in many_steps.LAWS else ALWAYS
    law(exchange, rotated(place) if place % 2 else usual)


ADAPTED = tuple(
    Adapted(inner, error, every=2)
    for inner, error in (
        (pair(codecs.topk(density=0.2), together.allgather_sparse()), None),
        (
            pair(codecs.topk(density=0.1, values=torch.bfloat16), together.casync_ps()),
            0.7,
        ),
        (pair(codecs.dgc(density=0.3), together.allgather_sparse()), 0.5),
        (pair(codecs.qsgd(block=64), together.casync_ps()), 0.3),
        (pair(codecs.uniform(bitwidth=8, block=64), together.casync_ps()), 0.05),
        (codecs.powersgd(rank=2), None),
        (codecs.powersgd(rank=1), 0.6),
    )
)
"""Settings change in the law's few steps, from one tensor to another."""
ADAPTED_LAWS = (*collectives.OF_ANY, *exchanges.LAWS)


@pytest.mark.slow
@SHARES
@by_law(ADAPTED_LAWS)
def test_adapted_exchanges_keep_every_law(
    law: Callable[..., None], share: Share
) -> None:
    hold(law, ADAPTED, 3, share)


@each("case", FEW, ids=str)
def test_the_norm_is_that_of_the_gradient(case: Case) -> None:
    for grad_N in case.grads():
        want = torch.linalg.vector_norm(grad_N, dtype=torch.float64)
        assert norm(grad_N) == pytest.approx(float(want), rel=1e-12)


@each("case, share", product(FEW, [0.5, 10.0]), ids=str)
def test_clipping_is_the_exchange_of_clipped_gradients(
    case: Case, share: float
) -> None:
    """Bit for bit, momentum, residuals and all; above the norms it changes nothing."""
    inner = gw.with_momentum_correction(codecs.topk(density=0.3))
    grads = [case.grads(step) for step in range(3)]
    norms = [[norm(g) for g in step] for step in grads]
    bound = share * max(0.001, *map(max, norms))
    max_norm = bound * case.world**0.5
    clipped = gw.with_clipping(inner, max_norm)
    states, others = case.states(inner), case.states(clipped)
    assert (share < 1) == any(
        norm > bound for step in norms for norm in step
    ) or not case.numel
    for step, given in enumerate(grads):
        bound = max_norm / case.world**0.5
        factors = [min(1.0, bound / norm) if norm else 1.0 for norm in norms[step]]
        small = [g * f for g, f in zip(given, factors, strict=True)]
        got = run_local(clipped, given, others, seed=step)
        want = run_local(inner, small, states, seed=step)
        others, states = ([state for _, _, state in results] for results in (got, want))
        for a, b in zip(got, want, strict=True):
            assert same_bits(a[0], b[0])
            assert same_bits(a[1], b[1])
            assert same_bits(a[2].residual_N, b[2].residual_N)


@each("law", exchanges.OF_ANY_ACCOUNT, ids=lambda law: law.__name__)
def test_clipping_keeps_what_is_not_about_the_account(law: Callable[..., None]) -> None:
    clipped = gw.with_clipping(
        pair(codecs.topk(density=0.3), together.allgather_sparse()), 0.5
    )
    for case in (ALWAYS, rotated(exchanges.OF_ANY_ACCOUNT.index(law))):
        law(clipped, case)


BITES = broken_momentum.BITES + broken_decoupled.BITES


@each(
    "law, wrong", BITES, ids=[f"{law.__name__}-{type(x).__name__}" for law, x in BITES]
)
def test_law_bites(law: Callable[..., None], wrong: Any) -> None:
    with rejected(by=law):
        for case in FEW:
            if case.world <= 5:
                law(wrong, case)


@each(
    "laws, broken",
    [(momentum_laws.LAWS, broken_momentum), (decoupled_laws.LAWS, broken_decoupled)],
)
def test_every_law_has_a_specimen_and_accepts_the_sound(laws: Any, broken: Any) -> None:
    assert {law for law, _ in broken.BITES} == set(laws)
    for law, exchange in product(laws, broken.SOUND):
        law(exchange, ALWAYS)


@each("exchange", [*CHANGING, *MOMENTUM, *DECOUPLED], ids=name_of)
def test_ranks_decide_by_the_same_numbers(exchange: Exchange) -> None:
    exchanges.law_whole_numbers_of_the_state_are_shared(exchange, ALWAYS)
