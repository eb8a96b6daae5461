"""What an optimizer did not take is put back, parameter by parameter; what it took
stays sent.

The account: W x the sum of means that were taken + the residuals = the sum of gradients
of the steps that were taken. A step is what one optimizer does with one or several
backward passes.
"""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Collection, Iterable
from copy import deepcopy as copy_of
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, Adam, Optimizer

import gradwire as gw
from tests.each import each
from tests.runtime.given import keywords
from tests.runtime.ranks import Ranks
from tests.runtime.state.test_checkpoint import through_a_file
from tests.runtime.test_controls import Route, lossy, put, route
from tests.runtime.training import Net, adamw, ddp, digest, loss_of

pytestmark = pytest.mark.multi


SCALE = 2.0**8
TOPK = gw.compress.topk(density=0.1)


class Pair(nn.Module):
    """Two layers, for two optimizers, whose gradients are drawn and not computed."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(31))
        self.b = nn.Parameter(torch.zeros(17))

    def forward(self, drawn_a: Tensor, drawn_b: Tensor) -> Tensor:
        return self.a @ drawn_a + self.b @ drawn_b


def drawn(rank: int, step: int, infinite: str = "") -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    found = torch.randn(31, generator=generator), torch.randn(17, generator=generator)
    for part, name in zip(found, "ab", strict=True):
        if name in infinite and rank == 0:
            part[step % 7] = torch.inf
    return found


class Account:
    """What gradients and means add up to in the steps that parameters took."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        self.pending = {param: torch.zeros_like(param) for param in params}
        self.given = {
            param: torch.zeros_like(param, dtype=torch.float64)
            for param in self.pending
        }
        self.means = {
            param: torch.zeros_like(param, dtype=torch.float64)
            for param in self.pending
        }

    def note(self, param: Tensor, grad: Tensor) -> None:
        self.pending[param] += grad

    def decide(self, grads: dict[Tensor, Tensor], *, is_taken: bool) -> None:
        for param, grad in grads.items():
            if is_taken:
                self.given[param] += self.pending[param]
                self.means[param] += grad
            self.pending[param].zero_()
            param.grad = None

    def error(self, residuals: dict[Tensor, Tensor]) -> float:
        """The largest part of a parameter's gradient sum, over all ranks, that is
        off.
        """
        errors = []
        for param, given in self.given.items():
            kept = residuals[param].double().view_as(given)
            both = torch.stack([given, kept])
            dist.all_reduce(both)
            off = dist.get_world_size() * self.means[param] + both[1] - both[0]
            errors.append(float(off.norm() / both[0].norm().clamp(min=1e-9)))
        return max(errors)


def residuals_of(*handles: Any) -> dict[Tensor, Tensor]:
    found = {}
    for handle in handles:
        for name, param in handle._synchroniser.params.items():
            zero = torch.zeros_like(param)
            found[param] = handle.residuals().get(name, zero)
    return found


def sgd(params: Iterable[Tensor], is_fused: bool = False) -> Optimizer:
    params = list(params)
    return Adam(params, lr=0.01, fused=True) if is_fused else SGD(params, lr=0.01)


