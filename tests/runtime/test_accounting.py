"""Densities of steps: what ranks asked for, selected and got, in stats, traces and reports."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire.contract import Member
from gradwire.contract.trace.chrome import to_chrome
from gradwire.contract.trace.density import StepDensity
from gradwire.contract.trace.span import Span
from gradwire.errors import InvalidSetting
from gradwire.exchange.local import drive
from gradwire.runtime.step.figures import Recorder
from gradwire_bench.report import density as report
from tests.each import each
from tests.laws.variable import above
from tests.runtime.given import keywords
from tests.runtime.ranks import Ranks
from tests.runtime.training import SMALL_MB, Net, ddp, named, train

pytestmark = pytest.mark.multi
NUM_STEPS, KEPT_STEPS = 5, 3
MATRICES = sum(p.numel() for p in Net().parameters() if p.dim() > 1)

codecs, pair = gw.compress, gw.pair
TOPK = gw.exchange_for(codecs.topk(density=0.1))


class Observed:
    """What one rank saw of a short run."""

    def __init__(self, handle: gw.Handle, net: Net) -> None:
        self.stats, self.trace = handle.stats(), handle.trace()
        means = [p.grad for p in net.parameters() if p.dim() > 1]
        self.num_in_mean = sum(int(mean.count_nonzero()) for mean in means if mean is not None)


def observed(rank: int, world: int, exchange: gw.Exchange, wrapped: bool = False) -> Observed:
    net = Net()
    model = ddp(net) if wrapped else net
    handle = gw.attach(model, exchange, **keywords(bucket_cap_mb=SMALL_MB, trace_steps=KEPT_STEPS))
    train(model, torch.optim.SGD(net.parameters(), lr=0.1), rank, range(NUM_STEPS))
    found = Observed(handle, net)
    handle.detach()
    return found


@each("wrapped", [False, True], ids=["module", "ddp"])
def test_the_mean_of_topk_grows_denser_than_what_a_rank_selects(wrapped: bool, four: Ranks) -> None:
    found = four.run(observed, TOPK, wrapped)
    for rank, own in enumerate(found):
        steps = own.trace.densities
        assert [d.step for d in steps] == own.trace.steps() == [2, 3, 4]
        assert all(d.rank == rank and d.numel == MATRICES for d in steps)
        assert all(d.asked_density == pytest.approx(0.1) for d in steps)
        assert all(d.local == pytest.approx(0.1, abs=0.002) for d in steps)
        assert all(0.15 < d.actual < 4 * d.local for d in steps)
        assert steps[-1].arrived == own.num_in_mean
        for one in steps:
            spans = own.trace.only(step=one.step).spans
            assert one.sent_bytes == sum(span.size_bytes for span in spans)
        assert own.stats["density_asked"] == pytest.approx(0.1)
        assert own.stats["density_local"] == steps[0].local
        assert 0.15 < own.stats["density_actual"] < 0.4
    for one, other in pairwise(found):
        assert one.stats["density_actual"] == other.stats["density_actual"]
        columns = [[d.arrived for d in own.trace.densities] for own in (one, other)]
        assert columns[0] == columns[1]


@each(
    "exchange",
    [
        gw.exchange_for(codecs.randomk(density=0.1)),
        gw.exchange_for(codecs.cltk(density=0.1)),
        gw.with_momentum_correction(codecs.deft(density=0.1)),
    ],
    ids=named,
)
def test_with_one_support_for_all_it_does_not(exchange: gw.Exchange, four: Ranks) -> None:
    for own in four.run(observed, exchange):
        assert own.stats["density_asked"] == pytest.approx(0.1)
        assert own.stats["density_actual"] == pytest.approx(0.1, rel=0.15)
        assert own.trace.densities[-1].arrived == own.num_in_mean


def test_what_was_not_asked_for_is_none(two: Ranks) -> None:
    threshold = gw.with_error_feedback(
        pair(above(threshold=0.05), gw.collective.allgather_sparse())
    )
    for own in two.run(observed, threshold):
        assert own.stats["density_asked"] is None
        assert 0 < own.stats["density_local"] < own.stats["density_actual"] < 1
        assert own.trace.densities[-1].asked is None
    for own in two.run(observed, gw.exchange_for(codecs.none())):
        names = ("density_asked", "density_local", "density_actual")
        assert [own.stats[name] for name in names] == [None] * 3
        assert own.trace.densities == ()


def test_a_trace_and_a_report_show_what_stats_add_up(two: Ranks) -> None:
    traces = [own.trace for own in two.run(observed, TOPK)]
    merged = gw.Trace.merged(traces)
    assert gw.Trace.from_json(merged.to_json()) == merged
    assert [d.step for d in merged.only(step=3).densities] == [3, 3]
    counters = [e for e in to_chrome(merged)["traceEvents"] if e["ph"] == "C"]
    assert len(counters) == 2 * len(merged.densities)
    shown = [e["args"] for e in counters if e["name"] == "density" and e["pid"] == 1]
    assert [args["actual"] for args in shown] == [d.actual for d in traces[1].densities]
    rows = report.rows(merged)
    assert [row["name"] for row in rows] == ["step 2", "step 3", "step 4"]
    last = [trace.densities[-1] for trace in traces]
    assert rows[-1]["wire_bytes"] == sum(d.sent_bytes for d in last) / 2
    assert rows[-1]["density_actual"] == last[0].actual == last[1].actual
    assert report.summary(last) == f"density {last[0].actual:.3g} (0.1 asked)"


def test_a_trace_has_the_densities_of_its_own_steps_alone() -> None:
    """Steps that select nothing, as those in which all rows travel, push older ones out too."""
    recorder = Recorder(2)
    selected = StepDensity(0, 0, 0.5, 800, numel=100, asked=10.0, selected=10, arrived=15)
    for step, density in enumerate((selected, None, None)):
        recorder.add(Span(0, "compute", "encode", step, step + 0.5, step=step))
        recorder.end_step(recorder.costs(step), step + 0.5, density)
        trace = recorder.trace()
        assert {d.step for d in trace.densities} <= set(trace.steps())
    assert trace.steps() == [1, 2]
    assert recorder.stats()["density_actual"] == 0.15


def test_no_more_elements_are_counted_than_there_are() -> None:
    """The last unit of 7 has 2 elements."""
    codec, members = codecs.nonzero(width=7), [Member(rank, 2) for rank in range(2)]
    exchange = pair(codec, gw.collective.allgather_sparse())
    state = exchange.init(gw.TensorSpec("", 9), 2)
    drive([exchange.synchronise(me, state, torch.ones(9), torch.empty(9)) for me in members])
    for me in members:
        assert me.selection is not None
        assert me.selection[1:] == (9, 9)


def test_the_mean_residual_norm_is_equation_2(two: Ranks) -> None:
    stats: list[dict[str, Any]] = [own.stats for own in two.run(observed, TOPK)]
    norms = [one["residual_norm"] for one in stats]
    assert norms[0] != norms[1]
    assert gw.mean_residual_norm(stats[::-1]) == pytest.approx(sum(norms) / 2)
    for given in ([], stats[:1], [*stats, stats[0]], [stats[0], stats[0]]):
        with pytest.raises(InvalidSetting, match="stats of all"):
            gw.mean_residual_norm(given)
