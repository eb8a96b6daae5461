"""ssfusion: its laws, the paper's equations, and its clock against the simulator's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.planning import catalogue
from gradwire.planning.data.cluster import Cluster, CodecFit, Host
from gradwire.planning.data.fit import LineFit
from gradwire.planning.data.plan import DENSE, Chunk, Plan, PlannedMessage
from gradwire.planning.data.profile import GradientDType, Profile
from gradwire.planning.simulation.clock import run_on_clock
from gradwire.planning.simulation.timeline import simulate
from gradwire_lab.laws.inputs import profile_of
from gradwire_lab.planner.ssfusion import VARIANTS, ssfusion
from gradwire_lab.planning.sparse_fusion import NOTHING, SparseCost
from tests.each import each
from tests.laws.sim_laws import law_one_rank_stands_for_all
from tests.planning.profiles import profiles
from tests.strategies import bounded

ON_DEVICE = LineFit(alpha_s=8.87e-4, per_unit_s=1.865e-10)
BESIDE = LineFit(alpha_s=1.673e-3, per_unit_s=1.494e-9)
"""Lines through the paper's table III, over elements of two bytes."""


def cluster_of(
    inline: LineFit = ON_DEVICE,
    beside: LineFit = BESIDE,
    num_ranks: int = 8,
    rate: float = 1.25e9,
    hop_s: float = 2e-5,
) -> Cluster:
    return Cluster(
        num_ranks=num_ranks,
        rate_bytes_per_s=rate,
        hop_s=hop_s,
        codecs={"dgc": CodecFit(encode=beside, decode=NOTHING, merge=NOTHING)},
        inline={"dgc": inline},
    )


def _buffers(plan: Plan) -> list[tuple[PlannedMessage | None, PlannedMessage]]:
    """The all-reduce, if there is one, and the all-gather of each group."""
    found: list[tuple[PlannedMessage | None, PlannedMessage]] = []
    ahead = None
    for message in plan.messages:
        if message.exchange == DENSE:
            assert ahead is None, "two all-reduces of one group"
            ahead = message
        else:
            found.append((ahead, message))
            ahead = None
    assert ahead is None, "an all-reduce without an all-gather"
    return found


def law_of_density(plan: Plan, floor: float, density: float) -> None:
    """The smallest are dense, no group is all dense, and density stays within its
    range.
    """
    for ahead, message in _buffers(plan):
        named = {*message.inline, *message.early}
        sparse = [chunk.numel for chunk in message.chunks if chunk.tensor in named]
        dense = [chunk.numel for chunk in message.chunks if chunk.tensor not in named]
        settings = plan.exchanges[message.exchange].settings
        assert settings["num_dense"] == len(dense)
        assert sparse, "all dense"
        dense += [chunk.numel for chunk in ahead.chunks] if ahead else []
        assert max(dense, default=0) <= min(sparse), "a smaller one is sparsified"
        assert floor <= float(settings["density"]) <= density
        sent = sum(dense) + sum(
            max(1, round(float(settings["density"]) * n)) for n in sparse
        )
        total = sum(dense) + sum(sparse)
        assert sent <= density * total + len(sparse), (
            "more elements than if all were sparsified"
        )


def uncompensated(plan: Plan) -> Plan:
    """The selection, with nothing that makes up for it."""
    exchanges = {
        name: one.model_copy(update={"settings": {**one.settings, "density": 0.01}})
        for name, one in plan.exchanges.items()
    }
    return plan.model_copy(update={"exchanges": exchanges})


def dense_large(plan: Plan) -> Plan:
    """The largest tensor of the first group dense, and the smallest not."""
    number = next(i for i, m in enumerate(plan.messages) if m.exchange != DENSE)
    message = plan.messages[number]
    by_size = sorted(message.chunks, key=lambda chunk: chunk.numel)
    swapped = message.model_copy(
        update={"inline": tuple(c.tensor for c in by_size[:-1])}
    )
    messages = [*plan.messages]
    messages[number] = swapped.model_copy(update={"early": ()})
    return plan.model_copy(update={"messages": tuple(messages)})


measured = st.builds(
    lambda ranks, rate, slow: cluster_of(
        beside=LineFit(alpha_s=slow, per_unit_s=1e-8), num_ranks=ranks, rate=rate
    ),
    st.sampled_from((1, 2, 3, 5)),
    st.floats(1e5, 1e8),
    st.floats(0.0, 5e-3),
)


