"""Finds what lies beside ``src/`` in a checkout of the sources and is in no wheel."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from gradwire.errors import InvalidSetting

PACKAGE = Path(__file__).parents[1]
"""The folder that this gradwire was imported from."""


def is_checkout(folder: str) -> bool:
    """Whether ``folder`` is a package beside the ``src/`` that gradwire is run from."""
    root = PACKAGE.parents[1]
    return PACKAGE.parent.name == "src" and (root / folder / "__init__.py").is_file()


def beside_src(folder: str, module: str) -> Any:
    """The module ``module`` of ``folder``, a package beside the ``src/`` that gradwire is run from.

    Raises ``InvalidSetting`` where gradwire was not installed from a checkout.
    """
    if not is_checkout(folder):
        raise InvalidSetting(
            f"{folder}/ is part of gradwire's source repository and not of {PACKAGE.parent}, where "
            "gradwire is installed; get the sources, and in their folder run: "
            "pip install --editable ."
        )
    root = str(PACKAGE.parents[1])
    if root not in sys.path:
        sys.path.insert(0, root)
    return importlib.import_module(f"{folder}.{module}")
