"""Every planner, with every example of its settings, keeps every law; wrong plans are refused."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.contract.registry import examples, load, names
from gradwire.contract.trace.span import Trace
from gradwire.errors import InvalidSetting
from gradwire.planning.check import check
from gradwire.planning.data.cluster import Cluster, CodecFit, Host
from gradwire.planning.data.fit import LineFit
from gradwire.planning.data.plan import Plan
from gradwire.planning.data.profile import Profile
from gradwire.planning.fusion import NOTHING
from gradwire.planning.planner.mgwfbp import mgwfbp
from gradwire.planning.planner.wfbp import wfbp
from gradwire.planning.price import iteration_s
from gradwire.planning.simulation.clock import run_on_clock
from gradwire.planning.simulation.closed_form import Lane
from gradwire.planning.simulation.timeline import simulate
from gradwire_lab.laws.inputs import MIXED, profile_of
from gradwire_lab.laws.planners import LAWS, Planner, law_same_facts_same_plan
from gradwire_lab.planner.bytescheduler import bytescheduler
from gradwire_lab.planner.omgs import omgs
from tests.each import each
from tests.laws import broken_plans as broken
from tests.laws import trace_laws
from tests.planning.profiles import clusters, exact_cluster, measured, profiles
from tests.strategies import bounded

SOUND = profile_of(
    ([64, 9], 0.5, 0.25), ([], 0.125, 0.125), ([300], 0.25, 0.5), ([40], 0.25, 0.5), dtypes=MIXED
)
ALONE = profile_of(([], 0.5, 0.25), ([], 0.0, 0.0))
"""No gradients at all: nothing to send, and no planner may stumble over it."""


def _id(example: Any) -> str:
    if isinstance(example, partial):
        return ",".join([example.func.__name__, *(f"{k}={v}" for k, v in example.keywords.items())])
    return str(example.__name__)


every_planner = pytest.mark.parametrize("planner", examples("planner"), ids=_id)


@every_planner
def test_planner_laws(planner: Planner) -> None:
    """One plan is held to all laws that look at one; the other asks the planner itself."""

    def hold(profile: Profile, cluster: Cluster) -> None:
        law_same_facts_same_plan(planner, profile, cluster)
        made = planner(profile, cluster)
        for law in LAWS:
            if law is not law_same_facts_same_plan:
                law(lambda *facts: made, profile, cluster)

    for profile in (SOUND, ALONE):
        hold(profile, measured(exact_cluster()))
    hold(SOUND, measured(HOSTS))
    plan = planner(SOUND, measured(MEASURED))
    assert iteration_s(plan, SOUND, MEASURED) == simulate(plan, SOUND, MEASURED).iteration_s
    bounded(4)(given(profile=profiles(), cluster=clusters)(hold))()


@every_planner
def test_trace_laws(planner: Planner) -> None:
    @bounded(6)
    @given(profile=profiles(largest=120), cluster=clusters)
    def hold(profile: Profile, cluster: Cluster) -> None:
        plan = planner(profile, cluster)
        trace = simulate(plan, profile, cluster)
        assert trace == simulate(plan, profile, cluster), "the same plan gave another trace"
        assert iteration_s(plan, profile, cluster) == trace.iteration_s
        for law in trace_laws.laws_of(plan, cluster):
            law(plan, profile, cluster, trace)

    hold()


PLAIN = profile_of(
    ([64, 900], 0.002, 0.001), ([], 0.001, 0.001), ([3000], 0.001, 0.002), ([400], 0.001, 0.002)
)
BENT = LineFit(alpha_s=1e-4, per_unit_s=1e-7, samples=((64, 2e-4), (2048, 3e-4), (20000, 2e-3)))
SLOW = Cluster(num_ranks=3, rate_bytes_per_s=1e6, hop_s=1e-4)
MEASURED = SLOW.model_copy(
    update={"collectives": dict.fromkeys(("all_reduce", "all_gather"), BENT), "host_share": 0.5}
)
"""Of costs that no line fits."""
HOSTS = SLOW.model_copy(
    update={"num_ranks": 8, "host": Host(num_ranks=4, rate_bytes_per_s=1e8, hop_s=1e-5)}
)
"""Of ranks of which several share a link."""


@each("planner, cluster", product([mgwfbp, omgs], [SLOW, MEASURED, HOSTS]))
def test_a_planners_own_link_is_the_simulators(
    planner: Planner, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link that a planner decides by ends with the last message, where nothing is merged."""
    links: list[Lane] = []

    class Noted(Lane):
        def __init__(self) -> None:
            super().__init__()
            links.append(self)

    monkeypatch.setattr(sys.modules[planner.__module__], "Lane", Noted)
    encode = CodecFit(encode=BENT, decode=NOTHING, merge=NOTHING)
    cluster = cluster.model_copy(update={"codecs": {"dgc": encode}})
    timing = run_on_clock(planner(PLAIN, cluster), PLAIN, cluster)
    assert links[-1].free_s == pytest.approx(timing.message_end_s[-1], rel=1e-12)


