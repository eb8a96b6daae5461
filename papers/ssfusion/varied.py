"""Figures 14 to 17 of SSFusion: throughput by sparsifier, density, rate and model,
simulated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

from gradwire_bench.report import bars

from ..frame import Ask, Claim, Findings, Row
from ..rows import number
from .compare import (
    Case,
    compared,
    dense_notes,
    difference,
    improvement,
    over,
    readings,
    where,
)
from .contenders import COMMON, SSFUSION, UNCOMPRESSED, VARIANTS
from .latency import RANDOM, slowness
from .printed import (
    ESPRESSO,
    FIGURE_14,
    FIGURE_15,
    FIGURE_16,
    FIGURE_17,
    OKTOPK,
    OMGS,
    SPARDL,
)
from .setting import CLOUD, RANKS, Reading
from .throughput import interleaved


def figure14(
    ask: Ask,
    models: Sequence[str] = tuple(FIGURE_14),
    num_ranks: int = RANKS[-1],
    slower: Mapping[str, float] | None = None,
) -> Findings:
    """Throughput by sparsifier: each takes as many times DGC's seconds as it does on
    this CPU.
    """
    factors = slowness(ask) if slower is None else dict(slower)
    reading = replace(CLOUD, slower=factors)
    names = (*FIGURE_14[models[0]], RANDOM)
    choices = [replace(COMMON, sparsifier=name) for name in names]
    cases = [
        Case(reading, model, num_ranks, one) for model, one in product(models, choices)
    ]
    rows = compared(ask, cases)
    claims = [
        improvement(
            where(rows, model=model, sparsifier=sparsifier),
            stated,
            f"SSFusion outperforms all others on {model} with {sparsifier}",
            "experiment 4, figure 14",
        )
        for model in models
        for sparsifier, stated in FIGURE_14[model].items()
    ]
    in_words = ", ".join(f"{name} {factor:.2f}" for name, factor in factors.items())
    return Findings(
        tuple(rows),
        tuple(claims),
        (
            f"seconds over DGC's on this CPU: {in_words}",
            "Ok-Topk and SparDL select in their own way, whatever the sparsifier",
            f"no range of {RANDOM} is printed: its rows have no claim",
            "which printed range is of which sparsifier is not said: the order is that "
            "in which experiment 4 first names them",
        ),
    )


def figure15(
    ask: Ask, model: str = "resnet152", num_ranks: int = RANKS[-1]
) -> Findings:
    """Throughput by density."""
    choices = {density: replace(COMMON, density=density) for density in FIGURE_15}
    rows = compared(
        ask, [Case(CLOUD, model, num_ranks, one) for one in choices.values()]
    )
    claims = [
        improvement(
            where(rows, density=density),
            stated,
            f"SSFusion outperforms all others on {model} at density {density:g}",
            "experiment 5, figure 15",
        )
        for density, stated in FIGURE_15.items()
    ]
    return Findings(tuple(rows), (*claims, denser_claim(rows, max(FIGURE_15))))


def denser_claim(rows: Sequence[Row], density: float) -> Claim:
    """Whether Ok-Topk and SparDL are ahead of Espresso and OMGS where much is sent."""
    own = {str(row["name"]): row for row in where(rows, density=density)}
    ahead = {name: number(own[name], "iteration_s") for name in (OKTOPK, SPARDL)}
    behind = {
        name: number(own[name], "iteration_s")
        for name in (ESPRESSO, OMGS)
        if name in own
    }
    is_so = max(ahead.values()) < min(behind.values())
    lacking = [name for name in (ESPRESSO, OMGS) if name not in own]
    in_words = ", ".join(
        f"{name} {1e3 * taken:.0f} ms" for name, taken in (ahead | behind).items()
    )
    fastest = min(behind, key=behind.__getitem__)
    return Claim(
        f"at density {density:g} Ok-Topk and SparDL are faster than Espresso and OMGS",
        "experiment 5, figure 15",
        in_words,
        None if is_so and lacking else is_so,
        (f"{', '.join(lacking)}: no planner of it" if lacking else "")
        if is_so
        else difference([own[fastest], own[OKTOPK]], f"density {density:g}:"),
    )


def figure16(
    ask: Ask,
    models: Sequence[str] = ("resnet152", "bert_large"),
    num_ranks: int = RANKS[-1],
) -> Findings:
    """Throughput by bandwidth; the claims are for the first of the models."""
    by_rate = {
        rate: Reading(f"links of {rate} Gbit/s", rate, CLOUD.gpu_speed)
        for rate in FIGURE_16
    }
    cases = [
        Case(one, model, num_ranks) for model, one in product(models, by_rate.values())
    ]
    rows = compared(ask, cases)
    claims = [
        improvement(
            where(rows, model=models[0], reading=by_rate[rate].name),
            stated,
            f"SSFusion outperforms all others with links of {rate} Gbit/s",
            "experiment 6, figure 16",
        )
        for rate, stated in FIGURE_16.items()
    ]
    return Findings(
        tuple(rows),
        (*claims, *_by_rate(rows, models)),
        (
            f"the model is not named; {models[0]} is taken, as the range at 100 Gbit/s "
            "is that of experiment 5 at density 0.01",
            *dense_notes(rows),
        ),
    )


def _by_rate(rows: Sequence[Row], models: Sequence[str]) -> list[Claim]:
    """Section IV-E: interleaving gains more on slower networks, model by model."""
    claims = []
    for model in models:
        own = {name: where(rows, model=model, reading=name) for name in readings(rows)}
        gains = {
            name: max(over(each, SSFUSION, [VARIANTS["o"]]).values())
            for name, each in own.items()
        }
        slowest, *others = gains
        agrees = gains[slowest] > max(gains[name] for name in others)
        (row,) = where(own[slowest], name=VARIANTS["o"])
        in_words = ", ".join(
            f"{100 * gain:.1f} % with {name}" for name, gain in gains.items()
        )
        claims.append(
            Claim(
                "interleaved communication gains more on slower networks",
                "section IV-E",
                f"{model}: -(O+I) over -O {in_words}",
                agrees,
                "" if agrees else interleaved([row, row], f"{model} with {slowest}:"),
            )
        )
    return claims


def figure17(
    ask: Ask, models: Sequence[str] = tuple(FIGURE_17), num_ranks: int = RANKS[-1]
) -> Findings:
    """Throughput of two larger models on 64 GPUs. Whether they fit a GPU's memory is
    not asked.
    """
    rows = compared(ask, [Case(CLOUD, model, num_ranks) for model in models])
    claims = [
        improvement(
            where(rows, model=model),
            FIGURE_17[model],
            f"SSFusion outperforms all others on {model}",
            "experiment 7, figure 17",
        )
        for model in models
    ]
    memory = Claim(
        "with GPUs of 40 GB throughput is 97 % of that with 80 GB (GPT2-XL)",
        "experiment 7, figure 17",
        "not measured",
        None,
        "the simulator knows no memory",
    )
    return Findings(tuple(rows), (*claims, memory))


def draw_by(rows: Sequence[Row], path: Path, *, key: str) -> Path:
    """Draws bars of samples a second over those of plain all-reduces, a panel for each
    ``key``.
    """
    panels: dict[str, dict[str, object]] = {}
    for row in rows:
        at = f"speedup_{row[key]}, {row['model']}"
        (plain,) = where(
            rows, **{key: row[key]}, model=row["model"], name=UNCOMPRESSED[0]
        )
        speed = number(row, "throughput") / number(plain, "throughput")
        panels.setdefault(str(row["name"]), {})[at] = speed
    drawn: list[Row] = [{"name": name, **own} for name, own in panels.items()]
    keys = list(dict.fromkeys(at for own in panels.values() for at in own))
    notes = {at: at.removeprefix("speedup_") for at in keys}
    title = f"Throughput over that of {UNCOMPRESSED[0]}, simulated"
    return bars.draw(drawn, path, keys=keys, title=title, notes=notes)


draw14 = partial(draw_by, key="sparsifier")
draw15 = partial(draw_by, key="density")
draw16 = partial(draw_by, key="reading")
draw17 = partial(draw_by, key="num_ranks")
