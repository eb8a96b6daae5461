"""Times ``demo`` beside bloc97's DeMo on one matrix: transform and choice, and the way back.

``python -m gradwire_bench.runs.demo_peer FOLDER`` with the folder of the peer's ``demo.py`` (it
needs einops). Both keep 32 of 4096 coefficients, by one thread, in turn. The peer's payload stays
in two tensors; gradwire's is packed for the wire and unpacked, which is counted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from statistics import median, quantiles
from time import perf_counter

import torch
from torch import Tensor

from gradwire.compress.demo import demo
from gradwire.contract.spec import spec_of

ROUNDS = 15
EXTENTS = (1024, 2048)
SIDE, KEEP = 64, 32


def measure(folder: str) -> dict[str, list[float]]:
    """Seconds of each round by name, ours first."""
    sys.path.append(folder)
    import demo as peer  # type: ignore[import-not-found]

    torch.set_num_threads(1)
    grad = torch.randn(EXTENTS, generator=torch.Generator().manual_seed(0))
    calls = {"gradwire": _ours(grad), "peer": _of_peer(peer, grad)}
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            start_s = perf_counter()
            call()
            found[name].append(perf_counter() - start_s)
    return found


def _ours(grad: Tensor) -> Callable[[], object]:
    codec, grad_N, out_N = demo(side=SIDE, keep=KEEP), grad.view(-1), torch.empty(grad.numel())
    state = codec.init(spec_of(grad_N))

    def call() -> None:
        payload, _ = codec.encode(state, grad_N)
        codec.decode(payload, out_N)

    return call


def _of_peer(peer: object, grad: Tensor) -> Callable[[], object]:
    param = torch.nn.Parameter(grad)
    transform = peer.TransformDCT([{"params": [param]}], SIDE)  # type: ignore[attr-defined]
    choice = peer.CompressDCT()  # type: ignore[attr-defined]

    def call() -> object:
        places, values, extents, total = choice.compress(transform.encode(grad), KEEP)
        back = choice.decompress(param, places, values, extents, total)
        return transform.decode(back)

    return call


def main() -> None:
    """Prints both sides' medians with their 20th and 80th percentile, and their ratio."""
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m gradwire_bench.runs.demo_peer FOLDER")
    found = measure(sys.argv[1])
    for name, seconds in found.items():
        low, *_, high = quantiles(seconds, n=5)
        print(f"{name}: {median(seconds) * 1e3:.1f} ms ({low * 1e3:.1f} to {high * 1e3:.1f})")
    print(f"{median(found['peer']) / median(found['gradwire']):.1f} x")


if __name__ == "__main__":
    main()
