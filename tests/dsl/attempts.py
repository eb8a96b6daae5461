"""Compressors made of two functions, as tests of the language try them."""

from __future__ import annotations

from gradwire.dsl.language import (
    concat,
    extract,
    map,
)
from gradwire.dsl.program import Program


def program(encode, decode=lambda self, sent: map(extract(sent)[0], lambda q: q * 1.0)):
    """A compressor with these two functions."""
    return type("attempt", (Program,), {"encode": encode, "decode": decode})()


def codes(udf):
    """An ``encode`` that sends ``udf`` of each element."""
    return lambda self, gradient: concat(q=map(gradient, udf))
