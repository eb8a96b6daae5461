"""The HTML report stands alone: everything is in the file, and every text is
escaped.
"""

from __future__ import annotations

import base64
from html.parser import HTMLParser
from pathlib import Path

import pytest

from gradwire_bench.report import html

PICTURE = b"\x89PNG\r\n\x1a\n not really, but not looked into either"


class Elements(HTMLParser):
    """Collects elements with their attributes, the text of cells, and unbalanced
    tags.
    """

    VOID = frozenset({"meta", "img", "link", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())


@pytest.mark.smoke
def test_all_is_in_the_file_and_escaped(tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_bytes(PICTURE)
    path = html.write(
        tmp_path / "report.html",
        title="a <b> & c",
        command="gradwire demo --rate '<200mbit>'",
        machine={"cpu": "Some <CPU>", "memory_bytes": 8_000_000_000},
        rows=[{"name": "<ddp>", "step_s": 0.25}, {"name": "onebit", "step_s": 0.125}],
        pictures={'one "step"': tmp_path / "picture.png"},
        notes=["losses <after> 40 steps"],
    )
    text = path.read_text(encoding="utf-8")
    elements = Elements()
    elements.feed(text)
    assert elements.open == []
    assert "http" not in text
    links = [
        attrs[key]
        for _, attrs in elements.found
        for key in ("src", "href")
        if key in attrs
    ]
    assert len(links) == 1
    kind, _, data = str(links[0]).partition(",")
    assert kind == "data:image/png;base64"
    assert base64.b64decode(data) == PICTURE
    assert not {"script", "link", "iframe"} & {tag for tag, _ in elements.found}
    expected = [
        "a <b> & c",
        "gradwire demo --rate '<200mbit>'",
        "<ddp>",
        "250 ms",
        "Some <CPU>",
        "8.00 GB",
        "losses <after> 40 steps",
        'one "step"',
    ]
    assert [text for text in expected if text not in elements.texts] == []
