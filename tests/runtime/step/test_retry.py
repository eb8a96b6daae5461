"""A backward pass that raised is repeated on all ranks, or all raise an error that says
why not.
"""

from __future__ import annotations

import re
import sys
import time
from contextlib import suppress
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import gradwire as gw
from gradwire.errors import ExitCode
from gradwire.runtime.liveness import blame
from gradwire.runtime.liveness.membership import Membership
from gradwire.runtime.step.retry import repeat_together
from gradwire.runtime.transport import wire
from tests.each import each
from tests.runtime.given import SMALL, keywords
from tests.runtime.ranks import Ranks
from tests.runtime.training import DENSE, SMALL_MB, TOPK, Net, digest, loss_of, momentum

pytestmark = [pytest.mark.multi, pytest.mark.timeout(120)]
STEPS, BROKEN = 5, (1, 3)
"""The steps, and the ones in which memory runs out."""


def run_out(net: Net, layer: str, rank: int, step: int) -> None:
    """A backward pass that ends at a layer, as if memory had run out there."""

    def fail(grad: Tensor) -> None:
        raise torch.OutOfMemoryError("no memory")

    hook = net.get_submodule(layer).weight.register_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        loss_of(net, rank, step + 100).backward()
    hook.remove()


def trained(
    rank: int, world: int, exchange: Any, shrinks: bool, breaks: bool
) -> tuple[str, str]:
    net = Net()
    settings: dict[str, Any] = {"on_failure": "shrink"} if shrinks else {}
    handle = gw.attach(
        net, exchange, **keywords(bucket_cap_mb=SMALL_MB, check_every=1, **settings)
    )
    optimizer = momentum(net.parameters())
    for step in range(STEPS):
        if breaks and step in BROKEN:
            # Each rank has launched another number of messages by then.
            run_out(net, ("first", "middle")[rank], rank, step)
            time.sleep(0.2 * rank)
        optimizer.zero_grad()
        loss_of(net, rank, step).backward()
        optimizer.step()
    owed = handle.residuals()
    handle.detach()
    return digest(net), digest([owed[name] for name in sorted(owed)])


@each("exchange, shrinks", [(DENSE, False), (TOPK, True)])
def test_a_run_with_retries_has_the_bits_of_one_without(
    two: Ranks, exchange: Any, shrinks: bool
) -> None:
    """Nothing of the passes that raised is in a mean or a residual."""
    broken, whole = (
        two.run(trained, exchange, shrinks, breaks) for breaks in (True, False)
    )
    assert broken == whole
    assert len({bits for bits, _ in broken}) == 1


def late(rank: int, world: int) -> int:
    """Rank 1, which is looked for meanwhile, has launched all but its last message."""
    net = Net()
    handle = gw.attach(
        net, DENSE, options=SMALL, failure=gw.FailurePolicy(check_every=1)
    )
    run_out(net, ("middle", "first")[rank], rank, 0)
    net.zero_grad()
    time.sleep(1.5 * rank)
    loss_of(net, rank, 0).backward()
    handle.detach()
    return handle.step


def test_a_rank_that_lacks_one_message_is_waited_for(two: Ranks) -> None:
    """Ranks compare parameters beside messages, and that is not taken for the last
    message.
    """
    assert two.run(late) == [1, 1]


def alone(rank: int, world: int, how: str) -> tuple[str, tuple[int, ...], str]:
    net = Net()
    exchange = {"residuals": TOPK, "draws": "uniform"}.get(how, DENSE)
    handle = gw.attach(net, exchange, options=SMALL)
    if rank == 1 or how != "one rank":
        run_out(net, "first", rank, 0)
        net.zero_grad(set_to_none=how != "gradients are kept")
    with pytest.raises(gw.RankFailed) as raised:
        loss_of(net, rank, 0).backward()
    with suppress(gw.RankFailed):
        handle.detach()
    # a script ends by the cause's code
    assert sys.excepthook.__module__ == blame.__name__
    return type(raised.value).__name__, raised.value.ranks, str(raised.value)


