"""ResNet-18 for small images: the first convolution is 3x3 and nothing is pooled before
the end.

Source: He et al., CVPR 2016, section 4.2 and table 1 (18 layers), with the stem that
    small images get in section 4.2: DEFT's computer vision application.
Differences: the width of the first stage is a setting, 64 in the paper; the first
    convolution may have a stride, which takes a quarter of the computing; shortcuts are
    projections where the shape changes (option B).
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

BLOCKS_PER_STAGE = 2


class _Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    def __init__(self, num_in: int, num_out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(num_in, num_out, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(num_out)
        self.second = nn.Conv2d(num_out, num_out, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(num_out)
        self.shortcut = nn.Sequential()
        if stride != 1 or num_in != num_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(num_in, num_out, 1, stride, bias=False),
                nn.BatchNorm2d(num_out),
            )

    def forward(self, x_BCHW: Tensor) -> Tensor:
        hidden = functional.relu(self.first_norm(self.first(x_BCHW)))
        hidden = self.second_norm(self.second(hidden))
        return functional.relu(hidden + self.shortcut(x_BCHW))


class ResNet18(nn.Module):
    """Images (B, channels, H, W) to scores (B, classes).

    ``width`` is the first stage's number of channels: 64 makes 11.2 M parameters, 16
    700,000, 8 176,000.

    >>> import torch
    >>> ResNet18(width=8)(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        width: int = 64,
        channels: int = 1,
        classes: int = 10,
        stem_stride: int = 1,
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(channels, width, 3, stem_stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
        )
        blocks: list[nn.Module] = []
        num_in = width
        for stage in range(4):
            num_out = width << stage
            for place in range(BLOCKS_PER_STAGE):
                stride = 2 if stage > 0 and place == 0 else 1
                blocks.append(_Block(num_in, num_out, stride))
                num_in = num_out
        self.blocks = nn.Sequential(*blocks)
        self.scores = nn.Linear(num_in, classes)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        hidden_BCHW = self.blocks(self.stem(images_BCHW))
        scores: Tensor = self.scores(hidden_BCHW.mean(dim=(2, 3)))
        return scores
