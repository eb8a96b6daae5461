"""A name that is mistyped, and a class without brackets, get the one that was meant."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import pytest
from torch import nn
from torch.optim import SGD

import gradwire as gw
from gradwire.contract.registry import load, names
from gradwire.errors import InvalidSetting, UnknownName, closest
from gradwire.exchange.by_name import exchange_for
from gradwire.planning.planner_settings import settings_of as settings_of_planner
from gradwire.planning.planner_settings import with_settings
from tests.each import each

FUNCTIONS: list[Callable[..., Any]] = [
    gw.attach,
    gw.local_steps,
    gw.deep_gradient_compression,
    gw.with_clipping,
    gw.with_decoupled_momentum,
    gw.with_density_warmup,
    gw.with_error_feedback,
    gw.with_momentum_correction,
    gw.with_natural_sparsity,
    gw.with_warmup,
]
CLASSES = [gw.Options, gw.FailurePolicy, gw.pilot.auto]
RECIPES = [
    gw.recipes.localsgd,
    gw.recipes.lora,
    gw.recipes.diloco,
    gw.recipes.streaming_diloco,
    gw.recipes.muloco,
]


def mistyped(name: str) -> str:
    """A name without the letter in its middle, or a short one with a letter more."""
    half = len(name) // 2
    return name[:half] + name[half + 1 :] if half > 1 else name + "s"


def made(kind: str) -> list[Any]:
    return [load(kind, name) for name in names(kind)]


def settings_of(algorithm: Callable[..., Any]) -> list[str]:
    found = signature(algorithm).parameters.values()
    return [
        one.name
        for one in found
        if one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]


@each("function", [*FUNCTIONS, *CLASSES, *made("compress"), *made("collective")])
def test_a_mistyped_setting_gets_the_one_that_is_meant(
    function: Callable[..., Any],
) -> None:
    for name in settings_of(function):
        if (wrong := mistyped(name)) in settings_of(function):
            continue
        with pytest.raises(UnknownName) as raised:
            function(**{wrong: 1})
        assert f"is called {wrong!r}; there are: " in str(raised.value)
        assert f"did you mean {name!r}?" in str(raised.value)


def test_a_planner_and_a_recipe_do_so_too() -> None:
    for planner in names("planner"):
        for name in settings_of_planner(load("planner", planner)) or ():
            with pytest.raises(UnknownName, match=f"did you mean '{name}'"):
                with_settings(planner, **{mistyped(name): 1})
    for recipe in RECIPES:
        with pytest.raises(UnknownName, match="did you mean 'fragments'"):
            recipe(nn.Linear(2, 2), fragmetns=2)
    with pytest.raises(UnknownName, match="did you mean 'bucket_cap_mb'"):
        gw.attach(nn.Linear(2, 2), "none", bucket_cap=4)  # type: ignore[call-arg]


@each(
    "given, meant",
    [
        ("bits", "bitwidth"),
        ("bit_width", "bitwidth"),
        ("Block", "block"),
        ("seeds", "seed"),
        ("rate", None),
        ("", None),
    ],
)
def test_a_name_that_begins_alike_is_near_enough(given: str, meant: str | None) -> None:
    assert closest(given, ["bitwidth", "block", "seed"]) == meant


def attached(given: Any) -> object:
    return gw.attach(nn.Linear(2, 2), given)


def in_periods(given: Any) -> object:
    model = nn.Linear(2, 2)
    return gw.local_steps(model, SGD(model.parameters(), lr=0.1), given, every=2)


def with_topk(given: Any) -> object:
    return gw.pair(gw.compress.topk(), given)


def with_ring(given: Any) -> object:
    return gw.pair(given, gw.collective.ring())


BARE: list[tuple[Callable[[Any], object], Any]] = [
    *((attached, one) for one in made("compress")),
    *((take, gw.compress.uniform) for take in (in_periods, with_ring)),
    *((take, gw.compress.uniform) for take in (exchange_for, gw.with_error_feedback)),
    (lambda given: gw.with_clipping(given, 1.0), gw.compress.uniform),
    *((with_topk, one) for one in made("collective")),
    (attached, gw.pilot.auto),
    (attached, gw.deep_gradient_compression),
    (
        lambda given: gw.recipes.diloco(nn.Linear(2, 2), exchange=given),
        gw.compress.uniform,
    ),
]


@each("take, given", BARE, ids=lambda given: getattr(given, "__name__", ""))
def test_a_class_without_brackets_is_refused_with_them(
    take: Callable[[Any], object], given: Any
) -> None:
    with pytest.raises(
        InvalidSetting, match=rf"; write {given.__name__}\(\), with its brackets"
    ):
        take(given)
