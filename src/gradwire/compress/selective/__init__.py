"""selective: each tensor of a message is sparsified by itself, and the smallest travel dense.

Source: Ming et al., ICDE 2026, "SSFusion: Tensor Fusion with Selective Sparsification for Efficient
    Distributed DNN Training", section IV-B (per-tensor selection, density-aware sparsification).
    What is offloaded or interleaved (-O, -I) is a plan's matter; ``encode_on_host`` serves -O.
Differences from the paper:
    - Which tensors are dense follows from sizes alone: the smallest, up to the paper's 102,400
      elements, as long as the others can make up for them. The paper goes on until the time of
      sparsification hides behind the message before (equation 2), which a plan may do by
      ``num_dense``. Its rule has no end where that never comes about, and then leaves large
      tensors dense too.
    - The density that makes up for them is a closed form and no search. It is counted in bytes, of
      which a dense float32 takes 4 and a sparse one 8; with ``count="elements"`` in elements, as in
      the paper, which leaves the others less (docs/measured.md).
    - All sparse tensors are encoded by one call of the sparsifier, so a small one costs little. The
      paper's insight 1, that small tensors take as long as large ones, is about a call for each.
    - A tensor of which a threshold let nothing pass sends its largest element.
    - Sparsifiers are those that send indices and values of a density: ``topk``, ``dgc``,
      ``graddrop``, ``gaussiank``, ``redsync``, ``sidco``. Random-k and CLT-k agree on elements
      first and all-reduce values, so nothing is gathered that dense tensors could ride with; DEFT
      gives every layer its k already; AdaComp sends more than indices and values, and it, the hard
      threshold and ``nonzero`` have no density that could be lowered.
Default: density 0.01 is the literature's, for long trainings (see ``topk``).
Density: the bytes of ``density`` * N sparse elements, and at most one element for each tensor more,
    as every tensor sends one at least; of the sparse ones within the sparsifier's own range.
Wire: of D dense elements and K sparse ones: dense_D in the working dtype, indices_K int32
    (ascending, of the message), values_K float32 -> 4 D + 8 K bytes (8 D for float64), to each
    other rank, padded to the largest of the step. Where K varies it is told first, 8 bytes.
State: the tensors' sizes, and codec_T, the sparsifier's state of each tensor.
Contributed: the dense tensors, and of each other one what the sparsifier took.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ...collective.steps.sizes import tell_all
from ...contract import Compressor, Exchange, Layout, Member, State, Traits, synchronise_alone
from ...contract.bounds import check_share, check_whole
from ...contract.exchange import Copies
from ...contract.payload import slot_bytes
from ...contract.registry import KINDS, load, names
from ...contract.spec import TensorSpec
from ...contract.verbs import AllGather, Steps
from ...errors import InvalidSetting, invalid
from .._coo import check_addressable
from .._quantise import check_choice
from .choice import Choice, choose
from .mixed import Mixed

_DENSE_COSTS = {"elements": 1.0, "bytes": 0.5}
"""The cost of a dense element in sparse ones, which have an index each, by what is counted."""


class SelectiveState(NamedTuple):
    """Elements of each tensor in the message, and the sparsifier's state of each."""

    sizes: tuple[int, ...]
    codec_T: tuple[Tensor, ...]
    """Empty where the sparsifier keeps none."""


