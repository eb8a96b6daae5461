"""Newcomers, with all ranks in threads of this process: who stays out, and what is
still owed.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import gradwire as gw
from gradwire.contract.verbs import AllReduce, Compute, Steps
from gradwire.errors import InvalidSetting, RankFailed, RanksDiffer
from gradwire.runtime.agreement.fingerprint import fingerprint, post_refusal
from gradwire.runtime.engine.engine import Engine
from gradwire.runtime.engine.plain import receive
from gradwire.runtime.liveness import pulse
from gradwire.runtime.liveness.membership import Membership
from gradwire.runtime.survive import rejoin, shrink
from gradwire.runtime.survive.rejoin import Lookout, Newcomer, Offer, come_together
from gradwire.runtime.transport import wire
from tests.runtime.given import keywords
from tests.runtime.training import SMALL_MB, TOPK, Net, digest, loss_of, momentum

LIMIT = timedelta(seconds=60)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The store of a job whose ranks are threads of this process."""
    for module in (rejoin, pulse):
        monkeypatch.setattr(module, "PERIOD_S", 0.05)
    found = dist.TCPStore("127.0.0.1", 0, None, True, LIMIT, False)
    monkeypatch.setattr(wire, "_given", [found])
    # torch's tables are the process's, and have no room for several ranks.
    monkeypatch.setattr(rejoin, "stand_outside", lambda rank: None)
    monkeypatch.setattr(rejoin, "register_group", lambda *given: None)
    return found


def until(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + LIMIT.total_seconds()
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.005)


def described(**other: Any) -> Any:
    """The fingerprint of a model, by default always the same."""
    tensor = torch.zeros(other.get("shape", (3, 4)))
    more = [("more", tensor, "topk")] if "more" in other else []
    settings = {"exchange": other.get("exchange", "topk")}
    return fingerprint([("weight", tensor, "topk"), *more], settings)


def newcomer(store: Any) -> Newcomer:
    return Newcomer(store, "shrink", momentum([torch.zeros(1, requires_grad=True)]), ())


def test_a_newcomer_that_differs_asks_for_no_place(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rejoin, "STORE_PATIENCE_S", 0.0)
    lookout = Lookout(json.dumps(described()))
    try:
        for other in ({"shape": (4, 3)}, {"more": True}, {"exchange": "onebit"}):
            with pytest.raises(RanksDiffer, match="do not train the same thing"):
                newcomer(store).ask(described(**other), LIMIT)
        # the first that asks
        with pytest.raises(RankFailed, match="no place was offered"):
            newcomer(store).ask(described(), timedelta(seconds=0.3))
        assert dist.PrefixStore("gradwire/rejoin", store).add("asked", 0) == 1
    finally:
        lookout.close()


class Late:
    """A store with a run that offers a place after ``delay_s``, by a clock of its
    own.
    """

    def __init__(self, delay_s: float) -> None:
        self._now_s, self._delay_s = 0.0, delay_s
        self.given: dict[str, bytes] = {}

    def monotonic(self) -> float:
        return self._now_s

    def sleep(self, seconds: float) -> None:
        self._now_s += seconds

    def check(self, keys: list[str]) -> bool:
        return keys == ["run"] or self._now_s >= self._delay_s

    def get(self, key: str) -> bytes:
        return json.dumps(described()).encode() if key == "run" else b"[[0, 2], 7]"

    def add(self, key: str, amount: int) -> int:
        return 1

    def set(self, key: str, value: str) -> None:
        self.given[key] = value.encode()


