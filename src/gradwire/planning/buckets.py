"""Buckets: gradients of one dtype laid end to end, which planners merge."""

from dataclasses import dataclass

from ..contract.bounds import check_whole
from .data.plan import Chunk, PlannedMessage
from .data.profile import Profile, ProfiledTensor


@dataclass(frozen=True)
class Bucket:
    """Tensors of one dtype in the profile's order, of one layer or neighbouring ones.

    None of the tensors is empty.
    """

    layer: int
    """The place in forward order of the bucket's first layer. In the backward pass that
    layer is ready last, and in the next forward pass it is needed first.
    """
    tensors: tuple[ProfiledTensor, ...]

    @property
    def dtype(self) -> str:
        return self.tensors[0].dtype

    @property
    def size_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors)


def buckets(profile: Profile) -> list[Bucket]:
    """All buckets in forward order: one or, with mixed dtypes, more a layer."""
    filled = []
    for place, layer in enumerate(profile.layers):
        by_dtype: dict[str, list[ProfiledTensor]] = {}
        for tensor in layer.tensors:
            if tensor.numel:
                by_dtype.setdefault(tensor.dtype, []).append(tensor)
        filled += [Bucket(place, tuple(tensors)) for tensors in by_dtype.values()]
    return filled


def whole_buckets(*fused: Bucket) -> PlannedMessage:
    """One message of several whole buckets."""
    return PlannedMessage(
        chunks=tuple(
            Chunk(tensor=tensor.name, start=0, stop=tensor.numel)
            for bucket in fused
            for tensor in bucket.tensors
        )
    )


def check_bytes(what: str, value: int) -> None:
    """Refuses ``value`` unless it is a size in bytes: a whole number of at least 1."""
    check_whole(what, value, "sizes are in bytes")
