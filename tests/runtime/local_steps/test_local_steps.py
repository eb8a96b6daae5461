"""Local steps: what they compute, on real ranks against plain PyTorch in one
process.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW

import gradwire as gw
from gradwire.contract import Exchange
from gradwire.errors import InvalidSetting, RankFailed, RanksDiffer
from gradwire.runtime.local_steps.local_steps import cut_into
from gradwire.runtime.local_steps.lock_step import Rhythm
from gradwire.runtime.local_steps.outer import DILOCO
from tests.each import each
from tests.runtime.given import keywords
from tests.runtime.meshes import mesh
from tests.runtime.ranks import Ranks
from tests.runtime.state.test_checkpoint import through_a_file
from tests.runtime.training import (
    SMALL_MB,
    Net,
    adamw,
    batch,
    ddp,
    digest,
    loss_of,
    train,
)

LOCAL_SGD = partial(SGD, lr=1.0)
NUM_STEPS = 14
RHYTHMS = (
    Rhythm(4),
    Rhythm(1),
    Rhythm(6, fragments=2),
    Rhythm(6, fragments=3, delay=1, mixing=0.5),
    Rhythm(4, delay=3, mixing=0.25),
)
FOUR_BITS = gw.exchange_for(gw.compress.uniform(bitwidth=4))
SPARSE = gw.exchange_for(gw.compress.topk(density=0.1))


def prepared(
    rhythm: Rhythm,
    exchange: Any = "none",
    outer: Any = DILOCO,
    seed: int = 0,
    **settings: Any,
) -> tuple[Net, Any, Any]:
    net = Net(seed)
    optimizer = adamw(net.parameters())
    settings = {"bucket_cap_mb": SMALL_MB, **vars(rhythm), **settings}
    return (
        net,
        optimizer,
        gw.local_steps(net, optimizer, exchange, outer=outer, **keywords(**settings)),
    )


def reference(
    world: int, rhythm: Rhythm, outer: Callable[..., Any]
) -> list[dict[str, Tensor]]:
    """Anchors, and then each rank's parameters, of ranks that are trained in this
    process.
    """
    nets = [Net(0) for _ in range(world)]
    optimizers = [adamw(net.parameters()) for net in nets]
    names = [name for name, _ in nets[0].named_parameters()]
    anchors = {
        name: nn.Parameter(p.detach().clone()) for name, p in nets[0].named_parameters()
    }
    step_outside = outer(list(anchors.values()))
    fragments = cut_into(list(nets[0].named_parameters()), rhythm.fragments)
    pending: dict[int, list[str]] = {}
    sent: dict[str, Tensor] = {}
    for step in range(1, NUM_STEPS + 1):
        for rank, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            train(net, optimizer, rank, [step - 1])
        locals_ = [dict(net.named_parameters()) for net in nets]
        if step % rhythm.gap == 0:
            chosen = fragments[(step // rhythm.gap - 1) % rhythm.fragments]
            for name in chosen:
                deltas = [
                    anchors[name].detach() - one[name].detach() for one in locals_
                ]
                sent[name] = torch.stack(deltas).mean(0)
            pending[step + rhythm.delay] = chosen
        for name in (due := pending.pop(step, [])):
            anchors[name].grad = sent[name]
        if due:
            step_outside.step()
            step_outside.zero_grad()
        for one in locals_:
            for name in due:
                mixed = rhythm.mixing * one[name] + (1 - rhythm.mixing) * anchors[name]
                one[name].data.copy_(mixed.detach())
    found = [anchors, *(dict(net.named_parameters()) for net in nets)]
    return [{name: one[name].detach().clone() for name in names} for one in found]


OF_PAPERS = [*((rhythm, DILOCO) for rhythm in RHYTHMS), (RHYTHMS[3], LOCAL_SGD)]


def trained(
    rank: int, world: int
) -> list[tuple[dict[str, Tensor], dict[str, Tensor], Tensor]]:
    """Anchors, parameters and a buffer after training in each way of the papers."""
    found = []
    for rhythm, outer in OF_PAPERS:
        net, optimizer, handle = prepared(rhythm, outer=outer)
        train(net, optimizer, rank, range(NUM_STEPS))
        params = {name: p.detach().clone() for name, p in net.named_parameters()}
        anchors = {name: anchor.clone() for name, anchor in handle.anchors().items()}
        found.append((anchors, params, net.get_buffer("norm.running_mean")))
        handle.detach()
    return found


@pytest.mark.multi
def test_ranks_do_what_the_papers_say(two: Ranks) -> None:
    """Buffers stay each rank's own."""
    for (rhythm, outer), *of_ranks in zip(OF_PAPERS, *two.run(trained), strict=True):
        anchors, *params = reference(2, rhythm, outer)
        for own, (got_anchors, got_params, _) in zip(params, of_ranks, strict=True):
            torch.testing.assert_close(got_anchors, anchors, rtol=2e-4, atol=2e-5)
            torch.testing.assert_close(got_params, own, rtol=2e-4, atol=2e-5)
        assert not torch.equal(of_ranks[0][2], of_ranks[1][2])


