"""Generated images: ten smooth random patterns, shifted, faded and under noise.

They stand in for photographs where a machine has none: classes overlap, so that no
model tells all of them apart, and neighbouring pixels are alike, so that a convolution
pays.
"""

import torch
from torch import Tensor
from torch.nn import functional

SIDE = 28
CLASSES = 10
"""Pixels of an image's side; kinds of image."""
_COARSE = 7
_SHIFT = 4
"""Random numbers along a pattern's side; pixels by which it moves at most."""
_NOISE = 3.0
"""The deviation of a pixel's noise, where a pattern's is 1."""


def draw(num: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images (num, 1, SIDE, SIDE) float32 and their classes (num,) int64.

    The patterns are the same in all draws.

    >>> images, classes = draw(3, torch.Generator().manual_seed(0))
    >>> images.shape, classes.shape
    (torch.Size([3, 1, 28, 28]), torch.Size([3]))
    """
    classes_B = torch.randint(CLASSES, (num,), generator=random)
    shifts_B2 = torch.randint(2 * _SHIFT + 1, (num, 2), generator=random)
    strengths_B = 0.25 + torch.rand(num, generator=random)
    side_S = torch.arange(SIDE)
    rows_BS1 = (shifts_B2[:, :1] + side_S).unsqueeze(2)
    columns_B1S = (shifts_B2[:, 1:] + side_S).unsqueeze(1)
    classes_B11 = classes_B.view(-1, 1, 1)
    patterns_BSS = _patterns()[classes_B11, rows_BS1, columns_B1S]
    noise_BSS = torch.randn(num, SIDE, SIDE, generator=random)
    strengths_B11 = strengths_B.view(-1, 1, 1)
    images_BSS = strengths_B11 * patterns_BSS + _NOISE * noise_BSS
    return images_BSS.unsqueeze(1), classes_B


def _patterns() -> Tensor:
    """One pattern a class, larger than an image by all that it may move."""
    random = torch.Generator().manual_seed(7)
    coarse_C1SS = torch.randn(CLASSES, 1, _COARSE, _COARSE, generator=random)
    size = (SIDE + 2 * _SHIFT,) * 2
    smooth_CSS = functional.interpolate(coarse_C1SS, size, mode="bicubic").squeeze(1)
    return smooth_CSS / smooth_CSS.std((1, 2), keepdim=True)
