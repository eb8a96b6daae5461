"""Mixed: one payload of a message's tensors, some of them whole and the others as entries.

Letters: N elements of the message, D of its dense tensors, K entries of the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ...contract import Compressor, Copies, Member, Selection, State
from ...contract.payload import Field, Format, Payload, slot_bytes
from ...contract.spec import TensorSpec, working_dtype
from ...errors import RanksDiffer
from ...kernels import select
from ...kernels.distinct import count_distinct
from .._coo import round_to_wire
from .._residual import as_working
from .choice import Choice

_ENTRY_BYTES = torch.int32.itemsize + torch.float32.itemsize
Tensors = Mapping[int, Tensor]
"""Tensors of a message by their places in it."""


class Picked(NamedTuple):
    """The elements picked of a sparse tensor, and the new state that the sparsifier keeps of it."""

    indices_K: Tensor
    """Places of the elements, from the tensor's own start."""
    values_K: Tensor
    state: State


class Encoded(NamedTuple):
    """The bytes of a payload, and the sparsifier's new states."""

    size_bytes: int
    codec_T: tuple[Tensor, ...]


@dataclass(frozen=True)
class Mixed:
    """How tensors of ``sizes`` elements and one ``dtype`` travel; ``codec`` encodes the sparse."""

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
    def forms(self) -> tuple[Format, ...]:
        """The layout of the largest payload that the codec makes of each sparse tensor."""
        return tuple(map(self.codec.format, self._specs()))

    @cached_property
    def largest(self) -> Format:
        """The layout of the largest payload."""
        return self.layout(sum(map(_num_entries, self.forms)))

    @cached_property
    def typical(self) -> Format:
        """The layout of a payload as large as is usual."""
        return self.layout(sum(map(_num_entries, map(self.codec.typical, self._specs()))))

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
        """The layout of a payload of so many bytes; ``RanksDiffer`` where none has so many."""
        num_entries, rest = divmod(size_bytes - self.layout(0).size_bytes, _ENTRY_BYTES)
        if rest or num_entries < 0:
            raise RanksDiffer(
                f"a payload of {size_bytes} bytes is none of {self.num_dense} dense elements and "
                "whole entries; give every rank the same model, compressor and settings"
            )
        return self.layout(num_entries)

    def encode(
        self,
        me: Member,
        codec: Compressor,
        codec_T: tuple[Tensor, ...],
        grad_N: Tensor,
        residual_N: Tensor | None,
        own: Tensor,
    ) -> Encoded:
        """Puts the payload in the front of ``own``; ``codec`` is this rank's variant.

        ``residual_N`` then holds what of gradient and residual the payload lacks. Tensors that
        were encoded ahead are taken as they are.
        """
        grads = self._by_place(as_working(grad_N))
        residuals = None if residual_N is None else self._by_place(residual_N)
        ahead, me.ahead = me.ahead, {}
        left = [place for place in self.choice.sparse if place not in ahead]
        found = self._entries(me, codec, codec_T, left, grads, residuals)
        made = ahead | dict(zip(left, found, strict=True))
        entries = [made[place] for place in self.choice.sparse]
        counts = [one.indices_K.numel() for one in entries]
        form = self.layout(sum(counts))
        payload = Payload.empty(form, own[: form.size_bytes])
        if entries:
            torch.cat([one.indices_K for one in entries], out=payload["indices"])
            torch.cat([one.values_K for one in entries], out=payload["values"])
            starts = [self._starts[place] for place in self.choice.sparse]
            torch._foreach_add_(torch.split(payload["indices"], counts), starts)
        if self.choice.dense:
            self._put_dense(payload["dense"], grads, residuals)
        return Encoded(form.size_bytes, self._next_states(codec_T, entries))

    def encode_ahead(
        self,
        me: Member,
        codec: Compressor,
        codec_T: tuple[Tensor, ...],
        place: int,
        grad_N: Tensor,
        residual_N: Tensor | None,
    ) -> None:
        """Leaves the entries of the sparse tensor at ``place`` in ``me.ahead``."""
        here = slice(self._starts[place], self._starts[place + 1])
        grads = {place: as_working(grad_N[here])}
        residuals = None if residual_N is None else {place: residual_N[here]}
        (me.ahead[place],) = self._entries(me, codec, codec_T, [place], grads, residuals)

    def encode_on_host(
        self,
        me: Member,
        codec: Compressor,
        codec_T: tuple[Tensor, ...],
        place: int,
        grad_N: Tensor,
        residual_N: Tensor | None,
    ) -> Copies:
        """``encode_ahead`` by the host, of what lies on a device: the sum goes out, entries back.

        The residual holds the sum until the entries are there. Then it is what they lack of it, and
        0 where the sum is not finite; there ``encode_ahead`` leaves what its codec does.
        """
        here = slice(self._starts[place], self._starts[place + 1])
        sent_N, kept_N = grad_N[here], None if residual_N is None else residual_N[here]
        (whole_N,) = yield (sent_N if kept_N is None else kept_N.add_(sent_N),)
        grads = {place: as_working(whole_N)}
        (found,) = self._entries(me, codec, codec_T, [place], grads, None, kept_N is not None)
        indices_K, values_K = yield found.indices_K, found.values_K
        if kept_N is not None:
            kept_N.index_add_(0, indices_K, values_K.to(kept_N.dtype), alpha=-1)
            torch.nan_to_num_(kept_N, nan=0.0, posinf=0.0, neginf=0.0)
        me.ahead[place] = Picked(indices_K, values_K, found.state)

    def merge(self, me: Member, sizes: Sequence[int], gathered: Tensor, out_N: Tensor) -> Selection:
        """Writes the mean of the ranks' payloads, of ``sizes`` bytes; ranks add up in one order."""
        slot = slot_bytes(max(sizes))
        payloads = [
            Payload(self.received(size), gathered[rank * slot : rank * slot + size])
            for rank, size in enumerate(sizes)
        ]
        dtype, share = working_dtype(out_N.dtype), 1 / me.world
        sum_N = out_N if out_N.dtype == dtype else me.passing("sum", out_N.numel(), out_N, dtype)
        sum_N.zero_()
        for payload in payloads:
            select.scatter_add(payload["indices"], payload["values"].to(dtype), sum_N, share)
        if self.choice.dense:
            dense_D = me.passing("dense", self.num_dense, out_N, dtype).zero_()
            for payload in payloads:
                dense_D.add_(payload["dense"], alpha=share)
            means = torch.split(dense_D, [self.sizes[place] for place in self.choice.dense])
            tensors = torch.split(sum_N, [*self.sizes])
            torch._foreach_copy_([tensors[place] for place in self.choice.dense], means)
        if sum_N is not out_N:
            out_N.copy_(sum_N)
        lists = [payload["indices"] for payload in payloads]
        union = count_distinct(lists, out_N.numel())
        asked = self.num_dense + self.choice.density * (out_N.numel() - self.num_dense)
        taken = lists[me.rank].numel()
        return Selection(asked, self.num_dense + taken, self.num_dense + union)

    def _entries(
        self,
        me: Member,
        codec: Compressor,
        codec_T: tuple[Tensor, ...],
        places: Sequence[int],
        grads: Tensors,
        residuals: Tensors | None,
        is_sum: bool = False,
    ) -> Iterator[Picked]:
        """The entries of sparse tensors, by one call; gradients that ``is_sum`` hold residuals."""
        if not places:
            return
        like = grads[places[0]]  # of one message some may be encoded here and some on the host
        whole = me.scratch(f"rooms on {like.device.type}", self._rooms_bytes, like, torch.uint8)
        made = codec.encode_many(
            [codec_T[place] if codec_T else None for place in places],
            [grads[place] for place in places],
            None if residuals is None else [residuals[place] for place in places],
            [whole[self._rooms[place]] for place in places],
        )
        for place, (payload, state) in zip(places, made, strict=True):
            found = payload["indices"], payload["values"]
            if not found[0].numel():
                residual_N = None if residuals is None else residuals[place]
                grad_N = grads[place]
                if is_sum:  # no residual is left with what is not finite
                    torch.nan_to_num_(grad_N, nan=0.0, posinf=0.0, neginf=0.0)
                found = _at_least_one(grad_N, residual_N)
            yield Picked(*found, state)

    def _next_states(
        self, codec_T: tuple[Tensor, ...], entries: Sequence[Picked]
    ) -> tuple[Tensor, ...]:
        """The sparsifier's states with those that came with the entries of the sparse tensors."""
        states = list(codec_T)
        for place, one in zip(self.choice.sparse, entries, strict=True):
            if states:
                states[place] = one.state
        return tuple(states)

    def _put_dense(self, dense_D: Tensor, grads: Tensors, residuals: Tensors | None) -> None:
        """Fills ``dense_D``: of the dense tensors everything is sent, and nothing stays."""
        sent = [grads[place] for place in self.choice.dense]
        if residuals is None:
            torch.cat(sent, out=dense_D)
            return
        kept = [residuals[place] for place in self.choice.dense]
        torch._foreach_add_(kept, sent)
        torch.cat(kept, out=dense_D)
        torch._foreach_zero_(kept)

    @cached_property
    def _rooms(self) -> dict[int, slice]:
        """Where each sparse tensor is encoded, before its entries join the others', by place."""
        ends = accumulate(form.slot_bytes for form in self.forms)
        starts = (end - form.slot_bytes for form, end in zip(self.forms, ends, strict=True))
        each = zip(self.choice.sparse, starts, self.forms, strict=True)
        return {place: slice(start, start + form.size_bytes) for place, start, form in each}

    @cached_property
    def _rooms_bytes(self) -> int:
        return sum(form.slot_bytes for form in self.forms)

    def _by_place(self, flat_N: Tensor) -> Tensors:
        return dict(enumerate(torch.split(flat_N, [*self.sizes])))

    def _specs(self) -> Iterator[TensorSpec]:
        return (TensorSpec("", self.sizes[place], self.dtype) for place in self.choice.sparse)

    @cached_property
    def _starts(self) -> list[int]:
        """The place in the message at which each tensor begins."""
        return list(accumulate(self.sizes, initial=0))


def _num_entries(form: Format) -> int:
    return next(part.numel for part in form if part.name == "indices")


def _at_least_one(grad_N: Tensor, residual_N: Tensor | None) -> tuple[Tensor, Tensor]:
    """The largest element of a tensor of which a sparsifier took nothing; none of zeros."""
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
