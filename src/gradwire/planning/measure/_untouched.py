"""untouched: runs steps of somebody's model and leaves everything about it as it was."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Gives back gradients, buffers, training modes and random numbers at the end of the block.

    Gradients are set aside at its beginning, as the same tensors. Parameters are not copied:
    nothing in the block may change them (see ``versions``).
    """
    grads = [(parameter, parameter.grad) for parameter in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, buffer, None if buffer is None else buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    for parameter, _ in grads:
        parameter.grad = None
    try:
        with _same_random_numbers():
            yield
    finally:
        for parameter, grad in grads:
            parameter.grad = grad
        for module, mode in modes:
            module.training = mode
        for module, name, buffer, content in buffers:
            module._buffers[name] = buffer
            if buffer is not None and content is not None:
                with torch.no_grad():
                    buffer.copy_(content)


def versions(model: nn.Module) -> dict[str, int]:
    """A number a parameter that grows whenever its values are written in place."""
    return {name: parameter._version for name, parameter in model.named_parameters()}


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """After the block, code draws the random numbers that it would have drawn without the block."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    on_gpu = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if on_gpu:
            torch.cuda.set_rng_state_all(on_gpu)