def stepped(scaler: GradScaler, optimizer: Optimizer, account: Account) -> None:
    """One step of an optimizer by the scaler, which skips what is not finite."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    grads = {
        param: param.grad / scaler.get_scale()
        for param in params
        if param.grad is not None
    }
    before = [param.detach().clone() for param in params]
    scaler.step(optimizer)
    is_taken = all(bool(grad.isfinite().all()) for grad in grads.values())
    are_as_before = all(map(torch.equal, params, before))
    assert is_taken or are_as_before, "torch skips what is not finite"
    account.decide(grads, is_taken=is_taken)


def several_optimizers(
    rank: int, world: int, exchange: Any, way: str, is_fused: bool
) -> tuple[float, str]:
    """An account where a step's inf is in one optimizer's parameters, in both's, in
    none.
    """
    net = Pair()
    model: Any = ddp(net) if way == "ddp" else net
    optimizers = [sgd([net.a], is_fused), sgd([net.b], is_fused)]
    scaler = GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    settings = {"on_failure": "shrink"} if way == "shrink" else {}
    handle = gw.attach(
        model, exchange, scaler=scaler, **keywords(compress_if=every, **settings)
    )
    account = Account([net.a, net.b])
    for step, infinite in enumerate(["", "b", "a", "", "ab", "b", "", "a", "b"]):
        a, b = drawn(rank, step, infinite)
        account.note(net.a, a)
        account.note(net.b, b)
        scaler.scale(model(a, b)).backward()
        for optimizer in optimizers:
            stepped(scaler, optimizer, account)
        scaler.update()
    error = account.error(residuals_of(handle))
    handle.detach()
    return error, repr(sorted(vars(scaler)))


def every(name: str, param: Tensor) -> bool:
    return True


@each(
    "exchange, way, is_fused",
    [
        (TOPK, "module", False),
        (TOPK, "module", True),
        ("onebit", "ddp", False),
        ("onebit", "shrink", False),
        ("powersgd", "module", False),
    ],
)
def test_of_several_optimizers_only_the_skipped_one_is_undone(
    exchange: Any, way: str, is_fused: bool, two: Ranks
) -> None:
    bare = repr(sorted(vars(used_scaler())))
    for error, left in two.run(several_optimizers, exchange, way, is_fused):
        assert error < 1e-5
        assert left == bare, "detach gives the scaler its own methods back"


def used_scaler() -> GradScaler:
    scaler = GradScaler("cpu")
    scaler.scale(torch.ones(()))
    return scaler


def two_models(rank: int, world: int) -> float:
    """One optimizer steps two attached models, and an inf in one skips both."""
    nets = [Pair(), Pair()]
    scaler = GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    handles = [gw.attach(net, TOPK, scaler=scaler, options=EVERY) for net in nets]
    params = [param for net in nets for param in net.parameters()]
    optimizer, account = sgd(params), Account(params)
    for step, infinite in enumerate([0, 1, None, 0, None, 1]):
        for place, net in enumerate(nets):
            a, b = drawn(rank, 2 * step + place, "a" if place == infinite else "")
            account.note(net.a, a)
            account.note(net.b, b)
            scaler.scale(net(a, b)).backward()
        stepped(scaler, optimizer, account)
        scaler.update()
    error = account.error(residuals_of(*handles))
    for handle in handles:
        handle.detach()
    return error


def test_an_inf_in_one_model_undoes_the_step_of_every_model_that_was_skipped(
    two: Ranks,
) -> None:
    assert max(two.run(two_models)) < 1e-5


def accumulated(rank: int, world: int, exchange: Any) -> float:
    """Several exchanged passes are one step; b's optimizer steps every second time."""
    net = Pair()
    scaler = GradScaler("cpu", init_scale=SCALE)
    handle = gw.attach(net, exchange, scaler=scaler, options=EVERY)
    optimizers, account = [sgd([net.a]), sgd([net.b])], Account([net.a, net.b])
    passes = ["-", "-b", "b-", "--", "a-b", "-", "-ab", "--"]
    place = 0
    for step, own in enumerate(passes):
        for infinite in own:
            place += 1
            a, b = drawn(rank, place, infinite)
            account.note(net.a, a)
            account.note(net.b, b)
            scaler.scale(net(a, b)).backward()
        for optimizer in optimizers[: 1 + step % 2]:
            stepped(scaler, optimizer, account)
        scaler.update(SCALE)  # as gradients that add up must have one scale
    error = account.error(residuals_of(handle))
    handle.detach()
    return error


@each("exchange", [TOPK, "onebit", "powersgd"])
def test_passes_that_accumulate_are_one_step(exchange: Any, two: Ranks) -> None:
    assert max(two.run(accumulated, exchange)) < 1e-5


