"""The fuzzers find a fault that is planted, say how to make it again, and find none
elsewhere.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.fuzzing import child, mutations, parsers, payloads, sanitizer
from tests.fuzzing.campaign import SHARES, fuzz

pytestmark = pytest.mark.skipif(
    sanitizer.why_not() is not None, reason=str(sanitizer.why_not())
)


@pytest.mark.slow
@pytest.mark.timeout(600)  # kernels may have to be built, on a busy machine
def test_a_kernel_without_a_bounds_check_is_found_and_found_again() -> None:
    found = fuzz("unchecked", 1, last=20, seconds=0.0)
    [first, *_] = found.findings
    assert "AddressSanitizer" in first.what
    assert (
        first.command
        == f"python -m tests.fuzzing unchecked --seed 1 --input {first.number}"
    )
    again = fuzz("unchecked", 1, first=first.number, last=first.number + 1, seconds=100)
    assert [one.number for one in again.findings] == [first.number]


@pytest.mark.slow
@pytest.mark.timeout(600)  # kernels may have to be built, on a busy machine
def test_damaged_sparse_payloads_stay_inside_of_their_tensors() -> None:
    found = fuzz("formats", 1, last=300, seconds=200)
    assert [str(one) for one in found.findings] == []
    assert found.num_inputs > 100
    assert 0 < found.num_refused < found.num_inputs


@pytest.mark.parametrize("target", ["codecs", "formats", "exchanges", "programs"])
def test_an_input_follows_from_target_seed_and_number(
    target: str, tmp_path: Path
) -> None:
    place = tmp_path / "place"
    place.write_bytes(bytes(8))
    child.attack(target, 5, 0, 8, 20.0, place)
    assert int.from_bytes(place.read_bytes(), "little") == 7
    draws = [child.draw(target, 5, number).random() for number in (7, 7, 8)]
    assert draws[0] == draws[1] != draws[2]


def test_errors_that_are_not_gradwires_are_findings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def raises(rng: random.Random) -> None:
        raise IndexError("raw")

    monkeypatch.setitem(child.TARGETS, "raises", raises)
    place = tmp_path / "place"
    place.write_bytes(bytes(8))
    child.attack("raises", 0, 3, 6, 20.0, place)
    first, total = capfd.readouterr().out.splitlines()
    assert '"number": 3, "what": "IndexError' in first
    assert total == '{"tried": 3, "refused": 0}'


def test_every_target_has_a_share_of_the_time_and_bytes_do_change() -> None:
    assert {*SHARES} == {*payloads.TARGETS, *parsers.TARGETS}
    assert sum(SHARES.values()) == pytest.approx(1.0)
    sound, rng = bytes(range(64)), random.Random(0)
    made = [mutations.mutated(rng, sound, (64,)) for _ in range(200)]
    assert {len(one) for one in made} == {64}
    assert sum(one != sound for one in made) > 180
