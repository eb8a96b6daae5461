"""Parameters that differ between ranks are noticed, and the odd rank is named on all of
them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import gradwire as gw
from gradwire.contract import Exchange
from gradwire.contract.verbs import AllGather, AllToAll, Send
from gradwire.errors import ExitCode, InvalidSetting
from gradwire.runtime.step import integrity
from gradwire.runtime.step.integrity import (
    digest_on_device,
    digests_of,
    odd_ranks,
    refuse_other_bits,
)
from gradwire.runtime.step.report import Check
from gradwire_bench.faults.striking import flip, flip_on_the_way
from tests.each import each
from tests.runtime.given import SMALL, keywords
from tests.runtime.plans import CLUSTER, profile_of_model
from tests.runtime.ranks import Ranks
from tests.runtime.training import (
    DENSE,
    SMALL_MB,
    TOPK,
    Net,
    ddp,
    digest,
    loss_of,
    momentum,
    train,
)

DDP, OVERLAP, LOCAL = "ddp", "overlap", "local steps"
PLAN = gw.planner.usbyte(profile_of_model(Net()), CLUSTER)
assert PLAN.overlap_forward


def on_device(tensor: Tensor) -> int:
    return int(digest_on_device(tensor))


@each("digest_of", [lambda tensor: digests_of([tensor])[0], on_device])
@each("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_digest_is_of_the_bits_wherever_they_lie(
    dtype: torch.dtype, digest_of: Callable[[Tensor], int]
) -> None:
    values = torch.randn(13).to(dtype)
    within = torch.zeros(16, dtype=dtype)[1:14].copy_(values)
    assert digest_of(within) == digest_of(values)
    for place in range(16 * values.element_size() // 2):
        flip(within, place / (16 * values.element_size() // 2))
        assert digest_of(within) != digest_of(values), place
        flip(within, place / (16 * values.element_size() // 2))


@each("digest_of", [lambda tensor: digests_of([tensor])[0], on_device])
def test_a_digest_tells_what_a_sum_and_a_xor_do_not(
    digest_of: Callable[[Tensor], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(integrity, "_CHUNK_BYTES", 4096)
    values = torch.randn(3000)
    want, swapped, twice = digest_of(values), values.clone(), values.clone()
    swapped[[3, 5]] = values[[5, 3]]
    twice.view(torch.int32)[[7, -1]] ^= 1 << 30
    for other in (swapped, twice, values.flip(0)):
        assert digest_of(other) != want


@each(
    "reported, odd",
    [
        ([[1], [1], [2]], (2,)),
        ([[1, 2], [1, 3], [1, 2], [1, 2]], (1,)),
        ([[1], [2], [3], [1], [1]], (1, 2)),
        ([[1], [2]], ()),
        ([[1], [1], [2], [2]], ()),
    ],
)
def test_most_ranks_are_right(reported: list[list[int]], odd: tuple[int, ...]) -> None:
    assert odd_ranks(reported) == odd


def prepared(way: str, every: int | None) -> tuple[nn.Module, Any, Any]:
    """A model that is attached in some way, its optimizer and its handle."""
    net = Net()
    model: nn.Module = ddp(net) if way == DDP else net
    optimizer = momentum(net.parameters())
    if way == LOCAL:
        # so each second exchange
        handle: Any = gw.local_steps(net, optimizer, "none", every=32)
        optimizer.register_step_post_hook(lambda *_: handle.end_period())
    elif way == OVERLAP:
        handle = gw.attach(
            model, PLAN, optimizer=optimizer, **keywords(check_every=every)
        )
    else:
        exchange = TOPK if way == "topk" else DENSE
        handle = gw.attach(
            model, exchange, **keywords(bucket_cap_mb=SMALL_MB, check_every=every)
        )
    return model, optimizer, handle


def trained(rank: int, world: int, way: str, every: int | None) -> str:
    net, optimizer, handle = prepared(way, every)
    train(net, optimizer, rank, range(3))
    handle.detach()
    return digest(net)


def accumulated(rank: int, world: int) -> int:
    """Each rank has parameters of its own while gradients accumulate, as SAM has."""
    net, _, handle = prepared("plain", 1)
    for step in range(3):
        with handle.no_sync():
            loss_of(net, rank, step).backward()
        moved = [0.1 * p.grad for p in net.parameters() if p.grad is not None]
        with torch.no_grad():
            torch._foreach_add_([*net.parameters()], moved)
        loss_of(net, rank, step).backward()
        with torch.no_grad():
            torch._foreach_sub_([*net.parameters()], moved)
        for param, start in zip(net.parameters(), Net(step).parameters(), strict=True):
            # adding and subtracting rounds on each rank in another way
            param.data.copy_(start)
    handle.detach()
    return int(handle.step)


def outer_tensor(handle: Any, what: str) -> Tensor:
    """The anchor of a parameter, or the outer optimizer's momentum of it."""
    anchor = handle._outer.anchors["deep.weight"]
    found: Tensor = (
        anchor if what == "anchor" else handle.outer.state[anchor]["momentum_buffer"]
    )
    return found


