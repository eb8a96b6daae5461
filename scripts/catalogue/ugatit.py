"""U-GAT-IT: two generators and four discriminators, whose gradients travel together.

Source: Kim et al. 2020, tables of the generator's and the discriminator's layers in its
appendix; bias and instance norms as in the version for PyTorch that its authors name.
Parameters are those of table 6 of HiPress: 2558.75 MB in 148 gradients, 511.25 MB in
its light form. Images are (batch, 3, 256, 256) float32.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

SIDE = 256
WIDTH = 64


class Attention(nn.Module):
    """Two class activation maps, of the mean and of the largest of each channel, put
    into one.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gap_fc = nn.Linear(width, 1, bias=False)
        self.gmp_fc = nn.Linear(width, 1, bias=False)
        self.conv1x1 = nn.Conv2d(2 * width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        maps = []
        for fc, pool in (
            (self.gap_fc, functional.adaptive_avg_pool2d),
            (self.gmp_fc, functional.adaptive_max_pool2d),
        ):
            fc(pool(x, 1).flatten(1))  # the class, which a loss of its own looks at
            maps.append(x * fc.weight[:, :, None, None])
        return functional.relu(self.conv1x1(torch.cat(maps, 1)))


class Residual(nn.Module):
    """Two convolutions with instance norms that have no parameters, and a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.relu(functional.instance_norm(self.conv1(x)))
        return x + functional.instance_norm(self.conv2(inner))


class Mixed(nn.Module):
    """A share rho of an instance norm and the rest of a layer norm; ``is_own``: with a
    scale and a shift of its own, else with those that are given.
    """

    def __init__(self, width: int, *, is_own: bool) -> None:
        super().__init__()
        self.rho = nn.Parameter(torch.empty(1, width, 1, 1))
        self.is_own = is_own
        if is_own:
            self.gamma = nn.Parameter(torch.empty(1, width, 1, 1))
            self.beta = nn.Parameter(torch.empty(1, width, 1, 1))

    def forward(
        self, x: Tensor, gamma_BC: Tensor | None = None, beta_BC: Tensor | None = None
    ) -> Tensor:
        layer = functional.layer_norm(x, x.shape[1:])
        out = self.rho * functional.instance_norm(x) + (1 - self.rho) * layer
        if self.is_own:
            return out * self.gamma + self.beta
        assert gamma_BC is not None
        assert beta_BC is not None
        return out * gamma_BC[:, :, None, None] + beta_BC[:, :, None, None]


class Adaptive(nn.Module):
    """A residual block whose two norms take their scale and shift from the
    attention.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = Mixed(width, is_own=False)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = Mixed(width, is_own=False)

    def forward(self, x: Tensor, gamma_BC: Tensor, beta_BC: Tensor) -> Tensor:
        inner = functional.relu(self.norm1(self.conv1(x), gamma_BC, beta_BC))
        return x + self.norm2(self.conv2(inner), gamma_BC, beta_BC)


class Generator(nn.Module):
    """An encoder, an attention and a decoder; ``is_light`` averages an image's places
    before the dense layers, which else have a weight for each of them.
    """

    def __init__(self, *, is_light: bool) -> None:
        super().__init__()
        inner = 4 * WIDTH
        self.is_light = is_light
        self.down = nn.ModuleList(
            [
                nn.Conv2d(3, WIDTH, 7, padding=3, bias=False),
                nn.Conv2d(WIDTH, 2 * WIDTH, 3, 2, 1, bias=False),
                nn.Conv2d(2 * WIDTH, inner, 3, 2, 1, bias=False),
            ]
        )
        self.blocks = nn.Sequential(*(Residual(inner) for _ in range(4)))
        self.attention = Attention(inner)
        places = 1 if is_light else (SIDE // 4) ** 2
        self.dense = nn.Sequential(
            nn.Linear(places * inner, inner, bias=False),
            nn.ReLU(),
            nn.Linear(inner, inner, bias=False),
            nn.ReLU(),
        )
        self.gamma = nn.Linear(inner, inner, bias=False)
        self.beta = nn.Linear(inner, inner, bias=False)
        self.adaptive = nn.ModuleList(Adaptive(inner) for _ in range(4))
        self.up = nn.ModuleList(
            nn.Sequential(
                nn.Upsample(scale_factor=2),
                nn.Conv2d(width, width // 2, 3, padding=1, bias=False),
                Mixed(width // 2, is_own=True),
                nn.ReLU(),
            )
            for width in (inner, inner // 2)
        )
        self.last = nn.Conv2d(WIDTH, 3, 7, padding=3, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        for conv in self.down:
            images = functional.relu(functional.instance_norm(conv(images)))
        x = self.attention(self.blocks(images))
        pooled = functional.adaptive_avg_pool2d(x, 1) if self.is_light else x
        style_BC = self.dense(pooled.flatten(1))
        gamma_BC = self.gamma(style_BC)
        beta_BC = self.beta(style_BC)
        for block in self.adaptive:
            x = block(x, gamma_BC, beta_BC)
        for block in self.up:
            x = block(x)
        return torch.tanh(self.last(x))


class Discriminator(nn.Module):
    """Convolutions of 4x4 that halve the image, but for the last, and an attention."""

    def __init__(self, num_convs: int) -> None:
        super().__init__()
        widths = [3, *(WIDTH << place for place in range(num_convs))]
        self.convs = nn.ModuleList(
            nn.Conv2d(one, other, 4, 1 if place == num_convs - 1 else 2, 1)
            for place, (one, other) in enumerate(pairwise(widths))
        )
        self.attention = Attention(widths[-1])
        self.last = nn.Conv2d(widths[-1], 1, 4, padding=1, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        for conv in self.convs:
            images = functional.leaky_relu(conv(images), 0.2)
        return self.last(self.attention(images))


class UGATIT(nn.Module):
    """One pass through every network: a generator a direction, and a global and a local
    discriminator for what each of them makes."""

    def __init__(self, *, is_light: bool = False) -> None:
        super().__init__()
        self.generators = nn.ModuleList(Generator(is_light=is_light) for _ in range(2))
        self.discriminators = nn.ModuleList(
            nn.ModuleList((Discriminator(6), Discriminator(4))) for _ in range(2)
        )

    def forward(self, images: Tensor) -> Tensor:
        scores = []
        for generator, judges in zip(self.generators, self.discriminators, strict=True):
            made = generator(images)
            scores += [judge(made).flatten(1) for judge in judges]
        return torch.cat(scores, 1)
