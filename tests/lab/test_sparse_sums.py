"""oktopk and spardl: sums that are cut on the way, among any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import gradwire as gw
from gradwire.exchange.by_name import exchange_for
from gradwire.exchange.without_data import expected_bytes, wire_bytes
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.simulation.representative import alone
from gradwire.planning.simulation.supersteps import Tariff
from gradwire_lab.compress.oktopk import CUT_STEPS, EXACT_STEPS
from gradwire_lab.compress.oktopk.threshold import FEWEST, MOST
from gradwire_lab.errors import LawBroken
from gradwire_lab.laws import collectives, exchanges, many_steps
from gradwire_lab.laws.cases import Case
from gradwire_lab.laws.subjects import Law
from tests.compress.test_support import draw
from tests.each import each
from tests.laws import broken_sums
from tests.run import Run

KINDS = (gw.compress.oktopk, gw.compress.spardl)
every_kind = each("kind", KINDS, ids=lambda kind: kind.__name__)


def vector(numel: int, dtype: torch.dtype = torch.float32) -> gw.TensorSpec:
    return gw.TensorSpec("vector", numel, dtype)


def kept(run: Run) -> Tensor:
    """What all ranks keep together."""
    return torch.stack([state.residual_N.double() for state in run.states]).sum(0)


def balance(run: Run, steps: Sequence[list[Tensor]]) -> None:
    """Holds each step to: what was pending and came = what arrived and is pending
    now.
    """
    world = len(run.members)
    for number, grads in enumerate(steps):
        want_N = kept(run) + torch.stack(grads).double().sum(0)
        got_N = world * run.step(grads, seed=number).double() + kept(run)
        largest = max(
            [1.0, *(float(grad_N.abs().max()) for grad_N in grads if len(grad_N))]
        )
        near = 8 * world * largest * torch.finfo(grads[0].dtype).eps
        torch.testing.assert_close(got_N, want_N, rtol=0.0, atol=near)


@every_kind
@each("world", [1, 3, 8, 13])
def test_nothing_is_lost_among_any_number_of_ranks(kind: type, world: int) -> None:
    """Also where there are more ranks than elements, in steps of zeros, and with one
    zero rank.
    """
    for numel, density in ((0, 0.1), (1, 0.1), (7, 0.4), (301, 0.02)):
        run = Run(exchange_for(kind(density=density)), vector(numel), world)
        steps = [draw(vector(numel), world, seed) for seed in range(4)]
        for grad_N in (*steps[1], steps[2][0]):
            grad_N.zero_()
        steps[3] = [100 * grad_N for grad_N in steps[3]]
        balance(run, steps)


@every_kind
def test_what_went_is_the_mean_of_what_all_have(kind: type) -> None:
    """Where ranks are alike nothing is cut twice: the largest arrive, whole."""
    spec = vector(400)
    [grad_N] = draw(spec, 1)
    mean_N = Run(kind(density=0.1), spec, 4).step([grad_N] * 4)
    there_K = mean_N.nonzero().flatten()
    assert there_K.numel() == 40
    torch.testing.assert_close(mean_N[there_K], grad_N[there_K])
    if kind is gw.compress.oktopk:
        assert torch.equal(there_K, grad_N.abs().topk(40).indices.sort().values)
    else:  # ten of each chunk
        assert (there_K // 104).bincount().tolist() == [10, 10, 11, 9]


@pytest.mark.smoke
@every_kind
def test_bytes_are_as_stated(kind: type) -> None:
    """oktopk's are those of most steps, whose counts are near what was asked for."""
    spec, world = vector(60_000), 5
    for formats in ("smallest", "coo"):
        exchange = kind(density=0.02, formats=formats)
        run = Run(exchange, spec, world)
        run.step(draw(spec, world))
        before = run.sent_bytes
        run.step(draw(spec, world, 1))
        stated = expected_bytes(exchange, spec, world)
        for sent, begun, expected in zip(run.sent_bytes, before, stated, strict=True):
            near = 0 if kind is gw.compress.spardl else 0.12
            assert sent - begun == pytest.approx(expected, rel=near)


