"""Blocks: ranges of a bucket's elements, which planners that cut gradients send."""

from gradwire.planning.buckets import Bucket
from gradwire.planning.data.plan import Chunk, PlannedMessage


def item_bytes(bucket: Bucket) -> int:
    """The bytes of one element."""
    return bucket.tensors[0].size_bytes // bucket.tensors[0].numel


def block_starts(bucket: Bucket, block_bytes: int) -> range:
    """The first element of each block of at most ``block_bytes``, and of at least one
    element.

    All blocks but the last have ``block_starts(...).step`` elements.
    """
    numel = sum(tensor.numel for tensor in bucket.tensors)
    return range(0, numel, max(1, block_bytes // item_bytes(bucket)))


def message_of(bucket: Bucket, start: int, stop: int) -> PlannedMessage:
    """Elements ``start:stop`` of a bucket, or up to its end, as chunks of its
    tensors.
    """
    cut = []
    offset = 0
    for tensor in bucket.tensors:
        first = max(start - offset, 0)
        last = min(stop - offset, tensor.numel)
        if first < last:
            cut.append(Chunk(tensor=tensor.name, start=first, stop=last))
        offset += tensor.numel
    return PlannedMessage(chunks=tuple(cut))
