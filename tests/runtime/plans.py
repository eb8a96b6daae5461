"""Plans for the models that ranks train: those of all planners, and drawn ones of any
shape.
"""

from __future__ import annotations

import random

from torch import nn

from gradwire.contract.registry import examples
from gradwire.planning.data.check import check
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.plan import (
    DENSE,
    Chunk,
    ExchangeSetting,
    Plan,
    PlannedMessage,
)
from gradwire.planning.data.profile import Layer, Profile, ProfiledTensor
from tests.planning.profiles import CODECS
from tests.runtime.training import Net

CLUSTER = Cluster(num_ranks=2, rate_bytes_per_s=1e6, hop_s=1e-4, codecs=CODECS)


def profile_of_model(model: nn.Module) -> Profile:
    """One layer for each module that owns parameters, with made-up seconds."""
    draw = random.Random(0)
    layers = []
    for name, module in model.named_modules():
        tensors = tuple(
            ProfiledTensor(name=f"{name}.{own}", shape=tuple(param.shape))
            for own, param in module.named_parameters(recurse=False)
        )
        if tensors:
            forward_s, backward_s = draw.uniform(1e-4, 2e-3), draw.uniform(1e-4, 4e-3)
            layers.append(
                Layer(
                    name=name,
                    tensors=tensors,
                    forward_s=forward_s,
                    backward_s=backward_s,
                )
            )
    kind = type(model).__name__
    return Profile(
        model=kind, source="made up for tests", batch_size=8, layers=tuple(layers)
    )


def planned() -> list[Plan]:
    """Every example of every planner that loses nothing, with small blocks where it
    cuts.
    """
    profile = profile_of_model(Net())
    made = [planner(profile, CLUSTER) for planner in examples("planner")]
    return [plan for plan in made if all(m.exchange == DENSE for m in plan.messages)]


def drawn(seed: int, *, model: nn.Module | None = None, cuts: int = 4) -> Plan:
    """Chunks cut anywhere, in any order, fused at random, with random dependencies and
    credit.

    Each tensor has ``cuts`` at most. The model is ``Net`` if none is given.
    """
    draw = random.Random(seed)
    profile = profile_of_model(Net() if model is None else model)
    chunks = []
    for layer in profile.layers:
        for tensor in layer.tensors:
            inner = range(1, tensor.numel)
            places = sorted(draw.sample(inner, min(draw.randint(0, cuts), len(inner))))
            for start, stop in zip([0, *places], [*places, tensor.numel], strict=True):
                chunks.append(Chunk(tensor=tensor.name, start=start, stop=stop))
    draw.shuffle(chunks)
    messages: list[PlannedMessage] = []
    while chunks:
        count = draw.randint(1, 4)
        before = range(len(messages))
        after = tuple(draw.sample(before, min(len(before), draw.choice((0, 0, 1, 2)))))
        messages.append(PlannedMessage(chunks=tuple(chunks[:count]), after=after))
        chunks = chunks[count:]
    plan = Plan(
        planner=f"drawn with seed {seed}",
        model=profile.model,
        messages=tuple(messages),
        credit=draw.randint(1, 3),
        overlap_forward=bool(seed % 2),
    )
    check(plan, profile)
    return plan


def every() -> list[Plan]:
    return [*planned(), *map(drawn, range(6))]


def through(plan: Plan, name: str, exchange: ExchangeSetting) -> Plan:
    """The same plan with every message through one exchange."""
    messages = tuple(m.model_copy(update={"exchange": name}) for m in plan.messages)
    return plan.model_copy(update={"messages": messages, "exchanges": {name: exchange}})


def in_turn(plan: Plan, exchanges: dict[str, ExchangeSetting]) -> Plan:
    """The same plan, whose messages take some exchanges and the dense one in turn."""
    names = (*exchanges, DENSE)
    messages = tuple(
        message.model_copy(update={"exchange": names[number % len(names)]})
        for number, message in enumerate(plan.messages)
    )
    return plan.model_copy(update={"messages": messages, "exchanges": exchanges})
