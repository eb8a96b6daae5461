"""A gradient has one exchange: who else would exchange it is attached, or refused by
name.

Training that goes on in spite of a second exchange gives wrong gradients without any
error, so each way in which a DDP, ``replicate()`` or a sharding API can meet an
attached model has its case here.
"""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, prune

import gradwire as gw
from gradwire.errors import ExitCode, InvalidSetting, LoopMistake
from tests.each import each
from tests.runtime.given import SMALL, keywords
from tests.runtime.meshes import device_mesh
from tests.runtime.ranks import Ranks
from tests.runtime.training import (
    DENSE,
    Net,
    batch,
    ddp,
    digest,
    loss_of,
    momentum,
    train,
)

TWICE = "would be exchanged twice"


class Wrapper(nn.Module):
    """As frameworks make it: holds the DDP and what is inside of it, and a part that is
    frozen.
    """

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
    "compiled wrapper": lambda wrapped: torch.compile(
        Wrapper(wrapped), backend="eager"
    ),
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
    """A DDP inside that is not all of a model, one around it, sharded models, and a DDP
    without a communication hook.
    """
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
        assert "torch._dynamo.config.optimize_ddp must be another value" in refused(
            ddp(Net())
        )


@pytest.mark.multi
def test_models_that_others_exchange_are_refused(two: Ranks) -> None:
    two.run(all_refused)


def not_around(rank: int, world: int) -> list[int]:
    """A DDP that is gone, one that is no more than garbage, and one that ignores what
    is given.
    """
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
def test_a_ddp_that_leaves_the_parameters_alone_is_no_obstacle(two: Ranks) -> None:
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
            parallelize_module(
                net, mesh, {"deep": ColwiseParallel(output_layouts=Replicate())}
            )
        ),
    }
    cases[name]()


LATER = {
    "DDP": TWICE,
    "DDP of more": TWICE,
    "replicate, marked before": TWICE,
    "FSDP": "Net is attached, and FullyShardedDataParallel would exchange its "
    "gradients too",
    "fully_shard": r"first\.weight, .* came into the model after it was attached",
    "parallelize_module": r"deep\.weight, \.\.\. \(a DTensor; 2 in all\) "
    "came into the model after",
}


def later(rank: int, world: int) -> None:
    """What takes an attached model in raises where it does, before any gradient is
    there.
    """
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
def test_what_exchanges_an_attached_model_later_is_refused(doomed_two: Ranks) -> None:
    doomed_two.run(later)


def unfrozen(rank: int, world: int) -> tuple[str, int, str]:
    """A loop that unfreezes a layer makes its DDP anew, which knows its first
    parameters alone.
    """
    net = Net()
    net.deep.requires_grad_(False)
    model = DistributedDataParallel(net)
    handle = gw.attach(model, "topk")
    train(model, momentum(model.parameters()), rank, range(2))
    net.deep.requires_grad_(True)
    try:
        DistributedDataParallel(net)
    except InvalidSetting as error:
        said = str(error)
    handle.detach()
    net.zero_grad()
    model = DistributedDataParallel(model.module)
    again = gw.attach(model, "topk")  # though the first handle lives still
    train(model, momentum(model.parameters()), rank, range(3))
    again.detach()
    return said, again.step, digest(net)


@pytest.mark.multi
def test_unfreezing_under_ddp_takes_a_new_ddp_between_detach_and_attach(
    two: Ranks,
) -> None:
    one, other = two.run(unfrozen)
    assert one == other
    said, step, _ = one
    assert TWICE in said
    assert (
        "call handle.detach() first, make the DistributedDataParallel, then attach"
        in said
    )
    assert step == 3


def unfrozen_alone(rank: int, world: int) -> str:
    net = Net()
    net.deep.requires_grad_(False)
    model = DistributedDataParallel(net)
    handle = gw.attach(model, "topk")
    net.deep.requires_grad_(True)
    with pytest.raises(LoopMistake) as raised:
        train(model, momentum(model.parameters()), rank, range(1))
    handle.detach()
    return str(raised.value)


