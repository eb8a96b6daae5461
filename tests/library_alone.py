"""A plugin of pytest that hides gradwire-lab and gradwire-bench from the library's
tests.

``python -m pytest -p tests.library_alone tests/exchange``. An import of the other
packages fails, and their entry points are not found. Test files that name the other
packages, themselves or by a helper that they import, are left out.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from gradwire.contract.registry import EXTENSIONS, KINDS, further_names

ROOT = Path(__file__).parents[1]
OTHERS = ("gradwire_lab", "gradwire_bench")
HELPERS = re.compile(r"^from ((?:tests)?\.[\w.]+) import", re.MULTILINE)

for name in OTHERS:
    sys.modules[name] = None  # type: ignore[assignment]

_entry_points = metadata.entry_points
_GROUPS = (*(kind.group for kind in KINDS.values()), EXTENSIONS)
_THEIRS = "|".join(name for group in _GROUPS for name in further_names().get(group, ()))
NAMES_OTHERS = re.compile(
    rf"gradwire[_-](lab|bench)|from papers|NotInstalled|\.({_THEIRS})\("
)


def _of_the_library(**asked: Any) -> Any:
    found = _entry_points(**asked)
    if not asked:  # a caller that selects by itself, as Triton does
        return found
    return metadata.EntryPoints(
        point for point in found if not point.value.startswith(OTHERS)
    )


metadata.entry_points = _of_the_library  # type: ignore[assignment]


@cache
def needs_others(path: Path) -> bool:
    """Whether a file of tests, or a helper that it imports, names another package."""
    text = path.read_text()
    helpers = (
        (path.parent if name.startswith(".") else ROOT)
        / f"{name.strip('.').replace('.', '/')}.py"
        for name in HELPERS.findall(text)
    )
    return bool(NAMES_OTHERS.search(text)) or any(
        needs_others(helper) for helper in helpers if helper.exists()
    )


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    is_test = (
        collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    )
    return True if is_test and needs_others(collection_path) else None
