"""Embeddings under ``attach``: rows go without loss, and the training loop sees what it
saw.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradwire as gw
from gradwire.contract import Exchange
from gradwire.errors import InvalidSetting
from gradwire.exchange import sparse_schemes
from gradwire.exchange.by_name import named_collective
from gradwire.exchange.natural import INNER
from gradwire.planning.data import plan as plans
from gradwire.planning.data.cluster import Cluster, Host
from gradwire.planning.data.plan import Plan
from gradwire.planning.data.profile import Layer, Profile, ProfiledTensor
from gradwire.runtime.settings import tables
from gradwire_lab.planning.zeros import measure_sparsity
from tests.each import each
from tests.runtime import models
from tests.runtime.meshes import mesh
from tests.runtime.ranks import Ranks
from tests.runtime.training import DENSE, TOPK, ddp, digest, gradients

pytestmark = pytest.mark.multi

NUM_ROWS = 9000
NUM_STEPS = 5
EVERY_ROW, NO_WORD = 3, 4
"""The step whose batch looks every row up, and that in which rank 1 looks up none."""


class Words(nn.Module):
    """Embeddings of each kind; ``words`` are those of the coming batch."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.table = nn.Embedding(NUM_ROWS, 16, padding_idx=0)
        self.bag = nn.EmbeddingBag(NUM_ROWS, 8, mode="sum")
        self.rows = nn.Embedding(NUM_ROWS, 8, sparse=True)
        self.tied = nn.Embedding(3000, 24)
        self.unused = nn.Embedding(6000, 12)
        self.last = nn.Linear(16, 5)
        self.words = torch.zeros(0, dtype=torch.int64)

    def forward(self, x: Tensor) -> Tensor:
        words = self.words
        found, own = self.table(words).sum(0), self.tied(words % 3000).sum(0)
        rows = self.rows(words).sum(0) + self.bag(words, torch.tensor([0]))[0]
        shown = F.linear(own, self.tied.weight)  # a softmax that shares the table
        return (
            self.last(found).sum()
            + rows.square().sum()
            + shown.square().mean()
            + x.sum() * 0
        )


def batch(rank: int, step: int) -> Tensor:
    if step == EVERY_ROW:
        return torch.arange(NUM_ROWS)
    if step == NO_WORD and rank == 1:
        return torch.zeros(0, dtype=torch.int64)
    draw = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(0, 50 + 900 * (step % 2), (40,), generator=draw)


