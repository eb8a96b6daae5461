"""Measured clusters: every verb, the same figures on every rank, and what is no
measurement.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from torch._C._distributed_c10d import HashStore, ProcessGroupGloo

from gradwire.errors import InvalidSetting
from gradwire.measure import links
from gradwire.measure.links import LinkReport, host_share, measure_cluster
from gradwire.planning.data.cluster import VERBS, Cluster, CodecFit
from gradwire.planning.data.fit import LineFit, fit_line
from gradwire.runtime.engine.engine import Engine
from gradwire.runtime.liveness.membership import Membership, join
from tests.each import each
from tests.runtime.ranks import Ranks

WORLD = 3
SIZES_BYTES = (1000, 64_000, 1_000_000)


def measured(rank: int, world: int) -> tuple[str, float, float]:
    """A rank's cluster, the progress that it was told, and the host's share."""
    engine = Engine(
        join(None),
        num_channels=2,
        timeout=timedelta(seconds=60),
        on_span=lambda span: None,
    )
    # Every rank brings other figures of codecs: rank 0's must come out everywhere.
    line = LineFit(alpha_s=rank, per_unit_s=1.0)
    reported: list[float] = []
    assert links._distance_s(engine, world, 0.02, 3) >= 0
    # On a busy machine ranks may seem to be far from each other.
    with patch.object(links, "_distance_s", return_value=0.0):
        cluster = measure_cluster(
            engine,
            sizes_bytes=SIZES_BYTES,
            budget_s=0.02,
            codecs={"own": CodecFit(encode=line, decode=line, merge=line)},
            advance=lambda amount, note: reported.append(amount),
        )
    share = host_share(engine, budget_s=0.02)
    engine.close()
    return cluster.to_json(), sum(reported), share


@pytest.mark.slow
@pytest.mark.multi
def test_every_rank_returns_the_same_lines_of_every_verb() -> None:
    with closing(Ranks(WORLD)) as ranks:
        reported_by_ranks = ranks.run(measured)
    assert len(set(reported_by_ranks)) == 1, (
        "a cluster or the host's share is not the same"
    )
    text, reported, share = reported_by_ranks[0]
    cluster = Cluster.parse(text)
    assert reported == pytest.approx(len(VERBS) * len(SIZES_BYTES))
    # Two channels cannot show less than about a half, and what they cannot show counts
    # as none.
    assert share == 0 or 0.5 < share <= 1
    assert 0 <= cluster.host_share <= 1
    assert cluster.num_ranks == WORLD
    assert cluster.codecs["own"].encode.alpha_s == 0
    assert tuple(cluster.collectives) == VERBS
    for verb, line in cluster.collectives.items():
        assert all(seconds > 0 for _, seconds in line.samples), verb
        buffers = [
            size * (WORLD if verb == "all_gather" else 1) for size, _ in line.samples
        ]
        assert all(
            0 <= b - wanted < 4 * WORLD
            for b, wanted in zip(buffers, SIZES_BYTES, strict=True)
        )
    assert all(seconds > 0 for _, seconds in cluster.processors.samples)
    # No rate was stated: it is that of a ring whose long messages take as long.
    ring = cluster.model_copy(update={"collectives": {}})
    fitted = cluster.line("all_reduce")
    assert ring.beta_s_per_byte == pytest.approx(links._slope(fitted))
    assert ring.alpha_s == pytest.approx(fitted.alpha_s)


@each("world", [2, 4, 8])
@each("latency_s", [0.0, 0.04])
def test_distance_and_rate_are_found_again(
    latency_s: float, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is measured where verbs take what a cluster says; no rank is started."""
    given = Cluster(
        num_ranks=world, rate_bytes_per_s=6.25e6, hop_s=1e-3, latency_s=latency_s
    )

    def seconds(engine: Any, cases: Sequence[Any], *rest: Any) -> list[float]:
        found = [given.collective_s(case.verb, 4 * case.numel) for case in cases]
        if [case.numel for case in cases] == [1, 1]:
            found[1] += (links.AT_ONCE - 1) * given.hop_s
        return found

    monkeypatch.setattr(links, "_message_s", seconds)
    monkeypatch.setattr(links, "broadcast_figures", lambda engine, own: own)
    monkeypatch.setattr(links, "shared_cores", lambda of_all: None)
    monkeypatch.setattr(links, "host_share", lambda engine, **_: 0.0)
    monkeypatch.setattr(links, "_processors", lambda engine, cases: None)
    engine: Any = SimpleNamespace(rank=1, world=world, ranks_per_host=1, num_channels=1)
    found = measure_cluster(engine)
    assert found.latency_s == pytest.approx(latency_s, rel=0.02, abs=1e-5)
    assert found.rate_bytes_per_s == pytest.approx(6.25e6, rel=0.02)
    stated = found.model_copy(update={"collectives": {}})
    for verb in ("send", "all_reduce", "all_gather", "all_to_all"):
        expected = given.collective_s(verb, 1000)
        assert stated.collective_s(verb, 1000) == pytest.approx(expected, rel=0.05)
    wider = found.scaled(num_ranks=2 * world)
    expected = given.scaled(num_ranks=2 * world).all_reduce_s(10**6)
    assert wider.all_reduce_s(10**6) == pytest.approx(expected, rel=0.05)


