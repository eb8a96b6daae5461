"""Cluster: how many ranks there are and what a link carries, and what an all-reduce then takes.

Source: US-Byte, equations 1 and 14: seconds = a + b * bytes with a = 2(N-1) times the cost of a hop
    and b = 2(N-1)/N times that of a byte on a link: a ring.
Differences from the paper: b comes from the link's rate, because the two values of b that the paper
    prints contradict its own links; the time to add two numbers (its gamma) counts as none. Its
    a = 910 us at 8 nodes is 65 us a hop, which is the default.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import InvalidSetting

HOP_S = 65e-6
"""Seconds a hop of the ring costs however little it carries: US-Byte's 910 us at 8 nodes."""


class Cluster(BaseModel):
    """``num_ranks`` in a ring of full-duplex links that carry ``rate_bytes_per_s`` each way.

    Raises ``ValueError`` (pydantic's) for figures that no cluster has.

    >>> cluster = Cluster(num_ranks=8, rate_bytes_per_s=1.25e9)
    >>> f"{cluster.alpha_s * 1e6:.0f} us + {cluster.beta_s_per_byte * 1e9:.1f} ns a byte"
    '910 us + 1.4 ns a byte'
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_ranks: Annotated[int, Field(ge=1)]
    rate_bytes_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    hop_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = HOP_S

    @property
    def alpha_s(self) -> float:
        """Seconds that every all-reduce costs, whatever its size; 0 for one rank."""
        return 2 * (self.num_ranks - 1) * self.hop_s

    @property
    def beta_s_per_byte(self) -> float:
        """Seconds that each byte of the buffer adds; 0 for one rank."""
        return 2 * (self.num_ranks - 1) / self.num_ranks / self.rate_bytes_per_s

    def all_reduce_s(self, size_bytes: int) -> float:
        """Seconds of an all-reduce of a buffer of ``size_bytes``; nothing costs nothing."""
        return self.alpha_s + self.beta_s_per_byte * size_bytes if size_bytes else 0.0

    def wire_bytes(self, size_bytes: int) -> int:
        """Bytes that each rank sends in an all-reduce of a buffer of ``size_bytes``."""
        return 2 * (self.num_ranks - 1) * size_bytes // self.num_ranks

    def save(self, path: Path | str) -> None:
        Path(path).write_text(self.model_dump_json(indent=1) + "\n")

    @classmethod
    def parse(cls, text: str, origin: str = "cluster") -> Cluster:
        """Reads JSON text; ``origin`` is what errors call it. Raises ``InvalidSetting``."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "the whole"
            raise InvalidSetting(
                f"{origin} cannot be read: {where}: {first['msg']}; "
                "it holds num_ranks, rate_bytes_per_s and hop_s"
            ) from None

    @classmethod
    def load(cls, path: Path | str) -> Cluster:
        return cls.parse(Path(path).read_text(), str(path))