def saved_in_mid_step(rank: int, world: int) -> list[bool]:
    """Whether a state of mid-step is that of the last step, and a load in mid-step
    stays loaded.
    """
    net = Pair()
    scaler = GradScaler("cpu", init_scale=SCALE)
    handle = gw.attach(net, "onebit", scaler=scaler, options=EVERY)
    optimizer = sgd(net.parameters())

    def make_pass(step: int, infinite: str = "") -> None:
        scaler.scale(net(*drawn(rank, step, infinite))).backward()

    def end_step() -> None:
        scaler.step(optimizer)
        scaler.update(SCALE)
        optimizer.zero_grad()

    def kept() -> list[Tensor]:
        return [tensor.clone() for tensor in handle.residuals().values()]

    def are_equal(some: list[Tensor], others: list[Tensor]) -> bool:
        return all(map(torch.equal, some, others))

    make_pass(0)
    end_step()
    before = kept()
    make_pass(1)
    changed = kept()
    saved = handle.state_dict()
    make_pass(2, "a")
    end_step()
    found = [not are_equal(changed, before), are_equal(kept(), before)]
    make_pass(3)
    end_step()
    make_pass(4, "a")
    handle.load_state_dict(saved)
    found.append(are_equal(kept(), before))
    end_step()
    found.append(are_equal(kept(), before))
    make_pass(5)
    end_step()
    found.append(not are_equal(kept(), before))
    handle.detach()
    return found


def test_a_state_of_mid_step_is_that_of_the_last_step(two: Ranks) -> None:
    assert two.run(saved_in_mid_step) == [[True] * 5] * 2


def by_hand(rank: int, world: int, way: str) -> list[bool]:
    """Whether a step by hand is undone if a mean is not finite, and only then."""
    net = Pair()
    scaler = GradScaler("cpu", init_scale=SCALE)
    handle = gw.attach(net, "onebit", scaler=scaler, options=EVERY)
    optimizer, found = sgd(net.parameters()), []
    for step, infinite in enumerate(["", "", "b", ""]):
        before = handle.residuals()["a"].clone()
        scaler.scale(net(*drawn(rank, step, infinite))).backward()
        if way == "unscale":
            scaler.unscale_(optimizer)
        if all(bool(param.grad.isfinite().all()) for param in net.parameters()):
            optimizer.step()
        scaler.update(None if way == "unscale" else SCALE)
        optimizer.zero_grad()
        found.append(torch.equal(handle.residuals()["a"], before))
    handle.detach()
    return found


@each("way", ["unscale", "update alone"])
def test_a_step_by_hand_is_undone_by_its_means(way: str, two: Ranks) -> None:
    assert two.run(by_hand, way) == [[False, False, True, False]] * 2


def copied_scaler(rank: int, world: int) -> list[bool]:
    """Whether copies of an observed scaler are plain, and detach leaves it plain."""
    scaler, found = used_scaler(), []
    handles = [gw.attach(Pair(), TOPK, scaler=scaler, options=EVERY) for _ in range(2)]
    copies = copy_of(scaler), pickle.loads(pickle.dumps(scaler))
    found += [sorted(vars(copy)) == sorted(vars(used_scaler())) for copy in copies]
    handles[0].detach()
    found.append("step" in vars(scaler))
    handles[1].detach()
    found.append(sorted(vars(scaler)) == sorted(vars(used_scaler())))
    return found


def test_copies_of_a_scaler_are_plain(two: Ranks) -> None:
    assert two.run(copied_scaler) == [[True] * 4] * 2


def through_switches(
    rank: int, world: int, where: str, infinite: Collection[int]
) -> tuple[float, float, str]:
    """The account of a run that changes its plan; ranks' losses are infinite in some
    steps.

    Also the norm of what is left owed at the end, when gradients are dense.
    """
    net = Net()
    account, scaler = Account(net.parameters()), GradScaler("cpu", init_scale=SCALE)
    for param in net.parameters():
        param.register_hook(partial(note_unscaled, account, scaler, param))
    model, handle = put(net, where, route(where), scaler=scaler)
    optimizer = adamw(net.parameters())
    for step in range(18):
        loss = loss_of(model, rank, step)
        is_infinite = step in infinite and rank == world - 1
        scaler.scale(loss * (torch.inf if is_infinite else 1.0)).backward()
        stepped(scaler, optimizer, account)
        scaler.update()
    owed = handle.stats()["residual_norm"]
    error = account.error(
        {param: torch.zeros_like(param) for param in net.parameters()}
    )
    handle.detach()
    return error, owed, digest(net)


