"""Gradients that stay one rank's own: the first optimizer step that takes them is
refused by name.

Each mistake leaves ranks with other parameters and no error of torch's own. Each
legitimate use of the same parts stays silent.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.utils.checkpoint import checkpoint

import gradwire as gw
from gradwire.errors import InvalidSetting, LoopMistake
from tests.runtime.given import keywords
from tests.runtime.ranks import Ranks
from tests.runtime.training import Net, ddp, loss_of, momentum

pytestmark = pytest.mark.multi
NUM_STEPS = 2


class Loop(NamedTuple):
    """What a body of a step is given."""

    model: Any
    handle: gw.Handle

    def loss(self, *, of: Any = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """The loss of a batch of this rank's own, by the model or a part of it."""
        found: Tensor = (of or self.model)(torch.randn(4, 8, dtype=dtype))
        return found.square().mean()

    @property
    def local(self) -> AbstractContextManager[None]:
        return self.handle.no_sync()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def plain(one: Loop) -> None:
    one.loss().backward()


def by_module(one: Loop) -> None:
    one.loss(of=one.model.module).backward()


def by_layers(one: Loop) -> None:
    """As adapters are called from the model that they adapt."""
    first, _, last = one.model.module
    one.loss(of=lambda x: last(first(x))).backward()


def by_module_on_purpose(one: Loop) -> None:
    with one.local:
        by_module(one)


def first_averages(one: Loop) -> None:
    plain(one)
    with one.local:
        plain(one)


def last_averages(one: Loop) -> None:
    with one.local:
        plain(one)
    plain(one)


def never_averages(one: Loop) -> None:
    with one.local:
        plain(one)


def two_forwards(one: Loop) -> None:
    losses = [one.loss(), one.loss()]
    losses[0].backward()
    losses[1].backward()


def twice_backward(one: Loop) -> None:
    loss = one.loss()
    loss.backward(retain_graph=True)
    loss.backward()


def in_double(one: Loop) -> None:
    if one.handle.step == 0:
        one.model.double()
    one.loss(dtype=torch.float64).backward()


def to_and_fro(one: Loop) -> None:
    one.model.double().float()
    plain(one)


def with_evaluation(one: Loop) -> None:
    plain(one)
    one.model(torch.ones(1, 8))  # without no_grad, as people forget it
    with torch.no_grad():
        one.model(torch.ones(1, 8))


def part_is_unused(one: Loop) -> None:
    first, _, _ = one.model.module
    one.model.module.forward = first.forward
    try:
        plain(one)
    finally:
        del one.model.module.forward


