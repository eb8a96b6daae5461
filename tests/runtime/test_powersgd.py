"""powersgd under training: two chained all-reduces a message, several messages at once, on gloo."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import gradwire as gw
from gradwire.errors import InvalidSetting, RanksDiffer
from gradwire.planning.data.cluster import CodecFit
from gradwire.planning.data.fit import LineFit
from gradwire.planning.data.plan import Chunk, ExchangeSetting, Plan, PlannedMessage
from tests.each import each
from tests.runtime.given import SMALL, keywords
from tests.runtime.models import Branches
from tests.runtime.plans import CLUSTER, profile_of_model
from tests.runtime.ranks import Ranks
from tests.runtime.test_checkpoint import through_a_file
from tests.runtime.training import Net, adamw, digest, train

POWER = gw.compress.powersgd(rank=2)
COSTS_S = {"encode": 0.25, "merge": 0.0, "decode": 0.125}
"""Of one computation each; a step has two encodes, one a factor, and merges nothing itself."""
SETTING = ExchangeSetting(compressor="powersgd", settings={"rank": 2}, error_feedback=True)


def with_threads_of_its_own(rank: int, world: int) -> str:
    torch.set_num_threads(1 + (rank == 1))
    gw.attach(Net(), gw.compress.onebit()).detach()  # which does not care
    with pytest.raises(RanksDiffer) as raised:
        gw.attach(Net(), POWER)
    torch.set_num_threads(1)
    return str(raised.value)


@pytest.mark.multi
def test_ranks_with_other_numbers_of_threads_are_refused(two: Ranks) -> None:
    """LAPACK's results depend on them, and each rank orthogonalises for itself."""
    assert all(
        "torch.get_num_threads() is 1 against 2" in text
        for text in two.run(with_threads_of_its_own)
    )


def fused_otherwise(rank: int, world: int) -> tuple[int, int]:
    """The state of many messages, resumed by one: what is warm is found by parameter."""
    net = Net()
    handle = gw.attach(net, POWER, options=SMALL)
    train(net, adamw(net.parameters()), rank, range(4))
    saved = through_a_file(handle.state_dict())
    before = len(handle._progress.messages)
    handle.detach()
    net.zero_grad()
    handle = gw.attach(net, POWER, options=gw.Options(bucket_cap_mb=1))
    handle.load_state_dict(saved)
    again = handle.state_dict()["params"]
    assert again.keys() == saved["params"].keys()
    for name, fields in saved["params"].items():
        assert fields.keys() == again[name].keys()
        assert all(torch.equal(again[name][path], fields[path]) for path in fields)
    weights = [name for name, p in net.named_parameters() if p.dim() > 1 and min(p.shape) > 5]
    assert all("inner.basis_T" in saved["params"][name] for name in weights)
    fresh = gw.exchange_for(POWER).init(gw.TensorSpec("", 37 * 41, shapes=((41, 37),)), world)
    kept = saved["params"]["middle.weight"]["inner.basis_T"]
    assert kept.shape == fresh.inner.basis_T[0].shape
    assert not torch.equal(kept, fresh.inner.basis_T[0])
    return before, len(handle._progress.messages)


@pytest.mark.multi
def test_state_is_named_by_parameter(two: Ranks) -> None:
    for before, after in two.run(fused_otherwise):
        assert before > after


def test_the_state_of_other_shapes_is_refused_before_any_is_written() -> None:
    """As many elements, so only the shape tells."""
    handle = gw.attach(nn.Linear(64, 64, bias=False), POWER)
    saved = handle.state_dict()
    handle.detach()
    handle = gw.attach(nn.Linear(128, 32, bias=False), POWER)
    before = digest(handle.state_dict()["params"]["weight"].values())
    said = r"basis_T of weight has the shape \[64, 2\] and here it has \[128, 2\]; load the state"
    with pytest.raises(InvalidSetting, match=said):
        handle.load_state_dict(saved)
    assert digest(handle.state_dict()["params"]["weight"].values()) == before
    handle.detach()


def never_used(rank: int, world: int) -> tuple[str, str, str]:
    model = Branches(lambda step: (False, True))
    handle = gw.attach(model, POWER, options=gw.Options(bucket_cap_mb=1))
    before = handle.state_dict()["params"]
    train(model, adamw(model.parameters()), rank, range(3))
    after = handle.state_dict()["params"]
    names = [name for name, fields in before.items() if fields and name.startswith("left")]
    assert names
    return (
        digest(t for name in names for t in before[name].values()),
        digest(t for name in names for t in after[name].values()),
        digest(model.parameters()),
    )


