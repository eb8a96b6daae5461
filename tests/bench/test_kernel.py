"""``bench kernel`` and ``bench batch``: both sides do the same work, and rows are what they say."""

from __future__ import annotations

import pytest
import torch

from gradwire.bench import batch, kernel
from gradwire.bench.kernel_peers import PEERS, SELECTING, peers_of
from gradwire.contract import Compressor
from gradwire.errors import InvalidSetting
from gradwire.load import load, names
from gradwire.spec import TensorSpec


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_does_what_the_compressor_does(name: str) -> None:
    """The same residual and sum; of those that draw, the same on average."""
    codec, peer = load("compress", name)(), PEERS[name]()
    numel = 8 * peer.block
    grad_N = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    ours = _sent_and_left(codec, grad_N)
    residual_N, sum_N = torch.zeros(numel), torch.zeros(numel)
    peer.merge(peer.encode(grad_N, residual_N), sum_N)
    torch.testing.assert_close(sum_N + residual_N, grad_N, atol=1e-5, rtol=0)
    if codec.traits.unbiased:
        spread = float(ours[1].norm())
        assert abs(float(residual_N.norm()) / spread - 1) < 0.05
    else:
        torch.testing.assert_close((sum_N, residual_N), ours, atol=1e-5, rtol=0)


def _sent_and_left(codec: Compressor, grad_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    spec = TensorSpec("gradient", grad_N.numel())
    residual_N = torch.zeros_like(grad_N)
    payload, _ = codec.encode(codec.init(spec), grad_N, residual_N=residual_N)
    return codec.decode(payload, torch.zeros_like(grad_N)), residual_N


def test_every_compressor_has_rows_and_names_are_the_registrys() -> None:
    codecs = kernel.shipped()
    assert {type(codec).__name__ for codec in codecs} <= set(names("compress"))
    rows = kernel.measure(70_000, 1, 4, [load("compress", n)() for n in ("onebit", "topk")])
    parts = ("encode", "encode-plain", "decode", "decode-plain")
    wanted = [f"{name}/{part}" for name in ("onebit", "topk") for part in parts]
    assert [row["name"] for row in rows] == ["copy", *wanted]
    assert all(float(str(row["kernel_s"])) > 0 for row in rows)
    told = {row["name"]: row for row in rows}
    assert "speedup_vs_eager" in told["onebit/decode"]
    assert "speedup_vs_eager" not in told["onebit/decode-plain"]


def test_what_has_no_encode_of_its_own_is_not_measured_as_if_it_were_not_named() -> None:
    with pytest.raises(InvalidSetting, match="bench exchange --only powersgd"):
        kernel.shipped(["onebit", "powersgd"])
    assert "powersgd" not in {type(codec).__name__ for codec in kernel.shipped()}


def test_bytes_are_those_that_must_move() -> None:
    codec = load("compress", "onebit")()
    numel = codec.block
    cases = kernel.codec_cases(codec, torch.zeros(numel), torch.zeros(numel))
    sent = 1 / 8 + 8 / numel
    found = {case.name.partition("/")[2]: case.bytes_per_element for case in cases}
    expected = {"encode": 12, "encode-plain": 4, "decode": 8, "decode-plain": 4}
    assert found == pytest.approx({part: size + sent for part, size in expected.items()})


def test_settings_other_than_the_defaults_have_no_peer() -> None:
    grad_N = torch.zeros(65536)
    for codec, known in (
        (load("compress", "onebit")(), True),
        (load("compress", "tbq")(threshold=1.0), False),
    ):
        found = peers_of(codec, grad_N, grad_N.clone(), ("eager",))
        assert ("eager" in found["encode"]) is known
    assert set(names("compress")) >= SELECTING


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