@dataclass(frozen=True, kw_only=True)
class selective(Exchange):
    """Averages the ``density`` share of each message, of every tensor in it something.

    ``sparsifier`` names a file of ``compress/``. Without ``num_dense`` the exchange leaves the
    smallest tensors dense, and lowers the density of the others in return, no further than to
    ``floor``. With it so many of the smallest are dense (all, of a message with no more), and
    ``density`` is that of the others as it stands: 0 is sparsification of each tensor by itself.
    ``count`` says what is to be no more for the dense ones: "bytes", or "elements", which leave the
    others a lower density, as dense elements travel without indices.
    A message holds the tensors that ``compress_if`` leaves to the exchange: by default no vectors.

    The example of the paper's figure 3: two tensors in one message, a quarter of which is sent.
    Selected as one vector, the second is missing; tensor by tensor, neither is.

    >>> from gradwire.compress.topk import topk
    >>> from gradwire.exchange.by_name import exchange_for, run_local
    >>> spec = TensorSpec("G2 and G1", 8, shapes=((4,), (4,)))
    >>> grads = [torch.tensor([0.8, 0.6, 0.9, 0.5, 0.1, 0.3, 0.2, 0.1])] * 2
    >>> def mean(exchange):
    ...     return run_local(exchange, grads, [exchange.init(spec, 2)] * 2)[0][0]
    >>> mean(exchange_for(topk(density=0.25)))
    tensor([0.8000, 0.0000, 0.9000, 0.0000, 0.0000, 0.0000, 0.0000, 0.0000])
    >>> mean(selective(sparsifier="topk", density=0.25))
    tensor([0.0000, 0.0000, 0.9000, 0.0000, 0.0000, 0.3000, 0.0000, 0.0000])
    """

    sparsifier: str = "dgc"
    density: float = 0.01
    num_dense: int | None = None
    floor: float = 0.001
    count: str = "bytes"
    traits: ClassVar[Traits] = Traits(
        layout=Layout.SPARSE,
        exact_size=False,
        contraction=True,
        error_feedback=True,
        density_range=(0.5, 1.0),
        whole_tensors=True,
        every_tensor=True,
    )

    def __post_init__(self) -> None:
        check_share("selective density", self.density)
        check_share("selective floor", self.floor)
        check_choice("selective count", self.count, tuple(_DENSE_COSTS))
        if self.sparsifier not in names("compress"):
            KINDS["compress"].refuse_elsewhere(self.sparsifier)
            raise _refused(self.sparsifier)
        if self.num_dense is not None:
            check_whole("selective num_dense", self.num_dense, "leave it out", least=0)
        own = _codec(self.sparsifier, self.density).traits
        stated = replace(self.traits, exact_size=own.exact_size, density_range=own.density_range)
        object.__setattr__(self, "traits", stated)

    def init(self, spec: TensorSpec, world: int) -> SelectiveState:
        check_addressable("selective", spec)
        codec, sizes = self.mixed(spec).codec, _sizes(spec)
        ends = accumulate(sizes)
        states = [codec.init(spec.chunk(b - n, b)) for n, b in zip(sizes, ends, strict=True)]
        return SelectiveState(sizes, tuple(state for state in states if state is not None))

    def mixed(self, spec: TensorSpec) -> Mixed:
        """How a message of this spec travels."""
        return self._mixed(_sizes(spec), spec.dtype)

    def _mixed(self, sizes: tuple[int, ...], dtype: torch.dtype) -> Mixed:
        cost = _DENSE_COSTS[self.count]
        choice = choose(sizes, self.density, self.floor, self.num_dense, dense_cost=cost)
        return _mixed(_codec(self.sparsifier, choice.density), sizes, choice, dtype)

    def apart(self, spec: TensorSpec) -> tuple[int, ...]:
        """Places of the tensors that are not sent dense."""
        return self.mixed(spec).choice.sparse

    def encode_ahead(
        self,
        me: Member,
        state: SelectiveState,
        place: int,
        grad_N: Tensor,
        residual_N: Tensor | None = None,
    ) -> None:
        mixed = self._mixed(state.sizes, grad_N.dtype)
        codec = me.variant_of(mixed.codec)
        mixed.encode_ahead(me, codec, state.codec_T, place, grad_N, residual_N)

    @property
    def offloads(self) -> bool:
        return True  # what sparsifiers keep are a few numbers in host memory

    def encode_on_host(
        self,
        me: Member,
        state: SelectiveState,
        place: int,
        grad_N: Tensor,
        residual_N: Tensor | None = None,
    ) -> Copies:
        mixed = self._mixed(state.sizes, grad_N.dtype)
        codec = me.variant_of(mixed.codec)
        return mixed.encode_on_host(me, codec, state.codec_T, place, grad_N, residual_N)

    def synchronise(
        self,
        me: Member,
        state: SelectiveState,
        grad_N: Tensor,
        out_N: Tensor,
        residual_N: Tensor | None = None,
    ) -> Steps[State]:
        me.selection = None
        if me.world == 1:
            yield from synchronise_alone(grad_N, out_N, residual_N)
            return state
        mixed, numel = self._mixed(state.sizes, grad_N.dtype), grad_N.numel()
        codec = me.variant_of(mixed.codec)
        own = me.scratch("own", slot_bytes(mixed.largest.size_bytes), grad_N, torch.uint8)
        size_bytes, codec_T = yield me.sized(
            "encode",
            lambda: mixed.encode(me, codec, state.codec_T, grad_N, residual_N, own),
            numel,
            lambda: (mixed.typical.size_bytes, state.codec_T),
        )
        sizes = [mixed.largest.size_bytes] * me.world
        if mixed.varies:
            usual = [mixed.typical.size_bytes] * me.world
            sizes = yield from tell_all(me, codec, size_bytes, sizes, usual=usual)
        slot = slot_bytes(max(sizes))
        gathered = me.scratch("gathered", me.world * slot, grad_N, torch.uint8, varies=mixed.varies)
        yield AllGather(gathered, own[:slot])
        me.selection = yield me.sized(
            "merge", lambda: mixed.merge(me, sizes, gathered, out_N), me.world * numel
        )
        return SelectiveState(state.sizes, codec_T)


def _sizes(spec: TensorSpec) -> tuple[int, ...]:
    """Elements of each tensor in a message, empty ones too."""
    return tuple(map(prod, spec.tensor_shapes))


@lru_cache(maxsize=1024)
def _mixed(codec: Compressor, sizes: tuple[int, ...], choice: Choice, dtype: torch.dtype) -> Mixed:
    return Mixed(codec, sizes, choice, dtype)


@lru_cache(maxsize=1024)
def _codec(name: str, density: float) -> Compressor:
    """The sparsifier of this name; raises ``InvalidSetting`` for what cannot be one."""
    kind = load("compress", name)
    if issubclass(kind, Compressor) and "density" in {part.name for part in fields(kind)}:
        codec: Compressor = kind(density=density)
        sent = {part.name for part in codec.format(TensorSpec("", 1))}
        if sent == {"indices", "values"} and not codec.traits.reads_latest:
            return codec
    raise _refused(name)


def _refused(given: object) -> InvalidSetting:
    accepted = "the name of a compressor that sends indices and values, and has a density"
    return invalid("selective sparsifier", given, accepted, "write 'dgc', or use it by itself")


EXAMPLES = (
    selective(),
    selective(sparsifier="topk", density=0.3),
    selective(sparsifier="topk", density=0.3, floor=0.25),
)
