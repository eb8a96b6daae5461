"""Deliberately wrong schemes for sparse gradients: ``zen`` with one thing wrong each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradwire.collective.zen import zen
from gradwire.compress.nonzero import nonzero
from gradwire.compress.topk import topk
from gradwire.contract import Imbalance, Member
from gradwire.contract.verbs import AllGather, Steps
from gradwire.exchange.pair import Pair
from gradwire.kernels.sparse.entries import Entries, part_length
from gradwire.kernels.sparse.permutation import Permutation
from tests.laws import sparse_laws as laws
from tests.laws.broken_collectives import starts_with_itself


class loses_element_0(zen):
    """Takes index 0 for an empty place of its table."""

    def units(self, me: Member, entries: Entries, numel: int) -> Entries:
        return _kept(entries, entries.indices_K != 0)


class drops_overflow(zen):
    """Has room for a quarter more than an equal share in each part, and loses the rest."""

    def units(self, me: Member, entries: Entries, numel: int) -> Entries:
        places_K = Permutation(numel, self.seed).places(entries.indices_K)
        part_K = places_K // max(1, part_length(numel, me.world))
        room = 1 + entries.num * 5 // (4 * me.world)
        before_K = (part_K[:, None] == part_K[None, :]).tril(-1).sum(1)
        return _kept(entries, before_K < room)


class says_more_than_it_states(zen):
    """Ranks tell each other one number more."""

    def merge(self, me: Member, *given: Any) -> Steps[Any]:
        yield AllGather(me.told("more", me.world), me.told("own", 1))
        return (yield from super().merge(me, *given))


class counts_one_more(zen):
    """Counts an element that nobody took in every part."""

    def arrived(self, merged: Entries) -> int:
        return super().arrived(merged) + 1


class claims_balance(zen):
    """Notes that all parts are equal, without looking."""

    def run(self, codec, me, state, grad_N, out_N, residual_N):
        state = yield from super().run(codec, me, state, grad_N, out_N, residual_N)
        me.imbalance = Imbalance(1.0, 1.0)
        return state


class hashes_nothing(zen):
    """Leaves every index where it is."""

    def permutation(self, num_units: int) -> Permutation | None:
        return None


def _kept(entries: Entries, kept_K: Tensor) -> Entries:
    chosen = kept_K.nonzero()[:, 0]
    units = entries.values.view(-1, entries.width)[chosen]
    return Entries(entries.indices_K[chosen].to(torch.int32), units.flatten(), entries.width)


def _with(scheme: zen) -> Pair:
    return Pair(nonzero(), scheme)


BITES = (
    (laws.law_the_mean_is_that_of_dense_gradients, _with(loses_element_0())),
    (laws.law_the_mean_is_that_of_dense_gradients, _with(drops_overflow())),
    (laws.law_every_rank_has_the_same_bits, Pair(topk(density=1.0), starts_with_itself())),
    (laws.law_bytes_are_the_formulas, _with(says_more_than_it_states())),
    (laws.law_what_was_selected_is_counted, _with(counts_one_more())),
    (laws.law_imbalance_is_definition_8, _with(claims_balance())),
    (laws.law_parts_are_balanced, _with(hashes_nothing())),
)
"""Which law must reject which."""
