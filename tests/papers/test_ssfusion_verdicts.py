"""SSFusion's verdicts and reasons, on rows that are made up."""

from __future__ import annotations

import pytest

from gradwire.planning.data.plan import DENSE
from papers.frame import Claim, Findings, Row
from papers.ssfusion import compare, duration, latency, throughput, varied
from papers.ssfusion.breakdown import less
from papers.ssfusion.compare import improvement, is_within
from papers.ssfusion.contenders import COMMON, CONTENDERS, SSFUSION, VARIANTS
from papers.ssfusion.latency import APART, ONE, TOGETHER, flat_claim, many_claims
from papers.ssfusion.printed import CUPCAKE, ESPRESSO, HIPRESS, OKTOPK, OMGS, SPARDL
from papers.ssfusion.setting import SPARSIFIER, Reading
from papers.ssfusion.sizes import claim_of, nearest
from tests.papers.figures import ask

pytestmark = pytest.mark.slow

SLOWER = {"dgc": 1.0, "gaussiank": 1.5, "redsync": 1.2, "sidco": 2.0}


def made_up(name: str, iteration_s: float, num_ranks: int = 8) -> Row:
    return {
        "name": name,
        "model": "m",
        "num_ranks": num_ranks,
        "throughput": 1 / iteration_s,
        "iteration_s": iteration_s,
        "compute_s": 0.5,
        "selection_s": 0.2,
        "communication_s": iteration_s - 0.7,
        "link_s": 0.4,
        "fraction_dense": 0.25,
    }


def verdict(rows: list[Row], stated: tuple[float, float], *others: str) -> Claim:
    return improvement(rows, stated, "ours is faster", "section 0", others=others or None)


def test_a_range_agrees_if_it_lies_within_the_printed_one() -> None:
    rows = [made_up(SSFUSION, 1.0), made_up("A", 1.2), made_up("B", 1.5)]
    assert verdict(rows, (0.2, 0.5), "A", "B").agrees is True
    assert verdict(rows, (0.3, 0.5), "A", "B").agrees is False
    assert verdict(rows, (0.2, 0.4), "A", "B").agrees is False
    assert "20.0 to 50.0 %" in verdict(rows, (0.2, 0.5), "A", "B").ours
    assert is_within((0.196, 0.504), (0.2, 0.5))
    assert not is_within((0.194, 0.5), (0.2, 0.5))


def test_a_scheme_that_is_not_here_leaves_a_range_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "LACKING", ("C",))
    monkeypatch.setattr(compare, "RIVALS", ("A",))
    rows = [made_up(SSFUSION, 1.0), made_up("A", 1.2)]
    inside = verdict(rows, (0.1, 0.5))
    assert inside.agrees is None
    assert "C" in inside.why
    assert verdict(rows, (0.3, 0.5)).agrees is False
    assert verdict(rows, (0.3, 0.5), "C").agrees is None


def test_the_reason_names_the_largest_difference() -> None:
    ours, other = made_up(SSFUSION, 1.0), made_up("A", 0.8)
    assert "on communication" in compare.difference([ours, other], "m")
    slow = other | {"selection_s": 0.01, "communication_s": 0.29}
    assert "10 ms on selection" in compare.difference([ours, slow], "m")


def test_interleaving_can_gain_no_more_than_what_is_not_hidden() -> None:
    why = throughput.interleaved([made_up(SSFUSION, 1.0), made_up("O", 1.0)], "m")
    assert "25.0 % of what" in why
    assert "30.0 % of its iteration" in why
    assert "42.9 %" in why


def test_slower_networks_must_gain_more() -> None:
    def rows(gain_slow: float, gain_fast: float) -> list[Row]:
        return [
            made_up(name, seconds) | {"reading": reading}
            for reading, gain in (("slow", gain_slow), ("fast", gain_fast))
            for name, seconds in ((SSFUSION, 1.0), (VARIANTS["o"], 1.0 + gain))
        ]

    assert varied._by_rate(rows(0.3, 0.1), ["m"])[0].agrees is True
    (claim,) = varied._by_rate(rows(0.1, 0.3), ["m"])
    assert claim.agrees is False
    assert "dense" in claim.why


@pytest.mark.parametrize(("least", "most", "agrees"), [(0.1, 0.4, True), (0.4, 0.1, False)])
def test_a_gap_widens_or_does_not(
    monkeypatch: pytest.MonkeyPatch, least: float, most: float, agrees: bool
) -> None:
    monkeypatch.setattr(throughput, "RIVALS", ("A",))
    rows = [
        made_up(name, seconds, num_ranks)
        for num_ranks, gain in ((8, least), (16, most))
        for name, seconds in ((SSFUSION, 1.0), ("A", 1.0 + gain))
    ]
    claim = throughput.widening(rows, "m")
    assert claim.agrees is agrees
    assert ("50.0 % computation" in claim.why) is not agrees


def test_at_a_high_density_sums_that_are_cut_are_faster() -> None:
    def claim(omgs_s: float, *more: Row) -> Claim:
        rows = [made_up(OKTOPK, 1.0), made_up(SPARDL, 1.1), made_up(OMGS, omgs_s), *more]
        return varied.denser_claim([row | {"density": 0.1} for row in rows], 0.1)

    assert claim(1.2, made_up(ESPRESSO, 1.3)).agrees is True
    assert claim(1.2, made_up(ESPRESSO, 1.05)).agrees is False
    assert claim(1.2).agrees is None
    assert ESPRESSO in claim(1.2).why
    assert claim(1.05).agrees is False


