"""A damaged payload is refused before anything reads it, and its sender is named on all ranks."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire.contract import Exchange
from gradwire.contract.verbs import AllGather, AllToAll, Send
from gradwire.errors import ExitCode, InvalidSetting
from gradwire_bench.faults.striking import flip_on_the_way
from tests.each import each
from tests.runtime.given import SMALL, keywords
from tests.runtime.ranks import Ranks
from tests.runtime.training import TOPK, Net, digest, momentum, train

RING = gw.pair(gw.compress.none(), gw.collective.ring())
PUSHED = gw.with_error_feedback(
    gw.pair(gw.compress.onebit(block=64), gw.collective.casync_ps(room_bytes=0))
)
EXCHANGES = {"send": RING, "all-gather": TOPK, "all-to-all": PUSHED}


def trained(rank: int, world: int, exchange: Exchange, checksums: bool) -> tuple[str, float]:
    net = Net()
    handle = gw.attach(net, exchange, options=SMALL, failure=gw.FailurePolicy(checksums=checksums))
    train(net, momentum(net.parameters()), rank, range(2))
    wire_bytes = handle.stats()["wire_bytes_per_step"]
    handle.detach()
    return digest(net), wire_bytes


def learnt(rank: int, world: int) -> tuple[str, float]:
    net = Net()
    optimizer = momentum(net.parameters())
    handle = gw.local_steps(net, optimizer, TOPK, every=1, **keywords(checksums=True))
    train(net, optimizer, rank, range(2))
    handle.detach()
    return digest(net), handle.stats()["wire_bytes_per_step"]


@pytest.mark.multi
def test_checksums_change_no_bit_and_are_counted(two: Ranks) -> None:
    for exchange in EXCHANGES.values():
        (plain, own_bytes), _ = two.run(trained, exchange, False)
        sealed = two.run(trained, exchange, True)
        assert [bits for bits, _ in sealed] == [plain, plain]
        assert all(0 < more - own_bytes < 400 for _, more in sealed)
        assert (sealed[0][1] - own_bytes) % 8 == 0
    assert len(set(two.run(learnt))) == 1


def struck(rank: int, world: int, name: str) -> Any:
    """Rank 1's payload of step 1 is damaged on its way to another process."""
    net = Net()
    limit = timedelta(seconds=10)
    handle = gw.attach(net, EXCHANGES[name], **keywords(checksums=True, timeout=limit))
    first, step = handle.synchroniser.messages[0], -1
    original: Any = first.text

    def text(*args: Any, **named: Any) -> Any:
        nonlocal step
        step += 1
        inner, value, is_over = original(*args, **named), None, rank != 1 or step != 1
        while True:
            try:
                asked = inner.send(value)
            except StopIteration as stop:
                return stop.value
            for verb in asked if isinstance(asked, tuple) else (asked,):
                if isinstance(verb, Send | AllGather | AllToAll) and not is_over:
                    flip_on_the_way(verb, 0.7)
                    is_over = True
            value = yield asked

    vars(first)["text"] = text
    try:
        train(net, momentum(net.parameters()), rank, range(4))
    except gw.RankFailed as failure:
        with suppress(gw.RankFailed):
            handle.detach()
        return failure.ranks, failure.step, failure.exit_code, str(failure)
    return "nobody noticed"


@pytest.mark.multi
@each("name", [*EXCHANGES])
def test_the_sender_of_a_damaged_payload_is_named(name: str, doomed_two: Ranks) -> None:
    for ranks, step, code, text in doomed_two.run(struck, name):
        assert (ranks, step, code) == ((1,), 1, ExitCode.BITS)
        assert "rank 1 sent arrived damaged at rank" in text


def test_other_words_than_true_and_false_are_refused() -> None:
    with pytest.raises(InvalidSetting, match="checksums"):
        gw.attach(torch.nn.Linear(2, 2), "none", **keywords(checksums="yes"))  # type: ignore[arg-type]
