"""Parameters that come into a model after it was attached are exchanged by nobody, and so refused.

What only looks like one is not: another name of the same parameter, one that is taken away, and
what ``torch.func`` puts in a parameter's place for one forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, prune

import gradwire as gw
from gradwire.errors import ExitCode, LoopMistake
from tests.each import each
from tests.runtime.ranks import Ranks
from tests.runtime.training import DENSE, Net, batch, ddp, digest, loss_of, momentum, train


def assign(net: Net) -> None:
    net.load_state_dict({name: t.clone() for name, t in net.state_dict().items()}, assign=True)


def new_head(net: Net) -> None:
    net.last = nn.Linear(29, 5)


def one_more(net: Net) -> None:
    net.deep.register_parameter("scale", nn.Parameter(torch.ones(1)))


def deeper(net: Net) -> None:
    net.deep.inner = nn.Linear(2, 2)


def parametrized(net: Net) -> None:
    parametrizations.weight_norm(net.middle)


def by_hand(net: Net) -> None:
    net.middle._parameters["weight"] = nn.Parameter(torch.ones(41, 37))


def converted(net: Net) -> None:
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        net.double().float()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


CHANGES: dict[Callable[[Net], None], str] = {
    assign: "first.weight",
    new_head: "last.weight",
    one_more: "deep.scale",
    deeper: "deep.inner.weight",
    parametrized: "middle.parametrizations.weight.original0",
    by_hand: "middle.weight",
    converted: "first.weight",
}


def called(net: Net) -> Tensor:
    return loss_of(net, 0, 1)


def not_called(net: Net) -> Tensor:
    """The root's forward method itself, as a training framework may use it."""
    x, y = batch(0, 1)
    return nn.functional.cross_entropy(net.forward(x), y)


USES = [
    (change, use)
    for change in CHANGES
    for use in (called, not_called)
    # Of what was attached nothing is left then, and nothing of what is left is called.
    if (change, use) != (converted, not_called)
]


@each("change, use", USES)
def test_the_next_backward_pass_names_a_stranger(
    change: Callable[[Net], None], use: Callable[[Net], Tensor]
) -> None:
    net = Net()
    handle = gw.attach(net, DENSE)
    train(net, momentum(net.parameters()), 0, range(1))
    change(net)
    with pytest.raises(LoopMistake, match=f"{CHANGES[change]}.* came into the model after it was"):
        use(net).backward()
    handle.detach()


@each("change", CHANGES)
def test_attach_after_the_change_is_right(change: Callable[[Net], None]) -> None:
    net = Net()
    handle = gw.attach(net, DENSE)
    train(net, momentum(net.parameters()), 0, range(1))
    handle.detach()
    change(net)
    net.zero_grad()
    again = gw.attach(net, DENSE)
    train(net, momentum(net.parameters()), 0, range(2))
    assert again.step == 2
    again.detach()


def pruned(net: Net) -> None:
    prune.random_unstructured(net.middle, "weight", 0.5)


def spectral(net: Net) -> None:
    parametrizations.spectral_norm(net.deep)


def taken_away(net: Net) -> None:
    net.deep.bias = None  # type: ignore[assignment]


def frozen_more(net: Net) -> None:
    net.extra = nn.Linear(2, 2).requires_grad_(False)


@each("change", [pruned, spectral, taken_away, frozen_more])
def test_a_change_without_strangers_goes_on(change: Callable[[Net], None]) -> None:
    net, plain = Net(), Net()
    handle = gw.attach(net, DENSE)
    for model in (net, plain):
        train(model, momentum(model.parameters()), 0, range(2))
        torch.manual_seed(0)
        change(model)
        train(model, momentum(model.parameters()), 0, range(2, 5))
    assert handle.step == 5
    assert digest(net) == digest(plain)
    handle.detach()


