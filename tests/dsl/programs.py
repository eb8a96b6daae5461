"""The compressors that are written in the language: what the tests of dsl run."""

from __future__ import annotations

from gradwire.dsl.program import Program
from gradwire.load import examples

EXAMPLES = tuple(
    codec
    for codec in examples("compress")
    if isinstance(codec, Program) and codec.traits.exact_size
)
"""Those of fixed size; kept elements and coded bytes have tests of their own."""
