"""Parameters by name, as messages are made of them."""

from __future__ import annotations

from ..planning.default_fusion import NamedTensor

NamedParam = NamedTensor
"""A parameter and its name."""
