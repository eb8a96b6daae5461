"""zero_run: runs of zero bytes made one byte each, for codes that five lie in a byte.

Source: Lim, Andersen, Kaminsky, SysML 2019 ("3LC"), section 3.3: five codes of three
    values make a byte of 0 to 242, and the 13 bytes that are left over stand for runs
    of 2 to 14 zeros.
Differences: a byte of five zeros is 0 and not 121, as the code of zero is 0 and not 1;
    runs end with their block, so that blocks are coded and decoded in parallel.
"""

from gradwire.dsl.language import Vector, map, uint_3, where
from gradwire.dsl.operators import register

from ..dsl.coders import Repeated, coder, repeat, runs

_BASE = 241  # the code of a run, less its length


def _encode(plain: Vector) -> Vector:
    return map(
        runs(plain, 0, 14), lambda byte, length: where(length > 1, _BASE + length, byte)
    )


def _decode(coded: Vector) -> Repeated:
    values = map(coded, lambda code: where(code > _BASE + 1, 0, code))
    return repeat(
        values, map(coded, lambda code: where(code > _BASE + 1, code - _BASE, 1))
    )


zero_run = register(coder("zero_run", takes=(uint_3,), encode=_encode, decode=_decode))
"""The vector, to be sent with each run of 2 to 14 zero bytes in one byte."""
