"""Local steps with a quorum, on real ranks."""

from __future__ import annotations

import gc
import json
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

import gradwire as gw
from gradwire.errors import InvalidSetting, LoopMistake, RankFailed
from gradwire.exchange.rounds import (
    Contribution,
    FragmentLearner,
    FragmentOwner,
    Merge,
    Opening,
    PartialRounds,
    Pull,
    Push,
    RoundCodec,
    Rules,
    Snapshot,
    codec_for_rounds,
)
from gradwire.runtime.local_steps import round_service
from gradwire.runtime.local_steps.local_steps import cut_into
from gradwire.runtime.local_steps.mail import (
    Drained,
    Invitation,
    Leaving,
    Mail,
    Note,
    RoundMessage,
    _message,
    _parts,
    _read,
)
from gradwire.runtime.local_steps.outer import DILOCO, Outer
from gradwire.runtime.local_steps.partial_steps import Fragment, PartialSteps
from gradwire_lab.exchange.virtual_rounds import VirtualRank
from tests.each import each, few
from tests.laws.tapes import replay
from tests.runtime.ranks import Ranks
from tests.runtime.state.test_checkpoint import through_a_file
from tests.runtime.training import Net, adamw, digest, train

PLAIN = partial(SGD, lr=1.0)


def prepared(**settings: Any) -> tuple[Net, Any, Any]:
    net = Net(0)
    optimizer = adamw(net.parameters())
    if settings.get("quorum", 1) is not None:
        settings = {"quorum": 1, "grace": 0.0, **settings}
    settings = {"every": 4, "outer": PLAIN, **settings}
    exchange = settings.pop("exchange", "none")
    return net, optimizer, gw.local_steps(net, optimizer, exchange, **settings)


# Keys of the store by which a test's ranks wait for each other.


def happens(what: str) -> None:
    dist.distributed_c10d._get_default_store().set(what, "")


def await_event(what: str) -> None:
    dist.distributed_c10d._get_default_store().wait([what], timedelta(seconds=90))


# ---- the slowest rank sets no pace ---------------------------------------------------


def without_the_other(rank: int, world: int) -> tuple[int, int, str]:
    """Rank 1 makes no step until rank 0 has seen several rounds close."""
    net, optimizer, handle = prepared()
    if rank == 0:
        step = 0
        while handle.stats()["exchanges"] < 3:
            train(net, optimizer, rank, [step])
            step += 1
        happens("rounds have closed")
    else:
        await_event("rounds have closed")
        train(net, optimizer, rank, range(2))
    handle.end_period()
    found = handle.step, handle.steps_of_all, digest(net)
    handle.detach()
    return found


@pytest.mark.multi
def test_rounds_close_while_a_rank_makes_no_step(two: Ranks) -> None:
    first, second = two.run(without_the_other)
    assert first[0] >= 12
    assert second[0] == 2
    assert first[1] == second[1] == first[0] + 2
    assert first[2] == second[2]


SETTINGS: tuple[dict[str, Any], ...] = (
    {"exchange": "none"},
    {"exchange": "topk", "fragments": 2, "outer": DILOCO},
    {"exchange": gw.compress.uniform(bitwidth=4), "quorum": 2, "grace": "adaptive"},
    {"exchange": "onebit", "fragments": 4, "weights": "tokens", "merge": "rda"},
)


def of_other_lengths(rank: int, world: int) -> list[tuple[Any, ...]]:
    """Each rank makes another number of steps; the first waits at the end."""
    found = []
    for settings in SETTINGS:
        net, optimizer, handle = prepared(**settings)
        num_steps = 6 + 5 * rank
        for step in range(num_steps):
            handle.count_tokens(8)
            train(net, optimizer, rank, [step])
        handle.end_period()
        ends = [digest(net), digest(handle.anchors().values())]
        handle.end_period()
        again = digest(net)
        found.append((*ends, again, handle.steps_of_all, handle.tokens))
        handle.detach()
    threads = [thread.name for thread in threading.enumerate()]
    assert not [name for name in threads if name.startswith("gradwire rounds")]
    return found


