"""The models of the catalogue, their batches, and the published speeds they are
calibrated with.

One efficiency a family: the throughput model is made to give the published time of one
model of the family, at the batch it was published for, and the others follow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from scripts.catalogue import convnets, inception, language, translation, ugatit

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Entry:
    """One model; ``inputs`` is the shape of one sample (of token ids where it has one
    extent).
    """

    build: Callable[[], nn.Module]
    inputs: Shape
    batch_size: int
    batch_source: str
    family: str

    def sample(self, batch_size: int) -> Tensor:
        """A batch on the meta device."""
        dtype = torch.float32 if len(self.inputs) == 3 else torch.int64
        return torch.empty((batch_size, *self.inputs), dtype=dtype, device="meta")


@dataclass(frozen=True)
class Published:
    """Seconds of one training iteration on one V100 in float32, as published."""

    model: str
    batch_size: int
    iteration_s: float
    source: str


_CNN_BENCHMARKS = (
    "github.com/dmikushin/cnn-benchmarks (2019), Tesla V100, Torch7, cuDNN 7.0.04, "
    "16 images"
)
_MXNET = (
    "MXNet 1.2 performance page (mxnet.apache.org, FAQ), V100 of EC2 p3.2xlarge, "
    "float32"
)
_NVIDIA_BERT = (
    "NVIDIA DeepLearningExamples, PyTorch BERT, 19.07 container, pre-training on one "
    "V100 32G of a DGX-1, float32, 32 sequences of 128 tokens: 40.32 sequences/s"
)
_TITAN_RATIO = (
    "no figure for a V100 in float32 was found: ResNet-50 at 32 images (298.51 "
    "images/s, " + _MXNET
) + (
    ") times 39.63 ms / 64.87 ms, MobileNet-v2 over ResNet-50 at 12 images on a TITAN "
    "RTX (github.com/ryujaehun/pytorch-gpu-benchmark)"
)

FAMILIES = {
    "VGG": Published("vgg16", 16, 0.07645, _CNN_BENCHMARKS + ": 76.45 ms"),
    "ResNet": Published("resnet50", 128, 128 / 363.69, _MXNET + ": 363.69 images/s"),
    "Inception": Published(
        "inception_v3", 64, 64 / 247.43, _MXNET + ": 247.43 images/s"
    ),
    "MobileNet": Published(
        "mobilenet_v2", 32, 32 / 298.51 * 39.63 / 64.87, _TITAN_RATIO
    ),
    "transformer": Published("bert_large", 32, 32 / 40.32, _NVIDIA_BERT),
}

CHECKS = {
    "vgg19": Published("vgg19", 16, 0.08797, _CNN_BENCHMARKS),
    "googlenet": Published("googlenet", 16, 0.02831, _CNN_BENCHMARKS),
    "resnet152": Published(
        "resnet152",
        16,
        0.1365,
        "github.com/u39kun/deep-learning-benchmark, V100, PyTorch 0.3",
    ),
}
"""Published speeds that nothing is fitted to; ``make_catalogue`` prints them beside the
model's.
"""

_IMAGE = (3, 224, 224)
_USBYTE_READ = (
    "US-Byte table 3, whose first digit is cut off in our copy (?{}): read as {}, "
    "assuming the order of table 4; the shape of a sample is chosen here"
)
_OURS = "chosen here"
_PAIR = (3, ugatit.SIDE, ugatit.SIDE)
_UGATIT_BATCH = (
    "one pair a step, in which a generator makes 4 images and a discriminator "
    "judges 3, taken as 4"
)

MODELS = {
    "googlenet": Entry(
        inception.GoogleNet, _IMAGE, 128, _USBYTE_READ.format(28, 128), "Inception"
    ),
    "resnet50": Entry(
        lambda: convnets.ResNet(50), _IMAGE, 128, _USBYTE_READ.format(28, 128), "ResNet"
    ),
    "resnet152": Entry(lambda: convnets.ResNet(152), _IMAGE, 32, _OURS, "ResNet"),
    "vgg16": Entry(
        lambda: convnets.VGG(16), _IMAGE, 128, _USBYTE_READ.format(28, 128), "VGG"
    ),
    "vgg19": Entry(lambda: convnets.VGG(19), _IMAGE, 32, _OURS, "VGG"),
    "mobilenet_v2": Entry(
        convnets.MobileNetV2, _IMAGE, 32, _USBYTE_READ.format(2, 32), "MobileNet"
    ),
    "inception_v3": Entry(
        inception.InceptionV3,
        (3, 299, 299),
        64,
        _USBYTE_READ.format(4, 64),
        "Inception",
    ),
    "bert_base": Entry(
        language.bert_base, (128,), 64, _USBYTE_READ.format(4, 64), "transformer"
    ),
    "bert_large": Entry(
        language.bert_large, (128,), 32, "as in the calibration", "transformer"
    ),
    "vit_large": Entry(language.vit_large, _IMAGE, 32, _OURS, "transformer"),
    "gpt2": Entry(language.gpt2, (512,), 8, _OURS, "transformer"),
    "gpt2_large": Entry(language.gpt2_large, (512,), 8, _OURS, "transformer"),
    "gpt2_xl": Entry(language.gpt2_xl, (512,), 4, _OURS, "transformer"),
    "bloom_3b": Entry(language.bloom_3b, (512,), 2, _OURS, "transformer"),
    "lstm": Entry(language.LSTM, (35,), 20, _OURS, "transformer"),
    "transformer": Entry(translation.Transformer, (64,), 32, _OURS, "transformer"),
    "ugatit": Entry(ugatit.UGATIT, _PAIR, 4, _UGATIT_BATCH, "ResNet"),
    "ugatit_light": Entry(
        lambda: ugatit.UGATIT(is_light=True), _PAIR, 4, _UGATIT_BATCH, "ResNet"
    ),
}
