"""What a plan has encoded early is, of a device's gradients, encoded by the host: the
same bits.

The device is `late`, on which a use before its event is noted, and a copy made as late
as may be.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch

import gradwire as gw
from gradwire.compress.topk import topk
from gradwire.contract import Member
from gradwire.exchange.error_feedback import tensor_encoder
from gradwire.planning.data.plan import Chunk, ExchangeSetting, Plan, PlannedMessage
from gradwire.runtime.device.streams import Offload, SideStream
from gradwire.runtime.handle import Handle
from gradwire_lab.compress.selective import selective
from tests.each import each, few, sampled
from tests.runtime.device import late
from tests.runtime.device.test_devices import SHAPES, Run, agrees, same
from tests.runtime.device.test_devices import run as by_device
from tests.runtime.ranks import Ranks

pytestmark = pytest.mark.multi

STEPS = 4
FLOAT_BYTES, ENTRY_BYTES = 4, 8
EARLY = {"0": 60 * 33, "3": 40 * 50}
"""The elements of the tensors that are encoded early; "1" is inline, and "2" travels
dense.
"""


def plan_of(
    sparsifier: str = "dgc", *, feedback: bool = True, early: bool = True
) -> Plan:
    """Two messages: of a dense tensor and an early one, of an inline tensor and an
    early one.
    """

    def chunks(*names: str) -> tuple[Chunk, ...]:
        numels = (torch.Size(SHAPES[int(name)]).numel() for name in names)
        pairs = zip(names, numels, strict=True)
        return tuple(Chunk(tensor=name, start=0, stop=numel) for name, numel in pairs)

    def setting(num_dense: int) -> ExchangeSetting:
        settings = {"sparsifier": sparsifier, "density": 0.05, "num_dense": num_dense}
        return ExchangeSetting(
            compressor="selective", settings=settings, error_feedback=feedback
        )

    last, first = ("3",), ("0",)
    where = ({"early": last}, {"inline": ("1",), "early": first})
    if not early:
        where = ({"inline": last}, {"inline": ("1", *first)})
    messages = (
        PlannedMessage(chunks=chunks("3", "2"), exchange="with dense", **where[0]),
        PlannedMessage(chunks=chunks("1", "0"), exchange="sparse", **where[1]),
    )
    exchanges = {"with dense": setting(1), "sparse": setting(0)}
    return Plan(planner="by hand", model="it", messages=messages, exchanges=exchanges)


def run(rank: int, plan: Plan, device: str, **how: Any) -> Run:
    """In one step each rank leaves an early tensor out."""

    def look(handle: Handle) -> None:
        is_there = any(one.name == "gradwire offload" for one in threading.enumerate())
        assert is_there == ("offload" in {span.lane for span in handle.trace().spans})

    used, given = {0: (1, 2), 1: (0, 1)}, {"steps": range(STEPS), **how}
    return by_device(rank, plan, device, look, used=used, needs_pinned=True, **given)


def compare(
    rank: int, world: int, plan: Plan, seeds: Sequence[int | None], how: Any
) -> None:
    host = run(rank, plan, "cpu", **how)
    assert host.stats["offloaded"] == {"tensors": 0, "bytes_per_step": 0}
    assert host.lanes == {
        "encode 0": "compute",
        "encode 1": "backward",
        "encode 3": "compute",
    }
    for seed in seeds:
        device = run(rank, plan, "late", seed=seed, **how)
        agrees(device, host, plan)
        assert device.stats["encoded_on"] == {"late:0": 2}
        within = dict.fromkeys(("copy 0", "copy 3", "encode 1"), "backward")
        assert device.lanes == within | dict.fromkeys(
            ("encode 0", "encode 3"), "offload"
        )


@few(
    "sparsifier, feedback, seeds, how",
    [
        ("topk", True, (None, 0), {}),
        ("dgc", False, (None,), {}),
        # a step counts on all ranks or on none
        ("topk", True, (None,), {"on_failure": "shrink"}),
        ("redsync", True, (None,), {}),
    ],
    fast=2,
    ids=["topk", "dgc without feedback", "shrink", "redsync"],
)
def test_the_host_makes_the_same_bits(
    sparsifier: str,
    feedback: bool,
    seeds: Sequence[int | None],
    how: Any,
    late_two: Ranks,
) -> None:
    late_two.run(compare, plan_of(sparsifier, feedback=feedback), seeds, how)


def in_two_parts(rank: int, world: int) -> None:
    plan = plan_of("dgc")
    whole = run(rank, plan, "late")
    for device in ("late", "cpu"):
        begun = run(rank, plan, device, steps=(0, 1))
        state = {**begun.state, "run": "before"}
        resumed = run(rank, plan, "late", steps=(2, 3), state=state)
        assert same(begun.means + resumed.means, whole.means)
        assert same(resumed.state["params"], whole.state["params"])


def test_a_checkpoint_goes_on_wherever_it_was_taken(late_two: Ranks) -> None:
    late_two.run(in_two_parts)


# ---- what is copied, and who encodes -------------------------------------------------


def copied(rank: int, world: int) -> None:
    every = {"steps": (0, 2, 3)}  # in which all gradients are there
    early, inline = (
        run(rank, plan_of("topk", early=e), "late", **every) for e in (True, False)
    )
    ways = ("to_host_bytes_per_step", "to_device_bytes_per_step")
    there, back = (early.stats[way] - inline.stats[way] for way in ways)
    assert there == FLOAT_BYTES * sum(EARLY.values())
    assert back == ENTRY_BYTES * sum(round(0.05 * numel) for numel in EARLY.values())
    assert early.stats["offloaded"] == {"tensors": 2, "bytes_per_step": there}
    assert inline.stats["offloaded"] == {"tensors": 0, "bytes_per_step": 0}
    assert early.stats["wire_bytes_per_step"] == inline.stats["wire_bytes_per_step"]
    assert len({*early.num_pinned}) == 1, "memory is pinned again"
    assert early.stats["pinned_bytes"] - inline.stats["pinned_bytes"] >= there + back
    assert same(early.means, inline.means)


def test_a_sum_goes_out_and_entries_come_back(late_two: Ranks) -> None:
    late_two.run(copied)


def by_whom(rank: int, world: int) -> set[tuple[int, bool, str]]:
    """The length, whereabouts and thread of all that the sparsifier was given."""
    given: set[tuple[int, bool, str]] = set()
    encode = topk.encode_many

    def noting(self: topk, states: Any, grads: Any, *rest: Any) -> Any:
        thread = threading.current_thread().name
        given.update((one.numel(), one.is_cpu, thread) for one in grads)
        return encode(self, states, grads, *rest)

    with mock.patch.object(topk, "encode_many", noting):
        run(rank, plan_of("topk"), "late", steps=(0, 2))
    return given


def test_the_codec_is_given_host_memory_by_a_thread_of_its_own(late_two: Ranks) -> None:
    for given in late_two.run(by_whom):
        on_host = {(numel, thread) for numel, is_cpu, thread in given if is_cpu}
        assert on_host == {(numel, "gradwire offload") for numel in EARLY.values()}
        assert {numel for numel, is_cpu, _ in given if not is_cpu} == {7 * 11}


@each("sparsifier", ["topk", "dgc", "redsync"])
def test_what_is_not_finite_leaves_no_residual(sparsifier: str) -> None:
    exchange = gw.with_error_feedback(
        selective(sparsifier=sparsifier, density=0.1, num_dense=0, floor=0.1)
    )
    spec, me = gw.TensorSpec("odd", 100, shapes=((100,),)), Member(0, 2)
    grad_N = torch.arange(100.0).sin()
    grad_N[:3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    state = exchange.init(spec, 2)
    encoder = tensor_encoder(exchange)
    assert encoder is not None
    steps = encoder.encode_on_host(me, state.inner, 0, grad_N, state.residual_N)
    made = steps.send(tuple(one.clone() for one in next(steps)))
    with pytest.raises(StopIteration):
        steps.send(tuple(one.clone() for one in made))
    sent_N = torch.zeros(100).index_add_(0, *made)
    left_N = state.residual_N
    assert sent_N.count_nonzero() > 0
    assert left_N[:3].tolist() == [0.0] * 3
    assert torch.equal(left_N[3:] + sent_N[3:].nan_to_num(), grad_N[3:])


# ---- what is left out, and what goes wrong -------------------------------------------


def _at_once(self: Offload) -> None:
    """The event is recorded before the copy."""
    event = self.side.record_event()
    LEAVE(self)
    self.out = event


def _elsewhere(self: Offload) -> None:
    """Entries come back on a stream of which the next step's copies know nothing."""
    stream, self.side = self.side, mock.Mock(wraps=self.side)
    self.side.use.side_effect = lambda: late.LATE.use(late.LATE.new_stream(late.DEVICE))
    self.side.kind, self.side.staging = stream.kind, stream.staging
    self.side.device = stream.device
    ENCODE(self)