@pytest.mark.multi
@few("world", [4, 2, 3])
def test_ranks_of_other_lengths_end_with_the_same_bits(
    world: int, pools: dict[int, Ranks], ranks_of: Callable[[int], Ranks]
) -> None:
    pool = pools.get(world) or ranks_of(world)
    first, *others = pool.run(of_other_lengths)
    assert others == [first] * (world - 1)
    steps = sum(6 + 5 * rank for rank in range(world))
    for params, anchors, again, steps_of_all, tokens in first:
        assert params == anchors == again
        assert (steps_of_all, tokens) == (steps, 8 * steps)


# ---- a tape --------------------------------------------------------------------------

TAPED: dict[str, Any] = {
    "exchange": "topk",
    "fragments": 2,
    "outer": DILOCO,
    "every": 4,
}
FAST_STEPS = 28


def taped(rank: int, world: int) -> tuple[list[str], int, str, str]:
    """Rank 1 makes one step for four of rank 0."""
    tape: list[str] = []
    net, optimizer, handle = prepared(**TAPED, tape=tape.append)
    for step in range(FAST_STEPS if rank == 0 else FAST_STEPS // 4):
        if rank:
            await_event(f"step {4 * step}")
        train(net, optimizer, rank, [step])
        if rank == 0:
            happens(f"step {step}")
    lines = [*tape]
    ends = digest(net), digest(handle.anchors().values())
    handle.end_period()
    found = lines, handle.step, *ends
    handle.detach()
    return found


class Replayed:
    """One rank of a replay, which trains a model of its own."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank = rank
        self._net = Net(0)
        self._optimizer = adamw(self._net.parameters())
        params = list(self._net.named_parameters())
        self.outer = Outer(params, DILOCO)
        cut = cut_into(params, TAPED["fragments"])
        self._flat = [
            Fragment(
                [(name, dict(params)[name]) for name in names],
                self.outer,
                self._optimizer,
            )
            for names in cut
        ]
        rules = Rules(quorum=1, every=TAPED["every"], fragments=2, is_measured=True)
        exchange = gw.exchange_for(gw.compress.topk())

        def codec_of(number: int) -> RoundCodec:
            spec = self._flat[number].spec("cpu")
            return RoundCodec(codec_for_rounds(exchange), spec, rank, world)

        def make_owner(number: int) -> FragmentOwner:
            return FragmentOwner(number, codec_of(number), rules, world)

        learners = [
            FragmentLearner(rank, n, codec_of(n), rules, flat.anchor_N, flat)
            for n, flat in enumerate(self._flat)
        ]
        self._rows = [flat.gathered() for flat in self._flat]
        self.tape: list[str] = []
        rounds = PartialRounds(rank, world, learners, make_owner, self.tape.append)
        self.virtual = VirtualRank(rounds, self._rows, self._train)

    def _train(self, step: int) -> int:
        for flat, row in zip(self._flat, self._rows, strict=True):
            flat.put(row)
        train(self._net, self._optimizer, self._rank, [step - 1])
        for flat, row in zip(self._flat, self._rows, strict=True):
            row.copy_(flat.gathered())
        return 0

    def digests(self) -> tuple[str, str]:
        for flat, row in zip(self._flat, self._rows, strict=True):
            flat.put(row)
        return digest(self._net), digest(self.outer.anchors.values())


@pytest.mark.multi
def test_a_tape_of_real_ranks_gives_the_same_bits(two: Ranks) -> None:
    of_ranks = two.run(taped)
    again = [Replayed(rank, 2) for rank in range(2)]
    lines = [line for found in of_ranks for line in found[0]]
    assert len(lines) > 4
    assert {json.loads(line)["rank"] for line in lines} == {0, 1}
    replay(lines, [one.virtual for one in again], [found[1] for found in of_ranks])
    for found, one in zip(of_ranks, again, strict=True):
        assert one.tape == found[0]
        assert one.digests() == found[2:]


# ---- checkpoints ---------------------------------------------------------------------


def settle(handle: Any) -> None:
    """Lets all that is on its way arrive, on all ranks together."""
    handle._meet("settle")
    handle._service.go_on()


def in_turn(net: nn.Module, optimizer: Any, handle: Any, turns: Sequence[int]) -> None:
    """Rank 0 makes three steps, then rank 1 makes one; nothing is left to chance."""
    for turn in turns:
        round_, of_rank = divmod(turn, 2)
        steps = (range(3 * round_, 3 * round_ + 3), [round_])[of_rank]
        train(net, optimizer, of_rank, steps if handle.rank == of_rank else ())
        settle(handle)


KEPT: tuple[dict[str, Any], ...] = (
    {"exchange": "topk", "fragments": 2, "grace": 1e9, "outer": DILOCO},
    {"exchange": gw.compress.uniform(bitwidth=2), "every": 6},
)


class Resumed(NamedTuple):
    """Digests before the end of the period, in both runs, and after it."""

    befores: list[tuple[str, str]]
    ends: list[str]
    step: int
    num_waiting: int
    """Pushes that wait at owners when a state is saved."""


def resumed(rank: int, world: int) -> list[Resumed]:
    found = []
    for settings in KEPT:
        befores = []
        ends = []
        net, optimizer, handle = prepared(**settings)
        in_turn(net, optimizer, handle, range(9))
        saved = {
            "model": net.state_dict(),
            "optimizer": optimizer.state_dict(),
            "gradwire": handle.state_dict(),
        }
        saved = through_a_file(saved)
        owners = saved["gradwire"]["rounds"]["owners"]
        waiting = sum(len(owner["pushes"]) for owner in owners)
        in_turn(net, optimizer, handle, range(9, 18))
        befores.append((digest(net), digest(handle.anchors().values())))
        handle.end_period()
        ends.append(digest(net))
        steps = handle.steps_of_all
        handle.detach()
        net, optimizer, handle = prepared(**settings)
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        handle.load_state_dict(saved["gradwire"])
        in_turn(net, optimizer, handle, range(9, 18))
        befores.append((digest(net), digest(handle.anchors().values())))
        handle.end_period()
        ends.append(digest(net))
        assert handle.steps_of_all == steps
        found.append(Resumed(befores, ends, handle.step, waiting))
        handle.detach()
    return found


@pytest.mark.multi
def test_a_resumed_run_is_the_uninterrupted_one(two: Ranks) -> None:
    """Bit for bit, until ranks come to the end of the period in any order."""
    first, second = two.run(resumed)
    for one, other in zip(first, second, strict=True):
        for found in (one, other):
            assert found.befores[0] == found.befores[1]
        assert one.ends == other.ends
        assert (one.step, other.step) == (27, 9)
    waiting = [found.num_waiting for found in (*first, *second)]
    assert sum(waiting), "no push was under way"


def gathered(rank: int, world: int) -> tuple[list[str], str]:
    net, optimizer, handle = prepared()
    train(net, optimizer, rank, range(3 + rank))
    states = handle.gather_state()
    text = ""
    try:
        handle.load_state_dict(gw.attach(nn.Linear(2, 2), "none").state_dict())
    except InvalidSetting as error:
        text = str(error)
    handle.detach()
    return sorted(states), text


@pytest.mark.multi
def test_states_of_all_ranks_are_gathered_and_others_are_refused(
    doomed_two: Ranks,
) -> None:
    first, second = doomed_two.run(gathered)
    assert first[0] == ["rank 0 of 2", "rank 1 of 2"]
    assert first[1]
    assert second[1]


def test_states_of_another_number_of_ranks_are_refused() -> None:
    _, _, handle = prepared()
    state = handle.state_dict()
    saved = [{**state, "world_size": 2, "rank": r, "saved_by": 2} for r in range(2)]
    with pytest.raises(InvalidSetting, match=r"must be 1, as now, got 2"):
        handle.load_state_dict(gw.redistribute(saved, world_size=1)[0])
    handle.detach()


def test_a_state_is_refused_once_a_rank_was_lost() -> None:
    """Its rounds are of the first epoch: owners would drop all pushes."""
    _, _, handle = prepared()
    state = handle.state_dict()
    handle._rounds.begin_epoch({0: handle._rounds.row()})
    with pytest.raises(InvalidSetting, match="after a rank was lost"):
        handle.load_state_dict(state)
    handle.detach()


def test_no_last_round_is_open_once_an_older_state_is_loaded() -> None:
    net, optimizer, handle = prepared()
    state = handle.state_dict()
    train(net, optimizer, 0, range(5))
    handle.end_period()
    handle.load_state_dict(state)
    assert not handle._rounds.last_owners
    handle.detach()


def test_parameters_that_are_no_numbers_end_at_their_anchors() -> None:
    net, optimizer, handle = prepared(exchange="topk")
    train(net, optimizer, 0, [0])
    with torch.no_grad():
        next(net.parameters()).fill_(float("nan"))
    train(net, optimizer, 0, [1])
    handle.end_period()
    anchors = handle.anchors().values()
    assert any(anchor.isfinite().any() for anchor in anchors)
    assert digest(net) == digest(anchors)
    handle.detach()


# ---- ranks that leave or fail --------------------------------------------------------


def leaving(rank: int, world: int) -> tuple[str, tuple[int, ...], str]:
    net, optimizer, handle = prepared()
    if rank == 1:
        train(net, optimizer, rank, range(2))
        handle.detach()
        return "", (), ""
    with pytest.raises(RankFailed) as caught:
        train(net, optimizer, rank, range(10**6))
    handle.detach()
    return type(caught.value).__name__, caught.value.ranks, str(caught.value)


@pytest.mark.multi
@pytest.mark.slow
def test_a_rank_that_leaves_early_is_named(doomed_two: Ranks) -> None:
    name, ranks, text = doomed_two.run(leaving)[0]
    assert (name, ranks) == ("RankFailed", (1,))
    assert "detached before the others" in text
    assert "call end_period() on all ranks" in text


def trains_on(rank: int, world: int, waits: bool) -> tuple[int, ...]:
    """Rank 2 dies; the others train, or wait for the end of the period."""
    net, optimizer, handle = prepared(quorum=2)
    train(net, optimizer, rank, range(5))
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    go_on = partial(train, net, optimizer, rank, range(10**6))
    with pytest.raises(RankFailed) as caught:
        (handle.end_period if waits else go_on)()
    handle.detach()
    return caught.value.ranks


@pytest.mark.multi
@pytest.mark.slow
@each("waits", [False, True])
def test_a_lost_rank_is_named_on_all(
    waits: bool, ranks_of: Callable[[int], Ranks]
) -> None:
    pool = ranks_of(4)
    pool.send(trains_on, waits)
    assert pool.survivors({2}) == [(2,)] * 3


def unlike_calls(rank: int, world: int, how: str) -> str:
    net, optimizer, handle = prepared()
    if how == "loads":
        with torch.no_grad():
            net.load_state_dict(Net(1 + rank).state_dict())
    train(net, optimizer, rank, range(2))
    call = handle.state_dict if how == "calls" and rank else handle.end_period
    with pytest.raises(LoopMistake) as caught:
        call()
    handle.detach()
    return str(caught.value)


@pytest.mark.multi
@pytest.mark.slow
@each("how, said", [("calls", "made another joint call"), ("loads", "loaded other")])
def test_ranks_that_do_not_call_alike_are_named(
    how: str, said: str, ranks_of: Callable[[int], Ranks]
) -> None:
    for text in ranks_of(2).run(unlike_calls, how):
        assert said in text


def test_a_merge_that_comes_just_before_all_have_met_is_taken_in() -> None:
    _, _, handle = prepared()
    # All have met while settle runs, or just after it.
    looks = iter([False, True, True])
    events: list[object] = []

    def have_met() -> bool:
        events.append(next(looks))
        return bool(events[-1])

    handle._service.wait_for(have_met, lambda: events.append("settles"))
    assert "settles" in events[events.index(True) :]
    handle.detach()


class Opened(NamedTuple):
    """What a handle has opened, and whether its channel stays after ``detach``."""

    num_channels: int
    threads: list[str]
    is_kept: bool


def opened(rank: int, world: int) -> Opened:
    before = {*threading.enumerate()}
    _, _, handle = prepared()
    num_channels = len(handle._engine.routes.all_channels())
    names = [one.name for one in {*threading.enumerate()} - before]
    channel = weakref.ref(handle._service._mail._channel)
    gc.disable()
    handle.end_period()
    handle.detach()
    is_kept = channel() is not None
    gc.enable()
    threads = sorted(name for name in names if name.startswith("gradwire"))
    return Opened(num_channels, threads, is_kept)


@pytest.mark.multi
def test_only_what_rounds_use_is_opened_and_detach_gives_it_back(two: Ranks) -> None:
    """One channel is for the parameters at the start, and one for the mail."""
    for rank, found in enumerate(two.run(opened)):
        assert found.num_channels == 2
        assert not [n for n in found.threads if "communication" in n or "comp" in n]
        assert f"gradwire rounds to {1 - rank}" in found.threads
        assert not found.is_kept


class Held(NamedTuple):
    """Bytes of a rank, in the median of its steps, and those of its whole model.

    On a busy machine merges wait in some steps.
    """

    median_bytes: int
    model_bytes: int
    fragment_bytes: int
    kinds: dict[str, int]


def held(rank: int, world: int, exchange: str, quorum: int | None) -> Held:
    net, optimizer, handle = prepared(exchange=exchange, quorum=quorum, fragments=2)
    found = []
    for step in range(12):
        train(net, optimizer, rank, [step])
        memory = handle.stats()["memory"]
        # beside what threads and channels keep for all models together
        kinds = {k: memory[k] for k in ("residuals", "messages", "payloads", "state")}
        found.append(kinds)
    handle.end_period()
    handle.detach()
    sizes = [param.nbytes for param in net.parameters()]
    found.sort(key=lambda kinds: sum(kinds.values()))
    kinds = found[len(found) // 2]
    return Held(sum(kinds.values()), sum(sizes), max(sum(sizes) // 2, *sizes), kinds)


@pytest.mark.multi
@each("exchange", ["none", "uniform", "topk"])
def test_rounds_hold_little_more_memory_than_lock_step(
    two: Ranks, exchange: str
) -> None:
    """At most one anchor and one buffer of a fragment, in few bits.

    Uncompressed pushes and the owner's are whole models, and so is a residual.
    """
    in_step = two.run(held, exchange, None)
    in_rounds = two.run(held, exchange, 1)
    for lock, partial_rounds in zip(in_step, in_rounds, strict=True):
        more_bytes = partial_rounds.median_bytes - lock.median_bytes
        wholes = 3 if exchange == "none" else 1
        assert more_bytes <= wholes * lock.model_bytes + lock.fragment_bytes
        assert partial_rounds.kinds["messages"] > 0
        assert partial_rounds.kinds["payloads"] > 0


ENDS = """
import atexit, sys, threading

# called last, after all that gradwire and torch do at the end
alive = lambda: [one.name for one in threading.enumerate() if "rounds" in one.name]
atexit.register(lambda: print(alive()))
import torch
import gradwire as gw

rank = int(sys.argv[1])
where = f"file://{sys.argv[2]}"
torch.distributed.init_process_group("gloo", where, rank=rank, world_size=3)
net = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(net.parameters())
handle = gw.local_steps(net, optimizer, "none", every=2, quorum=1)
for step in range(10**6):
    net(torch.randn(8, 8)).square().mean().backward()
    optimizer.step()
    if step == 40 and rank == 2:
        raise ValueError("a mistake of this loop")
"""


@pytest.mark.multi
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_processes_end_by_their_errors_without_detach(tmp_path: Path) -> None:
    """Threads that outlived the interpreter ended the process by SIGABRT."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", ENDS, str(rank), tmp_path / "store"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(3)
    ]
    said = [process.communicate()[0].strip() for process in ranks]
    assert said == ["[]"] * 3
    assert [process.returncode for process in ranks] == [75, 75, 1]


