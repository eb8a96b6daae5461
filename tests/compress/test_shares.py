"""Densities are fractions: a percentage, a text or a truth value is refused by every sparsifier."""

from __future__ import annotations

from dataclasses import fields

import pytest

from gradwire.compress.sparseloco import CHUNK
from gradwire.contract.registry import load, names
from gradwire.errors import InvalidSetting
from tests.each import each

SHARES = [
    (name, field.name)
    for name in names("compress")
    for field in fields(load("compress", name))
    if field.name in ("density", "sample_share", "max_density")
]


@each("name, setting", SHARES)
def test_what_is_no_share_is_refused(name: str, setting: str) -> None:
    for given in (0, -0.1, 1.5, 50, float("nan"), "1%", None, True):
        with pytest.raises(InvalidSetting, match=f"{name} {setting} must be"):
            load("compress", name)(**{setting: given})
    least = 1 / CHUNK if name == "sparseloco" else 1e-12  # at least an element of a chunk
    for given in (1, 1.0, least):
        load("compress", name)(**{setting: given})


def test_most_sparsifiers_have_a_density() -> None:
    assert {"topk", "deft", "dgc", "randomk", "sparseloco"} <= {name for name, _ in SHARES}