def _before(self: SideStream, events: Any) -> AbstractContextManager[None]:
    """A copy into the message, in front of the events of its gradients."""
    return self.use()


LEAVE, ENCODE = Offload.leave, Offload.encode
BROKEN: dict[str, Callable[[], Any]] = {
    "selects at once": lambda: mock.patch.object(Offload, "leave", _at_once),
    "goes on at once": lambda: mock.patch.object(Offload, "encode", _elsewhere),
    "gathers at once": lambda: mock.patch.object(SideStream, "behind", _before),
}
"""Runtimes that leave one wait out."""


def break_each(rank: int, world: int, names: list[str]) -> list[str]:
    """The broken runtimes of which nothing was found."""
    plan = plan_of("topk")
    sound, missed = run(rank, plan, "late"), []
    assert not sound.wrong
    for name in names:
        with BROKEN[name]():
            broken = run(rank, plan, "late")
        if not broken.wrong and same(broken.means, sound.means):
            missed.append(name)
    return missed


@sampled("names", [*BROKEN])
def test_a_wait_left_out_is_found(names: list[str], late_two: Ranks) -> None:
    assert late_two.run(break_each, names) == [[], []]


def fail(rank: int, world: int) -> tuple[str, str]:
    """The error on each rank where the host's selection raises on rank 1."""
    encode = topk.encode_many

    def failing(self: topk, states: Any, grads: Any, *rest: Any) -> Any:
        if rank == 1 and threading.current_thread().name == "gradwire offload":
            raise ValueError("no room")
        return encode(self, states, grads, *rest)

    with (
        mock.patch.object(topk, "encode_many", failing),
        pytest.raises((ValueError, gw.RankFailed)) as raised,
    ):
        run(rank, plan_of("topk"), "late")
    return type(raised.value).__name__, str(raised.value)


def test_an_error_of_the_host_reaches_all(doomed_two: Ranks) -> None:
    other, own = doomed_two.run(fail)
    assert own == ("ValueError", "no room")
    assert other[0] == "RankFailed"
    assert "rank 1 of 2 raised ValueError" in other[1]
