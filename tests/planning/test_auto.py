"""auto: never slower than ddp, compressed where that gains beyond doubt and nowhere
else.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire.compress.uniform import uniform
from gradwire.exchange.by_name import exchange_for
from gradwire.exchange.planned import exchanges_of
from gradwire.planning import catalogue
from gradwire.planning.data.check import check
from gradwire.planning.data.cluster import Cluster, CodecFit, Host
from gradwire.planning.data.fit import LineFit
from gradwire.planning.data.plan import (
    DENSE,
    Chunk,
    ExchangeSetting,
    Plan,
    PlannedMessage,
)
from gradwire.planning.data.profile import Profile
from gradwire.planning.data.sparsity import SparsityProfile, TensorSparsity
from gradwire.planning.default_fusion import default_messages
from gradwire.planning.planner.auto import auto, survey
from gradwire.planning.planner.auto.judgement import (
    FIDELITIES,
    LOSS_OVER_DENSE,
    PricedPlan,
    Survey,
    admitted,
)
from gradwire.planning.planner.ddp import ddp
from gradwire.planning.planner.wfbp import wfbp
from gradwire.planning.planner_settings import Planner
from gradwire.planning.price import iteration_s
from gradwire_lab.laws.inputs import profile_of
from gradwire_lab.planning.explain import explain
from gradwire_lab.planning.index_sets import unit_sparsity
from tests.arch.source import ROOT
from tests.each import each
from tests.planning.profiles import clusters, profiles
from tests.strategies import bounded

MBIT = 125_000.0


def cluster_of(
    num_ranks: int = 4, rate: float = 100 * MBIT, per_unit_s: float = 4e-10
) -> Cluster:
    line = LineFit(alpha_s=2e-5, per_unit_s=per_unit_s)
    codec = CodecFit(encode=line, decode=line, merge=line)
    names = (*LOSS_OVER_DENSE, "onebit", "topk")
    codecs = dict.fromkeys(names, codec)
    return Cluster(num_ranks=num_ranks, rate_bytes_per_s=rate, codecs=codecs)


def test_the_safe_ones_are_those_that_trained_to_the_loss_of_dense() -> None:
    """Every row of the table of trainings at 1.01 of dense or less, but for what is
    lossless.
    """
    text = (Path(ROOT) / "docs" / "measured.md").read_text(encoding="utf-8")
    training = text.partition("| compressor | held-out loss | of dense |")[2].partition(
        "\n#"
    )[0]
    rows = re.findall(r"^\| (\w+) \| [\d.]+ \| ([\d.]+) \|", training, re.M)
    near = {name: float(loss) for name, loss in rows if float(loss) <= 1.01}
    assert len(rows) > 20
    assert near == {**LOSS_OVER_DENSE, "none": 1.0, "nonzero": 1.0}


def law_no_slower_than_ddp(
    planner: Planner, profile: Profile, cluster: Cluster
) -> None:
    """Under the model, but for rounding."""
    own_s, least_s = (
        iteration_s(one(profile, cluster), profile, cluster) for one in (planner, ddp)
    )
    assert own_s <= least_s * (1 + 1e-12)


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
    planner = partial(auto, fidelity=fidelity, overlap_forward=overlap_forward)
    law_no_slower_than_ddp(planner, profile, cluster)
    assert overlap_forward or not planner(profile, cluster).overlap_forward


def always_compresses(profile: Profile, cluster: Cluster) -> Plan:
    """What ``auto`` would be if it took the best compressor whatever dense takes."""
    found = survey(profile, cluster, "safe", True).compressed
    return found.plan


@each(
    "wrong, profile",
    [
        (wfbp, profile_of(*[([1000], 1e-4, 1e-4)] * 20)),
        (always_compresses, catalogue.load("lstm")),
    ],
)
def test_the_law_bites(wrong: Planner, profile: Profile) -> None:
    cluster = cluster_of(4, 1e6 * MBIT, 1e-7)
    law_no_slower_than_ddp(auto, profile, cluster)
    with pytest.raises(AssertionError):
        law_no_slower_than_ddp(wrong, profile, cluster)


def compressors(plan: Plan) -> set[str]:
    return {
        plan.exchanges[m.exchange].compressor
        for m in plan.messages
        if m.exchange != DENSE
    }


def uneven_cluster(num_ranks: int = 4) -> Cluster:
    """A link of 2 Gbit, and compressors that take the longer the less they send, as
    real ones.
    """
    seconds = {
        "cast16": 2e-10,
        "fp8": 1e-9,
        "int8": 1.2e-9,
        "uniform": 2.5e-9,
        "qsgd": 4e-9,
    }
    cluster, codecs = cluster_of(num_ranks, 2000 * MBIT), {}
    for name, per_unit_s in seconds.items():
        line = LineFit(alpha_s=2e-5, per_unit_s=per_unit_s)
        codecs[name] = CodecFit(encode=line, decode=line, merge=line)
    return cluster.model_copy(update={"codecs": codecs})


def made_up(
    name: str, seconds: float, num_messages: int, lane_s: float = 0.0
) -> PricedPlan:
    chunk = (Chunk(tensor="t", start=0, stop=1),)
    messages = (PlannedMessage(chunks=chunk, exchange=name),) * num_messages
    exchanges = {name: ExchangeSetting(compressor="uniform")}
    plan = Plan(planner=name, model="m", messages=messages, exchanges=exchanges)
    return PricedPlan(name, seconds, plan, lane_s)


ADMITS = admitted("safe", cluster_of())
DDP, OTHER = made_up("ddp", 1.0, 2), made_up("other", 0.96, 20)


@each(
    "lossy, chosen, rivals",
    [
        ([("a", 0.50, 13, 0.1), ("a", 0.52, 5, 0.2)], 1, [0]),
        ([("a", 0.50, 13, 0.1), ("a", 0.53, 5, 0.2)], 0, [1]),
        ([("a", 0.50, 5, 0.2), ("a", 0.52, 5, 0.1)], 1, [0]),
        ([("a", 0.50, 13, 0.1), ("a", 0.72, 5, 0.2), ("b", 0.70, 5, 0.1)], 0, [2, 1]),
        ([("a", 0.94, 13, 0.1), ("a", 0.96, 5, 0.2)], 0, [1]),
        ([("a", 0.96, 5, 0.1)], None, []),
        ([("a", 0.50, 5, 0.1)], 0, []),
        (
            [("a", 0.50, 5, 0.1)] + [(name, 0.6, 5, 0.1) for name in "bcdef"],
            0,
            [1, 2, 3, 4],
        ),
    ],
)
def test_of_plans_that_tie_the_plainest_is_taken_and_others_are_rivals(
    lossy: list[tuple[str, float, int, float]], chosen: int | None, rivals: list[int]
) -> None:
    """Within 5 %; a plan that does not pay is no choice, however plain it is."""
    plans = [made_up(*figures) for figures in lossy]
    found = Survey([DDP, OTHER], plans, ADMITS)
    assert found.dense is DDP
    assert found.chosen is (DDP if chosen is None else plans[chosen])
    assert list(map(id, found.rivals)) == [id(plans[place]) for place in rivals]


def test_what_attach_does_without_a_plan_is_among_the_plans() -> None:
    """Message for message, with the exchange that it makes of the compressor's name."""
    profile = catalogue.load("lstm")
    found = survey(profile, cluster_of(), "safe", True)
    (plan,) = [
        one.plan for one in found.lossy if one.name == "uniform by default fusion"
    ]
    check(plan, profile)
    named = [
        (t.name, torch.empty(t.shape, device="meta"))
        for la in profile.layers
        for t in la.tensors
    ]
    exchange = exchange_for(uniform())
    own = [
        ([name for name, _ in m], e == exchange)
        for m, e in default_messages(named, exchange, 4)
    ]
    assert own == [
        ([c.tensor for c in m.chunks], m.exchange != DENSE) for m in plan.messages
    ]
    assert exchanges_of(plan)["uniform"] == exchange


