"""usbyte: tables and figures of US-Byte that can be had without its clusters, beside
ours.

Source: Gao et al., "US-Byte: An Efficient Communication Framework for Scheduling
    Unequal-sized Tensor Blocks in Distributed Deep Learning" (IEEE TPDS 2023), section
    6.
"""

from __future__ import annotations

from ..frame import MEASURED, SIMULATED, Figure, Item, Reproduction
from .bandwidth import draw11, draw14, figure11, figure14
from .blocks import draw15, draw16, figure15, figure16
from .energy import draw17, figure17
from .error import draw4, table4
from .lines import draw9, figure9
from .losses import draw12, figure12
from .order import draw13, figure13
from .overhead import table5
from .scaling import SHOWN, draw10, draw18, figure10, figure18

ASSUMPTIONS = (
    "Layer times are the catalogue's: a stated throughput model of a V100 in float32, "
    "not a measurement. Backward takes twice as long as forward.",
    "a is 910.5 us at 8 nodes (figure 9a), so 65 us a hop, and 2(N-1) hops at N nodes "
    "(equation 14). For cluster 2 it is 1318.6 us at 8 nodes (figure 9b).",
    "b comes from the links' rate, 2(N-1)/N bytes on the wire for each byte: the "
    "printed b of cluster 1, 0.352e-4 us a byte, is 28 GB/s on links of 1.25 GB/s. In "
    "the published code the same value is b of 2 nodes of the 100 Gbit cluster. gamma "
    "counts as 0.",
    "Batch sizes: the first digit of table 3 is cut off in the copy at hand. "
    "They are read as 128, "
    "128, 128, 32, 64, 64, which are those of the published code for the five it has.",
    "Images are 3x224x224 (Inception 3x299x299), sequences 128 tokens.",
    '"Mb" is read as megabit: S_p = 4 Mb is 500,000 bytes. Read as megabyte it '
    "is 4,000,000, which is the published code's default of 1,000,000 elements; figure "
    "18 has rows for both.",
    "A layer is a module with parameters of its own: weight and bias travel together. "
    "The paper's 32! orders for VGG16 (section 7.2) make each tensor a layer; figure "
    "18 has rows for both.",
    "Messages under way at once (ByteScheduler's credit) share the link's bandwidth "
    "while their latencies overlap; the paper does not model a credit.",
    "US-Byte is gradwire's planner usbyte: algorithm 1 mended, as it loses blocks as "
    "printed, and algorithm 2, or whole layers where those are faster. Nothing is "
    "merged across layers and one block travels at a time, as in the paper; where it "
    "is tuned, S_p is. Rows \"with gradwire's "
    'extensions" are usbyte_extended: small layers merged, several blocks at '
    "once, S_p and credit tuned.",
    "Figure 12 trains on generated images, a share of each epoch's for each node, with "
    "a learning rate that grows with the nodes; the paper's rates and batches for it "
    "are not printed.",
    "X outperforms Y by 11 %: X does 1.11 times as much as Y in the same time.",
)

WIDE = frozenset({"settings"} | {f"samples_per_s_{name}" for name in SHOWN})

DRAWING = "an illustration or notation: it states no figures"

CONTENTS = (
    Item("figure 1", "dependencies of computation and communication", why=DRAWING),
    Item("figure 2", "one iteration of 5 layers under three schedulers", why=DRAWING),
    Item("figure 3", "gain of fusion and order in 5 layers", why=DRAWING),
    Item("table 1", "notation", why=DRAWING),
    Item("figure 4", "the model of an iteration", why=DRAWING),
    Item("figure 5", "cases of an all-reduce in backward", why=DRAWING),
    Item("figure 6", "flowchart of algorithm 1", why=DRAWING),
    Item("figure 7", "example of the greedy algorithm", why=DRAWING),
    Item("figure 8", "architecture of US-Byte", why=DRAWING),
    Item(
        "table 2",
        "hardware of the clusters",
        why="a setting: the assumptions say what is taken",
    ),
    Item(
        "table 3",
        "models, parameters and batches",
        why="a setting: the assumptions say what is taken",
    ),
    Item(
        "table 4",
        "error of the model against measured iterations",
        ("table4",),
        "on shaped links of one machine, computations being waits, instead of "
        "two clusters",
        how=MEASURED,
    ),
    Item(
        "figure 9",
        "all-reduce time over bytes in both clusters",
        ("figure9",),
        "simulated with the printed a: the clusters are not to be had",
        how=SIMULATED,
    ),
    Item(
        "table 5",
        "time that partitioning takes in an iteration",
        ("table5",),
        "their scheduler partitions in each iteration; a plan here is made "
        "once, before",
        how=MEASURED,
    ),
    Item(
        "figure 10",
        "speed on 2, 4 and 8 nodes",
        ("figure10",),
        "simulated: the cluster is not to be had",
        how=SIMULATED,
    ),
    Item(
        "figure 11",
        "communication that is not hidden, and computation",
        ("figure11",),
        "simulated, as figure 10 is",
        how=SIMULATED,
    ),
    Item(
        "figure 12",
        "loss by epochs on 2, 4 and 8 nodes",
        ("figure12",),
        "a small convolutional network on generated images, not ResNet-50 and "
        "VGG16 on ImageNet",
        how=MEASURED,
    ),
    Item(
        "figure 13",
        "the second phase's order against random ones",
        ("figure13",),
        how=SIMULATED,
    ),
    Item(
        "figure 14",
        "speed by bandwidth in cluster 2",
        ("figure14",),
        "simulated, with the seconds of a V100",
        how=SIMULATED,
    ),
    Item(
        "figure 15",
        "planning time over S_p",
        ("figure15",),
        how=MEASURED,
    ),
    Item(
        "figure 16",
        "speed over S_p",
        ("figure16",),
        how=SIMULATED,
    ),
    Item(
        "figure 17",
        "power during training",
        ("figure17",),
        "the communications that section 5.3 explains it by, counted; no meter of "
        "power and no GPU of theirs, but RAPL's joules where /sys has them",
        how=MEASURED,
    ),
    Item(
        "figure 18",
        "speed on 8 to 128 simulated nodes",
        ("figure18",),
        how=SIMULATED,
    ),
    Item("figure 19", "gain of an order in the second phase", why=DRAWING),
)

usbyte = Reproduction(
    paper="Gao et al., US-Byte (IEEE TPDS 2023)",
    assumptions=ASSUMPTIONS,
    contents=CONTENTS,
    figures=(
        Figure(
            "table4", "error of the model against measured iterations", table4, draw4
        ),
        Figure(
            "figure9",
            "all-reduce time over bytes",
            figure9,
            draw9,
            frozenset({"cluster"}),
        ),
        Figure("figure10", "speed on 2, 4 and 8 nodes", figure10, draw10, WIDE),
        Figure("table5", "time that partitioning takes in an iteration", table5),
        Figure("figure11", "communication that is not hidden", figure11, draw11),
        Figure(
            "figure12",
            "loss by epoch on real ranks",
            figure12,
            draw12,
            frozenset({"points"}),
        ),
        Figure(
            "figure13", "the second phase's order against random ones", figure13, draw13
        ),
        Figure("figure14", "speed by bandwidth in cluster 2", figure14, draw14),
        Figure("figure15", "planning time over S_p", figure15, draw15),
        Figure("figure16", "speed over S_p", figure16, draw16),
        Figure(
            "figure17",
            "communications of an iteration by framework",
            figure17,
            draw17,
            frozenset({"model", "framework"}),
        ),
        Figure("figure18", "speed on 8 to 128 nodes", figure18, draw18, WIDE),
    ),
)
