"""Rows of figures go to whatever takes them, every so many steps, and agree with stats()."""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import gradwire as gw
from gradwire.errors import InvalidSetting
from tests.runtime.given import SMALL
from tests.runtime.ranks import Ranks
from tests.runtime.training import TOPK, Net, adamw, ddp, train

Row = tuple[int, dict[str, float]]


class Writer:
    """What TensorBoard's SummaryWriter has of it."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> None:
        assert global_step is not None
        self.rows.append((tag, scalar_value, global_step))


class Run:
    """What a wandb run has of it, which is called too where it is a module."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool = True) -> None:
        assert step is None
        self.rows.append(data)


class Logger:
    """What one of Lightning's loggers has of it."""

    def __init__(self) -> None:
        self.rows: list[tuple[dict[str, float], int | None]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((metrics, step))


class Gauges:
    """What OpenTelemetry's Meter has of it, or a Gauge of Prometheus: a gauge of each name."""

    def __init__(self, verb: str) -> None:
        self.values: dict[str, float] = {}
        self.num_made = 0
        setattr(self, verb, self._gauge)

    def _gauge(self, name: str) -> Any:
        self.num_made += 1
        return SimpleNamespace(set=lambda value: self.values.update({name: value}))


def logged(rank: int, world: int) -> tuple[list[Row], dict[str, Any], float]:
    net, rows = Net(), []
    handle = gw.attach(net, TOPK, options=SMALL)
    handle.log_to(lambda step, row: rows.append((step, row)), every=3)
    train(net, adamw(net.parameters()), rank, range(6))
    found = handle.stats()
    grads = [m.norms for m in handle._progress.messages if gw.residuals(m.state)]
    norm = math.hypot(*(norm for norms in grads for norm in norms))
    handle.log_to(None)
    train(net, adamw(net.parameters()), rank, range(6, 9))
    handle.detach()
    return rows, found, norm


@pytest.mark.multi
def test_rows_add_up_to_the_stats(two: Ranks) -> None:
    for rows, found, norm in two.run(logged):
        assert [step for step, _ in rows] == [3, 6]
        (_, early), (_, late) = rows
        for key in ("wire_bytes", "compute_s", "communication_s", "wait_s"):
            mean = (early[f"gradwire/{key}_per_step"] + late[f"gradwire/{key}_per_step"]) / 2
            assert mean == pytest.approx(found[f"{key}_per_step"])
        for kind in ("asked", "local", "actual"):
            assert 0 < late[f"gradwire/density_{kind}"] < 1
        assert late["gradwire/residual_norm"] == pytest.approx(found["residual_norm"])
        assert late["gradwire/gradient_norm"] == pytest.approx(norm)
        assert late["gradwire/step_s"] > 0


@pytest.mark.multi
def test_what_is_left_to_ddp_has_rows_too(two: Ranks) -> None:
    for row in two.run(of_ddp):
        assert row["gradwire/wire_bytes_per_step"] > 0
        assert "gradwire/residual_norm" not in row
        assert "gradwire/density_local" not in row


def of_ddp(rank: int, world: int) -> dict[str, float]:
    model, rows = ddp(Net(), broadcast_buffers=False), []
    handle = gw.attach(model, "none")
    handle.log_to(lambda step, row: rows.append(row), every=2)
    train(model, adamw(model.parameters()), rank, range(2))
    handle.detach()
    return rows[0]  # type: ignore[no-any-return]


def alone() -> tuple[nn.Module, gw.Handle]:
    model = nn.Linear(4, 4)
    return model, gw.attach(model, gw.compress.topk(density=0.5))


def step(model: nn.Module) -> None:
    model(torch.ones(2, 4)).sum().backward()


def test_all_that_take_rows_get_the_same_names() -> None:
    (model, handle), writer, run = alone(), Writer(), Run()
    handle.log_to(writer, every=1)
    step(model)
    handle.log_to(run, every=1)
    step(model)
    logger, meter, gauge = Logger(), Gauges("create_gauge"), Gauges("labels")
    for to in logger, meter, gauge:
        handle.log_to(to, every=1)
        for _ in range(2):
            step(model)
    handle.detach()
    names = {name for name, _, _ in writer.rows}
    assert {at for _, _, at in writer.rows} == {1}
    assert {*run.rows[0]} == {*names, "gradwire/step"}
    assert run.rows[0]["gradwire/step"] == 2
    assert [({*row}, at) for row, at in logger.rows] == [(names, 3), (names, 4)]
    assert {*meter.values} == {*gauge.values} == names
    assert meter.num_made == len(names)


def test_what_takes_no_rows_is_refused() -> None:
    _, handle = alone()
    for to in (logging.getLogger("x"), 7, "runs", lambda step: None):
        with pytest.raises(
            InvalidSetting, match=r"must be a SummaryWriter, a wandb run, .* or a fun"
        ):
            handle.log_to(to)
    with pytest.raises(InvalidSetting, match="every must be"):
        handle.log_to(Run(), every=0)
    handle.detach()


def test_a_log_that_fails_ends_and_training_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    model, handle = alone()

    def full(step: int, row: dict[str, float]) -> None:
        raise OSError("no space left on device")

    handle.log_to(full, every=1)
    for _ in range(3):
        step(model)
        model.zero_grad()
    assert handle.step == 3
    handle.detach()
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "logging ends, because step 1 could not be logged: OSError('no space left on device')"
    ]
