"""LivePage: losses over seconds in a browser, while methods train and afterwards.

The page reads the points each second from a script beside it, as a browser lets a page
from a disk read nothing else. At the end the page holds the points itself, so it can be
mailed. It needs no package and no network.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradwire.contract.files import write_text

from .figure import SERIES

TEMPLATE = Path(__file__).with_name("live.html")
_DATA = "/*page*/ null"


@dataclass(frozen=True)
class LivePage:
    """A page in a folder of its own.

    Args:
        folder: The folder; it is made if it is not there.
        methods: What the lines show, in words.
        place: Where the methods train, in words.
        steps: The steps of each method.
        command: The command line.
    """

    folder: Path
    methods: Sequence[str]
    place: str
    steps: int
    command: str

    @property
    def path(self) -> Path:
        """The page's file."""
        return self.folder / "index.html"

    @property
    def points(self) -> Path:
        """The file of points, while methods train; see `write_points`."""
        return self.folder / "points.js"

    def begin(self) -> None:
        """Writes the page, which waits for points."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_points(self.points, [[] for _ in self.methods])
        self._write({"answer": "", "goal": None, "points": None})

    def end(self, lines: Sequence[Sequence[Any]], goal: float, answer: str) -> None:
        """Writes the page that holds all points and the answer.

        Args:
            lines: For each method its points.
            goal: The loss at which methods are compared.
            answer: A sentence that says which method is there first.
        """
        self._write({"answer": answer, "goal": goal, "points": lines})
        # a page that is open now loads the new one
        write_points(self.points, lines, is_over=True)

    def _write(self, state: dict[str, Any]) -> None:
        page = {
            "methods": self.methods,
            "colours": SERIES,
            "place": self.place,
            "steps": self.steps,
            "command": self.command,
            **state,
        }
        write_text(self.path, filled(TEMPLATE, page))


def filled(template: Path, page: object) -> str:
    """A page's text with its data.

    Args:
        template: The page, in which ``/*page*/ null`` is the place of the data.
        page: Plain values.
    """
    # "</script>" within a string would end the script
    data = json.dumps(page).replace("<", "\\u003c")
    return template.read_text(encoding="utf-8").replace(_DATA, data)


def write_points(
    path: Path, lines: Sequence[Sequence[Any]], *, is_over: bool = False
) -> None:
    """Writes the points of all methods for an open page.

    Args:
        path: The file that the page reads.
        lines: For each method its points, each with "step", "seconds" and "loss".
        is_over: Whether the page has been written anew.
    """
    write_text(path, f"points({json.dumps(lines)}, {json.dumps(is_over)});\n")
