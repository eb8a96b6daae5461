"""auto: never slower than ddp, compressed where that gains beyond doubt and nowhere else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire import catalogue
from gradwire.data.cluster import Cluster, CodecFit
from gradwire.data.fit import LineFit
from gradwire.data.plan import DENSE, Plan
from gradwire.data.profile import Profile
from gradwire.errors import InvalidSetting
from gradwire.planner.auto import MARGIN, auto
from gradwire.planner.ddp import ddp
from gradwire.planning.fidelity import FIDELITIES, LOSS_OVER_DENSE, admitted
from gradwire.planning.price import iteration_s
from tests.arch.source import ROOT
from tests.planner.profiles import clusters, profiles
from tests.strategies import bounded

MBIT = 125_000.0


def cluster_of(num_ranks: int = 4, rate: float = 100 * MBIT, per_unit_s: float = 4e-10) -> Cluster:
    line = LineFit(alpha_s=2e-5, per_unit_s=per_unit_s)
    codec = CodecFit(encode=line, decode=line, merge=line)
    names = (*LOSS_OVER_DENSE, "onebit", "topk")
    codecs = dict.fromkeys(names, codec)
    return Cluster(num_ranks=num_ranks, rate_bytes_per_s=rate, codecs=codecs)


def test_the_safe_ones_are_those_that_trained_to_the_loss_of_dense() -> None:
    """Every row of the table of trainings at 1.01 of dense or less, but for what is lossless."""
    text = (Path(ROOT) / "docs" / "measured.md").read_text(encoding="utf-8")
    training = text[text.index("## Training") : text.index("## Exchanges")]
    rows = re.findall(r"^\| (\w+) \| [\d.]+ \| ([\d.]+) \|", training, re.M)
    near = {name: float(loss) for name, loss in rows if float(loss) <= 1.01}
    assert len(rows) > 20
    assert near == {**LOSS_OVER_DENSE, "none": 1.0, "nonzero": 1.0}


@bounded(25)
@given(
    profile=profiles(largest=200_000),
    cluster=clusters.filter(lambda one: one.num_ranks < 9),
    fidelity=st.sampled_from(FIDELITIES),
    overlap_forward=st.booleans(),
)
def test_it_is_never_slower_than_ddp(
    profile: Profile, cluster: Cluster, fidelity: str, overlap_forward: bool
) -> None:
    plan = auto(profile, cluster, fidelity=fidelity, overlap_forward=overlap_forward)
    least_s = iteration_s(ddp(profile, cluster), profile, cluster)
    assert iteration_s(plan, profile, cluster) <= least_s * (1 + 1e-12)
    assert overlap_forward or not plan.overlap_forward


def compressors(plan: Plan) -> set[str]:
    return {plan.exchanges[m.exchange].compressor for m in plan.messages if m.exchange != DENSE}


def test_it_compresses_on_a_slow_link_and_not_on_a_fast_one() -> None:
    profile = catalogue.load("resnet50")
    slow, fast = (auto(profile, cluster_of(rate=rate)) for rate in (100 * MBIT, 1e6 * MBIT))
    assert compressors(slow) in ({"qsgd"}, {"uniform"})
    assert compressors(fast) == set()


def test_vectors_stay_dense() -> None:
    profile = catalogue.load("resnet50")
    plan = auto(profile, cluster_of())
    shapes = {t.name: t.shape for layer in profile.layers for t in layer.tensors}
    through = [c.tensor for m in plan.messages if m.exchange != DENSE for c in m.chunks]
    assert through
    assert min(len(shapes[name]) for name in through) > 1


@pytest.mark.parametrize("fidelity", FIDELITIES)
def test_a_fidelity_admits_no_more_than_it_says(fidelity: str) -> None:
    used = compressors(auto(catalogue.load("resnet50"), cluster_of(), fidelity=fidelity))
    assert used <= set(admitted(fidelity, cluster_of()).exchanges)
    assert bool(used) is (fidelity != "exact")


def test_what_needs_error_feedback_gets_it() -> None:
    exchanges = admitted("any", cluster_of()).exchanges
    found = {name for name, one in exchanges.items() if one.error_feedback}
    assert found == {"fp8", "int8", "onebit", "topk"}


def test_what_is_not_measured_is_not_chosen() -> None:
    bare = Cluster(num_ranks=4, rate_bytes_per_s=100 * MBIT)
    assert compressors(auto(catalogue.load("resnet50"), bare)) == set()
    assert admitted("safe", bare).not_measured == tuple(LOSS_OVER_DENSE)


def test_a_gain_within_the_margin_is_none() -> None:
    """A codec just fast enough for a gain, and one just too slow for the margin."""
    profile = catalogue.load("vgg16")
    seen = set()
    for per_unit_s in (1e-9, 2e-9, 3e-9, 4e-9, 6e-9, 8e-9):
        cluster = cluster_of(rate=10_000 * MBIT, per_unit_s=per_unit_s)
        plan = auto(profile, cluster)
        dense = auto(profile, cluster, fidelity="exact")
        if compressors(plan):
            gain = 1 - iteration_s(plan, profile, cluster) / iteration_s(dense, profile, cluster)
            assert gain >= MARGIN
        seen.add(bool(compressors(plan)))
    assert seen == {True, False}


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"fidelity": "best"}, "'exact', 'half'"), ({"overlap_forward": 1}, "True or False")],
)
def test_settings_that_there_are_not(settings: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidSetting, match=words):
        auto(catalogue.load("lstm"), cluster_of(), **settings)  # type: ignore[arg-type]
