"""Malformed files end in ``InvalidSetting``, and extreme figures in it or in plans that
work.

A figure that is accepted and makes a planner or a simulation stumble is as wrong as one
that is not. Files in which anything else changed are read by ``tests/fuzzing``.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gradwire.contract.registry import names
from gradwire.errors import GradwireError, InvalidSetting
from gradwire.planning.data.cluster import Cluster, CodecFit
from gradwire.planning.data.fit import fit_line
from gradwire.planning.data.plan import Plan
from gradwire.planning.data.profile import Profile
from gradwire.planning.data.sparsity import SparsityProfile
from gradwire.planning.data.stored import Stored
from gradwire.planning.make_plan import plan as make_plan
from gradwire.planning.simulation.timeline import simulate
from gradwire_lab.planning.explain import alternatives, explain
from tests.planning.test_zen import SLOW, profile, sparsity

pytestmark = pytest.mark.slow

LINE = fit_line([(n, 1e-3 + n * 1e-9) for n in (1000, 10_000, 1_000_000)])
PROFILE = profile()
CLUSTER = Cluster(
    num_ranks=4,
    rate_bytes_per_s=1e8,
    collectives={"all_reduce": LINE, "send": LINE, "all_gather": LINE},
    codecs=dict.fromkeys(
        ("topk", "onebit"), CodecFit(encode=LINE, decode=LINE, merge=LINE)
    ),
    inline={"topk": LINE},
    host_share=0.2,
)
PLANS = tuple(make_plan(name, profile(), SLOW) for name in names("planner"))


def planned_for(found: Profile, cluster: Cluster) -> None:
    """What is read is planned for, simulated and explained."""
    for name in names("planner"):
        made = make_plan(name, found, cluster)
        simulate(made, found, cluster)
    explain(made, found, cluster)
    alternatives(made, found, cluster)


def carried_out(found: Plan) -> None:
    for run in (simulate, explain, alternatives):
        run(found, profile(), SLOW)  # type: ignore[operator]


KINDS: dict[str, tuple[type[Stored], list[Stored], Callable[[Any], object]]] = {
    "profile": (Profile, [PROFILE], lambda found: planned_for(found, SLOW)),
    "cluster": (Cluster, [CLUSTER], lambda found: planned_for(profile(), found)),
    "sparsity": (
        SparsityProfile,
        [sparsity(), sparsity("topk")],
        lambda found: planned_for(_with_sparsity(found), SLOW),
    ),
    "plan": (Plan, [*PLANS], carried_out),
}


def _with_sparsity(found: SparsityProfile) -> Profile:
    try:
        return profile().with_sparsity(found)
    except ValueError as error:  # of other tensors
        raise InvalidSetting(str(error)) from None


BROKEN = (
    *(
        "",
        " ",
        "{",
        "}",
        "[]",
        "null",
        "3",
        '"a"',
        "{}",
        "\ufeff{}",
        "not json",
        "{'a': 1}",
    ),
    *("[" * 100_000, '{"a":' * 100_000, "[" * 100_000 + "]" * 100_000),
    *("1e400", "-1e400", "1" * 5000, '{"schema_version": 1e400}', "\ud800", "nul\x00l"),
)
"""Whole texts that are no file."""


def test_texts_that_are_no_file_are_refused(tmp_path: Path) -> None:
    for text in BROKEN:
        with pytest.raises(InvalidSetting, match="cannot be read"):
            Plan.parse(text)
    for content in (b"\xff\xfe\x00", b"\x80" * 100, b"{\x00}"):
        (tmp_path / "broken.json").write_bytes(content)
        with pytest.raises(InvalidSetting, match=r"broken\.json cannot be read"):
            Plan.load(tmp_path / "broken.json")
    for path in (tmp_path, tmp_path / "none", tmp_path / ("long" * 100), "a\x00b"):
        with pytest.raises(InvalidSetting, match="cannot be read"):
            Plan.load(path)
        with pytest.raises(InvalidSetting, match="cannot be written"):
            PLANS[0].save(
                path / "x" if isinstance(path, Path) and path != tmp_path else path
            )


def test_a_file_is_replaced_and_never_half_written(tmp_path: Path) -> None:
    stored = PLANS[0]
    path, before = tmp_path / "stored.json", tmp_path / "before.json"
    path.write_text("what a reader has opened")
    before.hardlink_to(path)
    stored.save(path)
    assert before.read_text() == "what a reader has opened"
    assert Plan.load(path) == stored
    assert sorted(tmp_path.iterdir()) == [before, path]


EXTREME: dict[type, tuple[Any, ...]] = {
    float: (0.0, 5e-324, 1e-300, 1e-9, 0.999, 1.0, 1e3, 1e6, 1e9),
    int: (0, 1, 2, 3, 64, 2**16, 2**24, 2**31, 2**40),
    bool: (True, False),
}
"""Figures that stand in the place of those of their type."""


def figures(data: Any) -> Iterator[tuple[Any, Any]]:
    """The containers of all figures in a JSON value, and where each lies there."""
    steps = data.items() if isinstance(data, dict) else enumerate(data)
    for step, inner in [*steps]:
        if isinstance(inner, dict | list):
            yield from figures(inner)
        elif type(inner) in EXTREME:
            yield data, step


def stretched(text: str, draw: random.Random) -> str:
    """The text of a sound file in which one to four figures are extreme.

    Sometimes that is so in all places of a name.
    """
    data = json.loads(text)
    places = [*figures(data)]
    for _ in range(draw.randint(1, 4)):
        inside, name = draw.choice(places)
        chosen = draw.choice(EXTREME[type(inside[name])])
        inside[name] = chosen
        if draw.random() < 0.3:
            for other, step in places:
                if step == name and type(other[step]) is type(chosen):
                    other[step] = chosen
    return json.dumps(data)


@pytest.mark.parametrize("kind", KINDS)
def test_extreme_figures_are_refused_or_can_be_used(kind: str) -> None:
    form, sound, use = KINDS[kind]
    num_used = 0
    for seed in range(30):
        draw = random.Random(seed)
        text = stretched(draw.choice(sound).to_json(), draw)
        try:
            use(form.parse(text))
        except GradwireError:
            continue
        except Exception as error:
            raise AssertionError(
                f"seed {seed}: {error!r} from {text[:2000]}"
            ) from error
        num_used += 1
    assert num_used, "every change was refused, so nothing was used"
