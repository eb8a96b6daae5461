"""GoogleNet (Inception v1) and Inception-v3, without their auxiliary classifiers.

Images are (batch, 3, height, width) float32; what comes out is (batch, num_classes).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

Kernel = int | tuple[int, int]
Conv = tuple[int, Kernel, int, Kernel]
"""Channels out, kernel, stride, padding."""

GOOGLENET_BLOCKS = (
    (("3a", 64, 96, 128, 16, 32, 32), ("3b", 128, 128, 192, 32, 96, 64)),
    (
        ("4a", 192, 96, 208, 16, 48, 64),
        ("4b", 160, 112, 224, 24, 64, 64),
        ("4c", 128, 128, 256, 24, 64, 64),
        ("4d", 112, 144, 288, 32, 64, 64),
        ("4e", 256, 160, 320, 32, 128, 128),
    ),
    (("5a", 256, 160, 320, 32, 128, 128), ("5b", 384, 192, 384, 48, 128, 128)),
)
"""Table 1 of the paper, columns #1x1 to pool proj; a row of blocks per resolution."""


class ConvUnit(nn.Module):
    """Convolution without bias, batch norm, ReLU."""

    def __init__(
        self,
        channels: int,
        width: int,
        kernel: Kernel,
        stride: int = 1,
        padding: Kernel = 0,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, width, kernel, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(width, eps=0.001)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.bn(self.conv(x)))


