"""Settings of algorithms are given by name, and shown by name."""

from __future__ import annotations

import copy
import pickle
from inspect import Parameter, signature
from typing import Any

import pytest

import gradwire as gw
from gradwire.contract import Compressor
from gradwire.contract.registry import load, names
from gradwire.errors import InvalidSetting


class bare(Compressor):
    """An algorithm without settings that is no dataclass."""

    def format(self, spec: Any) -> Any:
        """Never asked for."""

    def encode(self, *operands: Any, **named: Any) -> Any:
        """Never called."""

    def decode(self, *operands: Any, **named: Any) -> Any:
        """Never called."""


@pytest.mark.parametrize("given", [{"args": (3,)}, {"settings": {"density": 1}}])
def test_an_algorithm_without_settings_refuses_all(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting, match="bare"):
        bare(*given.get("args", ()), **given.get("settings", {}))
    assert isinstance(bare(), Compressor)


def test_all_settings_are_shown_and_taken_by_name() -> None:
    kinds = [load("compress", name) for name in names("compress")]
    kinds += [load("collective", name) for name in names("collective")]
    for kind in (*kinds, gw.Options, gw.FailurePolicy):
        shown = signature(kind).parameters.values()
        assert {one.kind for one in shown} <= {Parameter.KEYWORD_ONLY}, kind
        made = kind(**{one.name: one.default for one in shown})
        assert made == kind()
        with pytest.raises(InvalidSetting, match=kind.__name__):
            kind(*[0] * max(1, len(shown)))
        assert copy.copy(made) == made
        assert pickle.loads(pickle.dumps(made)) == made
