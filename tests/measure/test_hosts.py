"""Hosts of several ranks are measured by what a cluster's formulas ask for."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from gradwire.measure import links
from gradwire.planning.data.cluster import Cluster, Host

HOST = Host(num_ranks=2, rate_bytes_per_s=1e9, hop_s=1e-5)
SIZES_BYTES = (2**14, 2**16, 2**18, 2**20)


def found_again(given: Cluster, patch: pytest.MonkeyPatch) -> Cluster:
    """What is measured where messages take what ``given`` says; no rank is started."""
    within_s = [given.within_line.seconds(size) for size in SIZES_BYTES]
    across_s = [
        given.all_reduce_s(size) - own_s
        for size, own_s in zip(SIZES_BYTES, within_s, strict=True)
    ]

    gathers_s = [
        given.shares.collective_s("all_gather", size / 8) for size in SIZES_BYTES
    ]

    def seconds(engine: Any, cases: Sequence[Any], *rest: Any) -> list[float]:
        if cases[0].verb == "send":
            send_s = given.across.collective_s("send", 4)
            work_s = given.hop_s
            return [send_s, send_s + (links.AT_ONCE - 1) * work_s]
        *_, whole = cases
        assert whole.numel * 4 == SIZES_BYTES[0]
        # Each part by itself has a hand-over between threads that a whole message has
        # once.
        twice_s = 3e-4 if given.across.num_ranks > 1 else 0.0
        parts_s = [s + twice_s for s in within_s] + across_s + gathers_s
        whole_s = within_s[0] + across_s[0]
        return [*parts_s[: len(cases) - 1], whole_s]

    patch.setattr(links, "_message_s", seconds)
    patch.setattr(links, "broadcast_figures", lambda engine, own: own)
    patch.setattr(links, "shared_cores", lambda of_all: None)
    engine: Any = SimpleNamespace(
        rank=1, world=given.num_ranks, ranks_per_host=2, num_channels=1
    )
    verbs = ("all_reduce", "all_gather")
    return links.measure_cluster(engine, sizes_bytes=SIZES_BYTES, verbs=verbs)


def test_both_levels_are_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    given = Cluster(num_ranks=8, rate_bytes_per_s=1e8, hop_s=1e-4, host=HOST)
    found = found_again(given, monkeypatch)
    assert found.ranks_per_host == 2
    for size_bytes in (2**14, 2**15, 2**22):
        assert found.all_reduce_s(size_bytes) == pytest.approx(
            given.all_reduce_s(size_bytes)
        )
    figures = (found.rate_bytes_per_s, found.hop_s)
    assert figures == pytest.approx((1e8, 1e-4), rel=1e-3)
    assert found.latency_s == pytest.approx(0.0, abs=1e-7)
    for size_bytes in SIZES_BYTES:  # of messages; a rank of a share has an eighth
        gather_s = given.shares.collective_s("all_gather", size_bytes / 8)
        assert found.shares.collective_s("all_gather", size_bytes / 8) == pytest.approx(
            gather_s
        )


def test_one_host_by_itself_has_its_own_links_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = Cluster(num_ranks=2, rate_bytes_per_s=1e8, host=HOST)
    found = found_again(given, monkeypatch)
    assert (found.host.rate_bytes_per_s, found.host.hop_s) == pytest.approx((1e9, 1e-5))
    assert found.all_reduce_s(10**6) == pytest.approx(given.all_reduce_s(10**6))


def test_longer_messages_that_take_no_longer_still_have_a_rate() -> None:
    flat = links.fit_line((size, 0.01) for size in SIZES_BYTES)
    assert links._slope(flat) == pytest.approx(0.01 / 2**20)
