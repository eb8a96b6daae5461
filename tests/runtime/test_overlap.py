"""Training that overlaps the next forward pass leaves the same bits as training that does not.

`late_means` makes every premature read blatant: a gradient that has not arrived is NaN.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from gradwire.errors import RankFailed
from gradwire.runtime.overlap import overlap as overlap_module
from tests.each import each
from tests.runtime.gated_models import MODELS, Attention, Net
from tests.runtime.late_means import LateMeans, Loop, Make, Rig, batches, run, same
from tests.runtime.overlapped import (
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
def test_overlapped_loops(loop: Loop, make: Make) -> None:
    overlap = law(Net(), make, loop)
    assert overlap.num_overlapped >= NUM_STEPS - 1  # nothing follows the last
    assert not overlap.fallbacks


@each("model", MODELS)
@each("make", [adam, adamw_groups])
def test_models(model: type[nn.Module], make: Make) -> None:
    assert law(model(), make, usual).num_overlapped == NUM_STEPS - 1
    assert law(model(), make, clipped).num_overlapped == 0


@each("loop", FALLEN_BACK)
@each("make", OPTIMIZERS)
def test_loops_that_fall_back(loop: Loop, make: Make) -> None:
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
    assert overlap.fallbacks == {"scale took no part in the backward pass on this rank": 2}
    assert overlap.num_overlapped == NUM_STEPS - 3


def test_gradients_with_a_graph() -> None:
    with pytest.warns(UserWarning, match="create_graph"):
        overlap = law(Net(), momentum, graph_of_gradients)
    assert "has a graph" in next(iter(overlap.fallbacks))


def test_sparse_gradients() -> None:
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


def test_gradients_that_swap_places() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.one, self.two = nn.Parameter(torch.ones(13)), nn.Parameter(torch.zeros(13))

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x * self.one) + self.two

    overlap = law(Pair(), momentum, exchanged_gradients)
    assert overlap.fallbacks == {
        "the optimizer has pending gradients of another model or parameter": NUM_STEPS
    }


def test_two_optimizers() -> None:
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
        chosen = [p for name, p in model.named_parameters() if not name.startswith("last")]
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
        stepper.record = lambda: record()._replace(values=stepper._optimizer.param_groups)  # type: ignore[method-assign]


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
