"""Malformed files of each kind end in ``InvalidSetting`` or in data that everything can work with.

What is read is also used: a figure that is accepted and makes a planner or a simulation stumble is
as wrong as one that is not.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gradwire.contract.registry import names
from gradwire.errors import GradwireError, InvalidSetting
from gradwire.planning.data.cluster import Cluster, CodecFit
from gradwire.planning.data.fit import fit_line
from gradwire.planning.data.plan import Plan
from gradwire.planning.data.profile import Measurement, Profile
from gradwire.planning.data.sparsity import SparsityProfile
from gradwire.planning.data.stored import Stored
from gradwire.planning.make_plan import plan as make_plan
from gradwire.planning.simulation.timeline import simulate
from gradwire_lab.planning.explain import alternatives, explain
from tests.planning.data.mutations import BROKEN, mutated
from tests.planning.test_zen import SLOW, profile, sparsity

pytestmark = pytest.mark.slow

LINE = fit_line([(n, 1e-3 + n * 1e-9) for n in (1000, 10_000, 1_000_000)])
PROFILE = profile().model_copy(
    update={"measurement": Measurement(iterations=3, profiling_s=9, step_s=0.5, hooked_step_s=0.6)}
)
CLUSTER = Cluster(
    num_ranks=4,
    rate_bytes_per_s=1e8,
    collectives={"all_reduce": LINE, "send": LINE, "all_gather": LINE},
    codecs=dict.fromkeys(("topk", "onebit"), CodecFit(encode=LINE, decode=LINE, merge=LINE)),
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


@pytest.mark.parametrize("kind", KINDS)
def test_texts_that_are_no_file_are_refused(kind: str, tmp_path: Path) -> None:
    form, _, _ = KINDS[kind]
    for text in BROKEN:
        with pytest.raises(InvalidSetting, match="cannot be read"):
            form.parse(text)
    for content in (b"\xff\xfe\x00", b"\x80" * 100, b"{\x00}"):
        (tmp_path / "broken.json").write_bytes(content)
        with pytest.raises(InvalidSetting, match=r"broken\.json cannot be read"):
            form.load(tmp_path / "broken.json")
    for path in (tmp_path, tmp_path / "none", tmp_path / ("long" * 100), "a\x00b"):
        with pytest.raises(InvalidSetting, match="cannot be read"):
            form.load(path)
        with pytest.raises(InvalidSetting, match="cannot be written"):
            KINDS[kind][1][0].save(
                path / "x" if isinstance(path, Path) and path != tmp_path else path
            )


def test_a_file_is_replaced_and_never_half_written(tmp_path: Path) -> None:
    _, (stored, *_), _ = next(iter(KINDS.values()))
    path, before = tmp_path / "stored.json", tmp_path / "before.json"
    path.write_text("what a reader has opened")
    before.hardlink_to(path)
    stored.save(path)
    assert before.read_text() == "what a reader has opened"
    assert type(stored).load(path) == stored
    assert sorted(tmp_path.iterdir()) == [before, path]


@pytest.mark.parametrize("kind", KINDS)
def test_changed_files_are_refused_or_can_be_used(kind: str) -> None:
    form, sound, use = KINDS[kind]
    num_used = 0
    for seed in range(80):
        draw = random.Random(seed)
        text = mutated(draw.choice(sound).to_json(), draw)
        try:
            use(form.parse(text))
        except GradwireError:
            continue
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r} from {text[:2000]}") from error
        num_used += 1
    assert num_used, "every change was refused, so nothing was used"
