"""Figures 11 and 14 of US-Byte: communication not hidden, and speed by bandwidth, by
the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path

from gradwire.contract.registry import load
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.price import iteration_s
from gradwire_bench.report import curves

from ..frame import Ask, Claim, Findings, Row, effect
from ..rows import number
from .blocks import CREDIT
from .readings import OURS, compare
from .scaling import QUICK_TRIALS, SHOWN, TRIALS
from .setting import BENCHMARKS, MBIT, RANKS, cluster_2, profile_of

SHOWN_11 = ("resnet50", "vgg16")
NODES = (2, 4, 8)
RATES_GBIT = (10, 20, 40, 60, 80, 100)
"""Figure 14's bandwidths: the text names 10, 20, 40, 60 and 100."""
BASIC_BYTES = 4 * MBIT
UP_TO = {"vgg16": (0.24, 20), "bert_base": (0.21, 20), "resnet50": (0.20, 10)}
"""The most that US-Byte gains over ByteScheduler, and the Gbit/s at which it does."""
AT_60 = {"bytescheduler": (0.04, 0.07), "wfbp": (0.09, 0.15)}
"""The ranges of US-Byte's gains at 60 Gbit/s."""
NEAR = 0.05
"""How far a gain of ours may lie from the paper's, and agree, where a quarter of it is
more; what a stable speed may lose.
"""
HIDDEN = 0.05
"""The share of computation below which what is not hidden counts as almost nothing."""


def figure11(
    ask: Ask,
    models: Sequence[str] = SHOWN_11,
    ranks: Sequence[int] = NODES,
    trials: int | None = None,
) -> Findings:
    """Computation, and communication that is not hidden, by planner, settings searched
    for.
    """
    trials = trials or (QUICK_TRIALS if ask.quick else TRIALS)
    rows: list[Row] = []
    for done, (model, num_ranks) in ask.each(list(product(models, ranks))):
        ask.report(done, f"{model} on {num_ranks} nodes")
        profile = profile_of(model)
        compute_s = profile.forward_s + profile.backward_s
        found = compare(OURS, model, num_ranks, trials).seconds
        exposed = {
            f"exposed_{name}_s": taken - compute_s for name, taken in found.items()
        }
        row: Row = {"name": model, "num_ranks": num_ranks, "compute_s": compute_s}
        rows.append(row | exposed)
    claims = [least_claim(rows, rival) for rival in AT_60]
    claims += [grows_claim(rows, model) for model in models]
    return Findings(tuple(rows), tuple(claims))


def least_claim(rows: Sequence[Row], rival: str) -> Claim:
    """Whether US-Byte leaves less unhidden than a rival in a row, and more in none."""
    pairs = {
        f"{row['name']} on {row['num_ranks']}": (
            1e3 * number(row, "exposed_usbyte_s"),
            1e3 * number(row, f"exposed_{rival}_s"),
        )
        for row in rows
    }
    more = [case for case, (ours, other) in pairs.items() if ours > other]
    agrees = not more and any(ours < other for ours, other in pairs.values())
    in_words = ", ".join(
        f"{case} {one:.0f} ms for {other:.0f}" for case, (one, other) in pairs.items()
    )
    why = (
        f"{'; '.join(more)}: with its own settings searched for, a credit hides "
        f"{SHOWN[rival]}'s latencies at no cost under the model"
    )
    return Claim(
        f"US-Byte overlaps communication better than {SHOWN[rival]}",
        "section 6.3, figure 11",
        in_words,
        agrees,
        "" if agrees else why if more else "the same in every case",
    )


