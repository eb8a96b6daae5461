"""Deliberately wrong local steps, each wrong in the one thing its name says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gradwire.runtime.local_steps.outer import Outer
from tests.laws import local_laws as laws


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
    """A rank steps with half of its own pseudo-gradient in place of half of the mean."""

    @torch.no_grad()
    def apply(self, means: Mapping[str, Tensor], mixing: float) -> None:
        own = {name: (mean + self.pseudo_gradient(name)) / 2 for name, mean in means.items()}
        super().apply(own, mixing)


class DoesNotMix(Outer):
    def apply(self, means: Mapping[str, Tensor], mixing: float) -> None:
        super().apply(means, 0.0)


class StepsOnAndOn(Outer):
    """Gradients stay in the anchors, so the next fragment's step moves this one's again."""

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
        return {**super().state(), "anchors": {n: a.detach() for n, a in self.anchors.items()}}


BITES = (
    (laws.law_nothing_learnt_is_lost, ForgetsTheAnchor),
    (laws.law_nothing_learnt_is_lost, GoesTheOtherWay),
    (laws.law_anchors_have_the_same_bits, KeepsItsOwn),
    (laws.law_parameters_go_on_from_their_anchors, DoesNotMix),
    (laws.law_parameters_go_on_from_their_anchors, StepsOnAndOn),
    (laws.law_rounding_of_an_anchor_is_not_learnt, LearnsFromRounding),
    (laws.law_a_pseudo_gradient_is_exact, LearnsFromRounding),
    (laws.law_a_pseudo_gradient_is_exact, RoundsWhatItHasLearnt),
    (laws.law_a_saved_state_goes_on_bit_for_bit, SavesNoMomentum),
    (laws.law_a_saved_state_goes_on_bit_for_bit, SavesWhatMovesOn),
)