def note_unscaled(
    account: Account, scaler: GradScaler, param: Tensor, grad: Tensor
) -> None:
    account.note(param, grad / scaler.get_scale())


@pytest.mark.parametrize(
    ("where", "infinite"),
    [
        ("plain", (1, 4, 6, 8, 11, 13, 14)),  # each step behind which the plan changes
        pytest.param(
            "ddp",
            (2, 5, 7, 12, 14, 15),  # each first one by another plan
            marks=pytest.mark.slow,
        ),
        pytest.param("ddp on hosts", (1, 3, 4, 5, 13, 14), marks=pytest.mark.slow),
    ],
    ids=["plain", "ddp", "ddp on hosts"],
)
def test_switches_and_skipped_steps_lose_nothing(
    where: str, infinite: Collection[int], two: Ranks, four: Ranks
) -> None:
    found = (four if "hosts" in where else two).run(through_switches, where, infinite)
    assert max(error for error, _, _ in found) < 1e-5
    assert [owed for _, owed, _ in found] == [0.0] * len(found), (
        "the last steps are dense"
    )
    assert len({bits for _, _, bits in found}) == 1, "replicas differ"


def resumed(rank: int, world: int, where: str) -> list[float]:
    """Norms of what is owed after a load, and after each step; two steps are
    skipped.
    """
    net, scaler = Net(), GradScaler("cpu", init_scale=SCALE)
    optimizer = adamw(net.parameters())
    model, handle = put(net, where, Route({1: lossy(2)}), scaler=scaler)
    norms = []
    for step in range(8):
        optimizer.zero_grad()
        if step == 4:
            saved = through_a_file(handle.state_dict())
            handle.detach()
            model, handle = put(model, where, Route({}), scaler=scaler)
            handle.load_state_dict(saved)
        if step >= 4:
            norms.append(handle.stats()["residual_norm"])
        is_infinite = step in (4, 5) and rank == 0
        scaler.scale(
            loss_of(model, rank, step) * (torch.inf if is_infinite else 1.0)
        ).backward()
        scaler.step(optimizer)
        scaler.update()
    handle.detach()
    return norms


@each("where", ["plain", "ddp"])
def test_residuals_are_delivered_by_the_first_step_that_is_taken(
    where: str, two: Ranks
) -> None:
    for owed, *others in two.run(resumed, where):
        assert owed > 0.1
        assert others == [owed, owed, 0.0]


