"""Attachment: the ways in which a model is attached, as ``attach_in`` sees them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Protocol

from torch import nn

from ..planning.default_fusion import NamedParam
from .failure.integrity import Check
from .failure.membership import Membership
from .handle import Handle
from .settings import Settings
from .step.progress import Progress
from .step.synchroniser import AnyMessage


class Attachment(Protocol):
    """The way in which a model is attached: what of it is exchanged, and when."""

    def prepare(
        self, model: nn.Module, params: list[NamedParam], settings: Settings
    ) -> Mapping[str, object]:
        """Checks and makes what only this way needs; returns settings that ranks must share."""

    def messages(
        self, model: nn.Module, params: list[NamedParam], settings: Settings, who: Membership
    ) -> list[AnyMessage]:
        """All messages in issue order."""

    def check(self, params: list[NamedParam], settings: Settings) -> Check:
        """The comparison of what has the same bits on all ranks whenever a step begins."""

    def caution(self, model: nn.Module, params: list[NamedParam], settings: Settings) -> None:
        """Warns of settings that can be carried out, and hardly mean what they say."""

    def hook(
        self,
        model: nn.Module,
        params: list[NamedParam],
        settings: Settings,
        progress: Progress,
        undo: ExitStack,
    ) -> Handle:
        """Hooks the model, whose parameters are the same on all ranks by now."""
