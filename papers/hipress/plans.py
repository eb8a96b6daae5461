"""Table 7 of HiPress: which gradients to compress, and into how many partitions to cut
them.

The paper's curves of encode, decode and transfer are not printed. The stated ones here
are lines of round figures that a V100 and a link of 100 Gbit/s could have. They are
chosen so that aggregators on four nodes get the paper's plans; the other nine cells
follow from them.
"""

from __future__ import annotations

from gradwire.planning.data.cluster import CodecFit
from gradwire.planning.data.fit import LineFit
from gradwire_lab.planning.casync_cost import CaSyncCost

from ..frame import Ask, Claim, Findings, Row

MIB = 2**20
SEND = LineFit(alpha_s=20e-6, per_unit_s=8 / 100e9)
"""A transfer, over bytes: 100 Gbit/s."""
ENCODE = LineFit(alpha_s=30e-6, per_unit_s=4 / 300e9)
"""Over elements: a gradient is read at 300 GB/s, a third of what the memory of a V100
gives.
"""
DECODE = LineFit(alpha_s=20e-6, per_unit_s=4 / 200e9)
"""Over elements: a gradient is written, or added to, at 200 GB/s."""
RATE = 1 / 32
"""The compression rate r of onebit in the paper: one bit of 32."""

TABLE_7: dict[tuple[str, int], tuple[tuple[int, bool, int], ...]] = {
    ("casync_ps", 4): ((4, True, 2), (16, True, 4), (392, True, 12)),
    ("casync_ps", 16): ((4, True, 1), (16, True, 6), (392, True, 16)),
    ("casync_ring", 4): ((4, True, 1), (16, True, 4), (392, True, 4)),
    ("casync_ring", 16): ((4, False, 16), (16, True, 5), (392, True, 16)),
}
"""By strategy and nodes: megabytes of a gradient, whether it is compressed, its
partitions.
"""

FITTED = ("casync_ps", 4)
"""The strategy and nodes whose three cells the stated curves were chosen for."""
FALLS = (
    "with lines every term of equation 2 falls on a ring, or stays, as partitions are "
    "added up to one a node, so the minimum is there; fewer need curves that are flat "
    "for small gradients"
)
GROWS = (
    "what a cut saves in transfers and decodes grows with the nodes, and its encodes "
    "cost as much on 4 nodes as on 16: where 2 partitions are best on 4 nodes, under "
    "equation 2 no increasing curves make 1 the best on 16"
)
BETWEEN = (
    "the number of partitions depends on the curves, which the paper does not print"
)


def table7(ask: Ask) -> Findings:
    """The choice of the cost model for each of the table's twelve cells."""
    rows = [
        _row(strategy, num_nodes, size, is_compressed, num_partitions)
        for (strategy, num_nodes), cells in TABLE_7.items()
        for size, is_compressed, num_partitions in cells
    ]
    note = (
        f"stated curves: a transfer {_words(SEND, 'byte')}, encode "
        f"{_words(ENCODE, 'element')}, decode {_words(DECODE, 'element')}; r = 1/32; "
        "alpha, beta, gamma as in section 6.1. They were chosen for casync_ps on 4 "
        "nodes, so those three cells are no prediction"
    )
    return Findings(tuple(rows), tuple(map(_claim, rows)), (note,))


def cost(strategy: str, num_nodes: int) -> CaSyncCost:
    """The cost model with the stated curves."""
    codec = CodecFit(encode=ENCODE, decode=DECODE, merge=DECODE)
    return CaSyncCost(num_nodes, strategy == "casync_ring", SEND, codec)


def _row(
    strategy: str, num_nodes: int, size: int, is_compressed: bool, num_partitions: int
) -> Row:
    size_bytes = size * MIB
    choice = cost(strategy, num_nodes).choose(
        size_bytes // 4, size_bytes, RATE * size_bytes
    )
    return {
        "name": f"{strategy} {num_nodes} nodes {size} MB",
        "strategy": strategy,
        "num_nodes": num_nodes,
        "size_bytes": size_bytes,
        "compresses": choice.is_compressed,
        "partitions": choice.num_partitions,
        "compresses_paper": is_compressed,
        "partitions_paper": num_partitions,
        "predicted_s": choice.seconds,
    }


def _claim(row: Row) -> Claim:
    says = _plan(row, "_paper")
    ours = _plan(row, "")
    agrees: bool | None = says == ours
    why = "" if agrees else _why(row)
    if (row["strategy"], row["num_nodes"]) == FITTED:
        agrees = None
        why = "the curves were chosen to give this cell, so it is no prediction"
    return Claim(f"{row['name']}: {says}", "table 7", ours, agrees, why)


def _why(row: Row) -> str:
    """The reason for another plan, from the row."""
    if row["strategy"] == "casync_ring" and row["partitions"] == row["num_nodes"]:
        return FALLS
    four = next(
        one for one in TABLE_7["casync_ps", 4] if one[0] * MIB == row["size_bytes"]
    )
    if four[2] > int(str(row["partitions_paper"])) == 1:
        return GROWS
    return BETWEEN


def _plan(row: Row, whose: str) -> str:
    return (
        f"<{'yes' if row[f'compresses{whose}'] else 'no'}, {row[f'partitions{whose}']}>"
    )


def _words(line: LineFit, unit: str) -> str:
    return (
        f"{line.alpha_s * 1e6:.0f} us and {line.per_unit_s * 1e12:.3g} ps for each "
        f"{unit}"
    )