def test_oktopks_thresholds_keep_to_the_density() -> None:
    """Whatever gradients do: as asked in each 32nd step, and within the stated range in
    others.
    """
    spec, world = vector(20_000), 4
    run = Run(exchange_for(gw.compress.oktopk(density=0.02)), spec, world)
    for step in range(EXACT_STEPS + 2):
        factor = 1000.0 if 5 <= step < 8 else 1e-4 if 12 <= step < 15 else 1.0
        run.step([factor * grad_N for grad_N in draw(spec, world, step)])
        [arrived] = {me.selection.arrived for me in run.members if me.selection}
        assert FEWEST * 400 <= arrived <= MOST * 400
        assert arrived == 400 or step % EXACT_STEPS
        assert all(
            me.selection and 200 <= me.selection.selected <= 800 for me in run.members
        )
    inner = [state.inner for state in run.states]
    shared = {
        (int(one.step), float(one.thresholds_2[1]), *one.cuts_C.tolist())
        for one in inner
    }
    assert len(shared) == 1
    assert len({float(one.thresholds_2[0]) for one in inner}) == world


@each("world", [3, 5, 6])
@each("formats", ["smallest", "coo"])
def test_oktopk_evens_out_sums_that_one_rank_has(world: int, formats: str) -> None:
    """Same bits, for at most 0.8 of the bytes."""
    spec = vector(16_385)
    grads = [0.01 * grad_N for grad_N in draw(spec, world)]
    for grad_N in grads:
        grad_N[: spec.numel // world] *= 100
    means, sent = [], []
    for most_uneven in (2.0, math.inf):
        kind = gw.compress.oktopk(
            density=0.02, formats=formats, most_uneven=most_uneven
        )
        run = Run(exchange_for(kind), spec, world)
        means.append(run.step([grad_N.clone() for grad_N in grads]))
        sent.append(run.sent_bytes)
        balance(run, [draw(spec, world, step) for step in range(1, 3)])
    assert torch.equal(*means)
    assert sum(sent[0]) < 0.8 * sum(sent[1])
    with pytest.raises(gw.InvalidSetting, match="most_uneven must be 1 or more"):
        gw.compress.oktopk(most_uneven=0.5)


def test_oktopks_regions_follow_what_ranks_select() -> None:
    """An eighth of the gradient has what is large: at first one rank of four sums all
    of it up.
    """
    spec, world = vector(32_000), 4
    run = Run(exchange_for(gw.compress.oktopk(density=0.02)), spec, world)
    sent = []
    for step in range(3):
        grads = [0.01 * grad_N for grad_N in draw(spec, world, step)]
        for grad_N in grads:
            grad_N[:4000] *= 100
        before = sum(run.sent_bytes)
        run.step(grads)
        sent.append(sum(run.sent_bytes) - before)
    cuts = run.states[0].inner.cuts_C
    assert cuts.tolist() == pytest.approx([1000, 2000, 3000], rel=0.1)
    assert sent[2] < 0.6 * sent[0]
    for step in range(3, CUT_STEPS + 1):
        run.step(draw(spec, world, step))
    assert torch.equal(run.states[0].inner.cuts_C, cuts)
    run.step(draw(spec, world, 99))
    assert not torch.equal(run.states[0].inner.cuts_C, cuts)


# ---- spardl's teams ------------------------------------------------------------------

TEAMS = ((4, 2), (6, 2), (6, 3), (8, 2), (8, 4), (9, 3), (12, 3), (12, 4), (4, 4))
"""Numbers of ranks, and of their teams; the last teams have one rank each."""
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
TEAM_LAWS = [
    law for law in (*exchanges.LAWS, *collectives.OF_ANY) if law not in many_steps.LAWS
]


@each("place, world_teams", enumerate(TEAMS))
def test_nothing_is_lost_among_teams(place: int, world_teams: tuple[int, int]) -> None:
    """Also in chunks that are empty, shorter than their counts, or longer than 16,384
    elements.

    In the second step one rank has zeros.
    """
    world, teams = world_teams
    sizes = ((0, 0.1), (1, 0.1), (7, 0.4), (90, 1.0), (301, 0.05), (70_001, 0.01))
    for number, (numel, density) in enumerate(sizes, place):
        spec = vector(numel, DTYPES[number % len(DTYPES)])
        run = Run(
            exchange_for(gw.compress.spardl(density=density, teams=teams)), spec, world
        )
        steps = [draw(spec, world, seed) for seed in range(2)]
        steps[1][0].zero_()
        balance(run, steps)


@each("world, teams", TEAMS)
def test_bytes_and_density_of_teams_are_as_stated(world: int, teams: int) -> None:
    """To the byte and to the element; chunks are of one length."""
    size, among_teams = world // teams, {2: 1, 3: 2, 4: 2}[teams]
    for dtype in (torch.float32, torch.float16):
        spec = vector(1024 * size, dtype)
        exchange = exchange_for(
            gw.compress.spardl(density=1 / 16, formats="coo", teams=teams)
        )
        run = Run(exchange, spec, world)
        mean_N = run.step(draw(spec, world))
        stated = (size - 1 + among_teams) * 64 * (4 + 4) + (size - 1) * 64 * (
            4 + dtype.itemsize
        )
        assert run.sent_bytes == wire_bytes(exchange, spec, world) == [stated] * world
        assert {me.selection for me in run.members} == {
            (64 * size, 64 * size, 64 * size)
        }
        assert int(mean_N.count_nonzero()) == 64 * size


@each(
    "world, teams, hops",
    [(8, 1, 6), (8, 2, 5), (8, 4, 4), (8, 8, 3), (6, 1, 6), (6, 3, 4)],
)
def test_teams_take_fewer_rounds(world: int, teams: int, hops: int) -> None:
    """On the planner's clock, where a hop takes a second and bytes take none."""
    exchange = gw.compress.spardl(density=0.1, teams=teams)
    cluster = Cluster(num_ranks=world, rate_bytes_per_s=1e18, hop_s=1.0)
    supersteps = alone(exchange, vector(4096), Tariff.of(exchange, cluster))
    assert sum(
        sum(verb.price) for one in supersteps for verb in one.wire
    ) == pytest.approx(hops)


@each(
    "turn, law",
    enumerate(TEAM_LAWS),
    ids=lambda value: getattr(value, "__name__", value),
)
def test_laws_hold_with_teams(turn: int, law: Law) -> None:
    for place in range(turn, turn + 2):
        world, teams = TEAMS[place % len(TEAMS)]
        numel, dtype = (300, 9, 64)[place % 3], DTYPES[place % len(DTYPES)]
        case = Case(world=world, numel=numel, dtype=dtype, seed=place)
        law(gw.compress.spardl(density=0.3, teams=teams), case)


@each(
    "turn, law, teams",
    [
        (broken_sums.all_keep_the_same, exchanges.law_nothing_is_lost_or_made, 2),
        (broken_sums.all_keep_the_same, exchanges.law_nothing_is_lost_or_made, 3),
        (broken_sums.none_keeps_the_same, exchanges.law_nothing_is_lost_or_made, 2),
        (broken_sums.none_keeps_the_same, exchanges.law_nothing_is_lost_or_made, 3),
        (
            broken_sums.adds_its_own_team_first,
            collectives.law_same_bits_on_every_rank,
            3,
        ),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_laws_reject_wrong_sums_of_teams(
    turn: type, law: Law, teams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradwire_lab.compress.spardl.Turn", turn)
    with pytest.raises(LawBroken):
        law(gw.compress.spardl(density=0.6, teams=teams), Case(world=6, numel=300))


def test_teams_divide_the_ranks() -> None:
    said = (
        "spardl teams must be one of 1, 2, 3, 6, which divide 6 ranks evenly, got "
        "4; write"
    )
    exchange, spec = gw.compress.spardl(teams=4), vector(9)
    with pytest.raises(gw.InvalidSetting, match=said):
        exchange.init(spec, 6)
    # with the state of another number of ranks
    with pytest.raises(gw.InvalidSetting, match=said):
        gw.run_local(exchange, draw(spec, 6), [exchange.init(spec, 4)] * 6)
    for teams in (0, 1.0, True):
        with pytest.raises(
            gw.InvalidSetting, match="spardl teams must be a whole number"
        ):
            gw.compress.spardl(teams=teams)


@pytest.mark.smoke
@each(
    "world, said",
    [(2048, "ranks of spardl.* at most 1024"), (2049, "divide 2049 ranks evenly")],
)
def test_teams_among_more_ranks_than_are_played(world: int, said: str) -> None:
    exchange = gw.compress.spardl(teams=8)
    cluster = Cluster(num_ranks=world, rate_bytes_per_s=1e9)
    with pytest.raises(gw.InvalidSetting, match=said):
        alone(exchange, vector(4096), Tariff.of(exchange, cluster))
