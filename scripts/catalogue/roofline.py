"""The seconds of a model's layers, by the flops and bytes of each, counted on the meta
device.

Every operation of a forward pass (and of the loss) is seen by a dispatch mode and
charged to the layer entered last: a module with parameters of its own. So ReLU,
pooling, softmax, residual additions and the loss belong to the layer before them. An
operation takes

    max(flops / FLOP_RATE, bytes / BYTE_RATE) / efficiency

where each tensor operand is read once and each result is written once, and views are
free. Backward is taken as twice forward (two products of the same size for each
product). Kernel launches, reuse of caches between operations, the optimizer and input
pipelines are not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten

DEVICE = "Tesla V100 SXM2, float32"
FLOP_RATE = 15.7e12
"""The V100's peak of float32, NVIDIA Tesla V100 datasheet (2018): 15.7 TFLOP/s."""
BYTE_RATE = 900e9
"""The V100's bandwidth of HBM2, same datasheet: 900 GB/s."""
WINOGRAD = 2.25
"""Multiplications saved by F(2x2, 3x3) (Lavin and Gray 2016), which cuDNN uses for
convolutions of 3x3 and stride 1: without it VGG would have to run at 124 % of the peak
to reach its measured speed.
"""
BACKWARD = 2.0
"""The time of backward over that of forward. Measured on a V100 (cnn-benchmarks) it is
2.2 for VGG16, 2.3 for ResNet-50 and 2.6 for GoogleNet and ResNet-152. The difference
moves time from forward to backward and leaves the sum.
"""
_FREE = {aten._unsafe_view, aten.empty, aten.empty_like}


@dataclass
class LayerWork:
    """A layer's own tensors and the seconds of its forward pass at efficiency 1."""

    name: str
    tensors: list[tuple[str, tuple[int, ...]]]
    ideal_s: float = 0.0


@dataclass
class _Ledger:
    layers: list[LayerWork] = field(default_factory=list)
    early_s: float = 0.0
    """The seconds of operations before the first layer."""

    def charge(self, seconds: float) -> None:
        if self.layers:
            self.layers[-1].ideal_s += seconds
        else:
            self.early_s += seconds


def _num_bytes(values: object) -> int:
    return sum(
        leaf.numel() * leaf.element_size()
        for leaf in tree_leaves(values)
        if isinstance(leaf, Tensor)
    )


def _is_winograd(args: tuple[Any, ...]) -> bool:
    """Whether a convolution can go by Winograd's algorithm.

    The arguments are those of aten.convolution: x, weight, bias, stride, padding,
    dilation, _, _, groups.
    """
    kernel = args[1].shape[2:]
    stride = args[3]
    dilation = args[5]
    groups = args[8]
    return tuple(kernel) == (3, 3) and {*stride, *dilation, groups} == {1}


def operation_s(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: object
) -> float:
    """Seconds of one operation at efficiency 1."""
    packet = func.overloadpacket
    aliases = [value.alias_info for value in func._schema.returns]
    if packet in _FREE or any(
        alias is not None and not alias.is_write for alias in aliases
    ):
        return 0.0
    flops = 0.0
    if packet in flop_registry:
        flops = float(flop_registry[packet](*args, **kwargs, out_val=out))
    if packet is aten.convolution and _is_winograd(args):
        flops /= WINOGRAD
    # A look-up reads the rows it returns, not the table.
    read = (
        _num_bytes((args[1], out))
        if packet is aten.embedding
        else _num_bytes((args, kwargs))
    )
    return max(flops / FLOP_RATE, (read + _num_bytes(out)) / BYTE_RATE)


class _Counter(TorchDispatchMode):
    def __init__(self, ledger: _Ledger) -> None:
        super().__init__()
        self.ledger = ledger

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.ledger.charge(operation_s(func, args, kwargs, out))
        return out


def _watch(model: nn.Module, ledger: _Ledger) -> None:
    """Opens a layer when a module starts that owns parameters nobody before it
    owned.
    """
    name_of = {parameter: name for name, parameter in model.named_parameters()}

    def open_layer(name: str) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, _: Any) -> None:
            own = [p for p in module.parameters(recurse=False) if p in name_of]
            if own:
                tensors = [(name_of.pop(p), tuple(p.shape)) for p in own]
                ledger.layers.append(LayerWork(name, tensors))

        return hook

    for name, module in model.named_modules():
        module.register_forward_pre_hook(open_layer(name))


def layers_of(model: nn.Module, inputs: Tensor) -> list[LayerWork]:
    """The layers in the order of their forward pass, in training mode, loss
    included.
    """
    ledger = _Ledger()
    _watch(model, ledger)
    with torch.no_grad(), _Counter(ledger):
        scores = model.train()(inputs)
        targets = torch.zeros(
            scores.shape[:-1], dtype=torch.int64, device=scores.device
        )
        functional.cross_entropy(scores.flatten(0, -2), targets.flatten())
    ledger.layers[0].ideal_s += ledger.early_s
    reached = {name for layer in ledger.layers for name, _ in layer.tensors}
    missed = {name for name, _ in model.named_parameters()} - reached
    if missed:
        raise RuntimeError(f"the forward pass never reaches {sorted(missed)}")
    return _timed(ledger.layers)


def _timed(layers: list[LayerWork]) -> list[LayerWork]:
    """The layers that take time; one that takes none, as it only holds others, is one
    with the next.
    """
    found: list[LayerWork] = []
    for layer in reversed(layers):
        if layer.ideal_s or not found:
            found.append(layer)
        else:
            after = found.pop()
            found.append(
                LayerWork(layer.name, layer.tensors + after.tensors, after.ideal_s)
            )
    return found[::-1]


def ideal_iteration_s(layers: list[LayerWork]) -> float:
    """The seconds of forward and backward of all layers at efficiency 1."""
    return (1 + BACKWARD) * sum(layer.ideal_s for layer in layers)
