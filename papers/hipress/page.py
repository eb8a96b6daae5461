"""hipress: tables of HiPress that can be had without its clusters, beside ours.

Source: Wu et al., "HiPress" (IEEE TPDS), sections 3.3, 4.4 and 6.1.
"""

from __future__ import annotations

from ..frame import Figure, Item, Reproduction
from .ablation import figure12
from .lines import table5
from .plans import table7

ASSUMPTIONS = (
    "A line is one that holds code; blank lines, comments and docstrings do not count. The paper "
    "does not say how it counts; figure 5's encode, 10 lines with its head, is part of TernGrad's "
    "23.",
    "PowerSGD is an exchange of its own here: counted are the functions that compute its factors, "
    "not the verbs between them, as the paper counts encode and decode.",
    "The curves of table 7 are stated lines, as the paper prints none; more partitions than nodes "
    "count as planning/casync.py says.",
)

DRAWING = "an illustration or notation: it states no figures"
CLUSTER = (
    "trains on clusters of GPUs with RDMA and other frameworks (MXNet, TensorFlow, BytePS), which "
    "are not to be had here"
)

CONTENTS = (
    Item("figure 1", "strategies of synchronisation", why=DRAWING),
    Item("table 1", "training Bert-large and Transformer on 16 machines", why=CLUSTER),
    Item("figure 2", "CaSync's design", why=DRAWING),
    Item("figure 3", "coordinated bulk synchronisation", why=DRAWING),
    Item("table 2", "notation of selective compression", why=DRAWING),
    Item(
        "table 3",
        "synchronisation parameters of CaSync's cost model",
        why="formulas: the planner secopa counts with them",
    ),
    Item("figure 4", "the interface of compression", why=DRAWING),
    Item("table 4", "operators of CompLL", why="a definition: docs/compll.md lists ours"),
    Item("figure 5", "TernGrad in CompLL's language", why="a program, without figures"),
    Item(
        "table 5",
        "lines of code of the algorithms",
        ("table5",),
        "CompLL's columns; those of the open-source versions are other people's code",
    ),
    Item("figure 6", "overview of HiPress", why=DRAWING),
    Item("figure 7", "ordering constraints of tasks", why=DRAWING),
    Item("figure 8", "the pipeline of computation and communication", why=DRAWING),
    Item("table 6", "sizes of the models", why="the setting of trainings that are not run here"),
    Item(
        "table 7",
        "which gradients to compress, and into how many parts",
        ("table7",),
    ),
    Item("figure 9", "training throughput on 128 GPUs", why=CLUSTER),
    Item("figure 10", "use of the GPUs", why=CLUSTER),
    Item("figure 11", "speedup on 16 local machines", why=CLUSTER),
    Item(
        "figure 12",
        "what each optimisation saves",
        ("figure12",),
        "replayed on shaped hosts, where waits stand for the GPUs",
    ),
    Item(
        "figure 13",
        "speed of encode and decode, and what it does for training",
        why="against GPU code of others; gradwire bench kernel times ours beside eager torch",
    ),
    Item(
        "figure 14",
        "accuracy of the cost model",
        why="a picture of latencies on a cluster of GPUs; secopa has the cost model",
    ),
    Item("figure 15", "speed by bandwidth and compression rate", why=CLUSTER),
    Item("figure 16", "time to convergence", why=CLUSTER),
)

hipress = Reproduction(
    paper="Wu et al., HiPress (IEEE TPDS 2023)",
    assumptions=ASSUMPTIONS,
    contents=CONTENTS,
    figures=(
        Figure("table5", "lines of code of the algorithms", table5),
        Figure(
            "table7",
            "which gradients to compress, and into how many parts",
            table7,
            unprinted=frozenset({"strategy", "num_nodes", "size_bytes"}),
        ),
        Figure(
            "figure12",
            "what each optimisation saves",
            figure12,
            unprinted=frozenset({"model", "added"}),
        ),
    ),
)
