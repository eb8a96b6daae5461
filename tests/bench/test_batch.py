"""``bench batch``: real models' gradients, timed both ways."""

from __future__ import annotations

import pytest

from gradwire.contract.registry import load
from gradwire_bench.micro import batch


def test_a_batch_is_timed_beside_a_call_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "MODELS", {"made up": lambda: [100, batch.SMALL + 1, 64]})
    rows = batch.measure([load("compress", "onebit")()], 1, 4)
    assert [row["num_tensors"] for row in rows] == [3, 2]
    assert all(float(str(row[key])) > 0 for row in rows for key in ("batch_s", "call_a_tensor_s"))
    assert "num_dense" not in rows[0]