def grows_claim(rows: Sequence[Row], model: str) -> Claim:
    """Whether what WFBP does not hide grows with the nodes."""
    own = [row for row in rows if row["name"] == model]
    exposed = [1e3 * number(row, "exposed_wfbp_s") for row in own]
    grows = exposed == sorted(exposed) and exposed[-1] > exposed[0]
    in_words = ", ".join(
        f"{taken:.0f} ms on {row['num_ranks']}"
        for taken, row in zip(exposed, own, strict=True)
    )
    return Claim(
        f"{model}: what WFBP does not hide increases with the nodes",
        "section 6.3, figure 11",
        in_words,
        grows,
        "" if grows else "all of it hides behind the backward pass under the model",
    )


def figure14(
    ask: Ask,
    models: Sequence[str] = BENCHMARKS,
    rates_gbit: Sequence[int] = RATES_GBIT,
) -> Findings:
    """Predicted speed over bandwidth on 8 nodes of cluster 2."""
    rows: list[Row] = []
    for done, (model, gbit) in ask.each(list(product(models, rates_gbit))):
        ask.report(done, f"{model} at {gbit} Gbit/s")
        rows.append(_speed_row(model, gbit))
    claims = [gain_claim(rows, model) for model in models]
    claims += [range_claim(rows, rival) for rival in AT_60]
    claims += [stable_claim(rows, models), hidden_claim(rows)]
    notes = (
        "a as printed for cluster 2, b from the bandwidth; S_p is 4 Mb and "
        "ByteScheduler's credit "
        f"{CREDIT}, as in section 6.7; section 6.4 does not state them",
        "computation is that of a V100: layer times of the paper's RTX 3090 are "
        "not published",
    )
    return Findings(tuple(rows), tuple(claims), notes)


def _speed_row(model: str, gbit: int) -> Row:
    profile = profile_of(model)
    full = cluster_2()
    cluster = Cluster(
        num_ranks=RANKS, rate_bytes_per_s=gbit * 1e9 / 8, hop_s=full.hop_s
    )
    settings: dict[str, dict[str, int]] = {
        "usbyte": {"basic_partition_bytes": BASIC_BYTES},
        "bytescheduler": {"partition_bytes": BASIC_BYTES, "credit": CREDIT},
        "wfbp": {},
    }
    plans = {
        name: load("planner", name)(profile, cluster, **own)
        for name, own in settings.items()
    }
    seconds = {
        name: iteration_s(plan, profile, cluster) for name, plan in plans.items()
    }
    row: Row = {"name": model, "rate_gbit": gbit}
    row |= {
        f"samples_per_s_{name}": RANKS * profile.batch_size / s
        for name, s in seconds.items()
    }
    row |= {
        f"fraction_over_{name}": seconds[name] / seconds["usbyte"] - 1 for name in AT_60
    }
    compute_s = profile.forward_s + profile.backward_s
    latency_s = len(plans["bytescheduler"].messages) * cluster.alpha_s / CREDIT
    return row | {
        "fraction_exposed": seconds["usbyte"] / compute_s - 1,
        "fraction_latency_bytescheduler": latency_s / compute_s,
    }


def gain_claim(rows: Sequence[Row], model: str) -> Claim:
    """The printed gain over ByteScheduler at one bandwidth beside ours."""
    stated, gbit = UP_TO[model]
    says = (
        f"US-Byte gains up to {100 * stated:.0f} % over ByteScheduler: {model}, "
        f"{gbit} Gbit/s"
    )
    place = "section 6.4, figure 14"
    row = next((r for r in rows if r["name"] == model and r["rate_gbit"] == gbit), None)
    if row is None:
        return Claim(says, place, "not measured", None)
    found = number(row, "fraction_over_bytescheduler")
    why = (
        f"US-Byte leaves {100 * number(row, 'fraction_exposed'):.0f} % of the "
        "computation's time "
        f"unhidden; latencies of ByteScheduler's blocks, {CREDIT} at once, are "
        f"{100 * number(row, 'fraction_latency_bytescheduler'):.0f} % of it"
    )
    return effect(says, place, f"{100 * found:.0f} %", found, stated, why, NEAR)


