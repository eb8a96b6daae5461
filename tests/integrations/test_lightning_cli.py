"""``LightningCLI`` finds a name, a plan's file and an algorithm's class in its
settings.
"""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import Any

import pytest

import gradwire as gw
from gradwire.runtime.settings import resolve
from tests.runtime.plans import drawn

pytestmark = pytest.mark.slow  # imports Lightning

HOME = "gradwire.integrations.lightning"


def test_what_a_file_gives_as_the_exchange_is_found(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    jsonargparse = pytest.importorskip("jsonargparse")
    plan = drawn(0)
    plan.save(tmp_path / "plan.json")
    of_class = {"class_path": "gradwire.compress.topk", "init_args": {"density": 0.5}}
    asked: list[tuple[Any, Any]] = [
        ("topk", resolve("topk")),
        ("auto", resolve("auto")),
        (str(tmp_path / "plan.json"), plan),
        (of_class, resolve(gw.compress.topk(density=0.5))),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs
        parser = jsonargparse.ArgumentParser()
        parser.add_argument(
            "--strategy", type=importlib.import_module(HOME).GradwireStrategy
        )
        for given, found in asked:
            strategy = {
                "class_path": f"{HOME}.GradwireStrategy",
                "init_args": {"exchange": given},
            }
            parsed = parser.parse_object({"strategy": strategy})
            made = parser.instantiate_classes(parsed).strategy
            assert resolve(made.attachment._attach.keywords["exchange"]) == found
