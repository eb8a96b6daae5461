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
from gradwire.contract import Layout
from gradwire.payload import Field, Format


@dataclass(frozen=True, kw_only=True)
class scaled_sign(gw.Compressor):
    """sign(g) * mean|g|, one byte an element for clarity."""

    traits: ClassVar[gw.Traits] = gw.Traits(
        layout=Layout.PACKED, contraction=True, error_feedback=True
    )

    def format(self, spec):
        fields = (Field("scale", torch.float32, 1), Field("signs", torch.int8, spec.numel))
        return Format(fields)

    def encode(self, state, grad_N, *, residual_N=None, buffer=None):
        payload = gw.Payload.empty(self.format(gw.TensorSpec("", grad_N.numel())), buffer)
        whole_N = grad_N.float() if residual_N is None else grad_N + residual_N
        payload["scale"].copy_(whole_N.abs().mean())
        payload["signs"].copy_(whole_N.sign())
        if residual_N is not None:
            residual_N.copy_(whole_N - self.decode(payload, torch.empty_like(whole_N)))
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
