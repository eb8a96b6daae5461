"""OmniReduce: blocks that are not all zeros, each to the rank that sums its range.

Source: OmniReduce (Fei et al., SIGCOMM 2021), as ZEN (OSDI 2025, section 2.4 and table
3) has it.
Differences: in bulk: a worker sends an aggregator all its blocks at once, each with its
    number, where OmniReduce streams them and sends the number of the next one.
    Aggregators are the ranks. Blocks hold whole units of the codec (one of rows:
    ``block`` / width rows, at least 1).
Wire: see ``push_pull``, whose unit is a block here; PULL(k) = COO(k) = (4 + block *
    itemsize) k bytes of k blocks. The last block is filled up with zeros.
State: the codec's.
Contributed: the encoded gradient.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from gradwire.collective.steps.push_pull import PushPull
from gradwire.contract import Compressor, Member
from gradwire.contract.bounds import check_whole
from gradwire.contract.collective import Dimensions
from gradwire.kernels.sparse.entries import MOST_WIDTH, Entries, num_units

from ..formats.blocks import blocks


@dataclass(frozen=True, kw_only=True)
class omnireduce(PushPull):
    """Push blocks of ``block`` elements in which any is not zero, add them up, pull.

    Args:
        block: The number of elements in a block, from 1 to 2**24; default 256. A block
            has an index of 4 bytes. Longer blocks have fewer indices, and send more
            zeros.
    """

    block: int = 256
    carries_rows: ClassVar[bool] = False
    dimensions: ClassVar[Dimensions] = Dimensions(
        "point-to-point", "one-shot", "parallelism", "imbalanced"
    )

    def __post_init__(self) -> None:
        check_whole(
            "omnireduce block", self.block, "OmniReduce takes 256", most=MOST_WIDTH
        )

    def width(self, codec: Compressor) -> int:
        return self.units_a_block(codec.width) * codec.width

    def units_a_block(self, width: int) -> int:
        """How many of a codec's units, of ``width`` elements, a block holds."""
        return max(1, self.block // width)

    def units(self, me: Member, entries: Entries, numel: int) -> Entries:
        form = blocks(block=self.units_a_block(entries.width))
        width = entries.width
        total = num_units(numel, width)
        layout = form.layout(
            form.count(entries, total), total, width, entries.values.dtype
        )
        room = me.thread_scratch(
            "blocks", layout.size_bytes, entries.values, torch.uint8
        )
        payload = form.encode(entries, total, room)
        return Entries(payload["indices"], payload["values"], form.block * width)

    def arrived(self, merged: Entries) -> int:
        return int(torch.count_nonzero(merged.values))


EXAMPLES = (omnireduce(),)
