"""Fashion-MNIST: 60,000 and 10,000 grey images of 28x28, ten kinds of clothing.

Source: Xiao, Rasul and Vollgraf 2017, under the MIT licence; the idx format of
    http://yann.lecun.com/exdb/mnist. Debian's package dataset-fashion-mnist holds the
    files.
"""

import gzip
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.errors import InvalidSetting

from .places import folder_of, looked_in

NAME = "fashion-mnist"
"""The name of the folder in Debian's package."""
_FILES = tuple(
    f"{part}-{what}-ubyte.gz"
    for part in ("train", "t10k")
    for what in ("images-idx3", "labels-idx1")
)


class Images(NamedTuple):
    """Labelled images: images_NCHW uint8 (N, 1, 28, 28), labels_N uint8 in [0, 10)."""

    images_NCHW: Tensor
    labels_N: Tensor


def missing(folder: Path | None = None) -> str | None:
    """A text on how to get the images if they are not in ``folder``, or anywhere; else
    None.
    """
    if folder_of(NAME, _FILES, folder) is not None:
        return None
    return (
        f"Fashion-MNIST is not in {looked_in(NAME, folder)}; apt-get install "
        "dataset-fashion-mnist, or put the four .gz files of "
        "https://github.com/zalandoresearch/fashion-mnist there"
    )


def load(folder: Path | None = None) -> tuple[Images, Images]:
    """Training and test images of ``folder``, or of the first place that has them.

    Raises ``InvalidSetting``, which says how to get them.
    """
    path = folder_of(NAME, _FILES, folder)
    if path is None:
        raise InvalidSetting(str(missing(folder)))
    return _read(path)


@cache
def _read(folder: Path) -> tuple[Images, Images]:
    return _images(folder, "train"), _images(folder, "t10k")


def _images(folder: Path, part: str) -> Images:
    images_NP = _read_idx(folder / f"{part}-images-idx3-ubyte.gz", 16)
    labels_N = _read_idx(folder / f"{part}-labels-idx1-ubyte.gz", 8)
    return Images(images_NP.view(-1, 1, 28, 28), labels_N)


def _read_idx(path: Path, header_bytes: int) -> Tensor:
    """An idx file's content as flat uint8."""
    with gzip.open(path) as file:
        return torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)[
            header_bytes:
        ]
