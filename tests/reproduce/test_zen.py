"""ZEN's figures in small: what must hold of any of them, on made-up and on captured gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from math import exp
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gradwire.bench.captured_rank import SCHEMES
from gradwire.errors import InvalidSetting
from gradwire.load import load
from gradwire.reproduce import (
    _zen_balance,
    _zen_captures,
    _zen_formats,
    _zen_hashing,
    _zen_schemes,
    _zen_sparsity,
    _zen_speed,
)
from gradwire.reproduce._frame import Ask, Claim, Findings, Reproduction, Row
from gradwire.reproduce._zen_captures import Capture, Source, captured
from gradwire.reproduce._zen_volumes import (
    ENTRY_BYTES,
    Traffic,
    busiest_bytes,
    dense_bytes,
    grown,
    sparcml_bytes,
    union,
)
from gradwire.sparse.gpu import partition
from gradwire.sparse.permutation import Permutation
from gradwire.workloads.task import Task, class_loss

RANKS = 32
MODELS = ("lstm", "transformer")


def made(name: str, num_units: int, width: int, kept: int) -> Capture:
    """Zipf's law over the units: low numbers are in every rank's gradient, high ones in few."""
    random = np.random.default_rng(0)
    weights = 1 / np.arange(1, num_units + 1)
    units = tuple(
        np.sort(random.choice(num_units, kept, replace=False, p=weights / weights.sum())).astype(
            np.int32
        )
        for _ in range(RANKS)
    )
    return Capture(name, "made up", num_units, width, units)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which captures of all models are kept."""
    place = tmp_path_factory.mktemp("zen")
    for found in (
        made("lstm", 2000, 16, 40),
        made("transformer", 40_000, 1, 2000),
        made("lstm, one sentence", 2000, 16, 6),
    ):
        found.save(place / f"capture-{_zen_captures.stem(found.name)}.npz")
    return place


def ask(folder: Path | None = None, **earlier: Findings) -> Ask:
    return Ask(quick=True, report=lambda fraction, what: None, earlier=earlier, folder=folder)


SMALL: dict[str, Callable[[Ask], Findings]] = {
    "figure2a": lambda asked: _zen_sparsity.figure2a(asked, MODELS),
    "figure2b": lambda asked: _zen_sparsity.figure2b(asked, MODELS),
    "figure3a": lambda asked: _zen_sparsity.figure3a(asked, MODELS),
    "figure3b": lambda asked: _zen_sparsity.figure3b(asked, MODELS),
    "figure8": lambda asked: _zen_schemes.figure8(asked, MODELS, (4, 32)),
    "theorem2": lambda asked: _zen_balance.theorem2(asked, MODELS, (4, 16), numel=2**16),
    "figure16": lambda asked: _zen_hashing.figure16(asked, numel=200_000),
    "figure17a": lambda asked: _zen_formats.figure17a(
        asked, (0.01, 0.05, 0.4, 0.6, 0.95), MODELS, numel=2**14
    ),
}


@pytest.fixture(scope="module")
def small(folder: Path) -> dict[str, Findings]:
    measured = {name: measure(ask(folder)) for name, measure in SMALL.items()}
    speed = speed_rows()
    measured["figure15"] = Findings(speed, _zen_speed.claims15(speed))
    measured["figure17b"] = _zen_speed.figure17b(ask(folder, figure15=measured["figure15"]))
    return measured


ALL = (*SMALL, "figure15", "figure17b")


def test_every_figure_is_registered_and_has_a_measure_of_its_own() -> None:
    paper: Reproduction = load("reproduce", "zen")
    assert {figure.name for figure in paper.figures} == set(ALL)
    assert len({figure.measure for figure in paper.figures}) == len(ALL)
    names = [figure.name for figure in paper.figures]
    assert names.index("figure15") < names.index("figure17b")


