"""Fashion-MNIST: 60,000 and 10,000 grey images of 28x28, ten kinds of clothing.

Source: Xiao, Rasul and Vollgraf 2017, under the MIT licence; the idx format of
    http://yann.lecun.com/exdb/mnist. Debian's package dataset-fashion-mnist holds the files.
"""

from __future__ import annotations

import gzip
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import InvalidSetting

FOLDER = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package puts its files."""
MEAN, DEVIATION = 0.2860, 0.3530
"""Of the training images' pixels, from 0 to 1."""


class Images(NamedTuple):
    """images_NCHW uint8 (N, 1, 28, 28), labels_N uint8 in [0, 10)."""

    images_NCHW: Tensor
    labels_N: Tensor


def missing(folder: Path = FOLDER) -> str | None:
    """What to do to have the images in ``folder``; None if they are there."""
    if (folder / "train-images-idx3-ubyte.gz").exists():
        return None
    return (
        f"Fashion-MNIST is not in {folder}; apt-get install dataset-fashion-mnist, or put the four "
        ".gz files of https://github.com/zalandoresearch/fashion-mnist there"
    )


@cache
def load(folder: Path = FOLDER) -> tuple[Images, Images]:
    """Training and test images. Raises ``InvalidSetting``, which says how to get them."""
    why = missing(folder)
    if why is not None:
        raise InvalidSetting(why)
    return _images(folder, "train"), _images(folder, "t10k")


def _images(folder: Path, part: str) -> Images:
    images_NP = _read_idx(folder / f"{part}-images-idx3-ubyte.gz", 16)
    labels_N = _read_idx(folder / f"{part}-labels-idx1-ubyte.gz", 8)
    return Images(images_NP.view(-1, 1, 28, 28), labels_N)


def _read_idx(path: Path, header_bytes: int) -> Tensor:
    """An idx file's content as flat uint8."""
    with gzip.open(path) as file:
        return torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)[header_bytes:]
