"""Finds the packages of a checkout of the sources that are in no wheel."""

import importlib
import sys
from pathlib import Path
from typing import Any

from gradwire.errors import InvalidSetting

ROOT = Path(__file__).resolve().parents[4]
"""The checkout, where gradwire-bench is run from its sources."""


def beside(folder: str, module: str) -> Any:
    """The module ``module`` of ``folder``, a package of the checkout that this is run
    from.

    Raises ``InvalidSetting`` where gradwire-bench was not installed from a checkout.
    """
    if not (ROOT / folder / "__init__.py").is_file():
        raise InvalidSetting(
            f"{folder}/ is part of gradwire's source repository and of no package; get "
            "the sources, and in their folder run: make setup"
        )
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    return importlib.import_module(f"{folder}.{module}")
