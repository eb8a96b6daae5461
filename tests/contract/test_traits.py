"""A trait that does not exist is refused, and the error lists those that do."""

from __future__ import annotations

import pytest

import gradwire as gw
from gradwire.errors import UnknownName


def test_an_unknown_trait_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnknownName, match=r"'contraction'.* nonexpansive"):
        gw.Traits(layout=gw.Layout.DENSE, contraction=True)  # type: ignore[call-arg]


def test_a_program_refuses_an_unknown_trait() -> None:
    with pytest.raises(UnknownName, match=r"'contraction'.* nonexpansive"):

        class coarse(gw.compress.onebit, contraction=True):  # type: ignore[call-arg]
            pass
