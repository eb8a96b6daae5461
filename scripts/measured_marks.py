"""Marks the figures of docs/measured.md with the age of the code that they measure.

    # writes the marks into the page, as `make marks` does
    python -m scripts.measured_marks

A section names the commit at which it was measured, and the files and folders whose
changes may change its figures. This script writes the line below. The site has the
marks of the day on which it is built:

    <!-- measured 0b7c16bc: src/gradwire/exchange/rounds.py src/gradwire/compress/ -->

    *Measured at `0b7c16bc`, 2026-11-29. Since then 3 commits changed the code.*

Marks stay as they are where git does not know the commit: in a shallow clone, or in an
archive without history.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = Path("docs/measured.md")
COMMENT = re.compile(
    r"^(<!-- measured (?P<commit>\w+): (?P<paths>.+) -->\n)(?:\n\*Measured at .*\*\n)?",
    re.M,
)


def git(root: Path, *words: str) -> str | None:
    """What git says about a checkout; None where it does not know."""
    try:
        done = subprocess.run(
            ["git", *words], cwd=root, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def mark(root: Path, commit: str, paths: list[str]) -> str | None:
    """The mark of one section; None where git does not know the commit."""
    date = git(root, "show", "--no-patch", "--format=%cs", commit)
    since = ("rev-list", "--count", "--no-merges", f"{commit}..HEAD", "--", *paths)
    count = git(root, *since)
    if not date or count is None:
        return None
    changed = {"0": "", "1": " Since then 1 commit changed the code."}
    many = f" Since then {count} commits changed the code."
    return f"*Measured at `{commit}`, {date}.{changed.get(count, many)}*"


def marked(text: str, root: Path = ROOT) -> str:
    """The page with the marks of today."""

    def written(found: re.Match[str]) -> str:
        made = mark(root, found["commit"], found["paths"].split())
        return found[0] if made is None else f"{found[1]}\n{made}\n"

    return COMMENT.sub(written, text)


def on_page_markdown(text: str, page: Any, **_: Any) -> str:
    """A page of the site with the marks of today; mkdocs calls it."""
    return marked(text) if page.file.src_uri == PAGE.name else text


def main(root: Path = ROOT) -> None:
    """Writes the marks, and names the commits that git does not know."""
    text = (root / PAGE).read_text(encoding="utf-8")
    commits = {found["commit"] for found in COMMENT.finditer(text)}
    unknown = sorted(one for one in commits if mark(root, one, ["."]) is None)
    (root / PAGE).write_text(marked(text, root), encoding="utf-8")
    if unknown:
        print(f"{PAGE}: marks stay where git does not know {', '.join(unknown)}")


if __name__ == "__main__":
    main()
