"""hipress: tables and figures of HiPress, beside ours: simulated, measured here, or
counted.

Source: Wu et al., "HiPress" (IEEE TPDS), sections 2.3, 3.3, 4.4 and 6.
"""

from __future__ import annotations

from ..frame import (
    BOTH,
    BY_CONSTRUCTION,
    MEASURED,
    SIMULATED,
    Figure,
    Item,
    Reproduction,
)
from .ablation import figure12
from .accuracy import draw14, figure14
from .batch import batch
from .convergence import draw16, figure16
from .coordinator import coordinator
from .gpu_use import draw10, figure10
from .lines import table5
from .pipeline import pipeline
from .plans import table7
from .servers import servers
from .servers_measured import servers_measured
from .sizes import table6
from .slots_measured import slots_measured
from .speed import draw13, figure13
from .throughput import draw, figure9, figure11, table1
from .varied import figure15

ASSUMPTIONS = (
    "A line is one that holds code; blank lines, comments and docstrings do not count. "
    "The paper does not say how it counts; figure 5's encode, 10 lines with its head, "
    "is part of TernGrad's 23.",
    "PowerSGD is an exchange of its own here: counted are the functions that compute "
    "its factors, not the verbs between them, as the paper counts encode and decode.",
    "The curves of table 7 are stated lines, as the paper prints none; more partitions "
    "than nodes count as planning/casync_cost.py says. The other figures "
    "take the same ones, times three for DGC's encode, whose decodes move its entries "
    "alone. A 1080 Ti computes 11.34 / 15.7 as fast as a V100 and has 484 / 900 of its "
    "bandwidth (datasheets).",
    "Layer times are the catalogue's: a stated throughput model of a V100, not a "
    "measurement. Its batches are not the paper's, which stand in a picture.",
    "onebit and TernGrad are sent with gradwire's blocks of 128: 1.5 and 2.25 "
    "bits an element with "
    "their scales, where the paper counts 1 and 2. Table 7 takes the paper's 1/32.",
    "GPUs of a host add up over NVLink or PCIe first, at no cost, so a host is one "
    "rank of the simulation; figure 9 has rows with the seconds of NVLink too. The "
    "paper's Ring and PyTorch do not add up first; a ring through all GPUs moves as "
    "many bytes over a host's link.",
    "How much arrives of a link is derived from table 1, whose share of communication "
    "over its efficiency is the seconds that a dense training communicates: 30 of 100 "
    "Gbit/s by a ring, 28 by BytePS, which has no RDMA on EC2. Other rows: all "
    "arrives. Locally the same shares.",
    "BytePS sends partitions of 4 MiB by priority, four at once, each a push and a "
    "pull of a hop. With onebit as many partitions go together as there are hosts, so "
    "each host serves one. The extra copies that the paper blames (section 6.3) are in "
    "no model. Ring fuses 64 MiB.",
    "PyTorch's hook makes backward pass, compression and transfers wait for each other "
    "(section 5.2). HiPress is the planner secopa; with DGC by CaSync-Ring. "
    "Compressing takes nothing from the computation's GPU.",
)

DRAWING = "an illustration or notation: it states no figures"
NO_CLUSTER = "simulated: the cluster is not to be had"