class SlowLink:
    """A channel to one other rank that notes the bytes for which each wait is."""

    def __init__(self) -> None:
        self.waited: list[int] = []
        self._never = threading.Event()

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0

    def send(self, parts: Sequence[Tensor], dst: int, tag: int) -> Any:
        sent = parts[0].nbytes

        def wait(timeout: timedelta) -> None:
            assert timeout == timedelta(seconds=1)
            self.waited.append(sent)

        return SimpleNamespace(wait=wait)

    def recv(self, parts: Sequence[Tensor], src: int, tag: int) -> Any:
        return SimpleNamespace(wait=self._never.wait)


def test_a_time_out_is_of_a_piece_of_a_payload() -> None:
    link = SlowLink()
    failed: list[BaseException] = []
    sent = threading.Event()
    channel: Any = link
    mail = Mail(channel, timedelta(seconds=1), lambda *_: None, failed.append)
    payload_B = torch.zeros(5 * 2**20 + 1, dtype=torch.uint8)
    mail.send(1, Merge(0, 1, (), payload_B), sent.set)
    assert sent.wait(60)
    mail.close(is_whole=False)
    link._never.set()
    assert link.waited[:8] == [256, len("[]"), *[2**20] * 5, 1]
    assert not failed


B = torch.ones(5).byte()
SENT: tuple[RoundMessage, ...] = (
    Push(
        7,
        15,
        *[2**31] * 2,
        True,
        *[2**31] * 2,
        2**53,
        1.5e300,
        9,
        9,
        torch.ones(3).byte(),
    ),
    Snapshot(7, 15, 9, *[2**31] * 4, 2**53, [[r, 2**31] for r in range(512)], B),
    Invitation(2**31, 2**31),
    Opening(7, 2**31, 9),
    Pull(7, 2**31),
    Merge(
        7,
        2**31,
        tuple(
            Contribution(rank, *[2**31] * 3, 2**53, math.pi, 0, 2**31, math.e, -math.pi)
            for rank in range(512)
        ),
        torch.ones(2).byte(),
    ),
    Note("load_state_dict()", 2**31, True, 2**31, 2**32, is_last=True),
    Drained(),
    Leaving(),
)


