"""Hosts that are far apart, or have rates of their own: hops, bends, files."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.collective.steps.travel import (
    FAR_S,
    NOTES,
    ahead_bytes,
    is_straight,
)
from gradwire.compress.none import none
from gradwire.errors import InvalidSetting
from gradwire.exchange.by_name import exchange_for
from gradwire.planning.data.cluster import VERBS, Cluster, Host
from gradwire.planning.simulation.supersteps import Tariff
from gradwire.runtime.transport.direct import piece_numels, room_bytes
from tests.each import each

ONE_WAY_S = 0.04
HOP_S = (1 + NOTES) * ONE_WAY_S
FAST = 1e15
"""A rate at which bytes cost nothing."""
FAR = Cluster(
    num_ranks=4, rate_bytes_per_s=6.25e6, hop_s=1e-4, latency_s=ONE_WAY_S, source="far"
)
NEAR = FAR.model_copy(update={"latency_s": 0.0})
HOME = Cluster(
    num_ranks=3,
    rate_bytes_per_s=4e6,
    hop_s=0.0,
    up_bytes_per_s=(1e6,),
    down_bytes_per_s=(8e6, 8e6, 2e6),
    latencies_s=((0, 0.01, 0.02), (0.03, 0, 0.01), (0.01, 0.01, 0)),
)


def added_s(verb: str, size_bytes: float, cluster: Cluster = FAR) -> float:
    """The seconds that distance adds to a verb."""
    near = cluster.model_copy(update={"latency_s": 0.0})
    return cluster.collective_s(verb, size_bytes) - near.collective_s(verb, size_bytes)


@each(
    "verb, num_latencies",
    [
        ("all_reduce", 2),
        ("all_gather", 1),
        ("all_to_all", 1),
        ("reduce_scatter", 1),
        ("broadcast", 2 + NOTES),
        ("send", 1 + NOTES),
    ],
)
def test_a_short_verb_takes_the_hops_of_the_runtime(
    verb: str, num_latencies: int
) -> None:
    far = FAR.model_copy(update={"rate_bytes_per_s": FAST})
    assert added_s(verb, 4096, far) == pytest.approx(num_latencies * ONE_WAY_S)


@each(
    "verb, world, ahead, beyond",
    [
        ("all_reduce", 4, 2, 3),
        ("all_reduce", 2, 1, 2),
        ("all_gather", 8, 1, 2),
        ("all_to_all", 4, 1, 2),
        ("reduce_scatter", 4, 1, 2),
    ],
)
def test_beyond_the_border_no_receive_is_posted_ahead(
    verb: str, world: int, ahead: int, beyond: int
) -> None:
    far = FAR.model_copy(update={"rate_bytes_per_s": FAST, "num_ranks": world})
    border = ahead_bytes(verb, world, ONE_WAY_S)
    assert added_s(verb, border, far) == pytest.approx(ahead * ONE_WAY_S)
    assert added_s(verb, border + 1, far) == pytest.approx(beyond * ONE_WAY_S)


@each("verb, rounds", [("all_reduce", 6), ("all_gather", 3)])
def test_large_verbs_of_hosts_that_are_not_far_go_round_a_ring(
    verb: str, rounds: int
) -> None:
    latency_s = 0.9 * FAR_S
    update = {"rate_bytes_per_s": FAST, "latency_s": latency_s}
    near = FAR.model_copy(update=update)
    border = ahead_bytes(verb, 4, latency_s)
    expected_s = rounds * (1 + NOTES) * latency_s
    assert added_s(verb, border + 1, near) == pytest.approx(expected_s)


def test_the_first_bytes_of_a_large_verb_are_under_way_while_notes_come() -> None:
    size_bytes = 4 * 2**20
    ahead_s = 1.5 * ahead_bytes("all_reduce", 4, ONE_WAY_S) / FAR.rate_bytes_per_s
    assert ahead_s > ONE_WAY_S
    assert added_s("all_reduce", size_bytes) == pytest.approx(2 * ONE_WAY_S)


@each("world", (2, 3, 4, 8, 64))
def test_the_borders_are_those_of_the_runtime(world: int) -> None:
    for verb, per_rank in (("all_reduce", 1), ("all_gather", world)):
        largest = ahead_bytes(verb, world) * per_rank
        if world > 2:
            assert is_straight(verb, largest, world)
            assert not is_straight(verb, largest + per_rank, world)
        assert room_bytes(-(-largest // world), world)
    for verb in ("all_reduce", "all_gather", "all_to_all", "reduce_scatter"):
        largest = ahead_bytes(verb, world, ONE_WAY_S)
        whole_of_part = 1 if verb == "all_gather" else world
        if verb == "all_reduce" and world == 2:
            whole_of_part = 1
        assert len(piece_numels(largest // whole_of_part, world)) == 1
        assert len(piece_numels(largest // whole_of_part + 1, world)) == 2


def test_the_bytes_of_a_long_ring_hide_the_distance() -> None:
    """A round's halves follow each other, so one is under way while a note is."""
    latency_s = 0.9 * FAR_S
    far = FAR.model_copy(update={"latency_s": latency_s, "rate_bytes_per_s": 1e8})
    hop_s = (1 + NOTES) * latency_s
    size_bytes = 3 * 2**20
    round_s = size_bytes / 4 / far.rate_bytes_per_s
    assert hop_s < round_s < 2 * hop_s
    expected = 6 * (1e-4 + hop_s + round_s / 2) + round_s / 2
    assert far.all_reduce_s(size_bytes) == pytest.approx(expected)
    # Seconds of a whole link are those of bytes alone: the rest is latency.
    latency_s, work_s = far.parts_s("all_reduce", size_bytes)
    assert work_s == pytest.approx(6 * round_s)
    assert latency_s == pytest.approx(expected - work_s)
    assert added_s("all_reduce", 7 * 2**20, far) == pytest.approx(hop_s)


