"""Training with a GradScaler is training without one, bit for bit: nothing kept has a scale.

Scales are powers of two, by which no rounding changes; they grow every second step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp import GradScaler

import gradwire as gw
from gradwire.contract import Exchange
from gradwire.contract.state import leaves
from gradwire.errors import InvalidSetting, RanksDiffer
from gradwire.exchange.by_name import exchange_for
from tests.each import each
from tests.runtime import plans
from tests.runtime.given import SMALL, keywords
from tests.runtime.ranks import Ranks
from tests.runtime.test_checkpoint import through_a_file
from tests.runtime.training import DENSE, ONEBIT, SMALL_MB, Net, adamw, ddp, digest, loss_of, named

pytestmark = [pytest.mark.multi, pytest.mark.slow]

codecs, together = gw.compress, gw.collective
NUM_STEPS = 12
EXCHANGES: tuple[Exchange, ...] = (
    DENSE,
    ONEBIT,
    exchange_for(codecs.topk(density=0.05)),
    gw.with_clipping(codecs.topk(density=0.1), 0.05),
    gw.deep_gradient_compression(warmup_steps=6, density=0.05, clip_norm=0.05, sample_share=1.0),
    exchange_for(codecs.tbq(threshold=0.01)),
    exchange_for(codecs.hardthreshold(threshold=0.01)),
    gw.pair(codecs.hardthreshold(threshold=0.01), together.allgather_sparse()),
    exchange_for(codecs.powersgd(rank=2)),
    exchange_for(codecs.deft(density=0.1)),
    gw.with_error_feedback(gw.pair(codecs.cast16(), together.casync_ps())),
)


def scaler_of(scale: float) -> GradScaler:
    """One whose scale doubles every second step; of scale 1 it is none."""
    return GradScaler("cpu", init_scale=scale, growth_interval=2, enabled=scale != 1.0)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: GradScaler,
    rank: int,
    steps: Iterable[int],
    *,
    handle: Any = None,
    accumulate: bool = False,
) -> None:
    """A user's loop; with ``accumulate`` two batches make a step."""
    for step in steps:
        optimizer.zero_grad()
        if accumulate:
            with handle.no_sync():
                scaler.scale(loss_of(model, rank, 100 + step)).backward()
        scaler.scale(loss_of(model, rank, step)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()


def trained(
    rank: int, exchange: Any, scale: float, *, wrapped: bool = False, accumulate: bool = False
) -> tuple[str, str, float]:
    """Bits of parameters and of residuals after training, and the last scale."""
    net, scaler = Net(), scaler_of(scale)
    model = ddp(net, broadcast_buffers=False) if wrapped else net
    optimizer, is_plan = adamw(net.parameters()), isinstance(exchange, gw.Plan)
    settings = {"optimizer": optimizer} if is_plan else {"bucket_cap_mb": SMALL_MB}
    given = scaler if scale != 1.0 else None
    handle = gw.attach(model, exchange, scaler=given, **keywords(**settings))
    train(model, optimizer, scaler, rank, range(NUM_STEPS), handle=handle, accumulate=accumulate)
    kept = digest(handle.residuals().values())
    handle.detach()
    return digest(net), kept, scaler.get_scale()


def with_and_without(
    rank: int, world: int, exchange: Any, settings: dict[str, bool]
) -> list[tuple[str, str, float]]:
    return [trained(rank, exchange, scale, **settings) for scale in (1.0, 2.0**10, 2.0**-4)]


@pytest.mark.parametrize("wrapped", [False, True], ids=["module", "ddp"])
@pytest.mark.parametrize("exchange", EXCHANGES, ids=named)
def test_a_scale_that_grows_changes_no_bit(exchange: Exchange, wrapped: bool, two: Ranks) -> None:
    for plain, large, small in two.run(with_and_without, exchange, {"wrapped": wrapped}):
        assert plain[:2] == large[:2] == small[:2]
        assert (large[2], small[2]) == (2.0**16, 4.0)


@pytest.mark.parametrize("wrapped", [False, True], ids=["module", "ddp"])
def test_gradients_may_accumulate(wrapped: bool, two: Ranks) -> None:
    settings = {"wrapped": wrapped, "accumulate": True}
    for plain, large, _ in two.run(with_and_without, EXCHANGES[2], settings):
        assert plain[:2] == large[:2]


TOPK_SETTING = plans.ExchangeSetting(
    compressor="topk",
    settings={"density": 0.1},
    collective="allgather_sparse",
    error_feedback=True,
)
OVERLAPPING = plans.through(plans.drawn(2), "lossy", TOPK_SETTING).model_copy(
    update={"overlap_forward": True}
)


def test_a_plan_may_overlap(two: Ranks) -> None:
    for plain, large, _ in two.run(with_and_without, OVERLAPPING, {}):
        assert plain[:2] == large[:2]


def of_other_scales(rank: int, world: int) -> list[str]:
    """Each rank has a scale of its own, as where a scaler was loaded on one rank alone."""
    return [trained(rank, EXCHANGES[4], scale)[0] for scale in (1.0, 2.0 ** (4 + 6 * rank))]


def test_ranks_may_have_different_scales(two: Ranks) -> None:
    bits = {text for both in two.run(of_other_scales) for text in both}
    assert len(bits) == 1


def resumed(rank: int, world: int, wrapped: bool) -> tuple[str, str, str]:
    """Saved at one scale; loaded at another, and without a scaler."""

    def fresh(scale: float) -> tuple[Net, Any, Any, Any, GradScaler]:
        net, scaler = Net(), scaler_of(scale)
        model = ddp(net, broadcast_buffers=False) if wrapped else net
        given = scaler if scale != 1.0 else None
        handle = gw.attach(model, EXCHANGES[4], options=SMALL, scaler=given)
        return net, model, handle, adamw(net.parameters()), scaler

    net, model, handle, optimizer, scaler = fresh(2.0**10)
    train(model, optimizer, scaler, rank, range(6))
    states = [net.state_dict(), optimizer.state_dict(), handle.state_dict()]
    states = through_a_file(states)
    train(model, optimizer, scaler, rank, range(6, NUM_STEPS))
    found = [digest(net)]
    for scale in (2.0**3, 1.0):
        net, model, handle, optimizer, scaler = fresh(scale)
        for part, state in zip((net, optimizer, handle), through_a_file(states), strict=True):
            part.load_state_dict(state)
        train(model, optimizer, scaler, rank, range(6, NUM_STEPS))
        found.append(digest(net))
    return found[0], found[1], found[2]


@pytest.mark.parametrize("wrapped", [False, True], ids=["module", "ddp"])
def test_what_was_saved_at_one_scale_is_loaded_at_any(wrapped: bool, two: Ranks) -> None:
    for whole, other, without in two.run(resumed, wrapped):
        assert whole == other == without


def small_values(rank: int, world: int) -> list[float]:
    """The mean of gradients too small for float16, as a scaled loss gives it and without scale."""
    found = []
    for scale in (1.0, 2.0**20):
        net, scaler = nn.Linear(4, 4, bias=False), scaler_of(scale)
        given = scaler if scale != 1.0 else None
        handle = gw.attach(net, codecs.cast16(dtype=torch.float16), scaler=given)
        scaler.scale((net(torch.ones(1, 4)) * 1e-9).sum()).backward()
        assert net.weight.grad is not None
        found.append(float(net.weight.grad[0, 0]) / scale)
        handle.detach()
    return found


def test_a_scale_helps_values_of_16_bits_on_the_wire(two: Ranks) -> None:
    for without, scaled in two.run(small_values):
        assert without == 0.0
        assert scaled == pytest.approx(1e-9, rel=1e-3)


def unused_and_skipped(rank: int, world: int, skipped: int) -> tuple[list[bool], str]:
    """A parameter that one rank uses, one that none does, and a step that the scaler skips."""
    torch.manual_seed(0)
    net = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("all", "one", "none")})
    scaler, optimizer = scaler_of(2.0**8), torch.optim.SGD(net.parameters(), lr=0.1)
    handle, found = gw.attach(net, EXCHANGES[2], scaler=scaler), []
    for step in range(5):
        if skipped < 0 and step == -skipped:
            continue
        optimizer.zero_grad()
        draw = torch.Generator().manual_seed(10 * step + rank)
        out = net["all"](torch.randn(2, 8, generator=draw))
        if rank == step % 2:
            out = net["one"](out)
        loss = out.square().sum() * (torch.inf if step == skipped and rank == 1 else 1.0)
        scaler.scale(loss).backward()
        assert net["none"].weight.grad is None
        grads = [p.grad for p in net.parameters() if p.grad is not None]
        found.append(all(bool(grad.isfinite().all()) for grad in grads))
        scaler.step(optimizer)
        scaler.update()
    bits = digest([*net.parameters(), *handle.residuals().values()])
    handle.detach()
    return found, bits