def test_ranks_that_connect_anew_do_not_say_that_they_leave() -> None:
    """A rank that has not heard of it yet would take this one for detached."""
    link = SlowLink()
    mail = Mail(link, timedelta(seconds=1), lambda *_: None, lambda _: None)
    mail.send(1, Drained())
    mail.end()
    (sender,) = [one for one in mail._threads if " to " in one.name]
    sender.join(60)
    assert not sender.is_alive()
    assert len(link.waited) == 1


@each("message", SENT, ids=lambda message: type(message).__name__)
def test_a_message_is_read_as_it_was_written(message: RoundMessage) -> None:
    """A head holds no list, so that a pull among many ranks has 256 bytes too."""
    head_B, *rest = _parts(message)
    assert head_B.numel() == 256
    name, sizes, *fields = _read(head_B)
    assert sizes == [part.numel() for part in rest]
    again = _message(name, fields, rest)
    assert type(again) is type(message)
    for got, want in zip(again, message, strict=True):
        if isinstance(want, Tensor):
            assert torch.equal(got, want)
        else:
            assert got == want


# ---- settings ------------------------------------------------------------------------

MISTAKES: tuple[tuple[dict[str, Any], str], ...] = (
    ({"quorum": 2}, "quorum must be at most 1, the number of ranks, got 2"),
    ({"quorum": 0}, "quorum must be"),
    ({"grace": "soon"}, "grace must be 'adaptive' or seconds"),
    ({"grace": None}, "grace must be 'adaptive' or seconds"),
    ({"grace": -1.0}, "grace must be seconds"),
    ({"grace": math.nan}, "grace must be seconds, from 0, got nan; write 0"),
    ({"grace": True}, "grace must be seconds, from 0, got True"),
    ({"quorum": 1.5}, "quorum must be a whole number"),
    ({"weights": None}, "weights must be equal or tokens or tokens_per_step"),
    ({"weights": ["tokens"]}, "weights must be equal or tokens or tokens_per_step"),
    ({"weights": "steps"}, "weights must be equal or tokens or tokens_per_step"),
    ({"merge": "median"}, "merge must be mean or rda"),
    ({"delay": 1}, "delay must be left out beside quorum="),
    ({"mixing": 0.5}, "mixing must be left out beside quorum="),
    ({"quorum": None, "weights": "tokens"}, "weights must be left out without quorum="),
    ({"quorum": None, "grace": 1.0}, "grace must be left out without quorum="),
    ({"exchange": gw.compress.powersgd()}, "exchange must be one whose payload"),
    ({"exchange": "auto"}, "exchange must be a compressor or an exchange"),
    (
        {"tape": "tape.jsonl"},
        "tape must be a function of a JSON line, got 'tape.jsonl'",
    ),
)


