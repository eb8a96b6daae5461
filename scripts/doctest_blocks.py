"""Examples in docstrings as blocks of code, for the documentation's API page; see
mkdocs.yml.
"""

from __future__ import annotations

from typing import Any

try:
    from griffe import Extension
except (
    ModuleNotFoundError
):  # tests read this file where the extra docs is not installed
    Extension: Any = object


def fenced(text: str) -> str:
    """A docstring with each of its examples between fences: from ``>>>`` to the next
    blank line.
    """
    found = []
    is_inside = False
    for line in text.split("\n"):
        if not is_inside and line.startswith(">>> "):
            found.append("```pycon")
            is_inside = True
        elif is_inside and not line.strip():
            found.append("```")
            is_inside = False
        found.append(line)
    return "\n".join([*found, "```"] if is_inside else found)


class DoctestBlocks(Extension):
    """Hands fenced docstrings on to whatever shows them."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
