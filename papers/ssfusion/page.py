"""ssfusion: the tables and figures of SSFusion, and those that are measured here so far.

Source: Ming et al., "SSFusion" (ICDE 2026), sections III and V.
"""

from __future__ import annotations

from ..frame import Figure, Item, Reproduction
from .missing import table1

ASSUMPTIONS = (
    "Models are those that train in seconds on two cores, and not ResNet-152, BERT-large or "
    "GPT2-large; density 0.01 and DGC's selection are the paper's.",
    "A fusion degree of 20 % is taken to be one message of the first 20 % of the tensors in "
    "backward order, and each other tensor by itself.",
    "Whether the paper's table 1 has error feedback is not said: both are measured.",
)

DRAWING = "an illustration: it states no figures"
PLANNER = (
    "not measured yet: the planners ssfusion, cupcake and omgs are there, and all of their plans "
    "can be carried out"
)
SETTING = "the setting of the others"

CONTENTS = (
    Item("figure 1", "three ways to train on several machines", why=DRAWING),
    Item("figure 2", "time and accuracy by fusion degree", why="accuracies of long trainings"),
    Item("figure 3", "two tensors, selected apart and together", why="a doctest of selective"),
    Item("table 1", "tensors missing by fusion degree", ("table1",)),
    Item(
        "figure 4",
        "seconds of selection by size",
        why="gradwire bench select and bench batch time ours",
    ),
    Item("table 2", "small and large tensors of four models", why="facts of models"),
    Item("figure 5", "selective sparsification beside the others", why=PLANNER),
    Item("figure 6", "overview of SSFusion", why=DRAWING),
    Item("figure 7", "selection hidden behind a message", why=DRAWING),
    Item("table 3", "selection on CPU and GPU", why="there is no GPU here"),
    Item("figure 8", "offloading of selection", why=DRAWING),
    Item("figure 9", "all-gather and all-reduce on 8 to 64 GPUs", why=PLANNER),
    Item("figure 10", "all-reduce before all-gather", why=DRAWING),
    Item("table 4", "models and data", why=SETTING),
    Item("figure 11", "training throughput on 64 GPUs", why=PLANNER),
    Item("figure 12", "convergence", why=PLANNER),
    Item("figure 13", "where an iteration's time goes", why=PLANNER),
    Item("figure 14", "throughput by sparsifier", why=PLANNER),
    Item("figure 15", "throughput by density", why=PLANNER),
    Item("figure 16", "throughput by bandwidth", why=PLANNER),
    Item("figure 17", "throughput of two larger models", why=PLANNER),
    Item("table 5", "share of profiling in training", why=PLANNER),
)

ssfusion = Reproduction(
    paper="Ming et al., SSFusion (ICDE 2026)",
    assumptions=ASSUMPTIONS,
    contents=CONTENTS,
    figures=(Figure("table1", "tensors missing by fusion degree", table1),),
)
