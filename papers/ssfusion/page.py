"""ssfusion: the tables and figures of SSFusion, measured or simulated, beside what it
prints.

Source: Ming et al., "SSFusion" (ICDE 2026), sections III and V.
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
from ..rows import POINTS
from .breakdown import draw13, figure13
from .collectives import draw9, figure9
from .compare import UNPRINTED
from .contenders import LACKING
from .convergence import draw12, figure12
from .degrees import draw2, figure2
from .duration import figure12_time
from .latency import draw4, figure4, table3
from .missing import table1
from .profiling import table5
from .replayed import figure11_replayed
from .schemes import draw5, figure5
from .setting import A100_SPEED, HOP_S
from .sizes import table2
from .throughput import draw11, figure11
from .varied import (
    draw14,
    draw15,
    draw16,
    draw17,
    figure14,
    figure15,
    figure16,
    figure17,
)

ASSUMPTIONS = (
    "In table 1 and figure 12 models are those that train in minutes on two cores, and "
    "not ResNet-152, BERT-large or GPT2-large; density 0.01 and DGC's selection are "
    "the paper's.",
    "A fusion degree of 20 % is taken to be one message of the first 20 % of the "
    "tensors in backward order, and each other tensor by itself.",
    "Whether the paper's table 1 has error feedback is not said: both are measured.",
    "Figures 2, 5, 11 and 13 to 17 are simulated, on a flat cluster: each GPU has a "
    "link of its own at the stated rate, though in the cloud cluster 4 GPUs of a node "
    "share one. Figure 11 has rows of nodes of 4 GPUs too: a ring through all GPUs "
    "crosses a node's link once, and has it for itself, and what each GPU sends to all "
    f"others shares it. A hop of a ring costs {1e6 * HOP_S:.0f} us, which is not "
    "printed.",
    "Models are the catalogue's, at its batch sizes and float32 seconds of a V100; an "
    f"A100 is taken to compute {A100_SPEED} times as fast. The paper prints neither "
    "batches nor seconds.",
    "Selection takes the seconds of table 3, a line through the four sizes (4 bytes an "
    "element): the GPU's within the backward pass, the CPU's where it is offloaded. "
    "Ok-Topk and SparDL select once from the whole gradient, on the GPU, when the "
    "backward pass has ended. All GPUs are one team of SparDL, as no number of teams "
    "is printed. HiPress selects within the backward pass. Espresso chooses for each "
    "tensor between an all-reduce, an all-gather, and push and pull, and selects "
    "within the backward pass or on the CPU. To merge and decode takes no time, as "
    "none is printed; nor does copying to the CPU and back.",
    "SSFusion is read as its planner says: exclusion stops where the density of the "
    "others would fall below 0.001. Figure 11 has rows of equation 2 as printed too, "
    "of the 56 Gbit/s that arrive in figure 9, and of the shorter selection that "
    "figures 2 and 5 leave room for.",
    *(
        f"Schemes that gradwire has no planner of: {name}. Claims about it are "
        "not measured, and a "
        "range over all schemes without it agrees with nothing, though it can disagree."
        for name in LACKING
    ),
    "X outperforms Y by 11 %: X does 1.11 times as much as Y in the same time. A range "
    "of the paper agrees if ours lies within it.",
    "In figure 12 a planner groups the tensors of a small model as those of a model of "
    "the paper's size with as many tensors, on its local cluster.",
)

DRAWING = "an illustration: it states no figures"
SETTING = "the setting of the others"

CONTENTS = (
    Item("figure 1", "three ways to train on several machines", why=DRAWING),
    Item(
        "figure 2",
        "time and accuracy by fusion degree",
        ("figure2",),
        "its time; accuracies by degree take long trainings, table 1 has what "
        "is missing",
        how=SIMULATED,
    ),
    Item(
        "figure 3",
        "two tensors, selected apart and together",
        why="a doctest of selective",
        how=BY_CONSTRUCTION,
    ),
    Item(
        "table 1",
        "tensors missing by fusion degree",
        ("table1",),
        how=MEASURED,
    ),
    Item(
        "figure 4",
        "seconds of selection by size",
        ("figure4",),
        "on a CPU, its shape",
        how=MEASURED,
    ),
    Item(
        "table 2",
        "small and large tensors of four models",
        ("table2",),
        how=BY_CONSTRUCTION,
    ),
    Item(
        "figure 5",
        "selective sparsification beside the others",
        ("figure5",),
        "its time; figure 12 has accuracies, of other models",
        how=SIMULATED,
    ),
    Item("figure 6", "overview of SSFusion", why=DRAWING),
    Item("figure 7", "selection hidden behind a message", why=DRAWING),
    Item(
        "table 3",
        "selection on CPU and GPU",
        ("table3",),
        "on a CPU; on a GPU it is not timed",
        how=MEASURED,
    ),
    Item("figure 8", "offloading of selection", why=DRAWING),
    Item(
        "figure 9",
        "all-gather and all-reduce on 8 to 64 GPUs",
        ("figure9",),
        "by formula: no verdicts",
        how=SIMULATED,
    ),
    Item("figure 10", "all-reduce before all-gather", why=DRAWING),
    Item("table 4", "models and data", why=SETTING),
    Item(
        "figure 11",
        "training throughput on 64 GPUs",
        ("figure11", "figure11_replayed"),
        "simulated; four planners replayed on 8 hosts",
        how=BOTH,
    ),
    Item(
        "figure 12",
        "convergence",
        ("figure12", "figure12_time"),
        "on small models, for hundreds of steps; its time is simulated",
        how=BOTH,
    ),
    Item(
        "figure 13",
        "where an iteration's time goes",
        ("figure13",),
        "simulated",
        how=SIMULATED,
    ),
    Item(
        "figure 14",
        "throughput by sparsifier",
        ("figure14",),
        "simulated",
        how=SIMULATED,
    ),
    Item(
        "figure 15",
        "throughput by density",
        ("figure15",),
        "simulated",
        how=SIMULATED,
    ),
    Item(
        "figure 16",
        "throughput by bandwidth",
        ("figure16",),
        "simulated",
        how=SIMULATED,
    ),
    Item(
        "figure 17",
        "throughput of two larger models",
        ("figure17",),
        "simulated",
        how=SIMULATED,
    ),
    Item(
        "table 5",
        "share of profiling in training",
        ("table5",),
        how=BOTH,
    ),
)

OF_TWO = UNPRINTED | {"reading"}

ssfusion = Reproduction(
    paper="Ming et al., SSFusion (ICDE 2026)",
    assumptions=ASSUMPTIONS,
    contents=CONTENTS,
    figures=(
        Figure(
            "figure2", "selection's share of the time by fusion degree", figure2, draw2
        ),
        Figure("table1", "tensors missing by fusion degree", table1),
        Figure("figure4", "seconds of selection by size", figure4, draw4),
        Figure("table2", "small and large tensors of four models", table2),
        Figure("figure5", "seconds of an iteration by sparsification", figure5, draw5),
        Figure("table3", "seconds of DGC's selection", table3),
        Figure("figure9", "all-gather and all-reduce by GPUs", figure9, draw9),
        Figure(
            "figure11_replayed",
            "a few planners, replayed on 8 hosts",
            figure11_replayed,
            None,
            frozenset(
                {"settings", "alpha_s", "beta_s_per_byte", "host_share", "credit"}
            ),
        ),
        Figure("figure11", "throughput by GPUs", figure11, draw11, UNPRINTED),
        Figure(
            "figure12", "final scores by scheme", figure12, draw12, frozenset({POINTS})
        ),
        Figure(
            "figure12_time",
            "seconds of an iteration on 8 GPUs",
            figure12_time,
            None,
            OF_TWO,
        ),
        Figure("figure13", "where an iteration's time goes", figure13, draw13, OF_TWO),
        Figure(
            "figure14",
            "throughput by sparsifier",
            figure14,
            draw14,
            OF_TWO - {"sparsifier"},
        ),
        Figure(
            "figure15", "throughput by density", figure15, draw15, OF_TWO - {"density"}
        ),
        Figure("figure16", "throughput by bandwidth", figure16, draw16, UNPRINTED),
        Figure("figure17", "throughput of two larger models", figure17, draw17, OF_TWO),
        Figure("table5", "share of profiling in training", table5),
    ),
)
