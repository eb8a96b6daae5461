"""Deliberately wrong exchanges: one sound one, ``altered``, and what can be wrong with
it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from gradwire.collective.allgather_sparse import allgather_sparse
from gradwire.collective.casync_ps import casync_ps
from gradwire.compress.cast16 import cast16
from gradwire.compress.onebit import onebit
from gradwire.compress.topk import topk
from gradwire.contract import Compressor, Layout, State, Traits
from gradwire.contract.collective import Collective
from gradwire.contract.spec import TensorSpec, working_dtype
from gradwire.exchange.by_name import clone_state
from gradwire.exchange.pair import Pair
from gradwire_lab.compress.selective import selective


class Hoard(NamedTuple):
    """A residual nobody accounts for."""

    residual_N: Tensor
    inner: State


class Figure(NamedTuple):
    """A figure beside the state of a pair."""

    figure_1: Tensor
    inner: State


@dataclass(frozen=True)
class altered(Pair):
    """Sound: a pair whose ``synchronise`` calls ``before`` and ``after``. The others
    break it.
    """

    codec: Compressor = field(default_factory=lambda: onebit(block=64))
    collective: Collective = field(default_factory=casync_ps)

    def synchronise(self, me, state, grad_N, out_N, residual_N=None):
        old_N = None if residual_N is None else residual_N.clone()
        self.before(grad_N, residual_N)
        state = yield from super().synchronise(me, state, grad_N, out_N, residual_N)
        self.after(out_N, residual_N, old_N)
        return state

    def before(self, grad_N: Tensor, residual_N: Tensor | None) -> None:
        """Nothing."""

    def after(
        self, out_N: Tensor, residual_N: Tensor | None, old_N: Tensor | None
    ) -> None:
        """Nothing."""


class leaves_residual_stale(altered):
    """Sends the residual and keeps it as it was."""

    def after(
        self, out_N: Tensor, residual_N: Tensor | None, old_N: Tensor | None
    ) -> None:
        if residual_N is not None:
            residual_N.copy_(old_N)


class drops_residual(altered):
    """Forgets what earlier steps did not deliver."""

    def before(self, grad_N: Tensor, residual_N: Tensor | None) -> None:
        if residual_N is not None:
            residual_N.zero_()


class counts_its_own(altered):
    """Keeps a whole number that each rank counts by itself."""

    kept: ClassVar[torch.dtype] = torch.int64

    def init(self, spec, world):
        return Figure(torch.zeros(1, dtype=self.kept), super().init(spec, world))

    def synchronise(self, me, state, grad_N, out_N, residual_N=None):
        figure_1 = state.figure_1 + (grad_N > 0).sum()
        inner = yield from super().synchronise(
            me, state.inner, grad_N, out_N, residual_N
        )
        return Figure(figure_1, inner)


class decides_by_its_own(counts_its_own):
    """Says that ranks decide by a figure that each has of its own gradient."""

    kept: ClassVar[torch.dtype] = torch.float64
    decides_by: ClassVar[tuple[str, ...]] = ("figure_1",)


class keeps_beside_its_state(altered):
    """Adds to each gradient the mean of the step before, which is in a buffer."""

    def synchronise(self, me, state, grad_N, out_N, residual_N=None):
        mean_N = me.scratch("mean", grad_N.numel(), grad_N, grad_N.dtype)
        sum_N = grad_N + mean_N
        state = yield from super().synchronise(me, state, sum_N, out_N, residual_N)
        mean_N.copy_(out_N)
        return state


class only_adds_to_residual(altered):
    """Conserves, but what is in the residual never leaves it."""

    def before(self, grad_N: Tensor, residual_N: Tensor | None) -> None:
        if residual_N is not None:
            residual_N.zero_()

    def after(
        self, out_N: Tensor, residual_N: Tensor | None, old_N: Tensor | None
    ) -> None:
        if residual_N is not None:
            residual_N.add_(old_N)


class overflows_residual(altered):
    """Multiplies a loss without looking at its range."""

    def after(
        self, out_N: Tensor, residual_N: Tensor | None, old_N: Tensor | None
    ) -> None:
        if residual_N is not None:
            residual_N.mul_(4)


class writes_the_gradient(altered):
    """Adds the residual to the caller's gradient."""

    def before(self, grad_N: Tensor, residual_N: Tensor | None) -> None:
        grad_N.mul_(0.5)


