"""selective: each tensor of a message sparsified by itself, the smallest dense.

Source: Ming et al., ICDE 2026, "SSFusion: Tensor Fusion with Selective Sparsification
    for Efficient Distributed DNN Training", section IV-B (per-tensor selection,
    density-aware sparsification). A plan decides which tensors are offloaded or
    interleaved (-O, -I); ``encode_on_host`` serves -O.
Differences from the paper:
    - Which tensors are dense follows from sizes alone: the smallest, up to the paper's
      102,400 elements, as long as the others can make up for them. The paper goes on
      until the time of sparsification hides behind the message before (equation 2),
      which a plan may do by ``num_dense``. If that time never hides, the paper's rule
      leaves large tensors dense too.
    - The density that makes up for them is a closed form and no search. It is counted
      in bytes: a dense float32 takes 4 bytes, a sparse one 8. With
      ``count="elements"`` it is counted in elements, as in the paper, which leaves the
      other tensors a lower density (docs/measured.md).
    - All sparse tensors are encoded by one call of the sparsifier, so a small one costs
      little. The paper's insight 1, that small tensors take as long as large ones, is
      about a call for each.
    - If a threshold lets no element of a tensor pass, the largest element is sent.
    - Sparsifiers are those that send indices and values of a density: ``topk``,
      ``dgc``, ``graddrop``, ``gaussiank``, ``redsync``, ``sidco``. Random-k and CLT-k
      agree on elements first and all-reduce values, so nothing is gathered that dense
      tensors could ride with; DEFT gives every layer its k already; AdaComp sends more
      than indices and values, and it, the hard threshold and ``nonzero`` have no
      density that could be lowered.
Default: density 0.01 is the literature's, for long trainings (see ``topk``).
Density: the bytes of ``density`` * N sparse elements, and at most one more element for
    each tensor, as every tensor sends at least one. Sparse tensors keep within the
    sparsifier's own range.
Wire: of D dense elements and K sparse ones: dense_D in the working dtype, indices_K
    int32 (ascending, of the message), values_K float32 -> 4 D + 8 K bytes (8 D for
    float64), to each other rank, padded to the largest of the step. Where K varies it
    is announced first, 8 bytes.
State: the tensors' sizes, and codec_T, the sparsifier's state of each tensor.
Contributed: the dense tensors, and the selected elements of each other tensor.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from math import prod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from gradwire.collective.steps.ordered_sums import num_entries, summing_into
from gradwire.collective.steps.sizes import announce_all
from gradwire.compress._coo import check_addressable, round_to_wire
from gradwire.compress._residual import as_working
from gradwire.contract import (
    Compressor,
    Copies,
    EncodesTensors,
    Exchange,
    Layout,
    Member,
    Selection,
    State,
    Traits,
    synchronise_alone,
)
from gradwire.contract.bounds import check_choice, check_share, check_whole
from gradwire.contract.compressor import Residual
from gradwire.contract.payload import Field, Format, Payload, slot_bytes
from gradwire.contract.registry import KINDS, load, names
from gradwire.contract.spec import TensorSpec, clear_not_finite, working_dtype
from gradwire.contract.verbs import AllGather, Steps
from gradwire.errors import InvalidSetting, RanksDiffer, invalid
from gradwire.kernels import select
from gradwire.kernels.distinct import count_distinct

# ---- which tensors travel dense, and the density left to the others ------------------
#
# Source: SSFusion (ICDE 2026), section IV-B: exclude from the smallest tensor on, and
# "decrease the sparsification density of large tensors to compensate", not below a
# floor.


SMALL = 102_400
"""The most elements of a tensor that is left dense by itself (section III-B)."""


class Choice(NamedTuple):
    """How a message's tensors travel.

    The same on all ranks, as it follows from their sizes.
    """

    dense: tuple[int, ...]
    """Places in the message of the tensors that travel whole, ascending."""
    sparse: tuple[int, ...]
    """Places of the others, ascending; tensors without elements are in neither."""
    density: float
    """The share that is sent of each of ``sparse``."""


def choose(
    sizes: tuple[int, ...],
    density: float,
    floor: float,
    num_dense: int | None = None,
    *,
    dense_cost: float = 1.0,
) -> Choice:
    """The choice for tensors of ``sizes`` elements.

    If a plan has chosen ``num_dense``, so many of the smallest tensors are dense, and
    ``density`` is the density of the others. With None the smallest tensors are dense,
    under two conditions. They have at most ``SMALL`` elements, and the others can make
    up for them. Then about ``density`` of all elements travel, where a dense element
    counts as ``dense_cost``. The density of the others is at least ``floor``, and at
    least one tensor is sparse. Of equally large tensors the first counts as smaller.

    >>> choose((20, 1000, 10), density=0.05, floor=0.001)
    Choice(dense=(0, 2), sparse=(1,), density=0.0215)
    >>> choose((20, 1000, 10), density=0.05, floor=0.001, dense_cost=0.5)
    Choice(dense=(0, 2), sparse=(1,), density=0.0365)
    >>> choose((20, 1000, 10), density=0.05, floor=0.03)
    Choice(dense=(2,), sparse=(0, 1), density=0.04068627450980392)
    >>> choose((20, 1000, 10), density=0.05, floor=0.001, num_dense=1)
    Choice(dense=(2,), sparse=(0, 1), density=0.05)
    """
    rising = sorted(
        (place for place, size in enumerate(sizes) if size), key=lambda p: sizes[p]
    )
    if num_dense is None:
        sorted_sizes = [sizes[place] for place in rising]
        num_dense, density = _compensated(sorted_sizes, density, floor, dense_cost)
    dense = rising[:num_dense]
    sparse = rising[num_dense:]
    return Choice(tuple(sorted(dense)), tuple(sorted(sparse)), density)


def _compensated(
    rising: list[int], density: float, floor: float, dense_cost: float
) -> tuple[int, float]:
    """How many of the smallest are dense, and the density left to the others."""
    least = min(floor, density)
    total = sum(rising)
    excluded = 0
    choice = (0, density)
    for count, size in enumerate(rising[:-1], start=1):
        excluded += size
        left = (density * total - dense_cost * excluded) / (total - excluded)
        if size > SMALL or left < least:
            break
        choice = (count, min(left, density))
    return choice


# ---- one payload of tensors, some of them whole and the others as entries ------------
#
# Letters: N elements of the message, D of its dense tensors, K entries of the others.


_ENTRY_BYTES = torch.int32.itemsize + torch.float32.itemsize
Tensors = Mapping[int, Tensor]
"""Tensors of a message by their places in it."""


class SelectedElements(NamedTuple):
    """The selected elements of a sparse tensor, and the sparsifier's state after it."""

    indices_K: Tensor
    """Places of the elements, from the tensor's own start."""
    values_K: Tensor
    state: State


