"""Figure 11 of SSFusion on real links: a few planners, replayed on eight shaped hosts.

The runtime, selections and bytes are real, and computation is waiting
(``gradwire bench schedule``). Eight hosts share this machine's cores, so links and
gradients are smaller than those they stand for, and selections are a CPU's.
"""

from __future__ import annotations

from collections.abc import Sequence

from gradwire_bench.errors import TestbedUnavailable
from gradwire_bench.schedule.schedule import ScheduleBench, run

from ..frame import Ask, Claim, Findings, Row
from ..rows import number
from .compare import shown
from .printed import FIGURE_11

DENSE = "ddp"
SSFUSION = "ssfusion"
RIVALS = ("omgs", "cupcake")
PLANNERS = (DENSE, *RIVALS, SSFUSION)
MODELS = ("resnet50", "bert_base")
"""Models that eight ranks can hold here beside each other; the paper's are larger."""
RATE_BYTES_PER_S = 1.25e8
"""A link of 1 Gbit/s: on eight hosts dense gradients then take several times the
computation.
"""
SCALE = 32.0
SLOWDOWN = 4.0
"""The factors of bytes and rates, and of all seconds.

At a slowdown of 1 eight ranks' selections wait for two cores, which made plans that
encode each tensor early 1.6 times as long as simulated.
"""


def figure11_replayed(ask: Ask, models: Sequence[str] = MODELS) -> Findings:
    """Measured beside simulated seconds of an iteration, under each planner in turn."""
    bench = ScheduleBench(
        profiles=tuple(models[:1] if ask.quick else models),
        rate_bytes_per_s=RATE_BYTES_PER_S,
        scale=SCALE,
        slowdown=SLOWDOWN,
        turns=1 if ask.quick else 2,
        planners=PLANNERS,
    )
    try:
        rows = run(bench, ask.report).rows
    except TestbedUnavailable as error:
        return Findings((), (), (str(error),), complete=False)
    return Findings(tuple(rows), (claim(rows),), (bench.title, *notes(rows)))


def claim(rows: Sequence[Row]) -> Claim:
    """The paper's gain over all others, beside that over those replayed here; never
    alike.
    """
    stated = (
        min(low for low, _ in FIGURE_11.values()),
        max(high for _, high in FIGURE_11.values()),
    )
    found = [gain(rows, model, SSFUSION, RIVALS) for model in models_of(rows)]
    in_words = f"{shown((min(found), max(found)))} over {' and '.join(RIVALS)}"
    why = "8 hosts, smaller models and a CPU's selections, where the paper has 64 GPUs"
    says = f"SSFusion-(O+I) outperforms all others by {shown(stated)}"
    return Claim(says, "experiment 1, figure 11", in_words, None, why)


def notes(rows: Sequence[Row]) -> list[str]:
    """A sentence for each model: SSFusion over the best other, and the bound on it."""
    in_words = []
    for model in models_of(rows):
        own = {str(row["name"]): row for row in rows if row["model"] == model}
        others = [name for name in own if name != SSFUSION]
        best = min(others, key=lambda name: number(own[name], "measured_s"))
        bound = number(own[best], "measured_s") / number(own[best], "compute_s")
        off = max(abs(number(row, "fraction_error")) for row in own.values())
        more = gain(rows, model, SSFUSION, others)
        in_words.append(
            f"{model}: {SSFUSION} takes 1/{1 + more:.2f} of "
            f"{best}'s seconds, the best other's; computation alone bounds that at "
            f"1/{bound:.2f}. Simulated seconds are at most {100 * off:.0f} % off"
        )
    return in_words


def gain(rows: Sequence[Row], model: str, ours: str, others: Sequence[str]) -> float:
    """How much more than the best of others a planner does in the same time."""
    took_s = {
        str(row["name"]): number(row, "measured_s")
        for row in rows
        if row["model"] == model
    }
    return min(took_s[name] for name in others) / took_s[ours] - 1


def models_of(rows: Sequence[Row]) -> list[str]:
    """The models of rows, each once."""
    return list(dict.fromkeys(str(row["model"]) for row in rows))
