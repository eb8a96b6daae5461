"""Hosts of several ranks: real ranks in a mesh of two hosts by two, or the other way
round.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import gradwire as gw
from gradwire.compress.powersgd import powersgd
from gradwire.contract import Exchange, Member
from gradwire.contract.spec import TensorSpec
from gradwire.errors import InvalidSetting, RankFailed
from gradwire.exchange.by_name import exchange_for
from gradwire.exchange.local import drive
from gradwire.exchange.two_level import on_hosts
from gradwire.planning.data.plan import ExchangeSetting, Plan
from gradwire.runtime.handle import Handle
from gradwire.runtime.state.checkpoint import collect
from gradwire.runtime.step.layout import ParamRange
from gradwire.runtime.step.messages import Message
from gradwire_lab.compress.deft import deft
from gradwire_lab.compress.selective import selective
from tests.each import each, sampled
from tests.runtime.given import SMALL, keywords
from tests.runtime.meshes import attached_to, device_mesh, mesh
from tests.runtime.plans import CLUSTER, drawn, profile_of_model, through
from tests.runtime.ranks import Ranks
from tests.runtime.training import CHOSEN, ONEBIT, Net, ddp, digest, swift, train

pytestmark = pytest.mark.multi

SHAPES = ((60, 33), (7, 11), (5,))
STEPS = 3
CLIPPED = gw.with_clipping(
    gw.with_momentum_correction(gw.compress.topk(density=0.1)), 0.5
)
WHOLE = tuple(
    map(exchange_for, (powersgd(rank=2), deft(density=0.1), selective(density=0.1)))
)
EXCHANGES = (*CHOSEN, CLIPPED, *WHOLE)
"""Of the last a message of one tensor leaves every second rank without one."""


def grad_of(rank: int, layer: int, step: int) -> Tensor:
    draw = torch.Generator().manual_seed(100 * rank + 10 * layer + step)
    return torch.randn(SHAPES[layer], generator=draw)


def layers() -> nn.ParameterList:
    return nn.ParameterList(torch.zeros(shape) for shape in SHAPES)


def backward(
    model: nn.ParameterList, rank: int, step: int, used: tuple[int, ...] = ()
) -> None:
    """Gives every layer, or those that are ``used``, its gradient."""
    model.zero_grad()
    chosen = used or tuple(range(len(SHAPES)))
    losses = [(model[i] * grad_of(rank, i, step)).sum() for i in chosen]
    torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]


def means_of(
    rank: int, world: int, exchanges: Sequence[Exchange]
) -> list[list[Tensor]]:
    """For each exchange the means of every layer in every step, each a message of its
    own.
    """
    settings: dict[str, Any] = {
        "bucket_cap_mb": 1e-6,
        "compress_if": lambda name, param: True,
    }
    found = []
    for exchange in exchanges:
        model, means = layers(), []
        handle = gw.attach(model, exchange, mesh=mesh(), **keywords(**settings))
        for step in range(STEPS):
            backward(model, rank, step)
            means += [p.grad.flatten().clone() for p in model if p.grad is not None]
        handle.detach()
        found.append(means)
    return found


def expected(exchange: Exchange) -> list[Tensor]:
    """What one process computes of the same messages."""
    made, found = on_hosts(exchange_for(exchange), 2), []
    specs = [
        TensorSpec(f"message {len(SHAPES) - 1 - i}", torch.Size(s).numel(), shapes=(s,))
        for i, s in enumerate(SHAPES)
    ]
    states = [
        [made.init(replace(spec, rank=rank), 4) for rank in range(4)] for spec in specs
    ]
    members = [[Member(rank, 4) for rank in range(4)] for _ in specs]
    for step in range(STEPS):
        for layer, _ in enumerate(specs):
            grads = [grad_of(rank, layer, step).flatten() for rank in range(4)]
            all_steps = [
                made.synchronise(
                    members[layer][r], states[layer][r], grads[r], grads[r]
                )
                for r in range(4)
            ]
            states[layer] = drive(all_steps, ranks_per_host=2).results
            found.append(grads[0])
    return found


@sampled("exchanges", EXCHANGES)
def test_real_ranks_compute_what_one_process_does(
    exchanges: list[Exchange], four: Ranks, subtests: pytest.Subtests
) -> None:
    of_all = four.run(means_of, exchanges)
    for exchange, *of_ranks in zip(exchanges, *of_all, strict=True):
        with subtests.test(type(exchange).__name__):
            want = expected(exchange)
            for found in of_ranks:
                assert len(found) == len(want)
                assert all(map(torch.equal, found, want))


@contextmanager
def lacking(name: str, limit: int) -> Iterator[None]:
    """Has a function of ``os`` fail here, as where memory is short, for more than so
    many bytes.
    """
    real = getattr(os, name)

    def short(*given: Any) -> Any:
        if limit and given[-1] <= limit:
            return real(*given)
        raise OSError(errno.ENOSPC, "No space left on device")

    with mock.patch.object(os, name, short):
        yield


LACKS = {
    "": ("memory", nullcontext),
    "memfd_create": ("gloo", lambda: lacking("memfd_create", 0)),
    "posix_fallocate": ("memory", lambda: lacking("posix_fallocate", 64)),
}
"""The function that fails on one rank, and what the host's ranks then say that they
use.
"""


def open_files() -> list[str]:
    """All that this process has open, but for what another of its threads closes
    meanwhile.
    """
    found = []
    for one in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found.append(str(one.readlink()))
    return found


def by_memory(rank: int, world: int) -> list[tuple[str, str, float, int]]:
    """Bits of training, the way within hosts, bytes sent and kept files; rank 2 lacks
    something.
    """
    found = []
    for _, lack in LACKS.values():
        with lack() if rank == 2 else nullcontext():
            model = Net()
            handle = attached_to(model, 1)
            train(model, swift(model.parameters()), rank, range(3))
        stats = handle.stats()
        kept = sum("gradwire-" in name for name in open_files())
        sent = stats["wire_bytes_per_step"]
        found.append((digest(model), stats["backend"]["within_hosts"], sent, kept))
        handle.detach()
    return found


def test_ranks_of_a_host_share_memory_or_none_does(four: Ranks) -> None:
    results = four.run(by_memory)
    for place, (way, _) in enumerate(LACKS.values()):
        for found in results:
            bits, within, sent, num_files = found[place]
            assert (bits, within, num_files) == (results[0][0][0], way, 0)
            assert (sent < found[1][2] / 10) is (place == 0), (
                "gradients pass through sockets"
            )


LAUNCHERS = [
    ("LOCAL_WORLD_SIZE", "LOCAL_RANK"),
    ("SLURM_STEP_TASKS_PER_NODE", "SLURM_LOCALID"),
]


@contextmanager
def variables(**given: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for pair in LAUNCHERS for name in pair}
    try:
        for name in before:
            os.environ.pop(name, None)
        os.environ.update(given)
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def trained(model: nn.Module, rank: int, hosts: Any) -> tuple[str, float, float]:
    """The bits of the parameters after training, and the loss of the first and the last
    step.
    """
    optimizer = swift(model.parameters())
    handle = gw.attach(model, ONEBIT, mesh=hosts, options=SMALL)
    losses = train(model, optimizer, rank, range(6))
    handle.detach()
    return digest(model), losses[0], losses[-1]


def trained_everywhere(rank: int, world: int) -> dict[str, tuple[str, float, float]]:
    """Trained on one, two and four hosts, under DDP, and on hosts of a launcher's
    variables.
    """
    found = {
        str(num_hosts): trained(Net(), rank, mesh(num_hosts)) for num_hosts in (1, 2, 4)
    }
    found["ddp"] = trained(ddp(Net()), rank, mesh(2))
    for size, place in LAUNCHERS:
        of_nodes = "2(x2)" if size.startswith("SLURM") else "2"
        with variables(**{size: of_nodes, place: str(rank % 2)}):
            found[size] = trained(Net(), rank, "torchrun")
    return found


def test_replicas_stay_equal_and_learn(four: Ranks) -> None:
    """Training on two hosts has the same bits under DDP, and whoever tells the
    hosts.
    """
    results = four.run(trained_everywhere)
    for way in results[0]:
        bits, firsts, lasts = zip(*(of_rank[way] for of_rank in results), strict=True)
        assert len({*bits}) == 1
        assert sum(lasts) < sum(firsts)
        assert way in ("1", "4") or bits[0] == results[0]["2"][0], way


def given_wrongly(rank: int, world: int) -> list[str]:
    """Every mistake is told on every rank, and none of them waits for another."""
    reported, grid = [], mesh()

    def attached(exchange: Any = ONEBIT, **settings: Any) -> None:
        with pytest.raises(InvalidSetting) as refused:
            gw.attach(Net(), exchange, **keywords(**settings))
        reported.append(f"{type(refused.value).__name__}: {refused.value}")

    attached(mesh="slurm")
    attached(mesh=device_mesh((2, 2), ("local", "hosts")))
    attached(mesh=device_mesh((4,)))
    attached(mesh=grid, group=grid["hosts"])
    backwards = DeviceMesh("cpu", [[3, 2], [1, 0]], mesh_dim_names=("hosts", "local"))
    attached(mesh=backwards)
    attached(gw.adapt(gw.compress.topk()), mesh=grid)
    attached(on_hosts(exchange_for(ONEBIT), 2), mesh=grid)
    attached(mesh=grid if rank else None)
    attached(mesh=(mesh(4), grid)[min(rank, 1)])
    for local_world, local_rank in (
        ("3", rank % 3),  # no divisor of the world
        ("1" if rank < 2 else "2", rank % 2 if rank > 1 else 0),  # unequal hosts
        ("2", rank // 2),  # numbered in turn, one rank of each host after another
        ("", 0),
    ):
        with variables(LOCAL_WORLD_SIZE=local_world, LOCAL_RANK=str(local_rank)):
            attached(mesh="torchrun")
    for nodes, place in (("3,1", rank % 3), ("2(x2)", rank // 2)):
        with variables(SLURM_STEP_TASKS_PER_NODE=nodes, SLURM_LOCALID=str(place)):
            attached(mesh="torchrun")
    return reported


def test_mistakes_are_told_on_every_rank(four: Ranks) -> None:
    wanted = [
        r"InvalidSetting: mesh must be a DeviceMesh of the dimensions "
        r"\('hosts', 'local'\), or",
        r"InvalidSetting: mesh must be a DeviceMesh of .* got .*'local', 'hosts'",
        r"InvalidSetting: mesh must be a DeviceMesh of",
        r"InvalidSetting: group must be None beside mesh=",
        r"InvalidSetting: mesh must be ranks numbered host after host",
        r"InvalidSetting: exchange among hosts .* fixed sett|"
        r"refused to attach: .* fixed settings",
        r"InvalidSetting: exchange must be an exchange without hosts",
        r"RanksDiffer: rank 0 and rank 1 .* ranks per host is 1 against 2",
        r"RanksDiffer: rank 0 and rank 1 .* ranks per host is 1 against 2",
        r"LOCAL_WORLD_SIZE must be a divisor of 4",
        r"RanksDiffer: rank 0 and rank 2 .* ranks per host is 1 against 2",
        r"LOCAL_RANK must be|refused to attach: .*LOCAL_RANK must be",
        r"LOCAL_WORLD_SIZE is not set; start with torchrun",
        r"SLURM_STEP_TASKS_PER_NODE is 3,1; start with torchrun, or with srun and",
        r"SLURM_LOCALID must be|refused to attach: .*SLURM_LOCALID must be",
    ]
    for reported in four.run(given_wrongly):
        for text, pattern in zip(reported, wanted, strict=True):
            assert re.search(pattern, text), text


def with_one_unused(rank: int, world: int) -> tuple[Tensor, Tensor, bool]:
    """A layer's residual before and after a step in which no rank uses it."""
    model = layers()
    settings: dict[str, Any] = {
        "bucket_cap_mb": 1.0,
        "compress_if": lambda name, param: True,
    }
    handle = gw.attach(model, ONEBIT, mesh=mesh(), **keywords(**settings))
    for step in range(2):
        backward(model, rank, step)
    before = handle.residuals()["1"].clone()
    backward(model, rank, 2, used=(0, 2))
    after, is_none = handle.residuals()["1"].clone(), model[1].grad is None
    handle.detach()
    return before, after, is_none


