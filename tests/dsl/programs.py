"""The compressors that are written in the language: what the tests of dsl run."""

from __future__ import annotations

from gradwire.contract.registry import examples
from gradwire.dsl.program import Program

EXAMPLES = tuple(
    codec
    for codec in examples("compress")
    if isinstance(codec, Program) and codec.traits.exact_size
)
"""Those of fixed size; kept elements and coded bytes have tests of their own."""
