"""Figures 11, 14, 15, 16 and 17 of SSFusion: throughput of all schemes, simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

from gradwire.report import bars, curves

from ..deft.rows import number
from ..frame import Ask, Claim, Findings, Row
from .compare import Case, compared, dense_note, improvement, over, range_of, shown
from .contenders import COMMON, RIVALS, SSFUSION, UNCOMPRESSED, VARIANTS
from .latency import slowness
from .printed import (
    FIGURE_11,
    FIGURE_11_O,
    FIGURE_11_OI,
    FIGURE_11_OVER,
    FIGURE_14,
    FIGURE_15,
    FIGURE_16,
    FIGURE_17,
)
from .setting import AS_FIGURE_2, AS_FIGURE_9, CLOUD, MODELS, RANKS, Reading

LITERAL = replace(COMMON, bound="none")
"""SSFusion with equation 2 as printed, which may send everything dense."""


def figure11(ask: Ask, models: Sequence[str] = MODELS, ranks: Sequence[int] = RANKS) -> Findings:
    """Throughput on 16 to 64 GPUs, and on the most of them under other readings."""
    if ask.quick:
        models, ranks = models[:2], (ranks[0], ranks[-1])
    most = max(ranks)
    cases = [Case(CLOUD, model, n) for model, n in product(models, ranks)]
    cases += [Case(other, model, most) for other in (AS_FIGURE_9, AS_FIGURE_2) for model in models]
    cases += [Case(CLOUD, model, most, LITERAL) for model in models]
    rows = compared(ask, cases)
    main = _of(rows, reading=cases[0].name)
    claims = [
        improvement(
            _of(main, model=model),
            FIGURE_11[model],
            f"{SSFUSION} outperforms all others on {model}",
            "experiment 1, figure 11",
        )
        for model in models
    ]
    for variant, others, stated in FIGURE_11_OVER:
        says = f"{VARIANTS[variant]} outperforms {' and '.join(others)}"
        claims.append(
            improvement(main, stated, says, "experiment 1", ours=VARIANTS[variant], others=others)
        )
    claims += [_offloading(main), _interleaving(main)]
    fewer = [f"of {', '.join(models)} on {ranks[0]} and {most} GPUs only"] if ask.quick else []
    return Findings(tuple(rows), tuple(claims), (*_dense(rows), *_ranges(rows), *fewer))


def _names(rows: Sequence[Row]) -> list[str]:
    """The readings of some rows."""
    return list(dict.fromkeys(str(row["reading"]) for row in rows))


def _dense(rows: Sequence[Row]) -> list[str]:
    """A sentence for each reading: how sending whole gradients compares with sparsifying them."""
    return [f"{name}: {dense_note(_of(rows, reading=name), UNCOMPRESSED)}" for name in _names(rows)]


def _ranges(rows: Sequence[Row]) -> list[str]:
    """A sentence for each reading: the gains of SSFusion-(O+I) under it."""
    return [
        f"{name}: {SSFUSION} over all of {', '.join(RIVALS)} "
        f"{shown(range_of(over(_of(rows, reading=name), SSFUSION, RIVALS).values()))}, over -O "
        f"{shown(range_of(over(_of(rows, reading=name), SSFUSION, [VARIANTS['o']]).values()))}"
        for name in _names(rows)
    ]


def _of(rows: Sequence[Row], **wanted: object) -> list[Row]:
    """The rows of these values."""
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def _offloading(rows: Sequence[Row]) -> Claim:
    return improvement(
        rows,
        FIGURE_11_O,
        "SSFusion-O outperforms SSFusion(naive)",
        "experiment 1",
        ours=VARIANTS["o"],
        others=[VARIANTS["naive"]],
        reason=offloaded,
    )


def offloaded(pair: Sequence[Row], case: str) -> str:
    """The seconds that offloading takes off the backward pass, and of how many."""
    ours, other = pair
    less_s = number(other, "selection_s") - number(ours, "selection_s")
    share = number(other, "selection_s") / number(other, "iteration_s")
    return (
        f"{case} offloading takes {1e3 * less_s:.0f} ms off an iteration of "
        f"{1e3 * number(other, 'iteration_s'):.0f} ms, {100 * share:.0f} % of which is selection"
    )


def _interleaving(rows: Sequence[Row]) -> Claim:
    return improvement(
        rows,
        FIGURE_11_OI,
        "SSFusion-(O+I) outperforms SSFusion-O",
        "experiment 1",
        others=[VARIANTS["o"]],
        reason=interleaved,
    )


def interleaved(pair: Sequence[Row], case: str) -> str:
    """How much there is for an all-reduce to shorten: what is dense, and what is not hidden."""
    _, other = pair
    exposed = number(other, "communication_s") / number(other, "iteration_s")
    most = 1 / (1 - exposed) - 1
    return (
        f"{case} {100 * number(other, 'fraction_dense'):.1f} % of what {other['name']} sends "
        f"is dense, and {100 * exposed:.1f} % of its iteration is communication that is not "
        f"hidden: without any it would gain {100 * most:.1f} %"
    )


def figure14(
    ask: Ask,
    models: Sequence[str] = tuple(FIGURE_14),
    num_ranks: int = RANKS[-1],
    slower: Mapping[str, float] | None = None,
) -> Findings:
    """Throughput by sparsifier: each takes as many times DGC's seconds as it does on this CPU."""
    factors = slowness(ask) if slower is None else dict(slower)
    reading = replace(CLOUD, slower=factors)
    choices = [replace(COMMON, sparsifier=name) for name in FIGURE_14[models[0]]]
    cases = [Case(reading, model, num_ranks, one) for model, one in product(models, choices)]
    rows = compared(ask, cases)
    claims = [
        improvement(
            _of(rows, model=model, sparsifier=sparsifier),
            stated,
            f"SSFusion outperforms all others on {model} with {sparsifier}",
            "experiment 4, figure 14",
        )
        for model in models
        for sparsifier, stated in FIGURE_14[model].items()
    ]
    told = ", ".join(f"{name} {factor:.2f}" for name, factor in factors.items())
    return Findings(
        tuple(rows),
        tuple(claims),
        (
            f"seconds over DGC's on this CPU: {told}",
            "Ok-Topk and SparDL select in their own way, whatever the sparsifier",
        ),
    )