class Fork(nn.Module):
    """A 1x3 and a 3x1 convolution of the same input, side by side."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.wide = ConvUnit(channels, width, (1, 3), padding=(0, 1))
        self.tall = ConvUnit(channels, width, (3, 1), padding=(1, 0))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.wide(x), self.tall(x)], 1)


def _chain(channels: int, convs: tuple[Conv, ...], fork: int = 0) -> nn.Sequential:
    units: list[nn.Module] = []
    for width, kernel, stride, padding in convs:
        units.append(ConvUnit(channels, width, kernel, stride, padding))
        channels = width
    if fork:
        units.append(Fork(channels, fork))
    return nn.Sequential(*units)


class Mixed(nn.Module):
    """Branches of the same input, in the given order, joined along the channels."""

    def __init__(self, branches: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.names = tuple(branches)
        for name, branch in branches.items():
            self.add_module(name, branch)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.get_submodule(name)(x) for name in self.names], 1)


def _googlenet_block(channels: int, widths: tuple[int, ...]) -> Mixed:
    single, reduce3, width3, reduce5, width5, pool = widths
    return Mixed(
        {
            "branch1": _chain(channels, ((single, 1, 1, 0),)),
            "branch2": _chain(channels, ((reduce3, 1, 1, 0), (width3, 3, 1, 1))),
            "branch3": _chain(channels, ((reduce5, 1, 1, 0), (width5, 3, 1, 1))),
            "branch4": nn.Sequential(
                nn.MaxPool2d(3, 1, 1, ceil_mode=True), ConvUnit(channels, pool, 1)
            ),
        }
    )


class GoogleNet(nn.Module):
    """Szegedy et al. 2015, table 1, as torchvision trains it.

    Differences from the paper: batch norm in place of biases, and 3x3 kernels in the
    "5x5" branches (6,624,904 parameters; the paper's kernels and biases give
    6,998,552).
    """

    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__()
        layers: dict[str, nn.Module] = {
            "conv1": ConvUnit(3, 64, 7, 2, 3),
            "maxpool1": nn.MaxPool2d(3, 2, ceil_mode=True),
            "conv2": ConvUnit(64, 64, 1),
            "conv3": ConvUnit(64, 192, 3, 1, 1),
            "maxpool2": nn.MaxPool2d(3, 2, ceil_mode=True),
        }
        channels = 192
        for place, blocks in enumerate(GOOGLENET_BLOCKS):
            if place:
                layers[f"maxpool{place + 2}"] = nn.MaxPool2d(3, 2, ceil_mode=True)
            for name, *widths in blocks:
                layers[f"inception{name}"] = _googlenet_block(channels, tuple(widths))
                channels = widths[0] + widths[2] + widths[4] + widths[5]
        layers |= {"avgpool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten()}
        layers |= {"dropout": nn.Dropout(0.2), "fc": nn.Linear(channels, num_classes)}
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, images: Tensor) -> Tensor:
        for layer in self.children():
            images = layer(images)
        return images


def _pool_branch(channels: int, width: int) -> nn.Sequential:
    return nn.Sequential(nn.AvgPool2d(3, 1, 1), ConvUnit(channels, width, 1))


def _square(channels: int, pool: int) -> Mixed:
    """Figure 5 of the paper, at 35x35."""
    twice = ((64, 1, 1, 0), (96, 3, 1, 1), (96, 3, 1, 1))
    return Mixed(
        {
            "branch1x1": _chain(channels, ((64, 1, 1, 0),)),
            "branch5x5": _chain(channels, ((48, 1, 1, 0), (64, 5, 1, 2))),
            "branch3x3dbl": _chain(channels, twice),
            "branch_pool": _pool_branch(channels, pool),
        }
    )


def _factored(channels: int, width: int) -> Mixed:
    """Figure 6, at 17x17: 7x7 kernels as 1x7 after 7x1."""

    def wide(out: int) -> Conv:
        return (out, (1, 7), 1, (0, 3))

    def tall(out: int) -> Conv:
        return (out, (7, 1), 1, (3, 0))

    first = (width, 1, 1, 0)
    twice = (first, tall(width), wide(width), tall(width), wide(192))
    return Mixed(
        {
            "branch1x1": _chain(channels, ((192, 1, 1, 0),)),
            "branch7x7": _chain(channels, (first, wide(width), tall(192))),
            "branch7x7dbl": _chain(channels, twice),
            "branch_pool": _pool_branch(channels, 192),
        }
    )


def _expanded(channels: int) -> Mixed:
    """Figure 7, at 8x8."""
    return Mixed(
        {
            "branch1x1": _chain(channels, ((320, 1, 1, 0),)),
            "branch3x3": _chain(channels, ((384, 1, 1, 0),), fork=384),
            "branch3x3dbl": _chain(
                channels, ((448, 1, 1, 0), (384, 3, 1, 1)), fork=384
            ),
            "branch_pool": _pool_branch(channels, 192),
        }
    )


def _shrink(channels: int, branches: Mapping[str, tuple[Conv, ...]]) -> Mixed:
    """Figure 10: convolutions of stride 2 beside a max pool."""
    chains: dict[str, nn.Module] = {
        n: _chain(channels, convs) for n, convs in branches.items()
    }
    return Mixed(chains | {"branch_pool": nn.MaxPool2d(3, 2)})


class InceptionV3(nn.Module):
    """Szegedy et al. 2016, table 1, at 299x299, with torchvision's widths."""

    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__()
        to17 = {
            "branch3x3": ((384, 3, 2, 0),),
            "branch3x3dbl": ((64, 1, 1, 0), (96, 3, 1, 1), (96, 3, 2, 0)),
        }
        seven = (
            (192, 1, 1, 0),
            (192, (1, 7), 1, (0, 3)),
            (192, (7, 1), 1, (3, 0)),
            (192, 3, 2, 0),
        )
        to8 = {"branch3x3": ((192, 1, 1, 0), (320, 3, 2, 0)), "branch7x7x3": seven}
        layers: dict[str, nn.Module] = {
            "Conv2d_1a_3x3": ConvUnit(3, 32, 3, 2),
            "Conv2d_2a_3x3": ConvUnit(32, 32, 3),
            "Conv2d_2b_3x3": ConvUnit(32, 64, 3, 1, 1),
            "maxpool1": nn.MaxPool2d(3, 2),
            "Conv2d_3b_1x1": ConvUnit(64, 80, 1),
            "Conv2d_4a_3x3": ConvUnit(80, 192, 3),
            "maxpool2": nn.MaxPool2d(3, 2),
            "Mixed_5b": _square(192, 32),
            "Mixed_5c": _square(256, 64),
            "Mixed_5d": _square(288, 64),
            "Mixed_6a": _shrink(288, to17),
            "Mixed_6b": _factored(768, 128),
            "Mixed_6c": _factored(768, 160),
            "Mixed_6d": _factored(768, 160),
            "Mixed_6e": _factored(768, 192),
            "Mixed_7a": _shrink(768, to8),
            "Mixed_7b": _expanded(1280),
            "Mixed_7c": _expanded(2048),
            "avgpool": nn.AdaptiveAvgPool2d(1),
            "dropout": nn.Dropout(),
            "flatten": nn.Flatten(),
            "fc": nn.Linear(2048, num_classes),
        }
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, images: Tensor) -> Tensor:
        for layer in self.children():
            images = layer(images)
        return images
