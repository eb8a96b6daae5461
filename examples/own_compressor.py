"""A compressor of your own, in one file outside the package.

It keeps the sign and one magnitude for the whole gradient (signSGD with majority replaced by a
mean; Bernstein et al., ICML 2018), and needs nothing but the contract: format, encode, decode.

    torchrun --nproc-per-node 2 examples/own_compressor.py
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn

import gradwire as gw


@dataclass(frozen=True, kw_only=True)
class scaled_sign(gw.Compressor):
    """sign(g) * mean|g|, one byte an element for clarity."""

    traits: ClassVar[gw.Traits] = gw.Traits(
        layout=gw.Layout.PACKED, contraction=True, error_feedback=True
    )

    def format(self, spec):
        # float32 also for 16-bit gradients, float64 for float64: the dtype of sums and residuals.
        scale_dtype = torch.promote_types(spec.dtype, torch.float32)
        return gw.Format(
            (gw.Field("scale", scale_dtype, 1), gw.Field("signs", torch.int8, spec.numel))
        )

    def encode(self, state, grad_N, *, residual_N=None, buffer=None):
        spec = gw.TensorSpec("", grad_N.numel(), grad_N.dtype)
        payload = gw.Payload.empty(self.format(spec), buffer)
        whole_N = grad_N.to(payload["scale"].dtype)
        if residual_N is not None:
            whole_N = whole_N + residual_N
        # A NaN or inf makes the scale so, and with it the mean on every rank ...
        payload["scale"].copy_(whole_N.abs().mean())
        payload["signs"].copy_(whole_N.sign().nan_to_num())
        if residual_N is not None:
            left_N = whole_N - self.decode(payload, torch.empty_like(whole_N))
            # ... but it must not stay: the next step would see it again.
            residual_N.copy_(left_N.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0))
        return payload, state

    def decode(self, payload, out_N, *, scale=1.0):
        return out_N.copy_(payload["signs"]).mul_(payload["scale"] * scale)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    handle = gw.attach(model, scaled_sign())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(200):
        inputs = torch.randn(32, 64, generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), inputs.roll(1, dims=1))
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.3f} through {handle.exchange}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
