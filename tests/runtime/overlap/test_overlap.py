"""Training that overlaps the next forward pass leaves the same bits as training that
does not.

`late_means` makes every premature read blatant: a gradient that has not arrived is NaN.
"""

from __future__ import annotations

import copy
import gc
import io
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from gradwire.errors import RankFailed
from gradwire.runtime.overlap import overlap as overlap_module
from gradwire.runtime.overlap.pending import PendingGrad
from tests.each import each
from tests.runtime.overlap.gated_models import MODELS, Attention, Net, Tied
from tests.runtime.overlap.late_means import (
    LateMeans,
    Loop,
    Make,
    Rig,
    batches,
    run,
    same,
)
from tests.runtime.overlap.overlapped import (
    FALLEN_BACK,
    NUM_STEPS,
    OPTIMIZERS,
    OVERLAPPED,
    adam,
    adamw_groups,
    clipped,
    evaluating,
    exchanged_gradients,
    frozen_midway,
    graph_of_gradients,
    law,
    loss_of,
    momentum,
    schedule_early,
    two_forwards,
    usual,
    with_closure,
    zero_to_zeros,
)


@each("make", OPTIMIZERS)
@each("loop", OVERLAPPED)
def test_usual_loops_overlap_every_forward_pass(loop: Loop, make: Make) -> None:
    overlap = law(Net(), make, loop)
    assert overlap.num_overlapped >= NUM_STEPS - 1  # nothing follows the last
    assert not overlap.fallbacks


@each("model", MODELS)
@each("make", [adam, adamw_groups])
def test_every_model_overlaps_and_clipping_never_does(
    model: type[nn.Module], make: Make
) -> None:
    assert law(model(), make, usual).num_overlapped == NUM_STEPS - 1
    assert law(model(), make, clipped).num_overlapped == 0


@each("loop", FALLEN_BACK)
@each("make", OPTIMIZERS)
def test_loops_that_cannot_overlap_fall_back_and_say_why(
    loop: Loop, make: Make
) -> None:
    overlap = law(Net(), make, loop)
    assert overlap.fallbacks.total() == NUM_STEPS
    assert overlap.num_overlapped == 0
    assert all(FALLEN_BACK[loop] in reason for reason in overlap.fallbacks)


def test_a_closure_is_run_whole() -> None:
    overlap = law(Net(), momentum, with_closure)
    assert overlap.num_overlapped + overlap.fallbacks.total() == NUM_STEPS


def test_an_optimizer_that_needs_a_closure() -> None:
    def lbfgs(model: nn.Module) -> Optimizer:
        return optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    overlap = law(Net(), lbfgs, with_closure)
    assert overlap.num_overlapped == 0
    assert "LBFGS" in next(iter(overlap.fallbacks))


def test_a_parameter_is_frozen_midway() -> None:
    """Without a gradient on this rank the step is settled within backward."""
    overlap = law(Net(), momentum, frozen_midway)
    assert overlap.fallbacks == {
        "scale took no part in the backward pass on this rank": 2
    }
    assert overlap.num_overlapped == NUM_STEPS - 3


def test_gradients_with_a_graph_fall_back() -> None:
    with pytest.warns(UserWarning, match="create_graph"):
        overlap = law(Net(), momentum, graph_of_gradients)
    assert "has a graph" in next(iter(overlap.fallbacks))


def test_sparse_gradients_fall_back() -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.rows = nn.Embedding(9, 13, sparse=True)
            self.net = Net()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(self.rows((x[:, 0] > 0).long()) + x)  # type: ignore[no-any-return]

    def plain(model: nn.Module) -> Optimizer:
        return optim.SGD(model.parameters(), lr=0.1)

    overlap = law(Rows(), plain, usual)
    assert overlap.fallbacks == {"the gradient of rows.weight is sparse": NUM_STEPS}


def test_gradients_that_swap_places_fall_back() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.one, self.two = (
                nn.Parameter(torch.ones(13)),
                nn.Parameter(torch.zeros(13)),
            )

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x * self.one) + self.two

    overlap = law(Pair(), momentum, exchanged_gradients)
    assert overlap.fallbacks == {
        "the optimizer has pending gradients of another model or parameter": NUM_STEPS
    }