@pytest.mark.parametrize("variant", VARIANTS)
@bounded(15)
@given(profile=profiles(largest=20_000), cluster=measured)
def test_plans_send_the_density_that_was_asked(
    variant: str, profile: Profile, cluster: Cluster
) -> None:
    plan = ssfusion(profile, cluster, variant=variant, density=0.1, floor=0.01)
    law_of_density(plan, 0.01, 0.1)
    if cluster.num_ranks > 1:
        law_one_rank_stands_for_all(simulate, plan, profile, cluster)


@each("spoils", [uncompensated, dense_large])
def test_the_law_bites(spoils: Callable[[Plan], Plan]) -> None:
    plan = ssfusion(
        catalogue.load("bert_large"), cluster_of(num_ranks=64), variant="naive"
    )
    law_of_density(plan, 0.001, 0.01)
    with pytest.raises(AssertionError):
        law_of_density(spoils(plan), 0.001, 0.01)


def test_dense_tensors_are_taken_off_the_density_as_in_the_worked_example() -> None:
    """Three tensors of 1030 elements, of which 5 % are sent: 51.5, less those that are
    dense.
    """
    profile = profile_of(([1000], 0.0, 0.0), ([20], 0.0, 0.0), ([10], 0.0, 0.0))
    found = {}
    for floor in (0.001, 0.03, 0.045):
        plan = ssfusion(
            profile, cluster_of(hop_s=1.0), variant="naive", density=0.05, floor=floor
        )
        (exchange,) = plan.exchanges.values()
        found[floor] = exchange.settings["num_dense"], exchange.settings["density"]
    assert found[0.001] == (2, pytest.approx(21.5 / 1000))
    assert found[0.03] == (1, pytest.approx(41.5 / 1020))
    assert found[0.045] == (0, 0.05)


@each("before_s, num_dense", [(0.0, 7), (0.0045, 4), (1.0, 0)])
def test_exclusion_ends_where_the_message_before_hides_it(
    before_s: float, num_dense: int
) -> None:
    """Equation 2: of eight encodes of 1 ms as many are left as the message before
    takes.

    One tensor stays sparse whatever it takes. Another dtype makes a group of its own
    before them.
    """
    dtypes: tuple[GradientDType, ...] = ("float32",) * 8 + ("bfloat16",)
    profile = profile_of(
        ([50_000] * 8, 0.0, 0.0), ([4_000_000], 0.0, 0.0), dtypes=dtypes
    )
    # A rank's payload and its size before it: two all-gathers.
    line = LineFit(alpha_s=before_s / 2, per_unit_s=0.0)
    cluster = cluster_of(inline=LineFit(alpha_s=1e-3, per_unit_s=0.0))
    cluster = cluster.model_copy(update={"collectives": {"all_gather": line}})
    plan = ssfusion(profile, cluster, variant="naive", density=0.9)
    first, second = plan.exchanges.values()
    assert first.settings["num_dense"] == 0
    assert second.settings["num_dense"] == num_dense


def _profile_of_one_group() -> Profile:
    return profile_of(
        *[([n], 0.0, 0.01) for n in (40_000, 200, 300_000, 500, 70_000, 90)]
    )


def _one_group(variant: str) -> tuple[Plan, Profile, Cluster]:
    """Six tensors in one group, as each encode takes long however small its tensor
    is.
    """
    profile = _profile_of_one_group()
    encode = LineFit(alpha_s=0.5, per_unit_s=1e-8)
    cluster = cluster_of(encode, num_ranks=64, hop_s=1e-6, rate=2e7)
    plan = ssfusion(profile, cluster, variant=variant, density=0.05)
    assert len(plan.exchanges) == 1
    return plan, profile, cluster


def test_interleaving_pays_where_dense_tensors_are_many_bytes() -> None:
    """64 ranks at 10 Gbit: an all-gather of dense tensors takes 32 times their
    all-reduce.
    """
    profile, cluster = catalogue.load("bert_large"), cluster_of(num_ranks=64)
    seconds = {
        variant: run_on_clock(
            ssfusion(profile, cluster, variant=variant), profile, cluster
        ).iteration_s
        for variant in VARIANTS
    }
    assert seconds["oi"] < 0.9 * seconds["o"] < 0.9 * seconds["naive"]
    assert seconds["oi"] < seconds["i"] < seconds["naive"]


