"""Malformed JSON: what a careful file becomes under editors, half-written disks and mischief."""

from __future__ import annotations

import json
import random
from copy import deepcopy
from typing import Any

WRONG: tuple[Any, ...] = (
    *(None, True, False, "", "a", "\x00", "nan", [], {}, [[]], {"": None}),
    *(0, -1, 1, 2, 2**31, 2**63, 2**80, 10**4000, -(2**80)),
    *(0.0, -0.0, 0.5, 1e-320, 1e308, -1e308, float("nan"), float("inf"), float("-inf")),
)
"""What an entry is replaced by."""

EXTREME: dict[type, tuple[Any, ...]] = {
    float: (0.0, 5e-324, 1e-300, 1e-9, 0.999, 1.0, 1e3, 1e6, 1e9),
    int: (0, 1, 2, 3, 64, 2**16, 2**24, 2**31, 2**40),
    bool: (True, False),
}
"""What an entry of a type is replaced by that stays one of it."""

BROKEN = (
    *("", " ", "{", "}", "[]", "null", "3", '"a"', "{}", "\ufeff{}", "not json", "{'a': 1}"),
    *("[" * 100_000, '{"a":' * 100_000, "[" * 100_000 + "]" * 100_000),
    *("1e400", "-1e400", "1" * 5000, '{"schema_version": 1e400}', "\ud800", "nul\x00l"),
)
"""Whole texts that are no file."""


def mutated(text: str, draw: random.Random) -> str:
    """The text of a sound file with one to four things wrong, or only extreme, about it."""
    data = json.loads(text)
    change = _spoil if draw.random() < 0.5 else _stretch
    for _ in range(draw.randint(1, 4)):
        change(data, draw)
    found = json.dumps(data)
    if draw.random() < 0.1:  # half-written, or with a character changed
        place = draw.randrange(len(found))
        found = found[:place] + draw.choice(["", "}", '"', "9", "é"]) + found[place + 1 :]
    return found[: draw.randrange(len(found))] if draw.random() < 0.05 else found


def _spoil(data: Any, draw: random.Random) -> None:
    place = draw.choice(_places(data))
    if not place:
        return
    *way, last = place
    for step in way:
        data = data[step]
    action = draw.random()
    if action < 0.7:
        value = data[last]
        nearby = [value * 10**9, -value, value + 1] if isinstance(value, int | float) else []
        data[last] = draw.choice([*WRONG, *nearby])
    elif action < 0.8:
        del data[last]
    elif action < 0.9 and isinstance(data, dict):
        data[draw.choice(["extra", "name", "start", ""])] = deepcopy(data[last])
    elif isinstance(data, list):
        data.append(deepcopy(data[last]))


def _stretch(data: Any, draw: random.Random) -> None:
    """Another figure of the same kind, or the same one in all places of that name."""
    found = [way for way in _places(data) if type(_at(data, way)) in EXTREME]
    *way, last = draw.choice(found)
    chosen = draw.choice(EXTREME[type(_at(data, (*way, last)))])
    everywhere = draw.random() < 0.3
    for *other, name in found if everywhere else [(*way, last)]:
        if name == last and type(_at(data, (*other, name))) is type(chosen):
            _at(data, tuple(other))[name] = chosen


def _at(data: Any, way: tuple[Any, ...]) -> Any:
    for step in way:
        data = data[step]
    return data


def _places(data: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The ways to all entries of a value, containers among them."""
    found = [way]
    steps = data.items() if isinstance(data, dict) else ()
    if isinstance(data, list):
        steps = enumerate(data)
    for step, inner in steps:
        found += _places(inner, (*way, step))
    return found