@each("settings, said", MISTAKES, ids=str)
def test_mistakes_are_named(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        prepared(**settings)
    assert said in str(caught.value)


def test_parameters_of_two_dtypes_are_refused() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16())
    with pytest.raises(InvalidSetting, match="one dtype on one device"):
        gw.local_steps(net, adamw(net.parameters()), "none", every=2, quorum=1)


def test_weights_by_tokens_ask_for_tokens() -> None:
    net, optimizer, handle = prepared(weights="tokens")
    with pytest.raises(InvalidSetting, match=r"call handle\.count_tokens\(n\)"):
        train(net, optimizer, 0, [0])
    handle.detach()


def test_weights_that_are_loaded_late_are_refused() -> None:
    net, optimizer, handle = prepared()
    train(net, optimizer, 0, range(2))
    net.load_state_dict(Net(1).state_dict())
    with pytest.raises(RankFailed, match="loaded between two local steps"):
        train(net, optimizer, 0, [2])
    handle.detach()


def reloaded(rank: int, world: int) -> tuple[str, int, str, str]:
    """All ranks load weights after the end of a period, and train on from there."""
    net, optimizer, handle = prepared(fragments=2)
    train(net, optimizer, rank, range(5 + 4 * rank))
    handle.end_period()
    net.load_state_dict(Net(1).state_dict())
    handle.end_period()  # as a framework does at its end; nothing is learnt
    start = digest(net)
    train(net, optimizer, rank, range(6))
    handle.end_period()
    found = start, handle.steps_of_all, digest(net), digest(handle.anchors().values())
    handle.detach()
    return found


