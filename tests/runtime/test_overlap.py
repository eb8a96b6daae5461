"""Training that overlaps the next forward pass leaves the same bits as training that does not.

`late_means` makes every premature read blatant: a gradient that has not arrived is NaN.
"""

from __future__ import annotations

import copy
import gc
import io
import logging
import math
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.optim import Optimizer, lr_scheduler
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from gradwire.errors import RankFailed
from gradwire.runtime import overlap as overlap_module
from gradwire.runtime.overlap import Overlap
from gradwire.runtime.pending import PendingGrad
from tests.runtime.late_means import LateMeans, Loop, Make, Rig, batches, run, same

NUM_STEPS = 6


class Net(nn.Module):
    """Layers of every usual kind, and a parameter of the root's own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.ones(13))
        self.start = nn.Linear(13, 16)
        self.norm = nn.LayerNorm(16)
        self.body = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16, bias=False))
        self.last = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(self.norm(torch.tanh(self.start(x * self.scale)))))  # type: ignore[no-any-return]


class Tied(nn.Module):
    """One matrix under two names, used a third time by hand."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.start = nn.Linear(13, 16)
        self.one, self.two = nn.Linear(16, 16), nn.Linear(16, 16)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.two(torch.tanh(self.one(torch.tanh(self.start(x))))), self.one.weight)


class Attention(nn.Module):
    """Its projection out is used without being called; in evaluation a whole layer is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.start = nn.Linear(13, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True)
        self.extra = nn.ParameterList([torch.ones(16), torch.zeros(16)])

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(self.start(x).unsqueeze(1))
        return y.squeeze(1) * self.extra[0] + self.extra[1]


class Checkpointed(Net):
    """Runs its body a second time in the backward pass."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(torch.tanh(self.start(x * self.scale)))
        if torch.is_grad_enabled():
            y = checkpoint(self.body, y, use_reentrant=self.reentrant)
        else:
            y = self.body(y)
        return self.last(y)  # type: ignore[no-any-return]


class Reentrant(Checkpointed):
    reentrant = True


class Selective(Net):
    """Keeps the sums of a forward pass for the backward pass, in the order in which they come.

    ``momentum`` makes sums too, in the midst of it; they must not be taken for these.
    """

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(torch.tanh(self.start(x * self.scale)))
        context = partial(create_selective_checkpoint_contexts, [torch.ops.aten.add.Tensor])
        y = checkpoint(self._residual, y, use_reentrant=False, context_fn=context)
        return self.last(y)  # type: ignore[no-any-return]

    def _residual(self, y: Tensor) -> Tensor:
        return torch.tanh(y + self.body(y)).square()


