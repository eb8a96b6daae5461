"""Finds what lies beside ``src/`` in a checkout of the sources and is in no wheel."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from ..errors import InvalidSetting

PACKAGE = Path(__file__).parents[1]
"""The folder that this gradwire was imported from."""


def beside_src(folder: str, module: str) -> Any:
    """The module ``module`` of ``folder``, a package beside the ``src/`` that gradwire is run from.

    Raises ``InvalidSetting`` where gradwire was not installed from a checkout.
    """
    root = PACKAGE.parents[1]
    if PACKAGE.parent.name != "src" or not (root / folder / "__init__.py").is_file():
        raise InvalidSetting(
            f"{folder}/ is part of gradwire's source repository and not of what is installed in "
            f"{PACKAGE.parent}; get the sources, and in their folder run: pip install --editable ."
        )
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return importlib.import_module(f"{folder}.{module}")
