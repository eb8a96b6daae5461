"""Values that collectives which sum on the way have divided by the world size."""

from dataclasses import replace
from typing import Self

from ..contract import Compressor
from ..contract.bounds import check_number


class Prescaled(Compressor):
    """A compressor with a setting ``prescale``: the factor of values on the wire."""

    prescale: float

    def __post_init__(self) -> None:
        what = f"{type(self).__name__} prescale"
        accepted = "1 over a number of ranks, from 2**-24 to 1"
        check_number(what, self.prescale, accepted, "leave it at 1", 2.0**-24, 1)

    def for_world(self, world: int, rank: int = 0) -> Self:
        return replace(self, prescale=1 / world)  # type: ignore[type-var]
