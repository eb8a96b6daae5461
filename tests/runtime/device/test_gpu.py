"""The tier ``gpu``: training whose gradients a real GPU computes, on two processes that
share it.

Skipped, and said so, where torch finds no GPU. What is asked of the order of streams is
asked of a stand-in elsewhere; here it is the device that is late. Gradients are made
element by element, so that a CPU has the same bits, and each test compares with a run
there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradwire as gw
from gradwire.contract import Exchange
from gradwire.contract.verbs import AllGather, AllReduce, AllToAll
from gradwire.exchange.by_name import exchange_for
from gradwire.planning.data.plan import Chunk, ExchangeSetting, Plan, PlannedMessage
from gradwire.runtime.device.devices import Accelerator
from gradwire.runtime.handle import Handle
from gradwire.runtime.transport.wire import carry_directly
from tests.runtime.given import SMALL, keywords
from tests.runtime.ranks import Ranks
from tests.runtime.training import CHOSEN, SMALL_MB, Net, batch, named

gpu = pytest.mark.gpu
pytestmark = pytest.mark.multi

SHAPES = ((60, 33), (7, 11), (5,), (40, 50), (300, 200))
STEPS = 4
LATE = 200_000_000
"""Cycles that a stream sleeps: a tenth of a second, far beyond what a step takes."""
INT8 = exchange_for(gw.compress.int8())
FIXED = [
    exchange_for(gw.compress.none()),
    INT8,
    exchange_for(gw.compress.uniform(bitwidth=4)),
]
"""Exchanges of fixed sizes, which never wait for the device."""
ALL = [
    *CHOSEN,
    *FIXED[1:],
    *(
        exchange_for(codec)
        for codec in (
            *(gw.compress.qsgd(), gw.compress.terngrad(), gw.compress.threelc()),
            *(
                gw.compress.dgc(density=0.1),
                gw.compress.cast16(),
                gw.compress.powersgd(),
            ),
        )
    ),
]


def offloaded(sparsifier: str = "dgc") -> Plan:
    """The two largest tensors in one message, encoded early; the others in another, one
    inline.
    """

    def message(
        places: tuple[int, ...], name: str, **where: tuple[str, ...]
    ) -> PlannedMessage:
        numels = {
            f"layers.{place}": torch.Size(SHAPES[place]).numel() for place in places
        }
        chunks = (
            Chunk(tensor=one, start=0, stop=numel) for one, numel in numels.items()
        )
        return PlannedMessage(chunks=tuple(chunks), exchange=name, **where)

    messages = (
        message((4, 3), "all", early=("layers.4", "layers.3")),
        message((2, 1, 0), "one", inline=("layers.0",)),
    )
    settings = {"sparsifier": sparsifier, "density": 0.05}
    exchanges = {
        name: ExchangeSetting(
            compressor="selective",
            settings={**settings, "num_dense": dense},
            error_feedback=True,
        )
        for name, dense in (("all", 0), ("one", 2))
    }
    return Plan(
        planner="by hand", model="Layers", messages=messages, exchanges=exchanges
    )


# ---- what ranks do -------------------------------------------------------------------


class Layers(nn.Module):
    """Parameters whose gradients are what they are multiplied with."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.layers = nn.ParameterList(
            torch.zeros(shape).to(device) for shape in SHAPES
        )

    def forward(self, factors: list[Tensor]) -> Tensor:
        return sum((p * f).sum() for p, f in zip(self.layers, factors, strict=True))  # type: ignore


def factors(rank: int, step: int, device: str) -> list[Tensor]:
    draw = torch.Generator().manual_seed(100 * rank + step)
    return [torch.randn(shape, generator=draw).to(device) for shape in SHAPES]


def attached(exchange: Exchange | Plan, device: str) -> tuple[Layers, Handle]:
    model = Layers(device)
    if isinstance(exchange, Plan):
        return model, gw.attach(model, exchange)
    every = {"compress_if": lambda name, param: True}
    return model, gw.attach(
        model, exchange, **keywords(bucket_cap_mb=SMALL_MB, **every)
    )


def late_gradient(grad: Tensor) -> Tensor:
    """The gradient, made by a kernel that stands behind a sleep."""
    torch.cuda._sleep(LATE)
    return grad * 1