@pytest.mark.multi
def test_weights_may_be_loaded_where_all_ranks_have_met(two: Ranks) -> None:
    first, second = two.run(reloaded)
    assert first == second
    start, steps, params, anchors = first
    assert start == digest(Net(1))
    assert steps == 5 + 9 + 12
    assert params == anchors != start


def test_rows_are_logged_with_a_quorum() -> None:
    net, optimizer, handle = prepared()
    rows: list[tuple[int, dict[str, float]]] = []
    handle.log_to(lambda step, row: rows.append((step, row)), every=2)
    train(net, optimizer, 0, range(5))
    handle.detach()
    assert [step for step, _ in rows] == [2, 4]
    assert all("gradwire/wire_bytes_per_step" in row for _, row in rows)


def waits(rank: int, world: int) -> list[str]:
    """Rank 0 saves alone; rank 1 comes once rank 0 has said that it waits."""
    net, optimizer, handle = prepared()
    train(net, optimizer, rank, range(2))
    heard: list[str] = []
    if rank:
        await_event("rank 0 has warned")
        handle.end_period()
    else:

        def note(record: logging.LogRecord) -> None:
            heard.append(record.getMessage())
            happens("rank 0 has warned")

        log = logging.getLogger("gradwire")
        handler = logging.Handler()
        handler.emit = note  # type: ignore[method-assign]
        log.addHandler(handler)
        with patch.object(round_service, "_WARN_S", 0.0):
            handle.end_period()
        log.removeHandler(handler)
    handle.detach()
    return heard