def in_segments(one: Loop) -> None:
    """Reentrant checkpoints, whose nested passes end before the backward pass does."""
    layers = one.model.module
    first, _, last = layers

    def run(x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for layer in (first, last):
            x = checkpoint(layer, x, use_reentrant=True)
        return x

    layers.forward = run
    try:
        plain(one)
    finally:
        del layers.forward


def last_averages_from_the_second_step(one: Loop) -> None:
    """Accumulation under static_graph: torch wants a first pass that averages."""
    (last_averages if one.handle.step else plain)(one)


def dropped_then_averaged(one: Loop) -> None:
    """A measure of each rank's own gradient, in passes whose gradients are dropped."""
    plain(one)
    one.model.zero_grad()
    with one.local:
        plain(one)
    one.model.zero_grad()
    plain(one)


Body = Callable[[Loop], None]
UNDER_NO_SYNC = "a later backward pass under no_sync"
UNSEEN = "has a gradient that DistributedDataParallel did not average"
CONVERTED = "was converted"
STATIC_FIRST = "the first pass of a DistributedDataParallel with static_graph=True"
STATIC = {"static_graph": True}
UNUSED = {"find_unused_parameters": True}

MISTAKES: dict[str, tuple[Body, Any, dict[str, Any] | None, str]] = {
    "plain, first averages": (first_averages, "none", None, UNDER_NO_SYNC),
    "plain, first averages, topk": (first_averages, "topk", None, UNDER_NO_SYNC),
    "first averages": (first_averages, "none", {}, UNDER_NO_SYNC),
    "first averages, topk": (first_averages, "topk", {}, UNDER_NO_SYNC),
    "by module": (by_module, "none", {}, UNSEEN),
    "by module, topk": (by_module, "topk", {}, UNSEEN),
    "by module, unused": (by_module, "topk", UNUSED, UNSEEN),
    "by module, static": (by_module, "none", STATIC, UNSEEN),
    "by layers": (by_layers, "topk", {}, UNSEEN),
    "two forwards": (two_forwards, "none", {}, UNSEEN),
    "twice backward, topk": (twice_backward, "topk", {}, UNSEEN),
    "in double": (in_double, "none", {}, CONVERTED),
    "in double, topk": (in_double, "topk", {}, CONVERTED),
    "to and fro": (to_and_fro, "none", {}, CONVERTED),
    "static, last averages": (last_averages, "none", STATIC, STATIC_FIRST),
}
"""A step, an exchange, DDP's settings (None: a plain module), and what the error
says.
"""

RIGHT: dict[str, tuple[Body, Any, dict[str, Any] | None]] = {
    "plain": (plain, "none", None),
    "plain, last averages": (last_averages, "topk", None),
    "plain, two forwards": (two_forwards, "topk", None),
    "plain, twice backward": (twice_backward, "none", None),
    "plain, never": (never_averages, "none", None),
    "plain, dropped": (dropped_then_averaged, "none", None),
    "ddp": (plain, "none", {}),
    "last averages": (last_averages, "none", {}),
    "last averages, topk": (last_averages, "topk", {}),
    "never": (never_averages, "none", {}),
    "never, topk": (never_averages, "topk", {}),
    "module on purpose": (by_module_on_purpose, "none", {}),
    "evaluation": (with_evaluation, "none", {}),
    "unused": (part_is_unused, "topk", UNUSED),
    "in segments": (in_segments, "none", {}),
    "in segments, topk": (in_segments, "topk", {}),
    "dropped": (dropped_then_averaged, "none", {}),
    "static": (plain, "none", STATIC),
    "static, averages first": (last_averages_from_the_second_step, "none", STATIC),
}


def trained(
    body: Body, exchange: Any, settings: dict[str, Any] | None, rank: int, **more: Any
) -> tuple[int, str]:
    """The number of steps that were made, and the error's text."""
    model = network() if settings is None else ddp(network(), **settings)
    handle = gw.attach(model, exchange, **keywords(**more))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    num_steps = 0
    text = ""
    try:
        while num_steps < NUM_STEPS:
            optimizer.zero_grad()
            body(Loop(model, handle))
            optimizer.step()
            num_steps += 1
    except LoopMistake as error:
        text = str(error)
    handle.detach()
    return num_steps, text


FEW = (
    *("plain, first averages", "by module", "two forwards", "in double, topk"),
    "static, last averages",
)
"""One mistake of each kind; each takes the half second in which ranks tell each
other.
"""
REST = tuple(name for name in MISTAKES if name not in FEW)


def all_trained(
    rank: int, world: int, names: Sequence[str]
) -> dict[str, tuple[int, str]]:
    cases: Any = {**MISTAKES, **RIGHT}
    return {name: trained(*cases[name][:3], rank) for name in names}


@pytest.mark.parametrize("names", [FEW, pytest.param(REST, marks=pytest.mark.slow)])
def test_the_first_step_over_gradients_of_one_rank_is_refused_by_name(
    two: Ranks, names: Sequence[str]
) -> None:
    for of_rank in two.run(all_trained, names):
        for name in names:
            num_steps, text = of_rank[name]
            assert (name, num_steps) == (name, 0)
            assert MISTAKES[name][-1] in text, (name, text)


def test_what_is_meant_so_stays_silent(two: Ranks) -> None:
    for of_rank in two.run(all_trained, list(RIGHT)):
        assert of_rank == dict.fromkeys(RIGHT, (NUM_STEPS, ""))


def on_one_rank(rank: int, world: int) -> tuple[int, str]:
    """Rank 0 alone averages in its first pass; rank 1 is told in its next step."""
    return trained(first_averages if rank == 0 else last_averages, "none", None, rank)


def test_a_mistake_of_one_rank_ends_all(two: Ranks) -> None:
    (num_steps, own), (_, reported) = two.run(on_one_rank)
    assert num_steps == 0
    for text in (own, reported):
        assert "on rank 0 of 2" in text
        assert UNDER_NO_SYNC in text


def by_another_optimizer(rank: int, world: int) -> int:
    """Averaged steps by one optimizer, then a step that a new one makes of this rank's
    own.
    """
    model = network()
    handle = gw.attach(model, "none")
    for body in (plain, plain, never_averages):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer.zero_grad()
        body(Loop(model, handle))
        optimizer.step()
    handle.detach()
    return handle.step


def test_a_new_optimizer_begins_where_the_one_before_has_ended(two: Ranks) -> None:
    assert two.run(by_another_optimizer) == [2, 2]


def compared_by_nobody(rank: int, world: int) -> list[tuple[int, str]]:
    return [trained(first_averages, "none", None, rank, check_every=None)]


def test_ranks_that_compare_no_parameters_may_step_apart(two: Ranks) -> None:
    assert two.run(compared_by_nobody) == [[(NUM_STEPS, "")]] * 2


def by_closure(rank: int, world: int, body: Body) -> str:
    model = network()
    handle = gw.attach(model, "none")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> None:
        optimizer.zero_grad()
        body(Loop(model, handle))

    with handle.no_sync():  # the first micro-batches of a framework's accumulation
        Loop(model, handle).loss().backward()
    try:
        optimizer.step(closure)  # type: ignore[arg-type]
    except LoopMistake as error:
        return str(error)
    finally:
        handle.detach()
    return ""


def test_a_closure_is_judged_by_the_gradients_that_it_has_made(two: Ranks) -> None:
    assert two.run(by_closure, last_averages) == ["", ""]
    assert all(UNDER_NO_SYNC in text for text in two.run(by_closure, first_averages))


@contextmanager
def caught() -> Iterator[list[logging.LogRecord]]:
    """The records of gradwire's log."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    log = logging.getLogger("gradwire")
    log.addHandler(handler)
    try:
        yield records
    finally:
        log.removeHandler(handler)


def by_hand(rank: int, world: int) -> tuple[list[str], list[str]]:
    """Warnings of a loop without an optimizer, in its first and its second step."""
    model = ddp(network())
    handle = gw.attach(model, "none")
    reported: list[list[str]] = []
    for _ in range(2):
        with caught() as records:
            by_module(Loop(model, handle))
            by_module(Loop(model, handle))
        reported.append([record.getMessage() for record in records])
    handle.detach()
    return reported[0], reported[1]


def test_a_loop_that_steps_by_hand_is_warned_once(two: Ranks) -> None:
    for first, later in two.run(by_hand):
        assert [UNSEEN in text for text in first] == [True]
        assert later == []


def foreign_model(rank: int, world: int) -> int:
    """Two models that train each other: one's loss brings gradients to the other's
    module.
    """
    models = [ddp(network()), ddp(nn.Linear(4, 1))]
    handles = [gw.attach(model, "topk") for model in models]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for _ in range(2):
        made = models[0](torch.randn(4, 8))
        models[1].module(made).mean().backward()  # leaves gradients in the second one
        optimizers[0].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        models[1](made.detach()).mean().backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    for handle in handles:
        handle.detach()
    return min(handle.step for handle in handles)


def test_gradients_that_no_optimizer_takes_are_nobodys_mistake(two: Ranks) -> None:
    assert two.run(foreign_model) == [2, 2]


def changed_before(rank: int, world: int) -> list[str]:
    reported = []
    for change in (
        lambda model: model.double(),
        lambda model: model.module[0].requires_grad_(False),
        lambda model: model.module[0].requires_grad_(True),
    ):
        inner = network()
        inner[0].requires_grad_(len(reported) < 2)  # type: ignore[index]
        model = ddp(inner)
        change(model)
        with pytest.raises(InvalidSetting) as raised:
            gw.attach(model, "topk")
        reported.append(str(raised.value))
    return reported


def test_a_ddp_that_was_made_for_other_parameters_is_refused(two: Ranks) -> None:
    for converted, frozen, unfrozen in two.run(changed_before):
        assert "trains 4 parameters of 864 bytes" in converted
        assert "made for 4 of 432 bytes" in converted
        assert "trains 2 parameters of 144 bytes" in frozen
        assert "was made for 2 of 144 bytes" in unfrozen
        assert all(
            "make it anew from its module" in text for text in (converted, frozen)
        )


def with_max_norm(rank: int, world: int) -> list[str]:
    reported = []
    for kind in (nn.Embedding, nn.EmbeddingBag):
        for freezes in (False, True):
            table = kind(9, 4, max_norm=0.5).requires_grad_(not freezes)
            model = nn.Sequential(table, nn.Linear(4, 1))
            with pytest.raises(InvalidSetting) as raised:
                gw.attach(model, "none")
            reported.append(str(raised.value))
    gw.attach(model, "none", failure=gw.FailurePolicy(check_every=None)).detach()
    model = nn.Sequential(kind(9, 4, max_norm=0.5), nn.Linear(4, 1))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    gw.local_steps(model, inner, "none", every=2).detach()
    return reported


def test_a_table_that_a_forward_pass_changes_is_refused_among_ranks(two: Ranks) -> None:
    for reported in two.run(with_max_norm):
        assert len(reported) == 4
        for text in reported:
            assert "max_norm of 0 must be None" in text
            assert "weight.copy_(weight.renorm(2, 0, 0.5))" in text


def test_a_process_alone_may_shorten_rows() -> None:
    gw.attach(nn.Embedding(9, 4, max_norm=0.5), "none").detach()


def steps_by_another_scaler(rank: int, world: int) -> list[str]:
    """The errors of a scaler that attach was not given, by exchange."""
    said = []
    for exchange, enabled in (("topk", True), ("topk", False), ("none", True)):
        net = Net()
        with gw.attach(net, exchange):
            optimizer = momentum(net.parameters())
            scaler = GradScaler("cpu", init_scale=8.0, enabled=enabled)
            scaler.scale(loss_of(net, rank, 0)).backward()
            try:
                scaler.step(optimizer)
            except gw.LoopMistake as error:
                said.append(str(error))
            else:
                said.append("")
    return said


def test_a_scaler_that_attach_was_not_given_is_refused(two: Ranks) -> None:
    """Residuals would have its scale; an exchange without residuals may go on."""
    for with_state, disabled, without_state in two.run(steps_by_another_scaler):
        assert "scaler=scaler" in with_state
        assert not disabled
        assert not without_state