@dataclass(frozen=True)
class Mixed:
    """How tensors of ``sizes`` elements and one ``dtype`` travel.

    ``codec`` encodes the sparse tensors.
    """

    codec: Compressor
    sizes: tuple[int, ...]
    choice: Choice
    dtype: torch.dtype

    @property
    def varies(self) -> bool:
        """Whether the payload's size depends on values."""
        return bool(self.choice.sparse) and not self.codec.traits.exact_size

    @cached_property
    def num_dense(self) -> int:
        """The number of elements in the dense tensors, D."""
        return sum(self.sizes[place] for place in self.choice.dense)

    @cached_property
    def largest(self) -> Format:
        """The layout of the largest payload."""
        sizes = [num_entries(self.codec.format(spec)) for spec in self._specs()]
        return self.layout(sum(sizes))

    @cached_property
    def typical(self) -> Format:
        """The layout of a payload as large as is usual."""
        sizes = [num_entries(self.codec.typical(spec)) for spec in self._specs()]
        return self.layout(sum(sizes))

    def layout(self, num_entries: int) -> Format:
        """dense_D, then indices_K int32 and values_K float32."""
        return Format(
            (
                Field("dense", working_dtype(self.dtype), self.num_dense),
                Field("indices", torch.int32, num_entries),
                Field("values", torch.float32, num_entries),
            )
        )

    def received(self, size_bytes: int) -> Format:
        """The layout of a payload of ``size_bytes``; raises ``RanksDiffer`` if no
        payload has this size.
        """
        num_entries, rest = divmod(size_bytes - self.layout(0).size_bytes, _ENTRY_BYTES)
        if rest or num_entries < 0:
            raise RanksDiffer(
                f"a payload of {size_bytes} bytes is none of {self.num_dense} "
                "dense elements and "
                "whole entries; give every rank the same model, compressor and settings"
            )
        return self.layout(num_entries)

    def encode(
        self,
        me: Member,
        codec: Compressor,
        codec_T: tuple[Tensor, ...],
        grad_N: Tensor,
        residual_N: Residual,
        room: Tensor,
    ) -> tuple[int, tuple[Tensor, ...]]:
        """Puts the payload in the front of ``room``; ``codec`` is this rank's variant.

        Returns the payload's bytes, and the sparsifier's new states.

        ``residual_N`` then holds the part of gradient and residual that the payload
        lacks. Tensors that were encoded ahead are taken as they are.
        """
        grads = self._by_place(as_working(grad_N))
        residuals = None
        if residual_N is not None:
            residuals = self._by_place(residual_N)
        ahead = me.ahead
        me.ahead = {}
        left = [place for place in self.choice.sparse if place not in ahead]
        encoded = self.entries(codec, codec_T, left, grads, residuals)
        made = ahead | dict(zip(left, encoded, strict=True))
        entries = [made[place] for place in self.choice.sparse]
        counts = [selected.indices_K.numel() for selected in entries]
        form = self.layout(sum(counts))
        payload = Payload.empty(form, room[: form.size_bytes])
        if entries:
            torch.cat(
                [selected.indices_K for selected in entries], out=payload["indices"]
            )
            torch.cat(
                [selected.values_K for selected in entries], out=payload["values"]
            )
            starts = [self.starts[place] for place in self.choice.sparse]
            torch._foreach_add_(torch.split(payload["indices"], counts), starts)
        if self.choice.dense:
            self._put_dense(payload["dense"], grads, residuals)
        states = list(codec_T)
        for place, selected in zip(self.choice.sparse, entries, strict=True):
            if states:
                states[place] = selected.state
        return form.size_bytes, tuple(states)

    def merge(
        self, me: Member, sizes: Sequence[int], gathered: Tensor, out_N: Tensor
    ) -> Selection:
        """Writes the mean of the ranks' payloads, of ``sizes`` bytes.

        Ranks add up in one order.
        """
        slot = slot_bytes(max(sizes))
        payloads = [
            Payload(self.received(size), gathered[rank * slot : rank * slot + size])
            for rank, size in enumerate(sizes)
        ]
        with summing_into(me, out_N) as sum_N:
            self._add_up(me, payloads, sum_N)
        lists = [payload["indices"] for payload in payloads]
        union = count_distinct(lists, out_N.numel())
        asked = self.num_dense + self.choice.density * (out_N.numel() - self.num_dense)
        taken = lists[me.rank].numel()
        return Selection(asked, self.num_dense + taken, self.num_dense + union)

    def _add_up(self, me: Member, payloads: Sequence[Payload], sum_N: Tensor) -> None:
        """Adds each payload's share of the mean to ``sum_N``."""
        share = 1 / me.world
        dtype = sum_N.dtype
        for payload in payloads:
            select.scatter_add(
                payload["indices"], payload["values"].to(dtype), sum_N, share
            )
        if self.choice.dense:
            dense_D = me.thread_scratch("dense", self.num_dense, sum_N, dtype).zero_()
            for payload in payloads:
                dense_D.add_(payload["dense"], alpha=share)
            means = torch.split(
                dense_D, [self.sizes[place] for place in self.choice.dense]
            )
            tensors = self._by_place(sum_N)
            torch._foreach_copy_([tensors[place] for place in self.choice.dense], means)

    def entries(
        self,
        codec: Compressor,
        codec_T: tuple[Tensor, ...],
        places: Sequence[int],
        grads: Tensors,
        residuals: Tensors | None,
        is_sum: bool = False,
    ) -> Iterator[SelectedElements]:
        """The entries of sparse tensors, by one call.

        Gradients that ``is_sum`` hold residuals.
        """
        if not places:
            return
        made = codec.encode_many(
            [codec_T[place] if codec_T else None for place in places],
            [grads[place] for place in places],
            None if residuals is None else [residuals[place] for place in places],
        )
        for place, (payload, state) in zip(places, made, strict=True):
            elements = payload["indices"], payload["values"]
            if not elements[0].numel():
                residual_N = None if residuals is None else residuals[place]
                grad_N = grads[place]
                if is_sum:  # no residual is left with what is not finite
                    clear_not_finite(grad_N)
                elements = _at_least_one(grad_N, residual_N)
            yield SelectedElements(*elements, state)

    def _put_dense(
        self, dense_D: Tensor, grads: Tensors, residuals: Tensors | None
    ) -> None:
        """Fills ``dense_D``; dense tensors are sent whole and leave no residual."""
        sent = [grads[place] for place in self.choice.dense]
        if residuals is None:
            torch.cat(sent, out=dense_D)
            return
        kept = [residuals[place] for place in self.choice.dense]
        torch._foreach_add_(kept, sent)
        torch.cat(kept, out=dense_D)
        torch._foreach_zero_(kept)

    def _by_place(self, flat_N: Tensor) -> Tensors:
        return dict(enumerate(torch.split(flat_N, [*self.sizes])))

    def _specs(self) -> Iterator[TensorSpec]:
        return (
            TensorSpec("", self.sizes[place], self.dtype)
            for place in self.choice.sparse
        )

    def slice_of(self, place: int) -> slice:
        """The elements of the tensor at ``place``."""
        return slice(self.starts[place], self.starts[place + 1])

    @cached_property
    def starts(self) -> list[int]:
        """The place in the message at which each tensor begins."""
        return list(accumulate(self.sizes, initial=0))


