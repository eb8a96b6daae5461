"""Anchors and the outer optimizer's state in 16 bits, or in the host's memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD

import gradwire as gw
from gradwire.errors import InvalidSetting, RanksDiffer
from gradwire.runtime.local_steps.lock_step import Rhythm
from tests.each import each
from tests.runtime.local_steps.test_islands import grid, learn, outcome
from tests.runtime.local_steps.test_local_steps import (
    DILOCO,
    LOCAL_SGD,
    prepared,
)
from tests.runtime.ranks import Ranks
from tests.runtime.training import train

STREAMING = Rhythm(6, fragments=3, delay=1, mixing=0.5)
DTYPES = (torch.bfloat16, torch.float16)


def state_of(handle: Any) -> list[Tensor]:
    """All that the outer optimizer keeps for each element."""
    fields = [own["momentum_buffer"] for own in handle.outer.state.values()]
    return [*handle.outer.param_groups[0]["params"], *fields]


def beside_float32(rank: int, world: int) -> list[tuple[float, float]]:
    """The distance of parameters from those with anchors of float32."""
    found = []
    for rhythm, outer in ((Rhythm(2), LOCAL_SGD), (STREAMING, DILOCO)):
        ends = []
        for dtype in (None, *DTYPES):
            net, optimizer, handle = prepared(rhythm, outer=outer, outer_dtype=dtype)
            train(net, optimizer, rank, range(12))
            wanted = {dtype or torch.float32}
            if outer is DILOCO:
                assert {one.dtype for one in state_of(handle)} == wanted
            handle.end_period()
            for name, anchor in handle.anchors().items():
                param = net.get_parameter(name).detach()
                kept = param if dtype is None else param.to(dtype).float()
                assert torch.equal(anchor, kept)
            ends.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
            handle.detach()
        norm = ends[0].norm()
        coarse, fine = (float((end - ends[0]).norm() / norm) for end in ends[1:])
        found.append((coarse, fine))
    return found


@pytest.mark.multi
def test_16_bits_train_as_float32_does(two: Ranks) -> None:
    """Plain averages lose nothing, so they are compared more closely."""
    (plain, streaming), other = two.run(beside_float32)
    assert [plain, streaming] == other
    assert max(plain) < 1e-5
    assert max(streaming) < 0.02


def islands(
    size: int, rank: int, world: int, dtype: Any
) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """A model on islands of ``size``, 1 for a whole one, and its optimizer."""
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 5))
    mesh = grid(world // size, size)
    if size > 1:
        fully_shard(net, mesh=mesh["shard"])
    optimizer = SGD(net.parameters(), lr=0.05)
    handle = gw.local_steps(
        net,
        optimizer,
        "none",
        every=6,
        fragments=2,
        delay=2,
        mixing=0.5,
        outer=DILOCO,
        outer_dtype=dtype,
        outer_device="cpu",
        group=mesh["site"] if size > 1 else None,
        options=gw.Options(num_channels=1),
    )
    return net, optimizer, handle


def sharded(
    rank: int, world: int, size: int, dtype: Any, folder: str, saves: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The state as it is saved or loaded, and some steps later."""
    net, optimizer, handle = islands(size, rank, world, dtype)
    learn(net, optimizer, rank // size, range(10 if saves else 3))
    state = {"gradwire": handle.sharded_state()}
    if saves:
        assert handle.state_dict()["outer"]["arriving"]
        dcp.save(state, checkpoint_id=folder)
    else:
        dcp.load(state, checkpoint_id=folder)
        handle.load_state_dict(state["gradwire"])
    assert {one.dtype for one in state_of(handle)} == {dtype}
    first = outcome(net, handle)
    learn(net, optimizer, rank // size, range(10, 17))
    end = outcome(net, handle)
    handle.detach()
    return first, end


@pytest.mark.multi
def test_a_checkpoint_goes_on_with_the_same_bits(
    four: Ranks, two: Ranks, tmp_path: Path
) -> None:
    """Among islands of another size, too."""
    folder = str(tmp_path)
    dtype = torch.bfloat16
    saved = four.run(sharded, 2, dtype, folder, True)
    for size, ranks in ((2, four), (1, two)):
        loaded = ranks.run(sharded, size, dtype, folder, False)
        for rank, found in enumerate(loaded):
            wanted = saved[2 * (rank // size)]
            torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def alone(**settings: Any) -> tuple[nn.Module, Any]:
    net = nn.Linear(3, 2)
    optimizer = SGD(net.parameters(), lr=0.1)
    return net, gw.local_steps(net, optimizer, "none", every=4, **settings)


def test_a_state_of_another_dtype_is_refused() -> None:
    _, handle = alone()
    saved = handle.state_dict()
    handle.detach()
    _, handle = alone(outer_dtype=torch.bfloat16)
    with pytest.raises(InvalidSetting, match=r"anchors .* outer_dtype"):
        handle.load_state_dict(saved)
    handle.detach()


def in_16_bits() -> None:
    net = nn.Linear(3, 2, dtype=torch.bfloat16)
    optimizer = SGD(net.parameters(), lr=0.1)
    gw.local_steps(net, optimizer, "none", every=4, outer_dtype=torch.bfloat16)


REFUSED: dict[str, Callable[[], Any]] = {
    "outer_dtype must be torch.bfloat16, torch.float16 or None": partial(
        alone, outer_dtype=torch.float64
    ),
    "outer_dtype must be None for parameters of 16 bits": in_16_bits,
    "outer_device must be 'cpu' or None, got 'cuda'": partial(
        alone, outer_device="cuda"
    ),
    "outer_dtype must be left out beside quorum=": partial(
        alone, outer_dtype=torch.bfloat16, quorum=1
    ),
    "outer_device must be left out beside quorum=": partial(
        alone, outer_device="cpu", quorum=1
    ),
}


@each("said", REFUSED)
def test_settings_that_anchors_cannot_have_are_named(said: str) -> None:
    with pytest.raises(InvalidSetting) as raised:
        REFUSED[said]()
    assert said in str(raised.value)


def unlike(rank: int, world: int) -> str:
    with pytest.raises(RanksDiffer) as raised:
        alone(outer_dtype=DTYPES[rank])
    return str(raised.value)


@pytest.mark.multi
def test_ranks_agree_on_the_dtype(two: Ranks) -> None:
    for text in two.run(unlike):
        assert "outer_dtype is 'torch.bfloat16' against 'torch.float16'" in text


def test_a_change_by_hand_ends_a_period() -> None:
    """A parameter differs from its anchor in the anchor's dtype."""
    net, handle = alone(outer_dtype=torch.bfloat16)
    net(torch.ones(1, 3)).sum().backward()
    handle.end_period()
    assert handle.stats()["exchanges"] == 0
    with torch.no_grad():
        net.weight.add_(1.0)
    handle.end_period()
    assert handle.stats()["exchanges"] == 1
    handle.detach()
