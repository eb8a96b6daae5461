"""VGG, ResNet and MobileNet-v2 as plain modules, from the tables of their papers.

Parameter names follow torchvision, so that a profile fits the model most users train.
Images are (batch, 3, height, width) float32; what comes out is (batch, num_classes).
"""

from __future__ import annotations

from torch import Tensor, nn

VGG_STAGES = {16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
RESNET_STAGES = {50: (3, 4, 6, 3), 152: (3, 8, 36, 3)}
MOBILENET_STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
"""Table 2 of the paper: expansion, channels, number of blocks, stride of the first."""


class VGG(nn.Module):
    """Configurations D (16) and E (19) of Simonyan and Zisserman 2015, table 1; no
    batch norm.
    """

    def __init__(self, depth: int, num_classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for num_convs, width in zip(
            VGG_STAGES[depth], (64, 128, 256, 512, 512), strict=True
        ):
            for _ in range(num_convs):
                layers += [
                    nn.Conv2d(channels, width, 3, padding=1),
                    nn.ReLU(inplace=True),
                ]
                channels = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(512 * 7 * 7, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(4096, num_classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images).flatten(1))


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 with a shortcut; the stride sits in the 3x3 (version 1.5, as
    torchvision).
    """

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or channels != 4 * width:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels, 4 * width, 1, stride, bias=False),
                nn.BatchNorm2d(4 * width),
            )

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        return self.relu(out.add_(self.downsample(x)))


class ResNet(nn.Module):
    """He et al. 2016, table 1, with bottleneck blocks."""

    def __init__(self, depth: int, num_classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        channels = 64
        for place, num_blocks in enumerate(RESNET_STAGES[depth]):
            width = 64 << place
            blocks = []
            for block in range(num_blocks):
                blocks.append(
                    Bottleneck(channels, width, 2 if place and not block else 1)
                )
                channels = 4 * width
            self.add_module(f"layer{place + 1}", nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        out = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        for place in range(1, 5):
            out = self.get_submodule(f"layer{place}")(out)
        return self.fc(self.avgpool(out).flatten(1))


def _conv_bn(
    channels: int, width: int, kernel: int, stride: int, groups: int
) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(
            channels, width, kernel, stride, kernel // 2, groups=groups, bias=False
        ),
        nn.BatchNorm2d(width),
        nn.ReLU6(inplace=True),
    )


class InvertedResidual(nn.Module):
    """Expand, filter each channel by itself, project without a nonlinearity."""

    def __init__(self, channels: int, width: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = channels * expansion
        layers: list[nn.Module] = []
        if expansion != 1:
            layers.append(_conv_bn(channels, hidden, 1, 1, 1))
        layers.append(_conv_bn(hidden, hidden, 3, stride, hidden))
        layers += [nn.Conv2d(hidden, width, 1, bias=False), nn.BatchNorm2d(width)]
        self.conv = nn.Sequential(*layers)
        self.has_shortcut = stride == 1 and channels == width

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.has_shortcut else self.conv(x)


class MobileNetV2(nn.Module):
    """Sandler et al. 2018, table 2, width multiplier 1."""

    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = [_conv_bn(3, 32, 3, 2, 1)]
        channels = 32
        for expansion, width, num_blocks, first_stride in MOBILENET_STAGES:
            for block in range(num_blocks):
                stride = 1 if block else first_stride
                layers.append(InvertedResidual(channels, width, stride, expansion))
                channels = width
        layers.append(_conv_bn(channels, 1280, 1, 1, 1))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, num_classes))

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images).mean((2, 3)))
