"""zen: figures of ZEN, from real gradients of small models and on shaped links, beside
ours.

Source: Wang et al., "ZEN: Empowering Distributed Training with Sparsity-driven Data
    Synchronization" (OSDI 2025), sections 2, 3 and 5, appendices A and B.
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
from . import (
    balance,
    formats,
    hashing,
    losses,
    parts,
    schemes,
    sparsity,
    speed,
    training,
)

ASSUMPTIONS = (
    "An LSTM language model (20,000 words of Python's library and documentation, by "
    "falling frequency, as One Billion Word's vocabulary is), a DeepFM on "
    "MovieLens-100K and a transformer with DGC of 5 % stand for ZEN's six models: 1 to "
    "3 million elements each, where the paper's have 112 million to 3 billion.",
    "Of the LSTM and the DeepFM the embedding's gradient is looked at, as in the "
    "paper; the softmax's has no zeros. DGC selects from the whole gradient of the "
    "transformer, which is smaller than one of the paper's buckets, without a residual "
    "of earlier steps.",
    "A rank is a batch: gradients of up to 128 batches are taken of one set of "
    "parameters after 5 "
    "steps. They are kept beside the figures, which all speak of the same ones.",
    "A host of figures 15 and 17b sends the sum of 8 ranks' gradients, as the paper's "
    "machines do (4 with --quick), but one of the transformer's: 8 GPUs hold one of "
    "the paper's large models. In all other figures a rank is alone, as section 2 "
    "assumes.",
    "Elements travel one by one with an index each, as the paper counts them, but for "
    "columns and rows that say rows: an embedding's row needs one index.",
    "Figures 11 to 14 are measured on models and hosts of this machine, 2 and 4 of "
    "them (2 with --quick), and simulated for the paper's models by the planner's "
    "formulas. The paper prints a step's computation for the LSTM alone: only its "
    "speedups are held against the paper's, and only where a machine sums 8 gradients "
    "(2 with --quick).",
    "Figure 18 trains on 4 ranks, which one process stands for, on smaller "
    "vocabularies: an LSTM whose whole gradient goes by its non-zero elements, and a "
    "transformer under DGC of 5 % with error feedback.",
    "Communication (figures 15, 17b) is measured on hosts that share this machine, "
    "with links shaped to a rate; the all-reduce is the library's (gloo). X is n times "
    "as fast as Y: Y takes n times X's seconds.",
)

DRAWING = "an illustration or notation: it states no figures"
SETTING = "a setting: the assumptions say what stands for it here"
CLUSTER = (
    "16 machines of 8 V100s each are not to be had: small models are measured on a few "
    "hosts, and the paper's are simulated, which every row says"
)

CONTENTS = (
    Item("figure 1", "overview of ZEN", why=DRAWING),
    Item(
        "table 1",
        "three models with natural sparsity",
        why=SETTING,
    ),
    Item(
        "table 2",
        "three language models",
        why=SETTING,
    ),
    Item(
        "figure 2",
        "overlap and densification",
        ("figure2a", "figure2b"),
        how=MEASURED,
    ),
    Item(
        "figure 3",
        "skew of non-zero gradients",
        ("figure3a", "figure3b"),
        how=MEASURED,
    ),
    Item("figure 4", "patterns of communication", why=DRAWING),
    Item("figure 5", "patterns of aggregation", why=DRAWING),
    Item("figure 6", "patterns of partition", why=DRAWING),
    Item("figure 7", "patterns of balance", why=DRAWING),
    Item(
        "table 3",
        "schemes by their dimensions, in words",
        why="a classification, not a measurement: each sparse collective declares "
        "its dimensions",
        how=BY_CONSTRUCTION,
    ),
    Item("table 4", "notation", why=DRAWING),
    Item(
        "figure 8",
        "communication time of schemes over ranks",
        ("figure8",),
        how=SIMULATED,
    ),
    Item(
        "theorem 2",
        "imbalance of hashed parts",
        ("theorem2",),
        how=MEASURED,
    ),
    Item("figure 9", "example of hierarchical hashing", why=DRAWING),
    Item("figure 10", "example of a hash bitmap", why=DRAWING),
    Item(
        "figure 11",
        "training throughput, natural sparsity, 25 Gbit/s",
        ("figure11",),
        CLUSTER,
        how=BOTH,
    ),
    Item(
        "figure 12",
        "training throughput, natural sparsity, 100 Gbit/s",
        ("figure12",),
        CLUSTER,
        how=BOTH,
    ),
    Item(
        "figure 13",
        "training throughput, sparsified, 25 Gbit/s",
        ("figure13",),
        CLUSTER,
        how=BOTH,
    ),
    Item(
        "figure 14",
        "training throughput, sparsified, 100 Gbit/s",
        ("figure14",),
        CLUSTER,
        how=BOTH,
    ),
    Item(
        "figure 15",
        "speedup of communication over an all-reduce",
        ("figure15",),
        how=MEASURED,
    ),
    Item(
        "figure 16",
        "memory and hash functions of algorithm 1",
        ("figure16",),
        how=MEASURED,
    ),
    Item(
        "figure 17",
        "what the hash bitmap and hashing give",
        ("figure17a", "figure17b"),
        "17b is of communication, where the paper's is of training throughput",
        how=MEASURED,
    ),
    Item(
        "figure 18",
        "accuracy is that of an all-reduce",
        ("figure18",),
        "losses of an LSTM and a transformer on 4 ranks, not of DeepFM and "
        "OPT-2.7B on 16 machines",
        how=MEASURED,
    ),
)

zen = Reproduction(
    paper="Wang et al., ZEN (OSDI 2025)",
    assumptions=ASSUMPTIONS,
    contents=CONTENTS,
    figures=(
        Figure(
            "figure2a",
            "overlap ratios of two ranks' gradients",
            sparsity.figure2a,
            sparsity.draw2a,
            sparsity.UNPRINTED,
        ),
        Figure(
            "figure2b",
            "densification ratio over ranks",
            sparsity.figure2b,
            sparsity.draw2b,
            sparsity.UNPRINTED,
        ),
        Figure(
            "figure3a",
            "where the non-zero elements are",
            sparsity.figure3a,
            sparsity.draw3a,
            sparsity.UNPRINTED,
        ),
        Figure(
            "figure3b",
            "skewness ratio over partitions",
            sparsity.figure3b,
            sparsity.draw3b,
            sparsity.UNPRINTED,
        ),
        Figure(
            "figure8",
            "communication time over that of an all-reduce",
            schemes.figure8,
            schemes.draw8,
            schemes.UNPRINTED,
        ),
        Figure(
            "theorem2",
            "imbalance of hashed parts",
            balance.theorem2,
            balance.draw,
            balance.UNPRINTED,
        ),
        Figure(
            "figure16",
            "memory and hash functions of algorithm 1",
            hashing.figure16,
            hashing.draw16,
            hashing.UNPRINTED,
        ),
        Figure(
            "figure17a",
            "sizes of formats over density",
            formats.figure17a,
            formats.draw17a,
            formats.UNPRINTED,
        ),
        *(
            Figure(
                name,
                f"training by each scheme, {part.sparsity}, {part.gbit} Gbit/s",
                getattr(training, name),
                training.draw,
                training.UNPRINTED,
            )
            for name, part in training.PARTS.items()
        ),
        Figure(
            "figure15",
            "communication on shaped links",
            speed.figure15,
            speed.draw15,
            speed.UNPRINTED,
        ),
        Figure(
            "figure17b",
            "what hashing gives, and what the hash bitmap adds",
            parts.figure17b,
            parts.draw17b,
        ),
        Figure(
            "figure18",
            "losses by steps under each scheme",
            losses.figure18,
            losses.draw18,
            losses.UNPRINTED,
        ),
    ),
)
