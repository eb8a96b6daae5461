"""Every setting of every algorithm, and every gradient, works or is refused; the laws bite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradwire as gw
from gradwire.contract.registry import examples, load, names
from gradwire.kernels.compiler import reference_only
from gradwire.planning import catalogue
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.plan import Plan
from gradwire.planning.data.profile import Profile
from gradwire.planning.planner_settings import settings_of
from gradwire_lab.laws.inputs import profile_of
from gradwire_lab.planning.tune import tune
from tests.each import by_file, each
from tests.laws import broken_inputs as broken
from tests.laws.cases import name_of
from tests.laws.input_laws import (
    NO_GRADIENTS,
    STRANGE,
    VALUES,
    law_planner_takes_or_refuses,
    law_setting_works_or_is_refused,
    law_strides_do_not_matter,
    law_what_is_no_gradient_is_refused,
)
from tests.strategies import bounded

ALGORITHMS = (*examples("compress"), *examples("collective"))
FIRST = tuple({type(made): made for made in reversed(ALGORITHMS)}.values())
"""One of each kind: what is tried for a setting replaces what the others differ in."""
WRAPPERS = {
    "momentum": partial(gw.with_momentum_correction, gw.compress.topk()),
    "max_norm": partial(gw.with_clipping, gw.compress.topk()),
    "steps_per_stage": partial(gw.with_density_warmup, gw.compress.topk()),
    "steps": partial(gw.with_warmup, gw.compress.onebit()),
    "every": partial(gw.adapt, gw.compress.topk()),
    "error": partial(gw.adapt, gw.compress.topk()),
    "decay": partial(gw.with_decoupled_momentum, gw.compress.demo()),
    "densities": partial(gw.with_density_warmup, gw.compress.topk(), steps_per_stage=5),
    "num_steps": partial(gw.with_measured_scheme, gw.compress.topk()),
    "width": partial(gw.with_natural_sparsity, gw.compress.topk()),
    "warmup_steps": gw.deep_gradient_compression,
    "density": partial(gw.deep_gradient_compression, warmup_steps=0),
    "clip_norm": partial(gw.deep_gradient_compression, warmup_steps=0),
}
"""What makes an exchange around another one, by a setting of it."""

PLANNERS = [
    (name, setting)
    for name in names("planner")
    for setting in settings_of(load("planner", name)) or ()
]
SMALL = profile_of(([64, 9], 0.5, 0.25), ([], 0.125, 0.125), ([300], 0.25, 0.5))


@pytest.fixture
def interpreted() -> Iterator[None]:
    """Each value of a setting is another program: to compile them all would take minutes."""
    with reference_only():
        yield


@pytest.mark.usefixtures("interpreted")
@by_file(FIRST)
def test_any_setting_works_or_is_refused(subtests: pytest.Subtests, places: list[int]) -> None:
    for made in (FIRST[place] for place in places):
        for turn, setting in enumerate((field.name for field in fields(made) if field.init), 1):
            with subtests.test(setting):
                law = partial(law_setting_works_or_is_refused, partial(replace, made), setting)
                for_some_values(law, places[0] + turn)


@pytest.mark.usefixtures("interpreted")
@each("setting", WRAPPERS)
def test_any_setting_of_a_wrapper_works_or_is_refused(setting: str) -> None:
    law = partial(law_setting_works_or_is_refused, WRAPPERS[setting], setting)
    for_some_values(law, [*WRAPPERS].index(setting))


@each("place", range(len(PLANNERS)), ids=lambda at: "-".join(PLANNERS[at]))
def test_any_setting_of_a_planner_gives_a_plan_or_is_refused(place: int) -> None:
    """Every second value for a small model, every sixth for a large one; others by turns."""
    planner, setting = PLANNERS[place]
    for value in VALUES[place % 2 :: 2]:
        law_planner_takes_or_refuses(planner, SMALL, setting, value)
    for value in VALUES[place % 6 :: 6]:
        law_planner_takes_or_refuses(planner, catalogue.load("vgg16"), setting, value)


@each("setting", ["trials", "seed"])
def test_any_setting_of_a_search_works_or_is_refused(setting: str) -> None:
    def searched(profile: Profile, cluster: Cluster, **settings: Any) -> Plan:
        return tune("ddp", profile, cluster, **{"trials": 2, **settings})

    for value in VALUES[setting == "seed" :: 2]:
        if setting == "seed" or not (isinstance(value, int) and 64 < value < 2**20):
            law_planner_takes_or_refuses(searched, SMALL, setting, value)


def for_some_values(law: Callable[[object], None], turn: int) -> None:
    """The law with every second extreme of everything, by turns, and with some numbers between."""
    for value in VALUES[turn % 2 :: 2]:
        law(value)

    @given(st.one_of(st.integers(-(2**70), 2**70), st.floats(), st.integers(0, 300)))
    @bounded(4)
    def holds(value: float) -> None:
        law(value)

    holds()


@each("name", ["adacomp", "threelc", "int8"])
def test_the_longest_block_compiles_and_works(name: str) -> None:
    """Of those the first ended the process beyond it, the second decoded garbage."""
    (made,) = (one for one in FIRST if type(one).__name__ == name)
    law_setting_works_or_is_refused(partial(replace, made), "block", 2**31 - 64)


@each("algorithm", examples("compress"), ids=name_of)
def test_what_is_no_gradient_is_refused(algorithm: Any) -> None:
    for given_ in NO_GRADIENTS.values():
        law_what_is_no_gradient_is_refused(algorithm, given_)


@each("algorithm", ALGORITHMS, ids=name_of)
def test_strides_do_not_matter(algorithm: Any) -> None:
    for grad_N in [*STRANGE.values()][ALGORITHMS.index(algorithm) % 2 :: 2]:
        law_strides_do_not_matter(algorithm, grad_N)


@each(
    "law, specimen, given_",
    [
        (law_setting_works_or_is_refused, broken.believes_any_number, ("factor", "a")),
        (law_setting_works_or_is_refused, broken.believes_any_number, ("factor", 10**400)),
        (law_setting_works_or_is_refused, broken.refuses_too_late, ("level", 2**40)),
        (law_setting_works_or_is_refused, broken.refuses_without_a_word, ("level", None)),
        (law_setting_works_or_is_refused, broken.takes_any_width, ("width", 2**40)),
        (law_setting_works_or_is_refused, broken.overflows, ("gain", 2**80)),
        (law_what_is_no_gradient_is_refused, broken.takes_anything(), ("complex",)),
        (law_what_is_no_gradient_is_refused, broken.takes_anything(), ("part of a graph",)),
        (law_strides_do_not_matter, broken.reads_memory(), ("every second element",)),
    ],
    ids=name_of,
)
def test_laws_of_inputs_bite(law: Callable[..., None], specimen: Any, given_: Any) -> None:
    named: dict[str, Any] = {**NO_GRADIENTS, **STRANGE}
    with pytest.raises(AssertionError, match=r"\w"):
        law(specimen, *(named[given_[0]],) if given_[0] in named else given_)


def test_what_the_broken_are_made_of_is_sound() -> None:
    for make, setting, value in (
        (broken.believes_any_number, "factor", 2),
        (broken.refuses_too_late, "level", 7),
        (broken.refuses_without_a_word, "level", 7),
        (broken.takes_any_width, "width", 7),
        (broken.overflows, "gain", 7),
    ):
        law_setting_works_or_is_refused(make, setting, value)
    law_strides_do_not_matter(broken.reads_memory(), torch.ones(20))