@pytest.mark.parametrize(
    ("delay_s", "comes"), [(70.0, True), (100.0, True), (200.0, False)]
)
def test_a_newcomer_waits_until_a_run_has_noticed_that_a_rank_is_stopped(
    store: Any, delay_s: float, comes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of the same time-out needs some seconds more, and then a step."""
    late = Late(delay_s)
    monkeypatch.setattr(wire, "time", late)
    monkeypatch.setattr(rejoin, "_live", lambda number: None)
    asked = partial(newcomer(store)._asked, late, described(), timedelta(seconds=60))
    if comes:
        assert asked() == Offer(1, [0, 2], 7)
    else:
        with pytest.raises(RankFailed, match=r"no place was offered within 0:02:30"):
            asked()
        assert "1/over" in late.given


class Old:
    """A rank of the run, to which all others are well."""

    world = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def check(self) -> None: ...

    def refuse_silence(self, step: int) -> None: ...


def admitted(number: int) -> list[str]:
    """The verdicts of two ranks of a run on a newcomer that never connects."""
    over, offer = threading.Event(), Offer(number, [0, 1, 2], 7)

    def connect(who: Any) -> Any:
        over.wait()
        raise RankFailed("nobody came")

    def admit(rank: int) -> Any:
        return come_together(offer, connect, lambda engine: None, LIMIT, Old(rank))  # type: ignore[arg-type]

    try:
        with ThreadPoolExecutor() as pool:
            return [*pool.map(admit, range(2))]
    finally:
        over.set()


def test_a_newcomer_that_falls_silent_stays_out(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks do not wait for it as long as they would for one that connects
    slowly.
    """
    monkeypatch.setattr(rejoin, "PATIENCE_S", 0.5)
    assert admitted(1) == ["it shows no sign of life"] * 2


def test_a_newcomer_that_refuses_is_not_waited_for(store: Any) -> None:
    """As one whose exchange does not suit one rank more; it may go on to show signs of
    life.
    """
    # ranks of the test before may still leave notes for newcomer 1
    post_refusal(Offer(2, [0, 1, 2], 7).who(2), InvalidSetting("teams"))
    assert admitted(2) == ["InvalidSetting: teams"] * 2


class ClosesSlowly(Engine):
    """An engine whose rank says nothing for a while after it has closed its
    connections.
    """

    def close(self) -> None:
        super().close()
        time.sleep(0.5)


@pytest.mark.parametrize("refuses", [0, 1], ids=["rank 0", "the newcomer"])
def test_all_hear_the_reason_and_not_that_a_connection_closed(
    store: Any, refuses: int
) -> None:
    # ranks of the test before may still leave notes for its newcomer
    offer = Offer(3 + refuses, [0, 1], 7)

    def connect(who: Membership) -> Engine:
        kind = ClosesSlowly if who.rank == refuses else Engine
        return kind(who, num_channels=1, timeout=LIMIT, on_span=lambda span: None)

    def heal(engine: Engine) -> None:
        if engine.rank == refuses:
            raise InvalidSetting("it cannot be")
        receive(refuses, engine.routes.first_channel)

    def admit(rank: int) -> Any:
        return come_together(offer, connect, heal, LIMIT, None if rank else Old(rank))  # type: ignore[arg-type]

    with ThreadPoolExecutor() as pool:
        assert [*pool.map(admit, range(2))] == ["InvalidSetting: it cannot be"] * 2


NUM_STEPS = 3
"""Steps of one rank, then of two, and then of three."""


def lives(
    number: int, store: Any, asks: list[Any], seen: list[Any]
) -> tuple[dict[int, str], Any]:
    """A rank's bits by step, and the balance: what was delivered or is owed, less all
    gradients.

    Rank 0 begins alone. After a few steps all wait until it has seen the next newcomer.
    """
    assert asks[number].wait(LIMIT.total_seconds())
    net, come = Net(seed=number), {"rejoin": store} if number else {}
    optimizer, params = momentum(net.parameters()), dict(net.named_parameters())
    given = {"bucket_cap_mb": SMALL_MB, "check_every": 2, "timeout": LIMIT, **come}
    handle = gw.attach(
        net, TOPK, optimizer=optimizer, **keywords(on_failure="shrink", **given)
    )  # type: ignore[arg-type]
    bits: dict[int, str] = {}
    balance = torch.zeros(sum(p.numel() for p in params.values()), dtype=torch.float64)

    def sees(newcomer: int) -> bool:
        return bool(handle._hooks.shrinking._lookout.number == newcomer)  # type: ignore[union-attr]

    try:
        while (
            so_far := num_steps(bits, handle.world_size)
        ) < NUM_STEPS or handle.world_size < 3:
            step, world = handle.step, handle.world_size
            if so_far >= NUM_STEPS - 1 and world < 3:
                asks[world].set()
                if not number:
                    until(partial(sees, world))
                    seen[world].set()
                assert seen[world].wait(LIMIT.total_seconds())
            optimizer.zero_grad()
            own = torch.autograd.grad(loss_of(net, number, step), [*params.values()])
            loss_of(net, number, step).backward()
            delivered = flat(p.grad for p in params.values())
            balance += (delivered - flat(own)) / handle.world_size
            optimizer.step()
            bits[step] = f"{handle.world_size} {digest(net)}"
        owed = {
            name: torch.zeros_like(p) for name, p in params.items()
        } | handle.residuals()
        balance += flat(owed[name] for name in params) / handle.world_size
    finally:
        handle.detach()
    return bits, balance


def num_steps(bits: dict[int, str], world: int) -> int:
    """The steps so far among so many ranks."""
    return [one[0] for one in bits.values()].count(str(world))


def flat(tensors: Any) -> Tensor:
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors])


