"""Memory of a rank beside weights and gradients: what is kept by kind, and how much at
most.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

import gradwire as gw
from gradwire.contract.registry import load
from gradwire.contract.thread_scratch import thread_scratch, thread_scratch_bytes
from gradwire.runtime.step.figures import KINDS
from gradwire_lab.algorithm_page import bytes_an_element
from tests.each import each
from tests.runtime.given import keywords
from tests.runtime.ranks import Ranks

MOST = {
    "topk": 4.7,
    "onebit": 5.8,
    "threelc": 6.5,
    "selective": 13.5,
    "topk + omnireduce": 26.5,
    "topk + zen": 5.0,
    "nonzero + zen": 38.0,
    "deep gradient compression, warmed up": 26.0,
}
"""The most bytes an element that each may keep: a little above what it does."""


def exchange_of(name: str) -> gw.Exchange:
    if name.startswith("deep"):
        return gw.deep_gradient_compression(
            warmup_steps=4 * ("warmed" in name), clip_norm=1.0
        )
    codec, _, collective = name.partition(" + ")
    made = load("compress", codec)()
    if not collective:
        return gw.exchange_for(made)
    pair = gw.pair(made, load("collective", collective)())
    return gw.with_error_feedback(pair) if made.traits.error_feedback else pair


@each("name", MOST)
def test_an_exchange_keeps_no_more_than_is_stated(name: str) -> None:
    found = bytes_an_element(exchange_of(name))
    assert sum(found.values()) <= MOST[name], found
    assert found["momentum"] == (4 if "deep" in name else 0)
    assert found["residuals"] == (0 if "nonzero" in name else 4)


def trained(rank: int, world: int, num_layers: int) -> dict[str, Any]:
    model = nn.Sequential(*(nn.Linear(100, 100, bias=False) for _ in range(num_layers)))
    before = thread_scratch_bytes()  # of threads that others of this process have left
    handle = gw.attach(
        model, exchange_of("topk + omnireduce"), **keywords(bucket_cap_mb=0.001)
    )
    for step in range(3):
        torch.manual_seed(rank + step)
        model(torch.randn(4, 100)).square().sum().backward()
        model.zero_grad()
    found: dict[str, Any] = handle.stats()
    handle.detach()
    found["after"] = thread_scratch_bytes() - before
    return found


@pytest.mark.multi
def test_messages_share_what_serves_within_one_computation(two: Ranks) -> None:
    few, many = (two.run(trained, num_layers) for num_layers in (1, 6))
    for one, other in zip(few, many, strict=True):
        assert (one["messages"], other["messages"]) == (1, 6)
        memory = other["memory"]
        assert memory["residuals"] == 6 * one["memory"]["residuals"] == 6 * 4 * 10_000
        assert memory["thread_scratch"] < 1.2 * one["memory"]["thread_scratch"]
        total = sum(memory[kind] for kind in KINDS)
        assert memory["bytes_a_parameter"] == pytest.approx(total / 60_000)
        # the lane's thread has ended
        assert other["after"] < memory["thread_scratch"] / 4


def test_thread_scratch_is_a_threads_own_and_only_grows() -> None:
    here = thread_scratch("test", 100, torch.float32, torch.device("cpu")).fill_(1.0)
    assert (
        thread_scratch("test", 50, torch.float32, here.device).data_ptr()
        == here.data_ptr()
    )
    assert (
        thread_scratch("test", 50, torch.int32, here.device).data_ptr()
        != here.data_ptr()
    )
    before, there = thread_scratch_bytes(), []

    def look() -> None:
        there.append(thread_scratch("test", 100, torch.float32, here.device).fill_(2.0))
        there.append(thread_scratch_bytes())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert there[1] == before + 400
    assert bool((here == 1).all())