def struck(
    rank: int, world: int, way: str, what: str
) -> tuple[tuple[int, ...], int, int, str]:
    """What the error says where one rank's bits change in step 1, of 3 to a check."""
    net, optimizer, handle = prepared(way, 3)
    weight = dict(net.named_parameters())[
        ("module." if way == DDP else "") + "deep.weight"
    ]
    if what == "optimizer":
        own = [SGD([param], lr=0.1) for param in net.parameters()]
        for one, param in zip(own, net.parameters(), strict=True):
            param.register_post_accumulate_grad_hook(lambda _, one=one: one.step())
    try:
        for step in range(7):
            optimizer.zero_grad()
            loss_of(net, rank, step).backward()
            if step == 1 and rank == world - 1 and what != "optimizer":
                handle.synchronize()
                spoilt = outer_tensor(handle, what) if way == LOCAL else weight
                words = (
                    (spoilt.grad if what == "grad" else spoilt)
                    .detach()
                    .view(torch.int32)
                )
                words[3, 2] ^= 1 << 30
            optimizer.step()
    except gw.RankFailed as failure:
        with suppress(gw.RankFailed):
            handle.detach()
        return failure.ranks, failure.step, int(failure.exit_code), str(failure)
    raise AssertionError("nobody noticed")


def rows(rank: int, world: int) -> int:
    table = nn.Embedding(50, 4, sparse=True)
    gw.attach(table, "none", failure=gw.FailurePolicy(check_every=1))
    for _ in range(2):
        table(torch.tensor([rank, 7])).sum().backward()
    assert table.weight.grad is not None
    return int(table.weight.grad._nnz())


WAYS = ["plain", "topk", DDP, OVERLAP, LOCAL]


def all_well(rank: int, world: int) -> list[Any]:
    found: list[Any] = [
        [trained(rank, world, w, e) for e in (1, None)] for w in WAYS[:-1]
    ]
    return [
        *found,
        trained(rank, world, LOCAL, None),
        rows(rank, world),
        accumulated(rank, world),
    ]


@pytest.mark.multi
def test_checks_change_no_bit_and_are_silent_where_all_is_well(two: Ranks) -> None:
    first, other = two.run(all_well)
    *pairs, _, num_rows, num_steps = first
    assert first == other
    assert all(checked == plain for checked, plain in pairs)
    assert (num_rows, num_steps) == (3, 3)


@pytest.mark.multi
@each("way, what", [("topk", "grad"), (DDP, "optimizer"), (LOCAL, "momentum")])
def test_a_bit_that_flips_once_is_noticed_at_the_next_check(
    way: str, what: str, two: Ranks
) -> None:
    """Whatever the step and the tensor: parameters of ranks differ from then on."""
    check_noticed(way, what, two)


