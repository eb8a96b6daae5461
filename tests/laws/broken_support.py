"""Deliberately wrong exchanges that share a support: each says what it does
otherwise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.contract import Member
from gradwire.contract.verbs import Broadcast, Steps
from gradwire_lab.compress._narrow import narrow, width_of
from gradwire_lab.compress._support import Pending, SelectedSupport
from gradwire_lab.compress.deft import DeftState, deft, layer_k, owners
from gradwire_lab.compress.randomk import randomk


class draws_apart(randomk):
    """Each rank draws elements of its own, and sums them up with others' elements."""

    def select(
        self, me: Member, state: Tensor, pending: Pending
    ) -> Steps[SelectedSupport]:
        apart = randomk(density=self.density, seed=me.rank)
        return (yield from apart.select(me, state, pending))


class allocates_alone(deft):
    """Every rank selects where its own norms say, and ranks differ in what is
    common.
    """

    def select(
        self, me: Member, state: DeftState, pending: Pending
    ) -> Steps[SelectedSupport]:
        steps, value = super().select(me, state, pending), None
        while True:
            try:
                asked = steps.send(value)
            except StopIteration as stop:
                return stop.value  # type: ignore[no-any-return]
            value = yield asked
            if isinstance(asked, Broadcast):
                layers = state.partition
                k_L = layer_k(
                    pending.norms_L, layers.sizes_L, self.kept(pending.whole_N.numel())
                )
                own_L = owners(layers, k_L, me.world, asked.src)
                narrow(own_L, width_of(me.world + 1), asked.buf)


class loses_an_index(deft):
    """The first index gets lost on its way, though the residual is cleared there."""

    def select(
        self, me: Member, state: DeftState, pending: Pending
    ) -> Steps[SelectedSupport]:
        chosen = yield from super().select(me, state, pending)
        pending.whole_N[chosen.support_K[:1].long()] = 0.0
        return chosen._replace(support_K=chosen.support_K[1:])


class sends_common_twice(deft):
    """Layers that are common to all ranks are selected once more by one of them."""

    def select(
        self, me: Member, state: DeftState, pending: Pending
    ) -> Steps[SelectedSupport]:
        chosen = yield from super().select(me, state, pending)
        twice_K = torch.cat([chosen.support_K, chosen.support_K]).sort().values
        return chosen._replace(support_K=twice_K)