def test_vectors_stay_dense() -> None:
    profile, cluster = catalogue.load("vgg16"), uneven_cluster()
    plan = auto(profile, cluster)
    shapes = {t.name: t.shape for layer in profile.layers for t in layer.tensors}
    through = [c.tensor for m in plan.messages if m.exchange != DENSE for c in m.chunks]
    assert through
    assert min(len(shapes[name]) for name in through) > 1


@each("fidelity", FIDELITIES)
def test_a_fidelity_admits_no_more_than_it_says(fidelity: str) -> None:
    used = compressors(auto(catalogue.load("lstm"), cluster_of(), fidelity=fidelity))
    assert used <= set(admitted(fidelity, cluster_of()).exchanges)
    assert bool(used) is (fidelity != "exact")


def test_the_very_bits_are_coded_only_where_that_pays() -> None:
    """At 10 Mbit fewer bytes are worth an encode of 400 MB a second; at 100 Mbit they
    are not.
    """
    line = LineFit(alpha_s=2e-5, per_unit_s=1e-8)
    codecs = {"lossless": CodecFit(encode=line, decode=line, merge=line)}
    profile = catalogue.load("lstm")
    used = []
    for rate in (10 * MBIT, 10_000 * MBIT):
        cluster = Cluster(num_ranks=4, rate_bytes_per_s=rate, codecs=codecs)
        used.append(compressors(auto(profile, cluster, fidelity="exact")))
    assert used == [{"lossless"}, set()]
    assert "lossless" not in admitted("any", cluster).exchanges