def pressure() -> None:
    """Takes the memory that a careless step gave back too soon, and spoils it."""
    sizes = [torch.Size(shape).numel() for shape in SHAPES]
    spoilt = [
        torch.full((n,), torch.nan, device="cuda") for n in (*sizes, sum(sizes)) * 8
    ]
    del spoilt


@contextmanager
def late(how: str, model: Layers, device: str) -> Iterator[None]:
    """A backward pass of which something is late: what is encoded, or what is copied
    back.
    """
    hooks = []
    if how == "before the encode":
        hooks = [layer.register_hook(late_gradient) for layer in model.layers]
    if how == "before the copy back":
        from gradwire.runtime.device.devices import side_stream

        with torch.cuda.stream(side_stream(model.layers[0].device)):
            torch.cuda._sleep(LATE)
    yield
    for hook in hooks:
        hook.remove()
    if how != "nothing":
        pressure()


def means(
    rank: int,
    world: int,
    exchange: Exchange | Plan,
    device: str,
    how: str = "nothing",
    own: bool = False,
) -> list[str]:
    """The bits of all means after each step; ``own`` trains on a stream of its own."""
    model, handle = attached(exchange, device)
    found = []
    with torch.cuda.stream(torch.cuda.Stream()) if own else nullcontext():
        for step in range(STEPS):
            model.zero_grad()
            loss = model(factors(rank, step, device))
            with late(how, model, device):
                loss.backward()
            whole = torch.cat([layer.grad.flatten() for layer in model.layers])
            assert whole.isfinite().all()
            found.append(hashlib.sha256(whole.cpu().numpy().tobytes()).hexdigest())
    handle.detach()
    return found


def without_a_wait(rank: int, world: int, exchange: Exchange) -> list[str]:
    """Backward passes that raise where anybody waits for the device as a whole or for a
    copy.
    """
    model, handle = attached(exchange, "cuda")
    for step in range(STEPS):
        model.zero_grad()
        loss = model(factors(rank, step, "cuda"))
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if step > 1 else "default")
        try:
            loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    handle.detach()
    return [str(layer.grad.norm().item()) for layer in model.layers]


def pinned(rank: int, world: int, exchange: Exchange | Plan) -> list[tuple[int, int]]:
    """(bytes that messages keep, bytes that torch has pinned) after each step."""
    model, handle = attached(exchange, "cuda")
    found = []
    for step in range(10):
        model.zero_grad()
        model(factors(rank, step, "cuda")).backward()
        torch.cuda.synchronize()
        torch_bytes = torch.cuda.host_memory_stats()["allocated_bytes.current"]
        found.append((handle.stats()["pinned_bytes"], torch_bytes))
    handle.detach()
    return found