def two_ddps(rank: int, world: int) -> str:
    net = Net()
    both = [DistributedDataParallel(net) for _ in range(2)]
    return refused(both[1])


@pytest.mark.multi
def test_what_ddp_does_not_notice_is_said_with_the_remedy(two: Ranks) -> None:
    for said in two.run(two_ddps):
        assert (
            f"{TWICE}: another DistributedDataParallel of them still lives; drop it"
            in said
        )
    for said in two.run(unfrozen_alone):
        assert "deep.weight, ... requires a gradient" in said
        assert (
            "make the DistributedDataParallel anew from its module, then attach" in said
        )


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
def test_a_ddp_around_is_refused_when_the_forward_pass_meets_it(two: Ranks) -> None:
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


def test_a_rank_of_a_launcher_without_a_group_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "one of WORLD_SIZE=2 ranks and no process group exists" in refused(Net())
    assert "init_process_group() before attach" in refused(Net())
    for alone in ("1", ""):
        monkeypatch.setenv("WORLD_SIZE", alone)
        gw.attach(Net(), DENSE).detach()


class Odd(torch.Tensor):
    """A tensor that decides by itself what is done with it."""

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def with_buffer(buffer: torch.Tensor) -> nn.Module:
    model = nn.Linear(3, 2)
    model.register_buffer("odd", buffer)
    return model


def test_tensors_without_plain_values_are_refused() -> None:
    with torch.device("meta"):
        nowhere = nn.Linear(3, 2)
    odd: torch.Tensor = torch.Tensor._make_subclass(Odd, torch.ones(2))
    assert (
        "weight must be a tensor with a shape, got 'UninitializedParameter'"
        in refused(nn.LazyLinear(2))
    )
    assert "device of weight must be one that holds values, got 'meta'" in refused(
        nowhere
    )
    assert "odd must be a plain tensor, whole on each rank, got 'Odd'" in refused(
        with_buffer(odd)
    )


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantised_and_sparse_tensors_are_refused() -> None:
    sparse = torch.eye(3).to_sparse()
    quantised = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)
    conjugate = torch.ones(3, dtype=torch.complex64).conj()
    for buffer in (sparse, quantised, conjugate, conjugate.imag):
        said = refused(with_buffer(buffer))
        assert "odd must be a dense tensor of plain numbers" in said
        assert "a plain attribute" in said
    kept = nn.Linear(3, 2)
    kept.odd = sparse  # type: ignore[assignment]
    gw.attach(kept, DENSE).detach()


def ddp_with_sparse_buffer(rank: int, world: int) -> list[int]:
    found = []
    for exchange in ("none", "topk"):
        model = ddp(with_buffer(torch.eye(3).to_sparse()), broadcast_buffers=False)
        with gw.attach(model, exchange) as handle:
            model(torch.ones(1, 3)).sum().backward()
            found.append(handle.step)
    return found


@pytest.mark.multi
def test_buffers_of_a_ddp_model_are_left_to_ddp(two: Ranks) -> None:
    assert two.run(ddp_with_sparse_buffer) == [[1, 1]] * 2


def with_frozen_gradient(rank: int, world: int) -> list[Tensor]:
    """A layer is frozen after a backward pass, as between two phases of a training."""
    found = []
    wraps: tuple[Callable[[nn.Module], nn.Module], ...] = (lambda model: model, ddp)
    for wrap in wraps:
        torch.manual_seed(0)
        frozen = nn.Linear(3, 3)
        trained = nn.Linear(3, 2)
        model = nn.Sequential(frozen, trained)
        inputs = torch.full((1, 3), rank + 1.0)
        model(inputs).sum().backward()
        stale: Any = frozen.weight.grad
        before = stale.clone()
        frozen.requires_grad_(False)
        trained.zero_grad()
        wrapped = wrap(model)
        with gw.attach(wrapped, "none"):
            wrapped(inputs).sum().backward()
        assert torch.equal(stale, before)
        mean: Any = trained.weight.grad
        found.append(mean.clone())
    return found


