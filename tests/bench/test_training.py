"""gradwire bench train: real losses and bytes of one small GPT, each compressor beside dense."""

from __future__ import annotations

import pytest

from gradwire.bench.training import TrainBench, run
from gradwire.errors import InvalidSetting


def test_losses_and_bytes_stand_beside_those_of_dense() -> None:
    dense, cast16, onebit = run(TrainBench(ranks=2, steps=10, only=("cast16", "onebit")))
    assert [row["name"] for row in (dense, cast16, onebit)] == ["dense", "cast16", "onebit"]
    assert dense["loss_over_dense"] == dense["sent_over_dense"] == 1
    assert 0.5 <= float(str(cast16["sent_over_dense"])) < 0.52, "vectors travel uncompressed"
    assert float(str(onebit["sent_over_dense"])) < 0.06
    assert cast16["loss_over_dense"] == pytest.approx(1, abs=0.01)
    assert onebit["loss_over_dense"] != 1


def test_the_same_command_gives_the_same_losses() -> None:
    bench = TrainBench(ranks=2, steps=10, only=("terngrad",))
    assert run(bench) == run(bench)


@pytest.mark.parametrize("settings", [{"ranks": 1}, {"steps": 9}])
def test_settings_that_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(InvalidSetting, match="or more, got"):
        TrainBench(**settings)
