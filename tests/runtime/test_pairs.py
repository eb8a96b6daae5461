"""Every pair of features is refused on all ranks by the table's sentence, or it
trains.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW
from torch.utils.checkpoint import checkpoint

import gradwire as gw
from gradwire.errors import InvalidSetting
from gradwire.planning.data.plan import (
    DENSE,
    Bulk,
    Chunk,
    ExchangeSetting,
    Plan,
    PlannedMessage,
)
from gradwire.runtime.grid.dtensors import shard_of
from gradwire.runtime.pairs import FEATURES, REFUSED, Feature, RefusedPair
from gradwire.runtime.settings import sparse_weights, trained
from gradwire.runtime.step.refusals import sole_ddp
from scripts.matrix_page import (
    ALL,
    PAGE,
    PAIRS,
    SHOWN,
    pairs,
    pairs_table,
    refusal_of,
    together,
)
from tests.each import each
from tests.runtime.given import keywords
from tests.runtime.meshes import HAS_REDUCE_SCATTER, device_mesh, mesh
from tests.runtime.ranks import Ranks
from tests.runtime.training import digest, everything

STEPS = 2


class Small(nn.Module):
    """An embedding and two layers, of which one may be recomputed in the backward
    pass.
    """

    def __init__(self, features: set[str]) -> None:
        super().__init__()
        self.words = nn.Embedding(
            40,
            8,
            sparse=bool({Feature.SPARSE_ROWS, Feature.SPARSE_DTENSORS} & features),
        )
        self.deep, self.last = nn.Linear(8, 8), nn.Linear(8, 3)
        self._recomputes = "reentrant checkpoint" in features

    def forward(self, words: Tensor) -> Tensor:
        found = self.words(words)
        if self._recomputes:
            found = checkpoint(self.deep, found, use_reentrant=True)
        else:
            found = self.deep(found)
        return self.last(found.relu())  # type: ignore[no-any-return]


def exchange_of(features: set[str], model: nn.Module) -> Any:
    codecs = gw.compress
    if Feature.SERVERS in features:
        served = gw.pair(codecs.topk(density=0.1), gw.collective.casync_ps(servers=1))
        return gw.adapt(served) if Feature.ADAPT in features else served
    made = {
        "error feedback": lambda: codecs.topk(density=0.1),
        "momentum correction": lambda: gw.with_momentum_correction(
            codecs.topk(density=0.1)
        ),
        Feature.ADAPT: lambda: gw.adapt(codecs.topk(density=0.1)),
        "powersgd": lambda: codecs.powersgd(rank=2),
        Feature.JOINT_PAYLOAD: lambda: codecs.powersgd(rank=2),
        "deft": lambda: codecs.deft(density=0.1),
        "selective": lambda: codecs.selective(density=0.1),
        "a plan": lambda: plan_of(model, False),
        "a plan with overlap": lambda: plan_of(model, True),
        Feature.BULK: lambda: plan_of(model, False).model_copy(update={"bulk": Bulk()}),
        "auto": lambda: "auto",
    }
    return next((make() for name, make in made.items() if name in features), "none")


def plan_of(model: nn.Module, overlaps: bool) -> Plan:
    """A message for each parameter, the last first; rows take an exchange that carries
    them.
    """
    messages, sparse = [], sparse_weights(model)
    for name, param in reversed(trained(sole_ddp(model))):
        chunk = Chunk(tensor=name, start=0, stop=shard_of(param).numel())
        exchange = "rows" if id(param) in sparse else DENSE
        messages.append(PlannedMessage(chunks=(chunk,), exchange=exchange))
    rows = ExchangeSetting(compressor="nonzero", collective="zen")
    given = {"rows": rows} if sparse else {}
    return Plan(
        planner="made by hand",
        model="Small",
        messages=tuple(messages),
        exchanges=given,
        credit=2,
        overlap_forward=overlaps,
    )


OF_FOUR = {Feature.DTENSORS, "shards", "mesh"}
"""Features of four ranks: replicas of shards, or hosts of several ranks. Two do for all
others.
"""

OPTIONS: dict[str, Any] = {
    "bucket_cap_mb": 0.001,
    "num_channels": 2,
    "compress_if": everything,
    "guard_every": 1,
    "trace_steps": 1,
    "cluster": gw.Cluster(num_ranks=2, rate_bytes_per_s=1e9),
    "backend": "gloo",
    "on_failure": "shrink",
    "check_every": 1,
    "checksums": True,
}


def attached(features: set[str], rank: int) -> tuple[nn.Module, Any, Any, Any, int]:
    """A model with these features: itself, optimizer, scaler, handle, and its group's
    number.
    """
    is_cut = bool(features & {Feature.DTENSORS, "shards"})
    grid: Any = device_mesh((2, 2), ("replicate", "shard")) if is_cut else None
    torch.manual_seed(rank % 2 if "shards" in features else 0)
    net: Any = Small(features)
    given = {name: value for name, value in OPTIONS.items() if name in features}
    if Feature.FLOAT16 in features:
        net.half()
    if Feature.REDUCE_SCATTER in features:
        fully_shard(net, mesh=device_mesh((dist.get_world_size(),)))
    elif Feature.DTENSORS in features:
        fully_shard(net, mesh=grid["shard"])
    if {"DDP", Feature.DDP_COLLECTIVES} & features:
        group = grid["replicate"].get_group() if is_cut else None
        finds = Feature.DDP_COLLECTIVES in features
        net = DistributedDataParallel(
            net, process_group=group, find_unused_parameters=finds
        )
    elif is_cut:
        given["group"] = grid["replicate"]
    model = torch.compile(net, backend="eager") if "compiled" in features else net
    exchange = exchange_of(features, model)
    if "mesh" in features:
        given.pop("group", None)
        given["mesh"] = mesh()
    if "shards" in features:
        given["shards"] = grid["shard"]
    if "rejoin" in features:
        given["rejoin"] = dist.HashStore()
    optimizer = SGD(net.parameters(), lr=0.01)
    scaler = (
        GradScaler("cpu", init_scale=4.0)
        if {"scaler", Feature.FLOAT16} & features
        else None
    )
    if Feature.REDUCE_SCATTER in features:
        given.pop("group", None)
        return (
            model,
            None,
            None,
            gw.fsdp.reduce_scatter(net, "uniform", **keywords(**given)),
            0,
        )
    if Feature.QUORUM in features:
        handle = gw.local_steps(
            model, optimizer, exchange, every=2, quorum=1, **keywords(**given)
        )
    elif {Feature.LOCAL_STEPS, Feature.LOCK_STEP} & features:
        handle = gw.local_steps(
            model, optimizer, exchange, every=2, **keywords(**given)
        )
    else:
        if {"optimizer", "a plan with overlap"} & features:
            given["optimizer"] = optimizer
        handle = gw.attach(model, exchange, scaler=scaler, **keywords(**given))
    return model, optimizer, scaler, handle, rank % 2 if is_cut else 0


def trained_with(features: set[str], rank: int) -> tuple[int, str]:
    """The group of a rank, and the digest of its parameters after a few steps."""
    model, optimizer, scaler, handle, place = attached(features, rank)
    before = digest(held(model))
    for step in range(STEPS):
        draws = torch.Generator().manual_seed(10 * step + rank)
        optimizer.zero_grad()
        loss = model(torch.randint(40, (5,), generator=draws)).square().mean()
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    if {Feature.LOCAL_STEPS, Feature.QUORUM} & features:
        handle.end_period()
    else:
        handle.synchronize()
    assert handle.step == STEPS
    handle.detach()
    after = digest(held(model))
    assert after != before
    return place, after


def held(model: nn.Module) -> list[Tensor]:
    return [shard_of(param).detach() for param in model.parameters()]


def sets_of_features() -> list[list[str]]:
    """Sets of features that all go together: every pair that does is in one of them."""
    left = [pair for pair in pairs() if refusal_of(*pair) is None]
    working, found = [{*pair} for pair in left], []
    while left:
        chosen = [*left[0]]
        for name in ALL:
            others = [{name, other} for other in chosen if other != name]
            is_new = any({*pair} in others for pair in left)
            if (
                name not in chosen
                and is_new
                and all(both in working for both in others)
            ):
                chosen.append(name)
        left = [pair for pair in left if not {*pair} <= {*chosen}]
        found.append(chosen)
    return found


def trained_by(rank: int, world: int, sets: list[list[str]]) -> list[tuple[int, str]]:
    found = []
    for features in sets:
        try:
            found.append(trained_with({*features}, rank))
        except Exception as error:  # at once: the other ranks would be at another set
            error.add_note(f"{', '.join(features)}, on rank {rank}")
            raise
    return found


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.timeout(300)
def test_what_goes_together(two: Ranks, four: Ranks) -> None:
    """Ranks that average end with the same bits, which are other than those they began
    with.
    """
    sets = sets_of_features()
    on_four = [features for features in sets if {*features} & OF_FOUR]
    on_two = [features for features in sets if features not in on_four]
    for pool, chosen in ((two, on_two), (four, on_four)):
        ranks = pool.run(trained_by, chosen, timeout_s=250.0)
        for features, *ends in zip(chosen, *ranks, strict=True):
            assert len({*ends}) == len({place for place, _ in ends}), features


def refused(rank: int, world: int) -> list[str]:
    found = []
    for one in REFUSED:
        try:
            attached({one.first, one.second}, rank)
            found.append("nothing")
        except InvalidSetting as error:
            found.append(str(error))
    return found


def sentence(one: RefusedPair) -> str:
    """A pattern of what a user reads."""
    said = re.escape(f"{one.what} must be {one.accepted}, got ")
    return (
        re.sub(r"\\\{(first|second)\\\}", ".*", said) + ".*; " + re.escape(one.remedy)
    )


@pytest.mark.multi
def test_what_is_refused_says_the_tables_sentence_on_every_rank(four: Ranks) -> None:
    for rank in four.run(refused):
        for one, text in zip(REFUSED, rank, strict=True):
            is_old = one.second == Feature.REDUCE_SCATTER and not HAS_REDUCE_SCATTER
            wanted = r"torch must be 2\.13 or newer: .*" if is_old else sentence(one)
            assert re.fullmatch(wanted, text), f"{one.first}, {one.second}: {text}"


def through(collective: gw.collective.Collective) -> gw.Exchange:
    return gw.with_error_feedback(gw.pair(gw.compress.topk(density=0.3), collective))


MOMENTUM = gw.with_momentum_correction(gw.compress.topk(density=0.3))
TWICE = "momentum counts twice"
NO_MOMENTUM = "row-sparse gradients get no momentum from the exchange (weight, ...)"
NOT_TAKEN = "row-sparse gradients (weight, ...) cannot take "
WARNED: list[tuple[Any, dict[str, Any] | None, list[str]]] = [
    (MOMENTUM, {"momentum": 0.9}, [TWICE]),
    (MOMENTUM, {"betas": (0.9, 0.999)}, [TWICE]),
    (MOMENTUM, {"momentum": 0.0}, []),
    (gw.compress.dgc(), {"momentum": 0.9}, []),
    (MOMENTUM, None, [NO_MOMENTUM]),
    (gw.compress.dgc(), None, []),
    (through(gw.collective.sparcml()), None, [NOT_TAKEN]),
    (gw.pair(gw.compress.none(), gw.collective.ring()), None, [NOT_TAKEN]),
    (through(gw.collective.zen()), None, []),
    (gw.compress.powersgd(), None, []),
]
"""Exchanges beside an optimizer of settings, or beside an embedding of rows, and what
is said.
"""


@each("exchange, settings, said", WARNED)
def test_what_hardly_anybody_means_is_warned_of(
    exchange: Any, settings: dict[str, Any] | None, said: list[str], caplog: Any
) -> None:
    caplog.clear()
    net = nn.Embedding(10, 4, sparse=True) if settings is None else nn.Linear(4, 4)
    kind: Any = AdamW if settings and "betas" in settings else SGD
    optimizer = kind(net.parameters(), lr=0.1, **settings) if settings else None
    with caplog.at_level(logging.WARNING, logger="gradwire"):
        gw.attach(net, exchange, optimizer=optimizer).detach()
    texts = [record.message for record in caplog.records]
    assert [text[: len(one)] for text, one in zip(texts, said, strict=True)] == said


def test_every_pair_is_in_the_table() -> None:
    assert {*Feature} <= {*FEATURES}
    both = [pair for pair in pairs() if refusal_of(*pair)]
    working = [(first, second) for first in ALL for second in together(first)]
    assert sorted([*both, *working]) == sorted(pairs())


def test_the_page_has_the_table() -> None:
    begin, end = PAIRS
    assert f"{begin}\n{pairs_table()}\n{end}" in PAGE.read_text(encoding="utf-8")
    assert (
        f"tests/runtime/{Path(__file__).name}::{test_what_goes_together.__name__}"
        == SHOWN
    )
