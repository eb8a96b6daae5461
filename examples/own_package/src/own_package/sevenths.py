"""sevenths: fifteen even levels between plus and minus a block's greatest magnitude.

Source: an example; linear quantisers stand in every textbook.
Differences: none.
Wire: most_B float32, codes_N in 4 bits -> 4 * ceil(N / block) + ceil(N / 2) bytes.
State: none. Contributed: the decoded gradient.
"""

from gradwire.dsl.language import (
    Compressed,
    Vector,
    concat,
    extract,
    floor,
    greater,
    map,
    reduce,
    uint4,
    where,
)
from gradwire.dsl.program import Program


class sevenths(Program, nonexpansive=True, error_feedback=True):
    """Rounds each element to the nearest seventh of its block's greatest magnitude."""

    block: int = 4096

    def encode(self, gradient: Vector) -> Compressed:
        most = reduce(map(gradient, abs), greater)
        per = where(most > 0, 7 / most, 0)
        return concat(
            most=most, codes=map(gradient, lambda x: uint4(floor(x * per + 7.5)))
        )

    def decode(self, compressed: Compressed) -> Vector:
        most, codes = extract(compressed)
        return map(codes, lambda code: (code - 7) * (most / 7))


EXAMPLES = (sevenths(), sevenths(block=64))
