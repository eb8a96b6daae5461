"""Islands: local steps among sites, of models that several ranks of a site hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import SGD

import gradwire as gw
from gradwire.runtime.grid.dtensors import shard_of
from gradwire.runtime.local_steps.lock_step import Rhythm
from tests.runtime.given import keywords
from tests.runtime.grid.test_dtensors import at_once, by_blocks, without_root
from tests.runtime.local_steps.test_local_steps import (
    DILOCO,
    FOUR_BITS,
    LOCAL_SGD,
    NUM_STEPS,
    RHYTHMS,
    SPARSE,
)
from tests.runtime.meshes import device_mesh
from tests.runtime.ranks import Ranks
from tests.runtime.training import SMALL_MB, Net, adamw, digest, train

pytestmark = pytest.mark.multi


def grid(num_sites: int = 2, size: int = 2) -> DeviceMesh:
    """Rank ``size`` * s + i is rank i of island s."""
    return device_mesh((num_sites, size), ("site", "shard"))


class Odd(nn.Module):
    """Sizes that no 2 or 3 divides, one element, two dtypes, a frozen and a tied
    layer.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(11, 6)
        self.first = nn.Linear(6, 7)
        self.low = nn.Linear(7, 5, dtype=torch.bfloat16)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.wide = nn.Linear(5, 1)
        self.tied = nn.Linear(6, 11, bias=False)
        self.tied.weight = self.words.weight


def cut(mesh: DeviceMesh, net: nn.Module) -> nn.Module:
    """``Odd`` on shards; FSDP wants one dtype in a group."""
    fully_shard(net.low, mesh=mesh)  # type: ignore[arg-type]
    return fully_shard(net, mesh=mesh)


def learn(net: nn.Module, optimizer: Any, site: int, steps: Iterable[int]) -> None:
    """Steps with gradients that site, step and name alone decide, however cut."""
    for step in steps:
        for place, (_, param) in enumerate(net.named_parameters()):
            if not param.requires_grad:
                continue
            draws = torch.Generator().manual_seed(97 * step + 13 * site + place)
            grad = torch.randn(param.shape, generator=draws).to(param.dtype)
            if isinstance(param, DTensor):
                layout = param.device_mesh, param.placements
                param.grad = distribute_tensor(grad, *layout, src_data_rank=None)
            else:
                param.grad = grad
        optimizer.step()


def started(
    net: nn.Module,
    mesh: DeviceMesh,
    exchange: Any = "none",
    rhythm: Rhythm = RHYTHMS[0],
    outer: Any = DILOCO,
    **settings: Any,
) -> tuple[Any, Any]:
    optimizer = adamw(p for p in net.parameters() if p.requires_grad)
    settings = {"bucket_cap_mb": SMALL_MB, **vars(rhythm), **settings}
    handle = gw.local_steps(
        net,
        optimizer,
        exchange,
        outer=outer,
        group=mesh["site"],
        **keywords(**settings),
    )
    return optimizer, handle


def whole(tensor: Any) -> Tensor:
    found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach().clone()  # type: ignore[no-any-return]


def outcome(net: nn.Module, handle: Any) -> dict[str, Tensor]:
    """Parameters, anchors and momenta, whole on each rank."""
    found = {}
    momenta = handle.outer.state
    for (name, anchor), held in zip(
        handle.anchors().items(), handle.outer.param_groups[0]["params"], strict=True
    ):
        found[f"anchor {name}"] = whole(anchor)
        found[name] = whole(net.get_parameter(name))
        if "momentum_buffer" in momenta.get(held, {}):
            moved = momenta[held]["momentum_buffer"]
            if isinstance(anchor, DTensor):
                layout = {"shape": anchor.shape, "stride": anchor.stride()}
                moved = DTensor.from_local(
                    moved, anchor.device_mesh, anchor.placements, **layout
                )
            found[f"momentum {name}"] = whole(moved)
    return found


WAYS = (by_blocks, without_root, at_once)


def as_whole_models(rank: int, world: int) -> list[tuple[str, bool, int]]:
    """Whether islands end as whole models do, in each rhythm; their exchanges."""
    mesh = grid()
    found = []
    for place, rhythm in enumerate(RHYTHMS):
        ends = []
        for is_cut in (False, True):
            net: Any = Net()
            if is_cut:
                net = WAYS[place % 3](mesh["shard"], net)
            optimizer, handle = started(net, mesh, rhythm=rhythm)
            # both ranks of an island have the same data, so FSDP's mean is exact
            train(net, optimizer, rank // 2, range(NUM_STEPS))
            ends.append(outcome(net, handle))
            assert handle.world_size == 2
            handle.end_period()
            ends[-1] |= {f"end {n}": whole(p) for n, p in net.named_parameters()}
            exchanges = handle.stats()["exchanges"]
            handle.detach()
        same = all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
        found.append((digest(ends[1].values()), same, exchanges))
    return found


def test_islands_of_fsdp_end_with_the_bits_of_whole_models(four: Ranks) -> None:
    """Parameters are each island's own within a period."""
    ranks = four.run(as_whole_models)
    for place, rhythm in enumerate(RHYTHMS):
        (first, is_same, exchanges), *others = (rank[place] for rank in ranks)
        assert is_same, rhythm
        assert exchanges > 1
        assert all(same for _, same, _ in others)
        assert first == others[0][0]
