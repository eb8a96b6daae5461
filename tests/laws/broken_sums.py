"""Deliberately wrong exchanges that cut sums: each says what it does otherwise."""

from __future__ import annotations

import torch

from gradwire.compress._coo import share_of
from gradwire.contract.spec import TensorSpec
from gradwire_lab.compress.oktopk import OktopkState, oktopk
from gradwire_lab.compress.spardl import spardl
from gradwire_lab.compress.spardl.turn import Turn


class keeps_only_its_own(spardl):
    """What others sent for an element, and this rank cuts, is in no residual."""

    def synchronise(self, me, state, grad_N, out_N, residual_N=None):
        own_N = None if residual_N is None else residual_N + grad_N
        state = yield from super().synchronise(me, state, grad_N, out_N, residual_N)
        if residual_N is not None:
            residual_N.copy_(torch.where(residual_N == 0, residual_N, own_N))
        return state


class forgets_what_was_too_small(oktopk):
    """What a rank selected is gone from its residual, also where the sum did not
    arrive.
    """

    def synchronise(self, me, state, grad_N, out_N, residual_N=None):
        count = share_of(self.density, grad_N.numel())
        own_K = grad_N.abs().topk(count).indices
        state = yield from super().synchronise(me, state, grad_N, out_N, residual_N)
        if residual_N is not None:
            residual_N[own_K] = 0.0
        return state


class decides_alone(oktopk):
    """Each rank goes by a threshold of sums of its own."""

    def init(self, spec: TensorSpec, world: int) -> OktopkState:
        return super().init(spec, world)._replace(step=torch.ones(1, dtype=torch.int64))

    def synchronise(self, me, state, grad_N, out_N, residual_N=None):
        alone_2 = torch.tensor([0.0, 0.1 * me.rank], dtype=torch.float64)
        state = state._replace(thresholds_2=alone_2)
        return (yield from super().synchronise(me, state, grad_N, out_N, residual_N))


class all_keep_the_same(Turn):
    """Each rank that cuts a sum of several teams keeps all elements that are cut."""

    def _is_kept_here(self, indices_S, alike):
        return torch.ones_like(indices_S, dtype=torch.bool)


class none_keeps_the_same(Turn):
    """No rank keeps the elements that are cut from a sum of several teams."""

    def _is_kept_here(self, indices_S, alike):
        return torch.zeros_like(indices_S, dtype=torch.bool)


class adds_its_own_team_first(Turn):
    """Each rank adds the teams' lists in an order of its own."""

    def _cut_alike(self, lists, places, alike):
        super()._cut_alike(lists, sorted(places), alike)
