"""The moving picture of a storm: ``python -m scripts.storm_picture RECORD PICTURE``.

RECORD is the JSON file of ``gradwire bench storm --out``. PICTURE is an SVG that a
browser plays by itself. Where nothing moves, it shows the whole storm.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

Span = tuple[float, float]
WIDTH = 640
ROW = 10
"""The height of a rank's row, with the gap below it."""
TITLE = 38
LOSS = 150
COLOURS = {"lost": "#d9822b", "counted": "#3d6fb6", "dead": "#24292f"}
WAITS = "#e8ecf0"
FAULT = "#c4304b"
LINES = ("#d9822b", "#7d62ad", "#3d6fb6")
STYLE = """
text { font: 18px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
       fill: #24292f }
.name { font-weight: 700; font-size: 23px }
.dim { fill: #57606a }
.cover { animation: play 20s linear infinite }
@keyframes play {
  0%, 25% { transform: none }
  25.01% { transform: translateX(-640px) }
  95%, 100% { transform: none }
}
@media (prefers-reduced-motion: reduce) { .cover { animation: none } }
"""


class Key(NamedTuple):
    """An entry of the key."""

    text: str
    x: int
    y: int
    fill: str
    stroke: str = "none"


KEYS = (
    Key("computes, ends in the model", 0, 20, COLOURS["counted"]),
    Key("computes for nothing", 310, 20, COLOURS["lost"]),
    Key("waits", 410, 46, WAITS),
    Key("killed, stopped or cut off", 0, 46, "none", FAULT),
    Key("dead", 310, 46, COLOURS["dead"]),
)


def joined(spans: Sequence[Span], gap_s: float) -> list[Span]:
    """The spans in order, of which those with less than a gap between them are one.

    >>> joined([(3.0, 4.0), (0.0, 1.0), (1.1, 2.0)], 0.5)
    [(0.0, 2.0), (3.0, 4.0)]
    """
    found: list[Span] = []
    for begin_s, end_s in sorted(spans):
        if found and begin_s - found[-1][1] < gap_s:
            found[-1] = (found[-1][0], end_s)
        else:
            found.append((begin_s, end_s))
    return found


def _box(
    x: float, y: float, width: float, height: float, fill: str, more: str = ""
) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'fill="{fill}"{more}/>'
    )


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}"{more}>{escape(text)}</text>'


def _cover(y: float, height: float) -> str:
    """Hides what has not happened yet; it moves to the right, out of the picture."""
    return _box(WIDTH, y, WIDTH, height, "#fff", ' class="cover"')


class Picture:
    """The parts of a storm's picture, from the top to the bottom."""

    def __init__(self, record: dict[str, Any]) -> None:
        self._record = record
        self._seconds = record["settings"]["seconds"]
        self._y = 64.0

    def _x(self, at_s: float) -> float:
        return WIDTH * at_s / self._seconds

    def parts(self) -> Iterator[str]:
        """The elements of the picture."""
        for key in KEYS:
            stroke = f' stroke="{key.stroke}" stroke-width="2"'
            yield _box(key.x + 1, key.y - 14, 15, 15, key.fill, stroke)
            yield _text(key.x + 24, key.y, key.text)
        for row in self._record["rows"]:
            yield from self._way(row)
        yield from self._axis()
        yield from self._losses()

    def _way(self, row: dict[str, Any]) -> Iterator[str]:
        courses = self._record["ways"][row["name"]]
        top = self._y + TITLE
        height = ROW * len(courses)
        yield _text(0, top - 9, row["name"], ' class="name"')
        useful = f"{row['fraction_counted']:.0%} useful"
        yield _text(WIDTH, top - 9, useful, ' class="name" text-anchor="end"')
        yield _box(0, top, WIDTH, height, WAITS)
        for rank, course in enumerate(courses):
            y = top + ROW * rank
            for kind, colour in COLOURS.items():
                for begin_s, end_s in joined(course[kind], self._seconds / WIDTH / 2):
                    width = max(0.5, self._x(end_s - begin_s))
                    yield _box(self._x(begin_s), y, width, ROW, colour)
            yield _box(0, y + ROW - 2, WIDTH, 2, "#fff")
        for begin_s, end_s, _, rank in self._record["settings"]["faults"]:
            stroke = f' stroke="{FAULT}" stroke-width="2"'
            y = top + ROW * rank
            width = self._x(end_s - begin_s)
            yield _box(self._x(begin_s), y - 1, width, ROW, "none", stroke)
        yield _cover(top - 2, height + 4)
        self._y = top + height

    def _axis(self) -> Iterator[str]:
        self._y += 22
        for share in (0, 0.25, 0.5, 0.75, 1):
            anchor = {0: "start", 1: "end"}.get(share, "middle")
            text = f"{share * self._seconds:.0f} s"
            more = f' class="dim" text-anchor="{anchor}"'
            yield _text(WIDTH * share, self._y, text, more)

    def _losses(self) -> Iterator[str]:
        ways = self._record["ways"]
        top = self._y + TITLE
        curves = {
            name: sorted(p for one in ways[name] for p in one["losses"] if p[0] >= 0)
            for name in ways
        }
        found = [loss for points in curves.values() for *_, loss in points]
        low = int(min(found))
        # the loss of guesses is where all begin
        high = max(ceil(points[0][2]) for points in curves.values() if points)
        yield _text(0, top - 9, "Loss", ' class="name"')
        place = WIDTH
        for name, colour in reversed([*zip(curves, LINES, strict=False)]):
            more = f' text-anchor="end" style="fill: {colour}; font-weight: 600"'
            yield _text(place, top - 9, name, more)
            place -= 11 * len(name) + 24

        def y(loss: float) -> float:
            return top + LOSS * (high - min(loss, high)) / (high - low)

        for loss in range(low, high + 1):
            yield _box(0, y(loss), WIDTH, 1, WAITS)
            if loss < high:
                yield _text(0, y(loss) - 3, f"{loss}", ' class="dim"')
        for points, colour in zip(curves.values(), LINES, strict=False):
            path = " ".join(f"{self._x(s):.1f},{y(loss):.1f}" for s, _, loss in points)
            yield (
                f'<polyline points="{path}" fill="none" stroke="{colour}" '
                'stroke-width="3"/>'
            )
        yield _cover(top - 2, LOSS + 4)
        self._y = top + LOSS

    def svg(self) -> str:
        """The picture as a file's text."""
        parts = "\n".join(self.parts())
        height = ceil(self._y + 6)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'width="{WIDTH}" height="{height}">\n<style>{STYLE}</style>\n'
            f"{_box(0, 0, WIDTH, height, '#fff')}\n{parts}\n</svg>\n"
        )


def main() -> None:
    """Draws a record."""
    record, picture = map(Path, sys.argv[1:])
    text = Picture(json.loads(record.read_text(encoding="utf-8"))).svg()
    picture.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
