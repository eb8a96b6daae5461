"""Densities of steps: what ranks asked for, selected and got, in stats, traces and
reports.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import gradwire as gw
from gradwire.contract import Exchange, Member, Result, State
from gradwire.contract.trace.span import Span, StepDensity
from gradwire.contract.verbs import AllReduce, Steps
from gradwire.errors import InvalidSetting
from gradwire.exchange.local import drive
from gradwire.runtime.step.figures import Recorder, outgrown
from gradwire.runtime.step.layout import ParamRange
from gradwire.runtime.step.messages import Message
from gradwire_bench.report.chrome import to_chrome
from gradwire_bench.report.timeline import density_summary
from tests.laws.variable import above
from tests.runtime.given import keywords
from tests.runtime.ranks import Ranks
from tests.runtime.training import SMALL_MB, Net, ddp, train

pytestmark = pytest.mark.multi
NUM_STEPS, KEPT_STEPS = 3, 2
MATRICES = sum(p.numel() for p in Net().parameters() if p.dim() > 1)

codecs, pair = gw.compress, gw.pair
TOPK, CLTK = (gw.exchange_for(make(density=0.1)) for make in (codecs.topk, codecs.cltk))
UNASKED = gw.with_error_feedback(
    pair(above(threshold=0.05), gw.collective.allgather_sparse())
)
NONE = gw.exchange_for(codecs.none())


class Observed:
    """What one rank saw of a short run."""

    def __init__(self, handle: gw.Handle, net: Net) -> None:
        self.stats, self.trace = handle.stats(), handle.trace()
        means = [p.grad for p in net.parameters() if p.dim() > 1]
        self.num_in_mean = sum(
            int(mean.count_nonzero()) for mean in means if mean is not None
        )


def observed(
    rank: int, world: int, exchanges: list[tuple[gw.Exchange, bool]]
) -> list[Observed]:
    """Short runs, each of a module or of one under DDP."""
    found = []
    for exchange, wrapped in exchanges:
        net = Net()
        model = ddp(net) if wrapped else net
        given = keywords(bucket_cap_mb=SMALL_MB, trace_steps=KEPT_STEPS)
        handle = gw.attach(model, exchange, **given)
        train(model, torch.optim.SGD(net.parameters(), lr=0.1), rank, range(NUM_STEPS))
        found.append(Observed(handle, net))
        handle.detach()
    return found


def test_stats_traces_and_reports_show_densities(two: Ranks) -> None:
    """The mean of topk grows denser than what a rank selects, and that of cltk does
    not.
    """
    exchanges = [
        (TOPK, False),
        (TOPK, True),
        (CLTK, False),
        (UNASKED, False),
        (NONE, False),
    ]
    runs = two.run(observed, exchanges)
    for rank, (topk, under_ddp, cltk, unasked, none) in enumerate(runs):
        for own in (topk, under_ddp):
            check_topk(rank, own)
        assert cltk.stats["density_asked"] == pytest.approx(0.1)
        assert cltk.stats["density_actual"] == pytest.approx(0.1, rel=0.15)
        assert cltk.trace.densities[-1].arrived == cltk.num_in_mean
        assert unasked.stats["density_asked"] is None
        assert 0 < unasked.stats["density_local"] < unasked.stats["density_actual"] < 1
        assert unasked.trace.densities[-1].asked is None
        names = ("density_asked", "density_local", "density_actual")
        assert [none.stats[name] for name in names] == [None] * 3
        assert none.trace.densities == ()
    topk = [own for own, *_ in runs]
    assert topk[0].stats["density_actual"] == topk[1].stats["density_actual"]
    arrived = [[d.arrived for d in own.trace.densities] for own in topk]
    assert arrived[0] == arrived[1]
    check_report([own.trace for own in topk])
    check_norms([own.stats for own in topk])


def check_topk(rank: int, own: Observed) -> None:
    steps = own.trace.densities
    assert [d.step for d in steps] == own.trace.steps() == [1, 2]
    assert all(d.rank == rank and d.numel == MATRICES for d in steps)
    assert all(d.asked_density == pytest.approx(0.1) for d in steps)
    assert all(d.local == pytest.approx(0.1, abs=0.002) for d in steps)
    assert all(1.1 * d.local < d.actual <= 2 * d.local for d in steps)
    assert steps[-1].arrived == own.num_in_mean
    assert own.stats["density_local"] == steps[0].local
    for one in steps:
        spans = own.trace.only(step=one.step).spans
        assert one.sent_bytes == sum(span.size_bytes for span in spans)


def check_report(traces: list[gw.Trace]) -> None:
    merged = gw.Trace.merged(traces)
    assert gw.Trace.from_json(merged.to_json()) == merged
    assert [d.step for d in merged.only(step=2).densities] == [2, 2]
    counters = [e for e in to_chrome(merged)["traceEvents"] if e["ph"] == "C"]
    assert len(counters) == 2 * len(merged.densities)
    shown = [e["args"] for e in counters if e["name"] == "density" and e["pid"] == 1]
    assert [args["actual"] for args in shown] == [d.actual for d in traces[1].densities]
    last = [trace.densities[-1] for trace in traces]
    assert last[0].actual == last[1].actual
    assert density_summary(last) == f"density {last[0].actual:.3g} (0.1 asked)"


def check_norms(stats: list[dict[str, Any]]) -> None:
    """The mean residual norm is equation 2."""
    norms = [one["residual_norm"] for one in stats]
    assert norms[0] != norms[1]
    assert gw.mean_residual_norm(stats[::-1]) == pytest.approx(sum(norms) / 2)
    for given in ([], stats[:1], [*stats, stats[0]], [stats[0], stats[0]]):
        with pytest.raises(InvalidSetting, match="stats of all"):
            gw.mean_residual_norm(given)


def test_a_trace_has_the_densities_of_its_own_steps_alone() -> None:
    """Steps that select nothing, as those in which all rows travel, push older ones out
    too.
    """
    recorder = Recorder(2)
    selected = StepDensity(
        0, 0, 0.5, 800, numel=100, asked=10.0, selected=10, arrived=15
    )
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
    drive(
        [
            exchange.synchronise(me, state, torch.ones(9), torch.empty(9))
            for me in members
        ]
    )
    for me in members:
        assert me.selection is not None
        assert me.selection[1:] == (9, 9)


# ---- Residuals that only grow are told of: what is kept there never gets through -----


WORLD = 2


@dataclass(frozen=True)
class keeps_all(Exchange):
    """Delivers nothing of the second half of a message, and all of the first."""

    def init(self, spec: gw.TensorSpec, world: int) -> State:
        return None

    def run(self, rank: int, world: int, state: State, grad_N: Tensor) -> Steps[Result]:
        sent_N = grad_N.clone()
        sent_N[len(sent_N) // 2 :] = 0
        mean_N = sent_N / world
        yield AllReduce(mean_N)
        return mean_N, sent_N, state


def messages() -> list[Message]:
    """One rank's each: two tensors of 8 elements."""
    parts = [ParamRange.whole(name, torch.zeros(8)) for name in ("first", "second")]
    exchange = gw.with_error_feedback(keeps_all())
    return [Message(0, parts, exchange, rank, WORLD) for rank in range(WORLD)]