def test_the_residual_of_an_unused_parameter_waits(four: Ranks) -> None:
    for before, after, is_none in four.run(with_one_unused):
        assert bool(before.any())
        assert torch.equal(before, after)
        assert is_none


ONEBIT_OF_A_PLAN = ExchangeSetting(
    compressor="onebit",
    settings={"block": 64},
    collective="casync_ps",
    error_feedback=True,
)


def by_plans(rank: int, world: int) -> tuple[list[str], bool, str]:
    """The bits after training by plans that cut anywhere, residuals loaded into another
    cut, and what a rank is told that loads without ``redistribute``.
    """
    bits = []
    states = []
    for seed in (0, 1):
        plan = through(drawn(seed), "onebit", ONEBIT_OF_A_PLAN)
        model = Net()
        optimizer = swift(model.parameters())
        handle = gw.attach(model, plan, mesh=mesh(), optimizer=optimizer)
        train(model, optimizer, rank, range(3))
        states.append(handle.state_dict())
        handle.detach()
        bits.append(digest(model))
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, states[0])
    handle = gw.attach(
        Net(), through(drawn(3), "onebit", ONEBIT_OF_A_PLAN), mesh=mesh()
    )
    with pytest.raises(InvalidSetting) as refused:
        handle.load_state_dict(states[0])
    handle.load_state_dict(gw.redistribute(gathered, 4, 2)[rank])
    loaded, is_same = handle.residuals(), True
    host = gathered[rank // 2 * 2 : rank // 2 * 2 + 2]
    for name, owed in loaded.items():
        whole = sum(one["params"][name]["residual_N"] for one in host)
        kept = owed != 0
        is_same &= torch.equal(owed[kept], whole[kept])
    handle.detach()
    return (
        bits,
        is_same and any(bool(one.any()) for one in loaded.values()),
        str(refused.value),
    )


def test_plans_that_cut_anywhere_go_on_hosts_too(four: Ranks) -> None:
    results = four.run(by_plans)
    assert all(bits == results[0][0] for bits, _, _ in results)
    for _, is_same, reported in results:
        assert is_same
        assert "gw.redistribute(state_dicts, world_size, ranks_per_host)" in reported


def until_a_rank_dies(rank: int, world: int) -> str:
    """Rank 3 ends in the second step: it shares its host with rank 2 and its place with
    rank 1.
    """
    model = layers()
    gw.attach(
        model,
        ONEBIT,
        mesh=mesh(),
        options=gw.Options(compress_if=lambda name, param: True),
    )
    backward(model, rank, 0)
    if rank == 3:
        os._exit(3)
    with pytest.raises(RankFailed) as failed:
        backward(model, rank, 1)
    return str(failed.value)


@pytest.mark.slow
def test_a_lost_rank_is_named_on_all_hosts(doomed: Ranks) -> None:
    *others, dead = doomed.outcomes(until_a_rank_dies)
    assert dead.exit_code == 3
    for one in others:
        assert (
            "step 1 cannot be finished: rank 3 of 4 stopped answering" in one.value
        ), one


def pending(handle: Handle) -> dict[str, Tensor]:
    """What a rank's residuals add to the mean of the ranks, when they are delivered."""
    return {name: residual.double() for name, residual in handle.residuals().items()}


def saved(rank: int, world: int) -> dict[int, tuple[dict[str, Any], dict[str, Tensor]]]:
    """By the number of hosts, a rank's state_dict after some steps, and the residuals
    in it.
    """
    found = {}
    for num_hosts in (1, 2, 4):
        model = Net()
        handle = attached_to(model, num_hosts)
        train(model, swift(model.parameters()), rank, range(3))
        found[num_hosts] = handle.state_dict(), pending(handle)
        handle.detach()
    return found


RECUT = [(2, 4), (4, 2), (2, 1), (1, 2)]
"""Hosts before and after."""


def loaded(
    rank: int, world: int, on_hosts: list[Any], flat: list[Any], recut: list[list[Any]]
) -> tuple[list[str], dict[str, Tensor], list[dict[str, Tensor]]]:
    """What a rank is told of states of other hosts; the residuals of a state that was
    loaded into one message instead of several; and those of states that were cut
    again.
    """
    reported = []
    for states, num_hosts in ((on_hosts, 4), (flat, 2)):
        handle = attached_to(Net(), num_hosts)
        with pytest.raises(InvalidSetting) as refused:
            handle.load_state_dict(states[rank])
        reported.append(str(refused.value))
        handle.detach()
    handle = gw.attach(
        Net(), ONEBIT, mesh=mesh(2), options=gw.Options(bucket_cap_mb=1.0)
    )
    handle.load_state_dict(on_hosts[rank])
    fused = pending(handle)
    handle.detach()
    found = []
    for states, (_, num_hosts) in zip(recut, RECUT, strict=True):
        handle = attached_to(Net(), num_hosts)
        handle.load_state_dict(states[rank])
        found.append(pending(handle))
        handle.detach()
    return reported, fused, found


def test_state_is_cut_again_for_other_hosts_and_other_messages(four: Ranks) -> None:
    """What residuals will add to the mean is the same before and after, element by
    element.
    """
    before = four.run(saved)
    states = {
        num_hosts: [one[num_hosts][0] for one in before] for num_hosts in before[0]
    }
    recut = [gw.redistribute(states[old], 4, 4 // new) for old, new in RECUT]
    after = four.run(loaded, states[2], states[4], recut)

    def total(owed: list[dict[str, Tensor]], name: str, num_hosts: int) -> Tensor:
        return (
            torch.stack([one[name] for one in owed if name in one]).sum(0) / num_hosts
        )

    for place, (old, new) in enumerate(RECUT):
        were, are = (
            [one[old][1] for one in before],
            [found[place] for *_, found in after],
        )
        names = {name for owed in were for name in owed}
        assert names == {name for owed in are for name in owed}
        assert names or 1 in (old, new)
        for name in names:
            was = total(were, name, old)
            assert bool(was.any()) or old == 1
            torch.testing.assert_close(total(are, name, new), was, rtol=1e-6, atol=1e-7)
    for one, (reported, fused, _) in zip(before, after, strict=True):
        own = one[2][1]
        assert all(torch.equal(fused[name], own[name]) for name in own)
        assert "saved on hosts of 2 ranks and hosts have 1 now" in reported[0]
        assert "saved on hosts of 1 ranks and hosts have 2 now" in reported[1]
    states[2][1]["share"] = ""
    with pytest.raises(InvalidSetting, match="is of a share is"):
        gw.redistribute(states[2], 4, 2)
    with pytest.raises(
        InvalidSetting, match="ranks_per_host must be a divisor of world_size, 4"
    ):
        gw.redistribute(states[4], 4, 3)


def whole_tensors(rank: int, world: int, exchange: Any) -> tuple[list[str], list[Any]]:
    """The bits after four steps in one run, in two runs and by a plan; then what
    residuals will add to the mean, as saved and as loaded elsewhere, each with the bits
    of a step from there.
    """

    def trained_by(net: nn.Module, chosen: Any, steps: range, states: Any = ()) -> None:
        optimizer = swift(net.parameters())
        handle = gw.attach(
            net, chosen, mesh=mesh(), options=SMALL if chosen is exchange else None
        )
        for part, state in zip((net, optimizer, handle), states, strict=False):
            part.load_state_dict(state)
        train(net, optimizer, rank, steps)
        if steps.stop == 2:
            kept.extend(
                deepcopy(
                    [net.state_dict(), optimizer.state_dict(), handle.state_dict()]
                )
            )
            every.append(handle.gather_state())
            moved.append((pending(handle), 2, ""))
            train(net, optimizer, rank, range(2, 4))
        handle.detach()

    kept, every, moved = list[Any](), list[Any](), list[Any]()
    model, again, planned = Net(), Net(seed=1), Net()
    trained_by(model, exchange, range(2))
    trained_by(again, exchange, range(2, 4), kept)
    trained_by(planned, plan_of(exchange.inner), range(4))
    dist.broadcast_object_list(every)
    for grid, cap in ((mesh(), 64.0), (mesh(1), 0.004), (None, 0.004)):
        net = Net()
        handle = gw.attach(
            net, exchange, mesh=grid, options=gw.Options(bucket_cap_mb=cap)
        )
        handle.load_state_dict(every[0])
        owed, num_hosts = pending(handle), 4 if grid is None else grid.size(0)
        train(net, swift(net.parameters()), rank, range(2, 3))
        handle.detach()
        moved.append((owed, num_hosts, digest(net)))
    return [*map(digest, (model, again, planned))], moved


def plan_of(exchange: Any) -> Plan:
    """A plan through an exchange; SSFusion's names tensors to be encoded before their
    message.
    """
    profile, name = profile_of_model(Net()), type(exchange).__name__
    if name == "selective":
        return gw.planner.ssfusion(profile, CLUSTER, sparsifier="topk", density=0.1)
    own = {"rank": 2} if name == "powersgd" else {"density": 0.1}
    setting = ExchangeSetting(compressor=name, settings=own, error_feedback=True)
    return through(gw.planner.wfbp(profile, CLUSTER), name, setting)


@pytest.mark.parametrize(
    "exchange",
    [WHOLE[0], pytest.param(WHOLE[2], marks=pytest.mark.slow)],
    ids=str,
)
def test_exchanges_of_whole_tensors_train_are_saved_and_are_planned(
    exchange: Exchange, four: Ranks
) -> None:
    """A host's ranks have some tensors each; other hosts and messages give them
    others.
    """
    of_ranks = four.run(whole_tensors, exchange)
    for whole, in_two, planned in (bits for bits, _ in of_ranks):
        assert whole == in_two == of_ranks[0][0][0]
        assert planned == of_ranks[0][0][2] != digest(Net())
    totals = []
    for each_rank in zip(*(moved for _, moved in of_ranks), strict=True):
        assert len({bits for _, _, bits in each_rank}) == 1
        owed, num_hosts = [own for own, _, _ in each_rank], each_rank[0][1]
        names = {name for own in owed for name in own}
        totals.append(
            {
                name: sum(own[name] for own in owed if name in own) / num_hosts
                for name in names
            }
        )
    for total in totals:
        assert total.keys() == totals[0].keys()
        for name, one in total.items():
            assert bool(one.any())
            torch.testing.assert_close(one, totals[0][name], rtol=1e-6, atol=1e-7)


def warmed(codec: Any) -> Exchange:
    return gw.with_density_warmup(gw.with_clipping(codec, 1.0), steps_per_stage=5)


@each(
    "exchange",
    [*EXCHANGES, warmed(gw.compress.topk()), warmed(selective(sparsifier="topk"))],
)
def test_a_state_of_hosts_has_the_fields_of_one_without(exchange: Exchange) -> None:
    """Each field is with a rank of the host at least, of every tensor, under the same
    path.
    """
    ranges = [
        ParamRange.whole(str(at), torch.zeros(shape)) for at, shape in enumerate(SHAPES)
    ]
    flat = collect([Message(0, ranges, exchange, 0, 2)])
    hosts = on_hosts(exchange, 2)
    of_host = [collect([Message(0, ranges, hosts, rank, 4)]) for rank in range(2)]
    for name, fields in flat["params"].items():
        assert {*fields} == {path for one in of_host for path in one["params"][name]}
    assert all(one["messages"].keys() == flat["messages"].keys() for one in of_host)


def kept_of_one_element(rank: int, world: int) -> list[Tensor]:
    """A rank's residual of a parameter of one element, alone in its message: flat, and
    loaded on hosts.
    """
    found: list[Tensor] = []
    states: list[Any] = [None] * world
    settings: dict[str, Any] = {
        "bucket_cap_mb": 1e-6,
        "compress_if": lambda name, param: True,
    }
    for grid in (None, mesh(2)):
        net = nn.Sequential(nn.Linear(3, 2), nn.PReLU())
        handle = gw.attach(net, ONEBIT, mesh=grid, **keywords(**settings))
        if grid is None:
            net(torch.randn(4, 3) - 1).square().sum().backward()
            dist.all_gather_object(states, handle.state_dict())
        else:
            handle.load_state_dict(gw.redistribute(states, world, 2)[rank])
        found.append(handle.residuals()["1.weight"])
        handle.detach()
    return found


def test_one_rank_of_a_host_keeps_what_is_owed_of_one_element(four: Ranks) -> None:
    flat, on_hosts = zip(*four.run(kept_of_one_element), strict=True)
    assert bool(sum(flat).any())
    torch.testing.assert_close(sum(on_hosts) / 2, sum(flat) / 4)
    assert not on_hosts[1].any()
    assert not on_hosts[3].any()
