"""Row-sparse gradients take the collective that is named for them, by an exchange or by a plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire.contract import Exchange
from gradwire.errors import InvalidSetting
from gradwire.exchange.by_name import named_collective
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.plan import DENSE, Plan
from gradwire.planning.data.profile import Layer, Profile, ProfiledTensor
from gradwire_lab.planning.zeros import measure_sparsity
from tests.each import each
from tests.runtime.models import Words, sparse_rows
from tests.runtime.ranks import Ranks
from tests.runtime.training import ddp, digest

TABLES = ("table.weight", "bag.weight")
TWO = Cluster(num_ranks=2, rate_bytes_per_s=1e6)


def through(collective: gw.collective.Collective) -> Exchange:
    return gw.with_error_feedback(gw.pair(gw.compress.topk(density=0.3), collective))


NAMED = (
    gw.collective.zen(),
    gw.collective.sparse_ps_broadcast(),
)


def trained(rank: int, chosen: Any) -> tuple[str, list[set[str]]]:
    """The bits of all parameters, and the ways of both tables by step; gradients are DDP's."""
    ours, plain = Words(), Words()
    for net in (ours, plain):  # what is compressed differs from DDP's, and is not asked about
        net.last.requires_grad_(False)
    handle = gw.attach(ours, chosen)
    ways: list[set[str]] = []
    ours.register_forward_pre_hook(lambda *_: ways.append(set(handle.stats()["ways"].values())))
    found = sparse_rows(rank, ours, None)
    for mine, their in zip(found, sparse_rows(rank, ddp(plain), None), strict=True):
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


# ---- plans -------------------------------------------------------------------------------------


def profile_of(net: Words, *, compressor: str | None = None, often: bool = False) -> Profile:
    """Of both tables and the rest; with ``often`` a batch looks all words up."""
    draw = torch.Generator().manual_seed(0)

    def step() -> None:
        net.rows = torch.randint(0, 50, (400 if often else 3,), generator=draw)
        net(torch.ones(1, 6)).sum().backward()

    tensors = tuple(
        ProfiledTensor(name=name, shape=tuple(p.shape)) for name, p in net.named_parameters()
    )
    layer = Layer(name="all", tensors=tensors, forward_s=0.01, backward_s=0.01)
    made = Profile(model="words", source="made up", batch_size=1, layers=(layer,))
    settings = {} if compressor is None else {"density": 0.2}
    found = measure_sparsity(net, step, num_gradients=4, compressor=compressor, settings=settings)
    assert {one.name: one.is_rows for one in found.tensors if one.name in TABLES} == dict.fromkeys(
        TABLES, True
    )
    return made.with_sparsity(found)


@each("compressor, often", [(None, False), ("topk", True)])
def test_zen_plans_what_attach_carries(compressor: str | None, often: bool) -> None:
    """However many rows there are, and whatever the other gradients are compressed with."""
    plan = gw.plan("zen", profile_of(Words(), compressor=compressor, often=often), TWO)
    for name in TABLES:
        (message,) = (m for m in plan.messages if name in {c.tensor for c in m.chunks})
        setting = plan.exchanges[message.exchange]
        assert (len(message.chunks), setting.compressor) == (1, "nonzero")
        assert setting.settings["width"] == 6
    gw.attach(Words(), plan).detach()


def by_plans(rank: int, world: int, texts: list[str]) -> list[tuple[str, list[set[str]]]]:
    return [trained(rank, Plan.parse(text)) for text in texts]


@pytest.mark.multi
def test_rows_take_the_way_that_a_plan_names(two: Ranks) -> None:
    net = Words()
    net.last.requires_grad_(False)
    made = profile_of(net)
    tables = tuple(t for t in made.layers[0].tensors if t.name in TABLES)
    layer = made.layers[0].model_copy(update={"tensors": tables})
    plan = gw.plan("zen", made.model_copy(update={"layers": (layer,)}), TWO)
    schemes, texts = ("allgather_sparse", "sparse_ps"), []
    for scheme in schemes:
        update = {"collective": scheme}
        exchanges = {name: one.model_copy(update=update) for name, one in plan.exchanges.items()}
        texts.append(plan.model_copy(update={"exchanges": exchanges}).to_json())
    found, other = two.run(by_plans, texts)
    assert found == other
    assert [ways for _, ways in found] == [[{scheme}] * 4 for scheme in schemes]


def test_plans_that_carry_no_rows_are_refused_with_the_message() -> None:
    made = profile_of(Words())
    zen = gw.plan("zen", made, TWO)
    number = next(i for i, m in enumerate(zen.messages) if m.chunks[0].tensor == "table.weight")
    table = zen.messages[number]
    first, second = (table.chunks[0].model_copy(update=u) for u in ({"stop": 6}, {"start": 6}))
    dgc = {"compressor": "dgc", "settings": {}, "collective": "zen"}
    wrong = {
        "with others": gw.plan("ddp", made, TWO),
        "through 'dense', which carries no rows": _instead(zen, number, {"exchange": DENSE}),
        "cut": _instead(zen, number, {"chunks": (first,)}, {"chunks": (second,)}),
        "through 'lossy', which": _instead(zen, number, {"exchange": "lossy"}, lossy=dgc),
    }
    for why, plan in wrong.items():
        with pytest.raises(InvalidSetting, match=why) as caught:
            gw.attach(Words(), plan)
        assert "sparse=False" in str(caught.value)


def _instead(plan: Plan, number: int, *updates: dict[str, Any], **exchanges: Any) -> Plan:
    """The plan with other messages in place of one."""
    data = plan.model_dump()
    made = [{**data["messages"][number], **update} for update in updates]
    data["messages"] = (*data["messages"][:number], *made, *data["messages"][number + 1 :])
    data["exchanges"] |= exchanges
    return Plan.model_validate(data)