def test_a_single_rank_has_no_links() -> None:
    engine = Engine(
        Membership("", 0, 1),
        num_channels=1,
        timeout=timedelta(seconds=5),
        on_span=lambda _: None,
    )
    with pytest.raises(InvalidSetting, match="joins at least two ranks, got 1"):
        measure_cluster(engine)
    engine.close()


class _Three:
    """As much of an engine as is looked at before anything is sent."""

    world, rank = 3, 0


@each(
    "settings, words",
    [
        ({"verbs": ("all_reduse",)}, "did you mean 'all_reduce'"),
        ({"sizes_bytes": (1, 2)}, "three sizes or more"),
        ({"sizes_bytes": (0, 2, 3)}, "three sizes or more"),
    ],
)
def test_mistakes_are_answered_before_anything_is_sent(
    settings: dict[str, tuple[object, ...]], words: str
) -> None:
    with pytest.raises(InvalidSetting, match=words):
        measure_cluster(_Three(), **settings)  # type: ignore[arg-type]


def test_the_rate_of_torchs_all_reduce_is_that_of_a_ring() -> None:
    # 4 ranks send 1.5 bytes for each byte of the buffer: 1.5 / beta.
    line = LineFit(alpha_s=0.0, per_unit_s=2.4e-7)
    assert LinkReport(4, "gloo", line).rate_bytes_per_s == pytest.approx(6.25e6)
    flat = LineFit(alpha_s=0.0, per_unit_s=0.0)
    assert LinkReport(4, "gloo", flat).rate_bytes_per_s == math.inf


@pytest.mark.slow
def test_torchs_all_reduces_are_really_measured() -> None:
    """By gloo on the loopback, between ranks in threads of this process."""
    store, options = HashStore(), ProcessGroupGloo._Options()
    options._devices = [ProcessGroupGloo.create_device(interface="lo")]
    with ThreadPoolExecutor(2) as pool:
        groups = pool.map(
            lambda rank: ProcessGroupGloo(store, rank, 2, options), range(2)
        )
        report, _ = pool.map(links.torch_all_reduces, [*groups])
    assert (report.world, report.backend) == (2, "gloo")
    assert tuple(size for size, _ in report.fit.samples) == links.TORCH_SIZES_BYTES
    assert all(seconds > 0 for _, seconds in report.fit.samples)
    assert report.fit == fit_line(report.fit.samples)
    assert report.round_trip_s is not None
    assert 0 < report.round_trip_s < 10
