"""``planning/local_rounds.py``: rounds without data, held against rounds with data."""

from __future__ import annotations

from math import ceil

import pytest

from gradwire.compress.cast16 import cast16
from gradwire.compress.none import none
from gradwire.contract.spec import TensorSpec
from gradwire.exchange.rounds import Merge, Push, Rules
from gradwire.planning import catalogue
from gradwire.planning.data.cluster import Cluster, Host
from gradwire.planning.data.fit import LineFit
from gradwire_lab.laws.inputs import profile_of
from gradwire_lab.planning.local_rounds import (
    OUTER_S,
    ROUNDS,
    Links,
    forecast,
    fragments_of,
    lock_step,
    play,
    proposals,
    virtual_ranks,
)
from tests.each import each
from tests.laws.rounds_laws import SHAPES, Conditions, Run

VGG16 = catalogue.load("vgg16")
SPECS = [TensorSpec("fragment", 1000), TensorSpec("fragment", 500)]
FAR = Cluster(
    num_ranks=3,
    rate_bytes_per_s=1e4,
    latencies_s=((0, 0.1, 0.3), (0.2, 0, 0.1), (0.5, 0.1, 0)),
    up_bytes_per_s=(1e4, 5e3, 2e4),
)


def test_lock_step_of_equal_ranks_loses_the_time_of_the_exchange() -> None:
    cluster = Cluster(num_ranks=4, rate_bytes_per_s=1e8)
    exchange_s = cluster.all_reduce_s(VGG16.size_bytes)
    figures = lock_step(10, VGG16, "none", cluster, [0.5] * 4)
    assert figures.round_s == pytest.approx(5.0 + exchange_s)
    assert figures.useful_time == pytest.approx(1 - exchange_s / figures.round_s)


def test_between_measured_hosts_an_outer_step_takes_its_time() -> None:
    """Ranks that share a core take as many times as long."""
    stated = Cluster(num_ranks=4, rate_bytes_per_s=1e8)
    alone = stated.model_copy(
        update={"processors": LineFit(alpha_s=0.0, per_unit_s=0.0)}
    )
    halves = alone.model_copy(update={"cores": 0.5})
    step_s = [0.5] * 4
    round_s = [
        lock_step(10, VGG16, "none", c, step_s).round_s for c in (stated, alone, halves)
    ]
    outer_s = OUTER_S * VGG16.size_bytes / 4
    assert round_s[1] - round_s[0] == pytest.approx(outer_s)
    assert round_s[2] - round_s[0] == pytest.approx(2 * outer_s)


@each("rate", [1e3, 1e4, 1e9])
def test_a_round_of_equal_ranks_lasts_as_long_as_its_two_messages(rate: float) -> None:
    """Ranks take a merge in at the end of a local step, and push at once if it is due.

    One of the two ranks is the owner, so a round has one push and one merge on the way.
    """
    cluster = Cluster(num_ranks=2, rate_bytes_per_s=rate, hop_s=0.0)
    rules = Rules(quorum=2, every=4)
    figures = forecast(rules, SPECS[:1], none(), cluster, [0.99, 0.99])
    messages_s = 2 * SPECS[0].size_bytes / rate
    steps = max(rules.every, ceil(messages_s / 0.99))
    assert figures.round_s == pytest.approx(0.99 * steps, rel=2 / ROUNDS)
    assert figures.ranks_per_round == 2
    assert 1 - 2 / ROUNDS < figures.useful_time <= 1


def test_slower_links_never_make_a_round_shorter_or_time_more_useful() -> None:
    step_s = [0.1, 0.1, 0.4]
    rules = Rules(quorum=2, every=5, fragments=2)
    rates = [10.0**exponent for exponent in range(3, 9)]
    clusters = [Cluster(num_ranks=3, rate_bytes_per_s=rate) for rate in rates]
    rounds = [forecast(rules, SPECS, none(), c, step_s).round_s for c in clusters]
    assert rounds == sorted(rounds, reverse=True)
    assert rounds[0] > 2 * rounds[-1]
    useful = [lock_step(5, VGG16, "none", c, step_s).useful_time for c in clusters]
    assert useful == sorted(set(useful))


def test_rounds_without_data_are_those_of_the_tape() -> None:
    """With data or without, the same messages leave at the same times."""
    rules = Rules(quorum=2, every=3, fragments=len(SHAPES))
    step_s = [0.1, 0.15, 0.37]
    run = Run(Conditions(codec=cast16(), rules=rules))
    _, links = play(run.ranks, FAR, step_s, rounds=5)
    specs = [learner.codec.spec for learner in run.ranks[0].rounds.learners]
    clock, sized_links = play(
        virtual_ranks(rules, specs, cast16(), 3), FAR, step_s, rounds=5
    )
    merges = {(m.fragment, m.version): m for m in clock.sent if isinstance(m, Merge)}
    same = ("rank", "number", "step", "steps", "age", "bytes")
    for line in run.lines():
        merge = merges[line["fragment"], line["round"]]
        assert merge.payload_B.numel() == line["bytes"]
        for entry, told in zip(merge.contributions, line["who"], strict=True):
            assert [getattr(entry, key) for key in same] == [told[key] for key in same]
    assert len(run.lines()) >= 5 * len(specs)
    assert links.sent_bytes == sized_links.sent_bytes


