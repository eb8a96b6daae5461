"""Whatever wrapper keeps the account, it is handed all that was owed inside of it."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import torch

import gradwire as gw
import gradwire.exchange
from gradwire.contract import Exchange, Member, State
from gradwire.contract.verbs import Steps
from gradwire.exchange.by_name import run_local
from gradwire.exchange.error_feedback import Chooser, ErrorFeedback, Wrapper, residuals
from gradwire.exchange.natural import Natural
from gradwire.exchange.two_level import TwoLevel
from gradwire_lab.exchange.adapt import Adapted
from gradwire_lab.exchange.clipping import Clipping
from gradwire_lab.exchange.density_warmup import DensityWarmup
from gradwire_lab.exchange.measured_scheme import MeasuredScheme
from gradwire_lab.exchange.momentum import DecoupledMomentum, MomentumCorrection
from gradwire_lab.exchange.warmup import Warmup
from gradwire_lab.laws.cases import Case, states_of
from gradwire_lab.laws.tolerance import must
from tests.each import each
from tests.laws.test_laws_bite import rejected

CASE = Case(world=4, numel=200, seed=3)
SPARSE = gw.pair(gw.compress.topk(density=0.1), gw.collective.allgather_sparse())
AROUND: dict[type[Wrapper], Callable[[Exchange], Exchange]] = {
    ErrorFeedback: lambda inner: inner,
    Clipping: lambda inner: Clipping(inner, max_norm=1e9),
    DecoupledMomentum: lambda inner: DecoupledMomentum(inner, decay=1.0),  # type: ignore[arg-type]
    DensityWarmup: lambda inner: DensityWarmup(inner, densities=(1.0,)),
    MomentumCorrection: lambda inner: MomentumCorrection(inner, momentum=0.0),
    Natural: lambda inner: Natural(inner, width=10),
    TwoLevel: lambda inner: TwoLevel(inner, ranks_per_host=2),
    Warmup: lambda inner: Warmup(inner, steps=1),
}
"""Each wrapper, set so that it neither clips nor lets anything fade, around an inner
account.
"""
NO_ACCOUNT_INSIDE = {Adapted, MeasuredScheme}
"""Wrappers that take compressors and pairs only, in which nothing is owed."""


def owed(states: list[State], ranks_per_host: int) -> float:
    """The sum of all residuals of all ranks; those of a share are of the mean of a
    host's ranks.
    """
    found = [tensor for state in states for tensor in residuals(state).values()]
    return sum(
        float(t.double().sum()) * (1 if t.numel() == CASE.numel else ranks_per_host)
        for t in found
    )


def law_an_outer_account_misses_nothing(kept: Exchange) -> None:
    """Gradients and all residuals, at any depth, are in W * mean or still in a
    residual.
    """
    states = CASE.states(kept)
    for number, residual_N in enumerate(
        t for one in states for t in residuals(one).values()
    ):
        draw = torch.Generator().manual_seed(number)
        residual_N.copy_(torch.randn(residual_N.shape, generator=draw))
    for step in range(3):
        grads = CASE.grads(step)
        given = sum(float(grad_N.double().sum()) for grad_N in grads)
        before = owed(states, kept.ranks_per_host)
        results = run_local(kept, grads, states, seed=step)
        states = states_of(results)
        arrived = CASE.world * float(results[0][0].double().sum())
        lost = given + before - arrived - owed(states, kept.ranks_per_host)
        must(abs(lost) < 1e-3, f"{lost:.3g} was lost or made in step {step}")


@each("wrapper", AROUND, ids=lambda wrapper: wrapper.__name__)
def test_an_outer_account_misses_nothing(wrapper: type[Wrapper]) -> None:
    law_an_outer_account_misses_nothing(
        ErrorFeedback(AROUND[wrapper](ErrorFeedback(SPARSE)))
    )


def test_every_wrapper_has_its_account_tried() -> None:
    for found in iter_modules(gradwire.exchange.__path__):
        import_module(f"gradwire.exchange.{found.name}")
    kinds = [*Wrapper.__subclasses__(), *Chooser.__subclasses__()]
    every = {one for one in kinds if one.__module__.startswith("gradwire")}
    assert every == {*AROUND, Chooser} | NO_ACCOUNT_INSIDE


class DropsWhatIsOwed(ErrorFeedback):
    """Under an outer wrapper it forgets its own residual."""

    def synchronise(self, me: Member, state: State, *others: Any) -> Steps[State]:
        state.residual_N.zero_()
        return super().synchronise(me, state, *others)


def test_the_law_of_accounts_bites() -> None:
    with rejected(by=law_an_outer_account_misses_nothing):
        law_an_outer_account_misses_nothing(ErrorFeedback(DropsWhatIsOwed(SPARSE)))
