"""What a user writes, for type checkers: nothing here runs.

``make check`` has mypy look at it. ``assert_type`` fails where a public name has no
type.
"""

from __future__ import annotations

from typing import assert_type

import torch
from torch import Tensor, nn

import gradwire as gw


def train(model: nn.Module, batches: list[Tensor]) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = gw.attach(model, gw.compress.uniform(bitwidth=4), optimizer=optimizer)
    assert_type(handle, gw.Handle)
    for batch in batches:
        optimizer.zero_grad()
        loss: Tensor = model(batch).square().mean()
        loss.backward()  # type: ignore[no-untyped-call,unused-ignore]  # torch's own
        optimizer.step()
    state = handle.state_dict()
    handle.load_state_dict(state)
    print(handle.stats()["wire_bytes_per_step"], handle.step)
    handle.detach()
    return handle.residuals()


def train_locally(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    handle = gw.local_steps(model, optimizer, "uniform", every=8)
    handle.end_period()
    anchors = handle.anchors()
    assert_type(anchors, dict[str, Tensor])


def plan_of(profile: gw.Profile, cluster: gw.Cluster) -> gw.Plan:
    plan = gw.plan("usbyte", profile, cluster)
    assert_type(gw.simulate(plan, profile, cluster), gw.Trace)
    return plan


def compose() -> gw.Exchange:
    exchange = gw.pair(gw.compress.topk(density=0.01), gw.collective.allgather_sparse())
    return gw.with_error_feedback(exchange)


def use_the_lab(model: nn.Module) -> gw.Exchange:
    """Names of gradwire-lab have types where it is not installed, too."""
    adapted = gw.adapt(gw.compress.topk(density=0.01), error=0.1)
    assert_type(adapted, gw.Exchange)
    assert_type(gw.measure_sparsity(model, train), gw.SparsityProfile)
    return gw.with_measured_scheme(adapted)


def refused() -> str:
    try:
        gw.compress.uniform(bitwidth=9)
    except gw.InvalidSetting as error:
        return str(error)
    except (gw.RankFailed, gw.RanksDiffer, gw.RanksLost) as error:
        return str(error)
    return gw.__version__
