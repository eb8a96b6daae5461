"""A member without data, which notes what a text asks it for while its verbs are recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...contract import Compressor, Member
from ...contract.member import nothing
from ...contract.verbs import Compute


class WritesNothing(TorchFunctionMode):
    """A mode that skips operations in place, which without data would only take time."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = func.__name__
        if name.endswith("_") and not name.endswith("__"):
            return args[0]
        return func(*args, **(kwargs or {}))


class Noticing(Member):
    """A member without data.

    It notes whether its rank is asked for: if not, all ranks do the same; and its turn: if not, all
    messages are alike. Its ``sizes`` are the usual ones where a text states them, and else the
    largest.
    """

    __slots__ = ("_rank", "_turn", "_turn_was_asked", "was_asked")

    def __init__(self, rank: int, world: int, turn: int = 0) -> None:
        super().__init__(rank, world, turn)
        self.was_asked = self._turn_was_asked = False

    @property
    def rank(self) -> int:
        self.was_asked = True
        return self._rank

    @rank.setter
    def rank(self, rank: int) -> None:
        self._rank = rank

    @property
    def turn(self) -> int:
        self._turn_was_asked = True
        return self._turn

    @turn.setter
    def turn(self, turn: int) -> None:
        self._turn = turn

    def across(self, ranks_per_host: int) -> Member:
        was_asked, found = self._turn_was_asked, super().across(ranks_per_host)
        self._turn_was_asked = was_asked  # handing it on is not asking
        return found

    @property
    def turn_was_asked(self) -> bool:
        """Whether its turn was asked for, among hosts or among all ranks."""
        among_hosts = isinstance(self._across, Noticing) and self._across.turn_was_asked
        return self._turn_was_asked or among_hosts

    def variant_of(self, codec: Compressor) -> Compressor:
        return codec.for_world(self.world)  # sizes are the same on every rank

    def sizes(
        self,
        told_W: Tensor,
        limits: Sequence[int],
        *,
        unit: str = "bytes",
        ranks: Sequence[int] | None = None,
        usual: Sequence[int] | None = None,
    ) -> list[int]:
        return list(limits if usual is None else usual)

    def sized(
        self, name: str, fn: Callable[[], Any], numel: int, usual: Callable[[], Any] = nothing
    ) -> Compute:
        return Compute(name, usual, numel)