@pytest.mark.multi
def test_gradients_of_frozen_parameters_are_left_alone(two: Ranks) -> None:
    one, other = two.run(with_frozen_gradient)
    assert all(map(torch.equal, one, other))


@pytest.mark.multi
def test_torchscript_is_refused_at_the_root_and_taken_inside(two: Ranks) -> None:
    one, other = two.run(scripted)
    assert one == other
    assert one[0] == 3


def scripted(rank: int, world: int) -> tuple[int, str]:
    """A model of TorchScript, itself or in DDP, and what the error says to write
    instead.
    """
    made = torch.jit.script(nn.Sequential(nn.Linear(13, 7), nn.Linear(7, 5)))  # type: ignore[no-untyped-call]
    for model in (made, ddp(made)):
        said = refused(model)
        assert "model must be a module that takes hooks" in said
        assert "got 'RecursiveScriptModule'; write nn.Sequential(scripted)" in said
    del model
    inner = nn.Sequential(made)
    handle = gw.attach(inner, "topk")
    train(inner, momentum(inner.parameters()), rank, range(3))
    handle.detach()
    return handle.step, digest(inner)


@pytest.mark.skipif(
    not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has none"
)
def test_gradients_of_another_dtype_than_their_parameter_are_refused() -> None:
    """Their mean would be rounded to the parameter's dtype."""
    says = (
        r"grad_dtype of parameter weight must be torch\.bfloat16, its own, "
        r"got torch\.float32"
    )
    model = nn.Linear(3, 2).bfloat16()
    model.weight.grad_dtype = torch.float32  # type: ignore[assignment]
    assert re.search(says, refused(model))
    model.weight.grad_dtype = torch.bfloat16  # type: ignore[assignment]
    handle = gw.attach(model, DENSE)
    model.weight.grad_dtype = torch.float32  # type: ignore[assignment]
    with pytest.raises(InvalidSetting, match=says):
        model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    handle.detach()


def test_nothing_is_watched_once_nothing_is_attached() -> None:
    before = len(nn.modules.module._global_module_registration_hooks)
    gc.collect()
    handles = [gw.attach(nn.Linear(3, 2), DENSE) for _ in range(2)]
    for handle in handles:
        handle.detach()
    assert len(nn.modules.module._global_module_registration_hooks) <= before


# ---- Parameters that come into a model later are exchanged by nobody -----------------


def assign(net: Net) -> None:
    net.load_state_dict(
        {name: t.clone() for name, t in net.state_dict().items()}, assign=True
    )


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
    *((change, called) for change in CHANGES),
    (new_head, not_called),
    (by_hand, not_called),
]


@each("change, use", USES)
def test_the_next_backward_pass_names_a_stranger_and_attaching_again_is_right(
    change: Callable[[Net], None], use: Callable[[Net], Tensor]
) -> None:
    net = Net()
    handle = gw.attach(net, DENSE)
    train(net, momentum(net.parameters()), 0, range(1))
    change(net)
    with pytest.raises(
        LoopMistake, match=f"{CHANGES[change]}.* came into the model after it was"
    ):
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
    own = {
        name: p.detach().clone().requires_grad_() for name, p in net.named_parameters()
    }
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


def reported(
    rank: int, world: int, wrapped: bool, change: str
) -> tuple[tuple[int, ...], str, bool]:
    """The error of a change on both ranks, or on rank 1 alone, and whether parameters
    stayed.
    """
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
    for ranks, text, unchanged in doomed_two.run(reported, wrapped, change):
        assert ranks == (1,) or "on rank 1" not in part
        assert text.startswith("step 2 cannot be finished: on rank")
        assert text.endswith(
            "change the training loop: a restart alone ends in the same error"
        )
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
def test_a_stranger_in_a_list_or_dict_of_parameters_is_named(
    change: Callable[[Any], Any], name: str
) -> None:
    model = Wide()
    gw.attach(model, DENSE)
    model(torch.ones(3)).sum().backward()
    model.zero_grad()
    change(model)
    with pytest.raises(LoopMistake, match=name):
        model(torch.ones(3)).sum().backward()
