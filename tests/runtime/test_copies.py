"""A copy or a pickle of an attached model is as one of a model that is not attached."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

import gradwire as gw
from gradwire.errors import InvalidSetting
from tests.each import each
from tests.runtime import plans
from tests.runtime.given import keywords
from tests.runtime.overlap.late_means import LateMeans, Rig
from tests.runtime.overlap.late_means import same as same_values
from tests.runtime.ranks import Ranks
from tests.runtime.training import DENSE, Net, ddp, digest, momentum, train


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


def pickled(model: nn.Module) -> nn.Module:
    loaded: nn.Module = pickle.loads(pickle.dumps(model))
    return loaded


COPIES: list[Callable[[Any], Any]] = [copy.deepcopy, pickled, saved]


IN_PLACE = ("__getstate__", "_match_all_reduce_for_bwd_pass")
"""What an attached module has in the place of methods."""


def hooks(model: nn.Module) -> list[tuple[str, int]]:
    """How many hooks of which kind the modules have, and what else is not usual of
    theirs.
    """
    own = [
        (name, len(value))
        for module in model.modules()
        for name, value in vars(module).items()
        if name.endswith("_hooks") and isinstance(value, dict)
    ]
    odd = [(name, 1) for m in model.modules() for name in vars(m) if name in IN_PLACE]
    of_params = [
        ("grad", len(p._post_accumulate_grad_hooks or {})) for p in model.parameters()
    ]
    return own + odd + of_params


def overlapping(net: Net) -> dict[str, Any]:
    plan = plans.drawn(1)
    assert plan.overlap_forward
    return {"exchange": plan, "optimizer": momentum(net.parameters())}


def without(net: Net) -> dict[str, Any]:
    return {"exchange": DENSE}


@each("settings", [without, overlapping])
def test_copies_are_not_attached(settings: Callable[[Net], dict[str, Any]]) -> None:
    net = Net()
    given = settings(net)
    optimizer = given.get("optimizer") or momentum(net.parameters())
    handle = gw.attach(net, **keywords(**given))
    train(net, optimizer, 0, range(2))
    for made in COPIES:
        twin = made(net)
        handle.synchronize()
        assert digest(twin) == digest(net)
        assert hooks(twin) == hooks(Net())
        train(twin, momentum(twin.parameters()), 0, range(2))
        assert handle.step == 2
    train(net, optimizer, 0, range(2, 4))
    handle.synchronize()
    assert handle.step == 4
    handle.detach()
    assert hooks(net) == hooks(Net())
    gw.attach(copy.deepcopy(net), DENSE).detach()


def counted(module: nn.Module, args: Any) -> None:
    """A hook of the user's own."""


class Stateful(Net):
    """Has a word of its own in what is copied of it."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "note": "copied"}


def test_hooks_and_state_of_the_users_own_are_copied() -> None:
    net = Stateful()
    before = net.register_forward_pre_hook(counted)
    handle = gw.attach(net, DENSE)
    net.deep.register_forward_pre_hook(counted)
    for made in COPIES:
        twin = made(net)
        assert [*twin._forward_pre_hooks.values()] == [counted]
        assert [*twin.deep._forward_pre_hooks.values()] == [counted]
        assert twin.note == "copied"
    before.remove()  # a handle from before attach still finds its hook
    assert counted not in net._forward_pre_hooks.values()
    handle.detach()
    assert not net._forward_pre_hooks
    assert "__getstate__" not in vars(net)


def test_two_attaches_of_parts_leave_each_others_hooks_out() -> None:
    outer = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    handles = [gw.attach(part, DENSE) for part in outer]
    assert hooks(copy.deepcopy(outer)) == hooks(
        nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    )
    for handle in handles:
        handle.detach()


@each("made", [copy.deepcopy, pickled])
def test_a_copy_of_the_optimizer_has_all_updates(made: Callable[[Any], Any]) -> None:
    left = []
    for arrivals in (None, LateMeans()):
        net = Net()
        optimizer = SGD(net.parameters(), lr=0.1, momentum=0.9)
        rig = Rig(net, optimizer, arrivals)
        x = torch.ones(4, 13)
        net(x).square().mean().backward()
        optimizer.step()
        left.append(made(optimizer).state_dict())
        rig.settle()
    assert same_values(*left)


def wrapped_copies(rank: int, world: int) -> list[str]:
    wrapped = ddp(Net())
    handle = gw.attach(wrapped, DENSE)
    train(wrapped, momentum(wrapped.parameters()), rank, range(2))
    found = [digest(wrapped)]
    for made in COPIES:
        for _ in range(2):  # while it is attached, and of the copy itself
            twin = made(wrapped)
            assert hooks(twin) == hooks(ddp(Net()))
            train(twin, momentum(twin.parameters()), rank, range(2, 4))
            assert handle.step == 2
            own = gw.attach(made(twin), DENSE)
            own.detach()
        found.append(digest(twin))
    train(wrapped, momentum(wrapped.parameters()), rank, range(2, 4))
    assert handle.step == 4
    found.append(digest(wrapped))
    handle.detach()
    found.append(digest(saved(wrapped)))
    return found


@pytest.mark.multi
def test_copies_of_a_ddp_train_as_without_gradwire(two: Ranks) -> None:
    one, other = two.run(wrapped_copies)
    assert one == other
    trained, *copies, again, detached = one
    assert len(set(copies)) == 1, "copies train as DDP does without gradwire"
    assert trained != again == detached


# ---- Handles -------------------------------------------------------------------------


class Holder(nn.Module):
    """A module that has its own handle as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 2)
        self.handle: Any = None


HANDLE_COPIES: list[Callable[[Any], Any]] = [copy.copy, *COPIES]


@each("made", HANDLE_COPIES, ids=["copy", "deepcopy", "pickle", "torch.save"])
def test_a_copy_of_a_handle_is_refused_with_what_to_do(
    made: Callable[[Any], Any],
) -> None:
    net, holder = nn.Linear(4, 2), Holder()
    optimizer = momentum(net.parameters())
    holder.handle = gw.attach(holder, "topk")
    handles = [holder.handle, gw.local_steps(net, optimizer, "topk", every=4)]
    for handle in handles:
        with pytest.raises(
            InvalidSetting,
            match=r"handle and cannot be copied .*; save .*state_dict\(\)",
        ):
            made(handle)
    if made is not copy.copy:
        with pytest.raises(InvalidSetting, match="handle out of what is copied"):
            made(holder)
    for handle in handles:
        handle.detach()


def averaged(net: nn.Module) -> nn.Module:
    """The moving average of a model's parameters, as torch makes it."""
    model = torch.optim.swa_utils.AveragedModel(net)
    model.update_parameters(net)
    return model


def test_a_moving_average_of_an_attached_model_is_not_exchanged() -> None:
    for locally in (False, True):
        net = Net()
        optimizer = momentum(net.parameters())
        if locally:
            handle = gw.local_steps(net, optimizer, "topk", every=4)
        else:
            handle = gw.attach(net, "topk")
        train(net, optimizer, 0, range(2))
        model = averaged(net)
        assert digest(model.module) == digest(net)
        assert hooks(model.module) == hooks(Net())
        train(net, optimizer, 0, range(2, 4))
        model.update_parameters(net)
        assert handle.step == 4
        assert digest(model.module) != digest(net)
        handle.detach()