@pytest.mark.multi
def test_what_no_rank_uses_keeps_its_state(two: Ranks) -> None:
    (before, after, one), (_, _, other) = two.run(never_used)
    assert after == before
    assert one == other


def test_its_name_stands_for_it() -> None:
    for given in ("powersgd", gw.compress.powersgd()):
        handle = gw.attach(nn.Linear(9, 9), given)
        assert handle.exchange == gw.with_error_feedback(gw.compress.powersgd())
        handle.detach()


def plan_of(model: nn.Module, *, cut: bool) -> Plan:
    """Every layer by itself through powersgd; with ``cut`` the largest weight in two ranges."""
    messages = []
    for layer in profile_of_model(model).layers:
        for tensor in layer.tensors:
            edges = [0, tensor.numel]
            if cut and tensor.name == "middle.weight":
                edges.insert(1, 37 * 20)
            for start, stop in pairwise(edges):
                chunk = Chunk(tensor=tensor.name, start=start, stop=stop)
                messages.append(PlannedMessage(chunks=(chunk,), exchange="low rank"))
    return Plan(
        planner="by hand",
        model=type(model).__name__,
        messages=tuple(reversed(messages)),
        credit=3,
        exchanges={"low rank": SETTING},
    )


def by_plan(rank: int, world: int) -> tuple[str, str]:
    net = Net()
    handle = gw.attach(net, plan_of(net, cut=False))
    train(net, adamw(net.parameters()), rank, range(4))
    planned = digest(net.parameters())
    handle.detach()
    net = Net()
    gw.attach(net, POWER, **keywords(bucket_cap_mb=1e-6, compress_if=lambda name, param: True))
    train(net, adamw(net.parameters()), rank, range(4))
    return planned, digest(net.parameters())


@pytest.mark.multi
def test_a_plan_may_name_it(two: Ranks) -> None:
    (planned, attached), other = two.run(by_plan)
    assert planned == attached
    assert other == (planned, attached)


def test_a_plan_that_cuts_a_matrix_is_refused_by_all_who_read_it() -> None:
    net = Net()
    plan = plan_of(net, cut=True)
    said = r"message \d+ sends elements \d+:\d+ of 'middle.weight' .* powersgd, which takes whole"
    with pytest.raises(InvalidSetting, match=said):
        gw.attach(net, plan)
    with pytest.raises(InvalidSetting, match=said):
        gw.simulate(plan, profile_of_model(net), CLUSTER)


@each("ranks_shown", ["one", "all"])
def test_the_simulator_counts_all_that_happens_one_after_the_other(ranks_shown: Any) -> None:
    model = nn.Linear(50, 30, bias=False)
    profile = profile_of_model(nn.Sequential(model))
    numel = 1500
    chunk = Chunk(tensor="0.weight", start=0, stop=numel)
    plan = Plan(
        planner="by hand",
        model=profile.model,
        messages=(PlannedMessage(chunks=(chunk,), exchange="low rank"),),
        exchanges={"low rank": SETTING},
    )
    fit = CodecFit(**{name: LineFit(alpha_s=at, per_unit_s=0.0) for name, at in COSTS_S.items()})
    cluster = CLUSTER.model_copy(update={"codecs": {"powersgd": fit}})
    trace = gw.simulate(plan, profile, cluster, ranks=ranks_shown)
    own = [s for s in trace.spans if s.rank == 0]
    computed = [(s.name, s.duration_s) for s in own if s.lane == "compute"]
    names = ["encode", "encode", "decode"]
    assert [name for name, _ in computed] == names
    assert [seconds for _, seconds in computed] == pytest.approx([COSTS_S[name] for name in names])
    sent = [s for s in own if s.lane == "communication"]
    line = CLUSTER.line("all_reduce")
    expected_s = line.seconds(4 * 2 * 30) + line.seconds(4 * 2 * 50)
    assert sum(s.duration_s for s in sent) == pytest.approx(expected_s)
    assert sum(s.size_bytes for s in sent) == 4 * 2 * 30 + 4 * 2 * 50
    of_message = sorted((s.start_s, s.end_s) for s in own if s.lane in ("compute", "communication"))
    assert len(of_message) == 5
    assert all(end <= start + 1e-12 for (_, end), (start, _) in pairwise(of_message))