def test_segments_of_a_ring_are_no_longer_than_gloos() -> None:
    """On a fast link a ring waits for notes, however long its buffer is."""
    latency_s = 0.9 * FAR_S
    update = {"rate_bytes_per_s": 1.25e10, "hop_s": 0.0, "latency_s": latency_s}
    fast = FAR.model_copy(update=update)
    once_bytes = 8 * 2**20
    once_s = fast.all_reduce_s(once_bytes)
    assert once_s > 6 * (1 + NOTES) * latency_s
    assert fast.all_reduce_s(4 * once_bytes) == pytest.approx(4 * once_s, rel=0.01)
    # Meanwhile the link is free for other messages.
    work_s = fast.parts_s("all_reduce", once_bytes)[1]
    assert work_s == pytest.approx(1.5 * once_bytes / 1.25e10)


@given(
    verb=st.sampled_from(VERBS),
    world=st.integers(2, 70),
    rate=st.floats(1e4, 1e10),
    latency_s=st.floats(0.0, 1.0),
    size_bytes=st.integers(1, 2**32),
)
def test_distance_never_makes_a_verb_faster(
    verb: str, world: int, rate: float, latency_s: float, size_bytes: int
) -> None:
    near = Cluster(num_ranks=world, rate_bytes_per_s=rate)
    far = near.model_copy(update={"latency_s": latency_s})
    farther = near.model_copy(update={"latency_s": 2 * latency_s})
    seconds = [
        cluster.collective_s(verb, size_bytes) for cluster in (near, far, farther)
    ]
    hair = 1 + 1e-9
    assert seconds[0] <= seconds[1] * hair
    assert seconds[1] <= seconds[2] * hair
    assert min(far.parts_s(verb, size_bytes)) >= 0


def test_a_cluster_without_distance_has_the_lines_that_it_had() -> None:
    for verb in VERBS:
        line = NEAR.line(verb)
        assert line.samples == ()
    old = {"num_ranks": 4, "rate_bytes_per_s": 6.25e6, "hop_s": 1e-4, "source": "far"}
    assert Cluster.parse(json.dumps(old)) == NEAR


def test_figures_of_hosts_are_read_as_they_were_written() -> None:
    assert Cluster.parse(HOME.to_json()) == HOME


def test_collectives_wait_for_the_farthest_and_the_slowest() -> None:
    even = HOME.evened
    assert even.rate_bytes_per_s == 1e6
    # Hosts 0 and 1: 10 ms there, 30 ms back.
    assert even.hop_between_s(0, 1) == pytest.approx(0.01 + NOTES * 0.03)
    for verb in VERBS:
        assert HOME.collective_s(verb, 4096) == even.collective_s(verb, 4096)
    assert even.evened is even
    assert HOME.speeds == ((1.0, 8.0), (1.0, 8.0), (1.0, 2.0))
    assert even.speeds == ()


