"""``bench kernel``: rows are what they say."""

from __future__ import annotations

import pytest
import torch

from gradwire.contract import Compressor
from gradwire.contract.registry import load, names
from gradwire.contract.spec import TensorSpec
from gradwire_bench.micro import kernel
from gradwire_bench.micro.kernel_peers import PEERS, peers
from tests.each import each

# Kernels


def made(*compressors: str) -> list[Compressor]:
    return [load("compress", name)() for name in compressors]


@pytest.mark.smoke
def test_every_compressor_has_rows_and_torch_columns_beside_ours() -> None:
    assert {type(codec).__name__ for codec in kernel.shipped()} <= set(
        names("compress")
    )
    timed = ("onebit", "topk", "sidco")
    rows = kernel.measure(70_000, 1, 4, made(*timed), peers=peers(("eager",), "cpu"))
    parts = ("encode", "encode-plain", "decode", "decode-plain")
    wanted = [f"{name}/{part}" for name in timed for part in parts]
    assert [row["name"] for row in rows] == ["copy", *wanted]
    assert all(float(str(row["kernel_s"])) > 0 for row in rows)
    reported = {row["name"]: row for row in rows}
    assert "speedup_vs_eager" in reported["onebit/decode"]
    assert "speedup_vs_eager" in reported["topk/encode-plain"]
    assert "speedup_vs_eager" in reported["sidco/encode-plain"]
    assert "speedup_vs_eager" not in reported["onebit/decode-plain"]


def test_bytes_are_those_that_must_move() -> None:
    (codec,) = made("onebit")
    numel = codec.block  # type: ignore[attr-defined]
    cases = kernel.codec_cases(codec, torch.zeros(numel), torch.zeros(numel))
    sent = 1 / 8 + 8 / numel
    found = {case.name.partition("/")[2]: case.bytes_per_element for case in cases}
    expected = {"encode": 12, "encode-plain": 4, "decode": 8, "decode-plain": 4}
    assert found == pytest.approx(
        {part: size + sent for part, size in expected.items()}
    )


@each("name", PEERS)
def test_a_peer_does_what_the_compressor_does(name: str) -> None:
    """The same residual and sum; of those that draw, the same on average."""
    (codec,), peer = made(name), PEERS[name]()
    numel = 8 * peer.block
    grad_N = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    left_N = torch.zeros(numel)
    state = codec.init(TensorSpec("gradient", numel))
    payload, _ = codec.encode(state, grad_N, residual_N=left_N)
    residual_N, sum_N = torch.zeros(numel), torch.zeros(numel)
    peer.merge(peer.encode(grad_N, residual_N), sum_N)
    torch.testing.assert_close(sum_N + residual_N, grad_N, atol=1e-5, rtol=0)
    if hasattr(codec, "seed"):
        assert abs(float(residual_N.norm()) / float(left_N.norm()) - 1) < 0.05
    else:
        sent_N = codec.decode(payload, torch.zeros(numel))
        torch.testing.assert_close(
            (sum_N, residual_N), (sent_N, left_N), atol=1e-5, rtol=0
        )
