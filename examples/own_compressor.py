"""A compressor of your own, in one file outside the package.

It sends three values: 0 for what is small, and plus or minus one magnitude a block for
the rest, packed five elements to a byte. That is all there is to write: the C++ and GPU
kernels, error feedback fused into encode, the wire format and the exchange among ranks
follow.

    torchrun --nproc-per-node 2 examples/own_compressor.py
    gradwire check examples/own_compressor.py
    gradwire compll show examples/own_compressor.py --target cpp
"""

import torch
import torch.distributed as dist
from torch import nn

import gradwire as gw
from gradwire.dsl.language import (
    add,
    concat,
    extract,
    filter,
    greater,
    map,
    reduce,
    size,
    uint_3,
    where,
)
from gradwire.dsl.program import Program


class ternary(Program, nonexpansive=True, error_feedback=True):
    """0 below ``share`` of the block's greatest magnitude, else the mean magnitude of
    the rest.
    """

    block: int = 4096
    share: float = 0.4

    def encode(self, gradient):
        cut = self.share * reduce(map(gradient, abs), greater)
        large = filter(gradient, lambda x: abs(x) >= cut)
        magnitude = reduce(map(large, abs), add) / size(large)
        signs = map(gradient, lambda x: where(abs(x) < cut, 1, where(x > 0, 2, 0)))
        return concat(magnitude=magnitude, signs=map(signs, uint_3))

    def decode(self, compressed):
        magnitude, signs = extract(compressed)
        return map(signs, lambda sign: (sign - 1) * magnitude)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    handle = gw.attach(model, ternary(share=0.3))
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