def test_what_functional_call_puts_in_their_place_is_no_stranger() -> None:
    net = Net()
    handle = gw.attach(net, DENSE)
    x, y = batch(0, 0)
    doubled = {name: 2 * p for name, p in net.named_parameters()}
    nn.functional.cross_entropy(functional_call(net, doubled, (x,)), y).backward()
    own = {name: p.detach().clone().requires_grad_() for name, p in net.named_parameters()}
    loss = nn.functional.cross_entropy(functional_call(net, own, (x,)), y)
    torch.autograd.grad(loss, list(own.values()))
    nn.functional.cross_entropy(functional_call(net, own, (x,)), y).backward()
    net.zero_grad()
    train(net, momentum(net.parameters()), 0, range(2))
    assert handle.step == 3
    handle.detach()


def test_evaluation_does_not_look() -> None:
    net = Net()
    handle = gw.attach(net, DENSE)
    new_head(net)
    with torch.no_grad():
        net(batch(0, 0)[0])
    handle.detach()
    loss_of(net, 0, 0).backward()


def test_nothing_is_left_on_a_stranger() -> None:
    net = Net()
    handle = gw.attach(net, DENSE)
    new_head(net)
    loss_of(net, 0, 0)
    assert net.last.weight._post_accumulate_grad_hooks
    handle.detach()
    assert not net.last.weight._post_accumulate_grad_hooks


def told(rank: int, world: int, wrapped: bool, change: str) -> tuple[str, bool]:
    net = Net()
    if change == "unfrozen":
        net.deep.requires_grad_(False)
    model = ddp(net) if wrapped else net
    handle = gw.attach(model, DENSE)
    train(model, momentum(model.parameters()), rank, range(2))
    if change == "replaced":
        net.last.weight = nn.Parameter(net.last.weight.detach().clone())
    else:
        net.deep.requires_grad_(True)
    before = digest(net)
    with pytest.raises(Exception) as raised:  # noqa: PT011
        train(model, momentum(model.parameters()), rank, range(2, 4))
    handle.detach()
    return f"{type(raised.value).__name__}: {raised.value}", digest(net) == before


@pytest.mark.multi
@pytest.mark.parametrize("wrapped", [False, True], ids=["module", "ddp"])
@pytest.mark.parametrize("change", ["replaced", "unfrozen"])
def test_no_rank_makes_a_step_with_strangers(wrapped: bool, change: str, doomed_two: Ranks) -> None:
    name = {"replaced": "last.weight", "unfrozen": "deep.weight"}[change]
    for text, unchanged in doomed_two.run(told, wrapped, change):
        assert text.startswith("LoopMistake: step 2 cannot be finished: on rank")
        assert text.endswith("change the training loop: a restart alone ends in the same error")
        assert name in text or "deep.bias" in text
        assert unchanged


def on_one(rank: int, world: int) -> str:
    net = Net()
    gw.attach(net, DENSE)
    train(net, momentum(net.parameters()), rank, range(2))
    if rank == 1:
        new_head(net)
    with pytest.raises(LoopMistake) as raised:
        train(net, momentum(net.parameters()), rank, range(2, 4))
    assert (raised.value.ranks, raised.value.exit_code) == ((1,), ExitCode.MISTAKE)
    return str(raised.value)


@pytest.mark.multi
def test_the_other_ranks_are_told(doomed_two: Ranks) -> None:
    for text in doomed_two.run(on_one):
        assert "on rank 1 of 2 last.weight" in text


class Wide(nn.Module):
    """Layers in lists and dicts, as the parameters of large models are."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList([torch.ones(3) for _ in range(3)])
        self.named = nn.ParameterDict({"a": torch.ones(3)})

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([*self.rows, *self.named.values()]).sum(0) * x  # type: ignore[no-any-return]


@each(
    "change, name",
    [
        (lambda m: m.rows.append(nn.Parameter(torch.ones(3))), r"rows\.3"),
        (lambda m: m.rows.__setitem__(1, nn.Parameter(torch.ones(3))), r"rows\.1"),
        (lambda m: m.named.update({"b": nn.Parameter(torch.ones(3))}), r"named\.b"),
    ],
)
def test_lists_and_dicts_of_parameters(change: Callable[[Any], Any], name: str) -> None:
    model = Wide()
    gw.attach(model, DENSE)
    model(torch.ones(3)).sum().backward()
    model.zero_grad()
    change(model)
    with pytest.raises(LoopMistake, match=name):
        model(torch.ones(3)).sum().backward()
