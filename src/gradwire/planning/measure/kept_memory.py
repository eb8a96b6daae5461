"""Memory that an exchange keeps beside weights and gradients: counted after a few steps."""

from __future__ import annotations

import threading
from math import isqrt

import torch

from ...contract import Exchange, Member
from ...contract.scratch import passing_bytes
from ...contract.spec import TensorSpec
from ...exchange.local import drive
from ...runtime.step.figures import KINDS, kept_bytes

NUMEL, WORLD, STEPS = 2**16, 4, 6


def bytes_an_element(exchange: Exchange) -> dict[str, float]:
    """Bytes that a rank of 4 keeps for each element of one message, by kind, without its gradients.

    The message is a square matrix of 65,536 float32, normally distributed. What all messages share
    is counted with it, so of many messages it is less.
    """
    found: list[dict[str, float]] = []
    # Passing buffers are a thread's own.
    counting = threading.Thread(target=lambda: found.append(_counted(exchange)))
    counting.start()
    counting.join()
    return found[0]


def _counted(exchange: Exchange) -> dict[str, float]:
    side = isqrt(NUMEL)
    spec = TensorSpec("weight", NUMEL, shapes=((side, side),))
    members = [Member(rank, WORLD) for rank in range(WORLD)]
    states = [exchange.init(spec, WORLD) for _ in members]
    draw = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        grads = [torch.randn(NUMEL, generator=draw) for _ in members]
        texts = [
            exchange.synchronise(me, state, grad_N, grad_N)
            for me, state, grad_N in zip(members, states, grads, strict=True)
        ]
        states = drive(texts).results
    kept = kept_bytes(states[0], members[0])
    kept["passing"] = passing_bytes(own=True)
    return {kind: kept[kind] / NUMEL for kind in KINDS if kind != "messages"}
