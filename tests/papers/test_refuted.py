"""Every rule that gives a verdict can say "disagrees", and finds no effect where there
is none.

Rules are fed with rows whose figures are drawn at random: each must disagree with some.
Then all figures are the same, so that no scheme is faster, smaller or closer than
another: only rules that state likeness or an upper bound may agree.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from papers import frame
from papers.deft import convergence as deft_convergence
from papers.deft import cost as deft_cost
from papers.deft import density as deft_density
from papers.deft import error as deft_error
from papers.deft import speed as deft_speed
from papers.deft import table as deft_table
from papers.deft.setting import LSTM
from papers.frame import Ask, Claim, effect
from papers.hipress import (
    ablation,
    accuracy,
    batch,
    convergence,
    coordinator,
    gpu_use,
    lines,
    pipeline,
    plans,
    printed,
    servers,
    servers_measured,
    sizes,
    slots_measured,
    speed,
    throughput,
    varied,
)
from papers.ssfusion import (
    breakdown,
    compare,
    degrees,
    duration,
    latency,
    missing,
    schemes,
)
from papers.ssfusion import convergence as ssfusion_convergence
from papers.ssfusion import sizes as ssfusion_sizes
from papers.ssfusion import throughput as ssfusion_throughput
from papers.ssfusion import training as ssfusion_training
from papers.ssfusion import varied as ssfusion_varied
from papers.ssfusion.contenders import RIVALS, SSFUSION, VARIANTS
from papers.ssfusion.printed import ESPRESSO, OKTOPK, OMGS, SPARDL
from papers.usbyte import bandwidth, blocks, energy, error, order, overhead, scaling
from papers.usbyte import lines as usbyte_lines
from papers.usbyte import losses as usbyte_losses
from papers.zen import balance, formats, hashing, losses, parts, sparsity
from papers.zen import schemes as zen_schemes
from papers.zen import speed as zen_speed
from papers.zen import training as zen_training

SEEDS = 20
SAME = 0.5
"""The value of every figure of a row without an effect."""
GAINS = ("fraction_over_", "fraction_gained")
"""Figures that are effects themselves start so: without an effect they are 0."""
ALIKE = (
    # the statement is that two things are alike,
    "reaches that of dense training",
    "attain the convergence point",
    "error is similar",
    "almost the same score",
    "about as fast",
    "about as long",
    "remains stable",
    "L <= delta_1 + delta_2 <= sum of m",
    "accuracy by iterations is that of",
    "reach a loss in as many epochs",
    # or that something is below a bound, or above one.
    "no step is slower than with static turns",
    "no step is slower than by static turns",
    "the coordinator's load is light",
    "Top-k selects 53.57 %",
    "less than 10 s",
    "less than 1 s",
    "the imbalance is at most",
    "always below 1.1",
    "save nothing above a density of 50 %",
    "more than 30 % of the gradients",
    "much higher than 0.05",
    "can be slower than AllReduce",
)
"""Words of the statements that may agree where all figures are the same."""
PAPERS = Path(frame.__file__).parent
ASK = Ask(quick=False, report=lambda *_: None, earlier={})


class Drawn(dict[str, Any]):
    """A row that has every figure it is asked for: drawn once, or the same as in all
    others.
    """

    def __init__(self, draw: Callable[[str], float], given: dict[str, Any]) -> None:
        super().__init__(given)
        self.draw = draw

    def __missing__(self, key: str) -> float:
        self[key] = self.draw(key)
        return float(self[key])

    def __or__(self, other: dict[str, Any]) -> Drawn:  # type: ignore[override]
        return Drawn(self.draw, {**self, **other})

    def having(self, *keys: str) -> Drawn:
        """This row with these figures drawn already, for rules that ask whether they
        are there.
        """
        for key in keys:
            self[key]
        return self


Make = Callable[..., Drawn]


def several(row: Make, key: str, values: Iterable[Any], **given: Any) -> list[Any]:
    return [row(**{key: value}, **given) for value in values]


def curve(row: Make, steps: int = 8, **given: Any) -> Drawn:
    """A row whose score gets better, from twice its last."""
    own = row(**given)
    points = [[step, own["score"] * (2 - step / steps)] for step in range(1, steps + 1)]
    return own | {"points": points}


def history(row: Make) -> Any:
    own = row()
    return SimpleNamespace(errors=[own["a"], own["b"]], actual=[own["c"]])


def of_deft(row: Make) -> Iterator[Claim]:
    app = LSTM.name
    densities = [curve(row, density=density) for density in (0.1, 0.01, 0.001)]
    yield deft_convergence._catches_up(densities, 8)
    scores = several(row, "name", ("topk", "cltk", "deft", "dense"), application=app)
    yield deft_convergence._reached(LSTM, scores)
    yield deft_convergence._attained(LSTM, scores)
    yield from deft_convergence._order(scores, [LSTM])
    at = [(method, density) for method in deft_cost.METHODS for density in (0.01, 0.1)]
    seconds = [row(method=method, density=density) for method, density in at]
    yield from deft_cost._claims(seconds, shaped=True)
    yield deft_density._rising(several(row, "num_ranks", (2, 4, 8)))
    by_place: Any = {
        (name, method): row(num_ranks=16)
        for name in deft_density.BUILD_UP
        for method in ("topk", "deft", "cltk")
    }
    yield from deft_density._build_up_claims(by_place)
    yield from deft_density._kept_claims(by_place, ["deft", "cltk"])
    yield deft_error._similar(app, history(row), history(row))
    yield deft_error._lower(
        app, {(app, name): history(row) for name in ("topk", "cltk", "deft")}
    )
    yield from deft_speed._breakdown_claims(
        {name: row() for name in deft_speed.METHODS}
    )
    yield from deft_speed._speedup_claims(several(row, "num_ranks", (4, 8)))
    named = several(row, "name", deft_table.SPARSIFIERS)
    yield from (deft_table._claim(column, named) for column in deft_table.COLUMNS)


def of_hipress(row: Make) -> Iterator[Claim]:
    model = convergence.MODELS[0]
    yield ablation.claims_of(
        "vgg19", several(row, "added", ("default", "codec"), model="vgg19")
    )[0]
    by_size = [
        row(name=str(size), size_bytes=size, partitions=round(16 * row()["some"]))
        for size in accuracy.SIZES
    ]
    yield accuracy._from_size(by_size)
    yield from accuracy._advice(by_size, 16)
    trained = [
        curve(row, application=model.name, name=name) for name in ("dense", "dgc")
    ]
    yield convergence.close_claim(model, trained)
    yield convergence.sooner_claim([model], trained)
    count = round(100 * row()["lines"])
    sides = row(), row()
    yield pipeline.sum_claim(sides[0])
    yield pipeline.faster_claim(*sides)
    yield pipeline.hidden_claim(sides[1])
    ways = (coordinator.STATIC, coordinator.COORDINATED)
    yield from coordinator.claims_of(
        [
            row(name=way, way=way, uneven_percent=100 * spread)
            for spread in coordinator.SPREADS
            for way in ways
        ]
    )
    yield from slots_measured.claims_of(
        [
            row(way=way, model="m", uneven_percent=100 * spread)
            for spread in slots_measured.SPREADS
            for way in (slots_measured.STATIC, slots_measured.COORDINATED)
        ]
    )
    yield from batch.claims_of([row() for _ in range(2)])
    yield from servers_measured.claims_of([row(), row()])
    yield from servers.claims_of(
        [row(hosts=servers.HOSTS) for _ in range(2 * len(servers.ROLES))]
    )
    ring, best = several(row, "name", ("Ring", "HiPress"), application="ugatit")
    yield gpu_use._sparser(ring, best)
    sends = int(ring["idle"])  # whole windows, of which there may be none
    yield gpu_use._drops(ring | {"idle_windows_that_send": sends})
    yield lines._claim(
        {"name": "a", "others_used": "", "lines_logic": count, "lines_logic_paper": 20}
    )
    cell = {"strategy": "casync_ring", "num_nodes": 16, "size_bytes": 4 * plans.MIB}
    yield plans._claim(
        row(**cell, compresses=True, compresses_paper=True, partitions_paper=16)
    )
    yield sizes.claim_of(row(mebibytes_paper=100.0))
    yield speed.faster_claim([row(name="a/encode").having("speedup_vs_eager")])
    pairs = [
        row(codec=codec, name=name)
        for codec in speed.FACTORS
        for name in (speed.OURS, speed.OTHERS)
    ]
    yield from (speed.saved_claim(pairs, codec) for codec in speed.FACTORS)
    yield speed.speedup_claim(pairs)
    for (_, name), (efficiency, _) in printed.TABLE_1.items():
        own = row(name=name, efficiency_paper=efficiency, fraction_paper=0.6)
        yield from (
            throughput._table1_claim(own, key) for key in ("efficiency", "fraction")
        )
    for stated in (*printed.FIGURE_9, *printed.FIGURE_11):
        names = stated.ours, stated.other
        at_16 = several(row, "name", names, model=stated.model, num_hosts=16)
        yield throughput.gain_claim(at_16, stated)
    systems = throughput.RING, throughput.BYTEPS, "HiPress"
    grown = [
        row(name=name, num_hosts=n, model="m") for name in systems for n in (2, 4, 8)
    ]
    yield throughput.widening(grown, "m", systems)
    site, fast, slow = varied.RATES[0]
    links = [f"links of {gbit:g} Gbit/s" for gbit in (fast, slow)]
    yield varied._same_speed(
        several(row, "reading", links, name=varied.PS_ONEBIT), site, slow
    )
    for many, loss in varied.DGC_LOSS.items():
        values = varied.LEAST_DENSITY, many
        own_rows = several(row, "value", values, varied=varied.ELEMENTS, name="DGC")
        yield varied._loss(own_rows, varied.ELEMENTS, *values, loss)


def of_ssfusion(row: Make) -> Iterator[Claim]:
    for part, stated in (("communication_s", 0.33), ("selection_s", 0.483)):
        yield breakdown.less(part, stated, row(), row(), "another")
    everyone = [SSFUSION, VARIANTS["o"], *RIVALS]
    at_64 = several(row, "name", everyone, model="m", num_ranks=64)
    yield compare.improvement(
        at_64, (0.082, 0.127), "ours is faster", "section 0", others=RIVALS
    )
    yield degrees_of_fusion(row)[0]
    yield from degrees_of_fusion(row)
    yield duration.claim_of(several(row, "name", everyone, model="m"))
    some = several(row, "numel", (4096, 16384), name=latency.ONE, sparsifier="dgc")
    yield latency.flat_claim(some)
    yield from latency.many_claims(row())
    yield from latency.table3_claims(several(row, "paper_cpu_s", latency.TABLE_3_CPU_S))
    ways = [one.name for one in missing.ways(feedback=False)]
    yield from missing._claims(missing.MODELS[1], False, several(row, "name", ways))
    names = schemes.PER_TENSOR, schemes.MULTI, schemes.SELECTIVE
    yield from schemes.claims_of("resnet152", several(row, "name", names))
    yield ssfusion_sizes.claim_of(row(name="vit_large", num_tensors=392, num_small=246))
    trained = several(row, "name", ("SSFusion", "dense", OKTOPK), metric="loss")
    model = ssfusion_training.MODELS[0]
    yield ssfusion_convergence._close(model, trained[0], trained[1])
    yield ssfusion_convergence._ahead(model, trained[0], trained[2:], "SSFusion")
    grown = [
        row(name=name, num_ranks=n, model="m")
        for name in everyone
        for n in (16, 32, 64)
    ]
    yield ssfusion_throughput.widening(grown, "m")
    dense = several(row, "name", (OKTOPK, SPARDL, ESPRESSO, OMGS), density=0.1)
    yield ssfusion_varied.denser_claim(dense, 0.1)
    rates = [
        row(name=name, reading=rate, model="m", num_ranks=64, communication_s=0.1)
        for name in everyone
        for rate in ("slow", "fast")
    ]
    yield from ssfusion_varied._by_rate(rates, ["m"])


def degrees_of_fusion(row: Make) -> list[Claim]:
    return degrees.claims_of("resnet152", several(row, "degree", missing.DEGREES))


def of_usbyte(row: Make) -> Iterator[Claim]:
    exposed = several(row, "num_ranks", (2, 4, 8), name="vgg16")
    yield bandwidth.least_claim(exposed, "wfbp")
    yield bandwidth.grows_claim(exposed, "vgg16")
    for model, (_, gbit) in bandwidth.UP_TO.items():
        yield bandwidth.gain_claim([row(name=model, rate_gbit=gbit)], model)
    rates = several(row, "rate_gbit", (10, 60, 100), name="resnet50")
    yield from (bandwidth.range_claim(rates, rival) for rival in bandwidth.AT_60)
    yield bandwidth.stable_claim(rates, ["resnet50"])
    yield bandwidth.hidden_claim(rates)
    sizes_mbit = several(row, "partition_mbit", (0.1, 8.0), name="vgg16")
    yield from (
        blocks._below(sizes_mbit),
        blocks._vgg16(sizes_mbit),
        blocks._stable(sizes_mbit),
    )
    yield from blocks._speed_claims(sizes_mbit)
    names = ("wfbp", "usbyte", "bytescheduler")
    frameworks = {name: row().having("joules") for name in names}
    yield energy.count_claim("vgg16", frameworks)
    yield energy.energy_claim("vgg16", frameworks)
    yield error._claim([row(name="vgg16", planner="usbyte", measured_s=1.0)])
    played = []
    for num_ranks in (2, 8):
        own = row()
        played += [
            row(
                cluster="cluster 1",
                num_ranks=num_ranks,
                size_bytes=size,
                simulated_s=own["a"]
                + own["b"] * size / 1e7
                + own["c"] * (size / 1e7) ** 0.5,
            )
            for size in (10**6, 10**7, 10**8)
        ]
    yield usbyte_lines.linear_claim(played)
    yield usbyte_lines.intercept_claim(played, "cluster 1")
    yield usbyte_lines.slope_claim(played, "cluster 1")
    yield usbyte_lines.equation_claim(played)
    reached = [
        row(name=f"{n} nodes").having("epochs_to_goal") for n in usbyte_losses.NODES
    ]
    yield usbyte_losses.alike_claim(reached, 0.8)
    yield order.claim_of([row(model="vgg16")], 10)
    shares = several(row, "name", ("vgg16", "resnet50"))
    yield overhead.small_claim(shares)
    yield from overhead.order_claims(shares)
    place = "section 6.3, figure 10"
    yield from scaling._claims(exposed, scaling.FIGURE_10, place, scaling.WHY_10)
    yield scaling._linear([row(model="resnet50", num_ranks=128)])


def of_zen(row: Make) -> Iterator[Claim]:
    yield balance._theorem(several(row, "num_ranks", (4, 16), name="a"))
    yield balance._practical([row(name="a", of="elements", num_units=100)])
    yield balance._old_boundaries([row(name="a").having("push_by_old_boundaries")])
    drawn = several(row, "name", "ab", of=formats.ANYWHERE)
    yield from formats.claims17a(
        [*drawn, row(name="transformer, one rank", of="transformer")]
    )
    yield from hashing._memory_claims({1.0: row(), 2.0: row(), 4.0: row()})
    yield from hashing._hash_claims({1: row(), 3: row(), 4: row()})
    yield hashing._strawman_claim([row(), row()])
    yield hashing._extraction_claim([row(), row()])
    yield hashing._seconds_claim(row(device="V100"))
    yield losses._claim(losses.PARTS[0], [[row()["a"]], [row()["a"]]])
    yield from parts._both_claims(
        "lstm", row().having("fraction_gained_in_training"), parts.PAPER_COO["lstm"]
    )
    at_128 = several(row, "name", "ab", model="lstm", num_ranks=128)
    yield from zen_schemes.claims8(
        [*at_128, row(name="c", model=zen_schemes.SMALL, num_ranks=8)]
    )
    one, other = ([row()["a"] for _ in range(9)] for _ in "ab")
    other = one if row()["a"] < 1 else other
    yield from sparsity.claims2a(
        [row(name="a", overlaps=one), row(name="b", overlaps=other)]
    )
    yield from sparsity.claims2b([row(name="a").having("densification_4")])
    yield from sparsity.claims3a([row(name="lstm", shares=[row()["a"]])])
    yield from sparsity.claims3b([row(name="lstm")])
    gains = {
        model: {
            scheme: zen_speed.Gain(row()["a"], row()["b"])
            for scheme in (*zen_speed.BASELINES, zen_speed.ZEN)
        }
        for model in zen_speed.PAPER_ZEN
    }
    yield from (
        zen_speed._zen_claim(model, own[zen_speed.ZEN]) for model, own in gains.items()
    )
    yield from (zen_speed._over_claim(gains, scheme) for scheme in zen_speed.PAPER_OVER)
    yield from (zen_speed._omnireduce_claim(gains), zen_speed._most_claim(gains))
    yield zen_speed._slower_claim({"lstm": gains["lstm"]})
    part = zen_training.PARTS["figure11"]
    machines = several(row, "num_machines", (2, 16))
    model = part.models[0]
    for scheme, paper in model.paper[part.gbit].items():
        yield zen_training._speedup_claim(ASK, part, model, scheme, paper, machines)
    yield zen_training._growing(ASK, part, {one.name: machines for one in part.models})


RULES = (of_deft, of_hipress, of_ssfusion, of_usbyte, of_zen)


def judged(rules: Callable[[Make], Iterator[Claim]], seed: int | None) -> list[Claim]:
    """The claims of drawn rows, or of rows in which all is the same."""
    random = np.random.default_rng(seed)

    def draw(key: str) -> float:
        if seed is None:
            return 0.0 if key.startswith(GAINS) else SAME
        return float(random.lognormal(0.0, 2.0))

    return list(rules(lambda **given: Drawn(draw, given)))


def verdicts() -> set[tuple[str, str]]:
    """The functions below papers/ that give a verdict, each with its file."""
    found = set()
    for path in PAPERS.glob("*/*.py"):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef) and any(
                map(is_verdict, ast.walk(function))
            ):
                found.add((f"{path.parent.name}/{path.name}", function.name))
    return found


def is_verdict(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return False
    if node.func.id != "Claim":
        return node.func.id == "effect"
    agrees = node.args[3] if len(node.args) > 3 else None
    return not (isinstance(agrees, ast.Constant) and agrees.value is None)


@pytest.mark.smoke
def test_every_rule_can_disagree(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that no test here feeds is found as well: it was never seen to
    disagree.
    """
    refuted: set[tuple[str, str]] = set()

    def seen(self: Claim) -> None:
        caller = sys._getframe(1)
        while self.agrees is False and caller is not None and caller.f_back is not None:
            path = Path(caller.f_code.co_filename)
            refuted.add((f"{path.parent.name}/{path.name}", caller.f_code.co_name))
            caller = caller.f_back

    monkeypatch.setattr(Claim, "__post_init__", seen)
    for rules in RULES:
        of_seeds = [judged(rules, seed) for seed in range(SEEDS)]
        never = [
            claims[0].says
            for claims in zip(*of_seeds, strict=True)
            if all(one.agrees is not False for one in claims)
            and claims[0].agrees is not None
        ]
        assert never == [], f"{rules.__name__}: no row drawn refutes these"
    assert verdicts() - refuted == set()


