"""What torch does beside compressors: the same work, for the defaults."""

from __future__ import annotations

import torch

from gradwire.contract import Compressor
from gradwire.contract.registry import load
from gradwire.contract.spec import TensorSpec
from gradwire_bench.micro import kernel
from gradwire_bench.micro.kernel_peers import PEERS, peers
from tests.each import each


@each("name", PEERS)
def test_a_peer_does_what_the_compressor_does(name: str) -> None:
    """The same residual and sum; of those that draw, the same on average."""
    codec, peer = load("compress", name)(), PEERS[name]()
    numel = 8 * peer.block
    grad_N = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    ours = _sent_and_left(codec, grad_N)
    residual_N, sum_N = torch.zeros(numel), torch.zeros(numel)
    peer.merge(peer.encode(grad_N, residual_N), sum_N)
    torch.testing.assert_close(sum_N + residual_N, grad_N, atol=1e-5, rtol=0)
    if hasattr(codec, "seed"):
        spread = float(ours[1].norm())
        assert abs(float(residual_N.norm()) / spread - 1) < 0.05
    else:
        torch.testing.assert_close((sum_N, residual_N), ours, atol=1e-5, rtol=0)


def _sent_and_left(codec: Compressor, grad_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    spec = TensorSpec("gradient", grad_N.numel())
    residual_N = torch.zeros_like(grad_N)
    payload, _ = codec.encode(codec.init(spec), grad_N, residual_N=residual_N)
    return codec.decode(payload, torch.zeros_like(grad_N)), residual_N


def test_peers_have_columns_beside_ours() -> None:
    codecs = [load("compress", name)() for name in ("onebit", "topk")]
    rows = kernel.measure(70_000, 1, 4, codecs, peers=peers(("eager",), "cpu"))
    told = {row["name"]: row for row in rows}
    assert "speedup_vs_eager" in told["onebit/decode"]
    assert "speedup_vs_eager" in told["topk/encode-plain"]
    assert "speedup_vs_eager" not in told["onebit/decode-plain"]