def test_the_second_of_two_optimizers_gets_pending_gradients() -> None:
    """The second looks at gradients that are pending, and gets them."""

    def loop(model: nn.Module, optimizer: Optimizer, rig: Rig) -> Any:
        assert isinstance(model, Net)
        other = optim.SGD(model.last.parameters(), lr=0.2, momentum=0.5)
        for x in batches(NUM_STEPS):
            loss_of(model, x).backward()
            optimizer.step()
            other.step()
            optimizer.zero_grad()
            other.zero_grad()
        return other.state_dict()

    def rest(model: nn.Module) -> Optimizer:
        chosen = [
            p for name, p in model.named_parameters() if not name.startswith("last")
        ]
        return optim.AdamW(chosen, lr=0.01)

    overlap = law(Net(), rest, loop)
    assert overlap.fallbacks.total() == NUM_STEPS


@each("model", MODELS)
@each("make", [adamw_groups])
def test_evaluation_sees_updated_parameters(model: type[nn.Module], make: Make) -> None:
    overlap = law(model(), make, evaluating)
    assert overlap.num_overlapped == NUM_STEPS - 3


def test_part_of_a_model_is_evaluated() -> None:
    def loop(model: nn.Module, optimizer: Optimizer, rig: Rig) -> list[Tensor]:
        assert isinstance(model, Attention)
        outputs = []
        for x in batches(NUM_STEPS):
            loss_of(model, x).backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                outputs.append(model.layer(torch.ones(2, 3, 16)))
            model.train()
        return outputs

    law(Attention(), momentum, loop)


def test_checkpoints_hold_all_updates() -> None:
    def loop(model: nn.Module, optimizer: Optimizer, rig: Rig) -> list[Any]:
        assert isinstance(model, Net)
        saved: list[Any] = []
        for i, x in enumerate(batches(NUM_STEPS)):
            optimizer.zero_grad()
            loss_of(model, x).backward()
            optimizer.step()
            if i == 1:
                saved.append(copy.deepcopy(model.state_dict()))
            if i == 2:
                saved.append(copy.deepcopy(optimizer.state_dict()))
            if i == 3:
                saved.append(copy.deepcopy(model.last.state_dict()))
            if i == 4:
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
        file = io.BytesIO()
        torch.save([model.state_dict(), optimizer.state_dict()], file)
        return [saved, torch.load(io.BytesIO(file.getvalue()))]

    for make in OPTIMIZERS:
        assert not law(Net(), make, loop).fallbacks


# The laws bite.


def without_gates(rig: Rig) -> None:
    if rig.overlap is not None:
        rig.overlap._gates._enter = lambda names: None


def with_rates_of_later(rig: Rig) -> None:
    if rig.overlap is not None:
        stepper = rig.overlap._stepper
        record = stepper.record
        stepper.record = lambda: record()._replace(
            values=stepper._optimizer.param_groups
        )  # type: ignore[method-assign]


def never_settling(rig: Rig) -> None:
    if rig.overlap is not None:
        rig.overlap._looked_at = lambda looker: None  # type: ignore[method-assign]


@each(
    "change, loop",
    [
        (with_rates_of_later, schedule_early),
        (never_settling, clipped),
        (never_settling, two_forwards),
        (never_settling, zero_to_zeros),
    ],
)
def test_wrong_overlaps_are_found(change: Callable[[Rig], None], loop: Loop) -> None:
    expected, _ = run(Net(), momentum, loop, None)
    try:
        found, _ = run(Net(), momentum, loop, LateMeans(), change=change)
    except AssertionError:
        return
    assert not same(found, expected)


def test_parameters_settle_where_gates_are_missing() -> None:
    expected, _ = run(Net(), momentum, usual, None)
    found, rig = run(Net(), momentum, usual, LateMeans(), change=without_gates)
    assert same(found, expected)
    assert rig.overlap is not None


def test_missing_gates_and_stand_ins_are_found() -> None:
    def without_both(rig: Rig) -> None:
        without_gates(rig)
        if rig.overlap is not None:
            rig.overlap._pending_class = nn.Parameter  # type: ignore[assignment]

    with pytest.raises(RankFailed, match="before its update"):
        run(Net(), momentum, usual, LateMeans(), change=without_both)