def test_accumulated_gradients_and_schedulers_see_only_optimizer_steps() -> None:
    net = Net()
    optimizer = SGD(net.parameters(), lr=0.1)
    handle = gw.local_steps(net, optimizer, "none", every=2, outer=LOCAL_SGD)
    inside = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    outside = torch.optim.lr_scheduler.StepLR(handle.outer, 1, 0.5)
    for step in range(4):
        optimizer.zero_grad()
        for part in range(3):
            with handle.no_sync():
                loss_of(net, part, step).backward()
        optimizer.step()
        inside.step()
        if handle.step % 2 == 0:
            outside.step()
    assert (handle.step, handle.stats()["exchanges"]) == (4, 2)
    assert optimizer.param_groups[0]["lr"] == 0.1 / 16
    assert handle.outer.param_groups[0]["lr"] == 1.0 / 4


def skipping(rank: int, world: int) -> tuple[int, int, str, str]:
    """A scaler of rank 1 skips the fourth step; both ranks have the same batches."""
    torch.manual_seed(0)
    net = nn.Linear(4, 3)
    optimizer = SGD(net.parameters(), lr=0.1)
    handle = gw.local_steps(net, optimizer, "none", every=5)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(12):
        inputs = batch(rank, step)[0][:, :4]
        if (rank, step) == (1, 3):
            inputs = inputs * torch.inf
        optimizer.zero_grad()
        scaler.scale(net(inputs).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    found = handle.step, handle.stats()["exchanges"]
    handle.end_period()
    ends = digest(net), digest(handle.anchors().values())
    handle.detach()
    return (*found, *ends)


@pytest.mark.multi
def test_a_step_that_a_scaler_skips_is_made_up_for(two: Ranks) -> None:
    """Each exchange has as many steps of both ranks, and a period may end early."""
    (steps, exchanges, *ends), (fewer, as_many, *others) = two.run(skipping)
    assert (steps, exchanges) == (12, 2)
    assert (fewer, as_many) == (11, 2)
    assert ends == others
    assert ends[0] == ends[1]


class Sixteen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.low = nn.Linear(13, 5, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.low(x.bfloat16()).float()  # type: ignore[no-any-return]


def test_anchors_of_16_bits_keep_what_parameters_round_away() -> None:
    """Small outer steps add up in the anchor, though none of them moves the
    parameter.
    """
    net = Sixteen()
    optimizer = SGD(net.parameters(), lr=0.1)
    handle = gw.local_steps(
        net, optimizer, "none", every=1, outer=partial(SGD, lr=1e-4)
    )
    before = {name: anchor.clone() for name, anchor in handle.anchors().items()}
    bits = digest(net.low.weight.view(torch.int16))
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(net(batch(0, 0)[0]), batch(0, 0)[1]).backward()
        optimizer.step()
    moved = before["low.weight"] - handle.anchors()["low.weight"]
    assert handle.anchors()["low.weight"].dtype == torch.float32
    assert bool(moved.any())
    assert digest(net.low.weight.view(torch.int16)) == bits
    handle.detach()


def on_hosts(rank: int, world: int) -> tuple[list[Tensor], list[Tensor]]:
    found = []
    for where in ({}, {"mesh": mesh()}):
        net, optimizer, handle = prepared(RHYTHMS[3], **where)
        train(net, optimizer, rank, range(NUM_STEPS))
        handle.end_period()
        found.append([p.detach().clone() for p in net.parameters()])
        handle.detach()
    flat, hosts = found
    return flat, hosts


@pytest.mark.multi
def test_hosts_of_several_ranks_exchange_their_shares(four: Ranks) -> None:
    ranks = four.run(on_hosts)
    for flat, hosts in ranks:
        torch.testing.assert_close(hosts, flat, rtol=2e-4, atol=2e-5)
    assert len({digest(hosts) for _, hosts in ranks}) == 1


def forgotten(rank: int, world: int) -> tuple[str, bool]:
    net = Net()
    optimizer = adamw(net.parameters())
    handle = gw.local_steps(net, optimizer, "none", every=2, outer=LOCAL_SGD)
    kept = weakref.ref(handle)
    del handle
    train(net, optimizer, rank, range(4))
    bits = digest(net)
    del net, optimizer
    gc.collect()
    return bits, kept() is None


@pytest.mark.multi
def test_a_handle_lives_as_long_as_its_model(two: Ranks) -> None:
    (bits, gone), (other_bits, other_gone) = two.run(forgotten)
    assert bits == other_bits
    assert gone
    assert other_gone


class Prepared(torch.optim.Optimizer):
    """An optimizer as Accelerate prepares it: around the one that steps, and without
    hooks.
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.optimizer = inner


def in_ddp(rank: int, world: int) -> tuple[bool, str, bool]:
    """A framework's DDP: the bits of a plain module's run, gradients after it, and its
    end.
    """
    static = ddp(Net(), static_graph=True)  # it averages within no_sync()
    with pytest.raises(InvalidSetting, match="model must be one without static_graph"):
        gw.local_steps(static, adamw(static.parameters()), "none", every=2)
    rhythm = RHYTHMS[0]
    net, optimizer, handle = prepared(rhythm, SPARSE)
    train(net, optimizer, rank, range(NUM_STEPS))
    handle.detach()
    model = ddp(Net())
    optimizer = adamw(model.parameters())
    settings: Any = {"outer": DILOCO, "bucket_cap_mb": SMALL_MB, **vars(rhythm)}
    with pytest.raises(
        InvalidSetting, match=r"give gw.attach or gw.local_steps the Distributed"
    ):
        gw.local_steps(model.module, optimizer, SPARSE, **keywords(**settings))
    handle = gw.local_steps(model, Prepared(optimizer), SPARSE, **keywords(**settings))
    with model.no_sync():
        train(model, optimizer, rank, range(3))
    model.require_backward_grad_sync = True  # as loops do that accumulate
    train(model, optimizer, rank, range(3, NUM_STEPS))
    is_same = digest(model.module) == digest(net)
    handle.end_period()
    handle.detach()
    optimizer.zero_grad()
    loss_of(model, rank, 0).backward()
    averaged = digest(p.grad for p in model.parameters() if p.grad is not None)
    optimizer.zero_grad()
    gw.local_steps(model, optimizer, SPARSE, **keywords(**settings))
    this = weakref.ref(model)
    del model, handle, optimizer
    gc.collect()
    return is_same, averaged, this() is None


@pytest.mark.multi
def test_a_ddp_model_trains_locally_and_averages_after_detach(two: Ranks) -> None:
    (is_same, averaged, is_gone), other = two.run(in_ddp)
    assert is_same
    assert is_gone
    assert (is_same, averaged, is_gone) == other


def test_momentum_on_both_sides_of_the_exchange_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for make, is_warned in ((DILOCO, True), (LOCAL_SGD, False)):
        net, caught = Net(), len(caplog.records)
        exchange = gw.with_momentum_correction(SPARSE, momentum=0.9)
        gw.local_steps(
            net, adamw(net.parameters()), exchange, every=2, outer=make
        ).detach()
        assert (
            any("momentum counts twice" in r.message for r in caplog.records[caught:])
            == is_warned
        )


@each("quorum", [None, 1])
def test_memory_has_anchors_and_their_outer_state(quorum: int | None) -> None:
    net = Net()
    optimizer = adamw(net.parameters())
    handle = gw.local_steps(
        net, optimizer, "none", every=2, outer=DILOCO, quorum=quorum
    )
    sizes = [param.nbytes for param in net.parameters()]
    first = handle.stats()["memory"]
    train(net, optimizer, 0, range(2))
    handle.end_period()
    memory = handle.stats()["memory"]
    handle.detach()
    # an anchor, then its momentum too
    assert (first["anchors"], memory["anchors"]) == (sum(sizes), 2 * sum(sizes))
    of_a_parameter = memory.pop("bytes_a_parameter")
    numel = sum(param.numel() for param in net.parameters())
    assert of_a_parameter == pytest.approx(sum(memory.values()) / numel)


def rate(rank: int, world: int, exchange: Any) -> dict[str, float]:
    torch.manual_seed(0)
    net = nn.Linear(400, 400, bias=False)
    optimizer = AdamW(net.parameters(), lr=1e-3)
    handle = gw.local_steps(net, optimizer, exchange, every=20)
    for _ in range(40):
        optimizer.zero_grad()
        net(torch.randn(4, 400)).square().mean().backward()
        optimizer.step()
    stats = handle.stats()
    return {
        key: stats[key]
        for key in ("wire_bytes_per_step", "steps", "exchanges", "messages")
    }


@pytest.mark.multi
def test_local_steps_send_little(two: Ranks) -> None:
    """At most 0.05 bytes a local step for a parameter by 4 bits; dense DiLoCo sends 0.2
    bytes.

    SparseLoCo sends 0.001 bytes.
    """
    for exchange, least, most in (
        (FOUR_BITS, 0.02, 0.05),
        ("sparseloco", 0.0009, 0.0012),
    ):
        for stats in two.run(rate, exchange):
            assert (stats["steps"], stats["exchanges"]) == (40, 2)
            assert least < stats["wire_bytes_per_step"] / 400**2 < most


OTHERS = [
    ({"every": 5}, "every is 4 against 5"),
    ({"outer": LOCAL_SGD}, "outer is"),
    ({"fragments": 2}, "fragments is 1 against 2"),
]


def reported(rank: int, world: int) -> tuple[list[str], str]:
    """What ranks hear whose settings differ, and where one of them is refused."""
    found = []
    for other, _ in OTHERS:
        net, settings = Net(), {"every": 4, **(other if rank else {})}
        with pytest.raises(RanksDiffer) as differ:
            gw.local_steps(net, adamw(net.parameters()), "none", **keywords(**settings))
        found.append(str(differ.value))
    net = Net()
    with pytest.raises(InvalidSetting if rank else RanksDiffer) as refused:
        gw.local_steps(
            net, adamw(net.parameters()), "none", every=4, fragments=1 + 2 * rank
        )
    return found, str(refused.value)


@pytest.mark.multi
def test_ranks_that_differ_and_refusals_are_told_to_all(two: Ranks) -> None:
    (found, others), (also_found, own) = two.run(reported)
    for text, also, (_, said) in zip(found, also_found, OTHERS, strict=True):
        assert said in text
        assert said in also
    assert f"rank 1 refused to attach: InvalidSetting: {own}" in others


def uneven(rank: int, world: int) -> str:
    net, optimizer, handle = prepared(Rhythm(3), timeout=timedelta(seconds=6))
    try:
        train(net, optimizer, rank, range(2 + rank))
        while True:
            handle._engine.check()  # rank 0 trains no more, and hears of it here
    except RankFailed as error:
        return str(error)


@pytest.mark.multi
@pytest.mark.slow
def test_a_rank_that_stays_behind_is_named(doomed_two: Ranks) -> None:
    for text in doomed_two.run(uneven):
        assert "rank 0 of 2 did not get as far" in text


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"every": 0}, "every must be a whole number, 1 to .*, got 0"),
    ({"every": 2.0}, "every must be a whole number, 1 to .*, got 2.0"),
    ({"every": 4, "fragments": 3}, "fragments must be a divisor of every, 4"),
    (
        {"every": 9, "fragments": 9},
        "fragments must be at most 8, the number of parameters, got 9",
    ),
    ({"every": 4, "delay": 4}, "delay must be fewer than 4"),
    ({"every": 4, "fragments": 2, "delay": 2}, "delay must be fewer than 2"),
    ({"every": 4, "mixing": 1}, "mixing must be a number in \\[0, 1\\)"),
    (
        {"every": 4, "outer": SGD([torch.ones(1)])},
        "outer must be a function of parameters",
    ),
    ({"every": 4, "outer": lambda params: None}, "got 'one that returns NoneType'"),
    (
        {"every": 4, "outer": lambda params: SGD(params[:1], lr=1.0)},
        "got 'one that takes 1 param",
    ),
    ({"every": 4, "timeout": 5}, "timeout must be a positive timedelta"),
]


def test_mistakes_are_named(subtests: pytest.Subtests) -> None:
    net = Net()
    for settings, said in MISTAKES:
        with subtests.test(said), pytest.raises(InvalidSetting, match=said):
            gw.local_steps(net, adamw(net.parameters()), "none", **keywords(**settings))
    gw.attach(net, "none").detach()  # nothing is left behind


def test_an_optimizer_that_trains_another_model_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="parameters that the model lacks"):
        gw.local_steps(Net(), adamw(Net().parameters()), "none", every=2)
    with pytest.raises(InvalidSetting, match=r"a torch\.optim\.Optimizer"):
        gw.local_steps(Net(), None, "none", every=2)  # type: ignore[arg-type]


def test_one_gradient_has_one_exchange() -> None:
    net = Net()
    handle = gw.local_steps(net, adamw(net.parameters()), "none", every=2)
    with pytest.raises(InvalidSetting, match="attached already"):
        gw.attach(net, "none")
    handle.detach()
    gw.attach(net, "none").detach()


STREAMING = Rhythm(6, fragments=2, delay=2, mixing=0.5)
CASES = (
    (Rhythm(4), FOUR_BITS, 7),
    (Rhythm(5), SPARSE, 5),  # at the end of a period
    (STREAMING, SPARSE, 8),  # between two fragments
    (STREAMING, SPARSE, 10),  # while a fragment is on its way
)


def bits(net: Any, handle: Any) -> str:
    held = [*net.parameters(), *handle.anchors().values(), *handle.residuals().values()]
    momenta = [own["momentum_buffer"] for own in handle.outer.state.values()]
    return digest([*held, *momenta])


def resumed(
    rank: int, world: int, rhythm: Rhythm, exchange: Exchange, at: int
) -> tuple[tuple[str, str, int, int], str, str]:
    """Bits of one run and of one in two parts; its parameters before and after a
    period's end.
    """
    net, optimizer, handle = prepared(rhythm, exchange)
    train(net, optimizer, rank, range(at))
    states = through_a_file(
        [net.state_dict(), optimizer.state_dict(), handle.state_dict()]
    )
    on_its_way = len(states[2]["outer"]["arriving"])
    train(net, optimizer, rank, range(at, at + 6))
    whole = bits(net, handle)

    net, optimizer, handle = prepared(rhythm, exchange, seed=1)
    train(net, optimizer, rank, range(3))  # a state of its own, to be replaced
    for part, state in zip((net, optimizer, handle), states, strict=True):
        part.load_state_dict(state)
    train(net, optimizer, rank, range(at, at + 6))
    assert handle.stats()["steps"] == 6
    found = whole, bits(net, handle), handle.step, on_its_way
    before = digest(net)
    train(net, optimizer, rank, [at + 6])
    handle.end_period()
    assert digest(net) == digest(handle.anchors().values())
    return found, before, digest(net)


@pytest.mark.multi
@each("rhythm, exchange, at", CASES, ids=["mid", "end", "turn", "way"])
def test_a_resumed_run_is_the_uninterrupted_one(
    rhythm: Rhythm, exchange: Exchange, at: int, two: Ranks
) -> None:
    """Parameters are each rank's own in a period, and the same bits on all at its
    end.
    """
    of_ranks = two.run(resumed, rhythm, exchange, at)
    for (whole, again, step, on_its_way), _, _ in of_ranks:
        assert (again, step) == (whole, at + 6)
        assert bool(on_its_way) == (at == 10)
    (_, before, end), (_, other_before, other_end) = of_ranks
    assert before != other_before
    assert end == other_end


def saved(rank: int, world: int) -> dict[str, Any]:
    net, optimizer, handle = prepared(STREAMING, SPARSE)
    train(net, optimizer, rank, range(10))
    return copy.deepcopy(handle.state_dict())


def mean_pseudo_gradient(states: list[dict[str, Any]], name: str) -> Tensor:
    outers = [state["outer"] for state in states]
    deltas = [
        (one["anchors"][name] - one["parameters"][name]).double() for one in outers
    ]
    return torch.stack(deltas).mean(0)


def loaded(rank: int, world: int, states: list[dict[str, Any]]) -> tuple[str, str, int]:
    net, optimizer, handle = prepared(STREAMING, SPARSE, seed=2)
    handle.load_state_dict(states[rank])
    assert all(
        torch.equal(p, states[rank]["outer"]["parameters"][name])
        for name, p in net.named_parameters()
    )
    train(net, optimizer, rank, range(10, 14))
    return digest(net), digest(handle.anchors().values()), handle.step


@pytest.mark.multi
def test_another_number_of_ranks_goes_on_from_the_mean(two: Ranks, four: Ranks) -> None:
    olds = two.run(saved)
    news = gw.redistribute(olds, 4)
    for name in olds[0]["outer"]["anchors"]:
        torch.testing.assert_close(
            mean_pseudo_gradient(news, name),
            mean_pseudo_gradient(olds, name),
            rtol=0,
            atol=1e-7,
        )
        assert bool(mean_pseudo_gradient(olds, name).any())
    ends = four.run(loaded, news)
    assert len({anchors for _, anchors, _ in ends}) == 1
    assert len({own for own, _, _ in ends}) == 4
    assert {step for _, _, step in ends} == {14}


def moments_apart(rank: int, world: int) -> tuple[str, str, str]:
    net, optimizer, handle = prepared(Rhythm(9))
    train(net, optimizer, rank, range(2))
    early = through_a_file(handle.state_dict())
    train(net, optimizer, rank, range(2, 4))
    late = through_a_file(handle.state_dict())
    before = bits(net, handle) if handle.outer.state else digest(net)
    with pytest.raises(RanksDiffer) as caught:
        handle.load_state_dict(late if rank else early)
    after = bits(net, handle) if handle.outer.state else digest(net)
    return str(caught.value), before, after


@pytest.mark.multi
def test_states_of_two_moments_of_a_period_are_refused(two: Ranks) -> None:
    for text, before, after in two.run(moments_apart):
        assert "local_step is 2 against 4" in text
        assert before == after


def alone() -> tuple[Any, dict[str, Any]]:
    net, optimizer, handle = prepared(Rhythm(2), SPARSE)
    train(net, optimizer, 0, range(3))
    return handle, handle.state_dict()


WEIGHT = "last.weight"
DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no outer": (
        lambda s: s.pop("outer"),
        "not one of local steps: its anchors is missing",
    ),
    "no step": (
        lambda s: s.pop("local_step"),
        "local_step of the state must be a whole number",
    ),
    "a list": (
        lambda s: s["outer"].update(anchors=[]),
        "its anchors is missing or no dict",
    ),
    "place": (lambda s: s["outer"].update(position=-1), "position in the period"),
    "loads": (
        lambda s: s["outer"].update(loads=(1, 2**63)),
        "loads of the state must be two int",
    ),
    "name": (
        lambda s: s["outer"]["anchors"].pop(WEIGHT),
        f"has {WEIGHT} among its anchors",
    ),
    "shape": (
        lambda s: s["outer"]["anchors"].update({WEIGHT: torch.ones(3)}),
        "here it has .5, 29.",
    ),
    "nan": (
        lambda s: s["outer"]["parameters"][WEIGHT].fill_(torch.nan),
        "must be finite",
    ),
    "arriving": (
        lambda s: s["outer"]["arriving"].update(x=torch.ones(1)),
        "x among the arriving",
    ),
    "momentum": (
        lambda s: s["outer"]["optimizer"]["state"][0]["momentum_buffer"].fill_(
            torch.inf
        ),
        "momentum_buffer of the outer optimizer must be finite",
    ),
    "groups": (
        lambda s: s["outer"]["optimizer"].pop("param_groups"),
        "cannot be loaded",
    ),
}


def test_a_damaged_state_is_refused_and_nothing_is_loaded(
    subtests: pytest.Subtests,
) -> None:
    handle, sound = alone()
    before = digest([*handle.anchors().values(), *handle._model.parameters()])
    for damage, (change, said) in DAMAGES.items():
        state = copy.deepcopy(sound)
        change(state)
        with subtests.test(damage), pytest.raises(InvalidSetting, match=said):
            handle.load_state_dict(state)
        assert (
            digest([*handle.anchors().values(), *handle._model.parameters()]) == before
        ), damage


def test_a_state_of_attach_is_none_of_local_steps() -> None:
    net, _, handle = prepared(Rhythm(2), SPARSE)
    state = handle.state_dict()
    handle.detach()
    attached = gw.attach(net, SPARSE)
    with pytest.raises(
        InvalidSetting, match="this state belongs to local steps with outer SGD"
    ):
        attached.load_state_dict(state)


def test_anchors_that_differ_are_not_redistributed() -> None:
    _, state = alone()
    olds = [
        {**copy.deepcopy(state), "rank": rank, "world_size": 2} for rank in range(2)
    ]
    for old in olds:
        old["saved_by"] = 2
    olds[1]["outer"]["anchors"][WEIGHT] += 1
    with pytest.raises(
        InvalidSetting, match=f"anchors of {WEIGHT} of rank 0 and rank 1 differ"
    ):
        gw.redistribute(olds, 3)


# ---- Means on their way --------------------------------------------------------------


def shifted(**rhythm: Any) -> tuple[nn.Linear, Any, Any]:
    """A model whose every local step subtracts 1, an anchor that becomes the
    parameters' mean.
    """
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = SGD(model.parameters(), lr=1.0)
    average = partial(SGD, lr=1.0)
    return (
        model,
        optimizer,
        gw.local_steps(model, optimizer, "none", outer=average, **rhythm),
    )


def shift(model: nn.Linear, optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        model.weight.grad = torch.ones(1, 1)
        optimizer.step()


def test_means_of_a_longer_delay_take_effect_before_the_next_ones_leave() -> None:
    model, optimizer, handle = shifted(every=4, delay=3, mixing=0.0)
    shift(model, optimizer, 4)
    saved = handle.state_dict()
    assert saved["outer"]["left"] == 3
    handle.detach()
    model, optimizer, handle = shifted(every=2, delay=0, mixing=0.0)
    handle.load_state_dict(saved)
    shift(model, optimizer, 2)  # the mean of the first four steps is still on its way
    assert handle.anchors()["weight"].item() == model.weight.item() == -4.0
    handle.detach()


def test_the_end_of_a_period_mixes_what_was_on_its_way() -> None:
    model, optimizer, handle = shifted(every=4, delay=2, mixing=0.5)
    shift(model, optimizer, 5)  # the anchor of the first four is still on its way
    handle.end_period()
    assert handle.anchors()["weight"].item() == model.weight.item() == -4.5
    handle.detach()