@pytest.mark.multi
@pytest.mark.slow
@each(
    "way, what",
    [
        ("plain", "parameter"),
        (DDP, "grad"),
        (OVERLAP, "parameter"),
        (LOCAL, "anchor"),
    ],
)
def test_so_are_flips_in_further_tensors(way: str, what: str, two: Ranks) -> None:
    check_noticed(way, what, two)


def check_noticed(way: str, what: str, two: Ranks) -> None:
    for ranks, step, code, text in two.run(struck, way, what):
        assert (ranks, step, code) == (
            (),
            1 if way == LOCAL else 2,
            gw.errors.ExitCode.BITS,
        )
        assert "hold different parameters" in text
        assert what == "optimizer" or "deep.weight" in text


def test_a_check_in_no_step_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="check_every"):
        gw.attach(Net(), "none", failure=gw.FailurePolicy(check_every=0))


def test_what_is_compared_follows_from_the_step_alone() -> None:
    """What one rank alone took, for a step that is not made, is in no later
    comparison.
    """
    param_N = torch.ones(3)
    check = Check(2, lambda names: [("weight", param_N)])
    check.look(1)  # a micro-batch of step 1, after which the state of step 0 is loaded
    assert check.taken(0) == {}
    param_N += 1
    check.look(1)
    assert check.taken(1) == {"weight": digests_of([param_N])[0]}
    assert check.taken(1) == {}


@each("world", [4, 6])
def test_a_rank_that_does_not_train_is_not_compared(world: int) -> None:
    given = [[7]] * (world - 1) + [None]
    refuse_other_bits(4, ["weight"], given)
    with pytest.raises(gw.RankFailed) as caught:
        refuse_other_bits(4, ["weight"], [[8], *given[1:]])
    assert caught.value.ranks == (0,)


# ---- Checksums: the sender of a damaged payload is named -----------------------------


RING = gw.pair(gw.compress.none(), gw.collective.ring())
PUSHED = gw.with_error_feedback(
    gw.pair(gw.compress.onebit(block=64), gw.collective.casync_ps(room_bytes=0))
)
EXCHANGES = {"send": RING, "all-gather": TOPK, "all-to-all": PUSHED}


def trained_sealed(
    rank: int, world: int, exchange: Exchange, checksums: bool
) -> tuple[str, float]:
    net = Net()
    handle = gw.attach(
        net, exchange, options=SMALL, failure=gw.FailurePolicy(checksums=checksums)
    )
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
        (plain, own_bytes), _ = two.run(trained_sealed, exchange, False)
        sealed = two.run(trained_sealed, exchange, True)
        assert [bits for bits, _ in sealed] == [plain, plain]
        assert all(0 < more - own_bytes < 400 for _, more in sealed)
        assert (sealed[0][1] - own_bytes) % 8 == 0
    assert len(set(two.run(learnt))) == 1


def struck_on_the_way(rank: int, world: int, name: str) -> Any:
    """Rank 1's payload of step 1 is damaged on its way to another process."""
    net = Net()
    limit = timedelta(seconds=10)
    handle = gw.attach(net, EXCHANGES[name], **keywords(checksums=True, timeout=limit))
    first, step = handle._synchroniser.messages[0], -1
    original: Any = first.steps

    def steps(*args: Any, **named: Any) -> Any:
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

    vars(first)["steps"] = steps
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
    for ranks, step, code, text in doomed_two.run(struck_on_the_way, name):
        assert (ranks, step, code) == ((1,), 1, ExitCode.BITS)
        assert "rank 1 sent arrived damaged at rank" in text


def test_other_words_than_true_and_false_are_refused() -> None:
    with pytest.raises(InvalidSetting, match="checksums"):
        gw.attach(torch.nn.Linear(2, 2), "none", **keywords(checksums="yes"))  # type: ignore[arg-type]