def with_scaler(rank: int, world: int, exchange: Exchange) -> tuple[str, float]:
    """A digest of what autocast and a scaler trained, and how much the loss fell."""
    model = Net().to("cuda")
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    handle = gw.attach(model, exchange, scaler=scaler, options=SMALL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(20):
        x, y = (one.to("cuda") for one in batch(rank, step % 2))
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    handle.detach()
    bits = torch.cat([param.detach().flatten() for param in model.parameters()]).cpu()
    return hashlib.sha256(bits.numpy().tobytes()).hexdigest(), losses[0] - losses[-1]


def captured(rank: int, world: int, exchange: Exchange) -> str:
    """The messages of what a backward pass raises that is captured as a CUDA graph."""
    model, _ = attached(exchange, "cuda")
    given = factors(rank, 0, "cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        model(given).backward()  # as torch asks before a capture
    torch.cuda.synchronize()
    said: list[str] = []
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            model(given).backward()
    except Exception as error:
        reason: BaseException | None = error
        while reason is not None:
            said.append(str(reason))
            reason = reason.__cause__ or reason.__context__
    return "\n".join(said)


def over_nccl(rank: int, world: int, exchange: Exchange) -> list[str]:
    """The means of one rank whose own group is NCCL's."""
    group = dist.new_group([0], backend="nccl")
    model = Layers("cuda")
    handle = gw.attach(model, exchange, group=group, options=SMALL)
    found = []
    for step in range(STEPS):
        model.zero_grad()
        model(factors(rank, step, "cuda")).backward()
        dist.all_reduce(torch.ones(1, device="cuda"), group=group)
        whole = torch.cat([layer.grad.flatten() for layer in model.layers]).cpu()
        found.append(hashlib.sha256(whole.numpy().tobytes()).hexdigest())
    handle.detach()
    return found


# ---- what comes of it ----------------------------------------------------------------


def agreed(of_ranks: list[Any]) -> Any:
    """What all ranks found, which is one."""
    assert all(one == of_ranks[0] for one in of_ranks)
    return of_ranks[0]


@gpu
@pytest.mark.parametrize("exchange", ALL, ids=named)
def test_two_ranks_on_one_gpu_have_the_bits_of_the_cpu(
    exchange: Exchange, two: Ranks
) -> None:
    found = agreed(two.run(means, exchange, "cuda"))
    assert found == agreed(two.run(means, exchange, "cpu"))
    assert len(set(found)) == STEPS


@gpu
@pytest.mark.parametrize("how", ["before the encode", "before the copy back"])
@pytest.mark.parametrize("exchange", CHOSEN, ids=named)
def test_nothing_is_read_before_it_is_made(
    exchange: Exchange, how: str, two: Ranks
) -> None:
    found = agreed(two.run(means, exchange, "cuda", how))
    assert found == agreed(two.run(means, exchange, "cpu"))


@gpu
@pytest.mark.parametrize("exchange", CHOSEN, ids=named)
def test_a_stream_of_ones_own_trains_alike(exchange: Exchange, two: Ranks) -> None:
    found = agreed(two.run(means, exchange, "cuda", "before the encode", True))
    assert found == agreed(two.run(means, exchange, "cpu"))


@gpu
@pytest.mark.parametrize(
    "how", ["nothing", "before the encode", "before the copy back"]
)
def test_what_is_offloaded_has_the_bits_of_the_cpu(how: str, two: Ranks) -> None:
    plan = offloaded()
    assert agreed(two.run(means, plan, "cuda", how)) == agreed(
        two.run(means, plan, "cpu")
    )


@gpu
@pytest.mark.parametrize("exchange", FIXED, ids=named)
def test_a_backward_pass_waits_for_no_device(exchange: Exchange, two: Ranks) -> None:
    agreed(two.run(without_a_wait, exchange))


@gpu
@pytest.mark.parametrize(
    "exchange",
    [*FIXED, ALL[2], offloaded("topk")],
    ids=["none", "int8", "uniform", "topk", "offloaded"],
)
def test_pinned_memory_is_flat_after_three_steps(
    exchange: Exchange | Plan, two: Ranks
) -> None:
    for found in two.run(pinned, exchange):
        assert found[2][0] > 0
        assert len({kept for kept, _ in found[2:]}) == 1
        assert len({torch_bytes for _, torch_bytes in found[2:]}) == 1


@gpu
@pytest.mark.parametrize("exchange", [INT8, ALL[2]], ids=named)
def test_autocast_and_a_scaler_train(exchange: Exchange, two: Ranks) -> None:
    bits, fell = zip(*two.run(with_scaler, exchange), strict=True)
    assert len(set(bits)) == 1
    assert min(fell) > 0


@gpu
def test_a_cuda_graph_is_refused_by_name(doomed_two: Ranks) -> None:
    for said in doomed_two.run(captured, INT8):
        assert "CUDA graph" in said


@gpu
@pytest.mark.skipif(not dist.is_nccl_available(), reason="torch has no NCCL here")
def test_a_rank_alone_in_a_group_of_nccl_keeps_its_gradients(one: Ranks) -> None:
    assert one.run(over_nccl, INT8) == one.run(
        means, exchange_for(gw.compress.none()), "cpu"
    )


def by_nccl(rank: int, world: int) -> list[float]:
    device, timeout = torch.device("cuda"), timedelta(seconds=60)
    group = Accelerator(torch.cuda).connect(device, dist.HashStore(), 0, 1, timeout)
    given_N, gathered_N, out_N = (
        torch.full((4,), x, device=device) for x in (3.0, 0.0, 0.0)
    )
    verbs = (
        AllReduce(given_N),
        AllGather(gathered_N, given_N),
        AllToAll(out_N, given_N, (4,), (4,)),
    )
    for verb in verbs:
        carry_directly([verb], [group], device)
    group.shutdown()
    return [*gathered_N.tolist(), *out_N.tolist()]


@gpu
@pytest.mark.skipif(not dist.is_nccl_available(), reason="torch has no NCCL here")
def test_a_group_of_nccl_carries_verbs_from_the_devices_memory(one: Ranks) -> None:
    assert one.run(by_nccl) == [[3.0] * 8]
