"""Buckets: gradients of one dtype laid end to end, which planners cut and merge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..contract.bounds import check_whole
from ..errors import invalid
from .data.plan import MOST_CREDIT, Chunk, PlannedMessage
from .data.profile import Profile, ProfiledTensor

MOST_MESSAGES = 2**18
"""The most messages of a plan. So many take half a gigabyte of memory and a minute to price."""


@dataclass(frozen=True)
class Bucket:
    """Tensors of one dtype, in the profile's order: a layer's, or those of neighbouring layers.

    None of the tensors is empty.
    """

    layer: int
    """The place in forward order of the bucket's first layer. In the backward pass that layer is
    ready last, and in the next forward pass it is needed first."""
    tensors: tuple[ProfiledTensor, ...]

    @property
    def dtype(self) -> str:
        return self.tensors[0].dtype

    @property
    def numel(self) -> int:
        return sum(tensor.numel for tensor in self.tensors)

    @property
    def size_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors)

    @property
    def item_bytes(self) -> int:
        return self.tensors[0].size_bytes // self.tensors[0].numel

    def chunks(self, start: int = 0, stop: int | None = None) -> tuple[Chunk, ...]:
        """Elements ``start:stop`` of the whole bucket, as chunks of its tensors."""
        stop = self.numel if stop is None else stop
        found, offset = [], 0
        for tensor in self.tensors:
            first, last = max(start - offset, 0), min(stop - offset, tensor.numel)
            if first < last:
                found.append(Chunk(tensor=tensor.name, start=first, stop=last))
            offset += tensor.numel
        return tuple(found)

    def block_numel(self, block_bytes: int) -> int:
        """Elements in a block of at most ``block_bytes``, and at least one."""
        return max(1, block_bytes // self.item_bytes)


def buckets(profile: Profile) -> list[Bucket]:
    """All buckets in forward order: one a layer that owns elements, more where it mixes dtypes."""
    found = []
    for place, layer in enumerate(profile.layers):
        by_dtype: dict[str, list[ProfiledTensor]] = {}
        for tensor in layer.tensors:
            if tensor.numel:
                by_dtype.setdefault(tensor.dtype, []).append(tensor)
        found += [Bucket(place, tuple(tensors)) for tensors in by_dtype.values()]
    return found


def merged_buckets(cut: Sequence[Bucket], size_bytes: float) -> list[Bucket]:
    """Neighbours of one dtype in one bucket, as long as each is smaller than ``size_bytes``."""
    found: list[Bucket] = []
    for bucket in cut:
        last = found[-1] if found else None
        small = last is not None and max(last.size_bytes, bucket.size_bytes) < size_bytes
        if last is not None and small and last.dtype == bucket.dtype:
            found[-1] = Bucket(last.layer, last.tensors + bucket.tensors)
        else:
            found.append(bucket)
    return found


def whole_buckets(*fused: Bucket) -> PlannedMessage:
    """One message of several whole buckets."""
    return PlannedMessage(chunks=tuple(chunk for bucket in fused for chunk in bucket.chunks()))


def check_bytes(what: str, given: int) -> None:
    """Refuses ``given`` unless it is a size of a message in bytes: a whole number of at least 1."""
    check_whole(what, given, "sizes are in bytes")


def check_count(what: str, given: int, num_messages: int) -> None:
    """Refuses a size with which the plan would have more than ``MOST_MESSAGES`` messages."""
    if num_messages > MOST_MESSAGES:
        accepted = f"a size that cuts this model into at most {MOST_MESSAGES} messages"
        raise invalid(what, given, f"{accepted}, and not {num_messages}", "write a larger one")


def check_credit(given: int) -> None:
    """Refuses ``given`` unless it is a whole number of channels from 1 to ``MOST_CREDIT``."""
    check_whole("credit", given, "4 is usual", most=MOST_CREDIT)