def uneven(rank: int, world: int) -> list[Tensor]:
    """Rank 0 runs out of data first; then a step of the others is skipped, and some are
    taken.

    Returns what each rank's exchange counts in draws.
    """
    net, scaler = Net(), GradScaler("cpu", init_scale=SCALE)
    model: Any = ddp(net)
    handle = gw.attach(
        model, gw.compress.randomk(density=0.2), scaler=scaler, options=EVERY
    )
    optimizer = adamw(net.parameters())
    counters = []
    with model.join():
        for step in range(2 + 4 * rank):
            optimizer.zero_grad()
            loss = loss_of(model, rank, step) * (torch.inf if step == 3 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    for message in handle._synchroniser.messages:
        counters += [t.clone() for t in message.rest_of_state().values()]
    handle.detach()
    return counters


def test_a_rank_that_has_joined_undoes_what_the_others_skip(two: Ranks) -> None:
    joined, trained = two.run(uneven)
    assert len(joined) > 0
    assert all(map(torch.equal, joined, trained))


def with_less(rank: int, world: int) -> tuple[list[Tensor], list[Tensor]]:
    """What is counted, and rank 1's residuals of b, after steps in which only rank 0
    steps b.
    """
    net, scaler = Pair(), GradScaler("cpu", init_scale=SCALE)
    handle = gw.attach(
        net, gw.compress.randomk(density=0.3), scaler=scaler, options=EVERY
    )
    onebit = gw.attach(other := Pair(), "onebit", scaler=scaler, options=EVERY)
    optimizers = [sgd([net.a, other.a]), sgd([net.b, other.b])][: 2 - rank]
    counts, residuals = [], []
    for step, infinite in enumerate(["", "b", "a", "ab", "ab", "", "b"]):
        for model in (net, other):
            scaler.scale(model(*drawn(rank, step, infinite))).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        net.zero_grad()
        other.zero_grad()
        for message in handle._synchroniser.messages:
            counts += [t.clone() for t in message.rest_of_state().values()]
        residuals.append(onebit.residuals()["b"].clone())
    handle.detach()
    onebit.detach()
    return counts, residuals


def test_a_rank_without_an_optimizer_decides_as_the_others(two: Ranks) -> None:
    (counts, _), (others, residuals) = two.run(with_less)
    assert len(counts) > 0
    assert all(map(torch.equal, counts, others))
    for skipped in (1, 3, 4, 6):
        assert torch.equal(residuals[skipped], residuals[skipped - 1])
    assert not torch.equal(residuals[2], residuals[1])


def with_closure(rank: int, world: int) -> list[bool]:
    """Whether passes of a closure are of the step that calls it, and of none that is
    skipped.
    """
    net, scaler = Pair(), GradScaler("cpu", init_scale=SCALE)
    handle = gw.attach(net, "onebit", scaler=scaler, options=EVERY)
    optimizer, found = sgd(net.parameters()), []

    def make_pass(step: int, infinite: str = "") -> None:
        optimizer.zero_grad()
        scaler.scale(net(*drawn(rank, step, infinite))).backward()

    before = handle.residuals()["a"].clone()
    for step, infinite in enumerate(["", "a", ""]):
        make_pass(2 * step, infinite)
        scaler.step(optimizer, partial(make_pass, 2 * step + 1))
        scaler.update()
        now = handle.residuals()["a"].clone()
        saved = handle.state_dict()["params"]["a"]["residual_N"]
        found += [torch.equal(now, before), torch.equal(saved, now)]
        before = now
    found.append(handle.step == 5)
    handle.detach()
    return found


def test_passes_of_a_closure_are_of_its_step(two: Ranks) -> None:
    assert two.run(with_closure) == [[False, True, True, True, False, True, True]] * 2


def losing_a_rank(rank: int, world: int) -> list[bool] | None:
    """A rank is lost in the second pass of a step; survivors repeat the step, which is
    skipped.

    Returns whether residuals are those of the last step that was taken, for the new
    number of ranks: once the rank is lost, and after the skipped step.
    """
    net, scaler = Pair(), GradScaler("cpu", init_scale=SCALE)
    settings = keywords(
        compress_if=every, on_failure="shrink", timeout=timedelta(seconds=60)
    )
    handle = gw.attach(net, "onebit", scaler=scaler, **settings)
    optimizer, found = sgd(net.parameters()), []

    def make_pass(step: int, infinite: str = "") -> None:
        scaler.scale(net(*drawn(rank, step, infinite))).backward()

    def are_of_the_last_step(params: dict[str, Any]) -> bool:
        factor = handle.world_size / world
        kept = {name: fields["residual_N"] for name, fields in params.items()}
        return all(
            torch.equal(kept[name], factor * own) for name, own in before.items()
        )

    make_pass(0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    before = {name: residual.clone() for name, residual in handle.residuals().items()}
    make_pass(1)
    if rank == world - 1:
        net.a.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(gw.RanksLost):
        make_pass(2)
    found.append(are_of_the_last_step(handle.state_dict()["params"]))
    make_pass(1)
    make_pass(2, "b")
    scaler.step(optimizer)
    scaler.update()
    found.append(
        are_of_the_last_step(
            {n: {"residual_N": r} for n, r in handle.residuals().items()}
        )
    )
    handle.detach()
    return found


def test_survivors_undo_a_step_that_was_begun_with_more_ranks(doomed: Ranks) -> None:
    *survivors, lost = doomed.outcomes(losing_a_rank)
    assert lost.exit_code == -signal.SIGKILL
    assert [one.value for one in survivors] == [[True, True]] * len(survivors), (
        survivors[0].error
    )


EVERY = gw.Options(compress_if=every)
