"""SharedSupport: all ranks send the same elements, summed by one all-reduce.

DEFT's algorithm 1, once: add the residual (line 5), agree on the elements (lines 6 and
7), gather their values (8), sum them (9), write the mean (10), clear them in the
residual (11 and 12). Which elements, is what ``randomk``, ``cltk`` and ``deft`` say,
each in a ``select`` of its own.

Differences from algorithm 1:
    - It averages gradients and not eta * G, so that any optimizer may follow. With a
      learning rate that changes, what waits in the residual is applied with the rate of
      the step it arrives in.
    - Values are divided by W before they are summed, so that a sum cannot overflow.
    - One value more travels: 0, or NaN where this rank's sum of gradient and residual
      is not finite. Then the whole mean is NaN on every rank, for whoever scales losses
      to see. Else an inf at an element that nobody chose would neither be sent nor
      kept.

Legend: N elements, L layers, K elements of the support, W ranks.
"""

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from gradwire.compress._residual import as_working
from gradwire.contract import (
    Exchange,
    Layout,
    Member,
    Selection,
    State,
    Traits,
    synchronise_alone,
)
from gradwire.contract.bounds import check_share
from gradwire.contract.compressor import Residual
from gradwire.contract.spec import clear_not_finite, working_dtype
from gradwire.contract.verbs import AllReduce, Steps
from gradwire.kernels import select

from ..kernels.magnitudes import range_norms
from ._gather import take


@dataclass(frozen=True)
class Partition:
    """The layers of a gradient: flat ranges, one behind the other. All int64."""

    sizes: tuple[int, ...]

    @cached_property
    def sizes_L(self) -> Tensor:
        return torch.tensor(self.sizes, dtype=torch.int64, device="cpu")

    @cached_property
    def starts_L(self) -> Tensor:
        return self.stops_L - self.sizes_L

    @cached_property
    def stops_L(self) -> Tensor:
        """The element behind the last of each layer."""
        return self.sizes_L.cumsum(0)


class Pending(NamedTuple):
    """A rank's gradient and unsent residual, added up, and its layers' norms."""

    whole_N: Tensor
    norms_L: Tensor
    """float64; inf or NaN where the squares are not finite."""

    @property
    def is_finite(self) -> bool:
        """Squares that overflow float64 say nothing: then elements are looked at."""
        return bool(self.norms_L.isfinite().all()) or bool(
            self.whole_N.isfinite().all()
        )


class SelectedSupport(NamedTuple):
    """The result of ``select``."""

    support_K: Tensor
    """int32, ascending, without duplicates; the same on every rank."""
    num_own: int
    """How many of them this rank chose."""
    state: State


@dataclass(frozen=True, kw_only=True)
class SharedSupport(Exchange):
    """Averages the elements that ``select`` names; the others stay in the residual.

    ``density`` is k/n in (0, 1].
    """

    density: float = 0.01
    traits: ClassVar[Traits] = Traits(
        layout=Layout.SPARSE,
        nonexpansive=True,
        error_feedback=True,
        shared_support=True,
        density_range=(1.0, 1.0),
    )

    def __post_init__(self) -> None:
        check_share(f"{type(self).__name__} density", self.density)

    def kept(self, numel: int) -> int:
        """The elements asked for of ``numel``: at least one of a non-empty gradient."""
        if not numel:
            return 0
        return max(1, round(self.density * numel))

    @abstractmethod
    def select(
        self, me: Member, state: State, pending: Pending
    ) -> Steps[SelectedSupport]:
        """Agrees on the elements; there are two ranks or more. May communicate."""

    def layers_of(self, state: State, numel: int) -> Partition:
        """The ranges whose norms ``select`` is given. Default: the whole gradient."""
        return Partition((numel,) if numel else ())

    def synchronise(
        self,
        me: Member,
        state: State,
        grad_N: Tensor,
        out_N: Tensor,
        residual_N: Residual = None,
    ) -> Steps[State]:
        if me.world == 1:
            me.selection = None
            yield from synchronise_alone(grad_N, out_N, residual_N)
            return state
        numel = grad_N.numel()
        whole_N = grad_N if residual_N is None else residual_N
        layers = self.layers_of(state, numel)
        pending = yield me.sized(
            "encode",
            lambda: _accumulated(grad_N, residual_N, layers),
            numel,
            lambda: Pending(whole_N, whole_N.new_empty(len(layers.sizes))),
        )
        support_K, num_own, state = yield from self.select(me, state, pending)
        values = me.scratch(
            "values",
            support_K.numel() + 1,
            whole_N,
            working_dtype(grad_N.dtype),
            varies=True,
        )
        yield me.sized(
            "encode", lambda: _take(me, pending, support_K, residual_N, values), numel
        )
        yield AllReduce(values)
        yield me.sized("decode", lambda: _deliver(support_K, values, out_N), numel)
        me.selection = Selection(self.density * numel, num_own, support_K.numel())
        return state


def _accumulated(grad_N: Tensor, residual_N: Residual, layers: Partition) -> Pending:
    """Adds the gradient to the residual, if any, and takes the layers' norms."""
    whole_N = as_working(grad_N)
    squares_L = torch.empty(len(layers.sizes), dtype=torch.float64, device="cpu")
    range_norms(whole_N, layers.starts_L, layers.stops_L, squares_L, residual_N)
    return Pending(whole_N if residual_N is None else residual_N, squares_L.sqrt_())


def _take(
    me: Member,
    pending: Pending,
    support_K: Tensor,
    residual_N: Residual,
    values: Tensor,
) -> None:
    """This rank's share of the mean: values at the support, which leave the residual,
    and a flag.

    The flag, the last value, is 0, or NaN where not all that is pending is finite.
    """
    is_finite = pending.is_finite
    values[-1] = 0.0 if is_finite else torch.nan
    take(
        pending.whole_N,
        support_K,
        values[:-1],
        scale=1 / me.world,
        residual_N=residual_N,
    )
    if residual_N is not None and not is_finite:
        clear_not_finite(residual_N)


def _deliver(support_K: Tensor, values: Tensor, out_N: Tensor) -> None:
    """Writes the mean: values at the support, zeros elsewhere.

    NaN alone if some rank's flag is.
    """
    values_K = values[:-1]
    flag_1 = values[-1:]
    if not bool(flag_1.isfinite()):
        # a host's share may hold no element of its message at the support
        out_N.fill_(torch.nan)
        return
    select.scatter_add(support_K, values_K.to(out_N.dtype), out_N.zero_())