def _at_least_one(grad_N: Tensor, residual_N: Residual) -> tuple[Tensor, Tensor]:
    """The largest element of a tensor of which a sparsifier took no element.

    A tensor of zeros has no such element.
    """
    whole_N = grad_N if residual_N is None else residual_N
    count = int(bool(whole_N.any()))
    indices_K = torch.empty(count, dtype=torch.int32, device=whole_N.device)
    exact_K = torch.empty(count, dtype=whole_N.dtype, device=whole_N.device)
    select.topk(whole_N, indices_K, exact_K)
    values_K = torch.empty(count, dtype=torch.float32, device=whole_N.device)
    if residual_N is not None:
        residual_N[indices_K.long()] = 0.0
    round_to_wire(values_K, exact_K, indices_K, residual_N)
    return indices_K, values_K


# ---- the exchange --------------------------------------------------------------------


_DENSE_COSTS = {"elements": 1.0, "bytes": 0.5}
"""A dense element's cost in sparse ones, which have an index each, by the count."""


class SelectiveState(NamedTuple):
    """Elements of each tensor in the message, and the sparsifier's state of each."""

    sizes: tuple[int, ...]
    codec_T: tuple[Tensor, ...]
    """Empty where the sparsifier keeps none."""


@dataclass(frozen=True, kw_only=True)
class selective(Exchange, EncodesTensors):
    """Averages the ``density`` share of a message, in every step some of each tensor.

    Each tensor is sparsified by itself, and the smallest tensors of a message are sent
    dense. A message holds the tensors that ``compress_if`` leaves to the exchange: by
    default no vectors.

    Args:
        sparsifier: The name of the compressor that selects elements: "topk" or "dgc"
            (the default). The package gradwire-lab adds "graddrop", "gaussiank",
            "redsync" and "sidco".
        density: The kept fraction k/n of the whole message, in (0, 1]; default 0.01. A
            larger fraction sends more bytes and loses less. With ``num_dense`` it is
            the fraction of the sparse tensors alone.
        num_dense: The number of the smallest tensors that are sent dense, a whole
            number from 0. It may exceed the tensors of a message: then all are dense.
            With 0 every tensor is sparse. None (the default): as many as fit. The
            density of the others is lowered in return, so the message gets no larger.
        floor: The least density to which the others are lowered, in (0, 1]; default
            0.001. A larger floor leaves fewer tensors dense. It has no effect beside
            ``num_dense``.
        count: The measure that dense tensors must not raise: "bytes" (the default) or
            "elements". A dense element has no index, so it takes half the bytes of a
            sparse one. "elements" is the paper's measure. It leaves the others a lower
            density, and so sends fewer bytes.

    The example of the paper's figure 3: two tensors in one message, and a quarter of
    the message is sent. If elements are selected from both tensors as one vector, none
    is from the second tensor. Tensor by tensor, each has an element.

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
        nonexpansive=True,
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
        codec_traits = _codec(self.sparsifier, self.density).traits
        stated = replace(
            self.traits,
            exact_size=codec_traits.exact_size,
            density_range=codec_traits.density_range,
        )
        object.__setattr__(self, "traits", stated)

    def init(self, spec: TensorSpec, world: int) -> SelectiveState:
        check_addressable("selective", spec)
        codec = self.mixed(spec).codec
        sizes = _sizes(spec)
        ends = accumulate(sizes)
        states = [
            codec.init(spec.chunk(b - n, b)) for n, b in zip(sizes, ends, strict=True)
        ]
        return SelectiveState(
            sizes, tuple(state for state in states if state is not None)
        )

    def mixed(self, spec: TensorSpec) -> Mixed:
        """How a message of this spec travels."""
        return _mixed(self, _sizes(spec), spec.dtype)

    def apart(self, spec: TensorSpec) -> tuple[int, ...]:
        """Places of the tensors that are not sent dense."""
        return self.mixed(spec).choice.sparse

    def encode_ahead(
        self,
        me: Member,
        state: SelectiveState,
        place: int,
        grad_N: Tensor,
        residual_N: Residual = None,
    ) -> None:
        mixed = _mixed(self, state.sizes, grad_N.dtype)
        here = mixed.slice_of(place)
        codec = me.variant_of(mixed.codec)
        grads = {place: as_working(grad_N[here])}
        residuals = None
        if residual_N is not None:
            residuals = {place: residual_N[here]}
        (me.ahead[place],) = mixed.entries(
            codec, state.codec_T, [place], grads, residuals
        )

    def encode_on_host(
        self,
        me: Member,
        state: SelectiveState,
        place: int,
        grad_N: Tensor,
        residual_N: Residual = None,
    ) -> Copies:
        """The sum goes out and entries come back.

        The residual holds the sum until the entries are there. Then it holds the part
        of the sum that the entries lack, and 0 if the sum is not finite. In that case
        ``encode_ahead`` leaves the residual of its codec.
        """
        mixed = _mixed(self, state.sizes, grad_N.dtype)
        here = mixed.slice_of(place)
        codec = me.variant_of(mixed.codec)
        sent_N = grad_N[here]
        kept_N = None
        if residual_N is not None:
            kept_N = residual_N[here]
        (whole_N,) = yield (sent_N if kept_N is None else kept_N.add_(sent_N),)
        grads = {place: as_working(whole_N)}
        is_sum = kept_N is not None
        (selected,) = mixed.entries(codec, state.codec_T, [place], grads, None, is_sum)
        indices_K, values_K = yield selected.indices_K, selected.values_K
        if kept_N is not None:
            kept_N.index_add_(0, indices_K, values_K.to(kept_N.dtype), alpha=-1)
            clear_not_finite(kept_N)
        me.ahead[place] = SelectedElements(indices_K, values_K, selected.state)

    def synchronise(
        self,
        me: Member,
        state: SelectiveState,
        grad_N: Tensor,
        out_N: Tensor,
        residual_N: Residual = None,
    ) -> Steps[State]:
        me.selection = None
        if me.world == 1:
            yield from synchronise_alone(grad_N, out_N, residual_N)
            return state
        mixed = _mixed(self, state.sizes, grad_N.dtype)
        numel = grad_N.numel()
        codec = me.variant_of(mixed.codec)
        room = me.scratch(
            "own", slot_bytes(mixed.largest.size_bytes), grad_N, torch.uint8
        )
        size_bytes, codec_T = yield me.sized(
            "encode",
            lambda: mixed.encode(me, codec, state.codec_T, grad_N, residual_N, room),
            numel,
            lambda: (mixed.typical.size_bytes, state.codec_T),
        )
        sizes = [mixed.largest.size_bytes] * me.world
        if mixed.varies:
            usual = [mixed.typical.size_bytes] * me.world
            sizes = yield from announce_all(me, codec, size_bytes, sizes, usual=usual)
        slot = slot_bytes(max(sizes))
        gathered = me.scratch(
            "gathered", me.world * slot, grad_N, torch.uint8, varies=mixed.varies
        )
        yield AllGather(gathered, room[:slot])
        me.selection = yield me.sized(
            "merge", lambda: mixed.merge(me, sizes, gathered, out_N), me.world * numel
        )
        return SelectiveState(state.sizes, codec_T)


def _sizes(spec: TensorSpec) -> tuple[int, ...]:
    """Elements of each tensor in a message, empty ones too."""
    return tuple(map(prod, spec.tensor_shapes))


@lru_cache(maxsize=4096)
def _mixed(made: selective, sizes: tuple[int, ...], dtype: torch.dtype) -> Mixed:
    cost = _DENSE_COSTS[made.count]
    choice = choose(sizes, made.density, made.floor, made.num_dense, dense_cost=cost)
    return Mixed(_codec(made.sparsifier, choice.density), sizes, choice, dtype)


@lru_cache(maxsize=1024)
def _codec(name: str, density: float) -> Compressor:
    """The sparsifier of this name; raises ``InvalidSetting`` for what cannot be one."""
    kind = load("compress", name)
    if issubclass(kind, Compressor) and "density" in {
        part.name for part in fields(kind)
    }:
        codec: Compressor = kind(density=density)
        sent = {part.name for part in codec.format(TensorSpec("", 1))}
        if sent == {"indices", "values"} and not codec.traits.reads_latest:
            return codec
    raise _refused(name)


def _refused(name: object) -> InvalidSetting:
    return invalid(
        "selective sparsifier",
        name,
        "the name of a compressor that sends indices and values, and has a density",
        "write 'dgc', or use it by itself",
    )


EXAMPLES = (
    selective(),
    selective(sparsifier="topk", density=0.3),
    selective(sparsifier="topk", density=0.3, floor=0.25),
)