@each(
    "how, said",
    [
        (
            "one rank",
            "rank 0 of 2 has all its gradients of this step, and rank 1 repeats",
        ),
        (
            "residuals",
            r"zero_grad\(set_to_none=True\), where the exchange keeps no state \(resid",
        ),
        (
            "draws",
            r"where the exchange keeps no state "
            r"\(residuals, momenta, counters of draws\)",
        ),
        ("gradients are kept", r"by all ranks, after zero_grad\(set_to_none=True\)"),
    ],
)
def test_where_not_all_can_repeat_it_all_say_so(
    doomed_two: Ranks, how: str, said: str
) -> None:
    found = doomed_two.run(alone, how)
    for kind, ranks, text in found:
        assert kind == "LoopMistake"
        assert len(ranks) == 1
        assert re.search(said, text), text
        assert text.endswith(
            "change the training loop: a restart alone ends in the same error"
        )


def accumulated(rank: int, world: int, breaks: bool) -> list[str]:
    """Bits of a dense run, and of one with residuals that may go on without lost
    ranks.
    """
    found = []
    cases: list[tuple[Any, dict[str, Any]]] = [
        (DENSE, {}),
        (TOPK, {"on_failure": "shrink"}),
    ]
    for exchange, settings in cases:
        net = Net()
        handle = gw.attach(
            net, exchange, **keywords(bucket_cap_mb=SMALL_MB, **settings)
        )
        optimizer = momentum(net.parameters())
        for step in range(3):
            for is_retry in (False, True) if breaks and step == 1 else (True,):
                optimizer.zero_grad()
                with handle.no_sync():
                    loss_of(net, rank, step + 50).backward()
                if not is_retry:
                    run_out(net, ("first", "middle")[rank], rank, step)
            loss_of(net, rank, step).backward()
            optimizer.step()
        handle.detach()
        found.append(digest(net))
    return found


def test_a_step_that_accumulates_is_repeated_from_its_first_pass_on(two: Ranks) -> None:
    broken, whole = (two.run(accumulated, breaks) for breaks in (True, False))
    assert broken == whole


def test_a_lost_store_is_no_mistake_of_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def clone() -> Any:
        raise dist.DistNetworkError("connection refused")

    monkeypatch.setattr(wire, "_given", [SimpleNamespace(clone=clone)])

    def fails(*given: Any) -> gw.RankFailed:
        code = ExitCode.MISTAKE if ExitCode.MISTAKE in given else ExitCode.UNAVAILABLE
        return gw.RankFailed(f"{given}", exit_code=code)

    engine: Any = SimpleNamespace(
        rank=1,
        who=Membership("0-1", 1, 2),
        timeout=timedelta(seconds=60),
        num_calls=1,
        begin_call=lambda: None,
        lose=fails,
        unreachable=fails,
    )
    with pytest.raises(gw.RankFailed, match="connection refused") as caught:
        repeat_together(engine, 3, 2)
    assert caught.value.exit_code == ExitCode.UNAVAILABLE


def outrun(rank: int, world: int) -> str:
    """Rank 0 raises with all gradients launched, and rank 1 before its first gradient.

    Who waited for the time-out would be ended by the test's own limit.
    """
    net = Net()
    timeout = timedelta(minutes=10)
    gw.attach(net, DENSE, options=SMALL, failure=gw.FailurePolicy(timeout=timeout))
    if rank == 0:
        hook = next(net.parameters()).register_post_accumulate_grad_hook(
            lambda param: 1 / 0
        )
        with pytest.raises(ZeroDivisionError):
            loss_of(net, rank, 0).backward()
        hook.remove()
        time.sleep(1)
    text = ""
    for step in range(2):
        net.zero_grad()
        try:
            loss_of(net, rank, step).backward()
        except gw.LoopMistake as error:
            text = str(error)
            break
    return text


def test_a_rank_that_is_a_step_ahead_of_a_retry_ends_it_at_once(two: Ranks) -> None:
    for text in two.run(outrun):
        assert (
            "rank 1 of 2 has all its gradients of this step, and rank 0 repeats" in text
        )