def test_parameters_that_some_rank_lacks_and_steps_that_all_skip(two: Ranks) -> None:
    """A skipped step is as if it had never been, which is how the other run has it."""
    skipping, without = two.run(unused_and_skipped, 2), two.run(unused_and_skipped, -2)
    assert [found for found, _ in skipping] == [[True, True, False, True, True]] * 2
    assert [bits for _, bits in skipping] == [bits for _, bits in without]


SELECTIVE = exchange_for(codecs.selective(density=0.1))
UNDONE = (
    *EXCHANGES[1:],
    SELECTIVE,
    gw.with_error_feedback(gw.pair(codecs.topk(density=0.1), together.casync_ps())),
)


def bits_after_each(
    rank: int, world: int, exchange: Any, way: str, steps: list[int], undoes: bool
) -> list[str]:
    """Trains by ``steps``, of which 2 has an infinite loss on one rank."""
    net, scaler = Net(), scaler_of(2.0**10)
    model = ddp(net, broadcast_buffers=False) if way == "ddp" else net
    optimizer = adamw(net.parameters())
    settings: dict[str, Any] = {"bucket_cap_mb": SMALL_MB}
    if way == "overlap":
        settings = {"optimizer": optimizer}
    elif way == "shrink":
        settings["on_failure"] = "shrink"
    handle = gw.attach(model, exchange, scaler=scaler, **keywords(**settings))
    if not undoes:
        handle.synchroniser.undoes_skipped = False
    bits = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model.train(step != 2), rank, step)  # the batch norm counts no skipped step
        scaler.scale(loss * (torch.inf if (step, rank) == (2, world - 1) else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        handle.synchronize()
        kept = [t for one in handle._progress.messages for _, t in leaves(one.state)]
        bits.append(digest([*net.parameters(), *kept]))
    handle.detach()
    return bits


def as_if_never(
    rank: int, world: int, exchange: Any, way: str, undoes: bool = True
) -> tuple[bool, bool]:
    """Whether a skipped step leaves the bits from before it, and training goes on without it."""
    bits = bits_after_each(rank, world, exchange, way, [0, 1, 2, 3, 4], undoes)
    without = bits_after_each(rank, world, exchange, way, [0, 1, 3, 4], undoes)
    return bits[2] == bits[1], bits[-1] == without[-1]


@pytest.mark.parametrize("way", ["module", "ddp", "shrink"])
@pytest.mark.parametrize("exchange", UNDONE, ids=named)
def test_a_skipped_step_leaves_no_trace(exchange: Exchange, way: str, two: Ranks) -> None:
    assert two.run(as_if_never, exchange, way) == [(True, True)] * 2


def test_a_skipped_step_leaves_no_trace_where_a_plan_overlaps(two: Ranks) -> None:
    assert two.run(as_if_never, OVERLAPPING, "overlap") == [(True, True)] * 2


@pytest.mark.parametrize("exchange", [EXCHANGES[2], EXCHANGES[4]], ids=named)
def test_the_law_rejects_a_step_that_is_not_undone(exchange: Exchange, two: Ranks) -> None:
    assert two.run(as_if_never, exchange, "module", False) == [(False, False)] * 2


def test_what_is_no_scaler_is_refused() -> None:
    with pytest.raises(InvalidSetting, match=r"scaler must be a torch.amp.GradScaler or None, got"):
        gw.attach(nn.Linear(2, 2), "topk", scaler=2.0**16)  # type: ignore[arg-type]


def test_float16_gradients_are_not_made_smaller() -> None:
    net = nn.Linear(4, 4, bias=False).half()
    with pytest.raises(InvalidSetting, match=r"weight has gradients of float16.*keep parameters"):
        gw.attach(net, "topk", scaler=GradScaler("cpu"))
    gw.attach(net, codecs.none(), scaler=GradScaler("cpu")).detach()
    gw.attach(net, "topk").detach()


def given_on_one(rank: int, world: int) -> str:
    with pytest.raises(RanksDiffer) as raised:
        gw.attach(Net(), "topk", scaler=GradScaler("cpu") if rank else None)
    return str(raised.value)


def test_a_scaler_on_some_ranks_alone_is_refused_on_all(two: Ranks) -> None:
    for text in two.run(given_on_one):
        assert "setting scaler is None against 'given'" in text


def attached_with_another_scale(rank: int, world: int, exchange: Any) -> str:
    scaler = GradScaler("cpu", init_scale=(2.0, 8.0)[rank])
    with pytest.raises(RanksDiffer) as caught:
        gw.attach(nn.Linear(4, 3), exchange, scaler=scaler)
    return str(caught.value)


@each("exchange", [gw.compress.topk(density=1.0), "none"])
def test_other_scales_are_refused_where_gradients_travel_scaled(two: Ranks, exchange: Any) -> None:
    for text in two.run(attached_with_another_scale, exchange):
        assert "scale of the scaler is 2.0 against 8.0" in text