def test_what_needs_error_feedback_gets_it() -> None:
    exchanges = admitted("any", cluster_of()).exchanges
    found = {name for name, one in exchanges.items() if one.error_feedback}
    assert found == {"fp8", "int8", "onebit", "topk"}


def test_what_is_not_measured_is_not_chosen() -> None:
    bare = Cluster(num_ranks=4, rate_bytes_per_s=100 * MBIT)
    assert compressors(auto(catalogue.load("lstm"), bare)) == set()
    assert admitted("safe", bare).not_measured == tuple(LOSS_OVER_DENSE)


def test_hosts_of_several_ranks_are_planned_for() -> None:
    """Those that add up within a host first; tensors may stay whole there."""
    host = Host(num_ranks=2, rate_bytes_per_s=1e10)
    cluster = cluster_of(num_ranks=8).model_copy(update={"host": host})
    profile = catalogue.load("lstm")
    plan = auto(profile, cluster)
    assert compressors(plan)
    law_no_slower_than_ddp(auto, profile, cluster)
    low_rank = cluster.model_copy(
        update={"codecs": {"powersgd": cluster.codecs["int8"]}}
    )
    for one in (low_rank, low_rank.model_copy(update={"host": None})):
        assert compressors(auto(profile, one, fidelity="any")) == {"powersgd"}
        law_no_slower_than_ddp(partial(auto, fidelity="any"), profile, one)


def test_rows_take_a_sparse_scheme_and_zeros_do_where_that_is_faster() -> None:
    cluster = cluster_of()
    for is_rows in (True, False):
        profile = _sparse(is_rows=is_rows)
        plan = auto(profile, cluster, fidelity="exact")
        check(plan, profile)
        (own,) = [m for m in plan.messages if m.exchange != DENSE]
        assert [c.tensor for c in own.chunks] == ["t0"]
        assert plan.exchanges[own.exchange].compressor == "nonzero"


def _sparse(*, is_rows: bool) -> Profile:
    """A model whose first tensor has 1000 rows, the same ten of them non-zero on each
    rank.
    """
    profile = profile_of(([4000], 0.1, 0.1), ([500_000], 0.1, 0.1))
    units = unit_sparsity([np.arange(10)] * 4, 4, 1000)
    blocks = unit_sparsity([np.arange(1)] * 4, 256, 16)
    one = TensorSparsity(name="t0", units=units, blocks=blocks, is_rows=is_rows)
    sparsity = SparsityProfile(source="made up", num_gradients=4, tensors=(one,))
    return profile.with_sparsity(sparsity)


@pytest.mark.slow
def test_it_says_at_which_rate_compression_no_longer_pays() -> None:
    profile, cluster = catalogue.load("lstm"), cluster_of(rate=1000 * MBIT)
    cluster = cluster.model_copy(update={"codecs": {"int8": cluster.codecs["int8"]}})
    fast = cluster.model_copy(update={"rate_bytes_per_s": 10_000_000 * MBIT})
    said = explain(auto(profile, fast), profile, fast)
    assert any(line.startswith("Compression does not pay: ") for line in said)
    said = explain(auto(profile, cluster), profile, cluster)
    assert 4 <= len(said) <= 10
    assert any(line.startswith("Compression pays: ") for line in said)
    rate, unit = next(line for line in said if "no longer pay" in line).split()[-2:]
    turning = float(rate) * {"Mbit/s": MBIT, "Gbit/s": 1000 * MBIT}[unit[:-1]]
    for factor, is_paying in ((0.8, True), (1.3, False)):
        at = cluster.scaled(rate_bytes_per_s=factor * turning)
        assert bool(compressors(auto(profile, at))) is is_paying


def test_it_names_what_is_not_measured_and_the_command() -> None:
    profile, bare = (
        catalogue.load("lstm"),
        Cluster(num_ranks=4, rate_bytes_per_s=100 * MBIT),
    )
    said = " ".join(explain(auto(profile, bare), profile, bare))
    assert (
        "no costs of them: cast16, fp8, int8, uniform, qsgd. gradwire profile --codecs"
        in said
    )
    assert "Fidelity 'safe' leaves no compressor" in said
    alone = Cluster(num_ranks=1, rate_bytes_per_s=100 * MBIT)
    assert "One rank sends nothing." in explain(auto(profile, alone), profile, alone)