def range_claim(rows: Sequence[Row], rival: str) -> Claim:
    """The printed range of gains at 60 Gbit/s beside ours."""
    least, most = AT_60[rival]
    gains = f"{100 * least:.0f} to {100 * most:.0f} %"
    says = f"US-Byte gains {gains} over {SHOWN[rival]} at 60 Gbit/s"
    place = "section 6.4, figure 14"
    at = [row for row in rows if row["rate_gbit"] == 60]
    own = {str(row["name"]): number(row, f"fraction_over_{rival}") for row in at}
    if not own:
        return Claim(says, place, "not measured", None)
    agrees = all(least - 0.005 <= gain <= most + 0.005 for gain in own.values())
    in_words = ", ".join(f"{name} {100 * gain:.0f} %" for name, gain in own.items())
    why = (
        "a gain follows from what is exposed, and that from layer times that are "
        "not published"
    )
    return Claim(says, place, in_words, agrees, "" if agrees else why)


def stable_claim(rows: Sequence[Row], models: Sequence[str]) -> Claim:
    """Whether no model trains much slower at 60 than at 100 Gbit/s."""
    says = "speed remains stable from 60 to 100 Gbit/s"
    place = "section 6.4, figure 14"
    speed = {
        (r["name"], r["rate_gbit"]): number(r, "samples_per_s_usbyte") for r in rows
    }
    lost = {
        model: 1 - speed[model, 60] / speed[model, 100]
        for model in models
        if {(model, 60), (model, 100)} <= speed.keys()
    }
    if not lost:
        return Claim(says, place, "not measured", None)
    agrees = max(lost.values()) <= NEAR
    in_words = ", ".join(
        f"{model} {100 * one:.1f} % slower" for model, one in lost.items()
    )
    in_words += f"; stable: at most {100 * NEAR:g} %"
    slow = max(lost, key=lost.__getitem__)
    why = f"{slow} still waits for the link at 60 Gbit/s under the model"
    return Claim(says, place, in_words, agrees, "" if agrees else why)


def hidden_claim(rows: Sequence[Row]) -> Claim:
    """Whether ResNet-50's communication is hidden above 40 Gbit/s, and not below."""
    says = "ResNet-50's communication is almost hidden only above 40 Gbit/s"
    place = "section 6.4, figure 14"
    own = [row for row in rows if row["name"] == "resnet50"]
    if not own:
        return Claim(says, place, "not measured", None)
    shares = {
        int(number(row, "rate_gbit")): number(row, "fraction_exposed") for row in own
    }
    agrees = all((share < HIDDEN) == (gbit >= 40) for gbit, share in shares.items())
    in_words = ", ".join(
        f"{100 * share:.1f} % at {gbit}" for gbit, share in shares.items()
    )
    why = "under the model it is hidden where these shares of the computation are small"
    return Claim(says, place, in_words, agrees, "" if agrees else why)


def draw14(rows: Sequence[Row], path: Path) -> Path:
    """Draws samples a second over bandwidth, with a panel for each model."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in rows:
        for name, shown in SHOWN.items():
            point = (number(row, "rate_gbit"), number(row, f"samples_per_s_{name}"))
            panels.setdefault(str(row["name"]), {}).setdefault(shown, []).append(point)
    return curves.draw_panels(
        panels,
        path,
        title="Speed over bandwidth",
        x_label="Gbit/s",
        y_label="samples a second",
    )


def draw11(rows: Sequence[Row], path: Path) -> Path:
    """Draws the seconds that are not hidden over nodes, with a panel for each model."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in rows:
        for name, shown in SHOWN.items():
            point = (number(row, "num_ranks"), number(row, f"exposed_{name}_s"))
            panels.setdefault(str(row["name"]), {}).setdefault(shown, []).append(point)
    return curves.draw_panels(
        panels,
        path,
        title="Communication not hidden",
        x_label="nodes",
        y_label="seconds",
    )
