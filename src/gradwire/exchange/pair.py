"""Pairing: an exchange of a compressor and a collective, if their traits allow it."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from ..collective.allreduce import allreduce
from ..collective.casync_ps import casync_ps
from ..collective.steps.tensorwise import tensor_sizes, tensorwise
from ..contract import (
    Compressor,
    Exchange,
    Layout,
    Member,
    State,
    Traits,
    synchronise_alone,
)
from ..contract.collective import Collective
from ..contract.compressor import Residual
from ..contract.spec import TensorSpec
from ..contract.verbs import Steps
from ..errors import IncompatiblePair, invalid, with_brackets


class PairState(NamedTuple):
    """Elements of each tensor in the message, and the collective's state."""

    sizes: tuple[int, ...]
    inner: State


@dataclass(frozen=True)
class Pair(Exchange):
    """A compressor and a collective that suits it; made by ``pair``.

    Where elements share a scale, each tensor of a message is encoded by itself.
    """

    codec: Compressor
    collective: Collective

    def __post_init__(self) -> None:
        if self.collective.encodes_sums:
            object.__setattr__(self, "codec", self.codec.for_sums())

    def init(self, spec: TensorSpec, world: int) -> PairState:
        sizes = tensor_sizes(spec)
        return PairState(sizes, self.collective.init(self.codec_of(sizes), spec, world))

    @cached_property
    def _codecs(self) -> dict[tuple[int, ...], Compressor]:
        """The codecs that ``codec_of`` has made, which members know again."""
        return {}

    def codec_of(self, sizes: tuple[int, ...]) -> Compressor:
        """The codec as it encodes a message of tensors of ``sizes`` elements."""
        codec = self._codecs.get(sizes)
        if codec is None:
            codec = self._codecs[sizes] = tensorwise(self.codec, sizes)
        return codec

    def synchronise(
        self,
        me: Member,
        state: State,
        grad_N: Tensor,
        out_N: Tensor,
        residual_N: Residual = None,
    ) -> Steps[State]:
        if me.world == 1:
            yield from synchronise_alone(grad_N, out_N, residual_N)
            return state
        codec = self.codec_of(state.sizes)
        inner = yield from self.collective.run(
            codec, me, state.inner, grad_N, out_N, residual_N
        )
        return PairState(state.sizes, inner)

    @cached_property
    def declared(self) -> Traits:
        traits = self.codec.traits
        return replace(
            traits, exact_size=traits.exact_size and self.collective.exact_size
        )


def pair(codec: Compressor, collective: Collective) -> Pair:
    """Makes an exchange of a compressor and a collective.

    The compressor encodes gradients, and the collective combines the encoded gradients
    among ranks. Some collectives also encode sums on their way. For these a compressor
    may have another variant, which ``pair`` then takes.

    Args:
        codec: The compressor, for example ``gw.compress.topk(density=0.01)``.
        collective: The collective, for example ``gw.collective.zen()``.

    Returns:
        An exchange for ``gw.attach``. It has no error feedback: add
        ``gw.with_error_feedback``.

    Raises:
        IncompatiblePair: The compressor lacks a trait (a declared property) that the
            collective needs. The message names a collective that fits.
        InvalidSetting: An argument is no compressor or no collective.

    >>> from gradwire.compress.onebit import onebit
    >>> type(pair(onebit(), casync_ps()).collective).__name__
    'casync_ps'
    >>> try:
    ...     pair(onebit(), allreduce())
    ... except IncompatiblePair as error:
    ...     print(str(error).partition(": ")[2])
    it sums payloads on the way, and these payloads cannot be summed; use casync_ps()
    """
    if not isinstance(codec, Compressor):
        traits = codec.traits if isinstance(codec, Exchange) else None
        if traits is None:
            remedy = with_brackets(codec, "write gw.compress.topk(density=0.01)")
            raise invalid("codec", codec, "a compressor", remedy)
        why = "it talks in the middle"
        if traits.shared_support:
            why = (
                "its ranks agree on the elements to take, and all-reduce the values "
                "at them"
            )
        raise IncompatiblePair(
            f"{codec!r} is an exchange of its own, and goes with no collective: {why}; "
            "give it to gw.attach or gw.exchange_for by itself"
        )
    if not isinstance(collective, Collective):
        remedy = with_brackets(collective, "write gw.collective.casync_ps()")
        raise invalid("collective", collective, "a collective", remedy)
    for trait, why in _ONLY_FOR_EXCHANGES.items():
        if getattr(codec.traits, trait):
            raise IncompatiblePair(f"{codec!r} declares {trait}, and {why}")
    refusal = collective.needs.refusal(codec.traits)
    if refusal is not None:
        instead = type(suited(codec)).__name__
        raise IncompatiblePair(
            f"{codec!r} cannot go with {collective!r}: {refusal}; use {instead}()"
        )
    return Pair(codec, collective)


_ONLY_FOR_EXCHANGES = {
    "whole_tensors": "payloads are of flat vectors that any collective may cut; write "
    "it as an exchange of its own, as powersgd is",
    "shared_support": "a compressor encodes what its own rank holds, before anyone can "
    "agree on the elements to take; write it as an exchange of its own, as cltk is",
}
"""Traits that a compressor cannot keep, and why."""


def suited(codec: Compressor) -> Collective:
    """The collective that a compressor's traits suit when the user names none."""
    if codec.traits.layout in (Layout.SPARSE, Layout.TRANSFORMED):
        # dense payloads need none
        from ..collective.allgather_sparse import allgather_sparse

        return allgather_sparse()
    return allreduce() if codec.traits.additive else casync_ps()