def test_plain_gradients_instead_of_pending_ones_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(overlap_module, "pending", lambda grad, round: grad)
    expected, _ = run(Net(), momentum, usual, None)
    found, _ = run(Net(), momentum, usual, LateMeans())
    assert not same(found, expected)


# ---- What a gate before a layer waits for, what ends a run, and how an overlap comes a


# What a gate waits for.


def begin(model: nn.Module, make: Make = momentum) -> tuple[LateMeans, Rig, Optimizer]:
    """One step of training; all its updates are on their way."""
    arrivals = LateMeans()
    optimizer = make(model)
    rig = Rig(model, optimizer, arrivals)
    loss_of(model, batches(1)[0]).backward()
    optimizer.step()
    assert arrivals.waited == []
    return arrivals, rig, optimizer


def test_each_layer_waits_for_its_own_parameters_alone() -> None:
    model = Net()
    arrivals, _, _ = begin(model)
    model(batches(1)[0])
    assert arrivals.waited == [
        ("scale",),
        ("start.weight", "start.bias"),
        ("norm.weight", "norm.bias"),
        ("body.0.weight", "body.0.bias"),
        ("body.2.weight",),
        ("last.weight", "last.bias"),
    ]
    assert arrivals.num_finished == 0


def test_what_has_arrived_goes_along(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    arrivals, rig, _ = begin(model)
    assert rig.overlap is not None
    made: list[int] = []
    apply = rig.overlap._stepper.apply
    monkeypatch.setattr(
        rig.overlap._stepper,
        "apply",
        lambda asked, params: (made.append(len(params)), apply(asked, params)),
    )
    arrivals.deliver("start.weight", "start.bias", "norm.weight", "last.weight")
    model(batches(1)[0])
    assert arrivals.waited[:2] == [("scale",), ("norm.bias",)]
    assert made == [4, 1, 2, 2, 1]


def test_modules_that_are_not_called_are_waited_for_around_them() -> None:
    model = Attention()
    arrivals, _, _ = begin(model)
    model(batches(1)[0])
    assert arrivals.waited[0] == ("extra.0", "extra.1")
    attention = next(
        names for names in arrivals.waited if "layer.self_attn.in_proj_weight" in names
    )
    assert "layer.self_attn.out_proj.weight" in attention


def test_shared_weights_wait_at_their_first_use() -> None:
    model = Tied()
    arrivals, _, _ = begin(model)
    model(batches(1)[0])
    assert arrivals.waited[1:] == [("one.weight", "one.bias"), ("two.bias",)]


def test_gradients_are_the_means_once_a_layer_was_entered() -> None:
    model = Net()
    _, _, optimizer = begin(model)
    model.start(torch.ones(1, 13))
    assert type(model.start.weight.grad) is Tensor
    assert isinstance(model.last.weight.grad, PendingGrad)
    optimizer.zero_grad()
    model.last(torch.ones(1, 16))
    assert model.last.weight.grad is None
    assert optimizer.state[model.last.weight]["momentum_buffer"].isfinite().all()


def test_a_gradient_is_freed_once_it_was_applied_and_cleared() -> None:
    model = Net()
    arrivals, _, optimizer = begin(model)
    arrivals.deliver("scale")
    gone = weakref.ref(arrivals.grads.pop("scale"))
    optimizer.zero_grad()
    assert gone() is not None
    model(batches(1)[0])
    assert gone() is None


def test_a_copy_of_the_model_has_all_updates_and_no_gates() -> None:
    model = Net()
    arrivals, _, _ = begin(model)
    twin = copy.deepcopy(model)
    assert (arrivals.waited, arrivals.num_finished) == ([], 1)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in twin.modules())
    assert all(
        type(p) is nn.Parameter for p in (*twin.parameters(), *model.parameters())
    )
    assert same(twin.state_dict(), model.state_dict())


