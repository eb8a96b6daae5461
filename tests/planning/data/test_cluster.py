"""The link model: closed forms, and what is not a cluster."""

from __future__ import annotations

import json

import pytest

from gradwire.errors import InvalidSetting
from gradwire.planning.data.cluster import VERBS, Cluster, CodecFit
from gradwire.planning.data.fit import LineFit
from tests.each import each


def test_a_ring_at_8_nodes_costs_the_papers_latency_and_the_links_rate() -> None:
    cluster = Cluster(num_ranks=8, rate_bytes_per_s=1.25e9)
    assert cluster.alpha_s == pytest.approx(910e-6)
    assert cluster.beta_s_per_byte == pytest.approx(1.4e-9)
    assert cluster.all_reduce_s(10**9) == pytest.approx(910e-6 + 1.4)
    assert cluster.wire_bytes(800) == 1400
    alone = Cluster(num_ranks=1, rate_bytes_per_s=1.0)
    assert (
        alone.all_reduce_s(10**9)
        == alone.wire_bytes(10**9)
        == cluster.all_reduce_s(0)
        == 0
    )


LINE = LineFit(alpha_s=1e-3, per_unit_s=2e-8, samples=((100, 1e-3), (200, 1.1e-3)))
MEASURED = Cluster(
    num_ranks=4,
    rate_bytes_per_s=1e8,
    hop_s=1e-4,
    collectives={"all_reduce": LINE, "send": LineFit(alpha_s=0.5, per_unit_s=0.0)},
    codecs={
        "topk": CodecFit(
            encode=LINE, decode=LINE, merge=LineFit(alpha_s=0, per_unit_s=1e-9)
        )
    },
    source="measured in a test",
)


def test_what_was_measured_counts_and_a_formula_stands_in_for_the_rest() -> None:
    assert (MEASURED.alpha_s, MEASURED.beta_s_per_byte) == (1e-3, 2e-8)
    assert MEASURED.all_reduce_s(1000) == LINE.measured_s(1000)
    assert MEASURED.collective_s("send", 1) == 0.5
    assert MEASURED.collective_s("send", 0) == 0
    stated = MEASURED.model_copy(update={"collectives": {}})
    expected = {
        "all_reduce": 6 * 1e-4 + 1.5 * 0.01,
        "all_gather": 3 * 1e-4 + 3 * 0.01,
        "all_to_all": 3 * 1e-4 + 0.75 * 0.01,
        "reduce_scatter": 3 * 1e-4 + 0.75 * 0.01,
        "broadcast": 2 * 1e-4 + 3 * 0.01,
        "send": 1e-4 + 0.01,
    }
    assert set(expected) == set(VERBS)
    for verb, seconds in expected.items():
        assert stated.collective_s(verb, 10**6) == pytest.approx(seconds), verb
        if verb not in ("all_reduce", "send"):
            assert MEASURED.collective_s(verb, 10**6) == pytest.approx(seconds), verb


def test_scaling_keeps_the_hop_and_the_share_of_the_rate() -> None:
    # 1 ms / 6 hops; 1.5 copies in 20 ns a byte are 75 MB/s, three quarters of the
    # link's rate.
    wider = MEASURED.scaled(num_ranks=16)
    assert wider.hop_s == pytest.approx(1e-3 / 6)
    assert wider.rate_bytes_per_s == pytest.approx(0.75e8)
    assert wider.all_reduce_s(10**6) == pytest.approx(
        30e-3 / 6 + 2 * 15 / 16 * 1e6 / 0.75e8
    )
    faster = MEASURED.scaled(rate_bytes_per_s=1e9)
    assert (faster.num_ranks, faster.rate_bytes_per_s) == (4, pytest.approx(0.75e9))
    assert wider.codecs == MEASURED.codecs
    for reported in (
        "16 ranks",
        "800.0 Mbit/s",
        "75 % of the rate",
        "167 us",
        "measured in a test",
    ):
        assert reported in wider.source
    # To its own size and rate it scales to the line it was made from.
    same = MEASURED.scaled(num_ranks=4)
    assert same.all_reduce_s(12345) == pytest.approx(LINE.seconds(12345))


def test_scaling_of_a_stated_cluster_and_what_cannot_be_scaled() -> None:
    stated = Cluster(num_ranks=2, rate_bytes_per_s=5.0, hop_s=0.25)
    assert stated.scaled(num_ranks=3, rate_bytes_per_s=7.0).model_dump(
        include={"num_ranks", "rate_bytes_per_s", "hop_s"}
    ) == {"num_ranks": 3, "rate_bytes_per_s": 7.0, "hop_s": 0.25}
    with pytest.raises(InvalidSetting, match="pass a rate or num_ranks"):
        stated.scaled()
    flat = MEASURED.model_copy(
        update={"collectives": {"all_reduce": LineFit(alpha_s=1.0, per_unit_s=0.0)}}
    )
    with pytest.raises(InvalidSetting, match="no rate follows from it"):
        flat.scaled(num_ranks=8)


@each(
    "entry, value, words",
    [
        ("num_ranks", 0, "num_ranks"),
        ("rate_bytes_per_s", float("nan"), "rate_bytes_per_s"),
        ("collectives", {"scatter": LINE.model_dump()}, r"collectives\.scatter"),
        (
            "collectives",
            {"send": {"alpha_s": -1.0, "per_unit_s": 0.0}},
            r".*send\.alpha_s: .*got -1",
        ),
        (
            "codecs",
            {"topk": {"encode": LINE.model_dump()}},
            r"codecs\.topk\.decode: Field required",
        ),
        ("schema_version", 0, "schema_version: .*schema 1 is accepted"),
    ],
)
def test_broken_measurements_name_the_entry(
    entry: str, value: object, words: str
) -> None:
    text = json.dumps({**json.loads(MEASURED.to_json()), entry: value})
    with pytest.raises(InvalidSetting, match=f"cluster cannot be read: {words}"):
        Cluster.parse(text)
