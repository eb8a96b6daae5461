"""``bench batch``: real models' gradients, timed both ways."""

from __future__ import annotations

import pytest

from gradwire.contract.registry import load
from gradwire_bench.micro import batch


def test_models_have_the_gradients_of_table_6() -> None:
    """148 gradients of 511.25 MB, the largest 128 MB; BERT-large: 1282.60 MB, 119.23 MB."""
    light, bert = batch.ugatit_light(), batch.bert_large()
    assert len(light) == 148
    for sizes, total, largest in ((light, 511.25, 128), (bert, 1282.60, 119.23)):
        assert 4 * sum(sizes) / 2**20 == pytest.approx(total, abs=0.005)
        assert 4 * max(sizes) / 2**20 == pytest.approx(largest, abs=0.005)


def test_a_batch_is_timed_beside_a_call_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "MODELS", {"made up": lambda: [100, batch.SMALL + 1, 64]})
    rows = batch.measure([load("compress", "onebit")()], 1, 4)
    assert [row["num_tensors"] for row in rows] == [3, 2]
    assert all(float(str(row[key])) > 0 for row in rows for key in ("batch_s", "call_a_tensor_s"))
    assert "num_dense" not in rows[0]
