"""Complex parameters travel as their real views, and train as under DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from gradwire.errors import InvalidSetting
from gradwire.runtime.grid.reals import as_complex, as_reals, grad_as_reals
from tests.each import each
from tests.runtime.given import keywords
from tests.runtime.ranks import Ranks


class Waves(nn.Module):
    """Complex matrices in both layouts, a complex vector and scalar, and a real layer
    at the end.

    ``turned`` gets lazily conjugated gradients, ``transposed`` ones of strides of its
    own, ``mirrored`` ones of both kinds, and ``spare`` none in odd steps of rank 0.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=torch.complex64) / 4

        self.matrix = nn.Parameter(drawn(24, 12))
        self.turned = nn.Parameter(drawn(12, 12))
        self.transposed = nn.Parameter(drawn(16, 12).t())
        self.mirrored = nn.Parameter(drawn(12, 12).t())
        self.vector = nn.Parameter(drawn(12))
        self.scalar = nn.Parameter(drawn())
        self.spare = nn.Parameter(drawn(12).to(torch.complex128))
        self.last = nn.Linear(16, 1)
        self.register_buffer("phase", drawn(12))

    def forward(self, x: Tensor, with_spare: bool = True) -> Tensor:
        waves = (
            x.to(torch.complex64) @ self.matrix @ self.turned.conj()
            + self.vector * self.phase
        )
        waves = (self.mirrored.mH @ waves.mT).mT
        if with_spare:
            waves = waves * self.spare.to(torch.complex64)
        found: Tensor = self.last((waves @ self.transposed * self.scalar).abs())
        return found


def trained(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int,
    steps: range,
    spare: bool,
) -> list[Tensor]:
    for step in steps:
        draws = torch.Generator().manual_seed(10 * step + rank)
        optimizer.zero_grad()
        x = torch.randn(4, 24, generator=draws)
        model(x, spare or rank == 1 or step % 2 == 0).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def plan_of(world: int) -> Any:
    model = Waves()
    profile = gw.profile(
        model, lambda: model(torch.ones(4, 24)).sum().backward(), iterations=1
    )
    cluster = gw.Cluster(num_ranks=world, rate_bytes_per_s=1e9)
    return gw.plan("usbyte", profile, cluster, basic_partition_bytes=256)


def same_as_ddp(rank: int, world: int) -> list[bool]:
    wrapped = DistributedDataParallel(Waves())
    native = trained(wrapped, sgd(wrapped), rank, range(4), spare=True)
    text = [plan_of(world).to_json()] if rank == 0 else [""]
    torch.distributed.broadcast_object_list(text)
    ways: list[tuple[nn.Module, Any, dict[str, Any]]] = [
        (Waves(), "none", {}),
        (Waves(), "none", {"bucket_cap_mb": 0.001}),
        (Waves(), gw.Plan.parse(text[0]), {"overlaps": True}),
        (DistributedDataParallel(Waves()), "none", {}),
        (DistributedDataParallel(Waves()), "none", {"bucket_cap_mb": 0.001}),
    ]
    found = []
    for model, exchange, how in ways:
        optimizer = sgd(model)
        if how.pop("overlaps", False):
            how["optimizer"] = optimizer
        handle = gw.attach(model, exchange, **keywords(**how))
        own = trained(model, optimizer, rank, range(4), spare=True)
        handle.detach()
        found.append(all(map(torch.equal, own, native)))
    wrapped = ways[-1][0]
    own = trained(wrapped, sgd(wrapped), rank, range(2), spare=True)  # by DDP again
    other: list[Any] = [None] * world
    torch.distributed.all_gather_object(other, own)
    return [*found, all(map(torch.equal, other[0], other[1]))]


@pytest.mark.multi
def test_bits_are_those_of_ddp(two: Ranks) -> None:
    assert two.run(same_as_ddp) == [[True] * 6] * 2


def compressed(rank: int, world: int, name: str, on_ddp: bool) -> list[bool]:
    def made() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model: nn.Module = Waves()
        if on_ddp:
            model = DistributedDataParallel(model)
        return model, sgd(model), gw.attach(model, name)

    model, optimizer, handle = made()
    whole = trained(model, optimizer, rank, range(6), spare=on_ddp)
    handle.detach()
    model, optimizer, handle = made()
    trained(model, optimizer, rank, range(3), spare=on_ddp)
    saved = model.state_dict(), optimizer.state_dict(), handle.state_dict()
    handle.detach()
    model, optimizer, handle = made()
    for one, state in zip((model, optimizer, handle), saved, strict=True):
        one.load_state_dict(state)
    numel = {name: owed.numel() for name, owed in handle.residuals().items()}
    rest = trained(model, optimizer, rank, range(3, 6), spare=on_ddp)
    handle.detach()
    other: list[Any] = [None] * world
    torch.distributed.all_gather_object(other, whole)
    of_parts = all(numel[name] == 24 * 24 for name in numel if name.endswith("matrix"))
    return [all(map(torch.equal, *other)), all(map(torch.equal, whole, rest)), of_parts]


@pytest.mark.multi
@each("name, on_ddp", [("topk", False), ("int8", True), ("powersgd", False)])
def test_compressed_they_resume_with_the_same_bits(
    two: Ranks, name: str, on_ddp: bool
) -> None:
    assert two.run(compressed, name, on_ddp) == [[True] * 3] * 2


@each("name", ["matrix", "transposed", "vector", "scalar"])
def test_reals_are_views_and_go_back(name: str) -> None:
    param = getattr(Waves(), name)
    reals = as_reals(param)
    assert reals.data_ptr() == param.data_ptr()
    assert reals.numel() == 2 * param.numel()
    assert torch.equal(as_complex(reals, param), param)
    mirrored = param.detach().conj()
    assert torch.equal(
        as_complex(grad_as_reals(mirrored, reals.shape), param), mirrored.resolve_conj()
    )
    straight = param.detach().contiguous()
    assert grad_as_reals(straight, reals.shape).shape == reals.shape


def test_local_steps_refuse_complex_parameters() -> None:
    model = Waves()
    with pytest.raises(
        InvalidSetting, match=r"matrix must be a real one under local_steps"
    ):
        gw.local_steps(model, sgd(model), "none", every=2)
