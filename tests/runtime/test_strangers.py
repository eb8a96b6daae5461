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


USES = [*((change, called) for change in CHANGES), (new_head, not_called), (by_hand, not_called)]


@each("change, use", USES)
def test_the_next_backward_pass_names_a_stranger_and_attaching_again_is_right(
    change: Callable[[Net], None], use: Callable[[Net], Tensor]
) -> None:
    net = Net()
    handle = gw.attach(net, DENSE)
    train(net, momentum(net.parameters()), 0, range(1))
    change(net)
    with pytest.raises(LoopMistake, match=f"{CHANGES[change]}.* came into the model after it was"):
        use(net).backward()
    handle.detach()
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


def test_evaluation_does_not_look_and_nothing_is_left_on_a_stranger() -> None:
    net = Net()
    handle = gw.attach(net, DENSE)
    new_head(net)
    with torch.no_grad():
        net(batch(0, 0)[0])
    assert not net.last.weight._post_accumulate_grad_hooks
    loss_of(net, 0, 0)
    assert net.last.weight._post_accumulate_grad_hooks
    handle.detach()
    assert not net.last.weight._post_accumulate_grad_hooks
    loss_of(net, 0, 0).backward()


def told(rank: int, world: int, wrapped: bool, change: str) -> tuple[tuple[int, ...], str, bool]:
    """The error of a change on both ranks, or on rank 1 alone, and whether parameters stayed."""
    net = Net()
    net.deep.requires_grad_(change != "unfrozen")
    model = ddp(net) if wrapped else net
    handle = gw.attach(model, DENSE)
    train(model, momentum(model.parameters()), rank, range(2))
    if change == "replaced":
        net.last.weight = nn.Parameter(net.last.weight.detach().clone())
    elif change == "unfrozen":
        net.deep.requires_grad_(True)
    elif rank == 1:
        new_head(net)
    before = digest(net)
    with pytest.raises(LoopMistake) as raised:
        train(model, momentum(model.parameters()), rank, range(2, 4))
    assert raised.value.exit_code == ExitCode.MISTAKE
    handle.detach()
    return raised.value.ranks, str(raised.value), digest(net) == before


@pytest.mark.multi
@each(
    "wrapped, change, part",
    [
        (False, "replaced", "last.weight"),
        (True, "unfrozen", "deep."),
        (False, "new on rank 1", "on rank 1 of 2 last.weight"),
    ],
)
def test_no_rank_makes_a_step_with_strangers(
    wrapped: bool, change: str, part: str, doomed_two: Ranks
) -> None:
    for ranks, text, unchanged in doomed_two.run(told, wrapped, change):
        assert ranks == (1,) or "on rank 1" not in part
        assert text.startswith("step 2 cannot be finished: on rank")
        assert text.endswith("change the training loop: a restart alone ends in the same error")
        assert part in text
        assert unchanged


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
