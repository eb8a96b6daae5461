"""Groups of ranks that go on: agreed in the store, and known to torch by the job's
numbers.
"""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.data import DistributedSampler

import gradwire as gw
from gradwire.errors import RankFailed
from gradwire.runtime.liveness.alarm import Alarm
from gradwire.runtime.liveness.blame import failure_of
from gradwire.runtime.liveness.membership import Membership, _did_not_come
from gradwire.runtime.survive import groups
from tests.runtime.given import keywords
from tests.runtime.ranks import Ranks
from tests.runtime.training import SMALL_MB, Net, digest, loss_of, momentum

pytestmark = [pytest.mark.multi, pytest.mark.timeout(180)]
LIMIT = timedelta(seconds=60)
NUM_STEPS = 5


class Known(NamedTuple):
    """What torch knows of a group."""

    rank: int
    ranks: list[int]
    mesh: list[int]
    place: int | None
    rows: int
    """Rows of a residual in the sharded state."""
    samples: list[int]
    total: float


def known(handle: gw.Handle) -> Known:
    """What torch says of a handle's group, and of the state that it cuts by it."""
    group = handle.group
    rank = dist.get_rank(group)
    mesh = DeviceMesh.from_group(group, "cpu")
    state: Any = handle.sharded_state()["params"]
    fields: dict[str, Tensor] = next(iter(state.values()))
    rows = next(iter(fields.values()))
    assert isinstance(rows, DTensor)
    sampler: Any = DistributedSampler(
        range(12), dist.get_world_size(group), rank, shuffle=False
    )
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    assert dist.get_global_rank(group, rank) == dist.get_rank()
    return Known(
        rank,
        dist.get_process_group_ranks(group),
        mesh.mesh.tolist(),
        mesh.get_local_rank(),
        rows.shape[0],
        list(sampler),
        total.item(),
    )


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def refuse(*_: Any, **__: Any) -> None:
    """As torch does under torchcomms where not all ranks of the job make the call."""
    raise NotImplementedError("new_group cannot delegate to split_group")


class Seen(NamedTuple):
    """What a survivor has seen: the losses, and each model's bits by step and group."""

    lost: list[tuple[int, ...]]
    bits: list[list[str]]
    known: list[Known]


def trains_in_groups(
    rank: int, world: int, victim: int, order: tuple[int, ...]
) -> Seen:
    """One model of all ranks and one of ranks 0, 1 and 3; the victim dies in the first
    to run.
    """
    some = dist.new_group([0, 1, 3])
    dist.new_group = refuse
    given = keywords(bucket_cap_mb=SMALL_MB, timeout=LIMIT, on_failure="shrink")
    nets = [Net(seed) for seed in range(1 if rank == 2 else 2)]
    handles = [
        gw.attach(net, "topk", group=group, **given)
        for net, group in zip(nets, (None, some), strict=False)
    ]
    optimizers = [momentum(net.parameters()) for net in nets]
    order = tuple(place for place in order if place < len(nets))
    lost: list[tuple[int, ...]] = []
    bits: list[list[str]] = [[] for _ in nets]
    step = 0
    while step < NUM_STEPS:
        if step == 2 and rank == victim and not lost:
            nets[order[0]].middle.weight.register_hook(die)
        try:
            for one in optimizers:
                one.zero_grad()
            for place in order:
                loss_of(nets[place], rank, step).backward()
        except gw.RanksLost as error:
            lost.append(error.ranks)
            continue
        for one in optimizers:
            one.step()
        step += 1
        for own, net in zip(bits, nets, strict=True):
            own.append(digest(net))
    found = Seen(lost, bits, [known(handle) for handle in handles])
    for handle in handles:
        handle.detach()
    return found


@pytest.mark.parametrize(
    "order",
    [(0, 1), pytest.param((1, 0), marks=pytest.mark.slow)],
    ids=["all ranks first", "some ranks first"],
)
def test_models_of_different_groups_lose_a_rank_together(
    doomed: Ranks, order: tuple[int, ...]
) -> None:
    """Ranks in another number of groups than others find each other, without
    ``new_group``.
    """
    doomed.send(trains_in_groups, 3, order)
    found: list[Seen] = doomed.survivors({3})
    assert [one.lost for one in found] == [[(3,)]] * 3
    for model, ranks in enumerate(([0, 1, 2], [0, 1])):
        for place, rank in enumerate(ranks):
            own = found[rank]
            assert own.bits[model] == found[ranks[0]].bits[model]
            assert own.known[model] == Known(
                place,
                ranks,
                ranks,
                place,
                len(ranks),
                list(range(place, 12, len(ranks))),
                float(len(ranks)),
            )