@pytest.mark.parametrize("name", ALL)
def test_claims_stand_somewhere_and_those_that_differ_say_why(
    small: dict[str, Findings], name: str
) -> None:
    assert small[name].claims
    for claim in small[name].claims:
        assert claim.place.startswith(("section", "theorem", "abstract"))
        assert claim.says
        assert claim.ours
        assert bool(claim.why) == (claim.agrees is False), claim


@pytest.mark.parametrize("name", ALL)
def test_every_figure_is_drawn(small: dict[str, Findings], name: str, tmp_path: Path) -> None:
    paper: Reproduction = load("reproduce", "zen")
    draw = next(figure.draw for figure in paper.figures if figure.name == name)
    assert draw is not None
    assert draw(small[name].rows, tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def by_name(found: Findings) -> dict[str, Row]:
    return {str(row["name"]): row for row in found.rows}


def claim_of(found: tuple[Claim, ...], words: str) -> Claim:
    (one,) = [claim for claim in found if words in claim.says]
    return one


# Captures


class Bag(nn.Module):
    """The mean of a batch's embeddings, classified."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 4)
        self.scores = nn.Linear(4, 3)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        scores_B3: Tensor = self.scores(self.embedding(tokens_BT).mean(1))
        return scores_B3


def batch(step: int, rank: int, world: int) -> tuple[Tensor, Tensor]:
    return torch.tensor([[rank, 7, 40 + step]]), torch.tensor([rank % 3])


TASK = Task(
    name="bag",
    description="a bag",
    make_model=Bag,
    make_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    batch=batch,
    loss=class_loss,
    score=lambda model: 0.0,
    metric="none",
)


def test_a_capture_holds_the_rows_that_each_rank_touched() -> None:
    source = Source("bag", lambda: TASK, "embedding.weight")
    found = _zen_captures.capture(source, 3, lambda *_: None)
    step = 40 + _zen_captures.WARM_UP
    assert [one.tolist() for one in found.units] == [[0, 7, step], [1, 7, step], [2, 7, step]]
    assert (found.num_units, found.width, found.numel) == (50, 4, 200)
    assert found.density == pytest.approx(0.06)
    assert found.elements(1)[0].tolist() == [
        *range(4), *range(28, 32), *range(4 * step, 4 * step + 4)
    ]  # fmt: skip


def test_without_a_parameter_dgc_selects_from_all_gradients() -> None:
    found = _zen_captures.capture(Source("bag", lambda: TASK), 2, lambda *_: None)
    numel = sum(parameter.numel() for parameter in Bag().parameters())
    assert (found.num_units, found.width) == (numel, 1)
    for one in found.units:
        assert 1 <= len(one) <= round(_zen_captures.DENSITY * numel)


def test_captures_are_kept_and_made_anew_for_more_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        _zen_captures.SOURCES, "bag", Source("bag", lambda: TASK, "embedding.weight")
    )
    first = captured(ask(tmp_path), "bag", 2)
    with monkeypatch.context() as patch:
        patch.setattr(_zen_captures, "capture", lambda *_: pytest.fail("it is kept"))
        again = captured(ask(tmp_path), "bag", 2)
    assert replace(again, units=()) == replace(first, units=())
    assert [one.tolist() for one in again.units] == [one.tolist() for one in first.units]
    assert len(captured(ask(tmp_path), "bag", 5).units) == 5
    assert len(captured(ask(), "bag", 2).units) == 2


def test_models_without_data_are_named_with_the_way_to_get_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = replace(_zen_captures.SOURCES["deepfm"], lacking=lambda: "unzip it there")
    monkeypatch.setitem(_zen_captures.SOURCES, "deepfm", source)
    assert "deepfm" not in _zen_captures.present()
    assert _zen_sparsity.absent_notes() == ("not measured: deepfm. unzip it there",)


# Figures 2 and 3


def test_sparsity_is_kept_as_a_profile_and_read_back(folder: Path) -> None:
    first = _zen_sparsity.sparsity(ask(folder), "lstm", RANKS)
    assert _zen_sparsity.sparsity(ask(folder), "lstm", RANKS) == first
    assert (folder / "sparsity-lstm.json").exists()
    fewer = _zen_sparsity.sparsity(ask(folder), "lstm", 4)
    assert fewer.num_gradients == 4
    units = first.tensors[0].units
    assert (units.width, units.num_units, units.density) == (16, 2000, pytest.approx(0.02))


def test_zipfs_law_is_skewed_and_shares_much(small: dict[str, Findings]) -> None:
    row = by_name(small["figure3a"])["lstm"]
    assert row["fraction_1"] == max(float(str(row[f"fraction_{i}"])) for i in range(1, 9))
    assert sum(float(str(row[f"fraction_{i}"])) for i in range(1, 9)) == pytest.approx(1)
    skews = by_name(small["figure3b"])["lstm"]
    assert float(str(skews["skewness_128"])) > float(str(skews["skewness_8"])) > 3
    ratios = by_name(small["figure2b"])["lstm"]
    assert 1 < float(str(ratios["densification_2"])) < float(str(ratios["densification_32"])) < 32
    assert "densification_64" not in ratios  # it would be extrapolated


def test_equal_overlaps_are_no_different_distributions() -> None:
    overlaps = [0.1 * (i % 7) for i in range(120)]
    row: Row = {
        "name": "a",
        "overlaps": overlaps,
        "overlap_mean": float(np.mean(overlaps)),
        "overlap_deviation": float(np.std(overlaps)),
    }
    shifted: Row = {**row, "name": "b", "overlaps": [0.3 + one for one in overlaps]}
    assert claim_of(_zen_sparsity.claims2a([row, row]), "distributions").agrees is False
    assert claim_of(_zen_sparsity.claims2a([row, shifted]), "distributions").agrees is True
    assert claim_of(_zen_sparsity.claims2a([row]), "distributions").agrees is None


@pytest.mark.parametrize(("skew", "agrees"), [(69.0, False), (71.0, True)])
def test_the_lstms_skew_is_held_against_70(skew: float, agrees: bool) -> None:
    row: Row = {"name": "lstm", "skewness_128": skew, "fraction_density": 0.0113}
    (claim,) = _zen_sparsity.claims3b([row])
    assert claim.agrees is agrees
    assert _zen_sparsity.claims3b([{**row, "name": "ncf"}])[0].agrees is None


# Figure 8

Sets = list[set[int]]


def tensors(sets: Sets) -> list[Tensor]:
    return [torch.tensor(sorted(one), dtype=torch.int32) for one in sets]


index_sets = st.lists(st.sets(st.integers(0, 59), max_size=30), min_size=4, max_size=4)


@given(index_sets)
def test_volumes_are_those_of_sets(sets: Sets) -> None:
    numel, held = 60, tensors(sets)
    merged = set().union(*sets)
    assert union(held, numel).tolist() == sorted(merged)
    pairs = [len(sets[0] | sets[1]), len(sets[2] | sets[3])]
    sizes = grown(held, numel)
    assert sizes == [[len(one) for one in sets], pairs, [len(merged)]]
    ranged = Traffic.of(held, numel)
    parts = [[sum(i // 15 == part for i in one) for part in range(4)] for one in sets]
    assert ranged.pushed_WW.tolist() == parts
    assert ranged.pulled_W.tolist() == [sum(i // 15 == part for i in merged) for part in range(4)]
    received = [sum(parts[i][j] for i in range(4) if i != j) for j in range(4)]
    sent = [sum(parts[i][j] for j in range(4) if i != j) for i in range(4)]
    assert ranged.push_bytes(8) == 8 * max(*received, *sent)
    first = max(max(map(len, sets[:2])), max(map(len, sets[2:])))
    assert sparcml_bytes(sizes, 4) == ENTRY_BYTES * (first + max(pairs))


def test_equal_and_disjoint_gradients_cost_what_the_paper_says() -> None:
    """Equations 1 and 2 at their two extremes: all overlap, and none."""
    world, numel, kept = 8, 8000, 100
    places = Permutation(numel).places
    apart = [torch.arange(kept, dtype=torch.int32) + kept * rank for rank in range(world)]
    equal = [apart[0]] * world
    for sets, most in ((apart, world), (equal, 1)):
        found = busiest_bytes(sets, numel, places, grown(sets, numel))
        unions = [min(2**i, most) for i in range(3)]
        assert found["sparcml"] == ENTRY_BYTES * kept * sum(unions)
        assert found["agsparse"] == ENTRY_BYTES * kept * (world - 1)
        ideal = ENTRY_BYTES * kept * (world - 1) / world * (1 + most)
        assert 1 <= found["balanced"] / ideal < 2.5
        assert found["balanced"] == 2 * found["without_index"]
        assert found["zen"] <= found["balanced"]
    assert dense_bytes(numel, world) == 2 * 7 / 8 * 4 * numel


def test_ranges_carry_skew_and_hashed_parts_do_not(small: dict[str, Findings]) -> None:
    for row in small["figure8"].rows:
        times = {key: float(str(row[key])) for key in ("sparse_ps", "balanced", "without_index")}
        assert times["without_index"] < times["balanced"] < times["sparse_ps"]
    rows = [row for row in small["figure8"].rows if row["model"] == "lstm"]
    for key in ("agsparse", "sparcml", "balanced"):
        fewer, more = (float(str(row[key])) for row in rows)
        assert fewer < more


def test_the_claims_of_figure_8_can_fail(small: dict[str, Findings]) -> None:
    poor = {"agsparse": 0.5, "balanced": 0.9, "sparcml": 2.0, "omnireduce": 0.5}
    claims = _zen_schemes.claims8([{**row, **poor} for row in many_ranks(small["figure8"].rows)])
    for words in ("no existing", "36 % less", "at a batch of 1", "double", "marginally"):
        assert claim_of(claims, words).agrees is False, words
    good = {"agsparse": 2.0, "sparcml": 1.5, "omnireduce": 1.2, "balanced": 0.6}
    claims = _zen_schemes.claims8([{**row, **good} for row in many_ranks(small["figure8"].rows)])
    for words in ("no existing", "36 % less"):
        assert claim_of(claims, words).agrees is True, words


def test_fewer_ranks_say_nothing_of_128(small: dict[str, Findings]) -> None:
    for words in ("no existing", "36 % less", "marginally"):
        assert claim_of(small["figure8"].claims, words).agrees is None


def many_ranks(rows: tuple[Row, ...]) -> list[Row]:
    """The rows with 128 in place of 32 ranks."""
    return [{**row, "num_ranks": 128} if row["num_ranks"] == 32 else row for row in rows]


# Theorem 2


def test_hashed_parts_are_balanced_and_ranges_are_not(small: dict[str, Findings]) -> None:
    rows = by_name(small["theorem2"])
    assert claim_of(small["theorem2"].claims, "probability").agrees is True
    assert rows["all in front, 16 ranks"]["push_by_ranges"] == 16
    for row in rows.values():
        for way in _zen_balance.WAYS:
            assert row[f"{way}_imbalance"] <= row[f"{way}_bound"]  # type: ignore[operator]


def test_a_part_beyond_the_bound_fails_the_theorem(small: dict[str, Findings]) -> None:
    first, *rest = small["theorem2"].rows
    assert isinstance(first["push_bound"], float)
    worse = {**first, "push_imbalance": 1.01 * first["push_bound"]}
    assert claim_of(_zen_balance.claims([worse, *rest]), "probability").agrees is False
    uneven = {**first, "of": "elements", "pull_imbalance": 1.2}
    assert claim_of(_zen_balance.claims([uneven]), "practical").agrees is False


def test_boundaries_of_an_earlier_step_leave_imbalance(small: dict[str, Findings]) -> None:
    old = [np.arange(0, 100), np.arange(50, 150)]
    assert _zen_balance.by_boundaries(old, [np.arange(150)], 3) == [1.0]
    assert _zen_balance.by_boundaries(old, [np.arange(40)], 3) == [3.0]
    row = by_name(small["theorem2"])["lstm, 16 ranks"]
    assert float(str(row["push_by_old_boundaries"])) > 1


# Figure 16


@given(
    st.sets(st.integers(0, 2**31 - 1), min_size=1, max_size=200),
    st.integers(1, 5),
    st.sampled_from((0.5, 1.0, 2.0)),
    st.integers(1, 4),
)
def test_algorithm_1_places_every_entry_once(
    indices: set[int], parts: int, memory: float, hashes: int
) -> None:
    indices_K = torch.tensor(sorted(indices), dtype=torch.int32)
    found = _zen_hashing.place(indices_K, parts, memory, hashes)
    assert found.num_entries == len(indices)
    assert 0 < sum(found.placed) <= min(len(indices), found.num_words)
    assert 0 <= found.serial_share < 1
    assert 1 <= found.tries <= hashes


def test_one_hash_loses_what_probability_says() -> None:
    indices_K = torch.arange(0, 400_000, 4, dtype=torch.int32)
    for load_of_memory in (0.1, 0.4, 1.0):
        found = _zen_hashing.place(indices_K, 4, 1 / load_of_memory, 1)
        expected = 1 - (1 - exp(-load_of_memory)) / load_of_memory
        assert found.serial_share == pytest.approx(expected, abs=0.005)


def test_the_wave_that_comes_first_matters_little() -> None:
    indices_K = torch.arange(50_000, dtype=torch.int32)
    few, many = (
        _zen_hashing.place(indices_K, 4, 2.0, 3, waves=waves).serial_share for waves in (1, 200)
    )
    assert few == pytest.approx(many, abs=0.03)


def test_the_papers_losses_are_those_of_a_quarter_of_the_memory(
    small: dict[str, Findings],
) -> None:
    claim = claim_of(small["figure16"].claims, "17.5 %")
    assert claim.agrees is False
    assert "4.8 % at 0.1" in claim.why
    assert "17.6 % at 0.4" in claim.why


@pytest.mark.skipif(find_spec("triton") is None, reason="no triton")
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is not interpreted")
def test_what_is_counted_is_what_the_kernel_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    entries = _zen_hashing._entries(60_000, "cpu")
    counted = _zen_hashing.place(entries.indices_K, 2, 2.0, 3, waves=3)
    with np.errstate(all="ignore"):
        _, spill = partition.algorithm_1(entries, 60_000, 2, Permutation(60_000), rehashes=3)
    share = (spill.serial + spill.fallback) / entries.indices_K.numel()
    assert share == pytest.approx(counted.serial_share, abs=0.015)
    assert share > 0


def test_on_a_gpu_the_kernel_is_timed_with_the_memory_of_the_row(
    monkeypatch: pytest.MonkeyPatch, small: dict[str, Findings]
) -> None:
    asked: list[dict[str, int]] = []
    monkeypatch.setattr(partition, "algorithm_1", lambda *_, **memory: asked.append(memory))
    entries = _zen_hashing._entries(10_000, "cpu")
    assert _zen_hashing.kernel_s(entries, 10_000, 1.5, 2) >= 0
    expected = {"rehashes": 2, "parallel": round(1.5 * entries.indices_K.numel())}
    assert asked == [expected] * (_zen_hashing.GPU_REPEATS + 1)
    for seconds, agrees in ((0.005, True), (0.007, False)):
        rows = [{**row, "gpu_s": seconds} for row in small["figure16"].rows]
        assert claim_of(_zen_hashing.claims(rows), "around 6 ms").agrees is agrees


# Figure 17a


def test_sizes_are_those_of_the_formulas() -> None:
    numel = 2**12
    indices_K = torch.arange(0, numel, 8, dtype=torch.int32)
    kept, part = len(indices_K), numel // _zen_formats.SERVERS
    sizes = {key: _zen_formats.encoded_bytes(key, indices_K, numel) for key in _zen_formats.FORMATS}
    assert sizes == {
        "hash_bitmap": 4 * kept + _zen_formats.SERVERS * part // 8,
        "coo": 8 * kept,
        "bitmap": 4 * kept + _zen_formats.SERVERS * numel // 8,
        "blocks": numel // 256 * (4 + 256 * 4),
    }


def test_the_crossings_of_figure_17a(small: dict[str, Findings]) -> None:
    for row in small["figure17a"].rows:
        density, bitmap, coo = (
            float(str(row[f"fraction_{key}"])) for key in ("density", "hash_bitmap", "coo")
        )
        assert bitmap == pytest.approx(density + 1 / 32, abs=1e-3)
        assert (bitmap < coo) == (density > 1 / 32)
    worse = [{**row, "fraction_hash_bitmap": 1.1} for row in small["figure17a"].rows]
    assert claim_of(_zen_formats.claims17a(worse), "95 %").agrees is False


# Figures 15 and 17b


def speed_rows(shaped: bool = True, **changed: float) -> tuple[Row, ...]:
    """Rows as the benchmark gives them, for one model."""
    speedups = dict.fromkeys(SCHEMES, 1.0) | {"dense": 1.0, "zen_in_coo": 6.0, "zen": 7.0}
    return tuple(
        {
            "name": f"lstm, {scheme}",
            "tensor": "lstm",
            "scheme": scheme,
            "link_bytes_per_s": 1e6 if shaped else None,
            "speedup_vs_dense": value,
            "busiest_bytes": 1000 / value / (2 if value > 1 else 1) if shaped else None,
        }
        for scheme, value in (speedups | changed).items()
    )


def test_speedups_are_held_against_the_papers() -> None:
    good = _zen_speed.claims15(speed_rows(omnireduce=1.2, sparse_ps=0.9))
    assert [claim.agrees for claim in good] == [True] * len(good)
    poor = _zen_speed.claims15(speed_rows(zen=1.5, omnireduce=2.0))
    assert not any(claim.agrees for claim in poor)
    assert "by bytes alone it would be" in _zen_speed._why_less(_zen_speed.Gain(2.0, 4.0), 3.0)
    assert "the bytes alone allow 2.50" in _zen_speed._why_less(_zen_speed.Gain(2.0, 2.5), 3.0)
    (claim,) = _zen_speed.claims15(speed_rows(shaped=False))
    assert claim.agrees is None


def test_training_gains_less_than_communication(folder: Path) -> None:
    before = Findings(speed_rows())
    (row,) = _zen_speed.figure17b(ask(folder, figure15=before)).rows
    assert row["fraction_gained"] == pytest.approx(1 / 6)
    assert row["speedup_of_training_in_coo"] < row["speedup_hashed_in_coo"]  # type: ignore[operator]
    adds = claim_of(_zen_speed.claims17b([row]), "then adds 13 %")
    assert adds.agrees is True
    assert claim_of(_zen_speed.claims17b([{**row, "fraction_gained": 0.1}]), "adds").agrees is False


def test_figure_15_measures_the_captures_of_all_models(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def run(bench: object, report: object) -> tuple[Row, ...]:
        asked.append(bench)
        found = [Capture.read(path) for path in bench.paths]  # type: ignore[attr-defined]
        assert [len(one.units) for one in found] == [4, 4]
        lstm, transformer = (captured(ask(folder), name, 32) for name in MODELS)
        assert found[0].units[1].tolist() == sorted(set(np.concatenate(lstm.units[8:16]).tolist()))
        assert found[1].units[1].tolist() == transformer.units[1].tolist()
        return speed_rows()

    monkeypatch.setattr(_zen_speed, "run", run)
    links = _zen_speed.Links(4, 1e6, 1)
    found = _zen_speed.figure15(ask(folder), MODELS, links)
    assert found.rows == speed_rows()
    assert [bench.hosts for bench in asked] == [4]  # type: ignore[attr-defined]


def test_a_profile_that_is_no_profile_is_refused(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "sparsity-lstm.json").write_text("{}")
    with pytest.raises(InvalidSetting, match=r"sparsity-lstm\.json"):
        _zen_sparsity.sparsity(ask(tmp_path), "lstm", 4)