def test_bytes_are_those_of_all_messages_to_other_ranks() -> None:
    rules = Rules(quorum=1, every=3, fragments=2)
    ranks = virtual_ranks(rules, SPECS, none(), 3)
    clock, links = play(ranks, FAR, [0.1, 0.2, 0.3])
    pushes = [m for m in clock.sent if isinstance(m, Push) and m.rank != m.fragment % 3]
    merges = [m for m in clock.sent if isinstance(m, Merge)]
    to_others = sum(m.payload_B.numel() for m in merges) * 2 / 3
    pushed = sum(m.payload_B.numel() for m in pushes)
    assert sum(links.sent_bytes) == pushed + to_others


def test_a_link_carries_one_payload_after_the_other() -> None:
    links = Links(FAR)
    # a payload of rank 0 takes a second on its link
    assert links.seconds(0, 1, 10_000, 5.0) == pytest.approx(1.1, abs=1e-3)
    assert links.seconds(0, 2, 10_000, 5.0) == pytest.approx(2.3, abs=1e-3)
    # rank 2 sends faster than rank 1 receives
    assert links.seconds(2, 1, 10_000, 5.0) == pytest.approx(2.1, abs=1e-3)
    # a message without payload waits for none
    assert links.seconds(0, 1, 0, 5.0) == pytest.approx(0.1, abs=1e-3)
    assert links.sent_bytes == [20_000, 0, 10_000]


def test_ranks_of_a_host_share_its_link() -> None:
    host = Host(num_ranks=2, rate_bytes_per_s=1e6)
    links = Links(Cluster(num_ranks=4, rate_bytes_per_s=1e4, hop_s=0.0, host=host))
    assert links.seconds(0, 1, 10_000, 0.0) == pytest.approx(0.01)
    assert links.seconds(0, 2, 10_000, 0.0) == pytest.approx(1.0)
    assert links.seconds(1, 3, 10_000, 0.0) == pytest.approx(2.0)


def test_quorum_uses_the_time_of_ranks_of_other_speeds() -> None:
    """The published speeds of 4 regions of 4 workers (HALoS, ICML 2025)."""
    speeds = [0.232, 0.907, 0.828, 0.347, 0.574, 0.531, 0.722, 0.194]
    speeds += [0.852, 0.132, 0.896, 0.107, 0.827, 0.515, 0.527, 0.788]
    step_s = [0.238391 / speed for speed in speeds]
    cluster = Cluster(num_ranks=16, rate_bytes_per_s=0.117e9 / 8)
    profile = profile_of(([2**16], 0.1, 0.1), ([2**16], 0.1, 0.1), model="small")
    specs = fragments_of(profile, 2)
    rules = Rules(quorum=8, every=32, fragments=2)
    assert lock_step(32, profile, "none", cluster, step_s).useful_time < 0.303
    assert forecast(rules, specs, none(), cluster, step_s).useful_time > 0.88


def test_a_proposal_keeps_up_with_the_shortest_period() -> None:
    near = Cluster(num_ranks=4, rate_bytes_per_s=1e10)
    first, _ = proposals(VGG16, near, [0.5] * 4)
    assert (first.quorum, first.every, first.exchange) == (None, 5, "none")
    far = Cluster(num_ranks=4, rate_bytes_per_s=1e8, latency_s=0.04)
    first, second = proposals(VGG16, far, [0.5, 0.5, 2.0, 2.0])
    assert (first.quorum, first.keeps_up) == (2, True)
    assert (second.quorum, second.keeps_up) == (None, False)
    assert first.forecast.round_s == pytest.approx(0.5 * first.every, rel=0.15)


def test_no_round_closes_while_a_rank_waits_for_the_merge_before() -> None:
    """Two near ranks could close a round a step; the third is 30 steps away."""
    row = (0.0, 0.0, 3.0)
    far = Cluster(
        num_ranks=3, rate_bytes_per_s=1e9, hop_s=0.0, latencies_s=(row, row, row)
    )
    rules = Rules(quorum=2, every=2)
    clock, _ = play(virtual_ranks(rules, SPECS[:1], none(), 3), far, [0.1] * 3, 5)
    assert clock.now_s > 10 * 0.1
    assert {m.version for m in clock.sent if isinstance(m, Merge)} == {1}