def trains_experts(rank: int, world: int, shared_first: bool) -> Seen:
    """A model of all ranks and one of each pair, in one backward pass in which rank 3
    dies.

    The pair of ranks 0 and 2 loses nobody.
    """
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    given = keywords(bucket_cap_mb=SMALL_MB, timeout=LIMIT, on_failure="shrink")
    nets = [Net(0), Net(1 + rank % 2)]
    handles = [
        gw.attach(net, "topk", group=group, **given)
        for net, group in zip(nets, (None, pairs[rank % 2]), strict=True)
    ]
    optimizers = [momentum(net.parameters()) for net in nets]
    lost: list[tuple[int, ...]] = []
    bits: list[list[str]] = [[], []]
    step = 0
    while step < NUM_STEPS:
        if step == 2 and rank == 3:
            nets[not shared_first].middle.weight.register_hook(die)
        try:
            for one in optimizers:
                one.zero_grad()
            losses = [loss_of(net, rank, step) for net in nets]
            sum(losses if shared_first else reversed(losses)).backward()  # type: ignore[union-attr]
        except gw.RanksLost as error:
            lost.append(error.ranks)
            continue
        for one in optimizers:
            one.step()
        step += 1
        for own, net in zip(bits, nets, strict=True):
            own.append(digest(net))
    assert handles[0].step == NUM_STEPS
    # one more where a rank had ended it
    assert handles[1].step in (
        NUM_STEPS,
        NUM_STEPS + 1,
    )
    for handle in handles:
        handle.detach()
    return Seen(lost, bits, [])


@pytest.mark.parametrize(
    "shared_first", [True, pytest.param(False, marks=pytest.mark.slow)]
)
def test_a_model_that_has_lost_nobody_repeats_the_step_with_the_others(
    doomed: Ranks, shared_first: bool
) -> None:
    """Its ranks would wait in it for one that has raised the loss in the other
    model.
    """
    doomed.send(trains_experts, shared_first)
    found: list[Seen] = doomed.survivors({3})
    assert [one.lost for one in found] == [[(3,)]] * 3
    assert all(one.bits[0] == found[0].bits[0] for one in found)
    assert found[0].bits[1] == found[2].bits[1]
    assert found[0].bits[1] != found[1].bits[1]


def loses_in_a_pair(rank: int, world: int) -> tuple[tuple[int, ...], str]:
    """Ranks 1 and 3 train together; rank 3 dies."""
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    net = Net()
    handle = gw.attach(net, "topk", group=pairs[rank % 2], **keywords(timeout=LIMIT))
    loss_of(net, rank, 0).backward()
    if rank % 2 == 0:
        handle.detach()
        return (), ""
    if rank == 3:
        net.middle.weight.register_hook(die)
    try:
        loss_of(net, rank, 1).backward()
    except gw.RankFailed as error:
        return error.ranks, str(error)
    return (), "nothing"


def test_errors_name_ranks_by_their_numbers_in_the_job(doomed: Ranks) -> None:
    doomed.send(loses_in_a_pair)
    _, (ranks, text), _ = doomed.survivors({3})
    assert ranks == (3,)
    assert "rank 1 of 2" in text
    assert "rank 1 of this group is rank 3 of the job" in text


def test_every_error_about_ranks_of_a_group_has_their_numbers_in_the_job() -> None:
    who = Membership("2-5-7/1", 0, 3, (2, 5, 7))
    found: list[RankFailed] = [
        failure_of(
            Alarm((1, 2), 4, "ranks 1, 2 of 3 stopped answering"), who, "it asked"
        ),
        _did_not_come((1, 2), who, "attach", LIMIT),
    ]
    for error in found:
        assert error.ranks == (5, 7)
        assert "rank 1, 2 of this group is rank 5, 7 of the job" in str(error)
    assert who.in_group((5, 9)) == (1,)
    assert who.on_host(3).ranks == (2, 5, 7)
    alone = Membership("0-1-2/1", 0, 3, (0, 1, 2))
    assert "of the job" not in str(
        failure_of(Alarm((1,), 4, "rank 1"), alone, "it asked")
    )
    beyond = failure_of(
        Alarm((), 4, "a rank of another group", beyond=(9,)), who, "told"
    )
    assert beyond.ranks == (9,)


def test_torch_without_a_table_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Survivors go on all the same: they do not need torch to know them."""
    monkeypatch.setattr(groups, "_TABLES", ("pg_map", "a_table_of_tomorrow"))
    with caplog.at_level("WARNING", logger="gradwire"):
        groups.register_group(object(), "name", [0, 1])
    assert "it lacks a_table_of_tomorrow" in caplog.text


@pytest.mark.parametrize(
    ("given", "config", "name"),
    [
        ("cpu:gloo,cuda:gloo", "cpu:gloo,cuda:gloo", "gloo"),
        ("cuda:nccl", "cuda:nccl", "nccl"),
        ("cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl"),
        ("cpu:torchcomm,cuda:torchcomm", "cpu:gloo,cuda:gloo", "gloo"),
    ],
)
def test_a_group_has_the_back_ends_that_a_store_alone_can_connect(
    given: str, config: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: list[Any] = []
    monkeypatch.setattr(groups, "_enter", lambda *values: entered.append(values))
    groups.register_group(None, "one", [0, 1], given)
    assert entered == [(None, "gradwire/one", [0, 1], name, config)]