CONTENTS = (
    Item("figure 1", "strategies of synchronisation", why=DRAWING),
    Item(
        "table 1",
        "training Bert-large and Transformer on 16 machines",
        ("table1",),
        NO_CLUSTER,
        how=SIMULATED,
    ),
    Item(
        "figure 2",
        "CaSync's design",
        ("batch",),
        "a drawing; of its queues the encodes that wait are joined, or not",
        how=BOTH,
    ),
    Item(
        "figure 3",
        "coordinated bulk synchronisation",
        ("coordinator", "slots_measured"),
        "a drawing; what it draws is simulated and measured beside static turns",
        how=BOTH,
    ),
    Item("table 2", "notation of selective compression", why=DRAWING),
    Item(
        "table 3",
        "synchronisation parameters of CaSync's cost model",
        ("servers", "servers_measured"),
        "formulas: the planner secopa counts with them; servers of their own are "
        "simulated, and measured, beside aggregators that sit with workers",
        how=BOTH,
    ),
    Item("figure 4", "the interface of compression", why=DRAWING),
    Item(
        "table 4",
        "operators of CompLL",
        why="a definition: docs/compll.md lists ours",
        how=BY_CONSTRUCTION,
    ),
    Item("figure 5", "TernGrad in CompLL's language", why="a program, without figures"),
    Item(
        "table 5",
        "lines of code of the algorithms",
        ("table5",),
        "CompLL's columns; those of the open-source versions are other people's code",
        how=MEASURED,
    ),
    Item("figure 6", "overview of HiPress", why=DRAWING),
    Item("figure 7", "ordering constraints of tasks", why=DRAWING),
    Item("figure 8", "the pipeline of computation and communication", why=DRAWING),
    Item(
        "table 6",
        "sizes of the models",
        ("table6",),
        how=BY_CONSTRUCTION,
    ),
    Item(
        "table 7",
        "which gradients to compress, and into how many parts",
        ("table7",),
        how=SIMULATED,
    ),
    Item(
        "figure 9",
        "training throughput on 128 GPUs",
        ("figure9",),
        NO_CLUSTER,
        how=SIMULATED,
    ),
    Item(
        "figure 10",
        "use of the GPUs",
        ("figure10",),
        NO_CLUSTER,
        how=SIMULATED,
    ),
    Item(
        "figure 11",
        "speedup on 16 local machines",
        ("figure11",),
        NO_CLUSTER,
        how=SIMULATED,
    ),
    Item(
        "figure 12",
        "what each optimisation saves",
        ("figure12",),
        "replayed on shaped hosts, where waits stand for the GPUs",
        how=MEASURED,
    ),
    Item(
        "figure 13",
        "speed of encode and decode, and what it does for training",
        ("figure13",),
        "measured on this CPU beside torch, not beside the paper's other codes; "
        "training is simulated with the printed factors",
        how=BOTH,
    ),
    Item(
        "figure 14",
        "accuracy of the cost model",
        ("figure14",),
        "beside the simulator's exchanges, not beside measured ones of a "
        "cluster of GPUs",
        how=SIMULATED,
    ),
    Item(
        "section 6.5, pipeline validation",
        "where a step's time goes: compression in DDP's hook, and CaSync-PS",
        ("pipeline",),
        "on two shaped hosts, where waits stand for the GPUs; onebit instead of "
        "Compliance",
        how=MEASURED,
    ),
    Item(
        "figure 15",
        "speed by bandwidth and compression rate",
        ("figure15",),
        NO_CLUSTER,
        how=SIMULATED,
    ),
    Item(
        "figure 16",
        "time to convergence",
        ("figure16",),
        "small models are trained, each step counting as many seconds as a "
        "simulated iteration",
        how=BOTH,
    ),
)

hipress = Reproduction(
    paper="Wu et al., HiPress (IEEE TPDS 2023)",
    assumptions=ASSUMPTIONS,
    contents=CONTENTS,
    figures=(
        Figure("table1", "training Bert-large and Transformer on 16 hosts", table1),
        Figure("table5", "lines of code of the algorithms", table5),
        Figure("table6", "sizes of the models", table6),
        Figure(
            "table7",
            "which gradients to compress, and into how many parts",
            table7,
            unprinted=frozenset({"strategy", "num_nodes", "size_bytes"}),
        ),
        Figure("batch", "encodes that wait, joined or not", batch),
        Figure("servers", "servers of their own, and beside workers", servers),
        Figure("servers_measured", "the same on shaped hosts", servers_measured),
        Figure(
            "coordinator",
            "a coordinator's slots, static turns and neither",
            coordinator,
            unprinted=frozenset({"model", "way"}),
        ),
        Figure(
            "slots_measured",
            "the same ways on 8 shaped hosts",
            slots_measured,
            unprinted=frozenset({"model", "way"}),
        ),
        Figure("figure9", "throughput on 2 to 16 hosts of eight GPUs", figure9, draw),
        Figure(
            "figure10",
            "use of a GPU in an iteration",
            figure10,
            draw10,
            unprinted=frozenset({"points"}),
        ),
        Figure("figure11", "throughput on 16 hosts of two GPUs", figure11),
        Figure(
            "figure12",
            "what each optimisation saves",
            figure12,
            unprinted=frozenset({"model", "added"}),
        ),
        Figure(
            "figure13", "encode and decode, and training with them", figure13, draw13
        ),
        Figure("figure14", "the cost model beside the simulator", figure14, draw14),
        Figure("pipeline", "a step of DDP with compression beside CaSync-PS", pipeline),
        Figure("figure15", "speed by bandwidth and compression rate", figure15),
        Figure("figure16", "time to converge, in small", figure16, draw16),
    ),
)
