"""What cannot be made into an exchange, or run as one, is refused with a remedy."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import gradwire as gw
from gradwire.contract import Layout, Traits
from gradwire.errors import IncompatiblePair, InvalidSetting
from gradwire.exchange.by_name import by_name, steps_of_all
from gradwire.exchange.pair import Pair
from tests.each import each

topk, none, ring = gw.compress.topk, gw.compress.none, gw.collective.ring
CLIPPED = gw.with_clipping(topk(), 1.0)
CORRECTED = gw.with_momentum_correction(topk())
CLIPPED_AFTER = r"with_clipping\(with_momentum_correction\(...\), max_norm\)"


class Shaped(none):
    traits = Traits(layout=Layout.DENSE, whole_tensors=True)


class OnlyTheForm:
    """No exchange, though it has the methods of one."""

    init, run, synchronise = none.init, Pair.run, Pair.synchronise


def of(*grads: torch.Tensor, states: list[None] | None = None) -> object:
    """The steps of ranks that exchange these gradients."""
    return steps_of_all(gw.exchange_for(none()), list(grads), states)


@each(
    "make, said",
    [
        (
            lambda: gw.pair("topk", ring()),
            r"codec must be a compressor, got 'topk'; write",
        ),
        (
            lambda: gw.pair(topk, ring()),
            r"a compressor, got <class .*; write topk\(\), with",
        ),
        (
            lambda: gw.run_local(gw.compress.powersgd, [torch.ones(3)]),
            r"write powersgd\(\), with its",
        ),
        (
            lambda: gw.pair(topk(), "ring"),
            r"collective must be a collective, got 'ring'; write",
        ),
        (lambda: gw.pair(Shaped(), gw.collective.casync_ps()), "own, as powersgd is"),
        (
            lambda: by_name("powersgd", {}, "allreduce"),
            "exchange of its own, got 'allreduce'",
        ),
        (
            lambda: by_name("onebit", {}, None),
            "must be one that onebit can use, got None",
        ),
        (
            lambda: gw.with_error_feedback(topk()),
            r"must be an exchange, got topk.*gw.pair\(",
        ),
        (lambda: gw.with_momentum_correction(CLIPPED), CLIPPED_AFTER),
        (
            lambda: gw.with_momentum_correction(
                gw.with_density_warmup(CLIPPED, steps_per_stage=1)
            ),
            CLIPPED_AFTER,
        ),
        (lambda: gw.with_momentum_correction(CORRECTED), "wrap it once"),
        (lambda: gw.with_warmup(CORRECTED, steps=1), "clipping outermost"),
        (lambda: gw.with_warmup(CLIPPED, steps=1), "clipping outermost"),
        (
            lambda: gw.with_decoupled_momentum(gw.compress.qsgd(bitwidth=2)),
            "nonexpansive",
        ),
        (
            lambda: gw.with_natural_sparsity(CORRECTED, 4),
            "a pair with or without error feedback",
        ),
        (of, "one gradient a rank"),
        (lambda: of(torch.zeros(2, 2)), r"pass grad.flatten\(\)"),
        (lambda: of(torch.zeros(2), torch.zeros(3)), "of one length and dtype"),
        (lambda: of(torch.zeros(2), torch.zeros(2).half()), "of one length and dtype"),
        (lambda: of(*[torch.zeros(2)] * 2, states=[None]), "one a rank, 2"),
        *(
            (
                lambda given=given: gw.run_local(given, [torch.ones(3)]),
                r"gw.exchange_for\(compres",
            )
            for given in (topk(), "topk", OnlyTheForm())
        ),
    ],
    ids=str,
)
def test_an_exchange_that_cannot_work_is_refused_with_its_reason(
    make: Callable[[], object], said: str
) -> None:
    with pytest.raises((InvalidSetting, IncompatiblePair), match=said):
        make()


def test_an_exchange_defines_one_of_its_two_forms() -> None:
    with pytest.raises(TypeError, match="neither run nor synchronise"):
        type("nothing", (gw.Exchange,), {"init": lambda self, spec, world: None})