@pytest.mark.multi
def test_a_rank_that_saves_alone_is_named(two: Ranks) -> None:
    alone, other = two.run(waits)
    assert not other
    assert len(alone) == 1
    assert alone[0].startswith("only ranks [0] have come to end_period() or a check")


def test_a_recipe_takes_a_quorum() -> None:
    net = Net(0)
    begun: list[Any] = [gw.recipes.diloco, gw.recipes.streaming_diloco]
    begun += [gw.recipes.lora, gw.recipes.muloco, gw.recipes.localsgd]
    for recipe in begun:
        _, handle = recipe(net, quorum=1)
        assert isinstance(handle, PartialSteps)
        group = handle.outer.param_groups[0]
        assert (group["lr"], group["momentum"]) == (1.0, 0.0)
        handle.detach()


def test_parameters_of_16_bits_end_at_their_anchors() -> None:
    net = nn.Linear(6, 3).bfloat16()
    optimizer = adamw(net.parameters())
    handle = gw.local_steps(net, optimizer, "topk", every=3, quorum=1)
    for step in range(8):
        optimizer.zero_grad()
        draws = torch.Generator().manual_seed(step)
        inputs = torch.randn(4, 6, generator=draws).bfloat16()
        net(inputs).square().sum().backward()
        optimizer.step()
    handle.end_period()
    anchors = handle.anchors()
    ends: dict[str, Tensor] = dict(net.named_parameters())
    assert all(torch.equal(anchors[n].bfloat16(), ends[n]) for n in anchors)
    assert sorted(handle.residuals()) == ["bias", "weight"]
    handle.detach()