@bounded(30)
@given(
    profile=profiles(largest=120),
    cluster=clusters.filter(lambda cluster: cluster.num_ranks < 9),
    credit=st.integers(1, 4),
    draw=st.randoms(use_true_random=False),
)
def test_trace_laws_of_any_plan(
    profile: Profile, cluster: Cluster, credit: int, draw: random.Random
) -> None:
    """Any order, any credit, any dependencies that look back; on one rank and on each of all."""
    messages = list(bytescheduler(profile, cluster, partition_bytes=96).messages)
    draw.shuffle(messages)
    for number, message in enumerate(messages):
        after = tuple(draw.sample(range(number), min(number, draw.choice((0, 0, 1, 2)))))
        messages[number] = message.model_copy(update={"after": after})
    plan = wfbp(profile, cluster).model_copy(
        update={"messages": tuple(messages), "credit": credit, "overlap_forward": True}
    )
    every = simulate(plan, profile, cluster, ranks="all")
    traces = [simulate(plan, profile, cluster)]
    traces += [
        every.only(lambda span, rank=rank: span.rank == rank) for rank in {0, cluster.num_ranks - 1}
    ]
    for trace in traces:
        for law in trace_laws.LAWS:
            law(plan, profile, cluster, trace)


@each("planner", examples("planner"), ids=_id)
def test_example_is_of_its_file(planner: Any) -> None:
    own = planner.func if isinstance(planner, partial) else planner
    assert load("planner", own.__name__) is own
    plan = planner(SOUND, measured(exact_cluster()))
    assert plan.planner == own.__name__
    if isinstance(planner, partial):
        assert planner.keywords.items() <= plan.settings.items(), "settings are not recorded"


@each("name", names("planner"))
def test_with_no_settings_it_is_an_example(name: str) -> None:
    planner = load("planner", name)
    assert planner in sys.modules[planner.__module__].EXAMPLES


@each("breaks, words", broken.REFUSED, ids=lambda p: getattr(p, "__name__", ""))
def test_broken_plans_are_refused_by_name(breaks: Callable[[Plan], Plan], words: str) -> None:
    sound = wfbp(SOUND, exact_cluster())
    check(sound, SOUND)
    with pytest.raises(InvalidSetting, match=words):
        check(breaks(sound), SOUND)
    with pytest.raises(InvalidSetting, match=words):
        simulate(breaks(sound), SOUND, exact_cluster())


def _fails(law: Callable[..., None], *args: object) -> bool:
    try:
        law(*args)
    except (AssertionError, InvalidSetting, ValueError, TypeError):
        return True
    return False


@each("law, planner", broken.PLANNER_BITES, ids=lambda p: p.__name__)
def test_planner_laws_bite(law: Callable[..., None], planner: Planner) -> None:
    assert not _fails(law, wfbp, SOUND, exact_cluster())
    assert _fails(law, planner, SOUND, exact_cluster())


@each("law, spoils", broken.TRACE_BITES, ids=lambda p: p.__name__)
def test_trace_laws_bite(law: Callable[..., None], spoils: Callable[[Trace], Trace]) -> None:
    cluster = exact_cluster(hop_s=0.0)  # or latency would hide a link that carries too much
    plan = wfbp(SOUND, cluster)
    *others, last = plan.messages
    last = last.model_copy(update={"after": (0,)})
    plan = plan.model_copy(update={"messages": (*others, last)})
    trace = simulate(plan, SOUND, cluster)
    assert not _fails(law, plan, SOUND, cluster, trace)
    assert _fails(law, plan, SOUND, cluster, spoils(trace))


def test_every_law_has_a_specimen() -> None:
    assert {law for law, _ in broken.PLANNER_BITES} == set(LAWS)
    assert {law for law, _ in broken.TRACE_BITES} == set(trace_laws.LAWS)
