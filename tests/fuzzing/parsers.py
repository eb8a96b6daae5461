"""Fuzzers of what people write or keep: plans, profiles, traces, programs, checkpoints."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from gradwire.contract import Compressor
from gradwire.contract.registry import load
from gradwire.contract.spec import TensorSpec
from gradwire.contract.trace.span import Span, Trace
from gradwire.dsl.language import uint2, uint_3
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.plan import Plan
from gradwire.planning.data.profile import Layer, ProfiledTensor
from gradwire.planning.data.profile import Profile as LayerProfile
from gradwire.runtime.state.checkpoint import loaded
from gradwire_lab.compll_text.compile import compile_coder, compile_text
from tests.fuzzing.mutations import mutated_text
from tests.runtime import test_malformed_states as states


def texts(rng: random.Random) -> None:
    """Reads a plan, a profile, a cluster or a trace in which something changed."""
    read, text = rng.choice(_texts())
    found = read(mutated_text(rng, text))
    again = read(found.to_json()).to_json()
    assert again == found.to_json(), "what was read is written as something else"


@cache
def _texts() -> tuple[tuple[Callable[[str], Any], str], ...]:
    layers = tuple(
        Layer(
            name=f"layer{i}",
            tensors=(ProfiledTensor(name=f"layer{i}.weight", shape=(64, 3)),),
            forward_s=1e-3,
            backward_s=2e-3,
        )
        for i in range(2)
    )
    profile = LayerProfile(model="small", source="made up", batch_size=1, layers=layers)
    cluster = Cluster(num_ranks=4, rate_bytes_per_s=1e8)
    plan = load("planner", "bytescheduler")(profile, cluster)
    trace = Trace((Span("encode", "compute", 0, 0, 0, 0.5, 1.0, 64),))
    return (
        (Plan.parse, plan.to_json()),
        (LayerProfile.parse, profile.to_json()),
        (Cluster.parse, cluster.to_json()),
        (Trace.from_json, trace.to_json()),
    )


def programs(rng: random.Random) -> None:
    """Compiles a CompLL program in which something changed, and lays a payload out."""
    text = mutated_text(rng, rng.choice(_programs()))
    if rng.randrange(4) == 0:
        compile_coder(text, takes=rng.choice(((uint_3,), (uint2,))))
        return
    made = compile_text(text, name="fuzzed")
    settings = {one.name: 2 for one in fields(made) if one.default is MISSING}
    found = made(**settings)
    if isinstance(found, Compressor):
        found.format(TensorSpec("gradient", 100))


@cache
def _programs() -> tuple[str, ...]:
    folder = Path(states.__file__).parents[1] / "lab"
    return tuple(path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.compll")))


def checkpoints(rng: random.Random) -> None:
    """Loads a saved state in which one to three things are wrong."""
    name = rng.choice([*states.EXCHANGES])
    whole = _saved(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(rng.choice((1, 1, 2, 3))):
            path = rng.choice([*states.places(whole)])
            whole = states.changed(whole, path, _change(rng))
        loaded(whole, states.messages(states.EXCHANGES[name], 0), states.origin(0))


@cache
def _saved(name: str) -> dict[str, Any]:
    return states.saved(states.trained(states.EXCHANGES[name]))[0]


def _change(rng: random.Random) -> Callable[[Any], Any]:
    """A function that makes something odd of a value; of a tensor mostly another tensor."""
    odd, other = rng.choice([*states.ODDITIES.values()]), rng.choice([*states.CHANGES.values()])
    is_left_out, is_other = rng.randrange(6) == 0, rng.randrange(3) > 0

    def change(value: Any) -> Any:
        if is_left_out:
            return ...
        if is_other and isinstance(value, Tensor):
            with suppress(Exception):  # there is no such tensor, or it objects
                return other(value)
        return odd()

    return change


TARGETS: dict[str, Callable[[random.Random], None]] = {
    "texts": texts,
    "programs": programs,
    "checkpoints": checkpoints,
}