def _parted(
    plan: Plan, first: Sequence[Chunk], rest: Sequence[Chunk], **settings: Any
) -> Plan:
    """The plan of one group whose first chunks go ahead in an all-reduce."""
    message = _buffers(plan)[-1][1]
    own = plan.exchanges[message.exchange]
    exchange = own.model_copy(update={"settings": {**own.settings, **settings}})
    ahead = [PlannedMessage(chunks=tuple(first))] if first else []
    messages = (*ahead, message.model_copy(update={"chunks": tuple(rest)}))
    return plan.model_copy(
        update={"messages": messages, "exchanges": {message.exchange: exchange}}
    )


def test_the_all_reduce_carries_what_ends_the_group_earliest() -> None:
    """Of every place up to which dense tensors could go ahead, by the simulator's
    clock.
    """
    plan, profile, cluster = _one_group("i")
    assert len(plan.messages) == 2
    best_s = run_on_clock(plan, profile, cluster).message_end_s[-1]
    together, profile, cluster = _one_group("naive")
    (message,) = together.messages
    dense = [c for c in message.chunks if c.tensor not in message.inline]
    ends_s = []
    for count in range(len(dense) + 1):
        rest = [chunk for chunk in message.chunks if chunk not in dense[:count]]
        other = _parted(together, dense[:count], rest, num_dense=len(dense) - count)
        ends_s.append(run_on_clock(other, profile, cluster).message_end_s[-1])
    assert best_s == pytest.approx(min(ends_s))
    assert len(ends_s) > 2


@each("hop_s, num_dense", [(1e-6, 3), (5e-2, 0)])
def test_hosts_leave_dense_what_lets_a_group_arrive_earliest(
    hop_s: float, num_dense: int
) -> None:
    """Of all numbers of its smallest tensors, by the simulator's clock; the others are
    encoded behind the host's sum. More than three would leave them less than the
    floor.
    """
    profile = _profile_of_one_group()
    cluster = cluster_of(
        beside=LineFit(alpha_s=0.5, per_unit_s=1e-8), rate=5e6, hop_s=hop_s
    )
    cluster = cluster.model_copy(
        update={"host": Host(num_ranks=2, rate_bytes_per_s=1e9)}
    )
    plan = ssfusion(profile, cluster, density=0.05)
    ahead, message = _buffers(plan)[-1]
    dense = list(ahead.chunks) if ahead else []
    assert len(dense) == num_dense
    assert (len(plan.exchanges), message.inline, message.early) == (1, (), ())
    every, ends_s = sorted([*dense, *message.chunks], key=lambda chunk: chunk.numel), []
    numels = [chunk.numel for chunk in every]
    for count in range(4):
        density = (0.05 * sum(numels) - sum(numels[:count])) / sum(numels[count:])
        other = _parted(plan, every[:count], every[count:], density=min(0.05, density))
        timing = run_on_clock(other, profile, cluster)
        encodes_s = [span.duration_s for span in timing.spans if span.name == "encode"]
        assert encodes_s == pytest.approx([0.5 + 1e-8 * max(numels)], rel=1e-3)
        ends_s.append(timing.message_end_s[-1])
    assert run_on_clock(plan, profile, cluster).message_end_s[-1] == pytest.approx(
        min(ends_s)
    )
    assert ends_s.index(min(ends_s)) == num_dense


def test_the_cost_of_tensors_that_stay_whole_is_the_simulators() -> None:
    cluster = cluster_of(
        beside=LineFit(alpha_s=1e-3, per_unit_s=1e-8), rate=5e6, hop_s=5e-2
    )
    cluster = cluster.model_copy(
        update={"host": Host(num_ranks=2, rate_bytes_per_s=1e9)}
    )
    profile = profile_of(([100_000, 100_000], 0.0, 0.01))
    plan = ssfusion(profile, cluster, density=0.05)
    assert [len(message.chunks) for message in plan.messages] == [2]
    timing = run_on_clock(plan, profile, cluster)
    cost = SparseCost.of(cluster, "dgc", 0.05)
    took_s = timing.message_end_s[0] - timing.message_start_s[0]
    assert took_s == pytest.approx(
        cost.apart_s([100_000] * 2, 2 * cost.sent_bytes(100_000))
    )
