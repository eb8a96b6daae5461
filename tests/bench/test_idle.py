"""``bench schedule --idle``: what its rows compare."""

from __future__ import annotations

import pytest

from gradwire_bench.micro import idle


def test_overhead_compares_turns_that_followed_each_other() -> None:
    plain = [{"seconds": [[1.0, 1.0], [2.0, 2.0]], "processor_s": [0.1, 0.1]}]
    own = [{"seconds": [[1.1, 1.1], [2.2, 2.2]], "processor_s": [0.2, 0.4]}]
    row = idle._row(idle.IdleBench(planners=("usbyte",)), "usbyte", idle._turns_s(plain), own)
    assert row["fraction_overhead"] == pytest.approx(0.1)
    assert row["fraction_overhead_p80"] == pytest.approx(0.1)
    assert row["processor_s"] == pytest.approx(0.3)
