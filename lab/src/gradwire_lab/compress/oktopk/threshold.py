"""Thresholds that serve for several steps: found exactly, used again, and corrected by
the count.

Source: Ok-Topk (PPoPP 2022), section 3.1.3 and the published code's constants.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.contract import Member, Residual
from gradwire.contract.spec import clear_not_finite
from gradwire.kernels import select
from gradwire.kernels.sparse.entries import Entries

from .._gather import take
from .._reaching import reaching

FEWEST = 0.5
MOST = 2.0
"""Least and most that a threshold may let pass, as factors of what is asked for."""


class Band(NamedTuple):
    """The counts, as factors of what is asked for, between which a threshold stays as
    it is.
    """

    fewest: float
    most: float
    factor: float
    """The number by which a threshold is divided, or multiplied, outside of them."""

    def corrected(self, threshold: float, count: int, asked: int) -> float:
        """The threshold for the next step, after ``count`` have reached this one."""
        if count < self.fewest * asked:
            return threshold / self.factor
        if count > self.most * asked:
            return threshold * self.factor
        return threshold


OWN = Band(2 / 3, 5 / 4, 1.012)
SHARED = Band(2 / 3, 4 / 3, 1.008)


def least(values_K: Tensor) -> float:
    """The least magnitude of what is finite; 0, which stands for an unknown one, if
    nothing is.
    """
    finite_K = values_K[values_K.isfinite()]
    if not finite_K.numel():
        return 0.0
    return float(finite_K.abs().min())


def largest_entries(me: Member, name: str, values_N: Tensor, count: int) -> Entries:
    """The ``count`` largest by magnitude, but for zeros, which nobody has to be
    sent.
    """
    count = min(count, values_N.numel())
    indices_K, chosen_K = _room(me, name, count, values_N)
    select.topk(values_N, indices_K, chosen_K)
    return _without_zeros(indices_K, chosen_K)


def entries_reaching(
    me: Member,
    name: str,
    values_N: Tensor,
    threshold: float,
    most: int,
    residual_N: Residual = None,
) -> Entries:
    """The elements that reach ``threshold``; of more than ``most`` the largest.

    ``residual_N`` is as in ``reaching``.
    """
    made: list[tuple[Tensor, Tensor]] = []

    def room(count: int) -> tuple[Tensor, Tensor]:
        made.append(_room(me, name, count, values_N))
        return made[0]

    reaching(values_N, threshold, most, room, residual_N)
    return Entries(*made[0])


class Taken(NamedTuple):
    """The elements that this rank selected, which have left its residual, and its
    threshold.
    """

    entries: Entries
    threshold: float
    """For the next step; 0 if it is not known."""


def select_own(
    me: Member,
    grad_N: Tensor,
    residual_N: Residual,
    threshold: float,
    asked: int,
) -> Taken:
    """Selects what reaches ``threshold``; the ``asked`` largest if it is 0 or too few
    reach it.

    Where too many reach it, the ``asked`` largest of them are taken. ``residual_N``
    then holds the sum of both without what was selected, or is not finite.
    """
    most = min(grad_N.numel(), round(MOST * asked))
    if threshold:
        taken = entries_reaching(me, "own", grad_N, threshold, most, residual_N)
        if FEWEST * asked <= taken.num < most:
            return Taken(taken, OWN.corrected(threshold, taken.num, asked))
        if residual_N is not None:
            select.scatter_add(taken.indices_K, taken.values, residual_N)
            grad_N = residual_N
        if taken.num == most:
            return _taken(
                entries_at(taken, largest_entries(me, "best", taken.values, asked)),
                residual_N,
            )
    indices_K, values_K = _room(me, "own", min(asked, grad_N.numel()), grad_N)
    if grad_N is residual_N:
        select.topk(grad_N, indices_K, values_K)
        return _taken(_without_zeros(indices_K, values_K), residual_N)
    select.topk(grad_N, indices_K, values_K, residual_N)
    return _taken(_without_zeros(indices_K, values_K), None)


def _taken(entries: Entries, residual_N: Residual) -> Taken:
    """The elements found exactly; they leave ``residual_N``, as all does that is not
    finite.
    """
    if residual_N is not None:
        take(residual_N, entries.indices_K, entries.values, residual_N=residual_N)
        if not bool(entries.values.isfinite().all()):
            clear_not_finite(residual_N)
    return Taken(entries, least(entries.values))


def entries_at(entries: Entries, chosen: Entries) -> Entries:
    """The entries at the places that ``chosen`` names."""
    places_K = chosen.indices_K
    return Entries(entries.indices_K[places_K], entries.values[places_K])


def put_back(me: Member, taken: Entries, out_N: Tensor, residual_N: Tensor) -> None:
    """Returns to the residual what was selected and is not in the mean, which is 0
    there.
    """
    arrived_K = me.thread_scratch("mean at own", taken.num, out_N, out_N.dtype)
    take(out_N, taken.indices_K, arrived_K)
    lost_K = ((arrived_K == 0) & taken.values.isfinite()).nonzero().flatten()
    select.scatter_add(taken.indices_K[lost_K], taken.values[lost_K], residual_N)


def _room(me: Member, name: str, count: int, like: Tensor) -> tuple[Tensor, Tensor]:
    indices_K = me.scratch(f"{name} indices", count, like, torch.int32, varies=True)
    return indices_K, me.scratch(f"{name} values", count, like, like.dtype, varies=True)


def _without_zeros(indices_K: Tensor, values_K: Tensor) -> Entries:
    is_any_K = values_K != 0
    if bool(is_any_K.all()):
        return Entries(indices_K, values_K)
    return Entries(indices_K[is_any_K], values_K[is_any_K])