class Several(set):  # type: ignore[type-arg]
    """Attached models of one process that are not in each other's way, as each is a
    rank's own.
    """

    def __len__(self) -> int:
        return 1


def test_what_is_owed_keeps_its_weight_as_newcomers_come_in(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All gradients of all ranks are in a mean or still owed, among one rank, two and
    three.
    """
    monkeypatch.setattr(shrink, "_shrinking", Several())
    asks, seen = ([threading.Event() for _ in range(3)] for _ in range(2))
    asks[0].set()
    with ThreadPoolExecutor() as pool:
        found = [*pool.map(lambda number: lives(number, store, asks, seen), range(3))]
    bits, balances = zip(*found, strict=True)
    for own in bits:
        assert own == {step: bits[0][step] for step in own}
    assert [own[min(own)][0] for own in bits] == ["1", "2", "3"]
    assert sum(balances).abs().max() < 1e-5


def test_who_closes_first_carries_out_what_others_wait_for(store: Any) -> None:
    """A message that was launched ends on both ranks, though one has nothing else to
    do.
    """
    begun, gate = threading.Event(), threading.Event()

    def life(rank: int) -> float:
        who = Membership(f"{wire.REJOINED}closing", rank, 2)
        engine = Engine(who, num_channels=1, timeout=LIMIT, on_span=lambda span: None)
        sum_1 = torch.full((1,), rank + 1.0)

        def steps() -> Steps[None]:
            yield Compute("encode", lambda: rank or (begun.set(), gate.wait()))
            yield AllReduce(sum_1)

        end = engine.launch(0, "message", steps())
        if rank:
            begun.wait()
            threading.Timer(0.2, gate.set).start()
            engine.wait([end])
        engine.finish_and_close()
        return sum_1.item()

    with ThreadPoolExecutor() as pool:
        assert [*pool.map(life, range(2))] == [3.0, 3.0]


# ---- The look-out of rank 0 ----------------------------------------------------------


def test_a_newcomer_that_has_died_is_offered_no_place(store: Any) -> None:
    """The look-out names those that show a sign of life, and the first of them."""
    place, lookout = wire.own_store(rejoin.REJOINED), Lookout("{}")
    living = [threading.Event(), threading.Event()]

    def asks(number: int) -> None:
        while living[number - 1].is_set():
            place.add(f"{number}/beat", 1)
            time.sleep(rejoin.PERIOD_S / 4)

    try:
        for event in living:
            event.set()
            number = place.add("asked", 1)
            place.set(f"{number}/label", "")
        with ThreadPoolExecutor() as pool:
            beats = [pool.submit(asks, number) for number in (1, 2)]
            until(lambda: lookout.number == 1)
            living[0].clear()
            until(lambda: lookout.number == 2)
            living[1].clear()
            until(lambda: lookout.number == 0)
            for beat in beats:
                beat.result()
    finally:
        for event in living:
            event.clear()
        lookout.close()


def test_newcomers_of_long_ago_cost_a_look_nothing(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each question takes a round trip between far hosts."""
    place = wire.own_store(rejoin.REJOINED)
    place.set("1/over", "")
    place.set("2/over", "")
    place.add("asked", 3)
    place.set("3/label", "")
    asked = Counter[str]()

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(place, name)

        def check(self, keys: list[str]) -> bool:
            asked.update(keys)
            return bool(place.check(keys))

    monkeypatch.setattr(rejoin, "own_store", lambda name: Counting())
    lookout = Lookout("{}")
    try:
        until(lambda: asked["3/over"] >= 8)
    finally:
        lookout.close()
    assert asked["1/over"] == asked["2/over"] == 1


def test_no_run_is_shown_once_nobody_looks_out(store: Any) -> None:
    place, lookout = wire.own_store(rejoin.REJOINED), Lookout("{}")
    until(lambda: bool(place.check(["run"])))
    lookout.close()
    until(lambda: not place.check(["run"]))


def test_no_run_is_shown_after_detach(store: Any) -> None:
    """Whether the model or the handle live on or not."""
    place, net = wire.own_store(rejoin.REJOINED), torch.nn.Linear(4, 2)
    optimizer = momentum(net.parameters())
    given = keywords(on_failure="shrink", timeout=LIMIT)
    handle = gw.attach(net, "topk", optimizer=optimizer, **given)
    for _ in range(2):
        net(torch.ones(1, 4)).sum().backward()
    until(lambda: bool(place.check(["run"])))
    handle.detach()
    until(lambda: not place.check(["run"]))
    assert handle.step == 2
