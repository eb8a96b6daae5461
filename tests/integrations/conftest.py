"""Pools of ranks, as for tests of the runtime."""

from tests.runtime.conftest import four, two

__all__ = ["four", "two"]
