"""Profiles as files: exact round trips, and errors that name the entry, what it is and
why not.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from gradwire.errors import InvalidSetting
from gradwire.planning.data.profile import Layer, Profile, ProfiledTensor
from tests.each import each

PROFILE = Profile(
    model="small",
    source="made up",
    batch_size=2,
    layers=(
        Layer(
            name="stem",
            tensors=(
                ProfiledTensor(name="stem.weight", shape=(4, 3)),
                ProfiledTensor(name="stem.bias", shape=(4,), dtype="bfloat16"),
            ),
            forward_s=0.1,
            backward_s=1 / 3,
        ),
        Layer(
            name="head",
            tensors=(ProfiledTensor(name="head.scale", shape=(), dtype="float64"),),
            forward_s=0.0,
            backward_s=0.2,
        ),
    ),
)


def changed(path: str, value: Any) -> str:
    """The profile's text with one entry replaced; ``path`` such as
    ``layers.0.name``.
    """
    data = json.loads(PROFILE.to_json())
    *way, last = path.split(".")
    place = data
    for step in way:
        place = place[int(step) if step.isdecimal() else step]
    place[last] = value
    return json.dumps(data)


def test_sizes_and_seconds_are_summed_over_layers() -> None:
    assert PROFILE.size_bytes == 12 * 4 + 4 * 2 + 8
    assert [layer.size_bytes for layer in PROFILE.layers] == [56, 8]
    assert PROFILE.forward_s == pytest.approx(0.1)
    assert PROFILE.backward_s == pytest.approx(1 / 3 + 0.2)


def test_round_trip_is_exact(tmp_path: Path) -> None:
    PROFILE.save(tmp_path / "profile.json")
    back = Profile.load(tmp_path / "profile.json")
    assert back == PROFILE
    assert back.to_json() == PROFILE.to_json()
    with pytest.raises(ValidationError, match="frozen"):
        back.model = "other"


NAN = float("nan")


@each(
    "entry, value, words",
    [
        ("schema_version", 2, r"schema_version: .*got 2 \(schema 1 is accepted\)"),
        ("model", "", r"model: .*at least 1 character"),
        ("batch_size", 0, r"batch_size: .*greater than or equal to 1, got 0"),
        (
            "layers.0.forward_s",
            -0.5,
            r"layers\.0 \('stem'\)\.forward_s: .*equal to 0, got -0\.5",
        ),
        (
            "layers.1.backward_s",
            NAN,
            r"layers\.1 \('head'\)\.backward_s: .*finite.*got nan",
        ),
        (
            "layers.1.forward_s",
            "fast",
            r"layers\.1 \('head'\)\.forward_s: .*number, got 'fast'",
        ),
        ("layers.1.name", "stem", r"layer 'stem' is listed twice"),
        (
            "layers.1.tensors.0.name",
            "stem.bias",
            r"tensor 'stem\.bias' is listed twice",
        ),
        (
            "layers.0.tensors.1.shape",
            [-4],
            r"layers\.0 \('stem'\)\.tensors\.1 \('stem\.bias'\)\.shape\.0: .*got -4",
        ),
        ("layers.0.tensors.0.dtype", "int8", r"dtype: .*'float32'.*got 'int8'"),
        (
            "layers.0.time",
            1.0,
            r"layers\.0 \('stem'\)\.time: Extra inputs are not permitted",
        ),
    ],
)
def test_a_wrong_entry_is_named_with_what_it_is(
    entry: str, value: Any, words: str
) -> None:
    with pytest.raises(
        InvalidSetting, match=f"mine.json cannot be read: .*{words}.*; write it"
    ):
        Profile.parse(changed(entry, value), "mine.json")


def _without(entry: str) -> str:
    data = json.loads(PROFILE.to_json())
    del data["layers"][1][entry]
    return json.dumps(data)


@each(
    "text, words",
    [
        ("", "the whole: it is empty"),
        ("{", "the whole: .*line 1 column 2"),
        ("[]", "the whole: Input should be an object"),
        ("{}", "model: Field required"),
        (_without("backward_s"), r"layers\.1 \('head'\)\.backward_s: Field required"),
        (
            PROFILE.to_json().replace('"batch_size"', '"batch_size": 4, "batch_size"'),
            "the whole: 'batch_size' is given twice in one object",
        ),
    ],
)
def test_a_broken_text_is_refused(text: str, words: str) -> None:
    with pytest.raises(
        InvalidSetting, match=rf"profile cannot be read: {words}.*gradwire profile"
    ):
        Profile.parse(text)