@pytest.mark.smoke
@pytest.mark.parametrize("rules", RULES)
def test_no_effect_is_found_where_there_is_none(
    rules: Callable[[Make], Iterator[Claim]],
) -> None:
    said = [claim.says for claim in judged(rules, None) if claim.agrees is True]
    assert [says for says in said if not any(words in says for words in ALIKE)] == []


def test_a_quarter_of_the_printed_effect_is_room_and_no_more() -> None:
    def agrees(found: float, stated: float, points: float = 0.1) -> bool | None:
        return effect("", "", "", found, stated, "why", points).agrees

    assert agrees(0.089, 0.089) is agrees(0.111, 0.089) is agrees(0.067, 0.089) is True
    assert agrees(0.163, 0.089) is agrees(-0.01, 0.089) is agrees(0.0, 0.089) is False
    assert agrees(1.19, 1.1) is True
    assert agrees(1.21, 1.1) is False, "points are less than a quarter"
    assert agrees(1.21, 1.1, points=1.0) is True
    assert effect("", "", "", 0.1, 0.1, "why").agrees_if == "7.5 to 12.5 %"


def test_what_is_not_said_says_why() -> None:
    with pytest.raises(ValueError, match="say why"):
        Claim("all is well", "table 1", "it is", None)
    Claim("all is well", "table 1", "not measured", None)
