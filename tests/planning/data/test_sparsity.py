"""Figures between those that are kept, and files that hold figures no gradients
have.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from gradwire.errors import InvalidSetting
from gradwire.planning.data.profile import Layer, Profile, ProfiledTensor
from gradwire.planning.data.sparsity import (
    Densification,
    RangeImbalance,
    Skewness,
    SparsityProfile,
    UnitSparsity,
)
from gradwire_lab.exchange.sparse_schemes import skew
from gradwire_lab.planning.index_sets import overlap_mean
from tests.each import each


@each(
    "field, kept",
    [
        ("densification", [Densification(ranks=2, ratio=1.5)] * 2),
        ("skewness", [Skewness(parts=n, ratio=1.0) for n in (4, 2)]),
        ("imbalances", [RangeImbalance(ranks=4, push=1.0, pull=1.0)] * 2),
    ],
)
def test_what_is_between_two_that_are_alike_is_not_asked(
    field: str, kept: list[Any]
) -> None:
    """It divides by how far apart they are."""
    with pytest.raises(ValueError, match="listed once each, ascending"):
        UnitSparsity.model_validate(
            {"width": 1, "num_units": 40, "density": 0.1, field: kept}
        )


def units(**changed: Any) -> dict[str, Any]:
    figures = {"width": 1, "num_units": 40, "density": 0.1, **changed}
    return json.loads(json.dumps(figures))  # type: ignore[no-any-return]


def profile_text(**changed: Any) -> str:
    tensor = {"name": "table", "units": units(**changed), "blocks": units()}
    return json.dumps({"source": "made up", "num_gradients": 2, "tensors": [tensor]})


@each(
    "changed, words",
    [
        ({"density": float("nan")}, r"tensors.0 \('table'\).units.density"),
        ({"density": -0.1}, r"units.density: .*greater than or equal to 0"),
        ({"density": 1.1}, r"units.density: .*less than or equal to 1"),
        (
            {"densification": [{"ranks": 2, "ratio": float("nan")}]},
            r"densification.0.ratio",
        ),
        (
            {"densification": [{"ranks": 2, "ratio": 2.5}]},
            "2 ranks is 2.5, and at most 2",
        ),
        (
            {"densification": [{"ranks": 2, "ratio": 0.5}]},
            "2 ranks is 0.5, below the 1 of fewer",
        ),
        (
            {"densification": [{"ranks": 2, "ratio": 1.9}, {"ranks": 4, "ratio": 1.5}]},
            "4 ranks is 1.5, below the 1.9",
        ),
        (
            {"density": 0.9, "densification": [{"ranks": 2, "ratio": 1.5}]},
            "makes a density of 0.9 more than all",
        ),
        ({"skewness": [{"parts": 2, "ratio": 2.5}]}, "2 parts is 2.5, and 1 to 2"),
        (
            {"imbalances": [{"ranks": 2, "push": 2.5, "pull": 1.0}]},
            "2 ranks are 2.5 and 1, and 1 to 2",
        ),
    ],
)
def test_files_with_impossible_figures_are_refused_by_name(
    changed: dict[str, Any], words: str
) -> None:
    assert SparsityProfile.parse(profile_text()).tensors[0].units.density == 0.1
    with pytest.raises(InvalidSetting, match=words):
        SparsityProfile.parse(profile_text(**changed))


def test_a_tensor_twice_is_refused() -> None:
    found = json.loads(profile_text())
    found["tensors"] *= 2
    with pytest.raises(InvalidSetting, match="'table' is listed twice"):
        SparsityProfile.parse(json.dumps(found))


def test_a_profile_holds_the_sparsity_of_its_own_tensors() -> None:
    tensor = ProfiledTensor(name="table", shape=(8, 5))
    layer = Layer(name="all", tensors=(tensor,), forward_s=0.1, backward_s=0.1)
    profile = Profile(model="words", source="made up", batch_size=1, layers=(layer,))
    sparsity = SparsityProfile.parse(profile_text())
    whole = profile.with_sparsity(sparsity)
    assert Profile.parse(whole.to_json()) == whole
    assert whole.sparsity == sparsity
    for shape, words in (
        ((9, 5), "40 units of 1 elements, and it has 45"),
        ((8, 4), "has 32"),
    ):
        other = tensor.model_copy(update={"shape": shape})
        shown = profile.model_copy(
            update={"layers": (layer.model_copy(update={"tensors": (other,)}),)}
        )
        with pytest.raises(ValueError, match=words):
            shown.with_sparsity(sparsity)
    renamed = sparsity.tensors[0].model_copy(update={"name": "other"})
    with pytest.raises(ValueError, match="'other', which is no tensor"):
        profile.with_sparsity(sparsity.model_copy(update={"tensors": (renamed,)}))


def test_between_what_is_kept_and_beyond() -> None:
    one = UnitSparsity(
        width=1,
        num_units=1000,
        density=0.001,
        densification=(
            Densification(ranks=2, ratio=1.5),
            Densification(ranks=8, ratio=4.0),
        ),
        skewness=(Skewness(parts=2, ratio=2.0),),
    )
    assert one.gamma(1) == 1.0
    assert one.gamma(4) == pytest.approx((1.5 * 4.0) ** 0.5)
    assert one.gamma(16) == pytest.approx(4.0 * (4.0 / 1.5) ** 0.5)
    assert [skew(one, parts) for parts in (1, 2, 4)] == pytest.approx([1.0, 2.0, 4.0])
    assert overlap_mean(one) == 0.0