def test_slower_and_scaled_clusters_keep_the_shape_of_their_hosts() -> None:
    slower = HOME.slower(2.0)
    assert slower.speeds == HOME.speeds
    assert slower.all_reduce_s(10**6) == pytest.approx(2 * HOME.all_reduce_s(10**6))
    assert FAR.slower(2.0).all_reduce_s(100) == pytest.approx(2 * FAR.all_reduce_s(100))
    faster = HOME.scaled(rate_bytes_per_s=8e6)
    assert faster.speeds == HOME.speeds
    assert faster.up_bytes_per_s == (2e6,)
    assert faster.latencies_s == HOME.latencies_s
    assert FAR.scaled(num_ranks=8).latency_s == ONE_WAY_S
    with pytest.raises(InvalidSetting, match=r"ranks must be 3, whose hosts .* got 4"):
        HOME.scaled(num_ranks=4)


def test_scaling_takes_the_distance_off_the_measured_latency() -> None:
    line = FAR.line("all_reduce").model_copy(update={"samples": ()})
    measured = FAR.model_copy(update={"collectives": {"all_reduce": line}})
    assert measured.scaled(num_ranks=8).hop_s == pytest.approx(1e-4)


def test_hosts_of_several_ranks_have_figures_for_each_host() -> None:
    host = Host(num_ranks=2, rate_bytes_per_s=1e9)
    rows = ((0, 0.04), (0.04, 0))
    cluster = Cluster(num_ranks=4, rate_bytes_per_s=1e6, latencies_s=rows, host=host)
    assert cluster.across.hop_between_s(0, 1) == pytest.approx(HOP_S)
    assert cluster.within.latency_s == 0
    even = cluster.model_copy(update={"latencies_s": (), "latency_s": ONE_WAY_S})
    for one in ("flat", "shares"):
        assert getattr(cluster, one).parts_s("all_gather", 10**6) == pytest.approx(
            getattr(even, one).parts_s("all_gather", 10**6)
        )
    assert cluster.all_reduce_s(10**6) == pytest.approx(even.all_reduce_s(10**6))


@each(
    "entry, value, words",
    [
        ("latency_s", -1.0, "latency_s: .*got -1"),
        ("latencies_s", [[0.0, 0.1]], "latencies_s has not a row of 3 for each of 3"),
        ("latencies_s", [[0.0] * 3, [0.0] * 3, [0.0] * 2], "not a row of 3"),
        ("up_bytes_per_s", [1e6, 1e6], "up_bytes_per_s has 2 figures for 3 hosts"),
        ("down_bytes_per_s", [0.0], r"down_bytes_per_s\.0: .*got 0"),
    ],
)
def test_wrong_figures_of_hosts_are_named(
    entry: str, value: object, words: str
) -> None:
    text = json.dumps({**json.loads(HOME.to_json()), entry: value})
    with pytest.raises(InvalidSetting, match=f"cluster cannot be read: .*{words}"):
        Cluster.parse(text)


def test_a_near_cluster_is_scaled_to_a_distance() -> None:
    """Its measured lines are those of near hosts, so they go."""
    measured = NEAR.model_copy(
        update={"collectives": {verb: NEAR.line(verb) for verb in VERBS}}
    )
    far = measured.scaled(latency_s=ONE_WAY_S)
    for size_bytes in (4096, 2**22):
        seconds = far.all_reduce_s(size_bytes)
        assert seconds == pytest.approx(FAR.all_reduce_s(size_bytes))
    assert HOME.scaled(latency_s=0.0).latencies_s == ()
    assert "40 ms one way" in far.source
    with pytest.raises(InvalidSetting, match=r"latency_s must be 0 to .* got -1"):
        NEAR.scaled(latency_s=-1.0)


def test_hosts_do_not_work_while_a_message_is_under_way() -> None:
    """The distance of several messages passes at once, whatever the hosts' share."""
    busy = FAR.model_copy(update={"host_share": 1.0})
    for size_bytes in (4096, 2**21):
        latency_s, work_s = FAR.parts_s("all_reduce", size_bytes)
        host_s = 6 * FAR.hop_s
        expected = (latency_s - host_s, work_s + host_s)
        assert busy.parts_s("all_reduce", size_bytes) == pytest.approx(expected)
        tariff = Tariff.of(exchange_for(none()), busy)
        assert tariff.verb("all_reduce", size_bytes) == pytest.approx(expected)
