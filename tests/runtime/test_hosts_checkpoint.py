"""Checkpoints of hosts of several ranks: a rank saves its share, which is cut anew elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import gradwire as gw
from gradwire.errors import InvalidSetting
from gradwire.runtime.handle import Handle
from tests.runtime.meshes import attached_to, mesh
from tests.runtime.ranks import Ranks
from tests.runtime.training import ONEBIT, Net, digest, swift, train

pytestmark = pytest.mark.multi


def pending(handle: Handle) -> dict[str, Tensor]:
    """What a rank's residuals add to the mean of the ranks, when they are delivered."""
    return {name: residual.double() for name, residual in handle.residuals().items()}


def saved_on_hosts(rank: int, world: int, num_hosts: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """A rank's state_dict after some steps, and the residuals that are in it."""
    model = Net()
    handle = attached_to(model, num_hosts)
    train(model, swift(model.parameters()), rank, range(5))
    state, owed = handle.state_dict(), pending(handle)
    handle.detach()
    return state, owed


def resumed(rank: int, world: int) -> tuple[str, str]:
    """The bits after eight steps: in one run, and in two with a checkpoint between them."""
    model = Net()
    optimizer = swift(model.parameters())
    handle = attached_to(model, 2)
    train(model, optimizer, rank, range(4))
    state = handle.state_dict()
    train(model, optimizer, rank, range(4, 8))
    handle.detach()
    again = Net()
    optimizer = swift(again.parameters())
    handle = attached_to(again, 2)
    train(again, optimizer, rank, range(4))
    handle.detach()
    optimizer.zero_grad()
    handle = attached_to(again, 2)
    handle.load_state_dict(state)
    train(again, optimizer, rank, range(4, 8))
    handle.detach()
    return digest(model), digest(again)


def test_a_run_goes_on_bit_for_bit(four: Ranks) -> None:
    for whole, in_two in four.run(resumed):
        assert whole == in_two


def in_other_messages(rank: int, world: int) -> bool:
    """Whether residuals are the same after a load into one message instead of several."""
    model = Net()
    handle = attached_to(model, 2)
    train(model, swift(model.parameters()), rank, range(3))
    state, before = handle.state_dict(), handle.residuals()
    handle.detach()
    handle = gw.attach(Net(), ONEBIT, mesh=mesh(2), bucket_cap_mb=1.0)
    handle.load_state_dict(state)
    after = handle.residuals()
    handle.detach()
    assert any(bool(residual.any()) for residual in before.values())
    return all(torch.equal(before[name], after[name]) for name in before)


def test_state_fits_messages_that_are_fused_in_another_way(four: Ranks) -> None:
    assert all(four.run(in_other_messages))


def owed_after(rank: int, world: int, state: dict[str, Any], num_hosts: int) -> dict[str, Tensor]:
    """The residuals of a new run that has loaded a state."""
    handle = attached_to(Net(), num_hosts)
    handle.load_state_dict(state)
    found = pending(handle)
    handle.detach()
    return found


def loading(rank: int, world: int, states: list[Any], num_hosts: int) -> dict[str, Tensor]:
    return owed_after(rank, world, states[rank], num_hosts)


@pytest.mark.parametrize(("old", "new"), [(2, 4), (4, 2), (2, 1), (2, 2), (1, 2)])
def test_state_is_cut_again_for_other_hosts(four: Ranks, old: int, new: int) -> None:
    """What residuals will add to the mean is the same before and after, element by element."""
    before = four.run(saved_on_hosts, old)
    states = gw.redistribute([state for state, _ in before], 4, 4 // new)
    after = four.run(loading, states, new)

    def total(owed: list[dict[str, Tensor]], name: str, num_hosts: int) -> Tensor:
        return torch.stack([one[name] for one in owed if name in one]).sum(0) / num_hosts

    names = {name for _, owed in before for name in owed}
    assert names == {name for owed in after for name in owed}
    assert names or 1 in (old, new)
    for name in names:
        was, now = total([owed for _, owed in before], name, old), total(after, name, new)
        assert bool(was.any()) or old == 1
        torch.testing.assert_close(now, was, rtol=1e-6, atol=1e-7)


def refused_states(rank: int, world: int, on_hosts: list[Any], flat: list[Any]) -> list[str]:
    told = []
    for states, num_hosts in ((on_hosts, 4), (flat, 2)):
        handle = attached_to(Net(), num_hosts)
        with pytest.raises(InvalidSetting) as refused:
            handle.load_state_dict(states[rank])
        told.append(str(refused.value))
        handle.detach()
    return told


def test_states_of_other_hosts_are_refused(four: Ranks) -> None:
    on_hosts, flat = ([s for s, _ in four.run(saved_on_hosts, hosts)] for hosts in (2, 4))
    for told in four.run(refused_states, on_hosts, flat):
        assert "saved on hosts of 2 ranks and hosts have 1 now" in told[0]
        assert "saved on hosts of 1 ranks and hosts have 2 now" in told[1]
    on_hosts[1]["share"] = ""
    with pytest.raises(InvalidSetting, match="one is of a share"):
        gw.redistribute(on_hosts, 4, 2)
    with pytest.raises(InvalidSetting, match="ranks_per_host must be a divisor of world_size, 4"):
        gw.redistribute(flat, 4, 3)