class Methods(nn.Module):
    """Used through a method, so the root and its own parameter are never called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.ones(13))
        self.inner = nn.Linear(13, 5)

    def features(self, x: Tensor) -> Tensor:
        return self.inner(x * self.scale)  # type: ignore[no-any-return]


def through_a_method(model: nn.Module, optimizer: Optimizer, rig: Rig) -> None:
    assert isinstance(model, Methods)
    for x in batches(NUM_STEPS):
        model.features(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_parameters_of_no_called_module_are_updated_in_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    law(Methods(), momentum, through_a_method)
    assert "waits for the gradients of 1 parameters (scale" in caplog.text
    run(Methods(), momentum, through_a_method, arrivals := LateMeans())
    assert arrivals.waited[:2] == [("scale",), ("inner.weight", "inner.bias")]


# What is not used, and what takes turns.


def test_branches_that_take_turns_fall_back() -> None:
    class Branches(Net):
        turn = 0

        def forward(self, x: Tensor) -> Tensor:
            self.turn += 1
            y = self.norm(torch.tanh(self.start(x * self.scale)))
            return self.last(self.body[0](y) if self.turn % 2 else self.body[2](y))  # type: ignore[no-any-return]

    overlap = law(Branches(), momentum, usual)
    assert overlap.fallbacks.total() == NUM_STEPS


def test_written_by_hand_after_synchronize_is_right() -> None:
    def loop(model: nn.Module, optimizer: Optimizer, rig: Rig) -> list[Tensor]:
        average = [p.detach().clone() for p in model.parameters()]
        for x in batches(NUM_STEPS):
            optimizer.zero_grad()
            loss_of(model, x).backward()
            optimizer.step()
            rig.settle()
            with torch.no_grad():
                for mean, param in zip(average, model.parameters(), strict=True):
                    param.clamp_(-0.2, 0.2)
                    mean.lerp_(param, 0.5)
        return average

    law(Net(), momentum, loop)


def test_a_lost_peer_is_told_at_the_gate_and_at_a_look() -> None:
    model = Net()
    arrivals, rig, _ = begin(model)
    arrivals.lost = RankFailed("rank 1 of 2 stopped answering", ranks=(1,), step=4)
    with pytest.raises(RankFailed) as caught:
        model(batches(1)[0])
    assert caught.value is arrivals.lost
    assert model.last.weight.grad is not None
    with pytest.raises(RankFailed):
        model.last.weight.grad.sum()
    with pytest.raises(RankFailed):
        rig.settle()
    assert rig.overlap is not None
    with pytest.raises(RankFailed):
        rig.overlap.detach()
    assert all(type(param) is nn.Parameter for param in model.parameters())
    model(batches(1)[0])  # The gates are gone.


# Coming and going.


def test_detach_leaves_model_and_optimizer_as_they_were() -> None:
    model = Net()
    plain, optimizer = copy.deepcopy(model), momentum(model)
    before = set(vars(optimizer)), [len(m._forward_pre_hooks) for m in model.modules()]
    arrivals = LateMeans()
    rig = Rig(model, optimizer, arrivals)
    loss_of(model, batches(1)[0]).backward()
    optimizer.step()
    assert rig.overlap is not None
    rig.overlap.detach()
    assert arrivals.num_finished == 1
    assert (
        set(vars(optimizer)) - {"_opt_called"},
        [len(m._forward_pre_hooks) for m in model.modules()],
    ) == before
    assert not any(m._forward_hooks or m._state_dict_pre_hooks for m in model.modules())
    expected = momentum(plain)
    loss_of(plain, batches(1)[0]).backward()
    for param in plain.parameters():
        assert param.grad is not None
        param.grad.mul_(0.75)
    expected.step()
    assert same(model.state_dict(), plain.state_dict())
    assert same(optimizer.state_dict(), expected.state_dict())


def test_a_dropped_model_is_freed() -> None:
    model = Net()
    _, rig, optimizer = begin(model)
    held, gone = model.last.weight.grad, weakref.ref(model)
    weight = model.last.weight
    del model, rig, optimizer
    gc.collect()
    assert gone() is None
    assert held is not None
    with pytest.raises(ValueError, match="never arrived"):
        held.sum()
    with pytest.raises(ValueError, match="last update was never made"):
        weight.sum()


def test_a_fall_back_is_logged_once_for_each_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run(Net(), momentum, clipped, LateMeans())
    (record,) = caplog.records
    assert record.name == "gradwire"
    assert record.levelno == logging.WARNING
    assert "clip_grad_norm_ at overlapped.py" in record.getMessage()
    assert "optimizer=None" in record.getMessage()
    caplog.clear()
    run(Net(), momentum, usual, LateMeans())
    run(Net(), momentum, evaluating, LateMeans())
    assert not caplog.records
