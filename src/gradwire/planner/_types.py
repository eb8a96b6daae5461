"""Plan: what is sent together, in which pieces, in which order and through which exchange, as data.

The runtime carries a plan out and the simulator predicts it; neither decides anything that is not
written here, so all ranks that hold the same plan issue the same messages in the same order.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import InvalidSetting

SCHEMA = 1
DENSE = "dense"
"""The exchange that needs no entry in ``Plan.exchanges``: an all-reduce of plain gradients."""

Setting = bool | int | Annotated[float, Field(allow_inf_nan=False)] | str


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Chunk(_Frozen):
    """Elements ``start`` up to, not including, ``stop`` of a tensor's flat gradient."""

    tensor: str
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


class Message(_Frozen):
    """Chunks that travel together, one behind the other, through one exchange."""

    chunks: tuple[Chunk, ...]
    exchange: str = DENSE


class ExchangeSetting(_Frozen):
    """How an exchange is made: names of files in ``compress/`` and ``collective/``."""

    compressor: str
    settings: dict[str, Setting] = {}
    collective: str
    error_feedback: bool = False


class Plan(_Frozen):
    """Messages in issue order, and the rules under which they are launched.

    A message is launched when every message before it was launched, all its gradients are ready and
    fewer than ``credit`` messages are on the wire: the head of the line waits, as in Algorithm 3 of
    US-Byte. With ``overlap_forward`` a layer's next forward waits for the layers before it and for
    its own messages; without, the next forward waits for all messages.

    What a plan means for a model is checked by ``gradwire.planner._check.check``.
    """

    schema_version: Literal[1] = 1
    planner: Annotated[str, Field(min_length=1)]
    model: Annotated[str, Field(min_length=1)]
    """``Profile.model`` of the profile that was planned for."""
    settings: dict[str, Setting] = {}
    """What the planner was called with: a record, which nothing acts upon."""
    messages: tuple[Message, ...]
    credit: int = 1
    overlap_forward: bool = False
    exchanges: dict[str, ExchangeSetting] = {}

    def save(self, path: Path | str) -> None:
        Path(path).write_text(self.to_json() + "\n")

    def to_json(self) -> str:
        return self.model_dump_json()

    @classmethod
    def parse(cls, text: str, origin: str = "plan") -> Plan:
        """Reads JSON text; ``origin`` is what errors call it.

        Raises ``InvalidSetting`` that names the entry: of another schema, unknown, or not of its
        type.
        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "the whole"
            raise InvalidSetting(
                f"{origin} cannot be read: {where}: {first['msg']} (schema {SCHEMA} is accepted); "
                "write it again with gradwire plan"
            ) from None

    @classmethod
    def load(cls, path: Path | str) -> Plan:
        return cls.parse(Path(path).read_text(), str(path))
