"""Training with a GradScaler is training without one, bit for bit: nothing kept has a
scale.

So a checkpoint may be loaded at any. Scales are powers of two, by which no rounding
changes; they grow every second step. A step that the scaler skips leaves no trace.
"""

from __future__ import annotations

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
from tests.each import few
from tests.runtime import plans
from tests.runtime.given import keywords
from tests.runtime.models import Branches
from tests.runtime.ranks import Ranks
from tests.runtime.training import (
    DENSE,
    ONEBIT,
    SMALL_MB,
    Net,
    adamw,
    ddp,
    digest,
    loss_of,
    named,
)

pytestmark = pytest.mark.multi

codecs, together = gw.compress, gw.collective
STEPS, SKIPPED = [0, 1, 2, 3, 4, 5], 3
"""The loss of one rank is infinite in the step that is skipped."""
TOPK = exchange_for(codecs.topk(density=0.05))
DGC = gw.deep_gradient_compression(
    warmup_steps=4, density=0.05, clip_norm=0.05, sample_share=1.0
)
EXCHANGES: tuple[Exchange, ...] = (
    *(DENSE, ONEBIT, TOPK, DGC),
    gw.with_clipping(codecs.topk(density=0.1), 0.05),
    exchange_for(codecs.tbq(threshold=0.01)),
    exchange_for(codecs.hardthreshold(threshold=0.01)),
    gw.pair(codecs.hardthreshold(threshold=0.01), together.allgather_sparse()),
    exchange_for(codecs.powersgd(rank=2)),
    exchange_for(codecs.deft(density=0.1)),
    exchange_for(codecs.selective(density=0.1)),
    gw.with_error_feedback(gw.pair(codecs.cast16(), together.casync_ps())),
    gw.with_error_feedback(gw.pair(codecs.topk(density=0.1), together.casync_ps())),
)
TOPK_SETTING = plans.ExchangeSetting(
    compressor="topk",
    settings={"density": 0.1},
    collective="allgather_sparse",
    error_feedback=True,
)
OVERLAPPING = plans.through(plans.drawn(2), "lossy", TOPK_SETTING).model_copy(
    update={"overlap_forward": True}
)
WAYS = ("module", "ddp", "shrink", "accumulate")


def scaler_of(scale: float) -> GradScaler:
    """One whose scale doubles every second step; of scale 1 it is none."""
    return GradScaler("cpu", init_scale=scale, growth_interval=2, enabled=scale != 1.0)


def bits_after_each(
    rank: int,
    exchange: Any,
    way: str,
    scale: float,
    steps: list[int],
    undoes: bool = True,
) -> list[str]:
    """Bits of parameters and of all that is kept after each of the steps."""
    scaler = scaler_of(scale)
    net: Any = (
        Branches(lambda step: (rank == step % 2, False)) if way == "unused" else Net()
    )
    model = ddp(net, broadcast_buffers=False) if way == "ddp" else net
    optimizer = adamw(net.parameters())
    settings: dict[str, Any] = {"bucket_cap_mb": SMALL_MB}
    if way == "overlap":
        settings = {"optimizer": optimizer}
    elif way == "shrink":
        settings["on_failure"] = "shrink"
    given = scaler if scale != 1.0 else None
    handle = gw.attach(model, exchange, scaler=given, **keywords(**settings))
    if not undoes:
        handle._synchroniser.undoes_skipped = False
    bits = []
    for step in steps:
        optimizer.zero_grad()
        model.train(step != SKIPPED)  # the batch norm counts no skipped step
        net._step = step
        if way == "accumulate":
            with handle.no_sync():
                scaler.scale(loss_of(model, rank, 100 + step)).backward()
            net._step = step
        loss = loss_of(model, rank, step) * (
            torch.inf if (step, rank) == (SKIPPED, 1) else 1.0
        )
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        handle.synchronize()
        kept = [t for one in handle._progress.messages for _, t in leaves(one.state)]
        bits.append(digest([*net.parameters(), *kept]))
    if scale != 1.0:
        assert scaler.get_scale() == 2 * scale, (
            "it grows, is halved by a skipped step, and grows"
        )
    handle.detach()
    return bits


def as_if_never(
    rank: int, world: int, exchange: Any, way: str, undoes: bool = True
) -> tuple[bool, bool]:
    """Whether a skipped step leaves the bits from before it, and training goes on as
    without it and without a scaler.
    """
    # Where gradients travel without a scale, each rank may have a scale of its own.
    scale = 2.0 ** (4 + 6 * rank) if exchange == DGC else 2.0**10
    bits = bits_after_each(rank, exchange, way, scale, STEPS, undoes)
    without = [step for step in STEPS if step != SKIPPED]
    plain = bits_after_each(rank, exchange, way, 1.0, without)
    return bits[SKIPPED] == bits[SKIPPED - 1], bits[-1] == plain[-1]


@few(
    "exchange, way",
    [(DENSE, "ddp"), (DGC, "module"), (TOPK, "unused"), (OVERLAPPING, "overlap")],
    fast=2,
    ids=lambda one: one if isinstance(one, str) else type(one).__name__,
)
def test_a_scaler_and_a_skipped_step_change_no_bit(
    exchange: Any, way: str, two: Ranks
) -> None:
    assert two.run(as_if_never, exchange, way) == [(True, True)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("exchange", EXCHANGES, ids=named)
def test_a_scaler_changes_no_bit_of_any_exchange(
    exchange: Exchange, two: Ranks
) -> None:
    """The ways by turns."""
    way = WAYS[EXCHANGES.index(exchange) % 4]
    assert two.run(as_if_never, exchange, way) == [(True, True)] * 2


def test_the_law_rejects_a_step_that_is_not_undone(two: Ranks) -> None:
    assert two.run(as_if_never, TOPK, "module", False) == [(False, False)] * 2


def small_values(rank: int, world: int) -> list[float]:
    """The mean of gradients too small for float16, as a scaled loss gives it and
    without scale.
    """
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


def test_what_cannot_be_scaled_is_refused() -> None:
    with pytest.raises(
        InvalidSetting, match=r"scaler must be a torch.amp.GradScaler or None, got"
    ):
        gw.attach(nn.Linear(2, 2), "topk", scaler=2.0**16)  # type: ignore[arg-type]
    net = nn.Linear(4, 4, bias=False).half()
    with pytest.raises(
        InvalidSetting, match=r"weight has gradients of float16.*keep parameters"
    ):
        gw.attach(net, "topk", scaler=GradScaler("cpu"))
    gw.attach(net, codecs.none(), scaler=GradScaler("cpu")).detach()
    gw.attach(net, "topk").detach()


def attached_with_another_scale(rank: int, world: int) -> list[str]:
    """Other scales where gradients travel scaled; then a scaler on one rank alone."""
    texts = []
    for exchange in (codecs.topk(density=1.0), "none"):
        scaler = GradScaler("cpu", init_scale=(2.0, 8.0)[rank])
        with pytest.raises(RanksDiffer) as raised:
            gw.attach(nn.Linear(4, 3), exchange, scaler=scaler)
        texts.append(str(raised.value))
    with pytest.raises(RanksDiffer) as raised:
        gw.attach(Net(), "topk", scaler=GradScaler("cpu") if rank else None)
    return [*texts, str(raised.value)]


def test_other_scales_and_a_scaler_on_some_ranks_alone_are_refused(two: Ranks) -> None:
    for compressed, dense, alone in two.run(attached_with_another_scale):
        assert "scale of the scaler is 2.0 against 8.0" in compressed
        assert "scale of the scaler is 2.0 against 8.0" in dense
        assert "setting scaler is None against 'given'" in alone