class claims_all_arrived(altered):
    """Says that the whole gradient is in the mean."""

    def after(
        self, out_N: Tensor, residual_N: Tensor | None, old_N: Tensor | None
    ) -> None:
        if residual_N is not None:
            residual_N.zero_()


class reads_old_buffers(altered):
    """Adds what a kept buffer holds from the step before, which in the first step is
    nothing.
    """

    def synchronise(self, me, state, grad_N, out_N, residual_N=None):
        state = yield from super().synchronise(me, state, grad_N, out_N, residual_N)
        out_N.add_(me.scratch("last", out_N.numel(), out_N, out_N.dtype))
        return state


class hoards(altered):
    """Puts a tenth of each gradient into a residual of its own, without taking it from
    anything.
    """

    def init(self, spec: TensorSpec, world: int) -> Hoard:
        residual_N = torch.zeros(spec.numel, dtype=working_dtype(spec.dtype))
        return Hoard(residual_N, super().init(spec, world))

    def synchronise(self, me, state, grad_N, out_N, residual_N=None):
        tenth_N = 0.1 * grad_N
        inner = yield from super().synchronise(
            me, state.inner, grad_N, out_N, residual_N
        )
        return Hoard(clone_state(state.residual_N).add_(tenth_N), inner)


@dataclass(frozen=True)
class rounds_alone(altered):
    """Encodes and decodes although there is nobody to send to."""

    codec: Compressor = field(default_factory=cast16)

    def synchronise(self, me, state, grad_N, out_N, residual_N=None):
        state = yield from self.collective.run(
            self.codec, me, state, grad_N, out_N, residual_N
        )
        return state


@dataclass(frozen=True)
class selects_from_the_whole(altered):
    """Promises something of every tensor, and selects from all of them as one
    vector.
    """

    codec: Compressor = field(default_factory=lambda: topk(density=0.1))
    collective: Collective = field(default_factory=allgather_sparse)
    traits: ClassVar[Traits | None] = Traits(layout=Layout.SPARSE, every_tensor=True)


@dataclass(frozen=True, kw_only=True)
class encodes_twice(selective):
    """Encodes tensors once more that were encoded ahead."""

    num_dense: int | None = 0

    def synchronise(self, me, state, grad_N, out_N, residual_N=None):
        me.ahead.clear()
        state = yield from super().synchronise(me, state, grad_N, out_N, residual_N)
        return state


@dataclass(frozen=True, kw_only=True)
class encodes_what_is_not_there(selective):
    """Encodes all tensors when one of them is ready."""

    num_dense: int | None = 0

    def encode_ahead(self, me, state, place, grad_N, residual_N=None):
        for other, size in enumerate(state.sizes):
            if size and other not in me.ahead:
                super().encode_ahead(me, state, other, grad_N, residual_N)


@dataclass(frozen=True, kw_only=True)
class keeps_what_it_sent(selective):
    """Leaves entries that the host has selected in the residual."""

    num_dense: int | None = 0

    def encode_on_host(self, me, state, place, grad_N, residual_N=None):
        yield from super().encode_on_host(me, state, place, grad_N, residual_N)
        if residual_N is not None:
            found = me.ahead[place]
            residual_N[sum(state.sizes[:place]) + found.indices_K.long()] += (
                found.values_K
            )


class shares_blocks(Pair):
    """Encodes all tensors of a message as if they were one."""

    def codec_of(self, sizes: tuple[int, ...]) -> Compressor:
        return self.codec
