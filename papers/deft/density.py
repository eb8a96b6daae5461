"""Figures 1 and 4 of DEFT: the density of the mean, over the one that was asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise

from ..frame import Ask, Claim, Findings, Row
from ..rows import POINTS, draw, mean, number, thinned
from .lacking import findings
from .runs import Run, histories, run_of
from .setting import APPLICATIONS, DENSE, METHODS, RESNET, Application, present

BUILD_UP = {"resnet18": 13.59, "lstm": 14.18, "ncf": 5.31}
"""Section 5.2: actual over asked density of Top-k on 16 GPUs."""
DEFT_DENSITY = 0.1003
"""Section 5.2: DEFT's mean density in the recommendation system, 0.1 being asked
for.
"""
TOPK_SHARE = 0.5357
"""Section 5.2: the share of all gradients that Top-k selects in the recommendation
system.
"""
NEAR = 0.05
"""The relative difference from the density asked for up to which a density counts as
kept.
"""
PAPER_RANKS = 16
"""The ranks of figure 4. The fewer ranks there are, the less their selections can add
up to.
"""
LIKE = 0.25
"""The relative difference from the printed build-up up to which a build-up counts as
the same.
"""
TOTAL_BATCH = {False: 128, True: 32}
"""Images of all ranks together in figure 1, by ``quick``; 256 in the paper."""
FIGURE_1_STEPS = {False: 200, True: 20}

WHY_BUILD_UP = (
    "how much the selections overlap depends on model, data, batch and how long "
    "was trained: here "
    "the models are small, trained for a few hundred steps with small batches"
)
WHY_DEFT = (
    "every layer sends at least one element, ranks have norms of their own, and the "
    "model here has so few elements that both show: the floor is (number of layers) / "
    "(number of elements)"
)


def figure1(
    ask: Ask, app: Application = RESNET, num_steps: int | None = None
) -> Findings:
    """Top-k's density after build-up on 2 to 16 ranks, the batch of all ranks together
    constant.
    """
    if app.missing() is not None:
        claim = Claim(_RISES, "section 1, figure 1", "not measured", None)
        return findings((), (claim,), (app,))
    total = TOTAL_BATCH[ask.quick]
    counts = _doublings(app.ranks(ask.quick))
    runs = [
        Run(
            application=app,
            method="topk",
            density=app.density,
            num_ranks=num_ranks,
            num_steps=num_steps or FIGURE_1_STEPS[ask.quick],
            quick=ask.quick,
            batch=total // num_ranks,
            num_scores=1,
        )
        for num_ranks in counts
    ]
    rows: list[Row] = [
        {
            "name": f"{run.num_ranks} ranks",
            "application": app.name,
            "num_ranks": run.num_ranks,
            "batch": run.batch,
            **_densities(found.asked, found.local, found.actual),
            POINTS: thinned(found.actual),
        }
        for run, found in zip(runs, histories(ask, runs), strict=True)
    ]
    return findings(rows, (_rising(rows),), (app,))


def _rising(rows: Sequence[Row]) -> Claim:
    actual = [number(row, "actual_density") for row in rows]
    rises = all(low < high for low, high in pairwise(actual))
    ours = ", ".join(
        f"{row['num_ranks']}: {number(row, 'actual_density'):.4f}" for row in rows
    )
    why = (
        ""
        if rises
        else "selections of some number of ranks overlap as much as those of fewer"
    )
    return Claim(_RISES, "section 1, figure 1", f"by ranks {ours}", rises, why)


_RISES = "the actual density rises with the number of workers though 0.01 is asked for"


def figure4(
    ask: Ask,
    methods: Sequence[str] = METHODS,
    apps: Sequence[Application] = APPLICATIONS,
) -> Findings:
    """Asked, local and actual density of every sparsifier in the three applications."""
    sparse = [method for method in methods if method != DENSE]
    runs = [run_of(ask, app, method) for app in present(apps) for method in sparse]
    rows: list[Row] = [
        {
            "name": run.method,
            "application": run.application.name,
            "num_ranks": run.num_ranks,
            **_densities(found.asked, found.local, found.actual),
            "sent_bytes": mean(found.sent_bytes),
            POINTS: thinned(found.actual),
        }
        for run, found in zip(runs, histories(ask, runs), strict=True)
    ]
    by_place = {(str(row["application"]), str(row["name"])): row for row in rows}
    claims = (*_build_up_claims(by_place), *_kept_claims(by_place, sparse))
    return findings(rows, claims, apps)


def _densities(
    asked: Sequence[float], local: Sequence[float], actual: Sequence[float]
) -> Row:
    """The means of the densities over steps, and the actual one over the one asked
    for.
    """
    return {
        "asked_density": mean(asked),
        "local_density": mean(local),
        "actual_density": mean(actual),
        "build_up": mean(actual) / mean(asked),
    }


_Rows = Mapping[tuple[str, str], Row]


def _build_up_claims(rows: _Rows) -> list[Claim]:
    claims = []
    for name, stated in BUILD_UP.items():
        says = (
            f"on 16 workers Top-k's actual density is {stated} times the asked one "
            f"in {name}"
        )
        claims.append(
            _build_up(says, "section 5.2, figure 4", rows.get((name, "topk")), stated)
        )
    says = (
        f"Top-k selects {100 * TOPK_SHARE:.2f} % of all gradients of NCF, 10 % being "
        "asked for"
    )
    return [
        *claims,
        _build_up(says, "section 5.2", rows.get(("ncf", "topk")), TOPK_SHARE),
    ]


def _build_up(says: str, place: str, row: Row | None, stated: float) -> Claim:
    """Top-k's density against a stated share of all (up to 1), or times the asked
    one.
    """
    if row is None:
        return Claim(says, place, "not measured", None)
    is_share = stated <= 1
    num = round(number(row, "num_ranks"))
    found = number(row, "actual_density" if is_share else "build_up")
    ours = f"{100 * found:.2f} %" if is_share else f"{found:.2f} times"
    ours += f" on {num} ranks"
    if num != PAPER_RANKS:
        why = (
            f"the paper's is of {PAPER_RANKS} ranks; {num} can reach {num} times at "
            "most"
        )
        return Claim(says, place, ours, None, why)
    agrees = abs(found / stated - 1) <= LIKE
    return Claim(says, place, ours, agrees, "" if agrees else WHY_BUILD_UP)


def _kept_claims(rows: _Rows, methods: Sequence[str]) -> list[Claim]:
    """DEFT's and CLT-k's density against the one asked for, in every application."""
    claims = []
    for method in ("deft", "cltk"):
        off = {
            application: number(row, "build_up") - 1
            for (application, name), row in rows.items()
            if name == method and method in methods
        }
        says = f"{method} keeps the density that is asked for"
        if not off:
            claims.append(Claim(says, "section 5.2, figure 4", "not measured", None))
            continue
        ours = ", ".join(f"{name} {100 * value:+.1f} %" for name, value in off.items())
        agrees = all(abs(value) <= NEAR for value in off.values())
        why = "" if agrees else WHY_DEFT
        claims.append(Claim(says, "section 5.2, figure 4", ours, agrees, why))
    says = f"DEFT's mean density in NCF is {DEFT_DENSITY}, 0.1 being asked for"
    row = rows.get(("ncf", "deft"))
    if row is None:
        return [*claims, Claim(says, "section 5.2, figure 4c", "not measured", None)]
    found = number(row, "actual_density")
    agrees = abs(found / DEFT_DENSITY - 1) <= NEAR
    why = "" if agrees else WHY_DEFT
    return [*claims, Claim(says, "section 5.2, figure 4c", f"{found:.4f}", agrees, why)]


def _doublings(most: int) -> list[int]:
    """2, 4 and so on up to ``most``; a single rank sends nothing."""
    return [1 << place for place in range(1, most.bit_length())]


draw1 = partial(
    draw,
    title="Density of Top-k's mean, 0.01 asked for",
    x_label="step",
    y_label="density",
)
draw4 = partial(
    draw, title="Density of the mean by sparsifier", x_label="step", y_label="density"
)