def figure15(ask: Ask, model: str = "resnet152", num_ranks: int = RANKS[-1]) -> Findings:
    """Throughput by density."""
    choices = {density: replace(COMMON, density=density) for density in FIGURE_15}
    rows = compared(ask, [Case(CLOUD, model, num_ranks, one) for one in choices.values()])
    claims = [
        improvement(
            _of(rows, density=density),
            stated,
            f"SSFusion outperforms all others on {model} at density {density:g}",
            "experiment 5, figure 15",
        )
        for density, stated in FIGURE_15.items()
    ]
    return Findings(tuple(rows), tuple(claims))


def figure16(
    ask: Ask, models: Sequence[str] = ("resnet152", "bert_large"), num_ranks: int = RANKS[-1]
) -> Findings:
    """Throughput by bandwidth; the claims are for the first of the models."""
    readings = {
        rate: Reading(f"links of {rate} Gbit/s", rate, CLOUD.gpu_speed) for rate in FIGURE_16
    }
    cases = [Case(one, model, num_ranks) for model, one in product(models, readings.values())]
    rows = compared(ask, cases)
    claims = [
        improvement(
            _of(rows, model=models[0], reading=readings[rate].name),
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
            f"the model is not named; {models[0]} is taken, as the range at 100 Gbit/s is that of "
            "experiment 5 at density 0.01",
            *_dense(rows),
        ),
    )


def _by_rate(rows: Sequence[Row], models: Sequence[str]) -> list[Claim]:
    """Section IV-E: interleaving gains more on slower networks, model by model."""
    claims = []
    for model in models:
        own = {name: _of(rows, model=model, reading=name) for name in _names(rows)}
        gains = {
            name: max(over(each, SSFUSION, [VARIANTS["o"]]).values()) for name, each in own.items()
        }
        slowest, *others = gains
        agrees = gains[slowest] > max(gains[name] for name in others)
        (row,) = _of(own[slowest], name=VARIANTS["o"])
        told = ", ".join(f"{100 * gain:.1f} % with {name}" for name, gain in gains.items())
        claims.append(
            Claim(
                "interleaved communication gains more on slower networks",
                "section IV-E",
                f"{model}: -(O+I) over -O {told}",
                agrees,
                "" if agrees else interleaved([row, row], f"{model} with {slowest}:"),
            )
        )
    return claims


def figure17(
    ask: Ask, models: Sequence[str] = tuple(FIGURE_17), num_ranks: int = RANKS[-1]
) -> Findings:
    """Throughput of two larger models on 64 GPUs. Whether they fit a GPU's memory is not asked."""
    rows = compared(ask, [Case(CLOUD, model, num_ranks) for model in models])
    claims = [
        improvement(
            _of(rows, model=model),
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
    """Draws bars of samples a second over those of plain all-reduces, a panel for each ``key``."""
    panels: dict[str, dict[str, object]] = {}
    for row in rows:
        at = f"speedup_{row[key]}, {row['model']}"
        (plain,) = _of(rows, **{key: row[key]}, model=row["model"], name=UNCOMPRESSED[0])
        speed = number(row, "throughput") / number(plain, "throughput")
        panels.setdefault(str(row["name"]), {})[at] = speed
    drawn: list[Row] = [{"name": name, **own} for name, own in panels.items()]
    keys = list(dict.fromkeys(at for own in panels.values() for at in own))
    notes = {at: at.removeprefix("speedup_") for at in keys}
    title = f"Throughput over that of {UNCOMPRESSED[0]}, simulated"
    return bars.draw(drawn, path, keys=keys, title=title, notes=notes)


def draw11(rows: Sequence[Row], path: Path) -> Path:
    """Draws samples a second over GPUs, with a panel for each model and a line for each scheme."""
    main = _of(rows, reading=CLOUD.name)
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in main:
        lines = panels.setdefault(str(row["model"]), {})
        point = (number(row, "num_ranks"), number(row, "throughput"))
        lines.setdefault(str(row["name"]), []).append(point)
    return curves.draw_panels(
        panels,
        path,
        title="Throughput, simulated",
        x_label="GPUs",
        y_label="samples a second",
        doubling=True,
    )


draw14 = partial(draw_by, key="sparsifier")
draw15 = partial(draw_by, key="density")
draw16 = partial(draw_by, key="reading")
draw17 = partial(draw_by, key="num_ranks")
