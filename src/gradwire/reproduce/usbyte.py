"""usbyte: tables and figures of US-Byte that can be had without its clusters, beside ours.

Source: Gao et al., "US-Byte: An Efficient Communication Framework for Scheduling Unequal-sized
    Tensor Blocks in Distributed Deep Learning" (IEEE TPDS 2023), section 6.
Left out: figures 11 and 14 (parts of what figures 10 and 16 show), 12 (convergence is that of dense
    training: a plan changes the mean by the rounding of its sums at most), 17 (power) and table 5
    (their scheduler's overhead).
"""

from __future__ import annotations

from ._frame import Figure, Reproduction
from ._usbyte_blocks import draw15, draw16, figure15, figure16
from ._usbyte_error import draw4, table4
from ._usbyte_order import draw13, figure13
from ._usbyte_scaling import SHOWN, draw10, draw18, figure10, figure18

ASSUMPTIONS = (
    "Layer times are the catalogue's: a stated throughput model of a V100 in float32, not a "
    "measurement. Backward takes twice as long as forward.",
    "a is 910.5 us at 8 nodes (figure 9a), so 65 us a hop, and 2(N-1) hops at N nodes (equation "
    "14). For cluster 2 it is 1318.6 us at 8 nodes (figure 9b).",
    "b comes from the links' rate, 2(N-1)/N bytes on the wire for each byte: the printed b of "
    "cluster 1, 0.352e-4 us a byte, is 28 GB/s on links of 1.25 GB/s. In the published code the "
    "same value is b of 2 nodes of the 100 Gbit cluster. gamma counts as 0.",
    "Batch sizes: the first digit of table 3 is cut off in the copy at hand. They are read as 128, "
    "128, 128, 32, 64, 64, which are those of the published code for the five it has.",
    "Images are 3x224x224 (Inception 3x299x299), sequences 128 tokens.",
    '"Mb" is read as megabit: S_p = 4 Mb is 500,000 bytes. Read as megabyte it is 4,000,000, which '
    "is the published code's default of 1,000,000 elements; figure 18 has rows for both.",
    "A layer is a module with parameters of its own: weight and bias travel together. The paper's "
    "32! orders for VGG16 (section 7.2) make each tensor a layer; figure 18 has rows for both.",
    "Messages under way at once (ByteScheduler's credit) share the link's bandwidth while their "
    "latencies overlap; the paper does not model a credit.",
    "US-Byte is gradwire's planner usbyte: algorithm 1 mended, as it loses blocks as printed, and "
    "algorithm 2 followed by a bounded climb. Nothing is merged across layers and one block "
    "travels at a time, as in the paper; where it is tuned, S_p is. Rows \"with gradwire's "
    'extensions" are usbyte_extended: small layers merged, several blocks at once, S_p and credit '
    "tuned.",
    "X outperforms Y by 11 %: X does 1.11 times as much as Y in the same time.",
)

WIDE = frozenset({"settings"} | {f"samples_per_s_{name}" for name in SHOWN})

usbyte = Reproduction(
    paper="Gao et al., US-Byte (IEEE TPDS 2023)",
    assumptions=ASSUMPTIONS,
    figures=(
        Figure("table4", "error of the model against measured iterations", table4, draw4),
        Figure("figure10", "speed on 2, 4 and 8 nodes", figure10, draw10, WIDE),
        Figure("figure13", "the second phase's order against random ones", figure13, draw13),
        Figure("figure15", "planning time over S_p", figure15, draw15),
        Figure("figure16", "speed over S_p", figure16, draw16),
        Figure("figure18", "speed on 8 to 128 nodes", figure18, draw18, WIDE),
    ),
)
