"""``bench kernel``: every compressor has rows, and they are what they say."""

from __future__ import annotations

import pytest
import torch

from gradwire.contract.registry import load, names
from gradwire_bench.micro import kernel


@pytest.mark.smoke
def test_every_compressor_has_rows_and_names_are_the_registrys() -> None:
    codecs = kernel.shipped()
    assert {type(codec).__name__ for codec in codecs} <= set(names("compress"))
    rows = kernel.measure(70_000, 1, 4, [load("compress", n)() for n in ("onebit", "topk")])
    parts = ("encode", "encode-plain", "decode", "decode-plain")
    wanted = [f"{name}/{part}" for name in ("onebit", "topk") for part in parts]
    assert [row["name"] for row in rows] == ["copy", *wanted]
    assert all(float(str(row["kernel_s"])) > 0 for row in rows)
    assert all("speedup_vs_eager" not in row for row in rows)


def test_bytes_are_those_that_must_move() -> None:
    codec = load("compress", "onebit")()
    numel = codec.block
    cases = kernel.codec_cases(codec, torch.zeros(numel), torch.zeros(numel))
    sent = 1 / 8 + 8 / numel
    found = {case.name.partition("/")[2]: case.bytes_per_element for case in cases}
    expected = {"encode": 12, "encode-plain": 4, "decode": 8, "decode-plain": 4}
    assert found == pytest.approx({part: size + sent for part, size in expected.items()})