def train(
    model: nn.Module, rank: int, steps: range, no_sync: Any
) -> tuple[list[Tensor | None], list[dict[str, str]]]:
    """Gradients of every step, and the ways of embeddings where there is a handle."""
    inner = getattr(model, "module", model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    kept: list[Tensor | None] = []
    ways = []
    for step in steps:
        optimizer.zero_grad()
        # step 2 accumulates a batch of its own first
        for part in range(2 if step == 2 else 1):
            inner.words = batch(rank, step + 50 * part)
            loss = model(torch.ones(1))
            if step == 2 and not part:
                with no_sync():
                    model(torch.ones(1)).backward()
                continue
            loss.backward()
        kept += [None if g is None else g.clone() for g in gradients(model)]
        optimizer.step()
        handle = getattr(inner, "handle", None)
        ways.append({} if handle is None else handle.stats()["ways"])
    return kept, ways


def attached(net: Words, exchange: Exchange, wrapped: bool) -> nn.Module:
    model = ddp(net, find_unused_parameters=True) if wrapped else net
    object.__setattr__(net, "handle", gw.attach(model, exchange))
    return model


def parity(rank: int, world: int) -> list[tuple[str, list[dict[str, str]]]]:
    """As a module and under DDP: bits of parameters, and the ways of embeddings in
    every step.
    """
    theirs = ddp(Words(), find_unused_parameters=True)
    expected, _ = train(theirs, rank, range(NUM_STEPS), theirs.no_sync)
    ends = []
    for wrapped in (False, True):
        ours = attached(Words(), DENSE, wrapped)
        handle: Any = getattr(ours, "module", ours).handle
        found, ways = train(ours, rank, range(NUM_STEPS), handle.no_sync)
        for mine, their in zip(found, expected, strict=True):
            if mine is None or their is None:
                assert mine is None or not bool(mine.to_dense().any())
                assert their is None or not bool(their.to_dense().any())
                continue
            assert mine.is_sparse == their.is_sparse
            torch.testing.assert_close(
                mine.to_dense(), their.to_dense(), rtol=1e-4, atol=1e-5
            )
            if mine.is_sparse:
                assert mine.is_coalesced()
                assert torch.equal(mine.indices(), their.coalesce().indices())
        ends.append((digest(ours.parameters()), ways))
        handle.detach()
    return ends


def test_embeddings_get_the_means_that_ddp_gives(two: Ranks) -> None:
    one, other = two.run(parity)
    assert one == other
    for _, ways in one:
        for step, of in enumerate(ways):
            assert (of["table.weight"] == INNER) == (step == EVERY_ROW)
            assert of["tied.weight"] == INNER  # a softmax's gradient has no zeros
            assert of["rows.weight"] in ("allgather_sparse", "zen")
            assert "last.weight" not in of


def overlapping(rank: int, world: int) -> tuple[str, list[str], float]:
    """All ranks look the same rows up, so each would send them to all others for
    nothing.
    """
    torch.manual_seed(rank)
    net = nn.ModuleDict(
        {
            "dense": nn.Embedding(20_000, 16),
            "sparse": nn.Embedding(20_000, 16, sparse=True),
        }
    )
    handle = gw.attach(net, DENSE)
    ways = []
    for step in range(3):
        net.zero_grad()
        words = torch.arange(0, 20_000, 5) + step
        (net["dense"](words) * (rank + 1.0) + net["sparse"](words)).sum().backward()
        expected = torch.zeros(20_000, 16)
        expected[words] = 2.5
        torch.testing.assert_close(net["dense"].weight.grad, expected)
        torch.testing.assert_close(
            net["sparse"].weight.grad.to_dense(), expected.clamp(max=1.0)
        )
        ways += [*handle.stats()["ways"].values()]
    stats = handle.stats()
    assert 1.0 <= stats["pull_imbalance"] < 1.2
    handle.detach()
    return digest(net.parameters()), ways, stats["push_imbalance"]


def test_four_ranks_that_overlap_learn_to_take_zen(four: Ranks) -> None:
    outcomes = four.run(overlapping)
    assert len(set(map(str, outcomes))) == 1
    _, ways, push = outcomes[0]
    assert ways[-2:] == ["zen", "zen"]
    assert 1.0 <= push < 1.2


def on_known_links(
    rank: int, world: int
) -> list[tuple[str, list[str], list[tuple[int, float]]]]:
    """By default, on a slow link, and on hosts of two ranks with it: bits, ways and
    links known.
    """
    slow = gw.Cluster(num_ranks=8, rate_bytes_per_s=3e6)
    hosts = gw.Cluster(
        num_ranks=4, rate_bytes_per_s=3e6, host=Host(num_ranks=2, rate_bytes_per_s=1e9)
    )
    ends = []
    for given in (
        {},
        {"options": gw.Options(cluster=slow)},
        {"options": gw.Options(cluster=hosts), "mesh": mesh()},
    ):
        torch.manual_seed(0)
        net = nn.ModuleDict(
            {
                "dense": nn.Embedding(9000, 16),
                "sparse": nn.Embedding(9000, 8, sparse=True),
            }
        )
        handle = gw.attach(net, DENSE, **given)
        words = 2000 * rank + torch.arange(3000)
        (net["dense"](words).sum() + net["sparse"](words).sum()).backward()
        members = [one.member for one in handle._progress.messages]
        members += [one._across for one in members if one._across is not None]
        links = [one.cluster for one in members if one.cluster is not None]
        reported = [(one.num_ranks, one.rate_bytes_per_s) for one in links]
        grads = digest(
            p.grad.to_dense() for p in net.parameters() if p.grad is not None
        )
        ends.append((grads, [*handle.stats()["ways"].values()], reported))
        handle.detach()
    return ends


def test_ways_are_those_of_the_links_that_are_known(four: Ranks) -> None:
    outcomes = four.run(on_known_links)
    assert len(set(map(str, outcomes))) == 1
    (one, default, nothing), (same, slow, flat), (_, hosts, shared) = outcomes[0]
    assert one == same
    assert not nothing
    assert flat == [(4, 3e6)] * 2, "scaled to the ranks that there are"
    assert default[0] != slow[0] == "zen", "a table"
    assert (default[1], slow[1], hosts[1]) == ("allgather_sparse", "zen", "zen"), "rows"
    assert sorted(shared) == [(2, 1.5e6), (4, 2.25e6), (4, 2.25e6)], (
        "a host's link is shared"
    )


def beside_topk(rank: int, world: int) -> tuple[str, str, float, float]:
    net = attached(Words(), TOPK, False)
    train(net, rank, range(1, 2), net.handle.no_sync)  # type: ignore[union-attr]
    owed = {name: float(r.norm()) for name, r in net.handle.residuals().items()}  # type: ignore[union-attr]
    way = net.handle.stats()["ways"]["table.weight"]  # type: ignore[union-attr]
    net.handle.detach()  # type: ignore[union-attr]
    return digest(net.parameters()), way, owed["table.weight"], owed["tied.weight"]


def test_rows_beat_a_lossy_exchange_that_sends_more(two: Ranks) -> None:
    (one, way, table, tied), (other, *_) = two.run(beside_topk)
    assert one == other
    assert way != INNER
    assert table == 0.0
    assert tied > 0.0


def named(rank: int, world: int) -> tuple[str, dict[str, str], bool]:
    """Few rows on each rank: by ``DENSE`` they go by another scheme than the one
    named.
    """
    net, theirs = Tabled(), ddp(Tabled())
    handle = gw.attach(net, gw.pair(gw.compress.nonzero(width=16), gw.collective.zen()))
    for model in (net, theirs):
        model(torch.arange(7) + rank).backward()
    for mine, their in zip(gradients(net), gradients(theirs), strict=True):
        torch.testing.assert_close(mine, their)
    stats = handle.stats()
    handle.detach()
    is_zen = stats["pull_imbalance"] is not None
    return digest(p.grad for p in net.parameters()), stats["ways"], is_zen


def test_a_collective_that_is_named_carries_tables(two: Ranks) -> None:
    (one, ways, is_zen), (other, *_) = two.run(named)
    assert one == other
    assert not ways
    assert is_zen


class Tabled(nn.Module):
    """A table and a matrix."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(NUM_ROWS, 16)
        self.last = nn.Linear(16, 5)

    def forward(self, words: Tensor) -> Tensor:
        return self.last(self.table(words).sum(0)).sum()


def test_which_parameters_are_tables() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(NUM_ROWS, 16)
            self.same = nn.Embedding(NUM_ROWS, 16)
            self.same.weight = self.table.weight
            self.softmax_table = nn.Embedding(NUM_ROWS, 16)
            self.softmax = nn.Linear(16, NUM_ROWS, bias=False)
            self.softmax.weight = self.softmax_table.weight
            self.sparse = nn.Embedding(NUM_ROWS, 16, sparse=True)
            self.small = nn.Embedding(9, 16)

    model = Model()
    assert tables(model) == {id(model.table.weight): 16}


def with_other_schemes(rank: int, world: int) -> None:
    if rank:  # as where gradwire-lab is not installed
        sparse_schemes.entry_points = lambda group: []  # type: ignore[attr-defined]
        sparse_schemes.schemes.cache_clear()
    gw.attach(nn.Linear(8, 9), gw.with_natural_sparsity(DENSE, 8))


def test_ranks_with_other_schemes_are_refused(doomed_two: Ranks) -> None:
    """A model without an embedding may choose among schemes too: by the user's own
    exchange.
    """
    for ended in doomed_two.outcomes(with_other_schemes):
        assert "setting sparse schemes installed is" in str(ended.error)


# ---- Rows take the collective that an exchange or a plan names -----------------------


TABLES = ("table.weight", "bag.weight")
TWO = Cluster(num_ranks=2, rate_bytes_per_s=1e6)


def through(collective: gw.collective.Collective) -> Exchange:
    return gw.with_error_feedback(gw.pair(gw.compress.topk(density=0.3), collective))


NAMED = (
    gw.collective.zen(),
    gw.collective.sparse_ps_broadcast(),
)


def trained(rank: int, chosen: Any) -> tuple[str, list[set[str]]]:
    """The bits of all parameters, and the ways of both tables by step; gradients are
    DDP's.
    """
    ours, plain = models.Words(), models.Words()
    # what is compressed differs from DDP's, and is not asked about
    for net in (
        ours,
        plain,
    ):
        net.last.requires_grad_(False)
    handle = gw.attach(ours, chosen)
    ways: list[set[str]] = []
    ours.register_forward_pre_hook(
        lambda *_: ways.append(set(handle.stats()["ways"].values()))
    )
    found = models.sparse_rows(rank, ours, None)
    for mine, their in zip(
        found, models.sparse_rows(rank, ddp(plain), None), strict=True
    ):
        assert (mine is None) == (their is None)
        if mine is not None and their is not None:
            torch.testing.assert_close(mine.to_dense(), their.to_dense())
    ways.append(set(handle.stats()["ways"].values()))
    handle.detach()
    return digest(ours), ways[1:]


def by_exchanges(rank: int, world: int) -> list[tuple[str, list[set[str]]]]:
    return [trained(rank, through(one)) for one in NAMED]


@pytest.mark.multi
def test_rows_take_the_collective_that_is_named(two: Ranks) -> None:
    one, other = two.run(by_exchanges)
    assert one == other
    for collective, (bits, ways) in zip(NAMED, one, strict=True):
        assert ways == [{type(collective).__name__}] * 4
        assert bits == one[0][0]  # all ways give the same bits


def test_a_suited_collective_is_not_named() -> None:
    assert named_collective(gw.exchange_for(gw.compress.topk())) is None
    assert named_collective(gw.exchange_for(gw.compress.none())) is None
    assert named_collective(gw.compress.powersgd()) is None
    assert named_collective(gw.compress.sharded_dgc()) is None
    zen = gw.collective.zen()
    assert named_collective(gw.compress.sharded_dgc(collective=zen)) is zen
    assert named_collective(gw.with_clipping(through(zen), 1.0)) is zen


# ---- plans ---------------------------------------------------------------------------


def profile_of(
    net: models.Words, *, compressor: str | None = None, often: bool = False
) -> Profile:
    """Of both tables and the rest; with ``often`` a batch looks all words up."""
    draw = torch.Generator().manual_seed(0)

    def step() -> None:
        net.rows = torch.randint(0, 50, (400 if often else 3,), generator=draw)
        net(torch.ones(1, 6)).sum().backward()

    tensors = tuple(
        ProfiledTensor(name=name, shape=tuple(p.shape))
        for name, p in net.named_parameters()
    )
    layer = Layer(name="all", tensors=tensors, forward_s=0.01, backward_s=0.01)
    made = Profile(model="words", source="made up", batch_size=1, layers=(layer,))
    settings = {} if compressor is None else {"density": 0.2}
    found = measure_sparsity(
        net, step, num_gradients=4, compressor=compressor, settings=settings
    )
    assert {
        one.name: one.is_rows for one in found.tensors if one.name in TABLES
    } == dict.fromkeys(TABLES, True)
    return made.with_sparsity(found)


@each("compressor, often", [(None, False), ("topk", True)])
def test_zen_plans_what_attach_carries(compressor: str | None, often: bool) -> None:
    """However many rows there are, and whatever the other gradients are compressed
    with.
    """
    plan = gw.plan(
        "zen", profile_of(models.Words(), compressor=compressor, often=often), TWO
    )
    for name in TABLES:
        (message,) = (m for m in plan.messages if name in {c.tensor for c in m.chunks})
        setting = plan.exchanges[message.exchange]
        assert (len(message.chunks), setting.compressor) == (1, "nonzero")
        assert setting.settings["width"] == 6
    gw.attach(models.Words(), plan).detach()


def by_plans(
    rank: int, world: int, texts: list[str]
) -> list[tuple[str, list[set[str]]]]:
    return [trained(rank, Plan.parse(text)) for text in texts]


@pytest.mark.multi
def test_rows_take_the_way_that_a_plan_names(two: Ranks) -> None:
    net = models.Words()
    net.last.requires_grad_(False)
    made = profile_of(net)
    tables = tuple(t for t in made.layers[0].tensors if t.name in TABLES)
    layer = made.layers[0].model_copy(update={"tensors": tables})
    plan = gw.plan("zen", made.model_copy(update={"layers": (layer,)}), TWO)
    schemes, texts = ("allgather_sparse", "sparse_ps"), []
    for scheme in schemes:
        update = {"collective": scheme}
        exchanges = {
            name: one.model_copy(update=update) for name, one in plan.exchanges.items()
        }
        texts.append(plan.model_copy(update={"exchanges": exchanges}).to_json())
    found, other = two.run(by_plans, texts)
    assert found == other
    assert [ways for _, ways in found] == [[{scheme}] * 4 for scheme in schemes]


def test_plans_that_carry_no_rows_are_refused_with_the_message() -> None:
    made = profile_of(models.Words())
    zen = gw.plan("zen", made, TWO)
    number = next(
        i for i, m in enumerate(zen.messages) if m.chunks[0].tensor == "table.weight"
    )
    table = zen.messages[number]
    first, second = (
        table.chunks[0].model_copy(update=u) for u in ({"stop": 6}, {"start": 6})
    )
    dgc = {"compressor": "dgc", "settings": {}, "collective": "zen"}
    wrong = {
        "with others": gw.plan("ddp", made, TWO),
        "through 'dense', which carries no rows": _instead(
            zen, number, {"exchange": plans.DENSE}
        ),
        "cut": _instead(zen, number, {"chunks": (first,)}, {"chunks": (second,)}),
        "through 'lossy', which": _instead(
            zen, number, {"exchange": "lossy"}, lossy=dgc
        ),
    }
    for why, plan in wrong.items():
        with pytest.raises(InvalidSetting, match=why) as caught:
            gw.attach(models.Words(), plan)
        assert "sparse=False" in str(caught.value)


def _instead(
    plan: Plan, number: int, *updates: dict[str, Any], **exchanges: Any
) -> Plan:
    """The plan with other messages in place of one."""
    data = plan.model_dump()
    made = [{**data["messages"][number], **update} for update in updates]
    data["messages"] = (
        *data["messages"][:number],
        *made,
        *data["messages"][number + 1 :],
    )
    data["exchanges"] |= exchanges
    return Plan.model_validate(data)
