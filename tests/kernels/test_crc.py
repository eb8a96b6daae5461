"""CRC-32: the compiled kernel gives zlib's bits."""

from __future__ import annotations

import zlib

import torch

from gradwire.kernels.compiler import reference_only
from gradwire.kernels.crc import crc32
from tests.each import each


@each("numel", [0, 1, 15, 63, 64, 65, 79, 80, 127, 128, 143, 1000, 100_003])
@each("start", [0, 1, 5])
def test_the_bits_are_those_of_zlib(numel: int, start: int) -> None:
    bytes_B = torch.randint(0, 256, (start + numel,), dtype=torch.uint8)[start:]
    whole = bytes_B.numpy().tobytes()
    assert crc32(bytes_B) == zlib.crc32(whole)
    assert crc32(bytes_B, 12345) == zlib.crc32(whole, 12345)
    with reference_only():
        assert crc32(bytes_B) == zlib.crc32(whole)
