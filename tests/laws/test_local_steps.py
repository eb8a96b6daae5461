"""Local steps keep their laws through any kind of exchange; wrong ones are rejected.

Each law takes the class of ``Outer``, so that it can be shown a wrong one, and an
exchange without error feedback. All ranks are in this process, and pseudo-gradients go
through the local driver.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD

from gradwire.collective.allgather_sparse import allgather_sparse
from gradwire.collective.allreduce import allreduce
from gradwire.collective.casync_ps import casync_ps
from gradwire.collective.ring import ring
from gradwire.compress.none import none
from gradwire.compress.onebit import onebit
from gradwire.compress.topk import topk
from gradwire.compress.uniform import uniform
from gradwire.contract import Exchange, State
from gradwire.contract.spec import TensorSpec
from gradwire.exchange.by_name import run_local
from gradwire.exchange.error_feedback import ErrorFeedback
from gradwire.exchange.pair import pair
from gradwire.runtime.local_steps.outer import DILOCO, Outer
from gradwire_lab.compress.sparseloco import sparseloco
from gradwire_lab.laws.tolerance import must, same_bits
from tests.each import each
from tests.laws.cases import name_of

# ---- laws ----------------------------------------------------------------------------

WORLD = 3
SHAPES = {"matrix": (7, 33), "vector": (19,), "table": (50, 4)}
FRAGMENTS = (("matrix",), ("vector", "table"))
PLAIN = partial(SGD, lr=1.0)
Kind = Callable[..., Outer]


class Ranks:
    """A few ranks that train, each for itself, and exchange one fragment after
    another.
    """

    def __init__(
        self, kind: Kind, exchange: Exchange, make: Any, dtype: torch.dtype
    ) -> None:
        generator = torch.Generator().manual_seed(1)
        first = {
            name: torch.randn(shape, generator=generator).to(dtype)
            for name, shape in SHAPES.items()
        }
        self.params = [
            {name: t.clone() for name, t in first.items()} for _ in range(WORLD)
        ]
        self.outers = [kind(list(own.items()), make) for own in self.params]
        self._exchange = ErrorFeedback(exchange)
        self._states: dict[tuple[str, ...], list[State]] = {}
        self.num_rounds = 0

    def learn(self) -> None:
        """Moves every rank's parameters in its own direction."""
        self.num_rounds += 1
        for rank, own in enumerate(self.params):
            generator = torch.Generator().manual_seed(100 * self.num_rounds + rank)
            for param in own.values():
                param += 0.1 * torch.randn(param.shape, generator=generator).to(
                    param.dtype
                )

    def pseudo_gradients(self, names: Sequence[str]) -> list[dict[str, Tensor]]:
        return [
            {name: outer.pseudo_gradient(name) for name in names}
            for outer in self.outers
        ]

    def means(self, sent: Sequence[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        """Each rank's mean of what all have sent."""
        names = tuple(sent[0])
        grads = [torch.cat([own[name].flatten() for name in names]) for own in sent]
        results = run_local(self._exchange, grads, self._known(names, grads[0]))
        self._states[names] = [state for _, _, state in results]
        sizes = [sent[0][name].numel() for name in names]
        return [
            {
                name: part.view(sent[0][name].shape).clone()
                for name, part in zip(names, torch.split(mean_N, sizes), strict=True)
            }
            for mean_N, _, _ in results
        ]

    def owed(self, names: Sequence[str]) -> Tensor:
        """The sum of all ranks' residuals, by element of these parameters laid end to
        end.
        """
        residuals = [
            state.residual_N.double() for state in self._states.get(tuple(names), [])
        ]
        numel = sum(self.params[0][name].numel() for name in names)
        return torch.stack([*residuals, torch.zeros(numel, dtype=torch.float64)]).sum(0)

    def _known(self, names: tuple[str, ...], grad_N: Tensor) -> list[State]:
        if names not in self._states:
            shapes = tuple(SHAPES[name] for name in names)
            spec = TensorSpec("fragment", grad_N.numel(), grad_N.dtype, shapes=shapes)
            self._states[names] = [
                self._exchange.init(spec, WORLD) for _ in range(WORLD)
            ]
        return self._states[names]

    def round(self, mixing: float = 0.0) -> Sequence[str]:
        """Learns, and exchanges the fragment whose turn it is; returns its names."""
        self.learn()
        names = FRAGMENTS[self.num_rounds % len(FRAGMENTS)]
        means = self.means(self.pseudo_gradients(names))
        for outer, own in zip(self.outers, means, strict=True):
            outer.apply(own, mixing)
        return names


def _flat(tensors: dict[str, Any], names: Sequence[str]) -> Tensor:
    return torch.cat([tensors[name].detach().double().flatten() for name in names])


def law_nothing_learnt_is_lost(kind: Kind, exchange: Exchange) -> None:
    """What all ranks have learnt and owed is W times the anchors' way plus what they
    owe then.

    That is conservation, of pseudo-gradients: with plain SGD of rate 1 an anchor goes
    as far as the mean pseudo-gradient says, and what ranks have learnt is how far their
    parameters have gone.
    """
    ranks = Ranks(kind, exchange, PLAIN, torch.float32)
    for _ in range(4):
        ranks.learn()
        names = FRAGMENTS[ranks.num_rounds % len(FRAGMENTS)]
        before = _flat(ranks.outers[0].anchors, names)
        learnt = sum(_flat(own, names) - before for own in ranks.params)
        owed = ranks.owed(names)
        means = ranks.means(ranks.pseudo_gradients(names))
        for outer, own in zip(ranks.outers, means, strict=True):
            outer.apply(own, 0.0)
        way = _flat(ranks.outers[0].anchors, names) - before
        # Residuals are of pseudo-gradients, and so point back.
        wrong = (learnt - owed) - (WORLD * way - ranks.owed(names))
        must(
            float(wrong.abs().max()) < 1e-4,
            f"{float(wrong.abs().max())} was lost or made",
        )


def law_anchors_have_the_same_bits(kind: Kind, exchange: Exchange) -> None:
    """Anchors have the same bits on all ranks after every outer step, momentum and
    all.
    """
    for dtype in (torch.float32, torch.bfloat16):
        ranks = Ranks(kind, exchange, DILOCO, dtype)
        for mixing in (0.0, 0.5, 0.5, 0.0):
            ranks.round(mixing)
            for outer in ranks.outers[1:]:
                for name, anchor in outer.anchors.items():
                    same = same_bits(
                        anchor.detach(), ranks.outers[0].anchors[name].detach()
                    )
                    must(same, f"the anchors of {name} differ among ranks")


def law_parameters_go_on_from_their_anchors(kind: Kind, exchange: Exchange) -> None:
    """A parameter becomes ``mixing`` of itself and the rest of its anchor; others stay
    as they are.

    So do the anchors of other fragments.
    """
    ranks = Ranks(kind, exchange, DILOCO, torch.float32)
    for mixing in (0.0, 0.25, 0.5, 0.0):
        ranks.learn()
        names = FRAGMENTS[ranks.num_rounds % len(FRAGMENTS)]
        means = ranks.means(ranks.pseudo_gradients(names))
        for outer, own, params in zip(ranks.outers, means, ranks.params, strict=True):
            before = {name: param.clone() for name, param in params.items()}
            were = {
                name: anchor.detach().clone() for name, anchor in outer.anchors.items()
            }
            outer.apply(own, mixing)
            for name, param in params.items():
                anchor = outer.anchors[name].detach()
                if name not in names:
                    must(
                        same_bits(param, before[name]),
                        f"{name} was not exchanged and moved",
                    )
                    must(
                        same_bits(anchor, were[name]),
                        f"the anchor of {name} moved by no mean",
                    )
                    continue
                want = mixing * before[name] + (1 - mixing) * anchor
                wrong = float((param - want).abs().max())
                must(wrong < 1e-6, f"{name} is {wrong} off its mix with the anchor")


def law_rounding_of_an_anchor_is_not_learnt(kind: Kind, exchange: Exchange) -> None:
    """A rank that has learnt nothing has a pseudo-gradient of 0, whatever its dtype
    rounds away.
    """
    for dtype in (torch.float32, torch.bfloat16):
        ranks = Ranks(kind, exchange, DILOCO, dtype)
        names = ranks.round()
        for own in ranks.pseudo_gradients(names):
            must(
                not any(bool(delta.any()) for delta in own.values()),
                "something was learnt",
            )


def law_a_pseudo_gradient_is_exact(kind: Kind, exchange: Exchange) -> None:
    """It is the anchor, rounded as its parameter is, less the parameter, rounded once
    to float32.

    Parameters and anchors lie orders of magnitude apart here. A difference that 16 bits
    rounded would lose what one of them has learnt.
    """
    for dtype in (torch.float32, torch.bfloat16):
        ranks = Ranks(kind, exchange, DILOCO, dtype)
        for _ in range(2):
            ranks.round()
        for outer, params in zip(ranks.outers, ranks.params, strict=True):
            for name, param in params.items():
                param.mul_(
                    torch.logspace(-3, 3, param.numel()).view_as(param).to(dtype)
                )
                got, anchor = outer.pseudo_gradient(name), outer.anchors[name].detach()
                want = (anchor.to(dtype).double() - param.double()).to(anchor.dtype)
                must(same_bits(got, want), f"what {name} has learnt is not exact")


def law_a_saved_state_goes_on_bit_for_bit(kind: Kind, exchange: Exchange) -> None:
    """Another rank that loads a state ends where the first does, anchors, momentum and
    all.
    """
    ranks = Ranks(kind, exchange, DILOCO, torch.float32)
    ranks.round()
    ranks.round()
    place = {"position": 0, "left": 0, "arriving": {}}
    saved = {**ranks.outers[0].state(), **place}
    params = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    other = kind(list(params.items()), DILOCO)

    def go_on(outer: Outer) -> None:
        outer.apply({name: torch.ones(shape) for name, shape in SHAPES.items()}, 0.25)

    go_on(ranks.outers[0])  # which must not reach what was saved
    other.checked(saved)()
    go_on(other)
    for name, param in params.items():
        must(same_bits(param, ranks.params[0][name]), f"{name} goes on from elsewhere")


def law_16_bits_are_off_by_half_a_unit(kind: Kind, exchange: Exchange) -> None:
    """A pseudo-gradient of anchors of 16 bits is off by half a unit of their last place
    at most.

    Outer steps compute in float32: parameters that take no part of their own are then
    the anchors before rounding.
    """
    for dtype in (torch.bfloat16, torch.float16):
        ranks = Ranks(partial(kind, dtype=dtype), exchange, DILOCO, torch.float32)
        for _ in range(2):
            names = ranks.round()
            exact = {name: ranks.params[0][name].clone() for name in names}
            ranks.learn()
            for own, sent in zip(
                ranks.params, ranks.pseudo_gradients(names), strict=True
            ):
                for name in names:
                    off = (sent[name] - (exact[name] - own[name])).abs()
                    most = torch.finfo(dtype).eps / 2 * exact[name].abs() + 1e-6
                    must(bool((off <= most).all()), f"{name} is off by {off.max()}")


def law_16_bits_lose_nothing(kind: Kind, exchange: Exchange) -> None:
    """With plain SGD of rate 1 parameters go as far as ranks have learnt.

    What anchors of 16 bits round away is in the next pseudo-gradient.
    """
    for dtype in (torch.bfloat16, torch.float16):
        ranks = Ranks(partial(kind, dtype=dtype), exchange, PLAIN, torch.float32)
        starts = {names: _flat(ranks.params[0], names) for names in FRAGMENTS}
        for _ in range(4):
            ranks.learn()
            names = FRAGMENTS[ranks.num_rounds % len(FRAGMENTS)]
            learnt = sum(_flat(own, names) - starts[names] for own in ranks.params)
            owed = ranks.owed(names)
            means = ranks.means(ranks.pseudo_gradients(names))
            for outer, own in zip(ranks.outers, means, strict=True):
                outer.apply(own, 0.0)
            way = _flat(ranks.params[0], names) - starts[names]
            starts[names] = _flat(ranks.params[0], names)
            wrong = (learnt - owed) - (WORLD * way - ranks.owed(names))
            must(
                float(wrong.abs().max()) < 1e-4,
                f"{float(wrong.abs().max())} was lost or made",
            )


LAWS = tuple(
    found for name, found in sorted(globals().items()) if name.startswith("law_")
)


# ---- deliberately wrong ones ---------------------------------------------------------


class ForgetsTheAnchor(Outer):
    """Parameters go back to where training began, as anchors are never put further."""

    @torch.no_grad()
    def apply(self, means: Mapping[str, Tensor], mixing: float) -> None:
        were = {name: anchor.detach().clone() for name, anchor in self.anchors.items()}
        super().apply(means, mixing)
        for name, anchor in self.anchors.items():
            anchor.copy_(were[name])


class GoesTheOtherWay(Outer):
    def pseudo_gradient(self, name: str) -> Tensor:
        return -super().pseudo_gradient(name)


class KeepsItsOwn(Outer):
    """A rank steps with half of its own pseudo-gradient in place of half of the
    mean.
    """

    @torch.no_grad()
    def apply(self, means: Mapping[str, Tensor], mixing: float) -> None:
        own = {
            name: (mean + self.pseudo_gradient(name)) / 2
            for name, mean in means.items()
        }
        super().apply(own, mixing)


class DoesNotMix(Outer):
    def apply(self, means: Mapping[str, Tensor], mixing: float) -> None:
        super().apply(means, 0.0)


class StepsOnAndOn(Outer):
    """Gradients stay in the anchors, so the next fragment's step moves this one's
    again.
    """

    @torch.no_grad()
    def apply(self, means: Mapping[str, Tensor], mixing: float) -> None:
        super().apply(means, mixing)
        for name, mean in means.items():
            self.anchors[name].grad = mean


class LearnsFromRounding(Outer):
    @torch.no_grad()
    def pseudo_gradient(self, name: str) -> Tensor:
        return self.anchors[name].detach() - self._params[name]


class RoundsWhatItHasLearnt(Outer):
    """The difference is of 16 bits where parameters are."""

    @torch.no_grad()
    def pseudo_gradient(self, name: str) -> Tensor:
        param, anchor = self._params[name], self.anchors[name]
        return (anchor.to(param.dtype) - param).to(anchor.dtype)


class SavesNoMomentum(Outer):
    def state(self) -> dict[str, Any]:
        saved = super().state()
        return {**saved, "optimizer": {**saved["optimizer"], "state": {}}}


class SavesWhatMovesOn(Outer):
    """A state that shares its tensors with the run that goes on."""

    def state(self) -> dict[str, Any]:
        return {
            **super().state(),
            "anchors": {n: a.detach() for n, a in self.anchors.items()},
        }


class LearnsIn16Bits(Outer):
    """The difference is of 16 bits where anchors are."""

    @torch.no_grad()
    def pseudo_gradient(self, name: str) -> Tensor:
        anchor = self.anchors[name].detach()
        return (anchor - self._params[name].to(anchor.dtype)).float()


class RoundsParameters(Outer):
    """Parameters go on from anchors that were rounded."""

    @torch.no_grad()
    def apply(self, means: Mapping[str, Tensor], mixing: float) -> None:
        super().apply(means, mixing)
        for name in means:
            self._params[name].copy_(self.anchors[name])


BITES = (
    (law_nothing_learnt_is_lost, ForgetsTheAnchor),
    (law_nothing_learnt_is_lost, GoesTheOtherWay),
    (law_anchors_have_the_same_bits, KeepsItsOwn),
    (law_parameters_go_on_from_their_anchors, DoesNotMix),
    (law_parameters_go_on_from_their_anchors, StepsOnAndOn),
    (law_rounding_of_an_anchor_is_not_learnt, LearnsFromRounding),
    (law_a_pseudo_gradient_is_exact, LearnsFromRounding),
    (law_a_pseudo_gradient_is_exact, RoundsWhatItHasLearnt),
    (law_a_saved_state_goes_on_bit_for_bit, SavesNoMomentum),
    (law_a_saved_state_goes_on_bit_for_bit, SavesWhatMovesOn),
    (law_16_bits_are_off_by_half_a_unit, LearnsIn16Bits),
    (law_16_bits_lose_nothing, RoundsParameters),
)


# ---- tests ---------------------------------------------------------------------------

DENSE = pair(none(), ring())
EXCHANGES = (
    DENSE,
    pair(none(), allreduce()),
    pair(uniform(bitwidth=4), casync_ps()),
    pair(onebit(block=64), casync_ps()),
    pair(topk(density=0.1), casync_ps()),
    pair(sparseloco(density=0.1), allgather_sparse()),
)


@each("exchange, law", product(EXCHANGES, LAWS), ids=name_of)
def test_local_steps_keep_their_laws(
    exchange: Exchange, law: Callable[..., None]
) -> None:
    law(Outer, exchange)


@each("law, wrong", BITES, ids=lambda one: one.__name__)
def test_wrong_ones_are_rejected(law: Callable[..., None], wrong: type[Outer]) -> None:
    with pytest.raises(AssertionError) as caught:
        law(wrong, DENSE)
    assert str(caught.value)


def test_every_law_has_a_specimen_it_must_reject() -> None:
    assert {law for law, _ in BITES} == set(LAWS)