def stepped(own: list[Message], num_steps: int) -> None:
    for step in range(num_steps):
        draw = torch.Generator().manual_seed(step)
        grads = [{n: 1 + torch.rand(8, generator=draw) for n in m.names} for m in own]
        for message in own:
            message.notes_norms = step == num_steps - 1
        drive(
            [message.steps(g) for message, g in zip(own, grads, strict=True)], seed=step
        )


def test_what_grows_for_ever_is_found_and_what_arrives_is_not() -> None:
    own = messages()
    stepped(own, 64)
    assert outgrown(own) == []  # 64 gradients: a sparsifier of 1 % owes as many
    stepped(own, 64)
    [(name, factor)] = outgrown(own[:1])
    assert name == "second"
    assert 100 < factor < 150


def test_what_sends_few_elements_may_owe_more() -> None:
    own = messages()
    stepped(own, 128)
    for message in own:
        message.member.selection = gw.contract.Selection(0.01 * 16, 1, 1)
    assert outgrown(own) == []


def test_a_gradient_of_zeros_or_of_nan_says_nothing() -> None:
    own = messages()
    stepped(own, 128)
    for norm in (0.0, float("nan")):
        own[0].norms = [norm, norm]
        assert outgrown(own[:1]) == []


def warnings_of(rank: int, world: int, exchange: Exchange, num_steps: int) -> list[str]:
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gradwire").addHandler(handler)
    net = torch.nn.Linear(13, 5)
    handle = gw.attach(net, exchange)
    train(net, torch.optim.SGD(net.parameters(), lr=0.0), rank, num_steps * [0])
    logging.getLogger("gradwire").removeHandler(handler)
    handle.detach()
    return heard


@pytest.mark.slow
@pytest.mark.multi
def test_a_run_is_warned_once_and_a_sound_one_never(two: Ranks) -> None:
    for found in two.run(warnings_of, gw.with_error_feedback(keeps_all()), 256):
        [warning] = found
        assert "times the norm of its gradient" in warning
        assert "after 128 steps" in warning
    assert two.run(warnings_of, gw.exchange_for(gw.compress.onebit()), 128) == [[]] * 2
