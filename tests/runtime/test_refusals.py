"""A gradient has one exchange: who else would exchange it is attached, or refused by name.

Training that goes on in spite of a second exchange gives wrong gradients without any error, so each
way in which a DDP, ``replicate()`` or a sharding API can meet an attached model has its case here.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from gradwire.errors import InvalidSetting
from tests.runtime.given import SMALL, keywords
from tests.runtime.meshes import device_mesh
from tests.runtime.ranks import Ranks
from tests.runtime.training import DENSE, Net, ddp, digest, momentum, train

TWICE = "would be exchanged twice"


class Wrapper(nn.Module):
    """As frameworks make it: holds the DDP and what is inside of it, and a part that is frozen."""

    def __init__(self, wrapped: DistributedDataParallel) -> None:
        super().__init__()
        self.forward_module = wrapped
        self.original = wrapped.module
        self.frozen = nn.Linear(2, 2).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward_module(x)  # type: ignore[no-any-return]


WRAPPERS: dict[str, Callable[[DistributedDataParallel], nn.Module]] = {
    "itself": lambda wrapped: wrapped,
    "sequential": lambda wrapped: nn.Sequential(wrapped),
    "compiled wrapper": lambda wrapped: torch.compile(Wrapper(wrapped), backend="eager"),
}


def through_wrappers(rank: int, world: int) -> list[tuple[str, int, float]]:
    found = []
    for wrapper in WRAPPERS.values():
        net = Net()
        model = wrapper(DistributedDataParallel(net))
        handle = gw.attach(model, DENSE, options=SMALL)
        train(model, momentum(model.parameters()), rank, range(3))
        with handle.no_sync():
            train(model, torch.optim.SGD(model.parameters(), lr=0.0), rank, range(3, 4))
        handle.detach()
        found.append((digest(net), handle.step, handle.stats()["wire_bytes_per_step"]))
    return found


@pytest.mark.multi
def test_a_ddp_inside_a_wrapper_is_attached_itself(two: Ranks) -> None:
    one, other = two.run(through_wrappers, timeout_s=100.0)
    assert one == other == [one[0]] * len(WRAPPERS)
    assert one[0][1] == 3


def refused(model: Any, **settings: Any) -> str:
    with pytest.raises(InvalidSetting) as raised:
        gw.attach(model, DENSE, **keywords(**settings))
    return str(raised.value)


def all_refused(rank: int, world: int) -> None:
    """A DDP inside that is not all of a model, one around it, sharded models, and a DDP without a
    communication hook."""
    mesh = device_mesh((world,))
    around = ddp(Net())
    cut = parallelize_module(nn.Linear(4, 2), mesh, ColwiseParallel())
    models: dict[str, Any] = {
        "1.weight is trained and outside of the DistributedDataParallel": nn.Sequential(
            ddp(nn.Linear(3, 3)), nn.Linear(3, 2)
        ),
        "2 DistributedDataParallel modules inside": nn.Sequential(
            ddp(nn.Linear(3, 3)), ddp(nn.Linear(3, 2))
        ),
        "1 DistributedDataParallel modules inside": ddp(
            nn.Sequential(ddp(nn.Linear(3, 3)), nn.Linear(3, 2))
        ),
        f"the gradients of first.weight {TWICE}": around.module,
        f"the gradients of weight {TWICE}": around.module.deep,
        "replicate() exchanges the gradients of DDPNet itself": replicate(Net()),
        "group must be ranks that hold the same shard of every layer": fully_shard(
            Net(), mesh=mesh
        ),
        "[0, 1], which hold different shards of deep.weight'": parallelize_module(
            Net(), mesh, {"deep": ColwiseParallel()}
        ),
        "weight must be a plain tensor, whole on each rank, got 'DTensor'": ddp(
            cut, init_sync=False
        ),
        "write fully_shard(module, mesh=mesh['shard'])": FullyShardedDataParallel(
            Net(), device_id=torch.device("cpu")
        ),
    }
    for said, model in models.items():
        assert said in refused(model)
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        assert "torch._dynamo.config.optimize_ddp must be another value" in refused(ddp(Net()))


@pytest.mark.multi
def test_models_that_others_exchange_are_refused(two: Ranks) -> None:
    two.run(all_refused)


def not_around(rank: int, world: int) -> list[int]:
    """A DDP that is gone, one that is no more than garbage, and one that ignores what is given."""
    net = Net()
    wrapped = ddp(net)
    wrapped.cycle = [wrapped]  # only the garbage collector frees it
    del wrapped
    first = gw.attach(net, DENSE)
    train(net, momentum(net.parameters()), rank, range(2))
    first.detach()

    both = Net()
    names = [f"deep.{name}" for name, _ in both.deep.named_parameters()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(both, names)
    outer = ddp(both)
    second = gw.attach(both.deep, DENSE)
    train(outer, momentum(outer.parameters()), rank, range(2))
    second.detach()
    return [first.step, second.step, int(digest(net), 16), int(digest(both), 16)]


@pytest.mark.multi
def test_a_ddp_that_leaves_the_parameters_alone(two: Ranks) -> None:
    one, other = two.run(not_around)
    assert one == other
    assert one[:2] == [2, 2]


def taking_in(name: str, net: Net, wholly: nn.Module, rank: int, world: int) -> None:
    """Has another one exchange the gradients of an attached model."""
    mesh = device_mesh((world,))

    def use(model: nn.Module) -> None:
        train(model, momentum(model.parameters()), rank, range(1))

    cases: dict[str, Callable[[], Any]] = {
        "DDP": lambda: ddp(net),
        "DDP of more": lambda: ddp(wholly),
        "replicate, marked before": lambda: use(wholly),
        "FSDP": lambda: FullyShardedDataParallel(net, device_id=torch.device("cpu")),
        "fully_shard": lambda: use(fully_shard(net, mesh=mesh)),  # type: ignore[arg-type]
        "parallelize_module": lambda: use(
            parallelize_module(net, mesh, {"deep": ColwiseParallel(output_layouts=Replicate())})
        ),
    }
    cases[name]()


LATER = {
    "DDP": TWICE,
    "DDP of more": TWICE,
    "replicate, marked before": TWICE,
    "FSDP": "Net is attached, and FullyShardedDataParallel would exchange its gradients too",
    "fully_shard": r"first\.weight, .* came into the model after it was attached",
    "parallelize_module": r"deep\.weight, \.\.\. \(a DTensor; 2 in all\) came into the model after",
}


def later(rank: int, world: int) -> None:
    """What takes an attached model in raises where it does, before any gradient is there."""
    for name, said in LATER.items():
        net = Net()
        wholly = nn.Sequential(net)
        if name == "replicate, marked before":
            replicate(wholly)
        handle = gw.attach(net, DENSE)
        with pytest.raises(Exception, match=said):
            taking_in(name, net, wholly, rank, world)
        handle.detach()
        if "shard" not in name and "parallel" not in name:  # these replace them
            assert all(param.grad is None for param in net.parameters())


@pytest.mark.multi
def test_what_exchanges_an_attached_model_later(doomed_two: Ranks) -> None:
    doomed_two.run(later)


def unseen(rank: int, world: int) -> list[str]:
    """A DDP that the garbage collector does not know of is met in the forward pass."""
    net = Net()
    wrapped = ddp(net)
    gc.collect()
    gc.freeze()
    try:
        handle = gw.attach(net, DENSE)
    finally:
        gc.unfreeze()
    with pytest.raises(InvalidSetting) as raised:
        train(wrapped, momentum(wrapped.parameters()), rank, range(1))
    handle.detach()
    return [str(raised.value), *(str(param.grad) for param in net.parameters())]


@pytest.mark.multi
def test_a_ddp_around_that_is_met_in_the_forward_pass(two: Ranks) -> None:
    for text, *grads in two.run(unseen):
        assert f"the gradients of first.weight {TWICE}" in text
        assert set(grads) == {"None"}


def dropped(rank: int, world: int) -> bool:
    wrapped = ddp(Net())
    gw.attach(wrapped, DENSE)
    train(wrapped, momentum(wrapped.parameters()), rank, range(2))
    seen = weakref.ref(wrapped)
    del wrapped
    gc.collect()
    return seen() is None


@pytest.mark.multi
def test_a_ddp_that_is_dropped_without_detach_is_freed(two: Ranks) -> None:
    assert two.run(dropped) == [True, True]


# On one process.


def test_a_rank_of_a_launcher_without_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "one of WORLD_SIZE=2 ranks and no process group exists" in refused(Net())
    assert "init_process_group() before attach" in refused(Net())
    for alone in ("1", ""):
        monkeypatch.setenv("WORLD_SIZE", alone)
        gw.attach(Net(), DENSE).detach()


class Odd(torch.Tensor):
    """A tensor that decides by itself what is done with it."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def with_buffer(buffer: torch.Tensor) -> nn.Module:
    model = nn.Linear(3, 2)
    model.register_buffer("odd", buffer)
    return model


def test_tensors_without_plain_values() -> None:
    with torch.device("meta"):
        nowhere = nn.Linear(3, 2)
    odd: torch.Tensor = torch.Tensor._make_subclass(Odd, torch.ones(2))
    assert "weight must be a tensor with a shape, got 'UninitializedParameter'" in refused(
        nn.LazyLinear(2)
    )
    assert "device of weight must be one that holds values, got 'meta'" in refused(nowhere)
    assert "odd must be a plain tensor, whole on each rank, got 'Odd'" in refused(with_buffer(odd))


def test_nothing_is_watched_once_nothing_is_attached() -> None:
    before = len(nn.modules.module._global_module_registration_hooks)
    gc.collect()
    handles = [gw.attach(nn.Linear(3, 2), DENSE) for _ in range(2)]
    for handle in handles:
        handle.detach()
    assert len(nn.modules.module._global_module_registration_hooks) <= before