class Normed(Net):
    """Weights that are made of others by parametrization."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.utils.parametrizations.weight_norm(self.start)


MODELS = [Net, Tied, Attention, Checkpointed, Reentrant, Selective, Normed]


def momentum(model: nn.Module) -> Optimizer:
    return optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def adam(model: nn.Module) -> Optimizer:
    return optim.Adam(model.parameters(), lr=0.01)


def adamw_groups(model: nn.Module) -> Optimizer:
    """Matrices decay and vectors do not, so groups are not in order of registration."""
    params = list(model.parameters())
    return optim.AdamW(
        [
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0, "lr": 0.02},
            {"params": [p for p in params if p.dim() >= 2], "weight_decay": 0.1},
        ],
        lr=0.01,
        fused=True,
    )


OPTIMIZERS = [momentum, adam, adamw_groups]


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


def usual(model: nn.Module, optimizer: Optimizer, rig: Rig) -> list[float]:
    losses = []
    for x in batches(NUM_STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def zero_after_step(model: nn.Module, optimizer: Optimizer, rig: Rig) -> None:
    for x in batches(NUM_STEPS):
        loss_of(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()


def zero_before_backward(model: nn.Module, optimizer: Optimizer, rig: Rig) -> None:
    for x in batches(NUM_STEPS):
        loss = loss_of(model, x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def none_by_hand(model: nn.Module, optimizer: Optimizer, rig: Rig) -> None:
    for x in batches(NUM_STEPS):
        loss_of(model, x).backward()
        optimizer.step()
        for param in model.parameters():
            param.grad = None


def never_zeroed(model: nn.Module, optimizer: Optimizer, rig: Rig) -> None:
    for x in batches(NUM_STEPS):
        loss_of(model, x).backward()
        optimizer.step()


def two_backwards(model: nn.Module, optimizer: Optimizer, rig: Rig) -> None:
    """Gradients accumulate over two exchanged backward passes."""
    for i, x in enumerate(batches(2 * NUM_STEPS)):
        loss_of(model, x).backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()


def two_forwards(model: nn.Module, optimizer: Optimizer, rig: Rig) -> None:
    """No forward pass between two backward passes."""
    for x in batches(NUM_STEPS):
        one, two = loss_of(model, x), loss_of(model, x.flip(0) + 1)
        one.backward()
        two.backward()
        optimizer.step()
        optimizer.zero_grad()


def skipped_steps(model: nn.Module, optimizer: Optimizer, rig: Rig) -> None:
    for i, x in enumerate(batches(NUM_STEPS)):
        optimizer.zero_grad()
        loss_of(model, x).backward()
        if i % 3:
            optimizer.step()


def schedule_early(model: nn.Module, optimizer: Optimizer, rig: Rig) -> list[Any]:
    """The scheduler changes rates while the updates of the step before are on their way."""
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=NUM_STEPS + 1)
    rates = []
    for x in batches(NUM_STEPS):
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()
        scheduler.step()
        rates.append(scheduler.get_last_lr())
    return [rates, scheduler.state_dict()["last_epoch"]]


def chained_schedules(model: nn.Module, optimizer: Optimizer, rig: Rig) -> None:
    schedulers = [
        lr_scheduler.LinearLR(optimizer, total_iters=3),
        lr_scheduler.CosineAnnealingLR(optimizer, T_max=4),
    ]
    for x in batches(NUM_STEPS):
        loss_of(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()
        for scheduler in schedulers:
            scheduler.step()


def frozen_midway(model: nn.Module, optimizer: Optimizer, rig: Rig) -> None:
    """A parameter is frozen while its update is on its way, and later trained again."""
    first = next(model.parameters())
    for i, x in enumerate(batches(NUM_STEPS)):
        loss_of(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()
        first.requires_grad_(i not in (1, 2))


def groups_change(model: nn.Module, optimizer: Optimizer, rig: Rig) -> None:
    extra = nn.Parameter(torch.ones(3))
    for i, x in enumerate(batches(NUM_STEPS)):
        optimizer.zero_grad()
        (loss_of(model, x) + extra.square().sum()).backward()
        optimizer.step()
        if i == 1:
            optimizer.add_param_group({"params": [extra], "lr": 0.3})
        if i == 3:
            optimizer.param_groups[0]["lr"] = 0.5


def some_without_gradient(model: nn.Module, optimizer: Optimizer, rig: Rig) -> None:
    """By hand: one parameter is left out of each step, another gets a gradient of its own."""
    params = list(model.parameters())
    for i, x in enumerate(batches(NUM_STEPS)):
        loss_of(model, x).backward()
        params[i % len(params)].grad = None
        own = params[(i + 1) % len(params)]
        own.grad = torch.full_like(own, 0.25)
        optimizer.step()
        optimizer.zero_grad()


def step_in_autocast_model(model: nn.Module, optimizer: Optimizer, rig: Rig) -> None:
    for x in batches(NUM_STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


OVERLAPPED: list[Loop] = [
    usual,
    zero_after_step,
    zero_before_backward,
    none_by_hand,
    never_zeroed,
    two_backwards,
    two_forwards,
    skipped_steps,
    schedule_early,
    chained_schedules,
    groups_change,
    some_without_gradient,
    step_in_autocast_model,
]


def clipped(model: nn.Module, optimizer: Optimizer, rig: Rig) -> list[Tensor]:
    norms = []
    for x in batches(NUM_STEPS):
        optimizer.zero_grad()
        loss_of(model, x).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.01))
        optimizer.step()
    return norms


def scaled(model: nn.Module, optimizer: Optimizer, rig: Rig) -> list[float]:
    """Every third step has an infinite loss, and the scaler skips it."""
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    scales = []
    for i, x in enumerate(batches(NUM_STEPS)):
        optimizer.zero_grad()
        loss = loss_of(model, x) * (math.inf if i % 3 == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def with_closure(model: nn.Module, optimizer: Optimizer, rig: Rig) -> list[float]:
    losses: list[float] = []
    for x in batches(NUM_STEPS):

        def closure(x: Tensor = x) -> float:
            optimizer.zero_grad()
            loss = loss_of(model, x)
            loss.backward()
            return loss.item()

        losses.append(optimizer.step(closure))  # type: ignore[arg-type]
    return losses


def stepped_twice(model: nn.Module, optimizer: Optimizer, rig: Rig) -> None:
    for x in batches(NUM_STEPS):
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.5
        optimizer.step()


def zero_to_zeros(model: nn.Module, optimizer: Optimizer, rig: Rig) -> None:
    for x in batches(NUM_STEPS):
        loss_of(model, x).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def logged_norms(model: nn.Module, optimizer: Optimizer, rig: Rig) -> list[float]:
    norms = []
    for x in batches(NUM_STEPS):
        loss_of(model, x).backward()
        optimizer.step()
        norms.append(sum(p.grad.norm().item() for p in model.parameters() if p.grad is not None))
        optimizer.zero_grad()
    return norms


def exchanged_gradients(model: nn.Module, optimizer: Optimizer, rig: Rig) -> None:
    """Two parameters of one shape swap gradients before the step."""
    one, two = [p for p in model.parameters() if p.dim() == 1][:2]
    one, two = (one, two) if one.shape == two.shape else (two, two)
    for x in batches(NUM_STEPS):
        optimizer.zero_grad()
        loss_of(model, x).backward()
        one.grad, two.grad = two.grad, one.grad
        optimizer.step()


def step_in_autocast(model: nn.Module, optimizer: Optimizer, rig: Rig) -> None:
    for x in batches(NUM_STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            loss_of(model, x).backward()
            optimizer.step()
        optimizer.zero_grad()


def hooked_step(model: nn.Module, optimizer: Optimizer, rig: Rig) -> list[float]:
    sums: list[float] = []
    first = next(model.parameters())
    optimizer.register_step_post_hook(lambda *_: sums.append(first.sum().item()))
    usual(model, optimizer, rig)
    return sums


def graph_of_gradients(model: nn.Module, optimizer: Optimizer, rig: Rig) -> None:
    for x in batches(NUM_STEPS):
        optimizer.zero_grad()
        torch.autograd.backward(loss_of(model, x), create_graph=True)
        optimizer.step()
        for param in model.parameters():
            param.grad = None


FALLEN_BACK: dict[Loop, str] = {
    clipped: "clip_grad_norm_ at test_overlap.py",
    scaled: "step at test_overlap.py",
    stepped_twice: "twice",
    zero_to_zeros: "zero_grad at test_overlap.py",
    logged_norms: "norm at test_overlap.py",
    step_in_autocast: "inside autocast",
    hooked_step: "step hooks",
}


def law(model: nn.Module, make: Make, loop: Loop) -> Overlap:
    """Late means, at the last moment and at random ones, leave what plain training leaves."""
    expected, _ = run(model, make, loop, None)
    for seed in (None, 0):
        found, rig = run(model, make, loop, LateMeans(seed))
        assert same(found, expected)
        assert not any(p.isnan().any() for p in found["model"].values())
    assert rig.overlap is not None
    return rig.overlap


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("loop", OVERLAPPED)
def test_overlapped_loops(loop: Loop, make: Make) -> None:
    overlap = law(Net(), make, loop)
    assert overlap.num_overlapped >= NUM_STEPS - 1  # nothing follows the last
    assert not overlap.fallbacks


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("make", [momentum, adamw_groups])
def test_models(model: type[nn.Module], make: Make) -> None:
    assert law(model(), make, usual).num_overlapped == NUM_STEPS - 1
    assert law(model(), make, clipped).num_overlapped == 0


@pytest.mark.parametrize("loop", FALLEN_BACK)
@pytest.mark.parametrize("make", OPTIMIZERS)
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


def evaluating(model: nn.Module, optimizer: Optimizer, rig: Rig) -> list[Tensor]:
    outputs = []
    for i, x in enumerate(batches(NUM_STEPS)):
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()
        if i % 2:
            model.eval()
            with torch.inference_mode() if i % 3 else torch.no_grad():
                outputs.append(model(x).clone())
            model.train()
    return outputs


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("make", [adamw_groups])
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


def test_a_copy_of_the_model_is_not_gated() -> None:
    model = Net()
    arrivals, _, _ = begin(model)
    with torch.no_grad():
        copy.deepcopy(model)(batches(1)[0])
    assert arrivals.waited == []
    assert arrivals.num_finished == 0


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


# What cannot be made right ends the run.


class Moody(Net):
    """Calls its last layer, or only uses its weight."""

    by_hand = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.by_hand:
            return super().forward(x)
        y = self.body(self.norm(torch.tanh(self.start(x * self.scale))))
        return F.linear(y, self.last.weight)


@pytest.mark.parametrize("zeroed", [False, True])
def test_a_parameter_used_before_its_update_ends_the_run(zeroed: bool) -> None:
    model = Moody()
    _, _, optimizer = begin(model)
    if zeroed:
        optimizer.zero_grad()
    model.by_hand = True
    with pytest.raises(
        RankFailed, match=r"last\.weight was used in the forward pass before its up"
    ):
        model(batches(1)[0])


@pytest.mark.parametrize("zeroed", [False, True])
def test_so_does_one_used_without_any_forward_pass(zeroed: bool) -> None:
    model = Net()
    _, _, optimizer = begin(model)
    if zeroed:
        optimizer.zero_grad()
    with pytest.raises(RankFailed, match="scale was used in the forward pass before its update"):
        model.scale.sum().backward()


def test_one_that_is_not_used_is_updated_all_the_same() -> None:
    def loop(model: nn.Module, optimizer: Optimizer, rig: Rig) -> list[Tensor]:
        assert isinstance(model, Net)
        seen = []
        for x in batches(NUM_STEPS):
            optimizer.zero_grad()
            hidden = model(x)
            seen.append(model.last.weight.detach().clone())
            loss = hidden.square().mean()
            loss.backward()
            optimizer.step()
        return seen

    law(Net(), momentum, loop)


def test_branches_that_take_turns() -> None:
    class Branches(Net):
        turn = 0

        def forward(self, x: Tensor) -> Tensor:
            self.turn += 1
            y = self.norm(torch.tanh(self.start(x * self.scale)))
            return self.last(self.body[0](y) if self.turn % 2 else self.body[2](y))  # type: ignore[no-any-return]

    overlap = law(Branches(), momentum, usual)
    assert overlap.fallbacks.total() == NUM_STEPS


def test_one_written_by_hand_before_its_update_ends_the_run() -> None:
    model = Net()
    begin(model)
    with torch.no_grad():
        model.start.weight.clamp_(-0.1, 0.1)
    with pytest.raises(RankFailed, match=r"start\.weight was written between optimizer\.step\(\)"):
        model(batches(1)[0])


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
    del model, rig, optimizer
    gc.collect()
    assert gone() is None
    assert held is not None
    with pytest.raises(ValueError, match="never arrived"):
        held.sum()


def test_a_fall_back_is_logged_once_for_each_reason(caplog: pytest.LogCaptureFixture) -> None:
    run(Net(), momentum, clipped, LateMeans())
    (record,) = caplog.records
    assert record.name == "gradwire"
    assert record.levelno == logging.WARNING
    assert "clip_grad_norm_ at test_overlap.py" in record.getMessage()
    assert "optimizer=None" in record.getMessage()
    caplog.clear()
    run(Net(), momentum, usual, LateMeans())
    run(Net(), momentum, evaluating, LateMeans())
    assert not caplog.records


# The laws bite.


def without_gates(rig: Rig) -> None:
    if rig.overlap is not None:
        rig.overlap._bring = lambda names: None  # type: ignore[method-assign]


def with_rates_of_later(rig: Rig) -> None:
    if rig.overlap is not None:
        stepper = rig.overlap._stepper
        record = stepper.record
        stepper.record = lambda: record()._replace(values=stepper._optimizer.param_groups)  # type: ignore[method-assign]


def never_settling(rig: Rig) -> None:
    if rig.overlap is not None:
        rig.overlap._looked_at = lambda looker: None  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("change", "loop"),
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


def test_missing_gates_are_found() -> None:
    with pytest.raises(RankFailed, match="before its update"):
        run(Net(), momentum, usual, LateMeans(), change=without_gates)


def test_plain_gradients_instead_of_pending_ones_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(overlap_module, "pending", lambda grad, round: grad)
    expected, _ = run(Net(), momentum, usual, None)
    found, _ = run(Net(), momentum, usual, LateMeans())
    assert not same(found, expected)