def test_time_saved_is_a_share_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duration, "RIVALS", ("A", "B"))
    monkeypatch.setattr(duration, "LACKING", ())
    rows = [made_up(SSFUSION, 1.0), made_up("A", 2.0), made_up("B", 1.25)]
    claim = duration.claim_of(rows)
    assert claim.agrees is True
    assert "20.0 to 50.0 %" in claim.ours
    assert duration.claim_of([*rows[:2], made_up("B", 0.9)]).agrees is False
    monkeypatch.setattr(duration, "LACKING", ("C",))
    assert duration.claim_of(rows).agrees is None


@pytest.mark.parametrize(
    ("other_s", "agrees", "told"),
    [(0.6, True, "50.0 % less"), (0.4, False, "25.0 % less"), (0.2, False, "50.0 % more")],
)
def test_how_much_less_a_part_takes(other_s: float, agrees: bool, told: str) -> None:
    ours, other = made_up(SSFUSION, 1.0), made_up("A", 1.0) | {"communication_s": other_s}
    claim = less("communication_s", 0.48, ours, other, "A")
    assert claim.agrees is agrees
    assert told in claim.ours
    assert less("communication_s", 0.48, ours, None, "A").agrees is None


def test_baselines_pay_for_what_they_encode() -> None:
    reading = Reading("links of 1 Gbit/s", 1, 2.2)
    profile = reading.profile("resnet50")
    by_name = {one.name: one for one in CONTENDERS}
    hipress, espresso = by_name[HIPRESS], by_name[ESPRESSO]
    cluster = reading.cluster(8, on_gpu=hipress.on_gpu)
    sparse = [
        message
        for message in hipress.plan(profile, cluster, COMMON).messages
        if message.exchange != DENSE
    ]
    assert sparse
    assert all(set(one.inline) == {chunk.tensor for chunk in one.chunks} for one in sparse)
    assert not espresso.on_gpu, "what it offloads takes the CPU's seconds"
    assert espresso.plan(profile, reading.cluster(8), COMMON).settings["divisible"] is True


@pytest.mark.parametrize(
    ("cupcake_s", "told"), [(2.0, "both rank them alike"), (0.5, "the two rank them differently")]
)
def test_a_replay_that_ranks_otherwise_is_told(cupcake_s: float, told: str) -> None:
    simulated = [made_up(SSFUSION, 1.0), made_up(CUPCAKE, cupcake_s)]
    seconds = {"ssfusion": 1.0, "cupcake": 1.3}
    replayed = tuple({"name": n, "model": "r", "measured_s": s} for n, s in seconds.items())
    note = throughput.order_note(simulated, Findings(replayed))
    assert told in note
    assert "1 of 1 that figure11_replayed" in note
    assert "not measured before this" in throughput.order_note(simulated, None)


# Figure 4 and table 3


def seconds_row(numel: int, taken_s: float) -> Row:
    return {"name": ONE, "sparsifier": SPARSIFIER, "num_tensors": 1, "numel": numel} | {
        "taken_s": taken_s
    }


def test_seconds_are_flat_or_not() -> None:
    assert flat_claim([seconds_row(4096, 1.0), seconds_row(16384, 1.2)]).agrees is True
    steep = flat_claim([seconds_row(4096, 1.0), seconds_row(16384, 4.0)])
    assert steep.agrees is False
    assert "4 times the elements take 4.0 times" in steep.why
    assert flat_claim([seconds_row(4096, 1.0)]).agrees is None


@pytest.mark.parametrize(("apart_s", "agrees"), [(2.0, True), (1.0, False)])
def test_many_small_ones_cost_more_or_do_not(apart_s: float, agrees: bool) -> None:
    (claim,) = many_claims({APART: apart_s, TOGETHER: 1.0, ONE: 1.0})
    assert claim.agrees is agrees


def test_sparsifiers_are_compared_at_one_size() -> None:
    rows = tuple(
        seconds_row(latency.ALIKE, taken_s) | {"sparsifier": name}
        for name, taken_s in SLOWER.items()
    )
    assert latency.slowness(ask(figure4=Findings(rows))) == SLOWER
    assert set(latency.slowness(ask())) == set(SLOWER)


# Table 2


def test_the_nearest_model_with_a_printed_share() -> None:
    assert nearest(0.6651, 436) == (290, 436)
    small, of = nearest(0.6266, 398)
    assert f"{100 * small / of:.2f}" == "62.66"
    row = {"name": "vit_large", "num_tensors": 392, "num_small": 246}
    row |= {"fraction_small": 246 / 392, "fraction_small_in_size": 0.00112}
    row |= {"fraction_small_over_large": 0.00113}
    assert claim_of(row).agrees is True
    assert "+1 small" in claim_of(row | {"num_small": 245, "fraction_small": 245 / 392}).why
    assert claim_of(row | {"fraction_small_in_size": 0.002}).agrees is False
